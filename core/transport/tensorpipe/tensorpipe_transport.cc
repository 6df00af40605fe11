// Picks TensorPipe's transports and channels, and turns its callbacks into ours.
#include "core/transport/tensorpipe/tensorpipe_transport.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/await_memory.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/exception.h"
#include "core/base/log.h"
#include "core/base/make_or.h"
#include "core/base/status.h"
#include "core/base/thread_pool.h"
#include "core/net/address.h"
#include "core/net/endpoint.h"
#include "core/net/loop.h"
#include "core/transport/tensorpipe/cma_channel.h"
#include "core/transport/tensorpipe/gpu_channel.h"
#include "core/transport/tensorpipe/message_layout.h"
#include "core/transport/tensorpipe/socket/error.h"
#include "core/transport/tensorpipe/socket/socket_transport.h"
#include "core/transport/tensorpipe/steady_listeners.h"
#include "tensorpipe/tensorpipe.h"

namespace distgrad {
namespace {

// Threads inherit what their maker blocks. libuv writes to sockets without MSG_NOSIGNAL, so a
// peer that dies would end this process by SIGPIPE; TensorPipe's own threads, and only they,
// are made deaf to it.
class SigpipeBlockedForNewThreads {
 public:
  SigpipeBlockedForNewThreads() {
    sigset_t sigpipe;
    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe, &before_);
  }
  ~SigpipeBlockedForNewThreads() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// The first message of the end that connects. Until it is there an accepted pipe may be waiting for
// further connections of the other end, which TensorPipe does for ever if that end is gone. Each of
// those has a handshake of its own, and this end waits for it as long as that may take.
constexpr char kGreeting[] = "distgrad 1";
constexpr absl::Duration kLeastGreetingPatience = absl::Seconds(10);

// At the end of an address and of a greeting: how many GPUs have a channel.
constexpr char kGpus[] = "#gpus=";

// Cuts that off, and returns it; 0 if it is not there.
int TakeGpus(std::string* text) {
  const size_t at = text->rfind(kGpus);
  int gpus = 0;
  if (at == std::string::npos || !absl::SimpleAtoi(text->substr(at + sizeof(kGpus) - 1), &gpus)) {
    return 0;
  }
  text->resize(at);
  return gpus;
}

// TensorPipe adds where in its own sources an error comes from; that helps none of our users.
std::string Message(const tensorpipe::Error& error) {
  std::string what = error.what();
  return what.substr(0, what.find(" (this error originated at"));
}

using Kind = TensorPipeOptions::Kind;

// As it stands before "://" in addresses.
std::string Scheme(Kind kind) {
  switch (kind) {
    case Kind::kSocket:
      return "socket";
    case Kind::kTcp:
      return "tcp";
    case Kind::kShm:
      return "shm";
  }
  return "";
}

// An address without what is for whoever shall connect only: messages end up in logs.
std::string PublicPart(const std::string& address) {
  const size_t slashes = address.find("://");
  return slashes == std::string::npos ? address : address.substr(0, address.find('/', slashes + 3));
}

// What the calling thread asks TensorPipe for at this moment; null on a thread of the transport's.
thread_local const void* asking = nullptr;

// Stands around each call into TensorPipe. A thread that calls there runs what others have queued
// meanwhile (tensorpipe/common/deferred_executor.h), their callbacks included: it must hand those
// on, for it has modes of its own, may hold locks, and was told that it would not wait.
class Asking {
 public:
  explicit Asking(const void* what) : before_(std::exchange(asking, what)) {}
  ~Asking() { asking = before_; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

 private:
  const void* const before_;
};

// Stands around each call into TensorPipe that may find no memory in the middle of something. The
// process ends there: else its executor takes this thread for the one that runs what is handed in,
// for good, and the whole transport stands still (tensorpipe/common/deferred_executor.h).
template <typename F>
auto InTensorPipe(const F& f) noexcept {
  return f();
}

// Keeps an error of TensorPipe's in what moves without memory, which its text does not: null for
// none.
using KeptError = std::shared_ptr<const tensorpipe::Error>;
KeptError Keep(const tensorpipe::Error& error) {
  if (!error) return nullptr;
  return AwaitMemory([&] { return std::make_shared<const tensorpipe::Error>(error); });
}
const tensorpipe::Error& ErrorOf(const KeptError& kept) {
  return kept != nullptr ? *kept : tensorpipe::Error::kSuccess;
}

// Keeps a loop running until it is removed from it: what is delivered while a transport ends needs
// the loop. Immutable.
class KeepsLoopRunning final : public Loop::Handler {
 public:
  void OnEvents(uint32_t) override {}
  void OnLoopClosed() override {}
};

// What the connections share with their transport, and may outlive it. Thread-safe.
class Shared {
 public:
  // `is_sockets`: the transport's sockets are the loop's too.
  Shared(std::string name, PacketLimits limits, absl::Duration handshake_timeout, Clock* clock,
         DeviceMemory* gpus, std::shared_ptr<Loop> loop, bool is_sockets)
      : name(std::move(name)),
        limits(limits),
        greeting_patience(std::max(kLeastGreetingPatience, handshake_timeout)),
        clock(clock),
        gpus(gpus),
        loop(std::move(loop)),
        is_sockets(is_sockets) {}

