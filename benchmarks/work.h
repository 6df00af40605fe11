// The pieces of work that every side does, and the results of repeating one.
#ifndef DISTGRAD_BENCHMARKS_WORK_H_
#define DISTGRAD_BENCHMARKS_WORK_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace distgrad {

// One kind of work, by name, with its parameters:
//
//   call      one call of aten::add on the first peer, with a tensor of `bytes`
//   calls     the same with `count` calls in flight all the time; an operation is one call
//   beside    a call with 4 bytes, while `count` other threads send `bytes` to the same peer
//   pass      `count` remote multiplications, each of the result before; backward; release
//   fan       the same, but all of them at once, and spread over the peers
//   tensors   a function of `count` tensors, all in one message; backward; release
//   threads   passes of one multiplication, on `count` threads; an operation is one pass
//   chain     a function that goes on from worker to worker, `count` hops; backward; release
//   executor  backward of a chain of `count` local nodes, in distgrad's executor
//   backward  the same in torch::autograd::backward
//   memcpy    one copy of `bytes`
//
// and, with the layers and the batch that the end of the name says (parallel_step.h),
//
//   step_       forward and backward
//   parallel_   the same by DataParallel over `count` replicas on the CPU
//   alone_      the same by every rank of a group for its part of the batch
//   averaged_   the same, and gradients are averaged by a GradientAverager
//   reducer_    the same by c10d's Reducer, as PyTorch's DistributedDataParallel sets it up
//   views_      the same where .grad are views of its buckets
//   allreduce_  the bytes of all gradients by one allreduce of c10d's Gloo
struct Work {
  std::string kind;
  int count = 1;
  size_t bytes = 4;
};

// Converts work to a text like "pass/10/4" and back.
std::string ToText(const Work& work);
absl::StatusOr<Work> WorkFromText(absl::string_view text);

struct Sample {
  int64_t operations = 0;
  double median_us = 0;  // of one operation
  double p99_us = 0;     // 0 of fewer than kFewestForP99, of which it would be the slowest
  double per_second = 0;
};

constexpr int64_t kFewestForP99 = 100;

// Returns a quantile (0.5: the median). `values` must not be empty.
double Quantile(std::vector<double> values, double quantile);

double MicrosNow();

// Repeats `once` for about `budget`, at least three times. `once` returns the microseconds that
// count, without those of its checks. Stops at the first error.
absl::StatusOr<Sample> Repeat(absl::Duration budget,
                              absl::FunctionRef<absl::StatusOr<double>()> once);

// Runs `once` on `count` threads at the same time, for about `budget`.
absl::StatusOr<Sample> RepeatOnThreads(int count, absl::Duration budget,
                                       absl::FunctionRef<absl::StatusOr<double>()> once);

// Repeats `once` as Repeat() does, while `count` other threads repeat `beside`.
absl::StatusOr<Sample> RepeatBeside(int count, absl::Duration budget,
                                    absl::FunctionRef<absl::Status()> beside,
                                    absl::FunctionRef<absl::StatusOr<double>()> once);

// Keeps `width` operations in flight: `start(i)` starts the i-th of them, `finish(i)` waits for it.
absl::StatusOr<Sample> RepeatInFlight(int width, absl::Duration budget,
                                      absl::FunctionRef<void(int)> start,
                                      absl::FunctionRef<absl::Status(int)> finish);

// One process of a side. The process of rank 0 is asked; the others are its peers.
class BenchmarkSide {
 public:
  virtual ~BenchmarkSide() = default;
  // Does the work. kInternal if an answer is wrong.
  virtual absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) = 0;
};

// The place of a process among its peers.
struct SideOptions {
  std::string config;  // chooses a transport, in the side's own words
  int rank = 0;
  int world = 1;
  int port = 0;  // of the peers' rendezvous
};

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_WORK_H_
