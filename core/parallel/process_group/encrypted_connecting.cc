// How the ranks of an encrypted group connect, and find out who has gone meanwhile.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/net/address.h"
#include "core/parallel/process_group/encrypted_context.h"
#include "core/transport/tensorpipe/socket/error.h"

namespace distgrad {
namespace {

using Error = tensorpipe::Error;

// The rank that speaks, the one that it takes the other for, the size of the group and its id.
constexpr size_t kHelloBytesOfRank = 3 * sizeof(uint32_t) + std::tuple_size_v<Digest>;
// What follows the answer to a hello: the rank that has answered is connected to all ranks. It says
// so in both directions, so that who sees the end of either has seen it before.
constexpr char kHasAll = 'a';
// How often it is asked whether another rank has failed while this one waits for it: at first, and
// at most. All ranks ask, and who has gone is noticed without.
constexpr absl::Duration kFirstAsk = absl::Milliseconds(200), kLastAsk = absl::Seconds(2);
// The time until another attempt to connect: at first, and at most.
constexpr absl::Duration kFirstRetry = absl::Milliseconds(10), kLastRetry = absl::Seconds(1);

std::string AddressKey(int rank) { return absl::StrCat("encrypted/", rank); }

}  // namespace

std::string EncryptedContext::Hello(int from, int to) const {
  std::string hello;
  WireWriter writer(&hello);
  writer.U32(static_cast<uint32_t>(from));
  writer.U32(static_cast<uint32_t>(to));
  writer.U32(static_cast<uint32_t>(size));
  writer.Raw(options_.group_id.data(), options_.group_id.size());
  return hello;
}

absl::StatusOr<int> EncryptedContext::RankOfHello(absl::string_view hello) const {
  const uint32_t from = WireReader(hello).U32();
  if (from < static_cast<uint32_t>(size) && from != static_cast<uint32_t>(rank) &&
      hello == Hello(static_cast<int>(from), rank)) {
    return static_cast<int>(from);
  }
  return absl::InvalidArgumentError(absl::StrCat("it is ", Describe(hello)));
}

std::string EncryptedContext::Describe(absl::string_view hello) const {
  WireReader reader(hello);
  const uint32_t from = reader.U32(), to = reader.U32(), of = reader.U32();
  Digest group_id = {};
  reader.Raw(group_id.data(), group_id.size());
  return absl::StrCat("rank ", from, " of ", of,
                      group_id == options_.group_id ? "" : " of another group",
                      ", which looks for rank ", to);
}

absl::Status EncryptedContext::Connect() {
  const Deadline deadline = Deadline::After(options_.connect_timeout);
  DG_ASSIGN_OR_RETURN(const std::string host, ResolveBindHost(options_.host));
  DG_ASSIGN_OR_RETURN(loop_, Loop::Start("dg-gloo"));
  SocketOptions socket;
  socket.key = options_.cluster_key;
  socket.certificates = options_.certificates;
  socket.unix_sockets = false;
  // The ranks alone, however many there are, never close each other's connections.
  socket.max_unauthenticated += static_cast<size_t>(size);
  DG_ASSIGN_OR_RETURN(listener_, SocketListener::Listen(loop_, host, socket));
  AcceptNext();
  DG_RETURN_IF_ERROR(options_.store->Set(AddressKey(rank), listener_->address(), deadline));
  DG_RETURN_IF_ERROR(OpenAll(deadline));
  DG_RETURN_IF_ERROR(AwaitOpen(deadline));
  listener_->Close();
  return AwaitConnected(deadline);
}

absl::Status EncryptedContext::OpenAll(Deadline deadline) {
  std::vector<int> missing;
  // Not all begin with the same one.
  for (int i = 1; i < size; ++i) missing.push_back((rank + i) % size);
  while (!missing.empty()) {
    std::vector<std::string> keys;
    keys.reserve(missing.size());
    for (const int other : missing) keys.push_back(AddressKey(other));
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> addresses,
                        options_.store->GetEach(keys, deadline));
    std::vector<int> still;
    for (size_t i = 0; i < missing.size(); ++i) {
      const int other = missing[i];
      if (!addresses[i].has_value()) {
        still.push_back(other);
        continue;
      }
      absl::StatusOr<Endpoint> endpoint = ParseEndpoint(*addresses[i]);
      if (!endpoint.ok()) return Annotate(endpoint.status(), absl::StrCat("rank ", other));
      {
        absl::MutexLock lock(&mu_);
        peers_[other].endpoint = *std::move(endpoint);
      }
      Open(other);
    }
    missing = std::move(still);
    if (missing.empty()) break;
    const absl::StatusOr<std::string> next =
        options_.store->Get(AddressKey(missing[0]), std::min(deadline, Deadline::After(kFirstAsk)));
    if (next.ok()) continue;
    if (!absl::IsNotFound(next.status())) return next.status();
    DG_RETURN_IF_ERROR(FirstLoss());
    DG_RETURN_IF_ERROR(options_.failed_elsewhere());
    if (deadline.Passed()) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", missing[0], " did not say at which address it listens"));
    }
  }
  return absl::OkStatus();
}

