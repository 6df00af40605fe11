// What a worker knows and says of the members of its job.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"
#include "core/worker/worker_impl.h"

namespace distgrad {

namespace {

// A call to one who is looked up in the store first. What comes first, of the deadline, a cancel,
// the store's answer and that of the call, says how it ends. Thread-safe.
class UnresolvedCall final : public Canceller {
 public:
  explicit UnresolvedCall(WorkerId self) : self_(self) {}

  // Cancels the call, or keeps it from being made.
  void Cancel(uint64_t) override {
    const Future<Message> call = this->call();
    if (call.valid()) return call.Cancel();
    End(absl::CancelledError("it was cancelled by its caller"));
  }
  // The store's answer is here, and the call is made.
  void GoOnWith(Future<Message> call) {
    {
      absl::MutexLock lock(&mu_);
      call_ = call;
    }
    if (future_.Done()) call.Cancel();
  }
  void End(const absl::StatusOr<Message>& reply) {
    if (reply.ok()) {
      promise_.Set(reply);
    } else {
      promise_.Set(WithOrigin(reply.status(), {self_, ErrorOrigin::By::kDistgrad}));
    }
  }
  const Future<Message>& future() const { return future_; }

 private:
  Future<Message> call() const {
    absl::MutexLock lock(&mu_);
    return call_;
  }

  const WorkerId self_;

  // Synchronize themselves.
  Promise<Message> promise_;
  const Future<Message> future_ = promise_.future();

