// Members that come, leave and come back, and which of them watches which.
#include "core/rpc/peers.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

WorkerInfo Info(WorkerRank rank, const std::string& name, uint64_t incarnation = 1,
                bool left = false) {
  WorkerInfo info;
  info.rank = rank;
  info.name = name;
  info.incarnation = incarnation << 32;
  info.left = left;
  return info;
}

constexpr Incarnation kFirst = Incarnation{1} << 32, kSecond = Incarnation{2} << 32;

// Whether the look-ups agree with the list, which is made anew each time.
void ExpectConsistent(const Peers& peers) {
  const std::vector<WorkerInfo> members = peers.Members();
  EXPECT_EQ(peers.size(), members.size());
  for (const WorkerInfo& member : members) {
    EXPECT_EQ(peers.Find(member.name).value(), member.rank) << member.name;
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

  ASSERT_FALSE(peers.UpdatePeer(Info(3, "d")).value());
  EXPECT_EQ(peers.size(), 4u);
  ExpectConsistent(peers);
}

TEST(PeersTest, WhoLeavesIsCountedNoMoreAndStillFound) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(peers.Start(Info(0, "a"), {Info(0, "a"), Info(1, "b"), Info(2, "c")}).ok());
  peers.SetLeft(1, kFirst);
  peers.SetLeft(1, kFirst);
  peers.SetLeft(7, kFirst);
  EXPECT_EQ(peers.size(), 2u);
  ExpectConsistent(peers);
  EXPECT_EQ(peers.Find("b").value(), 1);
  ASSERT_FALSE(peers.UpdatePeer(Info(1, "b")).value());
  EXPECT_EQ(peers.size(), 2u) << "it has said itself that it left";
  ASSERT_FALSE(peers.UpdatePeer(Info(2, "c", 1, /*left=*/true)).value());
  EXPECT_EQ(peers.size(), 1u);
  ASSERT_TRUE(peers.UpdatePeer(Info(1, "b", 2)).value());
  EXPECT_EQ(peers.size(), 2u) << "it is back";
  peers.SetLeft(1, kFirst);
  EXPECT_EQ(peers.size(), 2u) << "its former incarnation had said so before that";
  EXPECT_FALSE(peers.UpdatePeer(Info(1, "b", 1)).ok());
  EXPECT_EQ(peers.size(), 2u);
  ExpectConsistent(peers);
}

TEST(PeersTest, ANewIncarnationMayHaveAnotherName) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(peers.Start(Info(0, "a"), {Info(0, "a"), Info(1, "b")}).ok());
  ASSERT_TRUE(peers.UpdatePeer(Info(1, "z", 2)).value());
  EXPECT_EQ(peers.Find("z").value(), 1);
  EXPECT_FALSE(peers.Find("b").ok());
  ExpectConsistent(peers);
}

TEST(PeersTest, EachWatchesTheNextWhoIsThere) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(
      peers.Start(Info(2, "c"), {Info(0, "a"), Info(1, "b"), Info(2, "c"), Info(5, "f")}).ok());
  EXPECT_EQ(peers.After(1), std::vector<WorkerRank>({5}));
  EXPECT_EQ(peers.After(9), std::vector<WorkerRank>({5, 0, 1}));
  EXPECT_EQ(peers.Before(), 1);
  peers.SetLeft(1, kFirst);
  EXPECT_TRUE(peers.SetLost(5, Incarnation{1} << 32, "gone"));
  EXPECT_EQ(peers.After(9), std::vector<WorkerRank>({0}));
  EXPECT_EQ(peers.Before(), 0);
  peers.SetLeft(0, kFirst);
  EXPECT_TRUE(peers.After(9).empty());
  EXPECT_EQ(peers.Before(), std::nullopt);
  ASSERT_TRUE(peers.UpdatePeer(Info(5, "f", 2)).value());
  EXPECT_EQ(peers.Before(), 5) << "the last is before the first";
}

