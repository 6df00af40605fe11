// The functions of libc by which threads wait, start, and learn the time, those of sockets, and the
// system's random numbers: where the simulation does not run they are libc's own. The program's
// definition of a symbol comes before that of any library, so these are libtorch's and libstdc++'s,
// too.
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sockets.h"

namespace distgrad::simulation {
namespace {

// A simulation begins on this day, by the wall clock.
constexpr int64_t kEpoch = int64_t{1767225600} * 1000000000;  // 2026
constexpr int64_t kBoot = int64_t{1000} * 1000000000;         // and so long after the machine has

int64_t Nanoseconds(const timespec& time) {
  constexpr int64_t kFar = int64_t{4000000000};  // seconds
  return std::min<int64_t>(time.tv_sec, kFar) * 1000000000 + time.tv_nsec;
}

timespec ToTimespec(int64_t nanoseconds) {
  return {static_cast<time_t>(nanoseconds / 1000000000),
          static_cast<long>(nanoseconds % 1000000000)};
}

bool IsWall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int64_t OriginOf(clockid_t clock) { return IsWall(clock) ? kEpoch + WallClockAhead() : kBoot; }

int64_t Until(clockid_t clock, const timespec& time) { return Nanoseconds(time) - OriginOf(clock); }

template <typename Function>
Function* Real(Function* /*of this type*/, const char* name, const char* version = nullptr) {
  void* const found =
      version == nullptr ? dlsym(RTLD_NEXT, name) : dlvsym(RTLD_NEXT, name, version);
  return reinterpret_cast<Function*>(found);
}

std::vector<const void*>& OnceRunning() {
  static auto* const running = new std::vector<const void*>;
  return *running;
}

}  // namespace

const Libc& RealLibc() {
  static const Libc libc = {
      reinterpret_cast<decltype(Libc::create)>(dlsym(RTLD_NEXT, "pthread_create")),
      reinterpret_cast<decltype(Libc::join)>(dlsym(RTLD_NEXT, "pthread_join")),
      reinterpret_cast<decltype(Libc::syscall)>(dlsym(RTLD_NEXT, "syscall")),
  };
  return libc;
}

}  // namespace distgrad::simulation

using namespace distgrad::simulation;  // NOLINT: what follows is libc's

