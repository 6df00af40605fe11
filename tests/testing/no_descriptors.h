// A process that has used up its file descriptors.
#ifndef DISTGRAD_TESTS_TESTING_NO_DESCRIPTORS_H_
#define DISTGRAD_TESTS_TESTING_NO_DESCRIPTORS_H_

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/base/check.h"

namespace distgrad {

// Denies this process more of them while it lives; those that it has work. One at a time.
class NoDescriptors {
 public:
  NoDescriptors() {
    DG_CHECK(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    rlimit none = before_;
    none.rlim_cur = 0;
    DG_CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_;
};

// Gives this process, while it lives, a descriptor only where it gives one back. One at a time.
class NoMoreDescriptors {
 public:
  NoMoreDescriptors() {
    DG_CHECK(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    rlimit few = before_;
    few.rlim_cur = std::min<rlim_t>(before_.rlim_cur, 1024);  // so that they are soon taken
    DG_CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (int fd; (fd = fcntl(0, F_DUPFD_CLOEXEC, 0)) >= 0;) taken_.push_back(fd);
    DG_CHECK(errno == EMFILE);
  }
  ~NoMoreDescriptors() {
    setrlimit(RLIMIT_NOFILE, &before_);
    for (const int fd : taken_) close(fd);
  }
  NoMoreDescriptors(const NoMoreDescriptors&) = delete;
  NoMoreDescriptors& operator=(const NoMoreDescriptors&) = delete;

 private:
  rlimit before_;
  std::vector<int> taken_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_NO_DESCRIPTORS_H_
