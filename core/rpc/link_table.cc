// Opens, takes in, watches and ends the links of an agent.
#include "core/rpc/link_table.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/await_memory.h"
#include "core/base/exception.h"
#include "core/base/log.h"
#include "core/base/make_or.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// How long a silent store is asked who a worker is. Of a worker that we know, what we know is used
// after that; calls to an unknown one, and its own connection, have deadlines of their own.
constexpr absl::Duration kPatienceForKnown = absl::Seconds(5);
constexpr absl::Duration kPatience = absl::Minutes(1);

absl::Status ShuttingDown() { return absl::CancelledError("this worker is shutting down"); }

void SendFrame(Link& link, const Frame& frame) {
  Packet packet;
  AppendFrame(frame, &packet.bytes);
  link.Send(std::move(packet));
}

void SendPing(Link& link) {
  link.SetAsked();  // before its answer can come
  try {
    SendFrame(link, {.kind = FrameKind::kPing});
  } catch (const std::bad_alloc&) {
    link.SetNotAsked();
    throw;
  }
}

// Whether nothing has come on that link or left, nor waits to leave.
bool IsUntouched(const Link& link) { return link.heard() == 0 && link.sent() == 0 && link.idle(); }

// Whether nothing was sent on that link of ours, so that it need not be open: a refused call may
// have made it.
bool IsUnused(const Link& link) {
  return link.kind() == Link::Kind::kOpened && !link.is_bulk() && IsUntouched(link);
}

// Says in the log who that is; by rank alone where there is no memory for the name.
std::string NameIn(const Peers& peers, WorkerRank worker) {
  try {
    return peers.Describe(worker);
  } catch (const std::bad_alloc&) {
    return absl::StrCat(worker);  // in the string itself
  }
}

// Returns why a connection is refused, and has it in the log, with who has opened it.
absl::Status Logged(const absl::Status& why, const Peers& peers, WorkerRank from) {
  DG_LOG(WARNING) << "refusing a connection from worker " << NameIn(peers, from) << ": "
                  << why.message();
  return why;
}

// Calls `f`, or closes the link where there is no memory for it.
void OrClose(Link& link, absl::FunctionRef<void()> f) {
  try {
    f();
  } catch (const std::bad_alloc&) {
    link.Close(StatusFromStdException(std::current_exception()));
  }
}

}  // namespace

std::shared_ptr<Link> LinkTable::Make(Link::Kind kind, absl::Time asked_for) {
  const uint64_t number = ++last_link_;
  auto link = std::make_shared<Link>(shared_from_this(), &shared_, kind, number);
  links_.emplace(number, Entry{.link = link, .asked_for = asked_for});
  return link;
}

void LinkTable::Use(WorkerRank peer, const std::shared_ptr<Link>& link) {
  const auto [used, is_new] = by_peer_.emplace(peer, link);
  if (!is_new) return;
  try {
    calls_->Add(*link);
  } catch (const std::bad_alloc&) {
    by_peer_.erase(used);
    throw;
  }
}

void LinkTable::Drop(Entry& entry) {
  entry.mark = Entry::Mark::kDropped;
  entry.link->Drop();
}

void LinkTable::DropAll(WorkerRank peer, Incarnation incarnation, Links* dropped) {
  dropped->reserve(links_.size());  // first: nothing has changed where there is no memory for it
  for (auto& [number, entry] : links_) {
    if (entry.link->peer() != peer) continue;
    // One that is still being opened has no incarnation yet.
    const Incarnation its = entry.link->incarnation();
    if (its != incarnation && its != 0 && incarnation != 0) continue;
    Drop(entry);
    dropped->push_back(entry.link);
    const auto of_peer = by_peer_.find(peer);
    if (of_peer != by_peer_.end() && of_peer->second == entry.link) by_peer_.erase(of_peer);
  }
  const auto ended = ended_.find(peer);
  if (ended != ended_.end() && (incarnation == 0 || incarnation == ended->second.incarnation)) {
    ended->second.first_own = last_link_ + 1;
    ended->second.first_other = ended->second.next_other;
  }
}

LinkTable::Ended& LinkTable::EndedWith(WorkerRank peer, Incarnation incarnation) {
  Ended& ended = ended_[peer];
  if (ended.incarnation < incarnation) ended = {.incarnation = incarnation};
  return ended;
}

