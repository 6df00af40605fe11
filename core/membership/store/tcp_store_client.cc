// Connects again and repeats a request where that is needed: ExchangeAlone().
#include "core/membership/store/tcp_store_client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"
#include "core/membership/store/store_errors.h"
#include "core/membership/store/store_server.h"
#include "core/membership/store/tcp_store_answers.h"
#include "core/membership/store/tcp_store_protocol.h"
#include "core/net/handshake.h"

namespace distgrad {
namespace {

// When one waits for a change and another would wait, too, they take turns, each of so long.
constexpr absl::Duration kTurn = absl::Milliseconds(20);

static_assert(kMaxAwaitKeys * (kMaxStoreKey + 16) < kMaxAwaitBytes);

// That nobody listens, or somebody else, counts when it was so for this long: a firewall or a
// service's proxy may say it for a moment.
constexpr absl::Duration kRefusals = absl::Seconds(2);
// Of the time between two attempts counts no more than this: a process that was stopped meanwhile,
// or cut off, does not know whether it would have been refused.
constexpr absl::Duration kBetweenRefusals = absl::Milliseconds(250);

// Counts for how long a client has been refused in each attempt.
class Refusals {
 public:
  // Returns whether it is to be believed by now.
  bool Add() {
    const auto now = Deadline::Clock::now();
    if (last_.has_value()) {
      lasted_ += std::min(absl::FromChrono(now - *last_), kBetweenRefusals);
    }
    last_ = now;
    return lasted_ >= kRefusals;
  }
  // After an attempt that was not refused.
  void Reset() { *this = Refusals(); }

 private:
  absl::Duration lasted_ = absl::ZeroDuration();
  std::optional<Deadline::Clock::time_point> last_;
};

// What the server answers once it has done all that it was told before.
void AppendPing(std::string* out) {
  AppendStoreRequest({.kind = StoreRequestKind::kPing, .number = kStorePing}, out);
}

absl::Status ShakeHands(Socket& socket, const ClusterKey& cluster_key,
                        const std::shared_ptr<Certificates>& certificates, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(Handshake handshake, Handshake::Create(Handshake::Role::kClient, cluster_key,
                                                             kStoreToken, certificates != nullptr));
  std::string bytes;
  while (!handshake.done()) {
    DG_RETURN_IF_ERROR(socket.Send(handshake.TakeOutput(), deadline));
    bytes.resize(handshake.wanted());
    const absl::Status received = socket.Receive(bytes.data(), bytes.size(), deadline);
    // A server closes the connection on a proof that it does not like, and says no more.
    if (absl::IsUnavailable(received) && handshake.has_hello() && !cluster_key.empty()) {
      return absl::PermissionDeniedError(
          absl::StrCat("it refuses this process's cluster key, as it seems (", received.message(),
                       "): is it the one that the store's server has (", kClusterKeySetting,
                       ")? The log there says more"));
    }
    DG_RETURN_IF_ERROR(Annotate(received, "the handshake"));
    DG_RETURN_IF_ERROR(handshake.Receive(bytes));
  }
  if (cluster_key.empty() && certificates == nullptr) return absl::OkStatus();
  // A connection that ends meanwhile is no refusal: a server is ended and started anew, or makes
  // room for another client, without a word.
  return Annotate(socket.StartTls(handshake, certificates, deadline), "encrypting");
}

}  // namespace

TcpStoreClient::TcpStoreClient(TcpStoreClientOptions options)
    : options_(std::move(options)),
      where_(absl::StrCat(options_.host, ":", options_.port)),
      session_(RandomNumber()),
      nothing_(absl::StrCat("nothing ", RandomNumber(), " ", RandomNumber())),
      interrupt_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

absl::StatusOr<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(
    TcpStoreClientOptions options, Deadline deadline) {
  std::unique_ptr<TcpStoreClient> client(new TcpStoreClient(std::move(options)));
  if (!client->interrupt_.valid()) return absl::ErrnoToStatus(errno, "a store's client");
  Backoff backoff(deadline);
  absl::Status last;
  // One address or server that is silent does not use up all of the time; a busy one gets more of
  // it in each attempt.
  absl::Duration patience = client->options_.answer_timeout;
  Refusals refusals;
  do {
    auto socket = client->ConnectOnce(std::min(deadline, Deadline::After(patience)));
    patience *= 2;
    if (socket.ok()) {
      client->socket_ = *std::move(socket);
      return client;
    }
    // kInternal: OpenSSL here fails, by its machine's settings or for want of memory. It is better
    // said at once than tried again: what is wrong is in this process and not on its way.
    if (absl::IsUnauthenticated(socket.status()) || absl::IsInternal(socket.status())) {
      return Annotate(socket.status(), absl::StrCat("the store at ", client->where_));
    }
    // A server that is crowded, or something on the way, looks like it for a moment.
    if (!absl::IsPermissionDenied(socket.status())) {
      refusals.Reset();
    } else if (refusals.Add()) {
      return absl::UnauthenticatedError(
          absl::StrCat("the store at ", client->where_, ": ", socket.status().message()));
    }
    // That the time was over in the midst of an attempt tells less than how one before it ended.
    if (last.ok() || !absl::IsDeadlineExceeded(socket.status())) last = socket.status();
  } while (backoff.Sleep());
  if (absl::IsResourceExhausted(last)) {
    return Annotate(last, absl::StrCat("the store at ", client->where_));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("no store answered at ", client->where_, " in time: ", last.message()));
}

absl::StatusOr<Socket> TcpStoreClient::ConnectOnce(Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const std::string known, options_.resolver(options_.host));
  DG_ASSIGN_OR_RETURN(Socket socket, Socket::Connect(known, options_.port, deadline));
  if (is_ours()) {
    DG_RETURN_IF_ERROR(ShakeHands(socket, *options_.cluster_key, options_.certificates, deadline));
  }
  std::string hello;
  AppendStoreRequest({.kind = StoreRequestKind::kValidate, .number = kStoreMagic}, &hello);
  AppendPing(&hello);
  DG_RETURN_IF_ERROR(socket.Send(hello, deadline));
  DG_RETURN_IF_ERROR(ReadPong(socket, deadline));
  if (is_ours()) DG_RETURN_IF_ERROR(BeginSession(socket, deadline));
  return socket;
}

