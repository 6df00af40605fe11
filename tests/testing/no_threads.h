// A machine that gives no more threads, as one does whose user or container has as many as it may.
#ifndef DISTGRAD_TESTS_TESTING_NO_THREADS_H_
#define DISTGRAD_TESTS_TESTING_NO_THREADS_H_

#include <pthread.h>

namespace distgrad {

// Lets no thread be made in this process while it lives; those that there are go on. One at a time.
class NoThreads {
 public:
  NoThreads();
  ~NoThreads();
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_NO_THREADS_H_
