// Moves messages between buffers and connections.
#include "core/parallel/process_group/encrypted_context.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/wire.h"

namespace distgrad {
namespace {

using gloo::transport::UnboundBuffer;
using Error = tensorpipe::Error;

// A head is a kind, the slot and how many bytes the next frame has.
constexpr size_t kHeadBytes = 17;
// Messages that a rank is ready for, and that this one has not come to yet. Gloo's collectives
// begin to receive at most two beyond the one that they wait for, and c10d runs two collectives at
// a time; who is ready for many more is no rank that runs them.
constexpr size_t kMaxReady = 64;

// What Gloo asks for a rank's connection to another one.
class EncryptedPair final : public gloo::transport::Pair {
 public:
  EncryptedPair(EncryptedContext* context, int other) : context_(context), other_(other) {}

  bool isConnected() override { return context_->IsConnected(other_); }
  // Collectives send and receive by their buffers.
  const gloo::transport::Address& address() const override { Unused(); }
  void connect(const std::vector<char>&) override { Unused(); }
  void close() override { Unused(); }
  void setSync(bool, bool) override { Unused(); }
  std::unique_ptr<gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override {
    Unused();
  }
  std::unique_ptr<gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override {
    Unused();
  }
  void send(UnboundBuffer*, uint64_t, size_t, size_t) override { Unused(); }
  void recv(UnboundBuffer*, uint64_t, size_t, size_t) override { Unused(); }
  void put(UnboundBuffer*, const gloo::transport::RemoteKey&, uint64_t, size_t, size_t,
           size_t) override {
    Unused();
  }
  void get(UnboundBuffer*, const gloo::transport::RemoteKey&, uint64_t, size_t, size_t,
           size_t) override {
    Unused();
  }

 private:
  [[noreturn]] static void Unused() {
    throw std::logic_error("collectives do not use connections by themselves");
  }

  EncryptedContext* const context_;
  const int other_;
};

}  // namespace

std::string EncryptedContext::Head(Kind kind, uint64_t slot, uint64_t bytes) {
  std::string head;
  WireWriter writer(&head);
  writer.U8(static_cast<uint8_t>(kind));
  writer.U64(slot);
  writer.U64(bytes);
  return head;
}

EncryptedContext::EncryptedContext(const EncryptedGlooOptions& options, int rank, int size)
    : gloo::transport::Context(rank, size), options_(options), peers_(size) {
  for (int other = 0; other < size; ++other) {
    all_.push_back(std::make_unique<EncryptedPair>(this, other));
  }
}

EncryptedContext::~EncryptedContext() {
  if (loop_ == nullptr) return;
  // Whatever is called back is so before the loop has ended.
  loop_->Close();
  loop_->Join();
}

bool EncryptedContext::IsConnected(int other) {
  absl::MutexLock lock(&mu_);
  return peers_[other].IsConnected();
}

// Receiving

void EncryptedContext::ReadHead(int other, const std::shared_ptr<SocketConnection>& in) {
  const auto head = std::make_shared<std::array<char, kHeadBytes>>();
  in->Read(head->data(), head->size(), [this, other, in, head](const Error& error, auto, auto) {
    if (error) return OnInLost(other, in, error.what());
    OnHead(other, in, {head->data(), head->size()});
  });
}

void EncryptedContext::OnHead(int other, const std::shared_ptr<SocketConnection>& in,
                              absl::string_view head) {
  WireReader reader(head);
  const auto kind = static_cast<Kind>(reader.U8());
  const uint64_t slot = reader.U64(), size = reader.U64();
  absl::Status status;
  if (kind == Kind::kReady && size == 0) {
    status = OnReady(other, slot);
  } else if (kind == Kind::kHasAll && slot == 0 && size == 0) {
    absl::MutexLock lock(&mu_);
    peers_[other].has_all = true;
    WakeConnecting();
  } else if (kind == Kind::kData) {
    absl::StatusOr<Operation> receipt = OnData(other, slot, size);
    status = receipt.status();
    if (status.ok() && size > 0) {
      return in->Read(receipt->data, size,
                      [this, other, in, receipt = *receipt](const Error& error, auto, auto) {
                        {
                          absl::MutexLock lock(&mu_);
                          receipt.buffer->End(&EncryptedBuffer::receipts_, other,
                                              error ? Lost(other, error.what()) : absl::OkStatus());
                        }
                        if (error) return OnInLost(other, in, error.what());
                        ReadHead(other, in);
                      });
    }
    if (status.ok()) {
      absl::MutexLock lock(&mu_);
      receipt->buffer->End(&EncryptedBuffer::receipts_, other, absl::OkStatus());
    }
  } else {
    status = absl::InvalidArgumentError("it sends what is no message of a collective");
  }
  if (!status.ok()) return OnInLost(other, in, status.message());
  ReadHead(other, in);
}

absl::Status EncryptedContext::OnReady(int other, uint64_t slot) {
  Operation next;
  std::shared_ptr<SocketConnection> out;
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_[other];
    Slot& of = peer.slots[slot];
    if (of.sends.empty()) {
      ++of.ready;
      if (++peer.ready <= kMaxReady) return absl::OkStatus();
      return absl::ResourceExhaustedError("it is ready for more messages than collectives have");
    }
    next = of.sends.front();
    of.sends.pop_front();
    if (of.empty()) peer.slots.erase(slot);
    out = peer.out;
  }
  Transmit(out, next);
  return absl::OkStatus();
}

