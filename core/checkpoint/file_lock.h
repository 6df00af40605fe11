// A file that one process has locked, until it ends.
//
//   FileLock lock;
//   if (const int error = lock.Open(AT_FDCWD, "folder/.lock", O_RDWR | O_CREAT); error != 0) ...
//   if (const int error = lock.Lock(); error == EWOULDBLOCK) ...     // another process has it
//
// It is flock()'s lock, which belongs to the open file: so a process of which only a forked child
// is left would keep it. fcntl()'s locks are not inherited, but the process loses them as soon as
// any part of it closes any descriptor of that file, and two owners in one process would not keep
// each other out. Therefore a forked child closes its copy of the descriptor in a handler of
// pthread_atfork(), and whoever is done unlocks the file for all copies. (A child that was made
// with the system call clone() itself runs no such handler; after an exec no child has the
// descriptor.)
#ifndef DISTGRAD_CORE_CHECKPOINT_FILE_LOCK_H_
#define DISTGRAD_CORE_CHECKPOINT_FILE_LOCK_H_

namespace distgrad {

// A descriptor, and the lock of its file. For one thread; any other one may fork meanwhile.
class FileLock {
 public:
  FileLock() = default;
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() { Close(); }

  // Opens a file as openat() does, with O_CLOEXEC and mode 0666, in the place of the one before.
  // Returns 0, or errno.
  int Open(int folder, const char* path, int flags);
  // Locks it, and does not wait. Returns 0, or errno: EWOULDBLOCK if it is locked already.
  int Lock();
  // Unlocks and closes it.
  void Close();

  // Returns -1 if none is open, as in a forked child.
  int fd() const { return fd_; }

 private:
  friend class OpenLocks;

  int fd_ = -1;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_FILE_LOCK_H_
