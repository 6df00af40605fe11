// Workers: creating, calling, closing and destroying them.
#include "core/worker/worker.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "capi/worker_options.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/tensor/values.h"

namespace distgrad {
namespace {

// How long dg_worker_destroy waits, as its comment says.
constexpr absl::Duration kDestroyTimeout = absl::Minutes(1);

// Options of a call, and the pin that keeps its context.
struct OptionsOfCall {
  CallOptions options;
  std::optional<Pinned<ContextObject>> context;
};

absl::StatusOr<OptionsOfCall> ToOptions(const dg_call_options* given) {
  DG_ASSIGN_OR_RETURN(const dg_call_options read,
                      ReadOptions<dg_call_options>(given, DG_CALL_OPTIONS_INIT, "dg_call_options",
                                                   offsetof(dg_call_options, cancellation)));
  OptionsOfCall of;
  of.options.deadline = ToDeadline(read.timeout_ms, absl::InfinitePast());
  if (read.context != nullptr) {
    DG_ASSIGN_OR_RETURN(Pinned<ContextObject> context,
                        Pin<ContextObject>(read.context, "dg_call_options.context"));
    of.context.emplace(std::move(context));
    of.options.context = &(*of.context)->context;
  }
  if (read.cancellation != nullptr) {
    DG_ASSIGN_OR_RETURN(const Pinned<CancellationObject> cancellation,
                        Pin<CancellationObject>(read.cancellation, "dg_call_options.cancellation"));
    of.options.cancellation = cancellation->cancellation;
  }
  return of;
}

// A call that is ready to be made.
struct Prepared {
  // Waits for credit to send it, and for the reply.
  absl::StatusOr<Message> Run() {
    return use->Call(to, function, std::move(message), options.options);
  }
  Future<Message> Start() {
    return use->CallAsync(to, function, std::move(message), options.options);
  }

  SharedWorker::Use use;
  std::string to;
  std::string function;
  Message message;
  OptionsOfCall options;
};

absl::StatusOr<Prepared> Prepare(dg_worker* worker, dg_str to, dg_str function, Message message,
                                 const dg_call_options* given) {
  DG_ASSIGN_OR_RETURN(SharedWorker::Use use, UseWorker(worker));
  DG_ASSIGN_OR_RETURN(std::string to_name, FromStr(to, "to"));
  DG_ASSIGN_OR_RETURN(std::string name, FromStr(function, "function"));
  DG_ASSIGN_OR_RETURN(OptionsOfCall options, ToOptions(given));
  return Prepared{std::move(use), std::move(to_name), std::move(name), std::move(message),
                  std::move(options)};
}

absl::StatusOr<Prepared> PrepareFunction(dg_worker* worker, dg_str to, dg_str function,
                                         const dg_message* request,
                                         const dg_call_options* options) {
  DG_ASSIGN_OR_RETURN(const Pinned<MessageObject> message, Pin<MessageObject>(request, "request"));
  return Prepare(worker, to, function, message->message, options);
}

absl::StatusOr<Prepared> PrepareOp(dg_worker* worker, dg_str to, dg_str op,
                                   const dg_value* arguments, size_t argument_count,
                                   const dg_call_options* options) {
  DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> values, FromValues(arguments, argument_count));
  DG_ASSIGN_OR_RETURN(Message message, EncodeValues(values));
  return Prepare(worker, to, op, std::move(message), options);
}

// Of functions that wait for the end of this worker's work. A handler is part of that, and so is a
// function of a stage, of which core does not know on which thread it runs.
absl::Status CheckMayWaitForEnd(const SharedWorker& worker) {
  if (!InHandlerOf(worker)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("worker '", worker.name(),
                   "' cannot leave in a handler or a callback of its own, for it waits for those"));
}

absl::StatusOr<OnLost> ToOnLost(uint64_t flags) {
  DG_RETURN_IF_ERROR(CheckFlags(flags, DG_GO_ON_WITHOUT_LOST, "flags"));
  return (flags & DG_GO_ON_WITHOUT_LOST) != 0 ? OnLost::kGoOnWithout : OnLost::kFail;
}

}  // namespace

