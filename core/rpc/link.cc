// Queues what is sent on a strand, in order, and closes a connection with its reason.
#include "core/rpc/link.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <ostream>
#include <utility>

#include "core/base/exception.h"
#include "core/base/log.h"
#include "core/base/make_or.h"

namespace distgrad {
namespace {

// Made before main(), for later there may be no memory for it.
const absl::Status* const kTooMuch =
    new absl::Status(absl::ResourceExhaustedError("too much came before its sender was known"));

// What a log says of the peer: its rank, as there may be no memory for its name.
struct WithPeer {
  const std::optional<WorkerRank> peer;
};
std::ostream& operator<<(std::ostream& out, const WithPeer& with) {
  if (with.peer) out << " with worker " << *with.peer;
  return out;
}

}  // namespace

Link::Link(std::shared_ptr<Owner> owner, Shared* shared, Kind kind, uint64_t number)
    : owner_(std::move(owner)),
      shared_(shared),
      kind_(kind),
      number_(number),
      window_(std::make_shared<SendWindow>(kind == Kind::kLoopback
                                               ? std::numeric_limits<uint64_t>::max()
                                               : shared->limits.bytes_per_peer)),
      served_(shared->clock, &shared->limits, &shared->served),
      out_([this](std::exception_ptr thrown) {
        const absl::Status why = StatusFromStdException(std::move(thrown));
        DG_LOG(ERROR) << "closing a connection" << WithPeer{peer()} << ": " << why.message();
        Close(why);
      }),
      state_(kind == Kind::kLoopback ? State::kOpen : State::kOpening),
      inbox_(kind == Kind::kAccepted ? Inbox::kHolding : Inbox::kPassing) {}

// -------------------------------------------------------------------------------------- Sending

void Link::Send(Packet packet, SendWindow::Credit credit, uint64_t call) {
  if (kind_ == Kind::kLoopback) {
    if (call != 0 && !owner_->OnLeaving(call, packet)) return;
    return OnPacket(CopyPacket(packet));
  }
  const uint64_t size = packet.size();
  if (credit.window() != window_.get()) credit = window_->Acquire(size);
  Queue({std::move(packet), std::move(credit), call}, size > kBulkBytes);
}

void Link::SendBehind(uint64_t bytes, Packet packet) {
  if (kind_ == Kind::kLoopback) return Send(std::move(packet));
  SendWindow::Credit credit = window_->Acquire(packet.size());
  Queue({std::move(packet), std::move(credit), /*call=*/0}, bytes > kBulkBytes);
}

void Link::Withdraw(uint64_t call) {
  out_.Run([this, self = shared_from_this(), call] {
    const auto found = withdrawable_.find(call);
    if (found == withdrawable_.end()) return;
    Waiting& unwanted = *found->second;
    withdrawable_.erase(found);
    unwanted.withdrawn = true;
    unwanted.packet = Packet();
    unwanted.credit.Release();
    while (!waiting_.empty() && waiting_.front().withdrawn) PopWaiting();
    while (!large_waiting_.empty() && large_waiting_.front().withdrawn) large_waiting_.pop_front();
  });
}

// One that does not leave.
void Link::PopWaiting() {
  waiting_.pop_front();
  unsent_.fetch_sub(1, std::memory_order_relaxed);
}

bool Link::MayLeave(Waiting& waiting) {
  if (waiting.call == 0) return true;
  withdrawable_.erase(waiting.call);
  return !waiting.withdrawn && owner_->OnLeaving(waiting.call, waiting.packet);
}

void Link::Queue(Waiting waiting, bool is_large) {
  out_.Run([this, self = shared_from_this(), waiting = std::move(waiting), is_large]() mutable {
    if (open_ != nullptr) std::exchange(open_, nullptr)();
    if (!is_large) unsent_.fetch_add(1, std::memory_order_relaxed);
    std::deque<Waiting>& queue = is_large ? large_waiting_ : waiting_;
    queue.push_back(std::move(waiting));
    if (queue.back().call != 0) withdrawable_[queue.back().call] = &queue.back();
    if (is_large && !std::exchange(bulk_wanted_, true)) owner_->OnBulkWanted(self);
    FlushOnStrand();
  });
}

void Link::SendLast(Packet packet, absl::Status why) {
  served_.Close(why);
  window_->Close(why);
  {
    absl::MutexLock lock(&mu_);
    if (!why_.ok() || state_ == State::kClosed) return;
    // Under the lock, as the clock is there until Close() has had it.
    last_words_ = shared_->clock->At(shared_->clock->Now() + shared_->limits.handshake_timeout,
                                     [weak = weak_from_this(), why] {
                                       if (const auto self = weak.lock()) self->Close(why);
                                     });
    why_ = why;
  }
  out_.Run([this, self = shared_from_this(), packet = std::move(packet), why]() mutable {
    FlushOnStrand();
    const auto connection = this->connection();
    // The thread that opens it may not have come so far: it finds that it is closed.
    if (connection == nullptr) return Close(why);
    connection->Send(std::move(packet), [self, why](const absl::Status& sent) {
      if (!sent.ok()) self->Close(why);
    });
  });
}

void Link::FlushOnStrand() {
  std::shared_ptr<Connection> connection;
  std::shared_ptr<Link> bulk;
  bool is_closed;
  {
    absl::MutexLock lock(&mu_);
    connection = connection_;
    bulk = bulk_;
    is_closed = state_ == State::kClosed;
  }
  if (is_closed) {
    withdrawable_.clear();
    waiting_.clear();
    large_waiting_.clear();
  }
  while (connection != nullptr && !waiting_.empty()) {
    Waiting& next = waiting_.front();
    if (!MayLeave(next)) {
      PopWaiting();
      continue;
    }
    connection->Send(std::move(next.packet),
                     [self = shared_from_this(),
                      credit = std::move(next.credit)](const absl::Status& sent) mutable {
                       credit.Release();
                       self->OnSent(sent);
                     });
    waiting_.pop_front();
  }
  for (; bulk != nullptr && !large_waiting_.empty(); large_waiting_.pop_front()) {
    Waiting& next = large_waiting_.front();
    if (!MayLeave(next)) continue;
    next.call = 0;
    bulk->Queue(std::move(next), /*is_large=*/false);
  }
}

void Link::OnSent(const absl::Status& sent) {
  unsent_.fetch_sub(1, std::memory_order_relaxed);
  sent_.fetch_add(1, std::memory_order_relaxed);
  // Where the connection is over, its receiver hears of that. Where it stands and refuses a packet,
  // whoever waits for what was in it would wait on.
  if (sent.ok() || absl::IsUnavailable(sent) || absl::IsCancelled(sent) || absl::IsNotFound(sent)) {
    return;
  }
  DG_LOG(WARNING) << "closing a connection" << WithPeer{peer()} << ": " << sent.message();
  Close(sent);
}

// It leaves once there is a connection. So a link of which nothing has left was never open.
void Link::SendHello(Connection& connection, Packet hello) {
  unsent_.fetch_add(1, std::memory_order_relaxed);
  connection.Send(std::move(hello),
                  [self = shared_from_this()](const absl::Status& sent) { self->OnSent(sent); });
}

void Link::SetConnection(std::shared_ptr<Connection> connection) {
  {
    absl::MutexLock lock(&mu_);
    if (state_.Advance(State::kOpen)) connection_ = std::exchange(connection, nullptr);
  }
  if (connection != nullptr) return connection->Close();  // it comes too late
  out_.Run([this, self = shared_from_this()] { FlushOnStrand(); });
}

void Link::SetBulk(std::shared_ptr<Link> bulk) {
  {
    absl::MutexLock lock(&mu_);
    if (state_ != State::kClosed && bulk_ == nullptr) bulk_ = std::exchange(bulk, nullptr);
  }
  if (bulk != nullptr) {
    return bulk->Close(absl::CancelledError("the connection that it would serve is closed"));
  }
  out_.Run([this, self = shared_from_this()] { FlushOnStrand(); });
}

bool Link::ClaimBulk() {
  absl::MutexLock lock(&mu_);
  return !std::exchange(bulk_claimed_, true);
}

void Link::HearBulk() {
  absl::MutexLock lock(&mu_);
  if (bulk_ == nullptr) return;
  bulk_->heard_.fetch_add(1, std::memory_order_relaxed);
  bulk_->SetAnswered();
}

bool Link::ready(uint64_t bytes) const {
  absl::MutexLock lock(&mu_);
  return bytes > kBulkBytes && kind_ != Kind::kLoopback ? bulk_ != nullptr
                                                        : state_ != State::kOpening;
}

// ------------------------------------------------------------------------------------ Receiving

std::shared_ptr<Link> Link::Target() {
  if (state_ >= State::kDropped) return nullptr;
  return main_.has_value() ? main_->lock() : shared_from_this();
}

void Link::Deliver(std::shared_ptr<Link> target, Packet packet) {
  if (target != nullptr && target.get() != this) {
    absl::MutexLock lock(&target->mu_);
    if (target->state_ >= State::kDropped) return;
  }
  if (target != nullptr) owner_->OnPacket(target, std::move(packet));
}

void Link::OnPacket(Packet packet) {
  heard_.fetch_add(1, std::memory_order_relaxed);
  std::shared_ptr<Link> target;
  std::optional<WorkerRank> from;
  size_t held = 0;
  uint64_t held_bytes = 0;
  bool is_full = false, is_news = false;
  {
    absl::MutexLock lock(&mu_);
    target = Target();
    if (target != nullptr && inbox_ != Inbox::kPassing) {
      const uint64_t size = packet.size();
      // The answers to our own pings are none that it has chosen to send.
      const size_t chosen = held_.size() - std::min<size_t>(held_.size(), asked());
      is_full = !held_.empty() && (chosen >= shared_->limits.calls_per_peer ||
                                   held_bytes_ + size > shared_->limits.bytes_per_peer);
      if (!is_full) {
        try {
          held_.push_back(std::move(packet));
          held_bytes_ += size;
          return;
        } catch (const std::bad_alloc&) {  // which comes to the same
          is_full = true;
        }
      }
      from = held_from_;
      held = held_.size();
      held_bytes = held_bytes_;
      is_news = why_.ok();  // more may come before the connection has ended
    }
  }
  if (is_full) {
    if (is_news) {
      DG_LOG(WARNING) << "closing a connection" << WithPeer{from} << ": " << kTooMuch->message()
                      << ": " << held << " messages of " << held_bytes
                      << " bytes; limit calls_per_peer is " << shared_->limits.calls_per_peer
                      << ", limit bytes_per_peer is " << shared_->limits.bytes_per_peer;
    }
    return Close(*kTooMuch);
  }
  Deliver(std::move(target), std::move(packet));
}

void Link::Hold(std::optional<WorkerRank> from) {
  absl::MutexLock lock(&mu_);
  held_from_ = from;
  inbox_ = Inbox::kHolding;
}

void Link::Release() {
  uint64_t drain;
  {
    absl::MutexLock lock(&mu_);
    if (inbox_ != Inbox::kHolding) return;
    inbox_ = Inbox::kDraining;
    drain = ++drains_;
  }
  for (;;) {
    std::shared_ptr<Link> target;
    Packet packet;
    {
      absl::MutexLock lock(&mu_);
      // What was handed on had the link hold again; somebody else may have released it since.
      if (inbox_ != Inbox::kDraining || drains_ != drain) return;
      if (held_.empty()) {
        inbox_ = Inbox::kPassing;
        return;
      }
      target = Target();
      packet = std::move(held_.front());
      held_.pop_front();
      held_bytes_ -= packet.size();
    }
    Deliver(std::move(target), std::move(packet));
  }
}

void Link::Drop() {
  absl::MutexLock lock(&mu_);
  state_.Advance(State::kDropped);
}

std::optional<WorkerRank> Link::peer() const {
  absl::MutexLock lock(&mu_);
  return peer_;
}

Incarnation Link::incarnation() const {
  absl::MutexLock lock(&mu_);
  return incarnation_;
}

void Link::SetPeer(WorkerRank peer, Incarnation incarnation) {
  absl::MutexLock lock(&mu_);
  peer_ = peer;
  incarnation_ = incarnation;
}

void Link::SetMain(const std::shared_ptr<Link>& main) {
  absl::MutexLock lock(&mu_);
  main_ = main;
}

bool Link::is_bulk() const {
  absl::MutexLock lock(&mu_);
  return main_.has_value();
}

std::shared_ptr<Link> Link::main() const {
  absl::MutexLock lock(&mu_);
  return main_.has_value() ? main_->lock() : nullptr;
}

// --------------------------------------------------------------------------------------- Ending

void Link::Close(absl::Status why) {
  served_.Close(why);
  window_->Close(why);
  std::shared_ptr<Connection> connection;
  {
    absl::MutexLock lock(&mu_);
    CancelLastWords();
    if (why_.ok()) why_ = why;
    if (kind_ == Kind::kLoopback) state_.Advance(State::kDropped);  // nobody hears of its end
    connection = connection_;
  }
  if (connection != nullptr) return connection->Close();
  if (kind_ != Kind::kLoopback) OnClosed(std::move(why));
}

void Link::CancelLastWords() {
  if (last_words_.has_value()) shared_->clock->Cancel(*last_words_);
  last_words_.reset();
}

void Link::OnClosed(absl::Status why) {
  std::shared_ptr<Connection> connection;  // these end outside the lock
  std::shared_ptr<Link> bulk;
  bool is_refused;
  {
    absl::MutexLock lock(&mu_);
    if (!state_.Advance(State::kClosed)) return;
    CancelLastWords();
    connection.swap(connection_);
    bulk.swap(bulk_);
    is_refused = why_.ok() && absl::IsNotFound(why);
    if (!why_.ok()) why = why_;
  }
  if (is_refused) {  // to all others it is not to be had
    why = MakeOr(absl::Status(absl::StatusCode::kUnavailable, ""),
                 [&] { return absl::UnavailableError(why.message()); });
  }
  served_.Close(why);
  window_->Close(why);
  try {
    out_.Run([this, self = shared_from_this()] { FlushOnStrand(); });
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it goes with the link
  }
  if (bulk != nullptr) bulk->Close(why);
  owner_->OnClosed(shared_from_this(), std::move(why), is_refused);
}

bool Link::dropped() const {
  absl::MutexLock lock(&mu_);
  return state_ >= State::kDropped;
}

bool Link::closed() const {
  absl::MutexLock lock(&mu_);
  return state_ == State::kClosed;
}

std::shared_ptr<Connection> Link::connection() const {
  absl::MutexLock lock(&mu_);
  return connection_;
}

}  // namespace distgrad
