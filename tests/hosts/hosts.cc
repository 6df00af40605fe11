// Makes namespaces, cables and processes in them by ip, tc and system calls.
#include "tests/hosts/hosts.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/check.h"
#include "core/base/status.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

// As a shell's: the exit code of a process whose program is not there.
constexpr int kNoProgram = 127;
constexpr int kNamespaces = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWUTS;

// What RunInNamespaces() has come to.
absl::Status& Namespaces() {
  static auto* const status =
      new absl::Status(absl::StatusCode::kInternal, "RunInNamespaces was not called");
  return *status;
}

// Not by errno's own code: kFailedPrecondition is for what a machine does not have, where tests
// skip.
absl::Status Failed(absl::string_view what, int error = errno) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(error)));
}

// Where namespaces are made: whether this place forbids them, or has no more of them.
absl::Status FailedToIsolate(absl::string_view what, int error = errno) {
  for (const int forbidden : {EPERM, EACCES, ENOSYS, ENOSPC, EUSERS}) {
    if (error != forbidden) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("namespaces are not allowed here: ", what, ": ", std::strerror(error)));
  }
  return Failed(what, error);
}

// Returns 0, or what errno was.
int WriteFile(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int error = written ? 0 : errno;
  close(fd);
  return error;
}

std::string ReadFile(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return std::string(absl::StripAsciiWhitespace(text.str()));
}

// Who is not root becomes root of a namespace of users, which has one user only.
absl::Status Unshare() {
  const uid_t user = geteuid(), group = getegid();
  if (unshare((user == 0 ? 0 : CLONE_NEWUSER) | kNamespaces) != 0) {
    return FailedToIsolate("unshare");
  }
  if (user == 0) return absl::OkStatus();
  const std::pair<std::string, std::string> settings[] = {
      {"/proc/self/setgroups", "deny"},
      {"/proc/self/uid_map", absl::StrCat("0 ", user, " 1")},
      {"/proc/self/gid_map", absl::StrCat("0 ", group, " 1")}};
  for (const auto& [path, text] : settings) {
    if (const int error = WriteFile(path, text); error != 0) return FailedToIsolate(path, error);
  }
  return absl::OkStatus();
}

// What runs beside the hosts has a loopback, too.
absl::Status RaiseLoopback() {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Failed("loopback");
  ifreq device = {};
  std::strncpy(device.ifr_name, "lo", IFNAMSIZ - 1);
  device.ifr_flags = IFF_UP;
  const absl::Status status =
      ioctl(fd, SIOCSIFFLAGS, &device) == 0 ? absl::OkStatus() : Failed("loopback");
  close(fd);
  return status;
}

// In process 1 of new namespaces: what is mounted from here on is its own.
absl::Status MountProc() {
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return FailedToIsolate("mounts");
  }
  if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0) {
    return FailedToIsolate("mounting /proc");
  }
  return absl::OkStatus();
}

int ExitCode(int status) { return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status); }

// Forks. The child dies with its parent. `flags` are of clone().
pid_t Fork(unsigned long flags) {
  const pid_t child = static_cast<pid_t>(syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0));
  DG_CHECK(child >= 0) << std::strerror(errno);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // It may be dead already. In a new namespace of processes the parent shows as 0, always.
    if (getppid() == 1) _exit(126);
  }
  return child;
}

std::string NamespaceOf(pid_t process, const char* kind) {
  return absl::StrCat("/proc/", process, "/ns/", kind);
}

bool EnterNamespace(const std::string& path, int kind) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool entered = fd >= 0 && setns(fd, kind) == 0;
  if (fd >= 0) close(fd);
  return entered;
}

// `enter` runs in the child before the program does.
std::unique_ptr<HostProcess> StartProcess(const std::vector<std::string>& command,
                                          const Variables& variables,
                                          const std::function<bool()>& enter) {
  int input[2], output[2];
  DG_CHECK(pipe2(input, O_CLOEXEC) == 0 && pipe2(output, O_CLOEXEC) == 0) << std::strerror(errno);
  std::vector<std::string> strings = command;
  std::vector<char*> arguments;
  for (std::string& string : strings) arguments.push_back(string.data());
  arguments.push_back(nullptr);
  // Other threads of this program may hold locks of malloc's, which fork() takes care of.
  const pid_t pid = fork();
  DG_CHECK(pid >= 0) << std::strerror(errno);
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_DFL);
    dup2(input[0], STDIN_FILENO);
    dup2(output[1], STDOUT_FILENO);
    dup2(output[1], STDERR_FILENO);
    char folder[4096];
    const bool known = getcwd(folder, sizeof(folder)) != nullptr;
    if (!known || !enter() || chdir(folder) != 0) {
      std::perror("entering a host");
      _exit(126);
    }
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    execvp(arguments[0], arguments.data());
    const int error = errno;
    std::perror(arguments[0]);
    _exit(error == ENOENT ? kNoProgram : 126);
  }
  close(input[0]);
  close(output[1]);
  return std::make_unique<HostProcess>(pid, input[1], output[0]);
}

}  // namespace