// Tells a server of ours whom it serves, and finds out whether it still is the one that this client
// has spoken to before.
absl::Status TcpStoreClient::BeginSession(Socket& socket, Deadline deadline) {
  std::string request;
  AppendStoreRequest({.kind = StoreRequestKind::kSession, .session = session_}, &request);
  DG_RETURN_IF_ERROR(socket.Send(request, deadline));
  DG_ASSIGN_OR_RETURN(const bool known, ReadSessionAnswer(socket, deadline));
  if (known_ && !known) {
    return absl::DataLossError("another store is served there now, which is empty");
  }
  known_ = true;
  return absl::OkStatus();
}

Deadline TcpStoreClient::AtLeastAMoment(Deadline deadline) const {
  return std::max(deadline, Deadline::After(options_.answer_timeout));
}

absl::Status TcpStoreClient::TakeTurn(const Request& request, Deadline deadline) {
  const bool in_haste = !request.has_waited;
  SteadyMutexLock lock(&mu_);
  const uint64_t ticket = ++last_ticket_;
  line_.push_back(ticket);
  in_haste_ += in_haste ? 1 : 0;
  if (busy_) {
    const uint64_t one = 1;  // an eventfd that is full rings all the same
    [[maybe_unused]] const ssize_t rung = write(interrupt_.fd(), &one, sizeof(one));
  }
  const auto is_its_turn = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !busy_ && line_.front() == ticket;
  };
  while (!is_its_turn() && free_.WaitUntil(&mu_, deadline.at())) {
  }
  const bool came = is_its_turn();
  line_.erase(std::find(line_.begin(), line_.end(), ticket));
  in_haste_ -= in_haste ? 1 : 0;
  if (came && gone_.ok()) {
    busy_ = true;
    return absl::OkStatus();
  }
  free_.NotifyAll();  // the next in line may be the first now
  if (came) return gone_;
  return absl::DeadlineExceededError(absl::StrCat("the store at ", where_, " is busy"));
}

