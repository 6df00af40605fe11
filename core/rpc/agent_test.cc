// Calls, errors and notices between three agents, lost peers, and connections of others.
#include "core/rpc/agent.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/fake_clock.h"
#include "core/base/future.h"
#include "core/base/wire.h"
#include "core/rpc/agent_testing.h"
#include "core/rpc/frame.h"
#include "core/transport/inproc/inproc_transport.h"

namespace distgrad {
namespace {

class AgentTest : public ::testing::Test {
 protected:
  AgentTest() {
    for (WorkerRank rank = 0; rank < 3; ++rank) {
      agents_.push_back(std::make_unique<TestAgent>(&clock_, network_, rank, /*incarnation=*/2));
    }
    StartAll(agents_);
  }
  TestAgent& a() { return *agents_[0]; }
  TestAgent& b() { return *agents_[1]; }
  TestAgent& c() { return *agents_[2]; }

  FakeClock clock_;
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::vector<std::unique_ptr<TestAgent>> agents_;
};

TEST_F(AgentTest, CallsAreAnsweredByPeersAndByOneself) {
  EXPECT_EQ(*a().Call(1, "echo", "hello").Wait(), "hello");
  EXPECT_EQ(*b().Call(0, "echo", "back").Wait(), "back");
  EXPECT_EQ(*a().Call(0, "echo", "self").Wait(), "self");
}

TEST_F(AgentTest, ErrorsKeepTheirCodeAndNameWorkerAndFunction) {
  const absl::Status status = a().Call(1, "fail", "").Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "call of 'fail' on worker 'b' (1): as was asked");
}

TEST_F(AgentTest, ACallThatIsDroppedUnansweredTellsItsCaller) {
  EXPECT_EQ(a().Call(1, "drop", "").Wait().status().code(), absl::StatusCode::kInternal);
}

TEST_F(AgentTest, OneStartsOnce) {
  const absl::Status again = a().agent->Start(a().info, {a().info});
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition) << again;
  EXPECT_EQ(*a().agent->FindWorker("c"), 2) << "it knows whom it knew";
}

TEST_F(AgentTest, UnknownWorkers) {
  EXPECT_EQ(a().Call(9, "echo", "").Wait().status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*a().agent->FindWorker("c"), 2);
  const absl::Status status = a().agent->FindWorker("z").status();
  EXPECT_EQ(status.message(), "there is no worker 'z' in this job; there are: a, b, c");
  // Of these the low 16 bits are the rank of one.
  for (const int rank : {-65535, 65537}) {
    EXPECT_EQ(a().agent->FindWorker(rank).status().code(), absl::StatusCode::kNotFound) << rank;
  }
}

TEST_F(AgentTest, ADeadlineEndsTheCallAndTheReplyIsLate) {
  auto soon = a().Call(1, "keep", "", {.deadline = clock_.Now() + absl::Seconds(1)});
  auto later = a().Call(1, "keep", "", {.deadline = clock_.Now() + absl::Seconds(3)});
  IncomingCall first = b().service.AwaitKept(), second = b().service.AwaitKept();
  EXPECT_EQ(first.deadline(), clock_.Now() + absl::Seconds(1));
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(soon.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(later.Done());
  Packet reply = first.NewReply();
  reply.bytes += "too late";
  first.Reply(std::move(reply));
  EXPECT_EQ(a().service.AwaitLateReplies(1).front(), "too late");
  second.Reply(second.NewReply());
  EXPECT_TRUE(later.Wait().ok());
  EXPECT_EQ(a().Call(1, "echo", "", {.deadline = clock_.Now()}).Wait().status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(AgentTest, NoticesArriveInOrder) {
  for (int i = 0; i < 100; ++i) c().Notify(1, absl::StrCat(i));
  const std::vector<std::string> notices = b().service.AwaitNotices(100);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(notices[i], absl::StrCat("2:", i));
}

TEST_F(AgentTest, ALostPeerFailsItsCallsAndIsReported) {
  auto lost = a().Call(1, "keep", "");
  auto other = a().Call(2, "keep", "");
  IncomingCall kept = b().service.AwaitKept();
  b().agent->Close();
  const absl::Status status = lost.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find("'b' (1)"), std::string::npos) << status;
  EXPECT_FALSE(a().service.AwaitLost(1).ok());
  EXPECT_FALSE(other.Done());
}

TEST_F(AgentTest, CloseFailsWhatIsInFlight) {
  auto call = a().Call(1, "keep", "");
  IncomingCall kept = b().service.AwaitKept();
  a().agent->Close();
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(a().Call(1, "echo", "").Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(AgentTest, BothMayCallFirstAtTheSameTime) {
  std::vector<std::thread> threads;
  for (int from = 0; from < 3; ++from) {
    threads.emplace_back([this, from] {
      for (int i = 0; i < 200; ++i) {
        const auto to = static_cast<WorkerRank>(i % 3);
        ASSERT_EQ(*agents_[from]->Call(to, "echo", absl::StrCat(i)).Wait(), absl::StrCat(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A connection that sends no hello first, or is not a member's, is refused; others go on.
TEST_F(AgentTest, ConnectionsOfNonMembersAreRefused) {
  // Hears of either, and leaves it to the agent to close the connection.
  struct UnknownPeer : Receiver {
    Promise<Unit> refused;
    void OnPacket(Packet packet) override {
      WireReader reader(packet.bytes);
      EXPECT_EQ(ReadFrame(reader)->kind, FrameKind::kRefused);
      refused.Set(Unit());
    }
    void OnClosed(absl::Status) override { refused.Set(Unit()); }
  };
  std::string hello_of_nobody, hello_of_an_earlier_incarnation;
  AppendHello({.from = 7, .from_incarnation = 1, .to = 1, .to_incarnation = b().info.incarnation},
              &hello_of_nobody);
  AppendHello({.from = 0,
               .from_incarnation = a().info.incarnation - 1,
               .to = 1,
               .to_incarnation = b().info.incarnation},
              &hello_of_an_earlier_incarnation);
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(),
        Agent::NewRequest("echo").packet.bytes, hello_of_nobody, hello_of_an_earlier_incarnation}) {
    auto transport = NewInprocTransport(network_);
    auto unknown_peer = std::make_shared<UnknownPeer>();
    auto refused = unknown_peer->refused.future();
    auto connection = transport->Connect(b().info.address, unknown_peer);
    ASSERT_TRUE(connection.ok());
    (*connection)->Send(Packet{bytes, {}}, nullptr);
    EXPECT_TRUE(refused.Wait().ok());
  }
  EXPECT_EQ(*a().Call(1, "echo", "still here").Wait(), "still here");
}

}  // namespace
}  // namespace distgrad
