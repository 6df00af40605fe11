#include "tests/testing/child_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/check.h"

namespace distgrad {

ChildProcess::ChildProcess(const std::vector<std::string>& arguments) {
  int ends[2];
  DG_CHECK(pipe(ends) == 0) << std::strerror(errno);
  std::string name = "/proc/self/exe";
  std::vector<std::string> strings = arguments;
  std::vector<char*> argv = {name.data()};
  for (std::string& argument : strings) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  DG_CHECK(pid_ >= 0) << std::strerror(errno);
  if (pid_ == 0) {
    // Other threads of the parent may have held locks: nothing here but system calls.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    execv(name.c_str(), argv.data());
    _exit(127);
  }
  close(ends[1]);
  output_ = fdopen(ends[0], "r");
  DG_CHECK(output_ != nullptr) << std::strerror(errno);
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    Wait();
  }
  std::fclose(output_);
}

std::string ChildProcess::ReadLine() {
  std::string line;
  for (int c; (c = std::fgetc(output_)) != EOF && c != '\n';) line.push_back(static_cast<char>(c));
  return line;
}

void ChildProcess::Signal(int signal) { kill(pid_, signal); }

void ChildProcess::Stop() {
  Signal(SIGSTOP);
  int status = 0;
  pid_t stopped;
  do {
    stopped = waitpid(pid_, &status, WUNTRACED);
  } while (stopped < 0 && errno == EINTR);
  DG_CHECK(stopped == pid_ && WIFSTOPPED(status)) << "it ended, or cannot be waited for";
}

int ChildProcess::Wait() {
  int status = 0;
  pid_t ended;
  do {
    ended = waitpid(pid_, &status, 0);
  } while (ended < 0 && errno == EINTR);
  DG_CHECK(ended == pid_) << std::strerror(errno);
  pid_ = -1;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace distgrad