absl::Status TcpStoreClient::Exchange(const Request& request, Deadline deadline,
                                      ReadAnswer read_answer) {
  DG_RETURN_IF_ERROR(TakeTurn(request, deadline));
  const absl::Cleanup end_turn = [this] {
    SteadyMutexLock lock(&mu_);
    busy_ = false;
    free_.NotifyAll();
  };
  // Where there is no memory, half an answer may be on its way, as after an error.
  absl::Cleanup break_off = [this] { socket_ = Socket(); };
  bool gone = false;
  absl::Status status = ExchangeAlone(request, deadline, read_answer, &gone);
  std::move(break_off).Cancel();
  if (status.ok()) return status;
  status = Annotate(status, absl::StrCat(gone ? "lost the store at " : "the store at ", where_));
  if (gone) {
    SteadyMutexLock lock(&mu_);
    gone_ = status;
  }
  return status;
}

bool TcpStoreClient::AwaitAnswerOrOthers(Socket& socket, Deadline deadline) {
  const Deadline turn = Deadline::After(kTurn);
  while (!socket.HasInput()) {
    bool others;
    {
      SteadyMutexLock lock(&mu_);
      if (in_haste_ > 0) return true;
      others = !line_.empty();
    }
    if (others && turn.Passed()) return true;
    pollfd entries[] = {{socket.fd(), POLLIN, 0}, {interrupt_.fd(), POLLIN, 0}};
    const int ready =
        poll(entries, 2, PollMilliseconds(others ? std::min(turn, deadline) : deadline));
    if (ready > 0 && entries[0].revents != 0) return false;
    if (ready > 0) {
      uint64_t rings;
      [[maybe_unused]] const ssize_t n = read(interrupt_.fd(), &rings, sizeof(rings));
    }
    if (deadline.Passed()) return false;
  }
  return false;
}

absl::Status TcpStoreClient::ExchangeAlone(const Request& request, Deadline deadline,
                                           ReadAnswer read_answer, bool* gone) {
  Backoff backoff(deadline);
  absl::Status last;  // why the attempt before this one failed
  int closed = 0;     // how many new connections the server has closed instead of an answer
  Refusals refusals;
  do {
    const Deadline until = std::min(deadline, Deadline::After(options_.answer_timeout));
    const bool is_new = !socket_.valid();
    if (is_new) {
      auto socket = ConnectOnce(until);
      if (!socket.ok()) {
        last = socket.status();
        // A handshake that was changed on its way looks as if the key were another one; and a
        // certificate that is refused now may be renewed, here or there, before the deadline.
        const bool refused = absl::IsFailedPrecondition(last) ||
                             (absl::IsUnauthenticated(last) && options_.certificates == nullptr);
        if (!refused) refusals.Reset();
        *gone = absl::IsDataLoss(last) || (refused && refusals.Add());
        if (*gone) return absl::UnavailableError(last.message());
        continue;
      }
      socket_ = *std::move(socket);
      refusals.Reset();
    }
    const Deadline answer_by =
        request.repeat == Repeat::kForbidden
            ? deadline
            : std::min(deadline, Deadline::After(options_.answer_timeout + request.wait));
    absl::Status status = socket_.Send(request.bytes, answer_by);
    if (status.ok()) status = read_answer(socket_, answer_by);
    // That there is no room is an answer, too.
    if (status.ok() || absl::IsResourceExhausted(status)) return status;
    // Half an answer may be on its way: nobody can use this connection any more.
    socket_ = Socket();
    last = status;
    if (request.repeat == Repeat::kForbidden) {
      return absl::AbortedError(
          absl::StrCat(status.message(), "; whether it has added to the counter is not known"));
    }
    // c10d's server closes the connection on what it has no room for.
    if (!is_ours() && is_new && absl::IsUnavailable(status) && ++closed == 2) {
      return absl::ResourceExhaustedError(
          absl::StrCat("it closes the connection on this request (is it full?): ", last.message()));
    }
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(absl::StrCat("it does not answer: ", last.message()));
}

absl::Status TcpStoreClient::Set(const std::string& key, const std::string& value,
                                 Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckEntry(key, value));
  Request request;
  if (is_ours()) {
    AppendStoreRequest(
        {.kind = StoreRequestKind::kSetOnce, .change = ++changes_, .key = key, .value = value},
        &request.bytes);
    return Exchange(request, AtLeastAMoment(deadline), ReadDone);
  }
  // The server does not answer a set.
  AppendStoreRequest({.kind = StoreRequestKind::kSet, .key = key, .value = value}, &request.bytes);
  AppendPing(&request.bytes);
  return Exchange(request, AtLeastAMoment(deadline), ReadPong);
}

