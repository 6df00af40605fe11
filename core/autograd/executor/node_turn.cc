// Keeps a small table of the nodes that run now, and lets threads wait for their turn.
#include "core/autograd/executor/node_turn.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/check.h"

namespace distgrad {
namespace {

using torch::autograd::Node;

// Some of the nodes that are being run. Thread-safe.
class alignas(64) Running {
 public:
  bool TryAdd(const Node* node) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (Has(node)) return false;
    nodes_.push_back(node);
    return true;
  }
  void AwaitAndAdd(const Node* node) ABSL_LOCKS_EXCLUDED(mu_) {
    const auto is_free = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !Has(node); };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&is_free));
    nodes_.push_back(node);
  }
  void Remove(const Node* node) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    *std::find(nodes_.begin(), nodes_.end(), node) = nodes_.back();
    nodes_.pop_back();
  }

 private:
  bool Has(const Node* node) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::find(nodes_.begin(), nodes_.end(), node) != nodes_.end();
  }

  absl::Mutex mu_;
  absl::InlinedVector<const Node*, 4> nodes_ ABSL_GUARDED_BY(mu_);
};

// Nodes are the process's: contexts may share them, and so may workers. In parts, so that threads
// at different nodes rarely meet. It never ends, for other threads may be at nodes to the end.
Running& RunningLike(const Node* node) {
  constexpr size_t kParts = 64;
  static Running* const parts = new Running[kParts];
  const auto address = reinterpret_cast<uintptr_t>(node);
  return parts[(address >> 4 ^ address >> 10) % kParts];
}

thread_local bool is_held = false;

}  // namespace

NodeTurn::NodeTurn(const Node& node) : node_(&node) {
  DG_CHECK(!is_held) << "a thread at " << node.name() << " is at another node already";
  Running& running = RunningLike(node_);
  if (!running.TryAdd(node_)) {
    const BlockingScope blocking;
    running.AwaitAndAdd(node_);
  }
  is_held = true;
}

NodeTurn::~NodeTurn() {
  is_held = false;
  RunningLike(node_).Remove(node_);
}

bool NodeTurn::IsHeldHere() { return is_held; }

}  // namespace distgrad
