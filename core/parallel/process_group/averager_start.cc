// How an averager begins: what its ranks have to agree on.
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
#include "core/autograd/context_record.h"
#include "core/base/status.h"
#include "core/parallel/process_group/gradient_averager_impl.h"

namespace distgrad {
namespace {

std::vector<NamedTensor> Distinct(std::vector<NamedTensor> tensors) {
  std::unordered_set<const void*> known;
  std::vector<NamedTensor> distinct;
  for (NamedTensor& each : tensors) {
    if (!each.tensor.defined() || !known.insert(each.tensor.unsafeGetTensorImpl()).second) continue;
    distinct.push_back(std::move(each));
  }
  return distinct;
}

// Gradients come in the reverse order, more or less.
std::vector<AveragingPlan::Parameter> Trained(const std::vector<NamedTensor>& parameters) {
  std::vector<AveragingPlan::Parameter> trained;
  for (auto each = parameters.rbegin(); each != parameters.rend(); ++each) {
    if (!each->tensor.requires_grad()) continue;
    trained.push_back({each->name, each->tensor, each->sparse_gradient});
  }
  return trained;
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

GradientAverager::Impl::Impl(std::shared_ptr<ProcessGroup> group,
                             std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                             const AveragerOptions& options)
    : group_(std::move(group)),
      options_(options),
      buffers_(std::move(buffers)),
      plan_(group_, Trained(parameters), options.bucket_bytes, options.first_bucket_bytes,
            options.divide_by_active),
      touched_(plan_.parameters().size(), false),
      seen_(plan_.parameters().size()) {
  for (size_t k = 0; k < plan_.parameters().size(); ++k) {
    numbers_.emplace(plan_.parameters()[k].tensor.unsafeGetTensorImpl(), k);
  }
  for (NamedTensor& each : parameters) {
    if (!each.tensor.requires_grad()) frozen_.push_back(std::move(each));
  }
}

std::string GradientAverager::Impl::Describe() const {
  std::vector<std::string> lines = {
      absl::StrCat("buckets of ", options_.bucket_bytes, " bytes, the first of ",
                   options_.first_bucket_bytes, ", ", plan_.parameters().size(), " parameters, ",
                   frozen_.size(), " frozen ones and ", buffers_.size(), " buffers",
                   options_.divide_by_active ? ", divided by the active ranks" : "")};
  const auto describe = [&lines](const char* kind, const std::string& name,
                                 const at::Tensor& tensor) {
    lines.push_back(c10::str(kind, " '", name, "': ", tensor.scalar_type(), " ", tensor.sizes(),
                             " on ", tensor.device().type()));
  };
  for (const auto& each : plan_.parameters()) {
    describe(each.sparse_gradient ? "sparse parameter" : "parameter", each.name, each.tensor);
  }
  for (const NamedTensor& each : frozen_) describe("frozen parameter", each.name, each.tensor);
  for (const NamedTensor& each : buffers_) describe("buffer", each.name, each.tensor);
  return absl::StrJoin(lines, "\n");
}

absl::Status GradientAverager::Impl::Agree() {
  const std::string mine = Describe();
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
    return absl::InvalidArgumentError(
        absl::StrCat("process group '", group_->name(), "': rank ", rank, " has ", theirs,
                     ", and rank 0 has ", there[std::min<size_t>(number, there.size()) - 1]));
  }
  return absl::OkStatus();
}

absl::Status GradientAverager::Impl::BroadcastState(int root) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : plan_.parameters()) tensors.push_back(each.tensor);
  for (const NamedTensor& each : frozen_) tensors.push_back(each.tensor);
  for (const NamedTensor& each : buffers_) tensors.push_back(each.tensor);
  return group_->Broadcast(tensors, root);
}

absl::StatusOr<std::unique_ptr<GradientAverager>> GradientAverager::Create(
    std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
    std::vector<NamedTensor> buffers, AveragerOptions options) {
  if (group == nullptr) return absl::InvalidArgumentError("an averager needs a process group");
  parameters = Distinct(std::move(parameters));
  for (const NamedTensor& each : parameters) {
    if (each.tensor.is_leaf() && each.tensor.layout() == at::kStrided) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter '", each.name, "' is not a dense leaf; only such are averaged"));
  }
  const auto impl = std::make_shared<Impl>(std::move(group), std::move(parameters),
                                           Distinct(std::move(buffers)), options);
  DG_RETURN_IF_ERROR(impl->Agree());
  DG_RETURN_IF_ERROR(impl->BroadcastState(0));
  if (options.in_backward) impl->AddHooks();
  return std::unique_ptr<GradientAverager>(new GradientAverager(impl));
}

GradientAverager::GradientAverager(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
GradientAverager::~GradientAverager() {
  impl_->RemoveHooks();
  impl_->OnAveragerEnd();
}

GradientAverager::NoSync::NoSync(GradientAverager& averager) : averager_(averager) {
  averager_.impl_->AddToNoSync(1);
}
GradientAverager::NoSync::~NoSync() { averager_.impl_->AddToNoSync(-1); }

absl::Status GradientAverager::Average() { return impl_->Average(); }
absl::Status GradientAverager::Average(ContextRecord& context) { return impl_->Average(context); }
absl::Status GradientAverager::AverageInBackward(ContextRecord& context) {
  return impl_->AverageInBackward(context);
}
absl::StatusOr<bool> GradientAverager::Join(JoinOptions options) { return impl_->Join(options); }
absl::StatusOr<bool> GradientAverager::Join(ContextRecord& context, JoinOptions options) {
  return impl_->Join(context, options);
}

}  // namespace distgrad
