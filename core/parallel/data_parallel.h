// One module on several devices: the batch is split among them, each runs a replica on its part,
// and the outputs are put together; backward adds the replicas' gradients.
//
//   Net net;                                                  // a module holder
//   DataParallel parallel(net, {.devices = {gpu0, gpu1}});    // {cpu, cpu} works too
//   for (...) {
//     at::Tensor loss = Loss(parallel.Forward(batch), target);
//     loss.backward();                                        // gradients are in net's .grad
//     optimizer.step();                                       // over net->parameters()
//   }
//
// or, for once, RunDataParallel(net, batch, devices).
//
// These stand in the user's torch code and within the forward of other modules, where errors are
// exceptions; so they throw, as torch's operators do: c10::ValueError for bad arguments, the
// exception of the first replica by order, with the replica and the device in its message, when
// all have stopped, and StatusError where a reduction failed.
//
// docs/data_parallel.md has what happens with buffers, frozen parameters, small batches and so on.
#ifndef DISTGRAD_CORE_PARALLEL_DATA_PARALLEL_H_
#define DISTGRAD_CORE_PARALLEL_DATA_PARALLEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/parallel/broadcast.h"
#include "core/parallel/parallel_apply.h"
#include "core/parallel/replicas.h"
#include "core/parallel/scatter_gather.h"

namespace distgrad {

struct DataParallelOptions {
  // The devices; empty: all CUDA devices.
  std::vector<c10::Device> devices = {};
  // Where the output goes; by default the first device.
  std::optional<c10::Device> output_device = std::nullopt;
  // Along which inputs are split and outputs put together.
  int64_t dim = 0;
  DeviceCollectivesOptions collectives = {};
  ReplicasOptions replicas = {};
};

namespace internal {

// What DataParallel does for a module of any type. Used by one thread at a time.
class DataParallelCore {
 public:
  DataParallelCore(std::shared_ptr<torch::nn::Module> module, DataParallelOptions options);

  // Calls forward(i, replica) for the first `count` devices at the same time.
  void Run(size_t count, absl::FunctionRef<void(size_t, torch::nn::Module&)> forward);

  // Whether the module itself can do a batch of so many parts, all on its own device.
  bool OnModuleItself(size_t count) const;

  // Constant after construction.
  const DataParallelOptions options;
  const std::vector<c10::Device>& devices() const { return options.devices; }
  c10::Device output_device() const { return *options.output_device; }

 private:
  // Constant after construction.
  const std::shared_ptr<torch::nn::Module> module_;
  const std::unique_ptr<Replicas> replicas_;  // none where the module itself does it all
  ReplicaThreads threads_;                    // synchronizes itself
  std::atomic<bool> busy_{false};
};

template <typename M>
std::shared_ptr<M> PointerTo(std::shared_ptr<M> module) {
  return module;
}
template <typename Holder>
auto PointerTo(const Holder& holder) -> decltype(holder.ptr()) {
  return holder.ptr();
}

template <typename Module>
using ModuleTypeOf =
    typename std::decay_t<decltype(PointerTo(std::declval<const Module&>()))>::element_type;

template <typename T>
T ToDevice(const T& value, c10::Device device) {
  const auto move = [device](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device) : tensor;
  };
  return Nested<T>::Map(value, move);
}

}  // namespace internal

// Keeps replicas, threads and buckets between steps. Used by one thread at a time, like the module
// that it is made of; a call while another is in flight is an error.
template <typename M>
class DataParallel {
 public:
  // Takes a module holder or a std::shared_ptr to a module. Parameters stay the module's own,
  // wherever they are; replicas are made here, so plain members of the module that change later do
  // not reach them.
  template <typename Module>
  explicit DataParallel(const Module& module, DataParallelOptions options = {})
      : module_(internal::PointerTo(module)), core_(module_, std::move(options)) {}

  // The module's own forward, of the same arguments. Inputs are nested (core/tensor/nested.h);
  // outputs are as well, and hold nothing else.
  template <typename... Args>
  auto Forward(const Args&... args) {
    using Inputs = std::tuple<Args...>;
    using Output = internal::ResultOf<M*, Inputs>;
    // Without arguments there is nothing to split.
    std::vector<Inputs> parts = sizeof...(Args) == 0 ? std::vector<Inputs>(1)
                                                     : Scatter(Inputs(args...), core_.devices(),
                                                               {.dim = core_.options.dim});
    if (core_.OnModuleItself(parts.size())) {
      M* const module = module_.get();
      const c10::DeviceGuard on_device(core_.devices()[0]);
      return internal::ToDevice<Output>(internal::Call(module, std::move(parts[0])),
                                        core_.output_device());
    }
    std::vector<std::optional<Output>> outputs(parts.size());
    core_.Run(parts.size(), [&](size_t i, torch::nn::Module& replica) {
      M* const module = static_cast<M*>(&replica);
      outputs[i].emplace(internal::Call(module, std::move(parts[i])));
    });
    std::vector<Output> values;
    for (std::optional<Output>& output : outputs) values.push_back(*std::move(output));
    return Gather(values, core_.output_device(), core_.options.dim);
  }