SharedWorker::SharedWorker(std::unique_ptr<Worker> worker)
    : name_(worker->name()),
      rank_(worker->rank()),
      local_rank_(static_cast<uint32_t>(worker->local_rank())),
      local_world_size_(static_cast<uint32_t>(worker->local_world_size())),
      worker_(worker.release()) {}

absl::StatusOr<SharedWorker::Use> SharedWorker::Begin() {
  // Close() waits for this worker's handlers anyway; if they counted it would wait for ever, for
  // it is Close() that fails what they wait for.
  return Begin(/*counted=*/!InHandlerOf(*this));
}

absl::StatusOr<SharedWorker::Use> SharedWorker::BeginInBackground() {
  return Begin(/*counted=*/true);
}

absl::StatusOr<SharedWorker::Use> SharedWorker::Begin(bool counted) {
  absl::MutexLock lock(&mu_);
  if (state_ != State::kOpen && counted) return absl::FailedPreconditionError("the worker is gone");
  if (counted) ++uses_;
  return Use(shared_from_this(), counted);
}

void SharedWorker::End() {
  absl::MutexLock lock(&mu_);
  if (--uses_ == 0) closers_.WakeAll();
}

void SharedWorker::Advance(State to) {
  state_ = to;
  closers_.WakeAll();
}

bool SharedWorker::Refuse() {
  absl::MutexLock lock(&mu_);
  if (state_ != State::kOpen) return state_ == State::kClosed;
  Advance(State::kClosed);
  return false;
}

absl::Status SharedWorker::Close(Deadline deadline) {
  if (InHandlerOf(*this)) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", name_,
                     "' cannot be closed in a handler or callback of its own, since closing "
                     "waits for these; dg_worker_destroy does not wait there"));
  }
  {
    absl::MutexLock lock(&mu_);
    const absl::Condition alone(this, &SharedWorker::NobodyEndsIt);
    if (!closers_.Await(&mu_, alone, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("another thread is closing worker '", name_, "'"));
    }
    if (state_ == State::kEnded) return absl::OkStatus();
    Advance(State::kEnding);
  }
  absl::Status ended;
  try {
    ended = EndWorker(deadline);
  } catch (const std::bad_alloc&) {  // what was begun can be called again
    ended = StatusFromException(std::current_exception());
  }
  absl::MutexLock lock(&mu_);
  Advance(ended.ok() ? State::kEnded : State::kClosed);
  return ended;
}

void SharedWorker::Attach(std::shared_ptr<EndsWithWorker> what) {
  absl::MutexLock lock(&mu_);
  attached_.insert(std::move(what));
}

void SharedWorker::Detach(const std::shared_ptr<EndsWithWorker>& what) {
  absl::MutexLock lock(&mu_);
  attached_.erase(what);
}

absl::Status SharedWorker::EndWorker(Deadline deadline) {
  worker_->Abort();  // or threads might wait in it for ever, and this one for them
  {
    absl::MutexLock lock(&mu_);
    if (!closers_.Await(&mu_, absl::Condition(this, &SharedWorker::Unused), deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("worker '", name_, "' is closed, and ", uses_,
                       " threads are still in a function that uses it"));
    }
  }
  std::vector<std::shared_ptr<Part>> parts;
  {
    absl::MutexLock lock(&mu_);
    parts_closed_ = true;
    parts = parts_;
  }
  for (const std::shared_ptr<Part>& part : parts) {
    if (part->Close(deadline)) {
      Detach(part.get());
    } else {
      return absl::DeadlineExceededError(absl::StrCat(
          "worker '", name_, "' is closed, and a function of ", part->Describe(), " still runs"));
    }
  }
  parts.clear();
  DG_RETURN_IF_ERROR(worker_->Close(deadline));
  std::set<std::shared_ptr<EndsWithWorker>> attached;
  {
    absl::MutexLock lock(&mu_);
    attached.swap(attached_);
  }
  for (const std::shared_ptr<EndsWithWorker>& each : attached) each->End();
  delete worker_;
  // User data ends outside the lock.
  std::vector<std::shared_ptr<Handler>> handlers;
  absl::MutexLock lock(&mu_);
  handlers.swap(handlers_);
  return absl::OkStatus();
}