absl::StatusOr<int64_t> TcpStoreClient::Add(const std::string& key, int64_t amount,
                                            Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  const Deadline until = AtLeastAMoment(deadline);
  Request request;
  int64_t sum = 0;
  if (!is_ours()) {
    // The server breaks off when told to add to what is no number.
    DG_ASSIGN_OR_RETURN(const std::vector<Value> before, AskC10d({key}, until));
    if (before[0].has_value() && !absl::SimpleAtoi(*before[0], &sum)) return NotACounter(key);
    AppendStoreRequest({.kind = StoreRequestKind::kAdd, .amount = amount, .key = key},
                       &request.bytes);
    request.repeat = Repeat::kForbidden;
    DG_RETURN_IF_ERROR(
        Exchange(request, until, [&](Socket& socket, Deadline answer_by) -> absl::Status {
          DG_ASSIGN_OR_RETURN(sum, ReadNumber(socket, answer_by));
          return absl::OkStatus();
        }));
    return sum;
  }
  AppendStoreRequest(
      {.kind = StoreRequestKind::kAddOnce, .change = ++changes_, .amount = amount, .key = key},
      &request.bytes);
  std::optional<int64_t> counter;
  DG_RETURN_IF_ERROR(
      Exchange(request, until, [&](Socket& socket, Deadline answer_by) -> absl::Status {
        DG_ASSIGN_OR_RETURN(counter, ReadSumOnce(socket, answer_by));
        return absl::OkStatus();
      }));
  if (!counter.has_value()) return NotACounter(key);
  return *counter;
}

absl::Status TcpStoreClient::Delete(const std::string& key, Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  Request request;
  if (is_ours()) {
    AppendStoreRequest({.kind = StoreRequestKind::kDeleteOnce, .change = ++changes_, .key = key},
                       &request.bytes);
    return Exchange(request, AtLeastAMoment(deadline), ReadDone);
  }
  AppendStoreRequest({.kind = StoreRequestKind::kDeleteKey, .key = key}, &request.bytes);
  return Exchange(request, AtLeastAMoment(deadline), [&](Socket& socket, Deadline answer_by) {
    return ReadNumber(socket, answer_by).status();
  });
}

absl::StatusOr<std::vector<Store::Value>> TcpStoreClient::GetEach(Keys keys, Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckKeys(keys));
  const Deadline until = AtLeastAMoment(deadline);
  std::vector<Value> values;
  while (values.size() < keys.size()) {
    const Keys rest = keys.subspan(values.size(), kMaxAwaitKeys);
    DG_ASSIGN_OR_RETURN(std::vector<Value> more, is_ours() ? AskOurs(rest, {}, absl::ZeroDuration(),
                                                                     /*has_waited=*/false, until)
                                                           : AskC10d(rest, until));
    std::move(more.begin(), more.end(), std::back_inserter(values));
  }
  return values;
}

