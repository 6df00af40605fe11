// Runs each kind of step, by libtorch alone or by calls of workers.
#include "tests/integration/property_frame.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int kBrokenOp = 2;

at::Tensor Apply(int op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case 0:
      return a + b;
    case 1:
      return at::tanh(a * b);
    case kBrokenOp:
      return at::tanh(a.mm(b));
    case 3:
      return at::maximum(a, b);
    case 4:
      return at::relu(a) - b.t();
    case 5:
      return a.t();  // a view
    case 6:
      return a.unbind(0)[1].repeat({2, 1});  // one of two views is used
    default:
      return (a > 0).to(at::kDouble);  // requires no grad
  }
}

// The modes of a call, to the end of the scope.
class ModesScope {
 public:
  explicit ModesScope(int modes) : autocast_(modes == Step::kAutocast) {
    if (modes == Step::kNoGrad) no_grad_.emplace();
    if (modes == Step::kInference) inference_.emplace();
    if (!autocast_) return;
    before_ = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~ModesScope() {
    if (!autocast_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before_);
  }

 private:
  const bool autocast_;
  bool before_ = false;
  std::optional<at::NoGradGuard> no_grad_;
  std::optional<c10::InferenceMode> inference_;
};

// Shows its step what gradients come, or zeros for what is not used.
struct TwoOutputs : torch::autograd::Function<TwoOutputs> {
  static variable_list forward(AutogradContext* context, const Variable& a, const Variable& b,
                               State* run, const Step* step) {
    context->set_materialize_grads(step->c != 0);
    context->saved_data["run"] = reinterpret_cast<int64_t>(run);
    context->saved_data["step"] = reinterpret_cast<int64_t>(step);
    return {a * 2, b * 3};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto& run = *reinterpret_cast<State*>(context->saved_data["run"].toInt());
    const auto& step = *reinterpret_cast<const Step*>(context->saved_data["step"].toInt());
    for (size_t i = 0; i < 2; ++i) {
      run.Saw(step, i, gradients[i]);
      if (gradients[i].defined()) gradients[i] = gradients[i] * static_cast<double>(2 + i);
    }
    return {gradients[0], gradients[1], Variable(), Variable()};
  }
};

struct Failing : torch::autograd::Function<Failing> {
  static Variable forward(AutogradContext*, const Variable& x) { return x * 1; }
  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("on fire");
  }
};

// A function whose backward asks `gradient_of`; before that, one within it may fail.
struct Nested : torch::autograd::Function<Nested> {
  using GradientOf = std::function<at::Tensor(const at::Tensor&)>;
  struct Holder : torch::CustomClassHolder {
    explicit Holder(GradientOf gradient_of) : gradient_of(std::move(gradient_of)) {}
    const GradientOf gradient_of;
  };
  static Variable forward(AutogradContext* context, const Variable& x, GradientOf gradient_of,
                          bool fails) {
    context->saved_data["fails"] = fails;
    context->set_materialize_grads(false);
    context->save_for_backward({x});
    context->saved_data["gradient_of"] =
        c10::IValue::make_capsule(c10::make_intrusive<Holder>(std::move(gradient_of)));
    return x.tanh();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) return {Variable(), Variable(), Variable()};
    const at::AutoGradMode on(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    if (context->saved_data["fails"].toBool()) {
      try {
        Failing::apply(x).sum().backward();
      } catch (const std::runtime_error&) {
      }
    }
    const auto holder = context->saved_data["gradient_of"].toCapsule();
    const at::Tensor gradient = static_cast<const Holder&>(*holder).gradient_of(x);
    if (!gradient.defined()) return {Variable(), Variable(), Variable()};
    return {(gradients[0] * gradient).detach(), Variable(), Variable()};
  }
};

// Keeps what a node saved, and runs `body` with it when that is asked for.
struct SavedHook : torch::autograd::SavedVariableHooks {
  explicit SavedHook(std::function<void(const at::Tensor&)> body) : body(std::move(body)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed = tensor.detach().clone(); }
  at::Tensor call_unpack_hook() override {
    const at::AutoGradMode off(false);
    body(packed);
    return packed;
  }
  const std::function<void(const at::Tensor&)> body;
  at::Tensor packed;
};