void LinkTable::Start() {
  std::vector<std::shared_ptr<Link>> links;
  {
    absl::MutexLock lock(&mu_);
    if (!state_.Advance(State::kStarted)) return;
    for (const auto& [number, entry] : links_) links.push_back(entry.link);
    const WorkerRank self = peers_->self().rank;
    auto loopback = Make(Link::Kind::kLoopback);
    loopback->SetPeer(self, /*incarnation=*/0);
    Use(self, loopback);
  }
  // What peers sent before we knew who they are.
  for (const auto& link : links) link->Release();
}

void LinkTable::Close(const absl::Status& why) {
  std::map<uint64_t, Entry> links;
  std::optional<Clock::TimerId> timer;
  {
    absl::MutexLock lock(&mu_);
    if (!state_.Advance(State::kClosed)) return;
    for (auto& [number, entry] : links_) Drop(entry);
    links.swap(links_);
    by_peer_.clear();
    timer = std::exchange(heartbeat_timer_, std::nullopt);
  }
  if (timer) clock_->Cancel(*timer);
  for (const auto& [number, entry] : links) entry.link->Close(why);
}

std::vector<std::pair<WorkerRank, uint64_t>> LinkTable::Queued() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::pair<WorkerRank, uint64_t>> queued;
  for (const auto& [peer, link] : by_peer_) queued.emplace_back(peer, link->window()->acquired());
  std::sort(queued.begin(), queued.end());
  return queued;
}

// -------------------------------------------------------------------------------------- Opening

absl::StatusOr<std::shared_ptr<Link>> LinkTable::To(WorkerRank peer) {
  absl::MutexLock lock(&mu_);
  return ToLocked(peer);
}

absl::StatusOr<std::shared_ptr<Link>> LinkTable::ToLocked(WorkerRank peer) {
  if (state_ == State::kClosed) return ShuttingDown();
  const auto found = by_peer_.find(peer);
  if (found != by_peer_.end()) return found->second;
  if (directory_ == nullptr && !peers_->Find(peer)) return Peers::NoWorker(peer);
  auto link = Make(Link::Kind::kOpened, clock_->Now());
  // Should there be no memory for the rest. One that others find has to be whole: or calls would
  // wait for it until their deadlines.
  absl::Cleanup forget = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { links_.erase(link->number()); };
  link->SetPeer(peer, /*incarnation=*/0);
  // Runs on the first thread that sends; opening is the first task of the link.
  link->OpenLater([this, watch = std::weak_ptr<Link>(link), peer] {
    if (const auto link = watch.lock()) Open(link, peer);
  });
  Use(peer, link);
  std::move(forget).Cancel();
  return link;
}

bool LinkTable::HasHeardFrom(WorkerRank peer) const {
  absl::MutexLock lock(&mu_);
  const auto found = by_peer_.find(peer);
  return found != by_peer_.end() && found->second->heard() > 0;
}

void LinkTable::Ping(WorkerRank peer) {
  std::shared_ptr<Link> link;
  {
    absl::MutexLock lock(&mu_);
    // One on which nothing was sent may not be open: there was no memory for what would have been.
    const auto found = by_peer_.find(peer);
    if (found != by_peer_.end() && !IsUntouched(*found->second)) return;
    absl::StatusOr<std::shared_ptr<Link>> made = ToLocked(peer);
    if (!made.ok()) return;
    link = *std::move(made);
  }
  SendPing(*link);
}

bool LinkTable::Hears(WorkerRank peer, Incarnation incarnation) const {
  absl::MutexLock lock(&mu_);
  return std::any_of(links_.begin(), links_.end(), [&](const auto& numbered) {
    const Link& link = *numbered.second.link;
    return numbered.second.mark == Entry::Mark::kNone && !link.is_bulk() && !link.closed() &&
           link.peer() == peer && link.incarnation() == incarnation && link.heard() > 0;
  });
}

void LinkTable::AskLost(WorkerRank peer, Incarnation incarnation) {
  std::vector<std::shared_ptr<Link>> links;
  {
    absl::MutexLock lock(&mu_);
    const uint64_t loss = peers_->LossOf(peer, incarnation);
    if (loss == 0) return;
    for (auto& [number, entry] : links_) {
      if (entry.mark != Entry::Mark::kNone || entry.link->is_bulk() || entry.link->peer() != peer ||
          entry.link->incarnation() != incarnation) {
        continue;
      }
      entry.AwaitAnswer(loss);
      links.push_back(entry.link);
    }
  }
  for (const auto& link : links) SendPing(*link);
}

