// Steps of a pipeline that are started while others run: they come behind these on each rank, with
// the results of steps one after the other, and fail with them.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/optim/local_optimizer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "core/pipeline/step_plan.h"
#include "core/pipeline/test_layers.h"
#include "core/transport/packet.h"
#include "core/worker/metrics.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using testing::HasSubstr;

absl::Status Nothing(const Context&) { return absl::OkStatus(); }

class StepsInFlightTest : public testing::TestWithParam<std::string> {
 protected:
  StepsInFlightTest() { at::manual_seed(21); }
  ClusterOptions Workers(int count) const {
    return {.workers = count, .transport = GetParam(), .thread_count = 1};
  }
  // A step that was started, with its context.
  struct Started {
    std::unique_ptr<Context> context;
    PipelineStep step;
  };
  static Started Start(Cluster& cluster, Pipeline& pipeline, at::Tensor x, at::Tensor y) {
    Started started{std::make_unique<Context>(cluster[0].NewContext()), {}};
    absl::StatusOr<PipelineStep> step =
        pipeline.Start(*started.context, {std::move(x)}, {std::move(y)});
    EXPECT_TRUE(step.ok()) << step.status();
    if (step.ok()) started.step = *std::move(step);
    return started;
  }
  // Two stages, each on a worker. The back steps by `step`; the front notifies `ahead` when it is
  // in its second forward.
  static std::vector<std::unique_ptr<PipelineStages>> CreateFrontAndBack(
      Cluster& cluster, const EqualLayers& layers, absl::Notification& ahead,
      std::function<absl::Status(const Context&)> step) {
    std::vector<std::map<int, PipelineStage>> own(2);
    own[0][0] = {.forward =
                     [&, forwards = 0](Tensors in) mutable {
                       if (++forwards == 2) ahead.Notify();
                       return layers.Forward(0, std::move(in));
                     },
                 .step = Nothing};
    own[1][1] = {.forward = [&](Tensors in) { return layers.Forward(1, std::move(in)); },
                 .loss = Loss,
                 .step = std::move(step)};
    return CreateStages(cluster, std::move(own));
  }
  static Started Start(Cluster& cluster, Pipeline& pipeline) {
    return Start(cluster, pipeline, at::randn({4, 16}), at::randn({4, 16}));
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, StepsInFlightTest, testing::Values("inproc", "socket"));

TEST_P(StepsInFlightTest, FortyStepsAreThoseOfOneProcessToTheLastBit) {
  for (const Case& one : Cases()) {
    for (const bool adam : {false, true}) {
      SCOPED_TRACE(absl::StrCat(one.name, adam ? ", Adam" : ", SGD"));
      const Schedule schedule = WithSteps(one.schedule);
      const int stages = schedule.stages();
      Cluster cluster(Workers(schedule.ranks()));
      const EqualLayers layers(stages);
      const EqualLayers alone = layers.Copy();
      const auto new_optimizer =
          [&](const Tensors& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
        if (adam) return std::make_unique<torch::optim::Adam>(parameters, 0.01);
        return std::make_unique<torch::optim::SGD>(parameters,
                                                   torch::optim::SGDOptions(0.05).momentum(0.9));
      };
      std::deque<LocalOptimizer> optimizers;  // by stage
      std::vector<std::map<int, PipelineStage>> own(cluster.size());
      Tensors all;
      for (int s = 0; s < stages; ++s) {
        optimizers.emplace_back(new_optimizer(layers.Of(s)));
        own[schedule.rank_of_stage[s]][s] = {
            .forward = [&, s](Tensors in) { return layers.Forward(s, in); },
            .loss = Loss,
            .step = [&, s](const Context& c) { return optimizers[s].Step(*c.record()); }};
        for (const at::Tensor& parameter : alone.Of(s)) all.push_back(parameter);
      }
      const auto stages_of_workers = CreateStages(cluster, std::move(own));
      const auto optimizer_alone = new_optimizer(all);
      const auto pipeline = MakePipeline(cluster, schedule);
      std::deque<std::pair<Started, Tensors>> in_flight;  // with the losses of one process
      for (int step = 0; step < 40 || !in_flight.empty(); ++step) {
        SCOPED_TRACE(absl::StrCat("step ", step));
        if (step < 40) {
          const at::Tensor x = at::randn({10, 16}), y = at::rand({10, 16});
          Started started = Start(cluster, *pipeline, x, y);
          optimizer_alone->zero_grad();
          in_flight.emplace_back(std::move(started),
                                 StepAlone(alone, stages, schedule.micro_batches, true, x, y));
          optimizer_alone->step();
        }
        if (step < 40 && in_flight.size() < 3) continue;
        const absl::StatusOr<PipelineResult> result = in_flight.front().first.step.Wait();
        ASSERT_TRUE(result.ok()) << result.status();
        const Tensors& losses = in_flight.front().second;
        ASSERT_EQ(result->losses.size(), losses.size());
        for (size_t m = 0; m < losses.size(); ++m) {
          ASSERT_TRUE(at::equal(result->losses[m], losses[m])) << "micro-batch " << m;
        }
        in_flight.pop_front();
      }
      for (int s = 0; s < stages; ++s) {
        EXPECT_TRUE(at::equal(layers.weights[s], alone.weights[s])) << "stage " << s;
        EXPECT_TRUE(at::equal(layers.biases[s], alone.biases[s])) << "stage " << s;
      }
    }
  }
}

// Each rank waits in the second step for what another one does in the first one, or the other way
// round: one step after the other would not come to its end.
TEST_P(StepsInFlightTest, ARankBeginsTheNextStepWhileAnotherIsInTheOneBefore) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification front_is_ahead;
  const auto stages = CreateFrontAndBack(cluster, layers, front_is_ahead, [&](const Context&) {
    front_is_ahead.WaitForNotification();
    return absl::OkStatus();
  });
  const auto pipeline = MakePipeline(cluster, WithSteps(*GPipe(2, 1)));
  Started first = Start(cluster, *pipeline), second = Start(cluster, *pipeline);
  EXPECT_EQ(first.step.Wait().status(), absl::OkStatus());
  EXPECT_EQ(second.step.Wait().status(), absl::OkStatus());
}

