#include "core/base/strand.h"

#include <utility>

namespace distgrad {

Strand::Strand(OnThrow on_throw) : state_(std::make_shared<State>(std::move(on_throw))) {}

// That `on_throw` throws can only be our own bug, and ends the process.
void Strand::State::RunTask(Task& task) noexcept {
  try {
    task();
  } catch (...) {
    on_throw(std::current_exception());
  }
}

void Strand::Run(Task task) {
  const std::shared_ptr<State> state = state_;
  {
    absl::MutexLock lock(&state->mu);
    if (state->running) {
      state->waiting.push_back(std::move(task));
      return;
    }
    state->running = true;
  }
  while (true) {
    state->RunTask(task);
    task = nullptr;
    absl::MutexLock lock(&state->mu);
    if (state->waiting.empty()) {
      state->running = false;
      return;
    }
    task = std::move(state->waiting.front());
    state->waiting.pop_front();
  }
}

}  // namespace distgrad
