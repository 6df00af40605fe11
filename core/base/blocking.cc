// Keeps for each thread whom it tells before it waits.
#include "core/base/blocking.h"

#include <utility>

#include "core/base/blocking_observer.h"

namespace distgrad {
namespace {

thread_local Blockable* current = nullptr;
thread_local BlockingObserver* observer = nullptr;

}  // namespace

void Blockable::SetCurrent(Blockable* blockable) { current = blockable; }

BlockingObserver::BlockingObserver() : outer_(std::exchange(observer, this)) {}

BlockingObserver::~BlockingObserver() { observer = outer_; }

// What throws leaves the thread with its owner: there is no destructor then that would.
BlockingScope::BlockingScope() : blockable_(current) {
  if (observer != nullptr) observer->OnBlocking();
  if (blockable_ != nullptr) blockable_->OnBlocked();
  current = nullptr;
}

BlockingScope::~BlockingScope() {
  if (blockable_ == nullptr) return;
  current = blockable_;
  blockable_->OnUnblocked();
}

}  // namespace distgrad
