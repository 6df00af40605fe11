// A worker: one member of a job. It calls functions of the others by name, and they call its
// own, tensors in and tensors out; and calls made inside a context can be differentiated through
// all workers.
//
//   absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create({.name = "front"});
//   (*worker)->Register("square", [](Request& request) -> absl::StatusOr<Message> {
//     return Message{"", {request.message.tensors[0].square()}};
//   });
//
//   Context context = (*worker)->NewContext();
//   absl::StatusOr<Message> reply =
//       (*worker)->Call("back", "square", {"", {x}}, {.context = &context});
//   absl::Status done = context.Backward({reply->tensors[0].sum()});
//   absl::StatusOr<at::Tensor> gradient = context.Gradient(x);
#ifndef DISTGRAD_CORE_WORKER_WORKER_H_
#define DISTGRAD_CORE_WORKER_WORKER_H_

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/cancellation.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/base/trace.h"
#include "core/membership/member_event.h"
#include "core/tensor/message.h"
#include "core/worker/context.h"
#include "core/worker/worker_options.h"

namespace distgrad {

struct ContextState;   // core/autograd/state.h
struct WorkerMetrics;  // core/worker/metrics.h

struct CallOptions {
  // Records the call for the backward of this context. Null: of none; one that is not valid() fails
  // the call with kFailedPrecondition; one of another worker of this process fails it with
  // kInvalidArgument if it has tensors that require grad.
  const Context* context = nullptr;
  // The call fails with kDeadlineExceeded if it is not answered by then. Default: now plus
  // WorkerOptions::timeout.
  Deadline deadline = absl::InfinitePast();
  // Cancels the call too. Null: nothing does but the future's Cancel().
  std::shared_ptr<Cancellation> cancellation = nullptr;
};

// A worker by its name or its id. For parameters: it does not keep the name.
class WorkerRef {
 public:
  WorkerRef(absl::string_view name) : name_(name) {}   // NOLINT: implicit
  WorkerRef(const std::string& name) : name_(name) {}  // NOLINT: implicit
  WorkerRef(const char* name) : name_(name) {}         // NOLINT: implicit
  WorkerRef(int id) : by_id_(true), id_(id) {}         // NOLINT: implicit

  bool by_id() const { return by_id_; }
  int id() const { return id_; }
  absl::string_view name() const { return name_; }

 private:
  bool by_id_ = false;
  int id_ = 0;
  absl::string_view name_;
};

// A member of the job as another one knows it.
struct Member {
  WorkerId id = 0;
  std::string name;
  Incarnation incarnation = 0;  // another one for each incarnation of that name
};

// What a handler gets.
struct Request {
  WorkerId from;
  std::string function;
  Message message;
  // The caller's context; !valid() if the call was made outside of one.
  Context context;
  // The caller waits no longer than this.
  Deadline deadline = Deadline::Never();
  // Cancelled as soon as nobody waits for the answer: the caller has cancelled the call, given up
  // by its deadline, or is gone.
  std::shared_ptr<Cancellation> cancellation;

  // For calls that the handler makes in turn: within the same context and deadline, and cancelled
  // with this one.
  CallOptions Nested() const {
    return {.context = context.valid() ? &context : nullptr,
            .deadline = deadline,
            .cancellation = cancellation};
  }
};

// Thread-safe. It is the creating process's alone: a child that was forked off has none of its
// threads, and may neither use nor destroy it.
class Worker {
 public:
  // Runs on the worker's pool, several at once; may block, make calls, and throw. The caller gets
  // the error with its code.
  using Handler = std::function<absl::StatusOr<Message>(Request&)>;
  // The same, but the answer may come after the handler has returned, and from any thread; no
  // thread is held meanwhile. The request lives until then. If the caller waits no longer, the
  // future is cancelled.
  using AsyncHandler = std::function<Future<Message>(Request&)>;

  // Joins the job. Waits until all its workers have.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(WorkerOptions options);

  // Close(), waits for what Join() waits for, without a bound, and ends all threads. Shutdown()
  // first, to end in good order.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Fails what is in flight, and what is begun from now on, with kCancelled, so that no thread
  // waits in this worker any more (in a barrier, after a second). Does not wait itself. The others
  // find this worker gone.
  void Close();
  // Close(), and waits until nothing of the user's runs on this worker's threads any more:
  // handlers, the callback for members, functions and hooks of a backward pass. After that the
  // destructor has nobody to wait for. kDeadlineExceeded says how many threads have not ended; it
  // may be called again. kFailedPrecondition on one of these threads.
  absl::Status Join(Deadline deadline);

  // Its number in the job: its id.
  WorkerId rank() const;
  const std::string& name() const;
  // The members that this worker knows of, by id: those of the start, and of those who joined later
  // whom it has heard of; without those who have left. Barrier() and UpdateMembers() look in the
  // store for all.
  int world_size() const;
  std::vector<std::string> names() const;
  std::vector<Member> members() const;
  // Waits for the store.
  absl::Status UpdateMembers();

