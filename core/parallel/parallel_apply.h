// Several modules or functions, each on its own input, at the same time.
//
//   std::vector<at::Tensor> outputs = ParallelApply(Replicate(module, devices), inputs, devices);
#ifndef DISTGRAD_CORE_PARALLEL_PARALLEL_APPLY_H_
#define DISTGRAD_CORE_PARALLEL_PARALLEL_APPLY_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/parallel/devices.h"
#include "core/parallel/replica_threads.h"
#include "core/tensor/nested.h"

namespace distgrad {
namespace internal {

template <typename M, typename = void>
struct HasForward : std::false_type {};
template <typename M>
struct HasForward<M, std::void_t<decltype(std::declval<M&>().operator->())>> : std::true_type {};

// `called` is a function, or a (smart) pointer to a module or a module holder.
template <typename Called, typename... Args>
decltype(auto) CallOne(Called& called, Args&&... args) {
  if constexpr (std::is_invocable_v<Called&, Args...> && !HasForward<Called>::value) {
    return called(std::forward<Args>(args)...);
  } else {
    return called->forward(std::forward<Args>(args)...);
  }
}

template <typename T>
struct IsTuple : std::false_type {};
template <typename... Ts>
struct IsTuple<std::tuple<Ts...>> : std::true_type {};

// A tuple is the arguments, anything else the only one.
template <typename Called, typename Input>
auto Call(Called& called, Input&& input) {
  return CallOne(called, std::forward<Input>(input));
}
template <typename Called, typename... Args>
auto Call(Called& called, std::tuple<Args...>&& arguments) {
  return std::apply([&called](Args&... args) { return CallOne(called, std::move(args)...); },
                    arguments);
}

template <typename Called, typename Input>
using ResultOf = std::decay_t<decltype(Call(std::declval<Called&>(), std::declval<Input>()))>;

template <typename Input>
std::vector<c10::Device> DevicesOfInputs(const std::vector<Input>& inputs) {
  std::vector<c10::Device> devices;
  for (const Input& input : inputs) {
    const std::vector<at::Tensor> tensors = TensorsOf(input);
    c10::Device device = c10::kCPU;
    for (auto tensor = tensors.rbegin(); tensor != tensors.rend(); ++tensor) {
      if (tensor->defined()) device = tensor->device();
    }
    devices.push_back(device);
  }
  return devices;
}

}  // namespace internal

// called[i](inputs[i]) or called[i]->forward(inputs[i]), each on a thread of its own, as
// ReplicaThreads::Run has it; a std::tuple is taken as the arguments. The results, in order.
// devices[i] is the current one meanwhile; by default that of the first tensor of the input.
// Throws c10::ValueError if the numbers differ, and else what the first of them threw.
template <typename Called, typename Input>
std::vector<internal::ResultOf<Called, Input>> ParallelApply(
    std::vector<Called> called, std::vector<Input> inputs, std::vector<c10::Device> devices = {}) {
  TORCH_CHECK_VALUE(called.size() == inputs.size(), "parallel apply: ", called.size(),
                    " modules or functions for ", inputs.size(), " inputs");
  if (devices.empty()) devices = internal::DevicesOfInputs(inputs);
  TORCH_CHECK_VALUE(devices.size() == inputs.size(), "parallel apply: ", devices.size(),
                    " devices for ", inputs.size(), " inputs");
  std::vector<std::optional<internal::ResultOf<Called, Input>>> results(inputs.size());
  if (!inputs.empty()) {
    for (c10::Device& device : devices) device = Canonical(device);
    ReplicaThreads(devices).Run(inputs.size(), [&](size_t i) {
      results[i].emplace(internal::Call(called[i], std::move(inputs[i])));
    });
  }
  std::vector<internal::ResultOf<Called, Input>> values;
  for (auto& result : results) values.push_back(*std::move(result));
  return values;
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PARALLEL_APPLY_H_
