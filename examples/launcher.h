// Starts a job on this machine: copies of this program that find each other by the variables
// that launchers of distributed jobs commonly set.
#ifndef DISTGRAD_EXAMPLES_LAUNCHER_H_
#define DISTGRAD_EXAMPLES_LAUNCHER_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace distgrad {

// A process's place in a job.
struct JobPlace {
  int rank = 0;
  int world_size = 1;
  int local_world_size = 0;  // the processes of its machine; 0 where the launcher does not say so
};

// Returns the place that a launcher has set in the environment (docs/launching.md); nothing if none
// has.
absl::StatusOr<std::optional<JobPlace>> JobPlaceFromEnvironment();

struct LaunchOptions {
  int processes = 2;
  // The arguments as main() gets them, with the program's name first.
  std::vector<std::string> arguments;
  // The file to run; empty: this program again.
  std::string program;
  // How long processes have between being asked to end and being killed.
  absl::Duration grace = absl::Seconds(5);
};

// Starts the processes with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
// MASTER_PORT set (and, unless the user has set them, OMP_NUM_THREADS, each process's share of the
// cores, and GOMP_SPINCOUNT, so that waiting threads leave these to others), and waits until all
// have ended. Returns the status that the caller should exit with:
//
//  - 0 if all processes ended with 0;
//  - that of the first one that failed (128 + signal if it was killed); the others are then
//    asked to end (SIGTERM), and killed after the grace period;
//  - 128 + signal if SIGINT, SIGTERM or SIGHUP came: it is passed on. A second one kills.
//
// Each process leads a process group, so that what it starts ends with it, and is killed when
// the calling thread ends. Waits. Takes over the handlers of those signals and of SIGCHLD while
// it runs, so one call at a time in a process.
absl::StatusOr<int> Launch(const LaunchOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_LAUNCHER_H_
