// Data parallel over a C function, and its pieces: scatter, gather, broadcast, reduce_add.
#include "core/parallel/data_parallel.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "core/parallel/broadcast.h"
#include "core/parallel/scatter_gather.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// ------------------------------------------------------------------------------------- Devices

absl::StatusOr<std::vector<c10::Device>> ToDevices(const dg_str* names, size_t count) {
  DG_RETURN_IF_ERROR(CheckArray(names, count, "devices"));
  std::vector<c10::Device> devices;
  for (size_t i = 0; i < count; ++i) {
    DG_ASSIGN_OR_RETURN(const c10::Device device,
                        ToDevice(names[i], absl::StrCat("devices[", i, "]")));
    devices.push_back(device);
  }
  return devices;
}

// Nothing for the empty name.
absl::StatusOr<std::optional<c10::Device>> ToAnyDevice(dg_str name, absl::string_view what) {
  if (name.size == 0) return std::nullopt;
  return ToDevice(name, what);
}

// For the pieces, which have no default.
absl::StatusOr<std::vector<c10::Device>> ToSomeDevices(const dg_str* names, size_t count) {
  if (count == 0) return absl::InvalidArgumentError("the list of devices is empty");
  return ToDevices(names, count);
}

// -------------------------------------------------------------------------------------- Tensors

// Hands them out, when all of them are there.
void HandOut(std::vector<OwnedHandle<TensorObject>> handles, dg_tensor** outs) {
  for (OwnedHandle<TensorObject>& handle : handles) *outs++ = handle.release();
}

std::vector<const dg_tensor*> Pointers(const std::vector<OwnedHandle<TensorObject>>& handles) {
  std::vector<const dg_tensor*> pointers;
  for (const OwnedHandle<TensorObject>& handle : handles) pointers.push_back(handle.get());
  return pointers;
}

// What a callback stored; takes it all.
absl::StatusOr<TensorVector> TakeTensors(const std::vector<dg_tensor*>& handles) {
  TensorVector tensors;
  absl::Status first;
  for (size_t i = 0; i < handles.size(); ++i) {
    tensors.emplace_back();
    if (handles[i] == nullptr) continue;
    absl::StatusOr<std::unique_ptr<TensorObject>> taken =
        TakeHandle<TensorObject>(handles[i], absl::StrCat("outputs[", i, "]"));
    if (taken.ok()) {
      tensors.back() = (*taken)->tensor;
    } else {
      first.Update(absl::InternalError(taken.status().message()));
    }
  }
  if (!first.ok()) return first;
  return tensors;
}

// --------------------------------------------------------------------------------- The function

struct Function {
  dg_forward call;
  UserData user_data;
};

// What is the same for all replicas of one forward.
struct Step {
  size_t output_count;
  Role role;  // the caller's
  const std::vector<c10::Device>* devices;
};

