// Wraps Gloo's TCP device so that waits for a lost rank end.
#include "core/parallel/process_group/gloo_device.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

using gloo::transport::Pair;
using gloo::transport::UnboundBuffer;
using Timeout = std::chrono::milliseconds;

namespace {

// Slots of messages of different sizes differ. A message that is longer than what its receipt wants
// makes Gloo throw on a thread of its own, which ends the process, and one that is shorter is taken
// for all of it. So neither comes to that receipt, which is late then.
uint64_t SlotOfSize(uint64_t slot, size_t bytes) {
  // An odd factor, so no two sizes have one product; Gloo's slots of a time differ in a few bits.
  return slot ^ (bytes * uint64_t{0x9E3779B97F4A7C15});
}

}  // namespace

// The connections are those of `tcp_`; this one has none of its own.
class GlooDevice::Context final : public gloo::transport::Context,
                                  public std::enable_shared_from_this<Context> {
 public:
  explicit Context(std::shared_ptr<gloo::transport::Context> tcp)
      : gloo::transport::Context(tcp->rank, tcp->size), tcp_(std::move(tcp)) {}

  void EndLostWaits() ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the error of all: `why`, or that of an earlier call.
  std::exception_ptr Abort(std::exception_ptr why) ABSL_LOCKS_EXCLUDED(mu_);

  std::unique_ptr<Pair>& getPair(int other) override { return tcp_->getPair(other); }
  std::unique_ptr<Pair>& createPair(int other) override { return tcp_->createPair(other); }
  void createAndConnectAllPairs(std::shared_ptr<gloo::IStore> store) override {
    tcp_->timeout_ = timeout_;
    tcp_->createAndConnectAllPairs(std::move(store));
  }
  std::unique_ptr<UnboundBuffer> createUnboundBuffer(void* ptr, size_t size) override;

 private:
  friend class Buffer;

  // Not in the constructor and the destructor of a buffer, where clang checks no lock.
  void Add(Buffer* buffer) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    buffers_.insert(buffer);
  }
  void Remove(Buffer* buffer) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    buffers_.erase(buffer);
  }

  const std::shared_ptr<gloo::transport::Context> tcp_;
  absl::Mutex mu_;
  std::exception_ptr aborted_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<Buffer*> buffers_ ABSL_GUARDED_BY(mu_);
};

// Each operation has a buffer of Gloo's of its own, over the same memory: so it is known which
// rank it is that a wait, which takes the first operation, waits for.
class GlooDevice::Buffer final : public UnboundBuffer {
 public:
  Buffer(std::shared_ptr<Context> context, void* ptr, size_t size)
      : UnboundBuffer(ptr, size), context_(std::move(context)) {
    context_->Add(this);
  }
  ~Buffer() override { context_->Remove(this); }

  // Under context_->mu_.
  void EndLostWaits(const std::vector<bool>& lost) {
    sends_.EndLostWaits(lost, &UnboundBuffer::abortWaitSend);
    recvs_.EndLostWaits(lost, &UnboundBuffer::abortWaitRecv);
  }

  void send(int rank, uint64_t slot, size_t offset, size_t bytes) override {
    bytes = Bytes(offset, bytes);
    Guarded(
        [&] { sends_.Add(rank, NewOfTcp()).send(rank, SlotOfSize(slot, bytes), offset, bytes); });
  }
  void recv(int rank, uint64_t slot, size_t offset, size_t bytes) override {
    bytes = Bytes(offset, bytes);
    Guarded(
        [&] { recvs_.Add(rank, NewOfTcp()).recv(rank, SlotOfSize(slot, bytes), offset, bytes); });
  }
  void recv(std::vector<int>, uint64_t, size_t, size_t) override {
    throw std::logic_error("no collective receives from any rank");
  }
  bool waitSend(int* rank, Timeout timeout) override {
    Guarded([&] { Wait(sends_, &UnboundBuffer::waitSend, rank, timeout); });
    return true;
  }
  bool waitRecv(int* rank, Timeout timeout) override {
    Guarded([&] { Wait(recvs_, &UnboundBuffer::waitRecv, rank, timeout); });
    return true;
  }
  void abortWaitSend() override { throw std::logic_error("collectives do not abort their waits"); }
  void abortWaitRecv() override { throw std::logic_error("collectives do not abort their waits"); }

 private:
  struct Operation {
    int rank;
    std::unique_ptr<UnboundBuffer> buffer;
  };
  // The sends or the receipts. A collective has one thread; what is in here is changed under the
  // context's mutex, for EndLostWaits().
  class Operations {
   public:
    explicit Operations(absl::Mutex* mu) : mu_(mu) {}

