// Jobs over hosts: what an operator sees when all is well, when a cable is cut, a process is
// stopped or killed, a setting is wrong. docs/operating.md has what these tests print.
#include "tests/hosts/hosts.h"

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/hosts/tap_switch.h"
#include "tests/testing/certificates.h"

namespace distgrad {
namespace {

constexpr char kMember[] = "tests/hosts/member";
constexpr char kKey[] = "a secret of the whole job";

bool is_long = false;  // the long forms: --long

class HostsTest : public testing::Test {
 protected:
  using Variables = Hosts::Variables;

  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer does not see how TensorPipe orders its threads";
#endif
    Build({});
  }
  void Build(const HostsOptions& options) {
    hosts_ = nullptr;
    auto hosts = Hosts::Create(options);
    if (absl::IsFailedPrecondition(hosts.status())) GTEST_SKIP() << hosts.status().message();
    ASSERT_TRUE(hosts.ok()) << hosts.status();
    hosts_ = *std::move(hosts);
  }

  // Of rank `rank` of `size`; rank 0 runs on host 0.
  Variables Place(int rank, int size = 2, const std::string& store = Hosts::Ipv4(0)) {
    return {{"RANK", absl::StrCat(rank)}, {"WORLD_SIZE", absl::StrCat(size)},
            {"MASTER_ADDR", store},       {"MASTER_PORT", "29500"},
            {"DISTGRAD_KEY", kKey},       {"DISTGRAD_HOST", "eth0"}};
  }
  std::unique_ptr<HostProcess> Member(int host, const Variables& variables,
                                      const std::vector<std::string>& options = {}) {
    std::vector<std::string> command = {kMember};
    command.insert(command.end(), options.begin(), options.end());
    return hosts_->Start(host, command, variables);
  }
  // What it answers, which also goes to this test's output.
  std::string Answer(HostProcess& process) {
    const std::string line = process.AwaitLine("= ");
    std::printf("  %s\n", line.c_str());
    return line;
  }
  std::string Do(HostProcess& process, const std::string& command) {
    process.Say(command);
    return Answer(process);
  }
  void ExpectDone(HostProcess& process, const std::string& command) {
    const std::string answer = Do(process, command);
    EXPECT_TRUE(absl::StartsWith(answer, "= done")) << process.output();
  }
  void ExpectJoined(HostProcess& process) {
    const std::string answer = Answer(process);
    ASSERT_TRUE(absl::StartsWith(answer, "= done: joined")) << process.output();
  }
  void Start(const std::vector<std::string>& options = {}) {
    for (int rank : {0, 1}) members_.push_back(Member(rank, Place(rank), options));
    for (const auto& member : members_) ExpectJoined(*member);
  }
  // Until a store is served there, which is asked from a host.
  void AwaitStore(int host, const std::string& address) {
    const auto there = hosts_->Start(
        host, {"bash", "-c",
               absl::StrCat("until exec 3<>/dev/tcp/", address, "/29500; do sleep 0.1; done")});
    EXPECT_EQ(there->Wait(), 0) << there->output();
  }
  void LeaveAll() {
    for (const auto& member : members_) member->Say("leave");
    for (const auto& member : members_) {
      EXPECT_TRUE(absl::StartsWith(Answer(*member), "= done")) << member->output();
      EXPECT_EQ(member->Wait(), 0) << member->output();
    }
  }
  // Cuts the cable, and mends it; how long it was cut.
  absl::Duration Cut(int host, absl::Duration duration) {
    const absl::Time begin = absl::Now();
    hosts_->CutCable(host);
    absl::SleepFor(duration);  // the cut itself
    hosts_->MendCable(host);
    return absl::Now() - begin;
  }

