// Asks for the last context of each member, and reads the answers.
#include "core/worker/last_context.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/base/error_list.h"
#include "core/base/future.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/wire.h"

namespace distgrad {
namespace {

// From one time that somebody is asked until the next: contexts may come, and be refused, much
// faster than members and the store are to be asked.
constexpr absl::Duration kPause = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<Message> ServeLastContext(const ContextRegistry& contexts) {
  Message message;
  WireWriter(&message.payload).U64(contexts.last());
  return message;
}

absl::Duration LastContexts::Patience() const {
  return std::min(parts_.heartbeat_limit, absl::Seconds(5));
}

void LastContexts::ComeBack(absl::Span<const WorkerInfo> ever) {
  parts_.contexts.SetComesBack();
  absl::MutexLock lock(&mu_);
  for (const WorkerInfo& each : ever) {
    // Who has left, or leaves, takes part in no context that is new to it.
    if (each.rank == parts_.self.rank || each.left) continue;
    unheard_.emplace(each.rank, Unheard{.incarnation = each.incarnation});
  }
  stage_ = Stage::kAllAreRefused;
  is_busy_ = true;  // until AskAll() has asked
}

void LastContexts::AskAll(Deadline deadline) {
  std::vector<WorkerRank> members;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [member, unheard] : unheard_) members.push_back(member);
    awaited_ = members.size();
  }
  std::vector<std::string> silent = AskAndWait(members, deadline);
  const auto makers = GoOn(std::min(deadline, Deadline::After(Patience())));
  if (!makers.ok()) {
    silent.push_back(absl::StrCat("the job's store: ", makers.status().message()));
  } else if (!makers->empty()) {
    silent = AskAndWait(*makers, deadline);
  }
  bool all_are_refused;
  {
    absl::MutexLock lock(&mu_);
    all_are_refused = stage_ == Stage::kAllAreRefused;
  }
  if (silent.empty()) return;
  DG_LOG(WARNING) << "worker '" << parts_.self.name << "' (" << parts_.self.rank
                  << ") has come back, and refuses "
                  << (all_are_refused ? "all contexts of other workers" : "contexts of these")
                  << " until they have answered: " << FirstOf(silent);
}

void LastContexts::AskAgain(WorkerRank maker, std::weak_ptr<void> owner) {
  std::vector<WorkerRank> members;
  {
    absl::MutexLock lock(&mu_);
    if (stage_ == Stage::kAllAreRefused) {
      if (is_busy_ || !next_.Passed()) return;
      for (const auto& [member, unheard] : unheard_) members.push_back(member);
      is_busy_ = true;
      next_ = Deadline::After(kPause);
      awaited_ = members.size() + 1;
    } else {
      const auto found = unheard_.find(maker);
      if (found == unheard_.end() || found->second.is_asked) return;
      if (!found->second.next.Passed()) return;
      members.push_back(maker);
      found->second.is_asked = true;
      found->second.next = Deadline::After(kPause);
    }
  }
  Ask(members, owner);
  // Where the store alone has not answered nobody is asked.
  TakeAndGoOn(parts_.self.rank, absl::CancelledError(""), owner);
}

void LastContexts::Stop() { stop_->Cancel(absl::CancelledError("this worker leaves")); }

Future<Message> LastContexts::Call(WorkerRank member, Deadline deadline, bool wait) {
  return parts_.caller.Call(member, kLastContext, Message(),
                            {.deadline = deadline, .cancellation = stop_}, wait);
}

std::vector<std::string> LastContexts::AskAndWait(const std::vector<WorkerRank>& members,
                                                  Deadline deadline) {
  deadline = std::min(deadline, Deadline::After(Patience()));
  std::vector<Future<Message>> calls;
  for (const WorkerRank member : members) calls.push_back(Call(member, deadline, /*wait=*/true));
  std::vector<std::string> silent;
  for (size_t i = 0; i < members.size(); ++i) {
    const Answer last = Read(members[i], calls[i].Take());
    if (!last.ok()) silent.emplace_back(last.status().message());
    Take(members[i], last);
  }
  return silent;
}

void LastContexts::Ask(const std::vector<WorkerRank>& members, const std::weak_ptr<void>& owner) {
  const Deadline deadline = Deadline::After(Patience());
  for (const WorkerRank member : members) {
    try {
      Call(member, deadline, /*wait=*/false)
          .Then([this, owner, member](const absl::StatusOr<Message>& answer) {
            const auto alive = owner.lock();
            if (alive != nullptr) TakeAndGoOn(member, Read(member, answer), owner);
          });
    } catch (const std::bad_alloc&) {
      TakeAndGoOn(member, absl::Status(absl::StatusCode::kResourceExhausted, ""), owner);
    }
  }
}

LastContexts::Answer LastContexts::Read(WorkerRank maker, const absl::StatusOr<Message>& answer) {
  DG_RETURN_IF_ERROR(answer.status());
  WireReader reader(answer->payload);
  const ContextId last = reader.U64();
  DG_RETURN_IF_ERROR(reader.status("the last context of a worker"));
  // It speaks for its own contexts alone.
  if (MakerOf(last) != maker) return absl::InvalidArgumentError("a context of another worker");
  return last;
}

