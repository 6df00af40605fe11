// Finds, makes and drops communicators.
#include "core/parallel/nccl/nccl_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// Between two polls of whether all have left: what holds one up may hold its mutex, too.
constexpr absl::Duration kLeaveInterval = absl::Microseconds(100);

}  // namespace

absl::StatusOr<std::shared_ptr<NcclCommunicators>> NcclPool::Get(
    const std::vector<c10::Device>& devices, absl::Duration timeout) {
  List dropped;  // ends when the turn was given back: what runs on devices is waited for
  if (auto known = Find(devices, &dropped)) return known;
  DG_RETURN_IF_ERROR(
      order_->TakeTurn(absl::StrCat(NcclCommunicators::NameOf(devices), ": setting up"), timeout));
  const absl::Cleanup give_turn = [this] { order_->GiveTurn(); };
  // Another thread may have had it before, for the same ones.
  if (auto known = Find(devices, &dropped)) return known;
  DG_ASSIGN_OR_RETURN(auto made,
                      NcclCommunicators::Create(devices, timeout, platform_, order_, clock_));
  absl::MutexLock lock(&mu_);
  if (left_) made->TryLeave();  // there is nothing yet that it could wait for
  known_.push_front(made);
  dropped.splice(dropped.end(), Superfluous());
  return made;
}

void NcclPool::Leave(Deadline deadline) {
  List staying;
  {
    absl::MutexLock lock(&mu_);
    left_ = true;
    staying = known_;
  }
  // One that stands still holds up no other.
  const auto leaves = [](const auto& communicators) { return communicators->TryLeave(); };
  while (true) {
    staying.remove_if(leaves);
    if (staying.empty() || deadline.Passed()) return;
    absl::SleepFor(kLeaveInterval);
  }
}

std::shared_ptr<NcclCommunicators> NcclPool::Find(const std::vector<c10::Device>& devices,
                                                  List* dropped) {
  const auto is_it = [&](const auto& communicators) { return communicators->devices() == devices; };
  std::shared_ptr<NcclCommunicators> found;
  {
    absl::MutexLock lock(&mu_);
    const auto known = std::find_if(known_.begin(), known_.end(), is_it);
    if (known == known_.end()) return nullptr;
    known_.splice(known_.begin(), known_, known);
    found = known_.front();
  }
  // Not with mu_ held: it waits for an abort, in which the driver may stand still.
  if (found->status().ok()) return found;
  absl::MutexLock lock(&mu_);
  known_.remove(found);
  dropped->push_back(std::move(found));
  return nullptr;
}

NcclPool::List NcclPool::Superfluous() {
  List superfluous;
  size_t kept = 0;
  for (auto each = known_.begin(); each != known_.end();) {
    const auto next = std::next(each);
    const bool idle = each->use_count() == 1;
    // Whoever gets the newest may soon leave it.
    if (idle || each == known_.begin()) ++kept;
    if (idle && kept > kMostIdle) superfluous.splice(superfluous.end(), known_, each);
    each = next;
  }
  return superfluous;
}

}  // namespace distgrad
