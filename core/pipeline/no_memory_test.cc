// A step of a pipeline in which an allocation of a thread fails: the step fails, or goes on
// without, and the next one is as good as any.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int kStages = 2;
// So many are a rank's own when a step ends; the end of a promise comes behind them.
constexpr int kAllocations = 10;

class NoMemoryTest : public testing::Test {
 protected:
  NoMemoryTest() : cluster_({.workers = kStages, .thread_count = 2}) {
    const Schedule schedule = *ZeroBubbleH1(kStages, 2);
    for (int s = 0; s < kStages; ++s) {
      weights_.push_back(at::ones({1}).requires_grad_(true));
      stages_.push_back(
          *PipelineStages::Create(&cluster_[s], "model",
                                  {{s,
                                    {.forward = [this, s](Tensors in) -> Tensors {
                                       if (s == stage_) {
                                         FailAllocation(nth_);
                                         throw std::bad_alloc();
                                       }
                                       return {in[0] * weights_[s]};
                                     },
                                     .loss = [](Tensors out, Tensors) { return out[0].sum(); },
                                     .targets = 0}}}));
    }
    pipeline_ = *Pipeline::Create(
        &cluster_[0],
        {.name = "model", .workers = {WorkerName(0), WorkerName(1)}, .schedule = schedule});
  }

  absl::Status Train() {
    const Context context = cluster_[0].NewContext();
    return pipeline_->Train(context, {at::ones({4, 1})}, {}).status();
  }

  Cluster cluster_;
  Tensors weights_;
  // Whose forward finds no memory, and which of the allocations behind that fails.
  std::atomic<int> stage_{-1}, nth_{-1};
  std::vector<std::unique_ptr<PipelineStages>> stages_;
  std::unique_ptr<Pipeline> pipeline_;
};

// Its function finds none, and then what the thread does about that, with the first of its
// allocations, the second, and so on.
TEST_F(NoMemoryTest, OfAStage) {
  ASSERT_EQ(Train(), absl::OkStatus());
  for (int s = 0; s < kStages; ++s) {
    for (int nth = 0; nth < kAllocations; ++nth) {
      SCOPED_TRACE(absl::StrCat("stage ", s, ", allocation ", nth));
      nth_ = nth;
      stage_ = s;
      EXPECT_FALSE(Train().ok());
      nth_ = -1;  // also where fewer were made
      EXPECT_EQ(Train().code(), absl::StatusCode::kResourceExhausted);
      stage_ = -1;
      EXPECT_EQ(Train(), absl::OkStatus());
    }
  }
}

// Behind a stage's step: the step of the pipeline fails, and the stage has stepped.
TEST(StepNoMemoryTest, AStageThatHasSteppedIsSaidToHave) {
  Cluster cluster({.workers = 1});
  const auto stages =
      *PipelineStages::Create(&cluster[0], "model",
                              {{0,
                                {.forward = [w = at::ones({1}).requires_grad_(true)](
                                                Tensors in) -> Tensors { return {in[0] * w}; },
                                 .loss = [](Tensors out, Tensors) { return out[0].sum(); },
                                 .targets = 0,
                                 .step =
                                     [](const Context&) {
                                       FailAllocation(0);
                                       return absl::OkStatus();
                                     }}}});
  const auto pipeline = *Pipeline::Create(
      &cluster[0],
      {.name = "model", .workers = {WorkerName(0)}, .schedule = WithSteps(*GPipe(1, 1))});
  const Context context = cluster[0].NewContext();
  const absl::Status failed = pipeline->Train(context, {at::ones({1, 1})}, {}).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted) << failed;
  EXPECT_THAT(std::string(failed.message()),
              testing::HasSubstr("stage 0 on worker 'worker0' has stepped"));
}

// Of whoever ends stages that have had a step.
TEST(StagesNoMemoryTest, TheirEndWaitsForMemory) {
  Cluster cluster({.workers = 1});
  const auto pipeline = *Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {WorkerName(0)}, .schedule = *GPipe(1, 1)});
  FailEachAllocation([&](absl::FunctionRef<void()> lack) {
    auto stages = PipelineStages::Create(
        &cluster[0], "model", {{0, {.forward = [](Tensors in) -> Tensors { return in; }}}});
    EXPECT_TRUE(stages.ok()) << stages.status();
    if (!stages.ok()) return false;
    EXPECT_EQ(pipeline->Evaluate({at::ones({1, 1})}).status(), absl::OkStatus());
    lack();
    stages->reset();
    return FailAllocation(-1);
  });
}

