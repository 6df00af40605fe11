// Whom a worker watches, and when it takes one of them for lost.
#include "core/rpc/member_watch.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Verdict = MemberWatch::Verdict;

constexpr absl::Duration kPatience = absl::Seconds(40);

// Worker 1 of five.
class MemberWatchTest : public ::testing::Test {
 protected:
  MemberWatchTest() : peers_(std::make_shared<Peers>(100)), watch_(peers_, kPatience) {
    std::vector<WorkerInfo> workers(5);
    for (WorkerRank rank = 0; rank < 5; ++rank) {
      workers[rank].rank = rank;
      workers[rank].name = std::string(1, static_cast<char>('a' + rank));
      workers[rank].incarnation = 1;
    }
    EXPECT_TRUE(peers_->Start(workers[1], workers).ok());
    EXPECT_TRUE(watch_.Start());
  }
  std::vector<WorkerRank> Tick(bool is_first = false, bool can = true) {
    return watch_.Tick(is_first, [can](WorkerRank) { return can; });
  }
  // Of a connection with the next member that broke.
  Verdict Broke(MemberWatch::ClosedLink link,
                const absl::Status& why = absl::UnavailableError("it broke")) {
    if (link.peer == 0) link.peer = 2;
    return watch_.OnClosed(link, why, now_);
  }
  // That nobody has answered, who is asked since then.
  Verdict Unanswered(absl::Duration since) { return Broke({.asked_for = now_ - since}); }

  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  const std::shared_ptr<Peers> peers_;
  MemberWatch watch_;
};

TEST_F(MemberWatchTest, StartsOnce) { EXPECT_FALSE(watch_.Start()); }

TEST_F(MemberWatchTest, AsksTheNextOneAndTheOneBefore) {
  EXPECT_EQ(Tick(/*is_first=*/true), std::vector<WorkerRank>{2});
  EXPECT_EQ(Tick(), (std::vector<WorkerRank>{2, 0}));
}

TEST_F(MemberWatchTest, OfOthersItSaysNothing) {
  EXPECT_EQ(Broke({.peer = 3, .was_silent = true}), Verdict::kNothing);
  watch_.WatchToo(3);
  EXPECT_EQ(Broke({.peer = 3, .was_silent = true}), Verdict::kLost);
  watch_.Stop();
  EXPECT_EQ(Broke({.was_silent = true}), Verdict::kNothing);
}

TEST_F(MemberWatchTest, WhoIsWatchedTooIsTriedAgainUntilItIsLostOrHasLeft) {
  watch_.WatchToo(3);
  watch_.WatchToo(4);
  std::vector<WorkerRank> wanted = Tick(false, /*can=*/false);
  std::sort(wanted.begin() + 2, wanted.end());
  EXPECT_EQ(wanted, (std::vector<WorkerRank>{2, 0, 3, 4}));
  EXPECT_EQ(Tick(), (std::vector<WorkerRank>{2, 0})) << "they can be reached";
  ASSERT_TRUE(peers_->SetLost(4, 1, "it died"));
  EXPECT_EQ(Tick(false, /*can=*/false), (std::vector<WorkerRank>{2, 0, 3}));
  EXPECT_EQ(Broke({.peer = 4, .was_silent = true}), Verdict::kNothing) << "somebody has said it";
  EXPECT_EQ(Broke({.peer = 3, .was_silent = true}), Verdict::kLost);
  peers_->SetLeft(3, 1);
  EXPECT_EQ(Tick(false, /*can=*/false), (std::vector<WorkerRank>{2, 0}));
}

// As the others that it watches.
TEST_F(MemberWatchTest, WhoIsWatchedTooAndCanBeReachedHasAllOfThePatienceAgain) {
  watch_.WatchToo(3);
  const auto unanswered = [this] {
    return Broke({.peer = 3, .asked_for = now_ - absl::Milliseconds(100)});
  };
  EXPECT_EQ(unanswered(), Verdict::kTryAgain);
  now_ += kPatience;
  Tick();
  EXPECT_EQ(unanswered(), Verdict::kTryAgain);
}

TEST_F(MemberWatchTest, AConnectionThatWasGoodIsTriedAgainOnceASecond) {
  EXPECT_EQ(Broke({.was_heard = true}), Verdict::kTryAgain);
  EXPECT_EQ(Broke({.was_heard = true}), Verdict::kNothing);
  now_ += absl::Seconds(1);
  EXPECT_EQ(Broke({.was_heard = true}), Verdict::kTryAgain);
}

TEST_F(MemberWatchTest, WhoIsNotThereOrSilentIsLost) {
  EXPECT_EQ(Broke({.is_refused = true, .asked_for = now_ - absl::Milliseconds(100)}),
            Verdict::kLost);
  EXPECT_EQ(Broke({.was_heard = true, .was_silent = true}), Verdict::kLost);
}

