// Recording spans from many threads, and counting those that do not fit.
#include "core/base/trace.h"

#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

absl::Time At(int us) { return absl::UnixEpoch() + absl::Microseconds(us); }

void Add(TraceRecorder& recorder, std::string function, int begin, int end,
         const absl::Status& status = absl::OkStatus()) {
  recorder.End(
      std::make_unique<TraceSpan>(TraceSpan{.function = std::move(function), .begin = At(begin)}),
      At(end), status);
}

TEST(TraceTest, RecordsWhileItRuns) {
  TraceRecorder recorder;
  EXPECT_FALSE(recorder.on());
  Add(recorder, "nobody asked", 1, 2);
  ASSERT_TRUE(recorder.Start({}, At(10)).ok());
  EXPECT_TRUE(recorder.on());
  EXPECT_EQ(recorder.Start({}, At(11)), absl::FailedPreconditionError("a trace runs already"));
  Add(recorder, "began before", 9, 12);
  recorder.End(nullptr, At(12), absl::OkStatus());
  Add(recorder, "a", 10, 13);
  Add(recorder, "b", 12, 14);
  const absl::StatusOr<Trace> trace = recorder.Stop(At(20));
  ASSERT_TRUE(trace.ok());
  EXPECT_FALSE(recorder.on());
  EXPECT_EQ(recorder.Stop(At(21)).status(), absl::FailedPreconditionError("no trace runs"));
  Add(recorder, "too late", 15, 22);
  EXPECT_EQ(trace->begin, At(10));
  EXPECT_EQ(trace->end, At(20));
  EXPECT_EQ(trace->dropped, 0u);
  ASSERT_EQ(trace->spans.size(), 2u);
  EXPECT_EQ(trace->spans[0].function, "a");
  EXPECT_EQ(trace->spans[0].end, At(13));
  EXPECT_EQ(trace->spans[1].function, "b");

  // The next one has nothing of it.
  ASSERT_TRUE(recorder.Start({}, At(30)).ok());
  EXPECT_TRUE(recorder.Stop(At(31))->spans.empty());
}

TEST(TraceTest, WhatDoesNotFitIsCounted) {
  TraceRecorder recorder;
  const size_t bytes = sizeof(TraceSpan) + 1000;
  ASSERT_TRUE(recorder.Start({.max_bytes = 3 * bytes}, At(0)).ok());
  for (int i = 0; i < 10; ++i) Add(recorder, std::string(900, 'x'), i, i);
  // Its error counts too.
  Add(recorder, "failed", 10, 10, absl::InternalError(std::string(bytes, 'y')));
  absl::StatusOr<Trace> trace = recorder.Stop(At(20));
  EXPECT_EQ(trace->spans.size(), 3u);
  EXPECT_EQ(trace->dropped, 8u);

  // The next one has room again, and none of that count.
  ASSERT_TRUE(recorder.Start({.max_bytes = 3 * bytes}, At(30)).ok());
  Add(recorder, "x", 30, 31);
  trace = recorder.Stop(At(32));
  EXPECT_EQ(trace->spans.size(), 1u);
  EXPECT_EQ(trace->dropped, 0u);

  ASSERT_TRUE(recorder.Start({.max_bytes = 0}, At(40)).ok());
  Add(recorder, "x", 40, 41);
  EXPECT_EQ(recorder.Stop(At(42))->dropped, 1u);
}

TEST(TraceTest, ManyThreads) {
  TraceRecorder recorder;
  ASSERT_TRUE(recorder.Start({}, At(0)).ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i)
        if (recorder.on()) Add(recorder, "x", i, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(recorder.Stop(At(1000))->spans.size(), 4000u);
}

}  // namespace
}  // namespace distgrad
