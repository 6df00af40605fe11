#include "core/rpc/peers.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

WorkerInfo Info(WorkerId id, const std::string& name, uint64_t life = 1, bool left = false) {
  WorkerInfo info;
  info.id = id;
  info.name = name;
  info.incarnation = life << 32;
  info.left = left;
  return info;
}

// Whether the look-ups agree with the list, which is made anew each time.
void ExpectConsistent(const Peers& peers) {
  const std::vector<WorkerInfo> members = peers.Members();
  EXPECT_EQ(peers.size(), members.size());
  for (const WorkerInfo& member : members) {
    EXPECT_EQ(peers.Find(member.name).value(), member.id) << member.name;
  }
}

TEST(PeersTest, WhoIsThereIsFoundByNameAndCounted) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(peers.Start(Info(1, "b"), {Info(0, "a"), Info(1, "b"), Info(2, "c")}).ok());
  EXPECT_EQ(peers.size(), 3u);
  ExpectConsistent(peers);
  const absl::Status nobody = peers.Find("d").status();
  EXPECT_EQ(nobody.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(nobody.message(), "there are: a, b, c")) << nobody;

  ASSERT_FALSE(peers.Learn(Info(3, "d")).value());
  EXPECT_EQ(peers.size(), 4u);
  ExpectConsistent(peers);
}

TEST(PeersTest, WhoLeavesIsCountedNoMoreAndStillFound) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(peers.Start(Info(0, "a"), {Info(0, "a"), Info(1, "b"), Info(2, "c")}).ok());
  peers.SetLeft(1);
  peers.SetLeft(1);
  peers.SetLeft(7);
  EXPECT_EQ(peers.size(), 2u);
  ExpectConsistent(peers);
  EXPECT_EQ(peers.Find("b").value(), 1);
  ASSERT_FALSE(peers.Learn(Info(1, "b")).value());
  EXPECT_EQ(peers.size(), 2u) << "it has said itself that it left";
  ASSERT_FALSE(peers.Learn(Info(2, "c", 1, /*left=*/true)).value());
  EXPECT_EQ(peers.size(), 1u);
  ASSERT_TRUE(peers.Learn(Info(1, "b", 2)).value());
  EXPECT_EQ(peers.size(), 2u) << "it is back";
  EXPECT_FALSE(peers.Learn(Info(1, "b", 1)).ok());
  EXPECT_EQ(peers.size(), 2u);
  ExpectConsistent(peers);
}

TEST(PeersTest, ANewLifeMayHaveAnotherName) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(peers.Start(Info(0, "a"), {Info(0, "a"), Info(1, "b")}).ok());
  ASSERT_TRUE(peers.Learn(Info(1, "z", 2)).value());
  EXPECT_EQ(peers.Find("z").value(), 1);
  EXPECT_FALSE(peers.Find("b").ok());
  ExpectConsistent(peers);
}

}  // namespace
}  // namespace distgrad
