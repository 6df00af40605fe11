// Waits for connections, and lets only those through that finish their handshake.
//
// A connection that has not costs a file descriptor and a few hundred bytes; how many there may
// be, and for how long, is limited. Nothing that unauthenticated clients do ends the listener.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_LISTENER_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_LISTENER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/strand.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/loop.h"
#include "core/net/refusal_log.h"
#include "core/transport/tensorpipe/socket/socket_connection.h"
#include "core/transport/tensorpipe/socket/socket_options.h"

namespace distgrad {

// Thread-safe. Callbacks run on the loop's thread or on one that calls in here, one at a time, in
// the order in which they were given, each exactly once.
class SocketListener final : public std::enable_shared_from_this<SocketListener> {
 public:
  using Accepted = std::function<void(const tensorpipe::Error&, std::shared_ptr<SocketConnection>)>;

  // `host` is numeric.
  static absl::StatusOr<std::shared_ptr<SocketListener>> Listen(std::shared_ptr<Loop> loop,
                                                                const std::string& host,
                                                                const SocketOptions& options);
  // Called by Listen only.
  SocketListener(std::shared_ptr<Loop> loop, SocketOptions options);

  // Takes the next connection. Where there is no memory for what is to take it, the next one after
  // that.
  void Accept(Accepted accepted);
  // Fails all Accepts, and closes all connections that have not been accepted.
  void Close();

  const std::string& address() const { return address_; }

 private:
  class Events;

  // A socket that others connect to.
  struct Acceptor {
    Fd fd;
    uint64_t id = 0;
    bool is_unix = false;
  };
  // A client that has connected and is not authenticated yet.
  struct Client {
    Fd fd;
    uint64_t id = 0;
    bool is_unix = false;
    Handshake handshake;
    std::unique_ptr<TlsSession> tls;  // where it follows the handshake
    absl::Time step;                  // when it took the last one of its handshake, or came
    Loop::TimerId deadline = 0;
  };
  using Clients = std::list<Client>;

  // What is private runs on strand_ only, but for Listen's own calls.
  absl::Status OpenAcceptor(Acceptor* acceptor, absl::StatusOr<Fd> fd, bool is_unix);
  void AcceptClients(Acceptor& acceptor);
  void AcceptAll(Acceptor& acceptor);
  // Whether there is a slot for one more client: where one waits another is evicted for it.
  bool FreeSlot(const Acceptor& acceptor);
  // Evicts, of the clients who are silent, the one whose last step is the oldest. Returns false if
  // there is none, or all have taken one just now; `*left` then becomes how long that is so.
  bool Evict(const absl::Status& why, absl::Duration* left);
  // Takes clients again after there was no slot, or no descriptor: when one of them goes, or then.
  void ResumeAfter(absl::Duration delay);
  void Resume();
  // A connection is closed because this process itself cannot do what it takes.
  void LogInability(const absl::Status& why);
  void AddClient(Fd fd, bool is_unix);
  void GoOn(Clients::iterator client);
  void ShakeHands(Clients::iterator client);
  // Notes that the client has got further in its handshake.
  void TakeStep(Clients::iterator client);
  // Goes on with the handshake of TLS.
  void EstablishTls(Clients::iterator client);
  void Adopt(Clients::iterator client);
  // Dismisses it for others, and tells it so.
  void MakeRoom(Clients::iterator client, const absl::Status& why);
  void Dismiss(Clients::iterator client, const absl::Status& why);
  void Forget(Clients::iterator client);
  void HandOver();
  // Answers, once closed, all who wait.
  void FailWaiting();

  // Constant after Listen(); synchronize themselves.
  const std::shared_ptr<Loop> loop_;
  const SocketOptions options_;
  std::string address_;
  Token token_ = {};
  Strand strand_;

  // Used on strand_ only.
  bool closed_ = false;
  RefusalLog refusals_{"this worker"};
  uint64_t other_users_ = 0;  // refused
  uint64_t exhausted_ = 0;    // how often there was no file descriptor
  uint64_t unable_ = 0;       // connections that LogInability() has heard of
  bool full_ = false;         // clients that connect wait in the kernel's queue: ResumeAfter()
  Acceptor tcp_, unix_;
  Clients clients_;  // by their last steps
  std::deque<std::shared_ptr<SocketConnection>> ready_;
  std::list<Accepted> waiting_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_LISTENER_H_
