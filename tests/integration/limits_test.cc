// Passes at the limits of their workers: what is within them works, and what is not is an error
// that names the limit, at once, on every worker.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "tests/integration/team.h"

namespace distgrad {
namespace {

Tensors Sin(Tensors in, Request&) { return {in[0].sin()}; }

class LimitsTest : public ::testing::TestWithParam<std::string> {
 protected:
  ClusterOptions With(const Limits& limits) const {
    return {.transport = GetParam(), .limits = limits};
  }
};

void ExpectExhausted(const absl::Status& status, const std::vector<std::string>& texts) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  for (const std::string& text : texts)
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status << "\nlacks " << text;
}

// They become ready together, and would go together.
TEST_P(LimitsTest, GradientsThatAreSmallEnoughEachArriveTogether) {
  Team team(2, With({.message_bytes = 100 << 10}));
  const at::Tensor x = Leaf({15000}, 1);
  for (const int count : {1, 2, 3, 8}) {
    Context context = team[0].NewContext();
    at::Tensor sum = at::zeros({});
    for (int i = 0; i < count; ++i) sum = sum + team.Run(0, 1, context, Sin, {x})[0].sum();
    const absl::Status done = context.Backward({sum});
    EXPECT_TRUE(done.ok()) << done;
    EXPECT_TRUE(GradientOf(context, x).allclose(x.cos() * count));
  }
  team.AwaitQuiet(0);
}

// An expanded tensor is small on its way there; its gradient is not.
TEST_P(LimitsTest, AGradientThatIsTooLargeIsAnErrorOfAllWorkers) {
  Team team(3, With({.message_bytes = 100 << 10}));
  const at::Tensor x = Leaf({1}, 1);
  Context context = team[0].NewContext();
  const auto sum = [](Tensors in, Request&) { return Tensors{in[0].sin().sum()}; };
  const auto relay = [&](Tensors in, Request& r) { return team.Try(1, 2, r.Nested(), sum, in); };
  const at::Tensor y = team.Run(0, 1, context, relay, {x.expand({50000})})[0];
  ExpectExhausted(context.Backward({y}),
                  {"on worker 'worker2' (2): sending a gradient to worker 'worker1' (1): the "
                   "message has 200",
                   " bytes; limit message_bytes is 102400"});
  // Of this context alone, and only of that pass.
  team.AwaitQuiet(1);
  EXPECT_TRUE(team.Try(0, 1, {.context = &context}, Sin, {x}).ok());
  Context next = team[0].NewContext();
  const at::Tensor z = team.Run(0, 2, next, Sin, {x})[0];
  const absl::Status done = next.Backward({z.sum()});
  EXPECT_TRUE(done.ok()) << done;
}

// No gradient will come for it, and none is waited for.
TEST_P(LimitsTest, AReplyThatIsTooLargeLeavesNoEdge) {
  Team team(2, With({.message_bytes = 100 << 10}));
  const at::Tensor x = Leaf({1}, 1);
  Context context = team[0].NewContext();
  ExpectExhausted(team.Try(0, 1, {.context = &context}, Sin, {x.expand({50000})}).status(),
                  {"'run' on worker 'worker1' (1): the message has 200",
                   " bytes; limit message_bytes is 102400"});
  const at::Tensor y = team.Run(0, 1, context, Sin, {x})[0];
  const absl::Status done = context.Backward({y.sum()});
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_TRUE(GradientOf(context, x).allclose(x.cos()));
}

TEST_P(LimitsTest, AsManyGradientsAsTensorsAreAllowed) {
  constexpr int kTensors = 70000;
  Team team(2, With({.tensors_per_message = kTensors}));
  const at::Tensor x = Leaf({kTensors}, 1);
  Context context = team[0].NewContext();
  const auto sum = [](Tensors in, Request&) { return Tensors{at::stack(in).sum()}; };
  const at::Tensor y = team.Run(0, 1, context, sum, x.unbind())[0];
  const absl::Status done = context.Backward({y * 2});
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_TRUE(GradientOf(context, x).equal(at::full({kTensors}, 2.0f)));
}

// Its edge was never made, also if the other end has room by then.
TEST_P(LimitsTest, AContextThatHasBeenRefusedFails) {
  Team team(2, With({.contexts_per_peer = 1}));
  const at::Tensor x = Leaf({2}, 1);
  Context first = team[0].NewContext(), refused = team[0].NewContext();
  team.Run(0, 1, first, Sin, {x});
  const std::vector<std::string> texts = {"on worker 'worker1' (1)",
                                          "limit contexts_per_peer is 1"};
  ExpectExhausted(team.Try(0, 1, {.context = &refused}, Sin, {x}).status(), texts);
  // What has no edge is only asked to come again.
  Context patient = team[0].NewContext();
  ExpectExhausted(team.Try(0, 1, {.context = &patient}, Sin, {x.detach()}).status(), texts);
  first.Release();
  EXPECT_TRUE(Eventually([&] { return team[1].context_count() == 0; }));
  ExpectExhausted(refused.Backward({x.sum()}), texts);
  ExpectExhausted(team.Try(0, 1, {.context = &refused}, Sin, {x}).status(), texts);
  const at::Tensor y = team.Run(0, 1, patient, Sin, {x})[0];
  const absl::Status done = patient.Backward({y.sum()});
  EXPECT_TRUE(done.ok()) << done;
}

// Workers with limits of their own: what one of them sends is beyond those of the other.
class ReceiversLimitTest : public ::testing::Test {
 protected:
  static constexpr char kLimit[] = " bytes; limit message_bytes is 1048576";

