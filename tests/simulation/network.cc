// Has each transport's own thread do what is due, packet by packet.
#include "tests/simulation/network.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"
#include "core/base/thread.h"

namespace distgrad {
namespace internal {

using Clock = SimulatedNetwork::Clock;

constexpr absl::string_view kScheme = "simulated://";

class SimulatedNode;

// One end of a connection. Thread-safe.
class SimulatedEnd final : public Connection, public std::enable_shared_from_this<SimulatedEnd> {
 public:
  SimulatedEnd(std::shared_ptr<SimulatedNode> node, std::string peer_address)
      : node_(std::move(node)), peer_address_(std::move(peer_address)) {}

  void Send(Packet packet, SendDone done) override;
  void Close() override { CloseBoth(absl::CancelledError("closed here"), /*by_caller=*/true); }

  // Ends this end with `why`, and has the other hear of it.
  void CloseBoth(absl::Status why, bool by_caller);
  // Ends this end, once: on the node's thread, not before then.
  void Finish(absl::Status why, Clock::time_point when, bool by_caller);
  // What it sends from now on is lost, and so is what comes.
  void BecomeDeaf();
  // The same at both ends, and what is large does not even leave.
  void ChokeBoth();

  // The other end has taken it in.
  void Establish();
  void SetPeer(std::shared_ptr<SimulatedEnd> peer) {
    absl::MutexLock lock(&mu_);
    peer_ = std::move(peer);
  }
  // On the node's thread only.
  void SetReceiver(std::shared_ptr<Receiver> receiver) { receiver_ = std::move(receiver); }
  // When the next thing that is sent from here arrives: behind what was sent before.
  Clock::time_point NextArrival(uint64_t bytes = 0);

  SimulatedNode& node() { return *node_; }
  const std::string& peer_address() const { return peer_address_; }
  std::string Text() const;
  bool closed() const {
    absl::MutexLock lock(&mu_);
    return !closed_.ok();
  }

 private:
  void Deliver(Packet packet);
  void SendsDone(Clock::time_point now);
  void Choke();
  // Has the system end this end, of which something does not leave.
  void GiveUp();

  const std::shared_ptr<SimulatedNode> node_;
  const std::string peer_address_;

  mutable absl::Mutex mu_;
  std::shared_ptr<SimulatedEnd> peer_ ABSL_GUARDED_BY(mu_);  // null once closed
  absl::Status closed_ ABSL_GUARDED_BY(mu_);                 // why; OK while open
  bool closed_by_caller_ ABSL_GUARDED_BY(mu_) = false;
  bool deaf_ ABSL_GUARDED_BY(mu_) = false, established_ ABSL_GUARDED_BY(mu_) = false;
  bool choked_ ABSL_GUARDED_BY(mu_) = false;     // what is large does not leave
  bool full_ ABSL_GUARDED_BY(mu_) = false;       // nor what is sent now, for it is behind that
  Clock::time_point last_ ABSL_GUARDED_BY(mu_);  // when the last thing sent from here arrives
  std::deque<std::pair<Clock::time_point, SendDone>> sending_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<Receiver> receiver_;  // on the node's thread
};

// What a transport is made of. Thread-safe.
class SimulatedNode final : public std::enable_shared_from_this<SimulatedNode> {
 public:
  using Task = absl::AnyInvocable<void()>;

  SimulatedNode(std::shared_ptr<SimulatedNetwork> network, std::string address)
      : network_(std::move(network)), address_(std::move(address)) {}

  absl::Status Start();
  void Stop();
  absl::Status Listen(Transport::Accept accept);
  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& address,
                                                      std::shared_ptr<Receiver> receiver);
  // On this node's thread: takes in the end of a connection that another opened.
  bool TakeIn(const std::shared_ptr<SimulatedEnd>& end);
  void Forget(const std::shared_ptr<SimulatedEnd>& end);
  std::vector<std::shared_ptr<SimulatedEnd>> Ends() const;

  // Runs the task on this node's thread, not before then; false once that has ended.
  bool Post(Clock::time_point when, Task task);
  // What happens at one time on both ends of a network's fault.
  void Kill() {
    std::lock_guard<std::mutex> lock(mu_);
    dead_ = true;
  }
  bool dead() const {
    std::lock_guard<std::mutex> lock(mu_);
    return dead_;
  }

