// What is done where no memory is left, and may not fail.
#include <functional>
#include <new>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"
#include "core/base/future.h"
#include "core/base/make_or.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// A destructor that throws ends the process.
TEST(NoMemoryTest, APromiseIsDropped) {
  std::optional<Promise<Unit>> promise(std::in_place);
  const Future<Unit> future = promise->future();
  FailAllocation(0);
  promise.reset();
  EXPECT_FALSE(FailAllocation(-1)) << "it asked for memory";
  EXPECT_EQ(future.Wait().status().code(), absl::StatusCode::kCancelled);
}

// Calls it with its first allocation failing, with its second, and so on, until none fails.
void FailEachAllocation(const std::function<void()>& call) {
  for (int nth = 0; !testing::Test::HasFailure(); ++nth) {
    FailAllocation(nth);
    try {
      call();
      EXPECT_FALSE(FailAllocation(-1)) << "it went on without";
      return;
    } catch (const std::bad_alloc&) {
      EXPECT_TRUE(FailAllocation(-1));
    }
  }
}

TEST(NoMemoryTest, WhatCannotBeLeftOutIsDoneOnceThereIsMemory) {
  int calls = 0;
  FailAllocation(1, /*count=*/3);
  const std::string text = AwaitMemory([&] {
    ++calls;
    return absl::StrCat(std::string(100, 'x'), "y");
  });
  EXPECT_TRUE(FailAllocation(-1));
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(text, std::string(100, 'x') + "y");
}

TEST(NoMemoryTest, AnErrorIsSaidWithLessOfItsText) {
  const std::string text(100, 'x');
  const auto make = [&] { return absl::UnavailableError(absl::StrCat(text, "y")); };
  const auto say = [&] { return MakeOr(absl::Status(absl::StatusCode::kUnavailable, ""), make); };
  EXPECT_EQ(say(), absl::UnavailableError(text + "y"));
  for (int nth = 0; nth < 2; ++nth) {
    // From there on there is none at all.
    FailAllocation(nth, /*count=*/1000);
    const absl::Status said = say();
    EXPECT_TRUE(FailAllocation(-1)) << nth;
    EXPECT_EQ(said, absl::UnavailableError("")) << nth;
  }
}

// Too long to lie within a string, so that a copy of it asks for memory.
std::string KeyOf(int i) { return absl::StrCat("a key that is as long as several words, ", i); }

// Abseil's, as third_party/abseil/exceptions.patch has them.
using HashTable = absl::flat_hash_map<std::string, std::string>;

void ExpectHas(const HashTable& table, int count) {
  ASSERT_EQ(table.size(), static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const auto found = table.find(KeyOf(i));
    ASSERT_TRUE(found != table.end()) << i;
    EXPECT_EQ(found->second, KeyOf(-i));
  }
  EXPECT_FALSE(table.contains(KeyOf(count)));
}

// Neither growth nor an element that fails shows, and both succeed as soon as there is memory.
TEST(HashTableTest, KeepsWhatItHas) {
  HashTable table;
  for (int i = 0; i < 100; ++i) {
    const std::string key = KeyOf(i), value = KeyOf(-i);
    const size_t capacity = table.capacity();
    int calls = 0;
    FailEachAllocation([&] {
      if (calls++ == 1) {
        // Its first allocation has failed. A table that is broken would not survive the next call.
        ASSERT_EQ(table.capacity(), capacity);
        ASSERT_EQ(table.size(), static_cast<size_t>(i));
      }
      table.try_emplace(key, value);
    });
    EXPECT_GE(calls, 3);  // the key and the value
    ASSERT_NO_FATAL_FAILURE(ExpectHas(table, i + 1));
  }
}

TEST(HashTableTest, ACopyLeavesNothing) {
  HashTable table;
  for (int i = 0; i < 20; ++i) table.try_emplace(KeyOf(i), KeyOf(-i));
  std::optional<HashTable> copy;
  FailEachAllocation([&] { copy = table; });
  ASSERT_NO_FATAL_FAILURE(ExpectHas(*copy, 20));
  FailEachAllocation([&] { copy.emplace(1000); });
  EXPECT_TRUE(copy->empty());
}

}  // namespace
}  // namespace distgrad