  Team team_{2, {.transport = "socket", .limits_of = {{1, {.message_bytes = 1 << 20}}}}};
  const at::Tensor large_ = at::ones({1 << 19});  // of 2 MiB
};

TEST_F(ReceiversLimitTest, AMessageBeyondItFailsAlone) {
  const at::Tensor x = Leaf({1}, 1);
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, Sin, {x})[0];
  absl::Notification go;
  const auto wait = [&](Tensors in, Request&) {
    go.WaitForNotification();
    return in;
  };
  Future<Message> open = team_.Start(0, 1, {}, wait, {x.detach()});
  ExpectExhausted(
      team_.Try(0, 1, {}, Sin, {large_}).status(),
      {"'run' on worker 'worker1' (1): receiving the arguments: the message has 2097", kLimit});
  const auto make = [&](Tensors, Request&) { return Tensors{large_}; };
  ExpectExhausted(
      team_.Try(1, 0, {}, make, {}).status(),
      {"'run' on worker 'worker0' (0): receiving the answer: the message has 2097", kLimit});
  go.Notify();
  EXPECT_TRUE(open.Wait().ok()) << open.Wait().status();
  EXPECT_TRUE(context.Backward({y.sum()}).ok());
}

TEST_F(ReceiversLimitTest, OfGradientsBeyondItBothEndsAreTold) {
  const at::Tensor x = Leaf({1}, 1);
  Context context = team_[1].NewContext();
  const auto sum = [](Tensors in, Request&) { return Tensors{in[0].sin().sum()}; };
  const at::Tensor y = team_.Run(1, 0, context, sum, {x.expand({1 << 19})})[0];
  const absl::Status done = context.Backward({y});
  EXPECT_TRUE(absl::StrContains(done.message(), kLimit)) << done;
  EXPECT_TRUE(team_.Try(1, 0, {}, Sin, {x.detach()}).ok());
}

// Nothing that was read says whose they are.
TEST_F(ReceiversLimitTest, BytesBeyondItEndTheConnectionAndSayWhy) {
  for (int i = 0; i < 2; ++i) {
    testing::internal::CaptureStderr();
    const absl::Status why =
        team_[0].Call("worker1", "run", Message{std::string(2 << 20, 'x'), {}}).status();
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
    for (const std::string& text : {std::string(why.message()), log}) {
      EXPECT_TRUE(absl::StrContains(text, "worker 'worker0' (0): the message has 2097")) << text;
      EXPECT_TRUE(absl::StrContains(text, kLimit)) << text;
    }
    EXPECT_TRUE(team_.Try(0, 1, {}, Sin, {Leaf({1}, 1).detach()}).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, LimitsTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
