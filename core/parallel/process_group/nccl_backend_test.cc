// With --config=cuda alone. It needs a GPU, or one for each rank, and is skipped without.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "core/membership/store/in_process_store.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"

namespace distgrad {
namespace {

absl::StatusOr<std::shared_ptr<ProcessGroup>> Join(std::shared_ptr<Store> store, int rank,
                                                   int size) {
  return ProcessGroup::Create({.name = "gpus",
                               .store = std::move(store),
                               .rank = rank,
                               .size = size,
                               .backend = "nccl",
                               .timeout = absl::Minutes(1)});
}

TEST(NcclBackendTest, WithoutAGpuItIsAnError) {
  if (c10::cuda::device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  const absl::Status status = Join(NewInProcessStore(), 0, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "CUDA finds no GPU")) << status;
}

TEST(NcclBackendTest, OneRankOnOneGpu) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "it needs a GPU";
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_TRUE((*group)->device().is_cuda());
  EXPECT_EQ((*group)->Average({at::ones({2})}).code(), absl::StatusCode::kInvalidArgument);
  const at::Tensor w = at::ones({2}, (*group)->device()).requires_grad_();
  const auto averager = GradientAverager::Create(*group, {{"w", w}}, {});
  ASSERT_TRUE(averager.ok()) << averager.status();
  (w * 3).sum().backward();
  EXPECT_TRUE(w.grad().cpu().equal(at::full({2}, 3.0f)));
}

TEST(NcclBackendTest, OneRankAddsBroadcastsAbortsAndBeginsAgain) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "it needs a GPU";
  const auto store = NewInProcessStore();
  const std::string what = "adding";
  for (int round = 0; round < 3; ++round) {
    const auto group = Join(store, 0, 1);
    ASSERT_TRUE(group.ok()) << group.status();
    const at::Tensor tensor = at::full({1000}, 2.0f, (*group)->device());
    absl::Status status = (*group)->Average({tensor});
    EXPECT_TRUE(status.ok()) << status;
    status = (*group)->Broadcast({tensor});
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(tensor.cpu().equal(at::full({1000}, 2.0f)));
    const auto running = (*group)->BeginSum(tensor, what);
    ASSERT_TRUE(running.ok()) << running.status();
    (*group)->Fail(absl::DataLossError("no disk"));
    EXPECT_EQ((*group)->Wait(**running).code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ((*group)->Average({tensor}).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(NcclBackendTest, ARankForEachOfTwoGpus) {
  if (c10::cuda::device_count() < 2) GTEST_SKIP() << "it needs two GPUs";
  const auto store = NewInProcessStore();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&store, rank] {
      const c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank)));
      const auto group = Join(store, rank, 2);
      ASSERT_TRUE(group.ok()) << group.status();
      EXPECT_EQ((*group)->device().index(), rank);
      const at::Tensor w = at::full({2}, rank, (*group)->device()).to(at::kFloat).requires_grad_();
      const auto averager = GradientAverager::Create(*group, {{"w", w}}, {});
      ASSERT_TRUE(averager.ok()) << averager.status();
      EXPECT_TRUE(w.detach().cpu().equal(at::full({2}, 0.0f)));
      (w.sum() * (1 + rank)).backward();
      EXPECT_TRUE(w.grad().cpu().equal(at::full({2}, 1.5f)));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace distgrad
