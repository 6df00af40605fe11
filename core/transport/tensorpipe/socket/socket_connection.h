// One end of a socket, as TensorPipe's transports see it: the other end reads in the order in which
// we write, each write by one read.
//
// On the wire a write is a frame: its length in 8 bytes, then its bytes. A frame's length is
// checked against what the read can take before a byte of it is stored.
//
// A write is tried at once on the thread that asks for it; only what the kernel does not take
// waits for the loop's thread. Frames that wait go together in one system call. Only the loop's
// thread reads. A read fetches whatever has arrived, up to a buffer's size, in one system call; a
// large frame goes straight to where its reader wants it.
//
// With a cluster key or certificates all of that is inside of TLS (core/net/tls.h), but on
// Unix-domain sockets unless that is asked for: they do not leave the machine, and both ends are
// processes of one user.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_CONNECTION_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_CONNECTION_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/strand.h"
#include "core/net/cluster_key.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/loop.h"
#include "core/net/tls.h"
#include "core/transport/tensorpipe/socket/error.h"
#include "core/transport/tensorpipe/socket/socket_options.h"
#include "tensorpipe/common/error.h"
#include "tensorpipe/common/nop.h"

namespace distgrad {

// Thread-safe. Callbacks run on the loop's thread or, of writes and errors, on one that calls in
// here, one at a time, in the order of their reads and of their writes, each exactly once.
class SocketConnection final : public Loop::Handler,
                               public std::enable_shared_from_this<SocketConnection> {
 public:
  using Error = tensorpipe::Error;
  using ReadDone = std::function<void(const Error&, const void*, size_t)>;
  using WriteDone = std::function<void(const Error&)>;

  // Takes over a socket that has passed its handshake as a server, and if what follows is encrypted
  // the handshake of TLS, too; else `tls` is null.
  static std::shared_ptr<SocketConnection> Adopt(std::shared_ptr<Loop> loop, Fd fd,
                                                 std::unique_ptr<TlsSession> tls);
  // Starts to connect and to prove that this process belongs there. Reads and writes may be asked
  // for at once.
  static std::shared_ptr<SocketConnection> Connect(std::shared_ptr<Loop> loop, Endpoint endpoint,
                                                   const SocketOptions& options);
  // Fails whatever is asked of it.
  static std::shared_ptr<SocketConnection> Failed(std::shared_ptr<Loop> loop,
                                                  absl::string_view why);

  // Called by Adopt and Connect only.
  explicit SocketConnection(std::shared_ptr<Loop> loop);

  // Reads the next frame: into `data` if it is exactly `size` bytes long (nowhere for
  // DiscardTarget()), into memory of our own for a null `data`, or into an object.
  void Read(void* data, size_t size, ReadDone done);
  void Read(tensorpipe::AbstractNopHolder* object, WriteDone done);

  // The bytes must stay until `done`.
  void Write(const void* data, size_t size, WriteDone done);
  void Write(const tensorpipe::AbstractNopHolder& object, WriteDone done);
  // A frame of these bytes; and behind it, with none in between, one of `data`, unless that is of
  // no bytes.
  void Write(absl::string_view bytes, const void* data, size_t size, WriteDone done);

  // Fails all that is in flight.
  void Close();

  // See HasPeerProcess.
  pid_t PeerProcess() const { return peer_process_; }

  void OnEvents(uint32_t events) override;
  void OnLoopClosed() override;

 private:
  enum class State { kConnecting, kShakingHands, kEstablishingTls, kOpen, kClosed };

  struct ReadRequest {
    tensorpipe::AbstractNopHolder* object = nullptr;
    void* data = nullptr;
    size_t size = 0;
    ReadDone done;
    WriteDone object_done;
  };
  struct WriteRequest {
    std::string head;            // the frame's length; for an object all of it
    const void* data = nullptr;  // follows the head
    size_t size = 0;
    size_t sent = 0;  // of both
    WriteDone done;
  };

  // From any thread. Waits for memory: TensorPipe, or the loop, would stand still where this threw.
  void RunOnStrand(void (*task)(SocketConnection& it));

  // What follows runs on strand_ only.
  void StartConnecting();
  void FinishConnecting();
  void ShakeHands();
  void StartTls();
  void EstablishTls();
  void Open();
  void AwaitOpen(absl::Duration timeout);
  void AddToLoop(uint32_t events);
  // False, and all is over, if there is no memory for it. Then it is as it was: it, too, is to hear
  // of the end.
  template <typename Request>
  bool Append(std::deque<Request>& requests, Request& request);
  void Enqueue(ReadRequest request);
  void Enqueue(WriteRequest request);
  void AdvanceReads();
  // Goes on with that when the loop's thread has served others.
  void ReadLater();
  // Returns how much moves in one turn of this thread.
  size_t TurnBytes() const;
  // Returns whether the turn is over; then the rest comes later.
  bool EndTurnIfDue();
  // Parses the length of the next frame; false, and all is over, if it cannot be right.
  bool StartFrame();
  // Moves what has arrived into the frame's place. False when there is no more for now.
  bool FillFrame();
  bool Receive(uint8_t* target, size_t size, size_t* received);
  bool ReceiveTls(uint8_t* target, size_t size, size_t* received);
  // Takes what the kernel has for TLS to decrypt. False when there is no more for now.
  bool ReceiveTlsInput();
  bool HasInput() const;
  void FinishFrame();
  void AdvanceWrites();
  // Goes on with that when the loop's thread has served others.
  void WriteLater();
  // Sends some of what waits; how many bytes of it have been, or nullopt after a failure.
  std::optional<size_t> Send();
  std::optional<size_t> SendTls();
  // Encrypts some of what waits. False after a failure.
  bool Encrypt();
  // What waits, in as many parts as there is place for; how many, and their bytes.
  size_t Gather(absl::Span<iovec> parts, size_t* total) const;
  bool HasOutput() const;
  void Fail(absl::string_view why, TextError::Cause cause = TextError::Cause::kOther);
  void FailErrno(absl::string_view what, int error);

  // Constant after construction; synchronizes itself.
  const std::shared_ptr<Loop> loop_;
  Strand strand_;
  std::atomic<pid_t> peer_process_{0};  // once it is open

  // Used on strand_ only.
  State state_ = State::kConnecting;
  Error error_;  // why it is closed
  Fd fd_;
  uint64_t id_ = 0;  // in the loop
  bool readable_ = false, writable_ = false;
  bool hung_up_ = false;         // the other end will send no more
  bool waits_to_write_ = false;  // the loop watches for EPOLLOUT

  // While connecting.
  Endpoint endpoint_;
  SocketOptions options_;
  bool is_unix_ = false;
  std::optional<Handshake> handshake_;
  Loop::TimerId deadline_ = 0, retry_ = 0;

  // Set where it is encrypted.
  std::unique_ptr<TlsSession> tls_;
  size_t encrypted_ = 0;  // bytes of writes_ that are in its output

  std::deque<WriteRequest> writes_;
  bool writes_later_ = false;  // WriteLater() is on its way
  std::deque<ReadRequest> reads_;

  // What has been received but not used: buffer_[begin_, end_).
  std::unique_ptr<uint8_t[]> buffer_;
  size_t begin_ = 0, end_ = 0;
  // The frame of reads_.front(), once its length is known.
  bool in_frame_ = false;
  size_t frame_size_ = 0, frame_filled_ = 0;
  uint8_t* frame_ = nullptr;  // where it goes; null if it is used where it lies in the buffer
  std::unique_ptr<uint8_t[]> storage_;  // for frames that have no other place
  size_t moved_ = 0;                    // bytes, in this turn: several reads may share one
  bool turn_over_ = false;              // ReadLater() is on its way
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_CONNECTION_H_