// The real function of this name, of the same type as the one that stands for it.
#define DG_REAL(name, ...)                                                             \
  ([] {                                                                                \
    static const auto real =                                                           \
        Real(static_cast<decltype(&simulated_##name)>(nullptr), #name, ##__VA_ARGS__); \
    return real;                                                                       \
  }())

// By the name that the linker sees: libc's headers have declared that name in other words.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DG_DECLARE(result, name, ...) extern "C" result simulated_##name(__VA_ARGS__)
#else
#define DG_DECLARE(result, name, ...) extern "C" result simulated_##name(__VA_ARGS__) __asm__(#name)
#endif

DG_DECLARE(int, pthread_create, pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
DG_DECLARE(int, pthread_join, pthread_t, void**);
DG_DECLARE(int, pthread_detach, pthread_t);
DG_DECLARE(int, pthread_setname_np, pthread_t, const char*);
DG_DECLARE(int, pthread_mutex_lock, pthread_mutex_t*);
DG_DECLARE(int, pthread_mutex_unlock, pthread_mutex_t*);
DG_DECLARE(int, pthread_cond_wait, pthread_cond_t*, pthread_mutex_t*);
DG_DECLARE(int, pthread_cond_timedwait, pthread_cond_t*, pthread_mutex_t*, const timespec*);
DG_DECLARE(int, pthread_cond_clockwait, pthread_cond_t*, pthread_mutex_t*, clockid_t,
           const timespec*);
DG_DECLARE(int, pthread_cond_signal, pthread_cond_t*);
DG_DECLARE(int, pthread_cond_broadcast, pthread_cond_t*);
DG_DECLARE(int, pthread_rwlock_rdlock, pthread_rwlock_t*);
DG_DECLARE(int, pthread_rwlock_wrlock, pthread_rwlock_t*);
DG_DECLARE(int, pthread_rwlock_unlock, pthread_rwlock_t*);
DG_DECLARE(int, pthread_once, pthread_once_t*, void (*)());
DG_DECLARE(long, syscall, long, long, long, long, long, long, long);
DG_DECLARE(int, clock_gettime, clockid_t, timespec*);
DG_DECLARE(int, gettimeofday, timeval*, void*);
DG_DECLARE(time_t, time, time_t*);
DG_DECLARE(int, nanosleep, const timespec*, timespec*);
DG_DECLARE(int, clock_nanosleep, clockid_t, int, const timespec*, timespec*);
DG_DECLARE(int, usleep, useconds_t);
DG_DECLARE(int, sched_yield, void);
DG_DECLARE(int, socket, int, int, int);
DG_DECLARE(int, socketpair, int, int, int, int*);
DG_DECLARE(int, eventfd, unsigned, int);
DG_DECLARE(int, bind, int, const sockaddr*, socklen_t);
DG_DECLARE(int, listen, int, int);
DG_DECLARE(int, connect, int, const sockaddr*, socklen_t);
DG_DECLARE(int, accept4, int, sockaddr*, socklen_t*, int);
DG_DECLARE(ssize_t, send, int, const void*, size_t, int);
DG_DECLARE(ssize_t, recv, int, void*, size_t, int);
DG_DECLARE(ssize_t, write, int, const void*, size_t);
DG_DECLARE(ssize_t, read, int, void*, size_t);
DG_DECLARE(int, shutdown, int, int);
DG_DECLARE(int, close, int);
DG_DECLARE(int, poll, pollfd*, nfds_t, int);
DG_DECLARE(int, getsockopt, int, int, int, void*, socklen_t*);
DG_DECLARE(int, setsockopt, int, int, int, const void*, socklen_t);
DG_DECLARE(int, getsockname, int, sockaddr*, socklen_t*);
DG_DECLARE(int, getpeername, int, sockaddr*, socklen_t*);

// ------------------------------------------------------------------------------------- Threads

int simulated_pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                             void* (*function)(void*), void* argument) {
  if (!OnThread()) return RealLibc().create(thread, attributes, function, argument);
  return StartThread(thread, attributes, function, argument);
}

int simulated_pthread_join(pthread_t thread, void** result) {
  if (!OnThread()) return RealLibc().join(thread, result);
  return JoinThread(thread, result);
}

int simulated_pthread_detach(pthread_t thread) {
  if (OnThread()) DetachThread(thread);
  return DG_REAL(pthread_detach)(thread);
}

int simulated_pthread_setname_np(pthread_t thread, const char* name) {
  const int error = DG_REAL(pthread_setname_np)(thread, name);
  if (error == 0 && OnThread()) NameThread(thread, name);
  return error;
}

// --------------------------------------------------------------------------------------- Locks

int simulated_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (!OnThread()) return DG_REAL(pthread_mutex_lock)(mutex);
  MaybeYield();
  int error;
  while ((error = pthread_mutex_trylock(mutex)) == EBUSY) Block(Wait::kMutex, mutex, kNever);
  if (error == 0) CountLock(1);
  return error;
}

int simulated_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int error = DG_REAL(pthread_mutex_unlock)(mutex);
  if (OnThread()) {
    CountLock(-1);
    Wake(Wait::kMutex, mutex, INT32_MAX);
    MaybeYield();
  }
  return error;
}

namespace {

int WaitFor(pthread_cond_t* condition, pthread_mutex_t* mutex, int64_t until, bool wall = false) {
  DG_REAL(pthread_mutex_unlock)(mutex);
  CountLock(-1);
  Wake(Wait::kMutex, mutex, INT32_MAX);
  int64_t when = kNever;
  const bool spurious = DrawSpurious(&when) && when < until;
  const bool woken = Block(Wait::kCondition, condition, spurious ? when : until, wall && !spurious);
  int error;
  while ((error = pthread_mutex_trylock(mutex)) == EBUSY) Block(Wait::kMutex, mutex, kNever);
  CountLock(1);
  return woken || spurious ? error : ETIMEDOUT;
}

}  // namespace

int simulated_pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (!OnThread()) return DG_REAL(pthread_cond_wait, "GLIBC_2.3.2")(condition, mutex);
  return WaitFor(condition, mutex, kNever);
}

