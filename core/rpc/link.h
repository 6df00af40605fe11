// One connection with a peer as the agent has it: what is sent goes in order, also while the
// connection is still being opened; and the short cut to oneself, which touches no transport.
//
// Large packets go over a second connection, the bulk link, so that nothing else waits behind
// them; they keep their order among themselves. docs/threading.md, "Large packets".
#ifndef DISTGRAD_CORE_RPC_LINK_H_
#define DISTGRAD_CORE_RPC_LINK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/base/strand.h"
#include "core/rpc/limits.h"
#include "core/rpc/send_window.h"
#include "core/rpc/served_calls.h"
#include "core/transport/packet.h"
#include "core/transport/transport.h"

namespace distgrad {

// Thread-safe.
class Link : public Receiver, public std::enable_shared_from_this<Link> {
 public:
  // Who gets what arrives. Called as a Receiver is. Thread-safe.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void OnPacket(const std::shared_ptr<Link>& link, Packet packet) = 0;
    // Once: a large packet waits for SetBulk(). Called as Link::Send() is.
    virtual void OnBulkWanted(const std::shared_ptr<Link>& link) = 0;
    // The request of that call has waited, and is about to leave: writes into it what is left of
    // its time. False if nobody waits for the answer any more; then it does not leave.
    virtual bool OnLeaving(uint64_t call, Packet& request) = 0;
    // Once, and last.
    virtual void OnClosed(const std::shared_ptr<Link>& link, absl::Status why) = 0;
  };

  // A packet of more bytes than this is large.
  static constexpr uint64_t kBulkBytes = 64 << 10;

  // What the links of an agent share; outlives them, but for the clock, which outlives Close().
  struct Shared {
    Clock* clock;
    Limits limits;
    std::atomic<size_t> served{0};  // calls, of all peers together
  };

  Link(std::shared_ptr<Owner> owner, Shared* shared, bool loopback = false);

  // Who is at the other end: known from the start of a link that we opened, from its hello on
  // one that was accepted. Written and read by the owner, under its mutex.
  std::optional<WorkerId> peer;
  // Which incarnation of it: 0 until the hello, and of the link to oneself.
  Incarnation incarnation = 0;

  // The rest of what the owner keeps with a link, like `peer`.
  uint64_t number = 0;    // of its own
  bool accepted = false;  // the peer opened it
  bool dead = false;      // nothing of it counts any more: it was refused, or its peer came back
  bool silent = false;    // for so long that its peer is lost
  absl::Time asked_for = absl::InfinitePast();  // when we wanted it
  bool holds = false;                           // what arrives waits in `held`
  bool asking = false;                          // until it is known whether the hello is good
  bool releasing = false;                       // somebody is taking it from there
  std::deque<Packet> held;
  uint64_t held_bytes = 0;
  bool has_bulk = false;     // we have opened it
  bool is_bulk = false;      // what arrives belongs to `main`
  std::weak_ptr<Link> main;  // gone when that is closed

  bool loopback() const { return loopback_; }
  bool closed() const;

  // Once it is closed: whether somebody is there, who has not taken us in.
  bool is_there() const { return is_there_; }

  // How many packets have arrived.
  uint64_t heard() const { return heard_.load(std::memory_order_relaxed); }

  const Limits& limits() const { return *limits_; }
  // The bytes that wait to be sent; and the peer's calls that came over this link.
  const std::shared_ptr<SendWindow>& window() const { return window_; }
  ServedCalls& served() { return served_; }

  // Whether a packet of `bytes` that is sent now need not wait for a connection.
  bool ready(uint64_t bytes) const {
    return loopback_ || (bytes > kBulkBytes ? has_bulk_connection_ : has_connection_);
  }

  // An error closes the connection, and is reported there. `credit` is released when the packet
  // has left; one that has none goes all the same. The owner is asked before a request of a `call`
  // leaves (0: it is not).
  void Send(Packet packet, SendWindow::Credit credit = {}, uint64_t call = 0);
  // The request of that call does not leave any more, if it still waits here.
  void Withdraw(uint64_t call);
  // Goes where one of `bytes` has gone, behind it.
  void SendBehind(uint64_t bytes, Packet packet);

  // The same, and closes the connection when it has gone.
  void SendLast(Packet packet, absl::Status why);

  // Has the first Send() run `open` before it. Once, before anybody else knows the link. Not at
  // once: it is called under the owner's mutex, and a connection may fail while it is made.
  void OpenLater(absl::AnyInvocable<void()> open) { open_ = std::move(open); }
  // Until then what is sent waits.
  void SetConnection(std::shared_ptr<Connection> connection);
  bool connected() const { return connection() != nullptr; }
  // The link for large packets; once. Either one's end is the other's.
  void SetBulk(std::shared_ptr<Link> bulk);

  // The first reason stays; it is what the owner hears, at once if there is no connection yet.
  // Cancels what is served.
  void Close(absl::Status why);

  // Receiver
  void OnPacket(Packet packet) override;
  void OnClosed(absl::Status why) override;

 private:
  struct Waiting {
    Packet packet;
    SendWindow::Credit credit;
    uint64_t call;           // 0: the owner is not asked
    bool withdrawn = false;  // nothing of it is left
  };

  std::shared_ptr<Connection> connection() const;
  void Queue(Waiting waiting, bool is_large);
  bool MayLeave(Waiting& waiting);
  void FlushOnStrand();
  void OnSent(const absl::Status& sent);

  // Constant after construction.
  const std::shared_ptr<Owner> owner_;
  const Limits* const limits_;
  const bool loopback_;

  // Synchronize themselves.
  const std::shared_ptr<SendWindow> window_;
  ServedCalls served_;
  Strand out_;
  std::atomic<uint64_t> heard_{0};
  std::atomic<bool> has_connection_{false}, has_bulk_connection_{false};  // or had
  std::atomic<bool> is_there_{false};

  // On out_ only, once others know the link.
  absl::AnyInvocable<void()> open_;
  std::deque<Waiting> waiting_;                           // for the connection
  std::deque<Waiting> large_waiting_;                     // for the bulk link
  absl::flat_hash_map<uint64_t, Waiting*> withdrawable_;  // those of a call, in either
  bool bulk_wanted_ = false;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Link> bulk_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status why_ ABSL_GUARDED_BY(mu_);  // why we closed it, if we did
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_LINK_H_
