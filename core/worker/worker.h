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
#include "core/autograd/snapshot.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/rpc/inproc/inproc_transport.h"
#include "core/rpc/store.h"
#include "core/tensor/message.h"
#include "core/worker/context.h"

namespace distgrad {

struct WorkerOptions {
  // Unique in the job. Default: "worker<rank>".
  std::string name = {};

  // How the workers find each other:
  //   "env://"            MASTER_ADDR and MASTER_PORT (and RANK, WORLD_SIZE), as launchers set them
  //   "tcp://host:port"   worker 0 serves a store there
  //   "file:///path"      a file that all workers see; it must not be there from an earlier job
  std::string rendezvous = "env://";
  // Used instead of `rendezvous`: workers of one process share an in-process store.
  std::shared_ptr<Store> store = nullptr;

  // -1: from RANK and WORLD_SIZE in the environment.
  int rank = -1;
  int world_size = -1;

  // "socket" (Unix-domain sockets within a machine, TCP between machines), TensorPipe's own "tcp"
  // (any machine; strangers can end the process) and "shm" (this machine; keeps a core busy), or
  // "inproc" (this process; give the network that its workers share).
  std::string transport = "socket";
  // What this worker listens on, for "socket" and "tcp".
  std::string host = "127.0.0.1";
  std::shared_ptr<InprocNetwork> network = nullptr;

  // A file with the secret that all workers of the job share, at least 16 bytes; "": what
  // DISTGRAD_KEY_FILE names, or the secret itself in DISTGRAD_KEY, or none. With one, "socket"
  // talks only to those who have it, and "tcp" and "shm", which cannot tell, are refused. See
  // docs/security.md.
  std::string key_file = {};

  // Threads that run handlers and backward at the same time; more are started while some wait
  // for others. 0: as many as the machine has cores.
  size_t threads = 0;

  // Of calls and backward passes that set no deadline.
  absl::Duration timeout = absl::Minutes(1);
  // For all workers to join.
  absl::Duration join_timeout = absl::Minutes(1);

  // Whether the others may call operators ("aten::...") here.
  bool serve_operators = true;
};

struct CallOptions {
  // Records the call for the backward of this context.
  const Context* context = nullptr;
  // The call fails with kDeadlineExceeded if it is not answered by then. Default: now plus
  // WorkerOptions::timeout.
  absl::Time deadline = absl::InfinitePast();
};

// What a handler gets.
struct Request {
  WorkerId from;
  std::string function;
  Message message;
  // The caller's context; !valid() if the call was made outside of one.
  Context context;
  // The caller waits no longer than this.
  absl::Time deadline;

  // For calls that the handler makes in turn: within the same context and deadline.
  CallOptions Nested() const {
    return {.context = context.valid() ? &context : nullptr, .deadline = deadline};
  }
};

// Thread-safe.
class Worker {
 public:
  // Runs on the worker's pool, several at once; may block, make calls, and throw. The caller gets
  // the error with its code.
  using Handler = std::function<absl::StatusOr<Message>(Request&)>;

  // Joins the job. Waits until all its workers have.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(WorkerOptions options);

  // Fails what is under way, and ends all threads. Leave() first, to end in good order.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  WorkerId id() const;
  const std::string& name() const;
  int world_size() const;
  // The names of all workers, by id.
  std::vector<std::string> names() const;

  // Lets all workers call `function`. kAlreadyExists if it is registered, kInvalidArgument if the
  // name is empty, too long, or an operator's. Calls that come before it are refused, so register
  // before the others may call: for instance, before a WaitForAll().
  absl::Status Register(std::string function, Handler handler);

  // Calls a function of the worker with that name (itself, too), and waits for the reply.
  //
  // Inside a context, gradients will flow back through the tensors that require grad, both ways;
  // tensors of the reply that depend on them, or on parameters over there, require grad.
  //
  // Large tensors are sent from where they are: don't write to them before the reply has come.
  absl::StatusOr<Message> Call(absl::string_view to, absl::string_view function, Message message,
                               CallOptions options = {});
  Future<Message> CallAsync(absl::string_view to, absl::string_view function, Message message,
                            CallOptions options = {});

  // The same for any operator by its schema's name, "aten::add.Tensor" for instance. Missing
  // trailing arguments get their defaults.
  absl::StatusOr<std::vector<c10::IValue>> CallOperator(absl::string_view to, absl::string_view op,
                                                        std::vector<c10::IValue> arguments,
                                                        CallOptions options = {});

  // A new context, of which this worker is the origin.
  Context NewContext();

  // Waits until every worker has called it as often as this one.
  absl::Status WaitForAll(absl::Time deadline);

  // Leaves in good order: waits until every worker of the job has called this, so that nobody's
  // call finds us gone. Then the worker can be destroyed.
  absl::Status Leave(absl::Time deadline);

  // How many contexts this worker knows of.
  size_t context_count() const;

  // What it holds of them, and the passes that run on it at this moment, with what they wait for.
  // Not from a callback of Context::BackwardAsync.
  std::vector<ContextSnapshot> Contexts() const;

  class Impl;

 private:
  explicit Worker(std::shared_ptr<Impl> impl);

  const std::shared_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_WORKER_H_
