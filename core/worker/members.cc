// What a worker knows and says of the members of its job.
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/status.h"
#include "core/rpc/backoff.h"
#include "core/worker/worker_impl.h"

namespace distgrad {

namespace {

// A call to one who is looked up in the store first. What comes first, of the deadline, a cancel,
// the store's answer and that of the call, says how it ends. Thread-safe.
class CallOfStranger final : public Canceller {
 public:
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
  void End(const absl::StatusOr<Message>& reply) { promise_.Set(reply); }
  const Future<Message>& future() const { return future_; }

 private:
  Future<Message> call() const {
    absl::MutexLock lock(&mu_);
    return call_;
  }

  // Synchronize themselves.
  Promise<Message> promise_;
  const Future<Message> future_ = promise_.future();

  mutable absl::Mutex mu_;
  Future<Message> call_ ABSL_GUARDED_BY(mu_);  // not valid until it is made
};

}  // namespace

Future<Message> Worker::Impl::SendToStranger(std::string name, std::string function, Outgoing call,
                                             CallOptions options, bool wait) {
  options.context = nullptr;  // the call has what it needs of it
  const auto made = std::make_shared<CallOfStranger>();
  const Future<Message> future = made->future();
  future.MadeBy(made, 0, {});
  const Clock::TimerId timer = clock_->At(call.deadline, [made, name] {
    made->End(absl::DeadlineExceededError(
        absl::StrCat("the store has not said in time who worker '", name, "' is")));
  });
  if (options.cancellation != nullptr) {
    const uint64_t watch = options.cancellation->OnCancel([made] { made->Cancel(0); });
    future.Then([cancellation = options.cancellation, watch](const absl::StatusOr<Message>&) {
      cancellation->Forget(watch);
    });
  }
  auto send = [this, made, timer, name, function = std::move(function), call = std::move(call),
               options = std::move(options),
               wait](const absl::StatusOr<WorkerInfo>& found) mutable {
    clock_->Cancel(timer);
    if (made->future().Done()) return;
    absl::Status status = found.ok() ? agent_.Learn(*found) : found.status();
    // The message of this one has the names that are known.
    if (absl::IsNotFound(status)) status = agent_.FindWorker(name).status();
    if (!status.ok()) return made->End(status);
    const Future<Message> sent = Send(found->id, function, std::move(call), options, wait);
    made->GoOnWith(sent);
    sent.Then([made](const absl::StatusOr<Message>& reply) { made->End(reply); });
  };
  lookups_.Find(
      name, [this, made, timer, send = std::move(send)](absl::StatusOr<WorkerInfo> found) mutable {
        // A call may wait for room; the store's thread has others to serve.
        const bool scheduled = pool_.Schedule(
            [send = std::move(send), found = std::move(found)]() mutable { send(found); });
        if (scheduled) return;
        clock_->Cancel(timer);
        made->End(absl::CancelledError("this worker is shutting down"));
      });
  return future;
}

Future<Message> Worker::Impl::CallStranger(std::string name, absl::string_view function,
                                           const Message& message, const CallOptions& options,
                                           bool wait) {
  if (HasDeviceTensors(message.tensors)) {
    return Future<Message>::Of(absl::FailedPreconditionError(absl::StrCat(
        "the devices of worker '", name, "' are not known; call UpdateMembers() first")));
  }
  // Without tensors of devices the packet is the same for whoever gets it. Here and now: what the
  // tensors hold, and their history, may be others when the store has answered.
  absl::StatusOr<Outgoing> call = Prepare(self_.id, function, message, options);
  if (!call.ok()) return Future<Message>::Of(call.status());
  return SendToStranger(std::move(name), std::string(function), *std::move(call), options, wait);
}

std::vector<Member> Worker::Impl::members() const {
  std::vector<Member> members;
  for (const WorkerInfo& worker : agent_.Members()) {
    members.push_back({worker.id, worker.name, worker.incarnation});
  }
  return members;
}

absl::Status Worker::Impl::UpdateMembers() {
  DG_ASSIGN_OR_RETURN(const std::vector<WorkerInfo> all, members_->AllEver());
  for (const WorkerInfo& worker : all) {
    // An entry of a life that is over is older than what we know, and says nothing.
    const absl::Status learned = agent_.Learn(worker);
    if (!learned.ok() && !absl::IsFailedPrecondition(learned)) return learned;
  }
  return absl::OkStatus();
}

absl::Status Worker::Impl::WaitForAll(Deadline deadline) {
  DG_RETURN_IF_ERROR(members_->Barrier(deadline));
  return UpdateMembers();
}

// Calls of a context that this worker takes part in belong to what is under way.
bool Worker::Impl::Refuses(ContextId context) const {
  return leaving_ && (context == 0 || contexts_.Find(context) == nullptr);
}

absl::Status Worker::Impl::LeaveAlone(Deadline deadline) {
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
  const absl::Status said = members_->Leave();
  agent_.SayLeaving();
  BlockingScope blocking;
  Backoff backoff(deadline);
  size_t serving, calls, contexts;
  do {
    if (members_->closed()) {
      return absl::CancelledError(absl::StrCat("worker '", self_.name, "' is shutting down"));
    }
    serving = agent_.served();
    calls = agent_.under_way();
    contexts = contexts_.size();
    if (serving == 0 && calls == 0 && contexts == 0) return said;
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(
      absl::StrCat("worker '", self_.name, "' leaves, and this is not over: ", serving,
                   " calls of others, ", calls, " calls of its own, ", contexts, " contexts"));
}

}  // namespace distgrad
