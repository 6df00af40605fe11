// Ctrl-C, which ends training between two steps.
#ifndef DISTGRAD_EXAMPLES_INTERRUPT_H_
#define DISTGRAD_EXAMPLES_INTERRUPT_H_

namespace distgrad {

// Has the first SIGINT or SIGTERM remembered only; a second one ends the process.
void CatchInterrupts();

// Returns the signal that came, or 0. Thread-safe.
int InterruptedBy();

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_INTERRUPT_H_
