// The parts of a Worker, which it creates and ends. Private to core/worker: members.cc has what it
// knows of the members of its job; caller.h makes its calls, server.h serves those of others.
#ifndef DISTGRAD_CORE_WORKER_WORKER_IMPL_H_
#define DISTGRAD_CORE_WORKER_WORKER_IMPL_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/engine.h"
#include "core/autograd/state.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/thread_pool.h"
#include "core/base/trace.h"
#include "core/membership/lookups.h"
#include "core/membership/membership.h"
#include "core/membership/store.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/worker/call_body.h"
#include "core/worker/call_messages.h"
#include "core/worker/caller.h"
#include "core/worker/context.h"
#include "core/worker/device_maps.h"
#include "core/worker/job.h"
#include "core/worker/last_context.h"
#include "core/worker/member.h"
#include "core/worker/member_callback.h"
#include "core/worker/member_sync.h"
#include "core/worker/metrics.h"
#include "core/worker/server.h"
#include "core/worker/worker_options.h"

namespace distgrad {

// Thread-safe.
class WorkerImpl : public Server::Owner,
                   public AgentService,
                   public EngineNetwork,
                   public std::enable_shared_from_this<WorkerImpl> {
 public:
  static absl::StatusOr<std::shared_ptr<WorkerImpl>> Create(WorkerOptions options);
  ~WorkerImpl() override { Join(); }

  Caller& caller() { return caller_; }
  Server& server() { return server_; }
  Context NewContext() { return Context(shared_from_this(), contexts_.New(), /*is_origin=*/true); }
  // Members: members.cc.
  std::vector<Member> members() const;
  std::vector<Member> MembersOnThisMachine() const;
  absl::Status UpdateMembers(Deadline deadline);
  absl::Status Barrier(Deadline deadline, OnLost on_lost);
  absl::Status Shutdown(Deadline deadline, OnLost on_lost);
  absl::Status Leave(Deadline deadline);
  void OnMember(MemberCallback::Function callback);

  void Abort();
  absl::Status Close(Deadline deadline);
  void Join();  // Abort(), and ends all threads

  // Context::Owner
  Engine& engine() override { return engine_; }
  Deadline DefaultDeadline() override { return Deadline::After(options_.timeout); }

  // Server::Owner
  bool Refuses(ContextId context) const override;
  void OnOlder(ContextId context) override {
    last_contexts_.AskAgain(MakerOf(context), weak_from_this());
  }

  // AgentService
  absl::Status CheckBody(WorkerRank from, absl::string_view body) override {
    return CheckCallHeader(from, body);
  }
  void OnCall(IncomingCall call) override { server_.OnCall(std::move(call)); }
  absl::Status OnNotice(WorkerRank from, Body notice,
                        absl::FunctionRef<bool()> is_cut_off) override {
    return engine_.OnNotice(from, std::move(notice.packet), notice.offset, is_cut_off);
  }
  void OnLateReply(WorkerRank from, Body reply) override {
    caller_.OnLateReply(from, std::move(reply));
  }
  uint64_t BegunSoFar() override { return contexts_.begun(); }
  void OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) override {
    engine_.OnPeerLost(peer, begun, why);
    member_sync_.OnPeerLost();
  }
  void OnUnwatched() override { member_sync_.OnUnwatched(); }
  void OnUnreachable(WorkerRank peer, Incarnation incarnation, const absl::Status& why) override {
    member_sync_.OnUnreachable(peer, incarnation, why);
  }
  void OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss) override {
    member_sync_.OnRevived(peer, incarnation, loss);
  }
  void OnMemberEvents() override { member_callback_.OnEvents(); }

  // EngineNetwork
  Packet NewNotice() override { return Agent::NewNotice(); }
  void Notify(WorkerRank to, Packet notices) override { agent_->Notify(to, std::move(notices)); }
  absl::StatusOr<std::shared_ptr<const DeviceMap>> DevicesWith(WorkerRank worker) override;
  std::string Describe(WorkerRank worker) override { return agent_->Describe(worker); }
  std::shared_ptr<EventLoop> loop() override { return loop_; }

  const WorkerInfo& self() const { return self_; }
  const WorkerOptions& options() const { return options_; }
  const Job& job() const { return job_; }
  const Agent& agent() const { return *agent_; }
  size_t context_count() const { return contexts_.size(); }
  std::vector<ContextState> Contexts() const { return engine_.State(); }
  WorkerMetrics Metrics() const;
  absl::Status StartTrace(const TraceOptions& options) {
    return trace_->Start(options, clock_->Now());
  }
  absl::StatusOr<Trace> StopTrace();

 private:
  WorkerImpl(WorkerOptions options, Job job, WorkerInfo self, std::unique_ptr<Clock> clock,
             std::unique_ptr<Membership> members);

  absl::Status CheckMayLeave() const;
  // Waits until no call is in flight, in either direction, nor, if `contexts`, a context that this
  // worker takes part in.
  absl::Status AwaitIdle(Deadline deadline, bool contexts);

  std::map<WorkerRank, std::string> Names() const;

  // Constant once Create() has returned.
  const WorkerOptions options_;
  Job job_;
  WorkerInfo self_;

  // Parts that synchronize themselves, in the order in which they depend on each other.
  const std::unique_ptr<Clock> clock_;
  const std::shared_ptr<TraceRecorder> trace_;
  const std::unique_ptr<Membership> members_;
  Lookups lookups_;
  DeviceMaps device_maps_;
  ContextRegistry contexts_;
  ThreadPool pool_;
  Engine engine_;
  const std::shared_ptr<EventLoop> loop_;  // may be null
  const std::shared_ptr<Agent> agent_;
  const CallMessages messages_;
  Caller caller_;
  Server server_;
  LastContexts last_contexts_;
  MemberCallback member_callback_;
  MemberSync member_sync_;
  std::atomic<bool> leaving_{false}, joined_{false};
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_WORKER_IMPL_H_
