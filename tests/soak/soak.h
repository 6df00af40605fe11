// A job of four processes under a mixed load for as long as one likes, while workers are killed,
// stopped and started again, leave and come again; and what the system says of those that last.
//
//   std::vector<std::string> wrong = RunSoak({.duration = absl::Minutes(10), .seed = 7});
//
// What is looked at: every result (load.h), every deadline, and what is left at the end; and, in
// runs of at least kShortestToJudge, whether memory, descriptors, threads or latencies grow. The
// program that calls it runs RunSoakWorker() when its first argument is kSoakWorker.
#ifndef DISTGRAD_TESTS_SOAK_SOAK_H_
#define DISTGRAD_TESTS_SOAK_SOAK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace distgrad {

constexpr char kSoakWorker[] = "--worker";

// In a shorter run the first allocations, which come once, look like growth.
constexpr absl::Duration kShortestToJudge = absl::Minutes(5);

// By which something may grow in an hour before a run fails. Each process serves and makes some 500
// calls a second, so this is about ten bytes for each call, ...
constexpr double kMegabytesPerHour = 20;
// ... and one for each thirty times that a worker was killed, stopped or came again.
constexpr double kDescriptorsPerHour = 12;
constexpr double kThreadsPerHour = 12;
// By which the 99th percentile of small calls may grow in the whole run, as a multiple of that of
// a byte between two threads, which grows with what else the machine does.
constexpr double kLatencyGrowth = 2;

// By how much more something has to grow in the part of a run that is judged, for the run to fail
// in any case (JudgeGrowth's resolution), where that is more than the bound. It is a growth in the
// run, not in an hour, for a shorter run has fewer samples, and less time for the same leak: the
// eight minutes that are judged of ten tell 120 MB, 120 descriptors and 60 threads in an hour, and
// the 48 of an hour the bounds, or 20 descriptors. In two runs of ten minutes beside builds three
// standard errors were up to 16.4 MB, 13.9 descriptors, 5.4 threads and a factor of 12 in the run.
constexpr double kLeastMegabytes = 16;
constexpr double kLeastDescriptors = 16;
constexpr double kLeastThreads = 8;
constexpr double kLeastLatencyGrowth = 8;  // a factor

// What the transport keeps of freed segments (core/transport/packet.h).
constexpr double kMostKeptMegabytes = 256;

struct SoakOptions {
  absl::Duration duration = absl::Minutes(10);
  uint64_t seed = 1;
};

// Prints tables of what was done, and what of it grows. Returns what went wrong.
std::vector<std::string> RunSoak(const SoakOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SOAK_SOAK_H_