  std::unique_ptr<Hosts> hosts_;
  std::vector<std::unique_ptr<HostProcess>> members_;
};

// ------------------------------------------------------------------------------ What hosts are

TEST_F(HostsTest, AreHosts) {
  std::string said[2];
  for (int host : {0, 1}) {
    const auto process = hosts_->Start(
        host,
        {"sh", "-c", "hostname; cat /proc/sys/kernel/random/boot_id; echo $$; ls -d /proc/[0-9]*"});
    said[host] = process->AwaitEnd();
    EXPECT_EQ(process->Wait(), 0);
    // Its first processes, and no others: its own init, this shell and what it runs.
    EXPECT_TRUE(absl::StrContains(said[host], absl::StrCat("host", host, "\n")));
    EXPECT_TRUE(absl::StrContains(said[host], "\n/proc/1\n")) << said[host];
    int processes = 0;
    for (size_t at = 0; (at = said[host].find("/proc/", at)) != std::string::npos; ++at)
      ++processes;
    EXPECT_LE(processes, 5) << said[host];
  }
  const auto boot_id = [](const std::string& text) {
    const size_t begin = text.find('\n') + 1;
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_EQ(boot_id(said[0]).size(), 36) << said[0];
  EXPECT_NE(boot_id(said[0]), boot_id(said[1]));
}

// ------------------------------------------------------------------------------- What goes well

TEST_F(HostsTest, TrainOverTheNetwork) {
  Start();
  constexpr int64_t kBytes = 8 << 20;
  const int64_t before = hosts_->ReceivedBytes(1);
  ExpectDone(*members_[0], absl::StrCat("train 2 ", kBytes));
  // In the forward of each step; the gradient of a sum is one number.
  EXPECT_GE(hosts_->ReceivedBytes(1) - before, 2 * kBytes);
  ExpectDone(*members_[1], "train 2 4096");
  LeaveAll();
}

// Of these words, those that somebody sees who records all frames between two hosts while workers
// call each other there and train.
std::set<std::string> SeenOnTheCable(const std::set<std::string>& words,
                                     const std::function<void(Hosts&)>& job) {
  auto hosts = Hosts::Create({.taps = true});
  EXPECT_TRUE(hosts.ok()) << hosts.status();
  std::set<std::string> seen;
  int64_t bytes = 0;
  {
    TapSwitch taps({(*hosts)->Tap(0), (*hosts)->Tap(1)}, /*seed=*/1, [&](const std::string& frame) {
      bytes += static_cast<int64_t>(frame.size());
      for (const std::string& word : words) {
        if (absl::StrContains(frame, word)) seen.insert(word);
      }
    });
    job(**hosts);
  }
  std::printf("  %lld bytes of frames, %zu of %zu words seen\n", static_cast<long long>(bytes),
              seen.size(), words.size());
  EXPECT_GT(bytes, 2 << 20) << "the job's tensors did not pass here";
  return seen;
}

TEST_F(HostsTest, WhoRecordsAllFramesSeesNoTensorAndNoName) {
  // Without a place for cables that end here, this machine cannot record them.
  const absl::Status taps = Hosts::Create({.taps = true}).status();
  if (absl::IsFailedPrecondition(taps)) GTEST_SKIP() << taps.message();
  ASSERT_TRUE(taps.ok()) << taps;
  // What "call" sends (0.5, again and again), names of functions and of an operator's kind of
  // object, a worker's name, and keys of the store.
  std::string tensor;
  for (int i = 0; i < 16; ++i) tensor += std::string("\0\0\0\x3f", 4);
  const std::set<std::string> words = {tensor, "forward", "weight", "worker1", "incarnations"};
  const auto run = [&](const Variables& security) {
    return SeenOnTheCable(words, [&](Hosts& hosts) {
      members_.clear();
      for (int rank : {0, 1}) {
        Variables variables = Place(rank);
        variables.erase("DISTGRAD_KEY");
        variables.insert(security.begin(), security.end());
        members_.push_back(hosts.Start(rank, {kMember}, variables));
      }
      for (const auto& member : members_) ExpectJoined(*member);
      ExpectDone(*members_[0], absl::StrCat("call worker1 ", 1 << 20));
      ExpectDone(*members_[0], absl::StrCat("train 2 ", 1 << 18));
      LeaveAll();
      members_.clear();
    });
  };
  EXPECT_EQ(run({}), words) << "this test does not see what is there";
  EXPECT_EQ(run({{"DISTGRAD_KEY", kKey}}), std::set<std::string>());
  TestAuthority authority(testing::TempDir() + "/certificates");
  const CertificateFiles files = authority.Issue("worker", {.names = "URI:spiffe://job/worker"});
  EXPECT_EQ(run({{"DISTGRAD_TLS_CERT", files.cert},
                 {"DISTGRAD_TLS_KEY", files.key},
                 {"DISTGRAD_TLS_CA", files.ca}}),
            std::set<std::string>());
}

TEST_F(HostsTest, TrainOverASlowLink) {
  // 1.25 MB/s: one call of 6 MB there and back takes longer than the limit of the heartbeats.
  Start({"--heartbeat=6"});
  hosts_->SetRate("10mbit");
  const absl::Time begin = absl::Now();
  ExpectDone(*members_[0], absl::StrCat("call worker1 ", 6 << 20));
  EXPECT_GE(absl::Now() - begin, absl::Seconds(9));
  ExpectDone(*members_[0], "train 5 4096");
  LeaveAll();
}

TEST_F(HostsTest, TrainWithIpv6Alone) {
  Build({.count = 2, .ipv4 = false});
  ASSERT_NE(hosts_, nullptr);
  for (int rank : {0, 1}) {
    members_.push_back(Member(rank, Place(rank, 2, Hosts::Ipv6(0))));
  }
  for (const auto& member : members_) ExpectJoined(*member);
  ExpectDone(*members_[0], "train 2 1000000");
  ExpectDone(*members_[1], "train 2 4096");
  LeaveAll();
}

TEST_F(HostsTest, TrainWithoutDistgradHost) {
  for (const bool ipv4 : {true, false}) {
    SCOPED_TRACE(ipv4 ? "IPv4" : "IPv6");
    members_.clear();
    Build({.count = 2, .ipv4 = ipv4});
    ASSERT_NE(hosts_, nullptr);
    for (int rank : {0, 1}) {
      Variables variables = Place(rank, 2, ipv4 ? Hosts::Ipv4(0) : Hosts::Ipv6(0));
      variables.erase("DISTGRAD_HOST");
      members_.push_back(Member(rank, variables));
    }
    for (const auto& member : members_) ExpectJoined(*member);
    ExpectDone(*members_[0], "train 2 4096");
    ExpectDone(*members_[1], "train 2 4096");
    LeaveAll();
  }
}

// -------------------------------------------------------------------------------- Cables, stops

void PrintHealed(absl::Duration cut, absl::Time mended) {
  std::printf(
      "  went on %s after the end of a cut of %s\n",
      absl::FormatDuration(absl::Trunc(absl::Now() - mended, absl::Milliseconds(10))).c_str(),
      absl::FormatDuration(absl::Trunc(cut, absl::Milliseconds(10))).c_str());
}

TEST_F(HostsTest, ACutOfSecondsCostsTimeOnly) {
  // With 20 s a cut of 10 has some 3 s to spare, for after 10 s the system sends again after 12.6,
  // and a peer is lost after 16: on a machine that many tests share a thread may stand still
  // longer.
  Start({is_long ? "--heartbeat=20" : "--heartbeat=40"});
  for (const int seconds : {3, 10}) {
    SCOPED_TRACE(seconds);
    // Rank 1 waits for a barrier in the store, and rank 0 for an answer of rank 1's.
    members_[1]->Say("barrier");
    hosts_->CutCable(1);
    members_[0]->Say("train 1 4096");
    absl::SleepFor(absl::Seconds(seconds));  // the cut itself
    hosts_->MendCable(1);
    const absl::Time mended = absl::Now();
    EXPECT_TRUE(absl::StartsWith(Answer(*members_[0]), "= done")) << members_[0]->output();
    PrintHealed(absl::Seconds(seconds), mended);
    members_[0]->Say("barrier");
    for (const auto& member : members_) {
      EXPECT_TRUE(absl::StartsWith(Answer(*member), "= done")) << member->output();
    }
  }
  // And in the end of the job.
  members_[1]->Say("leave");
  Cut(1, absl::Seconds(3));
  ExpectDone(*members_[0], "leave");
  EXPECT_TRUE(absl::StartsWith(Answer(*members_[1]), "= done")) << members_[1]->output();
  for (const auto& member : members_) EXPECT_EQ(member->Wait(), 0) << member->output();
}

TEST_F(HostsTest, ACutBeyondTheHeartbeatsEndsWhatIsInFlight) {
  // The long form is the issue's: 40 s with a heartbeat of 20.
  const int limit = is_long ? 20 : 4;
  Start({absl::StrCat("--heartbeat=", limit)});
  ExpectDone(*members_[0], "train 1 4096");
  members_[1]->Say("barrier");
  hosts_->CutCable(1);
  const absl::Time cut = absl::Now();
  const std::string answer = Do(*members_[0], "call worker1 4096");
  EXPECT_TRUE(absl::StrContains(answer, "UNAVAILABLE")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "worker1")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "heartbeat limit")) << answer;
  absl::SleepFor(cut + absl::Seconds(2 * limit) - absl::Now());  // the rest of the cut
  hosts_->MendCable(1);
  // It is still a member. Its end of the connection may not have heard that it is over.
  ExpectDone(*members_[0], "train 1 4096");
  ExpectDone(*members_[0], "barrier");
  // Who waited may have missed the other, or the store, for longer than the heartbeats allow. A
  // barrier that fails is not used up.
  const std::string waited = Answer(*members_[1]);
  if (absl::StartsWith(waited, "= UNAVAILABLE")) {
    ExpectDone(*members_[1], "barrier");
  } else {
    EXPECT_TRUE(absl::StartsWith(waited, "= done")) << waited;
  }
  ExpectDone(*members_[1], "train 1 4096");
  LeaveAll();
}

