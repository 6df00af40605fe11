// Calls that are taken back, refused or kept waiting, and what is counted of them.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/fake_clock.h"
#include "core/base/future.h"
#include "core/base/wire.h"
#include "core/rpc/agent.h"
#include "core/rpc/agent_testing.h"
#include "core/rpc/frame.h"
#include "core/transport/inproc/inproc_transport.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

// Does to all packets of one agent what it is told. Thread-safe.
class Fault : public FaultInjector {
 public:
  Action OnSend(const std::string& from, const std::string&, Packet& packet) override {
    if (from != of) return Action::kDeliver;
    if (loses_next.exchange(false)) {
      packet = Packet();
      packet.segments_status = absl::ResourceExhaustedError("it is beyond a limit");
    }
    return action.load();
  }
  std::string of;  // set before any is sent
  std::atomic<Action> action{Action::kDeliver};
  std::atomic<bool> loses_next{false};  // so that its receiver hears no more of it than that
};

class AgentCallsTest : public ::testing::Test {
 protected:
  void Start(const Limits& limits = {}) {
    for (WorkerRank rank = 0; rank < 2; ++rank) {
      agents_.push_back(std::make_unique<TestAgent>(&clock_, network_, rank, /*incarnation=*/1,
                                                    AgentOptions{.limits = limits}));
    }
    faults_->of = a().info.address;
    StartAll(agents_);
  }
  TestAgent& a() { return *agents_[0]; }
  TestAgent& b() { return *agents_[1]; }
  static StatusCode CodeOf(const Future<std::string>& reply) {
    return reply.Wait().status().code();
  }

  FakeClock clock_;
  const std::shared_ptr<Fault> faults_ = std::make_shared<Fault>();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>(faults_);
  std::vector<std::unique_ptr<TestAgent>> agents_;
};

// Waits until the other end has had all that was sent to it.
#define ECHO() EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x")

TEST_F(AgentCallsTest, ACancelEndsTheCallAtOnceAndReachesTheHandler) {
  Start();
  const Future<std::string> made = a().Call(1, "keep", "");
  IncomingCall kept = b().service.AwaitKept();
  Promise<Unit> told;
  Future<Unit> heard = told.future();
  kept.cancellation()->OnCancel([&] { told.Set(Unit()); });
  EXPECT_FALSE(kept.cancellation()->cancelled());
  made.Cancel();
  ASSERT_TRUE(made.Done()) << "with no word from the other end";
  EXPECT_EQ(
      made.Wait().status(),
      absl::CancelledError("call of 'keep' on worker 'b' (1): it was cancelled by its caller"));
  ASSERT_TRUE(heard.Wait().ok());
  EXPECT_EQ(kept.cancellation()->why().code(), StatusCode::kCancelled);
  kept.Reply(kept.NewReply());
  made.Cancel();
  ASSERT_TRUE(b().Call(0, "echo", "x").Wait().ok());
  EXPECT_EQ(a().service.AwaitLateReplies(1).size(), 1u);
}

TEST_F(AgentCallsTest, ADeadlineAndALostCallerReachTheHandlerToo) {
  Start();
  const Future<std::string> late =
      a().Call(1, "keep", "", {.deadline = clock_.Now() + absl::Seconds(1)});
  IncomingCall first = b().service.AwaitKept();
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(CodeOf(late), StatusCode::kDeadlineExceeded);
  ECHO();
  EXPECT_TRUE(first.cancellation()->cancelled());

  const Future<std::string> lost = a().Call(1, "keep", "");
  IncomingCall second = b().service.AwaitKept();
  Promise<Unit> told;
  Future<Unit> heard = told.future();
  second.cancellation()->OnCancel([&] { told.Set(Unit()); });
  a().agent->Close();
  EXPECT_TRUE(heard.Wait().ok());
}

TEST_F(AgentCallsTest, ACancelOfWhatIsOverOrWasNeverThere) {
  Start();
  ECHO();
  a().agent->canceller().lock()->Cancel(1);
  a().agent->canceller().lock()->Cancel(4711);
  ECHO();
}

TEST_F(AgentCallsTest, ACallOfWhichTwoPacketsComeIsServedOnce) {
  Start();
  ECHO();
  faults_->action = FaultInjector::Action::kDuplicate;
  const Future<std::string> made = a().Call(1, "keep", "");
  faults_->action = FaultInjector::Action::kDeliver;
  IncomingCall kept = b().service.AwaitKept();
  const Future<std::string> next = a().Call(1, "keep", "next");
  IncomingCall other = b().service.AwaitKept();
  EXPECT_EQ(other.body().bytes(), "next");
  kept.Reply(kept.NewReply());
  EXPECT_TRUE(made.Wait().ok());
}

