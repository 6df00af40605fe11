// What a worker's user calls where an allocation of that thread fails.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "core/base/cancellation.h"
#include "core/base/future.h"
#include "core/rpc/call_metrics.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// A destructor that throws ends the process. One allocation fails of each: the rest is done by the
// release of the next context.
TEST(FailedAllocationTest, AContextEndsAllTheSame) {
  for (int nth = 0, failed = true; failed; ++nth) {
    SCOPED_TRACE(nth);
    // A connection on which an allocation fails ends, so each has one of its own.
    Cluster cluster(ClusterOptions{});
    ASSERT_EQ(cluster[1].Register("echo", [](Request& r) { return r.message; }), absl::OkStatus());
    const auto new_context = [&] {
      auto context = std::make_optional(cluster[0].NewContext());
      EXPECT_TRUE(cluster[0].Call(1, "echo", {"", {}}, {.context = &*context}).ok());
      return context;
    };
    std::optional<Context> first = new_context(), second = new_context();
    ASSERT_EQ(cluster[1].context_count(), 2u);
    FailAllocation(nth);
    first.reset();
    failed = FailAllocation(-1);
    second.reset();
    EXPECT_EQ(cluster[0].context_count(), 0u);
    while (cluster[1].context_count() > 0) std::this_thread::yield();
  }
}

// An error is one of a call that was never made: nobody would wait for it.
TEST(FailedAllocationTest, ACallThatThrowsIsNotMade) {
  Cluster cluster({.workers = 1});
  std::atomic<int> served{0};
  ASSERT_EQ(cluster[0].Register("count",
                                [&](Request& r) {
                                  ++served;
                                  return r.message;
                                }),
            absl::OkStatus());
  const auto cancellation = std::make_shared<Cancellation>();
  const auto call = [&] {
    return cluster[0].CallAsync(0, "count", {"", {}}, {.cancellation = cancellation});
  };
  int expected = 0;
  for (int nth = 0, failed = true; failed; ++nth) {
    SCOPED_TRACE(nth);
    std::optional<Future<Message>> made;
    FailAllocation(nth);
    try {
      made = call();
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): there is no call then
    }
    failed = FailAllocation(-1);
    if (made.has_value() && made->Wait().ok()) ++expected;
    ASSERT_TRUE(call().Wait().ok());
    EXPECT_EQ(served, ++expected);
  }
  for (const CallStats& calls : cluster[0].Metrics().calls) {
    EXPECT_TRUE(calls.served || calls.in_flight == 0);
  }
}

}  // namespace
}  // namespace distgrad
