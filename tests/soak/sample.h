// What a worker of the soak measures of itself now and then, as a line of text between processes.
#ifndef DISTGRAD_TESTS_SOAK_SAMPLE_H_
#define DISTGRAD_TESTS_SOAK_SAMPLE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

struct SoakSample {
  double time_ms = 0;  // since the epoch
  // In MB.
  double resident = 0, heap = 0;
  double kept = 0;  // segments for reuse
  double descriptors = 0, threads = 0, contexts = 0;
  double in_flight = 0;  // calls
  double pings = 0;      // small calls, since the sample before
  // Of these, and of a byte between two threads; in microseconds.
  double p50 = 0, p99 = 0, pipe_p99 = 0;
};

// "time_ms=... resident=..." and so on.
std::string FormatSample(const SoakSample& sample);

// kInvalidArgument where a value is missing or is no finite number. As a 0 it would be flat, and
// NaN is above no bound.
absl::StatusOr<SoakSample> ParseSample(absl::string_view text);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SOAK_SAMPLE_H_