  // Runs `task`, a callback for others, on a thread of the transport: here and now if this is one.
  // What one TensorPipe callback follows from another keeps its order, as the later one is asked
  // for by the task of the earlier one.
  // TensorPipe calls back once, so this waits where there is no memory to hand the task on, also on
  // a thread that has locks of others: the little that it needs does not come from what those hold.
  template <typename Task>
  void Deliver(Task task) noexcept {
    static_assert(std::is_nothrow_move_constructible_v<Task>, "a second try would have half of it");
    if (asking == nullptr && (!is_sockets || EventLoop::Current() == loop.get())) return task();
    const auto kept = AwaitMemory([&] { return std::make_shared<Task>(std::move(task)); });
    AwaitMemory([&] { loop->Run([kept] { (*kept)(); }); });
  }

  // What follows an address or a greeting of ours.
  std::string GpusHere() const {
    return limits.gpus_here == 0 ? "" : absl::StrCat(kGpus, limits.gpus_here);
  }

  // Constant.
  const std::string name;
  const PacketLimits limits;
  const absl::Duration greeting_patience;
  Clock* const clock;        // nobody uses it after AwaitAll()
  DeviceMemory* const gpus;  // nobody uses it after AwaitAll(); null without gpus_here
  const std::shared_ptr<Loop> loop;
  const bool is_sockets;
  ThreadPool allocator{"dg-allocate", 1};  // nobody uses it after AwaitAll(); has no thread yet

  std::atomic<bool> closing{false};  // the transport is being destroyed; set by Close()

  // Counts what will still call back.
  void Expect() {
    absl::MutexLock lock(&mu_);
    ++expected_;
  }
  // For threads that are not the transport's: false once it ends.
  bool ExpectUnlessClosing() {
    absl::MutexLock lock(&mu_);
    if (closing) return false;
    ++expected_;
    return true;
  }
  void Close() {
    absl::MutexLock lock(&mu_);
    closing = true;
  }
  void Done() {
    absl::MutexLock lock(&mu_);
    --expected_;
  }
  void AwaitAll() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](int* expected) { return *expected == 0; }, &expected_));
  }

 private:
  absl::Mutex mu_;
  int expected_ ABSL_GUARDED_BY(mu_) = 0;
};

