// Optimizers: creating, stepping, clipping, their state, removing them.
#include "core/worker/optimizer.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/optimizer_object.h"
#include "capi/tensor_map.h"
#include "capi/worker_object.h"
#include "core/base/blocking.h"

namespace distgrad {
namespace {

// Keeps the worker of an optimizer from ending; there is none where that is a local one.
absl::StatusOr<std::optional<SharedWorker::Use>> Begin(const OptimizerObject& object) {
  if (object.worker == nullptr) return std::nullopt;
  DG_ASSIGN_OR_RETURN(SharedWorker::Use use, object.worker->Begin());
  return std::optional<SharedWorker::Use>(std::move(use));
}

// `make` gives torch's optimizer for the parameters, or throws.
template <typename F>
absl::Status Create(dg_worker* worker, dg_str name, const dg_tensor* const* parameters,
                    size_t parameter_count, dg_optimizer** out, F&& make) {
  DG_RETURN_IF_ERROR(CheckOut(out));
  std::optional<SharedWorker::Use> use;
  if (worker != nullptr) {
    DG_ASSIGN_OR_RETURN(SharedWorker::Use begun, UseWorker(worker));
    use.emplace(std::move(begun));
  }
  DG_ASSIGN_OR_RETURN(const std::string text, FromStr(name, "name"));
  DG_ASSIGN_OR_RETURN(std::vector<at::Tensor> leaves,
                      PinTensors(parameters, parameter_count, /*allow_null=*/false, "parameters"));
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i].is_leaf() && leaves[i].requires_grad()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", i, " is not a leaf that requires grad"));
  }
  HandleAhead<OptimizerObject> made(use ? use->shared().shared_from_this() : nullptr);
  SharedAhead<Optimizer> shared;
  DG_ASSIGN_OR_RETURN(std::unique_ptr<Optimizer> optimizer,
                      Optimizer::Create(use ? use->get() : nullptr, make(std::move(leaves)), text));
  made->optimizer = shared.Share(std::move(optimizer));
  *out = made.Release();
  return absl::OkStatus();
}

// torch's own checks throw with their sources' lines; these name the field.
absl::Status CheckNotNegative(double value, absl::string_view field) {
  if (value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value));
}

absl::StatusOr<dg_adam_options> ReadAdam(const dg_adam_options* given,
                                         const dg_adam_options& defaults) {
  DG_ASSIGN_OR_RETURN(const dg_adam_options read,
                      ReadOptions<dg_adam_options>(given, defaults, "dg_adam_options"));
  DG_RETURN_IF_ERROR(CheckFlags(read.flags, DG_ADAM_AMSGRAD, "dg_adam_options.flags"));
  DG_RETURN_IF_ERROR(CheckNotNegative(read.learning_rate, "learning_rate"));
  DG_RETURN_IF_ERROR(CheckNotNegative(read.epsilon, "epsilon"));
  DG_RETURN_IF_ERROR(CheckNotNegative(read.weight_decay, "weight_decay"));
  if (!(read.beta1 >= 0 && read.beta1 < 1 && read.beta2 >= 0 && read.beta2 < 1)) {
    return absl::InvalidArgumentError("beta1 and beta2 are in [0, 1)");
  }
  return read;
}

template <typename Options>
Options ToAdam(const dg_adam_options& read) {
  return Options(read.learning_rate)
      .betas({read.beta1, read.beta2})
      .eps(read.epsilon)
      .weight_decay(read.weight_decay)
      .amsgrad((read.flags & DG_ADAM_AMSGRAD) != 0);
}

// Calls `use` with an optimizer, its parameters by name, and the path of a file.
template <typename F>
dg_error* WithFile(dg_optimizer* optimizer, const dg_str* names, const dg_tensor* const* parameters,
                   size_t count, dg_str path, F&& use) {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const TensorMap named,
                        PinTensorMap(names, parameters, count, "parameters"));
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(path, "path"));
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const auto in_use, Begin(*pinned));
    const BlockingScope blocking;
    return use(*pinned->optimizer, named, text);
  });
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_optimizer_create_sgd(dg_worker* worker, dg_str name,
                                  const dg_tensor* const* parameters, size_t parameter_count,
                                  const dg_sgd_options* options, dg_optimizer** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(
        const dg_sgd_options read,
        ReadOptions<dg_sgd_options>(options, DG_SGD_OPTIONS_INIT, "dg_sgd_options"));
    DG_RETURN_IF_ERROR(CheckFlags(read.flags, DG_SGD_NESTEROV, "dg_sgd_options.flags"));
    DG_RETURN_IF_ERROR(CheckNotNegative(read.learning_rate, "learning_rate"));
    DG_RETURN_IF_ERROR(CheckNotNegative(read.momentum, "momentum"));
    DG_RETURN_IF_ERROR(CheckNotNegative(read.weight_decay, "weight_decay"));
    const bool nesterov = (read.flags & DG_SGD_NESTEROV) != 0;
    if (nesterov && (read.momentum == 0 || read.dampening != 0)) {
      return absl::InvalidArgumentError("Nesterov's momentum needs a momentum and no dampening");
    }
    return Create(worker, name, parameters, parameter_count, out,
                  [&](std::vector<at::Tensor> leaves) {
                    return std::make_unique<torch::optim::SGD>(
                        std::move(leaves), torch::optim::SGDOptions(read.learning_rate)
                                               .momentum(read.momentum)
                                               .dampening(read.dampening)
                                               .weight_decay(read.weight_decay)
                                               .nesterov(nesterov));
                  });
  });
}

