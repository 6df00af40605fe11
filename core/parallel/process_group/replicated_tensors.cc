// Compares the tensors of the ranks, and gives all of them what one has.
#include "core/parallel/process_group/replicated_tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"
#include "core/parallel/bucket.h"

namespace distgrad {
namespace {

std::vector<NamedTensor> Distinct(const std::vector<NamedTensor>& tensors) {
  std::unordered_set<const void*> known;
  std::vector<NamedTensor> distinct;
  for (const NamedTensor& each : tensors) {
    if (!each.tensor.defined() || !known.insert(each.tensor.unsafeGetTensorImpl()).second) continue;
    distinct.push_back(each);
  }
  return distinct;
}

bool IsDenseLeaf(const at::Tensor& parameter) {
  return parameter.is_leaf() && parameter.layout() == at::kStrided;
}

std::vector<at::Tensor> Tensors(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& each : named) tensors.push_back(each.tensor);
  return tensors;
}

// The text of rank `root`, in place.
absl::Status BroadcastText(ProcessGroup& group, int root, std::string* text) {
  const at::Tensor size =
      at::full({1}, static_cast<int64_t>(text->size()), at::kLong).to(group.device());
  DG_RETURN_IF_ERROR(group.Broadcast({size}, root));
  text->resize(size.item<int64_t>());
  const at::Tensor here =
      at::from_blob(text->data(), {static_cast<int64_t>(text->size())}, at::kByte);
  const at::Tensor bytes = here.to(group.device());
  DG_RETURN_IF_ERROR(group.Broadcast({bytes}, root));
  here.copy_(bytes);
  return absl::OkStatus();
}

}  // namespace

ReplicatedTensors::ReplicatedTensors(std::shared_ptr<ProcessGroup> group,
                                     const std::vector<NamedTensor>& parameters,
                                     const std::vector<NamedTensor>& buffers)
    : group_(std::move(group)), buffers_(Distinct(buffers)) {
  for (NamedTensor& each : Distinct(parameters)) {
    (each.tensor.requires_grad() ? trained_ : frozen_).push_back(std::move(each));
  }
  std::reverse(trained_.begin(), trained_.end());
}

std::string ReplicatedTensors::Describe(const std::string& settings) const {
  std::vector<std::string> lines = {absl::StrCat(settings, ", ", trained_.size(), " parameters, ",
                                                 frozen_.size(), " frozen ones and ",
                                                 buffers_.size(), " buffers")};
  const auto describe = [this, &lines](const char* kind, const NamedTensor& each) {
    lines.push_back(c10::str(kind, " '", each.name, "': ", each.tensor.scalar_type(), " ",
                             each.tensor.sizes(), " on ", each.tensor.device().type()));
    const std::string why_not = WhyNotBroadcast(each.tensor);
    if (!why_not.empty()) absl::StrAppend(&lines.back(), ", ", why_not);
  };
  const auto describe_parameter = [&describe, &lines](const char* kind, const NamedTensor& each) {
    describe(kind, each);
    if (!IsDenseLeaf(each.tensor)) lines.back().append(", not a dense leaf");
  };
  for (const NamedTensor& each : trained_) {
    describe_parameter(each.sparse_gradient ? "sparse parameter" : "parameter", each);
  }
  for (const NamedTensor& each : frozen_) describe_parameter("frozen parameter", each);
  for (const NamedTensor& each : buffers_) describe("buffer", each);
  return absl::StrJoin(lines, "\n");
}

