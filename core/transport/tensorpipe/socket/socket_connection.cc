// Reads and writes frames on a non-blocking socket, with as few system calls as it can.
#include "core/transport/tensorpipe/socket/socket_connection.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"
#include "core/base/descriptors.h"
#include "core/base/exception.h"
#include "core/net/address.h"
#include "core/transport/tensorpipe/socket/peer_process.h"

namespace distgrad {
namespace {

constexpr size_t kHeadBytes = sizeof(uint64_t);
constexpr size_t kBufferBytes = 64 << 10;
// Of an object, or of a frame whose reader has no memory of its own. The largest objects describe
// packets of very many segments.
constexpr size_t kMaxOwnFrame = 16 << 20;
// What one connection reads before others have their turn.
constexpr size_t kTurnBytes = 4 << 20;
// The same within TLS, where a byte takes longer, on the loop's thread, which all connections of
// the transport share: a tenth of a millisecond, about, that a small message of another one waits.
constexpr size_t kTlsTurnBytes = 256 << 10;
// A frame counts as so many bytes more: whoever reads it has something to do with it.
constexpr size_t kFrameCost = 4 << 10;
// So does a record of TLS, which may hold a single byte.
constexpr size_t kRecordCost = 1 << 10;
constexpr size_t kMaxIovecs = 32;
// What is encrypted before it is sent, and how much of that goes into one record: as much as fits,
// for each is authenticated by itself.
constexpr size_t kEncryptedBytes = 64 << 10;
constexpr size_t kTlsRecordBytes = 16 << 10;
constexpr absl::Duration kQueueFullDelay = absl::Milliseconds(5);
constexpr uint32_t kReadEvents = EPOLLIN | EPOLLRDHUP;
constexpr absl::string_view kCallback = "what hears of the end of a connection";

// TensorPipe's decoder may look a few bytes past the end of an object that is cut short. It finds
// these: no object begins with such a byte, so it stops.
constexpr uint8_t kEndMark[64] = {
    0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90,
    0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90,
    0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90,
    0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90};

// For want of file descriptors or memory of this process, or another one.
TextError::Cause CauseOf(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? TextError::Cause::kExhausted
                                           : TextError::Cause::kOther;
}

// Made before main(), for later there may be no memory for it.
const tensorpipe::Error* const kNoMemory =
    new tensorpipe::Error(MakeError("out of memory", TextError::Cause::kExhausted));

std::string Head(uint64_t size) {
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size));
}

}  // namespace

SocketConnection::SocketConnection(std::shared_ptr<Loop> loop)
    : loop_(std::move(loop)), strand_([this](std::exception_ptr thrown) {
        const absl::Status why = StatusFromStdException(std::move(thrown));
        Fail(why.message(), CauseOf(why));
      }) {}

std::shared_ptr<SocketConnection> SocketConnection::Adopt(std::shared_ptr<Loop> loop, Fd fd,
                                                          std::unique_ptr<TlsSession> tls) {
  auto connection = std::make_shared<SocketConnection>(std::move(loop));
  connection->strand_.Run(
      [self = connection.get(), fd = std::move(fd), tls = std::move(tls)]() mutable {
        self->fd_ = std::move(fd);
        self->tls_ = std::move(tls);
        self->Open();
        if (self->state_ != State::kClosed) self->AddToLoop(kReadEvents);
      });
  return connection;
}

void SocketConnection::AwaitOpen(absl::Duration timeout) {
  deadline_ = loop_->After(timeout, [watch = weak_from_this()] {
    const auto self = watch.lock();
    if (self == nullptr) return;
    self->RunOnStrand([](SocketConnection& it) {
      if (it.state_ == State::kOpen) return;
      it.Fail(it.state_ == State::kConnecting ? "nobody answers there"
                                              : "the other end did not finish its handshake");
    });
  });
}

