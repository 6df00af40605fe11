// The process of one worker of the soak.
//
// Each line of its standard input is a command, answered by a line that begins with "= ":
//
//   join           joins the job, at its start or later
//   go             begins its load
//   barrier        waits for all workers, without those who are lost
//   stop           ends its load, when all that was begun has ended
//   check          waits until nothing is left of it, and says what is
//   leave          leaves the job, and destroys the worker; it may join again
//   end            ends the job with all others, destroys the worker, and says what the process
//                  still has of it; then the process ends
//
// Besides it writes "! " and what went wrong; while it is in the job "sample " and what it measures
// of itself; and before the answer to "end" "count " for each kind of its work.
#ifndef DISTGRAD_TESTS_SOAK_WORKER_H_
#define DISTGRAD_TESTS_SOAK_WORKER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace distgrad {

struct SoakWorkerOptions {
  std::string name;
  int rank = 0;  // -1: it joins as one more
  int world_size = 1;
  std::string rendezvous;
  uint64_t seed = 0;
  absl::Duration sample_every = absl::Seconds(10);
};

// As arguments of a program, and back; nothing is checked, for they are our own.
std::vector<std::string> ToArguments(const SoakWorkerOptions& options);
SoakWorkerOptions FromArguments(const std::vector<std::string>& arguments);

// Returns the program's exit code.
int RunSoakWorker(const SoakWorkerOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SOAK_WORKER_H_
