// The backward of a broadcast.
#ifndef DISTGRAD_CORE_PARALLEL_BROADCAST_NODE_H_
#define DISTGRAD_CORE_PARALLEL_BROADCAST_NODE_H_

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string>

#include "core/parallel/device_collectives.h"

namespace distgrad {

// The node of a broadcast. Its outputs are the copies: of the first device, then of the second, ...
// It reduces their gradients onto `source`. It holds nothing of a forward, so one may serve many.
//
// Immutable after construction, but for what every node has.
class BroadcastNode : public torch::autograd::Node {
 public:
  // `reader`: the stream that uses the sums in the end, where it is another than this node's own.
  BroadcastNode(torch::autograd::edge_list edges, c10::Device source,
                std::shared_ptr<DeviceCollectives> collectives,
                std::optional<c10::Stream> reader = std::nullopt);

  std::string name() const override { return "distgrad::BroadcastBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  // Constant after construction.
  const c10::Device source_;
  const std::shared_ptr<DeviceCollectives> collectives_;
  const std::optional<c10::Stream> reader_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_BROADCAST_NODE_H_
