// Workers whose wall clock is set while they run.
#include "tests/testing/wall_clock.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

class WallClockTest : public ::testing::TestWithParam<std::string> {
 protected:
  WallClockTest() : cluster_({.transport = GetParam()}) {
    // Answers when its caller has given up, and never otherwise.
    EXPECT_TRUE(worker(1)
                    .RegisterAsync("wait",
                                   [](Request& r) {
                                     auto promise = std::make_shared<Promise<Message>>();
                                     r.cancellation->OnCancel(
                                         [promise] { promise->Set(Message{}); });
                                     return promise->future();
                                   })
                    .ok());
    // What is left of the caller's time, in seconds; and a call in turn.
    EXPECT_TRUE(worker(1)
                    .Register("nest",
                              [this](Request& r) -> absl::StatusOr<Message> {
                                const absl::Duration left = r.deadline.Left();
                                EXPECT_GT(left, absl::ZeroDuration());
                                EXPECT_LE(left, absl::Minutes(2));
                                return worker(1).Call(0, "echo", r.message, r.Nested());
                              })
                    .ok());
    EXPECT_TRUE(
        worker(0)
            .Register("echo", [](Request& r) -> absl::StatusOr<Message> { return r.message; })
            .ok());
  }
  ~WallClockTest() override { SetWallClockAhead(absl::ZeroDuration()); }
  Worker& worker(int i) { return cluster_[i]; }

  Cluster cluster_;
};

// By a minute, in either direction, and back.
TEST_P(WallClockTest, ADeadlineIsAsFarAwayAsItsMakerSaid) {
  for (const int ahead : {0, -60, 3600, 0}) {
    SCOPED_TRACE(ahead);
    SetWallClockAhead(absl::Seconds(ahead));
    const auto in_time = [] { return absl::Now() + absl::Minutes(1); };
    const absl::StatusOr<Message> reply =
        worker(0).Call(1, "nest", {"x", {}}, {.deadline = in_time()});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->payload, "x");

    const absl::Status late =
        worker(0).Call(1, "wait", {}, {.deadline = absl::Now() + absl::Milliseconds(50)}).status();
    EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded) << late;

    Context context = worker(0).NewContext();
    const at::Tensor x = at::ones({3}).requires_grad_();
    const auto y = worker(0).CallOp(1, "aten::neg", {x}, {.context = &context});
    ASSERT_TRUE(y.ok()) << y.status();
    const absl::Status done = context.Backward({(*y)[0].toTensor().sum()}, {.deadline = in_time()});
    EXPECT_TRUE(done.ok()) << done;

    const Future<Message> never = worker(0).CallAsync(1, "wait", {});
    EXPECT_FALSE(never.WaitUntil(absl::Now() + absl::Milliseconds(20)));
    never.Cancel();
  }
}

// The clock is set back between the making of a deadline and the wait for it, which by the wall
// clock would last an hour.
TEST_P(WallClockTest, ACallInFlightIsNotMoved) {
  const Deadline soon = absl::Now() + absl::Milliseconds(50);
  SetWallClockAhead(-absl::Hours(1));
  const absl::Status late = worker(0).Call(1, "wait", {}, {.deadline = soon}).status();
  EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded) << late;
  const absl::Status alone = worker(0).Barrier(soon);
  EXPECT_EQ(alone.code(), StatusCode::kDeadlineExceeded) << alone;
}

INSTANTIATE_TEST_SUITE_P(Transports, WallClockTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