TEST_F(HostsTest, WhileRank0IsStoppedTheOthersWait) {
  Start({"--heartbeat=60"});
  ExpectDone(*members_[0], "train 1 4096");
  members_[0]->Stop();
  members_[1]->Say("train 1 4096");
  absl::SleepFor(absl::Seconds(is_long ? 30 : 8));  // longer than the store's client asks at a time
  members_[0]->Signal(SIGCONT);
  EXPECT_TRUE(absl::StartsWith(Answer(*members_[1]), "= done")) << members_[1]->output();
  members_[1]->Say("leave");
  members_[0]->Stop();
  absl::SleepFor(absl::Seconds(is_long ? 30 : 8));
  members_[0]->Signal(SIGCONT);
  ExpectDone(*members_[0], "leave");
  EXPECT_TRUE(absl::StartsWith(Answer(*members_[1]), "= done")) << members_[1]->output();
  for (const auto& member : members_) EXPECT_EQ(member->Wait(), 0) << member->output();
}

TEST_F(HostsTest, AllHearThatTheMachineWithTheStoreIsGone) {
  constexpr int kHosts = 4;
  Build({.count = kHosts});
  ASSERT_NE(hosts_, nullptr);
  for (int rank = 0; rank < kHosts; ++rank) {
    // Longer than whoever connects waits for the store to say where its peer is.
    members_.push_back(Member(rank, Place(rank, kHosts), {"--heartbeat=12"}));
  }
  for (const auto& member : members_) ExpectJoined(*member);
  members_[2]->Say("serve");
  hosts_->CutCable(0);
  const absl::Time cut = absl::Now();
  const std::string answer = Answer(*members_[2]);
  EXPECT_TRUE(absl::StartsWith(answer, "= UNAVAILABLE")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "worker 'worker0' (0), which serves the job's store"))
      << answer;
  EXPECT_EQ(members_[2]->Wait(), 1) << members_[2]->output();
  // One watches rank 0, and the other does not.
  for (int rank : {3, 1}) {
    EXPECT_NE(members_[rank]->AwaitLine("* lost worker0"), "");
    std::printf("  rank %d has heard of it %s after the cut\n", rank,
                absl::FormatDuration(absl::Now() - cut).c_str());
  }
  hosts_->MendCable(0);
  for (int rank : {3, 1}) EXPECT_NE(members_[rank]->AwaitLine("* joined worker0"), "");
  ExpectDone(*members_[1], "call worker0 4096");
}

