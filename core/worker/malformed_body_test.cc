// A worker and a peer that sends what no worker does: bodies of calls and of replies that say less
// than which edge they bring, and notices that are none.
#include <ATen/ops/neg.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/membership/membership.h"
#include "core/membership/store/in_process_store.h"
#include "core/rpc/agent_testing.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

absl::Time Later() { return absl::Now() + absl::Minutes(1); }

// Worker 0, and an agent in the place of worker 1. It echoes what is sent to "echo", so that the
// worker records an edge, and keeps other calls.
class MalformedBodyTest : public testing::Test {
 protected:
  void SetUp() override {
    std::thread other([this] {
      peer_.info.name = "worker1";
      const absl::StatusOr<WorkerInfo> claimed = members_.Claim(Later());
      ASSERT_TRUE(claimed.ok()) << claimed.status();
      peer_.info.incarnation = claimed->incarnation;
      const absl::StatusOr<std::vector<WorkerInfo>> all = members_.Enter(peer_.info, Later());
      ASSERT_TRUE(all.ok()) << all.status();
      const absl::Status started = peer_.agent->Start(peer_.info, *all);
      ASSERT_TRUE(started.ok()) << started;
    });
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(
        {.store = store_, .rank = 0, .world_size = 2, .transport = "inproc", .network = network_});
    other.join();
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }

  // Has the peer take part in the context, and returns what it gave.
  at::Tensor Echoed(const Context& context) {
    const at::Tensor x = at::ones({3}).requires_grad_();
    const auto echoed = worker_->Call("worker1", "echo", {"", {x}}, {.context = &context});
    EXPECT_TRUE(echoed.ok()) << echoed.status();
    return echoed.ok() ? echoed->tensors.at(0) : at::neg(x);
  }
  // Both ends know that what was sent is lost, so that no pass waits for it.
  void ExpectLost(const Context& context, const at::Tensor& root,
                  const char* what = "call body ends too early") {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!peer_.service.HasLost(0) && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_TRUE(peer_.service.HasLost(0)) << "the peer waits";
    const absl::Status why = peer_.service.AwaitLost(0);
    EXPECT_TRUE(absl::StrContains(why.message(), what)) << why;
    const absl::Status pass =
        context.Backward({at::sum(root)}, {.deadline = absl::Now() + absl::Seconds(20)});
    EXPECT_TRUE(absl::StrContains(pass.message(), what)) << pass;
  }

  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  const std::shared_ptr<Store> store_ = NewInProcessStore();
  const std::unique_ptr<Clock> clock_ = NewSystemClock().value();
  Membership members_{store_, {.name = "worker1", .rank = 1, .world_size = 2}};
  TestAgent peer_{clock_.get(), network_, 1, /*incarnation=*/1};
  std::unique_ptr<Worker> worker_;
};

TEST_F(MalformedBodyTest, ACallThatCannotBeReadEndsItsConnection) {
  const Context context = worker_->NewContext();
  const at::Tensor echoed = Echoed(context);
  const absl::Status failed = peer_.Call(0, "f", "x").Wait().status();
  EXPECT_TRUE(absl::StrContains(failed.message(), "call body ends too early")) << failed;
  ExpectLost(context, echoed);
}

TEST_F(MalformedBodyTest, AReplyThatCannotBeReadEndsItsConnection) {
  const Context context = worker_->NewContext();
  const at::Tensor echoed = Echoed(context);
  const Future<Message> call = worker_->CallAsync("worker1", "keep", {}, {.context = &context});
  IncomingCall kept = peer_.service.AwaitKept();
  Packet reply = kept.NewReply();
  reply.bytes += "x";
  kept.Reply(std::move(reply));
  const absl::Status failed = call.Wait().status();
  EXPECT_TRUE(absl::StrContains(failed.message(), "call body ends too early")) << failed;
  ExpectLost(context, echoed);
}

TEST_F(MalformedBodyTest, SoDoesAReplyThatComesLate) {
  const Context context = worker_->NewContext();
  const at::Tensor echoed = Echoed(context);
  const Future<Message> call = worker_->CallAsync("worker1", "keep", {}, {.context = &context});
  IncomingCall kept = peer_.service.AwaitKept();
  call.Cancel();
  EXPECT_TRUE(absl::IsCancelled(call.Wait().status()));
  Packet reply = kept.NewReply();
  reply.bytes += "x";
  kept.Reply(std::move(reply));
  ExpectLost(context, echoed);
}

TEST_F(MalformedBodyTest, SoDoesANotice) {
  const Context context = worker_->NewContext();
  const at::Tensor echoed = Echoed(context);
  peer_.Notify(0, "x");
  ExpectLost(context, echoed, "reading gradients from worker 'worker1' (1): ");
}

// An error has no body.
TEST_F(MalformedBodyTest, AnErrorEndsNothing) {
  const Context context = worker_->NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  const absl::Status failed =
      worker_->Call("worker1", "fail", {"", {x}}, {.context = &context}).status();
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_TRUE(worker_->Call("worker1", "echo", {"", {x}}, {.context = &context}).ok());
  EXPECT_FALSE(peer_.service.HasLost(0));
}

}  // namespace
}  // namespace distgrad
