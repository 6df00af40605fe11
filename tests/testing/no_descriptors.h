// A process that has used up its file descriptors.
#ifndef DISTGRAD_TESTS_TESTING_NO_DESCRIPTORS_H_
#define DISTGRAD_TESTS_TESTING_NO_DESCRIPTORS_H_

#include <sys/resource.h>

#include "core/base/check.h"

namespace distgrad {

// While it lives, this process gets no more of them; those that it has work. One at a time.
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

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_NO_DESCRIPTORS_H_
