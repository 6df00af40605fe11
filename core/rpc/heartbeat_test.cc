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
  EXPECT_EQ(verdict.probe, std::vector<WorkerRank>{5}) << "there may have been no memory for it";
  verdict = Tick(silent);  // 40 s, and up to 50 since it was heard
  EXPECT_EQ(verdict.lost, std::vector<size_t>{0});
}

TEST_F(HeartbeatTest, AnyLinkOfAPeerSpeaksForAll) {
  for (uint64_t i = 0; i < 20; ++i) {
    const auto verdict = Tick({{.link = 1, .peer = 5, .heard = 3, .sent = i},
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

// The other end sends there, pings among it, and answers those that come to it.
TEST_F(HeartbeatTest, ABulkLinkThatDeliversNothingIsStaleThoughItIsHeard) {
  for (const uint64_t speaks_each : {1, 2, 3}) {
    const uint64_t link = 10 * speaks_each;  // a new one
    const auto tick = [&](uint64_t i, bool delivers, bool answers = true) {
      return Tick({{.link = link, .peer = 5, .heard = i, .answers = true},
                   {.link = link + 1,
                    .peer = 5,
                    .heard = 1 + i / speaks_each,
                    .answers = answers,
                    .is_bulk = true,
                    .answered = delivers ? i : 20,
                    .main_answered = i}});
    };
    uint64_t i = 0;
    while (i < 20) EXPECT_TRUE(tick(++i, true).stale.empty()) << i;
    // A large packet leaves meanwhile.
    for (int k = 0; k < 8; ++k) EXPECT_TRUE(tick(++i, false).stale.empty()) << i;
    EXPECT_TRUE(tick(++i, false, /*answers=*/false).stale.empty());
    for (int k = 0; k < 10; ++k) {
      const auto verdict = tick(++i, false);
      EXPECT_EQ(verdict.ask, std::vector<size_t>{1}) << i;
      EXPECT_TRUE(verdict.stale.empty()) << i;
    }
    EXPECT_EQ(tick(++i, false).stale, (std::vector<size_t>{0, 1})) << speaks_each;
  }
}

// The answers wait behind small packets, as those of the other link do.
TEST_F(HeartbeatTest, ABulkLinkHasTimeWhileNoAnswersCome) {
  uint64_t i = 0;
  const auto tick = [&](uint64_t answered, uint64_t main_answered) {
    ++i;
    return Tick({{.link = 1, .peer = 5, .heard = i, .answers = true},
                 {.link = 2,
                  .peer = 5,
                  .heard = i,
                  .answers = true,
                  .is_bulk = true,
                  .answered = answered,
                  .main_answered = main_answered}});
  };
  for (uint64_t k = 1; k <= 20; ++k) EXPECT_TRUE(tick(k, k).stale.empty()) << i;
  for (int k = 0; k < 40; ++k) {
    const auto verdict = tick(20, 20);
    EXPECT_EQ(verdict.ask, std::vector<size_t>{1}) << i;
    EXPECT_TRUE(verdict.stale.empty()) << i;
  }
  // Both come at last, those of the other link, which carries less, before.
  EXPECT_TRUE(tick(20, 24).stale.empty());
  for (uint64_t k = 0; k < 20; ++k) EXPECT_TRUE(tick(21 + k, 25 + k).stale.empty()) << i;
  // Now only those of the other link do.
  for (uint64_t k = 0; k < 10; ++k) EXPECT_TRUE(tick(40, 45 + k).stale.empty()) << i;
  EXPECT_EQ(tick(40, 55).stale, (std::vector<size_t>{0, 1}));
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

// It was asked for, and what is sent waits for it; or its far end has stopped taking anything.
TEST_F(HeartbeatTest, ALinkThatGetsRidOfNothingIsStaleThoughItsPeerLives) {
  for (const bool was_open : {false, true}) {
    const uint64_t link = was_open ? 11 : 1;
    const auto tick = [&](uint64_t heard) {
      return Tick(
          {{.link = link, .peer = 5, .heard = was_open ? 3u : 0u, .sent = was_open ? 9u : 0u},
           {.link = 2, .peer = 5, .heard = heard, .answers = true}});
    };
    for (uint64_t i = 1; i < 5; ++i) {
      const auto verdict = tick(link + i);
      EXPECT_TRUE(verdict.ask.empty()) << "a ping would wait, too";
      EXPECT_TRUE(verdict.stale.empty()) << i;
    }
    const auto verdict = tick(link + 5);
    EXPECT_EQ(verdict.stale, was_open ? (std::vector<size_t>{0, 1}) : std::vector<size_t>{0});
    EXPECT_TRUE(verdict.lost.empty());
  }
}

// It died soon after it was heard last, on another one.
TEST_F(HeartbeatTest, ADeadLinkOfADeadPeerIsLostWithIt) {
  uint64_t i = 0;
  const auto tick = [&](uint64_t heard) {
    ++i;
    return Tick({{.link = 1, .peer = 5}, {.link = 2, .peer = 5, .heard = heard}});
  };
  tick(1);
  tick(2);
  while (i < 5) {
    const auto verdict = tick(2);
    EXPECT_TRUE(verdict.stale.empty() && verdict.lost.empty()) << i;
  }
  EXPECT_EQ(tick(2).lost, (std::vector<size_t>{0, 1}));
}

// However many wait, as on a slow network.
TEST_F(HeartbeatTest, ALinkFromWhichPacketsLeaveIsKept) {
  for (uint64_t i = 1; i < 40; ++i) {
    // One packet in three ticks.
    EXPECT_TRUE(Tick({{.link = 1, .peer = 5, .heard = 3, .sent = i / 3},
                      {.link = 2, .peer = 5, .heard = i, .answers = true}})
                    .stale.empty())
        << i;
  }
}

TEST_F(HeartbeatTest, TheTimeOfALinkBeginsWhenSomethingWaits) {
  uint64_t i = 0;
  const auto tick = [&](bool waits) {
    return Tick({{.link = 1, .peer = 5, .heard = 3, .sent = 9, .answers = !waits},
                 {.link = 2, .peer = 5, .heard = ++i, .answers = true}});
  };
  // What waited first was withdrawn.
  for (const bool waits : {true, true, true, false, true, true, true, true}) {
    EXPECT_TRUE(tick(waits).stale.empty()) << i;
  }
  EXPECT_FALSE(tick(true).stale.empty());
}

// Bytes of a large packet may leave for longer than the limit before it has; but before there is a
// connection none do.
TEST_F(HeartbeatTest, ABulkLinkMayTakeLongOnceItIsOpen) {
  const auto tick = [&](uint64_t heard, uint64_t sent) {
    return Tick({{.link = 1, .peer = 5, .heard = heard, .answers = true},
                 {.link = 2 + sent, .peer = 5, .sent = sent, .is_bulk = true}});
  };
  for (uint64_t i = 1; i < 20; ++i) EXPECT_TRUE(tick(i, 1).stale.empty()) << i;
  for (uint64_t i = 20; i < 24; ++i) EXPECT_TRUE(tick(i, 0).stale.empty()) << i;
  EXPECT_EQ(tick(24, 0).stale, std::vector<size_t>{1});
}

// With it the one would end that it belongs to, which is well.
TEST_F(HeartbeatTest, ABulkLinkHasAsLongToOpenAsTransportsHave) {
  Heartbeat heartbeat(heartbeat_.limit(), /*opening=*/2 * heartbeat_.limit());
  const auto tick = [&](uint64_t heard) {
    now_ += heartbeat.interval();
    return heartbeat.Tick(now_, {{.link = 1, .peer = 5, .heard = heard, .answers = true},
                                 {.link = 2, .peer = 5, .is_bulk = true}});
  };
  for (uint64_t i = 1; i <= 10; ++i) EXPECT_TRUE(tick(i).stale.empty()) << i;
  EXPECT_EQ(tick(11).stale, std::vector<size_t>{1});
}

// It may be one for large packets, whose other end waits for it as long.
TEST_F(HeartbeatTest, OneThatWasAcceptedHasAsLongForItsHelloAsTransportsHave) {
  Heartbeat heartbeat(heartbeat_.limit(), /*opening=*/2 * heartbeat_.limit());
  const auto tick = [&] {
    now_ += heartbeat.interval();
    // The second one is ours: where its peer is nobody has said yet.
    return heartbeat.Tick(now_, {{.link = 1, .answers = true}, {.link = 2}}).lost;
  };
  for (int i = 1; i <= 10; ++i) {
    EXPECT_EQ(tick(), i < 5 ? std::vector<size_t>{} : std::vector<size_t>{1}) << i;
  }
  EXPECT_EQ(tick(), (std::vector<size_t>{0, 1}));
}

TEST_F(HeartbeatTest, WhoHasSleptGivesLinksTimeAgain) {
  const auto tick = [&](uint64_t heard) {
    return Tick({{.link = 1, .peer = 5}, {.link = 2, .peer = 5, .heard = heard, .answers = true}});
  };
  for (uint64_t i = 1; i < 5; ++i) EXPECT_TRUE(tick(i).stale.empty());
  now_ += absl::Hours(1);
  for (uint64_t i = 5; i < 9; ++i) EXPECT_TRUE(tick(i).stale.empty());
  EXPECT_EQ(tick(9).stale, std::vector<size_t>{0});
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
