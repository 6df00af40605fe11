// Waits in epoll for the sockets of a transport, and for its timers. After an event it polls for
// the next one for a moment (core/base/spin.h); with nothing to do it sleeps.
//
// Sockets are watched edge-triggered: a handler is told once when a socket becomes ready, and
// uses it until the kernel says EAGAIN. So no system call but the reads and writes themselves is
// needed while messages come and go.
//
// The threads are a leader and followers: the leader waits for events, handles them, and runs
// tasks. As a rule that is one of the loop's own threads. A borrowed thread
// (core/base/event_loop.h) becomes the leader while the own one sleeps or would only poll.
// Followers sleep on a second epoll, in which the first is a member, watched only while no thread
// leads.
//
// A task may wait, in a BlockingScope, and one that was given to RunDeferred() may do what it
// likes: the thread stops leading for it, and leads again afterwards unless another does.
// Handlers must not wait.
//
// Thread-safe.
#ifndef DISTGRAD_CORE_NET_LOOP_H_
#define DISTGRAD_CORE_NET_LOOP_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/blocking.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/spin.h"
#include "core/base/thread_pool.h"
#include "core/base/timer_queue.h"
#include "core/net/endpoint.h"

namespace distgrad {

class Loop : public EventLoop, private Blockable {
 public:
  using Task = absl::AnyInvocable<void()>;
  using TimerId = uint64_t;

  class Handler {
   public:
    virtual ~Handler() = default;
    // Says that its socket is ready for `events` (EPOLLIN, ...). Called on the loop's thread; must
    // not block. Where it throws std::bad_alloc, before it has done anything, it is called again.
    virtual void OnEvents(uint32_t events) = 0;
    // Says that the loop is being closed: give up, and call Remove(). Called on the thread that
    // called Close().
    virtual void OnLoopClosed() = 0;
  };

  // Starts a loop; kResourceExhausted and the like where the machine gives no more file descriptors
  // or threads. The clock must outlive it. A loop whose tasks wait, or run deferred ones, needs it:
  // with it a thread is asked for again that the machine has refused.
  static absl::StatusOr<std::unique_ptr<Loop>> Start(std::string thread_name,
                                                     Clock* clock = nullptr);
  // Close() and Join() must have been called, or be possible here.
  ~Loop() override;

  // Adds a handler, which the loop keeps until Remove(). Returns 0 if the loop is closed already.
  uint64_t Add(std::shared_ptr<Handler> handler);
  void Remove(uint64_t id);

  // Adds a socket to a handler's, changes what it waits for, or takes it away again; before the
  // socket is closed.
  absl::Status Watch(uint64_t id, int fd, uint32_t events);
  void Change(uint64_t id, int fd, uint32_t events);
  void Unwatch(int fd);

  // Returns the time as timers count it: it does not jump with the wall clock.
  static absl::Time Now();

  // Runs `task` on the loop's thread, after `delay`. Dropped if the loop ends before.
  TimerId After(absl::Duration delay, Task task);
  void Cancel(TimerId timer);
  void Run(Task task) override;
  bool CanRunDeferred(const void* work) override;
  void RunDeferred(Task task) override;
  std::unique_ptr<EventLoop::BorrowedThread> BorrowThread() override;
  void WakeBorrowedThread() override;

  // Tells all handlers; from then on there are no new ones.
  void Close();
  // Waits until all handlers are gone, and ends the thread. Not on the loop's own thread.
  void Join();

 private:
  class BorrowedThread;
  enum class Leader { kNobody, kOwn, kBorrowed };

  Loop(Fd epoll, Fd sleep, Fd wake, std::string thread_name, Clock* clock);

  // Runs on an own thread, until enough others do or the loop is over.
  void Work();
  // Waits for events, and handles them. False once the loop is over.
  bool AwaitEvents(Spin& spin);
  // Sleeps, as a follower, until then, or until there is something to do and no leader, and becomes
  // the leader. Returns false once the loop is over.
  bool AwaitLeadership(absl::Time until);
  // Handles the events that there are, or come within `patience` milliseconds; returns whether
  // there were any.
  bool HandleEvents(int patience = 0);
  // Takes the first task out of the queue; null if there is none.
  Task TakeTask();
  // Runs what is due. Returns whether this thread still leads.
  bool RunDue();
  // Ends this thread's leadership, and sees to it that an own thread follows: the task that runs
  // now may take long.
  void StopLeading();
  // Returns whether another own thread can become the leader when this one stops.
  bool HasSuccessor();
  // Has this thread lead or follow again after StopLeading(). Returns false if it is not needed any
  // more.
  bool Return();
  // Returns whether there is nothing left to do, ever.
  bool IsOver();
  // Returns when the leader must be awake again.
  absl::Time WakeTime() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake();

  bool TryLead(Leader leader);
  // Sets whether an own thread that sleeps wakes for the next event.
  void WakeOwn(bool wake);
  // Leaves the leadership to an own thread that sleeps.
  void LeaveToOwn();

  void OnBlocked() override;
  void OnUnblocked() override {}

  // Constant after Start().
  const Fd epoll_;
  const Fd sleep_;  // an epoll with the other as its member
  const Fd wake_;   // an eventfd

  // Synchronize themselves.
  ThreadPool threads_;  // the own ones, and those that run a deferred task
  std::atomic<Leader> leader_{Leader::kNobody};
  std::atomic<bool> borrowed_{false};
  std::atomic<int> sleeps_alone_{0};  // of the own thread, since one was borrowed
  std::atomic<int> crowd_{0};         // so many are not borrowed

  Task deferred_;  // only for the leader

  absl::Mutex mu_;
  // Guarded by mu_.
  bool idle_ ABSL_GUARDED_BY(mu_) = true;     // no thread works, or will
  int own_ ABSL_GUARDED_BY(mu_) = 0;          // own threads that lead or follow
  bool queued_ ABSL_GUARDED_BY(mu_) = false;  // one of them is Work() that waits for a thread
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Handler>> handlers_ ABSL_GUARDED_BY(mu_);
  internal::TimerQueue timers_ ABSL_GUARDED_BY(mu_);
  // The time until which an own thread sleeps at most, if one does.
  absl::Time sleeps_until_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool over_ ABSL_GUARDED_BY(mu_) = false;  // no thread any more
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_LOOP_H_
