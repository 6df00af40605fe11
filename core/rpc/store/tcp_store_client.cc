// Connects again and repeats a request where that is needed: ExchangeAlone().
#include "core/rpc/store/tcp_store_client.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/random.h"
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

// The time that Set and Add have, which take no deadline.
constexpr absl::Duration kPatience = absl::Seconds(60);

// That nobody listens counts when it was so for this long: a firewall or a service's proxy may say
// it for a moment.
constexpr absl::Duration kRefusals = absl::Seconds(2);

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

absl::Status AwaitPong(Socket& socket, Deadline deadline) {
  uint32_t answer = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&answer, sizeof(answer), deadline));
  if (answer == kNonce) return absl::OkStatus();
  return absl::UnavailableError("what answers there is no store");
}

absl::Status ShakeHands(Socket& socket, const std::string& cluster_key, Deadline deadline) {
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

}  // namespace

TcpStoreClient::TcpStoreClient(TcpStoreClientOptions options)
    : options_(std::move(options)),
      where_(absl::StrCat(options_.host, ":", options_.port)),
      session_(RandomNumber()) {}

absl::StatusOr<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(
    TcpStoreClientOptions options, Deadline deadline) {
  std::unique_ptr<TcpStoreClient> client(new TcpStoreClient(std::move(options)));
  Backoff backoff(deadline);
  absl::Status last;
  do {
    auto socket = client->ConnectOnce(deadline);
    if (socket.ok()) {
      client->socket_ = *std::move(socket);
      return client;
    }
    if (absl::IsUnauthenticated(socket.status())) {
      return Annotate(socket.status(), absl::StrCat("the store at ", client->where_));
    }
    // That the time was over in the midst of an attempt tells less than how one before it ended.
    if (last.ok() || !absl::IsDeadlineExceeded(socket.status())) last = socket.status();
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(
      absl::StrCat("no store answered at ", client->where_, " in time: ", last.message()));
}

absl::StatusOr<Socket> TcpStoreClient::ConnectOnce(Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const std::string known, options_.resolver(options_.host));
  DG_ASSIGN_OR_RETURN(Socket socket, Socket::Connect(known, options_.port, deadline));
  if (options_.cluster_key.has_value()) {
    DG_RETURN_IF_ERROR(ShakeHands(socket, *options_.cluster_key, deadline));
  }
  std::string hello;
  WireWriter writer(&hello);
  AppendRequest(StoreRequest::kValidate, writer);
  writer.U32(kStoreMagic);
  AppendRequest(StoreRequest::kPing, writer);
  writer.U32(kNonce);
  DG_RETURN_IF_ERROR(socket.Send(hello, deadline));
  DG_RETURN_IF_ERROR(AwaitPong(socket, deadline));
  if (options_.cluster_key.has_value()) DG_RETURN_IF_ERROR(BeginSession(socket, deadline));
  return socket;
}

// Tells a server of ours whom it serves, and finds out whether it still is the one that this client
// has spoken to before.
absl::Status TcpStoreClient::BeginSession(Socket& socket, Deadline deadline) {
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kSession, writer);
  writer.U64(session_);
  DG_RETURN_IF_ERROR(socket.Send(request, deadline));
  uint8_t known = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&known, sizeof(known), deadline));
  if (known_ && known == 0) {
    return absl::DataLossError("another store is served there now, which is empty");
  }
  known_ = true;
  return absl::OkStatus();
}

absl::Status TcpStoreClient::Exchange(const std::string& request, Deadline deadline, Repeat repeat,
                                      ReadAnswer read_answer) {
  {
    const auto free = [this] { return !busy_; };
    std::unique_lock<std::mutex> lock(mu_);
    if (!free_.wait_until(lock, deadline.at(), free)) {
      return absl::DeadlineExceededError(absl::StrCat("the store at ", where_, " is busy"));
    }
    if (!gone_.ok()) return gone_;
    busy_ = true;
  }
  bool gone = false;
  absl::Status status = ExchangeAlone(request, deadline, repeat, read_answer, &gone);
  if (!status.ok()) {
    status = Annotate(status, absl::StrCat(gone ? "lost the store at " : "the store at ", where_));
  }
  std::lock_guard<std::mutex> lock(mu_);
  busy_ = false;
  if (gone) gone_ = status;
  // Whoever finds the store gone does not take a turn, and would wake nobody else.
  gone ? free_.notify_all() : free_.notify_one();
  return status;
}