// The driver starts steps as fast as it can, so that ranks hear of them while the one before has
// only begun.
TEST_P(StepsInFlightTest, WhoWaitsForTheLastStepFirstHasAllOfThem) {
  Cluster cluster(Workers(3));
  const EqualLayers layers(3);
  const auto stages = MakeStages(cluster, {0, 1, 2},
                                 [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = MakePipeline(cluster, *ZeroBubbleH1(3, 4));
  for (int round = 0; round < 10; ++round) {
    std::vector<Started> started;
    for (int i = 0; i < 8; ++i) started.push_back(Start(cluster, *pipeline));
    for (int i = 7; i >= 0; --i) {
      EXPECT_EQ(started[i].step.Wait().status(), absl::OkStatus());
      EXPECT_FALSE(started[i].step.valid());
    }
  }
}

TEST_P(StepsInFlightTest, AStepThatFailsEndsThoseBehindIt) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification all_started, back_has_stepped;
  std::atomic<int> front_forwards{0}, back_steps{0};
  std::atomic<bool> fails{true};
  std::vector<std::map<int, PipelineStage>> own(2);
  own[0][0] = {.forward =
                   [&](Tensors in) {
                     ++front_forwards;
                     return layers.Forward(0, std::move(in));
                   },
               .step = [&](const Context&) -> absl::Status {
                 all_started.WaitForNotification();
                 back_has_stepped.WaitForNotification();  // else its step may be stopped first
                 return fails ? absl::DataLossError("no step today") : absl::OkStatus();
               }};
  own[1][1] = {.forward = [&](Tensors in) { return layers.Forward(1, std::move(in)); },
               .loss = Loss,
               .step =
                   [&](const Context&) {
                     if (++back_steps == 1) back_has_stepped.Notify();
                     return absl::OkStatus();
                   }};
  const auto stages = CreateStages(cluster, std::move(own));
  const auto pipeline = MakePipeline(cluster, WithSteps(*GPipe(2, 1)));
  std::vector<Started> started;
  for (int i = 0; i < 3; ++i) started.push_back(Start(cluster, *pipeline));
  all_started.Notify();
  const absl::Status first = started[0].step.Wait().status();
  EXPECT_EQ(first.code(), absl::StatusCode::kDataLoss) << first;
  EXPECT_THAT(std::string(first.message()),
              HasSubstr("stage 0 on worker 'worker0' has failed in its step, stage 1 on worker "
                        "'worker1' has stepped: "));
  // Behind one that has failed none is started.
  const Context context = cluster[0].NewContext();
  const absl::Status refused =
      pipeline->Start(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("wait for it, and for all others"));
  for (int i = 1; i < 3; ++i) {
    const absl::Status behind = started[i].step.Wait().status();
    EXPECT_EQ(behind.code(), absl::StatusCode::kDataLoss) << behind;
    EXPECT_THAT(std::string(behind.message()), HasSubstr("the step before this one has failed"));
    EXPECT_THAT(std::string(behind.message()), HasSubstr("no step today"));
    EXPECT_THAT(std::string(behind.message()),
                HasSubstr("stage 0 on worker 'worker0' has not stepped, stage 1 on worker "
                          "'worker1' has not stepped: "));
  }
  EXPECT_EQ(front_forwards, 1);
  EXPECT_EQ(back_steps, 1);
  fails = false;
  EXPECT_EQ(pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status(),
            absl::OkStatus());
}

// The front has gone through the first step when the back fails in it, and is in the next one.
TEST_P(StepsInFlightTest, AStepThatFailsOnAnotherRankEndsThoseBehindIt) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification front_is_ahead;
  const auto stages =
      CreateFrontAndBack(cluster, layers, front_is_ahead, [&](const Context&) -> absl::Status {
        front_is_ahead.WaitForNotification();
        return absl::DataLossError("no step today");
      });
  const auto pipeline = MakePipeline(cluster, WithSteps(*GPipe(2, 1)));
  Started first = Start(cluster, *pipeline), second = Start(cluster, *pipeline);
  // Also if somebody waits for the second one first.
  const absl::Status behind = second.step.Wait().status();
  EXPECT_EQ(behind.code(), absl::StatusCode::kDataLoss) << behind;
  EXPECT_THAT(std::string(behind.message()),
              HasSubstr("the step before this one has failed on worker 'worker1'"));
  EXPECT_THAT(std::string(behind.message()),
              HasSubstr("stage 0 on worker 'worker0' has not stepped, stage 1 on worker 'worker1' "
                        "has not stepped: "));
  const absl::Status status = first.step.Wait().status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("stage 0 on worker 'worker0' has stepped, stage 1 on worker 'worker1' has "
                        "failed in its step: "));
}

