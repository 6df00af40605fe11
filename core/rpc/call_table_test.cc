// Calls that end by their deadline, their link, a cancel, or the table's end.
#include "core/rpc/call_table.h"

#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/fake_clock.h"
#include "core/base/trace.h"
#include "core/base/wire.h"
#include "core/rpc/frame.h"
#include "core/transport/transport.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// Of links that send nothing.
class NoOwner : public Link::Owner {
 public:
  void OnPacket(const std::shared_ptr<Link>&, Packet) override {}
  void OnBulkWanted(const std::shared_ptr<Link>&) override {}
  bool OnLeaving(uint64_t, Packet&) override { return false; }
  void OnClosed(const std::shared_ptr<Link>&, absl::Status, bool) override {}
};

class CallTableTest : public ::testing::Test {
 protected:
  CallTableTest() : table_(NewTable({})) {}

  std::shared_ptr<CallTable> NewTable(const Limits& limits) {
    return std::make_shared<CallTable>(&clock_, limits, std::make_shared<TraceRecorder>(),
                                       std::make_shared<Peers>(10));
  }
  std::shared_ptr<Link> NewLink(CallTable& table) {
    auto link = std::make_shared<Link>(std::make_shared<NoOwner>(), &shared_, Link::Kind::kOpened,
                                       ++links_);
    table.Add(*link);
    return link;
  }
  CallTable::Call NewCall(absl::Duration timeout = absl::InfiniteDuration()) {
    return {.to = 1,
            .function = "f",
            .bytes = 10,
            .begun = clock_.Now(),
            .deadline = clock_.Now() + timeout,
            .done = [this](const absl::StatusOr<Body>& reply, bool has_left) {
              ended_.push_back(reply.status());
              left_.push_back(has_left);
            }};
  }
  static Packet Request() {
    Packet packet;
    AppendFrame({.kind = FrameKind::kRequest, .function = "f"}, &packet.bytes);
    return packet;
  }
  absl::StatusOr<CallTable::Begun> Begin(CallTable& table, const std::shared_ptr<Link>& link,
                                         absl::Duration timeout = absl::InfiniteDuration()) {
    CallTable::Call call = NewCall(timeout);
    Packet request = Request();
    return table.Begin(call, link, request);
  }
  // Begins a call whose end is counted, which needs no memory.
  absl::Status BeginCounted(CallTable& table, const std::shared_ptr<Link>& link, int* ended,
                            absl::Duration timeout = absl::InfiniteDuration()) {
    CallTable::Call call = NewCall(timeout);
    call.done = [ended](const absl::StatusOr<Body>&, bool) { ++*ended; };
    Packet request = Request();
    return table.Begin(call, link, request).status();
  }

  FakeClock clock_;
  Link::Shared shared_{.clock = &clock_, .limits = {}};
  uint64_t links_ = 0;
  std::vector<absl::Status> ended_;
  std::vector<bool> left_;
  const std::shared_ptr<CallTable> table_;
};

TEST_F(CallTableTest, ALinkThatIsOverTakesNoMoreCalls) {
  const auto link = NewLink(*table_), other = NewLink(*table_);
  ASSERT_TRUE(Begin(*table_, link).ok());
  ASSERT_TRUE(Begin(*table_, other).ok());
  table_->EndCallsOver(*link, absl::UnavailableError("it broke"));
  ASSERT_EQ(ended_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(ended_[0]));
  EXPECT_TRUE(absl::StrContains(ended_[0].message(), "call of 'f' on worker")) << ended_[0];
  EXPECT_TRUE(left_[0]) << "what waited for it is lost, too";

  CallTable::Call call = NewCall();
  Packet request = Request();
  EXPECT_TRUE(absl::IsAborted(table_->Begin(call, link, request).status()));
  EXPECT_TRUE(call.done != nullptr) << "another link may take it";
  EXPECT_TRUE(table_->Begin(call, other, request).ok());
  EXPECT_EQ(table_->size(), 2u);
  table_->Close(absl::CancelledError("end"));
}

TEST_F(CallTableTest, LimitsHoldForEachLinkAndForAll) {
  const auto table = NewTable({.calls_per_peer = 2, .calls = 3});
  const auto a = NewLink(*table), b = NewLink(*table);
  const uint64_t first = Begin(*table, a)->number;
  EXPECT_TRUE(Begin(*table, a).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Begin(*table, a).status()));
  EXPECT_TRUE(Begin(*table, b).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Begin(*table, b).status()));
  EXPECT_TRUE(ended_.empty()) << "who asked says so";
  table->Cancel(first);
  EXPECT_TRUE(Begin(*table, a).ok());
  table->Close(absl::CancelledError("end"));
}

