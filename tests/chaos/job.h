// The processes of the chaos, their hosts, and what they say.
#ifndef DISTGRAD_TESTS_CHAOS_JOB_H_
#define DISTGRAD_TESTS_CHAOS_JOB_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/hosts/hosts.h"
#include "tests/hosts/tap_switch.h"

namespace distgrad {

struct ChaosJobOptions {
  int workers = 4;
  int hosts = 2;  // 1: no namespaces, whatever this machine allows
  absl::Duration heartbeat_limit = absl::Seconds(3);
  uint64_t seed = 1;  // of what the switch corrupts
};

// For one thread. RunInNamespaces() has to run it.
class ChaosJob {
 public:
  struct Line {
    int worker = 0;
    std::string text;
    bool is_end = false;  // its output is over, and it has ended
    int code = 0;         // then: its exit code, or minus the signal that killed it
  };

  // Processes are not started yet. Where there can be no hosts, all workers are to run on this one;
  // why_one_host() says so.
  static absl::StatusOr<std::unique_ptr<ChaosJob>> Create(const ChaosJobOptions& options);
  ~ChaosJob();

  int workers() const { return options_.workers; }
  int hosts() const { return hosts_ == nullptr ? 1 : options_.hosts; }
  absl::Duration heartbeat_limit() const { return options_.heartbeat_limit; }
  const std::string& why_one_host() const { return why_one_host_; }
  int HostOf(int worker) const { return worker % hosts(); }

  // Null with one host.
  TapSwitch* cables() { return cables_.get(); }
  // Where the job's checkpoints are: on a file system of their own, of some megabytes, with several
  // hosts.
  const std::string& checkpoints() const { return checkpoints_; }

  void Start(int worker);
  // By SIGKILL, and waits for its end. What it has still to say is not heard.
  void Kill(int worker);
  bool Runs(int worker) const { return processes_.at(worker) != nullptr; }
  HostProcess& process(int worker) { return *processes_.at(worker); }
  // Nobody hears it where its process has ended.
  void Say(int worker, const std::string& command);

  // The next line of any of them; nullopt if there is none until then. A process whose end that is
  // does not run any more.
  std::optional<Line> NextLine(absl::Time until);

 private:
  explicit ChaosJob(const ChaosJobOptions& options) : options_(options) {}

  std::optional<Line> TryNextLine();

  const ChaosJobOptions options_;
  std::string why_one_host_;
  std::string folder_, checkpoints_, rendezvous_;
  bool is_mounted_ = false;
  std::unique_ptr<Hosts> hosts_;
  std::unique_ptr<TapSwitch> cables_;
  std::vector<std::unique_ptr<HostProcess>> processes_;
  size_t next_ = 0;  // whom to hear first, so that nobody is drowned out
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_JOB_H_
