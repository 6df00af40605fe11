// Runs the threads of a process one at a time, in an order and at a time that follow from a seed.
//
// Every thread is one of the system's, so what belongs to a thread (grad mode, locks, handlers) is
// as in production; but only the one that has the baton runs (fiber.h). It hands it on where it
// would wait, and, if the options say so, where it takes or gives back a lock. The thread that gets
// it is drawn by the seed. Time is a number that moves only when the baton does: when no thread can
// go on, it jumps to the first moment at which one can. When there is no such moment, threads wait
// for each other for ever: the process prints where each waits, and ends.
//
// libc.cc brings the program's waiting here: it defines the functions of libc that wait, start
// threads, or tell the time, in place of libc's own, for all code of the program, libtorch's too.
// So nothing that is simulated knows of it, nothing that waits can be forgotten, and production
// pays nothing for it.
#ifndef DISTGRAD_TESTS_SIMULATION_SCHEDULER_H_
#define DISTGRAD_TESTS_SIMULATION_SCHEDULER_H_

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace distgrad::simulation {

// Sanitizers have functions of their own in place of libc's, and see to it that threads are theirs.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kCanSimulate = false;
#else
inline constexpr bool kCanSimulate = true;
#endif

// The exit codes of a process whose threads wait for ever, and of one that takes too long by its
// own clock.
inline constexpr int kDeadlockExit = 71, kTooLongExit = 72;

struct Schedule {
  uint64_t seed = 0;
  // One in so many times that a thread takes or gives back a lock, others go first; 0: never.
  uint32_t preempt_one_in = 0;
  // One in so many times that a thread is chosen, it stands still instead; 0: never.
  uint32_t stall_one_in = 0;
  int64_t longest_stall = 0;  // nanoseconds
  // One in so many waits for a condition variable ends for no reason; 0: none.
  uint32_t spurious_one_in = 0;
  int64_t time_limit = int64_t{4} * 3600 * 1000000000;  // nanoseconds; past it the process ends
  bool trace = false;                                   // prints each change of threads
  bool fibers = true;  // threads share one of the system's, where that can be (fiber.h)
};

// What happened, as far as it can be told apart from other runs.
struct Course {
  uint64_t hash = 0;
  uint64_t switches = 0;
  int64_t time = 0;  // nanoseconds since Begin
  uint64_t threads = 0;
};

// Gives the baton to the calling thread, which must be the only one of the process.
void Begin(const Schedule& schedule);
// Ends the course, once there is no other thread.
Course End();
// Has threads no longer preempted or stand still, so that what is left over ends soon.
void Calm();

// Moves the wall clock, as an operator or a time server does. What waits until a time of it waits
// less or more.
void MoveWallClock(int64_t by);  // nanoseconds
int64_t WallClockAhead();        // by how much it has been moved

// The threads that begin here, and this one meanwhile, are those of a process, whose number is not
// 0. Those that they start are, too.
class InProcess {
 public:
  explicit InProcess(int process);
  ~InProcess();
  InProcess(const InProcess&) = delete;
  InProcess& operator=(const InProcess&) = delete;

 private:
  const int before_;
};

int CurrentProcess();

// Has the threads of a process stand still until then, as SIGSTOP does; but each that has locks
// gives them back first, for others may need them: a simulated process shares some with the
// simulation.
void StopProcess(int process, int64_t until);
int64_t LastStopOfProcess();  // when this thread's process went on last; 0: it was never stopped

// Has the system start no threads of a process until then but those of a MustStart.
void RefuseThreads(int process, int64_t until);
void EndRefusals();
class MustStart {
 public:
  MustStart();
  ~MustStart();
  MustStart(const MustStart&) = delete;
  MustStart& operator=(const MustStart&) = delete;
};

bool Running();   // whether between Begin and End
bool OnThread();  // and on a thread that takes part
int64_t Now();    // nanoseconds since Begin
uint64_t Draw();  // the next number that follows from the seed

// Adds to the hash, and to what is printed, that something happened.
void Note(const char* what, uint64_t number);

// What follows is for libc.cc, on a thread that takes part.

enum class Wait { kNothing, kMutex, kCondition, kFutex, kThread, kSleep, kOnce, kLock, kPoll };

inline constexpr int64_t kNever = INT64_MAX;

// Gives the baton away until Wake() for the same thing, or that time. Whether it was woken. `wall`:
// it is a time of the wall clock.
bool Block(Wait wait, const void* what, int64_t until, bool wall = false);
// Returns how many it woke.
int Wake(Wait wait, const void* what, int most);
// Has those that wait for it wait until then at most.
void WakeAt(Wait wait, const void* what, int64_t at);
// Lets others go first, perhaps; and if the process is stopped, which a thread with locks is not
// yet.
void MaybeYield();
void CountLock(int by);  // that this thread has taken or given back
void Yield();
// Whether this wait for a condition variable ends for no reason, and when.
bool DrawSpurious(int64_t* when);

int StartThread(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                void* argument);
int JoinThread(pthread_t thread, void** result);
void DetachThread(pthread_t thread);  // before it is detached
void NameThread(pthread_t thread, const char* name);

// libc's own.
struct Libc {
  int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  int (*join)(pthread_t, void**);
  long (*syscall)(long, long, long, long, long, long, long);
};
const Libc& RealLibc();

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_SCHEDULER_H_
