// Creates a worker and takes it down, and forwards to its implementation.
#include "core/worker/worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/base/processors.h"
#include "core/base/status.h"
#include "core/tensor/values.h"
#include "core/worker/callers_loop.h"
#include "core/worker/job.h"
#include "core/worker/rendezvous.h"
#include "core/worker/worker_impl.h"

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

// ---------------------------------------------------------------------------------------- Life

Worker::Impl::Impl(WorkerOptions options, Job job, WorkerInfo self, std::unique_ptr<Clock> clock,
                   std::unique_ptr<Membership> members)
    : options_(std::move(options)),
      job_(std::move(job)),
      self_(std::move(self)),
      clock_(std::move(clock)),
      trace_(std::make_shared<TraceRecorder>()),
      members_(std::move(members)),
      lookups_(self_.name, members_.get()),
      device_maps_(self_.name, options_.device_maps, job_.transport.get()),
      contexts_(self_.id, self_.incarnation, options_.limits.contexts_per_peer),
      pool_(self_.name, options_.threads > 0 ? options_.threads : UsableProcessors(), clock_.get()),
      engine_(self_.id, self_.incarnation, this, &pool_, clock_.get(), trace_.get(), &contexts_,
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
               .messages = messages_}),
      member_callback_(&pool_, agent_.get()),
      member_sync_({.self = self_.id,
                    .worker0_serves_store = job_.worker0_serves_store,
                    .heartbeat_limit = options_.heartbeat_limit,
                    .clock = *clock_,
                    .members = *members_,
                    .lookups = lookups_,
                    .agent = *agent_,
                    .callback = member_callback_}) {}

absl::StatusOr<std::shared_ptr<Worker::Impl>> Worker::Impl::Create(WorkerOptions options) {
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
  std::shared_ptr<Impl> impl(new Impl(std::move(options), std::move(job), std::move(self),
                                      std::move(clock), std::move(members)));
  impl->server_.SetOwner(impl);
  DG_RETURN_IF_ERROR(impl->pool_.Start());
  DG_ASSIGN_OR_RETURN(impl->self_.devices, DeviceMaps::Encode(impl->options_.device_maps));
  DG_ASSIGN_OR_RETURN(impl->self_.address, impl->agent_->Listen());
  DG_ASSIGN_OR_RETURN(std::vector<WorkerInfo> all, impl->members_->Enter(impl->self_, deadline));
  if (impl->options_.join) ReserveForPeers(all.size());  // only now is it known how many there are
  absl::Status begun;
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
  impl->members_->OnRead([raw = impl.get()](const std::vector<WorkerInfo>& members) {
    raw->member_sync_.Learn(members).IgnoreError();
  });
  impl->agent_->WatchMembers(impl->members_->late());
  return impl;
}

void Worker::Impl::Close() {
  members_->Close();
  engine_.Close();
  agent_->Close();
}

absl::Status Worker::Impl::Join(Deadline deadline) {
  if (pool_.OnThisPool() || engine_.OnDeviceThread()) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", self_.name,
                     "' cannot be waited for on one of its own threads; Close() it there"));
  }
  Close();
  member_callback_.Stop();
  {
    const BlockingScope blocking;
    if (pool_.Join(deadline) && engine_.JoinThreads(deadline)) return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "worker '", self_.name, "' is closed, and ", pool_.thread_count() + engine_.thread_count(),
      " of its threads have not ended: a handler, a callback or a part of a backward pass runs"));
}

void Worker::Impl::Join() {
  if (joined_.exchange(true)) return;
  member_sync_.Stop();
  const BlockingScope blocking;
  Close();
  member_callback_.Set(nullptr);
  lookups_.Close();
  pool_.Join();
  engine_.Join();
  // The clock's thread may be in the agent or in a pass, and go on to the transport.
  absl::Notification idle;
  clock_->At(absl::InfinitePast(), [&idle] { idle.Notify(); });
  idle.WaitForNotification();
  job_.transport.reset();
  for (const auto& context : contexts_.All()) engine_.Release(context->id());
}

absl::StatusOr<std::shared_ptr<const DeviceMap>> Worker::Impl::DevicesWith(WorkerId worker) {
  DG_ASSIGN_OR_RETURN(const WorkerInfo info, agent_->Info(worker));
  return device_maps_.With(info);
}

std::map<WorkerId, std::string> Worker::Impl::Names() const {
  std::map<WorkerId, std::string> names;
  for (WorkerInfo& worker : agent_->Members()) names.emplace(worker.id, std::move(worker.name));
  return names;
}

