// Agents that have no memory as something arrives, as a connection ends, or for the answer to a
// call: each call ends all the same, and the next one is as good as any.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/fake_clock.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/rpc/agent.h"
#include "core/rpc/agent_testing.h"
#include "core/rpc/frame.h"
#include "core/transport/inproc/inproc_transport.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// Drops all packets once it is told to, and counts the connections that "a" opens. Thread-safe.
class Fault : public FaultInjector {
 public:
  Action OnSend(const std::string& from, const std::string&, Packet& packet) override {
    if (packet.bytes.size() > 4 && packet.bytes[4] == static_cast<char>(FrameKind::kHello)) {
      hellos += from == "inproc://1";
    }
    return action.load();
  }
  std::atomic<Action> action{Action::kDeliver};
  std::atomic<int> hellos{0};
};

// Another clock, which calls `before_next` and then has no memory for a timer, once. Thread-safe.
class ShortClock : public Clock {
 public:
  explicit ShortClock(Clock* clock) : clock_(clock) {}
  absl::Time Now() override { return clock_->Now(); }
  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override {
    if (before_next != nullptr) {
      std::exchange(before_next, nullptr)();
      throw std::bad_alloc();
    }
    return clock_->At(when, std::move(callback));
  }
  bool Cancel(TimerId timer) override { return clock_->Cancel(timer); }

  std::function<void()> before_next;

 private:
  Clock* const clock_;
};

// The agents "a", "b" and "c", or the first of them.
struct Agents {
  explicit Agents(const AgentOptions& options = {.heartbeat_limit = absl::Seconds(10)},
                  WorkerRank count = 3) {
    for (WorkerRank rank = 0; rank < count; ++rank) {
      agents.push_back(
          std::make_unique<TestAgent>(&clock, network, rank, /*incarnation=*/1, options));
    }
    StartAll(agents);
  }
  TestAgent& a() { return *agents[0]; }
  TestAgent& b() { return *agents[1]; }
  TestAgent& c() { return *agents[2]; }

  // Has `then` run on the thread that handles what arrives at b, once it hears that the call which
  // this returns is cancelled, or that the connection is over.
  Future<std::string> OnCancelAtB(const std::function<void()>& then) {
    return OnCancelAt(b(), a(), then);
  }
  // The same at another agent, of a call that `from` makes.
  Future<std::string> OnCancelAt(TestAgent& at, TestAgent& from,
                                 const std::function<void()>& then) {
    const Future<std::string> call = from.Call(at.info.rank, "keep");
    kept.push_back(at.service.AwaitKept());
    kept.back().cancellation()->OnCancel(then);
    return call;
  }

  FakeClock clock;
  const std::shared_ptr<Fault> faults = std::make_shared<Fault>();
  const std::shared_ptr<InprocNetwork> network = std::make_shared<InprocNetwork>(faults);
  std::vector<std::unique_ptr<TestAgent>> agents;
  std::vector<IncomingCall> kept;
};

TEST(AgentNoMemoryTest, WhatArrivesEndsItsConnectionAtMost) {
  for (const char* const function : {"echo", "fail", "drop"}) {
    bool failed = true;
    for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
      SCOPED_TRACE(absl::StrCat(function, ", allocation ", nth));
      Agents all;
      absl::Notification over;
      const Future<std::string> begin = all.OnCancelAtB([nth] { FailAllocation(nth); });
      const Future<std::string> end = all.OnCancelAtB([&] {
        failed = FailAllocation(-1);
        over.Notify();
      });
      begin.Cancel();
      all.a().Call(1, function, std::string(100, 'x')).Wait().status().IgnoreError();
      // On a connection that it opens.
      all.c().Call(1, function, std::string(100, 'x')).Wait().status().IgnoreError();
      end.Cancel();
      over.WaitForNotification();
      // The connection may be about to end.
      for (TestAgent* const agent : {&all.a(), &all.c()}) {
        absl::StatusOr<std::string> next = absl::UnavailableError("");
        for (int i = 0; i < 3 && absl::IsUnavailable(next.status()); ++i) {
          next = agent->Call(1, "echo", "x").Wait();
        }
        EXPECT_TRUE(next.ok()) << next.status();
      }
    }
  }
}

