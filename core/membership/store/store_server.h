// Serves a store to the workers of a job: what worker 0 does where no launcher serves one.
//
// A client first shakes hands as workers do (core/net/handshake.h); then it speaks the protocol of
// tcp_store_client.h.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_STORE_SERVER_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_STORE_SERVER_H_

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/wire.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"
#include "core/net/refusal_log.h"
#include "core/net/socket.h"
#include "core/net/tls.h"

namespace distgrad {

// The token in the place of that of a listener's address: a store's address has none, and a proof
// for a store is none for a worker.
inline constexpr Token kStoreToken = {'d', 'i', 's', 't', 'g', 'r', 'a', 'd', ' ', 's', 't', 'o'};

// So many clients at most that have not shown that they are ours: the loop looks at each of them;
// and where certificates alone say who belongs to the job each gets as far as TLS, which takes up
// to 140 KB.
inline constexpr size_t kMostUnauthenticated = 1024;

struct StoreServerOptions {
  ClusterKey cluster_key = {};
  std::shared_ptr<Certificates> certificates = nullptr;
  // Connections that have not shown that they are ours. For one more that one is closed whose last
  // step of the handshake is the oldest, if it is older than `grace`; otherwise the one more waits
  // in the listener's queue. 0: half of the descriptors that this process may have, and
  // kMostUnauthenticated at most.
  size_t max_unauthenticated = 0;
  absl::Duration grace = absl::Seconds(1);
  absl::Duration handshake_timeout = absl::Seconds(10);
  // The memory for keys, values, sessions and waits, about. What would take more is refused, and
  // the client told so; or it loses its connection, where what it asks has no answer.
  size_t max_bytes = 256 << 20;
};

// Runs on a thread of its own until it is destroyed.
class StoreServer {
 public:
  static absl::StatusOr<std::unique_ptr<StoreServer>> Start(Socket listener,
                                                            StoreServerOptions options);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  // Keys that a client waits for a change of.
  struct Wait {
    std::vector<std::pair<std::string, std::optional<std::string>>> seen;
    Deadline until;
    size_t bytes;
  };
  struct Peer {
    Socket socket;
    Handshake handshake;
    Deadline grace;     // from then on it may be evicted for another
    Deadline deadline;  // to be one of ours
    bool ours = false;
    bool took_step = false;  // of its handshake, by which its grace begins anew
    std::optional<Wait> wait = {};
    std::optional<uint64_t> session = {};  // none: c10d's protocol alone
    bool over = false;  // its client has another connection now, or is to make one
    std::unique_ptr<TlsSession> tls = {};  // with a cluster key, after the handshake
    std::string in = {};                   // read and decrypted, and not understood yet
    std::string out = {};                  // answers, to be encrypted
    std::string wire = {};                 // to be written as it is

    size_t unread() const { return out.size() + wire.size(); }
  };
  using Peers = std::list<Peer>;

  // The last change that a client made, which it may ask for again after it has lost its
  // connection.
  struct Change {
    uint64_t number;
    std::optional<int64_t> sum;  // of an addition
  };

  StoreServer(Socket listener, Socket wake, Socket stop, StoreServerOptions options)
      : options_(std::move(options)),
        listener_(std::move(listener)),
        wake_(std::move(wake)),
        stop_(std::move(stop)) {}

  void Run();
  // Does what is due, with these events; false: the connection is to be closed.
  bool GoOn(Peer& peer, short events);
  // Returns the milliseconds for poll().
  int Patience() const;
  void Accept();
  // Closes an unauthenticated connection that had time enough and is silent: the one whose last
  // step is the oldest.
  bool FreeSlot();
  // Handle a connection; false: it is to be closed.
  bool Read(Peer& peer);
  bool Write(Peer& peer);
  bool Understand(Peer& peer);
  bool Greet(Peer& peer);
  // Goes on with TLS; false: the connection is to be closed.
  bool EstablishTls(Peer& peer);
  bool Decrypt(Peer& peer);
  static void TakeTlsOutput(Peer& peer);
  // A connection is closed because this process itself cannot do what it takes.
  void LogInability(const absl::Status& why);
  // A connection is closed because there is no memory for what it takes.
  void LogLackOfMemory();
  // Has the connection closed in the next turn, whatever it says.
  static void Abandon(Peer& peer);
  // Answers the first request of `in`; returns its size, or 0 if not all of it is there.
  absl::StatusOr<size_t> Answer(Peer& peer, absl::string_view in);
  absl::StatusOr<bool> BeginSession(Peer& peer, uint64_t session);
  // Adds to a counter; nullopt if the key holds no number.
  absl::StatusOr<std::optional<int64_t>> Add(absl::string_view key, int64_t amount);
  absl::Status Set(absl::string_view key, absl::string_view value);
  void Delete(absl::string_view key);
  // Answers at once, or remembers what is waited for.
  absl::Status BeginWait(Peer& peer, absl::string_view request);
  void EndWait(Peer& peer);
  void ForgetWait(Peer& peer);
  bool HasChanged(const Wait& wait) const;
  void Tell(const Wait& wait, std::string* out) const;
  // Tells the clients that wait for the key.
  void OnChange(absl::string_view key);

  // Constant after construction.
  const StoreServerOptions options_;
  const Socket listener_;
  const Socket wake_;  // readable when it is to end
  const Socket stop_;  // the other end

  // Used on thread_ only, once it runs.
  std::vector<pollfd> entries_ = std::vector<pollfd>(2);  // its memory is enough for all of peers_
  Peers peers_;  // by their last steps, or since when they are there
  size_t unauthenticated_ = 0;
  std::map<std::string, std::string, std::less<>> values_;
  std::map<uint64_t, std::optional<Change>> sessions_;  // as long as the server
  std::map<std::string, std::set<Peer*>, std::less<>> waiting_;
  size_t bytes_ = 0;  // of all of these
  Deadline accept_again_ = absl::InfinitePast();
  RefusalLog refusals_{"the job's store"};
  uint64_t unable_ = 0;  // connections that LogInability() has heard of
  uint64_t lacks_ = 0;   // and LogLackOfMemory()

  std::thread thread_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_STORE_SERVER_H_