TEST_P(StepsInFlightTest, AStepThatNobodyWaitsForEnds) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification stands, go;
  std::atomic<int> steps{0};
  std::vector<std::map<int, PipelineStage>> own(2);
  own[0][0] = {.forward = [&](Tensors in) { return layers.Forward(0, std::move(in)); },
               .step = Nothing};
  own[1][1] = {.forward =
                   [&](Tensors in) {
                     if (!stands.HasBeenNotified()) stands.Notify();
                     go.WaitForNotification();
                     return layers.Forward(1, std::move(in));
                   },
               .loss = Loss,
               .step =
                   [&](const Context&) {
                     ++steps;
                     return absl::OkStatus();
                   }};
  const auto stages = CreateStages(cluster, std::move(own));
  const auto pipeline = MakePipeline(cluster, WithSteps(*GPipe(2, 1)));
  {
    const Started first = Start(cluster, *pipeline), second = Start(cluster, *pipeline);
    stands.WaitForNotification();
  }
  go.Notify();
  Started next = Start(cluster, *pipeline);
  EXPECT_EQ(next.step.Wait().status(), absl::OkStatus());
  EXPECT_EQ(steps, 1);
  // So does one in whose place another one comes.
  Started replaced = Start(cluster, *pipeline), behind = Start(cluster, *pipeline);
  replaced.step = std::move(behind.step);
  replaced.step.Wait().status().IgnoreError();
  const Context context = cluster[0].NewContext();
  EXPECT_EQ(pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status(),
            absl::OkStatus());
}

