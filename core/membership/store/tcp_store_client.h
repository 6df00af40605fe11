// The client of a store that is served over TCP: by worker 0 (store_server.h), or by torchrun's
// agent with c10d's TCPStore. The protocol: tcp_store_protocol.h.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_CLIENT_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_CLIENT_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/steady_mutex.h"
#include "core/membership/store.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/net/socket.h"

namespace distgrad {

struct TcpStoreClientOptions {
  std::string host;
  uint16_t port = 0;
  // The cluster key; it may be empty. Without one (nullopt) the server is c10d's, and there is no
  // handshake.
  std::optional<ClusterKey> cluster_key;
  std::shared_ptr<Certificates> certificates = nullptr;  // of no use to c10d's
  Resolver resolver;
  // The time that the server may take for one answer before the client tries another connection.
  absl::Duration answer_timeout;
};

// Thread-safe.
//
// It survives the loss of its connection and a server that is silent for a while: it connects again
// and repeats the request for as long as its caller has time. Only when nothing listens at the
// server's address any more, or when the server has forgotten this client, is the store lost.
//
// All threads share one connection, and take turns in the order in which they come. One that waits
// for a change gives the connection up when another needs it, and asks again in its next turn.
class TcpStoreClient final : public Store {
 public:
  static absl::StatusOr<std::unique_ptr<TcpStoreClient>> Connect(TcpStoreClientOptions options,
                                                                 Deadline deadline);

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override;
  absl::Status Delete(const std::string& key, Deadline deadline) override;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override;
  // Up to kMaxAwaitKeys. c10d's server is asked again and again: it can hold back an answer until
  // all of several keys are there, and is told nothing else meanwhile.
  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override;

 private:
  // Whether the server may get a request twice. Ours may get any: it knows what it has done. c10d's
  // may, but for additions; a value that it gets twice may take the place of a newer one.
  enum class Repeat { kAllowed, kForbidden };
  using ReadAnswer = absl::FunctionRef<absl::Status(Socket&, Deadline deadline)>;

  struct Request {
    std::string bytes;
    Repeat repeat = Repeat::kAllowed;
    // The time that the server may hold back its answer, for there is nothing to tell.
    absl::Duration wait = absl::ZeroDuration();
    bool has_waited =
        false;  // in an earlier turn, so that a thread that waits need not give way at once
  };

  explicit TcpStoreClient(TcpStoreClientOptions options);

  bool is_ours() const { return options_.cluster_key.has_value(); }
  // Returns the deadline of a request; in the past, too, a server has some seconds to answer.
  Deadline AtLeastAMoment(Deadline deadline) const;

  // Sends the request and reads what answers it, when it is this thread's turn.
  absl::Status Exchange(const Request& request, Deadline deadline, ReadAnswer read_answer);
  absl::Status TakeTurn(const Request& request, Deadline deadline);
  // Does the same on the thread whose turn it is. Sets *gone if the store is lost for good.
  absl::Status ExchangeAlone(const Request& request, Deadline deadline, ReadAnswer read_answer,
                             bool* gone);
  // Waits, on the thread whose turn it is, until there is something to read or another thread needs
  // the connection. Returns whether it is the latter.
  bool AwaitAnswerOrOthers(Socket& socket, Deadline deadline);
  absl::StatusOr<Socket> ConnectOnce(Deadline deadline);
  absl::Status BeginSession(Socket& socket, Deadline deadline);
  // Return the values of the first of these keys. `wait`: once they are not those that were `seen`.
  absl::StatusOr<std::vector<Value>> AskOurs(Keys keys, absl::Span<const Value> seen,
                                             absl::Duration wait, bool has_waited,
                                             Deadline deadline);
  absl::StatusOr<std::vector<Value>> AskC10d(Keys keys, Deadline deadline);

  // Constant after construction.
  const TcpStoreClientOptions options_;
  const std::string where_;
  const uint64_t session_;
  const std::string nothing_;  // what no key of c10d's holds
  const Socket interrupt_;     // an eventfd: the thread whose turn it is checks for others

  SteadyMutex mu_;
  SteadyCondVar free_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // a thread has the turn
  uint64_t last_ticket_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<uint64_t> line_ ABSL_GUARDED_BY(mu_);  // tickets of threads that wait for their turn
  int in_haste_ ABSL_GUARDED_BY(mu_) = 0;  // of these, threads that have not had a turn yet
  absl::Status gone_ ABSL_GUARDED_BY(mu_);

  std::atomic<uint64_t> changes_{0};  // that this client has asked for

  // Used by the thread whose turn it is.
  Socket socket_;       // invalid between two connections
  bool known_ = false;  // the server has heard of this session
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_CLIENT_H_
