// Prepares and sends calls, also to workers that the store has to find, and takes their answers.
#include "core/worker/caller.h"

#include <new>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/context_record.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/rpc/call_error.h"
#include "core/rpc/frame.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

std::string Quoted(absl::string_view name) { return absl::StrCat("'", name, "'"); }

// A call to one who is looked up in the store first. What comes first, of the deadline, a cancel,
// the store's answer and that of the call, says how it ends. Thread-safe.
class UnresolvedCall final : public Canceller {
 public:
  UnresolvedCall(WorkerRank self, std::string function, std::string worker)
      : self_(self), function_(std::move(function)), worker_(std::move(worker)) {}

  // Cancels the call, or keeps it from being made.
  void Cancel(uint64_t) override {
    const Future<Message> call = this->call();
    if (call.valid()) return call.Cancel();
    Fail(absl::CancelledError("it was cancelled by its caller"));
    // It may have been made meanwhile, by a thread that did not see that yet.
    if (const Future<Message> made = this->call(); made.valid()) made.Cancel();
  }
  // The store's answer is here, and the call is made.
  void GoOnWith(Future<Message> call) {
    {
      absl::MutexLock lock(&mu_);
      call_ = call;
    }
    if (future_.Done()) call.Cancel();
  }
  // The call has ended.
  void End(const absl::StatusOr<Message>& reply) {
    if (reply.ok()) {
      promise_.Set(reply);
    } else {
      promise_.Set(Originated(reply.status()));
    }
  }
  // It was not made. Whoever waits hears of it also where there is no memory for the names.
  void Fail(const absl::Status& why) {
    absl::Status error = why;
    try {
      error = Originated(CallError(why, function_, Quoted(worker_)));
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it says less, then
    }
    promise_.Set(error);
  }
  const Future<Message>& future() const { return future_; }

 private:
  absl::Status Originated(const absl::Status& error) const {
    return WithOrigin(error, {self_, ErrorOrigin::By::kDistgrad});
  }
  Future<Message> call() const {
    absl::MutexLock lock(&mu_);
    return call_;
  }

  // Constant after construction.
  const WorkerRank self_;
  const std::string function_, worker_;

  // Synchronize themselves.
  Promise<Message> promise_;
  const Future<Message> future_ = promise_.future();

  mutable absl::Mutex mu_;
  Future<Message> call_ ABSL_GUARDED_BY(mu_);  // not valid until it is made
};

}  // namespace

absl::StatusOr<WorkerRank> Caller::Find(WorkerRef worker) const {
  return worker.by_rank() ? parts_.agent.FindWorker(worker.rank())
                          : parts_.agent.FindWorker(worker.name());
}

absl::StatusOr<Caller::Outgoing> Caller::Prepare(WorkerRank to, absl::string_view function,
                                                 const Message& message,
                                                 const CallOptions& options) {
  if (function.empty() || function.size() > kMaxFunctionName) {
    return absl::InvalidArgumentError(absl::StrCat("a function's name has 1 to ", kMaxFunctionName,
                                                   " bytes, not ", function.size()));
  }
  if (options.context != nullptr && !options.context->valid()) {
    return absl::FailedPreconditionError("the context of the call is not valid");
  }
  // Gradients would come to this worker, and be waited for at the other; and nobody would release
  // the context of the handler.
  if (options.context != nullptr && !options.context->IsOf(parts_.owner)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "context ", options.context->id(), " is of another worker than worker '", parts_.self.name,
        "', which makes the call; use the worker that made the context, or in a handler the "
        "context of its request"));
  }
  Outgoing call;
  if (options.context != nullptr) call.context = options.context->record();
  if (options.deadline == absl::InfinitePast()) {
    call.deadline = parts_.clock.Now() + parts_.timeout;
  } else if (options.deadline.Passed()) {
    return absl::DeadlineExceededError("the deadline has passed already");
  } else {
    call.deadline = parts_.clock.TimeOf(options.deadline);
  }
  if (options.cancellation != nullptr && options.cancellation->cancelled()) {
    return options.cancellation->why();
  }
  call.request = Agent::NewRequest(function);
  try {
    call.header.modes = CallModes::Current();
    DG_ASSIGN_OR_RETURN(call.body, parts_.messages.Encode(call.header, call.context, to, message,
                                                          &call.request.packet));
    call.send = CallMessages::MakeSend(call.header, message);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return call;
}

