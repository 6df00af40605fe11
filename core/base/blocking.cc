#include "core/base/blocking.h"

#include <utility>

namespace distgrad {
namespace {

thread_local Blockable* current = nullptr;

}  // namespace

void Blockable::SetCurrent(Blockable* blockable) { current = blockable; }

BlockingScope::BlockingScope() : blockable_(std::exchange(current, nullptr)) {
  if (blockable_ != nullptr) blockable_->OnBlocked();
}

BlockingScope::~BlockingScope() {
  if (blockable_ == nullptr) return;
  current = blockable_;
  blockable_->OnUnblocked();
}

}  // namespace distgrad
