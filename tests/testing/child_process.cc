// Starts the program with pipes to it, and ends it with its parent.
#include "tests/testing/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/check.h"

namespace distgrad {

ChildProcess::ChildProcess(const std::vector<std::string>& arguments) {
  // Its input is a socket, for writing to a pipe that nobody reads ends the writer.
  int ends[2], inputs[2];
  DG_CHECK(pipe2(ends, O_CLOEXEC) == 0) << std::strerror(errno);
  DG_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, inputs) == 0) << std::strerror(errno);
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
    dup2(inputs[1], STDIN_FILENO);
    dup2(ends[1], STDOUT_FILENO);
    execv(name.c_str(), argv.data());
    _exit(127);
  }
  close(inputs[1]);
  close(ends[1]);
  input_ = inputs[0];
  output_ = ends[0];
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    Wait();
  }
  close(input_);
  close(output_);
}

void ChildProcess::WriteLine(const std::string& line) {
  const std::string bytes = line + "\n";
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(input_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;
    sent += static_cast<size_t>(n);
  }
}

bool ChildProcess::ReadMore(bool wait) {
  if (is_over_) return false;
  pollfd readable = {.fd = output_, .events = POLLIN, .revents = 0};
  if (!wait && poll(&readable, 1, 0) <= 0) return false;
  char bytes[4096];
  ssize_t n;
  do {
    n = read(output_, bytes, sizeof(bytes));
  } while (n < 0 && errno == EINTR);
  DG_CHECK(n >= 0) << std::strerror(errno);
  read_.append(bytes, static_cast<size_t>(n));
  is_over_ = n == 0;
  return n > 0;
}

std::string ChildProcess::TakeLine() {
  const size_t end = read_.find('\n');
  std::string line = read_.substr(0, end);
  read_.erase(0, end == std::string::npos ? end : end + 1);
  return line;
}

std::string ChildProcess::ReadLine() {
  while (read_.find('\n') == std::string::npos && ReadMore(/*wait=*/true)) {
  }
  return TakeLine();
}

std::optional<std::string> ChildProcess::TryReadLine() {
  while (read_.find('\n') == std::string::npos) {
    if (ReadMore(/*wait=*/false)) continue;
    if (!is_over_) return std::nullopt;
    break;
  }
  return TakeLine();
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
