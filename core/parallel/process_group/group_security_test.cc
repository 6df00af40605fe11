// What ranks that have keys, others or none are told before they connect.
#include "core/parallel/process_group/group_security.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "core/membership/store.h"
#include "core/membership/store/in_process_store.h"

namespace distgrad {
namespace {

const std::string kOne = "the first key of at least sixteen bytes",
                  kTwo = "the second key of at least sixteen bytes",
                  kThree = "the third key of at least sixteen bytes";

Deadline Soon() { return Deadline::After(absl::Minutes(2)); }

std::vector<absl::StatusOr<Digest>> Agree(const std::vector<ClusterKey>& keys,
                                          const std::string& group = "group") {
  const std::shared_ptr<Store> store = NewInProcessStore();
  std::vector<absl::StatusOr<Digest>> results(keys.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = AgreeOnSecurity(*store,
                                      {.group = group,
                                       .rank = static_cast<int>(rank),
                                       .size = static_cast<int>(keys.size()),
                                       .cluster_key = keys[rank]},
                                      Soon());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// All are told the same at once, and nothing of the keys.
void ExpectDifference(const std::vector<ClusterKey>& keys, const std::string& words) {
  for (const absl::StatusOr<Digest>& result : Agree(keys)) {
    const absl::Status status = result.status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_KEY_FILE")) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), "sixteen")) << status;
  }
}

TEST(GroupSecurityTest, SameKeysAgreeOnWhatNoOtherGroupHas) {
  for (const ClusterKey& key : {ClusterKey(), ClusterKey(kOne), ClusterKey(kOne, kTwo)}) {
    const auto first = Agree({key, key, key}), second = Agree({key, key, key});
    ASSERT_TRUE(first[0].ok()) << first[0].status();
    EXPECT_EQ(*first[0], *first[1]);
    EXPECT_EQ(*first[0], *first[2]);
    ASSERT_TRUE(second[0].ok()) << second[0].status();
    EXPECT_NE(*first[0], *second[0]);
  }
}

TEST(GroupSecurityTest, WhoDiffersIsNamedAtOnceToAll) {
  ExpectDifference({kOne, kOne, ClusterKey()}, "rank 0 has a cluster key and rank 2 has none");
  ExpectDifference({ClusterKey(), ClusterKey(), kOne},
                   "rank 2 has a cluster key and rank 0 has none");
  ExpectDifference({kOne, kTwo}, "rank 1 has another cluster key than rank 0");
}

TEST(GroupSecurityTest, WhileAKeyIsExchangedEachHasToKnowThoseThatAreUsed) {
  const ClusterKey both(kOne, kTwo), swapped(kTwo, kOne);
  EXPECT_TRUE(Agree({kOne, both})[0].ok());
  EXPECT_TRUE(Agree({both, swapped, both})[0].ok());
  EXPECT_TRUE(Agree({swapped, kTwo})[0].ok());
  EXPECT_TRUE(Agree({kOne, ClusterKey(kOne, kThree)})[0].ok()) << "the third is of no use";
  ExpectDifference({both, kOne, swapped}, "rank 1 has another cluster key than rank 2");
  ExpectDifference({swapped, kOne}, "rank 1 has another cluster key than rank 0");
}

TEST(GroupSecurityTest, ARankThatSaysNothingIsNamedAndOneThatFailsGivesItsReason) {
  const std::shared_ptr<Store> store = NewInProcessStore();
  const RankOfGroup first = {.group = "group", .rank = 0, .size = 2, .cluster_key = kOne};
  absl::Status status = AgreeOnSecurity(*store, first, absl::InfinitePast()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 1")) << status;
  ASSERT_TRUE(store->Set(kFailureKey, "rank 1 failed: no disk", Soon()).ok());
  status = AgreeOnSecurity(*store, first, Soon()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "no disk")) << status;
}

TEST(GroupSecurityTest, CertificatesAreOfAllOrOfNone) {
  for (const bool first : {true, false}) {
    const std::shared_ptr<Store> store = NewInProcessStore();
    absl::Status results[2];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        results[rank] = AgreeOnSecurity(*store,
                                        {.group = "group",
                                         .rank = rank,
                                         .size = 2,
                                         .cluster_key = kOne,
                                         .has_certificates = (rank == 0) == first},
                                        Soon())
                            .status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : results) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), first ? "rank 0 has certificates and rank 1"
                                                            : "rank 1 has certificates and rank 0"))
          << status;
    }
  }
}

// The store may be open to others.
TEST(GroupSecurityTest, WhatIsMalformedInTheStoreIsAnError) {
  for (const std::string& words : {std::string(), std::string("key"), std::string("key a b"),
                                   std::string("open "), std::string(1000, 'x')}) {
    const std::shared_ptr<Store> store = NewInProcessStore();
    ASSERT_TRUE(store->Set("security/1", words, Soon()).ok());
    const RankOfGroup first = {.group = "group", .rank = 0, .size = 2, .cluster_key = kOne};
    EXPECT_TRUE(absl::IsInvalidArgument(AgreeOnSecurity(*store, first, Soon()).status())) << words;
    ASSERT_TRUE(store->Set("security", words, Soon()).ok());
    const RankOfGroup second = {.group = "group", .rank = 1, .size = 2, .cluster_key = kOne};
    EXPECT_TRUE(absl::IsInvalidArgument(AgreeOnSecurity(*store, second, Soon()).status())) << words;
  }
}

}  // namespace
}  // namespace distgrad
