#include "core/rpc/agent.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/strand.h"
#include "core/rpc/frame.h"
#include "core/rpc/wire.h"

namespace distgrad {
namespace {

class Link;

// A call that has not been answered.
struct Pending {
  std::shared_ptr<Link> link;
  std::string function;
  WorkerId to = 0;
  absl::Time deadline;
  Agent::ReplyCallback done;
};

}  // namespace

// Thread-safe.
class Agent::Impl : public std::enable_shared_from_this<Agent::Impl> {
 public:
  Impl(Clock* clock, Transport* transport, AgentService* service)
      : clock_(clock), transport_(transport), service_(service) {}

  absl::StatusOr<std::string> Listen();
  absl::Status Start(const WorkerInfo& self, std::vector<WorkerInfo> workers);
  void Call(WorkerId to, Packet request, absl::Time deadline, ReplyCallback done);
  void Notify(WorkerId to, Packet notice);
  absl::StatusOr<WorkerId> FindWorker(absl::string_view name) const;
  std::string Describe(WorkerId worker) const;
  void Close();

  // From links.
  void OnPacket(const std::shared_ptr<Link>& link, Packet packet);
  void OnClosed(const std::shared_ptr<Link>& link, absl::Status why);

  Clock* const clock_;
  Transport* const transport_;
  AgentService* const service_;

 private:
  void Handle(const std::shared_ptr<Link>& link, Packet packet);
  absl::Status HandleOrFail(const std::shared_ptr<Link>& link, Packet packet);
  absl::Status Greet(const std::shared_ptr<Link>& link, WireReader& reader);
  absl::StatusOr<std::shared_ptr<Link>> LinkTo(WorkerId to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Open(const std::shared_ptr<Link>& link, const WorkerInfo& peer, std::string hello);
  void ArmTimer(absl::Time deadline);
  void OnTimer();
  absl::Status CallError(WorkerId to, absl::string_view function, const absl::Status& why) const;

  mutable absl::Mutex mu_;
  // Guarded by mu_; constant once started.
  bool started_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  WorkerInfo self_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<WorkerId, WorkerInfo> workers_ ABSL_GUARDED_BY(mu_);
  // Guarded by mu_.
  std::vector<std::pair<std::shared_ptr<Link>, Packet>> held_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<WorkerId, std::shared_ptr<Link>> links_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<Link>> accepted_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mu_);
  uint64_t last_call_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time armed_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::optional<Clock::TimerId> timer_ ABSL_GUARDED_BY(mu_);
};

namespace {

// One connection, or the short cut to oneself. Thread-safe.
class Link : public Receiver, public std::enable_shared_from_this<Link> {
 public:
  explicit Link(std::shared_ptr<Agent::Impl> agent, bool loopback = false)
      : agent_(std::move(agent)), loopback_(loopback) {}

  // Who is at the other end: known from the start of a link that we opened, from its hello on
  // one that was accepted. Written and read by the agent, under its mutex.
  std::optional<WorkerId> peer;

  void Send(Packet packet) {
    if (loopback_) return agent_->OnPacket(shared_from_this(), CopyPacket(packet));
    // In order, also while the connection is still being opened.
    out_.Run([this, self = shared_from_this(), packet = std::move(packet)]() mutable {
      if (open_ != nullptr) std::exchange(open_, nullptr)();
      // An error closes the connection, and is reported there.
      if (auto connection = this->connection()) connection->Send(std::move(packet), nullptr);
    });
  }

  // Has the first Send() run `open` before it. Once, before anybody else knows the link. Not at
  // once: it is called under the agent's mutex, and a connection may fail while it is made.
  void OpenLater(absl::AnyInvocable<void()> open) { open_ = std::move(open); }

  void SetConnection(std::shared_ptr<Connection> connection) {
    absl::MutexLock lock(&mu_);
    if (!closed_) connection_ = std::move(connection);
  }

  void Close(absl::Status why) {
    std::shared_ptr<Connection> connection;
    {
      absl::MutexLock lock(&mu_);
      if (why_.ok()) why_ = std::move(why);
      connection = connection_;
    }
    if (connection) connection->Close();
  }

