// Calls that are taken back, refused or kept waiting, and what is counted of them.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
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
#include "core/rpc/agent.h"
#include "core/rpc/inproc/inproc_transport.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

// Keeps the calls that come, and answers those of "echo". Thread-safe.
class KeepingService : public AgentService {
 public:
  void OnCall(IncomingCall call) override {
    if (!call.refusal().ok()) {
      ++refused;
      return call.Fail(call.refusal());
    }
    if (call.function() == "echo") {
      Packet reply = call.NewReply();
      reply.bytes += std::string(call.body().bytes());
      return call.Reply(std::move(reply));
    }
    absl::MutexLock lock(&mu_);
    kept_.push_back(std::move(call));
  }
  void OnNotice(WorkerId, Body) override { ++notices; }
  void OnLateReply(WorkerId, Body) override { ++late; }
  void OnPeerLost(WorkerId, const absl::Status&) override {}

  IncomingCall WaitForKept() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](std::deque<IncomingCall>* kept) { return !kept->empty(); }, &kept_));
    IncomingCall call = std::move(kept_.front());
    kept_.pop_front();
    return call;
  }

  std::atomic<int> refused{0}, notices{0}, late{0};

 private:
  absl::Mutex mu_;
  std::deque<IncomingCall> kept_ ABSL_GUARDED_BY(mu_);
};

// Does to all packets of one agent what it is told. Thread-safe.
class Fault : public FaultInjector {
 public:
  Action OnSend(const std::string& from, const std::string&, Packet&) override {
    return from == of ? action.load() : Action::kDeliver;
  }
  std::string of;  // set before any is sent
  std::atomic<Action> action{Action::kDeliver};
};

class AgentCallsTest : public ::testing::Test {
 protected:
  void Start(Limits limits = {}) {
    for (int i = 0; i < 2; ++i) {
      transports_.push_back(NewInprocTransport(network_));
      agents_.push_back(std::make_unique<Agent>(&clock_, transports_[i].get(), &services_[i],
                                                AgentOptions{.limits = limits}));
      WorkerInfo info;
      info.id = static_cast<WorkerId>(i);
      info.name = i == 0 ? "a" : "b";
      info.address = *agents_[i]->Listen();
      info.incarnation = 100 + i;
      infos_.push_back(info);
    }
    faults_->of = infos_[0].address;
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(agents_[i]->Start(infos_[i], infos_).ok());
  }
  void TearDown() override {
    for (auto& agent : agents_) agent->Close();
    transports_.clear();
  }

  static Packet Request(const std::string& function, const std::string& body) {
    Packet request = Agent::NewRequest(function);
    request.bytes += body;
    return request;
  }
  struct Made {
    uint64_t call;
    Future<std::string> reply;
  };
  Made Call(int from, WorkerId to, const std::string& function, const std::string& body,
            const CallTerms& terms = {}) {
    Promise<std::string> promise;
    Future<std::string> future = promise.future();
    const uint64_t call =
        agents_[from]->Call(to, Request(function, body), terms,
                            [promise = std::move(promise)](absl::StatusOr<Body> reply) mutable {
                              if (reply.ok()) {
                                promise.Set(std::string(reply->bytes()));
                              } else {
                                promise.Set(reply.status());
                              }
                            });
    future.CancelBy(agents_[from]->canceller(), call);
    return {call, future};
  }
  static StatusCode CodeOf(const Made& made) { return made.reply.Wait().status().code(); }

  FakeClock clock_;
  const std::shared_ptr<Fault> faults_ = std::make_shared<Fault>();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>(faults_);
  KeepingService services_[2];
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<Agent>> agents_;
  std::vector<WorkerInfo> infos_;
};

// Waits until the other end has had all that was sent to it.
#define ECHO() EXPECT_EQ(*Call(0, 1, "echo", "x").reply.Wait(), "x")

