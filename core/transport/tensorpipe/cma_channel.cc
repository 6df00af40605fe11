// Sends descriptors of memory, and copies from the process at the other end.
#include "core/transport/tensorpipe/cma_channel.h"

#include <errno.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/event_loop.h"
#include "core/base/processors.h"
#include "core/base/random.h"
#include "core/base/thread_pool.h"
#include "core/net/endpoint.h"
#include "core/transport/tensorpipe/socket/error.h"
#include "core/transport/tensorpipe/socket/peer_process.h"
#include "tensorpipe/channel/channel.h"
#include "tensorpipe/channel/cma/factory.h"
#include "tensorpipe/common/cpu_buffer.h"
#include "tensorpipe/transport/connection.h"

namespace distgrad {
namespace {

using tensorpipe::Buffer;
using tensorpipe::CpuBuffer;
using tensorpipe::Error;
using tensorpipe::transport::Connection;
using Done = std::function<void(const Error&)>;

// Made before main(), for later there may be no memory for them.
const Error* const kNoMemory = new Error(MakeError("out of memory", TextError::Cause::kExhausted));
const Error* const kNoPeerProcess = new Error(
    MakeError("the other end offers its memory, but is not connected over a Unix-domain socket"));

// The thread of the sockets copies so much at most before it serves others. More is copied by
// several threads, in such pieces.
constexpr size_t kPiece = 2 << 20;

// So many threads get all out of the memory that there is to get.
size_t CopyThreads() {
  constexpr int kMax = 4;
  static const int threads = std::min(UsableProcessors(), kMax);  // it reads files to find out
  return threads;
}

// What a sender says of memory that it sends: where it lies, and where its lease does, a number
// that the sender clears before the memory is anything else again.
struct Offer {
  uint64_t address = 0;
  uint64_t lease_address = 0;
  uint64_t lease = 0;  // not 0
};

// Copies out of a process's memory. Returns errno, or 0.
int CopyFrom(pid_t process, uint64_t address, void* target, size_t size) {
  auto* to = static_cast<uint8_t*>(target);
  while (size > 0) {
    const iovec local{to, size};
    const iovec remote{reinterpret_cast<void*>(address), size};
    const ssize_t n = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (n < 0) return errno;
    if (n == 0) return EFAULT;
    address += n;
    to += n;
    size -= n;
  }
  return 0;
}

// The threads that copy, for all channels of a context. Thread-safe.
class Copiers {
 public:
  // False once the context has been joined, or where there is no memory for it: then nobody else
  // will run `task`.
  template <typename Task>
  bool Schedule(const Task& task) {
    try {
      return threads_.Schedule(task);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  void Join() { threads_.Join(); }

  // Whether the calling thread is to copy so much itself.
  static bool IsForThisThread(const std::shared_ptr<Copiers>& self, size_t size) {
    EventLoop* const loop = EventLoop::Current();
    if (loop == nullptr) return size <= kPiece;  // one that does nothing else
    const size_t before = self->copied_.load(std::memory_order_relaxed);
    if (size > kPiece - before) return false;
    // One message may have thousands of tensors.
    try {
      if (before == 0 && size > 0) loop->Run([self] { self->copied_ = 0; });
    } catch (const std::bad_alloc&) {
      return false;  // nothing would end this turn
    }
    self->copied_.store(before + size, std::memory_order_relaxed);
    return true;
  }

 private:
  ThreadPool threads_{"dg-copy", CopyThreads()};
  // By the loop's thread, before it serves others; that thread alone writes it.
  std::atomic<size_t> copied_{0};
};

// Thread-safe. Callbacks run on the threads of the connections and on those that copy, one at a
// time for each direction.
class CmaChannel final : public std::enable_shared_from_this<CmaChannel> {
 public:
  CmaChannel(std::shared_ptr<Connection> offers, std::shared_ptr<Connection> taken,
             std::shared_ptr<Copiers> copiers)
      : offers_(std::move(offers)), taken_(std::move(taken)), copiers_(std::move(copiers)) {}

  void Send(const void* data, Done done) {
    const auto loan = std::make_shared<Loan>();
    {
      absl::MutexLock lock(&mu_);
      if (++last_lease_ == 0) ++last_lease_;
      loan->offer = {reinterpret_cast<uint64_t>(data), reinterpret_cast<uint64_t>(&loan->lease),
                     last_lease_};
      if (!closed_) {
        loan->lease = last_lease_;
        loans_.push_back(loan);
      }
    }
    offers_->write(&loan->offer, sizeof(Offer), [loan](const Error&) {});
    taken_->read(&loan->taken, sizeof(loan->taken),
                 [self = shared_from_this(), loan, done = std::move(done)](const Error& error,
                                                                           const void*, size_t) {
                   self->Reclaim(*loan);
                   done(error);
                 });
  }

  void Receive(void* data, size_t size, Done done) {
    const auto copy = std::make_shared<Copy>();
    copy->to = static_cast<uint8_t*>(data);
    copy->size = size;
    copy->done = std::move(done);
    offers_->read(&copy->from, sizeof(Offer),
                  [self = shared_from_this(), copy](const Error& error, const void*, size_t) {
                    self->OnOffer(copy, error);
                  });
  }

  // Ends what waits for the other end; a copy that runs ends first. From now on nothing that was
  // sent counts as received there, unless it does already: its memory may soon be reused.
  void Close() {
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      for (const auto& loan : loans_) loan->lease = 0;
      loans_.clear();
    }
    offers_->close();
    taken_->close();
  }

 private:
  struct Loan {
    Offer offer;
    std::atomic<uint64_t> lease{0};  // the other end reads it
    uint8_t taken = 0;
  };
  struct Copy {
    Offer from;
    pid_t process = 0;
    uint8_t* to = nullptr;
    size_t size = 0;
    Done done;
    Error error;  // of the connection
    std::atomic<size_t> begun{0};
    std::atomic<size_t> left{0};  // pieces
    std::atomic<int> failure{0};  // errno
    std::shared_ptr<Copy> next;   // of those that have come; guarded by mu_
  };

  void Reclaim(Loan& loan) {
    loan.lease = 0;
    absl::MutexLock lock(&mu_);
    // As a rule the first.
    const auto found = std::find_if(loans_.begin(), loans_.end(),
                                    [&](const auto& other) { return other.get() == &loan; });
    if (found != loans_.end()) loans_.erase(found);
  }

  // One after the other, in their order.
  void OnOffer(std::shared_ptr<Copy> copy, const Error& error) {
    copy->error = error;
    if (!error) {
      // As the kernel says it, not the other end, which might name somebody else's process.
      const auto* peer = dynamic_cast<const HasPeerProcess*>(offers_.get());
      if (peer != nullptr) copy->process = peer->PeerProcess();
      if (copy->process == 0) copy->error = *kNoPeerProcess;
    }
    {
      absl::MutexLock lock(&mu_);
      // A list of their own, which needs no memory: nobody else would tell either end.
      const bool is_first = first_copy_ == nullptr;
      (is_first ? first_copy_ : last_copy_->next) = copy;
      last_copy_ = copy.get();
      if (!is_first) return;
    }
    Begin(std::move(copy));
  }

  void Begin(std::shared_ptr<Copy> copy) {
    while (copy != nullptr) {
      if (!copy->error && copy->to != DiscardTarget()) {
        if (!Copiers::IsForThisThread(copiers_, copy->size)) return BeginPieces(copy);
        copy->failure = CopyFrom(copy->process, copy->from.address, copy->to, copy->size);
      }
      copy = End(*copy);
    }
  }

  void BeginPieces(const std::shared_ptr<Copy>& copy) {
    const size_t pieces = (copy->size + kPiece - 1) / kPiece;
    copy->left = pieces;
    for (size_t i = std::min(pieces, CopyThreads()); i > 0; --i) {
      const auto help = [self = shared_from_this(), copy] { self->CopyPieces(copy); };
      // The channel is being closed, say: there is no other thread.
      if (!copiers_->Schedule(help)) help();
    }
  }

  void CopyPieces(const std::shared_ptr<Copy>& copy) {
    for (;;) {
      const size_t begin = copy->begun.fetch_add(kPiece);
      if (begin >= copy->size) return;
      const int failure = CopyFrom(copy->process, copy->from.address + begin, copy->to + begin,
                                   std::min(kPiece, copy->size - begin));
      if (failure != 0) copy->failure = failure;
      if (--copy->left == 0) return Begin(End(*copy));
    }
  }

  // Returns the next.
  std::shared_ptr<Copy> End(Copy& copy) {
    // Read after the last byte: while the lease is there, all that was copied is the message.
    uint64_t lease = 0;
    if (!copy.error && copy.failure == 0) {
      copy.failure = CopyFrom(copy.process, copy.from.lease_address, &lease, sizeof(lease));
    }
    // Both ends wait to hear of it.
    try {
      if (copy.failure != 0) {
        copy.error = MakeError(absl::StrCat("copying ", copy.size, " bytes out of process ",
                                            copy.process, ": ", strerror(copy.failure)));
      } else if (!copy.error && (lease == 0 || lease != copy.from.lease)) {
        copy.error = MakeError(absl::StrCat("copying ", copy.size, " bytes out of process ",
                                            copy.process, ": it has taken its memory back"));
      } else if (!copy.error) {
        static const uint8_t kTaken = 1;
        taken_->write(&kTaken, sizeof(kTaken), [](const Error&) {});
      }
    } catch (const std::bad_alloc&) {
      copy.error = *kNoMemory;
    }
    if (copy.error) Close();
    std::exchange(copy.done, nullptr)(copy.error);
    absl::MutexLock lock(&mu_);
    first_copy_ = std::move(copy.next);
    return first_copy_;
  }

  // Constant after construction; synchronize themselves.
  const std::shared_ptr<Connection> offers_, taken_;
  const std::shared_ptr<Copiers> copiers_;

  absl::Mutex mu_;
  // Guarded by mu_.
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  // Begins with a random number: memory that was freed and is used again does not hold the next.
  uint64_t last_lease_ ABSL_GUARDED_BY(mu_) = RandomNumber();
  std::deque<std::shared_ptr<Loan>> loans_ ABSL_GUARDED_BY(mu_);  // as the other end takes them
  std::shared_ptr<Copy> first_copy_ ABSL_GUARDED_BY(mu_);         // is being copied
  Copy* last_copy_ ABSL_GUARDED_BY(mu_) = nullptr;                // if there is a first one
};

// What TensorPipe holds: it may let go without closing.
class ChannelHandle final : public tensorpipe::channel::Channel {
 public:
  explicit ChannelHandle(std::shared_ptr<CmaChannel> channel) : channel_(std::move(channel)) {}
  ~ChannelHandle() override { channel_->Close(); }

