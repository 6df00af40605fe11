// The links of an agent: opened to where a peer is now, accepted from members only, kept alive by
// heartbeats, and ended. docs/membership.md has the rules.
//
// There is one link for each peer over which this worker calls. Others stand beside it: accepted
// ones that have not said hello yet, second ones where both ends opened one at the same time, bulk
// links, and the heartbeat's probes.
#ifndef DISTGRAD_CORE_RPC_LINK_TABLE_H_
#define DISTGRAD_CORE_RPC_LINK_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/base/monotonic_state.h"
#include "core/base/wire.h"
#include "core/membership/directory.h"
#include "core/membership/worker_info.h"
#include "core/rpc/call_table.h"
#include "core/rpc/frame.h"
#include "core/rpc/heartbeat.h"
#include "core/rpc/limits.h"
#include "core/rpc/link.h"
#include "core/rpc/member_watch.h"
#include "core/rpc/peers.h"
#include "core/transport/packet.h"
#include "core/transport/transport.h"

namespace distgrad {

// Thread-safe. Links keep it alive.
class LinkTable : public Link::Owner, public std::enable_shared_from_this<LinkTable> {
 public:
  // The owner of the links. Called on threads of the transport, of the clock and of the directory,
  // and on those that send, with no lock held. Thread-safe.
  class User {
   public:
    virtual ~User() = default;
    // Gets each packet, also from a peer that has not said hello yet. An error ends the link.
    virtual absl::Status OnPacket(const std::shared_ptr<Link>& link, Packet packet) = 0;
    // Returns a number that grows with what begins (contexts). Asked for when the links that end
    // take in no message any more, and before those who wait hear of it, who may begin anew at
    // once. What is being read then on another thread may begin something later: so whoever reads a
    // packet asks its link afterwards (IncomingCall::is_cut_off()).
    virtual uint64_t BegunSoFar() = 0;
    // Says that what was in flight with that peer may be lost, of what had begun until then
    // (BegunSoFar()). The peer may be back.
    virtual void OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) = 0;
    // Says that a link with a member that has not left has ended.
    virtual void OnLinkEnded(const MemberWatch::ClosedLink& link, const absl::Status& why) = 0;
    // Says that a member has answered which was taken for lost, by that loss (Peers::LossOf), and
    // is no longer.
    virtual void OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss) = 0;
    // Says that Peers may have new events.
    virtual void OnMemberEvents() = 0;
  };

  // `transport`, `clock` and `directory`, which may be null, must outlive Close().
  LinkTable(Clock* clock, Transport* transport, Directory* directory,
            absl::Duration heartbeat_limit, const Limits& limits, std::shared_ptr<Peers> peers,
            std::shared_ptr<CallTable> calls)
      : clock_(clock),
        transport_(transport),
        directory_(directory),
        shared_{.clock = clock, .limits = limits},
        peers_(std::move(peers)),
        calls_(std::move(calls)),
        heartbeat_(heartbeat_limit, limits.handshake_timeout) {}

  // Listens; called once. Returns the address. `user` is told nothing once it is gone.
  absl::StatusOr<std::string> Listen(std::weak_ptr<User> user);
  // Takes in what came before the members of the job were known. Called once, when Peers has them.
  void Start();
  // Ends all links, and lets none begin.
  void Close(const absl::Status& why);

  // Returns the link over which to call a peer, which is opened when something is sent. kCancelled
  // after Close(), kNotFound for an unknown peer.
  absl::StatusOr<std::shared_ptr<Link>> To(WorkerRank peer);
  // Returns whether something has come on the link to a peer.
  bool HasHeardFrom(WorkerRank peer) const;
  // Opens a link to a peer, if none is open; heartbeats keep it. Where this throws std::bad_alloc
  // the next call does it.
  void Ping(WorkerRank peer);
  // Returns whether a link with that incarnation of a peer stands on which something has come.
  bool Hears(WorkerRank peer, Incarnation incarnation) const;
  // Asks that incarnation of a peer, if it is taken for lost, on all links that stand with it
  // whether it lives: it is taken for alive when it answers.
  void AskLost(WorkerRank peer, Incarnation incarnation);

  // Take the frames that concern a link: a hello, the answer to a ping, and a peer's wish for a
  // bulk link, with our number for it.
  absl::Status OnHello(const std::shared_ptr<Link>& link, WireReader& reader);
  void OnPong(const std::shared_ptr<Link>& link);
  void OnBulk(const std::shared_ptr<Link>& link, WorkerRank peer, uint64_t number);
  // Ends a link on which something came that is lost, with all others of that peer, which is told
  // why.
  void GiveUp(const std::shared_ptr<Link>& link, WorkerRank peer, const absl::Status& why);

  // Takes in what the store says of a worker.
  absl::Status UpdatePeer(const WorkerInfo& worker) { return UpdatePeer(worker, nullptr); }
  // Tells all connected workers that this one leaves the job.
  void SayLeaving();

  // Return the bytes that wait to be sent, by peer, and the number of calls of others that have not
  // ended.
  std::vector<std::pair<WorkerRank, uint64_t>> Queued() const;
  size_t served() const { return shared_.served; }

  absl::Duration heartbeat_interval() const { return heartbeat_.interval(); }

  // Link::Owner
  void OnPacket(const std::shared_ptr<Link>& link, Packet packet) override;
  void OnBulkWanted(const std::shared_ptr<Link>& link) override;
  bool OnLeaving(uint64_t call, Packet& request) override;
  void OnClosed(const std::shared_ptr<Link>& link, absl::Status why, bool is_refused) override;

 private:
  enum class State {
    kHolding,  // what arrives is held, until it is known who is a member
    kStarted,
    kClosed,  // no link begins any more
  };
  struct Entry {
    enum class Mark {
      kNone,
      kSilent,   // for so long that its peer is lost
      kStale,    // it is dead, and its peer lives
      kDropped,  // it was refused or given up, or its peer has come back
    };
    std::shared_ptr<Link> link;
    absl::Time asked_for = absl::InfinitePast();  // when it was made, and then when it was opened
    Mark mark = Mark::kNone;
    uint64_t peers_number = 0;  // of one that was accepted: what its hello says
    // Of one with a peer that is taken for lost: the loss (Peers::LossOf) after which it was
    // pinged, as long as that is not answered (0: none); and how many pings are older.
    uint64_t loss = 0, asked_before = 0;

    void AwaitAnswer(uint64_t after) {
      loss = after;
      asked_before = link->asked();
    }
  };
  // What has ended of the links with a peer, by the numbers that their openers gave them.
  struct Ended {
    Incarnation incarnation = 0;  // of the peer, for another one numbers the links anew
    // Those that this worker has given up, as its hellos say: Hello::first_own and first_other.
    uint64_t first_own = 0, first_other = 0;
    uint64_t next_other = 0;     // greater than the numbers of all that the peer has opened
    uint64_t first_of_peer = 0;  // of those, the peer has given up the ones with smaller numbers
  };

  using Links = std::vector<std::shared_ptr<Link>>;

  std::shared_ptr<Link> Make(Link::Kind kind, absl::Time asked_for = absl::InfinitePast())
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Has calls to a peer go over that link, unless there is one for them. All of it, or nothing.
  void Use(WorkerRank peer, const std::shared_ptr<Link>& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Drop(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Drops all links with that incarnation of a peer, and those that have none yet, adds them to
  // `dropped`, and notes that they are given up. 0: whichever incarnation they are with.
  void DropAll(WorkerRank peer, Incarnation incarnation, Links* dropped)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Ended& EndedWith(WorkerRank peer, Incarnation incarnation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Opening: a link that was asked for, step by step.
  absl::StatusOr<std::shared_ptr<Link>> ToLocked(WorkerRank peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Open(const std::shared_ptr<Link>& link, WorkerRank to);
  void OnFound(const std::shared_ptr<Link>& link, WorkerRank to,
               const absl::StatusOr<WorkerInfo>& found);
  // Connects and says hello. `bulk_of`: the link that a bulk link is for, by the number for the
  // hello; 0 for a main link.
  void Connect(const std::shared_ptr<Link>& link, WorkerRank to, uint64_t bulk_of = 0);

  // Taking in: one that a peer opened.
  std::shared_ptr<Receiver> Accept(std::shared_ptr<Connection> connection);
  void OnFoundPeer(const std::shared_ptr<Link>& link, const Hello& hello,
                   const absl::StatusOr<WorkerInfo>& found);
  // Returns whether there is a link that the peer has given up, as its hello says.
  bool HasGivenUp(const Hello& hello) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void Admit(const std::shared_ptr<Link>& link, const Hello& hello);
  absl::Status AdmitBulk(const std::shared_ptr<Link>& link, const Hello& hello);
  void Refuse(const std::shared_ptr<Link>& link, const absl::Status& why);
  // Tells its peer why nothing more is taken from it, and has it close it.
  void SendRefused(Link& link, const absl::Status& why);

  // Ending, and heartbeats.
  absl::Status UpdatePeer(const WorkerInfo& worker, const std::shared_ptr<Link>& keep);
  // Drops all links with a peer but `keep`, and adds them to `old`, which has room for them.
  void DropOldIncarnation(WorkerRank peer, const std::shared_ptr<Link>& keep, Links* old)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Tells the loss, then ends the links. `tells_peer`: on each of them, as any one's end may be the
  // first that it hears of.
  void EndDropped(WorkerRank peer, const Links& links, const absl::Status& why,
                  bool tells_peer = false);
  void StartHeartbeat();
  void ArmHeartbeat();
  void Beat();
  // `links` and `mains`, which bulk links alone have, are those of the readings.
  void Follow(const Heartbeat::Verdict& verdict, const std::vector<Heartbeat::Reading>& readings,
              const Links& links, const Links& mains);
  void Probe(WorkerRank peer);

  Clock* const clock_;
  Transport* const transport_;
  Directory* const directory_;
  Link::Shared shared_;  // constant, or synchronizes itself

  // Synchronize themselves.
  const std::shared_ptr<Peers> peers_;
  const std::shared_ptr<CallTable> calls_;

  Heartbeat heartbeat_;       // of the clock's thread
  std::weak_ptr<User> user_;  // constant after Listen()

  mutable absl::Mutex mu_;
  MonotonicState<State> state_ ABSL_GUARDED_BY(mu_){State::kHolding};
  // The links that have not ended, by their number; and of those the one for each peer.
  std::map<uint64_t, Entry> links_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<WorkerRank, std::shared_ptr<Link>> by_peer_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<WorkerRank, Ended> ended_ ABSL_GUARDED_BY(mu_);
  uint64_t last_link_ ABSL_GUARDED_BY(mu_) = 0;
  bool beats_ ABSL_GUARDED_BY(mu_) = false;  // as long as there are links
  std::optional<Clock::TimerId> heartbeat_timer_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_LINK_TABLE_H_
