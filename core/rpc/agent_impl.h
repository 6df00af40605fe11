// What an Agent is made of. Private to core/rpc: agent.cc has its beginning and end, and what it
// can be asked, agent_calls.cc its calls, agent_links.cc its connections, agent_watch.cc whom it
// watches.
#ifndef DISTGRAD_CORE_RPC_AGENT_IMPL_H_
#define DISTGRAD_CORE_RPC_AGENT_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/trace.h"
#include "core/base/wire.h"
#include "core/rpc/agent.h"
#include "core/rpc/call_metrics.h"
#include "core/rpc/frame.h"
#include "core/rpc/heartbeat.h"
#include "core/rpc/link.h"
#include "core/rpc/peers.h"
#include "core/rpc/send_window.h"

namespace distgrad {

// Thread-safe.
class Agent::Impl : public Link::Owner,
                    public Canceller,
                    public std::enable_shared_from_this<Agent::Impl> {
 public:
  Impl(Clock* clock, Transport* transport, AgentService* service, const AgentOptions& options)
      : clock_(clock),
        transport_(transport),
        service_(service),
        directory_(options.directory),
        trace_(options.trace != nullptr ? options.trace : std::make_shared<TraceRecorder>()),
        shared_{.clock = clock, .limits = options.limits},
        peers_(options.max_workers),
        heartbeat_(options.heartbeat_limit) {}

  absl::StatusOr<std::string> Listen();
  absl::Status Start(const WorkerInfo& self, std::vector<WorkerInfo> workers);
  uint64_t Call(WorkerId to, Packet request, const CallTerms& terms, ReplyCallback done);
  void Notify(WorkerId to, Packet notice);
  absl::StatusOr<WorkerId> FindWorker(int id) const;
  absl::StatusOr<WorkerInfo> Info(WorkerId worker) const;
  std::vector<CallStats> Stats() const;
  std::vector<std::pair<WorkerId, uint64_t>> Queued() const;
  absl::Status Learn(const WorkerInfo& worker, const std::shared_ptr<Link>& keep);
  void SayLeaving();
  size_t in_flight() const;
  size_t served() const { return shared_.served; }
  const Peers& peers() const { return peers_; }
  Peers& peers() { return peers_; }
  void WatchMembers(bool late);
  void WatchToo(WorkerId member);
  void StopWatching();
  void SetLost(WorkerId worker, Incarnation incarnation, absl::string_view reason);
  void SetAlive(WorkerId worker, Incarnation incarnation);
  void Close();

  // Canceller
  void Cancel(uint64_t call) override;

  // Link::Owner
  void OnPacket(const std::shared_ptr<Link>& link, Packet packet) override;
  void OnBulkWanted(const std::shared_ptr<Link>& link) override;
  bool OnLeaving(uint64_t call, Packet& request) override;
  void OnClosed(const std::shared_ptr<Link>& link, absl::Status why) override;

  Clock* const clock_;
  Transport* const transport_;
  AgentService* const service_;
  Directory* const directory_;
  const std::shared_ptr<TraceRecorder> trace_;  // as long as calls that arrived

 private:
  // A call that has not been answered.
  struct Pending {
    std::shared_ptr<Link> link;
    std::string function;
    WorkerId to = 0;
    uint64_t bytes = 0;
    absl::Time deadline;
    Agent::ReplyCallback done;
    CallCounters* counters = nullptr;
    absl::Time begun;
    std::unique_ptr<TraceSpan> span;  // null unless a trace runs
    bool has_left = false;            // the peer may have heard of it
  };
  using PendingCalls = absl::flat_hash_map<uint64_t, Pending>;

  Link::Shared shared_;  // constant, or synchronizes itself

  // Opening: a link that was asked for, step by step.
  void Open(const std::shared_ptr<Link>& link, WorkerId to);
  void OnFound(const std::shared_ptr<Link>& link, WorkerId to,
               const absl::StatusOr<WorkerInfo>& found);
  // As what `bulk_of` says in the hello.
  void Connect(const std::shared_ptr<Link>& link, WorkerId to, uint64_t bulk_of = 0);
  void OpenBulk(const std::shared_ptr<Link>& link, WorkerId peer, uint64_t number);

  // Taking in: one that a peer opened.
  absl::Status Greet(const std::shared_ptr<Link>& link, WireReader& reader);
  void OnFoundPeer(const std::shared_ptr<Link>& link, const Hello& hello,
                   const absl::StatusOr<WorkerInfo>& found);
  void Admit(const std::shared_ptr<Link>& link, const Hello& hello);
  absl::Status AdmitBulk(const std::shared_ptr<Link>& link, const Hello& hello);
  void Refuse(const std::shared_ptr<Link>& link, const absl::Status& why);
  void Release(const std::shared_ptr<Link>& link);

  // Ending, and signs of life.
  void DropOldIncarnation(WorkerId peer, const std::shared_ptr<Link>& keep);
  void StartHeartbeat();
  void ArmHeartbeat();
  void Beat();
  void Probe(WorkerId peer);
  // Watching.
  void ArmWatch(absl::Duration wait, bool is_first);
  void Watch(bool is_first);
  // What is known of a link that has ended.
  struct ClosedLink {
    WorkerId peer = 0;
    Incarnation incarnation = 0;
    bool was_heard = false;
    bool was_silent = false;
    bool is_there = false;  // somebody is, who has not taken us in
    absl::Time asked_for;
  };
  void OnWatchedLinkClosed(const ClosedLink& link, const absl::Status& why);
  void Ping(WorkerId peer);
  std::vector<std::shared_ptr<Link>> AllLinks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddOther(const std::shared_ptr<Link>& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<Pending> TakePending(const Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Handle(const std::shared_ptr<Link>& link, Packet packet);
  absl::Status HandleOrFail(const std::shared_ptr<Link>& link, Packet packet);
  absl::StatusOr<std::shared_ptr<Link>> LinkTo(WorkerId to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Serve(const std::shared_ptr<Link>& link, WorkerId peer, const Frame& frame,
                     Packet packet, size_t offset);
  absl::StatusOr<SendWindow::Credit> AwaitCredit(const std::shared_ptr<SendWindow>& window,
                                                 uint64_t bytes, const CallTerms& terms);
  absl::Status TooLarge(absl::string_view what, uint64_t size) const;
  absl::Status CheckCalls(const Link& link) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  Pending TakeOut(PendingCalls::iterator call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(Pending& call, absl::StatusOr<Body> reply);
  // Keeps a call that nobody waits for from leaving, or tells the worker that serves it.
  static void SendCancel(uint64_t number, const Pending& call);
  // The timer of the deadlines, which agent_calls.cc explains.
  struct Timer {
    uint64_t number = 0;  // of its own; 0: there is none
    absl::Time at = absl::InfiniteFuture();
    std::optional<Clock::TimerId> id = {};  // once the clock has it
  };
  // Makes it stand at `deadline`, or earlier. What it returns is for SetTimer(), at once.
  struct Arming {
    uint64_t number = 0;  // 0: nothing is to be done
    absl::Time at;
    std::optional<Clock::TimerId> stale;  // the clock's timer that this one replaces
  };
  Arming ArmTimer(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetTimer(const Arming& arming) ABSL_LOCKS_EXCLUDED(mu_);
  void OnTimer(uint64_t number);
  std::string Describe(WorkerId worker) const { return peers_.Describe(worker); }
  absl::Status NoWorker(int id) const;
  absl::Status CallError(WorkerId to, absl::string_view function, const absl::Status& why) const;

  Peers peers_;          // synchronizes itself
  Heartbeat heartbeat_;  // of the clock's thread

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  bool started_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  // One for each peer; and all others: accepted ones that are not known yet, second ones, probes,
  // bulk links.
  absl::flat_hash_map<WorkerId, std::shared_ptr<Link>> links_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<Link>> others_ ABSL_GUARDED_BY(mu_);
  uint64_t last_link_ ABSL_GUARDED_BY(mu_) = 0;
  bool beats_ ABSL_GUARDED_BY(mu_) = false;  // as long as there are links
  std::optional<Clock::TimerId> beat_ ABSL_GUARDED_BY(mu_);
  bool watches_ ABSL_GUARDED_BY(mu_) = false;
  size_t watched_ ABSL_GUARDED_BY(mu_) = 1;  // how many of the next members
  std::optional<WorkerId> watched_too_ ABSL_GUARDED_BY(mu_);
  // Since when those who are watched could not be reached, though nobody has refused.
  absl::flat_hash_map<WorkerId, absl::Time> unreachable_ ABSL_GUARDED_BY(mu_);
  absl::Time tried_again_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::optional<Clock::TimerId> watch_ ABSL_GUARDED_BY(mu_);
  PendingCalls pending_ ABSL_GUARDED_BY(mu_);
  CallMetrics metrics_ ABSL_GUARDED_BY(mu_);
  uint64_t last_call_ ABSL_GUARDED_BY(mu_) = 0;
  Timer timer_ ABSL_GUARDED_BY(mu_);
  uint64_t last_timer_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_AGENT_IMPL_H_