dg_error* dg_optimizer_create_adam(dg_worker* worker, dg_str name,
                                   const dg_tensor* const* parameters, size_t parameter_count,
                                   const dg_adam_options* options, dg_optimizer** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const dg_adam_options read, ReadAdam(options, DG_ADAM_OPTIONS_INIT));
    return Create(worker, name, parameters, parameter_count, out,
                  [&](std::vector<at::Tensor> leaves) {
                    return std::make_unique<torch::optim::Adam>(
                        std::move(leaves), ToAdam<torch::optim::AdamOptions>(read));
                  });
  });
}

dg_error* dg_optimizer_create_adamw(dg_worker* worker, dg_str name,
                                    const dg_tensor* const* parameters, size_t parameter_count,
                                    const dg_adam_options* options, dg_optimizer** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const dg_adam_options read, ReadAdam(options, DG_ADAMW_OPTIONS_INIT));
    return Create(worker, name, parameters, parameter_count, out,
                  [&](std::vector<at::Tensor> leaves) {
                    return std::make_unique<torch::optim::AdamW>(
                        std::move(leaves), ToAdam<torch::optim::AdamWOptions>(read));
                  });
  });
}

dg_error* dg_optimizer_set_workers(dg_optimizer* optimizer, const dg_str* workers,
                                   size_t worker_count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(std::vector<std::string> names, FromStrs(workers, worker_count, "workers"));
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
    return pinned->optimizer->SetWorkers(std::move(names));
  });
}

dg_error* dg_optimizer_step(dg_optimizer* optimizer, const dg_context* context) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> of, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
    return pinned->optimizer->Step(of->context);
  });
}

dg_error* dg_optimizer_clip_gradients(dg_optimizer* optimizer, const dg_context* context,
                                      double max_norm, double* norm) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(norm, "norm"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_RETURN_IF_ERROR(CheckNotNegative(max_norm, "max_norm"));
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> of, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
    DG_ASSIGN_OR_RETURN(*norm, pinned->optimizer->ClipGradients(of->context, max_norm));
    return absl::OkStatus();
  });
}

dg_error* dg_optimizer_set_learning_rate(dg_optimizer* optimizer, double learning_rate) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
    return pinned->optimizer->SetLearningRate(learning_rate);
  });
}

dg_error* dg_optimizer_state(dg_optimizer* optimizer,
                             void (*visit)(void* user_data, dg_str name, const dg_tensor* tensor),
                             void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    std::vector<StateTensor> state;
    {
      DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                          Pin<OptimizerObject>(optimizer, "optimizer"));
      DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
      const BlockingScope blocking;
      DG_ASSIGN_OR_RETURN(state, pinned->optimizer->State());
    }
    std::vector<OwnedHandle<TensorObject>> handles;
    for (const StateTensor& each : state) {
      handles.push_back(NewOwnedHandle<TensorObject>(each.tensor));
    }
    for (size_t i = 0; i < state.size(); ++i)
      visit(user_data, ToStr(state[i].name), handles[i].get());
    return absl::OkStatus();
  });
}

dg_error* dg_optimizer_load_state(dg_optimizer* optimizer, const dg_str* names,
                                  const dg_tensor* const* tensors, size_t count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(std::vector<std::string> texts, FromStrs(names, count, "names"));
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> pinned_tensors,
                        PinTensors(tensors, count, /*allow_null=*/false, "tensors"));
    std::vector<StateTensor> state;
    for (size_t i = 0; i < count; ++i) {
      state.push_back({std::move(texts[i]), pinned_tensors[i]});
    }
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
    const BlockingScope blocking;
    return pinned->optimizer->LoadState(state);
  });
}

dg_error* dg_optimizer_save(dg_optimizer* optimizer, const dg_str* names,
                            const dg_tensor* const* parameters, size_t count,
                            dg_str path) noexcept {
  return WithFile(optimizer, names, parameters, count, path,
                  [](Optimizer& part, const TensorMap& named, const std::string& file) {
                    return part.Save(named, file);
                  });
}

dg_error* dg_optimizer_load(dg_optimizer* optimizer, const dg_str* names,
                            const dg_tensor* const* parameters, size_t count,
                            dg_str path) noexcept {
  return WithFile(optimizer, names, parameters, count, path,
                  [](Optimizer& part, const TensorMap& named, const std::string& file) {
                    return part.Load(file, named);
                  });
}

dg_error* dg_optimizer_remove(dg_optimizer* optimizer) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        Pin<OptimizerObject>(optimizer, "optimizer"));
    DG_ASSIGN_OR_RETURN(const auto use, Begin(*pinned));
    const BlockingScope blocking;
    pinned->optimizer->Remove();
    return absl::OkStatus();
  });
}

void dg_optimizer_destroy(dg_optimizer* optimizer) noexcept {
  DestroyHandle<OptimizerObject>(optimizer);
}

}  // extern "C"
