// One side as a group of processes, which this program starts from its own binary. A group that is
// not measured is stopped, so that it takes no time from the one that is (an idle PyTorch worker
// burns a core).
#ifndef DISTGRAD_BENCHMARKS_GROUP_H_
#define DISTGRAD_BENCHMARKS_GROUP_H_

#include <sys/types.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "benchmarks/work.h"

namespace CLI {
class App;
}

namespace distgrad {

// The results of one turn, and the cost of all processes of the group together.
struct Slice {
  Sample sample;
  double cpu_us = 0;    // per operation
  double switches = 0;  // context switches per operation
  double others = 0;    // taken by other processes meanwhile: 1 is the whole machine
};

struct StartFacts {
  double start_ms = 0;  // from the command to begin until the first call can be made
  int threads = 0;      // of the process of rank 0, after its first pass
  double peak_mb = 0;
};

// Runs a side. Not thread-safe. Its destructor kills its processes; they die with this one, too.
class Group {
 public:
  // `program`: another build of this one, or empty for this one.
  static absl::StatusOr<std::unique_ptr<Group>> Start(const std::string& side,
                                                      const std::string& config, int world,
                                                      const std::string& program = "");
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  absl::StatusOr<Slice> Run(const Work& work, absl::Duration budget);
  // Measures the share of a core that each idle process takes, as `median_us`.
  absl::StatusOr<Slice> Idle(absl::Duration budget);

  const StartFacts& facts() const { return facts_; }

 private:
  struct Process {
    pid_t pid = -1;
    FILE* in = nullptr;   // commands to it
    FILE* out = nullptr;  // its answers
  };
  struct Usage {
    double cpu_us = 0;
    double switches = 0;
    double machine_us = 0;  // of all processes, as far as the kernel tells
    double now_us = 0;
  };

  Group() = default;
  absl::Status Spawn(std::string program, const std::vector<std::string>& arguments);
  absl::StatusOr<std::string> Ask(Process& process, const std::string& line);
  absl::StatusOr<Sample> Ask(const Work& work, absl::Duration budget);
  void Signal(int signal);
  Usage Take() const;

  std::string name_;
  std::vector<Process> processes_;
  StartFacts facts_;
};

// A program that starts groups, if a group has started it: then it is a process of that group.
class GroupMember {
 public:
  // Adds the options that say so; users do not see them.
  explicit GroupMember(CLI::App* app);

  bool IsOne() const { return !side_.empty(); }
  // Starts the side, and answers until its input ends. Returns the exit code.
  int Serve() const;

 private:
  std::string side_;
  SideOptions place_;
};

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_GROUP_H_