  mutable absl::Mutex mu_;
  Future<Message> call_ ABSL_GUARDED_BY(mu_);  // not valid until it is made
};

}  // namespace

Future<Message> Worker::Impl::SendToUnresolved(std::string name, Outgoing call, CallOptions options,
                                               bool wait) {
  options.context = nullptr;  // the call has what it needs of it
  const auto unresolved = std::make_shared<UnresolvedCall>(self_.id);
  const Future<Message> future = unresolved->future();
  future.MadeBy(unresolved, 0, {});
  const Clock::TimerId timer = clock_->At(call.deadline, [unresolved, name] {
    unresolved->End(absl::DeadlineExceededError(
        absl::StrCat("the store has not said in time who worker '", name, "' is")));
  });
  if (options.cancellation != nullptr) {
    const uint64_t watch = options.cancellation->OnCancel([unresolved] { unresolved->Cancel(0); });
    future.Then([cancellation = options.cancellation, watch](const absl::StatusOr<Message>&) {
      cancellation->Forget(watch);
    });
  }
  const absl::Duration call_time = call.deadline - clock_->Now();
  auto send = [this, unresolved, timer, name, call = std::move(call), options = std::move(options),
               wait](const absl::StatusOr<WorkerInfo>& found) mutable {
    clock_->Cancel(timer);
    if (unresolved->future().Done()) return;
    absl::Status status = found.ok() ? agent_->Learn(*found) : found.status();
    // The message of this one has the names that are known.
    if (absl::IsNotFound(status)) status = agent_->FindWorker(name).status();
    if (!status.ok()) return unresolved->End(status);
    const Future<Message> sent = Send(found->id, std::move(call), options, wait);
    unresolved->GoOnWith(sent);
    sent.Then([unresolved](const absl::StatusOr<Message>& reply) { unresolved->End(reply); });
  };
  // On this clock's time the call ends; so that of the look-up need not be exact.
  lookups_.Find(
      name, Deadline::After(call_time),
      [this, unresolved, timer, send = std::move(send)](absl::StatusOr<WorkerInfo> found) mutable {
        // A call may wait for room; the store's thread has others to serve.
        const bool scheduled = pool_.Schedule(
            [send = std::move(send), found = std::move(found)]() mutable { send(found); });
        if (scheduled) return;
        clock_->Cancel(timer);
        unresolved->End(absl::CancelledError("this worker is shutting down"));
      });
  return future;
}

Future<Message> Worker::Impl::CallUnresolved(std::string name, absl::string_view function,
                                             const Message& message, const CallOptions& options,
                                             bool wait) {
  if (HasDeviceTensors(message.tensors)) {
    return Failed(absl::FailedPreconditionError(absl::StrCat(
        "the devices of worker '", name, "' are not known; call UpdateMembers() first")));
  }
  // Without tensors of devices the packet is the same for whoever gets it. Here and now: what the
  // tensors hold, and their history, may be others when the store has answered.
  absl::StatusOr<Outgoing> call = Prepare(self_.id, function, message, options);
  if (!call.ok()) {
    return Failed(
        Annotate(call.status(), absl::StrCat("call of '", function, "' on worker '", name, "'")));
  }
  return SendToUnresolved(std::move(name), *std::move(call), options, wait);
}

std::vector<Member> Worker::Impl::members() const {
  std::vector<Member> members;
  for (const WorkerInfo& worker : agent_->Members()) {
    members.push_back({worker.id, worker.name, worker.incarnation});
  }
  return members;
}

absl::Status Worker::Impl::UpdateMembers(Deadline deadline) {
  const BlockingScope blocking;
  DG_ASSIGN_OR_RETURN(const std::vector<WorkerInfo> all, members_->AllEver(deadline));
  return LearnAll(all);
}

absl::Status Worker::Impl::LearnAll(const std::vector<WorkerInfo>& all) {
  for (const WorkerInfo& worker : all) {
    // An entry of an incarnation that is over is older than what we know, and says nothing.
    const absl::Status learned = agent_->Learn(worker);
    if (!learned.ok() && !absl::IsFailedPrecondition(learned)) return learned;
  }
  return absl::OkStatus();
}

absl::Status Worker::Impl::Barrier(Deadline deadline, OnLostMember on_lost) {
  const BlockingScope blocking;
  return NameTheStore(
      members_->Barrier(deadline, on_lost, [&] { return UpdateMembers(deadline); }));
}

absl::Status Worker::Impl::CheckMayLeave() const {
  if (!pool_.OnThisPool()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("worker '", self_.name,
                   "' cannot leave in a handler or a callback of its own, for it waits for those"));
}

// When all are there, no user's thread makes a call any more; handlers may. When then each has seen
// its calls end, in either direction, none of those makes one either.
absl::Status Worker::Impl::Shutdown(Deadline deadline, OnLostMember on_lost) {
  DG_RETURN_IF_ERROR(CheckMayLeave());
  BlockingScope blocking;
  DG_RETURN_IF_ERROR(NameTheStore(members_->Shutdown(
      deadline, on_lost, [&] { return AwaitIdle(deadline, /*contexts=*/false); })));
  agent_->StopWatching();
  return absl::OkStatus();
}

absl::Status Worker::Impl::NameTheStore(const absl::Status& status) {
  if (!worker0_serves_store_ || self_.id == 0 || !absl::IsUnavailable(status)) return status;
  const absl::Status store = members_->Changes().status();
  if (!absl::IsUnavailable(store) && !absl::IsDeadlineExceeded(store)) return status;
  return absl::UnavailableError(absl::StrCat(
      status.message(), "; worker ", agent_->Describe(0), ", which serves the job's store, ",
      absl::IsUnavailable(store) ? "is gone" : "does not answer"));
}

absl::Status Worker::Impl::AwaitIdle(Deadline deadline, bool contexts) {
  Backoff backoff(deadline);
  size_t serving, calls, of_contexts;
  do {
    if (members_->closed()) {
      return absl::CancelledError(absl::StrCat("worker '", self_.name, "' is shutting down"));
    }
    serving = agent_->served();
    calls = agent_->in_flight();
    of_contexts = contexts ? contexts_.size() : 0;
    if (serving == 0 && calls == 0 && of_contexts == 0) return absl::OkStatus();
  } while (backoff.Sleep());
  std::string left =
      absl::StrCat("worker '", self_.name, "' leaves, and this is not over: ", serving,
                   " calls of others, ", calls, " calls of its own");
  if (contexts) absl::StrAppend(&left, ", ", of_contexts, " contexts");
  return absl::DeadlineExceededError(left);
}

// Of one that cannot be reached the store says whether it has left, or come back elsewhere. A store
// that is silent says nothing: this worker may be the one that is cut off. Then it is asked again,
// with the agent's next attempt; but not where both are silent, the store and who serves it.
void Worker::Impl::OnUnreachable(WorkerId peer, Incarnation incarnation, const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (!asked_for_.insert(peer).second) return;
  }
  lookups_.Find(
      peer, absl::Seconds(5),
      [this, peer, incarnation, why](const absl::StatusOr<WorkerInfo>& found) {
        {
          absl::MutexLock lock(&mu_);
          asked_for_.erase(peer);
        }
        // When all have finished, the others end one by one, and with them the store.
        if (members_->finished() && self_.id != 0) return;
        const std::string reason(why.message());
        if (found.ok()) {
          agent_->Learn(*found).IgnoreError();  // of an incarnation that is over, say
          if (found->left || found->incarnation != incarnation) return;
          members_->MarkLost(*found, reason);
        } else if (peer == 0 && worker0_serves_store_ && absl::IsDeadlineExceeded(found.status())) {
          misses_store_ = true;
        } else if (!absl::IsUnavailable(found.status())) {
          return;
        }
        agent_->SetLost(peer, incarnation, reason);
      });
}