  void send(Buffer buffer, size_t, tensorpipe::channel::TSendCallback done) override {
    channel_->Send(buffer.unwrap<CpuBuffer>().ptr, std::move(done));
  }
  void recv(Buffer buffer, size_t size, tensorpipe::channel::TRecvCallback done) override {
    channel_->Receive(buffer.unwrap<CpuBuffer>().ptr, size, std::move(done));
  }
  void setId(std::string) override {}
  void close() override { channel_->Close(); }

 private:
  const std::shared_ptr<CmaChannel> channel_;
};

class CmaContext final : public tensorpipe::channel::Context {
 public:
  // `like`: TensorPipe's own.
  explicit CmaContext(const tensorpipe::channel::Context& like)
      : descriptors_(like.deviceDescriptors()) {
    // Those that meet on a Unix-domain socket.
    for (auto& [device, descriptor] : descriptors_) absl::StrAppend(&descriptor, "/", ThisPlace());
  }
  ~CmaContext() override { join(); }

  bool isViable() const override { return true; }
  size_t numConnectionsNeeded() const override { return 2; }
  const std::unordered_map<tensorpipe::Device, std::string>& deviceDescriptors() const override {
    return descriptors_;
  }
  bool canCommunicateWithRemote(const std::string& local,
                                const std::string& remote) const override {
    return local == remote;
  }

