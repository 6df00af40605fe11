#include "core/rpc/store/tcp_store_client.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/rpc/store/backoff.h"
#include "core/rpc/store/store_errors.h"
#include "core/rpc/wire.h"

namespace distgrad {
namespace {

enum Request : uint8_t { kValidate = 0, kSet = 1, kGet = 3, kAdd = 4, kCheck = 5, kPing = 13 };

constexpr uint32_t kMagic = 0x3C85F7CE;
constexpr uint32_t kNonce = 0x64677264;  // any number: the server sends it back

// For Set and Add, which have no deadline of their own, and for each question that Get asks:
// a server that lives answers at once.
constexpr absl::Duration kPatience = absl::Seconds(60);

void AppendString(absl::string_view text, WireWriter& writer) {
  writer.U64(text.size());
  writer.Raw(text.data(), text.size());
}

// c10d's clients put this before every key, so that its own keys are apart.
void AppendKey(const std::string& key, WireWriter& writer) {
  AppendString(absl::StrCat("/", key), writer);
}

absl::Status AwaitPong(Socket& socket, absl::Time deadline) {
  uint32_t answer = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&answer, sizeof(answer), deadline));
  if (answer == kNonce) return absl::OkStatus();
  return absl::UnavailableError("what answers there is no c10d store");
}

absl::StatusOr<Socket> ConnectOnce(const std::string& host, uint16_t port, absl::Time deadline) {
  DG_ASSIGN_OR_RETURN(Socket socket, Socket::Connect(host, port, deadline));
  std::string hello;
  WireWriter writer(&hello);
  writer.U8(kValidate);
  writer.U32(kMagic);
  writer.U8(kPing);
  writer.U32(kNonce);
  DG_RETURN_IF_ERROR(socket.Send(hello, deadline));
  DG_RETURN_IF_ERROR(AwaitPong(socket, deadline));
  return socket;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(const std::string& host,
                                                                        uint16_t port,
                                                                        absl::Time deadline) {
  std::string where = absl::StrCat(host, ":", port);
  Backoff backoff(deadline);
  absl::Status last;
  do {
    auto socket = ConnectOnce(host, port, deadline);
    if (socket.ok()) return std::make_unique<TcpStoreClient>(*std::move(socket), where);
    last = socket.status();
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
  writer.U8(kSet);
  AppendKey(key, writer);
  AppendString(value, writer);
  // The server does not answer a set; it answers this when it has done it.
  writer.U8(kPing);
  writer.U32(kNonce);
  return Exchange(request, deadline, [&](Socket& socket) { return AwaitPong(socket, deadline); });
}

absl::StatusOr<std::string> TcpStoreClient::Get(const std::string& key, absl::Time deadline) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  Backoff backoff(deadline);
  do {
    // One question is asked even if the deadline has passed.
    const absl::Time now = absl::Now();
    const absl::Time until = std::min(now + kPatience, std::max(deadline, now + absl::Seconds(1)));
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
  writer.U8(kAdd);
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
  writer.U8(kCheck);
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
  writer.U8(kGet);
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