Future<Message> Caller::Send(WorkerRank to, Outgoing call, const CallOptions& options, bool wait) {
  const absl::StatusOr<EdgeId> edge =
      parts_.messages.Record(call.context, to, std::move(call.send), /*of_operator=*/false,
                             call.body, &call.request.packet);
  if (!edge.ok())
    return Failed(CallError(edge.status(), call.request.function, parts_.agent.Describe(to)));
  // Where there is no memory for what follows. A backward would wait for a gradient of what nobody
  // has sent.
  absl::Cleanup drop = [this, &edge, context = call.context] {
    if (*edge != 0) parts_.engine.DropSend(*context, *edge);
  };
  Promise<Message> promise;
  const Future<Message> future = promise.future();
  // What needs memory comes before the call, so that none is in flight without its future.
  if (options.cancellation != nullptr) {
    const uint64_t watch = options.cancellation->OnCancel([future] { future.Cancel(); });
    future.Then([cancellation = options.cancellation, watch](const absl::StatusOr<Message>&) {
      cancellation->ForgetWithoutWaiting(watch);
    });
  }
  const CallTerms terms{.deadline = call.deadline,
                        .wait_for_credit = wait,
                        .cancellation = options.cancellation.get(),
                        .context = call.header.context};
  const uint64_t number = parts_.agent.Call(
      to, std::move(call.request), terms,
      [this, context = std::move(call.context), to, edge = *edge, promise = std::move(promise)](
          absl::StatusOr<Body> reply, bool has_left) mutable {
        if (reply.ok()) {
          absl::StatusOr<Message> message = TakeReply(context, to, *reply);
          if (!message.ok()) message = OwnError(message.status());
          promise.Set(std::move(message));
          return;
        }
        // Nobody will send a gradient for what nobody has got.
        if (edge != 0 && !has_left) parts_.engine.DropSend(*context, edge);
        promise.Set(OwnError(reply.status()));
      });
  std::move(drop).Cancel();
  if (number == 0) return future;
  future.MadeBy(parts_.agent.canceller(), number, parts_.loop);
  // A cancel before that has not reached the call.
  if (options.cancellation != nullptr && options.cancellation->cancelled()) future.Cancel();
  return future;
}

Future<Message> Caller::Call(WorkerRef to, absl::string_view function, const Message& message,
                             const CallOptions& options, bool wait) {
  const absl::StatusOr<WorkerRank> rank = Find(to);
  if (!rank.ok()) {
    if (to.name().empty()) return Failed(rank.status());
    return CallUnresolved(std::string(to.name()), function, message, options, wait);
  }
  absl::StatusOr<Outgoing> call = Prepare(*rank, function, message, options);
  if (!call.ok()) return Failed(CallError(call.status(), function, parts_.agent.Describe(*rank)));
  return Send(*rank, *std::move(call), options, wait);
}

Future<Message> Caller::SendToUnresolved(std::string name, Outgoing call, CallOptions options,
                                         bool wait) {
  options.context = nullptr;  // the call has what it needs of it
  const auto unresolved =
      std::make_shared<UnresolvedCall>(parts_.self.rank, call.request.function, name);
  const Future<Message> future = unresolved->future();
  future.MadeBy(unresolved, 0, {});
  const Clock::TimerId timer = parts_.clock.At(call.deadline, [unresolved] {
    unresolved->Fail(absl::DeadlineExceededError("the store has not said in time who that is"));
  });
  if (options.cancellation != nullptr) {
    const uint64_t watch = options.cancellation->OnCancel([unresolved] { unresolved->Cancel(0); });
    future.Then([cancellation = options.cancellation, watch](const absl::StatusOr<Message>&) {
      cancellation->ForgetWithoutWaiting(watch);
    });
  }
  const absl::Duration call_time = call.deadline - parts_.clock.Now();
  auto send = [this, unresolved, timer, name, call = std::move(call), options = std::move(options),
               wait](const absl::StatusOr<WorkerInfo>& found) mutable {
    parts_.clock.Cancel(timer);
    if (unresolved->future().Done()) return;
    const absl::Status status = found.ok() ? parts_.agent.UpdatePeer(*found) : found.status();
    absl::StatusOr<WorkerRank> rank =
        status.ok() ? absl::StatusOr<WorkerRank>(found->rank) : status;
    // It may have come since the store was asked; and if not, this error names those who are known.
    if (absl::IsNotFound(status)) rank = parts_.agent.FindWorker(name);
    if (!rank.ok()) return unresolved->Fail(rank.status());
    const Future<Message> sent = Send(*rank, std::move(call), options, wait);
    unresolved->GoOnWith(sent);
    sent.Then([unresolved](const absl::StatusOr<Message>& reply) { unresolved->End(reply); });
  };
  // On this clock's time the call ends; so that of the look-up need not be exact.
  parts_.lookups.Find(
      name, Deadline::After(call_time),
      [this, unresolved, timer, send = std::move(send)](absl::StatusOr<WorkerInfo> found) mutable {
        // A call may wait for credit; the store's thread has others to serve.
        absl::Status why;
        try {
          const bool scheduled = parts_.pool.Schedule(
              [send = std::move(send), found = std::move(found)]() mutable { send(found); });
          if (scheduled) return;
          why = absl::CancelledError("this worker is shutting down");
        } catch (const std::bad_alloc&) {
          why = StatusFromException(std::current_exception());
        }
        unresolved->Fail(why);
        parts_.clock.Cancel(timer);
      });
  return future;
}

