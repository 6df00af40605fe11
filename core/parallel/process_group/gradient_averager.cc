// Creates what an averager is made of, and forwards to it.
#include "core/parallel/process_group/gradient_averager.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/parallel/process_group/averaging_plan.h"
#include "core/parallel/process_group/averaging_sequence.h"
#include "core/parallel/process_group/context_averager.h"
#include "core/parallel/process_group/hook_averager.h"
#include "core/parallel/process_group/replicated_tensors.h"

namespace distgrad {

// In the order in which they depend on each other.
struct GradientAverager::Parts {
  Parts(const std::shared_ptr<ProcessGroup>& group, ReplicatedTensors all,
        const GradientAveragerOptions& options)
      : tensors(std::move(all)),
        plan(group, tensors.trained(), options.bucket_bytes, options.first_bucket_bytes,
             options.divide_by_active),
        sequence(group, plan, tensors),
        contexts(plan, sequence),
        hooks(plan, sequence, options.in_backward) {}

  const uint64_t number = RandomNumber();
  const ReplicatedTensors tensors;
  const AveragingPlan plan;
  AveragingSequence sequence;
  ContextAverager contexts;
  HookAverager hooks;
};

absl::StatusOr<std::unique_ptr<GradientAverager>> GradientAverager::Create(
    std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
    std::vector<NamedTensor> buffers, GradientAveragerOptions options) {
  constexpr char kWhat[] = "making an averager of gradients";
  if (group == nullptr) return absl::InvalidArgumentError("an averager needs a process group");
  DG_RETURN_IF_ERROR(group->MayBegin(kWhat));
  std::shared_ptr<Parts> parts;
  absl::Status wrong;  // of the arguments: the group goes on
  DG_RETURN_IF_ERROR(group->RunForOthers(kWhat, [&]() -> absl::Status {
    ReplicatedTensors tensors(group, parameters, buffers);
    DG_ASSIGN_OR_RETURN(const std::string difference,
                        tensors.Difference(absl::StrCat(
                            "buckets of ", options.bucket_bytes, " bytes, the first of ",
                            options.first_bucket_bytes,
                            options.divide_by_active ? ", divided by the active ranks" : "")));
    wrong = difference.empty() ? tensors.CheckTensors() : absl::InvalidArgumentError(difference);
    if (!wrong.ok()) return absl::OkStatus();
    DG_RETURN_IF_ERROR(tensors.Broadcast(0));
    parts = std::make_shared<Parts>(group, std::move(tensors), options);
    if (options.in_backward) {
      parts->hooks.AddHooks(std::shared_ptr<HookAverager>(parts, &parts->hooks));
    }
    return absl::OkStatus();
  }));
  DG_RETURN_IF_ERROR(wrong);
  return std::unique_ptr<GradientAverager>(new GradientAverager(parts));
}

GradientAverager::GradientAverager(std::shared_ptr<Parts> parts) : parts_(std::move(parts)) {}
GradientAverager::~GradientAverager() {
  parts_->hooks.Close();
  parts_->contexts.Close();
}

bool GradientAverager::Averages(const at::Tensor& tensor) const {
  return parts_->contexts.Averages(tensor);
}

GradientAverager::NoSync::NoSync(GradientAverager& averager) : averager_(averager) {
  averager_.parts_->hooks.AddToNoSync(1);
}
GradientAverager::NoSync::~NoSync() { averager_.parts_->hooks.AddToNoSync(-1); }

absl::Status GradientAverager::Average() { return parts_->hooks.Average(); }
absl::Status GradientAverager::Average(ContextRecord& context) {
  return parts_->contexts.Average(context);
}
absl::Status GradientAverager::AverageInBackward(ContextRecord& context) {
  return parts_->contexts.AverageInBackward(
      context, std::shared_ptr<ContextAverager>(parts_, &parts_->contexts));
}
absl::StatusOr<bool> GradientAverager::Join(JoinOptions options) {
  return parts_->hooks.Join(options.keep_gradients);
}
absl::StatusOr<bool> GradientAverager::Join(ContextRecord& context, JoinOptions options) {
  return parts_->contexts.Join(context, options.keep_gradients);
}
void GradientAverager::Fail(const absl::Status& why) { parts_->plan.group().Fail(why); }
uint64_t GradientAverager::number() const { return parts_->number; }

}  // namespace distgrad