TEST_P(StepsInFlightTest, WhatMayNotRunBesideAStepIsRefused) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  const auto stages =
      MakeStages(cluster, {0}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = MakePipeline(cluster, *GPipe(1, 1));
  const Context context = cluster[0].NewContext();
  const Tensors x{at::randn({4, 16})}, y{at::randn({4, 16})};
  std::vector<Started> started;
  for (int i = 0; i < 8; ++i) started.push_back(Start(cluster, *pipeline));
  for (const absl::Status& status :
       {pipeline->Train(context, x, y).status(), pipeline->Evaluate(x).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("runs already"));
  }
  const absl::Status ninth = pipeline->Start(context, x, y).status();
  EXPECT_EQ(ninth.code(), absl::StatusCode::kFailedPrecondition) << ninth;
  EXPECT_THAT(std::string(ninth.message()), HasSubstr("wait for the first one"));
  for (Started& each : started) EXPECT_EQ(each.step.Wait().status(), absl::OkStatus());
  EXPECT_EQ(pipeline->Evaluate(x).status(), absl::OkStatus());
  EXPECT_EQ(PipelineStep().Wait().status().code(), absl::StatusCode::kFailedPrecondition);
}

// A rank that is through with the first step would read it in the second one, while the other rank
// steps it.
TEST_P(StepsInFlightTest, ATiedParameterIsNoTensorOfTwoRanks) {
  for (const bool copies : {false, true}) {
    Cluster cluster(Workers(1));
    const EqualLayers layers(2);
    std::map<int, PipelineStage> own;
    for (int s = 0; s < 2; ++s) {
      const at::Tensor tied =
          copies ? layers.weights[0].detach().clone().requires_grad_() : layers.weights[0];
      own[s] = {.forward = [tied](Tensors in) { return Tensors{in[0].mm(tied)}; },
                .loss = Loss,
                .tied = {{"embedding", tied}},
                .step = Nothing};
    }
    const auto stages = CreateStages(cluster, {std::move(own)});
    const auto pipeline = Pipeline::Create(
        &cluster[0],
        {.name = "model", .workers = {"worker0", "worker0"}, .schedule = WithSteps(*GPipe(2, 1))});
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    Started first = Start(cluster, **pipeline);
    const Context context = cluster[0].NewContext();
    absl::StatusOr<PipelineStep> second =
        (*pipeline)->Start(context, {at::randn({4, 16})}, {at::randn({4, 16})});
    EXPECT_EQ(first.step.Wait().status(), absl::OkStatus());
    if (copies) {
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_EQ(second->Wait().status(), absl::OkStatus());
      continue;
    }
    EXPECT_EQ(second.status().code(), absl::StatusCode::kInvalidArgument) << second.status();
    EXPECT_THAT(std::string(second.status().message()),
                HasSubstr("several ranks of worker 'worker0' have one tensor for the tied "
                          "parameter 'embedding'"));
    // One step after the other is as it was.
    Started third = Start(cluster, **pipeline);
    EXPECT_EQ(third.step.Wait().status(), absl::OkStatus());
  }
}

// Batches of several contexts whose gradients nobody has used yet: each has those of its own.
TEST_P(StepsInFlightTest, WithoutStepsEachContextHasTheGradientsOfItsBatch) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto stages =
      MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = MakePipeline(cluster, *ZeroBubbleH1(2, 3));
  Tensors xs, ys;
  std::vector<Started> started;
  for (int i = 0; i < 4; ++i) {
    xs.push_back(at::randn({6, 16}));
    ys.push_back(at::randn({6, 16}));
    started.push_back(Start(cluster, *pipeline, xs[i], ys[i]));
  }
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(started[i].step.Wait().status(), absl::OkStatus());
    const EqualLayers alone = layers.Copy();
    StepAlone(alone, 2, 3, true, xs[i], ys[i]);
    EXPECT_TRUE(
        at::equal(*started[i].context->Gradient(layers.weights[0]), alone.weights[0].grad()));
  }
}

