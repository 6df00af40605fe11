// A thread that a test sees waiting, so that it can say that something has not gone on yet.
#ifndef DISTGRAD_TESTS_TESTING_WAITING_THREAD_H_
#define DISTGRAD_TESTS_TESTING_WAITING_THREAD_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <thread>

namespace distgrad {

class WaitingThread {
 public:
  explicit WaitingThread(std::function<void()> f);
  ~WaitingThread();  // joins it
  WaitingThread(const WaitingThread&) = delete;
  WaitingThread& operator=(const WaitingThread&) = delete;

  // Returns true once the system says that the thread sleeps, as it does while it waits for
  // something, and false if `f` has returned.
  bool Waits() const;

 private:
  std::atomic<pid_t> number_{0};
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_WAITING_THREAD_H_
