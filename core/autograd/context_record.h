// The state of a context on one worker: the send and recv nodes of its edges, the workers that
// know of it, and the gradients that its passes gave.
#ifndef DISTGRAD_CORE_AUTOGRAD_CONTEXT_RECORD_H_
#define DISTGRAD_CORE_AUTOGRAD_CONTEXT_RECORD_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "core/autograd/executor/source_node.h"
#include "core/autograd/executor/streams.h"
#include "core/autograd/pass.h"
#include "core/autograd/pass_handle.h"
#include "core/autograd/recv_node.h"
#include "core/autograd/state.h"
#include "core/base/ids.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace distgrad {

// Thread-safe.
class ContextRecord {
  class LeafGradient;
  using LeafGradients = absl::flat_hash_map<const c10::TensorImpl*, std::shared_ptr<LeafGradient>>;

 public:
  struct SendEnd {
    EdgeEnd end;
    std::shared_ptr<SourceNode> node;
    // Of the results of an operator that a peer has called: all that the node leads to was made by
    // that call, and the peer chose what it was made of.
    bool of_operator = false;
  };
  struct RecvEnd {
    EdgeEnd end;
    RecvNodes nodes;  // none of a message that could not be taken
  };
  // The edges there were at one moment.
  struct Edges {
    std::vector<SendEnd> sends;
    std::vector<RecvEnd> recvs;
  };

  using Holder = ContextHolder;

  explicit ContextRecord(ContextId id) : ContextRecord(id, Holder()) {}
  ContextRecord(ContextId id, Holder holder, uint64_t number = 0)
      : id_(id), holder_(holder), number_(number) {}
  ContextId id() const { return id_; }
  Holder holder() const { return holder_; }
  // Which one it is of those that this worker has ever known; of ContextRegistry::begun().
  uint64_t number() const { return number_; }

  // This worker leaves the job, and refuses the context's calls: it takes no part but for their
  // edges, which it has none the less.
  void SetRefused() { refused_ = true; }
  bool refused() const { return refused_; }

  // ---- Edges. kFailedPrecondition once released; kUnavailable if the worker at the other end was
  // lost since the context began, for then an edge may have been lost with it.

  absl::Status AddSend(SendEnd send);
  // Removes the send end of an edge whose message never left this worker. Returns its node, null if
  // it is gone.
  std::shared_ptr<SourceNode> RemoveSend(EdgeId edge);
  // Returns its place among the recv ends, and the passes that know only of those before it, also
  // those that are over on this worker.
  absl::StatusOr<std::pair<size_t, std::vector<std::shared_ptr<PassHandle>>>> AddRecv(RecvEnd recv);
  // The workers to which, or from which, a message of this context went, without this one.
  absl::Status AddPeer(WorkerRank peer);
  std::vector<WorkerRank> Peers() const;
  // Whether all of the graph takes so little time that the thread that received the first message
  // of a pass may traverse it, and run it. See executor/cheap_graph.h.
  bool CheapToRunInline() const;
  // The connection with a worker broke. Returns whether it was a peer.
  bool LosePeer(WorkerRank peer, const absl::Status& why);

  // ---- Passes.

  struct Found {
    std::shared_ptr<PassHandle> run;  // null if the pass has failed, or the context is released
    absl::Status over;                // how it ended, or why it cannot go well
    bool done = false;                // it has gone well, and `run` is kept for what may come late
  };
  // Begins a pass on this worker, `self`. `make` is given Notice::settled.
  absl::StatusOr<std::shared_ptr<PassHandle>> BeginPass(
      WorkerRank self, absl::FunctionRef<std::shared_ptr<PassHandle>(PassId settled)> make);
  // Finds a pass. `make` makes it if it is new here, another worker's, and `from`, whose message it
  // is, has not been lost: no worker would say when it is over. If it is not new and
  // `from` has been lost, Found::over says so: `from` may wait for gradients of messages that were
  // refused here for that reason.
  using MakeRun = absl::FunctionRef<std::shared_ptr<PassHandle>()>;
  Found FindPass(PassId pass) const;
  Found FindOrAddPass(PassId pass, WorkerRank from, PassId settled, MakeRun make);
  // Ends a pass. One that is done is kept until it is known to be so everywhere: see
  // Pass::OnLateRecv.
  void EndPass(PassId pass, const absl::Status& status);
  // The passes in flight.
  std::vector<std::shared_ptr<PassHandle>> Passes() const;

  // Whether the pass may run the graph, and the graph's edges at this moment. A pass without
  // `retain_graph` is the last one, and must be alone.
  absl::StatusOr<Edges> Claim(PassId pass, bool retain_graph);

  // ---- Gradients. On an accelerator: written in the order of this thread's current stream, and
  // read in that of the reader's, which is made to wait for the values; no thread waits for a
  // device.