// Where a connection broke, its other end may take this worker for lost.
void Worker::Impl::OnPeerLost(WorkerId peer, const absl::Status& why) {
  engine_.OnPeerLost(peer, why);
  if (options_.heartbeat_limit == absl::InfiniteDuration() || losses_to_deny_++ > 0) return;
  RunLater(options_.heartbeat_limit, &deny_timer_, &Impl::DenyLossLater);
}

void Worker::Impl::DenyLossLater() {
  const int seen = losses_to_deny_;
  const bool is_silent = absl::IsDeadlineExceeded(members_->DenyLoss());
  // Of a connection that broke meanwhile the other end may speak yet.
  if (!is_silent && losses_to_deny_.fetch_sub(seen) == seen) return;
  RunLater(options_.heartbeat_limit, &deny_timer_, &Impl::DenyLossLater);
}

void Worker::Impl::RunLater(absl::Duration wait, std::optional<Clock::TimerId>* timer,
                            void (Impl::*task)()) {
  absl::MutexLock lock(&mu_);
  if (joined_) return;  // which cancels the timers, so none of them outlives this
  *timer = clock_->At(clock_->Now() + wait,
                      [this, task] { lookups_.Run([this, task] { (this->*task)(); }); });
}

void Worker::Impl::OnMember(MemberCallback::Function callback) {
  const bool wanted = callback != nullptr;
  member_callback_.Set(std::move(callback));
  if (wanted && !follows_members_.exchange(true)) {
    lookups_.Run([this] { FollowMembers(); });
  }
}

void Worker::Impl::FollowMembers() {
  constexpr absl::Duration kPause = absl::Seconds(1);
  if (!member_callback_.is_set()) {
    follows_members_ = false;
    // Another may have been set before it was seen that this ends.
    if (!member_callback_.is_set() || follows_members_.exchange(true)) return;
  }
  ReadMembers();
  RunLater(kPause, &follow_timer_, &Impl::FollowMembers);
}

// Nobody can write to the store that the worker that serves it is lost.
void Worker::Impl::MissStore(const absl::Status& why) {
  if (!worker0_serves_store_ || self_.id == 0 || members_->finished()) return;
  if (absl::IsUnavailable(why))
    return agent_->WatchToo(0);  // it has ended, as that one has, or will
  if (store_has_until_.is_never()) {
    store_has_until_ = Deadline::After(options_.heartbeat_limit);
  } else if (store_has_until_.Passed()) {
    misses_store_ = true;
    const absl::StatusOr<WorkerInfo> worker0 = agent_->Info(0);
    if (worker0.ok()) agent_->SetLost(0, worker0->incarnation, why.message());
  }
}

void Worker::Impl::ReadMembers() {
  const absl::StatusOr<int64_t> changes = members_->Changes();
  if (!changes.ok()) return MissStore(changes.status());
  store_has_until_ = Deadline::Never();
  if (misses_store_.exchange(false)) {
    if (const auto worker0 = agent_->Info(0); worker0.ok())
      agent_->SetAlive(0, worker0->incarnation);
  }
  if (*changes == changes_) return;
  const absl::StatusOr<std::vector<WorkerInfo>> all = members_->AllEver(absl::InfinitePast());
  if (!all.ok() || !LearnAll(*all).ok()) return;
  const absl::StatusOr<Membership::Losses> losses = members_->LossesOf(*all);
  if (!losses.ok()) return;
  for (const Membership::LostMember& member : losses->lost) {
    agent_->SetLost(member.worker.id, member.worker.incarnation, member.reason);
  }
  for (const WorkerInfo& member : losses->denied) agent_->SetAlive(member.id, member.incarnation);
  changes_ = *changes;
}

// Calls of a context that this worker takes part in belong to what is in flight.
bool Worker::Impl::Refuses(ContextId context) const {
  return leaving_ && (context == 0 || contexts_.Find(context) == nullptr);
}

absl::Status Worker::Impl::Leave(Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckMayLeave());
  if (serves_store_) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", self_.name,
                     "' serves the job's store, and cannot leave while the job goes on"));
  }
  if (leaving_.exchange(true)) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", self_.name, "' is leaving already"));
  }
  // Who is not connected learns it from the store when it connects.
  const absl::Status said = members_->Leave(deadline);
  agent_->SayLeaving();
  BlockingScope blocking;
  DG_RETURN_IF_ERROR(AwaitIdle(deadline, /*contexts=*/true));
  agent_->StopWatching();
  return said;
}

}  // namespace distgrad
