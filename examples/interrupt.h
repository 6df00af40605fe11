// Ctrl-C, noticed between steps.
#ifndef DISTGRAD_EXAMPLES_INTERRUPT_H_
#define DISTGRAD_EXAMPLES_INTERRUPT_H_

namespace distgrad {

// From now on the first SIGINT or SIGTERM is only remembered; a second one ends the process.
void CatchInterrupts();

// The signal that came, or 0. Thread-safe.
int InterruptedBy();

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_INTERRUPT_H_
