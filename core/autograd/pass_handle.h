// One pass on one worker, as its context and the engine have it.
#ifndef DISTGRAD_CORE_AUTOGRAD_PASS_HANDLE_H_
#define DISTGRAD_CORE_AUTOGRAD_PASS_HANDLE_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "core/autograd/notice.h"
#include "core/autograd/pass.h"
#include "core/autograd/state.h"
#include "core/base/ids.h"

namespace distgrad {

// Whether the calling thread runs nodes of the graph; only where MayRunNodesHere().
enum class RunHere {
  kNo,
  kYes,
  kCheap,  // those that are cheap (executor/cheap_graph.h), and a few of them: the pool runs the
           // rest
};

// Thread-safe.
class PassHandle {
 public:
  virtual ~PassHandle() = default;

  virtual PassId id() const = 0;
  virtual void OnNotices(WorkerRank from, std::vector<Notice> notices, RunHere here) = 0;
  // `place`: where the node stands among the context's recv nodes.
  virtual void OnNewRecv(size_t place, EdgeEnd end) = 0;
  // See Pass::OnLostSend.
  virtual void OnLostSend(EdgeId edge) = 0;
  // The same as Fail(), where the calling thread releases the context.
  virtual void OnRelease(const absl::Status& why) = 0;
  virtual void OnPeerLost(WorkerRank peer, const absl::Status& why) = 0;
  virtual void Fail(const absl::Status& why) = 0;
  // Whether it has traversed the graph, and is in flight on this worker.
  virtual bool engaged() = 0;
  // Returns the pass's state. Must not be called from a callback of the pass.
  virtual PassState State() = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_PASS_HANDLE_H_
