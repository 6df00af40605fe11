// Allocations within and beyond a limit, in its scope, its pauses and on other threads.
#include "core/tensor/allocation_limit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

#include "absl/strings/match.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

absl::Status Allocate(int64_t bytes) {
  try {
    const at::Tensor tensor = at::empty({bytes}, at::kByte);
    return absl::OkStatus();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

TEST(AllocationLimitTest, WhatIsMoreFailsWithTheNameOfTheLimit) {
  {
    const AllocationLimit limit(1000, "limit bytes_of_test");
    EXPECT_TRUE(Allocate(600).ok());
    const absl::Status status = Allocate(600);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "it would allocate 600 bytes, after 600; limit bytes_of_test is "
                                  "1000"))
        << status;
    // What failed was not allocated.
    EXPECT_TRUE(Allocate(400).ok());
    EXPECT_FALSE(Allocate(1).ok());
    EXPECT_FALSE(Allocate(int64_t{1} << 62).ok());
  }
  EXPECT_TRUE(Allocate(100000).ok());
}

TEST(AllocationLimitTest, ItIsOfItsThreadAndItsScope) {
  const AllocationLimit limit(1000, "outer");
  std::thread([] { EXPECT_TRUE(Allocate(2000).ok()); }).join();
  {
    const AllocationLimit inner(10, "inner");
    EXPECT_FALSE(Allocate(100).ok());
    EXPECT_TRUE(Allocate(10).ok());
  }
  EXPECT_TRUE(Allocate(1000).ok());
  EXPECT_FALSE(Allocate(1).ok());
}

// A storage asks the allocator that it comes from for more.
TEST(AllocationLimitTest, WhatIsAllocatedInAPauseDoesNotCount) {
  const AllocationLimit limit(1000, "limit");
  {
    const AllocationLimitPause pause;
    EXPECT_EQ(at::ones({10'000}).numel(), 10'000);
    const AllocationLimit inner(10, "inner");
    EXPECT_ANY_THROW(at::ones({100}));
  }
  EXPECT_EQ(at::ones({100}).numel(), 100) << "nothing has counted";
  EXPECT_ANY_THROW(at::ones({10'000}));
}

TEST(AllocationLimitTest, ResizingCounts) {
  at::Tensor tensor = at::empty({10}, at::kByte);
  const AllocationLimit limit(1000, "limit");
  EXPECT_ANY_THROW(tensor.resize_({2000}));
  tensor.resize_({1000});
  EXPECT_EQ(tensor.numel(), 1000);
}

TEST(AllocationLimitTest, TensorsOutliveTheirLimitAndTheirThread) {
  at::Tensor tensor;
  std::thread([&] {
    const AllocationLimit limit(1000, "limit");
    tensor = at::ones({100}, at::kByte);
  }).join();
  EXPECT_EQ(tensor.clone().sum().item<int64_t>(), 100);
}

}  // namespace
}  // namespace distgrad