absl::StatusOr<std::vector<Store::Value>> TcpStoreClient::AwaitChange(Keys keys,
                                                                      absl::Span<const Value> seen,
                                                                      Deadline deadline) {
  if (!is_ours()) return Store::AwaitChange(keys, seen, deadline);
  DG_RETURN_IF_ERROR(CheckKeys(keys));
  if (keys.size() > kMaxAwaitKeys) {
    return absl::InvalidArgumentError(absl::StrCat("cannot wait for ", keys.size(),
                                                   " keys at once; the limit is ", kMaxAwaitKeys));
  }
  Backoff backoff(AtLeastAMoment(deadline));
  for (bool has_waited = false;; has_waited = true) {
    const absl::Duration wait = std::min(deadline.Left(), options_.answer_timeout);
    absl::StatusOr<std::vector<Value>> values =
        AskOurs(keys, seen, wait, has_waited, AtLeastAMoment(deadline));
    // There may be room for the wait later. Until then others take their turns.
    if (absl::IsResourceExhausted(values.status()) && backoff.Sleep()) continue;
    DG_RETURN_IF_ERROR(values.status());
    if (values->size() < keys.size()) {
      DG_ASSIGN_OR_RETURN(std::vector<Value> more, GetEach(keys.subspan(values->size()), deadline));
      std::move(more.begin(), more.end(), std::back_inserter(*values));
    }
    const bool same = std::equal(values->begin(), values->end(), seen.begin(), seen.end());
    if (!same || deadline.Passed()) return values;
  }
}

absl::StatusOr<std::vector<Store::Value>> TcpStoreClient::AskOurs(Keys keys,
                                                                  absl::Span<const Value> seen,
                                                                  absl::Duration wait,
                                                                  bool has_waited,
                                                                  Deadline deadline) {
  StoreAwait await;
  await.milliseconds =
      static_cast<uint32_t>(absl::ToInt64Milliseconds(wait + absl::Microseconds(999)));
  for (size_t i = 0; i < keys.size(); ++i) {
    await.seen.emplace_back(keys[i], i < seen.size() ? seen[i] : std::nullopt);
  }
  const std::string body = EncodeStoreAwait(await);
  if (body.size() > kMaxAwaitBytes) {
    return absl::InvalidArgumentError("cannot wait for values that are so long");
  }
  Request request;
  request.wait = wait;
  request.has_waited = has_waited;
  AppendStoreRequest({.kind = StoreRequestKind::kAwait, .await = body}, &request.bytes);
  std::vector<Value> values;
  const auto read_answer = [&](Socket& socket, Deadline until) -> absl::Status {
    const bool for_others = wait > absl::ZeroDuration() && AwaitAnswerOrOthers(socket, until);
    if (for_others) {
      // The server then answers at once, if it has not done so.
      std::string ping;
      AppendPing(&ping);
      DG_RETURN_IF_ERROR(socket.Send(ping, until));
    }
    absl::StatusOr<std::vector<Value>> answer = ReadAwaitAnswer(socket, keys.size(), until);
    // All of it, so that the next request finds a connection on which nothing is on its way.
    if (for_others && (answer.ok() || absl::IsResourceExhausted(answer.status()))) {
      DG_RETURN_IF_ERROR(ReadPong(socket, until));
    }
    DG_RETURN_IF_ERROR(answer.status());
    values = *std::move(answer);
    return absl::OkStatus();
  };
  DG_RETURN_IF_ERROR(Exchange(request, deadline, read_answer));
  return values;
}

// A comparison with what no key holds is how c10d's server says in one answer whether a key is
// there and what it holds: its kGet breaks the connection where there is nothing, and what an
// earlier question has found may be deleted since.
absl::StatusOr<std::vector<Store::Value>> TcpStoreClient::AskC10d(Keys keys, Deadline deadline) {
  Request request;
  for (const std::string& key : keys) {
    AppendStoreRequest({.kind = StoreRequestKind::kCompareSet,
                        .key = key,
                        .expected = nothing_,
                        .value = nothing_},
                       &request.bytes);
  }
  std::vector<Value> values;
  const auto read_answer = [&](Socket& socket, Deadline until) -> absl::Status {
    DG_ASSIGN_OR_RETURN(values, ReadComparedValues(socket, keys.size(), nothing_, until));
    return absl::OkStatus();
  };
  DG_RETURN_IF_ERROR(Exchange(request, deadline, read_answer));
  return values;
}

}  // namespace distgrad