  const std::string& address() const { return address_; }
  SimulatedNetwork& network() { return *network_; }

 private:
  void Run();

  const std::shared_ptr<SimulatedNetwork> network_;
  const std::string address_;

  mutable std::mutex mu_;  // not absl::Mutex, whose timed waits follow the wall clock
  std::condition_variable wake_;
  // Guarded by mu_.
  std::map<std::pair<Clock::time_point, uint64_t>, Task> tasks_;
  uint64_t posted_ = 0;
  bool stopping_ = false, over_ = false, listening_ = false, dead_ = false;
  std::vector<std::shared_ptr<SimulatedEnd>> ends_;
  std::thread thread_;

  Transport::Accept accept_;  // on the node's thread, once listening_
};

// SimulatedEnd

Clock::time_point SimulatedEnd::NextArrival(uint64_t bytes) {
  const Clock::time_point arrival =
      node_->network().Arrival(node_->address(), peer_address_, bytes);
  absl::MutexLock lock(&mu_);
  return last_ = std::max(last_, arrival);
}

void SimulatedEnd::Send(Packet packet, SendDone done) {
  Packet copy = CopyPacket(packet);
  packet = Packet();
  const bool done_at_once = node_->network().Draw() % 2 == 0;
  const Clock::time_point when = NextArrival(copy.size());
  absl::Status closed;
  std::shared_ptr<SimulatedEnd> peer;
  bool is_first_stuck = false;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    peer = peer_;
    if (closed.ok() && choked_ && !full_ && copy.size() > kLargePacket) {
      full_ = is_first_stuck = true;
    }
    if (closed.ok() && done && full_) {
      sending_.emplace_back(Clock::time_point::max(), std::exchange(done, nullptr));
    }
    // The system takes what is sent, whether it arrives or not; but nothing before there is a
    // connection.
    if (closed.ok() && done && !(established_ && done_at_once)) {
      sending_.emplace_back(when, std::exchange(done, nullptr));
      node_->Post(when, [self = shared_from_this(), when] { self->SendsDone(when); });
    }
    // Under the lock, so that what is sent keeps its order.
    if (peer != nullptr && !deaf_ && !node_->dead()) {
      peer->node().Post(
          when, [peer, copy = std::move(copy)]() mutable { peer->Deliver(std::move(copy)); });
    }
  }
  if (done) done(closed);
  if (is_first_stuck) GiveUp();
}

void SimulatedEnd::GiveUp() {
  const std::chrono::nanoseconds timeout = node_->network().system_timeout();
  if (timeout.count() == 0) return;
  node_->Post(Clock::now() + timeout, [self = shared_from_this()] {
    if (self->node_->dead()) return;
    self->Finish(absl::UnavailableError(absl::StrCat(self->peer_address_, " acknowledges nothing")),
                 Clock::now(), /*by_caller=*/false);
  });
}

void SimulatedEnd::ChokeBoth() {
  std::shared_ptr<SimulatedEnd> peer;
  {
    absl::MutexLock lock(&mu_);
    peer = peer_;
  }
  Choke();
  if (peer != nullptr) peer->Choke();
}

void SimulatedEnd::Choke() {
  absl::MutexLock lock(&mu_);
  deaf_ = choked_ = true;
}

void SimulatedEnd::Deliver(Packet packet) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_by_caller_ || deaf_) return;
  }
  if (node_->dead()) return;
  if (receiver_ != nullptr) receiver_->OnPacket(std::move(packet));
}

void SimulatedEnd::SendsDone(Clock::time_point now) {
  while (true) {
    SendDone done;
    {
      absl::MutexLock lock(&mu_);
      if (!established_ || sending_.empty() || sending_.front().first > now) return;
      done = std::move(sending_.front().second);
      sending_.pop_front();
    }
    done(absl::OkStatus());
  }
}

std::string SimulatedEnd::Text() const {
  absl::MutexLock lock(&mu_);
  if (closed_.ok() && !deaf_ && sending_.empty()) return "";
  return absl::StrCat(peer_address_, closed_.ok() ? "" : ", closed", deaf_ ? ", deaf" : "", ", ",
                      sending_.size(), " being sent");
}

void SimulatedEnd::Establish() {
  const Clock::time_point when = node_->network().Arrival(peer_address_, node_->address());
  {
    absl::MutexLock lock(&mu_);
    established_ = true;
  }
  node_->Post(when, [self = shared_from_this()] { self->SendsDone(Clock::now()); });
}

