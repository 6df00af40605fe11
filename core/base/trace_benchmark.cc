// What it costs to record a span, and not to record one. Prints nanoseconds.
//
//   tools/bazel run //core/base:trace_benchmark
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "core/base/trace.h"

namespace distgrad {
namespace {

// Of one call: the best of several rounds, each with a trace of its own if `on`.
template <typename F>
double Cost(TraceRecorder& recorder, bool on, F f) {
  using Clock = std::chrono::steady_clock;
  constexpr int kCalls = 20'000;
  double best = 1e12;
  for (int round = 0; round < 20; ++round) {
    if (on) recorder.Start({}, absl::InfinitePast()).IgnoreError();
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kCalls; ++i) f();
    const std::chrono::duration<double, std::nano> time = Clock::now() - start;
    best = std::min(best, time.count() / kCalls);
    if (on) recorder.Stop(absl::InfiniteFuture()).IgnoreError();
  }
  return best;
}

void Run() {
  TraceRecorder recorder;
  const std::string function = "distgrad.optimizer.step/adam";
  // As the agent does it.
  const auto record = [&] {
    std::unique_ptr<TraceSpan> span;
    if (recorder.on()) {
      span = std::make_unique<TraceSpan>(TraceSpan{.function = function, .begin = absl::Now()});
    }
    if (span != nullptr) recorder.End(std::move(span), absl::Now(), absl::OkStatus());
  };
  std::printf("off %6.1f\n", Cost(recorder, false, record));
  std::printf("on  %6.1f, of which two looks at the clock\n", Cost(recorder, true, record));
}

}  // namespace
}  // namespace distgrad

int main() { distgrad::Run(); }
