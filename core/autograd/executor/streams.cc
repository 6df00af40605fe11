// Records and awaits events between the streams of accelerators.
#include "core/autograd/executor/streams.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

#include "core/tensor/keep_memory.h"

namespace distgrad {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Has `to` wait for what `from` has been given so far.
void Order(c10::Stream from, c10::Stream to) {
  if (from == to) return;
  StreamEvent(from).Block(to);
}

}  // namespace

bool IsOnAccelerator(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() &&
         at::accelerator::isAccelerator(tensor.device().type());
}

std::optional<c10::Stream> HomeStream(const Node& node, uint32_t input,
                                      const at::Tensor& gradient) {
  const torch::autograd::InputMetadata& metadata = node.input_metadata(input);
  if (metadata.was_default_constructed() || metadata.device() != gradient.device()) {
    return std::nullopt;
  }
  return metadata.stream();
}

void BringHome(const at::Tensor& gradient, c10::Stream home) {
  const c10::impl::VirtualGuardImpl device(home.device_type());
  const c10::Stream made_on = device.getStream(gradient.device());
  if (made_on == home) return;
  Order(made_on, home);
  KeepMemoryFor(gradient, home);
}

void ReadyMark::Add(const at::Tensor& tensor) {
  if (!IsOnAccelerator(tensor)) return;
  const c10::Device device = tensor.device();
  for (const StreamEvent& event : events_) {
    if (event.device() == device) return;
  }
  events_.emplace_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void ReadyMark::Await(const at::Tensor& tensor) const {
  for (const StreamEvent& event : events_) {
    if (!tensor.defined() || event.device() != tensor.device()) continue;
    const c10::impl::VirtualGuardImpl device(tensor.device().type());
    const c10::Stream current = device.getStream(tensor.device());
    event.Block(current);
    KeepMemoryFor(tensor, current);
  }
}

HomeStreamGuard::HomeStreamGuard(Node& node, const variable_list& gradients)
    : of_node_(node.stream().value()) {
  // One stream can be current on each device. Inputs that live on others are ordered before it.
  std::vector<c10::Stream> current = {of_node_.current_stream()};
  for (uint32_t i = 0; i < gradients.size() && i < node.num_inputs(); ++i) {
    if (!IsOnAccelerator(gradients[i])) continue;
    const std::optional<c10::Stream> home = HomeStream(node, i, gradients[i]);
    if (!home.has_value()) continue;
    const auto same_device = std::find_if(
        current.begin(), current.end(),
        [&home](const c10::Stream& stream) { return stream.device() == home->device(); });
    if (same_device == current.end()) {
      current.push_back(*home);
    } else if (*same_device != *home) {
      Order(*home, *same_device);
      KeepMemoryFor(gradients[i], *same_device);
    }
  }
  if (current.size() > 1) of_other_devices_.emplace(current);
}

}  // namespace distgrad