// Of one of two threads that end them at a time: when the other one has done so the worker may go.
TEST(StagesNoMemoryTest, TheWorkerIsNotUsedWhenOneOfTwoEndsHasCome) {
  auto cluster = std::make_unique<Cluster>(ClusterOptions{.workers = 1});
  Worker& worker = (*cluster)[0];
  auto pipeline = *Pipeline::Create(
      &worker, {.name = "model", .workers = {WorkerName(0)}, .schedule = *GPipe(1, 1)});
  const auto stages = *PipelineStages::Create(
      &worker, "model", {{0, {.forward = [](Tensors in) -> Tensors { return in; }}}});
  const auto evaluate = [&] { return pipeline->Evaluate({at::ones({1, 1})}).status(); };
  ASSERT_EQ(evaluate(), absl::OkStatus());
  std::thread lacking([&] {
    FailAllocationOf(gettid(), 0, std::numeric_limits<int>::max());
    EXPECT_TRUE(stages->Close(Deadline::Never()));
  });
  while (evaluate().ok()) {  // until it has begun to
  }
  pipeline = nullptr;
  EXPECT_TRUE(stages->Close(Deadline::Never()));
  cluster = nullptr;
  EXPECT_TRUE(FailAllocationOf(/*thread=*/0, -1));
  lacking.join();
}

// Of whoever calls it: no call of the step that failed is on its way any more, for it might come
// behind the next step's begin.
TEST(DriverNoMemoryTest, TheNextStepIsAsGoodAsAny) {
  Cluster cluster({.workers = 1});
  const auto stages = *PipelineStages::Create(
      &cluster[0], "model", {{0, {.forward = [](Tensors in) -> Tensors { return {in[0] * 2}; }}}});
  const auto pipeline = *Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {WorkerName(0)}, .schedule = *GPipe(1, 1)});
  for (int nth = 0, failed = true; failed && !HasFailure(); ++nth) {
    SCOPED_TRACE(nth);
    Tensors batch{at::ones({1, 1})}, next{at::ones({1, 1})};
    FailAllocation(nth);
    pipeline->Evaluate(std::move(batch)).status().IgnoreError();
    failed = FailAllocation(-1);
    EXPECT_EQ(pipeline->Evaluate(std::move(next)).status(), absl::OkStatus());
  }
}

// Of the thread on which a rank hears of two steps, of which the second comes behind the first:
// none is left that would never end.
TEST(RankNoMemoryTest, TheNextStepIsAsGoodAsAny) {
  Cluster cluster({.workers = 1, .thread_count = 1});
  // On the one thread of the worker.
  ASSERT_EQ(cluster[0].Register("fail",
                                [](Request& r) -> absl::StatusOr<Message> {
                                  FailAllocation(std::stoi(r.message.payload));
                                  return Message{};
                                }),
            absl::OkStatus());
  const auto fail = [&](int nth) {
    cluster[0].Call(0, "fail", {absl::StrCat(nth), {}}).status().IgnoreError();
  };
  auto stages =
      *PipelineStages::Create(&cluster[0], "model",
                              {{0,
                                {.forward = [w = at::ones({1}).requires_grad_(true)](
                                                Tensors in) -> Tensors { return {in[0] * w}; },
                                 .loss = [](Tensors out, Tensors) { return out[0].sum(); },
                                 .targets = 0}}});
  const auto pipeline = *Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {WorkerName(0)}, .schedule = *GPipe(1, 1)});
  const Context context = cluster[0].NewContext();
  for (int nth = 0; nth < 150 && !HasFailure(); ++nth) {
    SCOPED_TRACE(nth);
    const auto start = [&] { return pipeline->Start(context, {at::ones({1, 1})}, {}); };
    fail(nth);
    absl::StatusOr<PipelineStep> first = start();
    absl::StatusOr<PipelineStep> second = start();
    fail(-1);
    if (first.ok()) first->Wait().status().IgnoreError();
    if (second.ok()) second->Wait().status().IgnoreError();
    const absl::StatusOr<PipelineResult> next = pipeline->Train(context, {at::ones({1, 1})}, {});
    EXPECT_EQ(next.status(), absl::OkStatus());
  }
  EXPECT_TRUE(stages->Close(Deadline::After(absl::Seconds(30))));
}

}  // namespace
}  // namespace distgrad