  // Adds to the gradient of a leaf, and calls its post-accumulate hook, which sees what the context
  // has for the leaf so far, and may change or drop it. Takes the tensor over where nothing else
  // holds it or its memory.
  void Accumulate(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient);
  // Adds a gradient that no backward has computed: calls neither the hook nor the leaf observer.
  void AddToGradient(const at::Tensor& leaf, at::Tensor gradient);
  // Sets whether the gradient of a leaf counts in norms over all gradients of the context, as all
  // do at first. Of leaves, here or on several workers, that have one gradient together, as copies
  // of one parameter have, one counts.
  void SetCountsInNorms(const at::Tensor& leaf, bool counts);
  // Adds the gradients of another context, as passes that gave them here would have, but calls
  // neither hooks nor the leaf observer. The other one has none any more. kFailedPrecondition, and
  // nothing has changed, if one of the two is released, or has a leaf observer, as averages in the
  // backward have; any other error leaves part of it done.
  absl::Status TakeGradientsOf(ContextRecord& other);
  // The gradient of a leaf; kNotFound if no pass gave it one, kFailedPrecondition once released.
  absl::StatusOr<at::Tensor> Gradient(const at::Tensor& leaf) const;
  // The gradients of several leaves; undefined for one that has none.
  absl::StatusOr<std::vector<at::Tensor>> GradientsOf(absl::Span<const at::Tensor> leaves) const;
  // The same of those that count in norms; undefined for all others.
  absl::StatusOr<std::vector<at::Tensor>> GradientsInNorms(
      absl::Span<const at::Tensor> leaves) const;
  // All leaves with a gradient; kFailedPrecondition once released.
  absl::StatusOr<std::vector<std::pair<at::Tensor, at::Tensor>>> Gradients() const;
  // Replaces the gradient of a leaf that has one (clipping, averaging over replicas).
  // kInvalidArgument unless it has the sizes, dtype and device of the leaf; else errors as above.
  absl::Status SetGradient(const at::Tensor& leaf, at::Tensor gradient);
  // Is called with each leaf whose gradient a pass has added to, on the thread that did; what it
  // throws fails that pass. Null: none. Ends with the context's release. Both may wait.
  using LeafObserver = std::function<void(const at::Tensor& leaf)>;
  void SetLeafObserver(LeafObserver observer);
  bool has_leaf_observer() const;

  // All that a context had. Its end runs what users' graphs and hooks hold, and may wait.
  struct Released {
    std::vector<std::shared_ptr<PassHandle>> passes;  // that were in flight
    std::map<PassId, std::shared_ptr<PassHandle>> done;
    Edges edges;
    LeafGradients gradients;
    std::shared_ptr<const LeafObserver> observer;
    bool empty() const {
      return passes.empty() && done.empty() && edges.sends.empty() && edges.recvs.empty() &&
             gradients.empty() && observer == nullptr;
    }
  };
  // Drops all that the context has; idempotent.
  Released Release();
  bool released() const;

  // Returns the state of all but the passes.
  ContextState State() const;

 private:
  // How many failed passes are remembered.
  static constexpr size_t kRemembered = 1024;

  // The gradient of one leaf. Its mutex is held while torch adds, for two passes may add to one
  // leaf; large additions to different leaves go on at the same time. Thread-safe.
  class LeafGradient {
   public:
    explicit LeafGradient(at::Tensor leaf) : leaf_(std::move(leaf)) {}
    const at::Tensor& leaf() const { return leaf_; }
    void Add(at::Tensor gradient);
    bool defined() const;
    // Returns the gradient; undefined if there is none.
    at::Tensor Get() const;
    // Returns the gradient, which is gone then; undefined if there was none.
    at::Tensor Take();
    void Set(at::Tensor gradient);
    // Sets the gradient if there is one. Returns whether there was.
    bool Replace(at::Tensor gradient);
    bool counts_in_norms() const;
    void SetCountsInNorms(bool counts);

   private:
    const at::Tensor leaf_;
    mutable absl::Mutex mu_;
    at::Tensor gradient_ ABSL_GUARDED_BY(mu_);
    ReadyMark ready_ ABSL_GUARDED_BY(mu_);
    bool counts_in_norms_ ABSL_GUARDED_BY(mu_) = true;
  };

  LeafGradients AllGradients() const;
  // Returns null once released.
  std::shared_ptr<LeafGradient> GradientToAddTo(const at::Tensor& leaf)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(gradients_mu_);
  // Of leaves, in their order; null for one that has none.
  absl::StatusOr<std::vector<std::shared_ptr<LeafGradient>>> Find(
      absl::Span<const at::Tensor> leaves) const;
  // The gradients of leaves, in their order; undefined for one that has none, or none that `wants`.
  absl::StatusOr<std::vector<at::Tensor>> Read(
      absl::Span<const at::Tensor> leaves,
      absl::FunctionRef<bool(const LeafGradient&)> wants) const;
  absl::Status NoGradient() const;
  absl::Status ReleasedError() const;
  absl::Status CheckAlive() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckReachable(WorkerRank peer) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  Found FindPassLocked(PassId pass) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Takes the passes out of done_ that are over everywhere; they end outside the lock.
  std::vector<std::shared_ptr<PassHandle>> TakeSettled(PassId settled)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ContextId id_;
  const Holder holder_;
  const uint64_t number_;
  std::atomic<bool> refused_{false};  // set once

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  Edges edges_ ABSL_GUARDED_BY(mu_);
  std::set<WorkerRank> peers_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<PassId, std::shared_ptr<PassHandle>> passes_ ABSL_GUARDED_BY(mu_);
  std::map<WorkerRank, absl::Status> lost_ ABSL_GUARDED_BY(mu_);  // peers, and how
  std::map<PassId, std::shared_ptr<PassHandle>> done_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<PassId, absl::Status> failed_ ABSL_GUARDED_BY(mu_);
  std::deque<PassId> failed_order_ ABSL_GUARDED_BY(mu_);
  PassId last_begun_ ABSL_GUARDED_BY(mu_) = 0;       // on this worker
  std::vector<PassId> claims_ ABSL_GUARDED_BY(mu_);  // passes that run the graph now
  PassId last_pass_ ABSL_GUARDED_BY(mu_) = 0;        // the one that did not retain the graph

  // Is never held together with mu_, nor with the mutex of a LeafGradient.
  mutable absl::Mutex gradients_mu_;
  bool gradients_dropped_ ABSL_GUARDED_BY(gradients_mu_) = false;
  LeafGradients gradients_ ABSL_GUARDED_BY(gradients_mu_);
  std::shared_ptr<const LeafObserver> observer_ ABSL_GUARDED_BY(gradients_mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_CONTEXT_RECORD_H_