TEST_F(HostsTest, WhoIsKilledIsMissedThoughNobodyCallsIt) {
  Start();
  members_[0]->Say("stay");
  members_[1]->Signal(SIGKILL);
  const absl::Time killed = absl::Now();
  const std::string answer = Answer(*members_[0]);
  EXPECT_TRUE(absl::StrContains(answer,
                                "UNAVAILABLE: waiting for all workers to shut down: "
                                "'worker1' (1) is lost: "))
      << answer;
  std::printf("  %s after the kill\n", absl::FormatDuration(absl::Now() - killed).c_str());
  // The callback has heard of it before, or hears of it now; it ends with the worker, which stays.
  if (!absl::StrContains(members_[0]->output(), "* lost worker1")) {
    members_[0]->AwaitLine("* lost worker1");
  }
}

TEST_F(HostsTest, WhoNeedsAStoreThatHasEndedIsToldSo) {
  constexpr int kHosts = 3;
  Build({.count = kHosts});
  ASSERT_NE(hosts_, nullptr);
  for (int rank = 0; rank < kHosts; ++rank) members_.push_back(Member(rank, Place(rank, kHosts)));
  for (const auto& member : members_) ExpectJoined(*member);
  ExpectDone(*members_[1], "call worker2 4096");
  members_[0]->Signal(SIGKILL);
  EXPECT_EQ(members_[0]->Wait(), -SIGKILL);
  const absl::Time killed = absl::Now();
  const std::string answer = Do(*members_[1], "barrier");
  EXPECT_TRUE(absl::StrContains(answer, "UNAVAILABLE")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, absl::StrCat("lost the store at ", Hosts::Ipv4(0))))
      << answer;
  std::printf("  %s after the kill\n", absl::FormatDuration(absl::Now() - killed).c_str());
  // Those who are connected go on.
  ExpectDone(*members_[1], "call worker2 4096");
}