  void OnPacket(Packet packet) override { agent_->OnPacket(shared_from_this(), std::move(packet)); }

  void OnClosed(absl::Status why) override {
    std::shared_ptr<Connection> connection;  // ends outside the lock
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      connection.swap(connection_);
      if (!why_.ok()) why = why_;
    }
    agent_->OnClosed(shared_from_this(), std::move(why));
  }

 private:
  std::shared_ptr<Connection> connection() const {
    absl::MutexLock lock(&mu_);
    return connection_;
  }

  const std::shared_ptr<Agent::Impl> agent_;
  const bool loopback_;
  Strand out_;
  absl::AnyInvocable<void()> open_;  // on out_ only, once others know the link
  mutable absl::Mutex mu_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status why_ ABSL_GUARDED_BY(mu_);  // why we closed it, if we did
};

}  // namespace

// ------------------------------------------------------------------------------- IncomingCall

class IncomingCall::Impl {
 public:
  Impl(std::shared_ptr<Link> link, WorkerId from, const Frame& frame, absl::Time deadline,
       Body body)
      : link(std::move(link)),
        from(from),
        call(frame.call),
        function(frame.function),
        deadline(deadline),
        body(std::move(body)) {}
  ~Impl() { Answer(absl::InternalError("the handler ended without an answer")); }

  void Answer(const absl::Status& status) {
    Packet packet;
    AppendFrame({.kind = FrameKind::kReply, .call = call, .status = status}, &packet.bytes);
    Answer(std::move(packet));
  }
  void Answer(Packet packet) {
    if (auto to = std::exchange(link, nullptr)) to->Send(std::move(packet));
  }

  std::shared_ptr<Link> link;  // null once answered
  const WorkerId from;
  const uint64_t call;
  const std::string function;
  const absl::Time deadline;
  Body body;
};

IncomingCall::IncomingCall(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
IncomingCall::IncomingCall(IncomingCall&&) noexcept = default;
IncomingCall& IncomingCall::operator=(IncomingCall&&) noexcept = default;
IncomingCall::~IncomingCall() = default;
WorkerId IncomingCall::from() const { return impl_->from; }
const std::string& IncomingCall::function() const { return impl_->function; }
absl::Time IncomingCall::deadline() const { return impl_->deadline; }
Body& IncomingCall::body() { return impl_->body; }
Packet IncomingCall::NewReply() const {
  Packet packet;
  AppendFrame({.kind = FrameKind::kReply, .call = impl_->call}, &packet.bytes);
  return packet;
}
void IncomingCall::Reply(Packet reply) { impl_->Answer(std::move(reply)); }
void IncomingCall::Fail(const absl::Status& status) { impl_->Answer(status); }

// --------------------------------------------------------------------------------- Life

absl::StatusOr<std::string> Agent::Impl::Listen() {
  return transport_->Listen([self = shared_from_this()](std::shared_ptr<Connection> connection) {
    auto link = std::make_shared<Link>(self);
    link->SetConnection(std::move(connection));
    absl::MutexLock lock(&self->mu_);
    auto& accepted = self->accepted_;
    accepted.erase(
        std::remove_if(accepted.begin(), accepted.end(), [](auto& l) { return l.expired(); }),
        accepted.end());
    accepted.push_back(link);
    return link;
  });
}

absl::Status Agent::Impl::Start(const WorkerInfo& self, std::vector<WorkerInfo> workers) {
  {
    absl::MutexLock lock(&mu_);
    if (started_ || !workers_.empty())
      return absl::FailedPreconditionError("the agent is started already");
    self_ = self;
    for (WorkerInfo& worker : workers) workers_.emplace(worker.id, std::move(worker));
    auto loopback = std::make_shared<Link>(shared_from_this(), /*loopback=*/true);
    loopback->peer = self.id;
    links_.emplace(self.id, std::move(loopback));
  }
  // What others sent before we knew who they are, in order; more may come meanwhile.
  for (;;) {
    std::vector<std::pair<std::shared_ptr<Link>, Packet>> held;
    {
      absl::MutexLock lock(&mu_);
      if (held_.empty()) {
        started_ = true;
        return absl::OkStatus();
      }
      held.swap(held_);
    }
    for (auto& [link, packet] : held) Handle(link, std::move(packet));
  }
}

void Agent::Impl::Close() {
  std::vector<std::shared_ptr<Link>> links;
  absl::flat_hash_map<uint64_t, Pending> pending;
  std::optional<Clock::TimerId> timer;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    for (auto& [peer, link] : links_) links.push_back(link);
    for (auto& link : accepted_) {
      if (auto l = link.lock()) links.push_back(std::move(l));
    }
    links_.clear();
    held_.clear();
    pending.swap(pending_);
    timer = std::exchange(timer_, std::nullopt);
  }
  if (timer) clock_->Cancel(*timer);
  for (auto& [call, p] : pending) {
    p.done(CallError(p.to, p.function, absl::CancelledError("this worker is shutting down")));
  }
  for (auto& link : links) link->Close(absl::CancelledError("this worker is shutting down"));
}