// The hooks of a node that other values may share: each looks at its own value's gradient alone.
struct NodeHook : torch::autograd::FunctionPreHook, torch::autograd::FunctionPostHook {
  NodeHook(State* run, const Step* step, uint32_t input) : run(*run), step(*step), input(input) {}
  variable_list operator()(const variable_list& gradients) override {
    variable_list changed = gradients;
    if (!changed[input].defined()) return changed;
    run.Saw(step, 0, changed[input]);
    changed[input] = changed[input] * 3;
    return changed;
  }
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    if (inputs[input].defined()) run.Saw(step, 0, inputs[input]);
    return outputs;
  }
  State& run;
  const Step& step;
  const uint32_t input;
};

Tensors Leaves(const State& run) {
  Tensors leaves;
  for (const Tensors& parameters : run.parameters)
    leaves.insert(leaves.end(), parameters.begin(), parameters.end());
  return leaves;
}

Tensors GradientsOf(const Tensors& roots, const Tensors& leaves) {
  return torch::autograd::grad(roots, leaves, {}, /*retain_graph=*/true, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

bool HasOperators(const Steps& steps) {
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) {
    return step.kind == Step::kOperator || HasOperators(step.body);
  });
}

// What arrives of what is sent.
Tensors Copies(const Tensors& sent) {
  Tensors copies;
  for (const at::Tensor& tensor : sent) copies.push_back(tensor.clone());
  return copies;
}

}  // namespace

// --------------------------------------------------------------------------------------- State

void State::Fail(const absl::Status& error) {
  absl::MutexLock lock(&mu);
  if (status.ok()) status = error;
  if (late.ok() && absl::IsDeadlineExceeded(error)) late = error;
}

void State::Saw(const Step& step, size_t input, const at::Tensor& gradient) {
  const double sum = gradient.defined() ? gradient.sum().item<double>() : 0;
  absl::MutexLock lock(&mu);
  Sight& sight = sights[{&step, input}];
  ++(gradient.defined() ? sight.gradients : sight.undefined);
  sight.sum += sum;
}

std::string Difference(const Steps& program, State& want, State& got) {
  // The gradients of one tensor are added in another order, so their sums differ in the last bits,
  // and the operator of kOperator rounds them to float, where that may be the next one.
  const bool rounds = HasOperators(program);
  const double relative = rounds ? 1e-6 : 1e-9, absolute = rounds ? 1e-6 : 1e-12;
  absl::MutexLock lock(&want.mu);
  absl::MutexLock other_lock(&got.mu);
  if (!got.status.ok()) return got.status.ToString();
  for (int w = 0; w <= kNewcomer; ++w) {
    for (int i = 0; i < kParameters; ++i) {
      const at::Tensor wanted = want.gradients[{w, i}], gotten = got.gradients[{w, i}];
      const std::string what = absl::StrCat("parameter ", i, " of worker ", w);
      if (wanted.defined() != gotten.defined())
        return absl::StrCat(what, gotten.defined() ? " has a gradient" : " has no gradient");
      if (wanted.defined() && !at::allclose(gotten, wanted, relative, absolute))
        return absl::StrCat("the gradient of ", what, " is wrong");
    }
  }
  for (auto* first : {&want, &got}) {
    for (const auto& [key, unused] : first->sights) {
      const Sight wanted = want.sights[key], gotten = got.sights[key];
      if (wanted.gradients == gotten.gradients && wanted.undefined == gotten.undefined &&
          std::abs(wanted.sum - gotten.sum) <= absolute + relative * std::abs(wanted.sum)) {
        continue;
      }
      const auto text = [](const Sight& s) {
        return absl::StrCat(s.gradients, " gradients with the sum ", s.sum, " and ", s.undefined,
                            " undefined ones");
      };
      return absl::StrCat("'", Text(*key.first), "' saw ", text(gotten), ", and in one process ",
                          text(wanted));
    }
  }
  return "";
}

// ---------------------------------------------------------------------------------------
// ProgramFrame

// The values of a frame. Those that were received, and not used since, are known to be unused.
class ProgramFrame::Values {
 public:
  explicit Values(Tensors arguments) { Receive(arguments); }