TEST_F(HostsTest, WhoIsKilledComesBack) {
  Start();
  const int kills = is_long ? 100 : 4;
  for (int i = 0; i < kills; ++i) {
    SCOPED_TRACE(i);
    ExpectDone(*members_[0], "train 1 100000");
    members_[0]->Say("train 1000000 100000");  // it is hit in the midst of something
    const absl::Time killed = absl::Now();
    members_[1]->Signal(SIGKILL);
    EXPECT_EQ(members_[1]->Wait(), -SIGKILL);
    const std::string answer = Answer(*members_[0]);
    EXPECT_TRUE(absl::StrContains(answer, "worker1")) << answer;
    members_[1] = Member(1, Place(1));
    ExpectJoined(*members_[1]);
    // A first call may meet what is left of the connection to the old incarnation.
    for (int tries = 0; tries < 3; ++tries) {
      if (absl::StartsWith(Do(*members_[0], "train 1 100000"), "= done")) break;
      ASSERT_LT(tries, 2) << members_[0]->output();
    }
    std::printf("  a good step %s after the kill\n",
                absl::FormatDuration(absl::Now() - killed).c_str());
  }
  LeaveAll();
}

// ------------------------------------------------------------------------------- Wrong settings

TEST_F(HostsTest, AWrongHostIsFoundBeforeTheStoreIsAsked) {
  // No store is there, and nobody waits for one.
  for (const std::string& host : {std::string("10.77.0.99"), std::string("eth7"), Hosts::Ipv4(0)}) {
    Variables variables = Place(1);
    variables["DISTGRAD_HOST"] = host;
    const auto member = Member(1, variables, {"--join_timeout=100000"});
    const std::string answer = Answer(*member);
    EXPECT_TRUE(absl::StartsWith(answer, "= INVALID_ARGUMENT")) << answer;
    EXPECT_TRUE(absl::StrContains(answer, absl::StrCat("\"", host, "\""))) << answer;
    EXPECT_TRUE(absl::StrContains(answer, "DISTGRAD_HOST")) << answer;
    EXPECT_EQ(member->Wait(), 1);
  }
}

TEST_F(HostsTest, FileDescriptorsAreReservedAtTheStart) {
  const auto with_limits = [&](int rank, int size, const std::string& limits) {
    return hosts_->Start(rank, {"bash", "-c", absl::StrCat(limits, "; exec ", kMember)},
                         Place(rank, size));
  };
  // A soft limit is raised,
  for (int rank : {0, 1}) members_.push_back(with_limits(rank, 2, "ulimit -Sn 30"));
  for (const auto& member : members_) ExpectJoined(*member);
  ExpectDone(*members_[0], "train 1 1000000");
  LeaveAll();
  // a hard one that will do for the store, but perhaps not for all peers, is in the log,
  {
    const auto member = with_limits(0, 100, "ulimit -n 256");
    const std::string warning = member->AwaitLine("ulimit -n");
    std::printf("  %s\n", warning.c_str());
    EXPECT_TRUE(absl::StrContains(warning, "job of 100 needs about 1054 file descriptors"))
        << warning;
    EXPECT_TRUE(absl::StrContains(warning, "may have 256")) << warning;
  }
  // and one that will not is an error at once.
  const auto member = with_limits(0, 512, "ulimit -n 256");
  const std::string answer = Answer(*member);
  EXPECT_TRUE(absl::StartsWith(answer, "= RESOURCE_EXHAUSTED")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "ulimit -n")) << answer;
  EXPECT_EQ(member->Wait(), 1);
}

