// Hands the processor from one thread to another, without the system's scheduler where it can.
//
// A fiber is a thread of the system's that has lent its stack and its thread-local storage. The
// thread that runs a fiber takes both: it moves its stack pointer, and the register by which
// thread-local variables are found. So all that belongs to a thread stays with it (locks,
// exceptions, grad mode), and to hand over takes some nanoseconds, where two futexes and the
// system's scheduler take microseconds. The thread that has lent them waits until its function has
// returned; then it ends as any other, and runs the destructors of its thread-local variables.
//
// This needs an x86-64 processor and a system that lets programs write that register (FSGSBASE,
// Linux 5.9). Elsewhere each fiber runs on its own thread, which waits for a futex.
#ifndef DISTGRAD_TESTS_SIMULATION_FIBER_H_
#define DISTGRAD_TESTS_SIMULATION_FIBER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace distgrad::simulation {

// Each belongs to one thread. One of all fibers runs at a time, and that one alone calls
// SwitchTo().
class Fiber {
 public:
  static constexpr size_t kLeastStack = size_t{256} << 10;

  // Before there are any: has them share the thread of Adopt(), if that is allowed and can be.
  static void Share(bool allowed);

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Has the calling thread be this fiber, which runs.
  void Adopt();

  // On a new thread, whose stack has kLeastStack bytes or more: waits for the first
  // SwitchTo(*this), and has `function` run then, which returns the fiber to run next. Returns when
  // that is to run, or soon after: then this thread has to end.
  void Lend(Fiber* (*function)());

  // On the fiber that runs: runs another one, until it, or one behind it, switches back.
  void SwitchTo(Fiber& next);

  // On another fiber, once `function` of Lend() has returned: lets the thread go.
  void Release();

 private:
  // Runs the function of the fiber that runs; on its stack.
  static void Enter();
  static void Wait(std::atomic<uint32_t>& word);
  static void Wake(std::atomic<uint32_t>& word);

  void* stack_pointer_ = nullptr;
  uint64_t storage_ = 0;            // the register
  Fiber* (*function_)() = nullptr;  // of Lend()
  std::atomic<uint32_t> lent_{0};   // futexes; this one: the three above are set
  std::atomic<uint32_t> go_{0};
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_FIBER_H_