  const std::shared_ptr<M>& module() const { return module_; }
  const std::vector<c10::Device>& devices() const { return core_.devices(); }

 private:
  // Constant after construction.
  const std::shared_ptr<M> module_;

  internal::DataParallelCore core_;
};

template <typename Module>
DataParallel(const Module&) -> DataParallel<internal::ModuleTypeOf<Module>>;
template <typename Module>
DataParallel(const Module&, DataParallelOptions) -> DataParallel<internal::ModuleTypeOf<Module>>;

// Returns independent modules that follow `module` once: clones with its values, whose gradients go
// to the module's parameters. Where they are on the module's device they share its memory.
template <typename Module>
std::vector<std::shared_ptr<internal::ModuleTypeOf<Module>>> Replicate(
    const Module& module, std::vector<c10::Device> devices = {});

// DataParallel for one forward. `input` is nested; a std::tuple is several arguments.
template <typename Module, typename Input>
auto RunDataParallel(const Module& module, const Input& input,
                     std::vector<c10::Device> devices = {},
                     std::optional<c10::Device> output_device = std::nullopt, int64_t dim = 0)
    -> internal::ResultOf<internal::ModuleTypeOf<Module>*, Input>;

// Does the same for function(parameters, input): the parameters are broadcast as one, and need not
// be leaves.
template <typename Function, typename Input>
auto RunDataParallel(Function function, const TensorVector& parameters, const Input& input,
                     std::vector<c10::Device> devices = {},
                     std::optional<c10::Device> output_device = std::nullopt, int64_t dim = 0)
    -> std::decay_t<std::invoke_result_t<Function&, const TensorVector&, Input>>;

// Details only below.

namespace internal {

std::vector<std::shared_ptr<torch::nn::Module>> ReplicateModule(
    std::shared_ptr<torch::nn::Module> module, std::vector<c10::Device> devices);

}  // namespace internal

template <typename Module>
std::vector<std::shared_ptr<internal::ModuleTypeOf<Module>>> Replicate(
    const Module& module, std::vector<c10::Device> devices) {
  using M = internal::ModuleTypeOf<Module>;
  std::vector<std::shared_ptr<M>> replicas;
  for (const auto& replica :
       internal::ReplicateModule(internal::PointerTo(module), std::move(devices))) {
    replicas.push_back(std::static_pointer_cast<M>(replica));
  }
  return replicas;
}

template <typename Module, typename Input>
auto RunDataParallel(const Module& module, const Input& input, std::vector<c10::Device> devices,
                     std::optional<c10::Device> output_device, int64_t dim)
    -> internal::ResultOf<internal::ModuleTypeOf<Module>*, Input> {
  DataParallel parallel(
      module, {.devices = std::move(devices), .output_device = output_device, .dim = dim});
  if constexpr (internal::IsTuple<Input>::value) {
    return std::apply([&](const auto&... args) { return parallel.Forward(args...); }, input);
  } else {
    return parallel.Forward(input);
  }
}

template <typename Function, typename Input>
auto RunDataParallel(Function function, const TensorVector& parameters, const Input& input,
                     std::vector<c10::Device> devices, std::optional<c10::Device> output_device,
                     int64_t dim)
    -> std::decay_t<std::invoke_result_t<Function&, const TensorVector&, Input>> {
  using Output = std::decay_t<std::invoke_result_t<Function&, const TensorVector&, Input>>;
  devices = DevicesOrAllCuda(std::move(devices));
  const c10::Device destination = output_device.value_or(devices[0]);
  std::vector<Input> parts = Scatter(input, devices, {.dim = dim});
  devices.erase(devices.begin() + static_cast<ptrdiff_t>(parts.size()), devices.end());
  const std::vector<TensorVector> copies = Broadcast(parameters, devices);
  std::vector<std::optional<Output>> outputs(parts.size());
  ReplicaThreads(devices).Run(parts.size(), [&](size_t i) {
    outputs[i].emplace(function(copies[i], std::move(parts[i])));
  });
  std::vector<Output> values;
  for (std::optional<Output>& output : outputs) values.push_back(*std::move(output));
  return Gather(values, destination, dim);
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_DATA_PARALLEL_H_
