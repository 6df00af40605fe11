// What one worker holds of a context: the send and recv nodes of its edges, the workers that
// know of it, and the gradients that its passes gave.
#ifndef DISTGRAD_CORE_AUTOGRAD_CONTEXT_RECORD_H_
#define DISTGRAD_CORE_AUTOGRAD_CONTEXT_RECORD_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/executor/source_node.h"
#include "core/autograd/pass.h"
#include "core/autograd/recv_node.h"
#include "core/base/ids.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace distgrad {

class PassRun;

// Thread-safe.
class ContextRecord {
 public:
  struct SendEnd {
    EdgeEnd end;
    std::shared_ptr<SourceNode> node;
  };
  // The edges there were at one moment. Both lists only ever grow.
  struct Edges {
    std::vector<SendEnd> sends;
    std::vector<std::shared_ptr<RecvNode>> recvs;
  };

  explicit ContextRecord(ContextId id) : id_(id) {}
  ContextId id() const { return id_; }

  // ---- Edges. kFailedPrecondition once released.

  absl::Status AddSend(SendEnd send);
  // The call that was to carry it never left this worker.
  void RemoveSend(EdgeId edge);
  // Returns its place among the recv nodes, and the passes that know only of those before it.
  absl::StatusOr<std::pair<size_t, std::vector<std::shared_ptr<PassRun>>>> AddRecv(
      std::shared_ptr<RecvNode> recv);
  // Everyone to whom, or from whom, a message of this context went. Not this worker.
  void AddPeer(WorkerId peer);
  std::vector<WorkerId> Peers() const;

  // ---- Passes.

  struct Found {
    std::shared_ptr<PassRun> run;  // null if the pass is over, or the context is released
    absl::Status over;             // how it ended
  };
  // The pass, made by `make` if it is new here.
  Found FindOrAddPass(PassId pass, absl::FunctionRef<std::shared_ptr<PassRun>()> make);
  void EndPass(PassId pass, const absl::Status& status);
  std::vector<std::shared_ptr<PassRun>> Passes() const;

  // Whether the pass may run the graph, and the graph's edges at this moment. A pass without
  // `retain_graph` is the last one, and must be alone.
  absl::StatusOr<Edges> Claim(PassId pass, bool retain_graph);

  // ---- Gradients.

  // Adds to the gradient of a leaf; takes the tensor over where nobody else holds it.
  void Accumulate(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient);
  // The gradient of a leaf; kNotFound if no pass gave it one.
  absl::StatusOr<at::Tensor> Gradient(const at::Tensor& leaf) const;
  // All leaves with a gradient.
  std::vector<std::pair<at::Tensor, at::Tensor>> Gradients() const;
  // Replaces the gradient of a leaf that has one (clipping, averaging over replicas).
  absl::Status SetGradient(const at::Tensor& leaf, at::Tensor gradient);

  // Drops everything. Returns the passes that were under way; idempotent.
  std::vector<std::shared_ptr<PassRun>> Release();
  bool released() const;

 private:
  struct LeafGradient {
    at::Tensor leaf;
    at::Tensor gradient;
  };

  absl::Status CheckAlive() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const ContextId id_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  Edges edges_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<WorkerId> peers_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<PassId, std::shared_ptr<PassRun>> passes_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<PassId, absl::Status> over_ ABSL_GUARDED_BY(mu_);
  std::vector<PassId> claims_ ABSL_GUARDED_BY(mu_);  // passes that run the graph now
  PassId last_pass_ ABSL_GUARDED_BY(mu_) = 0;        // the one that did not retain the graph

  // Held while torch adds: the gradient of a leaf may be asked for by two passes at once.
  // Never together with mu_.
  mutable absl::Mutex gradients_mu_;
  absl::flat_hash_map<const c10::TensorImpl*, LeafGradient> gradients_
      ABSL_GUARDED_BY(gradients_mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_CONTEXT_RECORD_H_
