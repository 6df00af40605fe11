// What a thread that waits for events, and runs tasks in between, offers to code that it calls.
//
// Code that is called in the middle of an event (a packet that arrived, with the connection's locks
// or strands taken) may neither wait nor take long. A task that takes little time, but may wait,
// can be deferred until the thread is back in its loop: that is cheaper than waking another thread.
// If it does wait, in a BlockingScope, another thread takes over the loop.
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
  // A thread that waits for what the loop will bring, and which the loop borrows meanwhile.
  class BorrowedThread {
   public:
    virtual ~BorrowedThread() = default;
    // Handles what has come, as the leader, if the loop's own thread has nothing to do. Does not
    // wait. Returns whether there was anything.
    virtual bool PollOnce() = 0;
    // Does the same, but sleeps until something comes, WakeBorrowedThread(), or `deadline`. Returns
    // false, at once, where another thread leads.
    virtual bool Sleep(Deadline deadline) = 0;
  };

  virtual ~EventLoop() = default;

  // Has the loop's thread run `task` between two events, after those before it. Dropped if the
  // loop ends first.
  virtual void Run(absl::AnyInvocable<void()> task) = 0;

  // Tells, on the thread that handles events, whether the loop can do without this thread
  // afterwards, so that it may run a task of `work` (null: of none) that is too expensive to run
  // inline. This thread need not be woken for that, as a pool's would; and another thread is woken,
  // to wait for events meanwhile, only if some come. A borrowed thread runs only what it waits for.
  virtual bool CanRunDeferred(const void* work) { return false; }
  // Runs `task` so, where that has just said that it can. Throws nothing.
  virtual void RunDeferred(absl::AnyInvocable<void()> task) { Run(std::move(task)); }

  // Borrows the calling thread, which does nothing else until it has destroyed what is returned. So
  // no thread needs to be woken to tell it. Null where others do what is to be done: one thread at
  // a time is borrowed.
  virtual std::unique_ptr<BorrowedThread> BorrowThread() { return nullptr; }

  // Wakes the borrowed thread that sleeps: what it waits for has happened elsewhere.
  virtual void WakeBorrowedThread() {}

  // The number of things that the calling thread has asked for and some loop is to bring. When it
  // waits for the last of them it has nothing else to do.
  static uint64_t& AskedByThisThread();
  // The work whose result the calling thread waits for while it is borrowed; null for none.
  static const void*& AwaitedByThisThread();
  // Says so as long as it lives.
  class Awaiting {
   public:
    explicit Awaiting(const void* maker) : before_(std::exchange(AwaitedByThisThread(), maker)) {}
    ~Awaiting() { AwaitedByThisThread() = before_; }
    Awaiting(const Awaiting&) = delete;
    Awaiting& operator=(const Awaiting&) = delete;

   private:
    const void* const before_;
  };

  // The loop that the calling thread leads, its own or a borrowed one; null on others.
  static EventLoop* Current();

 protected:
  static void SetCurrent(EventLoop* loop);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_EVENT_LOOP_H_
