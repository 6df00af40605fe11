// Starts copies of the program, passes signals on to them, and ends all if one fails.
#include "examples/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/processors.h"
#include "core/membership/environment.h"

namespace distgrad {
namespace {

constexpr std::array<int, 4> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGCHLD};
// Those of distgrad would count before the ones that are set here.
constexpr std::array<const char*, 12> kJobVariables = {"RANK",
                                                       "LOCAL_RANK",
                                                       "WORLD_SIZE",
                                                       "LOCAL_WORLD_SIZE",
                                                       "MASTER_ADDR",
                                                       "MASTER_PORT",
                                                       "DISTGRAD_RANK",
                                                       "DISTGRAD_LOCAL_RANK",
                                                       "DISTGRAD_WORLD_SIZE",
                                                       "DISTGRAD_LOCAL_WORLD_SIZE",
                                                       "DISTGRAD_NAME",
                                                       "DISTGRAD_RENDEZVOUS"};

absl::Status SystemError(absl::string_view what) {
  return absl::ErrnoToStatus(errno, absl::StrCat("starting the workers: ", what));
}

// A file descriptor with its owner. Move-only; for one thread.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { Close(); }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct Pipe {
  Descriptor read;
  Descriptor write;
};

absl::StatusOr<Pipe> MakePipe(int flags) {
  std::array<int, 2> fds;
  if (pipe2(fds.data(), flags | O_CLOEXEC) != 0) return SystemError("pipe");
  return Pipe{Descriptor(fds[0]), Descriptor(fds[1])};
}

// Signals become bytes in a pipe: a handler may do little else, and a signal may arrive on any
// thread of the process.
volatile int signal_pipe = -1;

void WriteSignal(int signal) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  // If the pipe is full, it has enough signals to wake its reader.
  [[maybe_unused]] const ssize_t written = write(signal_pipe, &byte, 1);
  errno = saved;
}

// Catches kSignals as long as it lives.
class SignalCatcher {
 public:
  explicit SignalCatcher(Pipe pipe) : pipe_(std::move(pipe)) {
    signal_pipe = pipe_.write.get();
    for (size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction action = {};
      action.sa_handler = WriteSignal;
      action.sa_flags = SA_RESTART;
      sigaction(kSignals[i], nullptr, &before_[i]);
      // A signal that nohup ignores stays ignored.
      if (kSignals[i] == SIGHUP && before_[i].sa_handler == SIG_IGN) continue;
      sigaction(kSignals[i], &action, nullptr);
    }
  }
  SignalCatcher(const SignalCatcher&) = delete;
  SignalCatcher& operator=(const SignalCatcher&) = delete;
  ~SignalCatcher() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
    signal_pipe = -1;
  }

  // Returns the signals that have come; waits for the first one until `deadline`.
  std::vector<int> Wait(absl::Time deadline) {
    pollfd waiting = {pipe_.read.get(), POLLIN, 0};
    int milliseconds = -1;
    if (deadline != absl::InfiniteFuture()) {
      const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
      milliseconds =
          static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
    }
    poll(&waiting, 1, milliseconds);
    std::array<unsigned char, 64> bytes;
    const ssize_t n = read(pipe_.read.get(), bytes.data(), bytes.size());
    return std::vector<int>(bytes.begin(), bytes.begin() + std::max<ssize_t>(n, 0));
  }

 private:
  const Pipe pipe_;
  std::array<struct sigaction, kSignals.size()> before_;
};

// Reserves a port of the loopback as long as the descriptor is open: bound, but not listening, so
// that a server that allows reuse of the address, as c10d's does, can still bind it by its number.
struct ReservedPort {
  Descriptor socket;
  int number = 0;
};