// Before a connection is opened the store is asked who the peer is now: it may have come back
// elsewhere.
void LinkTable::Open(const std::shared_ptr<Link>& link, WorkerRank to) {
  {
    // Long after it was made, maybe: what was to be sent there before was refused.
    absl::MutexLock lock(&mu_);
    const auto found = links_.find(link->number());
    if (found != links_.end()) found->second.asked_for = clock_->Now();
  }
  StartHeartbeat();
  if (directory_ == nullptr) return Connect(link, to);
  const absl::Duration patience = peers_->Find(to) ? kPatienceForKnown : kPatience;
  directory_->Find(to, patience,
                   [self = shared_from_this(), link, to](absl::StatusOr<WorkerInfo> found) {
                     OrClose(*link, [&] { self->OnFound(link, to, found); });
                   });
}

void LinkTable::OnFound(const std::shared_ptr<Link>& link, WorkerRank to,
                        const absl::StatusOr<WorkerInfo>& found) {
  const absl::Status learned = found.ok() ? UpdatePeer(*found, link) : found.status();
  const std::optional<WorkerInfo> known = peers_->Find(to);
  if (!known || absl::IsCancelled(learned)) return link->Close(learned);
  // A store that is gone, or whose entry is of an incarnation that is over, does not keep us from a
  // peer that we know.
  if (!learned.ok()) {
    DG_LOG(WARNING) << "asking for worker " << peers_->Describe(to) << ": " << learned;
  }
  // One that leaves goes on with the contexts that it takes part in; and all other connections with
  // it would end with this one.
  if (known->left && !Hears(to, known->incarnation)) {
    return link->Close(absl::UnavailableError("it has left the job"));
  }
  Connect(link, to);
}

void LinkTable::Connect(const std::shared_ptr<Link>& link, WorkerRank to, uint64_t bulk_of) {
  const std::optional<WorkerInfo> peer = peers_->Find(to);
  const WorkerInfo self = peers_->self();
  Hello hello = {
      .from = self.rank, .from_incarnation = self.incarnation, .to = to, .link = bulk_of};
  bool is_wanted, is_closed, is_lost = false;
  {
    absl::MutexLock lock(&mu_);
    is_closed = state_ == State::kClosed;
    // One that was given up while the store was asked carries nothing, and its end would be taken
    // for that of what the peer has begun since.
    const auto found = links_.find(link->number());
    is_wanted = peer && found != links_.end() && found->second.mark != Entry::Mark::kDropped;
    if (is_wanted) {
      link->SetPeer(to, peer->incarnation);
      if (bulk_of == 0) found->second.AwaitAnswer(peers_->LossOf(to, peer->incarnation));
      is_lost = found->second.loss != 0;
      const Ended& ended = EndedWith(to, peer->incarnation);
      hello.to_incarnation = peer->incarnation;
      hello.number = link->number();
      hello.first_own = ended.first_own;
      hello.first_other = ended.first_other;
    }
  }
  if (!is_wanted) {
    return link->Close(is_closed ? ShuttingDown()
                                 : absl::UnavailableError("it was given up while it was opened"));
  }
  Packet packet;
  AppendHello(hello, &packet.bytes);
  // Somebody calls it, say; it may live after all, and not know that it is taken for lost.
  if (is_lost) SendPing(*link);
  absl::StatusOr<std::shared_ptr<Connection>> connection = transport_->Connect(peer->address, link);
  if (!connection.ok()) return link->Close(connection.status());
  try {
    link->SendHello(**connection, std::move(packet));
    link->SetConnection(*connection);
  } catch (const std::bad_alloc&) {
    // The link first: it says what it has ended of. The connection, of which it need not know,
    // would say that it was closed.
    link->Close(StatusFromStdException(std::current_exception()));
    (*connection)->Close();
  }
}

// The bulk link of a link. The end that opened the link opens this, too, for the other one may have
// no way to it. It names a number that it has heard over the link, and so does not come before
// that.

void LinkTable::OnBulkWanted(const std::shared_ptr<Link>& link) {
  const bool is_ours = link->kind() == Link::Kind::kAccepted;
  SendFrame(*link, {.kind = FrameKind::kBulk, .link = is_ours ? link->number() : 0});
}

