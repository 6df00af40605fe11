// One thread that waits in epoll for the sockets of a transport, and for its timers. After an
// event it looks for the next one for a moment (core/base/spin.h); with nothing to do it sleeps.
//
// Sockets are watched edge-triggered: a handler is told once when a socket becomes ready, and
// uses it until the kernel says EAGAIN. So no system call but the reads and writes themselves is
// needed while messages come and go.
//
// A task may wait, in a BlockingScope: another thread then takes over the loop, and this one ends
// with its task. Handlers must not.
//
// Thread-safe.
#ifndef DISTGRAD_CORE_RPC_TENSORPIPE_SOCKET_LOOP_H_
#define DISTGRAD_CORE_RPC_TENSORPIPE_SOCKET_LOOP_H_

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
#include "core/base/event_loop.h"
#include "core/base/spin.h"
#include "core/base/thread_pool.h"
#include "core/base/timer_queue.h"
#include "core/rpc/tensorpipe/socket/endpoint.h"

namespace distgrad {

class Loop : public EventLoop, private Blockable {
 public:
  using Task = absl::AnyInvocable<void()>;
  using TimerId = uint64_t;

  class Handler {
   public:
    virtual ~Handler() = default;
    // Its socket is ready for `events` (EPOLLIN, ...). On the loop's thread; must not block.
    virtual void OnEvents(uint32_t events) = 0;
    // The loop is being closed: give up, and call Remove(). On the thread that called Close().
    virtual void OnLoopClosed() = 0;
  };

  // kResourceExhausted and the like where the machine gives no more file descriptors.
  static absl::StatusOr<std::unique_ptr<Loop>> Start(std::string thread_name);
  // Close() and Join() must have been called, or be possible here.
  ~Loop() override;

  // The loop keeps a handler until Remove(). 0 if the loop is closed already.
  uint64_t Add(std::shared_ptr<Handler> handler);
  void Remove(uint64_t id);

  // Adds a socket to a handler's, changes what it waits for, or takes it away again; before the
  // socket is closed.
  absl::Status Watch(uint64_t id, int fd, uint32_t events);
  void Change(uint64_t id, int fd, uint32_t events);
  void Unwatch(int fd);

  // Time as timers count it: it does not jump with the wall clock.
  static absl::Time Now();

  // Runs `task` on the loop's thread, after `delay`. Dropped if the loop ends before.
  TimerId After(absl::Duration delay, Task task);
  void Cancel(TimerId timer);
  void Run(Task task) override;

  // Tells all handlers; from then on there are no new ones.
  void Close();
  // Waits until all handlers are gone, and ends the thread. Not on the loop's own thread.
  void Join();

 private:
  Loop(Fd epoll, Fd wake, std::string thread_name);

  // What the thread of the loop runs, until it is relieved or the loop is over.
  void Work();
  // Waits for events and handles them.
  void HandleEvents(Spin& spin);
  // Runs what is due. Returns whether this thread is still that of the loop.
  bool RunDue();
  // How long epoll may sleep, in milliseconds; -1 for ever.
  int Patience();
  void Wake();

  void OnBlocked() override;
  void OnUnblocked() override {}

  // Constant after Start().
  const Fd epoll_;
  const Fd wake_;  // an eventfd

  // Synchronizes itself. The thread of the loop, and those that were relieved and still wait.
  ThreadPool threads_;

  absl::Mutex mu_;
  // Guarded by mu_.
  bool idle_ ABSL_GUARDED_BY(mu_) = true;  // nobody works, or will
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Handler>> handlers_ ABSL_GUARDED_BY(mu_);
  internal::TimerQueue timers_ ABSL_GUARDED_BY(mu_);
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool over_ ABSL_GUARDED_BY(mu_) = false;  // no thread any more
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_TENSORPIPE_SOCKET_LOOP_H_
