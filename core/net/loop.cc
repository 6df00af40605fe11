// Passes the leadership between the loop's threads, and handles events, timers and tasks.
#include "core/net/loop.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "core/base/await_memory.h"
#include "core/base/check.h"
#include "core/base/descriptors.h"
#include "core/base/spin.h"

namespace distgrad {
namespace {

constexpr uint64_t kWakeId = 0;  // no handler has it
// Any number may run a deferred task.
constexpr size_t kThreads = ThreadPool::kMostSpareThreads;
// That many lead or follow: after a deferred task there is another.
constexpr int kOwnThreads = 2;
// After so many sleeps without a borrowed thread none is expected.
constexpr int kSleepsAlone = 16;
// Where several threads would be borrowed at once, so many are refused: the own thread brings
// something to all of them.
constexpr int kCrowd = 64;

// For epoll: rounded up, as waking too early would be waking twice; -1 for ever.
int MillisecondsUntil(absl::Time then) {
  if (then == absl::InfiniteFuture()) return -1;
  const absl::Duration left = std::max(then - Loop::Now(), absl::ZeroDuration());
  return static_cast<int>(std::min<int64_t>(
      absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))), 1 << 30));
}

}  // namespace

absl::Time Loop::Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

class Loop::BorrowedThread final : public EventLoop::BorrowedThread {
 public:
  explicit BorrowedThread(Loop* loop) : loop_(loop) {}
  ~BorrowedThread() override {
    loop_->borrowed_ = false;
    if (Current() == loop_) loop_->LeaveToOwn();
  }

  bool PollOnce() override {
    if (!TryLead()) return false;
    const bool any = loop_->HandleEvents();
    loop_->RunDue();
    return any;
  }

  bool Sleep(Deadline deadline) override {
    if (Current() != loop_) {
      if (!TryLead()) return false;
      // What WakeBorrowedThread() was to say may have gone to the former leader: the caller asks
      // again.
      deadline = absl::InfinitePast();
    }
    absl::Time until;
    {
      absl::MutexLock lock(&loop_->mu_);
      until = std::min(loop_->WakeTime(), Now() + deadline.Left());
    }
    loop_->HandleEvents(MillisecondsUntil(until));
    loop_->RunDue();
    return true;
  }

 private:
  bool TryLead() {
    if (Current() == loop_) return true;
    if (!loop_->TryLead(Leader::kBorrowed)) return false;
    loop_->WakeOwn(false);
    return true;
  }

  Loop* const loop_;
};

Loop::Loop(Fd epoll, Fd sleep, Fd wake, std::string thread_name, Clock* clock)
    : epoll_(std::move(epoll)),
      sleep_(std::move(sleep)),
      wake_(std::move(wake)),
      threads_(std::move(thread_name), kThreads, clock, ThreadPool::Idle::kKeepNone) {}

absl::StatusOr<std::unique_ptr<Loop>> Loop::Start(std::string thread_name, Clock* clock) {
  Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus(errno, "epoll_create1");
  Fd sleep(epoll_create1(EPOLL_CLOEXEC));
  if (!sleep.valid()) return ErrnoStatus(errno, "epoll_create1");
  Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoStatus(errno, "eventfd");
  epoll_event none = {};
  if (epoll_ctl(sleep.get(), EPOLL_CTL_ADD, epoll.get(), &none) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  auto loop = std::unique_ptr<Loop>(
      new Loop(std::move(epoll), std::move(sleep), std::move(wake), std::move(thread_name), clock));
  if (absl::Status watched = loop->Watch(kWakeId, loop->wake_.get(), EPOLLIN); !watched.ok()) {
    return watched;
  }
  if (absl::Status started = loop->threads_.Start(); !started.ok()) return started;
  absl::MutexLock lock(&loop->mu_);
  loop->idle_ = false;
  loop->own_ = 1;
  absl::Cleanup is_idle = [&] {
    loop->mu_.AssertHeld();
    loop->idle_ = true;
  };
  loop->threads_.Schedule([loop = loop.get()] { loop->Work(); });
  std::move(is_idle).Cancel();
  return loop;
}

Loop::~Loop() {
  Close();
  Join();
}

uint64_t Loop::Add(std::shared_ptr<Handler> handler) {
  absl::MutexLock lock(&mu_);
  if (closed_) return 0;
  handlers_.emplace(++last_id_, std::move(handler));
  return last_id_;
}

void Loop::Remove(uint64_t id) {
  std::shared_ptr<Handler> gone;  // destroyed outside the lock
  absl::MutexLock lock(&mu_);
  const auto found = handlers_.find(id);
  if (found == handlers_.end()) return;
  gone = std::move(found->second);
  handlers_.erase(found);
  if (closed_ && handlers_.empty()) Wake();
}

absl::Status Loop::Watch(uint64_t id, int fd, uint32_t events) {
  epoll_event event = {};
  event.events = events | EPOLLET;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "epoll_ctl");
}

