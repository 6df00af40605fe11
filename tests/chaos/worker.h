// The process of one worker of the chaos. Worker 0 leads: it serves the store, trains, and saves
// checkpoints of the whole job.
//
// Each line of its standard input is a command, and is answered by a line that begins with "= ",
// in their order:
//
//   load       of worker 0: begins with the newest checkpoint: "= loaded STEP". It makes the first
//              one, of step 0, where there is none
//   go         of worker 0: trains until there is another command, goes on from the last checkpoint
//              after each error, and ends with a checkpoint; without an answer
//   pause      "= paused STEP"
//   barrier    waits for all workers: "= met", or the error
//   check      waits until nothing is left of what it did: "= clean CHECKSUM DESCRIPTORS THREADS
//              HEAP RESIDENT", the latter two in bytes; or "= left ..."
//   end        ends the job with all others, and destroys the worker: "= ended", or what is left of
//              it in the process; then the process ends
//   close      destroys the worker without the others; else the same
//
// "= joined" or an error is its first answer, to no command. Besides it writes
//
//   step STEP BITS         a step is done (the first is 0), with this loss
//   saved STEP             so many steps are in a checkpoint
//   resumed STEP           it goes on from there, after an error
//   failed WHAT SECONDS STATUS   what worker 0 did for its training, and how long that took
//   * lost NAME: WHY       and "* joined", "* left": what it hears of another member
//   ! ...                  what must not be
//
// and what distgrad logs.
#ifndef DISTGRAD_TESTS_CHAOS_WORKER_H_
#define DISTGRAD_TESTS_CHAOS_WORKER_H_

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace distgrad {

constexpr char kChaosWorker[] = "--worker";

struct ChaosWorkerOptions {
  int rank = 0;
  int world_size = 1;
  std::string rendezvous;
  std::string host;         // as WorkerOptions::host
  std::string checkpoints;  // a folder
  absl::Duration heartbeat_limit;
};

// As arguments of a program, and back; nothing is checked, for they are our own.
std::vector<std::string> ToArguments(const ChaosWorkerOptions& options);
ChaosWorkerOptions ToChaosWorkerOptions(const std::vector<std::string>& arguments);

// Within which every step, save and load ends, in time in which the process runs: a peer that is
// silent is lost after the heartbeat limit, on a connection of its own after 1.2 times that, one
// that nobody answers is given up after ten seconds; and ten seconds are for a busy machine.
absl::Duration ChaosBound(absl::Duration heartbeat_limit);

// Returns the program's exit code.
int RunChaosWorker(const ChaosWorkerOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_WORKER_H_
