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
#include "absl/types/span.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/membership/member_event.h"
#include "core/tensor/message.h"
#include "core/worker/call_options.h"    // IWYU pragma: export
#include "core/worker/context.h"         // IWYU pragma: export
#include "core/worker/member.h"          // IWYU pragma: export
#include "core/worker/request.h"         // IWYU pragma: export
#include "core/worker/worker_options.h"  // IWYU pragma: export

namespace distgrad {

class Certificates;    // core/net/certificates.h
class ClusterKey;      // core/net/cluster_key.h
struct ContextState;   // core/autograd/state.h
struct Trace;          // core/base/trace.h
struct TraceOptions;   // core/base/trace.h
class WorkerImpl;      // core/worker/worker_impl.h
struct WorkerMetrics;  // core/worker/metrics.h

// Thread-safe. It is the creating process's alone: a child that was forked off has none of its
// threads, and may neither use nor destroy it.
class Worker {
 public:
  using Handler = RequestHandler;
  using AsyncHandler = AsyncRequestHandler;

  // Joins the job. Waits until all its workers have.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(WorkerOptions options);

  // Calls Abort(), waits without a bound for what Close() waits for, and ends all threads. Call
  // Shutdown() before it, to end in good order.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Fails what is in flight, and what is begun from now on, with kCancelled, so that no thread
  // waits in this worker any more (in a barrier, after a second; some seconds where the job's store
  // is silent). Does not wait itself. The others find this worker gone.
  void Abort();
  // Calls Abort(), and waits until nothing of the user's runs on this worker's threads any more:
  // handlers, the callback for members, functions and hooks of a backward pass. After that the
  // destructor waits for no thread of the user's. kDeadlineExceeded says how many threads have not
  // ended; it may be called again. kFailedPrecondition on one of these threads.
  absl::Status Close(Deadline deadline);

  // Returns the worker's number in the job.
  WorkerRank rank() const;
  const std::string& name() const;
  // The members that this worker knows of, by rank: those of the start, and those that joined later
  // and that it has heard of; without those that have left. Barrier() and UpdateMembers() read all
  // from the store.
  int world_size() const;
  std::vector<std::string> names() const;
  std::vector<Member> members() const;
  // Returns now plus WorkerOptions::timeout, the deadline of what has none of its own.
  Deadline DefaultDeadline() const;
  // Returns "'name' (rank)", for messages; of a rank that it does not know, the rank.
  std::string Describe(WorkerRank worker) const;
  // Reads the members from the store, and waits for that; without a deadline until
  // DefaultDeadline().
  absl::Status UpdateMembers();
  absl::Status UpdateMembers(Deadline deadline);

  // Calls `callback` when a member has joined, has left or is lost: once for each event, in their
  // order, on a thread of this worker's pool, where it may wait as a handler may. The worker hears
  // of all events within seconds, by way of the store. There is one callback at a time: the next
  // one, or null, takes its place, and when OnMember() has returned the former is called no more
  // (it waits for that, unless it is called inside the callback). It ends with the worker, which
  // must not be destroyed in it; Abort() may be called there.
  void OnMember(std::function<void(const MemberEvent&)> callback);
  // The store by which the members of the job find each other. A program may keep there what its
  // workers have to agree on, under keys that begin with a word of its own and a '/'. It ends with
  // the worker that serves it.
  const std::shared_ptr<Store>& store() const;
  // Returns the address, name or interface that the worker listens on; "" with a transport that has
  // none. A process group beside it may be given the same (ProcessGroupOptions::host).
  const std::string& host() const;
  // Returns what the job's workers have in common; empty: nothing. For a process group beside it
  // (ProcessGroupOptions::cluster_key).
  const ClusterKey& cluster_key() const;
  // Returns what this worker shows the others, by options or variables; null: nothing. For a
  // process group beside it (ProcessGroupOptions::certificates).
  const std::shared_ptr<Certificates>& certificates() const;
  // Return its number among the workers of its machine, and the number of these, as the launcher
  // says: to choose a device by. 0 and 0 where it says nothing.
  int local_rank() const;
  int local_world_size() const;
  // Returns the members, this one among them, that are known to run on this worker's machine, by
  // their addresses, without those that are known to be lost; none where addresses do not say it.
  std::vector<Member> MembersOnThisMachine() const;
  // Returns the limits of what it holds, and lets others make it hold.
  const Limits& limits() const;

