// Remembers the signal, so that the training loop ends by itself.
#include "examples/interrupt.h"

#include <signal.h>

#include <atomic>

namespace distgrad {
namespace {

std::atomic<int> interrupted_by{0};

void Remember(int signal) { interrupted_by = signal; }

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = Remember;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int InterruptedBy() { return interrupted_by; }

}  // namespace distgrad
