// Begins and ends an agent, and answers what it can be asked.
#include "core/rpc/agent.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/rpc/agent_impl.h"

namespace distgrad {

// --------------------------------------------------------------------------------- Life

absl::StatusOr<std::string> Agent::Impl::Listen() {
  return transport_->Listen([self = shared_from_this()](std::shared_ptr<Connection> connection) {
    auto link = std::make_shared<Link>(self, &self->shared_);
    link->SetConnection(std::move(connection));
    bool closed;
    {
      absl::MutexLock lock(&self->mu_);
      closed = self->closed_;
      self->AddOther(link);
      link->accepted = true;
      link->number = ++self->last_link_;
      // Until we know who is a member.
      link->holds = !self->started_;
    }
    if (closed) link->Close(absl::CancelledError("this worker is shutting down"));
    self->StartHeartbeat();
    return link;
  });
}

absl::Status Agent::Impl::Start(const WorkerInfo& self, std::vector<WorkerInfo> workers) {
  DG_RETURN_IF_ERROR(peers_->Start(self, std::move(workers)));
  std::vector<std::shared_ptr<Link>> links;
  {
    absl::MutexLock lock(&mu_);
    links = AllLinks();
    started_ = true;
    auto loopback = std::make_shared<Link>(shared_from_this(), &shared_, /*loopback=*/true);
    loopback->peer = self.id;
    calls_->Add(*loopback);
    links_.emplace(self.id, std::move(loopback));
  }
  // What others sent before we knew who they are.
  for (const auto& link : links) Release(link);
  return absl::OkStatus();
}

void Agent::Impl::Close() {
  std::vector<std::shared_ptr<Link>> links;
  std::optional<Clock::TimerId> beat, watch;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    links = AllLinks();
    for (const auto& [peer, link] : links_) {
      if (link != nullptr && link->loopback()) links.push_back(link);
    }
    links_.clear();
    beat = std::exchange(heartbeat_timer_, std::nullopt);
    watch = std::exchange(watch_timer_, std::nullopt);
  }
  if (beat) clock_->Cancel(*beat);
  if (watch) clock_->Cancel(*watch);
  const absl::Status why = absl::CancelledError("this worker is shutting down");
  calls_->Close(why);
  for (auto& link : links) link->Close(why);
}

// --------------------------------------------------------------------------------- Names

absl::StatusOr<WorkerId> Agent::Impl::FindWorker(int id) const {
  const auto worker = static_cast<WorkerId>(id);
  if (id != worker || (directory_ == nullptr && !peers_->Find(worker))) return NoWorker(id);
  return worker;
}

absl::StatusOr<WorkerInfo> Agent::Impl::Info(WorkerId worker) const {
  const std::optional<WorkerInfo> known = peers_->Find(worker);
  if (!known) return NoWorker(worker);
  return *known;
}

absl::Status Agent::Impl::NoWorker(int id) const {
  return absl::NotFoundError(absl::StrCat("there is no worker with the id ", id, " in this job"));
}

std::vector<std::pair<WorkerId, uint64_t>> Agent::Impl::Queued() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::pair<WorkerId, uint64_t>> queued;
  for (const auto& [peer, link] : links_) queued.emplace_back(peer, link->window()->acquired());
  std::sort(queued.begin(), queued.end());
  return queued;
}

// --------------------------------------------------------------------------------- Agent

Agent::Agent(Clock* clock, Transport* transport, AgentService* service, AgentOptions options)
    : impl_(std::make_shared<Impl>(clock, transport, service, options)) {}
Agent::~Agent() { Close(); }
absl::StatusOr<std::string> Agent::Listen() { return impl_->Listen(); }
absl::Status Agent::Start(const WorkerInfo& self, std::vector<WorkerInfo> workers) {
  return impl_->Start(self, std::move(workers));
}
Agent::Request Agent::NewRequest(absl::string_view function) {
  Request request{.function = std::string(function), .packet = {}};
  AppendFrame({.kind = FrameKind::kRequest, .function = function}, &request.packet.bytes);
  return request;
}
Packet Agent::NewNotice() {
  Packet packet;
  AppendFrame({.kind = FrameKind::kNotice}, &packet.bytes);
  return packet;
}
uint64_t Agent::Call(WorkerId to, Request request, const CallTerms& terms, ReplyCallback done) {
  return impl_->Call(to, std::move(request), terms, std::move(done));
}
std::weak_ptr<Canceller> Agent::canceller() { return impl_->calls(); }
std::vector<CallStats> Agent::Stats() const { return impl_->calls()->metrics().Snapshot(); }
std::vector<std::pair<WorkerId, uint64_t>> Agent::Queued() const { return impl_->Queued(); }
void Agent::Notify(WorkerId to, Packet notice) { impl_->Notify(to, std::move(notice)); }
absl::StatusOr<WorkerId> Agent::FindWorker(absl::string_view name) const {
  return impl_->peers().Find(name);
}
absl::StatusOr<WorkerId> Agent::FindWorker(int id) const { return impl_->FindWorker(id); }
absl::StatusOr<WorkerInfo> Agent::Info(WorkerId worker) const { return impl_->Info(worker); }
std::vector<WorkerInfo> Agent::Members() const { return impl_->peers().Members(); }
size_t Agent::MemberCount() const { return impl_->peers().size(); }
absl::Status Agent::Learn(const WorkerInfo& worker) { return impl_->Learn(worker, nullptr); }
std::string Agent::Describe(WorkerId worker) const { return impl_->peers().Describe(worker); }
void Agent::WatchMembers(bool late) { impl_->WatchMembers(late); }
void Agent::WatchToo(WorkerId member) { impl_->WatchToo(member); }
void Agent::SetAlive(WorkerId worker, Incarnation incarnation) {
  impl_->SetAlive(worker, incarnation);
}
void Agent::StopWatching() { impl_->StopWatching(); }
void Agent::SetLost(WorkerId worker, Incarnation incarnation, absl::string_view reason) {
  impl_->SetLost(worker, incarnation, reason);
}
void Agent::KeepEvents(bool keep) { impl_->peers().KeepEvents(keep); }
std::vector<MemberEvent> Agent::TakeEvents() { return impl_->peers().TakeEvents(); }
void Agent::SayLeaving() { impl_->SayLeaving(); }
size_t Agent::in_flight() const { return impl_->calls()->size(); }
size_t Agent::served() const { return impl_->served(); }
absl::Time Agent::Now() const { return impl_->clock_->Now(); }
void Agent::Close() { impl_->Close(); }

}  // namespace distgrad