// --------------------------------------------------------------------------------- Sending

absl::StatusOr<std::shared_ptr<Link>> Agent::Impl::LinkTo(WorkerId to) {
  if (closed_) return absl::CancelledError("this worker is shutting down");
  auto it = links_.find(to);
  if (it != links_.end()) return it->second;
  auto worker = workers_.find(to);
  if (worker == workers_.end()) {
    return absl::NotFoundError(absl::StrCat("there is no worker with the id ", to, " in this job"));
  }
  auto link = std::make_shared<Link>(shared_from_this());
  link->peer = to;
  links_.emplace(to, link);
  std::string hello;
  AppendHello({.from = self_.id,
               .from_incarnation = self_.incarnation,
               .to = to,
               .to_incarnation = worker->second.incarnation},
              &hello);
  // Runs on the first thread that sends; opening is the first task of the link.
  link->OpenLater([this, watch = std::weak_ptr<Link>(link), peer = worker->second,
                   hello = std::move(hello)]() mutable {
    if (const auto link = watch.lock()) Open(link, peer, std::move(hello));
  });
  return link;
}

void Agent::Impl::Open(const std::shared_ptr<Link>& link, const WorkerInfo& peer,
                       std::string hello) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) hello.clear();
  }
  if (hello.empty()) return link->OnClosed(absl::CancelledError("this worker is shutting down"));
  absl::StatusOr<std::shared_ptr<Connection>> connection = transport_->Connect(peer.address, link);
  if (!connection.ok()) return link->OnClosed(connection.status());
  link->SetConnection(*connection);
  (*connection)->Send(Packet{std::move(hello), {}}, nullptr);
}

void Agent::Impl::Call(WorkerId to, Packet request, absl::Time deadline, ReplyCallback done) {
  WireReader reader(request.bytes);
  const std::string function(ReadFrame(reader)->function);
  absl::StatusOr<std::shared_ptr<Link>> link = nullptr;
  int64_t timeout_us = 0;
  if (deadline != absl::InfiniteFuture()) {
    timeout_us = absl::ToInt64Microseconds(deadline - clock_->Now());
    if (timeout_us <= 0) {
      return done(
          CallError(to, function, absl::DeadlineExceededError("the deadline has passed already")));
    }
  }
  bool arm = false;
  {
    absl::MutexLock lock(&mu_);
    link = LinkTo(to);
    if (link.ok()) {
      const uint64_t call = ++last_call_;
      SetCall(call, timeout_us, &request.bytes);
      pending_.emplace(call, Pending{*link, function, to, deadline, std::move(done)});
      arm = deadline < armed_;
    }
  }
  if (!link.ok()) return done(CallError(to, function, link.status()));
  if (arm) ArmTimer(deadline);
  (*link)->Send(std::move(request));
}

void Agent::Impl::Notify(WorkerId to, Packet notice) {
  absl::StatusOr<std::shared_ptr<Link>> link = nullptr;
  {
    absl::MutexLock lock(&mu_);
    link = LinkTo(to);
  }
  if (link.ok()) {
    (*link)->Send(std::move(notice));
  } else if (!absl::IsCancelled(link.status())) {
    service_->OnPeerLost(to, link.status());
  }
}