// All of them, and not only the one that was started last.
TEST_P(StepsInFlightTest, StagesThatAreTakenOffEndAllOfThem) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  std::atomic<int> front_forwards{0};
  absl::Notification front_waits, go;
  std::vector<std::map<int, PipelineStage>> own(2);
  own[0][0] = {.forward = [&](Tensors in) {
    ++front_forwards;
    return layers.Forward(0, std::move(in));
  }};
  own[1][1] = {.forward =
                   [&](Tensors in) {
                     if (!front_waits.HasBeenNotified()) front_waits.Notify();
                     go.WaitForNotification();
                     return layers.Forward(1, std::move(in));
                   },
               .loss = Loss};
  auto stages = CreateStages(cluster, std::move(own));
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  std::vector<Started> started;
  for (int i = 0; i < 3; ++i) started.push_back(Start(cluster, *pipeline));
  front_waits.WaitForNotification();
  // Does not wait for the back, whose function goes on.
  stages[0] = nullptr;
  // One is begun behind those that were started; the last may be too late.
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = started[i].step.Wait().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("were taken off"));
  }
  EXPECT_FALSE(started[2].step.Wait().ok());
  EXPECT_EQ(front_forwards, 1);
  go.Notify();
}

// A rank that is through with the step, and in a later one, says so.
TEST_P(StepsInFlightTest, AnErrorOfADeadlineSaysWhatEachRankDid) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification front_is_ahead, all_started;
  const auto stages =
      CreateFrontAndBack(cluster, layers, front_is_ahead, [&](const Context&) -> absl::Status {
        all_started.WaitForNotification();
        return absl::DeadlineExceededError("no step in time");
      });
  const auto pipeline = MakePipeline(cluster, WithSteps(*GPipe(2, 1)));
  Started first = Start(cluster, *pipeline), second = Start(cluster, *pipeline);
  front_is_ahead.WaitForNotification();
  const Started third = Start(cluster, *pipeline);
  all_started.Notify();
  const absl::Status status = first.step.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("worker 'worker0' is at the end of its list, worker 'worker1' is in the "
                        "step of stage 1"));
}

// Also if that fails while it is started, and then one that was started before them.
TEST_P(StepsInFlightTest, NoneIsStartedBehindAStepThatHasFailed) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification holds, give_back, go;
  const auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) {
    go.WaitForNotification();
    return layers.Forward(stage, std::move(in));
  });
  ASSERT_EQ(cluster[1].Register("hold",
                                [&](Request& request) {
                                  holds.Notify();
                                  give_back.WaitForNotification();
                                  return request.message;
                                }),
            absl::OkStatus());
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  std::vector<Started> started;
  for (int i = 0; i < 2; ++i) started.push_back(Start(cluster, *pipeline));
  // Has the one thread that would answer.
  const Future<Message> held = cluster[0].CallAsync("worker1", "hold", {});
  holds.WaitForNotification();
  absl::Status third;
  std::thread starts([&] {
    const Context context = cluster[0].NewContext();
    third = pipeline->Start(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  });
  const std::string begin = absl::StrCat(kBeginStep, "model");
  const auto begins = [&] {
    for (const CallStats& calls : cluster[0].Metrics().calls) {
      if (calls.peer == 1 && !calls.served && calls.function == begin) return calls.in_flight > 0;
    }
    return false;
  };
  while (!begins()) std::this_thread::yield();
  while (!started.empty()) started.pop_back();  // the last one first
  give_back.Notify();
  starts.join();
  EXPECT_EQ(third.code(), absl::StatusCode::kFailedPrecondition) << third;
  EXPECT_THAT(std::string(third.message()), HasSubstr("behind which this one would come"));
  go.Notify();
  EXPECT_TRUE(held.Wait().ok());
}

TEST_P(StepsInFlightTest, AWorkerThatIsLostEndsAllOfThem) {
  Cluster cluster(Workers(3));
  const EqualLayers layers(3);
  std::atomic<int> calls{0};
  absl::Notification all_started;
  auto stages = MakeStages(cluster, {0, 1, 2}, [&](int stage, Tensors in) {
    all_started.WaitForNotification();
    // Ends in the middle of a step, without a farewell.
    if (stage == 1 && ++calls == 3) cluster[1].Abort();
    return layers.Forward(stage, in);
  });
  const auto pipeline = MakePipeline(cluster, *OneForwardOneBackward(3, 4));
  std::vector<Started> started;
  for (int i = 0; i < 3; ++i) {
    started.push_back(Start(cluster, *pipeline, at::randn({8, 16}), at::randn({8, 16})));
  }
  all_started.Notify();
  for (Started& each : started) {
    const absl::Status status = each.step.Wait().status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("worker1")) << status;
  }
  stages.clear();
  started.clear();
  cluster.Kill(1);
}

