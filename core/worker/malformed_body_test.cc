// A worker and a peer that sends what no worker does: bodies of calls and of replies that say less
// than which edge they bring, or that it is of somebody else, and notices that are none.
#include <ATen/ops/neg.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/membership/membership.h"
#include "core/membership/store/in_process_store.h"
#include "core/rpc/agent_testing.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/call_body.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

absl::Time Later() { return absl::Now() + absl::Minutes(1); }

// Worker 0, and an agent in the place of worker 1, whose answers the tests write.
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
    const absl::StatusOr<Message> echoed = Echo(context, x, MakeId(1, ++edges_));
    EXPECT_TRUE(echoed.ok()) << echoed.status();
    return echoed.ok() ? echoed->tensors.at(0) : at::neg(x);
  }
  // Sends a tensor to the peer, which sends it back by that edge.
  absl::StatusOr<Message> Echo(const Context& context, const at::Tensor& tensor, EdgeId edge) {
    const Future<Message> call =
        worker_->CallAsync("worker1", "keep", {"", {tensor}}, {.context = &context});
    IncomingCall kept = peer_.service.AwaitKept();
    Packet reply = kept.NewReply();
    const size_t body = reply.bytes.size();
    reply.bytes += std::string(kept.body().bytes());
    SetEdge(body, edge, &reply);
    kept.Reply(std::move(reply));
    return call.Wait();
  }
  // Both ends know that what was sent is lost, so that no pass waits for it.
  void ExpectLost(const Context& context, const at::Tensor& root,
                  absl::string_view what = "call body ends too early") {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!peer_.service.HasLost(0) && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_TRUE(peer_.service.HasLost(0)) << "the peer waits";
    const absl::Status why = peer_.service.AwaitLost(0);
    EXPECT_TRUE(absl::StrContains(why.message(), what)) << why;
    const absl::Status pass =
        context.Backward({at::sum(root)}, {.deadline = absl::Now() + absl::Seconds(20)});
    EXPECT_TRUE(absl::StrContains(pass.message(), what)) << pass;
  }
  // The peer calls with an edge of that worker.
  void ExpectEndsByCall(WorkerRank maker) {
    const Context context = worker_->NewContext();
    const at::Tensor echoed = Echoed(context);
    const std::string what = absl::StrCat("is worker ", maker, "'s, not its sender's");
    Packet call;
    const absl::StatusOr<size_t> body =
        AppendCallBody({.context = context.id(), .edge = MakeId(maker, 1), .recorded = {0}},
                       {"", {at::ones({3}).requires_grad_()}}, &call, DeviceMap());
    ASSERT_TRUE(body.ok()) << body.status();
    const absl::Status failed = peer_.Call(0, "f", call.bytes).Wait().status();
    EXPECT_TRUE(absl::StrContains(failed.message(), what)) << failed;
    ExpectLost(context, echoed, what);
  }

  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  const std::shared_ptr<Store> store_ = NewInProcessStore();
  const std::unique_ptr<Clock> clock_ = NewSystemClock().value();
  Membership members_{store_, {.name = "worker1", .rank = 1, .world_size = 2}};
  TestAgent peer_{clock_.get(), network_, 1, /*incarnation=*/1};
  std::unique_ptr<Worker> worker_;
  uint64_t edges_ = 0;  // that the peer has made
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

// A backward would say of whoever the edge names what is wrong with it.
TEST_F(MalformedBodyTest, SoDoesACallWhoseEdgeIsOfAnotherWorker) { ExpectEndsByCall(2); }

TEST_F(MalformedBodyTest, SoDoesACallWhoseEdgeIsOfItsReceiver) { ExpectEndsByCall(0); }

TEST_F(MalformedBodyTest, SoDoesAReplyWhoseEdgeIsOfAnotherWorker) {
  const Context context = worker_->NewContext();
  const at::Tensor echoed = Echoed(context);
  const std::string what = "is worker 2's, not its sender's";
  const absl::Status failed = Echo(context, at::ones({3}).requires_grad_(), MakeId(2, 1)).status();
  EXPECT_TRUE(absl::StrContains(failed.message(), what)) << failed;
  ExpectLost(context, echoed, what);
}

// An error has no body.
TEST_F(MalformedBodyTest, AnErrorEndsNothing) {
  const Context context = worker_->NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  const absl::Status failed =
      worker_->Call("worker1", "fail", {"", {x}}, {.context = &context}).status();
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  Echoed(context);
  EXPECT_FALSE(peer_.service.HasLost(0));
}

}  // namespace
}  // namespace distgrad