TEST_F(AgentCallsTest, ACancelEndsTheCallAtOnceAndReachesTheHandler) {
  Start();
  const Made made = Call(0, 1, "keep", "");
  IncomingCall kept = services_[1].WaitForKept();
  Promise<Unit> told;
  Future<Unit> heard = told.future();
  kept.cancellation()->OnCancel([&] { told.Set(Unit()); });
  EXPECT_FALSE(kept.cancellation()->cancelled());
  made.reply.Cancel();
  ASSERT_TRUE(made.reply.Done()) << "with no word from the other end";
  EXPECT_EQ(
      made.reply.Wait().status(),
      absl::CancelledError("call of 'keep' on worker 'b' (1): it was cancelled by its caller"));
  ASSERT_TRUE(heard.Wait().ok());
  EXPECT_EQ(kept.cancellation()->why().code(), StatusCode::kCancelled);
  kept.Reply(kept.NewReply());
  made.reply.Cancel();
  ASSERT_TRUE(Call(1, 0, "echo", "x").reply.Wait().ok());
  EXPECT_EQ(services_[0].late, 1);
}

TEST_F(AgentCallsTest, ADeadlineAndALostCallerReachTheHandlerToo) {
  Start();
  const Made late = Call(0, 1, "keep", "", {.deadline = clock_.Now() + absl::Seconds(1)});
  IncomingCall first = services_[1].WaitForKept();
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(CodeOf(late), StatusCode::kDeadlineExceeded);
  ECHO();
  EXPECT_TRUE(first.cancellation()->cancelled());

  const Made lost = Call(0, 1, "keep", "");
  IncomingCall second = services_[1].WaitForKept();
  Promise<Unit> told;
  Future<Unit> heard = told.future();
  second.cancellation()->OnCancel([&] { told.Set(Unit()); });
  agents_[0]->Close();
  EXPECT_TRUE(heard.Wait().ok());
}

TEST_F(AgentCallsTest, ACancelOfWhatIsOverOrWasNeverThere) {
  Start();
  const Made made = Call(0, 1, "echo", "x");
  ASSERT_TRUE(made.reply.Wait().ok());
  agents_[0]->canceller().lock()->Cancel(made.call);
  agents_[0]->canceller().lock()->Cancel(4711);
  ECHO();
}

TEST_F(AgentCallsTest, ACallOfWhichTwoPacketsComeIsServedOnce) {
  Start();
  ECHO();
  faults_->action = FaultInjector::Action::kDuplicate;
  const Made made = Call(0, 1, "keep", "");
  faults_->action = FaultInjector::Action::kDeliver;
  IncomingCall kept = services_[1].WaitForKept();
  const Made next = Call(0, 1, "keep", "next");
  IncomingCall other = services_[1].WaitForKept();
  EXPECT_EQ(other.body().bytes(), "next");
  kept.Reply(kept.NewReply());
  EXPECT_TRUE(made.reply.Wait().ok());
}

TEST_F(AgentCallsTest, CallsUnderWayAreBoundedAtTheCaller) {
  Start({.calls_per_peer = 2, .calls = 3});
  const Made first = Call(0, 1, "keep", ""), second = Call(0, 1, "keep", "");
  const absl::Status status = Call(0, 1, "keep", "").reply.Wait().status();
  EXPECT_EQ(status, absl::ResourceExhaustedError(
                        "call of 'keep' on worker 'b' (1): 2 calls to it are under way; limit "
                        "calls_per_peer is 2"));
  const Made self = Call(0, 0, "keep", "");
  EXPECT_TRUE(absl::StrContains(Call(0, 0, "keep", "").reply.Wait().status().message(),
                                "limit calls is 3"));
  IncomingCall kept = services_[1].WaitForKept();
  kept.Reply(kept.NewReply());
  ASSERT_TRUE(first.reply.Wait().ok());
  ECHO();
}

