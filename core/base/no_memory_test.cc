// What is done where no memory is left, and may not fail.
#include <optional>

#include "absl/status/status.h"
#include "core/base/future.h"
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

}  // namespace
}  // namespace distgrad