void SimulatedEnd::BecomeDeaf() {
  absl::MutexLock lock(&mu_);
  deaf_ = true;
}

void SimulatedEnd::Finish(absl::Status why, Clock::time_point when, bool by_caller) {
  std::shared_ptr<SimulatedEnd> peer;
  {
    absl::MutexLock lock(&mu_);
    if (by_caller) closed_by_caller_ = true;
    if (!closed_.ok()) return;
    closed_ = why;
    peer.swap(peer_);
  }
  node_->Post(when, [self = shared_from_this(), why] {
    std::deque<std::pair<Clock::time_point, SendDone>> lost;
    {
      absl::MutexLock lock(&self->mu_);
      lost.swap(self->sending_);
    }
    for (auto& [time, done] : lost) done(why);
    if (const auto receiver = std::move(self->receiver_)) receiver->OnClosed(why);
    self->node_->Forget(self);
  });
}

void SimulatedEnd::CloseBoth(absl::Status why, bool by_caller) {
  std::shared_ptr<SimulatedEnd> peer;
  bool deaf;
  {
    absl::MutexLock lock(&mu_);
    peer = peer_;
    deaf = deaf_;
  }
  const Clock::time_point when = NextArrival();
  Finish(std::move(why), Clock::now(), by_caller);
  if (peer == nullptr || deaf || node_->dead()) return;
  // What is in flight may be lost, or not.
  const bool in_order = node_->network().Draw() % 2 == 0;
  peer->node().Post(
      in_order ? when : node_->network().Arrival(node_->address(), peer_address_), [peer] {
        if (peer->node().dead()) return;
        {
          absl::MutexLock lock(&peer->mu_);
          if (peer->deaf_) return;
        }
        peer->Finish(absl::UnavailableError(absl::StrCat("the connection to ", peer->peer_address_,
                                                         " was closed there")),
                     Clock::now(), /*by_caller=*/false);
      });
}

// SimulatedNode

absl::Status SimulatedNode::Start() {
  std::lock_guard<std::mutex> lock(mu_);
  if (stopping_) return absl::FailedPreconditionError(absl::StrCat(address_, " is going away"));
  if (thread_.joinable()) return absl::OkStatus();
  DG_ASSIGN_OR_RETURN(thread_, StartThread(absl::StrCat("net", address_.substr(kScheme.size())),
                                           [this] { Run(); }));
  return absl::OkStatus();
}

void SimulatedNode::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    if (tasks_.empty()) {
      if (stopping_ && ends_.empty()) break;
      wake_.wait(lock);
      continue;
    }
    const auto first = tasks_.begin();
    const Clock::time_point when = first->first.first;
    // At the end nothing is waited for.
    if (!stopping_ && when > Clock::now()) {
      wake_.wait_until(lock, when);
      continue;
    }
    Task task = std::move(first->second);
    tasks_.erase(first);
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
  over_ = true;
}

bool SimulatedNode::Post(Clock::time_point when, Task task) {
  std::lock_guard<std::mutex> lock(mu_);
  if (over_ || !thread_.joinable()) return false;
  tasks_.emplace(std::make_pair(when, posted_++), std::move(task));
  wake_.notify_one();
  return true;
}

