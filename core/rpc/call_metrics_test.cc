// Counts of calls by peer and function, and how many names a peer may invent.
#include "core/rpc/call_metrics.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

TEST(CallMetricsTest, ByPeerWayAndFunction) {
  CallMetrics metrics;
  metrics.Find(2, /*served=*/true, "f")->calls = 3;
  metrics.Find(2, /*served=*/true, "f")->ended = 2;
  metrics.Find(2, /*served=*/false, "f")->calls = 5;
  metrics.Find(1, /*served=*/true, "g")->queue_ns = 7;
  const std::vector<CallStats> stats = metrics.Stats();
  ASSERT_EQ(stats.size(), 3u);
  EXPECT_EQ(stats[0].peer, 1);
  EXPECT_EQ(stats[0].queue_time, absl::Nanoseconds(7));
  EXPECT_FALSE(stats[1].served);
  EXPECT_EQ(stats[1].in_flight, 5u);
  EXPECT_EQ(stats[2].calls, 3u);
  EXPECT_EQ(stats[2].in_flight, 1u);
}

TEST(CallMetricsTest, APeerThatInventsNamesDoesNotGrowIt) {
  CallMetrics metrics;
  CallCounters* first = metrics.Find(1, true, "first");
  for (int i = 0; i < 100000; ++i) ++metrics.Find(1, true, absl::StrCat("name", i))->calls;
  EXPECT_EQ(metrics.Find(1, true, "first"), first);
  const std::vector<CallStats> stats = metrics.Stats();
  ASSERT_EQ(stats.size(), CallMetrics::kNames + 1);
  EXPECT_EQ(stats[0].function, CallMetrics::kOther);
  EXPECT_EQ(stats[0].calls, 100000 - (CallMetrics::kNames - 1));
  EXPECT_NE(metrics.Find(2, true, "new"), metrics.Find(1, true, CallMetrics::kOther));
}

}  // namespace
}  // namespace distgrad