int simulated_pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                     const timespec* until) {
  if (!OnThread()) {
    return DG_REAL(pthread_cond_timedwait, "GLIBC_2.3.2")(condition, mutex, until);
  }
  return WaitFor(condition, mutex, Until(CLOCK_REALTIME, *until), /*wall=*/true);
}

int simulated_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                     clockid_t clock, const timespec* until) {
  if (!OnThread()) return DG_REAL(pthread_cond_clockwait)(condition, mutex, clock, until);
  return WaitFor(condition, mutex, Until(clock, *until), IsWall(clock));
}

int simulated_pthread_cond_signal(pthread_cond_t* condition) {
  if (!OnThread()) return DG_REAL(pthread_cond_signal, "GLIBC_2.3.2")(condition);
  Wake(Wait::kCondition, condition, 1);
  return 0;
}

int simulated_pthread_cond_broadcast(pthread_cond_t* condition) {
  if (!OnThread()) return DG_REAL(pthread_cond_broadcast, "GLIBC_2.3.2")(condition);
  Wake(Wait::kCondition, condition, INT32_MAX);
  return 0;
}

int simulated_pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  if (!OnThread()) return DG_REAL(pthread_rwlock_rdlock)(lock);
  int error;
  while ((error = pthread_rwlock_tryrdlock(lock)) == EBUSY) Block(Wait::kLock, lock, kNever);
  if (error == 0) CountLock(1);
  return error;
}

int simulated_pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  if (!OnThread()) return DG_REAL(pthread_rwlock_wrlock)(lock);
  int error;
  while ((error = pthread_rwlock_trywrlock(lock)) == EBUSY) Block(Wait::kLock, lock, kNever);
  if (error == 0) CountLock(1);
  return error;
}

int simulated_pthread_rwlock_unlock(pthread_rwlock_t* lock) {
  const int error = DG_REAL(pthread_rwlock_unlock)(lock);
  if (OnThread()) {
    CountLock(-1);
    Wake(Wait::kLock, lock, INT32_MAX);
  }
  return error;
}

int simulated_pthread_once(pthread_once_t* once, void (*function)()) {
  if (!OnThread()) return DG_REAL(pthread_once)(once, function);
  std::vector<const void*>& running = OnceRunning();
  while (std::find(running.begin(), running.end(), once) != running.end()) {
    Block(Wait::kOnce, once, kNever);
  }
  struct Mark {
    explicit Mark(const void* the_once) : once(the_once) {
      OnceRunning().push_back(once);
      CountLock(1);
    }
    ~Mark() {
      CountLock(-1);
      OnceRunning().erase(std::find(OnceRunning().begin(), OnceRunning().end(), once));
      Wake(Wait::kOnce, once, INT32_MAX);
    }
    const void* const once;
  };
  const Mark mark(once);  // the function may throw
  return DG_REAL(pthread_once)(once, function);
}

// absl's mutexes wait in futexes, as do the guards of static variables.
long simulated_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number != SYS_futex || !OnThread()) {
    return RealLibc().syscall(number, a, b, c, d, e, f);
  }
  auto* const word = reinterpret_cast<const int*>(a);
  const int operation = static_cast<int>(b) & FUTEX_CMD_MASK;
  if (operation == FUTEX_WAKE || operation == FUTEX_WAKE_BITSET) {
    return Wake(Wait::kFutex, word, static_cast<int>(c));
  }
  if (operation != FUTEX_WAIT && operation != FUTEX_WAIT_BITSET) {
    errno = ENOSYS;
    return -1;
  }
  if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != static_cast<int>(c)) {
    errno = EAGAIN;
    return -1;
  }
  int64_t until = kNever;
  const clockid_t clock =
      (static_cast<int>(b) & FUTEX_CLOCK_REALTIME) != 0 ? CLOCK_REALTIME : CLOCK_MONOTONIC;
  const bool is_span = operation == FUTEX_WAIT;
  if (const auto* const time = reinterpret_cast<const timespec*>(d)) {
    until = is_span ? Now() + Nanoseconds(*time) : Until(clock, *time);
  }
  if (Block(Wait::kFutex, word, until, IsWall(clock) && !is_span)) return 0;
  errno = ETIMEDOUT;
  return -1;
}

