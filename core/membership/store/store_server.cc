// Serves the store from one loop over poll(): reads requests and answers them.
#include "core/membership/store/store_server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/descriptors.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/membership/store/tcp_store_protocol.h"

namespace distgrad {
namespace {

constexpr size_t kReadBytes = 64 << 10;
// Before another client is taken in, where there is nothing to take it in with.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(50);
// Of answers that a peer does not read; until it does, it is not read from either.
constexpr size_t kMaxUnread = 4 << 20;
// What a value, a session and a key that is waited for cost beside their bytes, about.
constexpr size_t kEntryBytes = 128;

size_t MostUnauthenticated() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;
  return std::clamp<size_t>(limit.rlim_cur / 2, 64, kMostUnauthenticated);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreServer>> StoreServer::Start(Socket listener,
                                                                StoreServerOptions options) {
  if (options.max_unauthenticated == 0) options.max_unauthenticated = MostUnauthenticated();
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "serving a store");
  }
  std::unique_ptr<StoreServer> server(
      new StoreServer(std::move(listener), Socket(ends[0]), Socket(ends[1]), std::move(options)));
  DG_ASSIGN_OR_RETURN(server->thread_,
                      StartThread("dg/store", [self = server.get()] { self->Run(); }));
  return server;
}

StoreServer::~StoreServer() {
  if (!thread_.joinable()) return;  // it was not started
  shutdown(stop_.fd(), SHUT_RDWR);
  thread_.join();
}

void StoreServer::Run() {
  for (;;) {
    entries_.clear();  // and keeps its memory
    entries_.push_back({wake_.fd(), POLLIN, 0});
    const bool accepts = accept_again_.Passed();
    entries_.push_back({accepts ? listener_.fd() : -1, POLLIN, 0});
    for (const Peer& peer : peers_) {
      const bool reads = peer.unread() < kMaxUnread;
      entries_.push_back(
          {peer.socket.fd(),
           static_cast<short>((reads ? POLLIN : 0) | (peer.unread() > 0 ? POLLOUT : 0)), 0});
    }
    if (poll(entries_.data(), entries_.size(), Patience()) < 0) continue;
    if (entries_[0].revents != 0) return;
    auto next = peers_.begin();
    for (size_t at = 2; at < entries_.size(); ++at) {
      const auto peer = next++;
      const bool stays = GoOn(*peer, entries_[at].revents);
      if (!stays && !peer->ours) --unauthenticated_;
      if (!stays) {
        ForgetWait(*peer);
        peers_.erase(peer);
      } else if (std::exchange(peer->took_step, false)) {
        peer->grace = Deadline::After(options_.grace);
        peers_.splice(peers_.end(), peers_, peer);
      }
    }
    if (entries_[1].revents == 0) continue;
    try {
      Accept();
    } catch (const std::bad_alloc&) {  // the one that was to be taken in comes again
      LogLackOfMemory();
      accept_again_ = Deadline::After(kAcceptPause);
    }
  }
}

bool StoreServer::GoOn(Peer& peer, short events) {
  try {
    bool stays = !peer.over && (peer.ours || !peer.deadline.Passed());
    if (stays && (events & (POLLIN | POLLERR | POLLHUP)) != 0) stays = Read(peer);
    if (stays && peer.wait.has_value() && peer.wait->until.Passed()) EndWait(peer);
    // What it has said, and was not answered while it did not read, is answered now.
    return stays && (peer.unread() == 0 || (Write(peer) && Understand(peer)));
  } catch (const std::bad_alloc&) {  // its client comes again, and repeats what was not answered
    LogLackOfMemory();
    return false;
  }
}

int StoreServer::Patience() const {
  Deadline next = accept_again_.Passed() ? Deadline::Never() : accept_again_;
  for (const Peer& peer : peers_) {
    if (!peer.ours) next = std::min(next, peer.deadline);
    if (peer.wait.has_value()) next = std::min(next, peer.wait->until);
  }
  return next.is_never() ? -1 : PollMilliseconds(next);
}

bool StoreServer::FreeSlot() {
  // One that has said something may have done so long ago: where many come at once their
  // signatures take longer than the grace.
  const auto silent = std::find_if(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !peer.ours && peer.grace.Passed() && !IsReadable(peer.socket.fd());
  });
  if (silent == peers_.end()) return false;
  try {
    refusals_.Add(silent->socket.fd(), silent->handshake,
                  absl::UnavailableError("others wait too"));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it goes all the same
  }
  if (const absl::string_view words = silent->handshake.NoPlace(); silent->unread() == 0) {
    // It fits behind the hello; where it does not the client takes no answer either.
    send(silent->socket.fd(), words.data(), words.size(), MSG_NOSIGNAL);
  }
  peers_.erase(silent);
  --unauthenticated_;
  return true;
}