// The function with its parameters and buffers, as the module that core makes replicas of. Throws
// as torch does.
class FunctionModule : public torch::nn::Module {
 public:
  FunctionModule(std::shared_ptr<const Function> function, TensorVector parameters,
                 TensorVector buffers, std::optional<size_t> replica = std::nullopt)
      : function_(std::move(function)),
        parameters_(std::move(parameters)),
        buffers_(std::move(buffers)),
        replica_(replica) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& tensor = parameters_[i];
      register_parameter(absl::StrCat("parameter ", i), tensor, tensor.requires_grad());
    }
    for (size_t i = 0; i < buffers_.size(); ++i) {
      register_buffer(absl::StrCat("buffer ", i), buffers_[i]);
    }
  }

  // The replicas, in the order of the devices; each step brings their values.
  std::shared_ptr<Module> clone(const std::optional<c10::Device>& device) const override {
    const auto copies = [&device](const TensorVector& tensors) {
      TensorVector made;
      for (const at::Tensor& tensor : tensors) {
        made.push_back(tensor.detach().to(device.value_or(tensor.device())));
        made.back().set_requires_grad(tensor.requires_grad());
      }
      return made;
    };
    return std::make_shared<FunctionModule>(function_, copies(parameters_), copies(buffers_),
                                            clones_++);
  }

  TensorVector forward(const TensorVector& inputs, const Step& step) const {
    const auto parameters = NewTensorHandles(parameters_), buffers = NewTensorHandles(buffers_),
               parts = NewTensorHandles(inputs);
    const std::vector<const dg_tensor*> of_parameters = Pointers(parameters),
                                        of_buffers = Pointers(buffers), of_inputs = Pointers(parts);
    const size_t index = replica_.value_or(0);
    const std::string device = (*step.devices)[index].str();
    dg_replica replica = {};
    replica.struct_size = sizeof(replica);
    replica.index = index;
    replica.device = ToStr(device);
    replica.parameters = of_parameters.data();
    replica.parameter_count = of_parameters.size();
    replica.buffers = of_buffers.data();
    replica.buffer_count = of_buffers.size();
    replica.inputs = of_inputs.data();
    replica.input_count = of_inputs.size();
    replica.output_count = step.output_count;

    std::vector<dg_tensor*> outputs(step.output_count);
    absl::Status status;
    {
      const ServingScope scope(step.role);
      const at::AutoGradMode as_it_was(at::GradMode::is_enabled());
      status = TakeError(function_->call(function_->user_data.get(), &replica, outputs.data()));
    }
    absl::StatusOr<TensorVector> taken = TakeTensors(outputs);
    if (status.ok()) status = taken.status();
    if (status.ok()) return *std::move(taken);
    StatusError error(status);
    // Of replicas core says it.
    if (!replica_.has_value()) error.add_context(absl::StrCat("in replica 0 of 1, on ", device));
    throw error;
  }

 private:
  // Constant after construction.
  const std::shared_ptr<const Function> function_;
  const TensorVector parameters_, buffers_;
  const std::optional<size_t> replica_;  // none: this is the module itself

  mutable size_t clones_ = 0;  // changes while core makes its replicas
};

struct DataParallelObject : HandleObject {
  using Handle = dg_data_parallel;
  static constexpr HandleKind kKind = HandleKind::kDataParallel;
  static constexpr char kName[] = "dg_data_parallel";

  DataParallelObject(std::shared_ptr<FunctionModule> module, DataParallelOptions options)
      : parallel(module, std::move(options)) {}
  DataParallel<FunctionModule> parallel;  // whoever sets `busy` uses it
  std::atomic<bool> busy{false};
};

absl::StatusOr<DataParallelOptions> ToOptions(const dg_data_parallel_options& read) {
  DataParallelOptions options;
  DG_ASSIGN_OR_RETURN(options.devices, ToDevices(read.devices, read.device_count));
  DG_ASSIGN_OR_RETURN(options.output_device, ToAnyDevice(read.output_device, "output_device"));
  options.dim = read.dim;
  if (read.bucket_bytes > 0) {
    options.collectives.bucket_bytes = read.bucket_bytes;
    options.replicas.bucket_bytes = read.bucket_bytes;
  }
  options.replicas.preserve_rng_state = false;  // a FunctionModule's clone draws no numbers
  options.collectives.timeout = ToTimeout(read.timeout_ms, options.collectives.timeout);
  return options;
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_data_parallel_create(const dg_tensor* const* parameters, size_t parameter_count,
                                  const dg_data_parallel_options* options, dg_forward forward,
                                  void* user_data, void (*destroy)(void* user_data),
                                  dg_data_parallel** out) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckCallback(forward != nullptr, "forward"));
    DG_ASSIGN_OR_RETURN(const dg_data_parallel_options read,
                        ReadOptions<dg_data_parallel_options>(
                            options, DG_DATA_PARALLEL_OPTIONS_INIT, "dg_data_parallel_options"));
    DG_ASSIGN_OR_RETURN(DataParallelOptions core_options, ToOptions(read));
    DG_ASSIGN_OR_RETURN(TensorVector of_function, PinTensors(parameters, parameter_count,
                                                             /*allow_null=*/false, "parameters"));
    DG_ASSIGN_OR_RETURN(TensorVector buffers, PinTensors(read.buffers, read.buffer_count,
                                                         /*allow_null=*/false, "buffers"));
    *out = NewHandle<DataParallelObject>(
        std::make_shared<FunctionModule>(
            std::make_shared<const Function>(Function{forward, std::move(taken)}),
            std::move(of_function), std::move(buffers)),
        std::move(core_options));
    return absl::OkStatus();
  });
}