absl::Status TcpStoreClient::ExchangeAlone(const std::string& request, Deadline deadline,
                                           Repeat repeat, ReadAnswer read_answer, bool* gone) {
  Backoff backoff(deadline);
  absl::Status last;  // why the attempt before this one failed
  int closed = 0;     // how many new connections the server has closed instead of an answer
  Deadline refused_until = Deadline::Never();  // from the first refusal on
  do {
    const Deadline until = std::min(deadline, Deadline::After(options_.answer_timeout));
    const bool is_new = !socket_.valid();
    if (is_new) {
      auto socket = ConnectOnce(until);
      if (!socket.ok()) {
        last = socket.status();
        const bool refused = absl::IsFailedPrecondition(last);
        if (refused && refused_until.is_never()) refused_until = Deadline::After(kRefusals);
        if (!refused) refused_until = Deadline::Never();
        *gone = absl::IsDataLoss(last) || absl::IsUnauthenticated(last) ||
                (refused && refused_until.Passed());
        if (*gone) return absl::UnavailableError(last.message());
        continue;
      }
      socket_ = *std::move(socket);
    }
    const Deadline answer_by = repeat == Repeat::kAllowed ? until : deadline;
    absl::Status status = socket_.Send(request, answer_by);
    if (status.ok()) status = read_answer(socket_, answer_by);
    if (status.ok()) return status;
    // Half an answer may be on its way: nobody can use this connection any more.
    socket_ = Socket();
    last = status;
    if (repeat == Repeat::kForbidden) {
      return absl::AbortedError(
          absl::StrCat(status.message(), "; whether it has added to the counter is not known"));
    }
    if (is_new && absl::IsUnavailable(status) && ++closed == 2) {
      return absl::UnavailableError(
          absl::StrCat("it closes the connection on this request (is it full?): ", last.message()));
    }
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(absl::StrCat("it does not answer: ", last.message()));
}

absl::Status TcpStoreClient::Set(const std::string& key, const std::string& value) {
  DG_RETURN_IF_ERROR(CheckEntry(key, value));
  const Deadline deadline = Deadline::After(kPatience);
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kSet, writer);
  AppendKey(key, writer);
  AppendString(value, writer);
  // The server does not answer a set; it answers this when it has done it.
  AppendRequest(StoreRequest::kPing, writer);
  writer.U32(kNonce);
  return Exchange(request, deadline, Repeat::kAllowed, AwaitPong);
}

absl::StatusOr<std::string> TcpStoreClient::Get(const std::string& key, Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  Backoff backoff(deadline);
  do {
    // One question is asked even if the deadline has passed: on a busy machine the server's turn
    // may come late.
    const Deadline until = std::max(deadline, Deadline::After(options_.answer_timeout));
    DG_ASSIGN_OR_RETURN(const bool there, Check(key, until));
    if (there) return Fetch(key, until);
  } while (backoff.Sleep());
  return KeyDidNotCome(key, where_);
}

absl::StatusOr<int64_t> TcpStoreClient::Add(const std::string& key, int64_t amount) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  const Deadline deadline = Deadline::After(kPatience);
  // The server breaks off when told to add to what is no number.
  DG_ASSIGN_OR_RETURN(const bool there, Check(key, deadline));
  int64_t sum = 0;
  if (there) {
    DG_ASSIGN_OR_RETURN(const std::string before, Fetch(key, deadline));
    if (!absl::SimpleAtoi(before, &sum)) return NotACounter(key);
  }
  const bool is_ours = options_.cluster_key.has_value();
  std::string request;
  WireWriter writer(&request);
  AppendRequest(is_ours ? StoreRequest::kAddOnce : StoreRequest::kAdd, writer);
  if (is_ours) writer.U64(++additions_);
  AppendKey(key, writer);
  writer.I64(amount);
  DG_RETURN_IF_ERROR(Exchange(
      request, deadline, is_ours ? Repeat::kAllowed : Repeat::kForbidden,
      [&](Socket& socket, Deadline until) { return socket.Receive(&sum, sizeof(sum), until); }));
  return sum;
}

absl::StatusOr<bool> TcpStoreClient::Check(const std::string& key, Deadline deadline) {
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kCheck, writer);
  writer.U64(1);
  AppendKey(key, writer);
  uint8_t missing = 0;
  const auto read_answer = [&](Socket& socket, Deadline until) -> absl::Status {
    DG_RETURN_IF_ERROR(socket.Receive(&missing, 1, until));
    if (missing > 1) return absl::InternalError("an unknown answer");
    return absl::OkStatus();
  };
  DG_RETURN_IF_ERROR(Exchange(request, deadline, Repeat::kAllowed, read_answer));
  return missing == 0;
}

absl::StatusOr<std::string> TcpStoreClient::Fetch(const std::string& key, Deadline deadline) {
  std::string request;
  WireWriter writer(&request);
  AppendRequest(StoreRequest::kGet, writer);
  AppendKey(key, writer);
  std::string value;
  const auto read_answer = [&](Socket& socket, Deadline until) -> absl::Status {
    uint64_t size = 0;
    DG_RETURN_IF_ERROR(socket.Receive(&size, sizeof(size), until));
    if (size > kMaxStoreValue) return absl::InternalError("a value that is too long");
    value.resize(size);
    return socket.Receive(value.data(), size, until);
  };
  DG_RETURN_IF_ERROR(Exchange(request, deadline, Repeat::kAllowed, read_answer));
  return value;
}

}  // namespace distgrad
