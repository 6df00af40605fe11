// Two workers in two processes, on one GPU: tensors, gradients and a pipeline go from process to
// process by the channel for GPUs, and one that is killed is an error of the other. With
// --config=cuda alone; it needs a GPU, and is skipped without.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/membership/store.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "core/worker/context.h"
#include "core/worker/optimizer.h"
#include "core/worker/worker.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;
using Tensors = std::vector<Tensor>;

const c10::Device kGpu(c10::kCUDA, 0);
constexpr int kSteps = 10;
constexpr int kMicroBatches = 4;
constexpr double kRate = 0.1;
// For one process, by a signal: one that hangs is not waited for until the whole test is ended.
constexpr unsigned kSeconds = 120;

// The layers of a stage, the same ones in every process. What goes between the two is 512 KiB for a
// micro-batch, and so by the channel.
nn::Sequential Layers(int stage) {
  torch::manual_seed(1 + stage);
  nn::Sequential layers;
  if (stage == 0) {
    layers = nn::Sequential(nn::Linear(64, 512), nn::Tanh(), nn::Linear(512, 2048), nn::Tanh());
  } else {
    layers = nn::Sequential(nn::Linear(2048, 256), nn::Tanh(), nn::Linear(256, 10));
  }
  layers->to(kGpu);
  return layers;
}

Tensor Loss(const Tensor& scores, const Tensor& labels) {
  return at::cross_entropy_loss(scores, labels);
}

struct Batch {
  Tensor inputs, labels;
};

Batch BatchOf(int step) {
  torch::manual_seed(100 + step);
  return {at::rand({64 * kMicroBatches, 64}).to(kGpu),
          at::randint(10, {64 * kMicroBatches}, at::kLong).to(kGpu)};
}

// A worker with its stage.
struct Node {
  std::unique_ptr<Worker> worker;
  nn::Sequential layers{nullptr};
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<PipelineStages> stages;
};

absl::StatusOr<Node> NewNode(const std::string& rendezvous, int rank, bool channel) {
  Node node;
  DG_ASSIGN_OR_RETURN(
      node.worker,
      Worker::Create({.rendezvous = rendezvous,
                      .rank = rank,
                      .world_size = 2,
                      .heartbeat_limit = absl::Seconds(10),
                      .device_maps = {{absl::StrCat("worker", 1 - rank), {{kGpu, kGpu}}}},
                      .gpu_channel = channel}));
  node.layers = Layers(rank);
  DG_ASSIGN_OR_RETURN(node.optimizer,
                      Optimizer::Create(node.worker.get(), std::make_unique<torch::optim::SGD>(
                                                               node.layers->parameters(), kRate)));
  nn::Sequential layers = node.layers;
  DG_ASSIGN_OR_RETURN(
      node.stages,
      PipelineStages::Create(
          node.worker.get(), "model",
          {{rank,
            {.forward = [layers](Tensors in) mutable { return Tensors{layers->forward(in[0])}; },
             .loss = [](Tensors out, Tensors labels) { return Loss(out[0], labels[0]); }}}}));
  return node;
}

// What the child does: it is worker 1 until it is killed, or told to leave.
int Serve(const std::string& rendezvous, bool channel) {
  alarm(kSeconds);
  const auto say = [](absl::string_view text) {
    std::printf("%s\n", std::string(text).c_str());
    std::fflush(stdout);
    return 1;
  };
  absl::StatusOr<Node> node = NewNode(rendezvous, 1, channel);
  if (!node.ok()) return say(node.status().ToString());
  absl::Notification leave;
  Worker& worker = *node->worker;
  absl::Status status = worker.Register("double", [](Request& r) -> absl::StatusOr<Message> {
    return Message{"", {r.message.tensors[0] * 2}};
  });
  status.Update(worker.Register("sum of parameters", [&](Request&) -> absl::StatusOr<Message> {
    Tensor sum = at::zeros({}, kGpu);
    for (const Tensor& parameter : node->layers->parameters()) sum = sum + parameter.abs().sum();
    return Message{"", {sum.detach().cpu()}};
  }));
  status.Update(worker.Register("leave", [&](Request&) -> absl::StatusOr<Message> {
    leave.Notify();
    return Message{};
  }));
  if (!status.ok()) return say(status.ToString());
  say("ready");
  leave.WaitForNotification();
  status = worker.Leave(Deadline::After(absl::Seconds(30)));
  return status.ok() ? 0 : say(status.ToString());
}

