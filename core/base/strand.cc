// Hands tasks in, and runs them until there is none left.
#include "core/base/strand.h"

#include <memory>
#include <new>
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

void Strand::State::RunWaiting() {
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mu);
      if (waiting.empty()) {
        running = false;
        return;
      }
      task = std::move(waiting.front());
      waiting.pop_front();
    }
    RunTask(task);
  }
}

bool Strand::State::EndIfNothingWaits() {
  absl::MutexLock lock(&mu);
  running = !waiting.empty();
  return !running;
}

bool Strand::State::LeaveTo(ThreadPool& pool, std::shared_ptr<State> state) noexcept {
  try {
    return pool.Schedule([state = std::move(state)] { state->RunWaiting(); });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void Strand::Run(Task task, ThreadPool* others) {
  const std::shared_ptr<State> state = state_;
  {
    absl::MutexLock lock(&state->mu);
    if (state->running) {
      state->waiting.push_back(std::move(task));
      return;
    }
    state->running = true;
  }
  state->RunTask(task);
  task = nullptr;
  if (others != nullptr && (state->EndIfNothingWaits() || State::LeaveTo(*others, state))) {
    return;
  }
  state->RunWaiting();
}

}  // namespace distgrad
