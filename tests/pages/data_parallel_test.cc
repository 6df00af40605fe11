// What docs/data_parallel.md shows of C++.
#include "core/parallel/data_parallel.h"

#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/worker/join_process_group.h"

namespace distgrad {
namespace {

using Net = torch::nn::Linear;
using Batches = std::vector<std::pair<at::Tensor, at::Tensor>>;  // with their targets

// [doc: devices]
void Train(Net& net, const std::vector<c10::Device>& devices, const Batches& batches) {
  DataParallel parallel(net, {.devices = devices});  // by default all CUDA devices
  torch::optim::SGD optimizer(net->parameters(), /*lr=*/0.1);
  for (const auto& [batch, target] : batches) {
    optimizer.zero_grad();
    at::mse_loss(parallel.Forward(batch), target).backward();
    optimizer.step();
  }
}
// [doc: end]

// [doc: processes]
// In each process, with batches of its own. The launcher says which processes there are
// (launching.md), unless `rendezvous` does.
absl::Status TrainTogether(Net& net, const Batches& batches,
                           const RendezvousOptions& rendezvous = {}) {
  auto group = JoinProcessGroup({.name = "trainers"}, rendezvous);
  if (!group.ok()) return group.status();
  auto averager = GradientAverager::Create(*group, *net);
  if (!averager.ok()) return averager.status();
  torch::optim::SGD optimizer(net->parameters(), /*lr=*/0.1);
  for (const auto& [batch, target] : batches) {
    optimizer.zero_grad();
    at::mse_loss(net->forward(batch), target).backward();  // ends when .grad are the averages
    optimizer.step();
  }
  while (true) {  // where some have more batches than others
    optimizer.zero_grad();
    const absl::StatusOr<bool> others_go_on = (*averager)->Join();  // in place of a backward
    if (!others_go_on.ok()) return others_go_on.status();
    if (!*others_go_on) return absl::OkStatus();
    optimizer.step();
  }
}
// [doc: end]

Batches RandomBatches(int count) {
  Batches batches;
  for (int i = 0; i < count; ++i) batches.emplace_back(at::rand({6, 3}), at::rand({6, 2}));
  return batches;
}

Net Copy(const Net& net) {
  Net copy(3, 2);
  const std::vector<at::Tensor> from = net->parameters(), to = copy->parameters();
  for (size_t i = 0; i < from.size(); ++i) to[i].detach().copy_(from[i].detach());
  return copy;
}

void ExpectSame(const Net& a, const Net& b) {
  const std::vector<at::Tensor> of_a = a->parameters(), of_b = b->parameters();
  for (size_t i = 0; i < of_a.size(); ++i) EXPECT_TRUE(at::allclose(of_a[i], of_b[i])) << i;
}

TEST(DataParallelPageTest, TwoDevicesDoAsOne) {
  at::manual_seed(1);
  Net one(3, 2), two = Copy(one);
  const Net before = Copy(one);
  const Batches batches = RandomBatches(5);
  const c10::Device cpu(c10::kCPU);
  Train(one, {cpu}, batches);
  Train(two, {cpu, cpu}, batches);
  ExpectSame(one, two);
  EXPECT_FALSE(at::allclose(one->weight, before->weight));
}

TEST(DataParallelPageTest, ReplicasStayTheSame) {
  at::manual_seed(2);
  const std::string url = absl::StrCat("file://", std::getenv("TEST_TMPDIR"), "/trainers");
  std::vector<Net> nets = {Net(3, 2), Net(3, 2)};
  const std::vector<Batches> batches = {RandomBatches(1), RandomBatches(3)};
  std::vector<absl::Status> said(2, absl::UnknownError("it has not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const std::string rendezvous = absl::StrCat(url, "?rank=", rank);
      said[rank] =
          TrainTogether(nets[rank], batches[rank], {.rendezvous = rendezvous, .world_size = 2});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : said) EXPECT_TRUE(status.ok()) << status;
  ExpectSame(nets[0], nets[1]);
}

}  // namespace
}  // namespace distgrad