std::shared_ptr<SocketConnection> SocketConnection::Connect(std::shared_ptr<Loop> loop,
                                                            Endpoint endpoint,
                                                            const SocketOptions& options) {
  auto connection = std::make_shared<SocketConnection>(std::move(loop));
  connection->strand_.Run([self = connection, &endpoint, &options] {
    self->endpoint_ = std::move(endpoint);
    self->options_ = options;
    self->is_unix_ =
        options.unix_sockets && !ThisPlace().empty() && self->endpoint_.place == ThisPlace();
    auto handshake = Handshake::Create(Handshake::Role::kClient, options.key, self->endpoint_.token,
                                       options.certificates != nullptr, options.encrypts_unix);
    if (!handshake.ok()) {
      return self->Fail(handshake.status().message(), TextError::Cause::kExhausted);
    }
    self->handshake_ = *std::move(handshake);
    if (!self->is_unix_ && IsLoopback(self->endpoint_.tcp) &&
        !SharesLoopback(self->endpoint_.place)) {
      return self->Fail(
          "it listens on loopback, which its own machine alone can reach: set DISTGRAD_HOST there "
          "(or the option host) to an address or an interface that others reach");
    }
    auto fd = NewSocketFor(self->endpoint_, self->is_unix_);
    if (!fd.ok()) {
      return self->Fail(fd.status().message(), CauseOf(fd.status()));
    }
    self->fd_ = *std::move(fd);
    self->id_ = self->loop_->Add(self);
    if (self->id_ == 0) return self->Fail("the transport is closed");
    self->AwaitOpen(options.handshake_timeout);
    self->StartConnecting();
  });
  return connection;
}

std::shared_ptr<SocketConnection> SocketConnection::Failed(std::shared_ptr<Loop> loop,
                                                           absl::string_view why) {
  auto connection = std::make_shared<SocketConnection>(std::move(loop));
  connection->strand_.Run([self = connection.get(), why] { self->Fail(why); });
  return connection;
}

// Asking

void SocketConnection::Read(void* data, size_t size, ReadDone done) {
  strand_.Run([self = shared_from_this(), data, size, done = std::move(done)]() mutable {
    self->Enqueue(ReadRequest{nullptr, data, size, std::move(done), nullptr});
  });
}

void SocketConnection::Read(tensorpipe::AbstractNopHolder* object, WriteDone done) {
  strand_.Run([self = shared_from_this(), object, done = std::move(done)]() mutable {
    self->Enqueue(ReadRequest{object, nullptr, 0, nullptr, std::move(done)});
  });
}

void SocketConnection::Write(const void* data, size_t size, WriteDone done) {
  strand_.Run([self = shared_from_this(), data, size, done = std::move(done)]() mutable {
    self->Enqueue(WriteRequest{Head(size), data, size, 0, std::move(done)});
  });
}

void SocketConnection::Write(const tensorpipe::AbstractNopHolder& object, WriteDone done) {
  const size_t size = object.getSize();
  std::string frame(kHeadBytes + size, '\0');
  const uint64_t head = size;
  std::memcpy(frame.data(), &head, kHeadBytes);
  tensorpipe::NopWriter writer(reinterpret_cast<uint8_t*>(frame.data()) + kHeadBytes, size);
  const bool written = static_cast<bool>(object.write(writer));
  strand_.Run([self = shared_from_this(), written, frame = std::move(frame),
               done = std::move(done)]() mutable {
    if (!written && self->state_ != State::kClosed) self->Fail("an object that cannot be written");
    self->Enqueue(WriteRequest{std::move(frame), nullptr, 0, 0, std::move(done)});
  });
}

void SocketConnection::Write(absl::string_view bytes, const void* data, size_t size,
                             WriteDone done) {
  WriteRequest first{absl::StrCat(Head(bytes.size()), bytes), nullptr, 0, 0, nullptr};
  strand_.Run([self = shared_from_this(), first = std::move(first), data, size,
               done = std::move(done)]() mutable {
    if (size == 0) {
      first.done = std::move(done);
      return self->Enqueue(std::move(first));
    }
    first.done = [](const Error&) {};  // the other one's says it
    if (self->state_ != State::kClosed) self->Append(self->writes_, first);
    self->Enqueue(WriteRequest{Head(size), data, size, 0, std::move(done)});
  });
}