void SimulatedNode::Stop() {
  network_->Remove(address_);
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  for (const auto& end : Ends()) end->Close();
  {
    std::lock_guard<std::mutex> lock(mu_);
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  accept_ = nullptr;
}

absl::Status SimulatedNode::Listen(Transport::Accept accept) {
  DG_RETURN_IF_ERROR(Start());
  std::lock_guard<std::mutex> lock(mu_);
  if (listening_) return absl::FailedPreconditionError(absl::StrCat(address_, " listens already"));
  accept_ = std::move(accept);
  listening_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Connection>> SimulatedNode::Connect(
    const std::string& address, std::shared_ptr<Receiver> receiver) {
  uint64_t number;
  absl::string_view digits = address;
  if (!absl::ConsumePrefix(&digits, kScheme) || !absl::SimpleAtoi(digits, &number)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not simulated://N"));
  }
  DG_RETURN_IF_ERROR(Start());
  auto near = std::make_shared<SimulatedEnd>(shared_from_this(), address);
  near->SetReceiver(std::move(receiver));
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (stopping_) return absl::FailedPreconditionError(absl::StrCat(address_, " is going away"));
    ends_.push_back(near);
  }
  if (const auto after = network_->ConnectFails(address_)) {
    if (*after == std::chrono::nanoseconds::max()) return near;
    near->Finish(absl::UnavailableError(absl::StrCat("the handshake with ", address, " failed")),
                 Clock::now() + *after, /*by_caller=*/false);
    return near;
  }
  const Clock::time_point when = near->NextArrival();
  const std::shared_ptr<SimulatedNode> there = network_->Find(address);
  const auto refuse = [near](const std::string& why) {
    near->Finish(absl::NotFoundError(why),
                 near->node().network().Arrival(near->peer_address(), near->node().address()),
                 /*by_caller=*/false);
  };
  const std::string nobody = absl::StrCat("nobody listens at ", address);
  if (there == nullptr) {
    // Of a machine that is gone nobody says so.
    if (when != Clock::time_point::max()) {
      Post(when, [refuse, nobody] { refuse(nobody); });
    }
    return near;
  }
  auto far = std::make_shared<SimulatedEnd>(there, address_);
  near->SetPeer(far);
  far->SetPeer(near);
  const bool posted = there->Post(when, [there, far, near, refuse, nobody] {
    if (there->dead()) return;
    if (far->closed() || !there->TakeIn(far)) return refuse(nobody);
    far->Establish();
    near->Establish();
  });
  if (!posted) refuse(nobody);
  return near;
}

bool SimulatedNode::TakeIn(const std::shared_ptr<SimulatedEnd>& end) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!listening_ || stopping_) return false;
    ends_.push_back(end);
  }
  std::shared_ptr<Receiver> receiver = accept_(end);
  const bool refused = receiver == nullptr;
  end->SetReceiver(std::move(receiver));
  if (refused) end->Close();
  return true;
}

void SimulatedNode::Forget(const std::shared_ptr<SimulatedEnd>& end) {
  std::lock_guard<std::mutex> lock(mu_);
  ends_.erase(std::remove(ends_.begin(), ends_.end(), end), ends_.end());
}

std::vector<std::shared_ptr<SimulatedEnd>> SimulatedNode::Ends() const {
  std::lock_guard<std::mutex> lock(mu_);
  return ends_;
}

namespace {

// The shell that a caller owns. Thread-safe.
class SimulatedTransport final : public Transport {
 public:
  explicit SimulatedTransport(std::shared_ptr<SimulatedNode> node) : node_(std::move(node)) {}
  ~SimulatedTransport() override { node_->Stop(); }

  absl::StatusOr<std::string> Listen(Accept accept) override {
    DG_RETURN_IF_ERROR(node_->Listen(std::move(accept)));
    return node_->address();
  }
  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& address,
                                                      std::shared_ptr<Receiver> receiver) override {
    return node_->Connect(address, std::move(receiver));
  }
  std::string Name() const override { return "simulated"; }

 private:
  const std::shared_ptr<SimulatedNode> node_;
};

}  // namespace
}  // namespace internal

// SimulatedNetwork

std::unique_ptr<Transport> SimulatedNetwork::NewTransport(std::string* address) {
  absl::MutexLock lock(&mu_);
  *address = absl::StrCat(internal::kScheme, ++last_);
  auto node = std::make_shared<internal::SimulatedNode>(shared_from_this(), *address);
  nodes_[*address] = node;
  return std::make_unique<internal::SimulatedTransport>(std::move(node));
}

uint64_t SimulatedNetwork::Draw() {
  absl::MutexLock lock(&mu_);
  return random_();
}

SimulatedNetwork::Clock::time_point SimulatedNetwork::Arrival(const std::string& from,
                                                              const std::string& to,
                                                              uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (silent_.count(to) > 0) return Clock::time_point::max();
  const bool slow = options_.slow_one_in != 0 && random_() % options_.slow_one_in == 0;
  const auto longest = slow ? options_.slowest : options_.usual;
  std::chrono::nanoseconds delay(options_.fastest.count() +
                                 random_() % (longest - options_.fastest).count());
  if (options_.large_per_ms != 0 && bytes > kLargePacket) {
    delay += std::chrono::milliseconds(bytes / options_.large_per_ms);
  }
  const Clock::time_point when = Clock::now() + delay;
  const auto held = held_.find({from, to});
  return held == held_.end() ? when : std::max(when, held->second + delay);
}

