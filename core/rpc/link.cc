#include "core/rpc/link.h"

#include <cstdint>
#include <limits>
#include <utility>

namespace distgrad {

Link::Link(std::shared_ptr<Owner> owner, Shared* shared, bool loopback)
    : owner_(std::move(owner)),
      limits_(&shared->limits),
      loopback_(loopback),
      window_(std::make_shared<SendWindow>(loopback ? std::numeric_limits<uint64_t>::max()
                                                    : shared->limits.bytes_per_peer)),
      served_(shared->clock, &shared->limits, &shared->served) {}

void Link::Send(Packet packet, SendWindow::Room room) {
  if (loopback_) return owner_->OnPacket(shared_from_this(), CopyPacket(packet));
  if (room.window() != window_.get()) room = window_->Take(packet.size());
  out_.Run([this, self = shared_from_this(), packet = std::move(packet),
            room = std::move(room)]() mutable {
    if (open_ != nullptr) std::exchange(open_, nullptr)();
    waiting_.emplace_back(std::move(packet), std::move(room));
    FlushOnStrand();
  });
}

void Link::SendLast(Packet packet, absl::Status why) {
  out_.Run([this, self = shared_from_this(), packet = std::move(packet), why]() mutable {
    FlushOnStrand();
    const auto connection = this->connection();
    if (connection == nullptr) return;
    connection->Send(std::move(packet), [self, why](const absl::Status&) { self->Close(why); });
  });
}

void Link::FlushOnStrand() {
  const auto connection = this->connection();
  if (connection == nullptr) {
    std::deque<Waiting> unwanted;  // they end outside the lock
    {
      absl::MutexLock lock(&mu_);
      if (closed_) unwanted.swap(waiting_);
    }
    return;
  }
  while (!waiting_.empty()) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    connection->Send(std::move(next.first), [room = std::move(next.second)](
                                                const absl::Status&) mutable { room.GiveBack(); });
  }
}

void Link::SetConnection(std::shared_ptr<Connection> connection) {
  {
    absl::MutexLock lock(&mu_);
    if (!closed_) connection_ = std::exchange(connection, nullptr);
  }
  if (connection != nullptr) return connection->Close();  // it comes too late
  out_.Run([this, self = shared_from_this()] { FlushOnStrand(); });
}

void Link::Close(absl::Status why) {
  served_.Close(why);
  window_->Close(why);
  std::shared_ptr<Connection> connection;
  {
    absl::MutexLock lock(&mu_);
    if (why_.ok()) why_ = why;
    connection = connection_;
  }
  if (connection != nullptr) return connection->Close();
  if (!loopback_) OnClosed(std::move(why));
}

void Link::OnPacket(Packet packet) {
  heard_.fetch_add(1, std::memory_order_relaxed);
  owner_->OnPacket(shared_from_this(), std::move(packet));
}

void Link::OnClosed(absl::Status why) {
  std::shared_ptr<Connection> connection;  // ends outside the lock
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    connection.swap(connection_);
    if (!why_.ok()) why = why_;
  }
  served_.Close(why);
  window_->Close(why);
  out_.Run([this, self = shared_from_this()] { FlushOnStrand(); });
  owner_->OnClosed(shared_from_this(), std::move(why));
}

bool Link::closed() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

std::shared_ptr<Connection> Link::connection() const {
  absl::MutexLock lock(&mu_);
  return connection_;
}

}  // namespace distgrad