void Loop::Change(uint64_t id, int fd, uint32_t events) {
  epoll_event event = {};
  event.events = events | EPOLLET;
  event.data.u64 = id;
  DG_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0) << "errno " << errno;
}

void Loop::Unwatch(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

Loop::TimerId Loop::After(absl::Duration delay, Task task) {
  const absl::Time when = Now() + delay;
  absl::MutexLock lock(&mu_);
  if (over_) return 0;
  if (when < timers_.Next()) Wake();
  return timers_.Add(when, std::move(task));
}

void Loop::Cancel(TimerId timer) {
  internal::TimerQueue::Callback gone;  // destroyed outside the lock
  absl::MutexLock lock(&mu_);
  gone = timers_.Remove(timer);
}

void Loop::Run(Task task) {
  absl::MutexLock lock(&mu_);
  if (over_) return;
  // The loop's own thread comes to it by itself.
  if (tasks_.empty() && Current() != this) Wake();
  tasks_.push_back(std::move(task));
}

// Only the thread that leads comes here.
bool Loop::CanRunDeferred(const void* work) {
  if (Current() != this || deferred_ != nullptr) return false;
  if (leader_ == Leader::kOwn) return HasSuccessor();
  return work != nullptr && work == AwaitedByThisThread();
}

// For the own thread that leads.
bool Loop::HasSuccessor() {
  {
    absl::MutexLock lock(&mu_);
    if (own_ > 1) return !queued_;
    ++own_;
  }
  try {
    if (threads_.ScheduleNow([this] { Work(); })) return true;
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): as where there is no thread
  }
  absl::MutexLock lock(&mu_);
  --own_;
  return false;
}

void Loop::RunDeferred(Task task) { deferred_ = std::move(task); }

void Loop::Close() {
  std::vector<std::shared_ptr<Handler>> handlers;
  AwaitMemory([&] {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    handlers.reserve(handlers_.size());
    for (const auto& [id, handler] : handlers_) handlers.push_back(handler);
    closed_ = true;
    Wake();
  });
  for (const auto& handler : handlers) handler->OnLoopClosed();
}

void Loop::Join() {
  {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&idle_));
  }
  threads_.Join();
  // Nobody is left whom these could concern. They end outside of the lock, without memory.
  internal::TimerQueue timers;
  {
    absl::MutexLock lock(&mu_);
    over_ = true;
    std::swap(timers, timers_);
  }
  while (TakeTask() != nullptr) {
  }
}

void Loop::Wake() {
  const uint64_t one = 1;
  // It fails only if the thread is as good as awake.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof(one));
}

std::unique_ptr<EventLoop::BorrowedThread> Loop::BorrowThread() {
  // In an event of some loop: whoever waits there waits in vain, and must not handle others.
  if (Current() != nullptr) return nullptr;
  if (crowd_ > 0 && --crowd_ >= 0) return nullptr;
  if (borrowed_.exchange(true)) {
    crowd_ = kCrowd;
    return nullptr;
  }
  absl::Cleanup is_not = [this] { borrowed_ = false; };
  auto borrowed = std::make_unique<BorrowedThread>(this);
  std::move(is_not).Cancel();
  sleeps_alone_ = 0;
  return borrowed;
}

void Loop::WakeBorrowedThread() {
  if (Current() != this) Wake();
}

bool Loop::TryLead(Leader leader) {
  Leader nobody = Leader::kNobody;
  if (!leader_.compare_exchange_strong(nobody, leader)) return false;
  EventLoop::SetCurrent(this);
  return true;
}

void Loop::WakeOwn(bool wake) {
  epoll_event event = {};
  if (wake) event.events = EPOLLIN | EPOLLONESHOT;
  DG_CHECK(epoll_ctl(sleep_.get(), EPOLL_CTL_MOD, epoll_.get(), &event) == 0) << "errno " << errno;
}

void Loop::LeaveToOwn() {
  EventLoop::SetCurrent(nullptr);
  leader_ = Leader::kNobody;
  WakeOwn(true);
  absl::MutexLock lock(&mu_);
  if (WakeTime() < sleeps_until_) Wake();
}

absl::Time Loop::WakeTime() {
  if (!tasks_.empty() || (closed_ && handlers_.empty())) return absl::InfinitePast();
  return timers_.Next();
}

bool Loop::AwaitEvents(Spin& spin) {
  absl::Time until;
  {
    absl::MutexLock lock(&mu_);
    sleeps_until_ = until = WakeTime();
  }
  bool any = false;
  const auto poll = [&] { return (any = HandleEvents()) || borrowed_; };
  if (until == absl::InfinitePast()) {
    HandleEvents();
  } else if (spin.Await(poll, Spin::kLongPatience) && any) {
    // What follows a message often follows at once, its answer or the next request.
  } else if (!borrowed_ && sleeps_alone_ >= kSleepsAlone) {
    HandleEvents(MillisecondsUntil(until));
  } else {
    if (!borrowed_) ++sleeps_alone_;
    EventLoop::SetCurrent(nullptr);
    leader_ = Leader::kNobody;
    WakeOwn(true);
    if (!AwaitLeadership(until)) return false;
    HandleEvents();
  }
  return true;
}

