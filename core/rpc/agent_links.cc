// The connections of an agent: opened to where a peer is now, taken in from who is a member,
// watched, and ended. docs/membership.md has the rules.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/rpc/agent_impl.h"

namespace distgrad {
namespace {

// How long a store that is silent is asked who a worker is. Of one that we know, what we know is
// used after that; whoever calls or is one that we do not know has deadlines of its own.
constexpr absl::Duration kPatienceForKnown = absl::Seconds(5);
constexpr absl::Duration kPatience = absl::Minutes(1);

}  // namespace

// -------------------------------------------------------------------------------------- Opening

absl::StatusOr<std::shared_ptr<Link>> Agent::Impl::LinkTo(WorkerId to) {
  if (closed_) return absl::CancelledError("this worker is shutting down");
  auto it = links_.find(to);
  if (it != links_.end()) return it->second;
  if (directory_ == nullptr && !peers_->Find(to)) return NoWorker(to);
  auto link = std::make_shared<Link>(shared_from_this(), &shared_);
  link->peer = to;
  link->number = ++last_link_;
  link->asked_for = clock_->Now();
  links_.emplace(to, link);
  calls_->Add(*link);
  // Runs on the first thread that sends; opening is the first task of the link.
  link->OpenLater([this, watch = std::weak_ptr<Link>(link), to] {
    if (const auto link = watch.lock()) Open(link, to);
  });
  return link;
}

// Who opens a connection first asks who the peer is now: it may have come back elsewhere.
void Agent::Impl::Open(const std::shared_ptr<Link>& link, WorkerId to) {
  StartHeartbeat();
  if (directory_ == nullptr) return Connect(link, to);
  const absl::Duration patience = peers_->Find(to) ? kPatienceForKnown : kPatience;
  directory_->Find(to, patience,
                   [self = shared_from_this(), link, to](absl::StatusOr<WorkerInfo> found) {
                     self->OnFound(link, to, found);
                   });
}

void Agent::Impl::OnFound(const std::shared_ptr<Link>& link, WorkerId to,
                          const absl::StatusOr<WorkerInfo>& found) {
  absl::Status learned = found.ok() ? Learn(*found, link) : found.status();
  const std::optional<WorkerInfo> known = peers_->Find(to);
  if (!known || absl::IsCancelled(learned)) return link->Close(learned);
  // A store that is gone, or whose entry is of an incarnation that is over, does not keep us from a
  // peer that we know.
  if (!learned.ok()) DG_LOG(WARNING) << "asking for worker " << Describe(to) << ": " << learned;
  if (known->left) return link->Close(absl::UnavailableError("it has left the job"));
  Connect(link, to);
}

void Agent::Impl::Connect(const std::shared_ptr<Link>& link, WorkerId to, uint64_t bulk_of) {
  const std::optional<WorkerInfo> peer = peers_->Find(to);
  bool closed;
  {
    absl::MutexLock lock(&mu_);
    // One that was given up while the store was asked carries nothing, and its end would be taken
    // for that of what the peer has begun since.
    closed = closed_ || link->dead;
    if (peer) link->incarnation = peer->incarnation;
  }
  if (closed || !peer) {
    return link->Close(absl::CancelledError("this worker is shutting down"));
  }
  const WorkerInfo self = peers_->self();
  std::string hello;
  AppendHello({.from = self.id,
               .from_incarnation = self.incarnation,
               .to = to,
               .to_incarnation = peer->incarnation,
               .link = bulk_of},
              &hello);
  absl::StatusOr<std::shared_ptr<Connection>> connection = transport_->Connect(peer->address, link);
  if (!connection.ok()) return link->Close(connection.status());
  (*connection)->Send(Packet{std::move(hello), {}}, nullptr);
  link->SetConnection(*connection);
}

// The bulk link of a link. Who opened the link opens this, too, for the other end may have no way
// to it. It names a number that it has heard over the link, and so does not come before that.

void Agent::Impl::OnBulkWanted(const std::shared_ptr<Link>& link) {
  Packet packet;
  {
    absl::MutexLock lock(&mu_);
    AppendFrame({.kind = FrameKind::kBulk, .link = link->accepted ? link->number : 0},
                &packet.bytes);
  }
  link->Send(std::move(packet));
}

void Agent::Impl::OpenBulk(const std::shared_ptr<Link>& link, WorkerId peer, uint64_t number) {
  if (number == 0) return OnBulkWanted(link);
  auto bulk = std::make_shared<Link>(shared_from_this(), &shared_);
  {
    absl::MutexLock lock(&mu_);
    // Both ends may have asked for it.
    if (closed_ || link->accepted || std::exchange(link->has_bulk, true)) return;
    bulk->peer = peer;
    bulk->number = ++last_link_;
    bulk->is_bulk = true;
    bulk->main = link;
    AddOther(bulk);
  }
  Connect(bulk, peer, number);
  link->SetBulk(std::move(bulk));
}

absl::Status Agent::Impl::AdmitBulk(const std::shared_ptr<Link>& link, const Hello& hello) {
  std::shared_ptr<Link> main;
  {
    absl::MutexLock lock(&mu_);
    for (auto& other : AllLinks()) {
      if (other->number == hello.link) main = std::move(other);
    }
    if (main == nullptr || !main->accepted || main->is_bulk || main->peer != hello.from) {
      return absl::FailedPreconditionError("the connection that it belongs to is not there");
    }
    link->peer = hello.from;
    link->is_bulk = true;
    link->main = main;
  }
  main->SetBulk(link);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------ Taking in

// Takes what waits on a link, in order, until nothing does or the store is to be asked.
void Agent::Impl::Release(const std::shared_ptr<Link>& link) {
  {
    absl::MutexLock lock(&mu_);
    if (std::exchange(link->releasing, true)) return;
  }
  for (;;) {
    Packet packet;
    {
      absl::MutexLock lock(&mu_);
      if (link->dead) link->held.clear();
      if (link->held.empty() || link->asking) {
        link->holds = link->asking;
        link->releasing = false;
        return;
      }
      packet = std::move(link->held.front());
      link->held.pop_front();
      link->held_bytes -= packet.size();
    }
    Handle(link, std::move(packet));
  }
}

absl::Status Agent::Impl::Greet(const std::shared_ptr<Link>& link, WireReader& reader) {
  DG_ASSIGN_OR_RETURN(const Hello hello, ReadHello(reader));
  {
    absl::MutexLock lock(&mu_);
    if (link->peer || link->asking) {
      return absl::InvalidArgumentError("a second hello on one connection");
    }
  }
  absl::StatusOr<bool> known = peers_->Check(hello);
  if (known.ok() && !*known && directory_ == nullptr) {
    known = absl::FailedPreconditionError(
        absl::StrCat("it comes from worker ", hello.from, ", which is not a member of this job"));
  }
  if (!known.ok()) {
    Refuse(link, known.status());
  } else if (hello.link != 0) {
    const absl::Status admitted = AdmitBulk(link, hello);
    if (!admitted.ok()) Refuse(link, admitted);
  } else if (*known) {
    Admit(link, hello);
  } else {
    {
      absl::MutexLock lock(&mu_);
      link->holds = link->asking = true;
    }
    directory_->Find(hello.from, kPatience,
                     [self = shared_from_this(), link, hello](absl::StatusOr<WorkerInfo> found) {
                       self->OnFoundPeer(link, hello, found);
                     });
  }
  return absl::OkStatus();
}

// The store's word on one who has joined, or come back, since we last looked.
void Agent::Impl::OnFoundPeer(const std::shared_ptr<Link>& link, const Hello& hello,
                              const absl::StatusOr<WorkerInfo>& found) {
  absl::Status status = found.status();
  if (status.ok() && found->incarnation != hello.from_incarnation) {
    status = absl::FailedPreconditionError(absl::StrCat("it comes from an incarnation of worker '",
                                                        found->name, "' (", hello.from,
                                                        ") that the job's store does not know"));
  }
  if (status.ok()) status = Learn(*found, link);
  if (status.ok()) {
    Admit(link, hello);
  } else {
    Refuse(link, status);
  }
  {
    absl::MutexLock lock(&mu_);
    link->asking = false;
  }
  Release(link);
}

void Agent::Impl::Admit(const std::shared_ptr<Link>& link, const Hello& hello) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || link->dead) return;  // it broke while the store was asked
    link->peer = hello.from;
    link->incarnation = hello.from_incarnation;
    // Two workers may open connections to each other at the same time; then both stay.
    if (links_.emplace(hello.from, link).second) calls_->Add(*link);
  }
  // It was silent for long, and speaks again.
  SetAlive(hello.from, hello.from_incarnation);
}

