// The numbers of starts that share a store, also after starts that failed halfway.
#include "core/membership/start.h"

#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/membership/store/in_process_store.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

absl::Time Later() { return absl::Now() + absl::Minutes(1); }

// Starts ranks `from` to `to` - 1, in this order; their numbers.
std::vector<int64_t> StartAll(Store& store, int world_size, uint64_t nonce) {
  std::vector<int64_t> numbers(world_size);
  std::vector<std::thread> threads;
  for (int rank = world_size - 1; rank >= 0; --rank) {
    threads.emplace_back([&, rank] {
      const auto number = AgreeOnStart(store, rank, world_size, nonce * 100 + rank, Later());
      EXPECT_TRUE(number.ok()) << number.status();
      numbers[rank] = number.value_or(-1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return numbers;
}

TEST(AgreeOnStartTest, EachStartHasItsNumber) {
  const auto store = NewInProcessStore();
  EXPECT_EQ(StartAll(*store, 4, 1), std::vector<int64_t>(4, 1));
  EXPECT_EQ(StartAll(*store, 4, 2), std::vector<int64_t>(4, 2));
  EXPECT_EQ(StartAll(*store, 2, 3), std::vector<int64_t>(2, 3));  // fewer
  EXPECT_EQ(StartAll(*store, 5, 4), std::vector<int64_t>(5, 4));  // and more
  EXPECT_EQ(StartAll(*store, 1, 5), std::vector<int64_t>(1, 5));
}

// Some of a start were killed before they had asked, others before they heard, and worker 0
// before it answered.
TEST(AgreeOnStartTest, AfterStartsThatFailedHalfway) {
  const auto store = NewInProcessStore();
  const auto past = absl::InfinitePast();
  const absl::Status alone = AgreeOnStart(*store, 0, 3, 7, past).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(alone));
  EXPECT_TRUE(absl::StrContains(alone.message(), "of 3 workers these did not join in time: 1, 2"))
      << alone;
  const absl::Status early = AgreeOnStart(*store, 2, 3, 8, past).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(early));
  EXPECT_TRUE(absl::StrContains(early.message(), "worker 0 did not join")) << early;
  EXPECT_FALSE(AgreeOnStart(*store, 0, 3, 9, past).ok());  // answers a question of nobody
  const std::vector<int64_t> numbers = StartAll(*store, 3, 2);
  EXPECT_EQ(numbers, std::vector<int64_t>(3, 3));
}

// Of many only some are named.
TEST(AgreeOnStartTest, ManyAreMissing) {
  const auto store = NewInProcessStore();
  const absl::Status status = AgreeOnStart(*store, 0, 100, 1, absl::InfinitePast()).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "15, 16 and 83 more")) << status;
}

}  // namespace
}  // namespace distgrad
