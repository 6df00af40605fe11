// What a Worker is made of. Private to core/worker: worker.cc has its beginning and end, calls.cc
// what it asks of others, serving.cc what they ask of it.
#ifndef DISTGRAD_CORE_WORKER_WORKER_IMPL_H_
#define DISTGRAD_CORE_WORKER_WORKER_IMPL_H_

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/engine.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/origin.h"
#include "core/base/thread_pool.h"
#include "core/base/trace.h"
#include "core/membership/lookups.h"
#include "core/membership/membership.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/worker/call_body.h"
#include "core/worker/device_maps.h"
#include "core/worker/member_callback.h"
#include "core/worker/worker.h"

namespace distgrad {

// Thread-safe.
class Worker::Impl : public Context::Owner,
                     public AgentService,
                     public EngineNetwork,
                     public MemberCallback::Source,
                     public std::enable_shared_from_this<Worker::Impl> {
 public:
  static absl::StatusOr<std::shared_ptr<Impl>> Create(WorkerOptions options);
  ~Impl() override { Join(); }

  // A handler, or one that answers later.
  struct Function {
    Handler handler = nullptr;
    AsyncHandler async_handler = nullptr;
    bool is_own = false;  // of distgrad, not of its user
  };
  absl::Status Register(std::string name, Function function);
  void Unregister(absl::string_view name);
  // `wait`: this thread may wait for room to send.
  Future<Message> Call(WorkerRef to, absl::string_view function, const Message& message,
                       const CallOptions& options, bool wait);
  std::vector<Future<Message>> CallEach(absl::Span<const WorkerRef> to, absl::string_view function,
                                        const Message& message, const CallOptions& options);
  Context NewContext() { return Context(shared_from_this(), contexts_.New(), /*is_origin=*/true); }
  // Members: members.cc.
  std::vector<Member> members() const;
  absl::Status UpdateMembers(Deadline deadline);
  absl::Status Barrier(Deadline deadline, OnLostMember on_lost);
  absl::Status Shutdown(Deadline deadline, OnLostMember on_lost);
  absl::Status Leave(Deadline deadline);
  void OnMember(MemberCallback::Function callback);

  void Close();
  absl::Status Join(Deadline deadline);
  void Join();  // Close(), and ends all threads

  // Context::Owner
  Engine& engine() override { return engine_; }
  Deadline DefaultDeadline() override { return Deadline::After(options_.timeout); }

  // AgentService
  void OnCall(IncomingCall call) override;
  // Whether a call that comes now is new work, for which one that leaves is not to be had.
  bool Refuses(ContextId context) const;
  void OnNotice(WorkerId from, Body notice) override {
    engine_.OnNotice(from, std::move(notice.packet), notice.offset);
  }
  void OnLateReply(WorkerId from, Body reply) override;
  void OnPeerLost(WorkerId peer, const absl::Status& why) override;
  void OnUnreachable(WorkerId peer, Incarnation incarnation, const absl::Status& why) override;
  void OnMemberEvents() override { member_callback_.OnEvents(); }

  // MemberCallback::Source
  void KeepEvents(bool keep) override { agent_->KeepEvents(keep); }
  std::vector<MemberEvent> TakeEvents() override { return agent_->TakeEvents(); }

  // EngineNetwork
  Packet NewNotice() override { return Agent::NewNotice(); }
  void Notify(WorkerId to, Packet notices) override { agent_->Notify(to, std::move(notices)); }
  absl::StatusOr<std::shared_ptr<const DeviceMap>> DevicesWith(WorkerId worker) override;
  std::string Describe(WorkerId worker) override { return agent_->Describe(worker); }
  std::shared_ptr<EventLoop> loop() override { return loop_; }

  const WorkerInfo& self() const { return self_; }
  const WorkerOptions& options() const { return options_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  const std::string& host() const { return host_; }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  const Agent& agent() const { return *agent_; }
  size_t context_count() const { return contexts_.size(); }
  std::vector<ContextState> Contexts() const { return engine_.State(); }
  WorkerMetrics Metrics() const;
  absl::Status StartTrace(const TraceOptions& options) {
    return trace_->Start(options, clock_->Now());
  }
  absl::StatusOr<Trace> StopTrace();

 private:
  // A call that is served, while its handler has it.
  struct Serving {
    IncomingCall call;
    CallHeader header;
    std::shared_ptr<ContextRecord> context;
    Request request;
    bool by_handler = false;  // the answer is given by a handler of the program's
  };
  // A call about to be made.
  struct Outgoing {
    std::shared_ptr<ContextRecord> context;
    absl::Time deadline;  // by clock_
    CallHeader header;
    Agent::Request request = {};
    size_t body = 0;                   // where it begins
    std::shared_ptr<SourceNode> send;  // null if nothing is recorded; one for each call
  };

  Impl(WorkerOptions options, WorkerInfo self, std::unique_ptr<Clock> clock,
       std::unique_ptr<Membership> members, std::unique_ptr<Transport> transport);

  // Takes back that this worker is lost, should somebody have said so. Later, and again until the
  // store has answered.
  void DenyLossLater();
  // Reads in the store what has happened to members, now and then, while somebody wants to know.
  void FollowMembers();
  void ReadMembers();
  void MissStore(const absl::Status& why);
  // Of an error of waiting for all: if the store is gone, says with whom.
  absl::Status NameTheStore(const absl::Status& status);
  absl::Status LearnAll(const std::vector<WorkerInfo>& all);
  // Runs a task that may wait for the store, after a time. `timer` is one of those below.
  void RunLater(absl::Duration wait, std::optional<Clock::TimerId>* timer, void (Impl::*task)());
  absl::Status CheckMayLeave() const;
  // Waits until no call is in flight, in either direction, nor a context if `contexts`.
  absl::Status AwaitIdle(Deadline deadline, bool contexts);

  absl::StatusOr<Message> TakeReply(const std::shared_ptr<ContextRecord>& context, WorkerId from,
                                    Body& body);
  absl::Status TakeEdge(const std::shared_ptr<ContextRecord>& context, WorkerId from,
                        const CallHeader& header, absl::StatusOr<Message>& message);
  void Serve(Serving serving);
  void ServeLater(const AsyncHandler& handler, Serving serving);
  void Answer(Serving& serving, const absl::StatusOr<Message>& reply);
  std::shared_ptr<const Function> FindFunction(absl::string_view name) const;
  absl::StatusOr<Message> ServeOperator(Request& request);

  absl::StatusOr<WorkerId> Find(WorkerRef worker) const;
  absl::StatusOr<Outgoing> Prepare(WorkerId to, absl::string_view function, const Message& message,
                                   const CallOptions& options);
  // To one who is not known here: asks the store, without making this thread wait.
  Future<Message> CallUnresolved(std::string name, absl::string_view function,
                                 const Message& message, const CallOptions& options, bool wait);
  Future<Message> SendToUnresolved(std::string name, Outgoing call, CallOptions options, bool wait);
  Future<Message> Send(WorkerId to, Outgoing call, const CallOptions& options, bool wait);
  absl::Status CallError(WorkerId to, absl::string_view function, const absl::Status& why) const;
  // An error that arose here, unless it says something else.
  absl::Status OwnError(const absl::Status& why) const {
    return WithOrigin(why, {self_.id, ErrorOrigin::By::kDistgrad});
  }
  Future<Message> Failed(const absl::Status& why) const {
    return Future<Message>::Of(OwnError(why));
  }
  std::map<WorkerId, std::string> Names() const;
  // The steps from a message to a packet: its bytes, which differ by who gets them only for tensors
  // of devices; its send node, of the tensors' history as it is then, null where nothing is
  // recorded; and the edge, which nobody else has, 0 for null.
  absl::StatusOr<size_t> Encode(CallHeader& header, const std::shared_ptr<ContextRecord>& context,
                                WorkerId to, const Message& message, Packet* packet);
  static std::shared_ptr<SourceNode> MakeSend(const CallHeader& header, const Message& message);
  absl::StatusOr<EdgeId> Record(const std::shared_ptr<ContextRecord>& context, WorkerId to,
                                std::shared_ptr<SourceNode> send, size_t body, Packet* packet);

  // Constant after construction.
  const WorkerOptions options_;
  WorkerInfo self_;
  std::shared_ptr<Store> store_;
  std::string host_;
  int local_rank_ = 0;
  int local_world_size_ = 0;
  bool serves_store_ = false;
  bool worker0_serves_store_ = false;

  // Synchronize themselves. In the order in which they depend on each other.
  const std::unique_ptr<Clock> clock_;
  const std::shared_ptr<TraceRecorder> trace_;
  const std::unique_ptr<Membership> members_;
  Lookups lookups_;
  DeviceMaps device_maps_;
  ContextRegistry contexts_;
  ThreadPool pool_;
  Engine engine_;
  std::unique_ptr<Transport> transport_;
  const std::shared_ptr<EventLoop> loop_;  // may be null
  const std::shared_ptr<Agent> agent_;
  MemberCallback member_callback_;
  std::atomic<bool> leaving_{false};
  std::atomic<int> losses_to_deny_{0};  // that others may have claimed; soon
  std::atomic<bool> follows_members_{false};
  std::atomic<bool> misses_store_{false};  // and so takes the worker that serves it for lost
  // Of ReadMembers() alone.
  int64_t changes_ = -1;                          // as last seen
  Deadline store_has_until_ = Deadline::Never();  // to answer, where it does not

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  absl::flat_hash_map<std::string, std::shared_ptr<const Function>> functions_ ABSL_GUARDED_BY(mu_);
  bool joined_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_set<WorkerId> asked_for_ ABSL_GUARDED_BY(mu_);  // of whom the store is asked
  std::optional<Clock::TimerId> follow_timer_ ABSL_GUARDED_BY(mu_), deny_timer_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_WORKER_IMPL_H_
