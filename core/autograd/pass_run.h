// One pass on one worker: ties the protocol (Pass) to the local graph (Execution) and to the
// network.
#ifndef DISTGRAD_CORE_AUTOGRAD_PASS_RUN_H_
#define DISTGRAD_CORE_AUTOGRAD_PASS_RUN_H_

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/autograd/context_record.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/graph.h"
#include "core/autograd/executor/streams.h"
#include "core/autograd/notice.h"
#include "core/autograd/pass.h"
#include "core/autograd/pass_handle.h"
#include "core/autograd/pass_services.h"
#include "core/autograd/state.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/base/strand.h"
#include "core/base/trace.h"
#include "core/transport/packet.h"

namespace distgrad {

// Thread-safe.
class PassRun : public PassHandle,
                public PassHost,
                public GradientSink,
                public Canceller,
                public std::enable_shared_from_this<PassRun> {
 public:
  struct Roots {
    std::vector<at::Tensor> tensors;
    std::vector<at::Tensor> gradients;
    ReadyMark ready;
  };

  // `settled`: see Notice.
  PassRun(PassServices* services, std::shared_ptr<ContextRecord> context, PassId id, PassId settled,
          bool retain_graph, std::optional<Roots> roots);

  // Begins the pass; on the initiator, once. To cancel the future fails the pass.
  Future<Unit> Begin(absl::Time deadline, RunHere here);

  // PassHandle
  PassId id() const override { return id_; }
  void OnNotices(WorkerRank from, std::vector<Notice> notices, RunHere here) override;
  void OnNewRecv(size_t place, EdgeEnd end) override;
  void OnLostSend(EdgeId edge) override;
  void OnRelease(const absl::Status& why) override;
  void OnPeerLost(WorkerRank peer, const absl::Status& why) override;
  void Fail(const absl::Status& why) override;
  bool engaged() override;
  PassState State() override;

 private:
  struct Feed {
    Graph::Index root;
    std::vector<at::Tensor> gradients;
    ReadyMark ready;  // of the gradients
    absl::InlinedVector<bool, 8> reached;
    bool cheap;  // what it can make run
  };
  // The gradients that came to the recv nodes of an edge.
  struct Captured {
    struct Part {
      at::Tensor gradient;
      ReadyMark ready;
      bool reached = false;
    };
    EdgeEnd end;
    absl::InlinedVector<Part, 1> parts;  // by tensor
  };
  // The gradients of an edge with several recv nodes, of which some have had theirs.
  struct Gathering {
    size_t missing = 0;
    Captured captured;
  };

  // What the workers that take part were waiting for when the initiator's deadline passed.
  struct Reports {
    std::set<WorkerRank> heard;    // workers that have reported
    std::set<WorkerRank> missing;  // workers that were told of the abort, and have not
    std::vector<std::string> parts;
  };

  // Runs `task` on the strand. `others`: see Strand::Run().
  void Post(absl::AnyInvocable<void()> task, RunHere here, ThreadPool* others = nullptr);
  // Runs `task` on the strand, without what it feeds.
  void RunOnStrand(absl::AnyInvocable<void()> task, ThreadPool* others = nullptr);
  // Runs what is queued. The calling thread has been counted in coming_.
  void RunFeeds(RunHere here);
  // Drops what a thread has run nodes of.
  void LetGo(std::shared_ptr<Execution> execution);
  // Ends what may have something of the user's: here, or on the pool where the thread may be the
  // clock's or the sockets', which must run nothing of users'.
  template <typename T>
  void EndWhereItMay(T ended);
  // Has the pool run what is queued, unless enough threads are coming.
  void CallHelpers();
  void Settle();
  // Completes the initiator's future, once the pass has ended.
  void Tell();
  // Begins a span; null unless a trace runs.
  std::unique_ptr<TraceSpan> BeginSpan(TraceSpan::Kind kind);
  absl::Status LocalError(const absl::Status& why);

  // ---- On strand_ only.
  absl::StatusOr<PassPlan> Engage(std::optional<EdgeId> by) override;
  void FeedRoots() override;
  void FeedSend(EdgeId edge, Notice* arrived) override;
  bool Idle() override;
  void Stop(const absl::Status& why) override;
  void SendNoGradient(EdgeEnd edge, bool uncounted) override;
  void SendStart(WorkerRank to) override;
  void SendAck(WorkerRank to, uint32_t count) override;
  void SendAbort(WorkerRank to, const absl::Status& why) override;
  void Finish(const absl::Status& status) override;
  absl::StatusOr<PassPlan> TraverseGraph(std::optional<EdgeId> by);
  void OnNoticeOnStrand(WorkerRank from, Notice& notice);
  void FlushCapturedOnStrand();
  void PostFlush(bool in_node);
  // Fails the pass, unless it is over, and waits no longer for what others would say of it.
  void FailWith(const absl::Status& why);
  // A task has thrown: a device has failed, say, or memory cannot be had. Fails the pass; returns
  // with what.
  absl::Status FailOnStrand(std::exception_ptr thrown);
  void OnThrowOnStrand(std::exception_ptr thrown);
  // Has what a task fed run, and what it left to be sent, sent; after each task.
  void EndTaskOnStrand();
  void EndOnStrand();
  void OnDeadlineOnStrand();
  void SendReportOnStrand();
  void TakeReportOnStrand(WorkerRank from, const Notice& report);
  void EndReportsOnStrand();
  void Deliver(WorkerRank to, Notice notice);
  absl::Status AppendOnStrand(WorkerRank to, const Notice& notice);
  void Queue(Feed feed);
  std::string DescribeAwaitedOnStrand();
  std::shared_ptr<Execution> execution();

  // Canceller
  void Cancel(uint64_t pass) override;

  // ---- GradientSink, on the threads that run nodes.
  void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) override;
  void OnStop(torch::autograd::Node& stop, std::vector<at::Tensor> gradients,
              bool reached) override;
  void OnNext(torch::autograd::Node* next) override;
  void OnWait() override;
  void OnIdle() override;