// Unauthenticated connections are evicted for their slots and descriptors where a client waits for
// one. A crowd that comes at once waits in the listener's queue until those before it are through:
// so no client that is honest and quick is closed for others to come.
void StoreServer::Accept() {
  for (;;) {
    const bool is_full = unauthenticated_ >= options_.max_unauthenticated;
    if (is_full && !IsReadable(listener_.fd())) return;  // nobody waits for a slot
    const bool has_slot = !is_full || FreeSlot();
    const int fd =
        has_slot ? accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
    if (fd < 0) {
      const bool exhausted = has_slot && IsExhaustion(errno);
      if (exhausted && !IsReadable(listener_.fd())) return;
      if (exhausted) FreeSlot();
      if (exhausted || !has_slot) accept_again_ = Deadline::After(kAcceptPause);
      return;
    }
    Socket socket(fd);
    socket.SetNoDelay();
    // A client waits for as long as it likes; one whose machine is gone does not say so.
    socket.SetKeepAlive();
    auto handshake = Handshake::Create(Handshake::Role::kServer, options_.cluster_key, kStoreToken,
                                       options_.certificates != nullptr);
    if (!handshake.ok()) {
      LogInability(handshake.status());
      continue;
    }
    entries_.emplace_back();  // so that the next turn has room for it
    peers_.push_back({std::move(socket), *std::move(handshake), Deadline::After(options_.grace),
                      Deadline::After(options_.handshake_timeout)});
    ++unauthenticated_;
  }
}

bool StoreServer::Read(Peer& peer) {
  char bytes[kReadBytes];
  const absl::Span<char> space =
      peer.tls != nullptr ? peer.tls->InputSpace() : absl::MakeSpan(bytes);
  const ssize_t n = recv(peer.socket.fd(), space.data(), space.size(), 0);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) {
    if (!peer.ours)
      refusals_.Add(peer.socket.fd(), peer.handshake, absl::UnavailableError("it went away"));
    return false;
  }
  if (peer.tls != nullptr) {
    peer.tls->AddInput(static_cast<size_t>(n));
  } else {
    peer.in.append(bytes, static_cast<size_t>(n));
  }
  return Greet(peer) && EstablishTls(peer) && Decrypt(peer) && Understand(peer);
}

bool StoreServer::Write(Peer& peer) {
  if (peer.wire.empty() && peer.tls != nullptr) {
    if (!peer.tls->Write(peer.out).ok()) return false;
    peer.out.clear();
    TakeTlsOutput(peer);
  } else if (peer.wire.empty()) {
    peer.wire.swap(peer.out);
  }
  const ssize_t n = send(peer.socket.fd(), peer.wire.data(), peer.wire.size(), MSG_NOSIGNAL);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  peer.wire.erase(0, static_cast<size_t>(n));
  return true;
}

void StoreServer::TakeTlsOutput(Peer& peer) {
  const absl::string_view output = peer.tls->output();
  peer.wire.append(output);
  peer.tls->DropOutput(output.size());
}

void StoreServer::LogInability(const absl::Status& why) {
  if (!IsWorthALine(++unable_)) return;
  DG_LOG(WARNING) << "the job's store cannot take a connection: " << why << " (" << unable_
                  << " so far)";
}

void StoreServer::LogLackOfMemory() {
  if (!IsWorthALine(++lacks_)) return;
  DG_LOG(WARNING) << "the job's store has closed a connection for want of memory; its client comes "
                     "again ("
                  << lacks_ << " so far)";
}

bool StoreServer::Greet(Peer& peer) {
  while (!peer.handshake.done() && !peer.in.empty()) {
    const size_t size = std::min(peer.in.size(), peer.handshake.wanted());
    if (absl::Status received = peer.handshake.Receive(peer.in.substr(0, size)); !received.ok()) {
      refusals_.Add(peer.socket.fd(), peer.handshake, received);
      return false;
    }
    peer.in.erase(0, size);
    const std::string output = peer.handshake.TakeOutput();
    peer.took_step = peer.took_step || !output.empty();
    peer.wire += output;
  }
  return true;
}