Future<Message> Caller::CallUnresolved(std::string name, absl::string_view function,
                                       const Message& message, const CallOptions& options,
                                       bool wait) {
  if (HasDeviceTensors(message.tensors)) {
    return Failed(absl::FailedPreconditionError(absl::StrCat(
        "the devices of worker '", name, "' are not known; update the members first")));
  }
  // Without tensors of devices the packet is the same for whoever gets it. Here and now: what the
  // tensors hold, and their history, may be others when the store has answered.
  absl::StatusOr<Outgoing> call = Prepare(parts_.self.rank, function, message, options);
  if (!call.ok()) {
    return Failed(CallError(call.status(), function, Quoted(name)));
  }
  return SendToUnresolved(std::move(name), *std::move(call), options, wait);
}

std::vector<Future<Message>> Caller::CallEach(absl::Span<const WorkerRef> to,
                                              absl::string_view function, const Message& message,
                                              const CallOptions& options) {
  // By way of a device map the bytes are each worker's own.
  const bool shared = !HasDeviceTensors(message.tensors);
  std::optional<absl::StatusOr<Outgoing>> call;
  std::vector<Future<Message>> replies;
  replies.reserve(to.size());
  for (const WorkerRef& worker : to) {
    const absl::StatusOr<WorkerRank> rank = Find(worker);
    if (!rank.ok()) {
      replies.push_back(worker.name().empty()
                            ? Failed(rank.status())
                            : CallUnresolved(std::string(worker.name()), function, message, options,
                                             /*wait=*/true));
      continue;
    }
    if (!shared || !call.has_value()) call = Prepare(*rank, function, message, options);
    if (!call->ok()) {
      replies.push_back(Failed(CallError(call->status(), function, parts_.agent.Describe(*rank))));
      continue;
    }
    // Large tensors are segments, whose memory all the packets share.
    Outgoing own = **call;
    try {
      if (!replies.empty()) own.send = CallMessages::MakeSend(own.header, message);
    } catch (...) {
      replies.push_back(Future<Message>::Of(CallError(StatusFromException(std::current_exception()),
                                                      function, parts_.agent.Describe(*rank))));
      continue;
    }
    replies.push_back(Send(*rank, std::move(own), options, /*wait=*/true));
  }
  return replies;
}

absl::StatusOr<Message> Caller::TakeReply(const std::shared_ptr<ContextRecord>& context,
                                          WorkerRank from, Body& body) {
  DG_ASSIGN_OR_RETURN(const CallHeader header, ReadCallHeader(body.packet, body.offset));
  try {
    const c10::InferenceMode inference(header.modes.inference);
    absl::StatusOr<Message> message = parts_.messages.Read(body.packet, body.offset);
    DG_RETURN_IF_ERROR(parts_.messages.TakeEdge(context, from, header, message));
    return message;
  } catch (const std::bad_alloc&) {
    throw;  // the connection ends, for nobody would hear that no gradient comes over this edge
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

void Caller::OnLateReply(WorkerRank from, Body reply) {
  absl::StatusOr<CallHeader> header = ReadCallHeader(reply.packet, reply.offset);
  if (!header.ok() || header->context == 0) return;
  if (auto context = parts_.contexts.Find(header->context)) {
    absl::StatusOr<Message> unwanted = absl::CancelledError("the reply came late");
    const absl::Status taken = parts_.messages.TakeEdge(context, from, *header, unwanted);
    if (!taken.ok()) DG_LOG(INFO) << "a late reply: " << taken;
  }
}

}  // namespace distgrad
