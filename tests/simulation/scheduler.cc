// Hands the baton on, moves time, and reports threads that wait for each other.
#include "tests/simulation/scheduler.h"

#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <vector>

#include "tests/simulation/fiber.h"

namespace distgrad::simulation {
namespace {

// The thread that has the baton is the only user of all of them.
struct Thread {
  uint64_t id = 0;
  int process = 0, locks = 0;
  char name[16] = "";
  Fiber fiber;
  bool dump = false;

  bool ready = true, over = false, timed_out = false;
  Wait wait = Wait::kNothing;
  const void* what = nullptr;
  int64_t until = kNever;  // while it waits
  bool wall = false;       // by the wall clock
  int64_t not_before = 0;  // stands still

  pthread_t pthread{};
  std::atomic<pid_t> tid{0};  // which the thread itself sets
  void* (*function)(void*) = nullptr;
  void* argument = nullptr;
  void* result = nullptr;
};

// How many threads wait for a thing of the same hash, so that who wakes nobody, as most do, need
// not look at all of them.
class Waiters {
 public:
  void Add(const void* what, int by) { counts_[Hash(what)] += by; }
  bool Has(const void* what) const { return counts_[Hash(what)] > 0; }

 private:
  static size_t Hash(const void* what) {
    return static_cast<size_t>(reinterpret_cast<uintptr_t>(what) * 0x9e3779b97f4a7c15 >> 54);
  }

