// A snapshot of a worker's part of distributed autograd: for tests, and to see what a job waits
// for.
#ifndef DISTGRAD_CORE_AUTOGRAD_STATE_H_
#define DISTGRAD_CORE_AUTOGRAD_STATE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "core/autograd/pass.h"
#include "core/base/ids.h"

namespace distgrad {

// A pass that runs on this worker.
struct PassState {
  PassId id = 0;
  bool retain_graph = false;
  // The send nodes that still wait for their message, and the workers that owe it.
  std::vector<EdgeEnd> awaited;
  // How many messages of ours each worker has not acknowledged.
  std::map<WorkerRank, uint32_t> unacknowledged;
  // Send nodes (and roots) that are running or about to.
  size_t busy = 0;
};

struct ContextState {
  ContextId id = 0;
  std::vector<WorkerRank> peers;  // with whom messages of this context were exchanged
  size_t sends = 0;
  size_t receives = 0;
  size_t gradients = 0;
  std::vector<PassState> passes;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_STATE_H_
