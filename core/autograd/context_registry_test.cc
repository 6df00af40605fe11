// Which contexts a worker knows, and which it remembers to be gone.
#include "core/autograd/context_registry.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/strings/match.h"
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

TEST(ContextRegistryTest, OneThatWasNeverKnownIsNotAddedByAskingForIt) {
  ContextRegistry contexts(kSelf, /*incarnation=*/1, /*most=*/1);
  const ContextId id = MakeId(kOther, 1);
  const auto unknown = contexts.FindUnlessGone(id);
  ASSERT_TRUE(unknown.ok()) << unknown.status();
  EXPECT_EQ(*unknown, nullptr);
  EXPECT_EQ(contexts.size(), 0u);
  const auto added = contexts.FindOrAdd(id, /*edge=*/0);
  ASSERT_TRUE(added.ok()) << added.status();
  EXPECT_EQ(*contexts.FindUnlessGone(id), *added);
  EXPECT_FALSE(contexts.FindOrAdd(MakeId(kOther, 2), /*edge=*/7).ok()) << "there are too many";
  EXPECT_EQ(contexts.FindUnlessGone(MakeId(kOther, 2)).status().code(),
            absl::StatusCode::kResourceExhausted);
  contexts.Remove(id);
  EXPECT_EQ(contexts.FindUnlessGone(id).status().code(), absl::StatusCode::kFailedPrecondition);
  // Of our own all are known.
  EXPECT_EQ(contexts.FindUnlessGone(MakeId(kSelf, 9)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(ContextRegistryTest, ContextsThatAreOlderThanAWorkersReturnAreRefused) {
  const auto is_older = [](const absl::Status& status) {
    return absl::IsUnavailable(status) && absl::StrContains(status.message(), "came back");
  };
  const auto may_be_older = [](const absl::Status& status) {
    return absl::IsUnavailable(status) && absl::StrContains(status.message(), "had not heard");
  };
  ContextRegistry contexts(kSelf, /*incarnation=*/uint64_t{2} << 32);
  contexts.SetComesBack();
  const ContextId older = MakeId(kOther, 5), newer = MakeId(kOther, 6), early = MakeId(kOther, 7);
  const ContextId greatest = LastIdOf(kOther, /*incarnation=*/1);
  EXPECT_TRUE(may_be_older(contexts.FindOrAdd(newer, /*edge=*/0).status()));
  EXPECT_TRUE(may_be_older(contexts.FindOrAdd(greatest + 1, 0).status()));
  EXPECT_TRUE(may_be_older(contexts.FindUnlessGone(MakeId(kOther + 1, 1)).status()));
  contexts.SetMayBeOlder({greatest});
  EXPECT_TRUE(may_be_older(contexts.FindOrAdd(early, /*edge=*/9).status()));
  EXPECT_TRUE(may_be_older(contexts.FindOrAdd(newer, /*edge=*/0).status()));
  EXPECT_TRUE(may_be_older(contexts.FindUnlessGone(newer).status()));
  EXPECT_TRUE(may_be_older(contexts.FindOrAdd(greatest, 0).status()));
  EXPECT_TRUE(contexts.FindOrAdd(greatest + 1, 0).ok()) << "of the next incarnation of that one";
  contexts.SetOlder(older);
  EXPECT_TRUE(is_older(contexts.FindOrAdd(older, 0).status()));
  EXPECT_TRUE(is_older(contexts.FindUnlessGone(older).status()));
  EXPECT_TRUE(contexts.FindOrAdd(newer, 0).ok());
  EXPECT_TRUE(contexts.FindOrAdd(MakeId(kOther + 1, 1), 0).ok());
  // An edge of it would be waited for in vain.
  EXPECT_TRUE(may_be_older(contexts.FindOrAdd(early, 0).status()));
  // Of its own: those of the earlier incarnation.
  EXPECT_TRUE(is_older(contexts.FindOrAdd(MakeId(kSelf, 1), 0).status()));
  const ContextId own = contexts.New()->id();
  EXPECT_EQ(contexts.last(), own);
  contexts.Remove(own);
  EXPECT_EQ(contexts.FindOrAdd(own, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(contexts.size(), 3u);
}

// The store may have had an entry of its maker that was out of date.
TEST(ContextRegistryTest, WhatTheMakerSaysCountsThoughItIsMoreThanWasThought) {
  ContextRegistry contexts(kSelf, /*incarnation=*/uint64_t{2} << 32);
  contexts.SetComesBack();
  contexts.SetMayBeOlder({LastIdOf(kOther, /*incarnation=*/1)});
  const uint64_t first = FirstCounter(/*incarnation=*/uint64_t{2} << 32);
  contexts.SetOlder(MakeId(kOther, first + 5));
  EXPECT_TRUE(absl::IsUnavailable(contexts.FindOrAdd(MakeId(kOther, first + 3), 0).status()));
  EXPECT_TRUE(contexts.FindOrAdd(MakeId(kOther, first + 6), 0).ok());
}

// It may be a former incarnation of the maker that answers, for its entry was written late.
TEST(ContextRegistryTest, WhatAFormerIncarnationSaysCountsForItsOwnContextsAlone) {
  ContextRegistry contexts(kSelf, /*incarnation=*/uint64_t{2} << 32);
  contexts.SetComesBack();
  const Incarnation former = uint64_t{1} << 32, later = uint64_t{2} << 32;
  contexts.SetMayBeOlder({LastIdOf(kOther, later)});
  const auto is_served = [&](Incarnation of, uint64_t number) {
    return contexts.FindOrAdd(MakeId(kOther, FirstCounter(of) + number), /*edge=*/0).ok();
  };
  EXPECT_FALSE(contexts.SetOlder(MakeId(kOther, FirstCounter(former) + 5)));
  EXPECT_FALSE(is_served(former, 5));
  EXPECT_TRUE(is_served(former, 6));
  EXPECT_FALSE(is_served(later, 1)) << "it has not answered";
  EXPECT_TRUE(contexts.SetOlder(MakeId(kOther, FirstCounter(later) + 3)));
  EXPECT_FALSE(is_served(later, 3));
  EXPECT_TRUE(is_served(later, 4));
  // An answer that comes late takes nothing back.
  EXPECT_TRUE(contexts.SetOlder(MakeId(kOther, FirstCounter(former) + 9)));
  EXPECT_FALSE(is_served(later, 2));
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

TEST(ContextRegistryTest, OneThatIsThereIsNotRefusedLater) {
  ContextRegistry contexts(kSelf, /*incarnation=*/1);
  const ContextId id = MakeId(kOther, 1), late = MakeId(kOther, 2);
  EXPECT_FALSE(contexts.FindOrAdd(id, /*edge=*/7).value()->refused());
  EXPECT_FALSE(contexts.FindOrAdd(id, /*edge=*/8, /*refuses=*/true).value()->refused());
  EXPECT_TRUE(contexts.FindOrAdd(late, /*edge=*/7, /*refuses=*/true).value()->refused());
}

}  // namespace
}  // namespace distgrad
