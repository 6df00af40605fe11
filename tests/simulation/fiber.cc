// Switches stacks and thread-local storage on x86-64, and wakes threads elsewhere.
#include "tests/simulation/fiber.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <sys/auxv.h>
#include <sys/syscall.h>

#include <cstddef>

namespace distgrad::simulation {

#ifdef __x86_64__

// Saves the registers that a function has to leave as they were (System V ABI for x86-64, 3.2.1) on
// the stack, and that in *from; and goes on where another stack was left.
void Switch(void** from, void* to, uint64_t storage) __asm__("distgrad_simulation_switch");
asm(R"(
.pushsection .text
.p2align 4
.type distgrad_simulation_switch, @function
distgrad_simulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  subq $8, %rsp
  stmxcsr (%rsp)
  fnstcw 4(%rsp)
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  wrfsbase %rdx
  ldmxcsr (%rsp)
  fldcw 4(%rsp)
  addq $8, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size distgrad_simulation_switch, .-distgrad_simulation_switch
.popsection
)");
constexpr int kSavedRegisters = 6;

namespace {

bool CanShare() { return (getauxval(AT_HWCAP2) & 2) != 0; }  // HWCAP2_FSGSBASE of <asm/hwcap2.h>

uint64_t ReadStorage() {
  uint64_t storage;
  asm volatile("rdfsbase %0" : "=r"(storage));
  return storage;
}

// The control words of floating point, as Switch() saves them.
uint64_t ReadControls() {
  uint32_t sse;
  uint16_t x87;
  asm volatile("stmxcsr %0\n\tfnstcw %1" : "=m"(sse), "=m"(x87));
  return uint64_t{sse} | uint64_t{x87} << 32;
}

// Without libc, which would set errno: that is the fiber's, also while its thread waits here.
void Futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  long result = SYS_futex;
  register long timeout asm("r10") = 0;
  asm volatile("syscall"
               : "+a"(result)
               : "D"(&word), "S"(static_cast<long>(operation)), "d"(static_cast<long>(value)),
                 "r"(timeout)
               : "rcx", "r11", "memory");
}

#else

namespace {

void Switch(void**, void*, uint64_t) { __builtin_trap(); }
constexpr int kSavedRegisters = 0;
bool CanShare() { return false; }
uint64_t ReadStorage() { return 0; }
uint64_t ReadControls() { return 0; }

void Futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  // The program's own stands for it (libc.cc).
  static const auto real = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  const int error = errno;
  real(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
  errno = error;
}

#endif

// How far below what the thread that lends its stack uses of it a fiber begins: the frame of a
// signal fits in between.
constexpr size_t kDistance = size_t{64} << 10;

bool shares = false;
Fiber* running = nullptr;  // where fibers share a thread

}  // namespace

void Fiber::Share(bool allowed) { shares = allowed && CanShare(); }

void Fiber::Wait(std::atomic<uint32_t>& word) {
  while (word.load(std::memory_order_acquire) == 0) Futex(word, FUTEX_WAIT_PRIVATE, 0);
}

void Fiber::Wake(std::atomic<uint32_t>& word) {
  word.store(1, std::memory_order_release);
  Futex(word, FUTEX_WAKE_PRIVATE, 1);
}

void Fiber::Adopt() {
  storage_ = ReadStorage();
  running = this;
  lent_ = 1;
}

void Fiber::Enter() {
  Fiber* const next = running->function_();
  running = next;
  Wait(next->lent_);
  void* left = nullptr;  // nobody comes back
  Switch(&left, next->stack_pointer_, next->storage_);
  __builtin_trap();
}

void Fiber::Lend(Fiber* (*function)()) {
  if (!shares) {
    Wait(go_);
    go_ = 0;
    Wake(function()->go_);
    return;
  }
  function_ = function;
  storage_ = ReadStorage();
  // As Switch() leaves a stack, with Enter() in place of its caller.
  const auto top = reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) - kDistance;
  auto* frame = reinterpret_cast<uint64_t*>(top & ~uintptr_t{15});
  *--frame = 0;  // stacks end here
  *--frame = reinterpret_cast<uint64_t>(&Fiber::Enter);
  for (int i = 0; i < kSavedRegisters; ++i) *--frame = 0;
  *--frame = ReadControls();
  stack_pointer_ = frame;
  Wake(lent_);
  Wait(go_);
}

void Fiber::SwitchTo(Fiber& next) {
  if (!shares) {
    Wake(next.go_);
    Wait(go_);
    go_ = 0;
    return;
  }
  running = &next;
  Wait(next.lent_);
  Switch(&stack_pointer_, next.stack_pointer_, next.storage_);
}

void Fiber::Release() {
  if (shares) Wake(go_);
}

}  // namespace distgrad::simulation