void Agent::Impl::Refuse(const std::shared_ptr<Link>& link, const absl::Status& why) {
  DG_LOG(WARNING) << "refusing a connection: " << why.message();
  {
    absl::MutexLock lock(&mu_);
    link->dead = true;
  }
  Packet packet;
  AppendFrame({.kind = FrameKind::kRefused, .status = why}, &packet.bytes);
  link->SendLast(std::move(packet), why);
}

// --------------------------------------------------------------------------------------- Ending

void Agent::Impl::OnClosed(const std::shared_ptr<Link>& link, absl::Status why) {
  bool known = false, lost = false;
  WorkerId peer = 0;
  MemberWatch::ClosedLink closed;
  std::shared_ptr<Link> main;
  {
    absl::MutexLock lock(&mu_);
    if (link->is_bulk) main = link->main.lock();
    known = link->peer.has_value() && !link->is_bulk;
    if (known) {
      peer = *link->peer;
      auto it = links_.find(peer);
      const bool was_used = it != links_.end() && it->second == link;
      if (was_used) links_.erase(it);
      // A probe that nobody answered carried nothing that could be lost.
      lost = !closed_ && !link->dead && (was_used || link->heard() > 0);
      closed = {.peer = peer,
                .incarnation = link->incarnation,
                .was_heard = link->heard() > 0,
                .was_silent = link->silent,
                .is_there = link->is_there(),
                .asked_for = link->asked_for};
    }
    link->dead = true;
  }
  if (main != nullptr) main->Close(why);
  bool left = false;
  if (known) {
    const std::optional<WorkerInfo> info = peers_->Find(peer);
    left = info && info->left;
    why =
        left ? absl::UnavailableError(absl::StrCat("worker ", Describe(peer), " has left the job"))
             : Annotate(why, absl::StrCat("the connection with worker ", Describe(peer), " broke"));
  }
  calls_->EndCallsOver(*link, why);
  if (!lost) return;
  service_->OnPeerLost(peer, why);
  if (!left) OnWatchedLinkClosed(closed, why);
}

