// The order in which the streams of an accelerator must work, so that gradients that are still
// being computed can be handed from one to another. What is explained in docs of libtorch as
// "stream semantics of backward passes" holds here too.
//
// The rule: each input of a node has a home stream, the one on which forward made the tensor.
// A gradient for it is brought into the order of that stream when it arrives, is added up there,
// and the node runs there. No thread ever waits for a device.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_STREAMS_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_STREAMS_H_

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/tensor/stream_event.h"

namespace distgrad {

// Whether its values may still be in flight on a stream.
bool IsOnAccelerator(const at::Tensor& tensor);

// The home stream of a node's input; none if the node expects nothing on the gradient's device.
std::optional<c10::Stream> HomeStream(const torch::autograd::Node& node, uint32_t input,
                                      const at::Tensor& gradient);

// `gradient` (on an accelerator) was computed on this thread's current stream: has `home` wait
// for that, and the allocator keep the memory until `home` is done with it.
void BringHome(const at::Tensor& gradient, c10::Stream home);

// The point in their streams at which the values of some tensors are computed. Not thread-safe.
class ReadyMark {
 public:
  ReadyMark() = default;
  // Marks what was launched on this thread's current streams, which computes `tensors` (or nothing,
  // of those that are undefined or not on an accelerator).
  explicit ReadyMark(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) Add(tensor);
  }
  void Add(const at::Tensor& tensor);

  // Has this thread's current stream wait until `tensor`, one of those, is computed, and the
  // allocator keep its memory until that stream is done with it.
  void Await(const at::Tensor& tensor) const;

 private:
  std::vector<StreamEvent> events_;  // one for each device
};

// Sends what this thread launches, while the guard lives, to the home streams of the node's inputs,
// and makes the node's device the current one. For nodes that have a stream: those of the CPU have
// none.
class HomeStreamGuard {
 public:
  HomeStreamGuard(torch::autograd::Node& node, const torch::autograd::variable_list& gradients);

 private:
  c10::StreamGuard of_node_;
  std::optional<c10::MultiStreamGuard> of_other_devices_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_STREAMS_H_