TEST_P(StepsInFlightTest, ADriverThatIsLostEndsAllOfThem) {
  Cluster cluster(Workers(3));  // the last one drives
  const EqualLayers layers(2);
  absl::Notification stands, go;
  auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) {
    if (stage == 0 && !stands.HasBeenNotified()) stands.Notify();
    go.WaitForNotification();
    return layers.Forward(stage, in);
  });
  const Schedule schedule = *GPipe(2, 1);
  const Tensors x{at::randn({4, 16})}, y{at::randn({4, 16})};
  {
    const auto lost =
        Pipeline::Create(&cluster[2], {.name = "model", .workers = Names(2), .schedule = schedule});
    ASSERT_TRUE(lost.ok()) << lost.status();
    std::vector<Context> contexts;
    std::vector<PipelineStep> steps;
    for (int i = 0; i < 3; ++i) {
      contexts.push_back(cluster[2].NewContext());
      absl::StatusOr<PipelineStep> step = (*lost)->Start(contexts[i], x, y);
      ASSERT_TRUE(step.ok()) << step.status();
      steps.push_back(*std::move(step));
    }
    stands.WaitForNotification();
    cluster[2].Abort();
    for (PipelineStep& step : steps) EXPECT_FALSE(step.Wait().ok());
  }
  stages.pop_back();
  cluster.Kill(2);
  go.Notify();
  const auto pipeline = MakePipeline(cluster, schedule);
  const Context context = cluster[0].NewContext();
  absl::Status status;
  do {  // until its stages' workers have heard of it
    status = pipeline->Train(context, x, y).status();
  } while (absl::IsFailedPrecondition(status));
  EXPECT_EQ(status, absl::OkStatus());
}

// Says to a worker that has the one stage of a pipeline what a Pipeline would, call by call.
class DriverOfOneStage {
 public:
  explicit DriverOfOneStage(Worker& worker) : worker_(worker) {}

  absl::Status Begin(uint64_t step, uint64_t follows, const Context* context = nullptr) const {
    const StepPlan plan{.step = step,
                        .pipeline = 1,
                        .follows = follows,
                        .rank = 0,
                        .micro_batches = 1,
                        .backward = false,
                        .rank_of_stage = {0},
                        .workers = {"worker0"},
                        .list = {{Action::Kind::kForward, 0, 0}},
                        .weights = {1}};
    return Call(kBeginStep, EncodePlan(plan), context).Wait().status();
  }
  absl::Status Deliver(const Parcel& parcel, Tensors tensors) const {
    return Call(kDeliver, EncodeParcel(parcel), /*context=*/nullptr, std::move(tensors))
        .Wait()
        .status();
  }
  Future<Message> Run(uint64_t step) const {
    return Call(kRunStep, EncodeStepRef({.step = step, .first_stage = 0}));
  }
  std::string Describe(uint64_t step) const {
    return Call(kDescribe, EncodeStepRef({.step = step, .first_stage = 0})).Wait()->payload;
  }
  absl::Status End(uint64_t step) const {
    return Call(kEndStep, EncodeEnd({.of = {.step = step, .first_stage = 0}})).Wait().status();
  }

 private:
  Future<Message> Call(absl::string_view function, std::string payload,
                       const Context* context = nullptr, Tensors tensors = {}) const {
    return worker_.CallAsync("worker0", absl::StrCat(function, "model"),
                             {std::move(payload), std::move(tensors)}, {.context = context});
  }

  Worker& worker_;
};

class OneStageTest : public testing::Test {
 protected:
  std::function<Tensors(Tensors)> forward_ = [](Tensors in) { return in; };
  Cluster cluster_{{.workers = 1}};
  std::unique_ptr<PipelineStages> stages_ = *PipelineStages::Create(
      &cluster_[0], "model",
      {{0, {.forward = [this](Tensors in) { return forward_(std::move(in)); }}}});
  const DriverOfOneStage driver_{cluster_[0]};
};

