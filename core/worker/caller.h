// Makes the calls of a worker: finds the worker that is meant, sends the message with the edge of
// its context, and takes the answer.
#ifndef DISTGRAD_CORE_WORKER_CALLER_H_
#define DISTGRAD_CORE_WORKER_CALLER_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/autograd/context_record.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/engine.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/base/origin.h"
#include "core/base/thread_pool.h"
#include "core/membership/lookups.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/tensor/message.h"
#include "core/worker/call_body.h"
#include "core/worker/call_messages.h"
#include "core/worker/call_options.h"
#include "core/worker/context.h"

namespace distgrad {

// Thread-safe.
class Caller {
 public:
  // The parts that it works with, which outlive it.
  struct Parts {
    const WorkerInfo& self;
    const Context::Owner& owner;  // of the contexts in which this worker may call
    absl::Duration timeout;       // of a call without a deadline
    Clock& clock;
    ThreadPool& pool;
    Lookups& lookups;
    Agent& agent;
    Engine& engine;
    ContextRegistry& contexts;
    const CallMessages& messages;
    std::shared_ptr<EventLoop> loop;  // may be null
  };

  explicit Caller(Parts parts) : parts_(std::move(parts)) {}

  // Calls a worker. `wait`: this thread may wait for credit to send.
  Future<Message> Call(WorkerRef to, absl::string_view function, const Message& message,
                       const CallOptions& options, bool wait);
  std::vector<Future<Message>> CallEach(absl::Span<const WorkerRef> to, absl::string_view function,
                                        const Message& message, const CallOptions& options);

  // AgentService::OnLateReply
  void OnLateReply(WorkerRank from, Body reply);

 private:
  // A call about to be made.
  struct Outgoing {
    std::shared_ptr<ContextRecord> context;
    absl::Time deadline;  // by the clock
    CallHeader header;
    Agent::Request request = {};
    size_t body = 0;                   // where it begins
    std::shared_ptr<SourceNode> send;  // null if nothing is recorded; one for each call
  };

  absl::StatusOr<WorkerRank> Find(WorkerRef worker) const;
  absl::StatusOr<Outgoing> Prepare(WorkerRank to, absl::string_view function,
                                   const Message& message, const CallOptions& options);
  Future<Message> Send(WorkerRank to, Outgoing call, const CallOptions& options, bool wait);
  // Calls a worker that is not known here: asks the store, without making this thread wait.
  Future<Message> CallUnresolved(std::string name, absl::string_view function,
                                 const Message& message, const CallOptions& options, bool wait);
  Future<Message> SendToUnresolved(std::string name, Outgoing call, CallOptions options, bool wait);
  absl::StatusOr<Message> TakeReply(const std::shared_ptr<ContextRecord>& context, WorkerRank from,
                                    Body& body);
  // Marks an error as one that arose here, unless it says something else.
  absl::Status OwnError(const absl::Status& why) const {
    return WithOrigin(why, {parts_.self.rank, ErrorOrigin::By::kDistgrad});
  }
  Future<Message> Failed(const absl::Status& why) const {
    return Future<Message>::Of(OwnError(why));
  }

  const Parts parts_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALLER_H_