void SocketConnection::Close() {
  RunOnStrand([](SocketConnection& it) { it.Fail("the connection was closed"); });
}

void SocketConnection::OnLoopClosed() {
  RunOnStrand([](SocketConnection& it) { it.Fail("the transport was closed"); });
}

void SocketConnection::RunOnStrand(void (*task)(SocketConnection& it)) {
  AwaitMemory([&] { strand_.Run([self = shared_from_this(), task] { task(*self); }); });
}

template <typename Request>
bool SocketConnection::Append(std::deque<Request>& requests, Request& request) {
  try {
    requests.push_back(std::move(request));  // where it throws it has moved nothing
    return true;
  } catch (const std::bad_alloc&) {
    Fail("out of memory", TextError::Cause::kExhausted);
    return false;
  }
}

void SocketConnection::Enqueue(ReadRequest request) {
  if (state_ != State::kClosed && Append(reads_, request)) return AdvanceReads();
  if (request.object != nullptr) return request.object_done(error_);
  request.done(error_, nullptr, 0);
}

void SocketConnection::Enqueue(WriteRequest request) {
  if (state_ != State::kClosed && Append(writes_, request)) return AdvanceWrites();
  request.done(error_);
}

void SocketConnection::OnEvents(uint32_t events) {
  strand_.Run([self = shared_from_this(), events] {
    if (self->state_ == State::kClosed) return;
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) self->hung_up_ = true;
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) self->readable_ = true;
    if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) self->writable_ = true;
    if (self->state_ == State::kConnecting) return self->FinishConnecting();
    if (self->state_ == State::kShakingHands) return self->ShakeHands();
    if (self->state_ == State::kEstablishingTls) return self->EstablishTls();
    self->moved_ = 0;
    self->AdvanceWrites();
    self->AdvanceReads();
  });
}

// Connecting

void SocketConnection::AddToLoop(uint32_t events) {
  if (id_ == 0) id_ = loop_->Add(shared_from_this());
  if (id_ == 0) return Fail("the transport is closed");
  if (absl::Status watched = loop_->Watch(id_, fd_.get(), events); !watched.ok()) {
    Fail(watched.message(), CauseOf(watched));
  }
}

void SocketConnection::StartConnecting() {
  const int error = distgrad::StartConnecting(fd_, endpoint_, is_unix_);
  if (error == EAGAIN) {
    retry_ = loop_->After(kQueueFullDelay, [watch = weak_from_this()] {
      const auto self = watch.lock();
      if (self == nullptr) return;
      self->RunOnStrand([](SocketConnection& it) {
        if (it.state_ == State::kConnecting) it.StartConnecting();
      });
    });
    return;
  }
  if (error != 0 && error != EINPROGRESS) return FailErrno("cannot connect", error);
  // Once it stands, the loop says that it is writable.
  AddToLoop(kReadEvents | EPOLLOUT);
}

void SocketConnection::FinishConnecting() {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return FailErrno("cannot connect", error);
  if (!writable_) return;
  if (HasReachedItself(fd_.get())) return FailErrno("cannot connect", ECONNREFUSED);
  if (is_unix_) {
    if (absl::Status user = CheckPeerUser(fd_); !user.ok()) return Fail(user.message());
  }
  loop_->Change(id_, fd_.get(), kReadEvents);
  state_ = State::kShakingHands;
  ShakeHands();
}

void SocketConnection::ShakeHands() {
  for (;;) {
    // It always fits into a new socket.
    const std::string output = handshake_->TakeOutput();
    if (!output.empty() && send(fd_.get(), output.data(), output.size(), MSG_NOSIGNAL) !=
                               static_cast<ssize_t>(output.size())) {
      return FailErrno("handshake", errno);
    }
    if (handshake_->done()) {
      if (!is_unix_) SetAcknowledgeTimeout(fd_, options_.acknowledge_timeout);
      if (!options_.Encrypts(*handshake_, is_unix_)) return Open();
      StartTls();
      return EstablishTls();
    }
    if (!readable_) return;
    char bytes[kHelloBytes];
    const ssize_t n = recv(fd_.get(), bytes, std::min(handshake_->wanted(), sizeof(bytes)), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      readable_ = false;
      return;
    }
    if (n < 0) return FailErrno("handshake", errno);
    if (n == 0) {
      return Fail(absl::StrCat(
          "it refused our handshake: is it a worker of this job, with the same cluster key (",
          kClusterKeySetting, ")? Its log says why"));
    }
    if (absl::Status status = handshake_->Receive({bytes, static_cast<size_t>(n)}); !status.ok()) {
      return Fail(status.message());
    }
  }
}

