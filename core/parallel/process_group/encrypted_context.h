// The connections of a rank of an encrypted group to the others, and the messages that collectives
// send by them: what EncryptedGloo (encrypted_gloo.h) makes.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_CONTEXT_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_CONTEXT_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/deadline.h"
#include "core/net/endpoint.h"
#include "core/net/loop.h"
#include "core/parallel/process_group/encrypted_gloo_options.h"
#include "core/tensor/exception.h"
#include "core/transport/tensorpipe/socket/socket_connection.h"
#include "core/transport/tensorpipe/socket/socket_listener.h"
#include "gloo/transport/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace distgrad {

class EncryptedBuffer;

// Thread-safe; but it is for the callers that messages of one slot have an order.
class EncryptedContext final : public gloo::transport::Context,
                               public std::enable_shared_from_this<EncryptedContext> {
 public:
  EncryptedContext(const EncryptedGlooOptions& options, int rank, int size);
  ~EncryptedContext() override;

  std::unique_ptr<gloo::transport::Pair>& getPair(int other) override { return all_.at(other); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int other) override { return all_.at(other); }
  void createAndConnectAllPairs(std::shared_ptr<gloo::IStore>) override {
    if (absl::Status status = Connect(); !status.ok()) throw StatusError(Fail(status));
  }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr,
                                                                      size_t size) override;

  bool IsConnected(int other) ABSL_LOCKS_EXCLUDED(mu_);
  // Closes all connections, and ends all collectives. Returns the error of all: `why`, or that of
  // an earlier call.
  absl::Status Abort(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class EncryptedBuffer;

  // What a frame on a connection between two ranks is about.
  enum class Kind : uint8_t {
    kReady = 1,  // the sender is to receive the next message of the slot; no other frame
    kData = 2,
    kHasAll = 3,  // the sender is connected to all ranks; no other frame
  };

  // A message that this rank is to send or to receive.
  struct Operation {
    EncryptedBuffer* buffer;
    int other;
    uint64_t slot;
    char* data;
    size_t size;
  };
  // Messages with the same slot, of one pair of ranks, come in their order.
  struct Slot {
    std::deque<Operation> sends;  // the other rank is not ready for them yet
    size_t ready = 0;             // it is for so many more
    std::deque<Operation> receipts;

    bool empty() const { return sends.empty() && ready == 0 && receipts.empty(); }
  };
  struct Peer {
    std::shared_ptr<SocketConnection> out, in;  // on which this rank sends, and receives
    bool welcome = false;                       // there, as it has answered
    bool has_all = false;                       // it says that it is connected to all ranks
    absl::Status out_lost, in_lost;
    std::map<uint64_t, Slot> slots;
    size_t ready = 0;  // of all slots

    // While connecting.
    Endpoint endpoint;         // where it listens
    int attempts = 0;          // to connect to it
    std::string last_trouble;  // why the last one ended; "": it has not
    bool was_refusal = false;  // one has, as either end refused the other's certificate

    bool IsOpen() const { return welcome && in != nullptr; }
    bool IsConnected() const { return IsOpen() && out_lost.ok() && in_lost.ok(); }
  };

  static std::string Head(Kind kind, uint64_t slot, uint64_t bytes);

  // encrypted_connecting.cc.
  absl::Status Connect();
  // Opens a connection to each rank, as each says in the store where it listens.
  absl::Status OpenAll(Deadline deadline);
  void Open(int other) ABSL_LOCKS_EXCLUDED(mu_);
  // Until all ranks are connected to this one.
  absl::Status AwaitOpen(Deadline deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // And until all say that of themselves: after that one may go at once, and the others still join.
  absl::Status AwaitConnected(Deadline deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // Sleeps until `check`, under mu_, says of no rank that it is missing. It may give an error, too.
  absl::Status AwaitEach(absl::FunctionRef<absl::StatusOr<bool>(const Peer&)> check,
                         absl::FunctionRef<absl::Status()> ask, Deadline deadline)
      ABSL_LOCKS_EXCLUDED(mu_);
  // An error if another rank has gone, or has been taken for another.
  absl::Status FirstLoss() ABSL_LOCKS_EXCLUDED(mu_);
  // What `from` says of itself to `to`, in the first frame of a connection and in the answer.
  std::string Hello(int from, int to) const;
  // Of the first frame of a connection that another rank has opened: its rank, or what is wrong.
  absl::StatusOr<int> RankOfHello(absl::string_view hello) const;
  // Says which rank has sent it, for messages.
  std::string Describe(absl::string_view hello) const;

  // These run on the loop's thread.
  void AcceptNext();
  void Accept(std::shared_ptr<SocketConnection> connection);
  // Returns whether it is let in.
  bool Admit(const std::shared_ptr<SocketConnection>& connection, int other)
      ABSL_LOCKS_EXCLUDED(mu_);
  void OnAnswer(int other, const std::shared_ptr<SocketConnection>& out, absl::string_view answer)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The connection to another rank is over: another one is opened, unless all were open or that is
  // of no use.
  void OnOutEnded(int other, const std::shared_ptr<SocketConnection>& out,
                  const tensorpipe::Error& error) ABSL_LOCKS_EXCLUDED(mu_);
  void ReadHead(int other, const std::shared_ptr<SocketConnection>& in);
  void OnHead(int other, const std::shared_ptr<SocketConnection>& in, absl::string_view head);
  absl::Status OnReady(int other, uint64_t slot) ABSL_LOCKS_EXCLUDED(mu_);
  // Which receipt it is for.
  absl::StatusOr<Operation> OnData(int other, uint64_t slot, uint64_t size)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The connection to another rank, or from it, is over for good.
  void OnOutLost(int other, const std::shared_ptr<SocketConnection>& out, absl::string_view why)
      ABSL_LOCKS_EXCLUDED(mu_);
  void OnInLost(int other, const std::shared_ptr<SocketConnection>& in, absl::string_view why)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Tells the others why, if it is the first failure, and aborts.
  absl::Status Fail(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);

  absl::Status Lost(int other, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailSends(Peer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailReceipts(Peer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of buffers.
  void Send(const Operation& operation) ABSL_LOCKS_EXCLUDED(mu_);
  void Receive(const Operation& operation) ABSL_LOCKS_EXCLUDED(mu_);
  void Transmit(const std::shared_ptr<SocketConnection>& out, const Operation& operation);
  void Forget(const EncryptedBuffer* buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WakeConnecting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const EncryptedGlooOptions& options_;  // of the device, which Gloo keeps longer
  std::vector<std::unique_ptr<gloo::transport::Pair>> all_;

  // Constant once Connect() has begun.
  std::shared_ptr<Loop> loop_;
  std::shared_ptr<SocketListener> listener_;

  absl::Mutex mu_;
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mu_);
  bool all_open_ ABSL_GUARDED_BY(mu_) = false;  // nobody may come any more
  absl::Status aborted_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<EncryptedBuffer*> buffers_ ABSL_GUARDED_BY(mu_);
  Sleeper* connecting_ ABSL_GUARDED_BY(mu_) = nullptr;
};

// A collective has one thread, which waits; all else is the context's.
class EncryptedBuffer final : public gloo::transport::UnboundBuffer {
 public:
  EncryptedBuffer(std::shared_ptr<EncryptedContext> context, void* ptr, size_t size)
      : gloo::transport::UnboundBuffer(ptr, size), context_(std::move(context)) {
    absl::MutexLock lock(&context_->mu_);
    context_->buffers_.insert(this);
  }
  ~EncryptedBuffer() override;

  void send(int rank, uint64_t slot, size_t offset, size_t bytes) override {
    context_->Send(At(rank, slot, offset, bytes));
  }
  void recv(int rank, uint64_t slot, size_t offset, size_t bytes) override {
    context_->Receive(At(rank, slot, offset, bytes));
  }
  void recv(std::vector<int>, uint64_t, size_t, size_t) override {
    throw std::logic_error("no collective receives from any rank");
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    return Wait(&EncryptedBuffer::sends_, "take what was sent to it", rank, timeout);
  }
  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    return Wait(&EncryptedBuffer::receipts_, "send", rank, timeout);
  }
  void abortWaitSend() override { throw std::logic_error("collectives do not abort their waits"); }
  void abortWaitRecv() override { throw std::logic_error("collectives do not abort their waits"); }

 private:
  friend class EncryptedContext;

  // The ranks of the operations that have begun and are not over, and of those that are and have
  // not been waited for.
  struct Side {
    std::vector<int> begun;
    std::deque<int> over;
  };

  EncryptedContext::Operation At(int rank, uint64_t slot, size_t offset, size_t bytes);
  bool Wait(Side EncryptedBuffer::*side, absl::string_view what, int* rank,
            std::chrono::milliseconds timeout);

  // Under context_->mu_. One operation of the side is over.
  void End(Side EncryptedBuffer::*side, int other, const absl::Status& status) {
    context_->mu_.AssertHeld();
    Side& of = this->*side;
    of.begun.erase(std::find(of.begun.begin(), of.begun.end(), other));
    if (status.ok()) {
      of.over.push_back(other);
    } else if (failed_.ok()) {
      failed_ = status;
    }
    Wake();
  }
  void Wake() {
    if (waits_ != nullptr) waits_->Wake();
  }
  bool IsIdle() const { return sends_.begun.empty() && receipts_.begun.empty(); }

  const std::shared_ptr<EncryptedContext> context_;
  // The time-out is that of the collective, which waits several times.
  const Deadline::Clock::time_point begun_ = Deadline::Clock::now();

  // Guarded by context_->mu_.
  Side sends_, receipts_;
  absl::Status failed_;  // one of the operations
  Sleeper* waits_ = nullptr;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_CONTEXT_H_