bool StoreServer::EstablishTls(Peer& peer) {
  if (!peer.handshake.done() || peer.ours) return true;
  if (!options_.cluster_key.empty() || options_.certificates != nullptr) {
    if (peer.tls == nullptr) {
      auto tls = TlsSession::Create(peer.handshake, options_.certificates);
      if (!tls.ok()) {
        LogInability(tls.status());
        // With this end's proof the client knows that it is not its key that is refused.
        Write(peer);
        return false;
      }
      peer.tls = *std::move(tls);
      // What came with the end of the handshake.
      const absl::Span<char> space = peer.tls->InputSpace();
      peer.tls->AddInput(peer.in.copy(space.data(), space.size()));
      peer.in.clear();
    }
    const absl::Status status = peer.tls->Establish();
    peer.took_step = peer.took_step || !peer.tls->output().empty();
    TakeTlsOutput(peer);
    if (!status.ok()) {
      refusals_.Add(peer.socket.fd(), peer.handshake, absl::UnauthenticatedError(status.message()));
      // The client is told why, if there is room for it.
      Write(peer);
      return false;
    }
    if (!peer.tls->established()) return true;
  }
  peer.ours = true;
  --unauthenticated_;
  return true;
}

bool StoreServer::Decrypt(Peer& peer) {
  if (peer.tls == nullptr || !peer.ours) return true;
  char bytes[kReadBytes];
  for (;;) {
    const absl::StatusOr<size_t> n = peer.tls->Read(bytes, sizeof(bytes));
    if (!n.ok()) return false;
    if (*n == 0) return true;
    peer.in.append(bytes, *n);
  }
}

bool StoreServer::Understand(Peer& peer) {
  if (!peer.ours) return true;
  size_t done = 0;
  while (done < peer.in.size() && peer.unread() < kMaxUnread) {
    if (peer.wait.has_value()) EndWait(peer);
    const absl::StatusOr<size_t> size = Answer(peer, absl::string_view(peer.in).substr(done));
    if (!size.ok()) return false;
    if (*size == 0) break;
    done += *size;
  }
  peer.in.erase(0, done);
  return true;
}

absl::StatusOr<size_t> StoreServer::Answer(Peer& peer, absl::string_view in) {
  const absl::Status malformed = absl::InvalidArgumentError("no request of this store");
  StoreRequest request;
  DG_ASSIGN_OR_RETURN(const size_t size, DecodeStoreRequest(in, &request));
  // Not waited for to their end: they are known to c10d's server alone.
  if (request.kind == StoreRequestKind::kCompareSet || request.kind == StoreRequestKind::kAdd ||
      request.kind == StoreRequestKind::kDeleteKey) {
    return malformed;
  }
  if (size == 0) return 0;  // the rest is in flight
  WireWriter writer(&peer.out);
  switch (request.kind) {
    case StoreRequestKind::kValidate:
      if (request.number != kStoreMagic) return malformed;
      break;
    case StoreRequestKind::kPing:
      writer.U32(request.number);
      break;
    case StoreRequestKind::kSet:
      DG_RETURN_IF_ERROR(Set(request.key, request.value));
      break;
    case StoreRequestKind::kSession: {
      const absl::StatusOr<bool> known = BeginSession(peer, request.session);
      if (!known.ok() && !absl::IsResourceExhausted(known.status())) return known.status();
      writer.U8(known.ok() ? uint8_t{*known} : kStoreIsFull);
      break;
    }
    case StoreRequestKind::kAddOnce:
    case StoreRequestKind::kSetOnce:
    case StoreRequestKind::kDeleteOnce: {
      if (!peer.session.has_value()) return malformed;
      std::optional<Change>& last = sessions_[*peer.session];
      Change done{request.change, std::nullopt};
      bool has_room = true;
      if (last.has_value() && last->number == request.change) {
        done = *last;
      } else if (request.kind == StoreRequestKind::kAddOnce) {
        const auto sum = Add(request.key, request.amount);
        has_room = sum.ok();
        if (has_room) done.sum = *sum;
      } else if (request.kind == StoreRequestKind::kSetOnce) {
        has_room = Set(request.key, request.value).ok();
      } else {
        Delete(request.key);
      }
      if (has_room) last = done;
      const bool adds = request.kind == StoreRequestKind::kAddOnce;
      writer.U8(!has_room ? kStoreIsFull : uint8_t{!adds || done.sum.has_value()});
      if (adds) writer.I64(done.sum.value_or(0));
      break;
    }
    case StoreRequestKind::kAwait:
      DG_RETURN_IF_ERROR(BeginWait(peer, request.await));
      break;
    default:
      return malformed;
  }
  return size;
}

absl::Status StoreServer::BeginWait(Peer& peer, absl::string_view request) {
  DG_ASSIGN_OR_RETURN(StoreAwait await, DecodeStoreAwait(request));
  const size_t bytes = request.size() + await.seen.size() * kEntryBytes;
  Wait wait{std::move(await.seen), Deadline::After(absl::Milliseconds(await.milliseconds)), bytes};
  if (await.milliseconds == 0 || HasChanged(wait)) {
    Tell(wait, &peer.out);
  } else if (bytes_ + wait.bytes > options_.max_bytes) {
    WireWriter writer(&peer.out);
    writer.U32(sizeof(kStoreFull));
    writer.U32(kStoreFull);
  } else {
    bytes_ += wait.bytes;
    peer.wait = std::move(wait);
    // Where memory lacks in the middle ForgetWait() takes back what there is.
    for (const auto& [key, value] : peer.wait->seen) waiting_[key].insert(&peer);
  }
  return absl::OkStatus();
}