absl::StatusOr<EncryptedContext::Operation> EncryptedContext::OnData(int other, uint64_t slot,
                                                                     uint64_t size) {
  absl::MutexLock lock(&mu_);
  Peer& peer = peers_[other];
  const auto found = peer.slots.find(slot);
  if (found == peer.slots.end() || found->second.receipts.empty()) {
    return absl::InvalidArgumentError("it sends a message that this rank is not to receive");
  }
  Slot& of = found->second;
  const Operation receipt = of.receipts.front();
  if (receipt.size != size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it sends ", size, " bytes where ", receipt.size,
        " are to be received: do all ranks begin the same collectives, with tensors of "
        "the same shapes?"));
  }
  of.receipts.pop_front();
  if (of.empty()) peer.slots.erase(found);
  return receipt;
}

// Losing

absl::Status EncryptedContext::Lost(int other, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("the connection to rank ", other, " (",
                                             peers_[other].endpoint.tcp, ") has broken: ", why));
}

void EncryptedContext::OnOutLost(int other, const std::shared_ptr<SocketConnection>& out,
                                 absl::string_view why) {
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_[other];
    if (peer.out != out) return;  // another one has taken its place
    if (peer.out_lost.ok()) peer.out_lost = Lost(other, why);
    FailSends(peer);
    WakeConnecting();
  }
  // What the other one has sent before is still received; it closes that connection as soon as it
  // notices, as this rank does in OnInLost().
  out->Close();
}

void EncryptedContext::OnInLost(int other, const std::shared_ptr<SocketConnection>& in,
                                absl::string_view why) {
  std::shared_ptr<SocketConnection> out;
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_[other];
    if (peer.in != in) return;  // another one has taken its place
    if (!all_open_ && aborted_.ok()) {
      // The other rank may not have seen that it is welcome, and comes again; that it has gone
      // shows on the connection to it.
      peer.in = nullptr;
      peer.last_trouble = std::string(why);
    } else {
      out = peer.out;
      if (peer.in_lost.ok()) peer.in_lost = Lost(other, why);
      if (peer.out_lost.ok()) peer.out_lost = peer.in_lost;
      FailSends(peer);
      FailReceipts(peer);
    }
    WakeConnecting();
  }
  in->Close();
  if (out != nullptr) out->Close();
}

void EncryptedContext::FailSends(Peer& peer) {
  for (auto& [slot, of] : peer.slots) {
    for (const Operation& each : of.sends) {
      each.buffer->End(&EncryptedBuffer::sends_, each.other, peer.out_lost);
    }
    of.sends.clear();
  }
}