  // Constant after construction.
  PassServices* const services_;
  const std::shared_ptr<ContextRecord> context_;
  const PassId id_;
  const PassId settled_;
  const bool retain_graph_;

  // Synchronizes itself.
  Strand strand_;
  std::atomic<size_t> outstanding_{0};     // feeds that are queued or running
  std::atomic<bool> has_captured_{false};  // for threads that do not hold mu_

  // State of strand_ only.
  std::shared_ptr<const Graph> graph_;
  Pass pass_;
  std::optional<Roots> roots_;
  std::optional<Promise<Unit>> promise_;  // on the initiator
  // The thread state of the initiator's caller, until the graph is traversed.
  std::optional<at::ThreadLocalState> thread_state_;
  std::optional<Clock::TimerId> timer_;
  std::unique_ptr<TraceSpan> span_;
  size_t known_recvs_ = 0;  // those that the plan has
  absl::flat_hash_map<EdgeId, Graph::Index> send_roots_;
  Graph::Index root_ = Graph::kNone;  // of the roots
  std::map<WorkerRank, absl::InlinedVector<Packet, 1>> outbox_;
  std::optional<absl::Status> over_;  // how the pass ended; constant once ended_
  bool ended_ = false;                // and that all were told
  bool has_lent_gradients_ = false;   // memory of the program's, which it frees
  bool told_ = false;                 // the caller that waits for it, on the initiator
  // The thread of the task that runs is in the middle of something else: see Strand::Run().
  bool on_users_thread_ = false;
  std::optional<Reports> reports_;  // on the initiator, from its deadline on
  bool reported_ = false;           // on the others

  absl::Mutex mu_;
  // Guarded by mu_.
  std::shared_ptr<Execution> execution_ ABSL_GUARDED_BY(mu_);  // from engaging until it is over
  std::deque<Feed> feeds_ ABSL_GUARDED_BY(mu_);
  // Threads on their way to take a feed. After each task on the strand at least one for each feed
  // that is queued, up to kMaxHelpers: nothing fed is left lying.
  size_t coming_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<EdgeId, Gathering> gathering_ ABSL_GUARDED_BY(mu_);
  std::vector<Captured> captured_ ABSL_GUARDED_BY(mu_);
  size_t captured_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time captured_since_ ABSL_GUARDED_BY(mu_);  // the first of them
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_PASS_RUN_H_
