// Keeps a list of the open locks of the process, which a forked child closes.
#include "core/checkpoint/file_lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <set>

#include "absl/base/thread_annotations.h"
#include "core/base/steady_mutex.h"

namespace distgrad {

// The locks whose descriptors this process has open. Thread-safe. It is never destroyed, since a
// program may fork while it ends.
class OpenLocks {
 public:
  static OpenLocks& Get() {
    static OpenLocks& all = *new OpenLocks;
    return all;
  }

  // Returns 0, or errno. No call of a file system is made under the mutex, for which forks wait.
  int Open(FileLock& lock, int folder, const char* path, int flags) {
    if (atfork_ != 0) return atfork_;
    // Its place comes first: where there is no memory for it no file is opened, nor made.
    uint64_t forks = Add(lock);
    while (true) {
      const int fd = openat(folder, path, flags | O_CLOEXEC, 0666);
      const int error = fd < 0 ? errno : 0;
      {
        const SteadyMutexLock lock_of_all(&mu_);
        if (error != 0) {
          open_.erase(&lock);
          return error;
        }
        if (forks == forks_) {
          lock.fd_ = fd;
          return 0;
        }
        forks = forks_;
      }
      // The process has forked meanwhile, and the child has a descriptor that it does not know.
      close(fd);
    }
  }
  void Close(FileLock& lock) {
    int fd = -1;
    {
      const SteadyMutexLock lock_of_all(&mu_);
      open_.erase(&lock);
      fd = lock.fd_;
      lock.fd_ = -1;
    }
    if (fd < 0) return;
    // For a copy of the descriptor, if there is one after all.
    flock(fd, LOCK_UN);
    close(fd);
  }

 private:
  OpenLocks()
      : atfork_(pthread_atfork([]() ABSL_NO_THREAD_SAFETY_ANALYSIS { Get().mu_.Lock(); },
                               []() ABSL_NO_THREAD_SAFETY_ANALYSIS {
                                 ++Get().forks_;
                                 Get().mu_.Unlock();
                               },
                               []() ABSL_NO_THREAD_SAFETY_ANALYSIS { Get().CloseInChild(); })) {}

  // Returns how often the process has forked.
  uint64_t Add(FileLock& lock) {
    const SteadyMutexLock lock_of_all(&mu_);
    open_.insert(&lock);
    return forks_;
  }
  // On the only thread of the child, which has the mutex from before the fork. The lock itself
  // stays: it is the parent's.
  void CloseInChild() ABSL_UNLOCK_FUNCTION(mu_) {
    for (FileLock* const lock : open_) {
      if (lock->fd_ >= 0) close(lock->fd_);
      lock->fd_ = -1;
    }
    open_.clear();
    mu_.Unlock();
  }

  SteadyMutex mu_;  // not absl::Mutex, which a fork's child would have to give back
  // Those that are open, or about to be. Their descriptors change under the mutex, too.
  std::set<FileLock*> open_ ABSL_GUARDED_BY(mu_);
  uint64_t forks_ ABSL_GUARDED_BY(mu_) = 0;
  const int atfork_;  // the error of pthread_atfork()
};

int FileLock::Open(int folder, const char* path, int flags) {
  Close();
  return OpenLocks::Get().Open(*this, folder, path, flags);
}

int FileLock::Lock() {
  while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

void FileLock::Close() {
  if (fd_ >= 0) OpenLocks::Get().Close(*this);
}

}  // namespace distgrad
