#include "core/rpc/store/tcp_store_client.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/rpc/backoff.h"
#include "core/rpc/store/store_errors.h"
#include "core/rpc/store/store_server.h"
#include "core/rpc/store/tcp_store_protocol.h"
#include "core/rpc/tensorpipe/socket/handshake.h"
#include "core/rpc/wire.h"

namespace distgrad {
namespace {

constexpr uint32_t kNonce = 0x64677264;  // any number: the server sends it back

// For Set and Add, which have no deadline of their own, and for each question that Get asks:
// a server that lives answers at once.
constexpr absl::Duration kPatience = absl::Seconds(60);
// For a question whose deadline has passed: on a busy machine the server's turn may come late, and
// a client that gives up is broken for good.
constexpr absl::Duration kLeastPatience = absl::Seconds(5);

void AppendString(absl::string_view text, WireWriter& writer) {
  writer.U64(text.size());
  writer.Raw(text.data(), text.size());
}

void AppendRequest(StoreRequest request, WireWriter& writer) {
  writer.U8(static_cast<uint8_t>(request));
}

void AppendKey(const std::string& key, WireWriter& writer) {
  AppendString(absl::StrCat("/", key), writer);
}

absl::Status AwaitPong(Socket& socket, absl::Time deadline) {
  uint32_t answer = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&answer, sizeof(answer), deadline));
  if (answer == kNonce) return absl::OkStatus();
  return absl::UnavailableError("what answers there is no store");
}

