// Reads a thread's state in /proc.
#include "tests/testing/waiting_thread.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

bool Sleeps(pid_t thread) {
  std::ifstream file(absl::StrCat("/proc/self/task/", thread, "/stat"));
  std::string stat;
  std::getline(file, stat);
  const size_t state = stat.rfind(") ");  // behind its name
  return state != std::string::npos && stat.compare(state, 3, ") S") == 0;
}

}  // namespace

WaitingThread::WaitingThread(std::function<void()> f)
    : thread_([this, f = std::move(f)] {
        number_ = static_cast<pid_t>(syscall(SYS_gettid));
        f();
        over_ = true;
      }) {}

WaitingThread::~WaitingThread() { thread_.join(); }

bool WaitingThread::Waits() const {
  while (!over_) {
    if (number_ != 0 && Sleeps(number_)) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace distgrad