  bool empty() const { return values_.empty(); }
  at::Tensor Use(int i) {
    const size_t place = i % values_.size();
    unused_[place] = false;
    return values_[place];
  }
  Tensors UseAll(const std::vector<int>& places) {
    Tensors used;
    for (int i : places) {
      if (!empty()) used.push_back(Use(i));
    }
    return used;
  }
  // Nothing can have saved one that is unused, so it may be written to.
  bool unused(int i) const { return unused_[i % values_.size()]; }
  void Add(at::Tensor value) { Add(std::move(value), /*unused=*/false); }
  void Receive(const Tensors& received) {
    for (at::Tensor value : received) {
      // Of a call in inference mode.
      if (value.is_inference() && !c10::InferenceMode::is_enabled()) value = value.clone();
      Add(std::move(value), /*unused=*/true);
    }
  }

 private:
  void Add(at::Tensor value, bool unused) {
    values_.push_back(std::move(value));
    unused_.push_back(unused);
  }

  Tensors values_;
  std::vector<bool> unused_;
};

Tensors ProgramFrame::Run(const Steps& steps, const std::vector<int>& results, Tensors arguments) {
  Values values(std::move(arguments));
  for (const Step& step : steps) RunStep(step, values);
  Join();
  return values.UseAll(results);
}

void ProgramFrame::RunStep(const Step& s, Values& values) {
  if (HasSideEffects(s)) values.Receive(Join());
  switch (s.kind) {
    case Step::kParameter:
      return values.Add(run_.parameters[index_][s.a % kParameters]);
    case Step::kConstant:
      return values.Add(at::full({2, 2}, s.a * 0.01, at::kDouble));
    case Step::kCall:
    case Step::kAsync:
      return Send(s, values);
    case Step::kJoin:
      return values.Receive(Join());
    case Step::kFetch: {
      const Tensors& kept = run_.kept[index_];
      if (!kept.empty()) values.Add(kept[s.a % kept.size()]);
      return;
    }
    default:
      if (values.empty()) return;
  }
  switch (s.kind) {
    case Step::kOp: {
      at::Tensor a = values.Use(s.a);
      if (s.c == kBrokenOp && Broken()) a = a * 2;
      return values.Add(Apply(s.c, a, values.Use(s.b)));
    }
    case Step::kInPlace: {
      const bool on_itself = s.b == Step::kOnItself && values.unused(s.a);
      at::Tensor value = values.Use(s.a);
      if (!on_itself) value = value * 1;
      (s.b == Step::kOnViewOfCopy ? value.select(0, 1) : value).mul_(2);
      return values.Add(value);
    }
    case Step::kFunction:
      for (const at::Tensor& output :
           TwoOutputs::apply(values.Use(s.a), values.Use(s.b), &run_, &s)) {
        values.Add(output);
      }
      return;
    case Step::kHook: {
      const at::Tensor value = values.Use(s.a);
      if (value.grad_fn() == nullptr) return;
      value.register_hook([run = &run_, &s](const at::Tensor& gradient) {
        run->Saw(s, 0, gradient);
        return gradient.defined() ? gradient * 3 : gradient;
      });
      return;
    }
    case Step::kNodeHook: {
      const at::Tensor value = values.Use(s.a);
      if (value.grad_fn() == nullptr) return;
      auto hook = std::make_unique<NodeHook>(&run_, &s, static_cast<uint32_t>(value.output_nr()));
      if (s.b == 0) {
        value.grad_fn()->add_pre_hook(std::move(hook));
      } else {
        value.grad_fn()->add_post_hook(std::move(hook));
      }
      return;
    }
    case Step::kNested:
      return RunNested(s, values);
    case Step::kSaved:
      return values.Add(RunSaved(s, values.Use(s.a)));
    case Step::kOperator:
      return values.Receive(
          {CallMm(s.c, values.Use(s.a).to(at::kFloat), values.Use(s.b).to(at::kFloat))
               .to(at::kDouble)});
    case Step::kKeep:
      return run_.kept[index_].push_back(values.Use(s.a));
    case Step::kBackward: {
      Tensors roots;
      for (const at::Tensor& v : values.UseAll(s.arguments)) {
        if (v.requires_grad()) roots.push_back(at::sin(v).sum());
      }
      if (!roots.empty()) Backward(roots, s.a != 0, s.b != 0 ? 2 : 1);
      return;
    }
    default:
      return;
  }
}