bool LastContexts::Take(WorkerRank member, const Answer& last) {
  absl::MutexLock lock(&mu_);
  const auto found = unheard_.find(member);
  if (found != unheard_.end()) {
    found->second.is_asked = false;
    if (last.ok()) {
      // In the first stage it says only that it knows this incarnation. In the second one it may be
      // a former incarnation that answers, which says nothing of the contexts of the later one.
      const bool is_heard = stage_ != Stage::kMakersAreAsked || parts_.contexts.SetOlder(*last);
      if (is_heard) unheard_.erase(found);
    }
  }
  return stage_ == Stage::kAllAreRefused && --awaited_ == 0;
}

void LastContexts::TakeAndGoOn(WorkerRank member, const Answer& last,
                               const std::weak_ptr<void>& owner) {
  if (!Take(member, last)) return;
  absl::Cleanup is_over = [this] {
    absl::MutexLock lock(&mu_);
    is_busy_ = false;
  };
  if (stop_->cancelled()) return;
  try {
    const bool runs = parts_.lookups.Run([this, owner] {
      // Not twice: others may have been asked meanwhile, whose answers would count for another
      // stage.
      try {
        const auto makers = GoOn(absl::InfinitePast());
        if (makers.ok()) Ask(*makers, owner);
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next refusal does it
      }
    });
    if (runs) std::move(is_over).Cancel();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): so it does then
  }
}

absl::StatusOr<std::vector<WorkerRank>> LastContexts::GoOn(Deadline deadline) {
  const absl::Cleanup is_over = [this] {
    absl::MutexLock lock(&mu_);
    is_busy_ = false;
  };
  bool all_have_answered;
  {
    absl::MutexLock lock(&mu_);
    all_have_answered = unheard_.empty();
  }
  DG_ASSIGN_OR_RETURN(const std::vector<WorkerInfo> ever, parts_.members.AllEver(deadline));
  absl::flat_hash_set<WorkerRank> lost;
  if (!all_have_answered) {
    DG_ASSIGN_OR_RETURN(const Membership::Losses losses, parts_.members.LossesOf(ever));
    for (const Membership::LostMember& member : losses.lost) lost.insert(member.worker.rank);
  }
  // An entry may be that of an incarnation that is over, whose process writes late.
  const auto is_gone = [&](const WorkerInfo& entry, Incarnation incarnation) {
    return (entry.incarnation == incarnation && (entry.left || lost.contains(entry.rank))) ||
           parts_.agent.LossOf(entry.rank, incarnation) != 0;
  };
  std::vector<WorkerRank> silent;
  {
    absl::MutexLock lock(&mu_);
    for (const WorkerInfo& each : ever) {
      const auto found = unheard_.find(each.rank);
      // One that has left takes part in no context that is new to it; one that has come back since
      // has found this incarnation in the store.
      if (found != unheard_.end() && (each.incarnation > found->second.incarnation ||
                                      is_gone(each, found->second.incarnation))) {
        unheard_.erase(found);
      }
    }
    for (const auto& [member, unheard] : unheard_) silent.push_back(member);
  }
  if (!silent.empty()) {
    for (const WorkerRank member : silent) parts_.agent.WatchToo(member);
    return std::vector<WorkerRank>();
  }
  // An entry that was written late hides the incarnation that is there, which may have begun
  // contexts before this worker came back. Counters are not signed: they have more refused, until
  // their makers have answered, and never less.
  DG_ASSIGN_OR_RETURN(const std::vector<int64_t> starts, parts_.members.StartsOf(ever, deadline));
  std::vector<WorkerRank> makers;
  std::vector<ContextId> last;
  absl::flat_hash_map<WorkerRank, Unheard> next;
  for (size_t i = 0; i < ever.size(); ++i) {
    const WorkerInfo& each = ever[i];
    if (each.rank == parts_.self.rank) continue;
    const auto known = parts_.agent.Info(each.rank);
    const Incarnation incarnation =
        known.ok() ? std::max(known->incarnation, each.incarnation) : each.incarnation;
    // Of those who have left, or are lost, most are gone: they are asked when a context of theirs
    // comes.
    // So is one that has no entry yet, or not its own: nobody knows where it is. But a start that
    // was refused has counted, too.
    const Incarnation latest = static_cast<Incarnation>(starts[i]) << 32;
    const bool is_there = !is_gone(each, incarnation) &&
                          (latest <= incarnation || parts_.agent.Hears(each.rank, incarnation));
    if (is_there) makers.push_back(each.rank);
    last.push_back(std::max(LastIdOf(each.rank, incarnation), LastIdOf(each.rank, latest)));
    next.emplace(each.rank, Unheard{.incarnation = incarnation,
                                    .is_asked = is_there,
                                    .next = is_there ? Deadline::After(kPause)
                                                     : Deadline(absl::InfinitePast())});
  }
  absl::MutexLock lock(&mu_);
  // Whoever comes after that begins all contexts of its own later than this.
  parts_.contexts.SetMayBeOlder(last);
  unheard_ = std::move(next);
  stage_ = Stage::kMakersAreAsked;
  return makers;
}

}  // namespace distgrad