// ---------------------------------------------------------------------------------------- Time

int simulated_clock_gettime(clockid_t clock, timespec* time) {
  if (!Running()) return DG_REAL(clock_gettime)(clock, time);
  *time = ToTimespec(OriginOf(clock) + Now());
  return 0;
}

int simulated_gettimeofday(timeval* time, void* zone) {
  if (!Running()) return DG_REAL(gettimeofday)(time, zone);
  const int64_t now = OriginOf(CLOCK_REALTIME) + Now();
  *time = {static_cast<time_t>(now / 1000000000),
           static_cast<suseconds_t>(now % 1000000000 / 1000)};
  return 0;
}

time_t simulated_time(time_t* time) {
  if (!Running()) return DG_REAL(time)(time);
  const auto now = static_cast<time_t>((OriginOf(CLOCK_REALTIME) + Now()) / 1000000000);
  if (time != nullptr) *time = now;
  return now;
}

int simulated_nanosleep(const timespec* time, timespec* left) {
  if (!OnThread()) return DG_REAL(nanosleep)(time, left);
  Block(Wait::kSleep, nullptr, Now() + Nanoseconds(*time));
  return 0;
}

int simulated_clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (!OnThread()) return DG_REAL(clock_nanosleep)(clock, flags, time, left);
  Block(Wait::kSleep, nullptr,
        flags == TIMER_ABSTIME ? Until(clock, *time) : Now() + Nanoseconds(*time),
        flags == TIMER_ABSTIME && IsWall(clock));
  return 0;
}

int simulated_usleep(useconds_t time) {
  if (!OnThread()) return DG_REAL(usleep)(time);
  Block(Wait::kSleep, nullptr, Now() + int64_t{time} * 1000);
  return 0;
}

// Who gives way has others go on, however long it looks.
int simulated_sched_yield() {
  if (!OnThread()) return DG_REAL(sched_yield)();
  Block(Wait::kSleep, nullptr, Now() + 20000);
  return 0;
}

// ------------------------------------------------------------------------------------- Sockets

int simulated_socket(int domain, int type, int protocol) {
  return OnThread() ? NewSocket() : DG_REAL(socket)(domain, type, protocol);
}

int simulated_socketpair(int domain, int type, int protocol, int* ends) {
  return OnThread() ? NewSocketPair(ends) : DG_REAL(socketpair)(domain, type, protocol, ends);
}

int simulated_eventfd(unsigned rings, int flags) {
  return OnThread() ? NewEvent() : DG_REAL(eventfd)(rings, flags);
}

int simulated_bind(int descriptor, const sockaddr* address, socklen_t size) {
  return IsSimulated(descriptor) ? BindSocket(descriptor, address)
                                 : DG_REAL(bind)(descriptor, address, size);
}

int simulated_listen(int descriptor, int most) {
  return IsSimulated(descriptor) ? ListenOn(descriptor) : DG_REAL(listen)(descriptor, most);
}

int simulated_connect(int descriptor, const sockaddr* address, socklen_t size) {
  return IsSimulated(descriptor) ? ConnectSocket(descriptor, address)
                                 : DG_REAL(connect)(descriptor, address, size);
}

int simulated_accept4(int descriptor, sockaddr* address, socklen_t* size, int flags) {
  return IsSimulated(descriptor) ? AcceptSocket(descriptor)
                                 : DG_REAL(accept4)(descriptor, address, size, flags);
}

ssize_t simulated_send(int descriptor, const void* bytes, size_t size, int flags) {
  return IsSimulated(descriptor) ? SendTo(descriptor, bytes, size)
                                 : DG_REAL(send)(descriptor, bytes, size, flags);
}

ssize_t simulated_recv(int descriptor, void* bytes, size_t size, int flags) {
  return IsSimulated(descriptor) ? ReceiveFrom(descriptor, bytes, size)
                                 : DG_REAL(recv)(descriptor, bytes, size, flags);
}

ssize_t simulated_write(int descriptor, const void* bytes, size_t size) {
  return IsSimulated(descriptor) ? SendTo(descriptor, bytes, size)
                                 : DG_REAL(write)(descriptor, bytes, size);
}