// One timer serves all calls: it stands at the earliest deadline that there was, and is not
// moved when that call is answered in time.
void Agent::Impl::ArmTimer(absl::Time deadline) {
  const Clock::TimerId timer = clock_->At(deadline, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->OnTimer();
  });
  std::optional<Clock::TimerId> stale;
  {
    absl::MutexLock lock(&mu_);
    if (!closed_ && deadline < armed_) {
      armed_ = deadline;
      stale = std::exchange(timer_, timer);
    } else {
      stale = timer;
    }
  }
  if (stale) clock_->Cancel(*stale);
}

void Agent::Impl::OnTimer() {
  std::vector<Pending> late;
  absl::Time next = absl::InfiniteFuture();
  {
    absl::MutexLock lock(&mu_);
    armed_ = absl::InfiniteFuture();
    timer_.reset();
    const absl::Time now = clock_->Now();
    for (auto it = pending_.begin(); it != pending_.end();) {
      if (it->second.deadline <= now) {
        late.push_back(std::move(it->second));
        pending_.erase(it++);
      } else {
        next = std::min(next, it->second.deadline);
        ++it;
      }
    }
  }
  if (next != absl::InfiniteFuture()) ArmTimer(next);
  for (Pending& p : late) {
    p.done(
        CallError(p.to, p.function, absl::DeadlineExceededError("no answer before the deadline")));
  }
}

// ------------------------------------------------------------------------------- Receiving

void Agent::Impl::OnPacket(const std::shared_ptr<Link>& link, Packet packet) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    if (!started_) {
      held_.emplace_back(link, std::move(packet));
      return;
    }
  }
  Handle(link, std::move(packet));
}

void Agent::Impl::Handle(const std::shared_ptr<Link>& link, Packet packet) {
  absl::Status status = HandleOrFail(link, std::move(packet));
  if (status.ok()) return;
  DG_LOG(WARNING) << "closing a connection: " << status.message();
  link->Close(status);
}

absl::Status Agent::Impl::Greet(const std::shared_ptr<Link>& link, WireReader& reader) {
  DG_ASSIGN_OR_RETURN(const Hello hello, ReadHello(reader));
  absl::MutexLock lock(&mu_);
  if (link->peer.has_value()) return absl::InvalidArgumentError("a second hello on one connection");
  if (hello.to != self_.id || hello.to_incarnation != self_.incarnation) {
    return absl::FailedPreconditionError(absl::StrCat(
        "it was meant for another worker, or for an earlier life of '", self_.name, "'"));
  }
  auto from = workers_.find(hello.from);
  if (from == workers_.end() || hello.from == self_.id ||
      from->second.incarnation != hello.from_incarnation) {
    return absl::FailedPreconditionError(
        absl::StrCat("it comes from worker ", hello.from, ", which is not a member of this job"));
  }
  link->peer = hello.from;
  // Two workers may open connections to each other at the same time; then both stay.
  links_.emplace(hello.from, link);
  return absl::OkStatus();
}

absl::Status Agent::Impl::HandleOrFail(const std::shared_ptr<Link>& link, Packet packet) {
  WireReader reader(packet.bytes);
  DG_ASSIGN_OR_RETURN(const Frame frame, ReadFrame(reader));
  if (frame.kind == FrameKind::kHello) return Greet(link, reader);

  const size_t offset = packet.bytes.size() - reader.remaining();
  std::optional<WorkerId> peer;
  std::optional<Pending> answered;
  {
    absl::MutexLock lock(&mu_);
    peer = link->peer;
    if (peer && frame.kind == FrameKind::kReply) {
      auto it = pending_.find(frame.call);
      // A reply after the deadline finds nobody; one to a call that went elsewhere is refused.
      if (it != pending_.end() && it->second.to == *peer) {
        answered = std::move(it->second);
        pending_.erase(it);
      }
    }
  }
  if (!peer) return absl::InvalidArgumentError("somebody did not say hello first");

  switch (frame.kind) {
    case FrameKind::kRequest: {
      const absl::Time deadline = frame.timeout_us == 0
                                      ? absl::InfiniteFuture()
                                      : clock_->Now() + absl::Microseconds(frame.timeout_us);
      // The frame's function points into the packet, so it is copied before the packet moves.
      auto impl = std::make_unique<IncomingCall::Impl>(link, *peer, frame, deadline, Body());
      impl->body = Body{std::move(packet), offset};
      service_->OnCall(IncomingCall(std::move(impl)));
      break;
    }
    case FrameKind::kReply:
      if (!answered) {
        service_->OnLateReply(*peer, Body{std::move(packet), offset});
      } else if (!frame.status.ok()) {
        answered->done(CallError(*peer, answered->function, frame.status));
      } else {
        answered->done(Body{std::move(packet), offset});
      }
      break;
    case FrameKind::kNotice:
      service_->OnNotice(*peer, Body{std::move(packet), offset});
      break;
    case FrameKind::kHello:
      break;
  }
  return absl::OkStatus();
}

