// Gives slots to threads, replaces those that block, and asks again for threads refused.
#include "core/base/thread_pool.h"

#include <memory>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"
#include "core/base/check.h"
#include "core/base/event_loop.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/thread.h"

namespace distgrad {
namespace {

// Parked threads kept beyond `size`. A thread costs tens of microseconds to start, and libtorch
// keeps state for each that ever ran it, so nested calls should find the same threads again.
constexpr size_t kSpareThreads = 16;

// Made beforehand, for a copy needs no memory.
const absl::Status* const kNoMemory =
    new absl::Status(absl::StatusCode::kResourceExhausted, "there is no memory for another thread");

// The pool that the calling thread belongs to.
thread_local ThreadPool* this_pool = nullptr;

}  // namespace

// A thread without a slot; lives on its stack.
struct ThreadPool::Parked {
  absl::CondVar wake;
  bool has_slot = false;
  bool over = false;
};

ThreadPool::ThreadPool(std::string name, size_t size, Clock* clock, Idle idle)
    : name_(std::move(name)),
      size_(size),
      clock_(clock),
      kept_((idle == Idle::kKeepAll ? size : 0) + kSpareThreads) {
  DG_CHECK(size_ >= 1) << "pool " << name_;
  parked_.reserve(kept_);  // a thread that parks cannot say that there is no memory
}

ThreadPool::~ThreadPool() { Join(); }

absl::Status ThreadPool::Start() {
  absl::MutexLock lock(&mu_);
  if (closed_ || !threads_.empty()) return absl::OkStatus();
  ++running_;
  const absl::Status started = StartOne();
  if (!started.ok()) --running_;
  return started;
}

bool ThreadPool::Schedule(Task task) {
  Task refused;  // destroyed outside the lock
  absl::MutexLock lock(&mu_);
  if (closed_) return false;
  tasks_.push_back(std::move(task));
  absl::Cleanup take_back = [&] { refused = TakeBack(); };
  if (NoThreads()) {
    if (!TryFillSlot().ok()) return false;  // nobody would come to it later
  } else {
    FillSlot();
  }
  std::move(take_back).Cancel();
  return true;
}

bool ThreadPool::ScheduleNow(Task task) {
  Task refused;  // destroyed outside the lock
  absl::MutexLock lock(&mu_);
  if (closed_ || !tasks_.empty() || running_ >= size_) return false;
  tasks_.push_back(std::move(task));
  absl::Cleanup take_back = [&] { refused = TakeBack(); };
  if (!TryFillSlot().ok()) return false;
  std::move(take_back).Cancel();
  return true;
}

ThreadPool::Task ThreadPool::TakeBack() {
  mu_.AssertHeld();
  Task task = std::move(tasks_.back());
  tasks_.pop_back();
  return task;
}

bool ThreadPool::ScheduleInline(Task task, const void* work) {
  EventLoop* const loop = EventLoop::Current();
  if (loop == nullptr || !loop->CanRunDeferred(work)) return Schedule(std::move(task));
  // All memory comes before the slot, which nobody would give back.
  struct Deferred {
    ThreadPool* const pool;
    Task task;
    const bool stays;
  };
  auto deferred = std::make_unique<Deferred>(Deferred{this, std::move(task), work == nullptr});
  if (!TakeSlotForBorrowed()) return Schedule(std::move(deferred->task));
  loop->RunDeferred([deferred = std::move(deferred)] {
    deferred->pool->RunBorrowed(std::move(deferred->task), deferred->stays);
  });
  return true;
}

bool ThreadPool::TakeSlotForBorrowed() {
  absl::MutexLock lock(&mu_);
  if (closed_ || running_ >= size_) return false;
  ++running_;
  ++borrowed_;
  return true;
}

void ThreadPool::RunBorrowed(Task task, bool stays) {
  ThreadPool* const own = std::exchange(this_pool, this);
  Blockable::SetCurrent(this);
  task();
  task = nullptr;
  bool has_slot = true;
  AwaitMemory([&] {
    absl::MutexLock lock(&mu_);
    if (std::exchange(has_slot, false)) {
      if (stays) RunTasks();
      --running_;
    }
    if (!threads_.empty()) {
      FillSlot();
    } else if (!TryFillSlot().ok()) {
      // Nobody else may ever come to what waits.
      ++running_;
      RunTasks();
      --running_;
    }
    --borrowed_;
    WakeJoiners();
  });
  Blockable::SetCurrent(nullptr);
  this_pool = own;
}

void ThreadPool::RunTasks() {
  // After a task that had blocked there may be one thread too many.
  while (!tasks_.empty() && running_ <= size_) {
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    mu_.Unlock();
    task();
    task = nullptr;
    mu_.Lock();
  }
}

void ThreadPool::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
  // A task that blocks later starts new threads if it must: the parked ones can go.
  for (Parked* parked : parked_) {
    parked->over = true;
    parked->wake.Signal();
  }
  parked_.clear();
}

