// Large packets have a connection of their own: what passes them, and what must not.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/fake_clock.h"
#include "core/base/future.h"
#include "core/base/wire.h"
#include "core/rpc/agent_testing.h"
#include "core/rpc/frame.h"
#include "core/rpc/link.h"
#include "core/transport/inproc/inproc_transport.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

// Does with each packet what a test says, and counts hellos by who opens. Thread-safe.
class Faults : public FaultInjector {
 public:
  using Rule = std::function<Action(FrameKind kind, uint64_t bytes)>;

  void Set(Rule rule) {
    absl::MutexLock lock(&mu_);
    rule_ = std::move(rule);
  }
  std::vector<std::string> openers() const {
    absl::MutexLock lock(&mu_);
    return openers_;
  }
  Action OnSend(const std::string& from, const std::string&, Packet& packet) override {
    WireReader reader(packet.bytes);
    const FrameKind kind = ReadFrame(reader)->kind;
    absl::MutexLock lock(&mu_);
    if (kind == FrameKind::kHello) openers_.push_back(from);
    return rule_ ? rule_(kind, packet.size()) : Action::kDeliver;
  }

  static bool IsLarge(uint64_t bytes) { return bytes > Link::kBulkBytes; }
  static Action HoldLarge(FrameKind, uint64_t bytes) {
    return IsLarge(bytes) ? Action::kHold : Action::kDeliver;
  }

 private:
  mutable absl::Mutex mu_;
  Rule rule_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> openers_ ABSL_GUARDED_BY(mu_);
};

class AgentBulkTest : public testing::Test {
 protected:
  AgentBulkTest() {
    for (WorkerRank rank = 0; rank < 2; ++rank) {
      agents_.push_back(std::make_unique<TestAgent>(&clock_, network_, rank, /*incarnation=*/1));
    }
    StartAll(agents_);
  }
  TestAgent& a() { return *agents_[0]; }
  TestAgent& b() { return *agents_[1]; }
  void Release() {
    faults_->Set(nullptr);
    network_->ReleaseHeld();
  }
  void ExpectEcho(TestAgent& from, WorkerRank to, const std::string& body) {
    EXPECT_EQ(*from.Call(to, "echo", body).Wait(), body);
  }

  const std::string large_ = std::string(Link::kBulkBytes, 'x');  // with its header it is above

  FakeClock clock_;
  const std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>(faults_);
  std::vector<std::unique_ptr<TestAgent>> agents_;
};

// ------------------------------------------------------------------------------ What passes

TEST_F(AgentBulkTest, ASmallCallPassesALargeRequest) {
  faults_->Set(Faults::HoldLarge);
  const auto large = a().Call(1, "echo", large_);
  ExpectEcho(a(), 1, "small");
  EXPECT_FALSE(large.Done());
  Release();
  EXPECT_EQ(*large.Wait(), large_);
}

TEST_F(AgentBulkTest, ASmallReplyPassesALargeOne) {
  const auto large = a().Call(1, "keep");
  IncomingCall kept = b().service.AwaitKept();
  faults_->Set(Faults::HoldLarge);
  Packet reply = kept.NewReply();
  reply.segments.push_back(AllocateSegment(large_.size()));
  kept.Reply(std::move(reply));
  ExpectEcho(a(), 1, "small");
  EXPECT_FALSE(large.Done());
  Release();
  EXPECT_TRUE(large.Wait().ok());
}

TEST_F(AgentBulkTest, ANoticePassesToo) {
  faults_->Set(Faults::HoldLarge);
  a().Notify(1, large_);
  a().Notify(1, "small");
  EXPECT_EQ(b().service.AwaitNotices(1), std::vector<std::string>{"0:small"});
  Release();
  EXPECT_EQ(b().service.AwaitNotices(2)[1], "0:" + large_);
}

// ------------------------------------------------------------------------- What must not

TEST_F(AgentBulkTest, LargeOnesKeepTheirOrder) {
  for (int i = 0; i < 50; ++i) a().Notify(1, absl::StrCat(i, large_));
  const std::vector<std::string> notices = b().service.AwaitNotices(50);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(notices[i], absl::StrCat("0:", i, large_));
}

TEST_F(AgentBulkTest, ACancelOfALargeCallComesBehindIt) {
  faults_->Set(Faults::HoldLarge);
  const auto cancelled = a().Call(1, "keep", large_);
  const auto late = a().Call(1, "keep", large_, {.deadline = clock_.Now() + absl::Seconds(1)});
  ExpectEcho(a(), 1, "the way is free");
  cancelled.Cancel();
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(cancelled.Wait().status().code(), StatusCode::kCancelled);
  EXPECT_EQ(late.Wait().status().code(), StatusCode::kDeadlineExceeded);
  Release();
  const IncomingCall first = b().service.AwaitKept(), second = b().service.AwaitKept();
  ExpectEcho(a(), 1, large_);  // what went before it has arrived
  EXPECT_TRUE(first.cancellation()->cancelled());
  EXPECT_TRUE(second.cancellation()->cancelled());
}