void Agent::Impl::OnClosed(const std::shared_ptr<Link>& link, absl::Status why) {
  std::vector<Pending> failed;
  std::optional<WorkerId> peer;
  bool closed = false;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    peer = link->peer;
    if (peer) {
      auto it = links_.find(*peer);
      if (it != links_.end() && it->second == link) links_.erase(it);
    }
    for (auto it = pending_.begin(); it != pending_.end();) {
      if (it->second.link == link) {
        failed.push_back(std::move(it->second));
        pending_.erase(it++);
      } else {
        ++it;
      }
    }
  }
  if (peer)
    why = Annotate(why, absl::StrCat("the connection with worker ", Describe(*peer), " broke"));
  for (Pending& p : failed) p.done(CallError(p.to, p.function, why));
  if (peer && !closed) service_->OnPeerLost(*peer, why);
}

// --------------------------------------------------------------------------------- Names

absl::StatusOr<WorkerId> Agent::Impl::FindWorker(absl::string_view name) const {
  absl::MutexLock lock(&mu_);
  std::vector<std::string> names;
  for (const auto& [id, worker] : workers_) {
    if (worker.name == name) return id;
    names.push_back(worker.name);
  }
  std::sort(names.begin(), names.end());
  return absl::NotFoundError(absl::StrCat(
      "there is no worker '", name, "' in this job; there are: ", absl::StrJoin(names, ", ")));
}

std::string Agent::Impl::Describe(WorkerId worker) const {
  absl::MutexLock lock(&mu_);
  auto it = workers_.find(worker);
  return it == workers_.end() ? absl::StrCat(worker)
                              : absl::StrCat("'", it->second.name, "' (", worker, ")");
}

absl::Status Agent::Impl::CallError(WorkerId to, absl::string_view function,
                                    const absl::Status& why) const {
  return Annotate(why, absl::StrCat("call of '", function, "' on worker ", Describe(to)));
}

// --------------------------------------------------------------------------------- Agent

Agent::Agent(Clock* clock, Transport* transport, AgentService* service)
    : impl_(std::make_shared<Impl>(clock, transport, service)) {}
Agent::~Agent() { Close(); }
absl::StatusOr<std::string> Agent::Listen() { return impl_->Listen(); }
absl::Status Agent::Start(const WorkerInfo& self, std::vector<WorkerInfo> workers) {
  return impl_->Start(self, std::move(workers));
}
Packet Agent::NewRequest(absl::string_view function) {
  Packet packet;
  AppendFrame({.kind = FrameKind::kRequest, .function = function}, &packet.bytes);
  return packet;
}
Packet Agent::NewNotice() {
  Packet packet;
  AppendFrame({.kind = FrameKind::kNotice}, &packet.bytes);
  return packet;
}
void Agent::Call(WorkerId to, Packet request, absl::Time deadline, ReplyCallback done) {
  impl_->Call(to, std::move(request), deadline, std::move(done));
}
void Agent::Notify(WorkerId to, Packet notice) { impl_->Notify(to, std::move(notice)); }
absl::StatusOr<WorkerId> Agent::FindWorker(absl::string_view name) const {
  return impl_->FindWorker(name);
}
std::string Agent::Describe(WorkerId worker) const { return impl_->Describe(worker); }
absl::Time Agent::Now() const { return impl_->clock_->Now(); }
void Agent::Close() { impl_->Close(); }

}  // namespace distgrad