std::shared_ptr<internal::SimulatedNode> SimulatedNetwork::Find(const std::string& address) const {
  absl::MutexLock lock(&mu_);
  const auto found = nodes_.find(address);
  return found == nodes_.end() ? nullptr : found->second.lock();
}

void SimulatedNetwork::Remove(const std::string& address) {
  absl::MutexLock lock(&mu_);
  nodes_.erase(address);
}

std::vector<std::shared_ptr<internal::SimulatedNode>> SimulatedNetwork::Nodes() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<internal::SimulatedNode>> nodes;
  for (const auto& [address, weak] : nodes_) {
    if (auto node = weak.lock()) nodes.push_back(std::move(node));
  }
  return nodes;
}

void SimulatedNetwork::Cut(const std::string& a, const std::string& b, bool silently) {
  for (const auto& node : Nodes()) {
    for (const auto& end : node->Ends()) {
      const bool is_a = node->address() == a && end->peer_address() == b;
      const bool is_b = node->address() == b && end->peer_address() == a;
      if (!is_a && !is_b) continue;
      if (silently && is_b) {
        end->BecomeDeaf();
        continue;
      }
      end->Finish(absl::UnavailableError(
                      absl::StrCat("the connection to ", end->peer_address(), " was cut")),
                  Clock::now(), /*by_caller=*/false);
    }
  }
}

std::shared_ptr<internal::SimulatedEnd> SimulatedNetwork::AnyBetween(const std::string& a,
                                                                     const std::string& b) {
  std::vector<std::shared_ptr<internal::SimulatedEnd>> between;
  for (const auto& node : Nodes()) {
    for (const auto& end : node->Ends()) {
      const std::string &here = node->address(), &there = end->peer_address();
      if (end->closed() || !((here == a && there == b) || (here == b && there == a))) continue;
      between.push_back(end);
    }
  }
  return between.empty() ? nullptr : between[Draw() % between.size()];
}

void SimulatedNetwork::Deafen(const std::string& a, const std::string& b) {
  if (const auto end = AnyBetween(a, b)) end->BecomeDeaf();
}

void SimulatedNetwork::Choke(const std::string& a, const std::string& b) {
  if (const auto end = AnyBetween(a, b)) end->ChokeBoth();
}

void SimulatedNetwork::FailConnects(const std::string& from, Clock::time_point until, bool hang) {
  absl::MutexLock lock(&mu_);
  failing_[from] = {until, hang};
}

std::optional<std::chrono::nanoseconds> SimulatedNetwork::ConnectFails(const std::string& from) {
  absl::MutexLock lock(&mu_);
  const auto found = failing_.find(from);
  if (found == failing_.end() || Clock::now() >= found->second.first || random_() % 2 == 0) {
    return std::nullopt;
  }
  if (found->second.second) return std::chrono::nanoseconds::max();
  return std::chrono::nanoseconds(random_() % 2000000000);
}

void SimulatedNetwork::Hold(const std::string& from, const std::string& to,
                            Clock::time_point until) {
  absl::MutexLock lock(&mu_);
  held_[{from, to}] = until;
}

void SimulatedNetwork::Kill(const std::string& address, bool silently) {
  if (silently) {
    absl::MutexLock lock(&mu_);
    silent_.insert(address);
  }
  const auto dying = Find(address);
  if (dying == nullptr) return;
  dying->Kill();
  Remove(address);
  if (silently) return;
  for (const auto& node : Nodes()) {
    for (const auto& end : node->Ends()) {
      if (end->peer_address() != address) continue;
      end->Finish(absl::UnavailableError(absl::StrCat("the connection to ", address, " broke")),
                  Arrival(address, node->address()), /*by_caller=*/false);
    }
  }
}

std::string SimulatedNetwork::Text() const {
  std::string text;
  for (const auto& node : Nodes()) {
    for (const auto& end : node->Ends()) {
      const std::string state = end->Text();
      if (!state.empty()) absl::StrAppend(&text, node->address(), " to ", state, "; ");
    }
  }
  return text;
}

size_t SimulatedNetwork::ends() const {
  size_t ends = 0;
  for (const auto& node : Nodes()) ends += node->Ends().size();
  return ends;
}

}  // namespace distgrad
