// Creates what a worker is made of, and takes it down.
#include "core/worker/worker_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/await_memory.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/base/processors.h"
#include "core/base/status.h"
#include "core/worker/callers_loop.h"
#include "core/worker/rendezvous.h"
#include "core/worker/serve_sum_gradients.h"

namespace distgrad {
namespace {

// What is to be added to its times to get those of the machine's clock, which is what the traces of
// several processes have in common.
absl::Duration ToMachinesClock(Clock& clock) {
  absl::Duration shift, best = absl::InfiniteDuration();
  // The best of some: between two looks this thread may have to wait.
  for (int i = 0; i < 10; ++i) {
    const absl::Time before = clock.Now(), now = absl::Now(), after = clock.Now();
    if (after - before >= best) continue;
    best = after - before;
    shift = now - before;
  }
  return shift;
}

}  // namespace

WorkerImpl::WorkerImpl(WorkerOptions options, Job job, WorkerInfo self,
                       std::unique_ptr<Clock> clock, std::unique_ptr<Membership> members)
    : options_(std::move(options)),
      job_(std::move(job)),
      self_(std::move(self)),
      clock_(std::move(clock)),
      trace_(std::make_shared<TraceRecorder>()),
      members_(std::move(members)),
      lookups_(self_.name, members_.get()),
      device_maps_(self_.name, options_.device_maps, job_.transport.get()),
      contexts_(self_.rank, self_.incarnation, options_.limits.contexts_per_peer),
      pool_(self_.name, options_.thread_count > 0 ? options_.thread_count : UsableProcessors(),
            clock_.get()),
      engine_(self_.rank, self_.incarnation, this, &pool_, clock_.get(), trace_.get(), &contexts_,
              options_.limits),
      loop_(NewCallersLoop(job_.transport->loop())),
      agent_(std::make_shared<Agent>(
          clock_.get(), job_.transport.get(), this,
          AgentOptions{.directory = &lookups_,
                       .trace = trace_,
                       .heartbeat_limit = options_.heartbeat_limit,
                       .max_workers = static_cast<size_t>(options_.max_workers),
                       .limits = options_.limits})),
      messages_(options_.limits, &engine_, this),
      caller_({.self = self_,
               .owner = *this,
               .timeout = options_.timeout,
               .clock = *clock_,
               .pool = pool_,
               .lookups = lookups_,
               .agent = *agent_,
               .engine = engine_,
               .contexts = contexts_,
               .messages = messages_,
               .loop = loop_}),
      server_({.self = self_,
               .options = options_,
               .clock = *clock_,
               .pool = pool_,
               .contexts = contexts_,
               .engine = engine_,
               .messages = messages_}),
      last_contexts_({.self = self_,
                      .heartbeat_limit = options_.heartbeat_limit,
                      .contexts = contexts_,
                      .caller = caller_,
                      .members = *members_,
                      .lookups = lookups_,
                      .agent = *agent_}),
      member_callback_(&pool_, agent_.get()),
      member_sync_({.self = self_.rank,
                    .worker0_serves_store = job_.worker0_serves_store,
                    .heartbeat_limit = options_.heartbeat_limit,
                    .clock = *clock_,
                    .members = *members_,
                    .lookups = lookups_,
                    .agent = *agent_,
                    .callback = member_callback_}) {}

absl::StatusOr<std::shared_ptr<WorkerImpl>> WorkerImpl::Create(WorkerOptions options) {
  const Deadline deadline = Deadline::After(options.join_timeout);
  if (options.heartbeat_limit < absl::Milliseconds(100)) {
    return absl::InvalidArgumentError(absl::StrCat("heartbeat_limit must be 100ms or more, not ",
                                                   absl::FormatDuration(options.heartbeat_limit)));
  }
  DG_ASSIGN_OR_RETURN(std::unique_ptr<Clock> clock, NewSystemClock());
  DG_ASSIGN_OR_RETURN(Job job, JoinJob(options, deadline));
  auto members = std::make_unique<Membership>(
      job.store, MembershipOptions{.name = job.name,
                                   .rank = job.rank,
                                   .world_size = job.world_size,
                                   .join = options.join,
                                   .max_workers = options.max_workers,
                                   .store_limit = options.heartbeat_limit});
  DG_ASSIGN_OR_RETURN(WorkerInfo self, members->Claim(deadline));
  std::shared_ptr<WorkerImpl> impl(new WorkerImpl(
      std::move(options), std::move(job), std::move(self), std::move(clock), std::move(members)));
  impl->server_.SetOwner(impl);
  DG_RETURN_IF_ERROR(impl->server_.Register(
      std::string(kSumGradients),
      {.handler = [contexts = &impl->contexts_](
                      Request& request) { return ServeSumGradients(*contexts, request); },
       .is_own = true}));
  DG_RETURN_IF_ERROR(impl->server_.Register(
      std::string(kLastContext),
      {.handler = [contexts = &impl->contexts_](Request&) { return ServeLastContext(*contexts); },
       .is_own = true,
       .is_inline = true}));
  DG_RETURN_IF_ERROR(impl->pool_.Start());
  DG_ASSIGN_OR_RETURN(impl->self_.devices, DeviceMaps::Encode(impl->options_.device_maps));
  DG_ASSIGN_OR_RETURN(impl->self_.address, impl->agent_->Listen());
  DG_ASSIGN_OR_RETURN(std::vector<WorkerInfo> all, impl->members_->Enter(impl->self_, deadline));
  if (impl->options_.join) ReserveForPeers(all.size());  // only now is it known how many there are
  const bool comes_back = impl->members_->late() && StartOf(impl->self_.incarnation) > 1;
  absl::Status begun;
  if (comes_back) {
    const auto ever = impl->members_->AllEver(deadline);
    begun = ever.status();
    if (ever.ok()) impl->last_contexts_.ComeBack(*ever);
  }
  for (const WorkerInfo& worker : all) {
    if (begun.ok()) begun = impl->device_maps_.With(worker).status();
  }
  if (begun.ok()) begun = impl->agent_->Start(impl->self_, std::move(all));
  if (!begun.ok()) {
    // A member that is not there would be waited for.
    impl->members_->Leave(absl::InfinitePast()).IgnoreError();
    return begun;
  }
  // Whoever waits for a member that it has never heard of is to watch it, too.
  impl->members_->OnRead([raw = impl.get()](const std::vector<WorkerInfo>& members,
                                            const std::vector<WorkerInfo>& denied) {
    raw->member_sync_.UpdatePeers(members).IgnoreError();
    raw->member_sync_.OnDenied(denied);
  });
  impl->agent_->WatchMembers(impl->members_->late());
  if (comes_back) impl->last_contexts_.AskAll(deadline);
  return impl;
}

void WorkerImpl::Abort() {
  member_sync_.Stop();
  members_->Close();
  engine_.Close();
  agent_->Close();
}

absl::Status WorkerImpl::Close(Deadline deadline) {
  if (pool_.OnThisPool() || engine_.OnDeviceThread()) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", self_.name,
                     "' cannot be closed on one of its own threads, for which that waits"));
  }
  Abort();
  member_callback_.Stop();
  {
    const BlockingScope blocking;
    if (pool_.Join(deadline) && engine_.JoinThreads(deadline)) return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "worker '", self_.name, "' is closed, and ", pool_.thread_count() + engine_.thread_count(),
      " of its threads have not ended: a handler, a callback or a part of a backward pass runs"));
}