TEST_F(AgentCallsTest, CallsInFlightAreBoundedAtTheCaller) {
  Start({.calls_per_peer = 2, .calls = 3});
  const Future<std::string> first = a().Call(1, "keep", ""), second = a().Call(1, "keep", "");
  const absl::Status status = a().Call(1, "keep", "").Wait().status();
  EXPECT_EQ(status, absl::ResourceExhaustedError(
                        "call of 'keep' on worker 'b' (1): 2 calls to it are in flight; limit "
                        "calls_per_peer is 2"));
  const Future<std::string> self = a().Call(0, "keep", "");
  EXPECT_TRUE(
      absl::StrContains(a().Call(0, "keep", "").Wait().status().message(), "limit calls is 3"));
  IncomingCall kept = b().service.AwaitKept();
  kept.Reply(kept.NewReply());
  ASSERT_TRUE(first.Wait().ok());
  ECHO();
}

// A caller with other limits than ours, or none.
TEST_F(AgentCallsTest, CallsInFlightAreBoundedWhereTheyAreServed) {
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
  for (const uint64_t call : {1, 2}) {
    served.FreePlace(call);
    served.End();
  }
  EXPECT_TRUE(served.Begin(4, 5000).ok()) << "alone it may be larger";
  EXPECT_EQ(total, 1u);
  ServedCalls other(&clock_, &(strict.calls = 1, strict), &total);
  EXPECT_TRUE(absl::StrContains(other.Begin(1, 1).status().message(), "limit calls is 1"));
  // What was refused counts nowhere.
  EXPECT_EQ(total, 1u);
  EXPECT_EQ(other.count(), 0u);
  served.FreePlace(4);
  served.End();
  EXPECT_TRUE(other.Begin(1, 1).ok());
  served.Close(absl::UnavailableError("gone"));
  EXPECT_EQ(served.Begin(5, 0).status().code(), StatusCode::kCancelled);
  EXPECT_EQ(served.Now(), absl::InfinitePast());
}

// Its place is free before it can know that the call is over.
TEST_F(AgentCallsTest, WhoHasItsAnswerMayCallAgain) {
  struct AtReply : FaultInjector {
    absl::AnyInvocable<void()> call;  // once, when a reply has as good as arrived
    Action OnSend(const std::string&, const std::string&, Packet& packet) override {
      WireReader reader(packet.bytes);
      if (ReadFrame(reader)->kind == FrameKind::kReply) {
        if (auto now = std::exchange(call, nullptr)) now();
      }
      return Action::kDeliver;
    }
  };
  const auto at_reply = std::make_shared<AtReply>();
  const auto network = std::make_shared<InprocNetwork>(at_reply);
  std::vector<std::unique_ptr<TestAgent>> agents;
  for (WorkerRank rank = 0; rank < 2; ++rank) {
    agents.push_back(std::make_unique<TestAgent>(&clock_, network, rank, /*incarnation=*/1,
                                                 AgentOptions{.limits = {.bytes_per_peer = 1000}}));
  }
  StartAll(agents);
  const std::string most(900, 'x');
  const Future<std::string> first = agents[0]->Call(1, "keep", most);
  IncomingCall kept = agents[1]->service.AwaitKept();
  Future<std::string> second;
  at_reply->call = [&] {
    second = agents[0]->Call(1, "echo", most);
    while (agents[1]->agent->Stats().size() < 2) std::this_thread::yield();  // it was taken in
  };
  kept.Reply(kept.NewReply());
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(second.Wait().ok()) << second.Wait().status();
}

TEST_F(AgentCallsTest, MessagesAreBounded) {
  Start({.message_bytes = 1000});
  const absl::Status status = a().Call(1, "echo", std::string(1000, 'x')).Wait().status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "limit message_bytes is 1000")) << status;
  const Future<std::string> made = a().Call(1, "keep", "");
  IncomingCall kept = b().service.AwaitKept();
  Packet reply = kept.NewReply();
  reply.bytes.append(1000, 'x');
  kept.Reply(std::move(reply));
  EXPECT_EQ(CodeOf(made), StatusCode::kResourceExhausted);
  // Up to the limit they are served.
  const Future<std::string> full = a().Call(1, "keep", "");
  kept = b().service.AwaitKept();
  reply = kept.NewReply();
  reply.bytes.append(1000 - reply.size(), 'x');
  kept.Reply(std::move(reply));
  EXPECT_TRUE(full.Wait().ok()) << full.Wait().status();
}