void SocketConnection::StartTls() {
  absl::StatusOr<std::unique_ptr<TlsSession>> tls =
      TlsSession::Create(*handshake_, options_.certificates);
  // This process cannot make one; the other end has no part in it.
  if (!tls.ok()) return Fail(tls.status().message(), TextError::Cause::kExhausted);
  tls_ = *std::move(tls);
  state_ = State::kEstablishingTls;
}

void SocketConnection::EstablishTls() {
  while (state_ == State::kEstablishingTls) {
    const absl::Status status = tls_->Establish();
    // It always fits into a new socket, as the handshake did. The other end is also told why it is
    // refused.
    const absl::string_view output = tls_->output();
    const bool sent = output.empty() || send(fd_.get(), output.data(), output.size(),
                                             MSG_NOSIGNAL) == static_cast<ssize_t>(output.size());
    if (!status.ok()) {
      return Fail(status.message(), absl::IsUnauthenticated(status)    ? TextError::Cause::kRefused
                                    : absl::IsPermissionDenied(status) ? TextError::Cause::kRefuses
                                                                       : TextError::Cause::kOther);
    }
    if (!sent) return FailErrno("handshake", errno);
    tls_->DropOutput(output.size());
    if (tls_->established()) return Open();
    if (!ReceiveTlsInput()) return;
  }
}

void SocketConnection::Open() {
  state_ = State::kOpen;
  peer_process_ = PeerProcessOf(fd_);
  if (deadline_ != 0) loop_->Cancel(deadline_);
  handshake_.reset();
  buffer_ = std::unique_ptr<uint8_t[]>(new uint8_t[kBufferBytes]);  // not cleared
  writable_ = true;
  AdvanceWrites();
  AdvanceReads();
}

// Reading

void SocketConnection::AdvanceReads() {
  if (reads_.empty() || !HasInput()) return;
  // A thread that only wants to send is not to be kept by what others send.
  if (EventLoop::Current() != loop_.get()) return ReadLater();
  while (state_ == State::kOpen && !reads_.empty() && !turn_over_) {
    if (!in_frame_) {
      if (end_ - begin_ < kHeadBytes) {
        size_t none;
        if (!Receive(nullptr, 0, &none)) return;
        continue;
      }
      if (!StartFrame()) return;
    }
    const size_t filled_before = frame_filled_;
    if (!FillFrame()) return;
    // Within TLS what has been decrypted counts.
    if (tls_ == nullptr) moved_ += frame_filled_ - filled_before;
    if (frame_filled_ == frame_size_) {
      FinishFrame();
      moved_ += kFrameCost;
    }
    EndTurnIfDue();
  }
}

size_t SocketConnection::TurnBytes() const {
  return tls_ != nullptr && EventLoop::Current() == loop_.get() ? kTlsTurnBytes : kTurnBytes;
}

bool SocketConnection::EndTurnIfDue() {
  if (moved_ < TurnBytes()) return false;
  ReadLater();
  return true;
}

void SocketConnection::ReadLater() {
  if (state_ != State::kOpen || std::exchange(turn_over_, true)) return;
  loop_->Run([self = shared_from_this()] {
    self->RunOnStrand([](SocketConnection& it) {
      it.turn_over_ = false;
      it.moved_ = 0;
      it.AdvanceReads();
    });
  });
}