  std::array<int, 1024> counts_ = {};
};

struct Simulation {
  Schedule schedule;
  bool calm = false;
  uint64_t random = 0, drawn = 0;
  int64_t wall_clock_ahead = 0;
  std::map<int, int64_t> refuse_until, stopped_until;  // by process
  Course course;
  Waiters waiters;
  std::vector<Thread*> live;      // not over
  std::vector<Thread*> unjoined;  // started, and not joined
  Thread* leaving = nullptr;      // has given the baton away, and is on its way out
  Thread* reporter = nullptr;
};

// The functions of libc are those of the process, and so is what stands for them.
Simulation* simulation = nullptr;
thread_local Thread* self = nullptr;
thread_local int must_start = 0;

void Mix(uint64_t number) {
  uint64_t& hash = simulation->course.hash;
  hash = (hash ^ number) * 0x9e3779b97f4a7c15;
  hash ^= hash >> 29;
}

const char* NameOf(Wait wait) {
  switch (wait) {
    case Wait::kNothing:
      return "goes on";
    case Wait::kMutex:
      return "mutex";
    case Wait::kCondition:
      return "condition";
    case Wait::kFutex:
      return "futex";
    case Wait::kThread:
      return "thread's end";
    case Wait::kSleep:
      return "sleep";
    case Wait::kOnce:
      return "once";
    case Wait::kLock:
      return "rwlock";
    case Wait::kPoll:
      return "poll";
  }
  return "?";
}

void PrintSelf() {
  dprintf(2, "simulation: thread %llu '%s': %s%s %p", static_cast<unsigned long long>(self->id),
          self->name, self->ready ? "could go on, after " : "waits for ", NameOf(self->wait),
          self->what);
  if (self->until != kNever) dprintf(2, " until %.6f s", static_cast<double>(self->until) * 1e-9);
  dprintf(2, "\n");
  void* frames[48];
  const int count = backtrace(frames, 48);
  backtrace_symbols_fd(frames, count, 2);
}

// On a thread that has got the baton.
void OnBaton() {
  while (self->dump) {
    self->dump = false;
    PrintSelf();
    self->fiber.SwitchTo(simulation->reporter->fiber);
  }
  // Whoever has left still ends what belongs to its thread: nobody runs beside it.
  if (Thread* const gone = simulation->leaving) {
    simulation->leaving = nullptr;
    const int error = errno;  // of whoever has got the baton
    gone->fiber.Release();
    while (RealLibc().syscall(SYS_tgkill, getpid(), gone->tid.load(), 0, 0, 0, 0) == 0) {
      RealLibc().syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    }
    errno = error;
  }
}

// Prints where every thread is, and ends the process.
[[noreturn]] void Report(const char* why, int code) {
  dprintf(2, "simulation: %s after %.6f s and %llu switches, of seed %llu\n", why,
          static_cast<double>(simulation->course.time) * 1e-9,
          static_cast<unsigned long long>(simulation->course.switches),
          static_cast<unsigned long long>(simulation->schedule.seed));
  simulation->reporter = self;
  for (Thread* thread : simulation->live) {
    if (thread == self) {
      PrintSelf();
      continue;
    }
    thread->dump = true;
    self->fiber.SwitchTo(thread->fiber);
  }
  _exit(code);
}

// When a thread may go on, as far as its process may.
int64_t StoppedUntil(const Thread& thread) {
  const std::map<int, int64_t>& until = simulation->stopped_until;
  if (until.empty() || thread.locks > 0) return 0;
  const auto found = until.find(thread.process);
  return found == until.end() ? 0 : found->second;
}

Thread* Pick() {
  Simulation& s = *simulation;
  static std::vector<Thread*> eligible;
  s.course.time += 1000 + static_cast<int64_t>(Draw() % 4000);
  while (true) {
    const int64_t now = s.course.time;
    int64_t next = kNever;
    eligible.clear();
    for (Thread* thread : s.live) {
      if (!thread->ready) {
        if (thread->until > now) {
          next = std::min(next, thread->until);
          continue;
        }
        thread->ready = thread->timed_out = true;
      }
      const int64_t not_before = std::max(thread->not_before, StoppedUntil(*thread));
      if (not_before <= now) {
        eligible.push_back(thread);
      } else {
        next = std::min(next, not_before);
      }
    }
    if (eligible.empty()) {
      if (next == kNever) Report("threads wait for each other for ever", kDeadlockExit);
      if (next > s.schedule.time_limit) Report("it takes too long", kTooLongExit);
      s.course.time = next;
      continue;
    }
    Thread* const chosen = eligible[Draw() % eligible.size()];
    if (!s.calm && s.schedule.stall_one_in != 0 && Draw() % s.schedule.stall_one_in == 0) {
      chosen->not_before = now + static_cast<int64_t>(Draw() % s.schedule.longest_stall);
      continue;
    }
    ++s.course.switches;
    Mix(chosen->id);
    Mix(static_cast<uint64_t>(now));
    if (s.schedule.trace) {
      dprintf(2, "%.6f thread %llu after %s %p%s (%llu drawn, %zu bytes)\n",
              static_cast<double>(now) * 1e-9, static_cast<unsigned long long>(chosen->id),
              NameOf(chosen->wait), chosen->what, chosen->timed_out ? ", in vain" : "",
              static_cast<unsigned long long>(s.drawn), mallinfo2().uordblks);
    }
    return chosen;
  }
}

void Switch() {
  Thread* const next = Pick();
  if (next == self) return;
  self->fiber.SwitchTo(next->fiber);
  OnBaton();
}

// Returns whose turn it is then.
Fiber* RunFunction() {
  OnBaton();
  Thread* const thread = self;
  thread->result = thread->function(thread->argument);
  Simulation& s = *simulation;
  thread->over = true;
  s.live.erase(std::find(s.live.begin(), s.live.end(), thread));
  Wake(Wait::kThread, thread, INT32_MAX);
  Thread* const next = Pick();
  s.leaving = thread;
  self = nullptr;
  return &next->fiber;
}

void* RunThread(void* argument) {
  auto* const thread = static_cast<Thread*>(argument);
  self = thread;
  thread->tid = static_cast<pid_t>(RealLibc().syscall(SYS_gettid, 0, 0, 0, 0, 0, 0));
  thread->fiber.Lend(RunFunction);
  return thread->result;
}

}  // namespace

void Begin(const Schedule& schedule) {
  // libgcc is loaded at the first one.
  void* frame;
  backtrace(&frame, 1);
  simulation = new Simulation;
  simulation->schedule = schedule;
  simulation->random = schedule.seed * 0x9e3779b97f4a7c15 + 1;
  self = new Thread;
  self->pthread = pthread_self();
  Fiber::Share(schedule.fibers);
  self->fiber.Adopt();
  simulation->live.push_back(self);
  simulation->course.threads = 1;
}

Course End() {
  Yield();
  if (simulation->live.size() > 1) Report("threads are left over", kDeadlockExit);
  const Course course = simulation->course;
  delete self;
  self = nullptr;
  delete simulation;
  simulation = nullptr;
  return course;
}

void Calm() { simulation->calm = true; }

void MoveWallClock(int64_t by) {
  simulation->wall_clock_ahead += by;
  for (Thread* thread : simulation->live) {
    if (!thread->ready && thread->wall && thread->until != kNever) thread->until -= by;
  }
}

int64_t WallClockAhead() { return simulation->wall_clock_ahead; }

InProcess::InProcess(int process) : before_(self->process) { self->process = process; }
InProcess::~InProcess() { self->process = before_; }

int CurrentProcess() { return self->process; }

void StopProcess(int process, int64_t until) { simulation->stopped_until[process] = until; }

int64_t LastStopOfProcess() {
  const auto found = simulation->stopped_until.find(self->process);
  return found == simulation->stopped_until.end() ? 0 : std::min(found->second, Now());
}

void RefuseThreads(int process, int64_t until) { simulation->refuse_until[process] = until; }
void EndRefusals() { simulation->refuse_until.clear(); }

MustStart::MustStart() { ++must_start; }
MustStart::~MustStart() { --must_start; }

bool Running() { return simulation != nullptr; }
bool OnThread() { return self != nullptr; }
int64_t Now() { return simulation->course.time; }

uint64_t Draw() {
  ++simulation->drawn;
  // splitmix64
  uint64_t z = (simulation->random += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

void Note(const char* what, uint64_t number) {
  Mix(number);
  if (simulation->schedule.trace) {
    dprintf(2, "%.6f %s %llu\n", static_cast<double>(Now()) * 1e-9, what,
            static_cast<unsigned long long>(number));
  }
}

bool Block(Wait wait, const void* what, int64_t until, bool wall) {
  self->wall = wall;
  self->ready = self->timed_out = false;
  self->wait = wait;
  self->what = what;
  self->until = until;
  simulation->waiters.Add(what, 1);
  Switch();
  simulation->waiters.Add(what, -1);
  self->until = kNever;
  self->wait = Wait::kNothing;
  return !self->timed_out;
}

int Wake(Wait wait, const void* what, int most) {
  int woken = 0;
  if (!simulation->waiters.Has(what)) return 0;
  static std::vector<Thread*> waiting;
  waiting.clear();
  for (Thread* thread : simulation->live) {
    if (!thread->ready && thread->wait == wait && thread->what == what) waiting.push_back(thread);
  }
  while (woken < most && !waiting.empty()) {
    const size_t i = waiting.size() == 1 ? 0 : Draw() % waiting.size();
    waiting[i]->ready = true;
    waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(i));
    ++woken;
  }
  return woken;
}

void WakeAt(Wait wait, const void* what, int64_t at) {
  for (Thread* thread : simulation->live) {
    if (!thread->ready && thread->wait == wait && thread->what == what) {
      thread->until = std::min(thread->until, at);
    }
  }
}

void Yield() {
  self->ready = true;
  Switch();
}

void CountLock(int by) { self->locks = std::max(0, self->locks + by); }

void MaybeYield() {
  if (StoppedUntil(*self) > Now()) return Yield();
  const uint32_t one_in = simulation->schedule.preempt_one_in;
  if (one_in != 0 && !simulation->calm && Draw() % one_in == 0) Yield();
}

bool DrawSpurious(int64_t* when) {
  const uint32_t one_in = simulation->schedule.spurious_one_in;
  if (one_in == 0 || simulation->calm || Draw() % one_in != 0) return false;
  *when = Now() + static_cast<int64_t>(Draw() % 1000000);
  return true;
}

int StartThread(pthread_t* pthread, const pthread_attr_t* attributes, void* (*function)(void*),
                void* argument) {
  const auto refused = simulation->refuse_until.find(self->process);
  if (must_start == 0 && refused != simulation->refuse_until.end() && Now() < refused->second) {
    return EAGAIN;
  }
  size_t stack = Fiber::kLeastStack;
  if (attributes != nullptr) pthread_attr_getstacksize(attributes, &stack);
  if (stack < Fiber::kLeastStack)
    Report("a thread has too small a stack for a fiber", kDeadlockExit);
  auto* const thread = new Thread;
  thread->id = simulation->course.threads;
  thread->process = self->process;
  thread->function = function;
  thread->argument = argument;
  const int error = RealLibc().create(&thread->pthread, attributes, RunThread, thread);
  if (error != 0) {
    delete thread;
    return error;
  }
  *pthread = thread->pthread;
  ++simulation->course.threads;
  simulation->live.push_back(thread);
  simulation->unjoined.push_back(thread);
  MaybeYield();
  return 0;
}

void DetachThread(pthread_t pthread) {
  auto& unjoined = simulation->unjoined;
  unjoined.erase(
      std::remove_if(unjoined.begin(), unjoined.end(),
                     [&](const Thread* thread) { return pthread_equal(thread->pthread, pthread); }),
      unjoined.end());
}

void NameThread(pthread_t pthread, const char* name) {
  for (Thread* thread : simulation->live) {
    if (pthread_equal(thread->pthread, pthread)) {
      strncpy(thread->name, name, sizeof(thread->name) - 1);
    }
  }
}

int JoinThread(pthread_t pthread, void** result) {
  auto& unjoined = simulation->unjoined;
  const auto found = std::find_if(unjoined.begin(), unjoined.end(), [&](const Thread* thread) {
    return pthread_equal(thread->pthread, pthread);
  });
  if (found == unjoined.end()) return RealLibc().join(pthread, result);
  Thread* const thread = *found;
  while (!thread->over) Block(Wait::kThread, thread, kNever);
  unjoined.erase(std::find(unjoined.begin(), unjoined.end(), thread));
  const int error = RealLibc().join(pthread, result);
  delete thread;
  return error;
}

}  // namespace distgrad::simulation