absl::Status SharedWorker::Attach(std::shared_ptr<Part> part) {
  absl::MutexLock lock(&mu_);
  if (parts_closed_) return absl::FailedPreconditionError("the worker is gone");
  parts_.push_back(std::move(part));
  return absl::OkStatus();
}

void SharedWorker::Detach(const Part* part) {
  std::shared_ptr<Part> detached;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [part](const auto& each) { return each.get() == part; });
  if (found == parts_.end()) return;
  detached = std::move(*found);
  parts_.erase(found);
}

void DestroyWorker(dg_worker* worker, absl::Duration bound) {
  absl::StatusOr<Pinned<WorkerObject>> pinned = Pin<WorkerObject>(worker, "worker");
  if (!pinned.ok() || (*pinned)->destroyed.exchange(true)) return;
  const std::shared_ptr<SharedWorker> shared = (*pinned)->shared;
  // After a close that timed out this does not wait once more.
  if (shared->Refuse()) bound = absl::ZeroDuration();
  // If the end would wait for this very thread, another one does it.
  if (!InHandlerOf(*shared) && MayWait()) {
    BlockingScope blocking;
    const absl::Status closed = shared->Close(Deadline::After(bound));
    if (closed.ok()) {
      // Not before: running handlers find a closed worker, and not an invalid handle.
      DestroyHandle<WorkerObject>(worker);
      return;
    }
    DG_LOG(ERROR) << closed.message() << "; dg_worker_destroy waits no longer, and the worker's "
                  << "threads and memory are freed when that has ended";
  }
  const absl::Status ended = EndInBackground([shared, worker] {
    shared->Close(Deadline::Never()).IgnoreError();
    DestroyHandle<WorkerObject>(worker);
  });
  if (ended.ok()) return;
  DG_LOG(ERROR) << "worker '" << shared->name()
                << "' cannot be destroyed in the background, and stays alive; call "
                << "dg_worker_close, and then dg_worker_destroy again: " << ended.message();
  (*pinned)->destroyed = false;
}

absl::StatusOr<SharedWorker::Use> UseWorker(const dg_worker* worker) {
  DG_ASSIGN_OR_RETURN(const Pinned<WorkerObject> pinned, Pin<WorkerObject>(worker, "worker"));
  return pinned->shared->Begin();
}

}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_worker_create(const dg_worker_options* options, dg_worker** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(WorkerOptions core_options, ToWorkerOptions(options));
    BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, Worker::Create(std::move(core_options)));
    *out = NewHandle<WorkerObject>(std::move(worker));
    return absl::OkStatus();
  });
}

dg_error* dg_worker_barrier(dg_worker* worker, int64_t timeout_ms, uint64_t flags) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const OnLost on_lost, ToOnLost(flags));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    BlockingScope blocking;
    return use->Barrier(ToDeadline(timeout_ms, absl::InfinitePast()), on_lost);
  });
}

dg_error* dg_worker_shutdown(dg_worker* worker, int64_t timeout_ms, uint64_t flags) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const OnLost on_lost, ToOnLost(flags));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    DG_RETURN_IF_ERROR(CheckMayWaitForEnd(use.shared()));
    BlockingScope blocking;
    return use->Shutdown(ToDeadline(timeout_ms, absl::InfinitePast()), on_lost);
  });
}

dg_error* dg_worker_serve(dg_worker* worker, uint64_t flags) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const OnLost on_lost, ToOnLost(flags));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    DG_RETURN_IF_ERROR(CheckMayWaitForEnd(use.shared()));
    BlockingScope blocking;
    return use->Serve(on_lost);
  });
}

dg_error* dg_worker_leave(dg_worker* worker, int64_t timeout_ms) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    DG_RETURN_IF_ERROR(CheckMayWaitForEnd(use.shared()));
    BlockingScope blocking;
    return use->Leave(ToDeadline(timeout_ms, absl::InfinitePast()));
  });
}

void dg_worker_destroy(dg_worker* worker) noexcept {
  if (worker == nullptr) return;
  GuardValue(0, [&] {
    DestroyWorker(worker, kDestroyTimeout);
    return 0;
  });
}

