// Data parallel and its pieces on CUDA itself, over one GPU that is in the list twice, compared
// with the plain module and with torch's own operators. Skipped without a GPU.
#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/parallel/broadcast.h"
#include "core/parallel/data_parallel.h"
#include "core/parallel/new_device_collectives.h"
#include "core/parallel/scatter_gather.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;

const c10::Device kGpu(c10::kCUDA, 0);
const std::vector<c10::Device> kTwice = {kGpu, kGpu};

class OneGpuTwice : public testing::Test {
 protected:
  void SetUp() override {
    // Half a batch may get another kernel than all of it, and only one of the two may round its
    // numbers to TF32, to a thousandth.
    at::globalContext().setAllowTF32CuDNN(false);
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
    torch::manual_seed(1);
  }
};

// Convolutions, and no batch statistics: those of halves are others.
struct ConvNetImpl : nn::Cloneable<ConvNetImpl> {
  ConvNetImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 16, 3).padding(1)));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).stride(2)));
    last = register_module("last", nn::Linear(32 * 7 * 7, 10));
  }
  Tensor forward(const Tensor& x) {
    return last(torch::relu(second(torch::relu(first(x)))).flatten(1));
  }
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::Linear last{nullptr};
};
TORCH_MODULE(ConvNet);

// The largest difference, in parts of the largest number.
double Difference(const Tensor& a, const Tensor& b) {
  const double largest = b.to(at::kDouble).abs().max().item<double>();
  const double difference = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
  return difference / std::max(largest, 1e-12);
}

struct Run {
  at::ScalarType dtype = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  bool own_stream = false;
  int steps = 100;
};

// Losses by step, and the parameters in the end.
struct Trained {
  std::vector<double> losses;
  std::vector<Tensor> parameters;
};

Trained Train(const Run& run, bool parallel) {
  torch::manual_seed(7);
  const Tensor images = torch::rand({64, 3, 15, 15}).to(kGpu, run.dtype).contiguous(run.format);
  const Tensor labels = torch::randint(10, {64}, at::kLong).to(kGpu);
  ConvNet net;
  net->to(kGpu, run.dtype);
  std::optional<DataParallel<ConvNetImpl>> replicas;
  if (parallel) replicas.emplace(net, DataParallelOptions{.devices = kTwice});
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  Trained trained;
  std::optional<c10::StreamGuard> on_stream;
  if (run.own_stream) {
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    const c10::Stream stream = guard.getNewStream(kGpu);
    c10::Event made(c10::kCUDA);
    made.record(guard.getStream(kGpu));
    made.block(stream);
    on_stream.emplace(stream);
  }
  for (int step = 0; step < run.steps; ++step) {
    optimizer.zero_grad();
    const Tensor output = parallel ? replicas->Forward(images) : net->forward(images);
    const Tensor loss = torch::cross_entropy_loss(output.to(at::kFloat), labels);
    loss.backward();
    optimizer.step();
    trained.losses.push_back(loss.item<double>());
  }
  for (const Tensor& parameter : net->parameters()) {
    trained.parameters.push_back(parameter.detach().clone());
  }
  torch::cuda::synchronize();
  return trained;
}

void ExpectAlike(const Run& run, double tolerance) {
  const Trained plain = Train(run, /*parallel=*/false);
  const Trained parallel = Train(run, /*parallel=*/true);
  ASSERT_EQ(plain.losses.size(), parallel.losses.size());
  for (size_t step = 0; step < plain.losses.size(); ++step) {
    ASSERT_NEAR(parallel.losses[step], plain.losses[step],
                tolerance * std::max(1.0, plain.losses[step]))
        << "step " << step;
  }
  EXPECT_LT(plain.losses.back(), plain.losses.front()) << "it learns";
  for (size_t k = 0; k < plain.parameters.size(); ++k) {
    EXPECT_LT(Difference(parallel.parameters[k], plain.parameters[k]), 10 * tolerance) << k;
  }
}

TEST_F(OneGpuTwice, TrainsAsThePlainModuleDoes) { ExpectAlike({}, 1e-3); }

// PyTorch's test of this name; here of as many as there are.
TEST_F(OneGpuTwice, DataParallelUsesAllAvailableCUDADevices) {
  struct PassImpl : nn::Cloneable<PassImpl> {
    void reset() override {}
    Tensor forward(Tensor x) { return x; }
  };
  const Tensor output = RunDataParallel(std::make_shared<PassImpl>(), torch::ones({16, 3}));
  EXPECT_EQ(output.device(), kGpu);
  EXPECT_TRUE(output.cpu().equal(torch::ones({16, 3})));
}