ssize_t simulated_read(int descriptor, void* bytes, size_t size) {
  return IsSimulated(descriptor) ? ReceiveFrom(descriptor, bytes, size)
                                 : DG_REAL(read)(descriptor, bytes, size);
}

int simulated_shutdown(int descriptor, int how) {
  return IsSimulated(descriptor) ? ShutDown(descriptor) : DG_REAL(shutdown)(descriptor, how);
}

int simulated_close(int descriptor) {
  return IsSimulated(descriptor) ? CloseSocket(descriptor) : DG_REAL(close)(descriptor);
}

int simulated_poll(pollfd* entries, nfds_t count, int milliseconds) {
  const bool has_simulated = std::any_of(entries, entries + count,
                                         [](const pollfd& entry) { return IsSimulated(entry.fd); });
  return has_simulated ? PollSockets(entries, count, milliseconds)
                       : DG_REAL(poll)(entries, count, milliseconds);
}

int simulated_getsockopt(int descriptor, int level, int name, void* value, socklen_t* size) {
  if (!IsSimulated(descriptor)) return DG_REAL(getsockopt)(descriptor, level, name, value, size);
  if (level != SOL_SOCKET || name != SO_ERROR) {
    errno = ENOPROTOOPT;
    return -1;
  }
  *static_cast<int*>(value) = TakeSocketError(descriptor);
  return 0;
}

int simulated_setsockopt(int descriptor, int level, int name, const void* value, socklen_t size) {
  return IsSimulated(descriptor) ? 0 : DG_REAL(setsockopt)(descriptor, level, name, value, size);
}

int simulated_getsockname(int descriptor, sockaddr* address, socklen_t* size) {
  return IsSimulated(descriptor) ? NameOfSocket(descriptor, address, size)
                                 : DG_REAL(getsockname)(descriptor, address, size);
}

int simulated_getpeername(int descriptor, sockaddr* address, socklen_t* size) {
  return IsSimulated(descriptor) ? NameOfPeer(descriptor, address, size)
                                 : DG_REAL(getpeername)(descriptor, address, size);
}

// -------------------------------------------------------------------------------------- Chance

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Each one asks the processor what it can, which a virtual machine is slow to say.
void std::random_device::_M_init(const std::string& /*token*/) {}
void std::random_device::_M_fini() {}
std::random_device::result_type std::random_device::_M_getval() {
  if (OnThread()) return static_cast<result_type>(Draw());
  result_type number;
  if (RealLibc().syscall(SYS_getrandom, reinterpret_cast<long>(&number), sizeof(number), 0, 0, 0,
                         0) != sizeof(number)) {
    __builtin_trap();
  }
  return number;
}
#endif

// --------------------------------------------------------------------------------------- absl

// absl's clock counts the processor's cycles in between. The linker has the program call this one
// (--wrap).
absl::Time WrapAbslNow() __asm__("__wrap__ZN4absl12lts_202206233NowEv");
absl::Time WrapAbslNow() {
  timespec now;
  simulated_clock_gettime(CLOCK_REALTIME, &now);
  return absl::TimeFromTimespec(now);
}

// An absl::Mutex that is free is taken without libc. The linker has the program call these, too, so
// that others may go first here.
extern "C" {
void RealAbslLock(void*) __asm__("__real__ZN4absl12lts_202206235Mutex4LockEv");
void RealAbslUnlock(void*) __asm__("__real__ZN4absl12lts_202206235Mutex6UnlockEv");
void WrapAbslLock(void*) __asm__("__wrap__ZN4absl12lts_202206235Mutex4LockEv");
void WrapAbslUnlock(void*) __asm__("__wrap__ZN4absl12lts_202206235Mutex6UnlockEv");

void WrapAbslLock(void* mutex) {
  if (OnThread()) {
    MaybeYield();
    // Before it is here: abseil wakes one of those who wait, and the others by that one. So they
    // would wait for it while its process is stopped, also for a lock that no process has (of the
    // network).
    CountLock(1);
  }
  RealAbslLock(mutex);
}
void WrapAbslUnlock(void* mutex) {
  RealAbslUnlock(mutex);
  if (!OnThread()) return;
  CountLock(-1);
  MaybeYield();
}
}