// Kept alive by its own pending read until it is closed. Thread-safe.
class PipeConnection final : public Connection,
                             public std::enable_shared_from_this<PipeConnection> {
 public:
  // `peer` says in messages who is at the other end.
  PipeConnection(std::shared_ptr<Shared> shared, std::shared_ptr<tensorpipe::Pipe> pipe,
                 std::string peer)
      : shared_(std::move(shared)), pipe_(std::move(pipe)), peer_(std::move(peer)) {}
  ~PipeConnection() override {
    const Asking asks(this);
    pipe_ = nullptr;  // it closes once more
  }

  // One of these, once: for a connection of our own, and for one of somebody else's.
  void Greet(int gpus_there, std::shared_ptr<Receiver> receiver) {
    greeted_ = true;
    gpus_there_ = gpus_there;
    tensorpipe::Message greeting;
    greeting.metadata = kGreeting + shared_->GpusHere();
    InTensorPipe([&] {  // the read fails too
      pipe_->write(std::move(greeting), [](const tensorpipe::Error&) {});
    });
    Start(std::move(receiver));
  }
  void AwaitGreeting(std::shared_ptr<Receiver> receiver) {
    // It waits where there is no memory: the receiver is there, and hears of the end alone.
    AwaitMemory([&] {
      timer_ = shared_->clock->At(shared_->clock->Now() + shared_->greeting_patience,
                                  [watch = weak_from_this()]() noexcept {  // as Close()
                                    if (const auto self = watch.lock()) {
                                      self->late_ = true;
                                      const Asking asks(self.get());
                                      self->pipe_->close();
                                    }
                                  });
    });
    AwaitMemory([&] { Start(receiver); });
  }

  void Send(Packet packet, SendDone done) override {
    if (absl::Status checked = CheckPacket(packet, limits()); !checked.ok()) {
      if (done) done(Annotate(checked, absl::StrCat("sending to ", peer_)));
      return;
    }
    // What needs memory comes before it counts: the transport's end waits for what counts.
    auto sending = std::make_shared<Sending>();
    sending->packet = std::move(packet);
    sending->done = std::move(done);
    tensorpipe::Message message = LayOut(sending->packet);
    tensorpipe::Pipe::write_callback_fn written = [self = shared_from_this(),
                                                   sending](const tensorpipe::Error& error) {
      // Of what a thread sends itself it may hear at once.
      if (asking == sending.get()) return self->FinishSend(*sending, error);
      self->shared_->Deliver(
          [self, sending, error = Keep(error)] { self->FinishSend(*sending, ErrorOf(error)); });
    };
    if (!shared_->ExpectUnlessClosing()) {
      sending->packet = Packet();  // it goes before the sender hears that it is done with
      if (sending->done) sending->done(Cancelled());
      return;
    }
    const Asking asks(sending.get());
    InTensorPipe([&] { pipe_->write(std::move(message), std::move(written)); });
  }

  void Close() override {
    closed_ = true;
    const Asking asks(this);
    InTensorPipe([this] { pipe_->close(); });
  }

 private:
  struct Sending {
    Packet packet;
    SendDone done;
  };
  struct Preparing {
    tensorpipe::Descriptor descriptor;
    absl::StatusOr<std::shared_ptr<Incoming>> incoming = nullptr;  // made of it
  };

  void FinishSend(Sending& sending, const tensorpipe::Error& error) {
    sending.packet = Packet();
    if (sending.done) {
      sending.done(error ? Lost(error) : absl::OkStatus());
      sending.done = nullptr;
    }
    shared_->Done();
  }

  void Start(std::shared_ptr<Receiver> receiver) {
    auto read = OnDescriptor();  // before it counts, as there may be no memory for it
    receiver_ = std::move(receiver);
    shared_->Expect();
    InTensorPipe([&] { pipe_->readDescriptor(std::move(read)); });
  }

  PacketLimits limits() const {
    PacketLimits limits = shared_->limits;
    limits.gpus_there = gpus_there_;
    limits.can_discard = shared_->is_sockets;
    return limits;
  }

  // The six below are one loop, each called after the callback of the one before, on the
  // transport's threads. The receiver is to hear of its end, so nothing is thrown out of it.
  void ReadNext() {
    InTensorPipe([this] { pipe_->readDescriptor(OnDescriptor()); });
  }
  tensorpipe::Pipe::read_descriptor_callback_fn OnDescriptor() {
    return [self = shared_from_this()](const tensorpipe::Error& error,
                                       tensorpipe::Descriptor descriptor) {
      self->shared_->Deliver(
          [self, error = Keep(error), descriptor = std::move(descriptor)]() mutable {
            if (error != nullptr) return self->Finish(self->Lost(*error));
            self->Read(std::move(descriptor));
          });
    };
  }

  void Read(tensorpipe::Descriptor descriptor) {
    if (!TakesLongToPrepare(descriptor)) {
      return ReadInto(Prepare(std::move(descriptor), limits(), shared_->gpus));
    }
    const auto kept = AwaitMemory([] { return std::make_shared<Preparing>(); });
    kept->descriptor = std::move(descriptor);
    const auto prepare = [self = shared_from_this(), kept] {
      kept->incoming = Prepare(std::move(kept->descriptor), self->limits(), self->shared_->gpus);
      AwaitMemory([&] {
        self->shared_->loop->Run([self, kept] { self->ReadInto(std::move(kept->incoming)); });
      });
    };
    bool is_taken = false;
    try {
      is_taken = shared_->allocator.Schedule(prepare);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): as where there is no thread
    }
    // Where the machine gives no thread for it, it takes its time here.
    if (!is_taken) prepare();
  }

  void ReadInto(absl::StatusOr<std::shared_ptr<Incoming>> incoming) {
    if (!incoming.ok()) return Refuse(Receiving(incoming.status()));
    InTensorPipe([&] {
      pipe_->read(std::move((*incoming)->allocation),
                  [self = shared_from_this(), in = *incoming](const tensorpipe::Error& error) {
                    self->shared_->Deliver([self, in, error = Keep(error)] {
                      if (error != nullptr) return self->Finish(self->Lost(*error));
                      if (!in->on_gpus) return self->Deliver(std::move(in->packet));
                      self->AwaitGpus(in);
                    });
                  });
    });
  }

  // What a channel has read for a GPU is only in flight to it.
  void AwaitGpus(std::shared_ptr<Incoming> in) {
    shared_->gpus->AfterArrival(
        in->packet, [self = shared_from_this(), in](const absl::Status& arrived) {
          self->shared_->Deliver([self, in, arrived = absl::Status(arrived)] {
            if (arrived.ok()) return self->Deliver(std::move(in->packet));
            self->Finish(self->Receiving(arrived));
          });
        });
  }

  void Deliver(Packet packet) {
    if (!greeted_) {
      const int gpus = TakeGpus(&packet.bytes);
      if (packet.bytes != kGreeting || !packet.segments.empty()) {
        return Refuse(absl::InvalidArgumentError(
            absl::StrCat(peer_, " speaks another protocol or another version of it")));
      }
      greeted_ = true;
      gpus_there_ = gpus;
      shared_->clock->Cancel(timer_);
    } else if (!closed_) {
      receiver_->OnPacket(std::move(packet));
    }
    ReadNext();
  }

  // Ends it for what has come; of which the other end hears no more than that it is over.
  void Refuse(const absl::Status& why) {
    if (!closed_ && !shared_->closing) DG_LOG(WARNING) << "closing a connection: " << why.message();
    // Only a lack of memory is this end's own.
    const absl::StatusCode code =
        absl::IsResourceExhausted(why) ? why.code() : absl::StatusCode::kUnavailable;
    Finish(MakeStatus(code, [&] { return std::string(why.message()); }));
  }

  void Finish(absl::Status why) {
    InTensorPipe([this] { pipe_->close(); });
    if (!greeted_) shared_->clock->Cancel(timer_);
    if (closed_ || shared_->closing) why = Cancelled();
    // Receivers often own their connection: let go of it, so that both can be destroyed.
    std::exchange(receiver_, nullptr)->OnClosed(std::move(why));
    shared_->Done();
  }

  static absl::Status MakeStatus(absl::StatusCode code, absl::FunctionRef<std::string()> text) {
    return MakeOr(absl::Status(code, ""), [&] { return absl::Status(code, text()); });
  }
  absl::Status Receiving(const absl::Status& why) const {
    return MakeStatus(why.code(),
                      [&] { return absl::StrCat("receiving from ", peer_, ": ", why.message()); });
  }
  absl::Status Cancelled() const {
    return MakeStatus(absl::StatusCode::kCancelled,
                      [this] { return absl::StrCat("closed the connection to ", peer_); });
  }
  absl::Status Lost(const tensorpipe::Error& error) const {
    if (closed_ || shared_->closing) return Cancelled();
    if (late_) {
      return MakeStatus(absl::StatusCode::kUnavailable, [this] {
        return absl::StrCat(peer_, " did not finish connecting within ",
                            absl::FormatDuration(shared_->greeting_patience));
      });
    }
    auto code = absl::StatusCode::kUnavailable;
    if (const auto ours = error.castToType<TextError>(); ours == nullptr) {
      // TensorPipe's own transports give the system's text alone.
      const std::string text = AwaitMemory([&] { return error.what(); });
      if (absl::StrContains(text, "ECONNREFUSED") ||
          absl::StrContains(text, "Connection refused")) {
        code = absl::StatusCode::kNotFound;
      }
    } else if (ours->cause() == TextError::Cause::kExhausted) {
      code = absl::StatusCode::kResourceExhausted;
    } else if (ours->cause() == TextError::Cause::kNobodyListens) {
      code = absl::StatusCode::kNotFound;
    }
    return MakeStatus(code, [&] { return absl::StrCat("lost ", peer_, ": ", Message(error)); });
  }

  // Constant after construction; synchronize themselves.
  const std::shared_ptr<Shared> shared_;
  std::shared_ptr<tensorpipe::Pipe> pipe_;
  const std::string peer_;
  std::atomic<bool> closed_{false};  // by Close()
  std::atomic<bool> late_{false};    // closed because nothing came
  std::atomic<int> gpus_there_{0};

  // Of the read loop only.
  std::shared_ptr<Receiver> receiver_;
  bool greeted_ = false;
  Clock::TimerId timer_ = 0;  // while not greeted
};