// A caller with other limits than ours, or none.
TEST_F(AgentCallsTest, CallsUnderWayAreBoundedWhereTheyAreServed) {
  Limits strict{.calls_per_peer = 2, .bytes_per_peer = 1000};
  std::atomic<size_t> total{0};
  ServedCalls served(&clock_, &strict, &total);
  ASSERT_TRUE(served.Begin(1, 900).ok());
  EXPECT_EQ(served.Begin(1, 1).status().code(), StatusCode::kAlreadyExists);
  absl::Status status = served.Begin(2, 101).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "limit bytes_per_peer is 1000")) << status;
  ASSERT_TRUE(served.Begin(2, 100).ok());
  status = served.Begin(3, 0).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "limit calls_per_peer is 2")) << status;
  served.End(1);
  served.End(2);
  EXPECT_TRUE(served.Begin(4, 5000).ok()) << "alone it may be larger";
  EXPECT_EQ(total, 1u);
  ServedCalls other(&clock_, &(strict.calls = 1, strict), &total);
  EXPECT_TRUE(absl::StrContains(other.Begin(1, 1).status().message(), "limit calls is 1"));
  served.Close(absl::UnavailableError("gone"));
  EXPECT_EQ(served.Begin(5, 0).status().code(), StatusCode::kCancelled);
  EXPECT_EQ(served.Now(), absl::InfinitePast());
}

TEST_F(AgentCallsTest, MessagesAreBounded) {
  Start({.message_bytes = 1000});
  const absl::Status status = Call(0, 1, "echo", std::string(1000, 'x')).reply.Wait().status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "limit message_bytes is 1000")) << status;
  const Made made = Call(0, 1, "keep", "");
  IncomingCall kept = services_[1].WaitForKept();
  Packet reply = kept.NewReply();
  reply.bytes.append(1000, 'x');
  kept.Reply(std::move(reply));
  EXPECT_EQ(CodeOf(made), StatusCode::kResourceExhausted);
}

// ------------------------------------------------------------------------------- A slow peer

class SlowPeerTest : public AgentCallsTest {
 protected:
  void SetUp() override {
    Start({.bytes_per_peer = 10000});
    ECHO();
    // The first reply's bytes may still be counted on b; nothing of a's is.
    faults_->action = FaultInjector::Action::kHold;
  }
  void Release() {
    faults_->action = FaultInjector::Action::kDeliver;
    network_->ReleaseHeld();
  }
};

TEST_F(SlowPeerTest, WhatWaitsToBeSentIsBounded) {
  const Made first = Call(0, 1, "echo", std::string(6000, 'x'));
  const Made second = Call(0, 1, "echo", std::string(6000, 'y'));
  ASSERT_TRUE(second.reply.Done());
  EXPECT_EQ(CodeOf(second), StatusCode::kResourceExhausted);
  EXPECT_TRUE(
      absl::StrContains(second.reply.Wait().status().message(), "limit bytes_per_peer is 10000"));
  EXPECT_GT(agents_[0]->Queued()[1].second, 6000u);
  Release();
  EXPECT_EQ(first.reply.Wait()->size(), 6000u);
  EXPECT_TRUE(Call(0, 1, "echo", std::string(6000, 'z')).reply.Wait().ok());
}

TEST_F(SlowPeerTest, WhoWaitsForRoomGoesWhenThereIsSome) {
  const Made first = Call(0, 1, "echo", std::string(6000, 'x'));
  Promise<std::string> promise;
  Future<std::string> second = promise.future();
  std::thread waits([&] {
    promise.Set(Call(0, 1, "echo", std::string(5000, 'y'), {.wait_for_room = true}).reply.Wait());
  });
  EXPECT_FALSE(second.Done());
  Release();
  EXPECT_EQ(second.Wait()->size(), 5000u);
  waits.join();
}

TEST_F(SlowPeerTest, WhoWaitsForRoomGivesUpByDeadlineCancelAndLoss) {
  const Made first = Call(0, 1, "echo", std::string(6000, 'x'));
  const auto call = [&](CallTerms terms) {
    terms.wait_for_room = true;
    return Call(0, 1, "echo", std::string(6000, 'x'), terms).reply.Wait().status();
  };
  // The wait is by the machine's clock, long after that of the test.
  absl::Status status = call({.deadline = absl::Now() - absl::Seconds(1)});
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "limit bytes_per_peer is 10000")) << status;

  Cancellation cancellation;
  std::thread cancelled([&] {
    EXPECT_EQ(call({.cancellation = &cancellation}),
              absl::CancelledError("call of 'echo' on worker 'b' (1): no longer wanted"));
  });
  cancellation.Cancel(absl::CancelledError("no longer wanted"));
  cancelled.join();

  std::thread lost([&] { EXPECT_FALSE(call({}).ok()); });
  agents_[1]->Close();
  lost.join();
}

