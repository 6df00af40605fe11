// Copies of tensors for many devices, and sums of tensors from many devices. Both are
// differentiable any number of times: the backward of each is the other, and both move many small
// tensors as one.
//
//   std::vector<TensorVector> copies = Broadcast({weight, bias}, devices);
//   TensorVector sums = ReduceAdd(lists, devices[0]);
//
// Like torch's own operators they throw: c10::ValueError or StatusError for bad arguments. A
// gradient that is undefined on all devices stays undefined, and is not made zeros.
#ifndef DISTGRAD_CORE_PARALLEL_BROADCAST_H_
#define DISTGRAD_CORE_PARALLEL_BROADCAST_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/parallel/device_collectives.h"

namespace distgrad {

// Returns for each of the collectives' devices a copy of all tensors in memory of its own. These
// lie on one device; undefined ones stay so.
std::vector<TensorVector> Broadcast(const TensorVector& tensors,
                                    const std::shared_ptr<DeviceCollectives>& collectives);

// Returns the sums of the k-th tensors, as DeviceCollectives::Reduce has it.
TensorVector ReduceAdd(const std::vector<TensorVector>& lists, c10::Device destination,
                       const std::shared_ptr<DeviceCollectives>& collectives);

// Does the same with collectives for this call. Making them is cheap but for NCCL's.
std::vector<TensorVector> Broadcast(const TensorVector& tensors,
                                    const std::vector<c10::Device>& devices);
// Returns copies of one tensor.
std::vector<at::Tensor> Broadcast(const at::Tensor& tensor,
                                  const std::vector<c10::Device>& devices);

// Returns the sum of the tensors, which may lie on any devices, on `destination`, by default the
// device of the first. Of lists: the sums of the k-th of all lists, each of which lies on one
// device.
at::Tensor ReduceAdd(const std::vector<at::Tensor>& tensors,
                     std::optional<c10::Device> destination = std::nullopt);
TensorVector ReduceAdd(const std::vector<TensorVector>& lists,
                       std::optional<c10::Device> destination = std::nullopt);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_BROADCAST_H_
