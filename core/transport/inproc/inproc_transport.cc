// Delivers packets through queues, on a thread of its own, with faults on demand.
#include "core/transport/inproc/inproc_transport.h"

#include <cstddef>
#include <deque>
#include <new>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/await_memory.h"
#include "core/base/status.h"
#include "core/base/thread_pool.h"

namespace distgrad {
namespace {

constexpr absl::string_view kScheme = "inproc://";

}  // namespace

namespace internal {

// One end of a connection. Thread-safe. Its node and it own each other until it is closed, and
// so do the two ends.
//
// What happens to an end is put on its node's one thread in the order in which it happens: that
// gives all the order that a Receiver is promised.
class InprocEnd final : public Connection, public std::enable_shared_from_this<InprocEnd> {
 public:
  InprocEnd(std::shared_ptr<InprocNode> node, std::string peer_address)
      : node_(std::move(node)), peer_address_(std::move(peer_address)) {}

  // Before anything else.
  void SetPeer(std::shared_ptr<InprocEnd> peer) {
    absl::MutexLock lock(&mu_);
    peer_ = std::move(peer);
  }

  void Send(Packet packet, SendDone done) override {
    const absl::Status status = TrySend(packet, done);
    packet = Packet();  // it goes before the sender hears that it is done with
    if (done) done(status);
  }

  void Close() override { CloseBoth("closed", /*by_caller=*/true, absl::StatusCode::kCancelled); }

  // Ends this end, once; the first reason stays. Where that throws nothing has changed.
  void Finish(const absl::Status& why, bool by_caller);

  // Runs `task` on the node's thread, before OnClosed; false if the end is closed.
  bool PostIfOpen(ThreadPool::Task task);

  // Puts held packets on their way.
  void ReleaseHeld();

  // On the node's thread only.
  void SetReceiver(std::shared_ptr<Receiver> receiver) { receiver_ = std::move(receiver); }

 private:
  // Takes `done` where the packet is held.
  absl::Status TrySend(const Packet& packet, SendDone& done);
  // `code`: of this end.
  void CloseBoth(absl::string_view how, bool by_caller, absl::StatusCode code);
  // The last that is called for this end, on the node's thread.
  void End();
  // Makes `copy` arrive at this end.
  void Arrive(Packet copy);

  // Constant after construction.
  const std::shared_ptr<InprocNode> node_;
  const std::string peer_address_;

  absl::Mutex mu_;
  // Guarded by mu_.
  std::shared_ptr<InprocEnd> peer_ ABSL_GUARDED_BY(mu_);  // null once closed
  absl::Status closed_ ABSL_GUARDED_BY(mu_);              // why; OK while open
  bool closed_by_caller_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::pair<Packet, SendDone>> held_ ABSL_GUARDED_BY(mu_);

  // On the node's thread only.
  std::shared_ptr<Receiver> receiver_;  // null before Accept and after OnClosed
};

// What a transport is made of. Thread-safe.
class InprocNode final : public std::enable_shared_from_this<InprocNode> {
 public:
  InprocNode(std::shared_ptr<InprocNetwork> network, std::string address)
      : network_(std::move(network)),
        address_(std::move(address)),
        thread_(absl::StrCat("inproc", address_.substr(kScheme.size())), 1) {}

  // Returns when all callbacks have been called.
  void Stop();

  absl::Status Listen(Transport::Accept accept);
  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& address,
                                                      std::shared_ptr<Receiver> receiver);
  // Called by a node that connects to this one, with the end that is to be ours. False if we do
  // not listen, or if the connection is closed already.
  bool TakeIn(const std::shared_ptr<InprocEnd>& end);

  void Forget(const std::shared_ptr<InprocEnd>& end);
  std::vector<std::shared_ptr<InprocEnd>> Ends() const;

  bool Post(ThreadPool::Task task) { return thread_.Schedule(std::move(task)); }
  const std::string& address() const { return address_; }
  InprocNetwork& network() { return *network_; }

 private:
  // False when the node is stopping.
  bool Add(const std::shared_ptr<InprocEnd>& end);

  // Constant after construction.
  const std::shared_ptr<InprocNetwork> network_;
  const std::string address_;

  // Synchronizes itself. Of size 1, so that tasks keep their order.
  ThreadPool thread_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool listening_ ABSL_GUARDED_BY(mu_) = false;
  std::set<std::shared_ptr<InprocEnd>> ends_ ABSL_GUARDED_BY(mu_);

