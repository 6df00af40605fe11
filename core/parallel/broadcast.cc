// Has the autograd nodes of broadcasts and sums, and the functions that record them.
#include "core/parallel/broadcast.h"

#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "core/parallel/broadcast_node.h"
#include "core/parallel/devices.h"
#include "core/parallel/new_device_collectives.h"
#include "core/parallel/recording.h"
#include "core/tensor/exception.h"
#include "core/tensor/keep_memory.h"

namespace distgrad {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The backward of ReduceAdd: broadcasts.
class ReduceAddNode : public Node {
 public:
  explicit ReduceAddNode(std::shared_ptr<DeviceCollectives> collectives)
      : collectives_(std::move(collectives)) {}

  std::string name() const override { return "distgrad::ReduceAddBackward"; }

  variable_list apply(variable_list&& gradients) override {
    variable_list results;
    results.reserve(num_outputs());
    for (TensorVector& list : Broadcast(gradients, collectives_)) {
      for (at::Tensor& tensor : list) {
        const size_t number = results.size();
        results.push_back(task_should_compute_output(number) ? std::move(tensor) : at::Tensor());
      }
    }
    return results;
  }

 private:
  // Constant after construction.
  const std::shared_ptr<DeviceCollectives> collectives_;
};

c10::Device DeviceOf(const TensorVector& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) return tensor.device();
  }
  return c10::kCPU;
}

std::shared_ptr<DeviceCollectives> CollectivesFor(std::vector<c10::Device> devices) {
  return ValueOrThrow(NewDeviceCollectives(DevicesOrAllCuda(std::move(devices))));
}

}  // namespace

// As leaves, it comes before all else that is ready: the sooner a bucket is reduced the more of
// the backward is left to hide it.
BroadcastNode::BroadcastNode(torch::autograd::edge_list edges, c10::Device source,
                             std::shared_ptr<DeviceCollectives> collectives,
                             std::optional<c10::Stream> reader)
    : Node(std::numeric_limits<uint64_t>::max(), std::move(edges)),
      source_(source),
      collectives_(std::move(collectives)),
      reader_(reader) {}

variable_list BroadcastNode::apply(variable_list&& gradients) {
  const size_t count = num_outputs();
  std::vector<TensorVector> lists(collectives_->devices().size());
  for (size_t i = 0; i < lists.size(); ++i) {
    const auto begin = gradients.begin() + static_cast<ptrdiff_t>(i * count);
    lists[i].assign(std::make_move_iterator(begin),
                    std::make_move_iterator(begin + static_cast<ptrdiff_t>(count)));
  }
  gradients.clear();
  variable_list sums = ReduceAdd(lists, source_, collectives_);
  if (reader_.has_value()) {
    // A leaf may keep a sum, and its reader free it: not before that stream is done with it.
    for (const at::Tensor& sum : sums) KeepMemoryFor(sum, *reader_);
  }
  return sums;
}

std::vector<TensorVector> Broadcast(const TensorVector& tensors,
                                    const std::shared_ptr<DeviceCollectives>& collectives) {
  std::vector<TensorVector> lists;
  {
    const at::NoGradGuard no_grad;
    lists = ValueOrThrow(collectives->Broadcast(tensors));
    for (TensorVector& list : lists) {
      for (size_t k = 0; k < list.size(); ++k) {
        if (list[k].defined() && list[k].is_same(tensors[k])) list[k] = list[k].clone();
      }
    }
  }
  if (!AnyNeedsGradient(tensors)) return lists;
  const auto node =
      std::make_shared<BroadcastNode>(EdgesOf(tensors), DeviceOf(tensors), collectives);
  for (const TensorVector& list : lists) {
    for (size_t k = 0; k < list.size(); ++k) AddOutput(node, list[k], NeedsGradient(tensors[k]));
  }
  return lists;
}

TensorVector ReduceAdd(const std::vector<TensorVector>& lists, c10::Device destination,
                       const std::shared_ptr<DeviceCollectives>& collectives) {
  TensorVector sums;
  {
    const at::NoGradGuard no_grad;
    sums = ValueOrThrow(collectives->Reduce(lists, destination));
  }
  TensorVector inputs;
  for (const TensorVector& list : lists) inputs.insert(inputs.end(), list.begin(), list.end());
  if (!AnyNeedsGradient(inputs)) return sums;
  const auto node = std::make_shared<ReduceAddNode>(collectives);
  node->set_next_edges(EdgesOf(inputs));
  for (size_t k = 0; k < sums.size(); ++k) {
    bool differentiable = false;
    for (const TensorVector& list : lists) {
      differentiable = differentiable || NeedsGradient(list[k]);
      // A sum of one is that one, whose history is its own.
      if (sums[k].defined() && sums[k].is_same(list[k])) sums[k] = sums[k].detach();
    }
    AddOutput(node, sums[k], differentiable);
  }
  return sums;
}

std::vector<TensorVector> Broadcast(const TensorVector& tensors,
                                    const std::vector<c10::Device>& devices) {
  return Broadcast(tensors, CollectivesFor(devices));
}

std::vector<at::Tensor> Broadcast(const at::Tensor& tensor,
                                  const std::vector<c10::Device>& devices) {
  std::vector<at::Tensor> copies;
  for (TensorVector& list : Broadcast(TensorVector{tensor}, devices)) {
    copies.push_back(std::move(list[0]));
  }
  return copies;
}

TensorVector ReduceAdd(const std::vector<TensorVector>& lists,
                       std::optional<c10::Device> destination) {
  TORCH_CHECK_VALUE(!lists.empty(), "reduce: no tensors");
  std::vector<c10::Device> devices;
  for (const TensorVector& list : lists) devices.push_back(DeviceOf(list));
  return ReduceAdd(lists, Canonical(destination.value_or(devices[0])), CollectivesFor(devices));
}

at::Tensor ReduceAdd(const std::vector<at::Tensor>& tensors,
                     std::optional<c10::Device> destination) {
  std::vector<TensorVector> lists;
  for (const at::Tensor& tensor : tensors) lists.push_back({tensor});
  return ReduceAdd(lists, destination)[0];
}

}  // namespace distgrad