std::unique_ptr<HostProcess> StartHere(const std::vector<std::string>& command,
                                       const Variables& variables) {
  signal(SIGPIPE, SIG_IGN);
  return StartProcess(command, variables, [] { return true; });
}

int RunInNamespaces(const std::function<int()>& body) {
  setenv("PATH", absl::StrCat(std::getenv("PATH"), ":/usr/sbin:/sbin").c_str(), 1);
  // A process of its own finds out, for what it has left cannot be entered again. It says "+" and
  // why where namespaces are not allowed, "-" and why of any other failure.
  int ends[2];
  DG_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  const pid_t outer = Fork(0);
  if (outer == 0) {
    absl::Status status = Unshare();
    if (!status.ok()) {
      const std::string why =
          absl::StrCat(absl::IsFailedPrecondition(status) ? "+" : "-", status.message());
      if (write(ends[1], why.data(), why.size()) < 0) _exit(126);
      _exit(125);
    }
    const pid_t inner = Fork(0);  // process 1
    if (inner == 0) {
      status = MountProc();
      if (status.ok()) status = RaiseLoopback();
      Namespaces() = status;
      const int result = body();
      std::fflush(nullptr);
      _exit(result);
    }
    int result = 0;
    DG_CHECK(waitpid(inner, &result, 0) == inner);
    const int code = ExitCode(result);
    _exit(code < 0 ? 128 - code : code);
  }
  close(ends[1]);
  int result = 0;
  while (waitpid(outer, &result, 0) < 0) DG_CHECK(errno == EINTR) << std::strerror(errno);
  const int code = ExitCode(result);
  if (code != 125) return code < 0 ? 128 - code : code;
  char why[256] = {};
  if (read(ends[0], why, sizeof(why) - 1) <= 0) return code;
  Namespaces() = {
      why[0] == '+' ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInternal, why + 1};
  return body();
}

absl::Status CheckNamespaces() { return Namespaces(); }

// ------------------------------------------------------------------------------------ Processes

HostProcess::HostProcess(pid_t pid, int input, int output)
    : pid_(pid), input_(input), output_fd_(output) {}

HostProcess::~HostProcess() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    Wait();
  }
  close(input_);
  close(output_fd_);
}

void HostProcess::Say(absl::string_view line) {
  const std::string text = absl::StrCat(line, "\n");
  // SIGPIPE is ignored: that it is gone shows when its answer is awaited.
  (void)!write(input_, text.data(), text.size());
}

bool HostProcess::ReadMore(absl::Time deadline, absl::string_view what_for) {
  pollfd entry = {output_fd_, POLLIN, 0};
  const int64_t left = absl::ToInt64Milliseconds(
      std::min<absl::Duration>(deadline - absl::Now(), absl::Minutes(60)));
  if (left <= 0 || poll(&entry, 1, static_cast<int>(left)) == 0) {
    ADD_FAILURE() << what_for << " did not come; the output so far:\n" << output_;
    return false;
  }
  char bytes[4096];
  const ssize_t n = read(output_fd_, bytes, sizeof(bytes));
  if (n > 0) output_.append(bytes, n);
  if (n == 0) over_ = true;
  return n > 0 || (n < 0 && errno == EINTR);
}

std::string HostProcess::AwaitLine(absl::string_view text) {
  const absl::Time deadline = absl::Now() + kPatience;
  const std::string what_for = absl::StrCat("a line with '", text, "'");
  for (;;) {
    const size_t end = output_.find('\n', seen_);
    if (end == std::string::npos) {
      if (ReadMore(deadline, what_for)) continue;
      if (over_)
        ADD_FAILURE() << what_for << " did not come before the end; the output:\n" << output_;
      return "";
    }
    const std::string line = output_.substr(seen_, end - seen_);
    seen_ = end + 1;
    if (line.find(std::string(text)) != std::string::npos) return line;
  }
}

std::optional<std::string> HostProcess::TryReadLine() {
  for (;;) {
    const size_t end = output_.find('\n', seen_);
    if (end != std::string::npos) {
      std::string line = output_.substr(seen_, end - seen_);
      // A process that lasts may say much.
      output_.erase(0, end + 1);
      seen_ = 0;
      return line;
    }
    pollfd entry = {output_fd_, POLLIN, 0};
    if (over_ || poll(&entry, 1, 0) <= 0) return std::nullopt;
    if (!ReadMore(absl::InfiniteFuture(), "more") && over_) return std::nullopt;
  }
}

