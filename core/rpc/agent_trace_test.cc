// What an agent records of calls while a trace runs.
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "core/base/fake_clock.h"
#include "core/base/trace.h"
#include "core/rpc/agent.h"
#include "core/rpc/agent_testing.h"
#include "core/transport/inproc/inproc_transport.h"

namespace distgrad {
namespace {

using Kind = TraceSpan::Kind;

class AgentTraceTest : public ::testing::Test {
 protected:
  void Start(const Limits& limits = {}) {
    for (WorkerRank rank = 0; rank < 2; ++rank) {
      agents_.push_back(
          std::make_unique<TestAgent>(&clock_, network_, rank, /*incarnation=*/rank + 1,
                                      AgentOptions{.trace = traces_[rank], .limits = limits}));
    }
    StartAll(agents_);
  }
  TestAgent& a() { return *agents_[0]; }
  TestAgent& b() { return *agents_[1]; }
  void StartTraces() {
    for (const auto& trace : traces_) ASSERT_TRUE(trace->Start({}, clock_.Now()).ok());
  }
  std::deque<TraceSpan> SpansOf(int i) { return traces_[i]->Stop(clock_.Now())->spans; }
  absl::Time Pass(int us) {
    clock_.Advance(absl::Microseconds(us));
    return clock_.Now();
  }

  FakeClock clock_;
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  const std::vector<std::shared_ptr<TraceRecorder>> traces_ = {std::make_shared<TraceRecorder>(),
                                                               std::make_shared<TraceRecorder>()};
  std::vector<std::unique_ptr<TestAgent>> agents_;
};

TEST_F(AgentTraceTest, ACallAtBothEnds) {
  Start();
  // One more before, so that the numbers of both sides' calls differ.
  ASSERT_TRUE(a().Call(1, "echo", "x").Wait().ok());
  StartTraces();
  const absl::Time begin = Pass(1);
  const Future<std::string> made = a().Call(1, "keep", "hello", {.context = 77});
  IncomingCall kept = b().service.AwaitKept();
  kept.SetContext(77);
  const absl::Time work = Pass(10);
  kept.Begin();
  const absl::Time end = Pass(100);
  Packet reply = kept.NewReply();
  reply.bytes += "you";
  const uint64_t reply_size = reply.size();
  kept.Reply(std::move(reply));
  ASSERT_TRUE(made.Wait().ok());

  const std::deque<TraceSpan> mine = SpansOf(0), theirs = SpansOf(1);
  ASSERT_EQ(mine.size(), 1u);
  EXPECT_EQ(mine[0].kind, Kind::kCallMade);
  EXPECT_EQ(mine[0].peer, 1);
  EXPECT_EQ(mine[0].function, "keep");
  EXPECT_EQ(mine[0].call, 2u);
  EXPECT_EQ(mine[0].context, 77u);
  EXPECT_EQ(mine[0].bytes_received, reply_size);
  EXPECT_EQ(mine[0].begin, begin);
  EXPECT_EQ(mine[0].end, end);
  EXPECT_TRUE(mine[0].status.ok());

  ASSERT_EQ(theirs.size(), 1u);
  EXPECT_EQ(theirs[0].kind, Kind::kCallServed);
  EXPECT_EQ(theirs[0].peer, 0);
  EXPECT_EQ(theirs[0].function, "keep");
  EXPECT_EQ(theirs[0].call, 2u);
  EXPECT_EQ(theirs[0].incarnation, a().info.incarnation);
  EXPECT_EQ(theirs[0].context, 77u);
  EXPECT_EQ(theirs[0].bytes_sent, reply_size);
  EXPECT_EQ(theirs[0].bytes_received, mine[0].bytes_sent);
  EXPECT_EQ(theirs[0].begin, begin);
  EXPECT_EQ(theirs[0].work, work);
  EXPECT_EQ(theirs[0].end, end);
}

TEST_F(AgentTraceTest, CallsThatFail) {
  Start({.message_bytes = 1000});
  StartTraces();
  // At the other end, by the caller, and before they left.
  EXPECT_FALSE(a().Call(1, "fail").Wait().ok());
  const Future<std::string> cancelled = a().Call(1, "keep");
  IncomingCall kept = b().service.AwaitKept();
  cancelled.Cancel();
  EXPECT_FALSE(a().Call(1, "echo", std::string(1000, 'x')).Wait().ok());
  kept.Fail(absl::AbortedError("nobody listens"));

  const std::deque<TraceSpan> mine = SpansOf(0), theirs = SpansOf(1);
  ASSERT_EQ(mine.size(), 3u);
  EXPECT_TRUE(absl::IsDataLoss(mine[0].status)) << mine[0].status;
  EXPECT_TRUE(absl::StrContains(mine[0].status.message(), "call of 'fail' on worker 'b' (1)"));
  EXPECT_TRUE(absl::IsCancelled(mine[1].status)) << mine[1].status;
  EXPECT_TRUE(absl::IsResourceExhausted(mine[2].status)) << mine[2].status;
  EXPECT_EQ(mine[2].call, 0u);
  ASSERT_EQ(theirs.size(), 2u);
  EXPECT_TRUE(absl::IsDataLoss(theirs[0].status)) << theirs[0].status;
  EXPECT_EQ(theirs[1].status, absl::AbortedError("nobody listens"));
  EXPECT_EQ(theirs[1].work, absl::InfiniteFuture()) << "its handler never began";
}

// A call that was in flight when the trace began, at either end, is not in it; nor what is still
// in flight when it stops.
TEST_F(AgentTraceTest, OnlyWhatBeginsAndEndsInIt) {
  Start();
  const Future<std::string> before = a().Call(1, "keep");
  IncomingCall kept = b().service.AwaitKept();
  Pass(1);
  StartTraces();
  const Future<std::string> behind = a().Call(1, "keep");
  IncomingCall late = b().service.AwaitKept();
  kept.Reply(kept.NewReply());
  ASSERT_TRUE(before.Wait().ok());
  EXPECT_TRUE(SpansOf(0).empty());
  EXPECT_TRUE(SpansOf(1).empty());
  // Not in a later one either, however soon that begins.
  Pass(1);
  StartTraces();
  late.Reply(late.NewReply());
  ASSERT_TRUE(behind.Wait().ok());
  EXPECT_TRUE(SpansOf(0).empty());
  EXPECT_TRUE(SpansOf(1).empty());
}

TEST_F(AgentTraceTest, ACallToOneself) {
  Start();
  StartTraces();
  ASSERT_TRUE(a().Call(0, "echo", "x").Wait().ok());
  const std::deque<TraceSpan> spans = SpansOf(0);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].kind, Kind::kCallServed);
  EXPECT_EQ(spans[1].kind, Kind::kCallMade);
  EXPECT_EQ(spans[0].call, spans[1].call);
  EXPECT_EQ(spans[0].incarnation, a().info.incarnation);
}

// What answers after its agent has closed, and the trace's owner is gone.
TEST_F(AgentTraceTest, AnAnswerBehindTheEnd) {
  Start();
  StartTraces();
  const Future<std::string> made = a().Call(1, "keep");
  IncomingCall kept = b().service.AwaitKept();
  agents_.clear();
  EXPECT_FALSE(made.Wait().ok());
  kept.Fail(absl::AbortedError("too late"));
  EXPECT_EQ(SpansOf(0).size(), 1u);
}

}  // namespace
}  // namespace distgrad
