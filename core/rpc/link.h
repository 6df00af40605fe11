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
#include "core/base/monotonic_state.h"
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
  // Gets what arrives on a link. Called as a Receiver is. Thread-safe.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void OnPacket(const std::shared_ptr<Link>& link, Packet packet) = 0;
    // Says, once, that a large packet waits for SetBulk(). Called as Link::Send() is.
    virtual void OnBulkWanted(const std::shared_ptr<Link>& link) = 0;
    // Writes into a request that has waited, and is about to leave, what is left of its time.
    // Returns false if its call has ended; then it does not leave.
    virtual bool OnLeaving(uint64_t call, Packet& request) = 0;
    // Says that the link has ended; called once, and last. `is_refused`: nobody listens where it
    // was to lead.
    virtual void OnClosed(const std::shared_ptr<Link>& link, absl::Status why, bool is_refused) = 0;
  };

  enum class Kind {
    kLoopback,  // to oneself
    kOpened,    // by this worker
    kAccepted,  // opened by the peer; what arrives is held until Release()
  };

  // A packet of more bytes than this is large.
  static constexpr uint64_t kBulkBytes = 64 << 10;

  // The parts that the links of an agent share; outlive them, but for the clock, which outlives
  // Close().
  struct Shared {
    Clock* clock;
    Limits limits;
    std::atomic<size_t> served{0};  // calls, of all peers together
  };

  // `number` is unique among the links of `owner`.
  Link(std::shared_ptr<Owner> owner, Shared* shared, Kind kind, uint64_t number);

  Kind kind() const { return kind_; }
  uint64_t number() const { return number_; }
  bool closed() const;

  // The worker at the other end, known from the start of a link that this one opened, from the
  // hello on one that was accepted; and its incarnation, 0 until the hello and for oneself.
  std::optional<WorkerRank> peer() const;
  Incarnation incarnation() const;
  void SetPeer(WorkerRank peer, Incarnation incarnation);

  // Makes this a bulk link: what arrives counts as if it had come on `main`. Called before anything
  // else arrives.
  void SetMain(const std::shared_ptr<Link>& main);
  bool is_bulk() const;
  // Returns the link that SetMain() gave; null where there is none, or none any more.
  std::shared_ptr<Link> main() const;

  // Hold() holds what arrives, until Release() hands it to the owner, in order, and ends when
  // nothing is left or Hold() is called again. The owner gets later packets as they come. Past a
  // limit of what is held the link is closed. `from`: whom it says to come from, for the log.
  void Hold(std::optional<WorkerRank> from = std::nullopt);
  void Release();
  // Ignores what arrives from now on. What is sent still goes.
  void Drop();
  // Returns whether what arrives is ignored, by Drop() or at the end. A packet that was taken in
  // before may be on its way to the owner still, on another thread.
  bool dropped() const;

  // Return the number of packets that have arrived, and that have left.
  uint64_t heard() const { return heard_.load(std::memory_order_relaxed); }
  uint64_t sent() const { return sent_.load(std::memory_order_relaxed); }
  // Count the pings on this link, but for one for large packets, and return their number. Each is
  // answered once, in their order.
  void SetAsked() { asked_.fetch_add(1, std::memory_order_relaxed); }
  void SetNotAsked() { asked_.fetch_sub(1, std::memory_order_relaxed); }  // it was not sent
  uint64_t asked() const { return asked_.load(std::memory_order_relaxed); }
  // Counts an answer to a ping on this link, and return the number of them; HearBulk() counts those
  // of a link for large packets.
  void SetAnswered() { answered_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t answered() const { return answered_.load(std::memory_order_relaxed); }
  // Say, and return, whether a request, a reply or a notice has come on it.
  void SetCarried() { carried_.store(true, std::memory_order_relaxed); }
  bool carried() const { return carried_.load(std::memory_order_relaxed); }

  const Limits& limits() const { return shared_->limits; }
  // The window of bytes that wait to be sent; and the peer's calls that came over this link.
  const std::shared_ptr<SendWindow>& window() const { return window_; }
  ServedCalls& served() { return served_; }

  // Returns whether a packet of `bytes` that is sent now need not wait for a connection.
  bool ready(uint64_t bytes) const;
  // Returns whether a small packet that is sent now goes with none before it. Large ones are not
  // counted: they may wait for a bulk link that never comes, as this link is dead.
  bool idle() const { return unsent_.load(std::memory_order_relaxed) == 0; }

  // Sends a packet; an error closes the connection, and is reported there. `credit` is released
  // when the packet has left; one that has none goes all the same. The owner is asked before a
  // request of a `call` leaves (0: it is not).
  void Send(Packet packet, SendWindow::Credit credit = {}, uint64_t call = 0);
  // Keeps the request of that call from leaving, if it still waits here.
  void Withdraw(uint64_t call);
  // Sends a packet the way that one of `bytes` has gone, behind it.
  void SendBehind(uint64_t bytes, Packet packet);

  // Begins to close the link: sends a packet that has the peer close it. One that does not has as
  // long for that as for a handshake.
  void SendLast(Packet packet, absl::Status why);

  // Has the first Send() run `open` before it. Called once, before others know the link, and under
  // the owner's mutex: so `open`, which may fail at once, does not run here.
  void OpenLater(absl::AnyInvocable<void()> open) { open_ = std::move(open); }
  // Sends the first packet, on the connection that SetConnection() then gets.
  void SendHello(Connection& connection, Packet hello);
  // Sets the connection; what was sent earlier has waited for it.
  void SetConnection(std::shared_ptr<Connection> connection);
  bool connected() const { return connection() != nullptr; }
  // Sets the link for large packets, once. Either one's end is the other's.
  void SetBulk(std::shared_ptr<Link> bulk);
  // Returns true to the first caller, which then opens the bulk link.
  bool ClaimBulk();
  // Takes a sign of life of the bulk link that came here, as what the peer sends there may take
  // long: it counts as heard there.
  void HearBulk();

  // Closes the link, and cancels the calls that it serves. The first reason stays; it is what the
  // owner hears, at once if there is no connection yet. Does not throw.
  void Close(absl::Status why);

  // Receiver
  void OnPacket(Packet packet) override;
  void OnClosed(absl::Status why) override;

 private:
  enum class State {
    kOpening,  // what is sent waits for a connection
    kOpen,
    kDropped,  // nothing that arrives counts any more; it waits for its end
    kClosed,   // the owner hears of it
  };
  // The fate of packets that arrive.
  enum class Inbox {
    kPassing,   // the owner gets them
    kHolding,   // they are held
    kDraining,  // so are they, while Release() hands on what was there before
  };
  struct Waiting {
    Packet packet;
    SendWindow::Credit credit;
    uint64_t call;           // 0: the owner is not asked
    bool withdrawn = false;  // nothing of it is left
  };

  // Returns the link on which what arrives here counts; null if it does not.
  std::shared_ptr<Link> Target() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Deliver(std::shared_ptr<Link> target, Packet packet);
  std::shared_ptr<Connection> connection() const;
  void Queue(Waiting waiting, bool is_large);
  bool MayLeave(Waiting& waiting);
  void FlushOnStrand();
  // Hears what became of a packet that was counted in unsent_.
  void OnSent(const absl::Status& sent);
  void PopWaiting();
  void CancelLastWords() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const std::shared_ptr<Owner> owner_;
  Shared* const shared_;
  const Kind kind_;
  const uint64_t number_;

  // Synchronize themselves.
  const std::shared_ptr<SendWindow> window_;
  ServedCalls served_;
  Strand out_;
  std::atomic<uint64_t> heard_{0}, sent_{0}, asked_{0}, answered_{0};
  std::atomic<bool> carried_{false};
  std::atomic<size_t> unsent_{0};  // small packets that have not left, nor were given up

  // Used on out_ only, once others know the link.
  absl::AnyInvocable<void()> open_;
  std::deque<Waiting> waiting_;                           // for the connection
  std::deque<Waiting> large_waiting_;                     // for the bulk link
  absl::flat_hash_map<uint64_t, Waiting*> withdrawable_;  // those of a call, in either
  bool bulk_wanted_ = false;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  MonotonicState<State> state_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  absl::Status why_ ABSL_GUARDED_BY(mu_);  // why we closed it, if we did
  // The timer of SendLast().
  std::optional<Clock::TimerId> last_words_ ABSL_GUARDED_BY(mu_);
  std::optional<WorkerRank> peer_ ABSL_GUARDED_BY(mu_);
  Incarnation incarnation_ ABSL_GUARDED_BY(mu_) = 0;
  Inbox inbox_ ABSL_GUARDED_BY(mu_);
  uint64_t drains_ ABSL_GUARDED_BY(mu_) = 0;  // Release() so far; the last one drains
  std::deque<Packet> held_ ABSL_GUARDED_BY(mu_);
  uint64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<WorkerRank> held_from_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Link> bulk_ ABSL_GUARDED_BY(mu_);
  bool bulk_claimed_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<std::weak_ptr<Link>> main_ ABSL_GUARDED_BY(mu_);  // of a bulk link
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_LINK_H_