TEST_F(HostsTest, WhoCallsAWorkerWithoutDescriptorsIsToldSo) {
  Start();
  const std::string open = Do(*members_[1], "descriptors");
  LeaveAll();
  members_.clear();
  // As many as it needs to join, and one, which it cannot do without; and what it needs besides for
  // a moment, which was not counted.
  const int least = std::atoi(open.c_str() + std::strlen("= done: ")) + 1;
  for (int limit = least;; ++limit) {
    ASSERT_LT(limit, least + 10);
    members_.clear();
    members_.push_back(Member(0, Place(0)));
    members_.push_back(hosts_->Start(
        1, {"bash", "-c", absl::StrCat("ulimit -n ", limit, "; exec ", kMember)}, Place(1)));
    const std::string answer = Answer(*members_[1]);
    if (absl::StartsWith(answer, "= done: joined")) break;
    ASSERT_TRUE(absl::StrContains(answer, "Too many open files")) << answer;
  }
  ASSERT_NO_FATAL_FAILURE(ExpectJoined(*members_[0]));
  // For as long as nobody is lost whose watcher cannot reach it.
  const absl::Time begin = absl::Now();
  while (absl::Now() - begin < absl::Seconds(4)) {
    const std::string answer = Do(*members_[0], "call worker1 4096");
    EXPECT_TRUE(absl::StartsWith(answer, "= UNAVAILABLE")) << answer;
    absl::SleepFor(absl::Seconds(1));  // how often an operator would try
  }
  std::printf("  %s\n", members_[1]->AwaitLine("Too many open files").c_str());
  // Its own calls fail with what to do.
  const std::string own = Do(*members_[1], "call worker0 4096");
  EXPECT_TRUE(absl::StartsWith(own, "= RESOURCE_EXHAUSTED")) << own;
  EXPECT_TRUE(absl::StrContains(own, "raise the limit (`ulimit -n`; docs/operating.md)")) << own;
  EXPECT_FALSE(absl::StrContains(members_[0]->output(), "* lost")) << members_[0]->output();
}

// core/worker/rendezvous.cc reserves ten for each peer.
TEST_F(HostsTest, APeerTakesFewDescriptors) {
  for (const bool is_near : {false, true}) {
    members_.clear();
    for (int rank : {0, 1}) members_.push_back(Member(is_near ? 0 : rank, Place(rank)));
    for (const auto& member : members_) ExpectJoined(*member);
    const auto count = [&](int rank) {
      const std::string answer = Do(*members_[rank], "descriptors");
      return std::atoi(answer.c_str() + std::strlen("= done: "));
    };
    const int before[] = {count(0), count(1)};
    for (const int64_t bytes : {4, 4 << 20}) {
      ExpectDone(*members_[0], absl::StrCat("call worker1 ", bytes));
      for (int rank : {0, 1}) {
        const int more = count(rank) - before[rank];
        std::printf("  rank %d, on %s, with calls of %d bytes: %d for its peer\n", rank,
                    is_near ? "one host" : "two", static_cast<int>(bytes), more);
        EXPECT_LE(more, 10);
      }
    }
    LeaveAll();
  }
}

TEST_F(HostsTest, WhoListensOnLoopbackAloneIsToldSo) {
  for (int rank : {0, 1}) {
    Variables variables = Place(rank);
    variables["DISTGRAD_HOST"] = "127.0.0.1";
    members_.push_back(Member(rank, variables));
  }
  for (const auto& member : members_) ExpectJoined(*member);
  const std::string answer = Do(*members_[0], "call worker1 4096");
  EXPECT_TRUE(absl::StartsWith(answer, "= UNAVAILABLE")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "worker1")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "DISTGRAD_HOST")) << answer;
  // They are not asked to leave: worker 0 takes worker 1 for lost, and whether that one denies it
  // before worker 0 gives up depends on who comes first.
}