TEST(PeersTest, WhatHappensIsToldOnceAndInOrder) {
  Peers peers(/*max_workers=*/100);
  ASSERT_TRUE(peers.Start(Info(0, "a"), {Info(0, "a"), Info(1, "b"), Info(2, "c")}).ok());
  peers.SetLeft(2, kFirst);
  EXPECT_TRUE(peers.TakeEvents().empty()) << "nobody had asked for them";
  peers.KeepEvents(true);
  ASSERT_TRUE(peers.UpdatePeer(Info(2, "c", 2)).ok());  // it is back
  ASSERT_TRUE(peers.UpdatePeer(Info(2, "c", 2)).ok());
  ASSERT_TRUE(peers.UpdatePeer(Info(3, "d", 1, /*left=*/true)).ok());  // was never seen
  ASSERT_TRUE(peers.UpdatePeer(Info(4, "e")).ok());
  EXPECT_FALSE(peers.SetLost(1, Incarnation{7} << 32, "of another incarnation"));
  EXPECT_TRUE(peers.SetLost(1, Incarnation{1} << 32, "it is silent"));
  EXPECT_FALSE(peers.SetLost(1, Incarnation{1} << 32, "once more"));
  EXPECT_FALSE(peers.SetLost(0, Incarnation{1} << 32, "is this worker"));
  const uint64_t loss = peers.LossOf(1, kFirst);
  EXPECT_EQ(peers.LossOf(1, kSecond), 0u) << "of another incarnation";
  EXPECT_FALSE(peers.SetAlive(1, kSecond, loss)) << "so is this";
  EXPECT_TRUE(peers.SetAlive(1, kFirst, loss));
  EXPECT_FALSE(peers.SetAlive(1, kFirst, loss));
  EXPECT_FALSE(peers.SetAlive(1, kFirst, peers.LossOf(1, kFirst))) << "it is not lost";
  ASSERT_TRUE(peers.UpdatePeer(Info(1, "b", 2)).ok());  // comes back before anybody has missed it
  peers.SetLeft(4, kFirst);
  peers.SetLeft(1, kFirst);  // what the former one has said comes late
  ASSERT_TRUE(peers.UpdatePeer(Info(4, "e", 1, /*left=*/true)).ok());
  EXPECT_TRUE(peers.SetLost(1, Incarnation{2} << 32, "it died"));
  EXPECT_FALSE(peers.SetAlive(1, kSecond, loss)) << "what it did before an earlier loss";
  peers.SetLeft(1, kSecond);  // it had said so before it died
  EXPECT_FALSE(peers.SetLost(4, Incarnation{1} << 32, "has left"));

  std::vector<std::string> told;
  for (const MemberEvent& event : peers.TakeEvents()) {
    const char* const kinds[] = {"?", "joined", "left", "lost"};
    told.push_back(absl::StrCat(kinds[static_cast<int>(event.kind)], " ", event.name, " ",
                                event.incarnation >> 32, event.reason.empty() ? "" : ": ",
                                event.reason));
  }
  EXPECT_EQ(told, std::vector<std::string>({
                      "joined c 2",
                      "joined e 1",
                      "lost b 1: it is silent",
                      "joined b 1",
                      "lost b 1: it has come back as a new incarnation",
                      "joined b 2",
                      "left e 1",
                      "lost b 2: it died",
                  }));
  EXPECT_TRUE(peers.TakeEvents().empty());
  ASSERT_TRUE(peers.UpdatePeer(Info(5, "f")).ok());
  peers.KeepEvents(false);
  EXPECT_TRUE(peers.TakeEvents().empty());
}

// Who finds no memory says it again.
TEST(PeersTest, WhatFindsNoMemoryChangesNothing) {
  bool has_failed = true;
  for (int nth = 0; has_failed; ++nth) {
    Peers peers(/*max_workers=*/100);
    ASSERT_TRUE(peers.Start(Info(0, "a"), {Info(0, "a"), Info(1, "b"), Info(2, "c")}).ok());
    peers.KeepEvents(true);
    const std::string long_name(100, 'n');
    const WorkerInfo fourth = Info(4, long_name), renamed = Info(2, long_name + "2", 2);
    FailAllocation(nth);
    AwaitMemory([&] { return peers.UpdatePeer(fourth).ok(); });
    EXPECT_TRUE(
        AwaitMemory([&] { return peers.SetLost(4, kFirst, "it was silent for too long"); }));
    EXPECT_TRUE(AwaitMemory([&] { return peers.SetAlive(4, kFirst, peers.LossOf(4, kFirst)); }));
    EXPECT_TRUE(*AwaitMemory([&] { return peers.UpdatePeer(renamed); }));
    AwaitMemory([&] { peers.SetLeft(4, kFirst); });
    has_failed = FailAllocation(-1);
    std::vector<std::string> told;
    const char* const kinds[] = {"?", "joined ", "left ", "lost "};
    for (const MemberEvent& event : peers.TakeEvents()) {
      told.push_back(absl::StrCat(kinds[static_cast<int>(event.kind)], event.rank));
    }
    EXPECT_EQ(told, std::vector<std::string>(
                        {"joined 4", "lost 4", "joined 4", "lost 2", "joined 2", "left 4"}))
        << "allocation " << nth;
    EXPECT_EQ(peers.size(), 3u) << "allocation " << nth;
    EXPECT_EQ(*peers.Find(renamed.name), 2);
    EXPECT_FALSE(peers.Find("c").ok());
  }
}

}  // namespace
}  // namespace distgrad