// Takes connections until the listener closes. On the transport's threads, one call at a time.
class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  Acceptor(std::shared_ptr<Shared> shared, std::shared_ptr<tensorpipe::Listener> listener,
           Transport::Accept accept)
      : shared_(std::move(shared)), listener_(std::move(listener)), accept_(std::move(accept)) {}

  void Start() {
    shared_->Expect();
    AcceptNext();
  }

 private:
  void AcceptNext() {
    InTensorPipe([this] {
      listener_->accept([self = shared_from_this()](const tensorpipe::Error& error,
                                                    std::shared_ptr<tensorpipe::Pipe> pipe) {
        self->shared_->Deliver([self, error = Keep(error), pipe = std::move(pipe)]() mutable {
          if (error != nullptr) return self->Finish(*error);
          self->Take(std::move(pipe));
          self->AcceptNext();
        });
      });
    });
  }

  void Take(std::shared_ptr<tensorpipe::Pipe> pipe) {
    std::shared_ptr<PipeConnection> connection;
    try {
      // The name is the other end's word for itself.
      std::string peer = absl::StrCat("'", absl::CHexEscape(pipe->getRemoteName().substr(0, 64)),
                                      "' (who connected to us)");
      connection = std::make_shared<PipeConnection>(shared_, std::move(pipe), std::move(peer));
    } catch (const std::bad_alloc&) {  // the pipe closes as it goes
      DG_LOG(WARNING) << "refusing a connection: there is no memory for it";
      return;
    }
    if (auto receiver = accept_(connection)) {
      connection->AwaitGreeting(std::move(receiver));
    } else {
      connection->Close();
    }
  }

  void Finish(const tensorpipe::Error& error) {
    if (!shared_->closing) {
      DG_LOG(ERROR) << shared_->name << " takes no more connections: " << Message(error);
    }
    accept_ = nullptr;
    shared_->Done();
  }

  const std::shared_ptr<Shared> shared_;
  const std::shared_ptr<tensorpipe::Listener> listener_;
  Transport::Accept accept_;
};