  std::shared_ptr<tensorpipe::channel::Channel> createChannel(
      std::vector<std::shared_ptr<Connection>> connections,
      tensorpipe::channel::Endpoint) override {
    auto channel = std::make_shared<CmaChannel>(std::move(connections[0]),
                                                std::move(connections[1]), copiers_);
    absl::MutexLock lock(&mu_);
    if (closed_) channel->Close();
    channels_.erase(std::remove_if(channels_.begin(), channels_.end(),
                                   [](const auto& other) { return other.expired(); }),
                    channels_.end());
    channels_.push_back(channel);
    return std::make_shared<ChannelHandle>(std::move(channel));
  }

  void setId(std::string) override {}
  void close() final {
    std::vector<std::weak_ptr<CmaChannel>> channels;
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      channels.swap(channels_);
    }
    for (const auto& weak : channels) {
      if (const auto channel = weak.lock()) channel->Close();
    }
  }
  void join() final {
    close();
    copiers_->Join();
  }

 private:
  std::unordered_map<tensorpipe::Device, std::string> descriptors_;  // constant
  const std::shared_ptr<Copiers> copiers_ = std::make_shared<Copiers>();

  absl::Mutex mu_;
  // Guarded by mu_.
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::weak_ptr<CmaChannel>> channels_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<tensorpipe::channel::Context> NewCmaChannel() {
  const auto like = tensorpipe::channel::cma::create();
  const bool works = like->isViable() && !ThisPlace().empty();
  auto channel = works ? std::make_shared<CmaContext>(*like) : nullptr;
  like->close();
  like->join();
  return channel;
}

}  // namespace distgrad
