// Hosts for tests, out of Linux' namespaces: each has a network, processes, mounts, a name and a
// boot id of its own, and a cable to a switch that can be cut and made slow. A network alone would
// be no host: processes would still see each other, and copy large messages past the network.
//
//   int main(int argc, char** argv) {
//     return RunInNamespaces([&] { ... return RUN_ALL_TESTS(); });
//   }
//
//   TEST(...) {
//     auto hosts = Hosts::Create({.count = 2});
//     if (absl::IsFailedPrecondition(hosts.status())) GTEST_SKIP() << hosts.status().message();
//     ASSERT_TRUE(hosts.ok()) << hosts.status();
//     auto process = (*hosts)->Start(1, {"some/program"}, {{"RANK", "1"}});
//     process->AwaitLine("ready");
//     (*hosts)->CutCable(1);
//
// All of it lives in namespaces that are nested in those of RunInNamespaces(), so that the kernel
// takes everything back when the test ends, however it ends, and no other test sees any of it.
#ifndef DISTGRAD_TESTS_HOSTS_HOSTS_H_
#define DISTGRAD_TESTS_HOSTS_HOSTS_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace distgrad {

// Runs `body` in a child whose namespaces are its own, and returns what it returns; the child ends
// with this process. Where the machine does not allow that, `body` runs here, and Hosts::Create()
// says why. First of all in main(): there must be no threads yet.
int RunInNamespaces(const std::function<int()>& body);

// Whether RunInNamespaces() has made namespaces. kFailedPrecondition says why this place does not
// allow them; anything else is a mistake of the test's.
absl::Status CheckNamespaces();

// A process, on one of the hosts or beside this one. It is killed with this object. For one thread.
class HostProcess {
 public:
  // Longer than anything takes that is waited for: only a test that would hang gets there.
  static constexpr absl::Duration kPatience = absl::Minutes(4);

  HostProcess(pid_t pid, int input, int output);
  HostProcess(const HostProcess&) = delete;
  HostProcess& operator=(const HostProcess&) = delete;
  ~HostProcess();

  // A line for its standard input.
  void Say(absl::string_view line);

  // The next line of its output (standard output and errors) that contains `text`. "" with a
  // failure of the test, which shows all output, if it ends before or takes longer than kPatience.
  std::string AwaitLine(absl::string_view text);
  // The next line, without waiting: nullopt if no whole line is there, also at the end.
  std::optional<std::string> TryReadLine();
  // Readable when there is more of its output, or the end of it.
  int output_fd() const { return output_fd_; }
  // Its output has ended, which TryReadLine() or AwaitLine() has seen.
  bool is_over() const { return over_; }
  // Its lines so far and what comes until it ends.
  std::string AwaitEnd();

  // As this process sees it.
  pid_t pid() const { return pid_; }
  void Signal(int signal);
  // SIGSTOP, and waits until it has stopped. SIGCONT lets it go on.
  void Stop();
  // Waits for its end: its exit code, or minus the signal that killed it.
  int Wait();

  const std::string& output() const { return output_; }

 private:
  // False at the end of the output. Fails the test when the time is over.
  bool ReadMore(absl::Time deadline, absl::string_view what_for);

  pid_t pid_;  // -1 once it was waited for
  int input_, output_fd_;
  std::string output_;
  size_t seen_ = 0;  // up to here AwaitLine() has looked
  bool over_ = false;
};

using Variables = std::map<std::string, std::string>;

// Starts a program beside this one, in the namespaces of this one, which has the variables besides
// those of this process: for who goes on without hosts.
std::unique_ptr<HostProcess> StartHere(const std::vector<std::string>& command,
                                       const Variables& variables = {});

struct HostsOptions {
  int count = 2;
  bool ipv4 = true;
  bool ipv6 = true;
  // Each cable ends in this program, as a TAP device does, and not at a switch: Hosts::Tap().
  bool taps = false;
};

// For one thread.
class Hosts {
 public:
  using Variables = distgrad::Variables;

  // kFailedPrecondition with the reason where namespaces are not allowed, or this machine has no
  // `ip`, or no /dev/net/tun for taps. Whatever else fails has another code: no test may skip then.
  static absl::StatusOr<std::unique_ptr<Hosts>> Create(const HostsOptions& options);
  ~Hosts();

  // Of its interface, which is called "eth0" on each.
  static std::string Ipv4(int host);
  static std::string Ipv6(int host);

  // Starts a program, which has the variables besides those of this process.
  std::unique_ptr<HostProcess> Start(int host, const std::vector<std::string>& command,
                                     const Variables& variables = {});

  // This program's end of the host's cable, with HostsOptions::taps: Ethernet frames, one for each
  // read() and write(), whose checksums are in place. It lasts as long as this object.
  int Tap(int host) const { return hosts_.at(host).tap; }

  // A cable that is cut carries nothing, and both ends see that it is not there.
  void CutCable(int host);
  void MendCable(int host);
  // What each cable carries at most, in either direction, as tc writes it: "10mbit".
  void SetRate(const std::string& rate);

  // How many bytes its interface has received.
  int64_t ReceivedBytes(int host);

 private:
  struct Host {
    pid_t init = -1;   // process 1 there
    std::string port;  // its end of the cable, at the switch
    int tap = -1;      // the same, where it is a TAP device's
  };

  Hosts() = default;
  absl::Status AddHost(const HostsOptions& options, const std::string& bridge);
  absl::Status AddTap(Host& host);
  // Runs a command there (-1: at the switch); its output if it fails.
  absl::Status Run(int host, const std::vector<std::string>& command);

  std::vector<Host> hosts_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_HOSTS_HOSTS_H_
