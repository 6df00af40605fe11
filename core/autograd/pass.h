// The backward protocol on one worker: one pass of one context, as a state machine over an
// interface for everything it does. It knows neither tensors nor sockets, so a test can run it
// for every order of messages (pass_test.cc). docs/autograd.md explains the protocol.
#ifndef DISTGRAD_CORE_AUTOGRAD_PASS_H_
#define DISTGRAD_CORE_AUTOGRAD_PASS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/ids.h"

namespace distgrad {

struct Notice;  // notice.h; handed on, and not read here

// An edge of the context and the worker at its other end.
struct EdgeEnd {
  EdgeId edge = 0;
  WorkerRank peer = 0;
};

// The findings of a worker when it traverses its local graph to take part in a pass.
struct PassPlan {
  // Every send node of the context: each gets exactly one message in this pass.
  std::vector<EdgeEnd> sends;
  // The edges to whose recv nodes no send node and no root leads: no gradient will reach them.
  std::vector<EdgeEnd> dead;
  // The workers of edges whose message will go without waiting for any other worker: their recv
  // nodes are reached from the roots or from the edge that engaged this worker, and from no other
  // send node.
  std::vector<WorkerRank> certain;
  // The workers at the other ends of all send and recv nodes.
  std::vector<WorkerRank> peers;
};

// What a pass asks of its worker. Called on the strand of the pass.
class PassHost {
 public:
  virtual ~PassHost() = default;

  // Traverses the local graph. `by` is the edge whose message engaged this worker, if it was one.
  virtual absl::StatusOr<PassPlan> Engage(std::optional<EdgeId> by) = 0;

  // Runs the roots; on the initiator only, once.
  virtual void FeedRoots() = 0;
  // Runs the send node of `edge` with what has arrived for it; null: no gradient.
  virtual void FeedSend(EdgeId edge, Notice* arrived) = 0;
  // Whether all that was fed has been followed to its end.
  virtual bool Idle() = 0;
  // Runs nothing more.
  virtual void Stop(const absl::Status& why) = 0;

  // Messages. To this worker itself only SendNoGradient is sent; it arrives as OnEdge later.
  // `uncounted`: see Pass::OnEdge.
  virtual void SendNoGradient(EdgeEnd edge, bool uncounted) = 0;
  virtual void SendStart(WorkerRank to) = 0;
  virtual void SendAck(WorkerRank to, uint32_t count) = 0;
  virtual void SendAbort(WorkerRank to, const absl::Status& why) = 0;

  // The pass is over on this worker: called once. On the initiator OK means that it is over
  // everywhere. Afterwards messages may still be answered.
  virtual void Finish(const absl::Status& status) = 0;
};

// One worker's part in a pass. For the strand of the pass only.
class Pass {
 public:
  Pass(WorkerRank self, PassHost* host) : self_(self), host_(host) {}

  // Begins the pass; on the initiator, once.
  void Begin();

  // Handles messages of this pass. `from` may be this worker itself. A pass that is over answers
  // them: others may still be at it. An `uncounted` one is not acknowledged: its sender knows that
  // we take part, for we have sent it something, and so that we wait for it ourselves. `arrived` is
  // for PassHost::FeedSend().
  void OnEdge(WorkerRank from, EdgeId edge, bool uncounted, Notice* arrived = nullptr);
  void OnStart(WorkerRank from);
  void OnAck(WorkerRank from, uint32_t count);
  void OnAbort(WorkerRank from, const absl::Status& why);

  // Returns whether the gradient of a recv node that the host sends to `to` is to be counted.
  bool CountGradient(WorkerRank to);
  // What was fed has been followed to its end, or stopped with this status.
  void OnIdle(const absl::Status& status);
  // A recv node was made after this worker engaged: a reply came late. No gradient will reach it.
  // If our part is over, its other end hears that in a message that is neither counted nor
  // acknowledged; and only once we know that it is engaged, because it has said so.
  void OnLateRecv(EdgeEnd edge);
  // The message that was to make a recv node never left this worker.
  void OnLostSend(EdgeId edge);
  // The pass cannot go on: a node threw, a deadline passed, the context was released.
  void Fail(const absl::Status& why);
  // A worker is gone. Fails the pass if it took part.
  void OnPeerLost(WorkerRank peer, const absl::Status& why);

  bool running() const { return state_ == State::kRunning; }
  bool over() const { return state_ == State::kDone || state_ == State::kFailed; }
  // The send nodes that still wait for their message.
  std::vector<EdgeEnd> Awaited() const;
  // The workers that are told if it fails; while it runs, and after it failed.
  const std::set<WorkerRank>& peers() const { return peers_; }
  // The number of our messages that each peer has not acknowledged. No zeros.
  const std::map<WorkerRank, uint32_t>& Unacknowledged() const { return unacknowledged_; }

 private:
  enum class State {
    kNotEngaged,  // heard of, at most
    kRunning,     // engaged
    kDone,        // this worker's part is over, and of all that it engaged
    kFailed,      // aborted
  };

  // Counts a message that is to be acknowledged, which may be the first of the pass (and then of
  // the edge `by`). Returns whether the pass runs here.
  bool Count(WorkerRank from, std::optional<EdgeId> by);
  void Engage(std::optional<WorkerRank> parent, std::optional<EdgeId> by);
  void Feed(EdgeId edge, Notice* arrived);
  // Whether a message to `to` is to be acknowledged; if so, counts it.
  bool CountSent(WorkerRank to);
  void Advance();
  void Abort(const absl::Status& why, std::optional<WorkerRank> from);

  const WorkerRank self_;
  PassHost* const host_;

  State state_ = State::kNotEngaged;
  std::optional<WorkerRank> parent_;  // whose message engaged this worker; none on the initiator
  std::set<WorkerRank> peers_;
  std::map<EdgeId, WorkerRank> awaited_;  // send nodes without their message yet
  // Messages not yet acknowledged by us, by sender; all senders that there were.
  std::map<WorkerRank, uint32_t> owed_;
  std::map<WorkerRank, uint32_t> unacknowledged_;  // messages of ours; no zeros
  // Edges that came late, of workers that may not be engaged yet.
  std::map<WorkerRank, std::vector<EdgeEnd>> late_;
  bool local_done_ = false;
  absl::Status why_;  // if failed
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_PASS_H_