void ProgramFrame::Send(const Step& call, Values& values) {
  Tensors sent = values.UseAll(call.arguments);
  const bool write = call.c != 0;
  if (write) {
    for (at::Tensor& tensor : sent) tensor = tensor * 1.5;
  }
  // What is sent is written to before it is known who it is sent to.
  std::optional<absl::ReaderMutexLock> no_answers;
  if (write && call.kind == Step::kAsync && run_.look_ups != nullptr)
    no_answers.emplace(run_.look_ups);
  Tensors results;
  {
    const ModesScope modes(call.b);
    if (call.kind == Step::kCall) {
      results = Call(call, sent);
    } else {
      CallAsync(call, sent);
    }
  }
  values.Receive(results);
  if (!write) return;
  for (at::Tensor& tensor : sent) values.Add(tensor.mul_(2));
}

void ProgramFrame::RunNested(const Step& nested, Values& values) {
  const at::Tensor x = values.Use(nested.a);
  const bool fails = nested.c != 0;
  if (nested.b == 0) return values.Add(Nested::apply(x, GradientOf(nested), fails));
  if (c10::InferenceMode::is_enabled()) return;
  const at::AutoGradMode on(true);
  const at::Tensor leaf = x.detach().requires_grad_();
  const at::Tensor gradient =
      GradientsOf({Nested::apply(leaf * 2, GradientOf(nested), fails).sum()}, {leaf})[0];
  run_.Saw(nested, 0, gradient);
  values.Add(gradient.defined() ? gradient : at::zeros({2, 2}, at::kDouble));
}

at::Tensor ProgramFrame::RunSaved(const Step& saved, const at::Tensor& x) {
  const at::Tensor y = x.sin();
  auto* const node = dynamic_cast<torch::autograd::generated::SinBackward0*>(y.grad_fn().get());
  if (node != nullptr) node->self_.register_hooks(std::make_unique<SavedHook>(BodyOf(saved)));
  return y;
}

Tensors ProgramFrame::NestedRoots(const Step& nested, const at::Tensor& x) {
  Tensors roots;
  for (const at::Tensor& result : Run(nested.body, nested.results, {x * 1})) {
    if (result.requires_grad()) roots.push_back(at::sin(result).sum());
  }
  return roots;
}

// ---------------------------------------------------------------------------------- LocalFrame

Tensors LocalFrame::Call(const Step& call, Tensors arguments) {
  return Copies(LocalFrame(&run_, call.a).Run(call.body, call.results, Copies(arguments)));
}

void LocalFrame::CallAsync(const Step& call, Tensors arguments) {
  for (at::Tensor& result : Call(call, std::move(arguments))) pending_.push_back(result);
}

at::Tensor LocalFrame::CallMm(int, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a.clone(), b.clone()).clone();
}

void LocalFrame::Backward(const Tensors& roots, bool retain_graph, int passes) {
  if (passes > 1) Backward(roots, retain_graph, passes - 1);
  const Tensors gradients = GradientsOf(roots, Leaves(run_));
  absl::MutexLock lock(&run_.mu);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    at::Tensor& sum = run_.gradients[{static_cast<int>(i) / kParameters, i % kParameters}];
    sum = sum.defined() ? sum + gradients[i] : gradients[i];
  }
}

std::function<void(const at::Tensor& x)> LocalFrame::BodyOf(const Step& saved) {
  return [run = &run_, index = index_, &saved](const at::Tensor& x) {
    LocalFrame(run, index).Run(saved.body, {}, {x});
  };
}

ProgramFrame::NestedGradient LocalFrame::GradientOf(const Step& nested) {
  return [run = &run_, index = index_, &nested](const at::Tensor& x) {
    const Tensors roots = LocalFrame(run, index).NestedRoots(nested, x);
    if (roots.empty()) return at::Tensor();
    // By the parameters too, so that the same nodes run as in a context.
    Tensors leaves = Leaves(*run);
    leaves.push_back(x);
    return GradientsOf(roots, leaves).back();
  };
}

}  // namespace distgrad