void LinkTable::OnBulk(const std::shared_ptr<Link>& link, WorkerRank peer, uint64_t number) {
  if (number == 0) return OnBulkWanted(link);
  std::shared_ptr<Link> bulk;
  {
    absl::MutexLock lock(&mu_);
    // Both ends may have asked for it. One that is given up has no use for it, and the peer that is
    // there now may be another incarnation, of which the number is not.
    if (state_ == State::kClosed || link->kind() == Link::Kind::kAccepted || link->dropped() ||
        !link->ClaimBulk()) {
      return;
    }
    bulk = Make(Link::Kind::kOpened);
    bulk->SetPeer(peer, /*incarnation=*/0);
    bulk->SetMain(link);
  }
  OrClose(*bulk, [&] {
    Connect(bulk, peer, number);
    link->SetBulk(bulk);
  });
}

absl::Status LinkTable::AdmitBulk(const std::shared_ptr<Link>& link, const Hello& hello) {
  std::shared_ptr<Link> main;
  {
    absl::MutexLock lock(&mu_);
    const auto found = links_.find(hello.link);
    if (found != links_.end()) main = found->second.link;
    if (main == nullptr || main->kind() != Link::Kind::kAccepted || main->is_bulk() ||
        main->peer() != hello.from || main->incarnation() != hello.from_incarnation) {
      return absl::FailedPreconditionError("the connection that it belongs to is not there");
    }
    link->SetPeer(hello.from, hello.from_incarnation);
    link->SetMain(main);
    // The peer has opened it before it heard that the main one is given up. It ends with that, and
    // must not be refused, which would say so in place of why.
    const auto own = links_.find(link->number());
    if (main->dropped() && own != links_.end()) Drop(own->second);
  }
  main->SetBulk(link);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------ Taking in

absl::StatusOr<std::string> LinkTable::Listen(std::weak_ptr<User> user) {
  user_ = std::move(user);
  return transport_->Listen([self = shared_from_this()](std::shared_ptr<Connection> connection) {
    return self->Accept(std::move(connection));
  });
}

std::shared_ptr<Receiver> LinkTable::Accept(std::shared_ptr<Connection> connection) {
  std::shared_ptr<Link> link;
  State state;
  try {
    {
      absl::MutexLock lock(&mu_);
      state = state_;
      link = Make(Link::Kind::kAccepted);
      if (state == State::kClosed) links_.erase(link->number());
    }
    link->SetConnection(std::move(connection));
    switch (state) {
      case State::kHolding:  // until we know who is a member
        break;
      case State::kStarted:
        link->Release();
        break;
      case State::kClosed:
        link->Close(ShuttingDown());
    }
    StartHeartbeat();
  } catch (const std::bad_alloc&) {
    DG_LOG(WARNING) << "refusing a connection: there is no memory for it";
    if (link != nullptr) {
      absl::MutexLock lock(&mu_);
      links_.erase(link->number());
    }
    return nullptr;
  }
  return link;
}

void LinkTable::OnPacket(const std::shared_ptr<Link>& link, Packet packet) {
  const std::shared_ptr<User> user = user_.lock();
  if (user == nullptr) return;
  absl::Status status;
  try {
    const absl::Status taken = user->OnPacket(link, std::move(packet));
    // What has come is not this worker's doing, and says nothing of its own calls.
    if (!taken.ok()) status = absl::UnavailableError(taken.message());
  } catch (const std::bad_alloc&) {
    // What a worker sends itself it hears of itself. The transport can do nothing with it.
    if (link->kind() == Link::Kind::kLoopback) throw;
    status = StatusFromStdException(std::current_exception());
  }
  if (status.ok()) return;
  if (const std::optional<WorkerRank> peer = link->peer()) {
    DG_LOG(WARNING) << "closing a connection with worker " << NameIn(*peers_, *peer) << ": "
                    << status.message();
  } else {
    DG_LOG(WARNING) << "closing a connection: " << status.message();
  }
  link->Close(status);
}

bool LinkTable::OnLeaving(uint64_t call, Packet& request) {
  return calls_->OnLeaving(call, request);
}

absl::Status LinkTable::OnHello(const std::shared_ptr<Link>& link, WireReader& reader) {
  DG_ASSIGN_OR_RETURN(const Hello hello, ReadHello(reader));
  if (link->peer()) return absl::InvalidArgumentError("a second hello on one connection");
  absl::StatusOr<bool> known = peers_->Check(hello);
  if (known.ok() && !*known && directory_ == nullptr) {
    known = absl::FailedPreconditionError(
        absl::StrCat("it comes from worker ", hello.from, ", which is not a member of this job"));
  }
  if (!known.ok()) {
    Refuse(link, Logged(known.status(), *peers_, hello.from));
  } else if (hello.link != 0) {
    const absl::Status admitted = AdmitBulk(link, hello);
    if (!admitted.ok()) Refuse(link, Logged(admitted, *peers_, hello.from));
  } else if (*known) {
    Admit(link, hello);
  } else {
    link->Hold(hello.from);
    directory_->Find(hello.from, kPatience,
                     [self = shared_from_this(), link, hello](absl::StatusOr<WorkerInfo> found) {
                       OrClose(*link, [&] { self->OnFoundPeer(link, hello, found); });
                     });
  }
  return absl::OkStatus();
}

// The store's word on a worker that has joined, or come back, since we last asked.
void LinkTable::OnFoundPeer(const std::shared_ptr<Link>& link, const Hello& hello,
                            const absl::StatusOr<WorkerInfo>& found) {
  absl::Status status = found.status();
  if (status.ok() && found->incarnation != hello.from_incarnation) {
    status = absl::FailedPreconditionError(absl::StrCat("it comes from an incarnation of worker '",
                                                        found->name, "' (", hello.from,
                                                        ") that the job's store does not know"));
  }
  if (status.ok()) status = UpdatePeer(*found, link);
  if (status.ok()) {
    Admit(link, hello);
  } else {
    Refuse(link, Logged(status, *peers_, hello.from));
  }
  link->Release();
}

bool LinkTable::HasGivenUp(const Hello& hello) const {
  for (const auto& [number, entry] : links_) {
    const Link& link = *entry.link;
    if (entry.mark == Entry::Mark::kDropped || link.is_bulk() || link.peer() != hello.from ||
        link.incarnation() != hello.from_incarnation) {
      continue;
    }
    if (link.kind() == Link::Kind::kAccepted ? entry.peers_number < hello.first_own
                                             : number < hello.first_other) {
      return true;
    }
  }
  return false;
}

// A peer that has given up its links with us, and opens another one, may be faster than the news of
// their end. They end before the new one is taken in: heard of later, their end would be its end,
// too, and fail what has just begun on it. All others with that peer end with them, as they do when
// a link breaks (OnClosed()): it hears of the end of those that it has not given up itself. While
// they end, with no lock held, other threads take in links of that peer; so what the hello says is
// noted under the lock under which they are dropped, and looked for once more.
void LinkTable::Admit(const std::shared_ptr<Link>& link, const Hello& hello) {
  for (;;) {
    Links dropped;
    absl::Status why;  // of their end
    absl::Status outdated;
    bool is_given_up = false, is_lost = false;
    {
      absl::MutexLock lock(&mu_);
      const auto found = links_.find(link->number());
      // It broke while the store was asked.
      if (found == links_.end() || found->second.mark == Entry::Mark::kDropped) return;
      // The peer may have come back since it was looked for: whoever knows that finds no link with
      // the one that is over.
      outdated = peers_->Check(hello).status();
      Ended& ended = EndedWith(hello.from, hello.from_incarnation);
      const bool is_old = hello.from_incarnation < ended.incarnation;
      if (!is_old) ended.first_of_peer = std::max(ended.first_of_peer, hello.first_own);
      // A later one was faster, and has said so; or this worker has given it up itself, before it
      // came; or the peer has come back meanwhile.
      is_given_up = is_old || hello.number < std::max(ended.first_of_peer, ended.first_other);
      if (!outdated.ok()) {
        // Refused below.
      } else if (is_given_up) {
        Drop(found->second);
      } else if (HasGivenUp(hello)) {
        why = absl::UnavailableError(
            absl::StrCat("worker ", peers_->Describe(hello.from),
                         " has given up the connection, and opened another one"));
        DropAll(hello.from, hello.from_incarnation, &dropped);
      } else {
        ended.next_other = std::max(ended.next_other, hello.number + 1);
        found->second.peers_number = hello.number;
        // Before others know the link, and ping it.
        found->second.AwaitAnswer(peers_->LossOf(hello.from, hello.from_incarnation));
        is_lost = found->second.loss != 0;
        link->SetPeer(hello.from, hello.from_incarnation);
        // Two workers may open connections to each other at the same time; then both stay.
        Use(hello.from, link);
      }
    }
    if (!outdated.ok()) return Refuse(link, Logged(outdated, *peers_, hello.from));
    if (is_given_up) return link->Close(absl::UnavailableError("its opener has given it up"));
    if (dropped.empty()) {
      // It may have been silent for long, and speak again; or it is dead, and has sent this before
      // it died. What it answers now it has not sent before it was taken for lost.
      if (is_lost) SendPing(*link);
      return;
    }
    EndDropped(hello.from, dropped, why);
  }
}

void LinkTable::OnPong(const std::shared_ptr<Link>& link) {
  link->SetAnswered();
  uint64_t loss = 0;
  {
    absl::MutexLock lock(&mu_);
    const auto found = links_.find(link->number());
    if (found != links_.end() && link->answered() > found->second.asked_before) {
      loss = std::exchange(found->second.loss, 0);
    }
  }
  const std::optional<WorkerRank> peer = link->peer();
  if (loss == 0 || !peer) return;
  // The answer comes once, and others wait to hear that the peer lives.
  const bool is_revived =
      AwaitMemory([&] { return peers_->SetAlive(*peer, link->incarnation(), loss); });
  const auto user = user_.lock();
  if (!is_revived || user == nullptr) return;
  AwaitMemory([&] { user->OnRevived(*peer, link->incarnation(), loss); });
  user->OnMemberEvents();
}

void LinkTable::Refuse(const std::shared_ptr<Link>& link, const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    const auto found = links_.find(link->number());
    if (found != links_.end()) Drop(found->second);
  }
  SendRefused(*link, why);
}