class TensorPipeTransport final : public Transport {
 public:
  // `own_clock`: that of the options, if nobody else has it. `loop`: of the sockets if the
  // transport below is our own.
  TensorPipeTransport(TensorPipeOptions options, std::unique_ptr<Clock> own_clock,
                      std::shared_ptr<tensorpipe::Context> context, std::shared_ptr<Loop> loop,
                      std::string name, int gpus)
      : options_(std::move(options)),
        own_clock_(std::move(own_clock)),
        scheme_(Scheme(options_.kind)),
        context_(std::move(context)),
        loop_(std::move(loop)),
        shared_(std::make_shared<Shared>(
            std::move(name),
            PacketLimits{options_.max_packet_bytes, options_.max_segments, /*gpus_here=*/gpus},
            options_.handshake_timeout, options_.clock, options_.gpus.get(), loop_,
            options_.kind == Kind::kSocket)),
        keeps_loop_(loop_->Add(std::make_shared<KeepsLoopRunning>())) {}

  ~TensorPipeTransport() override {
    const Asking asks(this);
    shared_->Close();
    context_->close();
    shared_->AwaitAll();
    shared_->allocator.Join();
    loop_->Remove(keeps_loop_);
    loop_->Close();
    loop_->Join();
    context_->join();
  }

  absl::StatusOr<std::string> Listen(Accept accept) override {
    std::string url = scheme_ + "://";
    if (options_.kind != Kind::kShm) {
      DG_ASSIGN_OR_RETURN(const std::string host, ResolveBindHost(options_.host));
      if (options_.cluster_key.empty() && options_.certificates == nullptr && !IsLoopback(host)) {
        DG_LOG(WARNING) << Name() << " listens on " << host << " without a cluster key ("
                        << kClusterKeySetting << "); see docs/security.md";
      }
      url += host;
    }
    if (listening_.exchange(true)) {
      return absl::FailedPreconditionError(absl::StrCat(Name(), " is listening already"));
    }
    const Asking asks(this);
    absl::StatusOr<std::shared_ptr<tensorpipe::Listener>> listener =
        InTensorPipe([&]() -> absl::StatusOr<std::shared_ptr<tensorpipe::Listener>> {
          try {
            return context_->listen({url});
          } catch (const std::bad_alloc&) {
            throw;
          } catch (const std::exception& e) {  // of a transport, before anything is handed in
            return absl::UnavailableError(
                absl::StrCat(Name(), " cannot listen on ", url, ": ", e.what()));
          }
        });
    if (!listener.ok()) {
      listening_ = false;
      return listener.status();
    }
    std::string address = (*listener)->url(scheme_) + shared_->GpusHere();
    std::make_shared<Acceptor>(shared_, *std::move(listener), std::move(accept))->Start();
    return address;
  }

  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& full_address,
                                                      std::shared_ptr<Receiver> receiver) override {
    std::string address = full_address;
    const int gpus_there = TakeGpus(&address);
    DG_RETURN_IF_ERROR(Annotate(CheckAddress(address), absl::StrCat(Name(), " cannot connect")));
    const Asking asks(this);
    try {
      auto pipe = InTensorPipe([&] { return context_->connect(address); });
      auto connection =
          std::make_shared<PipeConnection>(shared_, std::move(pipe), PublicPart(address));
      connection->Greet(gpus_there, std::move(receiver));
      return connection;
    } catch (const std::bad_alloc&) {  // which says nothing of the other end
      return StatusFromStdException(std::current_exception());
    }
  }

  bool CarriesDevices(const std::string& address) const override {
    std::string rest = address;
    return shared_->limits.gpus_here > 0 && TakeGpus(&rest) > 0;
  }

  // TensorPipe's own addresses do not say where their machine is.
  bool IsOnThisMachine(const std::string& full_address) const override {
    if (options_.kind != Kind::kSocket) return false;
    std::string address = full_address;
    TakeGpus(&address);
    absl::string_view rest = address;
    if (!absl::ConsumePrefix(&rest, scheme_ + "://")) return false;
    const absl::StatusOr<Endpoint> endpoint = ParseEndpoint(rest);
    return endpoint.ok() && IsKnownToShareLoopback(endpoint->place);
  }
  std::shared_ptr<EventLoop> loop() override { return shared_->is_sockets ? loop_ : nullptr; }
  std::string Name() const override { return shared_->name; }

 private:
  absl::Status CheckAddress(absl::string_view address) const {
    absl::string_view rest = address;
    if (!absl::ConsumePrefix(&rest, scheme_ + "://")) {
      return absl::InvalidArgumentError(absl::StrCat("\"", PublicPart(std::string(address)),
                                                     "\" does not start with ", scheme_, "://"));
    }
    if (options_.kind == Kind::kSocket) return ParseEndpoint(rest).status();
    if (options_.kind == Kind::kTcp) return CheckSocketAddress(rest);
    if (rest.empty() || rest.size() > 20 ||
        rest.find_first_not_of("0123456789abcdef") != absl::string_view::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", address, "\" is not shm://<hexadecimal number>"));
    }
    return absl::OkStatus();
  }

  // Constant after construction; synchronize themselves.
  const TensorPipeOptions options_;
  const std::unique_ptr<Clock> own_clock_;  // if none was given
  const std::string scheme_;
  const std::shared_ptr<tensorpipe::Context> context_;
  const std::shared_ptr<Loop> loop_;
  const std::shared_ptr<Shared> shared_;
  const uint64_t keeps_loop_;
  std::atomic<bool> listening_{false};
};

