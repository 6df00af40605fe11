#include "core/rpc/tensorpipe/socket/loop.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/thread.h"

namespace distgrad {
namespace {

constexpr uint64_t kWakeId = 0;  // no handler has it

}  // namespace

absl::Time Loop::Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

absl::StatusOr<std::unique_ptr<Loop>> Loop::Start(std::string thread_name) {
  Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return absl::ErrnoToStatus(errno, "epoll_create1");
  Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  auto loop = std::unique_ptr<Loop>(new Loop(std::move(epoll), std::move(wake)));
  if (absl::Status watched = loop->Watch(kWakeId, loop->wake_.get(), EPOLLIN); !watched.ok()) {
    return watched;
  }
  absl::MutexLock lock(&loop->join_mu_);
  loop->thread_ = StartThread(std::move(thread_name), [self = loop.get()] { self->Work(); });
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
  return absl::ErrnoToStatus(errno, "epoll_ctl");
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
  if (tasks_.empty()) Wake();
  tasks_.push_back(std::move(task));
}

void Loop::Close() {
  std::vector<std::shared_ptr<Handler>> handlers;
  {
    absl::MutexLock lock(&mu_);
    if (std::exchange(closed_, true)) return;
    for (const auto& [id, handler] : handlers_) handlers.push_back(handler);
    Wake();
  }
  for (const auto& handler : handlers) handler->OnLoopClosed();
}

void Loop::Join() {
  absl::MutexLock lock(&join_mu_);
  if (thread_.joinable()) thread_.join();
}

void Loop::Wake() {
  const uint64_t one = 1;
  // It fails only if the thread is as good as awake.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof(one));
}

int Loop::Patience() {
  absl::MutexLock lock(&mu_);
  if (!tasks_.empty() || (closed_ && handlers_.empty())) return 0;
  const absl::Time next = timers_.Next();
  if (next == absl::InfiniteFuture()) return -1;
  const absl::Duration left = std::max(next - Now(), absl::ZeroDuration());
  // Rounded up: waking too early would be waking twice.
  return static_cast<int>(std::min<int64_t>(
      absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))), 1 << 30));
}

void Loop::RunDue() {
  std::vector<Task> due;
  {
    absl::MutexLock lock(&mu_);
    due.swap(tasks_);
    if (timers_.Next() != absl::InfiniteFuture()) {
      const absl::Time now = Now();
      while (timers_.Next() <= now) due.push_back(timers_.Pop());
    }
  }
  for (Task& task : due) {
    task();
    task = nullptr;
  }
}

void Loop::Work() {
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  for (;;) {
    const int n = epoll_wait(epoll_.get(), events, kEvents, Patience());
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
      if (handler != nullptr) handler->OnEvents(events[i].events);
    }
    RunDue();
    absl::MutexLock lock(&mu_);
    if (closed_ && handlers_.empty()) break;
  }
  // Nobody is left whom these could concern.
  std::vector<Task> tasks;
  internal::TimerQueue timers;
  absl::MutexLock lock(&mu_);
  tasks.swap(tasks_);
  std::swap(timers, timers_);
}

}  // namespace distgrad
