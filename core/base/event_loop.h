// What a thread that waits for events, and runs tasks in between, offers to code that it calls.
//
// Whoever is called in the middle of an event (a packet that arrived, with the connection's locks
// or strands taken) may neither wait nor take long. What takes little time, but may wait, can be
// put off until the thread is back in its loop: that is cheaper than waking another thread. If it
// does wait, in a BlockingScope, somebody else takes over the loop.
#ifndef DISTGRAD_CORE_BASE_EVENT_LOOP_H_
#define DISTGRAD_CORE_BASE_EVENT_LOOP_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "core/base/deadline.h"

namespace distgrad {

// Thread-safe.
class EventLoop {
 public:
  // A thread that waits for what the loop will bring, and looks for it itself.
  class Visitor {
   public:
    virtual ~Visitor() = default;
    // Handles what has come, in place of the loop's own thread, if that has nothing to do. Does
    // not wait. Whether there was anything.
    virtual bool Look() = 0;
    // The same, but sleeps until something comes, WakeVisitor(), or `deadline`. False, at once,
    // where another thread has that to do.
    virtual bool Sleep(Deadline deadline) = 0;
  };

  virtual ~EventLoop() = default;

  // Has the loop's thread run `task` between two events, after those before it. Dropped if the
  // loop ends first.
  virtual void Run(absl::AnyInvocable<void()> task) = 0;

  // For what is not brief, on the thread that handles events: whether the loop can do without it
  // afterwards, so that it may run a task of `work` (null: of nobody's) then, and has it do so. It
  // need not be woken for that, as a pool's would; and another thread is, to wait for events
  // meanwhile, only if some come. A visitor can be had only for what it waits for.
  virtual bool CanRunDeferred(const void* work) { return false; }
  // Only if it can.
  virtual void RunDeferred(absl::AnyInvocable<void()> task) { Run(std::move(task)); }

  // For the calling thread, which does nothing else until it has destroyed it.
  // So nobody needs to be woken to tell it. Null where others do what is to be done: there is one
  // visitor at a time.
  virtual std::unique_ptr<Visitor> Visit() { return nullptr; }

  // Wakes the visitor that sleeps: what it waits for has happened elsewhere.
  virtual void WakeVisitor() {}

  // How many things the calling thread has asked for that some loop is to bring. Who waits for the
  // last of them has nothing else to do.
  static uint64_t& AskedByThisThread();
  // Whose result the calling thread waits for, visiting; null for nobody's.
  static const void*& AwaitedByThisThread();

  // The loop that the calling thread is the thread of, a visitor's too; null on others.
  static EventLoop* Current();

 protected:
  static void SetCurrent(EventLoop* loop);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_EVENT_LOOP_H_
