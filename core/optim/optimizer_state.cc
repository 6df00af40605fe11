// Lists where each of libtorch's optimizers keeps its state, and copies it out and in.
#include "core/optim/optimizer_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "core/base/error_list.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "core/tensor/extent.h"

namespace distgrad {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using Betas = std::tuple<double, double>;

constexpr absl::string_view kMomentum = "momentum_buffer";

// Where an optimizer keeps something, and how state_dict() calls it.
struct Slot {
  absl::string_view name;
  std::variant<double*, bool*, Betas*, int64_t*, at::Tensor*> value;
};

std::vector<Slot> SlotsOf(torch::optim::SGDOptions& options) {
  return {{"lr", &options.lr()},
          {"momentum", &options.momentum()},
          {"dampening", &options.dampening()},
          {"weight_decay", &options.weight_decay()},
          {"nesterov", &options.nesterov()}};
}
template <typename AdamOptions>
std::vector<Slot> OptionsOfAdam(AdamOptions& options) {
  return {{"lr", &options.lr()},
          {"betas", &options.betas()},
          {"eps", &options.eps()},
          {"weight_decay", &options.weight_decay()},
          {"amsgrad", &options.amsgrad()}};
}
std::vector<Slot> SlotsOf(torch::optim::AdagradOptions& options) {
  return {{"lr", &options.lr()},
          {"lr_decay", &options.lr_decay()},
          {"weight_decay", &options.weight_decay()},
          {"initial_accumulator_value", &options.initial_accumulator_value()},
          {"eps", &options.eps()}};
}
std::vector<Slot> SlotsOf(torch::optim::RMSpropOptions& options) {
  return {{"lr", &options.lr()},
          {"alpha", &options.alpha()},
          {"eps", &options.eps()},
          {"weight_decay", &options.weight_decay()},
          {"momentum", &options.momentum()},
          {"centered", &options.centered()}};
}
std::vector<Slot> SlotsOf(torch::optim::AdagradParamState& state) {
  return {{"step", &state.step()}, {"sum", &state.sum()}};
}
std::vector<Slot> SlotsOf(torch::optim::RMSpropParamState& state) {
  return {{"step", &state.step()},
          {"square_avg", &state.square_avg()},
          {kMomentum, &state.momentum_buffer()},
          {"grad_avg", &state.grad_avg()}};
}
std::vector<Slot> SlotsOf(torch::optim::SGDParamState& state) {
  return {{kMomentum, &state.momentum_buffer()}};
}
template <typename AdamParamState>
std::vector<Slot> StateOfAdam(AdamParamState& state) {
  return {{"step", &state.step()},
          {"exp_avg", &state.exp_avg()},
          {"exp_avg_sq", &state.exp_avg_sq()},
          {"max_exp_avg_sq", &state.max_exp_avg_sq()}};
}

// What is to be known of a kind of optimizer.
struct Kind {
  absl::string_view name;
  std::vector<Slot> (*options)(OptimizerOptions& options);
  std::vector<Slot> (*state)(OptimizerParamState& state);
  std::unique_ptr<OptimizerParamState> (*new_state)();
  // Whether what the options say needs that part of the state.
  bool (*needs)(const OptimizerOptions& options, absl::string_view slot);
  // Whether parameters have a state before they have taken a step. One that was added to the
  // optimizer later has none.
  bool from_the_start = false;
};

constexpr Kind kSgd = {"SGD",
                       [](OptimizerOptions& options) {
                         return SlotsOf(static_cast<torch::optim::SGDOptions&>(options));
                       },
                       [](OptimizerParamState& state) {
                         return SlotsOf(static_cast<torch::optim::SGDParamState&>(state));
                       },
                       []() -> std::unique_ptr<OptimizerParamState> {
                         return std::make_unique<torch::optim::SGDParamState>();
                       },
                       [](const OptimizerOptions&, absl::string_view) { return true; }};

template <typename Options, typename State, bool kDecoupled>
constexpr Kind kAdam = {
    kDecoupled ? "AdamW" : "Adam",
    [](OptimizerOptions& options) { return OptionsOfAdam(static_cast<Options&>(options)); },
    [](OptimizerParamState& state) { return StateOfAdam(static_cast<State&>(state)); },
    []() -> std::unique_ptr<OptimizerParamState> { return std::make_unique<State>(); },
    [](const OptimizerOptions& options, absl::string_view slot) {
      return slot != "max_exp_avg_sq" || static_cast<const Options&>(options).amsgrad();
    }};

constexpr Kind kAdagrad = {"Adagrad",
                           [](OptimizerOptions& options) {
                             return SlotsOf(static_cast<torch::optim::AdagradOptions&>(options));
                           },
                           [](OptimizerParamState& state) {
                             return SlotsOf(static_cast<torch::optim::AdagradParamState&>(state));
                           },
                           []() -> std::unique_ptr<OptimizerParamState> {
                             return std::make_unique<torch::optim::AdagradParamState>();
                           },
                           [](const OptimizerOptions&, absl::string_view) { return true; },
                           /*from_the_start=*/true};

constexpr Kind kRmsprop = {"RMSprop",
                           [](OptimizerOptions& options) {
                             return SlotsOf(static_cast<torch::optim::RMSpropOptions&>(options));
                           },
                           [](OptimizerParamState& state) {
                             return SlotsOf(static_cast<torch::optim::RMSpropParamState&>(state));
                           },
                           []() -> std::unique_ptr<OptimizerParamState> {
                             return std::make_unique<torch::optim::RMSpropParamState>();
                           },
                           [](const OptimizerOptions& options, absl::string_view slot) {
                             const auto& rmsprop =
                                 static_cast<const torch::optim::RMSpropOptions&>(options);
                             if (slot == kMomentum) return rmsprop.momentum() > 0;
                             return slot != "grad_avg" || rmsprop.centered();
                           }};

absl::StatusOr<const Kind*> KindOf(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr) return &kSgd;
  if (dynamic_cast<const Adam*>(&optimizer) != nullptr)
    return &kAdam<AdamOptions, AdamParamState, false>;
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) {
    return &kAdam<AdamWOptions, AdamWParamState, true>;
  }
  if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) return &kAdagrad;
  if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) return &kRmsprop;
  return absl::UnimplementedError(
      "the state of SGD, Adam, AdamW, Adagrad and RMSprop can be read and loaded, not that of "
      "other optimizers");
}