bool ThreadPool::Join(Deadline deadline) {
  DG_CHECK(!OnThisPool()) << "a task joins its own pool " << name_;
  Close();
  {
    absl::MutexLock lock(&mu_);
    const absl::Condition ended(this, &ThreadPool::NoThreads);
    if (!joiners_.Await(&mu_, ended, deadline)) return false;
  }
  absl::MutexLock joining(&joining_);
  std::thread last;
  {
    absl::MutexLock lock(&mu_);
    last = std::move(ended_);
    if (retry_.has_value() && clock_->Cancel(*retry_)) retry_.reset();
    mu_.Await(absl::Condition(this, &ThreadPool::NoRetry));
  }
  if (last.joinable()) last.join();
  return true;
}

void ThreadPool::WakeJoiners() {
  if (NoThreads()) joiners_.WakeAll();
}

size_t ThreadPool::thread_count() const {
  absl::MutexLock lock(&mu_);
  return threads_.size() + borrowed_;
}

bool ThreadPool::OnThisPool() const { return this_pool == this; }

void ThreadPool::Run(Threads::iterator self) {
  this_pool = this;
  Blockable::SetCurrent(this);
  std::thread before;
  {
    absl::MutexLock lock(&mu_);
    do {
      RunTasks();
      --running_;
    } while (Park());
    before = std::move(ended_);
    ended_ = std::move(*self);
    threads_.erase(self);
    WakeJoiners();
  }
  if (before.joinable()) before.join();
}

bool ThreadPool::Park() {
  if (closed_ || parked_.size() >= kept_) return false;
  Parked parked;
  parked_.push_back(&parked);
  while (!parked.has_slot && !parked.over) parked.wake.Wait(&mu_);
  return parked.has_slot;
}

absl::Status ThreadPool::TryFillSlot() {
  if (tasks_.empty() || running_ >= size_) return absl::OkStatus();
  ++running_;
  if (!parked_.empty()) {
    parked_.back()->has_slot = true;
    parked_.back()->wake.Signal();
    parked_.pop_back();
    return absl::OkStatus();
  }
  absl::Status started = StartOne();
  if (started.ok()) {
    short_of_threads_ = false;
  } else {
    --running_;
  }
  return started;
}

bool ThreadPool::FillSlot() {
  const absl::Status filled = TryFillSlot();
  if (filled.ok()) return true;
  RetryLater();
  if (std::exchange(short_of_threads_, true)) return false;
  try {
    DG_LOG(WARNING) << tasks_.size() << " tasks of '" << name_ << "' wait for one of its "
                    << threads_.size() << " threads: " << filled.message();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): nobody waits for the word
  }
  return false;
}

void ThreadPool::RetryLater() {
  if (clock_ == nullptr || retry_.has_value()) return;
  retry_ = clock_->At(clock_->Now() + kRetryDelay, [this] {
    absl::MutexLock lock(&mu_);
    const auto retry = std::exchange(retry_, std::nullopt);
    try {
      for (size_t waiting = tasks_.size(); waiting > 0 && FillSlot(); --waiting) {
      }
    } catch (const std::bad_alloc&) {
      retry_ = retry;  // the clock calls again
      throw;
    }
  });
}

absl::Status ThreadPool::StartOne() {
  try {
    if (threads_.size() >= size_ + kMostSpareThreads) {
      return absl::ResourceExhaustedError(
          absl::StrCat("all but ", size_, " of them wait for others, and it starts no more than ",
                       kMostSpareThreads, " of those"));
    }
    // Its place is made before, for one that runs has to be kept.
    Threads starting(1);
    const Threads::iterator self = starting.begin();
    DG_ASSIGN_OR_RETURN(
        *self, StartThread(absl::StrCat(name_, "-", started_), [this, self] { Run(self); }));
    threads_.splice(threads_.end(), starting);
    ++started_;
    return absl::OkStatus();
  } catch (const std::bad_alloc&) {
    return *kNoMemory;
  }
}

void ThreadPool::OnBlocked() {
  bool has_slot = true;
  AwaitMemory([&] {
    absl::MutexLock lock(&mu_);
    if (std::exchange(has_slot, false)) --running_;
    FillSlot();
  });
}

void ThreadPool::OnUnblocked() {
  absl::MutexLock lock(&mu_);
  ++running_;
}

}  // namespace distgrad