absl::StatusOr<std::string> ReplicatedTensors::Difference(const std::string& settings) const {
  const std::string mine = Describe(settings);
  std::string first = mine;
  DG_RETURN_IF_ERROR(BroadcastText(*group_, 0, &first));
  const std::vector<std::string> here = absl::StrSplit(mine, '\n');
  const std::vector<std::string> there = absl::StrSplit(first, '\n');
  // Lists of different lengths differ in their first line.
  const size_t line =
      std::mismatch(here.begin(), here.end(), there.begin(), there.end()).first - here.begin();
  // By rank, and 0 for all is well.
  const at::Tensor differs =
      at::zeros({group_->size()}, at::TensorOptions(at::kLong).device(group_->device()));
  if (mine != first) differs[group_->rank()].fill_(static_cast<int64_t>(line + 1));
  const std::string what = "comparing parameters";
  DG_ASSIGN_OR_RETURN(const auto running, group_->BeginSum(differs, what));
  DG_RETURN_IF_ERROR(group_->Wait(*running));
  for (int rank = 0; rank < group_->size(); ++rank) {
    const int64_t number = differs[rank].item<int64_t>();
    if (number == 0) continue;
    std::string theirs = here[std::min<size_t>(number, here.size()) - 1];
    DG_RETURN_IF_ERROR(BroadcastText(*group_, rank, &theirs));
    return absl::StrCat("process group '", group_->name(), "': rank ", rank, " has ", theirs,
                        ", and rank 0 has ", there[std::min<size_t>(number, there.size()) - 1]);
  }
  return "";
}

std::string ReplicatedTensors::WhyNotBroadcast(const at::Tensor& tensor) const {
  if (!AssignBuckets({tensor}, 1).front().flat) return "not dense";
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "of elements that share memory";
  }
  const c10::Device device = group_->device();
  if (device.is_cuda() && tensor.device() != device) {
    return c10::str("not on ", device, ", which NCCL has for this group");
  }
  return "";
}

absl::Status ReplicatedTensors::CheckTensors() const {
  for (const std::vector<NamedTensor>* parameters : {&trained_, &frozen_}) {
    for (const NamedTensor& each : *parameters) {
      if (IsDenseLeaf(each.tensor)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", each.name, "' is not a dense leaf; only such are averaged"));
    }
  }
  for (const NamedTensor& each : trained_) {
    if (!each.sparse_gradient || each.tensor.dim() > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "process group '", group_->name(), "': parameter '", each.name,
        "' has no dimensions, and so no rows that a sparse gradient could have; do not mark it "
        "(NamedTensor::sparse_gradient)"));
  }
  for (const std::vector<NamedTensor>* tensors : {&trained_, &frozen_, &buffers_}) {
    for (const NamedTensor& each : *tensors) {
      const std::string why_not = WhyNotBroadcast(each.tensor);
      if (why_not.empty()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "process group '", group_->name(), "': ", tensors == &buffers_ ? "buffer" : "parameter",
          " '", each.name, "' is ", why_not, ": rank 0's cannot be given to all ranks"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReplicatedTensors::CheckFrozen() const {
  for (const NamedTensor& each : frozen_) {
    if (!each.tensor.requires_grad()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "'", each.name, "' was frozen when the averager was made, and now requires grad"));
  }
  return absl::OkStatus();
}

absl::Status ReplicatedTensors::Broadcast(int root) const {
  std::vector<at::Tensor> tensors = Tensors(trained_);
  for (const std::vector<NamedTensor>* more : {&frozen_, &buffers_}) {
    for (const NamedTensor& each : *more) tensors.push_back(each.tensor);
  }
  return group_->Broadcast(tensors, root);
}

absl::Status ReplicatedTensors::BroadcastBuffers(int root) const {
  std::vector<at::Tensor> tensors, before;
  for (const NamedTensor& each : buffers_) {
    const at::Tensor& buffer = each.tensor;
    tensors.push_back(buffer.data());
    const bool counts =
        !buffer.is_floating_point() && !buffer.is_complex() && !buffer.is_inference();
    before.push_back(counts && group_->rank() != root ? buffer.clone() : at::Tensor());
  }
  const absl::Status status = group_->Broadcast(tensors, root);
  for (size_t i = 0; i < before.size(); ++i) {
    if (!before[i].defined() || before[i].equal(tensors[i])) continue;
    buffers_[i].tensor.unsafeGetTensorImpl()->bump_version();
  }
  return status;
}

}  // namespace distgrad