// Whoever waits for what was in it must not wait for ever, at either end.
TEST_F(AgentCallsTest, APacketThatIsLostEndsTheConnection) {
  Start({.message_bytes = 1000});
  ECHO();
  a().Notify(1, std::string(1000, 'x'));
  EXPECT_TRUE(absl::StrContains(a().service.AwaitLost(1).message(), "limit message_bytes is 1000"))
      << a().service.AwaitLost(1);
  EXPECT_FALSE(b().service.AwaitLost(0).ok());
  ECHO();
  faults_->action = FaultInjector::Action::kRefuse;
  const absl::Status status = a().Call(1, "echo", "x").Wait().status();
  EXPECT_TRUE(absl::StrContains(status.message(), "a packet was refused")) << status;
  faults_->action = FaultInjector::Action::kDeliver;
  ECHO();
}

// Nothing says whose they are, so all that is in flight between the two ends; and both ends say
// why.
TEST_F(AgentCallsTest, BytesThatAreLostOnTheirWayEndTheConnectionAndSayWhy) {
  Start();
  ECHO();
  const Future<std::string> own = b().Call(0, "keep");
  const IncomingCall kept = a().service.AwaitKept();
  faults_->loses_next = true;
  testing::internal::CaptureStderr();
  const absl::Status status = a().Call(1, "echo", "x").Wait().status();
  const absl::Status at_b = own.Wait().status();
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string why = "receiving from worker 'a' (0): it is beyond a limit";
  EXPECT_EQ(status, absl::UnavailableError(absl::StrCat(
                        "call of 'echo' on worker 'b' (1): the connection with worker 'b' (1) "
                        "broke: it refused the connection: ",
                        why)));
  EXPECT_EQ(at_b.code(), StatusCode::kUnavailable) << at_b;
  EXPECT_TRUE(absl::StrContains(at_b.message(), why)) << at_b;
  EXPECT_TRUE(absl::StrContains(log, why)) << log;
  ECHO();
}

// ---------------------------------------------------------------------------------- Deadlines

// A clock in which anything may happen while a timer is being set: `meanwhile` runs inside At(),
// before the timer is known to the clock or after that. So it shows each order in which other
// threads, the clock's among them, can overtake the one that sets a timer, all on one thread. And
// time may pass between a look at the clock and the one before it.
class InterleavingClock final : public Clock {
 public:
  absl::Time Now() override {
    if (looks_until_late > 0 && --looks_until_late == 0) {
      if (fires) clock.Advance(absl::Seconds(3));
      if (!fires) ahead = absl::Seconds(3);
    }
    return clock.Now() + ahead;
  }
  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override {
    meanwhile(/*is_set=*/false);
    const TimerId timer =
        clock.At(when, [callback = std::move(callback), alive = Count()]() mutable { callback(); });
    meanwhile(/*is_set=*/true);
    return timer;
  }
  bool Cancel(TimerId timer) override { return clock.Cancel(timer); }

  // Timers that have neither fired nor been taken back.
  long timers() const { return alive_.use_count() - 1; }

  FakeClock clock;
  std::function<void(bool is_set)> meanwhile = [](bool) {};
  int looks_until_late = 0;  // 0: no time passes
  bool fires = true;         // when it does; else the timers come too late
  absl::Duration ahead = absl::ZeroDuration();

 private:
  std::shared_ptr<int> Count() { return alive_; }

  std::shared_ptr<int> alive_ = std::make_shared<int>();
};

class DeadlinesTest : public ::testing::Test {
 protected:
  DeadlinesTest() {
    agents_.push_back(std::make_unique<TestAgent>(&clock_, std::make_shared<InprocNetwork>(),
                                                  /*rank=*/0, /*incarnation=*/1));
    StartAll(agents_);
  }
  // A call to oneself: it arrives before this returns.
  Future<std::string> Call(absl::Duration timeout) {
    return agents_[0]->Call(0, "keep", "", {.deadline = clock_.Now() + timeout});
  }

  InterleavingClock clock_;
  std::vector<std::unique_ptr<TestAgent>> agents_;
};

