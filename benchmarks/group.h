// One side as a group of processes, started by this program out of itself. A group that is not
// measured is stopped, so that it takes nothing from those that are (an idle PyTorch worker burns
// a core).
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

// What was measured at once, and what it cost: all processes of the group together.
struct Slice {
  Sample sample;
  double cpu_us = 0;    // per operation
  double switches = 0;  // context switches per operation
  double others = 0;    // what other processes took meanwhile: 1 is the whole machine
};

struct StartFacts {
  double start_ms = 0;  // from the word to begin, to where the first call can be made
  int threads = 0;      // of the process that is asked, after its first pass
  double peak_mb = 0;
};

// Not thread-safe. Kills its processes at its end; they die with this one, too.
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
  // The share of a core that each process takes while nothing is asked of it, as `median_us`.
  absl::StatusOr<Slice> Idle(absl::Duration budget);

  const StartFacts& facts() const { return facts_; }

 private:
  struct Process {
    pid_t pid = -1;
    FILE* in = nullptr;   // what we write
    FILE* out = nullptr;  // what it answers
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

// What a program that starts groups is itself, where a group started it: a process of that one.
class GroupMember {
 public:
  // Adds the options by which a process is told so; users do not see them.
  explicit GroupMember(CLI::App* app);

  bool IsOne() const { return !side_.empty(); }
  // Starts the side, and answers until nobody asks any more. Returns the exit code.
  int Serve() const;

 private:
  std::string side_;
  SideOptions place_;
};

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_GROUP_H_
