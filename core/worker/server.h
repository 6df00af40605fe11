// Serves the calls that others make to a worker: keeps its functions, and runs them, or ATen's
// operators, on its pool or where they arrive.
#ifndef DISTGRAD_CORE_WORKER_SERVER_H_
#define DISTGRAD_CORE_WORKER_SERVER_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/context_record.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/engine.h"
#include "core/base/clock.h"
#include "core/base/thread_pool.h"
#include "core/membership/worker_info.h"
#include "core/rpc/incoming_call.h"
#include "core/tensor/message.h"
#include "core/worker/call_body.h"
#include "core/worker/call_messages.h"
#include "core/worker/context.h"
#include "core/worker/request.h"
#include "core/worker/worker_options.h"

namespace distgrad {

// Thread-safe.
class Server {
 public:
  // The owner of the functions. Lives as long as the server.
  class Owner : public Context::Owner {
   public:
    // Returns whether a call that comes now is new work, which a worker that leaves refuses.
    virtual bool Refuses(ContextId context) const = 0;
    // Says that a call of a context was refused which is older than this worker's return, or may
    // be.
    virtual void OnOlder(ContextId context) = 0;
  };
  // The parts that it works with, which outlive it.
  struct Parts {
    const WorkerInfo& self;
    const WorkerOptions& options;
    Clock& clock;
    ThreadPool& pool;
    ContextRegistry& contexts;
    Engine& engine;
    const CallMessages& messages;
  };
  // A function: a handler, or one that answers later.
  struct Function {
    RequestHandler handler = nullptr;
    AsyncRequestHandler async_handler = nullptr;
    bool is_own = false;     // of distgrad, not of its user
    bool is_inline = false;  // takes less than handing it to another thread, and waits for nothing
  };

  explicit Server(Parts parts) : parts_(parts) {}

  // Called before the first call.
  void SetOwner(std::weak_ptr<Owner> owner) { owner_ = std::move(owner); }

  absl::Status Register(std::string name, Function function);
  void Unregister(absl::string_view name);

  // AgentService::OnCall
  void OnCall(IncomingCall call);

 private:
  // A call that is served, while its handler has it.
  struct Serving {
    IncomingCall call;
    CallHeader header;
    std::shared_ptr<ContextRecord> context;
    Request request;
    bool by_handler = false;   // the answer is given by a handler of the program's
    bool by_operator = false;  // the answer is given by one of ATen's operators
  };

  // Whether running it takes less than handing it to another thread.
  bool RunsInline(const Request& request) const;
  void Serve(Serving serving);
  // Runs a function that answers at once, or an operator where there is none.
  absl::StatusOr<Message> Run(Serving& serving, const Function* function);
  void ServeLater(const AsyncRequestHandler& handler, const std::shared_ptr<Serving>& serving);
  void Answer(Serving& serving, const absl::StatusOr<Message>& reply);
  // Ends the use of an inline function, on another thread if it is the last: it may own what is its
  // user's.
  void LetGo(std::shared_ptr<const Function> function, absl::string_view name);
  // Ends the tensors of the request, and then answers it: on another thread, for large tensors take
  // long to free. Until then they count against the limits of their caller.
  void AnswerWhenFreed(Serving serving, const absl::StatusOr<Message>& reply);
  absl::StatusOr<Message> ServeOperator(Request& request);
  // The error of a call of a function that is not there, with what to do.
  absl::Status NotRegistered(absl::string_view function) const;
  std::shared_ptr<const Function> FindFunction(absl::string_view name) const;

  const Parts parts_;
  std::weak_ptr<Owner> owner_;  // constant after SetOwner()

  mutable absl::Mutex mu_;
  absl::flat_hash_map<std::string, std::shared_ptr<const Function>> functions_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_SERVER_H_