TEST_F(OneStageTest, AParcelThatComesTwiceOrIsAnothersIsRefused) {
  ASSERT_EQ(driver_.Begin(1, /*follows=*/0), absl::OkStatus());
  const StepRef to{.step = 1, .first_stage = 0};
  const Tensors first{at::randn({4, 16})}, second{at::randn({4, 16})};
  for (const Parcel& parcel :
       {Parcel{.to = to, .stage = 1}, Parcel{.to = to, .micro_batch = 1},
        Parcel{.to = to, .other = 1}, Parcel{.to = to, .wanted = {false, false}}}) {
    const absl::Status status = driver_.Deliver(parcel, second);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
  ASSERT_EQ(driver_.Deliver({.to = to}, first), absl::OkStatus());
  const absl::Status again = driver_.Deliver({.to = to}, second);
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists) << again;
  const absl::StatusOr<Message> result = driver_.Run(1).Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->tensors.size(), 1u);
  EXPECT_TRUE(at::equal(result->tensors[0], first[0]));
}

// It may be large, and the worker knows some steps for long that are over.
TEST_F(OneStageTest, WhatWasDeliveredInVainEndsWithItsStep) {
  constexpr int64_t kLarge = 1 << 20;  // bytes
  const Tensors x{at::randn({4, 16})};
  const auto deliver = [&](uint64_t step) {
    EXPECT_EQ(driver_.Deliver({.to = {step, 0}}, x), absl::OkStatus());
    EXPECT_EQ(driver_.Deliver({.to = {step, 0}, .kind = Parcel::Kind::kTarget},
                              {at::zeros({kLarge}, at::kByte)}),
              absl::OkStatus());
    return KeptSegmentBytes();
  };
  // Memory of what has arrived is kept for the next when nobody has it any more.
  const auto ends = [&](size_t kept) {
    const absl::Time patience = absl::Now() + absl::Seconds(30);
    const size_t least = kept + kLarge;
    while (KeptSegmentBytes() < least && absl::Now() < patience) std::this_thread::yield();
    return KeptSegmentBytes() >= least;
  };
  ASSERT_EQ(driver_.Begin(1, /*follows=*/0), absl::OkStatus());
  const size_t not_wanted = deliver(1);
  ASSERT_EQ(driver_.Run(1).Wait().status(), absl::OkStatus());
  EXPECT_TRUE(ends(not_wanted));
  EXPECT_FALSE(driver_.Deliver({.to = {1, 0}, .kind = Parcel::Kind::kTarget}, x).ok());

  absl::Notification stands, go;
  forward_ = [&](Tensors in) {
    stands.Notify();
    go.WaitForNotification();
    return in;
  };
  ASSERT_EQ(driver_.Begin(3, /*follows=*/0), absl::OkStatus());
  ASSERT_EQ(driver_.Begin(4, /*follows=*/3), absl::OkStatus());
  EXPECT_EQ(driver_.Deliver({.to = {3, 0}}, x), absl::OkStatus());
  const size_t given_up = deliver(4);
  const Future<Message> hangs = driver_.Run(3), waits = driver_.Run(4);
  stands.WaitForNotification();
  while (driver_.Describe(4) == "has not begun") std::this_thread::yield();
  EXPECT_EQ(driver_.End(4), absl::OkStatus());
  EXPECT_TRUE(ends(given_up));
  go.Notify();
  EXPECT_EQ(hangs.Wait().status(), absl::OkStatus());
  EXPECT_FALSE(waits.Wait().ok());
}

// Its driver may be lost before it says that the step has ended.
TEST_F(OneStageTest, AStepThatNobodyCanStartHoldsUpNoneBehindIt) {
  auto ends_early = std::make_optional(cluster_[0].NewContext());
  ASSERT_EQ(driver_.Begin(1, /*follows=*/0, &*ends_early), absl::OkStatus());
  ends_early.reset();
  ASSERT_EQ(driver_.Begin(2, /*follows=*/1), absl::OkStatus());
  const absl::Status status = driver_.Run(2).Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the step before this one has failed"));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("was not started before its deadline, or before its context was released"));
}