absl::StatusOr<Trace> Worker::Impl::StopTrace() {
  DG_ASSIGN_OR_RETURN(Trace trace, trace_->Stop(clock_->Now()));
  trace.worker = self_.name;
  trace.id = self_.id;
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

WorkerMetrics Worker::Impl::Metrics() const {
  WorkerMetrics metrics;
  metrics.worker = self_.name;
  metrics.names = Names();
  metrics.calls = agent_->Stats();
  for (const auto& [peer, bytes] : agent_->Queued()) metrics.queued_bytes.emplace(peer, bytes);
  metrics.contexts = contexts_.size();
  const Engine::PassCounts passes = engine_.CountPasses();
  metrics.passes_ended = passes.ended;
  metrics.passes_failed = passes.failed;
  metrics.passes_running = passes.running;
  return metrics;
}

// -------------------------------------------------------------------------------------- Worker

Worker::Worker(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() { impl_->Join(); }
void Worker::Close() { impl_->Close(); }
absl::Status Worker::Join(Deadline deadline) { return impl_->Join(deadline); }

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(WorkerOptions options) {
  const BlockingScope blocking;
  DG_ASSIGN_OR_RETURN(std::shared_ptr<Impl> impl, Impl::Create(std::move(options)));
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

WorkerId Worker::rank() const { return impl_->self().id; }
const std::string& Worker::name() const { return impl_->self().name; }
int Worker::world_size() const { return static_cast<int>(impl_->agent().MemberCount()); }
const std::shared_ptr<Store>& Worker::store() const { return impl_->job().store; }
const std::string& Worker::host() const { return impl_->job().host; }
int Worker::local_rank() const { return impl_->job().local_rank; }
int Worker::local_world_size() const { return impl_->job().local_world_size; }
std::vector<std::string> Worker::names() const {
  std::vector<std::string> names;
  for (Member& member : members()) names.push_back(std::move(member.name));
  return names;
}
std::vector<Member> Worker::members() const { return impl_->members(); }
absl::Status Worker::Register(std::string function, Handler handler) {
  return impl_->server().Register(std::move(function), {.handler = std::move(handler)});
}
absl::Status Worker::RegisterAsync(std::string function, AsyncHandler handler) {
  return impl_->server().Register(std::move(function), {.async_handler = std::move(handler)});
}
absl::Status Worker::RegisterOwn(std::string function, Handler handler) {
  return impl_->server().Register(std::move(function),
                                  {.handler = std::move(handler), .is_own = true});
}
void Worker::UnregisterOwn(absl::string_view function) { impl_->server().Unregister(function); }
Future<Message> Worker::CallAsync(WorkerRef to, absl::string_view function, Message message,
                                  CallOptions options) {
  return impl_->caller().Call(to, function, message, options, /*wait=*/false);
}
absl::StatusOr<Message> Worker::Call(WorkerRef to, absl::string_view function, Message message,
                                     CallOptions options) {
  return impl_->caller().Call(to, function, message, options, /*wait=*/true).Take();
}
std::vector<absl::StatusOr<Message>> Worker::CallEach(absl::Span<const WorkerRef> to,
                                                      absl::string_view function,
                                                      const Message& message, CallOptions options) {
  std::vector<absl::StatusOr<Message>> replies;
  for (Future<Message>& reply : impl_->caller().CallEach(to, function, message, options)) {
    replies.push_back(reply.Take());
  }
  return replies;
}
absl::StatusOr<std::vector<c10::IValue>> Worker::CallOperator(WorkerRef to, absl::string_view op,
                                                              std::vector<c10::IValue> arguments,
                                                              CallOptions options) {
  DG_ASSIGN_OR_RETURN(Message message, EncodeValues(arguments));
  DG_ASSIGN_OR_RETURN(Message reply, Call(to, op, std::move(message), options));
  return DecodeValues(std::move(reply));
}
Context Worker::NewContext() { return impl_->NewContext(); }
absl::Status Worker::Barrier(Deadline deadline, OnLostMember on_lost) {
  return impl_->Barrier(deadline, on_lost);
}
absl::Status Worker::Shutdown(Deadline deadline, OnLostMember on_lost) {
  return impl_->Shutdown(deadline, on_lost);
}
absl::Status Worker::Serve(OnLostMember on_lost) {
  return impl_->Shutdown(Deadline::Never(), on_lost);
}
void Worker::OnMember(std::function<void(const MemberEvent&)> callback) {
  impl_->OnMember(std::move(callback));
}
absl::Status Worker::Leave(Deadline deadline) { return impl_->Leave(deadline); }
absl::Status Worker::UpdateMembers() { return impl_->UpdateMembers(impl_->DefaultDeadline()); }
size_t Worker::context_count() const { return impl_->context_count(); }
WorkerMetrics Worker::Metrics() const { return impl_->Metrics(); }
absl::Status Worker::StartTrace(TraceOptions options) { return impl_->StartTrace(options); }
absl::StatusOr<Trace> Worker::StopTrace() { return impl_->StopTrace(); }
std::vector<ContextState> Worker::Contexts() const { return impl_->Contexts(); }

}  // namespace distgrad