void EncryptedContext::FailReceipts(Peer& peer) {
  for (auto& [slot, of] : peer.slots) {
    for (const Operation& each : of.receipts) {
      each.buffer->End(&EncryptedBuffer::receipts_, each.other, peer.in_lost);
    }
    of.receipts.clear();
  }
}

absl::Status EncryptedContext::Fail(const absl::Status& why) {
  bool is_first;
  {
    absl::MutexLock lock(&mu_);
    is_first = aborted_.ok();
  }
  if (is_first) options_.tell_failure(why);
  return Abort(why);
}

absl::Status EncryptedContext::Abort(const absl::Status& why) {
  std::vector<std::shared_ptr<SocketConnection>> connections;
  {
    absl::MutexLock lock(&mu_);
    if (!aborted_.ok()) return aborted_;
    aborted_ = why;
    for (const Peer& peer : peers_) {
      for (const auto& each : {peer.out, peer.in}) {
        if (each != nullptr) connections.push_back(each);
      }
    }
    for (EncryptedBuffer* buffer : buffers_) buffer->Wake();
    WakeConnecting();
  }
  for (const auto& each : connections) each->Close();
  return why;
}

// Sending

void EncryptedContext::Send(const Operation& operation) {
  std::shared_ptr<SocketConnection> out;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_.at(operation.other);
    status = aborted_.ok() ? peer.out_lost : aborted_;
    if (status.ok()) {
      operation.buffer->sends_.begun.push_back(operation.other);
      Slot& of = peer.slots[operation.slot];
      if (of.ready == 0) {
        of.sends.push_back(operation);
        return;
      }
      --of.ready;
      --peer.ready;
      if (of.empty()) peer.slots.erase(operation.slot);
      out = peer.out;
    }
  }
  if (!status.ok()) throw StatusError(Fail(status));
  Transmit(out, operation);
}

void EncryptedContext::Transmit(const std::shared_ptr<SocketConnection>& out,
                                const Operation& operation) {
  out->Write(Head(Kind::kData, operation.slot, operation.size), operation.data, operation.size,
             [this, operation](const Error& error) {
               absl::MutexLock lock(&mu_);
               operation.buffer->End(
                   &EncryptedBuffer::sends_, operation.other,
                   error ? Lost(operation.other, error.what()) : absl::OkStatus());
             });
}

void EncryptedContext::Receive(const Operation& operation) {
  std::shared_ptr<SocketConnection> out;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_.at(operation.other);
    status = !aborted_.ok() ? aborted_ : !peer.in_lost.ok() ? peer.in_lost : peer.out_lost;
    if (status.ok()) {
      operation.buffer->receipts_.begun.push_back(operation.other);
      peer.slots[operation.slot].receipts.push_back(operation);
      out = peer.out;
    }
  }
  if (!status.ok()) throw StatusError(Fail(status));
  // If it is lost, so is the connection, and then the other rank closes its own.
  out->Write(Head(Kind::kReady, operation.slot, 0), nullptr, 0, [](const Error&) {});
}

void EncryptedContext::Forget(const EncryptedBuffer* buffer) {
  if (buffer->IsIdle()) return;
  const absl::Status over = absl::CancelledError("the collective is over");
  const auto forget = [&](std::deque<Operation>& operations,
                          EncryptedBuffer::Side EncryptedBuffer::*side) {
    std::deque<Operation> others;
    for (const Operation& each : operations) {
      if (each.buffer == buffer) {
        each.buffer->End(side, each.other, over);
      } else {
        others.push_back(each);
      }
    }
    operations = std::move(others);
  };
  for (Peer& peer : peers_) {
    for (auto& [slot, of] : peer.slots) {
      forget(of.sends, &EncryptedBuffer::sends_);
      forget(of.receipts, &EncryptedBuffer::receipts_);
    }
  }
}

std::unique_ptr<UnboundBuffer> EncryptedContext::createUnboundBuffer(void* ptr, size_t size) {
  return std::make_unique<EncryptedBuffer>(shared_from_this(), ptr, size);
}

}  // namespace distgrad
