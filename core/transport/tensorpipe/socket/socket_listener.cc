// Accepts clients, runs their handshakes, and closes those that take too long.
#include "core/transport/tensorpipe/socket/socket_listener.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"
#include "core/base/descriptors.h"
#include "core/base/exception.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/net/cluster_key.h"
#include "core/transport/tensorpipe/socket/error.h"

namespace distgrad {
namespace {

// How long to wait when the process has no file descriptors left.
constexpr absl::Duration kExhaustedDelay = absl::Milliseconds(100);
// The part of its time that a client is given even when others wait: when a large job starts, all
// of them are honest. And the most that this is: they may also be strangers, who never end.
constexpr int kGracePart = 100;
constexpr absl::Duration kMaxGrace = absl::Seconds(1);
// How long to wait where all that could be evicted have just said something.
constexpr absl::Duration kUnreadDelay = absl::Milliseconds(10);

// Made before main(), for later there may be no memory for them.
const tensorpipe::Error* const kClosed =
    new tensorpipe::Error(MakeError("the listener was closed"));
const absl::Status* const kNoMemory =
    new absl::Status(absl::ResourceExhaustedError("out of memory"));
const absl::Status* const kTooLong = new absl::Status(absl::UnavailableError("it took too long"));

}  // namespace

// Passes on what happens to one of the sockets. Immutable after construction.
class SocketListener::Events final : public Loop::Handler {
 public:
  Events(std::weak_ptr<SocketListener> listener, std::function<void(SocketListener&)> on_events)
      : listener_(std::move(listener)), on_events_(std::move(on_events)) {}

  void OnEvents(uint32_t) override {
    const auto listener = listener_.lock();
    if (listener == nullptr) return;
    listener->strand_.Run([listener, on_events = on_events_] {
      if (!listener->closed_) on_events(*listener);
    });
  }
  void OnLoopClosed() override {
    if (const auto listener = listener_.lock()) listener->Close();
  }