    // Before it is begun: if the connection has broken by then, Gloo refuses it, and if it breaks
    // later, EndLostWaits() finds it here.
    UnboundBuffer& Add(int rank, std::unique_ptr<UnboundBuffer> buffer) {
      absl::MutexLock lock(mu_);
      return *all_.emplace_back(Operation{rank, std::move(buffer)}).buffer;
    }
    // Returns the first that has not been waited for.
    const Operation& Next() {
      absl::MutexLock lock(mu_);
      return all_.at(waited_);
    }
    void SetWaited() {
      absl::MutexLock lock(mu_);
      ++waited_;
    }
    // Under the mutex.
    void EndLostWaits(const std::vector<bool>& lost, void (UnboundBuffer::*abort)()) {
      mu_->AssertHeld();
      for (const Operation& each : all_) {
        if (lost[each.rank]) (each.buffer.get()->*abort)();
      }
    }

   private:
    absl::Mutex* const mu_;
    // All stay to the end: a buffer that is done waits for Gloo's thread when it is destroyed,
    // which may still be at it.
    std::deque<Operation> all_ ABSL_GUARDED_BY(mu_);
    size_t waited_ ABSL_GUARDED_BY(mu_) = 0;
  };

  // The largest is Gloo's word for all of the rest.
  size_t Bytes(size_t offset, size_t bytes) const {
    return bytes == std::numeric_limits<size_t>::max() ? size - offset : bytes;
  }

  void Guarded(absl::FunctionRef<void()> operation) {
    try {
      operation();
    } catch (...) {
      std::rethrow_exception(context_->Abort(std::current_exception()));
    }
  }

  std::unique_ptr<UnboundBuffer> NewOfTcp() {
    return context_->tcp_->createUnboundBuffer(ptr, size);
  }

  void Wait(Operations& operations, bool (UnboundBuffer::*wait)(int*, Timeout), int* rank,
            Timeout timeout) ABSL_LOCKS_EXCLUDED(context_->mu_) {
    const Operation& first = operations.Next();
    Timeout left = timeout;
    // Less than none is Gloo's word for that of all.
    if (timeout >= Timeout::zero()) {
      const auto waited = std::chrono::steady_clock::now() - begun_;
      left = std::max(timeout - std::chrono::duration_cast<Timeout>(waited), Timeout::zero());
    }
    bool came;
    try {
      came = (first.buffer.get()->*wait)(rank, left);
    } catch (const std::exception& error) {
      // Gloo names the time that was left. It may also tell of another collective that is late.
      const bool is_late =
          timeout >= Timeout::zero() && std::chrono::steady_clock::now() - begun_ >= timeout;
      if (!is_late || !absl::StrContains(error.what(), "Timed out")) throw;
      throw std::runtime_error(
          absl::StrCat("Timed out waiting ", timeout.count(), "ms for rank ", first.rank));
    }
    if (!came) {
      // It was over when the connection broke, or else is late now.
      bool over;
      try {
        over = (first.buffer.get()->*wait)(rank, Timeout::zero());
      } catch (...) {
        over = false;
      }
      if (!over) {
        throw std::runtime_error(
            absl::StrCat("the connection to rank ", first.rank, " has broken"));
      }
    }
    operations.SetWaited();
  }

  const std::shared_ptr<Context> context_;
  // The time-out is that of the collective, which waits several times.
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  Operations sends_{&context_->mu_}, recvs_{&context_->mu_};
};

std::unique_ptr<UnboundBuffer> GlooDevice::Context::createUnboundBuffer(void* ptr, size_t size) {
  return std::make_unique<Buffer>(shared_from_this(), ptr, size);
}

void GlooDevice::Context::EndLostWaits() {
  std::vector<bool> lost(size);
  for (int other = 0; other < size; ++other) {
    lost[other] = other != rank && !getPair(other)->isConnected();
  }
  absl::MutexLock lock(&mu_);
  for (Buffer* buffer : buffers_) buffer->EndLostWaits(lost);
}

std::exception_ptr GlooDevice::Context::Abort(std::exception_ptr why) {
  {
    absl::MutexLock lock(&mu_);
    if (aborted_ != nullptr) return aborted_;
    aborted_ = why;
  }
  // Gloo closes all connections when a receipt is late; and this one is, for nobody sends. (To
  // close each would lose what the other end has not read yet.)
  try {
    tcp_->createUnboundBuffer(nullptr, 0)->waitRecv(nullptr, Timeout::zero());
  } catch (...) {  // NOLINT(bugprone-empty-catch): it is late, as it had to be
  }
  EndLostWaits();
  return why;
}

GlooDevice::GlooDevice(std::shared_ptr<gloo::transport::Device> tcp) : tcp_(std::move(tcp)) {}

GlooDevice::~GlooDevice() = default;

std::shared_ptr<gloo::transport::Context> GlooDevice::createContext(int rank, int size) {
  return context_ = std::make_shared<Context>(tcp_->createContext(rank, size));
}

void GlooDevice::EndLostWaits() { context_->EndLostWaits(); }

void GlooDevice::Abort() {
  context_->Abort(std::make_exception_ptr(std::runtime_error("the group was aborted")));
}

}  // namespace distgrad