absl::StatusOr<std::shared_ptr<tensorpipe::transport::Context>> NewTransport(
    const TensorPipeOptions& options, std::shared_ptr<Loop>* loop) {
  if (options.kind == Kind::kSocket) {
    SocketOptions socket;
    socket.key = options.cluster_key;
    socket.certificates = options.certificates;
    socket.encrypts_unix = options.encrypts_unix;
    socket.handshake_timeout = options.handshake_timeout;
    socket.acknowledge_timeout = options.acknowledge_timeout;
    socket.max_unauthenticated = options.max_unauthenticated;
    socket.unix_sockets = options.unix_sockets;
    DG_ASSIGN_OR_RETURN(*loop, Loop::Start("dg-sockets", options.clock));
    return NewSocketTransport(*loop, std::move(socket));
  }
  if (!options.cluster_key.empty() || options.certificates != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("TensorPipe's own transport ", Scheme(options.kind),
                     " cannot use a cluster key (", kClusterKeySetting, ") or certificates (",
                     kCertSetting, "): use socket, or leave these out"));
  }
  // It runs only what a thread of TensorPipe's could not deliver itself.
  DG_ASSIGN_OR_RETURN(*loop, Loop::Start("dg-deliver", options.clock));
  return options.kind == Kind::kTcp ? tensorpipe::transport::uv::create()
                                    : tensorpipe::transport::shm::create();
}