TEST_F(HostsTest, WhoDoesNotComeIsNamed) {
  const auto waits = Member(0, Place(0), {"--join_timeout=3"});
  const std::string named = Answer(*waits);
  EXPECT_TRUE(absl::StartsWith(named, "= DEADLINE_EXCEEDED")) << named;
  EXPECT_TRUE(absl::StrContains(named, "worker 1 of 2 did not join within")) << named;
  EXPECT_EQ(waits->Wait(), 1);
  // Now nobody listens there.
  const auto asks = Member(1, Place(1), {"--join_timeout=3"});
  const std::string answer = Answer(*asks);
  EXPECT_TRUE(absl::StartsWith(answer, "= DEADLINE_EXCEEDED")) << answer;
  EXPECT_TRUE(
      absl::StrContains(answer, absl::StrCat("no store answered at ", Hosts::Ipv4(0),
                                             ":29500 in time: connect: Connection refused")))
      << answer;
  EXPECT_EQ(asks->Wait(), 1);
  // As where a firewall drops what comes: nobody has that address, and nobody says so.
  const std::string silent = "10.77.0.50";
  const auto knocks = hosts_->Start(
      1,
      {"bash", "-c",
       absl::StrCat("ip neigh add ", silent, " lladdr 02:00:00:00:00:99 dev eth0 nud permanent && ",
                    "exec ", kMember, " --join_timeout=3")},
      Place(1, 2, silent));
  const std::string silence = Answer(*knocks);
  EXPECT_TRUE(absl::StrContains(
      silence, absl::StrCat("no store answered at ", silent, ":29500 in time: no answer")))
      << silence;
  EXPECT_EQ(knocks->Wait(), 1);
}

TEST_F(HostsTest, AWrongKeyAtAFileStoreIsNamedOnBothSides) {
  // By a file alone nobody knows where the others are.
  const std::string url = absl::StrCat("file://", testing::TempDir(), "/a_wrong_key");
  for (int rank : {0, 1}) {
    Variables variables = Place(rank);
    variables["DISTGRAD_RENDEZVOUS"] = url;
    if (rank == 1) variables["DISTGRAD_KEY"] = "a secret of another job";
    members_.push_back(Member(rank, variables, {"--join_timeout=20"}));
  }
  for (const auto& member : members_) {
    const std::string answer = Answer(*member);
    EXPECT_TRUE(absl::StartsWith(answer, "= UNAUTHENTICATED")) << answer;
    EXPECT_TRUE(absl::StrContains(answer, "was not written by a worker with our cluster key"))
        << answer;
    EXPECT_EQ(member->Wait(), 1);
  }
}

TEST_F(HostsTest, AWrongKeyIsNamedOnBothSides) {
  members_.push_back(Member(0, Place(0)));
  AwaitStore(1, Hosts::Ipv4(0));
  const std::pair<std::string, std::string> keys[] = {
      {"", "the other end has no cluster key, this one has"},
      {"a secret of another job", "has another cluster key"}};
  for (const auto& [key, why] : keys) {
    Variables variables = Place(1);
    variables["DISTGRAD_KEY"] = key;
    if (key.empty()) variables.erase("DISTGRAD_KEY");
    const auto rank1 = Member(1, variables, {"--join_timeout=6"});
    const std::string answer = Answer(*rank1);
    EXPECT_TRUE(absl::StrContains(answer, "cluster key")) << answer;
    EXPECT_EQ(rank1->Wait(), 1);
    const std::string refused =
        members_[0]->AwaitLine("refused a connection to the job's store from");
    std::printf("  %s\n", refused.c_str());
    EXPECT_TRUE(absl::StrContains(refused, Hosts::Ipv4(1))) << refused;
    EXPECT_TRUE(absl::StrContains(refused, why)) << refused;
  }
  // Who has the key joins all the same.
  members_.push_back(Member(1, Place(1)));
  for (const auto& member : members_) ExpectJoined(*member);
  LeaveAll();
}

// ------------------------------------------------------------------------------------ Two users

class TwoUsersTest : public HostsTest {
 protected:
  static constexpr int kUser = 1001;  // and the next one
  std::unique_ptr<HostProcess> MemberOf(int user, int rank, const std::string& key,
                                        const std::string& timeout = "--join_timeout=300") {
    Variables variables = Place(rank, 2, "127.0.0.1");
    variables.erase("DISTGRAD_KEY");
    if (!key.empty()) variables["DISTGRAD_KEY"] = key;
    variables["DISTGRAD_HOST"] = "127.0.0.1";
    return Member(0, variables, {absl::StrCat("--user=", user), timeout});
  }
  void SetUp() override {
    HostsTest::SetUp();
    if (hosts_ == nullptr) return;
    // Each line has the first of some users here, the first of them outside, and how many there
    // are.
    int64_t first = 0, outside = 0, count = 0;
    bool has_both = false;
    for (std::ifstream map("/proc/self/uid_map"); map >> first >> outside >> count;) {
      has_both = has_both || (first <= kUser && first + count > kUser + 1);
    }
    ASSERT_GT(count, 0) << "/proc/self/uid_map has nothing";
    if (!has_both) GTEST_SKIP() << "there is one user only";
  }
};