  // On the node's thread only, once listening_ is true.
  Transport::Accept accept_;
};

// InprocEnd

absl::Status InprocEnd::TrySend(const Packet& packet, SendDone& done) {
  {
    absl::MutexLock lock(&mu_);
    if (!closed_.ok()) return closed_;
  }
  Packet copy;
  try {
    copy = CopyPacket(packet);
  } catch (const std::bad_alloc&) {
    copy = {packet.bytes,
            {},
            absl::ResourceExhaustedError(
                absl::StrCat("there is no memory for the ", packet.size(), " bytes of it"))};
  }
  FaultInjector* faults = node_->network().faults();
  const FaultInjector::Action action = faults == nullptr
                                           ? FaultInjector::Action::kDeliver
                                           : faults->OnSend(node_->address(), peer_address_, copy);
  if (action == FaultInjector::Action::kDrop) return absl::OkStatus();
  if (action == FaultInjector::Action::kRefuse) {
    return absl::ResourceExhaustedError("a packet was refused");
  }
  if (action == FaultInjector::Action::kCut) {
    CloseBoth("cut", /*by_caller=*/false, absl::StatusCode::kUnavailable);
  }
  if (action == FaultInjector::Action::kNobodyListens) {
    CloseBoth("refused", /*by_caller=*/false, absl::StatusCode::kNotFound);
  }

  Packet again;
  if (action == FaultInjector::Action::kDuplicate) again = CopyPacket(copy);
  absl::MutexLock lock(&mu_);
  if (!closed_.ok()) return closed_;
  const bool hold = action == FaultInjector::Action::kHold || !held_.empty();
  const auto put = [&](Packet one) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (hold) {
      held_.emplace_back(std::move(one), std::exchange(done, nullptr));
    } else {
      peer_->Arrive(std::move(one));
    }
  };
  put(std::move(copy));
  if (action == FaultInjector::Action::kDuplicate) put(std::move(again));
  return absl::OkStatus();
}

void InprocEnd::Arrive(Packet copy) {
  // Refused only by a node that has stopped, and that has closed this end.
  node_->Post([self = shared_from_this(), copy = std::move(copy)]() mutable {
    {
      absl::MutexLock lock(&self->mu_);
      if (self->closed_by_caller_) return;
    }
    if (self->receiver_ != nullptr) self->receiver_->OnPacket(std::move(copy));
  });
}

void InprocEnd::Finish(const absl::Status& why, bool by_caller) {
  std::shared_ptr<InprocEnd> peer;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  if (by_caller) closed_by_caller_ = true;
  if (!closed_.ok()) return;
  // Under the lock, so that whoever finds the end closed knows that this is on its way.
  node_->Post([self = shared_from_this()] { self->End(); });
  closed_ = why;
  peer.swap(peer_);
}

void InprocEnd::End() {
  absl::Status why;
  for (;;) {
    std::pair<Packet, SendDone> lost;  // ends outside the lock
    {
      absl::MutexLock lock(&mu_);
      why = closed_;
      if (held_.empty()) break;
      lost = std::move(held_.front());
      held_.pop_front();
    }
    lost.first = Packet();
    if (lost.second) lost.second(why);
  }
  if (const auto receiver = std::move(receiver_)) receiver->OnClosed(why);
  node_->Forget(shared_from_this());
}

void InprocEnd::CloseBoth(absl::string_view how, bool by_caller, absl::StatusCode code) {
  std::shared_ptr<InprocEnd> peer;
  {
    absl::MutexLock lock(&mu_);
    peer = peer_;
  }
  AwaitMemory([&] {
    const std::string text = absl::StrCat("the connection to ", peer_address_, " was ", how);
    Finish(absl::Status(code, by_caller ? absl::StrCat(text, " here") : text), by_caller);
  });
  if (peer == nullptr) return;
  AwaitMemory([&] {
    peer->Finish(absl::UnavailableError(absl::StrCat("the connection to ", node_->address(),
                                                     " was ", how, by_caller ? " there" : "")),
                 /*by_caller=*/false);
  });
}

bool InprocEnd::PostIfOpen(ThreadPool::Task task) {
  absl::MutexLock lock(&mu_);
  return closed_.ok() && node_->Post(std::move(task));
}

void InprocEnd::ReleaseHeld() {
  absl::MutexLock lock(&mu_);
  if (!closed_.ok() || held_.empty()) return;
  for (auto& [packet, done] : held_) peer_->Arrive(std::move(packet));
  // Under the lock: while an end is open its node runs.
  node_->Post([held = std::exchange(held_, {})]() mutable {
    for (auto& [packet, done] : held) {
      if (done) done(absl::OkStatus());
    }
  });
}

// InprocNode

void InprocNode::Stop() {
  network_->Remove(address_);
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (const auto& end : AwaitMemory([this] { return Ends(); })) end->Close();
  thread_.Join();
  accept_ = nullptr;
}