std::string HostProcess::AwaitEnd() {
  const absl::Time deadline = absl::Now() + kPatience;
  while (ReadMore(deadline, "the end")) continue;
  return output_;
}

void HostProcess::Signal(int signal) { kill(pid_, signal); }

void HostProcess::Stop() {
  Signal(SIGSTOP);
  int status = 0;
  while (waitpid(pid_, &status, WUNTRACED) < 0) DG_CHECK(errno == EINTR) << std::strerror(errno);
  EXPECT_TRUE(WIFSTOPPED(status)) << output_;
  if (!WIFSTOPPED(status)) pid_ = -1;
}

int HostProcess::Wait() {
  AwaitEnd();
  if (!over_) Signal(SIGKILL);  // the test has failed
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0) DG_CHECK(errno == EINTR) << std::strerror(errno);
  pid_ = -1;
  return ExitCode(status);
}

// ---------------------------------------------------------------------------------------- Hosts

absl::StatusOr<std::unique_ptr<Hosts>> Hosts::Create(const HostsOptions& options) {
  DG_RETURN_IF_ERROR(CheckNamespaces());
  signal(SIGPIPE, SIG_IGN);
  static int last = 0;  // the kernel may take a while to remove the devices of former hosts
  const std::string bridge = absl::StrCat("switch", ++last);
  std::unique_ptr<Hosts> hosts(new Hosts());
  if (hosts->Start(-1, {"ip", "-V"})->Wait() == kNoProgram) {
    return absl::FailedPreconditionError("there is no ip on this machine (Debian: iproute2)");
  }
  if (!options.taps) {
    DG_RETURN_IF_ERROR(hosts->Run(-1, {"ip", "link", "add", bridge, "type", "bridge"}));
    DG_RETURN_IF_ERROR(hosts->Run(-1, {"ip", "link", "set", bridge, "up"}));
  }
  for (int i = 0; i < options.count; ++i) {
    DG_RETURN_IF_ERROR(hosts->AddHost(options, bridge));
  }
  return hosts;
}

absl::Status Hosts::AddHost(const HostsOptions& options, const std::string& bridge) {
  const int number = static_cast<int>(hosts_.size());
  const std::string boot_id =
      absl::StrCat(testing::TempDir(), "/", bridge, ".", number, ".boot_id");
  const std::string id = ReadFile("/proc/sys/kernel/random/uuid") + "\n";
  if (const int error = WriteFile(boot_id, id); error != 0) return Failed(boot_id, error);
  const std::string name = absl::StrCat("host", number);
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) return Failed("pipe");
  const pid_t init = Fork(kNamespaces);
  if (init == 0) {
    absl::Status status = MountProc();
    if (status.ok() &&
        mount(boot_id.c_str(), "/proc/sys/kernel/random/boot_id", nullptr, MS_BIND, nullptr) != 0) {
      status = Failed("a boot id");
    }
    if (status.ok() && sethostname(name.data(), name.size()) != 0) status = Failed("sethostname");
    signal(SIGCHLD, SIG_IGN);  // orphans leave nothing behind
    const std::string said = status.ok() ? "+" : std::string(status.message());
    (void)!write(ready[1], said.data(), said.size());
    close(ready[1]);
    // What else was open stays with the test.
    for (int fd = 0; fd < 1024; ++fd) close(fd);
    for (;;) pause();
  }
  close(ready[1]);
  hosts_.push_back({init, absl::StrCat(bridge, "p", number)});
  char said[256] = {};
  const ssize_t n = read(ready[0], said, sizeof(said) - 1);
  close(ready[0]);
  if (n <= 0 || said[0] != '+') return absl::InternalError(said);

  if (options.taps) {
    DG_RETURN_IF_ERROR(AddTap(hosts_.back()));
  } else {
    const std::string& port = hosts_.back().port;
    DG_RETURN_IF_ERROR(Run(-1, {"ip", "link", "add", port, "type", "veth", "peer", "name", "eth0",
                                "netns", absl::StrCat(init)}));
    DG_RETURN_IF_ERROR(Run(-1, {"ip", "link", "set", port, "master", bridge, "up"}));
  }
  DG_RETURN_IF_ERROR(Run(number, {"ip", "link", "set", "lo", "up"}));
  if (options.ipv4) {
    DG_RETURN_IF_ERROR(Run(number, {"ip", "addr", "add", Ipv4(number) + "/24", "dev", "eth0"}));
  }
  if (options.ipv6) {
    DG_RETURN_IF_ERROR(
        Run(number, {"ip", "addr", "add", Ipv6(number) + "/64", "dev", "eth0", "nodad"}));
  }
  return Run(number, {"ip", "link", "set", "eth0", "up"});
}