// This process is worker 0, and a child is worker 1; with the channel for GPUs, or without.
class TwoWorkersOneGpuTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() < 1) GTEST_SKIP() << "this machine has no GPU";
    const char* const folder = std::getenv("TEST_TMPDIR");
    file_ = absl::StrCat(folder == nullptr ? "/tmp" : folder, "/workers-XXXXXX");
    const int fd = mkstemp(file_.data());
    ASSERT_GE(fd, 0);
    close(fd);
    unlink(file_.c_str());
    const std::string rendezvous = absl::StrCat("file://", file_);
    child_ = std::make_unique<ChildProcess>(
        std::vector<std::string>{"--serve", rendezvous, GetParam() ? "1" : "0"});
    absl::StatusOr<Node> node = NewNode(rendezvous, 0, GetParam());
    ASSERT_TRUE(node.ok()) << node.status();
    here_ = *std::move(node);
    ASSERT_EQ(child_->ReadLine(), "ready");
    const auto entry = here_.worker->store()->Get("worker/1", Deadline::After(absl::Seconds(10)));
    ASSERT_TRUE(entry.ok()) << entry.status();
    EXPECT_EQ(absl::StrContains(*entry, "#gpus="), GetParam()) << *entry;
  }
  void TearDown() override { unlink(file_.c_str()); }

  void Leave() {
    ASSERT_TRUE(here_.worker->Call("worker1", "leave", {}).ok());
    EXPECT_EQ(child_->Wait(), 0) << child_->ReadLine();
  }

  std::string file_;
  std::unique_ptr<ChildProcess> child_;
  Node here_;
};

TEST_P(TwoWorkersOneGpuTest, TensorsAndGradientsGoFromProcessToProcess) {
  for (const int64_t size : {0, 1, 1024, 1025, 65536, 65537, 1000001, 30000000}) {
    const Tensor x = at::rand({size}, kGpu).requires_grad_();
    const Context context = here_.worker->NewContext();
    const auto reply = here_.worker->Call("worker1", "double", {"", {x}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << size << ": " << reply.status();
    EXPECT_EQ(reply->tensors[0].device(), kGpu);
    EXPECT_TRUE(reply->tensors[0].detach().equal(x.detach() * 2)) << size;
    const absl::Status backward = context.Backward({(reply->tensors[0] * 3).sum()});
    ASSERT_TRUE(backward.ok()) << size << ": " << backward;
    EXPECT_TRUE(context.Gradient(x)->cpu().equal(at::full({size}, 6.0f))) << size;
  }
  Leave();
}

TEST_P(TwoWorkersOneGpuTest, APipelineTrainsAsOneProcess) {
  const auto schedule = ZeroBubbleH2(2, kMicroBatches);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  const auto pipeline =
      Pipeline::Create(here_.worker.get(),
                       {.name = "model", .workers = {"worker0", "worker1"}, .schedule = *schedule});
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  nn::Sequential front = Layers(0), back = Layers(1);
  Tensors parameters = front->parameters();
  for (const Tensor& parameter : back->parameters()) parameters.push_back(parameter);
  torch::optim::SGD alone(parameters, kRate);
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = BatchOf(step);
    const Context context = here_.worker->NewContext();
    const auto result = (*pipeline)->Train(context, {batch.inputs}, {batch.labels});
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(here_.optimizer->Step(context).ok());

    alone.zero_grad();
    const Tensors inputs = batch.inputs.chunk(kMicroBatches),
                  labels = batch.labels.chunk(kMicroBatches);
    Tensor sum = at::zeros({}, kGpu);
    for (int i = 0; i < kMicroBatches; ++i) {
      const Tensor loss = Loss(back->forward(front->forward(inputs[i])), labels[i]) / kMicroBatches;
      loss.backward();
      sum = sum + loss.detach();
    }
    alone.step();
    EXPECT_TRUE(torch::allclose(result->loss.cpu(), sum.cpu(), 1e-4, 1e-6))
        << step << ": " << result->loss.item<float>() << " and " << sum.item<float>();
  }
  const Tensors ours = here_.layers->parameters(), theirs = front->parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours[i], theirs[i], 1e-4, 1e-6)) << i;
    EXPECT_FALSE(ours[i].equal(Layers(0)->parameters()[i])) << "it trained";
  }
  const auto sum = here_.worker->Call("worker1", "sum of parameters", {});
  ASSERT_TRUE(sum.ok()) << sum.status();
  Tensor expected = at::zeros({}, kGpu);
  for (const Tensor& parameter : back->parameters()) expected = expected + parameter.abs().sum();
  EXPECT_TRUE(torch::allclose(sum->tensors[0], expected.detach().cpu(), 1e-4));
  Leave();
}

TEST_P(TwoWorkersOneGpuTest, APeerThatIsKilledIsAnErrorAndTheGpuWorksOn) {
  const Tensor x = at::rand({int64_t{64} << 20}, kGpu);
  ASSERT_TRUE(here_.worker->Call("worker1", "double", {"", {x}}).ok());
  std::vector<Future<Message>> calls;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(here_.worker->CallAsync("worker1", "double", {"", {x}}));
  }
  child_->Signal(SIGKILL);
  EXPECT_EQ(child_->Wait(), -SIGKILL);
  int failed = 0;
  for (Future<Message>& call : calls) {
    const absl::Status status = call.Wait().status();
    if (status.ok()) continue;
    ++failed;
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
  EXPECT_GT(failed, 0) << "the calls had ended before it was killed";
  EXPECT_TRUE((x * 2).equal(x + x));
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutChannel, TwoWorkersOneGpuTest, testing::Bool());

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 4 && argv[1] == std::string("--serve")) {
    return distgrad::Serve(argv[2], argv[3] == std::string("1"));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