void WorkerImpl::Join() {
  if (joined_.exchange(true)) return;
  const BlockingScope blocking;
  // Destructors call this: so it waits where there is no memory for it.
  AwaitMemory([this] { Abort(); });
  member_callback_.Set(nullptr);
  lookups_.Close();
  pool_.Join();
  engine_.Join();
  // The clock's thread may be in the agent or in a pass, and go on to the transport.
  absl::Notification idle;
  AwaitMemory([&] { clock_->At(absl::InfinitePast(), [&idle] { idle.Notify(); }); });
  idle.WaitForNotification();
  job_.transport.reset();
  for (const auto& context : AwaitMemory([this] { return contexts_.All(); })) {
    engine_.Release(context->id());
  }
}

absl::StatusOr<std::shared_ptr<const DeviceMap>> WorkerImpl::DevicesWith(WorkerRank worker) {
  DG_ASSIGN_OR_RETURN(const WorkerInfo info, agent_->Info(worker));
  return device_maps_.With(info);
}

std::map<WorkerRank, std::string> WorkerImpl::Names() const {
  std::map<WorkerRank, std::string> names;
  for (WorkerInfo& worker : agent_->Members()) names.emplace(worker.rank, std::move(worker.name));
  return names;
}

absl::StatusOr<Trace> WorkerImpl::StopTrace() {
  DG_ASSIGN_OR_RETURN(Trace trace, trace_->Stop(clock_->Now()));
  trace.worker = self_.name;
  trace.rank = self_.rank;
  trace.incarnation = self_.incarnation;
  trace.names = Names();
  const absl::Duration shift = ToMachinesClock(*clock_);
  trace.begin += shift;
  trace.end += shift;
  for (TraceSpan& span : trace.spans) {
    span.begin += shift;
    span.work += shift;
    span.end += shift;
  }
  if (trace.dropped > 0) {
    DG_LOG(WARNING) << "worker '" << self_.name << "': " << trace.dropped
                    << " spans did not fit into the trace; give TraceOptions more max_bytes";
  }
  return trace;
}

WorkerMetrics WorkerImpl::Metrics() const {
  WorkerMetrics metrics;
  metrics.worker = self_.name;
  metrics.names = Names();
  metrics.calls = agent_->Stats();
  for (const auto& [peer, bytes] : agent_->Queued()) metrics.queued_bytes.emplace(peer, bytes);
  metrics.contexts = contexts_.size();
  const Engine::PassCounts passes = engine_.CountPasses();
  metrics.passes_ended = passes.ended;
  metrics.passes_failed = passes.failed;
  metrics.passes_in_flight = passes.running;
  return metrics;
}

}  // namespace distgrad