  // Lets all workers call `function`. kAlreadyExists if it is registered, kInvalidArgument if the
  // name is empty, longer than 1000 bytes, has a "::" (an operator's) or begins with "distgrad.".
  // Calls that come before it are refused, so register before the others may call: before a
  // Barrier(), for instance.
  absl::Status Register(std::string function, Handler handler);
  absl::Status RegisterAsync(std::string function, AsyncHandler handler);
  // Register functions of distgrad itself, whose names begin with "distgrad.".
  absl::Status RegisterOwn(std::string function, Handler handler);
  absl::Status RegisterOwnAsync(std::string function, AsyncHandler handler);
  // For a handler that waits for nothing, runs no code of the user's, and takes less than handing
  // it to another thread: it runs on the thread that has read the call.
  absl::Status RegisterOwnInline(std::string function, Handler handler);
  // Undoes RegisterOwn(): calls that come from now on find no such function. Those that run go on.
  void UnregisterOwn(absl::string_view function);

  // Calls a function of that worker (itself, too), and waits for the reply.
  //
  // Inside a context, gradients will flow back through the tensors that require grad, both ways;
  // tensors of the reply that depend on them, or on parameters over there, require grad.
  //
  // Large tensors are sent from where they are: don't write to them before the reply has come.
  //
  // Future::Cancel() ends the call at once, with kCancelled, and its handler can see it. Where
  // Limits::bytes_per_peer wait to be sent, Call() waits for credit and CallAsync(), which never
  // waits, fails with kResourceExhausted.
  absl::StatusOr<Message> Call(WorkerRef to, absl::string_view function, Message message,
                               CallOptions options = {});
  Future<Message> CallAsync(WorkerRef to, absl::string_view function, Message message,
                            CallOptions options = {});

  // Calls several workers at once, with one message, which is encoded only once. Returns a result
  // for each, in their order.
  std::vector<absl::StatusOr<Message>> CallEach(absl::Span<const WorkerRef> to,
                                                absl::string_view function, const Message& message,
                                                CallOptions options = {});

  // Calls any operator by its schema's name, "aten::add.Tensor" for instance. Missing trailing
  // arguments get their defaults.
  absl::StatusOr<std::vector<c10::IValue>> CallOp(WorkerRef to, absl::string_view op,
                                                  std::vector<c10::IValue> arguments,
                                                  CallOptions options = {});

  // Returns a new context, of which this worker is the origin.
  Context NewContext();

  // Waits until every worker has called it as often as this one. A member that leaves meanwhile is
  // not waited for, nor one that joined or came back after the first of them called it. If a member
  // that has not come is lost this fails at once, with kUnavailable and its name, or goes on
  // without it. kFailedPrecondition, as at the end and in Leave(), if this worker was started again
  // in another process, which has taken its place.
  absl::Status Barrier(Deadline deadline, OnLost on_lost = OnLost::kFail);

  // Ends the job in good order: waits until every worker has called this or Serve(), so that no
  // call finds this worker gone, and until the calls that are in flight then, in either direction,
  // are answered. Then the worker can be destroyed. It needs no deadline: if a member is lost it
  // fails with kUnavailable and its name, or goes on without it; if Abort() is called, with
  // kCancelled. kFailedPrecondition in a handler of this worker, for it waits for those.
  absl::Status Shutdown(Deadline deadline = Deadline::Never(), OnLost on_lost = OnLost::kFail);

  // Serves until the job ends, for a worker that only answers the others from now on: until all
  // others have left, or have called Shutdown() or Serve() themselves. The same as Shutdown()
  // without a deadline.
  absl::Status Serve(OnLost on_lost = OnLost::kFail);

  // Leaves in good order while the job goes on. New calls are refused from now on with
  // kUnavailable, and the others know that this worker is no member any more; calls in flight and
  // contexts that this worker takes part in are waited for until they are over, or until the
  // deadline, which is an error that counts them. Then the worker can be destroyed. May be called
  // once. Fails with kFailedPrecondition for the worker that serves the store, and in a handler of
  // this worker.
  absl::Status Leave(Deadline deadline);

  // Returns the number of contexts that this worker knows of.
  size_t context_count() const;

  // Returns the numbers of calls, bytes, errors, times and passes so far. ToPrometheus() writes
  // them as text.
  WorkerMetrics Metrics() const;

  // Records from now on when calls are made and served, and passes run: docs/trace.md.
  // kFailedPrecondition while a trace runs.
  absl::Status StartTrace();
  absl::Status StartTrace(const TraceOptions& options);
  // Ends the trace and returns it. It has what began and ended meanwhile; ToChromeTrace() writes it
  // as text. kFailedPrecondition if none runs.
  absl::StatusOr<Trace> StopTrace();

  // Returns what this worker holds of each context, and the passes that run on it at this moment,
  // with what they wait for. A callback of Context::BackwardAsync must not call it.
  std::vector<ContextState> Contexts() const;

 private:
  explicit Worker(std::shared_ptr<WorkerImpl> impl);

  const std::shared_ptr<WorkerImpl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_WORKER_H_
