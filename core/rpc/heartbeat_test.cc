// Silent peers, stale links and a process that slept, tick by tick.
#include "core/rpc/heartbeat.h"

#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Reading = Heartbeat::Reading;

// A limit of 50 s is a tick each 10 s.
class HeartbeatTest : public testing::Test {
 protected:
  // Goes on by a tick.
  Heartbeat::Verdict Tick(const std::vector<Reading>& readings) {
    now_ += heartbeat_.interval();
    return heartbeat_.Tick(now_, readings);
  }

  Heartbeat heartbeat_{absl::Seconds(50)};
  absl::Time now_ = absl::FromUnixSeconds(1'000'000'000);
};

TEST_F(HeartbeatTest, WhoIsHeardIsLeftAlone) {
  for (uint64_t heard = 1; heard < 20; ++heard) {
    const auto verdict = Tick({{.link = 1, .peer = 5, .heard = heard}});
    EXPECT_TRUE(verdict.ask.empty());
    EXPECT_TRUE(verdict.probe.empty());
    EXPECT_TRUE(verdict.lost.empty());
  }
}

TEST_F(HeartbeatTest, WhoIsSilentIsAskedThenProbedThenLost) {
  const std::vector<Reading> silent = {{.link = 1, .peer = 5, .heard = 3}};
  EXPECT_TRUE(Tick(silent).ask.empty());
  auto verdict = Tick(silent);  // 10 s
  EXPECT_EQ(verdict.ask, std::vector<size_t>{0});
  EXPECT_TRUE(verdict.probe.empty());
  verdict = Tick(silent);  // 20 s
  EXPECT_EQ(verdict.ask, std::vector<size_t>{0});
  EXPECT_EQ(verdict.probe, std::vector<WorkerRank>{5});
  verdict = Tick(silent);  // 30 s
  EXPECT_EQ(verdict.ask, std::vector<size_t>{0});
  EXPECT_TRUE(verdict.probe.empty()) << "it was probed already";
  verdict = Tick(silent);  // 40 s, and up to 50 since it was heard
  EXPECT_EQ(verdict.lost, std::vector<size_t>{0});
}

TEST_F(HeartbeatTest, AnyLinkOfAPeerSpeaksForAll) {
  for (uint64_t i = 0; i < 20; ++i) {
    const auto verdict = Tick({{.link = 1, .peer = 5, .heard = 3},
                               {.link = 2, .peer = 5, .heard = i},
                               {.link = 3, .peer = 6, .heard = i}});
    EXPECT_TRUE(verdict.ask.empty());
    EXPECT_TRUE(verdict.lost.empty());
  }
}

TEST_F(HeartbeatTest, LinksAreStaleIfOneBringsNoAnswerWhileItsPeerLives) {
  const auto tick = [&](uint64_t heard, bool answers) {
    return Tick({{.link = 1, .peer = 5, .heard = 3, .answers = answers},
                 {.link = 2, .peer = 5, .heard = heard, .answers = true},
                 {.link = 3, .peer = 6, .heard = heard, .answers = true}});
  };
  EXPECT_TRUE(tick(0, true).ask.empty());
  for (uint64_t i = 1; i < 5; ++i) {
    const auto verdict = tick(i, true);
    EXPECT_EQ(verdict.ask, std::vector<size_t>{0});
    EXPECT_TRUE(verdict.stale.empty());
    EXPECT_TRUE(verdict.probe.empty());
  }
  // While something waits on it a question waits behind that.
  EXPECT_TRUE(tick(5, false).stale.empty());
  const auto verdict = tick(6, true);
  EXPECT_EQ(verdict.stale, (std::vector<size_t>{0, 1}));
  EXPECT_TRUE(verdict.lost.empty());
}

// All the while large packets went both ways, on a link of their own; so nothing came on this one,
// and no ping went out on it.
TEST_F(HeartbeatTest, ALinkIsPingedBeforeItIsStale) {
  const auto tick = [&](uint64_t heard, bool answers) {
    return Tick({{.link = 1, .peer = 5, .heard = 3, .answers = answers},
                 {.link = 2, .peer = 5, .heard = heard, .answers = false}});
  };
  for (uint64_t i = 1; i < 10; ++i) EXPECT_TRUE(tick(i, false).ask.empty());
  for (uint64_t i = 10; i < 14; ++i) {
    const auto verdict = tick(i, true);
    EXPECT_EQ(verdict.ask, std::vector<size_t>{0});
    EXPECT_TRUE(verdict.stale.empty());
  }
  EXPECT_EQ(tick(14, true).stale, (std::vector<size_t>{0, 1}));
}

// A large packet may begin before the ping that was to go out first, and take longer than the
// limit.
TEST_F(HeartbeatTest, ABulkLinkHasTimeToAnswerAfterALargePacket) {
  const auto tick = [&](uint64_t heard, bool answers) {
    return Tick({{.link = 1, .peer = 5, .heard = heard, .answers = true},
                 {.link = 2, .peer = 5, .heard = 3, .answers = answers, .is_bulk = true}});
  };
  uint64_t i = 0;
  const auto expect_asked = [&] {
    const auto verdict = tick(++i, true);
    EXPECT_EQ(verdict.ask, std::vector<size_t>{1}) << i;
    EXPECT_TRUE(verdict.stale.empty()) << i;
  };
  EXPECT_TRUE(tick(++i, true).ask.empty());
  for (int k = 0; k < 2; ++k) expect_asked();
  while (i < 10) EXPECT_TRUE(tick(++i, false).stale.empty());
  for (int k = 0; k < 4; ++k) expect_asked();
  EXPECT_EQ(tick(++i, true).stale, (std::vector<size_t>{0, 1}));
}

// A second link that is taken by the kernel and by nobody else.
TEST_F(HeartbeatTest, ALinkOnWhichNothingEverCameGoesAlone) {
  const auto tick = [&](uint64_t heard) {
    return Tick({{.link = 1, .peer = 5, .heard = heard, .answers = true},
                 {.link = 2, .peer = 5, .heard = 0, .answers = true}});
  };
  for (uint64_t i = 1; i < 6; ++i) EXPECT_TRUE(tick(i).stale.empty());
  EXPECT_EQ(tick(6).stale, std::vector<size_t>{1});
}

TEST_F(HeartbeatTest, AProbeThatNobodyAnswersIsNoSignOfLife) {
  std::vector<Reading> links = {{.link = 1, .peer = 5, .heard = 3}};
  for (int i = 0; i < 3; ++i) Tick(links);
  links.push_back({.link = 2, .peer = 5, .heard = 0});
  EXPECT_TRUE(Tick(links).lost.empty());
  EXPECT_EQ(Tick(links).lost, (std::vector<size_t>{0, 1}));
}

TEST_F(HeartbeatTest, OneThatNeverConnectsIsLost) {
  const std::vector<Reading> links = {{.link = 1, .peer = 5}, {.link = 2, .peer = {}}};
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Tick(links).lost.empty());
  EXPECT_EQ(Tick(links).lost, (std::vector<size_t>{0, 1}));
}

TEST_F(HeartbeatTest, WhoHasSleptDoesNotBlameOthers) {
  const std::vector<Reading> silent = {{.link = 1, .peer = 5, .heard = 3}};
  for (int i = 0; i < 3; ++i) Tick(silent);
  now_ += absl::Hours(1);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Tick(silent).lost.empty());
  EXPECT_EQ(Tick(silent).lost, std::vector<size_t>{0});
}

TEST_F(HeartbeatTest, ThereMayBeNoLimit) {
  EXPECT_EQ(Heartbeat(absl::InfiniteDuration()).interval(), absl::InfiniteDuration());
}

}  // namespace
}  // namespace distgrad