void EncryptedContext::Open(int other) {
  SocketOptions socket;
  socket.key = options_.cluster_key;
  socket.certificates = options_.certificates;
  socket.unix_sockets = false;
  socket.handshake_timeout = options_.connect_timeout;
  Endpoint endpoint;
  {
    absl::MutexLock lock(&mu_);
    endpoint = peers_[other].endpoint;
  }
  const auto out = SocketConnection::Connect(loop_, std::move(endpoint), socket);
  bool is_over;
  {
    absl::MutexLock lock(&mu_);
    is_over = !aborted_.ok();
    peers_[other].out = out;
    ++peers_[other].attempts;
  }
  if (is_over) return out->Close();
  out->Write(Hello(rank, other), nullptr, 0, [](const Error&) {});  // the read has the same error
  const auto answer = std::make_shared<std::array<char, kHelloBytesOfRank>>();
  out->Read(answer->data(), answer->size(),
            [this, other, out, answer](const Error& error, auto, auto) {
              if (error) return OnOutEnded(other, out, error);
              OnAnswer(other, out, {answer->data(), answer->size()});
            });
}

void EncryptedContext::OnAnswer(int other, const std::shared_ptr<SocketConnection>& out,
                                absl::string_view answer) {
  if (answer != Hello(other, rank)) {
    return OnOutLost(other, out,
                     absl::StrCat("at its address there is ", Describe(answer),
                                  ": has somebody changed the store?"));
  }
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_[other];
    if (peer.out != out) return;
    peer.welcome = true;
    peer.last_trouble.clear();
    WakeConnecting();
  }
  const auto more = std::make_shared<char>();
  out->Read(more.get(), 1, [this, other, out, more](const Error& error, auto, auto) {
    if (error) return OnOutEnded(other, out, error);
    if (*more != kHasAll) return OnOutLost(other, out, "it says what no rank says");
    {
      absl::MutexLock lock(&mu_);
      peers_[other].has_all = true;
      WakeConnecting();
    }
    // Nothing more comes on this connection but its end.
    out->Read(more.get(), 1, [this, other, out, more](const Error& end, auto, auto) {
      OnOutLost(other, out, end ? end.what() : "it sends on a connection that is not its own");
    });
  });
}

void EncryptedContext::OnOutEnded(int other, const std::shared_ptr<SocketConnection>& out,
                                  const Error& error) {
  const auto text = error.castToType<TextError>();
  // It listens until this rank is connected to it.
  if (text != nullptr && text->cause() == TextError::Cause::kNobodyListens) {
    return OnOutLost(other, out,
                     absl::StrCat("it does not listen any more (", error.what(),
                                  "): it has ended, or given up"));
  }
  // The keys have been compared before; a certificate that is not accepted shows here alone.
  const bool is_refusal = text != nullptr && (text->cause() == TextError::Cause::kRefused ||
                                              text->cause() == TextError::Cause::kRefuses);
  bool is_over;
  absl::Duration pause;
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_[other];
    if (peer.out != out) return;
    // One that is refused, here or there, may be from somebody on the way, or be replaced just now:
    // one more attempt shows whether it is the rank's own.
    const bool again = is_refusal && std::exchange(peer.was_refusal, true);
    is_over = all_open_ || !aborted_.ok() || again;
    if (!is_over) {
      // It was closed for the sake of others, perhaps, or something on its way has changed a byte.
      peer.out = nullptr;
      peer.welcome = false;
      peer.last_trouble = error.what();
      pause = std::min(kFirstRetry * (int64_t{1} << std::min(peer.attempts, 16)), kLastRetry);
    }
  }
  if (is_over) return OnOutLost(other, out, error.what());
  out->Close();
  loop_->After(pause, [this, other] { Open(other); });
}

absl::Status EncryptedContext::FirstLoss() {
  absl::MutexLock lock(&mu_);
  for (const Peer& peer : peers_) {
    DG_RETURN_IF_ERROR(peer.out_lost);
    DG_RETURN_IF_ERROR(peer.in_lost);
  }
  return aborted_;
}

absl::Status EncryptedContext::AwaitOpen(Deadline deadline) {
  return AwaitEach(
      [](const Peer& peer) -> absl::StatusOr<bool> {
        // Also of one that was connected before it went.
        DG_RETURN_IF_ERROR(peer.out_lost);
        DG_RETURN_IF_ERROR(peer.in_lost);
        return peer.IsOpen();
      },
      options_.failed_elsewhere, deadline);
}