TEST_F(CallTableTest, OnlyTheWorkerThatWasAskedAnswers) {
  const auto link = NewLink(*table_);
  const uint64_t number = Begin(*table_, link)->number;
  EXPECT_FALSE(table_->Take(number, 1).has_value()) << "it has not left";
  Packet request = Request();
  EXPECT_TRUE(table_->OnLeaving(number, request));
  EXPECT_FALSE(table_->Take(number, 2).has_value());
  EXPECT_FALSE(table_->Take(number + 1, 1).has_value());
  std::optional<CallTable::Call> call = table_->Take(number, 1);
  ASSERT_TRUE(call.has_value());
  table_->End(*std::move(call), Body{});
  EXPECT_EQ(ended_, std::vector<absl::Status>{absl::OkStatus()});
  EXPECT_FALSE(table_->Take(number, 1).has_value());
}

TEST_F(CallTableTest, EachEndsAtItsOwnDeadline) {
  const auto link = NewLink(*table_);
  const uint64_t late = Begin(*table_, link, absl::Seconds(20))->number;
  ASSERT_TRUE(Begin(*table_, link, absl::Seconds(10)).ok());
  ASSERT_TRUE(Begin(*table_, link).ok());
  clock_.Advance(absl::Seconds(10));
  ASSERT_EQ(ended_.size(), 1u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(ended_[0]));
  EXPECT_FALSE(left_[0]);
  Packet request = Request();
  EXPECT_TRUE(table_->OnLeaving(late, request));
  WireReader reader(request.bytes);
  EXPECT_EQ(ReadFrame(reader)->timeout_us, 10'000'000) << "what is left of its time";
  clock_.Advance(absl::Seconds(10));
  EXPECT_EQ(ended_.size(), 2u);
  EXPECT_EQ(table_->size(), 1u);
  EXPECT_FALSE(table_->OnLeaving(late, request));
  table_->Close(absl::CancelledError("end"));
}

TEST_F(CallTableTest, OneThatFindsNoMemoryLeavesNothing) {
  const auto table = NewTable({.calls_per_peer = 1});
  const auto link = NewLink(*table);
  int nth = 0;
  for (bool begun = false; !begun; ++nth) {
    CallTable::Call call = NewCall(absl::Seconds(10));
    Packet request = Request();
    FailAllocation(nth);
    try {
      begun = table->Begin(call, link, request).ok();
      EXPECT_FALSE(FailAllocation(-1));
      ASSERT_TRUE(begun);
    } catch (const std::bad_alloc&) {
      EXPECT_TRUE(FailAllocation(-1));
      ASSERT_EQ(table->size(), 0u) << nth;
    }
  }
  EXPECT_GT(nth, 2);
  // Its deadline has a timer.
  EXPECT_TRUE(ended_.empty());
  clock_.Advance(absl::Seconds(10));
  EXPECT_EQ(ended_.size(), 1u);
  table->Close(absl::CancelledError("end"));
}

// A clock that has no memory for a timer, and finds that out only as time has passed.
class FullClock : public Clock {
 public:
  explicit FullClock(FakeClock* clock) : clock_(clock) {}
  absl::Time Now() override { return clock_->Now(); }
  bool Cancel(TimerId timer) override { return clock_->Cancel(timer); }
  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override {
    if (!full_for_) return clock_->At(when, std::move(callback));
    clock_->Advance(*std::exchange(full_for_, std::nullopt));
    throw std::bad_alloc();
  }
  void FailNext(absl::Duration after) { full_for_ = after; }

 private:
  FakeClock* const clock_;
  std::optional<absl::Duration> full_for_;
};

// One that is to end before all others has no timer, and theirs may have fired in vain meanwhile.
TEST_F(CallTableTest, WhereThereIsNoMemoryForATimerThoseThatNeedOneEnd) {
  for (const absl::Duration until_it_fails : {absl::ZeroDuration(), absl::Seconds(20)}) {
    ended_.clear();
    FullClock clock(&clock_);
    const auto table = std::make_shared<CallTable>(
        &clock, Limits{}, std::make_shared<TraceRecorder>(), std::make_shared<Peers>(10));
    const auto link = NewLink(*table);
    ASSERT_TRUE(Begin(*table, link).ok());
    ASSERT_TRUE(Begin(*table, link, absl::Seconds(20)).ok());
    clock.FailNext(until_it_fails);
    EXPECT_THROW(Begin(*table, link, absl::Seconds(10)).status().IgnoreError(), std::bad_alloc);
    ASSERT_EQ(ended_.size(), 1u) << "the other one with a deadline";
    EXPECT_TRUE(absl::IsResourceExhausted(ended_[0])) << ended_[0];
    EXPECT_EQ(table->size(), 1u);
    EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
    // What comes later has a timer.
    ASSERT_TRUE(Begin(*table, link, absl::Seconds(30)).ok());
    clock_.Advance(absl::Seconds(30));
    EXPECT_EQ(ended_.size(), 2u);
    table->Close(absl::CancelledError("end"));
  }
}

// Keeps what is sent. For one thread.
class KeepingConnection : public Connection {
 public:
  void Send(Packet packet, SendDone done) override {
    sent.push_back(std::move(packet.bytes));
    if (done) done(absl::OkStatus());
  }
  void Close() override {}

  std::vector<std::string> sent;
};