TEST(AgentNoMemoryTest, TheEndOfAConnectionEndsItsCallsAndIsHeardOf) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all;
    const Future<std::string> begin = all.OnCancelAtB([nth] { FailAllocation(nth); });
    const Future<std::string> made = all.b().Call(0, "keep");
    const IncomingCall kept = all.a().service.AwaitKept();
    absl::Notification over;
    all.b().service.OnNextLost([&] {
      failed = FailAllocation(-1);
      over.Notify();
    });
    begin.Cancel();
    all.a().agent->Close();
    EXPECT_EQ(made.Wait().status().code(), absl::StatusCode::kUnavailable);
    over.WaitForNotification();
  }
}

// On the clock's thread, which ends the process if that throws.
TEST(AgentNoMemoryTest, TheHeartbeatGoesOn) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all;
    const Future<std::string> made = all.a().Call(1, "keep");
    const IncomingCall kept = all.b().service.AwaitKept();
    all.faults->action = FaultInjector::Action::kDrop;
    FailAllocation(nth);
    all.clock.Advance(absl::Seconds(2));
    failed = FailAllocation(-1);
    for (int i = 0; i < 10; ++i) all.clock.Advance(absl::Seconds(2));
    EXPECT_EQ(made.Wait().status().code(), absl::StatusCode::kUnavailable);
  }
}

// Others count on it that have begun meanwhile.
TEST(AgentNoMemoryTest, TheHeartbeatBeginsForAll) {
  FakeClock time;
  ShortClock clock(&time);
  const auto faults = std::make_shared<Fault>();
  const auto network = std::make_shared<InprocNetwork>(faults);
  std::vector<std::unique_ptr<TestAgent>> agents;
  for (WorkerRank rank = 0; rank < 3; ++rank) {
    // The others would notice that they hear nothing of this one.
    const absl::Duration limit = rank == 0 ? absl::Seconds(10) : absl::InfiniteDuration();
    agents.push_back(std::make_unique<TestAgent>(&clock, network, rank, /*incarnation=*/1,
                                                 AgentOptions{.heartbeat_limit = limit}));
  }
  StartAll(agents);
  std::optional<Future<std::string>> second;
  std::optional<IncomingCall> kept;
  clock.before_next = [&] {
    second = agents[0]->Call(2, "keep");
    kept = agents[2]->service.AwaitKept();
  };
  agents[0]->Call(1, "echo").Wait().status().IgnoreError();
  faults->action = FaultInjector::Action::kDrop;
  for (int i = 0; i < 10; ++i) time.Advance(absl::Seconds(2));
  ASSERT_TRUE(second->WaitUntil(Deadline::After(absl::Seconds(30))));  // on another thread
  EXPECT_EQ(second->Wait().status().code(), absl::StatusCode::kUnavailable);
}

// Before a silent peer is given up it is asked on a new connection.
TEST(AgentNoMemoryTest, WhoCouldNotBeProbedIsProbedLater) {
  bool failed = true;
  int probed_later = 0;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all;
    const Future<std::string> made = all.a().Call(1, "keep");
    const IncomingCall kept = all.b().service.AwaitKept();
    all.faults->action = FaultInjector::Action::kDrop;
    for (int i = 0; i < 2; ++i) all.clock.Advance(absl::Seconds(2));
    FailAllocation(nth);
    all.clock.Advance(absl::Seconds(2));
    failed = FailAllocation(-1);
    const bool could_not = all.faults->hellos == 1;
    EXPECT_TRUE(failed || !could_not) << "nobody was to be probed yet";
    all.clock.Advance(absl::Seconds(2));
    // Or its own connection had to end.
    if (made.Done()) continue;
    EXPECT_GE(all.faults->hellos, 2);
    if (failed && could_not) ++probed_later;
  }
  EXPECT_GT(probed_later, 0);
}

