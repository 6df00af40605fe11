// Calls between workers: dispatches what arrives to the tables of calls (deadlines, replies) and of
// links (which peers are reachable). It carries bytes and segments and does not look into them;
// what a call means is its service's affair.
//
// There is one connection to each peer, opened by the end that calls first and used both ways, and
// one for large packets, which nothing else waits behind (docs/threading.md). When either breaks,
// or nothing is heard on it for too long, everything in flight with that peer fails at once, and
// the next call opens another: to where the peer is then, for it may have come back.
// docs/membership.md has the rules. A call to oneself touches no transport.
#ifndef DISTGRAD_CORE_RPC_AGENT_H_
#define DISTGRAD_CORE_RPC_AGENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/cancellation.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/base/trace.h"
#include "core/membership/directory.h"
#include "core/membership/member_event.h"
#include "core/membership/worker_info.h"
#include "core/rpc/call_metrics.h"
#include "core/rpc/call_table.h"
#include "core/rpc/frame.h"
#include "core/rpc/incoming_call.h"
#include "core/rpc/limits.h"
#include "core/rpc/link.h"
#include "core/rpc/link_table.h"
#include "core/rpc/member_watch.h"
#include "core/rpc/peers.h"
#include "core/rpc/send_window.h"
#include "core/transport/packet.h"
#include "core/transport/transport.h"

namespace distgrad {

// Gets what other workers send. Called on transport threads, several at once, also for one peer
// (and on the calling thread for messages to oneself), with no lock held; must not block.
class AgentService {
 public:
  virtual ~AgentService() = default;
  // Returns whether the body of a request or of a reply says so much that nothing is lost of which
  // its sender would not hear, and nothing in another worker's name: as of a notice, an error ends
  // the connection. First of all, for each that comes.
  virtual absl::Status CheckBody(WorkerRank /*from*/, absl::string_view /*body*/) {
    return absl::OkStatus();
  }
  // Gets each call, also one that is refused (IncomingCall::refusal): its body may be of interest.
  virtual void OnCall(IncomingCall call) = 0;
  // `is_cut_off`: the same as IncomingCall::is_cut_off(), until this returns. An error says that
  // what the notice tells is lost: its connection ends, for its sender to hear of that.
  virtual absl::Status OnNotice(WorkerRank from, Body notice,
                                absl::FunctionRef<bool()> is_cut_off) = 0;
  // Gets a reply to a call that has ended already, by its deadline or a cancel.
  virtual void OnLateReply(WorkerRank from, Body reply) = 0;
  // LinkTable::User::BegunSoFar(): of contexts.
  virtual uint64_t BegunSoFar() { return 0; }
  // Says that the connection with a worker broke: what was in flight with it may be lost, of the
  // contexts that had begun until then (BegunSoFar()). The worker may be back.
  virtual void OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) = 0;
  // Says that this incarnation of a watched member (Agent::WatchMembers) cannot be reached: nothing
  // is heard of it, or nothing listens there. Called again and again, until Agent::SetLost(),
  // unless it can be reached again.
  virtual void OnUnreachable(WorkerRank /*peer*/, Incarnation /*incarnation*/,
                             const absl::Status& /*why*/) {}
  // Says that the member that is to watch this worker keeps no connection with it: it may take this
  // worker for lost, and have said so. Called again and again, as long as that is so.
  virtual void OnUnwatched() {}
  // Says that a member that was marked as lost, by that loss (Agent::LossOf), has answered, and is
  // marked as alive.
  virtual void OnRevived(WorkerRank /*peer*/, Incarnation /*incarnation*/, uint64_t /*loss*/) {}
  // Says that there are events for Agent::TakeEvents().
  virtual void OnMemberEvents() {}
};