bool Loop::AwaitLeadership(absl::Time until) {
  epoll_event event;
  for (;;) {
    const int n = epoll_wait(sleep_.get(), &event, 1, MillisecondsUntil(until));
    DG_CHECK(n >= 0 || errno == EINTR) << "epoll_wait: errno " << errno;
    if (TryLead(Leader::kOwn)) break;
    // Somebody was faster, who wakes this thread if there is something to do when nobody leads.
    until = absl::InfiniteFuture();
    {
      absl::MutexLock lock(&mu_);
      if (idle_) return false;
      sleeps_until_ = until;
    }
    if (TryLead(Leader::kOwn)) break;
  }
  WakeOwn(false);
  return true;
}

bool Loop::HandleEvents(int patience) {
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  const int n = epoll_wait(epoll_.get(), events, kEvents, patience);
  DG_CHECK(n >= 0 || errno == EINTR) << "epoll_wait: errno " << errno;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kWakeId) {
      uint64_t count;
      [[maybe_unused]] const ssize_t read_bytes = read(wake_.get(), &count, sizeof(count));
      continue;
    }
    std::shared_ptr<Handler> handler;
    {
      absl::MutexLock lock(&mu_);
      const auto found = handlers_.find(events[i].data.u64);
      if (found != handlers_.end()) handler = found->second;
    }
    // It is told once.
    if (handler != nullptr) AwaitMemory([&] { handler->OnEvents(events[i].events); });
  }
  return n > 0;
}

Loop::Task Loop::TakeTask() {
  absl::MutexLock lock(&mu_);
  if (tasks_.empty()) return nullptr;
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

bool Loop::RunDue() {
  size_t due;
  {
    absl::MutexLock lock(&mu_);
    if (timers_.Next() != absl::InfiniteFuture()) {
      const absl::Time now = Now();
      try {
        while (timers_.Next() <= now) {
          tasks_.emplace_back();
          tasks_.back() = timers_.Pop();
        }
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next turn takes them
      }
    }
    // What these add comes after the next events.
    due = tasks_.size();
  }
  for (; due > 0; --due) {
    Task task = TakeTask();
    Blockable::SetCurrent(this);
    task();
    task = nullptr;
    Blockable::SetCurrent(nullptr);
    if (Current() != this) return false;
  }
  if (deferred_ == nullptr) return true;
  Task task = std::exchange(deferred_, nullptr);
  StopLeading();
  task();
  return false;
}

// In a task.
void Loop::OnBlocked() {
  if (Current() != this) return;  // it has stopped leading already
  if (deferred_ != nullptr) {
    // That cannot wait until this one goes on. This thread keeps it until there is memory for it.
    // The task empties what both hold: so it ends there, whichever of the two lets go last.
    const auto held = AwaitMemory([] { return std::make_shared<Task>(); });
    *held = std::exchange(deferred_, nullptr);
    AwaitMemory([&] { threads_.Schedule([held] { std::exchange(*held, nullptr)(); }); });
  }
  StopLeading();
}

void Loop::StopLeading() {
  if (leader_ == Leader::kBorrowed) return LeaveToOwn();
  bool is_last;
  {
    absl::MutexLock lock(&mu_);
    is_last = own_ == 1;
    if (is_last) {
      queued_ = true;
    } else {
      --own_;
    }
    sleeps_until_ = absl::InfiniteFuture();  // this thread does not
  }
  LeaveToOwn();
  if (is_last) AwaitMemory([this] { threads_.Schedule([this] { Work(); }); });
}

bool Loop::Return() {
  absl::MutexLock lock(&mu_);
  if (idle_ || own_ == kOwnThreads) return false;
  ++own_;
  return true;
}

bool Loop::IsOver() {
  {
    absl::MutexLock lock(&mu_);
    if (!closed_ || !handlers_.empty()) return false;
    idle_ = true;
  }
  EventLoop::SetCurrent(nullptr);
  // This thread stays the leader, so no follower becomes one any more, and all may end.
  WakeOwn(true);
  Wake();
  return true;
}

void Loop::Work() {
  {
    absl::MutexLock lock(&mu_);
    queued_ = false;  // if one was, it is this: there is no other that has not begun
  }
  Spin spin;
  do {
    if (TryLead(Leader::kOwn)) {
      WakeOwn(false);
    } else if (!AwaitLeadership(absl::InfiniteFuture())) {
      return;
    }
    for (;;) {
      if (!AwaitEvents(spin)) return;
      if (!RunDue()) break;
      if (IsOver()) return;
    }
  } while (Return());
}

}  // namespace distgrad