absl::Status Agent::Impl::Learn(const WorkerInfo& worker, const std::shared_ptr<Link>& keep) {
  DG_ASSIGN_OR_RETURN(const bool is_new, peers_->Learn(worker));
  if (is_new) DropOldIncarnation(worker.id, keep);
  service_->OnMemberEvents();
  return absl::OkStatus();
}

// Ends what there is with the old incarnation of a peer, here and now: whatever the new one sends
// must find nothing of it.
void Agent::Impl::DropOldIncarnation(WorkerId peer, const std::shared_ptr<Link>& keep) {
  const absl::Status why = absl::UnavailableError(
      absl::StrCat("worker ", Describe(peer), " has come back as a new incarnation"));
  std::vector<std::shared_ptr<Link>> old;
  {
    absl::MutexLock lock(&mu_);
    for (auto& link : AllLinks()) {
      if (link->peer != peer || link == keep) continue;
      link->dead = true;
      old.push_back(std::move(link));
    }
    const auto it = links_.find(peer);
    if (it != links_.end() && it->second != keep) links_.erase(it);
  }
  for (const auto& link : old) calls_->EndCallsOver(*link, why);
  // Where there was no connection, what went over an earlier one has been lost with that; and a
  // context may have begun since, for which this peer is the new incarnation.
  if (!old.empty()) service_->OnPeerLost(peer, why);
  for (const auto& link : old) link->Close(why);
}