bool StoreServer::HasChanged(const Wait& wait) const {
  return std::any_of(wait.seen.begin(), wait.seen.end(), [&](const auto& entry) {
    const auto found = values_.find(entry.first);
    return found == values_.end() ? entry.second.has_value() : entry.second != found->second;
  });
}

void StoreServer::Tell(const Wait& wait, std::string* out) const {
  std::string answer;
  uint32_t told = 0;
  for (const auto& [key, seen] : wait.seen) {
    if (answer.size() >= kMaxAnswer) break;
    const auto found = values_.find(key);
    AppendStoreValue(found != values_.end() ? &found->second : nullptr, &answer);
    ++told;
  }
  WireWriter head(out);
  head.U32(static_cast<uint32_t>(sizeof(told) + answer.size()));
  head.U32(told);
  head.Raw(answer.data(), answer.size());
}

void StoreServer::EndWait(Peer& peer) {
  Tell(*peer.wait, &peer.out);
  ForgetWait(peer);
}

void StoreServer::ForgetWait(Peer& peer) {
  if (!peer.wait.has_value()) return;
  for (const auto& [key, seen] : peer.wait->seen) {
    const auto entry = waiting_.find(key);
    if (entry == waiting_.end()) continue;  // a key that it has named twice, or not got to
    entry->second.erase(&peer);
    if (entry->second.empty()) waiting_.erase(entry);
  }
  bytes_ -= peer.wait->bytes;
  peer.wait.reset();
}

// Does not throw: the change is done, and whoever made it must not do it again.
void StoreServer::OnChange(absl::string_view key) {
  const auto entry = waiting_.find(key);
  if (entry == waiting_.end()) return;
  bool is_last = false;  // whose wait, when it ends, takes the entry with it
  for (auto next = entry->second.begin(); !is_last;) {
    Peer& peer = **next++;
    is_last = next == entry->second.end();
    if (!HasChanged(*peer.wait)) continue;
    try {
      EndWait(peer);
    } catch (const std::bad_alloc&) {  // its client comes again, and asks anew
      LogLackOfMemory();
      ForgetWait(peer);
      Abandon(peer);
    }
  }
}

void StoreServer::Abandon(Peer& peer) {
  peer.over = true;
  peer.session.reset();
  shutdown(peer.socket.fd(), SHUT_RDWR);  // so that poll() shows it
}

// Nothing that is still on its way in the client's former connection may be done after what comes
// in this one, so that connection ends here.
absl::StatusOr<bool> StoreServer::BeginSession(Peer& peer, uint64_t session) {
  if (peer.session.has_value()) return absl::InvalidArgumentError("a second session");
  for (Peer& other : peers_) {
    if (other.session == session) Abandon(other);
  }
  peer.session = session;
  const auto [entry, is_new] = sessions_.try_emplace(session);
  if (!is_new) return true;
  if (bytes_ + kEntryBytes > options_.max_bytes) {
    sessions_.erase(entry);
    peer.session.reset();
    return absl::ResourceExhaustedError("the store is full");
  }
  bytes_ += kEntryBytes;
  return false;
}

absl::StatusOr<std::optional<int64_t>> StoreServer::Add(absl::string_view key, int64_t amount) {
  int64_t sum = 0;
  const auto found = values_.find(key);
  if (found != values_.end() && !absl::SimpleAtoi(found->second, &sum)) return std::nullopt;
  sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(amount));
  DG_RETURN_IF_ERROR(Set(key, absl::StrCat(sum)));
  return sum;
}

void StoreServer::Delete(absl::string_view key) {
  const auto entry = values_.find(key);
  if (entry == values_.end()) return;
  bytes_ -= kEntryBytes + entry->first.size() + entry->second.size();
  values_.erase(entry);
  OnChange(key);
}

absl::Status StoreServer::Set(absl::string_view key, absl::string_view value) {
  auto entry = values_.find(key);
  const size_t before =
      entry == values_.end() ? 0 : kEntryBytes + key.size() + entry->second.size();
  const size_t bytes = bytes_ - before + kEntryBytes + key.size() + value.size();
  if (bytes > options_.max_bytes) return absl::ResourceExhaustedError("the store is full");
  if (entry == values_.end()) {
    values_.emplace(key, value);
  } else {
    entry->second = std::string(value);
  }
  bytes_ = bytes;
  OnChange(key);
  return absl::OkStatus();
}

}  // namespace distgrad
