// Which contexts a worker knows, and which it remembers to be gone.
#include "core/autograd/context_registry.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "core/base/ids.h"

namespace distgrad {
namespace {

constexpr WorkerRank kSelf = 1, kOther = 2;

TEST(ContextRegistryTest, NoMessageBringsBackOneThatIsGone) {
  ContextRegistry contexts(kSelf, /*incarnation=*/1);
  const ContextId id = MakeId(kOther, 1);
  ASSERT_TRUE(contexts.FindOrAdd(id, /*edge=*/0).ok());
  EXPECT_NE(contexts.Remove(id), nullptr);
  EXPECT_EQ(contexts.FindOrAdd(id, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  // A release may overtake the message that would have brought the context.
  EXPECT_EQ(contexts.Remove(MakeId(kOther, 2)), nullptr);
  EXPECT_EQ(contexts.FindOrAdd(MakeId(kOther, 2), 0).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(contexts.size(), 0u);
}

// A job may last for months: what is remembered has a bound.
TEST(ContextRegistryTest, TheLongestGoneIsForgotten) {
  ContextRegistry contexts(kSelf, /*incarnation=*/1);
  const auto is_known_to_be_gone = [&](uint64_t counter) {
    return !contexts.FindOrAdd(MakeId(kOther, counter), 0).ok();
  };
  for (uint64_t i = 1; i <= ContextRegistry::kRemembered; ++i) contexts.Remove(MakeId(kOther, i));
  EXPECT_TRUE(is_known_to_be_gone(1));
  contexts.Remove(MakeId(kOther, 1));  // again, which is nothing new
  EXPECT_TRUE(is_known_to_be_gone(1));
  contexts.Remove(MakeId(kOther, ContextRegistry::kRemembered + 1));
  EXPECT_FALSE(is_known_to_be_gone(1));
  EXPECT_TRUE(is_known_to_be_gone(2));
}

}  // namespace
}  // namespace distgrad