 private:
  const std::weak_ptr<SocketListener> listener_;
  const std::function<void(SocketListener&)> on_events_;
};

SocketListener::SocketListener(std::shared_ptr<Loop> loop, SocketOptions options)
    : loop_(std::move(loop)), options_(std::move(options)), strand_([](std::exception_ptr thrown) {
        // It goes on listening: what failed concerns one connection, which is closed with the task.
        DG_LOG(ERROR) << "cannot take a connection: "
                      << StatusFromStdException(std::move(thrown)).message();
      }) {}

absl::StatusOr<std::shared_ptr<SocketListener>> SocketListener::Listen(
    std::shared_ptr<Loop> loop, const std::string& host, const SocketOptions& options) {
  auto listener = std::make_shared<SocketListener>(std::move(loop), options);
  absl::Cleanup close = [&] { listener->Close(); };
  Endpoint endpoint;
  if (options.unix_sockets) endpoint.place = ThisPlace();
  DG_RETURN_IF_ERROR(FillRandom(endpoint.token.data(), endpoint.token.size()));
  Token name;  // everybody here can see it, so it must say nothing about the token
  DG_RETURN_IF_ERROR(FillRandom(name.data(), name.size()));
  endpoint.name = absl::BytesToHexString(std::string(name.begin(), name.end()));
  listener->token_ = endpoint.token;
  absl::Status opened =
      listener->OpenAcceptor(&listener->tcp_, ListenTcp(host, &endpoint.tcp), false);
  if (opened.ok() && !endpoint.place.empty()) {
    opened = listener->OpenAcceptor(&listener->unix_, ListenUnix(endpoint.name), true);
  }
  DG_RETURN_IF_ERROR(opened);
  listener->address_ = FormatEndpoint(endpoint);
  // Only now, when all is in its place, may events come.
  for (Acceptor* acceptor : {&listener->tcp_, &listener->unix_}) {
    if (!acceptor->fd.valid()) continue;
    DG_RETURN_IF_ERROR(listener->loop_->Watch(acceptor->id, acceptor->fd.get(), EPOLLIN));
  }
  std::move(close).Cancel();
  return listener;
}

absl::Status SocketListener::OpenAcceptor(Acceptor* acceptor, absl::StatusOr<Fd> fd, bool is_unix) {
  DG_RETURN_IF_ERROR(fd.status());
  acceptor->fd = *std::move(fd);
  acceptor->is_unix = is_unix;
  acceptor->id = loop_->Add(std::make_shared<Events>(
      weak_from_this(), [acceptor](SocketListener& self) { self.AcceptClients(*acceptor); }));
  if (acceptor->id == 0) return absl::FailedPreconditionError("the transport is closed");
  return absl::OkStatus();
}

// Who asks does so again when it has had its answer. So it waits for memory, rather than lose the
// question; it may be a thread of TensorPipe's, which would stand still where this threw.
void SocketListener::Accept(Accepted accepted) {
  AwaitMemory([&] {
    std::list<Accepted> one = {accepted};
    strand_.Run([self = shared_from_this(), one = std::move(one)]() mutable {
      self->waiting_.splice(self->waiting_.end(), one);
      if (self->closed_) return self->FailWaiting();
      self->HandOver();
    });
  });
}

void SocketListener::Close() {
  AwaitMemory([this] {
    strand_.Run([self = shared_from_this()] {
      if (std::exchange(self->closed_, true)) return;
      self->full_ = false;
      while (!self->clients_.empty()) self->Forget(self->clients_.begin());
      for (const auto& connection : self->ready_) connection->Close();
      self->ready_.clear();
      self->FailWaiting();
      for (Acceptor* acceptor : {&self->tcp_, &self->unix_}) {
        if (acceptor->fd.valid()) self->loop_->Unwatch(acceptor->fd.get());
        acceptor->fd = Fd();
        if (acceptor->id != 0) self->loop_->Remove(acceptor->id);
      }
    });
  });
}

void SocketListener::FailWaiting() {
  while (!waiting_.empty()) {
    const Accepted accepted = std::move(waiting_.front());
    waiting_.pop_front();
    CallAndLog("what a listener's end was told to", accepted, *kClosed, nullptr);
  }
}

bool SocketListener::FreeSlot(const Acceptor& acceptor) {
  if (clients_.size() < std::max<size_t>(options_.max_unauthenticated, 1)) return true;
  if (!IsReadable(acceptor.fd.get())) return false;
  absl::Duration left = kUnreadDelay;
  if (Evict(absl::UnavailableError("others wait too"), &left)) return true;
  ResumeAfter(left);
  return false;
}

bool SocketListener::Evict(const absl::Status& why, absl::Duration* left) {
  for (auto client = clients_.begin(); client != clients_.end(); ++client) {
    const absl::Duration grace =
        client->step + std::min(options_.handshake_timeout / kGracePart, kMaxGrace) - Loop::Now();
    if (grace > absl::ZeroDuration()) {
      *left = grace;
      break;
    }
    // It may have said it long ago: where many come at once their signatures take longer than that.
    if (IsReadable(client->fd.get())) continue;
    MakeRoom(client, why);
    return true;
  }
  return false;
}

void SocketListener::ResumeAfter(absl::Duration delay) {
  if (full_) return;
  loop_->After(delay, [watch = weak_from_this()] {
    const auto self = watch.lock();
    if (self == nullptr) return;
    AwaitMemory([&] { self->strand_.Run([self] { self->Resume(); }); });
  });
  full_ = true;
}

void SocketListener::Resume() {
  if (closed_ || !std::exchange(full_, false)) return;
  for (Acceptor* acceptor : {&tcp_, &unix_}) {
    if (acceptor->fd.valid()) AcceptClients(*acceptor);
  }
}

void SocketListener::AcceptClients(Acceptor& acceptor) {
  try {
    AcceptAll(acceptor);
  } catch (const std::bad_alloc&) {
    // The loop says once that there are clients, of whom some still wait.
    LogInability(*kNoMemory);
    AwaitMemory([this] { ResumeAfter(kExhaustedDelay); });
  }
}

void SocketListener::AcceptAll(Acceptor& acceptor) {
  while (FreeSlot(acceptor)) {
    Fd fd(accept4(acceptor.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.valid()) {
      AddClient(std::move(fd), acceptor.is_unix);
      continue;
    }
    const int error = errno;
    if (error == EAGAIN) return;
    if (IsExhaustion(error)) {
      if (!IsReadable(acceptor.fd.get())) return;
      if (IsWorthALine(++exhausted_)) {
        DG_LOG(WARNING) << "cannot accept a connection: " << ErrnoText(error) << " (" << exhausted_
                        << " times so far)";
      }
      absl::Duration left = kExhaustedDelay;
      if (Evict(absl::UnavailableError("no file descriptors are left"), &left)) continue;
      // One may become free at any time, anywhere in the process.
      return ResumeAfter(std::min(left, kExhaustedDelay));
    }
    // ECONNABORTED and the like concern one connection, which is gone already.
  }
}

void SocketListener::LogInability(const absl::Status& why) {
  if (!IsWorthALine(++unable_)) return;
  DG_LOG(ERROR) << "cannot take a connection: " << why.message() << " (" << unable_ << " so far)";
}

void SocketListener::AddClient(Fd fd, bool is_unix) {
  if (is_unix) {
    if (absl::Status user = CheckPeerUser(fd); !user.ok()) {
      if (IsWorthALine(++other_users_)) {
        DG_LOG(WARNING) << "refused a connection: " << user.message() << " (" << other_users_
                        << " of other users so far)";
      }
      return;
    }
  } else {
    SetNoDelay(fd);
  }
  auto handshake = Handshake::Create(Handshake::Role::kServer, options_.key, token_,
                                     options_.certificates != nullptr, options_.encrypts_unix);
  if (!handshake.ok()) return LogInability(handshake.status());
  const auto client = clients_.insert(
      clients_.end(),
      Client{std::move(fd), 0, is_unix, *std::move(handshake), nullptr, Loop::Now()});
  absl::Cleanup forget = [&] { Forget(client); };  // should there be no memory for the rest
  // While the client is in the list the loop knows its id; both go together, on our strand.
  client->id = loop_->Add(
      std::make_shared<Events>(weak_from_this(), [id = &client->id](SocketListener& self) {
        // An event may come late, when the client is gone: its id is looked for, not used.
        for (auto it = self.clients_.begin(); it != self.clients_.end(); ++it) {
          if (&it->id == id) return self.GoOn(it);
        }
      }));
  if (client->id == 0) return;
  client->deadline =
      loop_->After(options_.handshake_timeout, [watch = weak_from_this(), id = client->id] {
        const auto self = watch.lock();
        if (self == nullptr) return;
        AwaitMemory([&] {
          self->strand_.Run([self, id] {
            for (auto it = self->clients_.begin(); it != self->clients_.end(); ++it) {
              if (it->id == id) return self->Dismiss(it, *kTooLong);
            }
          });
        });
      });
  const absl::Status watched = loop_->Watch(client->id, client->fd.get(), EPOLLIN | EPOLLRDHUP);
  std::move(forget).Cancel();
  if (!watched.ok()) Dismiss(client, watched);
}

void SocketListener::GoOn(Clients::iterator client) {
  try {
    ShakeHands(client);
  } catch (const std::bad_alloc&) {  // from before it was forgotten; it is told once what has come
    LogInability(*kNoMemory);
    Forget(client);
  }
}

void SocketListener::ShakeHands(Clients::iterator client) {
  Handshake& handshake = client->handshake;
  while (!handshake.done()) {
    char bytes[kHelloBytes];
    const ssize_t n = recv(client->fd.get(), bytes, std::min(handshake.wanted(), sizeof(bytes)), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return Dismiss(client, absl::UnavailableError("it went away"));
    if (absl::Status status = handshake.Receive({bytes, static_cast<size_t>(n)}); !status.ok()) {
      return Dismiss(client, status);
    }
    // It always fits into a new socket, unless the other end plays tricks.
    const std::string output = handshake.TakeOutput();
    if (output.empty()) continue;
    if (send(client->fd.get(), output.data(), output.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(output.size())) {
      return Dismiss(client, absl::UnavailableError("it does not read what we answer"));
    }
    TakeStep(client);
  }
  if (!options_.Encrypts(handshake, client->is_unix)) return Adopt(client);
  if (client->tls == nullptr) {
    auto tls = TlsSession::Create(handshake, options_.certificates);
    if (!tls.ok()) {
      LogInability(tls.status());
      return Forget(client);
    }
    client->tls = *std::move(tls);
  }
  EstablishTls(client);
}

void SocketListener::TakeStep(Clients::iterator client) {
  client->step = Loop::Now();
  clients_.splice(clients_.end(), clients_, client);
}

void SocketListener::EstablishTls(Clients::iterator client) {
  TlsSession& tls = *client->tls;
  for (;;) {
    const absl::Status status = tls.Establish();
    // It always fits into a new socket. The other end is also told why it is refused.
    const absl::string_view output = tls.output();
    const bool sent = output.empty() || send(client->fd.get(), output.data(), output.size(),
                                             MSG_NOSIGNAL) == static_cast<ssize_t>(output.size());
    if (!status.ok()) return Dismiss(client, absl::UnauthenticatedError(status.message()));
    if (!sent) return Dismiss(client, absl::UnavailableError("it does not read what we answer"));
    if (!output.empty()) TakeStep(client);
    tls.DropOutput(output.size());
    if (tls.established()) return Adopt(client);
    const absl::Span<char> space = tls.InputSpace();
    const ssize_t n = recv(client->fd.get(), space.data(), space.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return Dismiss(client, absl::UnavailableError("it went away"));
    tls.AddInput(static_cast<size_t>(n));
  }
}

void SocketListener::Adopt(Clients::iterator client) {
  loop_->Unwatch(client->fd.get());
  if (!client->is_unix) SetAcknowledgeTimeout(client->fd, options_.acknowledge_timeout);
  ready_.emplace_back();  // first, as there may be no memory for it
  absl::Cleanup take_out = [this] { ready_.pop_back(); };
  ready_.back() = SocketConnection::Adopt(loop_, std::move(client->fd), std::move(client->tls));
  std::move(take_out).Cancel();
  Forget(client);
  HandOver();
}

void SocketListener::MakeRoom(Clients::iterator client, const absl::Status& why) {
  // It fits behind the hello; where it does not the client takes no answer either.
  const absl::string_view words = client->handshake.NoPlace();
  send(client->fd.get(), words.data(), words.size(), MSG_NOSIGNAL);
  Dismiss(client, why);
}

void SocketListener::Dismiss(Clients::iterator client, const absl::Status& why) {
  try {
    refusals_.Add(client->fd.get(), client->handshake, why);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it goes all the same
  }
  Forget(client);
}

void SocketListener::Forget(Clients::iterator client) {
  loop_->Cancel(client->deadline);
  if (client->fd.valid()) loop_->Unwatch(client->fd.get());
  loop_->Remove(client->id);
  clients_.erase(client);
  if (!full_) return;
  try {
    strand_.Run([self = shared_from_this()] { self->Resume(); });
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the timer does it
  }
}

void SocketListener::HandOver() {
  while (!ready_.empty() && !waiting_.empty()) {
    const auto connection = std::move(ready_.front());
    ready_.pop_front();
    try {
      // A copy: what TensorPipe asks with can be called once, also where it throws.
      const Accepted accepted = waiting_.front();
      accepted(tensorpipe::Error(), connection);
    } catch (const std::bad_alloc&) {
      connection->Close();
      LogInability(*kNoMemory);
      continue;  // it would not ask again
    }
    waiting_.pop_front();
  }
}

}  // namespace distgrad
