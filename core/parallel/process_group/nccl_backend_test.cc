// With --config=cuda alone. It needs a GPU, or one for each rank, and is skipped without;
// nccl_backend_on_stand_ins_test has what needs no kernel on the stand-ins for CUDA and NCCL.
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "core/base/fake_clock.h"
#include "core/membership/store/in_process_store.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/new_backend.h"
#include "core/parallel/process_group/process_group.h"
#include "tests/testing/held_stream.h"
#include "tests/testing/status_of.h"

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

// The collective comes behind what the GPU still does, so it runs as long as that does, though with
// one rank NCCL has nothing to do.
TEST(NcclBackendTest, ASumWhoseStreamIsHeldIsAbortedASecondAfterItsDeadline) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "it needs a GPU";
  FakeClock clock;
  const NewBackend alone = NewNcclBackend({.store = NewInProcessStore(),
                                           .timeout = absl::Minutes(5),
                                           .connect_timeout = absl::Minutes(5),
                                           .host = "",
                                           .failed_elsewhere = [] { return absl::OkStatus(); },
                                           .clock = &clock});
  const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  const c10::StreamGuard on_stream(stream);
  std::vector<at::Tensor> tensors = {at::full({1000}, 2.0f).to(c10::Device(c10::kCUDA, 0))};
  EXPECT_TRUE(alone.backend->allreduce(tensors)->wait());
  HeldStream held(stream);
  const auto work = alone.backend->allreduce(tensors);
  clock.AdvanceTo(clock.NextTimer());  // the GPU is asked: it has not ended
  std::thread aborts([&] { clock.AdvanceTo(clock.NextTimer()); });
  held.Release();  // an abort frees memory of the GPU, which waits for all of it
  aborts.join();
  EXPECT_THROW(work->wait(), std::exception);
  EXPECT_THROW(alone.backend->allreduce(tensors), std::exception);
}

// NCCL waits for the other rank on a thread of its own, which the abort ends.
TEST(NcclBackendTest, ARankThatDoesNotConnectIsAnErrorInTime) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "it needs a GPU";
  const absl::Status status = StatusOf([] {
    NewNcclBackend({.store = NewInProcessStore(),
                    .rank = 0,
                    .size = 2,
                    .timeout = absl::Minutes(5),
                    .connect_timeout = absl::Seconds(2),
                    .host = "",
                    .failed_elsewhere = [] { return absl::OkStatus(); }});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "connecting")) << status;
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_TRUE((*group)->Average({at::ones({2}, (*group)->device())}).ok());
}

// A graph of torch's own, in its default mode, which ends where any thread does what is not safe
// beside it.
TEST(NcclBackendTest, WhatACaptureRefusesLeavesItsGraphAndItsGroupWhole) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "it needs a GPU";
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  // All is on this stream, so that a backward has no other one to wait for.
  const c10::StreamGuard on_stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
  const std::string what = "adding";
  const at::Tensor tensor = at::full({1000}, 2.0f, (*group)->device());
  const at::Tensor w = at::ones({2}, (*group)->device()).requires_grad_();
  const auto averager = GradientAverager::Create(*group, {{"w", w}}, {});
  ASSERT_TRUE(averager.ok()) << averager.status();
  const auto backward = [&] { (w * 3).sum().backward(); };
  backward();  // what torch does once is done
  w.mutable_grad() = at::Tensor();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  tensor.add_(1);
  for (const absl::Status& status :
       {(*group)->BeginSum(tensor, what).status(), (*group)->Average({tensor}),
        (*group)->Broadcast({tensor}), (*averager)->Average(), (*averager)->Join().status(),
        GradientAverager::Create(*group, {{"w", w}}, {}).status(), StatusOf(backward)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "captured into a graph")) << status;
  }
  const absl::Status ended = StatusOf([&] { graph.capture_end(); });
  ASSERT_TRUE(ended.ok()) << "the capture was ended: " << ended;
  w.mutable_grad() = at::Tensor();
  EXPECT_TRUE((*group)->status().ok()) << (*group)->status();
  for (int replay = 1; replay <= 3; ++replay) {
    graph.replay();
    EXPECT_TRUE(tensor.cpu().equal(at::full({1000}, 2.0f + static_cast<float>(replay))));
    const absl::Status status = (*group)->Average({tensor});
    EXPECT_TRUE(status.ok()) << status;
    backward();
    EXPECT_TRUE(w.grad().cpu().equal(at::full({2}, 3.0f * static_cast<float>(replay))));
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