// In errors of deadlines.
TEST_F(OneStageTest, AStepThatWaitsForOneBeforeSaysWhatThatDoes) {
  std::vector<Future<Message>> runs;
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_EQ(driver_.Begin(step, /*follows=*/step - 1), absl::OkStatus());
    runs.push_back(driver_.Run(step));
  }
  const std::string first = "waits for others in the forward of stage 0, micro-batch 0";
  while (driver_.Describe(1) != first) std::this_thread::yield();
  for (const uint64_t step : {2, 3}) {
    while (driver_.Describe(step) == "has not begun") std::this_thread::yield();
  }
  EXPECT_EQ(
      driver_.Describe(3),
      absl::StrCat("waits for the step before, which waits for the step before, which ", first));
  for (const uint64_t step : {1, 2, 3}) EXPECT_EQ(driver_.End(step), absl::OkStatus());
  for (const Future<Message>& run : runs) EXPECT_FALSE(run.Wait().ok());
}

// Its driver may be lost when it has said of the second step alone that it is to run.
TEST(TwoStagesTest, AStepThatNobodyCanStartKeepsNoStageFromAnotherDivision) {
  Cluster cluster({.workers = 1});
  const EqualLayers layers(2);
  const auto stages =
      MakeStages(cluster, {0, 0}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto together = MakePipeline(cluster, *InterleavedOneForwardOneBackward(1, 2, 1));
  auto ends_early = std::make_optional(cluster[0].NewContext());
  const auto call = [&](absl::string_view function, std::string payload) {
    return cluster[0].CallAsync("worker0", absl::StrCat(function, "model"),
                                {std::move(payload), {}}, {.context = &*ends_early});
  };
  for (const uint64_t step : {1, 2}) {
    const StepPlan plan{.step = step,
                        .pipeline = 1,
                        .follows = step - 1,
                        .rank = 0,
                        .micro_batches = 1,
                        .backward = false,
                        .rank_of_stage = {0, 1},
                        .workers = {"worker0", "worker0"},
                        .list = {{Action::Kind::kForward, 0, 0}},
                        .weights = {1}};
    ASSERT_EQ(call(kBeginStep, EncodePlan(plan)).Wait().status(), absl::OkStatus());
  }
  const Future<Message> second = call(kRunStep, EncodeStepRef({.step = 2, .first_stage = 0}));
  while (call(kDescribe, EncodeStepRef({.step = 2, .first_stage = 0})).Wait()->payload ==
         "has not begun") {
    std::this_thread::yield();
  }
  ends_early.reset();
  // The first one ends, and with it the second, on its thread.
  together->Evaluate({at::randn({4, 16})}).status().IgnoreError();
  ASSERT_TRUE(second.WaitUntil(Deadline::After(absl::Seconds(20))));
  EXPECT_EQ(second.Wait().status().code(), absl::StatusCode::kFailedPrecondition)
      << second.Wait().status();
  EXPECT_EQ(together->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
}

// They do not keep each other: their end would need a stack for all of them.
TEST_F(OneStageTest, AnyNumberOfStepsBehindEachOtherEnd) {
  for (uint64_t step = 1; step <= 2000; ++step) {
    ASSERT_EQ(driver_.Begin(step, /*follows=*/step - 1), absl::OkStatus());
    ASSERT_EQ(driver_.End(step), absl::OkStatus());
  }
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, size_t{128} << 10), 0);
  pthread_t thread;
  const auto end = [](void* stages) -> void* {
    static_cast<std::unique_ptr<PipelineStages>*>(stages)->reset();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, end, &stages_), 0);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
  ASSERT_EQ(pthread_attr_destroy(&attributes), 0);
}

TEST_F(OneStageTest, ThereIsAnEndToTheStepsThatMayBegin) {
  uint64_t step = 1;
  absl::Status begun;
  for (; begun.ok() && step < 1000; ++step) begun = driver_.Begin(step, /*follows=*/step - 1);
  EXPECT_EQ(begun.code(), absl::StatusCode::kResourceExhausted) << begun;
  EXPECT_EQ(step, 66u);
  ASSERT_EQ(driver_.End(1), absl::OkStatus());
  EXPECT_EQ(driver_.Begin(step, /*follows=*/step - 2), absl::OkStatus());
}

}  // namespace
}  // namespace distgrad