  // Calls `callback` when a member has joined, has left or is lost: for each event of which this
  // worker hears once, in their order, on a thread of its pool, where it may wait as a handler may.
  // It hears of all within seconds, by way of the store. There is one callback at a time: the next
  // one, or null, takes its place, and when OnMember() has returned the former is called no more
  // (it waits for that, unless it is called inside the callback). It ends with the worker, which
  // must not be destroyed in it; Close() may be called there.
  void OnMember(std::function<void(const MemberEvent&)> callback);
  // Where the members of the job find each other: for what they want to agree on besides, under
  // keys that begin with a word of its own and a '/'. Lives as long as whoever serves it.
  const std::shared_ptr<Store>& store() const;
  // The address, name or interface that it listens on; "" with a transport that has none. For a
  // process group beside it (ProcessGroupOptions::host).
  const std::string& host() const;
  // Its number among the workers of its machine, and how many these are, as the launcher says:
  // to choose a device by. 0 and 0 where it says nothing.
  int local_rank() const;
  int local_world_size() const;

  // Lets all workers call `function`. kAlreadyExists if it is registered, kInvalidArgument if the
  // name is empty, longer than 1000 bytes, has a "::" (an operator's) or begins with "distgrad.".
  // Calls that come before it are refused, so register before the others may call: for instance,
  // before a Barrier().
  absl::Status Register(std::string function, Handler handler);
  absl::Status RegisterAsync(std::string function, AsyncHandler handler);
  // For functions of distgrad itself, whose names begin with "distgrad.".
  absl::Status RegisterOwn(std::string function, Handler handler);
  // The other way: calls that come from now on find no such function. Those that run go on.
  void UnregisterOwn(absl::string_view function);

  // Calls a function of that worker (itself, too), and waits for the reply.
  //
  // Inside a context, gradients will flow back through the tensors that require grad, both ways;
  // tensors of the reply that depend on them, or on parameters over there, require grad.
  //
  // Large tensors are sent from where they are: don't write to them before the reply has come.
  //
  // Future::Cancel() ends the call at once, with kCancelled, and its handler can see it. Where
  // Limits::bytes_per_peer wait to be sent, Call() waits for room and CallAsync(), which never
  // waits, fails with kResourceExhausted.
  absl::StatusOr<Message> Call(WorkerRef to, absl::string_view function, Message message,
                               CallOptions options = {});
  Future<Message> CallAsync(WorkerRef to, absl::string_view function, Message message,
                            CallOptions options = {});

  // The same on several workers, at once and with one message, which is encoded only once. A result
  // for each, in their order.
  std::vector<absl::StatusOr<Message>> CallEach(absl::Span<const WorkerRef> to,
                                                absl::string_view function, const Message& message,
                                                CallOptions options = {});

  // The same for any operator by its schema's name, "aten::add.Tensor" for instance. Missing
  // trailing arguments get their defaults.
  absl::StatusOr<std::vector<c10::IValue>> CallOperator(WorkerRef to, absl::string_view op,
                                                        std::vector<c10::IValue> arguments,
                                                        CallOptions options = {});

  // A new context, of which this worker is the origin.
  Context NewContext();

  // Waits until every worker has called it as often as this one. Who leaves meanwhile is not
  // waited for, nor who joined or came back after the first of them called it. If a member that has
  // not come is lost this fails at once, with kUnavailable and its name, or goes on without it.
  absl::Status Barrier(Deadline deadline, OnLostMember on_lost = OnLostMember::kFail);

  // Ends the job in good order: waits until every worker has called this or Serve(), so that
  // nobody's call finds us gone, and until the calls that are in flight then, in either direction,
  // are answered. Then the worker can be destroyed. It needs no deadline: if a member is lost it
  // fails with kUnavailable and its name, or goes on without it; if Close() is called, with
  // kCancelled. kFailedPrecondition in a handler of this worker, for it waits for those.
  absl::Status Shutdown(Deadline deadline = Deadline::Never(),
                        OnLostMember on_lost = OnLostMember::kFail);

  // For a worker that only answers the others from now on: serves until the job ends, which is when
  // all others have left, or have called Shutdown() or Serve() themselves. The same as Shutdown()
  // without a deadline.
  absl::Status Serve(OnLostMember on_lost = OnLostMember::kFail);

  // Leaves in good order while the job goes on. New calls are refused from now on with
  // kUnavailable, and the others know that we are no member any more; calls in flight and contexts
  // that this worker takes part in are waited for until they are over, or until the deadline, which
  // is an error that counts them. Then the worker can be destroyed. Once. kFailedPrecondition for
  // the worker that serves the store, and in a handler of this worker.
  absl::Status Leave(Deadline deadline);

  // How many contexts this worker knows of.
  size_t context_count() const;

  // Calls, bytes, errors, times and passes so far. ToPrometheus() writes it as text.
  WorkerMetrics Metrics() const;

  // Records from now on when calls are made and served, and passes run: docs/trace.md.
  // kFailedPrecondition while a trace runs.
  absl::Status StartTrace(TraceOptions options = {});
  // Ends the trace. It has what began and ended meanwhile; ToChromeTrace() writes it as text.
  // kFailedPrecondition if none runs.
  absl::StatusOr<Trace> StopTrace();

  // What it holds of them, and the passes that run on it at this moment, with what they wait for.
  // Not from a callback of Context::BackwardAsync.
  std::vector<ContextState> Contexts() const;

  class Impl;

 private:
  explicit Worker(std::shared_ptr<Impl> impl);

  const std::shared_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_WORKER_H_