dg_error* dg_worker_close(dg_worker* worker, int64_t timeout_ms) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    std::shared_ptr<SharedWorker> shared;
    {
      DG_ASSIGN_OR_RETURN(const Pinned<WorkerObject> pinned, Pin<WorkerObject>(worker, "worker"));
      shared = pinned->shared;
    }
    BlockingScope blocking;
    return shared->Close(Deadline::After(ToTimeout(timeout_ms, absl::ZeroDuration())));
  });
}

dg_error* dg_wait(void (*wait)(void* user_data), void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(wait != nullptr, "wait"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    BlockingScope blocking;
    wait(user_data);
    return absl::OkStatus();
  });
}

dg_error* dg_worker_call(dg_worker* worker, dg_str to, dg_str function, const dg_message* request,
                         const dg_call_options* options, dg_message** reply) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(reply, "reply"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(Prepared call, PrepareFunction(worker, to, function, request, options));
    // Made before, for the function has run once there is a reply.
    HandleAhead<MessageObject> made;
    DG_ASSIGN_OR_RETURN(made->message, call.Run());
    *reply = made.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_worker_call_async(dg_worker* worker, dg_str to, dg_str function,
                               const dg_message* request, const dg_call_options* options,
                               dg_future** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(Prepared call, PrepareFunction(worker, to, function, request, options));
    HandleAhead<FutureObject> future;
    future->work = call.Start();
    *out = future.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_worker_call_each(dg_worker* worker, const dg_str* to, size_t to_count, dg_str function,
                              const dg_message* request, const dg_call_options* given,
                              dg_message** replies, dg_error** errors) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const std::vector<std::string> names, FromStrs(to, to_count, "to"));
    DG_RETURN_IF_ERROR(CheckArray(replies, to_count, "replies"));
    DG_RETURN_IF_ERROR(CheckArray(errors, to_count, "errors"));
    DG_ASSIGN_OR_RETURN(const std::string name, FromStr(function, "function"));
    DG_ASSIGN_OR_RETURN(const Pinned<MessageObject> message,
                        Pin<MessageObject>(request, "request"));
    DG_ASSIGN_OR_RETURN(const OptionsOfCall options, ToOptions(given));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    std::vector<std::unique_ptr<HandleAhead<MessageObject>>> made(to_count);
    for (auto& each : made) each = std::make_unique<HandleAhead<MessageObject>>();
    std::vector<absl::StatusOr<Message>> results =
        use->CallEach(std::vector<WorkerRef>(names.begin(), names.end()), name, message->message,
                      options.options);
    for (size_t i = 0; i < to_count; ++i) {
      errors[i] = ToError(results[i].status());
      replies[i] = nullptr;
      if (!results[i].ok()) continue;
      (*made[i])->message = *std::move(results[i]);
      replies[i] = made[i]->Release();
    }
    return absl::OkStatus();
  });
}

dg_error* dg_worker_call_op(dg_worker* worker, dg_str to, dg_str op, const dg_value* arguments,
                            size_t argument_count, const dg_call_options* options,
                            dg_values** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(Prepared call,
                        PrepareOp(worker, to, op, arguments, argument_count, options));
    DG_ASSIGN_OR_RETURN(Message message, call.Run());
    DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> values,
                        DecodeValues(std::move(message), call.use->limits().message_bytes));
    DG_ASSIGN_OR_RETURN(std::unique_ptr<ValuesObject> converted, ToValues(values));
    *out = AdoptHandle(std::move(converted));
    return absl::OkStatus();
  });
}

dg_error* dg_worker_call_op_async(dg_worker* worker, dg_str to, dg_str op,
                                  const dg_value* arguments, size_t argument_count,
                                  const dg_call_options* options, dg_future** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(Prepared call,
                        PrepareOp(worker, to, op, arguments, argument_count, options));
    HandleAhead<FutureObject> future;
    future->work = RemoteValues{call.Start(), call.use->limits().message_bytes};
    *out = future.Release();
    return absl::OkStatus();
  });
}

}  // extern "C"