bool SocketConnection::StartFrame() {
  uint64_t size;
  std::memcpy(&size, &buffer_[begin_], kHeadBytes);
  begin_ += kHeadBytes;
  const ReadRequest& request = reads_.front();
  const bool fixed = request.data != nullptr;
  if (fixed ? size != request.size : size > kMaxOwnFrame) {
    Fail(absl::StrCat("received a frame of ", size, " bytes where ", fixed ? "" : "at most ",
                      fixed ? request.size : kMaxOwnFrame, " were expected"));
    return false;
  }
  in_frame_ = true;
  frame_size_ = size;
  frame_filled_ = 0;
  if (fixed) {
    frame_ = static_cast<uint8_t*>(request.data);
  } else if (size <= kBufferBytes) {
    frame_ = nullptr;
  } else {
    storage_.reset(new (std::nothrow) uint8_t[size]);  // not cleared
    if (storage_ == nullptr) {
      Fail(absl::StrCat("there is no memory for a frame of ", size, " bytes"),
           TextError::Cause::kExhausted);
      return false;
    }
    frame_ = storage_.get();
  }
  return true;
}

bool SocketConnection::FillFrame() {
  if (frame_ == nullptr) {
    while (end_ - begin_ < frame_size_) {
      size_t none;
      if (!Receive(nullptr, 0, &none)) return false;
    }
    frame_filled_ = frame_size_;
    return true;
  }
  const bool discards = frame_ == DiscardTarget();
  const size_t buffered = std::min(end_ - begin_, frame_size_ - frame_filled_);
  if (buffered > 0) {
    if (!discards) std::memcpy(frame_ + frame_filled_, &buffer_[begin_], buffered);
    begin_ += buffered;
    frame_filled_ += buffered;
  }
  if (frame_filled_ == frame_size_) return true;
  size_t received = 0;
  if (discards) return Receive(nullptr, 0, &received);
  if (!Receive(frame_ + frame_filled_, frame_size_ - frame_filled_, &received)) return false;
  frame_filled_ += received;
  return true;
}

bool SocketConnection::HasInput() const {
  return readable_ || begin_ != end_ || (tls_ != nullptr && tls_->HasInput());
}

