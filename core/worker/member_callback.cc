// Runs a user's callback for members: by one task of the pool at a time, so that it gets each event
// once and in order, and with no lock held.
#include "core/worker/member_callback.h"

#include <exception>
#include <utility>

#include "core/base/await_memory.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/tensor/exception.h"

namespace distgrad {

void MemberCallback::Set(Function function) {
  // These end outside the lock: what they hold is the user's.
  std::shared_ptr<const Function> former, running;
  if (function != nullptr) former = std::make_shared<const Function>(std::move(function));
  const BlockingScope blocking;
  absl::MutexLock lock(&mu_);
  function_.swap(former);
  // What had happened before is not for the new one.
  events_.clear();
  agent_->KeepEvents(false);
  agent_->KeepEvents(function_ != nullptr);
  // That may be an earlier one than the former: one that has replaced itself, say.
  running = running_;
  if (running == nullptr || thread_ == std::this_thread::get_id()) return;
  const auto is_over = [&] {
    mu_.AssertReaderHeld();
    return running_ != running;
  };
  mu_.Await(absl::Condition(&is_over));
}

void MemberCallback::Stop() {
  std::shared_ptr<const Function> former;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  function_.swap(former);
  agent_->KeepEvents(false);
}

bool MemberCallback::is_set() {
  absl::MutexLock lock(&mu_);
  return function_ != nullptr;
}

void MemberCallback::OnEvents() {
  {
    absl::MutexLock lock(&mu_);
    if (function_ == nullptr || scheduled_) return;
    scheduled_ = true;
  }
  // There may be no next event, with which another thread would do it. A pool that is closed takes
  // no more: the worker ends.
  AwaitMemory([this] { pool_->Schedule([this] { Run(); }); });
}

Peers::Events MemberCallback::Next() {
  if (events_.empty()) events_ = agent_->TakeEvents();
  Peers::Events next;
  if (!events_.empty()) next.splice(next.end(), events_, events_.begin());
  return next;
}

void MemberCallback::Run() {
  for (;;) {
    Peers::Events event;                               // one, or none
    std::shared_ptr<const Function> function, former;  // these end outside the lock
    {
      absl::MutexLock lock(&mu_);
      former.swap(running_);
      thread_ = std::thread::id();
      if (function_ != nullptr) event = Next();
      if (event.empty()) {
        scheduled_ = false;
        return;
      }
      running_ = function = function_;
      thread_ = std::this_thread::get_id();
    }
    try {
      (*function)(event.front());
    } catch (...) {
      DG_LOG(ERROR) << "a callback for members threw: "
                    << StatusFromException(std::current_exception());
    }
  }
}

}  // namespace distgrad