// Null where it has none, also where a step has failed of that: libtorch leaves a null there.
OptimizerParamState* StateOf(const torch::optim::Optimizer& optimizer, const at::Tensor& tensor) {
  const auto found = optimizer.state().find(tensor.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

std::string GroupPrefix(size_t group) { return absl::StrCat("param_groups.", group, "."); }
std::string StatePrefix(const StateForm& form, size_t parameter) {
  return form.names.empty() ? absl::StrCat("state.", parameter, ".")
                            : absl::StrCat("state.", form.names[parameter], ".");
}

// There is a name for each parameter, or for none.
absl::Status CheckNames(const StateForm& form, const torch::optim::Optimizer& optimizer) {
  size_t count = 0;
  for (const auto& group : optimizer.param_groups()) count += group.params().size();
  if (form.names.empty() || form.names.size() == count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the optimizer has ", count, " parameters, and ",
                                                 form.names.size(), " have names"));
}

// A storage that was resized may be too small for the tensor that has it: a copy would read what is
// behind it.
bool ReachesBehindItsStorage(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !IsInMemory(tensor);
}
constexpr absl::string_view kNotInMemory = "has elements that are not in its memory";

// Undefined where there is none.
at::Tensor Encode(const Slot& slot, bool copy) {
  struct {
    bool copy;
    at::Tensor operator()(double* value) { return at::scalar_tensor(*value, at::kDouble); }
    at::Tensor operator()(bool* value) { return at::scalar_tensor(*value, at::kBool); }
    at::Tensor operator()(Betas* value) {
      return at::tensor({std::get<0>(*value), std::get<1>(*value)}, at::kDouble);
    }
    at::Tensor operator()(int64_t* value) { return at::scalar_tensor(*value, at::kLong); }
    at::Tensor operator()(at::Tensor* value) {
      if (!value->defined()) return at::Tensor();
      return copy ? value->detach().clone() : value->detach();
    }
  } encode{copy};
  return std::visit(encode, slot.value);
}

std::string ShapeOf(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

// Gives a slot the value of a tensor; what is wrong with it, or "".
class Decoder {
 public:
  struct Slots {
    // As SGD's momentum, which is as sparse as the gradients that it is made of.
    bool may_be_sparse;
    bool copy;
    bool check_only;
  };
  Decoder(absl::string_view name, const at::Tensor& tensor, const at::Tensor& parameter,
          const Slots& slots)
      : name_(name), tensor_(tensor), parameter_(parameter), slots_(slots) {}

  std::string operator()(double* value) const {
    std::vector<double> numbers;
    if (std::string wrong = Numbers(1, &numbers); !wrong.empty()) return wrong;
    // All but this one are rates of some kind.
    if (numbers[0] < 0 && name_ != "dampening") return absl::StrCat("is ", numbers[0]);
    *value = numbers[0];
    return "";
  }
  std::string operator()(bool* value) const {
    std::vector<double> numbers;
    if (std::string wrong = Numbers(1, &numbers); !wrong.empty()) return wrong;
    if (numbers[0] != 0 && numbers[0] != 1) return absl::StrCat("is ", numbers[0]);
    *value = numbers[0] != 0;
    return "";
  }
  std::string operator()(Betas* value) const {
    std::vector<double> numbers;
    if (std::string wrong = Numbers(2, &numbers); !wrong.empty()) return wrong;
    for (const double beta : numbers) {
      if (beta < 0 || beta >= 1) return absl::StrCat("has ", beta, ", which is not in [0, 1)");
    }
    *value = {numbers[0], numbers[1]};
    return "";
  }
  std::string operator()(int64_t* value) const {
    constexpr double kMost = int64_t{1} << 53;
    std::vector<double> numbers;
    if (std::string wrong = Numbers(1, &numbers); !wrong.empty()) return wrong;
    if (numbers[0] < 0 || numbers[0] > kMost || numbers[0] != std::floor(numbers[0])) {
      return absl::StrCat("is ", numbers[0], ", which is no number of steps");
    }
    *value = static_cast<int64_t>(numbers[0]);
    return "";
  }
  std::string operator()(at::Tensor* value) const {
    if (tensor_.sizes() != parameter_.sizes()) {
      return absl::StrCat("has shape ", ShapeOf(tensor_), ", not ", ShapeOf(parameter_));
    }
    if (tensor_.scalar_type() != parameter_.scalar_type()) {
      return absl::StrCat("has dtype ", c10::toString(tensor_.scalar_type()), ", not ",
                          c10::toString(parameter_.scalar_type()));
    }
    const bool may_be = slots_.may_be_sparse && tensor_.layout() == at::kSparse;
    if (tensor_.layout() != at::kStrided && !may_be) return "is not a dense tensor";
    // From another device it would be a copy.
    if (slots_.check_only) return "";
    *value = tensor_.detach().to(parameter_.device(), parameter_.scalar_type(),
                                 /*non_blocking=*/false, slots_.copy);
    return "";
  }

 private:
  std::string Numbers(int64_t count, std::vector<double>* numbers) const {
    if (tensor_.layout() != at::kStrided || at::isComplexType(tensor_.scalar_type()) ||
        tensor_.numel() != count || tensor_.dim() > 1) {
      return absl::StrCat("has dtype ", c10::toString(tensor_.scalar_type()), " and shape ",
                          ShapeOf(tensor_), ", and should be ", count,
                          count == 1 ? " number" : " numbers");
    }
    const at::Tensor flat = tensor_.detach().to(at::kCPU, at::kDouble).reshape({count});
    for (int64_t i = 0; i < count; ++i) {
      numbers->push_back(flat[i].item<double>());
      if (!std::isfinite(numbers->back())) return absl::StrCat("is ", numbers->back());
    }
    return "";
  }

  const absl::string_view name_;
  const at::Tensor& tensor_;
  const at::Tensor& parameter_;
  const Slots slots_;
};

// The tensors of a state by their names, and what is wrong with them.
class Given {
 public:
  Given(const std::vector<StateTensor>& state, const Decoder::Slots& slots) : slots_(slots) {
    for (const StateTensor& each : state) {
      if (!each.tensor.defined()) {
        errors_.Add(absl::StrCat("'", each.name, "' is no tensor"));
      } else if (!left_.emplace(each.name, &each.tensor).second) {
        errors_.Add(absl::StrCat("'", each.name, "' is there twice"));
      }
    }
  }

  bool has(const std::string& name) const { return left_.count(name) > 0; }

  // Fills a slot from what has that name.
  void Fill(const std::string& prefix, const Slot& slot, const at::Tensor& parameter) {
    const std::string name = absl::StrCat(prefix, slot.name);
    const auto found = left_.find(name);
    if (found == left_.end()) return errors_.Add(absl::StrCat("'", name, "' is missing"));
    const std::string wrong =
        ReachesBehindItsStorage(*found->second)
            ? std::string(kNotInMemory)
            : std::visit(Decoder(slot.name, *found->second, parameter, slots_), slot.value);
    if (!wrong.empty()) errors_.Add(absl::StrCat("'", name, "' ", wrong));
    left_.erase(found);
  }

  absl::Status Finish() {
    for (const auto& [name, tensor] : left_) {
      errors_.Add(absl::StrCat("'", name, "' is unexpected"));
    }
    if (errors_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the state is not this optimizer's: ", errors_.Text()));
  }

 private:
  const Decoder::Slots slots_;
  std::map<std::string, const at::Tensor*> left_;
  ErrorList errors_;
};

absl::Status Load(const std::vector<StateTensor>& state, torch::optim::Optimizer* optimizer,
                  const StateForm& form) {
  DG_ASSIGN_OR_RETURN(const Kind* const kind, KindOf(*optimizer));
  DG_RETURN_IF_ERROR(CheckNames(form, *optimizer));
  Given given(state,
              {.may_be_sparse = kind == &kSgd, .copy = form.copy, .check_only = form.check_only});
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> states;
  size_t parameter = 0;
  for (size_t i = 0; i < optimizer->param_groups().size(); ++i) {
    const torch::optim::OptimizerParamGroup& group = optimizer->param_groups()[i];
    options.push_back(group.options().clone());
    for (const Slot& slot : kind->options(*options[i]))
      given.Fill(GroupPrefix(i), slot, at::Tensor());
    for (const at::Tensor& tensor : group.params()) {
      const std::string prefix = StatePrefix(form, parameter++);
      std::unique_ptr<OptimizerParamState> made = kind->new_state();
      const std::vector<Slot> slots = kind->state(*made);
      bool any = false;
      for (const Slot& slot : slots) any |= given.has(absl::StrCat(prefix, slot.name));
      const bool has_one = StateOf(*optimizer, tensor) != nullptr;
      if (!any && !(kind->from_the_start && has_one)) continue;
      for (const Slot& slot : slots) {
        if (kind->needs(*options[i], slot.name) || given.has(absl::StrCat(prefix, slot.name))) {
          given.Fill(prefix, slot, tensor);
        }
      }
      states.emplace_back(tensor.unsafeGetTensorImpl(), std::move(made));
    }
  }
  DG_RETURN_IF_ERROR(given.Finish());
  if (form.check_only) return absl::OkStatus();
  for (size_t i = 0; i < options.size(); ++i) {
    optimizer->param_groups()[i].set_options(std::move(options[i]));
  }
  optimizer->state().clear();
  for (auto& [key, made] : states) optimizer->state()[key] = std::move(made);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<StateTensor>> ReadState(torch::optim::Optimizer& optimizer,
                                                   const StateForm& form) {
  DG_ASSIGN_OR_RETURN(const Kind* const kind, KindOf(optimizer));
  DG_RETURN_IF_ERROR(CheckNames(form, optimizer));
  std::vector<StateTensor> state;
  try {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    const auto add = [&](const std::string& prefix, const Slot& slot) -> absl::Status {
      std::string name = absl::StrCat(prefix, slot.name);
      const auto* const its = std::get_if<at::Tensor*>(&slot.value);
      if (its != nullptr && (*its)->defined() && ReachesBehindItsStorage(**its)) {
        return absl::InvalidArgumentError(absl::StrCat("'", name, "' ", kNotInMemory));
      }
      at::Tensor tensor = Encode(slot, form.copy);
      if (tensor.defined()) state.push_back({std::move(name), std::move(tensor)});
      return absl::OkStatus();
    };
    size_t parameter = 0;
    for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      torch::optim::OptimizerParamGroup& group = optimizer.param_groups()[i];
      for (const Slot& slot : kind->options(group.options())) {
        DG_RETURN_IF_ERROR(add(GroupPrefix(i), slot));
      }
      for (const at::Tensor& tensor : group.params()) {
        const std::string prefix = StatePrefix(form, parameter++);
        OptimizerParamState* const its = StateOf(optimizer, tensor);
        if (its == nullptr) continue;
        for (const Slot& slot : kind->state(*its)) DG_RETURN_IF_ERROR(add(prefix, slot));
      }
    }
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return state;
}

absl::Status LoadState(const std::vector<StateTensor>& state, torch::optim::Optimizer* optimizer,
                       const StateForm& form) {
  try {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    return Load(state, optimizer, form);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::StatusOr<std::string> OptimizerName(const torch::optim::Optimizer& optimizer) {
  DG_ASSIGN_OR_RETURN(const Kind* const kind, KindOf(optimizer));
  return std::string(kind->name);
}

}  // namespace distgrad
