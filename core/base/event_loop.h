// What a thread that waits for events, and runs tasks in between, offers to code that it calls.
//
// Whoever is called in the middle of an event (a packet that arrived, with the connection's locks
// or strands taken) may neither wait nor take long. What takes little time, but may wait, can be
// put off until the thread is back in its loop: that is cheaper than waking another thread. If it
// does wait, in a BlockingScope, somebody else takes over the loop.
#ifndef DISTGRAD_CORE_BASE_EVENT_LOOP_H_
#define DISTGRAD_CORE_BASE_EVENT_LOOP_H_

#include "absl/functional/any_invocable.h"

namespace distgrad {

// Thread-safe.
class EventLoop {
 public:
  virtual ~EventLoop() = default;

  // Has the loop's thread run `task` between two events, after those before it. Dropped if the
  // loop ends first.
  virtual void Run(absl::AnyInvocable<void()> task) = 0;

  // The loop that the calling thread is the thread of; null on others.
  static EventLoop* Current();

 protected:
  static void SetCurrent(EventLoop* loop);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_EVENT_LOOP_H_