absl::StatusOr<std::unique_ptr<Transport>> Create(TensorPipeOptions options) {
  // First: what is below has the loop, which asks it for threads, and may be given up again.
  std::unique_ptr<Clock> own_clock;
  if (options.clock == nullptr) {
    DG_ASSIGN_OR_RETURN(own_clock, NewSystemClock());
    options.clock = own_clock.get();
  }
  const std::string scheme = Scheme(options.kind);
  auto context =
      std::make_shared<tensorpipe::Context>(tensorpipe::ContextOptions().name(options.name));

  std::shared_ptr<Loop> loop;
  DG_ASSIGN_OR_RETURN(auto transport, NewTransport(options, &loop));
  if (!transport->isViable()) {
    return absl::FailedPreconditionError(
        absl::StrCat("TensorPipe's ", scheme, " transport does not work on this machine"));
  }
  context->registerTransport(0, scheme, WithSteadyListeners(std::move(transport)));

  // Higher numbers come first. Always there: two ends that have no channel in common would end the
  // process.
  context->registerChannel(1, "basic", tensorpipe::channel::basic::create());
  std::string channel_name = "basic";
  if (options.channel == TensorPipeOptions::Channel::kCma && options.kind == Kind::kSocket &&
      options.unix_sockets) {
    if (auto cma = NewCmaChannel()) {
      // With the number of what its two ends say to each other.
      context->registerChannel(2, "distgrad cma 2", std::move(cma));
      channel_name = "cma";
    } else {
      DG_LOG(INFO) << "no process may read another's memory on this machine; using basic";
    }
  }
  int gpus = 0;
  if (options.gpus != nullptr) {
    if (auto channel = NewGpuChannel()) {
      // One of the channel's devices is the CPU, which the others serve better.
      gpus = std::min(options.gpus->devices(),
                      static_cast<int>(channel->deviceDescriptors().size()) - 1);
      context->registerChannel(0, "cuda_basic", std::move(channel));
      channel_name += "+cuda_basic";
    }
  }
  return std::make_unique<TensorPipeTransport>(
      std::move(options), std::move(own_clock), std::move(context), std::move(loop),
      absl::StrCat("tensorpipe ", scheme, "+", channel_name), gpus);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> NewTensorPipeTransport(TensorPipeOptions options) {
  const SigpipeBlockedForNewThreads sigpipe_blocked;
  try {
    return Create(std::move(options));
  } catch (const std::exception& e) {
    return absl::ResourceExhaustedError(absl::StrCat("TensorPipe did not start: ", e.what()));
  }
}

}  // namespace distgrad
