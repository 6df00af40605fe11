#include "core/rpc/tensorpipe/cma_channel.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/processors.h"
#include "core/base/thread_pool.h"
#include "core/rpc/tensorpipe/error.h"
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

// As much is copied at once by the thread that hears of it; more by several threads, in such
// pieces.
constexpr size_t kPiece = 2 << 20;

// So many threads get all out of the memory that there is to get.
size_t CopyThreads() {
  constexpr int kMax = 4;
  static const int threads = std::min(UsableProcessors(), kMax);  // it reads files to find out
  return threads;
}

// Where what is sent lies. Both ends are on one machine.
struct Offer {
  int64_t process = 0;
  uint64_t address = 0;
};

// Copies out of a process's memory. Returns errno, or 0.
int CopyFrom(Offer from, uint8_t* to, size_t size) {
  while (size > 0) {
    const iovec local{to, size};
    const iovec remote{reinterpret_cast<void*>(from.address), size};
    const ssize_t n = process_vm_readv(static_cast<pid_t>(from.process), &local, 1, &remote, 1, 0);
    if (n < 0) return errno;
    if (n == 0) return EFAULT;
    from.address += n;
    to += n;
    size -= n;
  }
  return 0;
}

// Thread-safe. Callbacks run on the threads of the connections and on those that copy, one at a
// time for each direction.
class CmaChannel final : public std::enable_shared_from_this<CmaChannel> {
 public:
  CmaChannel(std::shared_ptr<Connection> offers, std::shared_ptr<Connection> taken,
             std::shared_ptr<ThreadPool> threads)
      : offers_(std::move(offers)), taken_(std::move(taken)), threads_(std::move(threads)) {}

  void Send(const void* data, Done done) {
    struct Messages {
      Offer offer;
      uint8_t taken = 0;
    };
    const auto messages = std::make_shared<Messages>();
    messages->offer = {getpid(), reinterpret_cast<uint64_t>(data)};
    offers_->write(&messages->offer, sizeof(Offer), [messages](const Error&) {});
    taken_->read(&messages->taken, sizeof(messages->taken),
                 [messages, done = std::move(done)](const Error& error, const void*, size_t) {
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

  // Ends what waits for the other end; a copy that runs ends first.
  void Close() {
    offers_->close();
    taken_->close();
  }

 private:
  struct Copy {
    Offer from;
    uint8_t* to = nullptr;
    size_t size = 0;
    Done done;
    Error error;  // of the connection
    std::atomic<size_t> begun{0};
    std::atomic<size_t> left{0};  // pieces
    std::atomic<int> failure{0};  // errno
  };

  // One after the other, in their order.
  void OnOffer(std::shared_ptr<Copy> copy, const Error& error) {
    copy->error = error;
    {
      absl::MutexLock lock(&mu_);
      copies_.push_back(copy);
      if (copies_.size() > 1) return;
    }
    Begin(std::move(copy));
  }

  void Begin(std::shared_ptr<Copy> copy) {
    while (copy != nullptr) {
      if (!copy->error && copy->size > kPiece) return BeginPieces(copy);
      if (!copy->error) copy->failure = CopyFrom(copy->from, copy->to, copy->size);
      copy = End(*copy);
    }
  }

  void BeginPieces(const std::shared_ptr<Copy>& copy) {
    const size_t pieces = (copy->size + kPiece - 1) / kPiece;
    copy->left = pieces;
    for (size_t i = std::min(pieces, CopyThreads()); i > 0; --i) {
      const auto help = [self = shared_from_this(), copy] { self->CopyPieces(copy); };
      // The channel is being closed: there is no other thread any more.
      if (!threads_->Schedule(help)) help();
    }
  }

  void CopyPieces(const std::shared_ptr<Copy>& copy) {
    for (;;) {
      const size_t begin = copy->begun.fetch_add(kPiece);
      if (begin >= copy->size) return;
      const int failure = CopyFrom({copy->from.process, copy->from.address + begin},
                                   copy->to + begin, std::min(kPiece, copy->size - begin));
      if (failure != 0) copy->failure = failure;
      if (--copy->left == 0) return Begin(End(*copy));
    }
  }

  // Returns the next.
  std::shared_ptr<Copy> End(Copy& copy) {
    if (copy.failure != 0) {
      copy.error = MakeError(absl::StrCat("copying ", copy.size, " bytes out of process ",
                                          copy.from.process, ": ", strerror(copy.failure)));
    }
    if (copy.error) {
      Close();
    } else {
      static const uint8_t kTaken = 1;
      taken_->write(&kTaken, sizeof(kTaken), [](const Error&) {});
    }
    std::exchange(copy.done, nullptr)(copy.error);
    absl::MutexLock lock(&mu_);
    copies_.pop_front();
    return copies_.empty() ? nullptr : copies_.front();
  }

  // Constant after construction; synchronize themselves.
  const std::shared_ptr<Connection> offers_, taken_;
  const std::shared_ptr<ThreadPool> threads_;

  absl::Mutex mu_;
  // Guarded by mu_. The first is being copied.
  std::deque<std::shared_ptr<Copy>> copies_ ABSL_GUARDED_BY(mu_);
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
      : descriptors_(like.deviceDescriptors()) {}
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
                                                std::move(connections[1]), threads_);
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
    threads_->Join();
  }

 private:
  const std::unordered_map<tensorpipe::Device, std::string> descriptors_;
  const std::shared_ptr<ThreadPool> threads_ =
      std::make_shared<ThreadPool>("dg-copy", CopyThreads());

  absl::Mutex mu_;
  // Guarded by mu_.
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::weak_ptr<CmaChannel>> channels_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<tensorpipe::channel::Context> NewCmaChannel() {
  const auto like = tensorpipe::channel::cma::create();
  auto channel = like->isViable() ? std::make_shared<CmaContext>(*like) : nullptr;
  like->close();
  like->join();
  return channel;
}

}  // namespace distgrad
