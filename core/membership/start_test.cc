// The numbers of starts that share a store, also after starts that failed halfway.
#include "core/membership/start.h"

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/membership/store/in_process_store.h"
#include "gtest/gtest.h"
#include "tests/testing/forwarding_store.h"
#include "tests/testing/key_watch.h"
#include "tests/testing/waiting_thread.h"

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

// Starts all ranks, each of which sets a key of its own, and one that only its start has; what the
// store holds then.
std::set<std::string> StartListed(const std::shared_ptr<KeyWatch>& store, int world_size) {
  static int starts = 0;
  const std::string of_start = absl::StrCat("of start ", ++starts);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto part = ListedStoreOfThisStart(store, rank, world_size, Later());
      ASSERT_TRUE(part.ok()) << part.status();
      EXPECT_EQ((*part)->Add("count", 1, Later()).status(), absl::OkStatus());
      EXPECT_EQ((*part)->Set(absl::StrCat("rank ", rank), "here", Later()), absl::OkStatus());
      EXPECT_EQ((*part)->Set(of_start, "here", Later()), absl::OkStatus());
      EXPECT_EQ((*part)->Get(absl::StrCat("rank ", (rank + 1) % world_size), Later()).value_or(""),
                "here");
    });
  }
  for (std::thread& thread : threads) thread.join();
  return store->keys();
}

TEST(ListedStoreOfThisStartTest, FormerStartsLeaveNothing) {
  const auto store = std::make_shared<KeyWatch>(NewInProcessStore());
  const std::set<std::string> first = StartListed(store, 3);
  EXPECT_EQ(first.count("1/rank 2"), 1);
  for (int start = 2; start <= 100; ++start) {
    const std::set<std::string> keys = StartListed(store, 3);
    EXPECT_EQ(keys.size(), first.size());
    EXPECT_EQ(keys.count(absl::StrCat(start, "/rank 2")), 1);
    for (const std::string& key : keys) {
      EXPECT_TRUE(absl::StartsWith(key, "start/") ||
                  absl::StartsWith(key, absl::StrCat(start, "/")))
          << key;
    }
  }
  // Of ranks that there are no more the next start with as many knows.
  StartListed(store, 1);
  EXPECT_EQ(StartListed(store, 3).size(), first.size());
}

// Neither do starts to which somebody did not come.
TEST(ListedStoreOfThisStartTest, StartsThatFailedLeaveNothing) {
  const auto store = std::make_shared<KeyWatch>(NewInProcessStore());
  const std::set<std::string> first = StartListed(store, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(ListedStoreOfThisStart(store, 0, 3, absl::InfinitePast()).ok());
    EXPECT_FALSE(ListedStoreOfThisStart(store, 1, 3, absl::InfinitePast()).ok());
  }
  EXPECT_EQ(StartListed(store, 3).size(), first.size());
}

// Fails each write of a list for as long as it is told to; and calls `at_list` before one.
class FailingLists : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (absl::StartsWith(key, "start/keys/")) {
      if (fails) return absl::ResourceExhaustedError("the store is full");
      if (at_list != nullptr) std::exchange(at_list, nullptr)();
    }
    return ForwardingStore::Set(key, value, deadline);
  }

  bool fails = false;
  std::function<void()> at_list;
};

// A key is set once the list has it, however often that was tried before.
TEST(ListedStoreOfThisStartTest, WhatCouldNotBeListedIsListedByTheNextAttempt) {
  const auto store = std::make_shared<KeyWatch>(NewInProcessStore());
  const auto failing = std::make_shared<FailingLists>(store);
  const auto part = ListedStoreOfThisStart(failing, 0, 1, Later());
  ASSERT_TRUE(part.ok()) << part.status();
  failing->fails = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(absl::IsResourceExhausted((*part)->Set("first", "", Later())));
    EXPECT_TRUE(absl::IsResourceExhausted((*part)->Add("second", 1, Later()).status()));
  }
  failing->fails = false;
  EXPECT_EQ((*part)->Set("first", "", Later()), absl::OkStatus());
  EXPECT_EQ((*part)->Add("second", 1, Later()).value_or(0), 1);
  EXPECT_EQ(store->keys().count("1/first") + store->keys().count("1/second"), 2);
  ASSERT_TRUE(ListedStoreOfThisStart(store, 0, 1, Later()).ok());
  EXPECT_EQ(store->keys().count("1/first") + store->keys().count("1/second"), 0);
}

// Nor does a thread go on whose key another one is about to list.
TEST(ListedStoreOfThisStartTest, OfTwoThreadsNoneSetsAKeyBeforeItIsListed) {
  const auto store = std::make_shared<KeyWatch>(NewInProcessStore());
  const auto failing = std::make_shared<FailingLists>(store);
  const auto part = ListedStoreOfThisStart(failing, 0, 1, Later());
  ASSERT_TRUE(part.ok()) << part.status();
  std::optional<WaitingThread> other;
  failing->at_list = [&] {
    other.emplace([&] { EXPECT_TRUE((*part)->Set("key", "", Later()).ok()); });
    EXPECT_TRUE(other->Waits());
    EXPECT_EQ(store->keys().count("1/key"), 0u);
  };
  EXPECT_EQ((*part)->Set("key", "", Later()), absl::OkStatus());
}

// A list says what is deleted: of a former start alone, whatever stands there.
TEST(ListedStoreOfThisStartTest, AListOfSomethingElseDeletesNothing) {
  const auto store = std::make_shared<KeyWatch>(NewInProcessStore());
  for (const std::string key : {"9/ours", "x/ours", "ours"}) {
    ASSERT_EQ(store->Set(key, "", Later()), absl::OkStatus());
  }
  const std::set<std::string> first = StartListed(store, 1);
  for (const std::string list : {"", "\n", "x\nours", "9\nours", "-1\n\n", "ours"}) {
    ASSERT_EQ(store->Set("start/keys/0", list, Later()), absl::OkStatus());
    EXPECT_FALSE(ListedStoreOfThisStart(store, 0, 2, absl::InfinitePast()).ok());
    for (const std::string key : {"9/ours", "x/ours", "ours"}) {
      EXPECT_EQ(store->keys().count(key), 1) << key << " after " << list;
    }
  }
}

}  // namespace
}  // namespace distgrad