// ----------------------------------------------------------------------------------- Opening

TEST_F(AgentBulkTest, ItIsOpenedWhenItIsFirstNeeded) {
  ExpectEcho(a(), 1, std::string(1000, 'x'));
  EXPECT_EQ(faults_->openers().size(), 1u);
  ExpectEcho(a(), 1, large_);
  ExpectEcho(a(), 1, large_);
  EXPECT_EQ(faults_->openers().size(), 2u);
}

// Who accepted a connection may have no way to who opened it.
TEST_F(AgentBulkTest, WhoOpenedTheLinkOpensIt) {
  ExpectEcho(a(), 1, "small");
  ExpectEcho(b(), 0, large_);
  EXPECT_EQ(faults_->openers(), std::vector<std::string>(2, a().info.address));
}

TEST_F(AgentBulkTest, BothMayNeedItFirstAtTheSameTime) {
  ExpectEcho(a(), 1, "small");
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) ExpectEcho(b(), 0, absl::StrCat(i, large_));
  });
  for (int i = 0; i < 20; ++i) ExpectEcho(a(), 1, absl::StrCat(i, large_));
  other.join();
  EXPECT_EQ(faults_->openers(), std::vector<std::string>(2, a().info.address));
}

TEST_F(AgentBulkTest, ItNeedsALinkOfItsOwnPeer) {
  struct UnknownPeer : Receiver {
    Promise<std::string> refused;
    void OnPacket(Packet packet) override {
      WireReader reader(packet.bytes);
      refused.Set(std::string(ReadFrame(reader)->status.message()));
    }
    void OnClosed(absl::Status) override {}
  };
  // Of b's links the first is its own loopback, the second a's, and the third the first unknown
  // peer's.
  ExpectEcho(a(), 1, "small");
  for (const uint64_t link : {uint64_t{4711}, uint64_t{3}}) {
    auto transport = NewInprocTransport(network_);
    auto unknown_peer = std::make_shared<UnknownPeer>();
    const auto refused = unknown_peer->refused.future();
    auto connection = transport->Connect(b().info.address, unknown_peer);
    ASSERT_TRUE(connection.ok());
    std::string hello;
    AppendHello({.from = 0,
                 .from_incarnation = a().info.incarnation,
                 .to = 1,
                 .to_incarnation = b().info.incarnation,
                 .link = link},
                &hello);
    (*connection)->Send(Packet{hello, {}}, nullptr);
    EXPECT_EQ(*refused.Wait(), "the connection that it belongs to is not there");
  }
  ExpectEcho(a(), 1, large_);
  EXPECT_FALSE(a().service.HasLost(1));
}

// ------------------------------------------------------------------------------------ The end

TEST_F(AgentBulkTest, EitherLinksEndIsTheOthers) {
  for (const bool large_is_cut : {true, false}) {
    ExpectEcho(a(), 1, large_);
    const auto small = a().Call(1, "keep"), large = a().Call(1, "keep", large_);
    const IncomingCall first = b().service.AwaitKept(), second = b().service.AwaitKept();
    faults_->Set([&](FrameKind, uint64_t bytes) {
      return Faults::IsLarge(bytes) == large_is_cut ? FaultInjector::Action::kCut
                                                    : FaultInjector::Action::kDeliver;
    });
    const auto cut = a().Call(1, "echo", large_is_cut ? large_ : "small");
    for (const auto& call : {cut, small, large}) {
      const absl::Status status = call.Wait().status();
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "worker 'b' (1)")) << status;
    }
    faults_->Set(nullptr);
    a().service.AwaitLost(1).IgnoreError();
    b().service.AwaitLost(0).IgnoreError();
    ExpectEcho(a(), 1, "again");
  }
  ExpectEcho(a(), 1, large_);
}

TEST_F(AgentBulkTest, WhatWaitsForItFailsWithItsLink) {
  faults_->Set([](FrameKind kind, uint64_t) {
    return kind == FrameKind::kBulk ? FaultInjector::Action::kDrop
                                    : FaultInjector::Action::kDeliver;
  });
  const auto large = a().Call(1, "echo", large_);
  ExpectEcho(a(), 1, "small");
  b().agent->Close();
  EXPECT_EQ(large.Wait().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(a().agent->Queued()[0].second, 0u);
}

TEST_F(AgentBulkTest, OneThatCannotBeOpenedIsTheEndOfItsLink) {
  ExpectEcho(a(), 1, "small");
  faults_->Set([](FrameKind kind, uint64_t) {
    return kind == FrameKind::kHello ? FaultInjector::Action::kCut
                                     : FaultInjector::Action::kDeliver;
  });
  EXPECT_EQ(a().Call(1, "echo", large_).Wait().status().code(), StatusCode::kUnavailable);
  faults_->Set(nullptr);
  ExpectEcho(a(), 1, large_);
}

}  // namespace
}  // namespace distgrad
