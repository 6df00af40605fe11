// Guards what averages do, and follows which ranks are active.
#include "core/parallel/process_group/averaging_sequence.h"

#include <c10/core/InferenceMode.h>

#include <optional>

#include "core/base/status.h"

namespace distgrad {
namespace {

constexpr char kWhat[] = "averaging gradients";

}  // namespace

absl::Status AveragingSequence::MayBegin() {
  return group_->status().ok() ? group_->MayBegin(kWhat) : absl::OkStatus();
}

absl::Status AveragingSequence::Run(absl::FunctionRef<absl::Status()> part) {
  // Backwards add to what it leaves, in any mode.
  std::optional<c10::InferenceMode> off;
  if (c10::InferenceMode::is_enabled()) off.emplace(false);
  const absl::Status status = group_->RunForOthers(kWhat, part);
  if (!status.ok()) {
    for (Driver* driver : drivers_) driver->Drop();
  }
  return status;
}

absl::Status AveragingSequence::GiveUpOthers(const Driver* driver) {
  for (Driver* other : drivers_) {
    if (other != driver) DG_RETURN_IF_ERROR(other->GiveUp());
  }
  return absl::OkStatus();
}

absl::Status AveragingSequence::EndRound(AveragingRound& round) {
  DG_ASSIGN_OR_RETURN(active_, round.Active());
  if (tensors_.has_buffers()) DG_RETURN_IF_ERROR(tensors_.BroadcastBuffers(LowestActive()));
  return tensors_.CheckFrozen();
}

absl::StatusOr<bool> AveragingSequence::AnyActive(AveragingRound& round) {
  DG_ASSIGN_OR_RETURN(const at::Tensor active, round.Active());
  if (active.gt(0).any().item<bool>()) return true;
  DG_RETURN_IF_ERROR(tensors_.Broadcast(LowestActive()));
  return false;
}

int AveragingSequence::LowestActive() const {
  return active_.defined() ? active_.gt(0).to(at::kInt).argmax().item<int>() : 0;
}

}  // namespace distgrad
