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
#include "core/rpc/call_table.h"
#include "core/rpc/frame.h"
#include "core/rpc/heartbeat.h"
#include "core/rpc/link.h"
#include "core/rpc/member_watch.h"
#include "core/rpc/peers.h"
#include "core/rpc/send_window.h"

namespace distgrad {

// Thread-safe.
class Agent::Impl : public Link::Owner, public std::enable_shared_from_this<Agent::Impl> {
 public:
  Impl(Clock* clock, Transport* transport, AgentService* service, const AgentOptions& options)
      : clock_(clock),
        transport_(transport),
        service_(service),
        directory_(options.directory),
        trace_(options.trace != nullptr ? options.trace : std::make_shared<TraceRecorder>()),
        shared_{.clock = clock, .limits = options.limits},
        peers_(std::make_shared<Peers>(options.max_workers)),
        calls_(std::make_shared<CallTable>(clock, options.limits, trace_, peers_)),
        heartbeat_(options.heartbeat_limit),
        watch_(peers_, heartbeat_.limit() - heartbeat_.interval()) {}

  absl::StatusOr<std::string> Listen();
  absl::Status Start(const WorkerInfo& self, std::vector<WorkerInfo> workers);
  uint64_t Call(WorkerId to, Request request, const CallTerms& terms, ReplyCallback done);
  void Notify(WorkerId to, Packet notice);
  absl::StatusOr<WorkerId> FindWorker(int id) const;
  absl::StatusOr<WorkerInfo> Info(WorkerId worker) const;
  std::vector<std::pair<WorkerId, uint64_t>> Queued() const;
  absl::Status Learn(const WorkerInfo& worker, const std::shared_ptr<Link>& keep);
  void SayLeaving();
  size_t served() const { return shared_.served; }
  const std::shared_ptr<CallTable>& calls() const { return calls_; }
  Peers& peers() const { return *peers_; }
  void WatchMembers(bool late);
  void WatchToo(WorkerId member);
  void StopWatching();
  void SetLost(WorkerId worker, Incarnation incarnation, absl::string_view reason);
  void SetAlive(WorkerId worker, Incarnation incarnation);
  void Close();

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
  void OnWatchedLinkClosed(const MemberWatch::ClosedLink& link, const absl::Status& why);
  void Ping(WorkerId peer);
  std::vector<std::shared_ptr<Link>> AllLinks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddOther(const std::shared_ptr<Link>& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Handle(const std::shared_ptr<Link>& link, Packet packet);
  absl::Status HandleOrFail(const std::shared_ptr<Link>& link, Packet packet);
  absl::StatusOr<std::shared_ptr<Link>> LinkTo(WorkerId to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnReply(WorkerId peer, const Frame& frame, Body reply);
  absl::Status Serve(const std::shared_ptr<Link>& link, WorkerId peer, const Frame& frame,
                     Packet packet, size_t offset);
  absl::StatusOr<SendWindow::Credit> AwaitCredit(const std::shared_ptr<SendWindow>& window,
                                                 uint64_t bytes, const CallTerms& terms);
  absl::Status TooLarge(absl::string_view what, uint64_t size) const;
  CallCounters* CountNotice(WorkerId peer, bool served);
  std::string Describe(WorkerId worker) const { return peers_->Describe(worker); }
  absl::Status NoWorker(int id) const;

  // Synchronize themselves.
  const std::shared_ptr<Peers> peers_;
  const std::shared_ptr<CallTable> calls_;
  Heartbeat heartbeat_;  // of the clock's thread
  MemberWatch watch_;    // synchronizes itself

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
  std::optional<Clock::TimerId> heartbeat_timer_ ABSL_GUARDED_BY(mu_);
  std::optional<Clock::TimerId> watch_timer_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_AGENT_IMPL_H_