// The options of a call.
struct CallTerms {
  // The call's deadline by the agent's clock. Waiting for credit, for a look-up or for a connection
  // counts; a request whose time is over does not leave any more.
  absl::Time deadline = absl::InfiniteFuture();
  // Whether this thread waits for credit where that worker's send window has none left; else the
  // call fails.
  bool wait_for_credit = false;
  // Ends that wait (not the call); may be null.
  Cancellation* cancellation = nullptr;
  // The context that the call belongs to, for the trace; 0: none.
  ContextId context = 0;
};

struct AgentOptions {
  // Says before each connection which incarnation the peer is now, and whether an unknown one is a
  // member. Null: the members are those of Start(), for ever.
  Directory* directory = nullptr;
  // Records calls while a trace runs. Null: they are not recorded.
  std::shared_ptr<TraceRecorder> trace = nullptr;
  // The same options as in WorkerOptions.
  absl::Duration heartbeat_limit = absl::InfiniteDuration();
  size_t max_workers = 1 << 16;
  Limits limits = {};
};

// Thread-safe. Held by a shared_ptr, for its timers and links may outlive its owner.
class Agent : public LinkTable::User, public std::enable_shared_from_this<Agent> {
 public:
  // `has_left`: the request may have reached that worker, or its connection broke. Always true with
  // a reply.
  using ReplyCallback = CallTable::Done;

  // `clock`, `transport`, `service` and what is in the options must outlive the agent's Close().
  // No answer of the directory may come later.
  Agent(Clock* clock, Transport* transport, AgentService* service,
        const AgentOptions& options = {});
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent() override { Close(); }

  // Listens, once, and before anything else; the address goes into WorkerInfo.
  absl::StatusOr<std::string> Listen() { return links_->Listen(weak_from_this()); }

  // Sets the members of the job, this worker among them, before any call is made; what arrives
  // earlier is held back until then.
  absl::Status Start(const WorkerInfo& self, std::vector<WorkerInfo> workers);

  // A call's request, to whose packet the body is to be appended, for Call().
  struct Request {
    std::string function;
    Packet packet;
  };
  static Request NewRequest(absl::string_view function);
  // Sends it. `done` is called exactly once, on any thread (also before this returns), with no
  // lock held; it must not block. The message of an error names the worker and the function.
  // kResourceExhausted past a limit. Returns the number of the call, 0 if it has ended already.
  uint64_t Call(WorkerRank to, Request request, const CallTerms& terms, ReplyCallback done);
  // Ends calls by their number, with kCancelled, and tells the worker that serves it.
  std::weak_ptr<Canceller> canceller() { return calls_; }

  // Do the same for a message without an answer. It waits for no credit. A failure to deliver shows
  // up as OnPeerLost.
  static Packet NewNotice();
  void Notify(WorkerRank to, Packet notice);

  // Returns a worker's rank; kNotFound, with the names that are known, if there is none.
  absl::StatusOr<WorkerRank> FindWorker(absl::string_view name) const { return peers_->Find(name); }
  absl::StatusOr<WorkerRank> FindWorker(int rank) const;
  // Returns what is known of that worker; kNotFound if there is none of that rank.
  absl::StatusOr<WorkerInfo> Info(WorkerRank worker) const;
  // Returns the members that have not left, this worker among them, by rank; of those that joined
  // later, the ones that this worker has heard of.
  std::vector<WorkerInfo> Members() const { return peers_->Members(); }
  // Returns the number of Members().
  size_t MemberCount() const { return peers_->size(); }
  // Takes in what the store says of a worker.
  absl::Status UpdatePeer(const WorkerInfo& worker) { return links_->UpdatePeer(worker); }
  // Returns "'name' (rank)", for messages.
  std::string Describe(WorkerRank worker) const { return peers_->Describe(worker); }
  absl::Time Now() const { return clock_->Now(); }

