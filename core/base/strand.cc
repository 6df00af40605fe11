#include "core/base/strand.h"

#include <utility>

namespace distgrad {

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
    task();
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