TEST_F(TwoUsersTest, WithTheKeyTheyWorkTogether) {
  for (int rank : {0, 1}) members_.push_back(MemberOf(kUser + rank, rank, kKey));
  for (const auto& member : members_) ExpectJoined(*member);
  // Also what is large, which between processes of one user is copied out of the other's memory.
  ExpectDone(*members_[0], absl::StrCat("train 2 ", 4 << 20));
  LeaveAll();
}

TEST_F(TwoUsersTest, WithoutItNobodyGetsIn) {
  const auto rank0 = MemberOf(kUser, 0, kKey);
  AwaitStore(0, "127.0.0.1");
  for (const std::string& key : {std::string("a secret of another job"), std::string()}) {
    const auto other = MemberOf(kUser + 1, 1, key, "--join_timeout=6");
    const std::string answer = Answer(*other);
    EXPECT_TRUE(absl::StrContains(answer, "cluster key")) << answer;
    EXPECT_EQ(other->Wait(), 1);
  }
  // The place is still free for who has the key.
  members_.push_back(MemberOf(kUser + 1, 1, kKey));
  ExpectJoined(*rank0);
  ExpectJoined(*members_[0]);
  ExpectDone(*rank0, "train 1 4096");
  rank0->Say("leave");
  LeaveAll();
  EXPECT_EQ(rank0->Wait(), 0) << rank0->output();
}

// --------------------------------------------------------------------------------- The examples

// 100 images for each of the two parts of the data set.
constexpr char kMakeData[] = R"(
mkdir -p "$1"
for part in train t10k; do
  { printf '\x00\x00\x08\x03\x00\x00\x00\x64\x00\x00\x00\x1c\x00\x00\x00\x1c'
    head -c $((100 * 28 * 28)) /dev/urandom; } | gzip >"$1/$part-images-idx3-ubyte.gz"
  { printf '\x00\x00\x08\x01\x00\x00\x00\x64'
    head -c 100 /dev/zero; } | gzip >"$1/$part-labels-idx1-ubyte.gz"
done)";

class ExamplesTest : public HostsTest {
 protected:
  void SetUp() override {
    HostsTest::SetUp();
    if (hosts_ == nullptr) return;
    const auto made = hosts_->Start(0, {"bash", "-c", kMakeData, "-", data_});
    ASSERT_EQ(made->Wait(), 0) << made->output();
  }
  void StartJob(const std::string& program, int epochs, const Variables& more = {}) {
    for (int rank : {0, 1}) {
      Variables variables = Place(rank);
      for (const auto& [name, value] : more) variables[name] = value;
      members_.push_back(
          hosts_->Start(rank,
                        {program, "--data=" + data_, absl::StrCat("--epochs=", epochs),
                         "--batch=25", absl::StrCat("--output=", testing::TempDir(), "/out", rank)},
                        variables));
    }
  }
  void ExpectTrained() {
    for (const auto& member : members_) EXPECT_EQ(member->Wait(), 0) << member->output();
    std::printf("  %s\n", members_[0]->AwaitLine(" % after ").c_str());
  }

  const std::string data_ = testing::TempDir() + "/data";
};

TEST_F(ExamplesTest, TheMainJobRunsAcrossTwoHostsAndSurvivesACut) {
  StartJob("examples/fashion_mnist", is_long ? 100 : 20);
  members_[0]->AwaitLine("epoch");
  Cut(1, absl::Seconds(is_long ? 10 : 5));
  ExpectTrained();
}

TEST_F(ExamplesTest, DataParallelRunsAcrossTwoHosts) {
  // Gloo's addresses are found as those of workers are.
  StartJob("examples/replicas", 2, {{"DISTGRAD_HOST", ""}});
  ExpectTrained();
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  return distgrad::RunInNamespaces([&] {
    testing::InitGoogleTest(&argc, argv);
    distgrad::is_long = argc > 1 && std::string(argv[1]) == "--long";
    return RUN_ALL_TESTS();
  });
}