TEST_F(DeadlinesTest, ATimerThatFiresWhileItIsSetDelaysNoLaterDeadline) {
  bool at_once = true;
  clock_.meanwhile = [&](bool is_set) {
    if (is_set && std::exchange(at_once, false)) clock_.clock.Advance(absl::Milliseconds(1));
  };
  const Future<std::string> first = Call(absl::Microseconds(100));
  ASSERT_TRUE(first.Done());
  EXPECT_EQ(first.Wait().status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(agents_[0]->agent->served(), 0u) << "nobody waits for its answer";
  const Future<std::string> second = Call(absl::Milliseconds(50));
  clock_.clock.Advance(absl::Seconds(1));
  ASSERT_TRUE(second.Done());
  EXPECT_EQ(second.Wait().status().code(), StatusCode::kDeadlineExceeded);
}

// A call to oneself ends by its deadline on its way to the handler, which hears of that.
TEST_F(DeadlinesTest, AHandlerIsCancelledWhoseCallEndsOnTheWayToIt) {
  for (const bool needs_timer : {true, false}) {
    SCOPED_TRACE(needs_timer);
    std::vector<IncomingCall> earlier;
    if (!needs_timer) {
      Call(absl::Seconds(1));  // whose timer stands before that of the next would
      earlier.push_back(agents_[0]->service.AwaitKept());
    }
    // The clock is looked at for the deadline, when the call begins, when its request leaves (if it
    // has had to set a timer), and, at last, when that has arrived.
    clock_.looks_until_late = needs_timer ? 4 : 3;
    const Future<std::string> late = Call(absl::Seconds(2));
    ASSERT_TRUE(late.Done());
    EXPECT_EQ(late.Wait().status().code(), StatusCode::kDeadlineExceeded);
    ASSERT_EQ(agents_[0]->agent->served(), earlier.size() + 1) << "it was late before it arrived";
    const IncomingCall kept = agents_[0]->service.AwaitKept();
    EXPECT_TRUE(kept.cancellation()->cancelled());
  }
}

// Not with what the handler makes of its being cancelled, which may be faster than the timer.
TEST_F(DeadlinesTest, ACallEndsByItsDeadlineBeforeItsHandlerHearsOfThat) {
  clock_.fires = false;
  clock_.looks_until_late = 4;
  const Future<std::string> late = Call(absl::Seconds(2));
  ASSERT_TRUE(late.Done());
  EXPECT_EQ(late.Wait().status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(agents_[0]->service.AwaitKept().cancellation()->cancelled());
}

// Calls are made, answered, cancelled and run into their deadlines, in any order, also while a
// timer is being set. No deadline is missed, and there is one timer at most.
TEST_F(DeadlinesTest, NoDeadlineIsMissedWhateverComesBetween) {
  for (int seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    const auto pick = [&](int n) { return static_cast<int>(random() % n); };
    std::vector<std::pair<absl::Time, Future<std::string>>> calls;
    const auto act = [&] {
      switch (pick(5)) {
        case 0:
        case 1: {
          const absl::Duration timeout = absl::Milliseconds(1 + pick(20));
          const absl::Time deadline = clock_.Now() + timeout;
          Future<std::string> call = Call(timeout);
          calls.emplace_back(deadline, std::move(call));
          break;
        }
        case 2:
          if (!calls.empty()) calls[pick(calls.size())].second.Cancel();
          break;
        case 3: {
          IncomingCall kept = (Call(absl::Seconds(1)), agents_[0]->service.AwaitKept());
          kept.Reply(kept.NewReply());
          break;
        }
        case 4:
          clock_.clock.Advance(absl::Milliseconds(pick(10)));
          break;
      }
    };
    int depth = 0;
    clock_.meanwhile = [&](bool) {
      if (depth >= 3 || pick(2) == 0) return;
      ++depth;
      act();
      --depth;
    };
    for (int step = 0; step < 30; ++step) {
      act();
      // While At() was interrupted the clock may have gone past the timer that was being set.
      while (clock_.clock.NextTimer() <= clock_.Now()) clock_.clock.Advance(absl::ZeroDuration());
      for (const auto& [deadline, call] : calls) {
        ASSERT_TRUE(call.Done() || deadline > clock_.Now()) << "step " << step;
      }
      ASSERT_LE(clock_.timers(), 1) << "step " << step;
    }
    clock_.meanwhile = [](bool) {};
    clock_.clock.Advance(absl::Seconds(2));
    for (const auto& [deadline, call] : calls) ASSERT_TRUE(call.Done());
    ASSERT_EQ(clock_.timers(), 0);
    while (agents_[0]->agent->served() > 0) agents_[0]->service.AwaitKept();
  }
}

// ------------------------------------------------------------------------------ Backpressure

class BackpressureTest : public AgentCallsTest {
 protected:
  void SetUp() override {
    Start({.calls_per_peer = 3, .bytes_per_peer = 10000});
    ECHO();
    // The first reply's bytes may still be counted on b; nothing of a's is.
    faults_->action = FaultInjector::Action::kHold;
  }
  void Release() {
    faults_->action = FaultInjector::Action::kDeliver;
    network_->ReleaseHeld();
  }
};

TEST_F(BackpressureTest, WhatWaitsToBeSentIsBounded) {
  const Future<std::string> first = a().Call(1, "echo", std::string(6000, 'x'));
  const Future<std::string> second = a().Call(1, "echo", std::string(6000, 'y'));
  ASSERT_TRUE(second.Done());
  EXPECT_EQ(CodeOf(second), StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(second.Wait().status().message(), "limit bytes_per_peer is 10000"));
  EXPECT_GT(a().agent->Queued()[1].second, 6000u);
  Release();
  EXPECT_EQ(first.Wait()->size(), 6000u);
  // What has come may be counted a moment longer where it was sent.
  while (a().agent->Queued()[1].second + b().agent->Queued()[0].second > 0) {
    std::this_thread::yield();
  }
  const absl::Status third = a().Call(1, "echo", std::string(6000, 'z')).Wait().status();
  EXPECT_TRUE(third.ok()) << third;
}

TEST_F(BackpressureTest, WhoWaitsForRoomGoesWhenThereIsSome) {
  const Future<std::string> first = a().Call(1, "echo", std::string(6000, 'x'));
  Promise<std::string> promise;
  Future<std::string> second = promise.future();
  std::thread waits([&] {
    promise.Set(a().Call(1, "echo", std::string(5000, 'y'), {.wait_for_credit = true}).Wait());
  });
  EXPECT_FALSE(second.Done());
  Release();
  EXPECT_EQ(second.Wait()->size(), 5000u);
  waits.join();
}

TEST_F(BackpressureTest, WhoWaitsForRoomGivesUpByDeadlineCancelAndLoss) {
  const Future<std::string> first = a().Call(1, "echo", std::string(6000, 'x'));
  const auto call = [&](CallTerms terms) {
    terms.wait_for_credit = true;
    return a().Call(1, "echo", std::string(6000, 'x'), terms).Wait().status();
  };
  absl::Status status;
  const absl::Time deadline = clock_.Now() + absl::Seconds(1);
  std::thread late([&] { status = call({.deadline = deadline}); });
  while (clock_.NextTimer() != deadline) std::this_thread::yield();  // until it waits
  clock_.Advance(absl::Seconds(1));
  late.join();
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
  b().agent->Close();
  lost.join();
}

// Replies wait for credit as well; none is lost, and meanwhile, but no longer, their calls count as
// in flight.
TEST_F(BackpressureTest, RepliesGoWhenThereIsRoom) {
  Release();
  std::vector<Future<std::string>> made;
  for (int i = 0; i < 3; ++i) made.push_back(b().Call(0, "keep", ""));
  std::vector<IncomingCall> kept;
  for (int i = 0; i < 3; ++i) kept.push_back(a().service.AwaitKept());
  faults_->action = FaultInjector::Action::kHold;
  const Future<std::string> first = a().Call(1, "echo", std::string(6000, 'x'));
  for (IncomingCall& call : kept) {
    Packet reply = call.NewReply();
    reply.bytes.append(6000, 'x');
    call.Reply(std::move(reply));
  }
  EXPECT_LT(a().agent->Queued()[1].second, 10000u);
  EXPECT_FALSE(kept[0].cancellation()->cancelled());
  Release();
  for (const Future<std::string>& call : made) EXPECT_EQ(call.Wait()->size(), 6000u);
  const absl::Status next = b().Call(0, "echo", "x").Wait().status();
  EXPECT_TRUE(next.ok()) << next;
  EXPECT_TRUE(first.Wait().ok());
  const absl::Time late = absl::Now() + absl::Seconds(30);
  while (a().agent->served() > 0 && absl::Now() < late) std::this_thread::yield();
  EXPECT_EQ(a().agent->served(), 0u);
}

// Up to the limit a caller may wait to read: what it calls meanwhile is refused, and its connection
// stays. Beyond that it does not read.
TEST_F(AgentCallsTest, ACallIsRefusedUntilMoreThanTheLimitWaitsForItsCaller) {
  constexpr uint64_t kLimit = 10000;
  Start({.bytes_per_peer = kLimit});
  const auto call = [&] {
    // What has left may be counted a moment longer.
    while (b().agent->Queued()[0].second > 0) std::this_thread::yield();
    return b().Call(0, "keep", std::string(6000, 'x'));
  };
  const auto waits = [&] {
    uint64_t bytes = 0;
    for (const auto& [peer, queued] : a().agent->Queued()) bytes += queued;
    return bytes;
  };
  ASSERT_TRUE(b().Call(0, "echo").Wait().ok());  // now there is a connection
  const Future<std::string> first = call();
  const IncomingCall kept = a().service.AwaitKept();
  while (waits() > 0) std::this_thread::yield();
  faults_->action = FaultInjector::Action::kHold;
  const Future<std::string> small = a().Call(1, "keep", "x");
  const uint64_t head = waits() - 1;
  const Future<std::string> rest = a().Call(1, "keep", std::string(kLimit - 2 * head - 1, 'x'));
  ASSERT_EQ(waits(), kLimit);
  const Future<std::string> refused = call();
  // The refusal waits behind them, unless the connection has ended.
  while (waits() == kLimit) std::this_thread::yield();
  ASSERT_GT(waits(), kLimit);
  const Future<std::string> beyond = call();
  EXPECT_EQ(CodeOf(beyond), StatusCode::kUnavailable);
  const absl::Status why = a().service.AwaitLost(1);
  EXPECT_TRUE(absl::StrContains(why.message(), "does not read the replies")) << why;
}

// ----------------------------------------------------------------------------------- Metrics

TEST_F(AgentCallsTest, WhatIsCounted) {
  Start();
  const Future<std::string> made = a().Call(1, "keep", std::string(100, 'x'));
  IncomingCall kept = b().service.AwaitKept();
  clock_.Advance(absl::Seconds(2));
  kept.Begin();
  clock_.Advance(absl::Seconds(3));
  Packet reply = kept.NewReply();
  reply.bytes.append(200, 'y');
  const uint64_t request_bytes = Agent::NewRequest("keep").packet.bytes.size() + 100,
                 reply_bytes = reply.bytes.size();
  kept.Reply(std::move(reply));
  ASSERT_TRUE(made.Wait().ok());
  const Future<std::string> failed = a().Call(1, "keep", "");
  IncomingCall fails = b().service.AwaitKept();
  clock_.Advance(absl::Seconds(4));
  fails.Fail(absl::DataLossError("as was asked"));
  EXPECT_EQ(CodeOf(failed), StatusCode::kDataLoss);
  const Future<std::string> open = a().Call(1, "keep", "");
  IncomingCall still = b().service.AwaitKept();
  a().agent->Notify(1, Agent::NewNotice());
  ECHO();

  const auto find = [](const std::vector<CallStats>& all, absl::string_view function) {
    for (const CallStats& stats : all) {
      if (stats.function == function) return stats;
    }
    return CallStats{};
  };
  const CallStats caller = find(a().agent->Stats(), "keep");
  EXPECT_EQ(caller.peer, 1);
  EXPECT_FALSE(caller.served);
  EXPECT_EQ(caller.calls, 3u);
  EXPECT_EQ(caller.errors, 1u);
  EXPECT_EQ(caller.in_flight, 1u);
  EXPECT_GE(caller.bytes_sent, request_bytes);
  EXPECT_EQ(caller.bytes_received, reply_bytes);
  EXPECT_EQ(caller.run_time, absl::Seconds(9));

  const CallStats callee = find(b().agent->Stats(), "keep");
  EXPECT_TRUE(callee.served);
  EXPECT_EQ(callee.calls, 3u);
  EXPECT_EQ(callee.errors, 1u);
  EXPECT_EQ(callee.in_flight, 1u);
  EXPECT_EQ(callee.bytes_received, caller.bytes_sent);
  EXPECT_GT(callee.bytes_sent, reply_bytes);
  EXPECT_EQ(callee.queue_time, absl::Seconds(6)) << "the one that failed had not begun";
  EXPECT_EQ(callee.run_time, absl::Seconds(3));
  EXPECT_EQ(find(b().agent->Stats(), Agent::kNotices).calls, 1u);
}

}  // namespace
}  // namespace distgrad