void LinkTable::SendRefused(Link& link, const absl::Status& why) {
  OrClose(link, [&] {
    Packet packet;
    AppendFrame({.kind = FrameKind::kRefused, .status = why}, &packet.bytes);
    link.SendLast(std::move(packet), why);
  });
}

void LinkTable::GiveUp(const std::shared_ptr<Link>& link, WorkerRank peer,
                       const absl::Status& why) {
  if (link->kind() == Link::Kind::kLoopback) {  // which stays
    const auto user = user_.lock();
    if (user != nullptr) AwaitMemory([&] { user->OnPeerLost(peer, user->BegunSoFar(), why); });
    return;
  }
  Links dropped;
  const bool is_news = AwaitMemory([&] {
    absl::MutexLock lock(&mu_);
    // Whoever has given it up tells the loss, which may not have come so far.
    if (link->dropped()) return false;
    DropAll(peer, link->incarnation(), &dropped);
    return true;
  });
  if (is_news) EndDropped(peer, dropped, why, /*tells_peer=*/true);
}

// --------------------------------------------------------------------------------------- Ending

// Others wait to hear of the end, which is said once. So this waits where there is no memory for
// that; and does without for the rest, for the thread may be the transport's.
void LinkTable::OnClosed(const std::shared_ptr<Link>& link, absl::Status why, bool is_refused) {
  std::optional<WorkerRank> peer;
  bool is_bulk = false, is_lost = false, is_news = false, was_given_up = false;
  MemberWatch::ClosedLink closed;
  Links others;
  const bool is_known = AwaitMemory([&] {
    absl::MutexLock lock(&mu_);
    const auto found = links_.find(link->number());
    if (found == links_.end()) return false;  // Close() has ended all
    const Entry& entry = found->second;
    // Another thread may have admitted it just now.
    peer = link->peer();
    is_bulk = link->is_bulk();
    if (peer && !is_bulk) {
      const auto of_peer = by_peer_.find(*peer);
      const bool was_used = of_peer != by_peer_.end() && of_peer->second == link;
      // On one that it did not use this worker has sent only answers to what came there. If what
      // the peer has sent there is lost, the peer finds that, and ends all others itself.
      const bool is_wanted = entry.mark != Entry::Mark::kDropped;
      is_lost = is_wanted && (was_used || link->carried());
      if (is_lost) others.reserve(links_.size());  // before anything changes
      if (was_used) by_peer_.erase(of_peer);
      is_news = is_wanted && (was_used || link->heard() > 0);
      was_given_up = entry.mark == Entry::Mark::kSilent || entry.mark == Entry::Mark::kStale;
      closed = {.peer = *peer,
                .incarnation = link->incarnation(),
                .was_heard = link->heard() > 0 || entry.mark == Entry::Mark::kStale,
                .was_silent = entry.mark == Entry::Mark::kSilent,
                .is_refused = is_refused,
                .asked_for = entry.asked_for};
    }
    links_.erase(found);
    // What was sent on this link may be lost, and the peer need not hear of that: it may never have
    // had this link, or have given it up before it began what it waits for. So all links with it
    // end.
    if (is_lost) DropAll(*peer, closed.incarnation, &others);
    return true;
  });
  if (!is_known) return;
  if (is_bulk) {
    // Whoever drops that ends it, too, and may have to say why first.
    if (const auto main = link->main(); main != nullptr && !main->dropped()) main->Close(why);
    return;
  }
  if (!peer) return;
  bool left = false;
  try {
    const std::optional<WorkerInfo> info = peers_->Find(*peer);
    left = info && info->left;
    const std::string who = peers_->Describe(*peer);
    why = left ? absl::UnavailableError(absl::StrCat("worker ", who, " has left the job"))
               : Annotate(why, absl::StrCat("the connection with worker ", who, " broke"));
    // By heartbeats: nothing else says so where nobody waits for anything.
    if (was_given_up && !left) DG_LOG(WARNING) << why.message();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it says less, then
  }
  const auto user = user_.lock();
  const uint64_t begun = user != nullptr ? user->BegunSoFar() : 0;
  calls_->EndCallsOver(*link, why);
  for (const auto& other : others) calls_->EndCallsOver(*other, why);
  if (user != nullptr) {
    if (is_lost) AwaitMemory([&] { user->OnPeerLost(*peer, begun, why); });
    try {
      if (is_news && !left) user->OnLinkEnded(closed, why);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): a watched one is tried again
    }
  }
  // Last: whatever the peer begins when it hears of this must find nothing of what there was.
  for (const auto& other : others) other->Close(why);
}