TEST_F(OneGpuTwice, TrainsInChannelsLast) {
  ExpectAlike({.format = at::MemoryFormat::ChannelsLast}, 1e-3);
}

TEST_F(OneGpuTwice, TrainsInBFloat16) { ExpectAlike({.dtype = at::kBFloat16, .steps = 10}, 0.05); }

TEST_F(OneGpuTwice, TrainsOnAStreamThatIsNotTheDefaultOne) {
  ExpectAlike({.own_stream = true}, 1e-3);
}

// How often some steps have waited for the GPU, by what torch warns of on all threads.
int Synchronizations(const std::function<void()>& step) {
  for (int i = 0; i < 3; ++i) step();
  torch::cuda::synchronize();
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 10; ++i) step();
  const std::string said = testing::internal::GetCapturedStderr();
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  const std::string warning = "called a synchronizing CUDA operation";
  int count = 0;
  for (size_t at = said.find(warning); at != std::string::npos; at = said.find(warning, at + 1)) {
    ++count;
  }
  return count;
}

TEST_F(OneGpuTwice, AStepWaitsForTheGpuNoMoreThanThePlainModules) {
  const Tensor images = torch::rand({64, 3, 15, 15}, kGpu);
  EXPECT_EQ(Synchronizations([&] { images.sum().item<float>(); }), 10) << "that waits";
  ConvNet net;
  net->to(kGpu);
  DataParallel<ConvNetImpl> parallel(net, DataParallelOptions{.devices = kTwice});
  const int plain = Synchronizations([&] { net->forward(images).sum().backward(); });
  const int ours = Synchronizations([&] { parallel.Forward(images).sum().backward(); });
  RecordProperty("waits_in_10_steps", ours);
  RecordProperty("waits_in_10_steps_of_the_plain_module", plain);
  EXPECT_LE(ours, plain);
}

TEST_F(OneGpuTwice, PartsOfABatchAndBack) {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kLong, at::kBool}) {
    for (const Tensor& batch :
         {torch::randint(2, {9, 5}).to(dtype), torch::randint(2, {9, 5}).to(kGpu, dtype),
          torch::randint(2, {9, 5}).to(dtype).pin_memory()}) {
      const std::vector<Tensor> parts = Scatter(batch, kTwice);
      ASSERT_EQ(parts.size(), 2u);
      EXPECT_EQ(parts[0].device(), kGpu);
      EXPECT_TRUE(Gather(parts, kGpu).cpu().equal(batch.cpu()));
      EXPECT_TRUE(Gather(parts, c10::Device(c10::kCPU)).equal(batch.cpu()));
    }
  }
}

TEST_F(OneGpuTwice, SumsAndCopiesOfManyTensors) {
  const auto collectives = NewDeviceCollectives(kTwice, {.bucket_bytes = 1 << 20});
  ASSERT_TRUE(collectives.ok()) << collectives.status();
  std::vector<TensorVector> lists(2);
  for (int i = 0; i < 300; ++i) {
    const int64_t size = i % 7 == 0 ? 100'000 + i : i;
    for (TensorVector& list : lists) {
      list.push_back(i % 5 == 0 ? torch::rand({size, 2}, kGpu).t() : torch::rand({size}, kGpu));
    }
  }
  const auto sums = (*collectives)->Reduce(lists, kGpu);
  ASSERT_TRUE(sums.ok()) << sums.status();
  for (size_t k = 0; k < sums->size(); ++k) {
    ASSERT_TRUE((*sums)[k].equal(lists[0][k] + lists[1][k])) << k;
  }
  const TensorVector on_host = {torch::rand({1000}), torch::rand({3, 4}).t()};
  const auto copies = (*collectives)->Broadcast(on_host);
  ASSERT_TRUE(copies.ok()) << copies.status();
  for (const TensorVector& list : *copies) {
    for (size_t k = 0; k < list.size(); ++k) EXPECT_TRUE(list[k].cpu().equal(on_host[k]));
  }
}

TEST_F(OneGpuTwice, BroadcastAndReduceHaveEachOthersGradients) {
  const Tensor x = torch::rand({50}, kGpu).requires_grad_();
  const std::vector<Tensor> copies = Broadcast(x, kTwice);
  const Tensor sum = ReduceAdd({copies[0] * 2, copies[1] * 3}, kGpu);
  EXPECT_LT(Difference(sum.detach(), x.detach() * 5), 1e-6);
  sum.sum().backward();
  EXPECT_TRUE(x.grad().cpu().equal(torch::full({50}, 5.0f)));
}

}  // namespace
}  // namespace distgrad