absl::Status Hosts::AddTap(Host& host) {
  // The device comes into the network in which its file is opened.
  const int here = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  if (here < 0) return Failed("the network");
  absl::Status status;
  if (!EnterNamespace(NamespaceOf(host.init, "net"), CLONE_NEWNET)) {
    status = Failed("entering a host's network");
  } else {
    ifreq device = {};
    device.ifr_flags = IFF_TAP | IFF_NO_PI;
    std::strncpy(device.ifr_name, "eth0", IFNAMSIZ - 1);
    host.tap = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    const bool has_none =
        host.tap < 0 && (errno == ENOENT || errno == ENODEV || errno == EPERM || errno == EACCES);
    if (has_none) {
      status = absl::FailedPreconditionError(
          absl::StrCat("there is no /dev/net/tun here: ", std::strerror(errno)));
    } else if (host.tap < 0) {
      status = Failed("/dev/net/tun");
    } else if (ioctl(host.tap, TUNSETIFF, &device) != 0) {
      status = Failed("a TAP device");
    }
    DG_CHECK(setns(here, CLONE_NEWNET) == 0) << std::strerror(errno);
  }
  close(here);
  return status;
}

Hosts::~Hosts() {
  for (const Host& host : hosts_) {
    if (host.tap >= 0) close(host.tap);
    kill(host.init, SIGKILL);  // and with it all that runs there
    while (waitpid(host.init, nullptr, 0) < 0) DG_CHECK(errno == EINTR) << std::strerror(errno);
  }
}

std::string Hosts::Ipv4(int host) { return absl::StrCat("10.77.0.", host + 1); }
std::string Hosts::Ipv6(int host) { return absl::StrCat("fd77::", host + 1); }

std::unique_ptr<HostProcess> Hosts::Start(int host, const std::vector<std::string>& command,
                                          const Variables& variables) {
  const pid_t init = host < 0 ? getpid() : hosts_.at(host).init;
  // A process's children are in the namespace of processes that it asks for, not itself.
  DG_CHECK(EnterNamespace(NamespaceOf(init, "pid"), CLONE_NEWPID)) << std::strerror(errno);
  auto process = StartProcess(command, variables, [&] {
    return host < 0 || (EnterNamespace(NamespaceOf(init, "net"), CLONE_NEWNET) &&
                        EnterNamespace(NamespaceOf(init, "uts"), CLONE_NEWUTS) &&
                        // The last one, for the others are found by what is mounted here.
                        EnterNamespace(NamespaceOf(init, "mnt"), CLONE_NEWNS));
  });
  DG_CHECK(EnterNamespace(NamespaceOf(getpid(), "pid"), CLONE_NEWPID)) << std::strerror(errno);
  return process;
}

absl::Status Hosts::Run(int host, const std::vector<std::string>& command) {
  const auto process = Start(host, command);
  const int code = process->Wait();
  if (code == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("`", absl::StrJoin(command, " "),
                                          "`: ", absl::StripAsciiWhitespace(process->output())));
}

void Hosts::CutCable(int host) {
  const absl::Status cut = Run(-1, {"ip", "link", "set", hosts_.at(host).port, "down"});
  EXPECT_TRUE(cut.ok()) << cut;
}

void Hosts::MendCable(int host) {
  const absl::Status mended = Run(-1, {"ip", "link", "set", hosts_.at(host).port, "up"});
  EXPECT_TRUE(mended.ok()) << mended;
}

void Hosts::SetRate(const std::string& rate) {
  for (size_t host = 0; host < hosts_.size(); ++host) {
    for (const auto& [where, device] :
         {std::pair<int, std::string>(-1, hosts_[host].port), {static_cast<int>(host), "eth0"}}) {
      const absl::Status set = Run(where, {"tc", "qdisc", "replace", "dev", device, "root", "tbf",
                                           "rate", rate, "burst", "64kb", "latency", "100ms"});
      EXPECT_TRUE(set.ok()) << set;
    }
  }
}

int64_t Hosts::ReceivedBytes(int host) {
  // What its end of the cable has sent is what the host has received.
  const auto process = Start(-1, {"ip", "-s", "-j", "link", "show", hosts_.at(host).port});
  EXPECT_EQ(process->Wait(), 0) << process->output();
  const std::string& text = process->output();
  const size_t at = text.find("\"bytes\":", text.find("\"tx\":"));
  int64_t bytes = -1;
  if (at != std::string::npos) bytes = std::atoll(text.c_str() + at + std::strlen("\"bytes\":"));
  EXPECT_GE(bytes, 0) << text;
  return bytes;
}

}  // namespace distgrad
