// The tensors that all ranks of a group hold alike: the parameters of a model, which they train,
// those that are frozen, and its buffers.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_REPLICATED_TENSORS_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_REPLICATED_TENSORS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/parallel/process_group/named_tensor.h"
#include "core/parallel/process_group/process_group.h"

namespace distgrad {

// Immutable after construction; but it is for the callers to see to the same order on all ranks.
class ReplicatedTensors {
 public:
  // Counts the first of each tensor, and none that is undefined.
  ReplicatedTensors(std::shared_ptr<ProcessGroup> group, const std::vector<NamedTensor>& parameters,
                    const std::vector<NamedTensor>& buffers);

  // The parameters that require grad, from the last to the first: gradients come in this order,
  // more or less.
  const std::vector<NamedTensor>& trained() const { return trained_; }

  // Says, on every rank, which rank and tensor are the first that differ from rank 0's, or where
  // `settings` differ; "" if nothing does.
  absl::StatusOr<std::string> Difference(const std::string& settings) const;
  // Returns kInvalidArgument for a parameter that cannot be averaged, and for a tensor that cannot
  // be broadcast. Where nothing differs, all ranks get the same answer.
  absl::Status CheckTensors() const;
  // Returns kFailedPrecondition if a frozen one requires grad by now.
  absl::Status CheckFrozen() const;

  // Gives every rank what that one has.
  absl::Status Broadcast(int root) const;
  // Writes past the version counters, as batch norm does: a graph that has saved a buffer may still
  // go backward, on each rank. But integers that change are counted: they may be indices, and a
  // backward that has saved some writes where they say, in the tensor or not.
  absl::Status BroadcastBuffers(int root) const;
  bool has_buffers() const { return !buffers_.empty(); }

 private:
  // Returns a line for the settings, and one for each tensor.
  std::string Describe(const std::string& settings) const;
  // Returns "" for a tensor that can be broadcast, or what it is instead.
  std::string WhyNotBroadcast(const at::Tensor& tensor) const;

  const std::shared_ptr<ProcessGroup> group_;
  std::vector<NamedTensor> trained_, frozen_, buffers_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_REPLICATED_TENSORS_H_