// What cancels it there would find nothing before that.
TEST_F(CallTableTest, OneThatHasLostItsTimerBeforeItIsSentIsCancelledBehindItsRequest) {
  FullClock clock(&clock_);
  const auto table = std::make_shared<CallTable>(
      &clock, Limits{}, std::make_shared<TraceRecorder>(), std::make_shared<Peers>(10));
  const auto link = NewLink(*table);
  const auto connection = std::make_shared<KeepingConnection>();
  link->SetConnection(connection);
  ASSERT_TRUE(Begin(*table, link, absl::Seconds(20)).ok());
  CallTable::Call call = NewCall(absl::Seconds(30));
  const absl::Time deadline = call.deadline;
  Packet request = Request();
  const absl::StatusOr<CallTable::Begun> begun = table->Begin(call, link, request);
  ASSERT_TRUE(begun.ok());
  ASSERT_TRUE(begun->leaves_now);
  // On another thread.
  clock.FailNext(absl::ZeroDuration());
  EXPECT_THROW(Begin(*table, link, absl::Seconds(10)).status().IgnoreError(), std::bad_alloc);
  EXPECT_EQ(ended_.size(), 2u);
  link->Send(std::move(request));
  table->EndIfLate(begun->number, deadline, *link, /*bytes=*/10);
  WireReader reader(connection->sent.back());
  const absl::StatusOr<Frame> last = ReadFrame(reader);
  ASSERT_TRUE(last.ok());
  EXPECT_EQ(last->kind, FrameKind::kCancel);
  EXPECT_EQ(last->call, begun->number);
  // Those that come later have one.
  const absl::StatusOr<CallTable::Begun> next = Begin(*table, link, absl::Seconds(30));
  ASSERT_TRUE(next.ok());
  table->EndIfLate(next->number, deadline, *link, /*bytes=*/10);
  EXPECT_EQ(table->size(), 1u);
  table->Close(absl::CancelledError("end"));
}

// Else its caller would take it for one that was never made.
TEST_F(CallTableTest, WhereThereIsNoMemoryForItsCancelALateCallHasEndedAllTheSame) {
  const auto link = NewLink(*table_);
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    int ended = 0;
    absl::StatusCode how = absl::StatusCode::kOk;
    CallTable::Call call = NewCall(absl::Seconds(10));
    call.done = [&](const absl::StatusOr<Body>& reply, bool) {
      ++ended;
      how = reply.status().code();
    };
    Packet request = Request();
    const absl::StatusOr<CallTable::Begun> begun = table_->Begin(call, link, request);
    ASSERT_TRUE(begun.ok());
    ASSERT_TRUE(table_->OnLeaving(begun->number, request));
    FailAllocation(nth);
    // It is there, and then it is not, as where its timer was faster.
    for (int i = 0; i < 2; ++i) {
      table_->EndIfLate(begun->number, absl::InfinitePast(), *link, /*bytes=*/10);
    }
    failed = FailAllocation(-1);
    EXPECT_EQ(ended, 1);
    EXPECT_EQ(how, absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(table_->size(), 0u);
  }
}

// On the clock's thread, which ends the process if that throws.
TEST_F(CallTableTest, WhereThereIsNoMemoryADeadlineEndsItsCallsAllTheSame) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const auto table = NewTable({});
    const auto link = NewLink(*table);
    int ended = 0;
    for (const int seconds : {10, 10, 20}) {
      ASSERT_TRUE(BeginCounted(*table, link, &ended, absl::Seconds(seconds)).ok());
    }
    FailAllocation(nth);
    clock_.Advance(absl::Seconds(10));
    failed = FailAllocation(-1);
    EXPECT_GE(ended, 2);
    clock_.Advance(absl::Seconds(10));
    EXPECT_EQ(ended, 3);
    EXPECT_EQ(table->size(), 0u);
  }
}

TEST_F(CallTableTest, WhereThereIsNoMemoryALinkThatIsOverEndsItsCallsAllTheSame) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const auto table = NewTable({});
    const auto link = NewLink(*table);
    int ended = 0;
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(BeginCounted(*table, link, &ended).ok());
    const absl::Status why = absl::UnavailableError("it broke");
    FailAllocation(nth);
    table->EndCallsOver(*link, why);
    failed = FailAllocation(-1);
    EXPECT_EQ(ended, 2);
    EXPECT_EQ(table->size(), 0u);
    EXPECT_TRUE(absl::IsAborted(Begin(*table, link).status()));
  }
}

TEST_F(CallTableTest, NoneBeginsAfterTheEnd) {
  const auto link = NewLink(*table_);
  ASSERT_TRUE(Begin(*table_, link, absl::Seconds(10)).ok());
  table_->Close(absl::CancelledError("end"));
  ASSERT_EQ(ended_.size(), 1u);
  EXPECT_TRUE(absl::IsCancelled(ended_[0]));
  EXPECT_TRUE(absl::IsCancelled(Begin(*table_, link).status()));
  clock_.Advance(absl::Seconds(20));
  EXPECT_EQ(ended_.size(), 1u);
}

}  // namespace
}  // namespace distgrad