dg_error* dg_data_parallel_forward(const dg_data_parallel* data_parallel,
                                   const dg_tensor* const* inputs, size_t input_count,
                                   dg_tensor** outputs, size_t output_count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckArray(outputs, output_count, "outputs"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<DataParallelObject> pinned,
                        Pin<DataParallelObject>(data_parallel, "data_parallel"));
    DG_ASSIGN_OR_RETURN(const TensorVector values,
                        PinTensors(inputs, input_count, /*allow_null=*/true, "inputs"));
    if (pinned->busy.exchange(true)) {
      return absl::FailedPreconditionError(
          "a forward of this dg_data_parallel is in flight, here or on another thread");
    }
    const absl::Cleanup done = [&] { pinned->busy = false; };
    DataParallel<FunctionModule>& parallel = pinned->parallel;
    HandOut(NewTensorHandles(
                parallel.Forward(values, Step{output_count, Serving(), &parallel.devices()})),
            outputs);
    return absl::OkStatus();
  });
}

void dg_data_parallel_destroy(dg_data_parallel* data_parallel) noexcept {
  DestroyHandle<DataParallelObject>(data_parallel);
}

dg_error* dg_scatter(const dg_tensor* tensor, const dg_str* devices, size_t device_count,
                     int64_t dim, const int64_t* sizes, dg_tensor** outs,
                     size_t* part_count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(outs, "outs"));
    DG_RETURN_IF_ERROR(CheckOut(part_count, "part_count"));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    DG_ASSIGN_OR_RETURN(const std::vector<c10::Device> to, ToSomeDevices(devices, device_count));
    ScatterOptions options{.dim = dim};
    if (sizes != nullptr) options.sizes.assign(sizes, sizes + device_count);
    auto parts = NewTensorHandles(Scatter(pinned->tensor, to, options));
    const size_t count = parts.size();
    parts.resize(device_count);
    HandOut(std::move(parts), outs);
    *part_count = count;
    return absl::OkStatus();
  });
}

dg_error* dg_gather(const dg_tensor* const* tensors, size_t tensor_count, dg_str device,
                    int64_t dim, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const TensorVector values,
                        PinTensors(tensors, tensor_count, /*allow_null=*/false, "tensors"));
    DG_ASSIGN_OR_RETURN(const std::optional<c10::Device> to, ToAnyDevice(device, "device"));
    *out = NewTensorHandle(Gather(values, to, dim));
    return absl::OkStatus();
  });
}

dg_error* dg_broadcast(const dg_tensor* const* tensors, size_t tensor_count, const dg_str* devices,
                       size_t device_count, dg_tensor** outs) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckArray(outs, tensor_count, "outs"));
    DG_ASSIGN_OR_RETURN(const TensorVector values,
                        PinTensors(tensors, tensor_count, /*allow_null=*/true, "tensors"));
    DG_ASSIGN_OR_RETURN(const std::vector<c10::Device> to, ToSomeDevices(devices, device_count));
    TensorVector copies;
    for (TensorVector& of_device : Broadcast(values, to)) {
      for (at::Tensor& copy : of_device) copies.push_back(std::move(copy));
    }
    HandOut(NewTensorHandles(copies), outs);
    return absl::OkStatus();
  });
}

dg_error* dg_reduce_add(const dg_tensor* const* tensors, size_t list_count, size_t tensor_count,
                        dg_str device, dg_tensor** outs) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckArray(outs, tensor_count, "outs"));
    size_t count = 0;
    if (__builtin_mul_overflow(list_count, tensor_count, &count)) {
      return absl::InvalidArgumentError("there are not so many tensors");
    }
    DG_ASSIGN_OR_RETURN(const TensorVector values,
                        PinTensors(tensors, count, /*allow_null=*/true, "tensors"));
    DG_ASSIGN_OR_RETURN(const std::optional<c10::Device> to, ToAnyDevice(device, "device"));
    std::vector<TensorVector> lists;
    for (auto list = values.begin(); list != values.end(); list += tensor_count) {
      lists.emplace_back(list, list + tensor_count);
    }
    HandOut(NewTensorHandles(ReduceAdd(lists, to)), outs);
    return absl::OkStatus();
  });
}

}  // extern "C"