// Ends what there is with an old incarnation of a peer, here and now: whatever the new one sends
// must find nothing of it. Under one lock with what is known of the peer, so that nobody who knows
// the new one finds a link with the old one, which may live, and answer.
absl::Status LinkTable::UpdatePeer(const WorkerInfo& worker, const std::shared_ptr<Link>& keep) {
  Links old;
  {
    absl::MutexLock lock(&mu_);
    old.reserve(links_.size());  // first: nothing has changed where there is no memory for it
    DG_ASSIGN_OR_RETURN(const bool is_new, peers_->UpdatePeer(worker));
    if (is_new) DropOldIncarnation(worker.rank, keep, &old);
  }
  if (!old.empty()) {
    const absl::Status why = AwaitMemory([&] {
      return absl::UnavailableError(absl::StrCat("worker ", peers_->Describe(worker.rank),
                                                 " has come back as a new incarnation"));
    });
    // Where there was no connection, what went over an earlier one has been lost with that; and a
    // context may have begun since, for which this peer is the new incarnation.
    EndDropped(worker.rank, old, why);
  }
  if (const auto user = user_.lock()) user->OnMemberEvents();
  return absl::OkStatus();
}

void LinkTable::DropOldIncarnation(WorkerRank peer, const std::shared_ptr<Link>& keep, Links* old) {
  for (auto& [number, entry] : links_) {
    if (entry.link->peer() != peer || entry.link == keep) continue;
    Drop(entry);
    old->push_back(entry.link);
  }
  const auto found = by_peer_.find(peer);
  if (found != by_peer_.end() && found->second != keep) by_peer_.erase(found);
}