absl::Status InprocNode::Listen(Transport::Accept accept) {
  DG_RETURN_IF_ERROR(thread_.Start());
  absl::MutexLock lock(&mu_);
  if (listening_) return absl::FailedPreconditionError(absl::StrCat(address_, " listens already"));
  accept_ = std::move(accept);
  listening_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Connection>> InprocNode::Connect(
    const std::string& address, std::shared_ptr<Receiver> receiver) {
  uint64_t number;
  if (!absl::StartsWith(address, kScheme) ||
      !absl::SimpleAtoi(address.substr(kScheme.size()), &number)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not inproc://N"));
  }
  DG_RETURN_IF_ERROR(thread_.Start());
  auto near = std::make_shared<InprocEnd>(shared_from_this(), address);
  near->SetReceiver(std::move(receiver));  // no task of this end is on the thread yet
  const std::shared_ptr<InprocNode> there = network_->Find(address);
  std::shared_ptr<InprocEnd> far;
  if (there != nullptr) far = std::make_shared<InprocEnd>(there, address_);
  // Should there be no memory for the rest.
  absl::Cleanup let_go = [&] {
    near->SetPeer(nullptr);
    Forget(near);
    if (far == nullptr) return;
    far->SetPeer(nullptr);
    there->Forget(far);
  };
  near->SetPeer(far);
  if (far != nullptr) far->SetPeer(near);
  if (!Add(near)) {
    return absl::FailedPreconditionError(absl::StrCat(address_, " is going away"));
  }
  if (far == nullptr || !there->TakeIn(far)) {
    near->Finish(absl::NotFoundError(absl::StrCat("nobody listens at ", address)),
                 /*by_caller=*/false);
  }
  std::move(let_go).Cancel();
  return near;
}

bool InprocNode::TakeIn(const std::shared_ptr<InprocEnd>& end) {
  {
    absl::MutexLock lock(&mu_);
    if (!listening_ || stopping_) return false;
    ends_.insert(end);
  }
  const bool open = end->PostIfOpen([this, end] {
    std::shared_ptr<Receiver> receiver = accept_(end);
    const bool refused = receiver == nullptr;
    end->SetReceiver(std::move(receiver));
    if (refused) end->Close();
  });
  if (!open) Forget(end);
  return open;
}

bool InprocNode::Add(const std::shared_ptr<InprocEnd>& end) {
  absl::MutexLock lock(&mu_);
  if (!stopping_) ends_.insert(end);
  return !stopping_;
}

void InprocNode::Forget(const std::shared_ptr<InprocEnd>& end) {
  absl::MutexLock lock(&mu_);
  ends_.erase(end);
}

std::vector<std::shared_ptr<InprocEnd>> InprocNode::Ends() const {
  absl::MutexLock lock(&mu_);
  return {ends_.begin(), ends_.end()};
}

namespace {

// The shell that a caller owns. Thread-safe.
class InprocTransport final : public Transport {
 public:
  explicit InprocTransport(std::shared_ptr<InprocNode> node) : node_(std::move(node)) {}
  ~InprocTransport() override { node_->Stop(); }

  absl::StatusOr<std::string> Listen(Accept accept) override {
    if (absl::Status status = node_->Listen(std::move(accept)); !status.ok()) return status;
    return node_->address();
  }
  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& address,
                                                      std::shared_ptr<Receiver> receiver) override {
    return node_->Connect(address, std::move(receiver));
  }
  bool IsOnThisMachine(const std::string&) const override { return true; }
  std::string Name() const override { return "inproc"; }

 private:
  const std::shared_ptr<InprocNode> node_;
};

}  // namespace
}  // namespace internal

// InprocNetwork

std::unique_ptr<Transport> InprocNetwork::NewTransport() {
  return NewInprocTransport(shared_from_this());
}

void InprocNetwork::ReleaseHeld() {
  std::vector<std::shared_ptr<internal::InprocNode>> nodes;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [address, weak] : nodes_) {
      if (auto node = weak.lock()) nodes.push_back(std::move(node));
    }
  }
  for (const auto& node : nodes) {
    for (const auto& end : node->Ends()) end->ReleaseHeld();
  }
}

std::string InprocNetwork::NewAddress() {
  absl::MutexLock lock(&mu_);
  return absl::StrCat(kScheme, ++last_);
}

void InprocNetwork::Add(const std::shared_ptr<internal::InprocNode>& node) {
  absl::MutexLock lock(&mu_);
  nodes_[node->address()] = node;
}

void InprocNetwork::Remove(const std::string& address) {
  absl::MutexLock lock(&mu_);
  nodes_.erase(address);
}

std::shared_ptr<internal::InprocNode> InprocNetwork::Find(const std::string& address) const {
  absl::MutexLock lock(&mu_);
  const auto found = nodes_.find(address);
  return found == nodes_.end() ? nullptr : found->second.lock();
}

std::unique_ptr<Transport> NewInprocTransport(std::shared_ptr<InprocNetwork> network) {
  std::string address = network->NewAddress();
  auto node = std::make_shared<internal::InprocNode>(network, std::move(address));
  network->Add(node);
  return std::make_unique<internal::InprocTransport>(std::move(node));
}

}  // namespace distgrad
