// The transport's loop, as the user's threads see it while they wait for an answer: what they do
// for it meanwhile, they do as a new thread would, not in their own grad mode, autocast, profiler
// or hooks, nor at the cost of the operator that waits (AllocationLimit).
#ifndef DISTGRAD_CORE_WORKER_CALLERS_LOOP_H_
#define DISTGRAD_CORE_WORKER_CALLERS_LOOP_H_

#include <memory>

#include "core/base/event_loop.h"

namespace distgrad {

// Wraps `loop`; returns null for null.
std::shared_ptr<EventLoop> NewCallersLoop(std::shared_ptr<EventLoop> loop);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALLERS_LOOP_H_