absl::StatusOr<ReservedPort> ReservePort() {
  ReservedPort port{Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  const int on = 1;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (port.socket.get() < 0 ||
      setsockopt(port.socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      bind(port.socket.get(), any, size) != 0 || getsockname(port.socket.get(), any, &size) != 0) {
    return SystemError("no free port on the loopback");
  }
  port.number = ntohs(address.sin_port);
  return port;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> Environment(int rank, int processes, int port) {
  std::vector<std::string> variables;
  for (char** v = environ; *v != nullptr; ++v) {
    const bool ours = std::any_of(
        kJobVariables.begin(), kJobVariables.end(),
        [&](const char* name) { return absl::StartsWith(*v, absl::StrCat(name, "=")); });
    if (!ours) variables.emplace_back(*v);
  }
  for (const char* name : {"RANK", "LOCAL_RANK"}) {
    variables.push_back(absl::StrCat(name, "=", rank));
  }
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) {
    variables.push_back(absl::StrCat(name, "=", processes));
  }
  variables.push_back("MASTER_ADDR=127.0.0.1");
  variables.push_back(absl::StrCat("MASTER_PORT=", port));
  // More threads than processors would wait for each other in every parallel loop.
  if (getenv("OMP_NUM_THREADS") == nullptr) {
    variables.push_back(
        absl::StrCat("OMP_NUM_THREADS=", std::max(1, UsableProcessors() / processes)));
  }
  // OpenMP's threads are to spin for some 50 us at most while they wait. By default they spin for
  // milliseconds, which makes training ten times slower as soon as other processes want the cores
  // too; where nobody does, threads that sleep at once (OMP_WAIT_POLICY=passive) train the
  // transformer at half the speed. libgomp reads this when it is loaded, before main().
  if (getenv("OMP_WAIT_POLICY") == nullptr && getenv("GOMP_SPINCOUNT") == nullptr) {
    variables.emplace_back("GOMP_SPINCOUNT=2000");
  }
  return variables;
}

// Becomes the program; on failure writes the reason to `report`. Runs between fork and exec, and so
// makes only calls that are safe there.
[[noreturn]] void Become(const char* program, char* const* arguments, char* const* environment,
                         pid_t launcher, int report) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(127);  // it had ended before that call
  for (const int signal : kSignals) ::signal(signal, SIG_DFL);
  // A process in the background may not read from the terminal.
  const int nothing = open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  if (nothing > STDIN_FILENO) close(nothing);
  execve(program, arguments, environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(report, &error, sizeof(error));
  _exit(127);
}

absl::StatusOr<pid_t> Start(const std::string& program, std::vector<std::string> arguments,
                            std::vector<std::string> environment) {
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  absl::StatusOr<Pipe> pipe = MakePipe(0);
  if (!pipe.ok()) return pipe.status();
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid < 0) return SystemError("fork");
  if (pid == 0) Become(program.c_str(), argv.data(), envp.data(), launcher, pipe->write.get());
  // Here as well as there, so that the group exists from now on.
  setpgid(pid, pid);
  pipe->write.Close();
  int error = 0;
  ssize_t n;
  do {
    n = read(pipe->read.get(), &error, sizeof(error));
  } while (n < 0 && errno == EINTR);
  if (n == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    errno = error;
    return SystemError(program);
  }
  return pid;
}

// The processes of a job, from their start to their end. For one thread.
class Job {
 public:
  Job(SignalCatcher& signals, absl::Duration grace) : signals_(signals), grace_(grace) {}

  void Add(pid_t pid) { processes_.push_back({pid, static_cast<int>(processes_.size())}); }

  // Waits until all have ended; returns Launch's result.
  int Wait() {
    Reap();
    while (!processes_.empty()) {
      for (const int signal : signals_.Wait(kill_at_)) {
        if (signal != SIGCHLD) OnStopSignal(signal);
      }
      if (absl::Now() >= kill_at_) Kill();
      Reap();
    }
    return result_;
  }

  void Stop(int signal) {
    stopping_ = true;
    kill_at_ = absl::Now() + grace_;
    SignalAll(signal);
  }

 private:
  struct Process {
    pid_t pid;
    int rank;
  };

  void OnStopSignal(int signal) {
    if (stopping_) {
      Kill();
    } else {
      result_ = 128 + signal;
      Stop(signal);
    }
  }

  void Kill() {
    SignalAll(SIGKILL);
    kill_at_ = absl::Now() + grace_;
  }

  void SignalAll(int signal) {
    for (const Process& process : processes_) kill(-process.pid, signal);
  }

  // Collects the processes that have ended: first those that a signal has ended, for then others
  // exit because of that, and may have done so meanwhile.
  void Reap() {
    Reap(/*killed=*/true);
    Reap(/*killed=*/false);
  }

  void Reap(bool killed) {
    // A copy, for Stop() below reads processes_.
    for (const Process& process : std::vector<Process>(processes_)) {
      siginfo_t info = {};
      const int options = WEXITED | WNOHANG | WNOWAIT;
      if (waitid(P_PID, process.pid, &info, options) != 0 || info.si_pid == 0) continue;
      if ((info.si_code != CLD_EXITED) != killed) continue;
      // Kills what it has left running. Its number is not reused before it is waited for.
      kill(-process.pid, SIGKILL);
      waitpid(process.pid, nullptr, 0);
      processes_.erase(std::find_if(processes_.begin(), processes_.end(),
                                    [&](const Process& p) { return p.pid == process.pid; }));
      OnEnd(process, info);
    }
  }

  void OnEnd(const Process& process, const siginfo_t& info) {
    const bool killed = info.si_code != CLD_EXITED;
    if (stopping_ || (!killed && info.si_status == 0)) return;
    // A process that exits has printed its reason.
    if (killed) {
      std::fprintf(stderr, "worker %d (process %d) was killed by signal %d (%s)\n", process.rank,
                   process.pid, info.si_status, strsignal(info.si_status));
    }
    result_ = killed ? 128 + info.si_status : info.si_status;
    Stop(SIGTERM);
  }

  SignalCatcher& signals_;
  const absl::Duration grace_;

  std::vector<Process> processes_;  // that run
  bool stopping_ = false;
  absl::Time kill_at_ = absl::InfiniteFuture();
  int result_ = 0;
};

}  // namespace

absl::StatusOr<std::optional<JobPlace>> JobPlaceFromEnvironment() {
  const absl::StatusOr<Place> place = FindPlace({}, &ProcessEnvironment);
  if (!place.ok()) return place.status();
  const bool alone = place->rendezvous.kind == RendezvousUrl::Kind::kEnvironment;
  if (alone) return std::nullopt;
  return JobPlace{place->rank, place->world_size, place->local_world_size};
}

absl::StatusOr<int> Launch(const LaunchOptions& options) {
  std::string program = options.program;
  if (program.empty()) {
    std::error_code error;
    program = std::filesystem::read_symlink("/proc/self/exe", error).string();
    if (error) return absl::ErrnoToStatus(error.value(), "/proc/self/exe");
  }
  absl::StatusOr<ReservedPort> port = ReservePort();
  if (!port.ok()) return port.status();
  absl::StatusOr<Pipe> pipe = MakePipe(O_NONBLOCK);
  if (!pipe.ok()) return pipe.status();
  SignalCatcher signals(*std::move(pipe));

  Job job(signals, options.grace);
  for (int rank = 0; rank < options.processes; ++rank) {
    absl::StatusOr<pid_t> pid =
        Start(program, options.arguments, Environment(rank, options.processes, port->number));
    if (!pid.ok()) {
      job.Stop(SIGKILL);
      job.Wait();
      return pid.status();
    }
    job.Add(*pid);
  }
  return job.Wait();
}

}  // namespace distgrad