  // Notices from now on when a member dies with which nothing is in flight. Each worker watches the
  // next one by rank, over a connection of its own accord, so all are watched, by one each. One
  // that came `late` also connects to the one before it, which may not know of it. Called once.
  void WatchMembers(bool late);
  // Watches this member too, whichever others do.
  void WatchToo(WorkerRank member);
  void StopWatching();
  // Marks that incarnation of a member as lost, as OnUnreachable() or another worker said, or as
  // alive after all, as it says itself in a word that is later than its loss. It stays a member.
  void SetLost(WorkerRank worker, Incarnation incarnation, absl::string_view reason);
  void SetAlive(WorkerRank worker, Incarnation incarnation);
  // Returns the number of the loss of that incarnation of a member, if it is marked as lost, or 0.
  // A later one is greater.
  uint64_t LossOf(WorkerRank worker, Incarnation incarnation) const {
    return peers_->LossOf(worker, incarnation);
  }
  // Returns whether a connection with that incarnation of a member stands on which it was heard. If
  // it is dead, that ends, and OnUnreachable() follows.
  bool Hears(WorkerRank worker, Incarnation incarnation) const {
    return links_->Hears(worker, incarnation);
  }
  // Asks that incarnation of a member that is marked as lost, on the connections that stand with
  // it, whether it is alive: if it answers it is marked so.
  void AskLost(WorkerRank worker, Incarnation incarnation) { links_->AskLost(worker, incarnation); }
  // Keeps from now on what happens to members, in its order, until it is taken; or no longer.
  void KeepEvents(bool keep) { peers_->KeepEvents(keep); }
  Peers::Events TakeEvents() { return peers_->TakeEvents(); }

  // Returns the counts of calls and notices so far, the latter under kNotices.
  static constexpr absl::string_view kNotices = "(notices)";
  std::vector<CallStats> Stats() const { return calls_->metrics().Stats(); }
  // Returns the bytes that wait to be sent, by peer.
  std::vector<std::pair<WorkerRank, uint64_t>> Queued() const { return links_->Queued(); }
  // Tells all connected workers that this one leaves the job.
  void SayLeaving() { links_->SayLeaving(); }
  // Return the number of calls made from here, and of calls of others, that have not ended.
  size_t in_flight() const { return calls_->size(); }
  size_t served() const { return links_->served(); }

  // Fails every call in flight with kCancelled and closes all connections. No callback starts
  // after the transport is destroyed.
  void Close();

 private:
  // LinkTable::User
  absl::Status OnPacket(const std::shared_ptr<Link>& link, Packet packet) override;
  uint64_t BegunSoFar() override { return service_->BegunSoFar(); }
  void OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) override;
  void OnLinkEnded(const MemberWatch::ClosedLink& link, const absl::Status& why) override;
  void OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss) override;
  void OnMemberEvents() override;

  absl::StatusOr<SendWindow::Credit> AwaitCredit(const std::shared_ptr<SendWindow>& window,
                                                 uint64_t bytes, const CallTerms& terms);
  absl::Status TooLarge(absl::string_view what, uint64_t size) const;
  CallCounters* CountNotice(WorkerRank peer, bool served);
  absl::Status Serve(const std::shared_ptr<Link>& link, WorkerRank peer, const Frame& frame,
                     Packet packet, size_t offset);
  void OnReply(WorkerRank peer, const Frame& frame, Body reply);

  void ArmWatch(absl::Duration wait, bool is_first);
  void Watch(bool is_first);

  Clock* const clock_;
  AgentService* const service_;
  Directory* const directory_;
  const Limits limits_;
  const std::shared_ptr<TraceRecorder> trace_;

  // Synchronize themselves; links keep them.
  const std::shared_ptr<Peers> peers_;
  const std::shared_ptr<CallTable> calls_;
  const std::shared_ptr<LinkTable> links_;

  const absl::Duration watch_interval_;
  MemberWatch watch_;  // synchronizes itself
  absl::Mutex mu_;
  std::optional<Clock::TimerId> watch_timer_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_AGENT_H_