TEST_F(MemberWatchTest, WhoDoesNotAnswerIsLostWhenPatienceEnds) {
  EXPECT_EQ(Unanswered(absl::Milliseconds(100)), Verdict::kTryAgain);
  now_ += kPatience - absl::Seconds(1);
  EXPECT_EQ(Unanswered(absl::Seconds(5)), Verdict::kTryAgain);
  now_ += absl::Seconds(1);
  EXPECT_EQ(Unanswered(absl::Milliseconds(100)), Verdict::kLost);
}

TEST_F(MemberWatchTest, WhoWasReachedMeanwhileHasAllOfItAgain) {
  EXPECT_EQ(Unanswered(absl::Milliseconds(100)), Verdict::kTryAgain);
  now_ += kPatience - absl::Seconds(1);
  EXPECT_EQ(Broke({.was_heard = true}), Verdict::kTryAgain);
  now_ += absl::Seconds(1);
  EXPECT_EQ(Unanswered(absl::Milliseconds(100)), Verdict::kTryAgain);
  Tick();  // it can be reached
  now_ += kPatience - absl::Seconds(1);
  EXPECT_EQ(Unanswered(absl::Milliseconds(100)), Verdict::kTryAgain);
}

// It may come from an address that the member no longer has.
TEST_F(MemberWatchTest, ARefusalThatComesLateSaysNothing) {
  EXPECT_EQ(Broke({.is_refused = true, .asked_for = now_ - absl::Seconds(1)}), Verdict::kTryAgain);
}

TEST_F(MemberWatchTest, ANewIncarnationHasAllOfIt) {
  const auto unanswered = [&](Incarnation incarnation) {
    return Broke({.incarnation = incarnation, .asked_for = now_});
  };
  EXPECT_EQ(unanswered(1), Verdict::kTryAgain);
  now_ += kPatience;
  EXPECT_EQ(unanswered(2), Verdict::kTryAgain);
  now_ += kPatience - absl::Seconds(1);
  EXPECT_EQ(unanswered(0), Verdict::kTryAgain) << "the store has not said which";
  now_ += absl::Seconds(1);
  EXPECT_EQ(unanswered(2), Verdict::kLost);
}

// As one that is among the next.
TEST_F(MemberWatchTest, SoHasOneThatIsWatchedTooAndWasReachedMeanwhile) {
  const auto unanswered = [&] { return Broke({.peer = 3, .asked_for = now_}); };
  watch_.WatchToo(3);
  EXPECT_EQ(unanswered(), Verdict::kTryAgain);
  Tick(/*is_first=*/false, /*can=*/false);
  now_ += kPatience - absl::Seconds(1);
  EXPECT_EQ(unanswered(), Verdict::kTryAgain);
  Tick();  // it can be reached
  now_ += absl::Seconds(1);
  EXPECT_EQ(unanswered(), Verdict::kTryAgain);
}

TEST_F(MemberWatchTest, SoHasOneThatWasNotWatchedForAWhile) {
  EXPECT_EQ(Unanswered(absl::ZeroDuration()), Verdict::kTryAgain);
  ASSERT_TRUE(peers_->SetLost(2, 1, "another one says so"));
  Tick(/*is_first=*/false, /*can=*/false);
  ASSERT_TRUE(peers_->SetAlive(2, 1, peers_->LossOf(2, 1)));
  now_ += kPatience;
  EXPECT_EQ(Unanswered(absl::ZeroDuration()), Verdict::kTryAgain);
}

TEST_F(MemberWatchTest, WhoLacksTheMeansToConnectKnowsNothing) {
  const absl::Status why = absl::ResourceExhaustedError("no descriptors");
  EXPECT_EQ(Broke({.asked_for = now_}, why), Verdict::kNothing);
}

TEST_F(MemberWatchTest, WhereOneIsLostItLooksForMoreUntilAllCanBeReached) {
  EXPECT_TRUE(watch_.IsWatched(2));
  EXPECT_FALSE(watch_.IsWatched(3));
  ASSERT_TRUE(peers_->SetLost(2, 1, "it died"));
  EXPECT_EQ(watch_.WatchMore(), (std::vector<WorkerRank>{3, 4}));
  EXPECT_EQ(Tick(false, /*can=*/false), (std::vector<WorkerRank>{3, 4, 0}));
  EXPECT_EQ(Tick(false, /*can=*/true), (std::vector<WorkerRank>{3, 4, 0}));
  EXPECT_EQ(Tick(), (std::vector<WorkerRank>{3, 0}));
}

TEST(ManyMembersTest, OneWatchesSixtyFourAtMost) {
  std::vector<WorkerInfo> workers(300);
  for (size_t rank = 0; rank < workers.size(); ++rank) {
    workers[rank].rank = static_cast<WorkerRank>(rank);
    workers[rank].name = std::to_string(rank);
    workers[rank].incarnation = 1;
  }
  const auto peers = std::make_shared<Peers>(workers.size());
  ASSERT_TRUE(peers->Start(workers[1], workers).ok());
  MemberWatch watch(peers, kPatience);
  ASSERT_TRUE(watch.Start());
  size_t watched = 1;
  for (int losses = 1; losses <= 8; ++losses) watched = watch.WatchMore().size();
  EXPECT_EQ(watched, 64u);
}

}  // namespace
}  // namespace distgrad