void LinkTable::EndDropped(WorkerRank peer, const Links& links, const absl::Status& why,
                           bool tells_peer) {
  if (links.empty()) return;
  const auto user = user_.lock();
  const uint64_t begun = user != nullptr ? user->BegunSoFar() : 0;
  // What has come and could not be taken fails passes, of whose gradients it may be; the calls that
  // this worker has made are none of it.
  const absl::Status of_calls = absl::IsUnavailable(why)
                                    ? why
                                    : MakeOr(absl::Status(absl::StatusCode::kUnavailable, ""),
                                             [&] { return absl::UnavailableError(why.message()); });
  for (const auto& link : links) calls_->EndCallsOver(*link, of_calls);
  if (user != nullptr) AwaitMemory([&] { user->OnPeerLost(peer, begun, why); });
  for (const auto& link : links) {
    if (!tells_peer) {
      link->Close(of_calls);
    } else if (!link->is_bulk()) {  // which ends with its main one
      SendRefused(*link, of_calls);
    }
  }
}

void LinkTable::SayLeaving() {
  std::vector<std::shared_ptr<Link>> links;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [peer, link] : by_peer_) links.push_back(link);
  }
  for (const auto& link : links) {
    // Whoever connects asks the store.
    if (link->connected()) SendFrame(*link, {.kind = FrameKind::kLeaving});
  }
}

// ----------------------------------------------------------------------------------- Heartbeats

void LinkTable::StartHeartbeat() {
  if (heartbeat_.interval() == absl::InfiniteDuration()) return;
  {
    absl::MutexLock lock(&mu_);
    if (state_ == State::kClosed || std::exchange(beats_, true)) return;
  }
  // Others find that it beats, and count on it.
  AwaitMemory([this] { ArmHeartbeat(); });
}