// Receives into `target`, and what comes after it into the buffer.
bool SocketConnection::Receive(uint8_t* target, size_t size, size_t* received) {
  if (!HasInput() || EndTurnIfDue()) return false;
  if (begin_ > 0) {
    std::memmove(&buffer_[0], &buffer_[begin_], end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (tls_ != nullptr) return ReceiveTls(target, size, received);
  if (!readable_) return false;
  iovec parts[2] = {{target, size}, {&buffer_[end_], kBufferBytes - end_}};
  msghdr message = {};
  message.msg_iov = size > 0 ? parts : parts + 1;
  message.msg_iovlen = size > 0 ? 2 : 1;
  ssize_t n;
  do {
    n = recvmsg(fd_.get(), &message, 0);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) {
    readable_ = false;
    return false;
  }
  if (n < 0) {
    FailErrno("receiving", errno);
    return false;
  }
  if (n == 0) {
    Fail("the other end is gone");
    return false;
  }
  const size_t count = n;
  // Less than was asked for: there is no more, and the next byte wakes the loop.
  if (count < size + parts[1].iov_len && !hung_up_) readable_ = false;
  *received = std::min(count, size);
  end_ += count - *received;
  return true;
}

bool SocketConnection::ReceiveTls(uint8_t* target, size_t size, size_t* received) {
  *received = 0;
  const size_t buffered = end_;
  for (;;) {
    const bool to_target = *received < size;
    uint8_t* to = to_target ? target + *received : &buffer_[end_];
    const size_t room = to_target ? size - *received : kBufferBytes - end_;
    if (room == 0) return true;
    size_t count = 0;
    // A question for what is not there would take as long as a small record.
    if (tls_->HasInput()) {
      const absl::StatusOr<size_t> n = tls_->Read(to, room);
      if (!n.ok()) {
        Fail(n.status().message());
        return false;
      }
      count = *n;
    }
    (to_target ? *received : end_) += count;
    if (count > 0) {
      moved_ += count + kRecordCost;
      if (moved_ < TurnBytes()) continue;
    }
    // What has come is used before more is asked for: others have their turn in between, and what
    // came before the end of the connection is not lost with it.
    if (*received > 0 || end_ > buffered) return true;
    if (!ReceiveTlsInput()) return false;
  }
}

bool SocketConnection::ReceiveTlsInput() {
  if (!readable_) return false;
  const absl::Span<char> space = tls_->InputSpace();
  ssize_t n;
  do {
    n = recv(fd_.get(), space.data(), space.size(), 0);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno != EAGAIN) {
    FailErrno("receiving", errno);
    return false;
  }
  if (n == 0) {
    Fail("the other end is gone");
    return false;
  }
  if (n < static_cast<ssize_t>(space.size()) && !hung_up_) readable_ = false;
  if (n < 0) {
    readable_ = false;
    return false;
  }
  tls_->AddInput(static_cast<size_t>(n));
  return true;
}

void SocketConnection::FinishFrame() {
  const uint8_t* bytes = frame_ != nullptr ? frame_ : &buffer_[begin_];
  // While it is among those that hear of a failure: there may be no memory for the object.
  if (tensorpipe::AbstractNopHolder* const object = reads_.front().object; object != nullptr) {
    tensorpipe::NopReader reader(bytes, frame_size_, kEndMark, sizeof(kEndMark));
    if (!object->read(reader)) return Fail("received a malformed object");
  }
  const ReadRequest request = std::move(reads_.front());
  reads_.pop_front();
  in_frame_ = false;
  if (frame_ == nullptr) begin_ += frame_size_;
  if (request.object == nullptr) {
    request.done(Error(), bytes, frame_size_);
  } else {
    request.object_done(Error());
  }
  storage_ = nullptr;
}

// Writing

bool SocketConnection::HasOutput() const {
  return !writes_.empty() || (tls_ != nullptr && !tls_->output().empty());
}

void SocketConnection::AdvanceWrites() {
  size_t moved = 0;  // in this turn
  // An event is no reason for the loop's thread to take another turn before the one that is due.
  const bool on_loop = EventLoop::Current() == loop_.get();
  while (state_ == State::kOpen && writable_ && HasOutput() && !(on_loop && writes_later_)) {
    if (moved >= TurnBytes()) {
      // Encrypting keeps pace with a fast reader, so the socket may never be full.
      WriteLater();
      break;
    }
    std::optional<size_t> sent = tls_ != nullptr ? SendTls() : Send();
    if (!sent.has_value()) return;
    moved += *sent + (tls_ != nullptr ? kRecordCost : 0);
    while (!writes_.empty()) {
      WriteRequest& request = writes_.front();
      const size_t rest = request.head.size() + request.size - request.sent;
      if (*sent < rest) {
        request.sent += *sent;
        break;
      }
      *sent -= rest;
      const WriteDone done = std::move(request.done);
      writes_.pop_front();
      done(Error());
    }
  }
  if (state_ != State::kOpen || id_ == 0) return;
  if (waits_to_write_ != HasOutput()) {
    waits_to_write_ = HasOutput();
    loop_->Change(id_, fd_.get(), kReadEvents | (waits_to_write_ ? uint32_t{EPOLLOUT} : 0));
  }
}

void SocketConnection::WriteLater() {
  if (std::exchange(writes_later_, true)) return;
  loop_->Run([self = shared_from_this()] {
    self->RunOnStrand([](SocketConnection& it) {
      it.writes_later_ = false;
      it.AdvanceWrites();
    });
  });
}

size_t SocketConnection::Gather(absl::Span<iovec> parts, size_t* total) const {
  size_t count = 0;
  *total = 0;
  for (size_t i = 0; i < writes_.size() && count + 2 <= parts.size(); ++i) {
    const WriteRequest& request = writes_[i];
    const size_t head = std::min(request.sent, request.head.size());
    if (head < request.head.size()) {
      parts[count++] = {const_cast<char*>(&request.head[head]), request.head.size() - head};
    }
    const size_t data = request.sent - head;
    if (data < request.size) {
      parts[count++] = {const_cast<char*>(static_cast<const char*>(request.data)) + data,
                        request.size - data};
    }
    *total += request.head.size() + request.size - request.sent;
  }
  return count;
}

std::optional<size_t> SocketConnection::Send() {
  iovec parts[kMaxIovecs];
  size_t total;
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = Gather(absl::MakeSpan(parts), &total);
  ssize_t n;
  do {
    n = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno != EAGAIN) {
    FailErrno("sending", errno);
    return std::nullopt;
  }
  const size_t sent = n < 0 ? 0 : n;
  // The kernel's buffer is full; it says when it no longer is.
  if (sent < total) writable_ = false;
  return sent;
}

std::optional<size_t> SocketConnection::SendTls() {
  if (tls_->output().empty() && !Encrypt()) return std::nullopt;
  const absl::string_view output = tls_->output();
  ssize_t n;
  do {
    n = send(fd_.get(), output.data(), output.size(), MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno != EAGAIN) {
    FailErrno("sending", errno);
    return std::nullopt;
  }
  const size_t sent = n < 0 ? 0 : n;
  if (sent < output.size()) writable_ = false;
  tls_->DropOutput(sent);
  return tls_->output().empty() ? std::exchange(encrypted_, 0) : 0;
}

bool SocketConnection::Encrypt() {
  iovec parts[kMaxIovecs];
  size_t total;
  const size_t count = Gather(absl::MakeSpan(parts), &total);
  std::string record;  // of parts that are smaller
  const auto write = [this](absl::string_view bytes) {
    absl::Status status = tls_->Write(bytes);
    if (!status.ok()) Fail(status.message());
    return status.ok();
  };
  for (size_t i = 0; i < count && encrypted_ < kEncryptedBytes; ++i) {
    absl::string_view part(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    part = part.substr(0, kEncryptedBytes - encrypted_);
    encrypted_ += part.size();
    // A record is filled up; what is more goes from where it lies.
    const size_t copied = record.empty() && part.size() >= kTlsRecordBytes
                              ? 0
                              : std::min(part.size(), kTlsRecordBytes - record.size());
    record.append(part.substr(0, copied));
    part.remove_prefix(copied);
    if (part.empty() && record.size() < kTlsRecordBytes) continue;
    if (!record.empty() && !write(record)) return false;
    record.clear();
    if (!part.empty() && !write(part)) return false;
  }
  return record.empty() || write(record);
}

// The end

void SocketConnection::FailErrno(absl::string_view what, int error) {
  const absl::Status status = ErrnoStatus(error, what);
  // EADDRNOTAVAIL is for want of ports (endpoint.h).
  Fail(status.message(), error == ECONNREFUSED    ? TextError::Cause::kNobodyListens
                         : error == EADDRNOTAVAIL ? TextError::Cause::kExhausted
                                                  : CauseOf(status));
}

void SocketConnection::Fail(absl::string_view why, TextError::Cause cause) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  try {
    error_ = MakeError(why, cause);
  } catch (const std::bad_alloc&) {
    error_ = *kNoMemory;
  }
  if (deadline_ != 0) loop_->Cancel(deadline_);
  if (retry_ != 0) loop_->Cancel(retry_);
  if (fd_.valid() && id_ != 0) loop_->Unwatch(fd_.get());
  fd_ = Fd();
  handshake_.reset();
  tls_ = nullptr;
  while (!reads_.empty()) {
    const ReadRequest request = std::move(reads_.front());
    reads_.pop_front();
    if (request.object != nullptr) {
      CallAndLog(kCallback, request.object_done, error_);
    } else {
      CallAndLog(kCallback, request.done, error_, nullptr, 0);
    }
  }
  while (!writes_.empty()) {
    const WriteDone done = std::move(writes_.front().done);
    writes_.pop_front();
    CallAndLog(kCallback, done, error_);
  }
  buffer_ = nullptr;
  storage_ = nullptr;
  // Last: the loop may have been all that kept us, and only now nothing is called any more.
  if (id_ != 0) loop_->Remove(id_);
}

}  // namespace distgrad