// Replies wait for room as well; none is lost, and meanwhile their calls count as under way.
TEST_F(SlowPeerTest, RepliesGoWhenThereIsRoom) {
  Release();
  std::vector<Made> made;
  for (int i = 0; i < 3; ++i) made.push_back(Call(1, 0, "keep", ""));
  std::vector<IncomingCall> kept;
  for (int i = 0; i < 3; ++i) kept.push_back(services_[0].WaitForKept());
  faults_->action = FaultInjector::Action::kHold;
  for (IncomingCall& call : kept) {
    Packet reply = call.NewReply();
    reply.bytes.append(6000, 'x');
    call.Reply(std::move(reply));
  }
  EXPECT_LT(agents_[0]->Queued()[1].second, 10000u);
  EXPECT_FALSE(kept[0].cancellation()->cancelled());
  Release();
  for (const Made& call : made) EXPECT_EQ(call.reply.Wait()->size(), 6000u);
}

// ----------------------------------------------------------------------------------- Metrics

TEST_F(AgentCallsTest, WhatIsCounted) {
  Start();
  const Made made = Call(0, 1, "keep", std::string(100, 'x'));
  IncomingCall kept = services_[1].WaitForKept();
  clock_.Advance(absl::Seconds(2));
  kept.Begin();
  clock_.Advance(absl::Seconds(3));
  Packet reply = kept.NewReply();
  reply.bytes.append(200, 'y');
  const uint64_t request_bytes = Request("keep", std::string(100, 'x')).bytes.size(),
                 reply_bytes = reply.bytes.size();
  kept.Reply(std::move(reply));
  ASSERT_TRUE(made.reply.Wait().ok());
  const Made failed = Call(0, 1, "keep", "");
  services_[1].WaitForKept().Fail(absl::DataLossError("as was asked"));
  EXPECT_EQ(CodeOf(failed), StatusCode::kDataLoss);
  const Made open = Call(0, 1, "keep", "");
  IncomingCall still = services_[1].WaitForKept();
  agents_[0]->Notify(1, Agent::NewNotice());
  ECHO();

  const auto find = [](const std::vector<CallStats>& all, absl::string_view function) {
    for (const CallStats& stats : all) {
      if (stats.function == function) return stats;
    }
    return CallStats{};
  };
  const CallStats caller = find(agents_[0]->Stats(), "keep");
  EXPECT_EQ(caller.peer, 1);
  EXPECT_FALSE(caller.served);
  EXPECT_EQ(caller.calls, 3u);
  EXPECT_EQ(caller.errors, 1u);
  EXPECT_EQ(caller.in_flight, 1u);
  EXPECT_GE(caller.bytes_sent, request_bytes);
  EXPECT_EQ(caller.bytes_received, reply_bytes);
  EXPECT_EQ(caller.run_time, absl::Seconds(5));

  const CallStats callee = find(agents_[1]->Stats(), "keep");
  EXPECT_TRUE(callee.served);
  EXPECT_EQ(callee.calls, 3u);
  EXPECT_EQ(callee.errors, 1u);
  EXPECT_EQ(callee.in_flight, 1u);
  EXPECT_EQ(callee.bytes_received, caller.bytes_sent);
  EXPECT_GT(callee.bytes_sent, reply_bytes);
  EXPECT_EQ(callee.queue_time, absl::Seconds(2));
  EXPECT_EQ(callee.run_time, absl::Seconds(3));
  EXPECT_EQ(find(agents_[1]->Stats(), Agent::kNotices).calls, 1u);
}

}  // namespace
}  // namespace distgrad