void LinkTable::ArmHeartbeat() {
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + heartbeat_.interval(), [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->Beat();
      });
  bool closed;
  {
    absl::MutexLock lock(&mu_);
    closed = state_ == State::kClosed;
    if (!closed) heartbeat_timer_ = timer;
  }
  if (closed) clock_->Cancel(timer);
}

void LinkTable::Beat() {
  Links links, mains;
  std::vector<Heartbeat::Reading> readings;
  {
    absl::MutexLock lock(&mu_);
    heartbeat_timer_.reset();
    if (state_ == State::kClosed) return;
    bool is_any = false;
    for (const auto& [number, entry] : links_) {
      if (entry.link->kind() == Link::Kind::kLoopback || entry.link->closed()) continue;
      // Also of one that is being opened, and whose first call has ended meanwhile: nobody would
      // start this again once it is open.
      is_any = true;
      // The peer is about to close it, or has a limit to.
      if (entry.mark == Entry::Mark::kDropped) continue;
      const Link& link = *entry.link;
      // Nobody is silent there.
      if (IsUnused(link)) continue;
      readings.push_back({.link = number,
                          .peer = link.peer(),
                          .heard = link.heard(),
                          .sent = link.sent(),
                          .answers = link.idle(),
                          .is_bulk = link.is_bulk(),
                          .answered = link.answered()});
      links.push_back(entry.link);
      mains.push_back(link.main());
      if (mains.back() != nullptr) readings.back().main_answered = mains.back()->answered();
    }
    beats_ = is_any;
    if (!beats_) return;
  }
  ArmHeartbeat();
  try {
    Follow(heartbeat_.Tick(clock_->Now(), readings), readings, links, mains);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next one does it
  }
}

void LinkTable::Follow(const Heartbeat::Verdict& verdict,
                       const std::vector<Heartbeat::Reading>& readings, const Links& links,
                       const Links& mains) {
  for (const size_t i : verdict.ask) {
    if (readings[i].is_bulk) {
      SendFrame(*links[i], {.kind = FrameKind::kBulkPing});
    } else {
      SendPing(*links[i]);
    }
    if (mains[i] != nullptr) SendPing(*mains[i]);
  }
  for (const WorkerRank peer : verdict.probe) Probe(peer);
  {
    absl::MutexLock lock(&mu_);
    const auto mark = [&](size_t i, Entry::Mark mark) {
      mu_.AssertHeld();
      const auto found = links_.find(links[i]->number());
      if (found == links_.end() || found->second.mark != Entry::Mark::kNone) return;
      found->second.mark = mark;
    };
    for (const size_t i : verdict.lost) mark(i, Entry::Mark::kSilent);
    for (const size_t i : verdict.stale) mark(i, Entry::Mark::kStale);
  }
  for (const size_t i : verdict.lost) {
    // Before it is connected nobody but the store was asked for anything.
    const absl::string_view what =
        directory_ == nullptr || links[i]->connected()
            ? "nothing was heard of it within the heartbeat limit of "
            : "where it is the store has not said within the heartbeat limit of ";
    links[i]->Close(
        absl::UnavailableError(absl::StrCat(what, absl::FormatDuration(heartbeat_.limit()))));
  }
  for (const size_t i : verdict.stale) {
    links[i]->Close(absl::UnavailableError(
        absl::StrCat("one of the connections with it has brought or taken nothing within the "
                     "heartbeat limit of ",
                     absl::FormatDuration(heartbeat_.limit()), ", though it lives")));
  }
}

// A second link stays for as long as the first.
void LinkTable::Probe(WorkerRank peer) {
  std::shared_ptr<Link> probe;
  {
    absl::MutexLock lock(&mu_);
    const auto is_of_peer = [peer](const auto& numbered) {
      const Link& link = *numbered.second.link;
      return numbered.second.mark != Entry::Mark::kDropped && link.peer() == peer &&
             !link.is_bulk() && !link.closed() && !IsUnused(link);
    };
    if (state_ == State::kClosed || std::count_if(links_.begin(), links_.end(), is_of_peer) != 1) {
      return;
    }
    probe = Make(Link::Kind::kOpened);
    probe->SetPeer(peer, /*incarnation=*/0);
  }
  OrClose(*probe, [&] {
    Connect(probe, peer);
    SendPing(*probe);
  });
}

}  // namespace distgrad