// Nor does a caller wait on whose deadline has passed.
TEST(AgentNoMemoryTest, TheWaitForRoomEndsAtItsDeadline) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all({.limits = {.bytes_per_peer = 10'000}});
    all.faults->action = FaultInjector::Action::kHold;
    const Future<std::string> first = all.a().Call(1, "echo", std::string(6000, 'x'));
    const absl::Time deadline = all.clock.Now() + absl::Seconds(1);
    absl::Status status;
    std::thread waits([&] {
      status = all.a()
                   .Call(1, "echo", std::string(6000, 'x'),
                         {.deadline = deadline, .wait_for_credit = true})
                   .Wait()
                   .status();
    });
    while (all.clock.NextTimer() != deadline) std::this_thread::yield();  // until it waits
    FailAllocation(nth);
    all.clock.Advance(absl::Seconds(1));
    failed = FailAllocation(-1);
    all.clock.Advance(absl::Seconds(1));
    waits.join();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
}

// So does the watch over another member.
TEST(AgentNoMemoryTest, TheWatchGoesOn) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all;
    all.a().agent->WatchMembers(/*late=*/false);
    FailAllocation(nth);
    all.clock.Advance(absl::Seconds(2));
    failed = FailAllocation(-1);
    all.b().agent->Close();
    all.b().transport.reset();
    for (int i = 0; i < 20 && !all.a().service.HasUnreachable(1); ++i) {
      all.clock.Advance(absl::Seconds(2));
      // What follows a refusal comes on the transport's thread.
      all.a().Call(2, "echo", "x").Wait().status().IgnoreError();
    }
    EXPECT_TRUE(all.a().service.HasUnreachable(1));
  }
}

// Of two alone, of whom the other one opens no connection either.
TEST(AgentNoMemoryTest, AWatchedMemberThatCouldNotBePingedIsPingedLater) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all({.heartbeat_limit = absl::Seconds(10)}, /*count=*/2);
    all.a().agent->WatchMembers(/*late=*/false);
    FailAllocation(nth);
    all.clock.Advance(absl::Seconds(2));
    failed = FailAllocation(-1);
    for (int i = 0; i < 3; ++i) all.clock.Advance(absl::Seconds(2));
    EXPECT_GE(all.faults->hellos, 1);
  }
}

// A member that was taken for lost answers once, and then those hear that it lives who had heard
// that it was lost.
TEST(AgentNoMemoryTest, TheAnswerOfAMemberThatWasTakenForLostIsHeard) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Agents all;
    absl::Notification over;
    const Future<std::string> begin =
        all.OnCancelAt(all.a(), all.b(), [nth] { FailAllocation(nth); });
    const Future<std::string> end = all.OnCancelAt(all.a(), all.b(), [&] {
      failed = FailAllocation(-1);
      over.Notify();
    });
    all.a().agent->KeepEvents(true);
    const Incarnation incarnation = all.b().info.incarnation;
    all.a().agent->SetLost(1, incarnation, "it was silent");
    const uint64_t loss = all.a().agent->LossOf(1, incarnation);
    begin.Cancel();
    all.a().agent->AskLost(1, incarnation);
    all.a().Notify(1, "it is asked");
    all.b().service.AwaitNotices(1);  // it has answered
    end.Cancel();
    over.WaitForNotification();
    EXPECT_EQ(all.a().agent->LossOf(1, incarnation), 0u);
    EXPECT_EQ(all.a().service.last_revived(), loss);
    EXPECT_EQ(all.a().agent->TakeEvents().size(), 2u) << "it was lost, and has come back";
  }
}

// Neither an answer that finds no memory, nor one that finds none for the error either, ends the
// way on which a worker calls itself.
TEST(AgentNoMemoryTest, AWorkerThatCouldNotAnswerItselfServesItselfOn) {
  Agents all;
  for (const char* const function : {"echo", "fail", "drop"}) {
    for (int count = 1; count <= 4; ++count) {
      bool failed = true;
      for (int nth = 0; failed; ++nth) {
        SCOPED_TRACE(absl::StrCat(function, ": ", count, " allocations from ", nth));
        FailAllocation(nth, count);
        try {
          all.a().Call(0, function, "x");
        } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not made
        }
        failed = FailAllocation(-1);
        const Future<std::string> next = all.a().Call(0, "echo", "x");
        ASSERT_TRUE(next.Done());
        EXPECT_TRUE(next.Wait().ok()) << next.Wait().status();
        EXPECT_EQ(all.a().agent->served(), 0u);
      }
    }
  }
}

}  // namespace
}  // namespace distgrad