absl::Status ShakeHands(Socket& socket, const std::string& cluster_key, absl::Time deadline) {
  DG_ASSIGN_OR_RETURN(Handshake handshake,
                      Handshake::Create(Handshake::Role::kClient, cluster_key, kStoreToken));
  std::string bytes;
  while (!handshake.done()) {
    DG_RETURN_IF_ERROR(socket.Send(handshake.TakeOutput(), deadline));
    bytes.resize(handshake.wanted());
    const absl::Status received = socket.Receive(bytes.data(), bytes.size(), deadline);
    DG_RETURN_IF_ERROR(Annotate(received, "the handshake (another cluster key?)"));
    DG_RETURN_IF_ERROR(handshake.Receive(bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<Socket> ConnectOnce(const std::string& host, uint16_t port,
                                   const std::optional<std::string>& cluster_key,
                                   absl::Time deadline, const Resolver& resolver) {
  DG_ASSIGN_OR_RETURN(const std::string known, resolver(host));
  DG_ASSIGN_OR_RETURN(Socket socket, Socket::Connect(known, port, deadline));
  if (cluster_key.has_value()) DG_RETURN_IF_ERROR(ShakeHands(socket, *cluster_key, deadline));
  std::string hello;
  WireWriter writer(&hello);
  AppendRequest(StoreRequest::kValidate, writer);
  writer.U32(kStoreMagic);
  AppendRequest(StoreRequest::kPing, writer);
  writer.U32(kNonce);
  DG_RETURN_IF_ERROR(socket.Send(hello, deadline));
  DG_RETURN_IF_ERROR(AwaitPong(socket, deadline));
  return socket;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(
    const std::string& host, uint16_t port, const std::optional<std::string>& cluster_key,
    absl::Time deadline, const Resolver& resolver) {
  std::string where = absl::StrCat(host, ":", port);
  Backoff backoff(deadline);
  absl::Status last;
  do {
    auto socket = ConnectOnce(host, port, cluster_key, deadline, resolver);
    if (socket.ok()) return std::make_unique<TcpStoreClient>(*std::move(socket), where);
    if (absl::IsUnauthenticated(socket.status())) {
      return Annotate(socket.status(), absl::StrCat("the store at ", where));
    }
    // That the time was over in the midst of an attempt tells less than how one before it ended.
    if (last.ok() || !absl::IsDeadlineExceeded(socket.status())) last = socket.status();
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(
      absl::StrCat("no store answered at ", where, " in time: ", last.message()));
}

absl::Status TcpStoreClient::Exchange(const std::string& request, absl::Time deadline,
                                      absl::FunctionRef<absl::Status(Socket&)> read_answer) {
  {
    const auto free = [this] {
      mu_.AssertReaderHeld();
      return !busy_;
    };
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithDeadline(absl::Condition(&free), deadline)) {
      return absl::DeadlineExceededError(absl::StrCat("the store at ", where_, " is busy"));
    }
    if (!broken_.ok()) return broken_;
    busy_ = true;
  }
  absl::Status status = socket_.Send(request, deadline);
  if (status.ok()) status = read_answer(socket_);
  absl::MutexLock lock(&mu_);
  busy_ = false;
  if (!status.ok()) {
    // Half an answer may be under way: nobody can use this connection any more.
    status = Annotate(status, absl::StrCat("lost the store at ", where_));
    broken_ = absl::UnavailableError(status.message());
  }
  return status;
}

absl::Status TcpStoreClient::Set(const std::string& key, const std::string& value) {
  DG_RETURN_IF_ERROR(CheckEntry(key, value));
  const absl::Time deadline = absl::Now() + kPatience;
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kSet, writer);
  AppendKey(key, writer);
  AppendString(value, writer);
  // The server does not answer a set; it answers this when it has done it.
  AppendRequest(StoreRequest::kPing, writer);
  writer.U32(kNonce);
  return Exchange(request, deadline, [&](Socket& socket) { return AwaitPong(socket, deadline); });
}

absl::StatusOr<std::string> TcpStoreClient::Get(const std::string& key, absl::Time deadline) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  Backoff backoff(deadline);
  do {
    // One question is asked even if the deadline has passed.
    const absl::Time now = absl::Now();
    const absl::Time until = std::min(now + kPatience, std::max(deadline, now + kLeastPatience));
    DG_ASSIGN_OR_RETURN(const bool there, Check(key, until));
    if (there) return Fetch(key, until);
  } while (backoff.Sleep());
  return KeyDidNotCome(key, where_);
}

absl::StatusOr<int64_t> TcpStoreClient::Add(const std::string& key, int64_t amount) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  const absl::Time deadline = absl::Now() + kPatience;
  // The server breaks off when told to add to what is no number.
  DG_ASSIGN_OR_RETURN(const bool there, Check(key, deadline));
  int64_t sum = 0;
  if (there) {
    DG_ASSIGN_OR_RETURN(const std::string before, Fetch(key, deadline));
    if (!absl::SimpleAtoi(before, &sum)) return NotACounter(key);
  }
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kAdd, writer);
  AppendKey(key, writer);
  writer.I64(amount);
  DG_RETURN_IF_ERROR(Exchange(request, deadline, [&](Socket& socket) {
    return socket.Receive(&sum, sizeof(sum), deadline);
  }));
  return sum;
}

absl::StatusOr<bool> TcpStoreClient::Check(const std::string& key, absl::Time deadline) {
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kCheck, writer);
  writer.U64(1);
  AppendKey(key, writer);
  uint8_t missing = 0;
  DG_RETURN_IF_ERROR(Exchange(request, deadline, [&](Socket& socket) -> absl::Status {
    DG_RETURN_IF_ERROR(socket.Receive(&missing, 1, deadline));
    if (missing > 1) return absl::InternalError("an unknown answer");
    return absl::OkStatus();
  }));
  return missing == 0;
}

absl::StatusOr<std::string> TcpStoreClient::Fetch(const std::string& key, absl::Time deadline) {
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kGet, writer);
  AppendKey(key, writer);
  std::string value;
  DG_RETURN_IF_ERROR(Exchange(request, deadline, [&](Socket& socket) -> absl::Status {
    uint64_t size = 0;
    DG_RETURN_IF_ERROR(socket.Receive(&size, sizeof(size), deadline));
    if (size > kMaxStoreValue) return absl::InternalError("a value that is too long");
    value.resize(size);
    return socket.Receive(value.data(), size, deadline);
  }));
  return value;
}

}  // namespace distgrad