void Agent::Impl::SayLeaving() {
  std::vector<std::shared_ptr<Link>> links;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [peer, link] : links_) links.push_back(link);
  }
  for (const auto& link : links) {
    if (!link->connected()) continue;  // whoever connects asks the store
    Packet packet;
    AppendFrame({.kind = FrameKind::kLeaving}, &packet.bytes);
    link->Send(std::move(packet));
  }
}

// ----------------------------------------------------------------------------------- Heartbeats

std::vector<std::shared_ptr<Link>> Agent::Impl::AllLinks() {
  std::vector<std::shared_ptr<Link>> links;
  absl::flat_hash_set<const Link*> seen;
  const auto add = [&](std::shared_ptr<Link> link) {
    if (link != nullptr && !link->loopback() && seen.insert(link.get()).second) {
      links.push_back(std::move(link));
    }
  };
  for (const auto& [peer, link] : links_) add(link);
  for (const auto& link : others_) add(link.lock());
  return links;
}

// A link that has ended leaves its memory to the list, so the list is cleared of those each time.
void Agent::Impl::AddOther(const std::shared_ptr<Link>& link) {
  others_.erase(std::remove_if(others_.begin(), others_.end(),
                               [](const auto& other) { return other.expired(); }),
                others_.end());
  others_.push_back(link);
}

void Agent::Impl::StartHeartbeat() {
  if (heartbeat_.interval() == absl::InfiniteDuration()) return;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || std::exchange(beats_, true)) return;
  }
  ArmHeartbeat();
}

void Agent::Impl::ArmHeartbeat() {
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + heartbeat_.interval(), [weak = weak_from_this()] {
        if (auto self = weak.lock()) self->Beat();
      });
  bool closed;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    if (!closed) heartbeat_timer_ = timer;
  }
  if (closed) clock_->Cancel(timer);
}

void Agent::Impl::Beat() {
  std::vector<std::shared_ptr<Link>> links;
  std::vector<Heartbeat::Reading> readings;
  {
    absl::MutexLock lock(&mu_);
    heartbeat_timer_.reset();
    if (closed_) return;
    for (auto& link : AllLinks()) {
      if (link->closed()) continue;
      readings.push_back({.link = link->number, .peer = link->peer, .heard = link->heard()});
      links.push_back(std::move(link));
    }
    beats_ = !links.empty();
    if (!beats_) return;
  }
  ArmHeartbeat();
  const Heartbeat::Verdict verdict = heartbeat_.Tick(clock_->Now(), readings);
  for (size_t i : verdict.ask) {
    Packet ping;
    AppendFrame({.kind = FrameKind::kPing}, &ping.bytes);
    links[i]->Send(std::move(ping));
  }
  for (WorkerId peer : verdict.probe) Probe(peer);
  for (size_t i : verdict.lost) {
    {
      absl::MutexLock lock(&mu_);
      links[i]->silent = true;
    }
    links[i]->Close(absl::UnavailableError(
        absl::StrCat("nothing was heard of it within the heartbeat limit of ",
                     absl::FormatDuration(heartbeat_.limit()))));
  }
}

// A second link stays for as long as the first.
void Agent::Impl::Probe(WorkerId peer) {
  auto probe = std::make_shared<Link>(shared_from_this(), &shared_);
  {
    absl::MutexLock lock(&mu_);
    int links = 0;
    for (const auto& link : AllLinks()) {
      links += link->peer == peer && !link->is_bulk && !link->closed();
    }
    if (closed_ || links != 1) return;
    probe->peer = peer;
    probe->number = ++last_link_;
    AddOther(probe);
  }
  Connect(probe, peer);
  Packet ping;
  AppendFrame({.kind = FrameKind::kPing}, &ping.bytes);
  probe->Send(std::move(ping));
}

}  // namespace distgrad