absl::Status EncryptedContext::AwaitConnected(Deadline deadline) {
  std::vector<std::shared_ptr<SocketConnection>> ins, outs;
  {
    absl::MutexLock lock(&mu_);
    for (const Peer& peer : peers_) {
      if (peer.in != nullptr) ins.push_back(peer.in);
      if (peer.out != nullptr) outs.push_back(peer.out);
    }
  }
  for (const auto& in : ins) {
    in->Write(absl::string_view(&kHasAll, 1), nullptr, 0, [](const Error&) {});
  }
  for (const auto& out : outs) {
    out->Write(Head(Kind::kHasAll, 0, 0), nullptr, 0, [](const Error&) {});
  }
  // What one has said before it went counts, and so nobody asks whether one has failed meanwhile.
  return AwaitEach(
      [](const Peer& peer) -> absl::StatusOr<bool> {
        if (peer.has_all) return true;
        DG_RETURN_IF_ERROR(peer.out_lost);
        DG_RETURN_IF_ERROR(peer.in_lost);
        return false;
      },
      [] { return absl::OkStatus(); }, deadline);
}

absl::Status EncryptedContext::AwaitEach(absl::FunctionRef<absl::StatusOr<bool>(const Peer&)> check,
                                         absl::FunctionRef<absl::Status()> ask, Deadline deadline) {
  absl::Duration interval = kFirstAsk;
  Deadline next_ask = Deadline::After(interval);
  for (;;) {
    Sleeper sleeper;
    int missing = -1;
    std::string trouble;
    {
      absl::MutexLock lock(&mu_);
      DG_RETURN_IF_ERROR(aborted_);
      for (int other = 0; other < size; ++other) {
        if (other == rank) continue;
        DG_ASSIGN_OR_RETURN(const bool here, check(peers_[other]));
        if (here) continue;
        missing = other;
        trouble = peers_[other].last_trouble;
      }
      if (missing < 0) {
        all_open_ = true;
        return absl::OkStatus();
      }
      connecting_ = &sleeper;
    }
    const bool late = deadline.Passed();
    if (!late) sleeper.Sleep(std::min(deadline, next_ask));
    {
      absl::MutexLock lock(&mu_);
      connecting_ = nullptr;
    }
    // Not each time that a rank has come: all of them would ask of all.
    if (late || next_ask.Passed()) {
      DG_RETURN_IF_ERROR(ask());
      interval = std::min(2 * interval, kLastAsk);
      next_ask = Deadline::After(interval);
    }
    if (late) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", missing,
                                                      " and this one are not connected yet",
                                                      trouble.empty() ? "" : ": ", trouble));
    }
  }
}

void EncryptedContext::WakeConnecting() {
  if (connecting_ != nullptr) connecting_->Wake();
}

void EncryptedContext::AcceptNext() {
  listener_->Accept([this](const Error& error, std::shared_ptr<SocketConnection> connection) {
    if (error) return;  // it has been closed: all are connected, or this is the end
    Accept(std::move(connection));
    AcceptNext();
  });
}

void EncryptedContext::Accept(std::shared_ptr<SocketConnection> connection) {
  const auto hello = std::make_shared<std::array<char, kHelloBytesOfRank>>();
  SocketConnection& from = *connection;
  from.Read(hello->data(), hello->size(),
            [this, connection = std::move(connection), hello](const Error& error, auto, auto) {
              // Who goes before it has said who it is may come again.
              if (error) return;
              const absl::string_view said(hello->data(), hello->size());
              const absl::StatusOr<int> other = RankOfHello(said);
              // Who is here is also told to one that has come to the wrong place, by which it knows
              // that: it has the cluster key. And before anything else is said here, as it is once
              // the rank is admitted.
              const auto from = static_cast<int>(WireReader(said).U32());
              connection->Write(Hello(rank, from), nullptr, 0, [connection, other](const Error&) {
                if (!other.ok()) connection->Close();
              });
              if (!other.ok()) {
                DG_LOG(WARNING) << "rank " << rank << " of a process group refused a connection: "
                                << other.status().message();
              } else if (Admit(connection, *other)) {
                ReadHead(*other, connection);
              } else {
                connection->Close();
              }
            });
}

bool EncryptedContext::Admit(const std::shared_ptr<SocketConnection>& connection, int other) {
  std::shared_ptr<SocketConnection> former;
  {
    absl::MutexLock lock(&mu_);
    Peer& peer = peers_[other];
    if (!aborted_.ok() || all_open_) return false;
    former = std::exchange(peer.in, connection);
    WakeConnecting();
  }
  // A rank comes again if it has not seen that it was welcome.
  if (former != nullptr) former->Close();
  return true;
}

}  // namespace distgrad
