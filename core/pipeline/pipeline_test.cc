// Steps of a pipeline, compared with one process; errors, deadlines and lost workers.
#include "core/pipeline/pipeline.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/origin.h"
#include "core/base/processors.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "core/pipeline/step_plan.h"
#include "core/pipeline/test_layers.h"
#include "core/tensor/exception.h"
#include "core/worker/metrics.h"
#include "core/worker/optimizer.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class PipelineTest : public testing::TestWithParam<std::string> {
 protected:
  PipelineTest() { at::manual_seed(21); }
  ClusterOptions Workers(int count) const {
    return {.workers = count, .transport = GetParam(), .thread_count = 1};
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, PipelineTest, testing::Values("inproc", "socket"));

TEST_P(PipelineTest, FiftyStepsAreThoseOfOneProcessToTheLastBit) {
  for (const Case& one : Cases()) {
    for (const bool adam : {false, true}) {
      SCOPED_TRACE(absl::StrCat(one.name, adam ? ", Adam" : ", SGD"));
      const Schedule& schedule = one.schedule;
      const int stages = schedule.stages(), ranks = schedule.ranks();
      Cluster cluster(Workers(ranks));
      const EqualLayers layers(stages);
      const EqualLayers alone = layers.Copy();
      const auto new_optimizer =
          [&](const Tensors& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
        if (adam) return std::make_unique<torch::optim::Adam>(parameters, 0.01);
        return std::make_unique<torch::optim::SGD>(parameters,
                                                   torch::optim::SGDOptions(0.05).momentum(0.9));
      };
      const auto stages_of_workers =
          MakeStages(cluster, schedule.rank_of_stage,
                     [&](int stage, Tensors in) { return layers.Forward(stage, in); });
      std::vector<std::unique_ptr<Optimizer>> optimizers;
      Tensors all;
      for (int rank = 0; rank < ranks; ++rank) {
        Tensors own;
        for (int s = 0; s < stages; ++s) {
          if (schedule.rank_of_stage[s] != rank) continue;
          for (const at::Tensor& parameter : layers.Of(s)) own.push_back(parameter);
        }
        optimizers.push_back(*Optimizer::Create(&cluster[rank], new_optimizer(own)));
      }
      for (int s = 0; s < stages; ++s) {
        for (const at::Tensor& parameter : alone.Of(s)) all.push_back(parameter);
      }
      const auto optimizer_alone = new_optimizer(all);
      const bool mean = !adam;
      const auto pipeline =
          MakePipeline(cluster, schedule,
                       mean ? PipelineOptions::Reduction::kMean : PipelineOptions::Reduction::kSum);
      for (int step = 0; step < 50; ++step) {
        SCOPED_TRACE(absl::StrCat("step ", step));
        const at::Tensor x = at::randn({10, 16}), y = at::rand({10, 16});
        const Context context = cluster[0].NewContext();
        const absl::StatusOr<PipelineResult> result = pipeline->Train(context, {x}, {y});
        ASSERT_TRUE(result.ok()) << result.status();
        optimizer_alone->zero_grad();
        const Tensors losses = StepAlone(alone, stages, schedule.micro_batches, mean, x, y);
        ASSERT_EQ(result->losses.size(), losses.size());
        for (size_t m = 0; m < losses.size(); ++m) {
          ASSERT_TRUE(at::equal(result->losses[m], losses[m])) << "micro-batch " << m;
        }
        ASSERT_TRUE(optimizers[0]->Step(context).ok());
        optimizer_alone->step();
      }
      for (int s = 0; s < stages; ++s) {
        EXPECT_TRUE(at::equal(layers.weights[s], alone.weights[s])) << "stage " << s;
        EXPECT_TRUE(at::equal(layers.biases[s], alone.biases[s])) << "stage " << s;
      }
    }
  }
}

TEST_P(PipelineTest, BatchesOfOneContextAddUp) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const EqualLayers alone = layers.Copy();
  const auto stages =
      MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = MakePipeline(cluster, *ZeroBubbleH1(2, 3));
  const Context context = cluster[0].NewContext();
  for (int batch = 0; batch < 3; ++batch) {
    const at::Tensor x = at::randn({6, 16}), y = at::randn({6, 16});
    ASSERT_EQ(pipeline->Train(context, {x}, {y}).status(), absl::OkStatus());
    StepAlone(alone, 2, 3, true, x, y);
  }
  const absl::StatusOr<at::Tensor> gradient = context.Gradient(layers.weights[0]);
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  EXPECT_TRUE(at::equal(*gradient, alone.weights[0].grad()));
}

// Several inputs and outputs, of which some have no gradient; a skip connection by way of the stage
// between; a frozen stage; a parameter that two stages of one rank share.
TEST_P(PipelineTest, StagesMayHaveAnyTensorsAndParameters) {
  for (const bool halves : {false, true}) {
    SCOPED_TRACE(halves);
    Cluster cluster(Workers(2));
    const at::Tensor a = at::randn({16, 16}).requires_grad_(true);
    const at::Tensor frozen = at::randn({16, 16});
    const at::Tensor tied = at::randn({16, 16}).requires_grad_(true);
    const auto forward = [&](int stage, Tensors in) -> Tensors {
      switch (stage) {
        case 0:
          return {in[0].mm(tied) + in[1], in[1].to(at::kLong), in[1]};
        case 1:
          return {in[0].mm(a).tanh(), in[0], in[1], in[2]};
        case 2:  // in[1] has skipped stage 1
          return {(in[0].mm(frozen) + in[1].mm(tied)) * in[2].to(at::kFloat), in[3]};
        default:
          return {in[0].mm(frozen) + in[1]};
      }
    };
    Schedule schedule = *InterleavedOneForwardOneBackward(2, 2, 3);
    if (halves) {
      // A list of one's own: all weights at the end.
      for (std::vector<Action>& list : schedule.lists) {
        std::vector<Action> split;
        for (const Action& action : list) {
          split.push_back(action);
          if (action.kind != Action::Kind::kBackward) continue;
          split.back().kind = Action::Kind::kBackwardInput;
        }
        for (const Action& action : list) {
          if (action.kind != Action::Kind::kBackward) continue;
          split.push_back({Action::Kind::kBackwardWeight, action.stage, action.micro_batch});
        }
        list = split;
      }
      schedule.max_activations.clear();
    }
    const auto stages = MakeStages(cluster, schedule.rank_of_stage, forward);
    const auto pipeline = MakePipeline(cluster, schedule);
    const at::Tensor x = at::randn({9, 16}), mask = at::rand({9, 16}) * 3, y = at::randn({9, 16});
    const Context context = cluster[0].NewContext();
    const absl::StatusOr<PipelineResult> result = pipeline->Train(context, {x, mask}, {y});
    ASSERT_TRUE(result.ok()) << result.status();

    const Tensors xs = x.tensor_split(3), masks = mask.tensor_split(3), ys = y.tensor_split(3);
    at::Tensor expected_loss;
    for (int m = 0; m < 3; ++m) {
      Tensors at{xs[m], masks[m]};
      for (int s = 0; s < 4; ++s) at = forward(s, at);
      const at::Tensor loss = Loss(at, {ys[m]});
      EXPECT_TRUE(at::equal(loss, result->losses[m]));
      loss.backward(at::full_like(loss, 3.0 / 9.0));
      const at::Tensor part = loss.detach() * (3.0 / 9.0);
      expected_loss = m == 0 ? part : expected_loss + part;
    }
    EXPECT_TRUE(at::equal(result->loss, expected_loss));
    EXPECT_TRUE(result->outputs.empty());
    // Stages 1 and 3 are worker 1's, 0 and 2 worker 0's.
    const auto part_of = [&](int worker, const at::Tensor& leaf) {
      EXPECT_TRUE(cluster[worker]
                      .Register(absl::StrCat("gradient", halves),
                                [&](Request& request) -> absl::StatusOr<Message> {
                                  const auto found = request.context.Gradient(leaf);
                                  if (!found.ok()) return found.status();
                                  return Message{"", {*found}};
                                })
                      .ok());
      const absl::StatusOr<Message> reply = cluster[0].Call(
          WorkerName(worker), absl::StrCat("gradient", halves), {}, {.context = &context});
      EXPECT_TRUE(reply.ok()) << reply.status();
      return reply.ok() ? reply->tensors[0] : at::Tensor();
    };
    EXPECT_TRUE(at::equal(part_of(1, a), a.grad()));
    // Two stages add to it, each its sums: not the order of one process, where they are added
    // within each micro-batch first. So not to the last bit.
    EXPECT_TRUE(part_of(0, tied).allclose(tied.grad(), 1e-4, 1e-5));
  }
}

// Four stages, of which two have something for others than the next one: see SkipsOf().
Tensors ForwardWithSkips(const EqualLayers& layers, int stage, const Tensors& in) {
  switch (stage) {
    case 0: {
      const at::Tensor h = layers.Forward(0, in)[0];
      return {h, h, at::tanh(h), in[0]};
    }
    case 1:
      return {layers.Forward(1, in)[0], in[0] > 0};
    case 2:  // behind the output of stage 1: the second output of stage 0
      return {layers.Forward(2, {in[0]})[0] * in[1]};
    default:  // the third and the fourth output of stage 0, and the second one of stage 1
      return layers.Forward(3, {(in[0] + in[1]) * in[2] * in[3].to(at::kFloat)});
  }
}
std::vector<int> SkipsOf(int stage) {
  if (stage == 0) return {2, 3, 3};
  return stage == 1 ? std::vector{3} : std::vector<int>{};
}

// What a stage has given, with what has skipped to the next one behind it.
Tensors RunWithSkips(const EqualLayers& layers, const at::Tensor& x) {
  const Tensors first = ForwardWithSkips(layers, 0, {x});
  const Tensors second = ForwardWithSkips(layers, 1, {first[0]});
  const Tensors third = ForwardWithSkips(layers, 2, {second[0], first[1]});
  return ForwardWithSkips(layers, 3, {third[0], first[2], first[3], second[1]});
}

std::vector<std::unique_ptr<PipelineStages>> MakeStagesWithSkips(Cluster& cluster,
                                                                 const Schedule& schedule,
                                                                 const EqualLayers& layers,
                                                                 bool recompute) {
  std::vector<std::map<int, PipelineStage>> stages(cluster.size());
  for (int s = 0; s < 4; ++s) {
    stages[schedule.rank_of_stage[s]][s] = {
        .forward = [&layers, s](Tensors in) { return ForwardWithSkips(layers, s, in); },
        .loss = Loss,
        .inputs = std::array{1, 1, 2, 4}[s],
        .skips = SkipsOf(s),
        .recompute = recompute};
  }
  return CreateStages(cluster, std::move(stages));
}

struct SkipCase {
  std::string name;
  Schedule schedule;
  bool recompute = false;
};

TEST_P(PipelineTest, SkipConnectionsHaveTheGradientsOfOneProcessToTheLastBit) {
  for (const SkipCase& one :
       {SkipCase{"GPipe", *GPipe(4, 4)}, SkipCase{"1F1B", *OneForwardOneBackward(4, 4)},
        SkipCase{"recomputed", *OneForwardOneBackward(4, 3), true},
        // Stages 0 and 2 are on one rank, and 1 and 3.
        SkipCase{"interleaved", *InterleavedOneForwardOneBackward(2, 2, 4)},
        SkipCase{"one rank", *InterleavedOneForwardOneBackward(1, 4, 2)},
        SkipCase{"ZB-H1", *ZeroBubbleH1(4, 4)}}) {
    SCOPED_TRACE(one.name);
    const int count = one.schedule.micro_batches;
    Cluster cluster(Workers(one.schedule.ranks()));
    const EqualLayers layers(4);
    const EqualLayers alone = layers.Copy();
    const auto stages = MakeStagesWithSkips(cluster, one.schedule, layers, one.recompute);
    const auto pipeline = MakePipeline(cluster, one.schedule);
    std::vector<std::unique_ptr<Optimizer>> optimizers;
    Tensors all;
    for (int rank = 0; rank < one.schedule.ranks(); ++rank) {
      Tensors own;
      for (int s = 0; s < 4; ++s) {
        if (one.schedule.rank_of_stage[s] != rank) continue;
        for (const at::Tensor& parameter : layers.Of(s)) own.push_back(parameter);
      }
      optimizers.push_back(
          *Optimizer::Create(&cluster[rank], std::make_unique<torch::optim::Adam>(own, 0.01)));
    }
    for (int s = 0; s < 4; ++s) {
      for (const at::Tensor& parameter : alone.Of(s)) all.push_back(parameter);
    }
    torch::optim::Adam optimizer_alone(all, 0.01);
    for (int step = 0; step < 10; ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      const at::Tensor x = at::randn({10, 16}), y = at::rand({10, 16});
      const Context context = cluster[0].NewContext();
      const absl::StatusOr<PipelineResult> result = pipeline->Train(context, {x}, {y});
      ASSERT_TRUE(result.ok()) << result.status();
      optimizer_alone.zero_grad();
      const Tensors xs = x.tensor_split(count), ys = y.tensor_split(count);
      for (int m = 0; m < count; ++m) {
        const at::Tensor loss = Loss(RunWithSkips(alone, xs[m]), {ys[m]});
        loss.backward(at::full_like(loss, static_cast<double>(xs[m].size(0)) / 10.0));
        ASSERT_TRUE(at::equal(result->losses[m], loss)) << "micro-batch " << m;
      }
      ASSERT_TRUE(optimizers[0]->Step(context).ok());
      optimizer_alone.step();
    }
    for (int s = 0; s < 4; ++s) {
      EXPECT_TRUE(at::equal(layers.weights[s], alone.weights[s])) << "stage " << s;
      EXPECT_TRUE(at::equal(layers.biases[s], alone.biases[s])) << "stage " << s;
    }
    // An evaluation takes the same ways.
    const at::Tensor x = at::randn({10, 16});
    const absl::StatusOr<PipelineResult> result = pipeline->Evaluate({x});
    ASSERT_TRUE(result.ok()) << result.status();
    const Tensors xs = x.tensor_split(count);
    for (int m = 0; m < count; ++m) {
      ASSERT_EQ(result->outputs[m].size(), 1u);
      EXPECT_TRUE(at::equal(result->outputs[m][0], RunWithSkips(alone, xs[m])[0]));
    }
  }
}

// Autograd adds the gradient of relu(h) to that which has skipped back to h, in place.
TEST_P(PipelineTest, TheGradientOfASkipWithinARankBelongsToTheStageThatGetsIt) {
  const auto forward = [](const EqualLayers& layers, int stage, const Tensors& in) -> Tensors {
    const at::Tensor h = layers.Forward(stage, {in[0]})[0];
    if (stage == 0) return {at::relu(h), h};
    return {stage == 2 ? h + in[1] : h};
  };
  for (const Schedule& schedule :
       {*InterleavedOneForwardOneBackward(2, 2, 4), *InterleavedOneForwardOneBackward(1, 4, 2)}) {
    Cluster cluster(Workers(schedule.ranks()));
    const EqualLayers layers(4);
    const EqualLayers alone = layers.Copy();
    std::vector<std::map<int, PipelineStage>> stages(cluster.size());
    for (int s = 0; s < 4; ++s) {
      stages[schedule.rank_of_stage[s]][s] = {
          .forward = [&, s](Tensors in) { return forward(layers, s, in); },
          .loss = Loss,
          .inputs = s == 2 ? 2 : 1,
          .skips = s == 0 ? std::vector{2} : std::vector<int>{}};
    }
    const auto made = CreateStages(cluster, std::move(stages));
    const auto pipeline = MakePipeline(cluster, schedule);
    const at::Tensor x = at::randn({8, 16}), y = at::rand({8, 16});
    const Context context = cluster[0].NewContext();
    const absl::StatusOr<PipelineResult> result = pipeline->Train(context, {x}, {y});
    ASSERT_TRUE(result.ok()) << result.status();
    for (int m = 0; m < schedule.micro_batches; ++m) {
      Tensors at_stage{x.tensor_split(schedule.micro_batches)[m]};
      const Tensors first = forward(alone, 0, at_stage);
      at_stage = forward(alone, 1, {first[0]});
      at_stage = forward(alone, 2, {at_stage[0], first[1]});
      at_stage = forward(alone, 3, at_stage);
      const at::Tensor loss = Loss(at_stage, {y.tensor_split(schedule.micro_batches)[m]});
      loss.backward(at::full_like(loss, 1.0 / schedule.micro_batches));
      EXPECT_TRUE(at::equal(result->losses[m], loss)) << "micro-batch " << m;
    }
    EXPECT_TRUE(at::equal(*context.Gradient(layers.weights[0]), alone.weights[0].grad()));
  }
}

TEST_P(PipelineTest, WhatSkipsAStageDoesNotPassItsWorker) {
  Cluster cluster(Workers(3));
  constexpr int64_t kWide = 1 << 16;
  const at::Tensor w = at::ones({1}).requires_grad_(true);
  const auto first =
      PipelineStages::Create(&cluster[0], "model",
                             {{0,
                               {.forward =
                                    [&](Tensors in) {
                                      return Tensors{in[0] * w, in[0].expand({-1, kWide}) * w};
                                    },
                                .skips = {2}}}});
  const auto second = PipelineStages::Create(
      &cluster[1], "model", {{1, {.forward = [](Tensors in) { return Tensors{in[0] * 2}; }}}});
  const auto third = PipelineStages::Create(
      &cluster[2], "model",
      {{2,
        {.forward = [](Tensors in) { return Tensors{in[0] * (in[1] * in[1]).sum()}; },
         .loss = [](Tensors out, Tensors) { return out[0].sum(); },
         .inputs = 2}}});
  const auto pipeline = MakePipeline(cluster, *OneForwardOneBackward(3, 1));
  const Context context = cluster[0].NewContext();
  const absl::StatusOr<PipelineResult> result =
      pipeline->Train(context, {at::ones({1, 1})}, {at::ones({1})});
  ASSERT_TRUE(result.ok()) << result.status();
  // The loss is 2 w kWide w^2.
  EXPECT_EQ(context.Gradient(w)->item<float>(), 6.0f * kWide);
  const auto received = [&](int worker) {
    uint64_t bytes = 0;
    for (const CallStats& stats : cluster[worker].Metrics().calls) {
      if (stats.served) bytes += stats.bytes_received;
    }
    return bytes;
  };
  EXPECT_LT(received(1), uint64_t{kWide});
  EXPECT_GT(received(2), uint64_t{kWide} * sizeof(float));
  EXPECT_GT(received(0), uint64_t{kWide} * sizeof(float)) << "its gradient comes back";
}

TEST_P(PipelineTest, SkipsThatCannotBeAreErrors) {
  const auto train = [&](std::vector<int> skips, int outputs) {
    Cluster cluster(Workers(3));
    const EqualLayers layers(3);
    std::vector<std::unique_ptr<PipelineStages>> stages;
    for (int s = 0; s < 3; ++s) {
      PipelineStage stage{.forward =
                              [&layers, s, outputs](Tensors in) {
                                const at::Tensor out = layers.Forward(s, {in[0]})[0];
                                return Tensors(s == 0 ? outputs : 1, out);
                              },
                          .loss = Loss,
                          .inputs = std::nullopt};
      if (s == 0) stage.skips = skips;
      stages.push_back(*PipelineStages::Create(&cluster[s], "model", {{s, std::move(stage)}}));
    }
    const auto pipeline = MakePipeline(cluster, *OneForwardOneBackward(3, 2));
    const Context context = cluster[0].NewContext();
    return pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  };
  EXPECT_EQ(train({2}, 2), absl::OkStatus());
  for (const int to : {-1, 0, 1, 3}) {
    const absl::Status status = train({to}, 2);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("stage 0 on worker 'worker0' skips to stage ", to)));
  }
  const absl::Status status = train({2, 2}, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("forward of stage 0, micro-batch 0 on worker 'worker0'"),
                    HasSubstr("gives 1 tensors, and the last 2 are to skip")));
}

TEST_P(PipelineTest, AnEvaluationGivesOutputsAndLosses) {
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    const int stages = one.schedule.stages();
    Cluster cluster(Workers(one.schedule.ranks()));
    const EqualLayers layers(stages);
    std::atomic<bool> grad_mode{false};
    const at::Tensor reused = at::zeros({});
    const auto forward = [&](int s, Tensors in) {
      if (at::GradMode::is_enabled()) grad_mode = true;
      return layers.Forward(s, in);
    };
    // It may give each loss in the memory of the one before.
    const auto loss = [&](Tensors outputs, Tensors targets) {
      reused.copy_(Loss(std::move(outputs), std::move(targets)));
      return reused;
    };
    const auto made = MakeStages(cluster, one.schedule.rank_of_stage, forward, loss);
    const auto pipeline = MakePipeline(cluster, one.schedule);
    const at::Tensor x = at::randn({11, 16}), y = at::randn({11, 16});
    const int count = one.schedule.micro_batches;
    for (const bool with_targets : {false, true}) {
      const absl::StatusOr<PipelineResult> result =
          pipeline->Evaluate({x}, with_targets ? Tensors{y} : Tensors{});
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(result->outputs.size(), static_cast<size_t>(count));
      EXPECT_EQ(result->losses.size(), static_cast<size_t>(with_targets ? count : 0));
      const Tensors xs = x.tensor_split(count), ys = y.tensor_split(count);
      for (int m = 0; m < count; ++m) {
        Tensors at{xs[m]};
        for (int s = 0; s < stages; ++s) at = layers.Forward(s, at);
        ASSERT_EQ(result->outputs[m].size(), 1u);
        EXPECT_TRUE(at::equal(result->outputs[m][0], at[0]));
        EXPECT_FALSE(result->outputs[m][0].requires_grad());
        if (with_targets) {
          EXPECT_TRUE(at::equal(result->losses[m], Loss(at, {ys[m]})));
        }
      }
    }
    EXPECT_FALSE(grad_mode);
  }
}

// Throws in backward.
struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a) {
    return a.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::invalid_argument("no way back");
  }
};

TEST_P(PipelineTest, AnErrorNamesStageMicroBatchAndWorkerAndTheNextStepIsGood) {
  Cluster cluster(Workers(3));
  const EqualLayers layers(3);
  std::atomic<int> calls{0};
  enum Fault { kNone, kForward, kBackward, kLoss, kNoGradient, kOutputs };
  std::atomic<Fault> fault{kNone};
  const auto stages = MakeStages(
      cluster, {0, 1, 2},
      [&](int stage, Tensors in) {
        if (fault == kNoGradient) in[0] = in[0].detach();
        Tensors out = layers.Forward(stage, in);
        if (fault == kNoGradient) out[0] = out[0].detach();
        if (stage == 1 && ++calls == 2) {
          if (fault == kForward) throw std::invalid_argument("no way on");
          if (fault == kBackward) out[0] = Broken::apply(out[0]);
          if (fault == kOutputs) out.clear();
        }
        return out;
      },
      [&](Tensors outputs, Tensors targets) {
        return fault == kLoss ? outputs[0] : Loss(outputs, targets);
      });
  for (const Schedule& schedule : {*OneForwardOneBackward(3, 5), *ZeroBubbleH1(3, 5)}) {
    const auto pipeline = MakePipeline(cluster, schedule);
    const auto step = [&](Fault with) {
      fault = with;
      calls = 0;
      const Context context = cluster[0].NewContext();
      const absl::Status status =
          pipeline->Train(context, {at::randn({10, 16})}, {at::randn({10, 16})}).status();
      fault = kNone;
      return status;
    };
    EXPECT_EQ(step(kNone), absl::OkStatus());
    absl::Status status = step(kForward);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("forward of stage 1, micro-batch 1 on worker 'worker1'"),
                      HasSubstr("no way on")));
    EXPECT_EQ(step(kNone), absl::OkStatus());
    status = step(kBackward);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("of stage 1, micro-batch 1 on worker 'worker1'"),
                      HasSubstr("no way back")));
    EXPECT_EQ(step(kNone), absl::OkStatus());
    status = step(kLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("forward of stage 2, micro-batch 0 on worker 'worker2'"),
                      HasSubstr("the loss is not one number")));
    // It is over when the functions of the one before are: they count no more calls.
    EXPECT_EQ(step(kNone), absl::OkStatus());
    status = step(kOutputs);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("forward of stage 2, micro-batch 1 on worker 'worker2'"),
                      HasSubstr("a layer has one input, and not 0")));
    status = step(kNoGradient);
    EXPECT_THAT(std::string(status.message()), HasSubstr("nothing that requires grad"));
    EXPECT_EQ(step(kNone), absl::OkStatus());
  }
}

// What is odd, but may be a result, is one; what cannot travel is an error.
TEST_P(PipelineTest, OddThingsThatStagesDoArePassedOnOrNamed) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  enum Fault { kNoException, kMeta, kMetaLoss, kComplexLoss, kNoLoss, kNan };
  std::atomic<Fault> fault{kNoException};
  const auto stages = MakeStages(
      cluster, {0, 1},
      [&](int stage, Tensors in) {
        Tensors out = layers.Forward(stage, in);
        if (stage == 0 && fault == kNoException) throw 5;  // NOLINT
        if (stage == 0 && fault == kMeta) out[0] = out[0].to(at::kMeta);
        if (stage == 0 && fault == kNan) out[0] = out[0] * (0.0 / 0.0);
        return out;
      },
      [&](Tensors outputs, Tensors targets) {
        const at::Tensor loss = Loss(outputs, targets);
        if (fault == kMetaLoss) return loss.to(at::kMeta);
        if (fault == kComplexLoss) return loss.to(at::kComplexFloat);
        return fault == kNoLoss ? at::Tensor() : loss;
      });
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 2));
  const auto step = [&](Fault with) {
    fault = with;
    const Context context = cluster[0].NewContext();
    return pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})});
  };
  EXPECT_THAT(std::string(step(kNoException).status().message()),
              HasSubstr("forward of stage 0, micro-batch 0 on worker 'worker0'"));
  EXPECT_THAT(std::string(step(kMeta).status().message()),
              AllOf(HasSubstr("worker 'worker0' cannot send the activations of micro-batch 0 to "
                              "stage 1 on worker 'worker1'"),
                    HasSubstr("a meta tensor has no elements to send")));
  EXPECT_THAT(std::string(step(kMetaLoss).status().message()),
              AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker 'worker1'"),
                    HasSubstr("the loss is a meta tensor, which has no value")));
  EXPECT_THAT(std::string(step(kComplexLoss).status().message()),
              AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker 'worker1'"),
                    HasSubstr("the loss is complex")));
  EXPECT_THAT(std::string(step(kNoLoss).status().message()),
              AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker 'worker1'"),
                    HasSubstr("the loss is not one number")));
  const absl::StatusOr<PipelineResult> result = step(kNan);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->loss.isnan().item().toBool());
}

TEST_P(PipelineTest, WhatIsAskedForWronglyIsNamed) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto forward = [&](int stage, Tensors in) { return layers.Forward(stage, in); };
  const auto stages = MakeStages(cluster, {0, 1}, forward);
  EXPECT_EQ(PipelineStages::Create(&cluster[1], "model", {}).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(PipelineStages::Create(&cluster[1], "aten::add", {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PipelineStages::Create(&cluster[1], "other", {{0, PipelineStage{}}}).status().code(),
            absl::StatusCode::kInvalidArgument);

  Schedule broken = *GPipe(2, 2);
  broken.lists[1].pop_back();
  EXPECT_THAT(
      std::string(
          Pipeline::Create(&cluster[0], {.name = "model", .workers = Names(2), .schedule = broken})
              .status()
              .message()),
      HasSubstr("is missing"));
  EXPECT_THAT(
      std::string(Pipeline::Create(&cluster[0],
                                   {.name = "model", .workers = Names(1), .schedule = *GPipe(2, 2)})
                      .status()
                      .message()),
      HasSubstr("1 workers for 2 ranks"));

  const auto pipeline = MakePipeline(cluster, *GPipe(2, 4));
  const Context context = cluster[0].NewContext();
  const auto message = [&](Tensors inputs, Tensors targets) {
    return std::string(pipeline->Train(context, inputs, targets).status().message());
  };
  EXPECT_THAT(message({}, {}), HasSubstr("at least one input"));
  EXPECT_THAT(
      message({at::ones({3, 16})}, {}),
      HasSubstr("input 0 has 3 elements for a batch of 3 in 4 micro-batches, which needs at "
                "least 4"));
  EXPECT_THAT(message({at::ones({4, 16})}, {at::ones({5, 16})}), HasSubstr("target 0 has 5"));
  EXPECT_THAT(message({at::ones({})}, {}), HasSubstr("no dimension"));
  EXPECT_THAT(message({at::ones({4, 16})}, {at::ones({4, 16}).to_sparse()}),
              HasSubstr("target 0 is of layout Sparse, and only a dense one can be cut into "
                        "micro-batches; pass its indices and values, or make it dense"));
  EXPECT_EQ(pipeline->Train(Context(), {at::ones({4, 16})}, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  // A stage that nobody has, and a worker that nobody is.
  const absl::Status missing = MakePipeline(cluster, *InterleavedOneForwardOneBackward(2, 2, 4))
                                   ->Train(context, {at::ones({4, 16})}, {})
                                   .status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  // Both lack one, and either may be the first to say so.
  EXPECT_THAT(std::string(missing.message()),
              ContainsRegex("worker '(worker0' has no stage 2|worker1' has no stage 3) of pipe"));
  // Half of the model would be trained, and nobody would hear of it.
  const auto four = PipelineStages::Create(
      &cluster[0], "four",
      {{0, {.forward = [&](Tensors in) { return layers.Forward(0, in); }, .loss = Loss}},
       {3, {.forward = [&](Tensors in) { return layers.Forward(1, in); }, .loss = Loss}}});
  ASSERT_TRUE(four.ok()) << four.status();
  const auto one_of_four = Pipeline::Create(
      &cluster[0], {.name = "four", .workers = Names(1), .schedule = *GPipe(1, 2)});
  ASSERT_TRUE(one_of_four.ok()) << one_of_four.status();
  const absl::Status more = (*one_of_four)->Train(context, {at::ones({4, 16})}, {}).status();
  EXPECT_EQ(more.code(), absl::StatusCode::kInvalidArgument) << more;
  EXPECT_THAT(std::string(more.message()),
              HasSubstr("worker 'worker0' has stage 3 of pipeline 'four', and the stages of the "
                        "schedule are 1, from 0"));
  const auto lost = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker0", "nobody"}, .schedule = *GPipe(2, 2)});
  ASSERT_TRUE(lost.ok());
  EXPECT_THAT(std::string((*lost)->Train(context, {at::ones({4, 16})}, {}).status().message()),
              HasSubstr("stage 1 on worker 'nobody'"));
}

TEST_P(PipelineTest, AWorkerThatHasNotCreatedItsStagesIsNamed) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto front = PipelineStages::Create(
      &cluster[0], "model", {{0, {.forward = [&](Tensors in) { return layers.Forward(0, in); }}}});
  ASSERT_TRUE(front.ok()) << front.status();
  const absl::Status status = MakePipeline(cluster, *GPipe(2, 2))
                                  ->Train(cluster[0].NewContext(), {at::ones({4, 16})}, {})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("stage 1 on worker 'worker1'"),
                    HasSubstr("that worker has no PipelineStages of the name 'model' (yet): every "
                              "worker of a pipeline creates its stages, and a barrier stands "
                              "before the first step")));
}

// What has made it would not be trained, and nobody would hear of it.
TEST_P(PipelineTest, ABatchThatRequiresGradIsRefused) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto stages =
      MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 2));
  const Context context = cluster[0].NewContext();
  const at::Tensor plain = at::randn({4, 16}), leaf = at::randn({4, 16}).requires_grad_(true);
  const std::vector<std::pair<Tensors, std::string>> batches = {
      {{leaf, plain}, "input 0"}, {{leaf * 2, plain}, "input 0"}, {{plain, leaf}, "target 0"}};
  for (const auto& [batch, what] : batches) {
    const absl::Status status = pipeline->Train(context, {batch[0]}, {batch[1]}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(what, " requires grad, and no gradient goes back")));
  }
  EXPECT_EQ(pipeline->Train(context, {plain}, {plain}).status(), absl::OkStatus());
  // Nothing goes back in an evaluation.
  EXPECT_EQ(pipeline->Evaluate({leaf}, {leaf}).status(), absl::OkStatus());
}

// Its gradients would be those of a context that the other worker knows nothing of, and nobody
// would release them.
TEST_P(PipelineTest, AContextOfAnotherWorkerIsRefused) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto stages =
      MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto optimizer =
      Optimizer::Create(&cluster[0], std::make_unique<torch::optim::SGD>(layers.Of(0), /*lr=*/0.1));
  ASSERT_TRUE(optimizer.ok()) << optimizer.status();
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 2));
  const Context foreign = cluster[1].NewContext();
  const absl::Status trained =
      pipeline->Train(foreign, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  for (const absl::Status& status :
       {trained, (*optimizer)->Step(foreign), (*optimizer)->ClipGradients(foreign, 1).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("context ", foreign.id())),
                      HasSubstr("of another worker than worker 'worker0'")));
  }
  EXPECT_TRUE(foreign.Gradients()->empty());
}

// A first stage without any parameter that is trained, whole and in halves, and kept or recomputed:
// nothing of it goes backward.
TEST_P(PipelineTest, AFirstStageMayBeFrozen) {
  for (const Schedule& schedule : {*OneForwardOneBackward(2, 3), *ZeroBubbleH1(2, 3)}) {
    for (const bool recompute : {false, true}) {
      Cluster cluster(Workers(2));
      EqualLayers layers(2);
      for (at::Tensor frozen : layers.Of(0)) frozen.requires_grad_(false);
      const EqualLayers alone = layers.Copy();
      std::vector<std::unique_ptr<PipelineStages>> stages;
      for (int s = 0; s < 2; ++s) {
        stages.push_back(*PipelineStages::Create(
            &cluster[s], "model",
            {{s,
              {.forward = [&, s](Tensors in) { return layers.Forward(s, in); },
               .loss = Loss,
               .recompute = recompute}}}));
      }
      const auto pipeline = MakePipeline(cluster, schedule);
      const at::Tensor x = at::randn({6, 16}), y = at::randn({6, 16});
      // The last stage's worker leads, for its gradients are those that there are.
      const auto own = Pipeline::Create(
          &cluster[1], {.name = "model", .workers = Names(2), .schedule = schedule});
      ASSERT_TRUE(own.ok()) << own.status();
      const Context context = cluster[1].NewContext();
      ASSERT_EQ((*own)->Train(context, {x}, {y}).status(), absl::OkStatus());
      StepAlone(alone, 2, 3, true, x, y);
      EXPECT_TRUE(at::equal(*context.Gradient(layers.weights[1]), alone.weights[1].grad()));
      EXPECT_TRUE(at::equal(*context.Gradient(layers.biases[1]), alone.biases[1].grad()));
      const Context of_first = cluster[0].NewContext();
      ASSERT_EQ(pipeline->Train(of_first, {x}, {y}).status(), absl::OkStatus());
      EXPECT_TRUE(of_first.Gradients()->empty());
    }
  }
}

TEST_P(PipelineTest, ADeadlineEndsAStepEverywhere) {
  // A step may not have come so far by the first limits.
  for (absl::Duration limit = absl::Milliseconds(200);; limit *= 2) {
    Cluster cluster(Workers(2));
    const EqualLayers layers(2);
    absl::Notification end;
    std::atomic<bool> blocks{true};
    const auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) {
      if (stage == 1 && blocks.exchange(false)) end.WaitForNotification();
      return layers.Forward(stage, in);
    });
    const auto pipeline = MakePipeline(cluster, *OneForwardOneBackward(2, 4));
    const Tensors x{at::randn({4, 16})}, y{at::randn({4, 16})};
    absl::Status status;
    {
      const Context context = cluster[0].NewContext();
      status = pipeline->Train(context, x, y, Deadline::After(limit)).status();
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    const bool is_enough =
        absl::StrContains(status.message(),
                          "worker 'worker0' waits for others in the receive of ") &&
        absl::StrContains(status.message(),
                          "worker 'worker1' is in the forward of stage 1, micro-batch 0");
    if (!is_enough && limit < absl::Seconds(10)) {
      end.Notify();
      continue;
    }
    EXPECT_TRUE(is_enough) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("pipeline 'model', stage "));
    // The function still runs: the next step waits for it,
    const absl::string_view queued = "worker 'worker1' waits for a function of the step before";
    // The step has to have begun on that worker by then.
    for (int tries = 0; tries < 8 && !absl::StrContains(status.message(), queued); ++tries) {
      const Context context = cluster[0].NewContext();
      status = pipeline->Train(context, x, y, Deadline::After(absl::Milliseconds(100 << tries)))
                   .status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    }
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(queued)));
    // and ends well.
    std::thread other([&] { end.Notify(); });
    const Context context = cluster[0].NewContext();
    EXPECT_EQ(pipeline->Train(context, x, y).status(), absl::OkStatus());
    other.join();
    return;
  }
}

TEST_P(PipelineTest, AWorkerThatIsLostInAStepIsNamedAndAnotherTakesItsPlace) {
  Cluster cluster(Workers(3));
  const EqualLayers layers(3);
  std::atomic<int> calls{0};
  const auto forward = [&](int stage, Tensors in) {
    // Ends in the middle of a step, without a farewell.
    if (stage == 1 && ++calls == 3) cluster[1].Abort();
    return layers.Forward(stage, in);
  };
  auto stages = MakeStages(cluster, {0, 1, 2}, forward);
  const auto pipeline = MakePipeline(cluster, *OneForwardOneBackward(3, 4));
  const Tensors x{at::randn({8, 16})}, y{at::randn({8, 16})};
  {
    const Context context = cluster[0].NewContext();
    const absl::Status status = pipeline->Train(context, x, y).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("worker1")) << status;
  }
  // So do those hear who only serve.
  for (const int i : {0, 2}) {
    const absl::Status heard = cluster[i].Barrier(Deadline::After(absl::Seconds(60)));
    EXPECT_EQ(heard.code(), absl::StatusCode::kUnavailable) << heard;
    EXPECT_THAT(std::string(heard.message()), HasSubstr("worker1"));
  }
  stages[1].reset();
  cluster.Kill(1);
  const auto joined = cluster.Join("worker1");
  auto again = PipelineStages::Create(
      joined.get(), "model", {{1, {.forward = [&](Tensors in) { return layers.Forward(1, in); }}}});
  ASSERT_TRUE(again.ok()) << again.status();
  // The others may hear of it a little later.
  absl::Status status;
  for (int tries = 0; tries < 1000; ++tries) {
    const Context context = cluster[0].NewContext();
    status = pipeline->Train(context, x, y).status();
    if (status.ok()) break;
    ASSERT_TRUE(cluster[0].UpdateMembers().ok());
  }
  EXPECT_EQ(status, absl::OkStatus());
  again->reset();
}

// A worker that is lost in the middle of a step comes back alone, and takes its parameters from
// what was saved after the step before. Nobody has stepped since, as the error says, so that the
// job goes on from there, and ends as if nothing had happened.
TEST_P(PipelineTest, WithAWorkerThatHasComeBackTheJobGoesOnFromItsLastStep) {
  constexpr int kStages = 3, kSteps = 6, kLostIn = 3;
  Cluster cluster(Workers(kStages));
  EqualLayers layers(kStages);
  const EqualLayers alone = layers.Copy();
  const auto descend = [](const Tensors& parameters, auto gradient_of) {
    const at::AutoGradMode grad_mode(false);
    for (at::Tensor parameter : parameters) parameter.sub_(gradient_of(parameter), 0.1);
  };
  std::atomic<int> forwards_left{-1};  // of stage 1, before its worker is lost; -1: it is not
  const auto stage_of = [&](int s) -> std::map<int, PipelineStage> {
    return {{s,
             {.forward =
                  [&, s](Tensors in) {
                    if (s == 1 && forwards_left >= 0 && forwards_left-- == 0) cluster[1].Abort();
                    return layers.Forward(s, in);
                  },
              .loss = Loss,
              .step = [&, s](const Context& context) -> absl::Status {
                descend(layers.Of(s), [&](const at::Tensor& parameter) {
                  return ValueOrThrow(context.Gradient(parameter));
                });
                return absl::OkStatus();
              }}}};
  };
  std::unique_ptr<Worker> joined;
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int s = 0; s < kStages; ++s) {
    stages.push_back(*PipelineStages::Create(&cluster[s], "model", stage_of(s)));
  }
  const Schedule schedule = WithSteps(*OneForwardOneBackward(kStages, 4));
  const auto pipeline = MakePipeline(cluster, schedule);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    const at::Tensor x = at::randn({8, 16}), y = at::randn({8, 16});
    const auto train = [&] {
      const Context context = cluster[0].NewContext();
      return pipeline->Train(context, {x}, {y}).status();
    };
    const EqualLayers saved = layers.Copy();
    absl::Status status = absl::UnavailableError("no step yet");
    if (step == kLostIn) {
      forwards_left = 2;
      status = train();
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("stage 0 on worker 'worker0' has not stepped"),
                        HasSubstr("stage 1 on worker 'worker1'"),
                        HasSubstr("stage 2 on worker 'worker2' has not stepped")));
      stages[1].reset();
      cluster.Kill(1);
      joined = cluster.Join("worker1");
      layers.weights[1] = saved.weights[1];
      layers.biases[1] = saved.biases[1];
      stages[1] = *PipelineStages::Create(joined.get(), "model", stage_of(1));
    }
    // The others may hear of it a little later.
    for (int tries = 0; tries < 1000; ++tries) {
      status = train();
      if (status.ok() || step != kLostIn) break;
      ASSERT_TRUE(cluster[0].UpdateMembers().ok());
    }
    ASSERT_EQ(status, absl::OkStatus());
    StepAlone(alone, kStages, schedule.micro_batches, true, x, y);
    for (int s = 0; s < kStages; ++s) {
      descend(alone.Of(s), [](const at::Tensor& parameter) { return parameter.grad(); });
      for (at::Tensor parameter : alone.Of(s)) parameter.mutable_grad().reset();
    }
  }
  EXPECT_NE(joined, nullptr);
  for (int s = 0; s < kStages; ++s) {
    EXPECT_TRUE(at::equal(layers.weights[s], alone.weights[s])) << "stage " << s;
    EXPECT_TRUE(at::equal(layers.biases[s], alone.biases[s])) << "stage " << s;
  }
}

TEST_P(PipelineTest, AStepOfTheScheduleIsThatOfTheStage) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const EqualLayers alone = layers.Copy();
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int s = 0; s < 2; ++s) {
    stages.push_back(
        *PipelineStages::Create(&cluster[s], "model",
                                {{s,
                                  {.forward = [&, s](Tensors in) { return layers.Forward(s, in); },
                                   .loss = Loss,
                                   .step = [&, s](const Context& context) -> absl::Status {
                                     const at::AutoGradMode grad_mode(false);
                                     for (at::Tensor parameter : layers.Of(s)) {
                                       const auto gradient = context.Gradient(parameter);
                                       if (!gradient.ok()) return gradient.status();
                                       parameter.sub_(*gradient);
                                     }
                                     return absl::OkStatus();
                                   }}}}));
  }
  const Schedule schedule = WithSteps(*ZeroBubbleH1(2, 3));
  const auto pipeline = MakePipeline(cluster, schedule);
  const at::Tensor x = at::randn({16, 16}), y = at::randn({16, 16});
  const Context context = cluster[0].NewContext();
  ASSERT_EQ(pipeline->Train(context, {x}, {y}).status(), absl::OkStatus());
  StepAlone(alone, 2, 3, true, x, y);
  for (int s = 0; s < 2; ++s) {
    EXPECT_TRUE(at::equal(layers.weights[s], alone.weights[s] - alone.weights[s].grad()));
  }
}

// It is found out before others have stepped.
TEST_P(PipelineTest, AStageWithoutAFunctionForItsStepIsNamed) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  std::atomic<int> forwards{0};
  std::vector<std::map<int, PipelineStage>> own(2);
  for (int s = 0; s < 2; ++s) {
    own[s][s] = {.forward =
                     [&, s](Tensors in) {
                       ++forwards;
                       return layers.Forward(s, std::move(in));
                     },
                 .loss = Loss};
  }
  own[1][1].step = [](const Context&) { return absl::OkStatus(); };
  const auto stages = CreateStages(cluster, std::move(own));
  const Context context = cluster[0].NewContext();
  const absl::Status status = MakePipeline(cluster, WithSteps(*GPipe(2, 2)))
                                  ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the schedule has a step of stage 0, and that stage on worker 'worker0' "
                        "has no function for it"));
  EXPECT_EQ(forwards, 0);
}

// Two stages: the front calls `fails` on the way back, and the back steps by `step` meanwhile.
std::vector<std::map<int, PipelineStage>> FrontThatFails(
    const EqualLayers& layers, const CallOnTheWayBack::Call* fails,
    std::function<absl::Status(const Context&)> step) {
  std::vector<std::map<int, PipelineStage>> stages(2);
  stages[0][0] = {.forward = [&layers, fails](Tensors in) -> Tensors {
                    return {CallOnTheWayBack::apply(layers.Forward(0, std::move(in))[0], fails)};
                  },
                  .step = [](const Context&) { return absl::OkStatus(); }};
  stages[1][1] = {.forward = [&layers](Tensors in) { return layers.Forward(1, std::move(in)); },
                  .loss = Loss,
                  .step = std::move(step)};
  return stages;
}

// The back steps while the front still goes backward, and fails. The caller may look at the
// parameters, or save them, once Train() has returned.
TEST_P(PipelineTest, AfterAStepThatHasFailedNoStageStepsAnyMore) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification steps, returned;
  const CallOnTheWayBack::Call fails = [&] {
    steps.WaitForNotification();
    throw std::runtime_error("no gradient today");
  };
  std::atomic<bool> ends_late{false};
  const auto step = [&](const Context&) {
    steps.Notify();
    // Train() would return at once if it did not wait for this function.
    ends_late = returned.WaitForNotificationWithTimeout(absl::Milliseconds(300));
    return absl::OkStatus();
  };
  auto stages = CreateStages(cluster, FrontThatFails(layers, &fails, step));
  const Schedule schedule = WithSteps(*GPipe(2, 1));
  const auto pipeline = MakePipeline(cluster, schedule);
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  returned.Notify();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no gradient today"));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("pipeline 'model': stage 0 on worker 'worker0' has not stepped, stage 1 "
                        "on worker 'worker1' has stepped: "));
  stages.clear();
  EXPECT_FALSE(ends_late);
}

// The back fails in its step while the front still goes backward, which has its step yet to come.
TEST_P(PipelineTest, AStageThatWouldStepAfterAStepHasFailedDoesNot) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification goes_backward, returned;
  const CallOnTheWayBack::Call waits = [&] {
    goes_backward.Notify();
    returned.WaitForNotification();
  };
  std::atomic<bool> front_steps{false};
  std::vector<std::map<int, PipelineStage>> own(2);
  own[0][0] = {.forward = [&](Tensors in) -> Tensors {
                 return {CallOnTheWayBack::apply(layers.Forward(0, std::move(in))[0], &waits)};
               },
               .step =
                   [&](const Context&) {
                     front_steps = true;
                     return absl::OkStatus();
                   }};
  own[1][1] = {.forward = [&](Tensors in) { return layers.Forward(1, std::move(in)); },
               .loss = Loss,
               .step =
                   [&](const Context&) {
                     goes_backward.WaitForNotification();
                     return absl::DataLossError("no step today");
                   }};
  auto stages = CreateStages(cluster, std::move(own));
  const Schedule schedule = WithSteps(*GPipe(2, 1));
  const auto pipeline = MakePipeline(cluster, schedule);
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("pipeline 'model': stage 0 on worker 'worker0' has not stepped, stage 1 "
                        "on worker 'worker1' has failed in its step: "));
  returned.Notify();
  stages.clear();  // waits until the front has come to the end of its list
  EXPECT_FALSE(front_steps);
}

// A stage's own deadline is not that of the step: there is time to wait for those that step, also
// where it is a stage on the driver's worker.
TEST_P(PipelineTest, ADeadlineOfAStagesOwnLeavesTimeForTheSteps) {
  for (const int driver : {0, 1}) {
    SCOPED_TRACE(driver);
    Cluster cluster(Workers(2));
    const EqualLayers layers(2);
    absl::Notification steps, returned;
    const CallOnTheWayBack::Call fails = [&] {
      steps.WaitForNotification();
      throw StatusError(absl::DeadlineExceededError("the disk is slow"));
    };
    const auto step = [&](const Context&) {
      steps.Notify();
      // Longer than what is left once the deadline of a step has passed.
      returned.WaitForNotificationWithTimeout(absl::Milliseconds(2500));
      return absl::OkStatus();
    };
    const auto stages = CreateStages(cluster, FrontThatFails(layers, &fails, step));
    const Schedule schedule = WithSteps(*GPipe(2, 1));
    const auto pipeline = Pipeline::Create(
        &cluster[driver], {.name = "model", .workers = Names(2), .schedule = schedule});
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    const Context context = cluster[driver].NewContext();
    const absl::Status status =
        (*pipeline)->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
    returned.Notify();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("the disk is slow"),
                      HasSubstr("stage 1 on worker 'worker1' has stepped: ")));
  }
}

// Each worker lets the step wait for less than that, and both together for more.
TEST_P(PipelineTest, TheDefaultDeadlineIsOneForAllCallsOfAStep) {
  ClusterOptions options = Workers(2);  // with one thread each
  options.timeout = absl::Seconds(4);
  Cluster cluster(options);
  const EqualLayers layers(2);
  const auto stages = MakeStages(
      cluster, {0, 1}, [&](int s, Tensors in) { return layers.Forward(s, std::move(in)); });
  absl::Notification failed;
  absl::BlockingCounter begun(2);
  std::vector<Future<Message>> busy;
  for (const int rank : {0, 1}) {
    const auto wait = [&, rank](Request&) -> absl::StatusOr<Message> {
      begun.DecrementCount();
      failed.WaitForNotificationWithTimeout(options.timeout * (rank == 0 ? 0.9 : 1.8));
      return Message{};
    };
    ASSERT_TRUE(cluster[rank].Register("wait", wait).ok());
    busy.push_back(cluster[0].CallAsync(WorkerName(rank), "wait", {},
                                        {.deadline = Deadline::After(absl::Seconds(60))}));
  }
  begun.Wait();
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  const Context context = cluster[0].NewContext();
  EXPECT_EQ(pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  failed.Notify();
  for (const Future<Message>& call : busy) EXPECT_TRUE(call.Wait().ok());
}

// A stage's functions are handlers, also where they run for the second time; and so is a recorder.
TEST_P(PipelineTest, TheOriginOfAnErrorIsWhoseFunctionItWas) {
  const ErrorOrigin handler{0, ErrorOrigin::By::kHandler};
  for (const bool in_recorder : {false, true}) {
    SCOPED_TRACE(in_recorder);
    Cluster cluster(Workers(1));
    const EqualLayers layers(1);
    int calls = 0;
    const auto forward = [&](Tensors in) {
      if (++calls == 2) throw StatusError(absl::NotFoundError("gone"));
      return layers.Forward(0, std::move(in));
    };
    const auto record = [in_recorder](const StageSpan& span) {
      if (in_recorder && span.action.kind == Action::Kind::kForward) {
        throw StatusError(absl::NotFoundError("gone"));
      }
    };
    const auto stages = PipelineStages::Create(
        &cluster[0], "model", {{0, {.forward = forward, .loss = Loss, .recompute = true}}},
        {.on_action = record});
    ASSERT_TRUE(stages.ok()) << stages.status();
    const Context context = cluster[0].NewContext();
    const absl::Status status = MakePipeline(cluster, *GPipe(1, 1))
                                    ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})})
                                    .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_EQ(calls, in_recorder ? 1 : 2);
    EXPECT_EQ(OriginOf(status), handler);
  }
}

// It is the recorder that has failed.
TEST_P(PipelineTest, AStepAfterWhichTheRecorderFailsHasStepped) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  PipelineStage stage = {.forward = [&](Tensors in) { return layers.Forward(0, std::move(in)); },
                         .loss = Loss,
                         .step = [](const Context&) { return absl::OkStatus(); }};
  const auto stages = PipelineStages::Create(&cluster[0], "model", {{0, stage}},
                                             {.on_action = [](const StageSpan& span) {
                                               if (span.action.kind == Action::Kind::kStep) {
                                                 throw std::runtime_error("the disk is full");
                                               }
                                             }});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const Schedule schedule = WithSteps(*GPipe(1, 1));
  const Context context = cluster[0].NewContext();
  const absl::Status status = MakePipeline(cluster, schedule)
                                  ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})})
                                  .status();
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("stage 0 on worker 'worker0' has stepped: "), HasSubstr("the disk is full")));
}

// One that does not answer takes no time from the others.
TEST_P(PipelineTest, AWorkerThatDoesNotAnswerHidesNothingOfTheOthers) {
  absl::Status status;
  absl::Duration enough = absl::Milliseconds(500);
  bool is_late;  // to a forward of the last stage, by the step's deadline
  do {
    enough *= 2;
    is_late = true;
    Cluster cluster(Workers(2));
    const EqualLayers layers(2);
    absl::Notification ends;
    ASSERT_TRUE(cluster[1]
                    .Register("wait",
                              [&](Request&) -> absl::StatusOr<Message> {
                                ends.WaitForNotification();
                                return Message();
                              })
                    .ok());
    const Deadline deadline = Deadline::After(enough);
    std::vector<Future<Message>> waiting;
    std::vector<std::map<int, PipelineStage>> own(2);
    for (int s = 0; s < 2; ++s) {
      own[s][s] = {.forward = [&, s](Tensors in) -> Tensors {
                     if (s == 1) {
                       // All threads that would serve a call are taken.
                       for (size_t i = 0; i < 8; ++i) {
                         waiting.push_back(cluster[0].CallAsync("worker1", "wait", Message()));
                       }
                       is_late = deadline.Passed();
                       ends.WaitForNotification();
                     }
                     return layers.Forward(s, std::move(in));
                   },
                   .loss = Loss,
                   .step = [](const Context&) { return absl::OkStatus(); }};
    }
    auto stages = CreateStages(cluster, std::move(own));
    const Schedule schedule = WithSteps(*GPipe(2, 1));
    const Context context = cluster[0].NewContext();
    status = MakePipeline(cluster, schedule)
                 ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}, deadline)
                 .status();
    ends.Notify();
    stages.clear();  // the function has ended
    for (const Future<Message>& call : waiting) {
      EXPECT_TRUE(call.Wait().ok()) << call.Wait().status();
    }
  } while (is_late && absl::IsDeadlineExceeded(status));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("worker 'worker1' does not answer"));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("stage 0 on worker 'worker0' has not stepped, stage 1 on worker 'worker1' "
                        "may have stepped"));
}

TEST_P(PipelineTest, AStepThatFailsOrIsLostWithItsWorkerIsSaid) {
  for (const bool lost : {false, true}) {
    Cluster cluster(Workers(2));
    const EqualLayers layers(2);
    std::vector<std::map<int, PipelineStage>> own(2);
    for (int s = 0; s < 2; ++s) {
      own[s][s] = {.forward = [&, s](Tensors in) { return layers.Forward(s, std::move(in)); },
                   .loss = Loss,
                   .step = [&, s, lost](const Context&) -> absl::Status {
                     if (s == 0) return absl::OkStatus();
                     if (lost) cluster[1].Abort();
                     return absl::DataLossError("no step today");
                   }};
    }
    auto stages = CreateStages(cluster, std::move(own));
    const Schedule schedule = WithSteps(*GPipe(2, 1));
    const Context context = cluster[0].NewContext();
    const absl::Status status = MakePipeline(cluster, schedule)
                                    ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})})
                                    .status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(lost ? "stage 1 on worker 'worker1' may have stepped, or be in its step ("
                               : "stage 1 on worker 'worker1' has failed in its step"));
    stages.clear();
    if (lost) cluster.Kill(1);
  }
}

// --------------------------------------------------------------------------------------- Tied

// The first stage multiplies by a parameter that the last one multiplies by, too: each has its copy
// where they are on different workers.
TEST_P(PipelineTest, TiedParametersHaveTheSumOfTheGradientsOfAllStages) {
  enum Copies { kOnEachWorker, kOfEachStage };
  struct TiedCase {
    Schedule schedule;
    std::vector<std::string> workers;  // by rank
    Copies copies = kOnEachWorker;
  };
  const std::vector<TiedCase> cases = {
      {*GPipe(3, 4), Names(3)},
      {*ZeroBubbleH1(3, 4), Names(3)},
      {*InterleavedOneForwardOneBackward(2, 2, 4), Names(2)},
      // Both ranks of one worker add to one gradient.
      {*OneForwardOneBackward(2, 2), {"worker0", "worker0"}},
      {*OneForwardOneBackward(2, 2), {"worker0", "worker0"}, kOfEachStage},
      {*InterleavedOneForwardOneBackward(1, 3, 2), {"worker0"}, kOfEachStage}};
  for (size_t number = 0; number < cases.size(); ++number) {
    SCOPED_TRACE(number);
    const Schedule schedule = WithSteps(cases[number].schedule);
    const int stages = schedule.stages(), count = schedule.micro_batches;
    const auto worker_of = [&](int stage) {
      return cases[number].workers[schedule.rank_of_stage[stage]] == "worker0"
                 ? 0
                 : schedule.rank_of_stage[stage];
    };
    Cluster cluster(Workers(static_cast<int>(cases[number].workers.size())));
    const EqualLayers layers(stages);
    const EqualLayers alone = layers.Copy();
    const at::Tensor tied = (at::randn({16, 16}) * 0.3).requires_grad_(true);
    std::map<int, at::Tensor> copies;  // by worker, or by stage
    Tensors own(stages), seen(stages);
    std::vector<std::map<int, PipelineStage>> of_worker(cluster.size());
    for (int s = 0; s < stages; ++s) {
      const int copy = cases[number].copies == kOfEachStage ? s : worker_of(s);
      if (!copies[copy].defined()) copies[copy] = tied.detach().clone().requires_grad_(true);
      own[s] = copies[copy];
      PipelineStage stage = {.forward = [&, s](Tensors in) -> Tensors {
                               if (s == 0) in[0] = in[0].mm(own[s]);
                               Tensors out = layers.Forward(s, in);
                               if (s == stages - 1) out[0] = out[0].mm(own[s].t());
                               return out;
                             },
                             .loss = Loss,
                             .step = [&, s](const Context& context) -> absl::Status {
                               const auto gradient = context.Gradient(own[s]);
                               if (!gradient.ok()) return gradient.status();
                               seen[s] = gradient->clone();
                               return absl::OkStatus();
                             }};
      // A stage between them that uses it not has a copy, too.
      stage.tied = {{"embedding", own[s]}};
      of_worker[worker_of(s)][s] = std::move(stage);
    }
    std::vector<std::unique_ptr<PipelineStages>> made;
    for (int i = 0; i < cluster.size(); ++i) {
      auto one = PipelineStages::Create(&cluster[i], "model", std::move(of_worker[i]));
      ASSERT_TRUE(one.ok()) << one.status();
      made.push_back(*std::move(one));
    }
    const auto pipeline = Pipeline::Create(
        &cluster[0], {.name = "model", .workers = cases[number].workers, .schedule = schedule});
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    const Context context = cluster[0].NewContext();
    for (int batch = 0; batch < 2; ++batch) {  // which add up
      const at::Tensor x = at::randn({count + 1, 16}), y = at::randn({count + 1, 16});
      ASSERT_EQ((*pipeline)->Train(context, {x}, {y}).status(), absl::OkStatus());
      for (int m = 0; m < count; ++m) {
        Tensors at{x.tensor_split(count)[m].mm(tied)};
        for (int s = 0; s < stages; ++s) at = alone.Forward(s, at);
        const at::Tensor loss = Loss({at[0].mm(tied.t())}, {y.tensor_split(count)[m]});
        const double rows = static_cast<double>(x.tensor_split(count)[m].size(0));
        loss.backward(at::full_like(loss, rows / (count + 1)));
      }
      for (int s = 0; s < stages; ++s) {
        // The sums are in another order than those of one process, but the same on all workers.
        ASSERT_TRUE(seen[s].allclose(tied.grad(), 1e-4, 1e-5)) << "stage " << s;
        EXPECT_TRUE(at::equal(seen[s], seen[0])) << "stage " << s;
      }
    }
    EXPECT_TRUE(at::equal(*context.Gradient(layers.weights[0]), alone.weights[0].grad()));
  }
}

// As in one process, where it is one parameter.
TEST_P(PipelineTest, ClippingCountsATiedParameterOnce) {
  enum Copies { kOnTwoWorkers, kOnOneWorker, kShared };
  for (const Copies copies : {kOnTwoWorkers, kOnOneWorker, kShared}) {
    SCOPED_TRACE(copies);
    const bool apart = copies == kOnTwoWorkers;
    Cluster cluster(Workers(apart ? 2 : 1));
    const EqualLayers layers(2);
    const EqualLayers alone = layers.Copy();
    const at::Tensor tied = (at::randn({16, 16}) * 0.3).requires_grad_(true);
    Tensors own;
    for (int s = 0; s < 2; ++s) {
      const bool shares = s == 1 && copies == kShared;
      own.push_back(shares ? own[0] : tied.detach().clone().requires_grad_(true));
    }
    std::vector<std::map<int, PipelineStage>> stages(cluster.size());
    std::vector<Tensors> parameters(cluster.size());
    for (int s = 0; s < 2; ++s) {
      PipelineStage stage = {.forward = [&, s](Tensors in) -> Tensors {
                               if (s == 0) return layers.Forward(0, {in[0].mm(own[0])});
                               return {layers.Forward(1, in)[0].mm(own[1].t())};
                             },
                             .loss = Loss};
      stage.tied = {{"embedding", own[s]}};
      const int worker = apart ? s : 0;
      stages[worker][s] = std::move(stage);
      for (const at::Tensor& parameter : layers.Of(s)) parameters[worker].push_back(parameter);
      if (s == 0 || copies != kShared) parameters[worker].push_back(own[s]);
    }
    const auto made = CreateStages(cluster, std::move(stages));
    std::vector<std::unique_ptr<Optimizer>> optimizers;
    for (int i = 0; i < cluster.size(); ++i) {
      optimizers.push_back(*Optimizer::Create(
          &cluster[i], std::make_unique<torch::optim::SGD>(parameters[i], /*lr=*/0.1)));
    }
    const auto pipeline =
        Pipeline::Create(&cluster[0], {.name = "model",
                                       .workers = {"worker0", apart ? "worker1" : "worker0"},
                                       .schedule = *OneForwardOneBackward(2, 2)});
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    const at::Tensor x = at::randn({4, 16}), y = at::randn({4, 16});
    const Context context = cluster[0].NewContext();
    ASSERT_EQ((*pipeline)->Train(context, {x}, {y}).status(), absl::OkStatus());
    const at::Tensor out = alone.Forward(1, alone.Forward(0, {x.mm(tied)}))[0].mm(tied.t());
    Loss({out}, {y}).backward();
    double squares = 0;
    for (const at::Tensor& parameter :
         {alone.weights[0], alone.weights[1], alone.biases[0], alone.biases[1], tied}) {
      squares += parameter.grad().square().sum().item<double>();
    }
    const absl::StatusOr<double> norm = optimizers[0]->ClipGradients(context, 0.5);
    ASSERT_TRUE(norm.ok()) << norm.status();
    EXPECT_NEAR(*norm, std::sqrt(squares), 1e-4 * *norm);
    // Each copy is scaled, so that they stay the same.
    const absl::StatusOr<at::Tensor> clipped = context.Gradient(own[0]);
    ASSERT_TRUE(clipped.ok()) << clipped.status();
    const double factor = std::min(1.0, 0.5 / std::sqrt(squares));
    EXPECT_TRUE(clipped->allclose(tied.grad() * factor, 1e-3, 1e-5));
    ASSERT_EQ(optimizers[0]->Step(context), absl::OkStatus());
    EXPECT_TRUE(at::equal(own[0], own[1]));
  }
}

TEST_P(PipelineTest, TiedParametersThatDoNotFitAreNamed) {
  Cluster cluster(Workers(2));
  const auto stages_of = [&](int worker, const at::Tensor& tied) {
    PipelineStage stage = {
        .forward = [tied](Tensors in) -> Tensors { return {in[0] * tied.sum()}; }, .loss = Loss};
    stage.tied = {{"embedding", tied}};
    return PipelineStages::Create(&cluster[worker], "model", {{worker, stage}});
  };
  const auto none = stages_of(0, at::randn({4})).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("tied parameter 'embedding' of stage 0"));
  const at::Tensor twice = at::randn({4}).requires_grad_(true);
  PipelineStage two_names = {.forward = [](Tensors in) { return in; }};
  two_names.tied = {{"embedding", twice}, {"scores", twice}};
  EXPECT_THAT(
      std::string(
          PipelineStages::Create(&cluster[0], "model", {{0, two_names}}).status().message()),
      HasSubstr("has another name, too"));
  const auto front = stages_of(0, at::randn({4}).requires_grad_(true));
  const auto back = stages_of(1, at::randn({5}).requires_grad_(true));
  ASSERT_TRUE(front.ok() && back.ok());
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 2));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), ContainsRegex("tied parameter 'embedding' is Float"));
}

// It names no micro-batch: they are of all of them.
TEST_P(PipelineTest, GradientsOfTiedParametersThatCannotBeSentAreNamed) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  absl::Notification received;
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int s = 0; s < 2; ++s) {
    PipelineStage stage = {.forward = [&, s](Tensors in) { return layers.Forward(s, in); },
                           .loss = Loss};
    stage.tied = {{"embedding", layers.weights[s]}};
    stages.push_back(*PipelineStages::Create(
        &cluster[s], "model", {{s, stage}}, {.on_action = [&](const StageSpan& span) {
          if (span.action.kind == Action::Kind::kReceiveGradient) received.Notify();
          if (span.action.kind != Action::Kind::kSendGradient) return;
          // What follows goes to one who does not know it any more.
          received.WaitForNotification();
          cluster[0].UnregisterOwn("distgrad.pipeline.deliver/model");
        }}));
  }
  const Context context = cluster[0].NewContext();
  const absl::Status status = MakePipeline(cluster, *GPipe(2, 1))
                                  ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("worker 'worker1' cannot send the gradients of tied parameters to stage 0 "
                        "on worker 'worker0'"));
}

// The gradients of an embedding are sparse where it is told so: torch adds one to a dense one, and
// not the other way round. The first stage looks rows up, or multiplies by the whole table; and so
// does the last one.
TEST_P(PipelineTest, TiedParametersMayHaveSparseGradients) {
  const auto look_up = [](const at::Tensor& table, const at::Tensor& rows) {
    return at::embedding(table, rows, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                         /*sparse=*/true);
  };
  for (const auto& [front_is_sparse, back_is_sparse] :
       {std::pair(true, true), std::pair(true, false), std::pair(false, true)}) {
    for (const bool apart : {true, false}) {  // on two workers, or with one tensor on one
      SCOPED_TRACE(absl::StrCat(front_is_sparse, back_is_sparse, apart));
      Cluster cluster(Workers(apart ? 2 : 1));
      const at::Tensor table = at::randn({10, 16}).requires_grad_(true);
      const at::Tensor back_rows = at::tensor({3, 3}, at::kLong);
      const auto front = [&, sparse = front_is_sparse](const at::Tensor& t, const at::Tensor& in) {
        return sparse ? look_up(t, in) : at::eye(10).index_select(0, in).mm(t);
      };
      const auto back = [&, sparse = back_is_sparse](const at::Tensor& t, const at::Tensor& in) {
        return in * (sparse ? look_up(t, back_rows) : t.sum(0));
      };
      Tensors own(2), seen(2);
      std::vector<std::map<int, PipelineStage>> stages(cluster.size());
      for (int s = 0; s < 2; ++s) {
        own[s] = s == 0 || apart ? table.detach().clone().requires_grad_(true) : own[0];
        PipelineStage stage = {.forward = [&, s](Tensors in) -> Tensors {
                                 return {s == 0 ? front(own[0], in[0]) : back(own[1], in[0])};
                               },
                               .loss = Loss,
                               .step = [&, s](const Context& context) -> absl::Status {
                                 const auto gradient = context.Gradient(own[s]);
                                 if (!gradient.ok()) return gradient.status();
                                 seen[s] = gradient->clone();
                                 return absl::OkStatus();
                               }};
        stage.tied = {{"embedding", own[s]}};
        stages[apart ? s : 0][s] = std::move(stage);
      }
      const auto made = CreateStages(cluster, std::move(stages));
      const Schedule schedule = WithSteps(*OneForwardOneBackward(2, 3));
      const auto pipeline =
          Pipeline::Create(&cluster[0], {.name = "model",
                                         .workers = {"worker0", apart ? "worker1" : "worker0"},
                                         .schedule = schedule});
      ASSERT_TRUE(pipeline.ok()) << pipeline.status();
      const Context context = cluster[0].NewContext();
      for (int batch = 0; batch < 2; ++batch) {  // which add up
        const at::Tensor x = at::randint(10, {6}, at::kLong), y = at::randn({6, 16});
        ASSERT_EQ((*pipeline)->Train(context, {x}, {y}).status(), absl::OkStatus());
        for (int m = 0; m < 3; ++m) {
          const at::Tensor out = back(table, front(table, x.tensor_split(3)[m]));
          const at::Tensor loss = Loss({out}, {y.tensor_split(3)[m]});
          loss.backward(at::full_like(loss, 1.0 / 3));
        }
        for (int s = 0; s < 2; ++s) {
          ASSERT_TRUE(seen[s].defined()) << "stage " << s;
          EXPECT_EQ(seen[s].is_sparse(), front_is_sparse && back_is_sparse) << "stage " << s;
          EXPECT_TRUE(seen[s].to_dense().allclose(table.grad().to_dense(), 1e-4, 1e-5))
              << "stage " << s;
          EXPECT_TRUE(at::equal(seen[s].to_dense(), seen[0].to_dense())) << "stage " << s;
        }
      }
    }
  }
}

// The front waits for gradients that the back would send after the front's sums have come.
TEST_P(PipelineTest, ASendBehindAStepOfTiedParametersIsRefused) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  std::vector<std::map<int, PipelineStage>> own(2);
  for (int s = 0; s < 2; ++s) {
    own[s][s] = {.forward = [&, s](Tensors in) { return layers.Forward(s, in); },
                 .loss = Loss,
                 .step = [](const Context&) { return absl::OkStatus(); }};
    own[s][s].tied = {{"embedding", layers.weights[s]}};
  }
  const auto stages = CreateStages(cluster, std::move(own));
  Schedule schedule = WithSteps(*GPipe(2, 1));
  const auto train = [&] {
    const Context context = cluster[0].NewContext();
    return MakePipeline(cluster, schedule)
        ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})},
                Deadline::After(absl::Seconds(20)))
        .status();
  };
  EXPECT_EQ(train(), absl::OkStatus());
  std::swap(schedule.lists[1].back(), schedule.lists[1].rbegin()[1]);
  const absl::Status status = train();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the list of worker 'worker1' has the step of stage 1 before the send of "
                        "gradients of stage 1, micro-batch 0"));
}

// ------------------------------------------------------------------------------------ Replicas

// Says to a worker that has the one stage of a pipeline what a Pipeline would, call by call.
class DriverOfOneStage {
 public:
  explicit DriverOfOneStage(Worker& worker) : worker_(worker), context_(worker.NewContext()) {}

  // Lists of actions.
  static std::vector<Action> Forward() { return {{Action::Kind::kForward, 0, 0}}; }
  static std::vector<Action> Both() {
    return {{Action::Kind::kForward, 0, 0}, {Action::Kind::kBackward, 0, 0}};
  }

  absl::Status Begin(uint64_t step, bool backward, std::vector<Action> list) const {
    const StepPlan plan{.step = step,
                        .pipeline = 1,
                        .rank = 0,
                        .micro_batches = 1,
                        .backward = backward,
                        .has_targets = backward,
                        .rank_of_stage = {0},
                        .workers = {"worker0"},
                        .list = std::move(list),
                        .weights = {1}};
    const absl::StatusOr<Message> answer = Call(kBeginStep, EncodePlan(plan)).Wait();
    if (!answer.ok()) return answer.status();
    const absl::StatusOr<Begun> begun = DecodeBegun(answer->payload);
    if (begun.ok() && begun->averager != 0) averager_ = begun->averager;
    return begun.status();
  }
  // Returns how the rank has ended, with a batch of its own. An evaluation has no targets, and may
  // end before some come.
  absl::Status Run(uint64_t step, bool backward = true) const {
    const StepRef ref{.step = step, .first_stage = 0};
    const Future<Message> run = Call(kRunStep, EncodeStepRef(ref));
    std::vector<Parcel::Kind> kinds = {Parcel::Kind::kActivation};
    if (backward) kinds.push_back(Parcel::Kind::kTarget);
    for (const Parcel::Kind kind : kinds) {
      // One that fails takes nothing.
      const absl::Status delivered =
          Call(kDeliver, EncodeParcel({.to = ref, .kind = kind}), {at::randn({4, 16})})
              .Wait()
              .status();
      EXPECT_TRUE(delivered.ok() || !run.Wait().ok()) << delivered;
    }
    return run.Wait().status();
  }
  absl::StatusOr<Stepped> End(uint64_t step) const {
    const absl::StatusOr<Message> answer =
        Call(kEndStep, EncodeEnd({.of = {step, 0}, .averager = averager_})).Wait();
    if (!answer.ok()) return answer.status();
    return DecodeStepped(answer->payload);
  }

 private:
  Future<Message> Call(absl::string_view function, std::string payload,
                       Tensors tensors = {}) const {
    return worker_.CallAsync("worker0", absl::StrCat(function, "model"),
                             {std::move(payload), std::move(tensors)},
                             {.context = function == kBeginStep ? &context_ : nullptr,
                              .deadline = Deadline::After(absl::Seconds(30))});
  }

  Worker& worker_;
  const Context context_;
  mutable std::atomic<uint64_t> averager_{0};  // that of the last step which averages
};

// Of a function of pipeline 'model', the calls that have come to a worker, and those that it has
// not answered yet.
struct Served {
  uint64_t begun = 0, in_flight = 0;
};
Served CallsServed(Worker& worker, absl::string_view function) {
  Served calls;
  for (const CallStats& stats : worker.Metrics().calls) {
    if (!stats.served || stats.function != absl::StrCat(function, "model")) continue;
    calls.begun += stats.calls;
    calls.in_flight += stats.in_flight;
  }
  return calls;
}

// Those of a pipeline: replica r has its ranks on the workers from r * ranks on.
class PipelineReplicasTest : public PipelineTest {
 protected:
  static constexpr int kReplicas = 2;

  // Two stages for each replica, of which the first is not trained.
  static std::vector<EqualLayers> WithFrozenFirstStage() {
    std::vector<EqualLayers> of_replica = {EqualLayers(2), EqualLayers(2)};
    for (const EqualLayers& layers : of_replica) {
      for (at::Tensor parameter : layers.Of(0)) parameter.requires_grad_(false);
    }
    return of_replica;
  }

  // For each worker an averager of its layers over those that have the same rank; and of one more
  // parameter, where there are some, by worker.
  static std::vector<std::shared_ptr<GradientAverager>> MakeAveragers(
      Cluster& cluster, const Schedule& schedule, const std::vector<EqualLayers>& of_replica,
      const Tensors& more = {}, const Tensors& left_out = {}) {
    std::vector<std::shared_ptr<GradientAverager>> made(cluster.size());
    std::vector<std::thread> threads;
    for (int i = 0; i < cluster.size(); ++i) {
      threads.emplace_back([&, i] {
        const int rank = i % schedule.ranks(), replica = i / schedule.ranks();
        std::vector<NamedTensor> parameters;
        for (int s = 0; s < schedule.stages(); ++s) {
          if (schedule.rank_of_stage[s] != rank) continue;
          for (const at::Tensor& parameter : of_replica[replica].Of(s)) {
            const bool is_there =
                std::none_of(left_out.begin(), left_out.end(),
                             [&](const at::Tensor& other) { return other.is_same(parameter); });
            if (is_there) parameters.push_back({absl::StrCat(parameters.size()), parameter});
          }
        }
        if (!more.empty()) parameters.push_back({"more", more[i]});
        const auto group = ProcessGroup::Create({.name = absl::StrCat("rank", rank),
                                                 .store = cluster[i].store(),
                                                 .rank = replica,
                                                 .size = cluster.size() / schedule.ranks(),
                                                 .timeout = absl::Seconds(60),
                                                 .join_timeout = absl::Seconds(60)});
        EXPECT_TRUE(group.ok()) << group.status();
        if (!group.ok()) return;
        auto averager =
            GradientAverager::Create(*group, std::move(parameters), {}, {.in_backward = false});
        EXPECT_TRUE(averager.ok()) << averager.status();
        if (averager.ok()) made[i] = *std::move(averager);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return made;
  }

  // The one stage of a pipeline, on the first worker.
  static std::unique_ptr<PipelineStages> MakeOneStage(Cluster& cluster, const EqualLayers& layers,
                                                      std::shared_ptr<GradientAverager> averager) {
    auto made = PipelineStages::Create(
        &cluster[0], "model",
        {{0, {.forward = [&](Tensors in) { return layers.Forward(0, in); }, .loss = Loss}}},
        {.averager = std::move(averager)});
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }

  // Takes a step of each replica, of their own batches, at the same time.
  static std::vector<absl::Status> Train(
      Cluster& cluster, const Schedule& schedule, const Tensors& xs, const Tensors& ys,
      PipelineOptions::Reduction reduction = PipelineOptions::Reduction::kMean) {
    std::vector<absl::Status> statuses(kReplicas);
    std::vector<std::thread> threads;
    for (int r = 0; r < kReplicas; ++r) {
      threads.emplace_back([&, r] {
        const int first = r * schedule.ranks();
        std::vector<std::string> workers;
        for (int i = 0; i < schedule.ranks(); ++i) workers.push_back(WorkerName(first + i));
        const auto pipeline = Pipeline::Create(
            &cluster[first],
            {.name = "model", .workers = workers, .schedule = schedule, .reduction = reduction});
        ASSERT_TRUE(pipeline.ok()) << pipeline.status();
        const Context context = cluster[first].NewContext();
        statuses[r] = (*pipeline)->Train(context, {xs[r]}, {ys[r]}).status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }
  static void Step(Cluster& cluster, const Schedule& schedule, const Tensors& xs,
                   const Tensors& ys) {
    for (const absl::Status& status : Train(cluster, schedule, xs, ys)) {
      EXPECT_EQ(status, absl::OkStatus());
    }
  }

  // The optimizer of these tests: takes the gradients off the parameters.
  static absl::Status Descend(const Tensors& parameters, const Context& context) {
    const at::AutoGradMode grad_mode(false);
    for (at::Tensor parameter : parameters) {
      const auto gradient = context.Gradient(parameter);
      if (!gradient.ok()) return gradient.status();
      parameter.sub_(*gradient);
    }
    return absl::OkStatus();
  }

  // The stages of all replicas, each with its layer and the optimizer of these tests.
  static std::vector<std::unique_ptr<PipelineStages>> CreateReplicas(
      Cluster& cluster, const Schedule& schedule, const std::vector<EqualLayers>& of_replica,
      const std::vector<std::shared_ptr<GradientAverager>>& averagers) {
    std::vector<std::unique_ptr<PipelineStages>> made;
    for (int i = 0; i < cluster.size(); ++i) {
      const EqualLayers& layers = of_replica[i / schedule.ranks()];
      std::map<int, PipelineStage> own;
      for (int s = 0; s < schedule.stages(); ++s) {
        if (schedule.rank_of_stage[s] != i % schedule.ranks()) continue;
        own[s] = {.forward = [&layers, s](Tensors in) { return layers.Forward(s, in); },
                  .loss = Loss,
                  .step = [&layers,
                           s](const Context& context) { return Descend(layers.Of(s), context); }};
      }
      auto stages = PipelineStages::Create(&cluster[i], "model", own, {.averager = averagers[i]});
      EXPECT_TRUE(stages.ok()) << stages.status();
      made.push_back(*std::move(stages));
    }
    return made;
  }

  // The same step in one process, from the sums over the replicas.
  static void DescendAlone(const EqualLayers& alone) {
    const at::AutoGradMode grad_mode(false);
    for (const Tensors& all : {alone.weights, alone.biases}) {
      for (at::Tensor parameter : all) {
        parameter.sub_(parameter.grad() / kReplicas);
        parameter.mutable_grad().reset();
      }
    }
  }

  static void ExpectAreThoseOfOneProcess(const std::vector<EqualLayers>& of_replica,
                                         const EqualLayers& alone) {
    for (size_t s = 0; s < alone.weights.size(); ++s) {
      // The sums are in another order.
      EXPECT_TRUE(of_replica[0].weights[s].allclose(alone.weights[s], 1e-4, 1e-5)) << "stage " << s;
      EXPECT_TRUE(at::equal(of_replica[0].weights[s], of_replica[1].weights[s])) << "stage " << s;
      EXPECT_TRUE(at::equal(of_replica[0].biases[s], of_replica[1].biases[s])) << "stage " << s;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, PipelineReplicasTest, testing::Values("inproc", "socket"));

TEST_P(PipelineReplicasTest, AStepTakesTheAveragesOfAllReplicas) {
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    const Schedule schedule = WithSteps(one.schedule);
    const int stages = schedule.stages(), count = schedule.micro_batches;
    Cluster cluster(Workers(kReplicas * schedule.ranks()));
    const EqualLayers alone(stages);
    // Those of the first replica are given to all.
    const std::vector<EqualLayers> of_replica = {alone.Copy(), EqualLayers(stages)};
    const auto averagers = MakeAveragers(cluster, schedule, of_replica);
    const auto made = CreateReplicas(cluster, schedule, of_replica, averagers);
    for (int step = 0; step < 3; ++step) {
      Tensors xs, ys;
      for (int r = 0; r < kReplicas; ++r) {
        xs.push_back(at::randn({count + 1, 16}));
        ys.push_back(at::randn({count + 1, 16}));
        StepAlone(alone, stages, count, true, xs[r], ys[r]);
      }
      Step(cluster, schedule, xs, ys);
      DescendAlone(alone);
    }
    ExpectAreThoseOfOneProcess(of_replica, alone);
  }
}

// Ranks average in one step while others are in another one, and each replica in the same order.
TEST_P(PipelineReplicasTest, StepsInFlightTakeTheAveragesOfAllReplicas) {
  constexpr int kRanks = 2, kMicroBatches = 2, kSteps = 5;
  const Schedule schedule = WithSteps(*ZeroBubbleH1(kRanks, kMicroBatches));
  Cluster cluster(Workers(kReplicas * kRanks));
  const EqualLayers alone(kRanks);
  const std::vector<EqualLayers> of_replica = {alone.Copy(), EqualLayers(kRanks)};
  const auto averagers = MakeAveragers(cluster, schedule, of_replica);
  const auto made = CreateReplicas(cluster, schedule, of_replica, averagers);
  std::array<Tensors, kReplicas> xs, ys;
  for (int step = 0; step < kSteps; ++step) {
    for (int r = 0; r < kReplicas; ++r) {
      xs[r].push_back(at::randn({2 * kMicroBatches, 16}));
      ys[r].push_back(at::randn({2 * kMicroBatches, 16}));
      StepAlone(alone, kRanks, kMicroBatches, true, xs[r][step], ys[r][step]);
    }
    DescendAlone(alone);
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < kReplicas; ++r) {
    threads.emplace_back([&, r] {
      const int first = r * kRanks;
      const auto pipeline =
          Pipeline::Create(&cluster[first], {.name = "model",
                                             .workers = {WorkerName(first), WorkerName(first + 1)},
                                             .schedule = schedule});
      ASSERT_TRUE(pipeline.ok()) << pipeline.status();
      std::vector<Context> contexts;
      std::vector<PipelineStep> steps;
      for (int step = 0; step < kSteps; ++step) {
        contexts.push_back(cluster[first].NewContext());
        auto started = (*pipeline)->Start(contexts.back(), {xs[r][step]}, {ys[r][step]});
        ASSERT_TRUE(started.ok()) << started.status();
        steps.push_back(*std::move(started));
      }
      for (PipelineStep& step : steps) EXPECT_EQ(step.Wait().status(), absl::OkStatus());
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectAreThoseOfOneProcess(of_replica, alone);
}

// Gradient accumulation: several batches of one context, each averaged over the replicas.
TEST_P(PipelineReplicasTest, BatchesOfOneContextAddUpOverTheReplicas) {
  constexpr int kRanks = 2, kBatches = 2, kMicroBatches = 3;
  const Schedule schedule = *ZeroBubbleH1(kRanks, kMicroBatches);
  Cluster cluster(Workers(kReplicas * kRanks));
  const EqualLayers alone(kRanks);
  const std::vector<EqualLayers> of_replica = {alone.Copy(), EqualLayers(kRanks)};
  const auto averagers = MakeAveragers(cluster, schedule, of_replica);
  const auto made = CreateReplicas(cluster, schedule, of_replica, averagers);
  std::array<Tensors, kReplicas> xs, ys;
  for (int r = 0; r < kReplicas; ++r) {
    for (int batch = 0; batch < kBatches; ++batch) {
      xs[r].push_back(at::randn({2 * kMicroBatches, 16}));
      ys[r].push_back(at::randn({2 * kMicroBatches, 16}));
      StepAlone(alone, kRanks, kMicroBatches, true, xs[r][batch], ys[r][batch]);
    }
  }
  Tensors gradients(kReplicas);  // of the first stage's weights
  std::vector<std::thread> threads;
  for (int r = 0; r < kReplicas; ++r) {
    threads.emplace_back([&, r] {
      Worker* const worker = &cluster[r * kRanks];
      const auto pipeline =
          Pipeline::Create(worker, {.name = "model",
                                    .workers = {WorkerName(r * kRanks), WorkerName(r * kRanks + 1)},
                                    .schedule = schedule});
      ASSERT_TRUE(pipeline.ok()) << pipeline.status();
      const Context context = worker->NewContext();
      for (int batch = 0; batch < kBatches; ++batch) {
        EXPECT_EQ((*pipeline)->Train(context, {xs[r][batch]}, {ys[r][batch]}).status(),
                  absl::OkStatus());
      }
      const auto gradient = context.Gradient(of_replica[r].weights[0]);
      EXPECT_TRUE(gradient.ok()) << gradient.status();
      if (gradient.ok()) gradients[r] = *gradient;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const at::Tensor& gradient : gradients) ASSERT_TRUE(gradient.defined());
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  EXPECT_TRUE(gradients[0].allclose(alone.weights[0].grad() / kReplicas, 1e-4, 1e-5));
}

TEST_P(PipelineReplicasTest, CopiesOfATiedParameterHaveTheAverageOfTheSumsOfEachReplica) {
  for (const Schedule& schedule :
       {WithSteps(*OneForwardOneBackward(2, 3)), WithSteps(*ZeroBubbleH1(2, 3))}) {
    Cluster cluster(Workers(kReplicas * 2));
    const EqualLayers alone(2);
    const std::vector<EqualLayers> of_replica = {alone.Copy(), alone.Copy()};
    const at::Tensor tied = (at::randn({16, 16}) * 0.3).requires_grad_(true);
    Tensors copies;  // by worker
    for (int i = 0; i < cluster.size(); ++i) {
      copies.push_back(tied.detach().clone().requires_grad_(true));
    }
    const auto averagers = MakeAveragers(cluster, schedule, of_replica, copies);
    // The first stage multiplies by it, and the last one by what it is transposed.
    const auto forward = [](const EqualLayers& layers, const at::Tensor& own, int s, Tensors in) {
      if (s == 0) return layers.Forward(0, {in[0].mm(own)});
      return Tensors{layers.Forward(1, in)[0].mm(own.t())};
    };
    std::vector<std::unique_ptr<PipelineStages>> made;
    for (int i = 0; i < cluster.size(); ++i) {
      const EqualLayers& layers = of_replica[i / 2];
      const int s = i % 2;
      PipelineStage stage = {
          .forward = [&, s, i](Tensors in) { return forward(layers, copies[i], s, std::move(in)); },
          .loss = Loss,
          .step = [&, s, i](const Context& context) -> absl::Status {
            Tensors own = layers.Of(s);
            own.push_back(copies[i]);
            return Descend(own, context);
          }};
      stage.tied = {{"embedding", copies[i]}};
      auto one =
          PipelineStages::Create(&cluster[i], "model", {{s, stage}}, {.averager = averagers[i]});
      ASSERT_TRUE(one.ok()) << one.status();
      made.push_back(*std::move(one));
    }
    for (int step = 0; step < 3; ++step) {
      Tensors xs, ys;
      for (int r = 0; r < kReplicas; ++r) {
        xs.push_back(at::randn({6, 16}));
        ys.push_back(at::randn({6, 16}));
        const at::Tensor loss =
            Loss(forward(alone, tied, 1, forward(alone, tied, 0, {xs[r]})), {ys[r]});
        loss.backward();
      }
      Step(cluster, schedule, xs, ys);
      const at::AutoGradMode grad_mode(false);
      for (const Tensors& all : {alone.weights, alone.biases, Tensors{tied}}) {
        for (at::Tensor parameter : all) {
          parameter.sub_(parameter.grad() / kReplicas);
          parameter.mutable_grad().reset();
        }
      }
    }
    for (const at::Tensor& copy : copies) {
      EXPECT_TRUE(copy.allclose(tied, 1e-4, 1e-5));
      EXPECT_TRUE(at::equal(copy, copies[0]));
    }
    for (const EqualLayers& layers : of_replica) {
      EXPECT_TRUE(layers.weights[0].allclose(alone.weights[0], 1e-4, 1e-5));
    }
  }
}

// Replicas count the same, as those of DistributedDataParallel do; PipelineStagesOptions::averager
// says how each row of the batch does.
TEST_P(PipelineReplicasTest, ReplicasWithUnequalPartsCountTheSameUnlessRowsDo) {
  const std::vector<int> rows = {5, 2};
  for (const bool by_rows : {false, true}) {
    SCOPED_TRACE(by_rows);
    const Schedule schedule = WithSteps(*OneForwardOneBackward(1, 2));
    Cluster cluster(Workers(kReplicas));
    const EqualLayers alone(1);
    const std::vector<EqualLayers> of_replica = {alone.Copy(), alone.Copy()};
    const auto averagers = MakeAveragers(cluster, schedule, of_replica);
    std::vector<std::unique_ptr<PipelineStages>> made;
    for (int r = 0; r < kReplicas; ++r) {
      const EqualLayers& layers = of_replica[r];
      auto stages = PipelineStages::Create(
          &cluster[r], "model",
          {{0,
            {.forward = [&layers](Tensors in) { return layers.Forward(0, in); },
             .loss = [by_rows](Tensors out, Tensors targets) -> at::Tensor {
               if (!by_rows) return Loss(out, targets);
               const at::Tensor by_row = (out[0] - targets[0]).square().mean(1);
               return by_row.sum() * (1.0 * kReplicas / (5 + 2));
             },
             .step =
                 [&layers](const Context& context) { return Descend(layers.Of(0), context); }}}},
          {.averager = averagers[r]});
      ASSERT_TRUE(stages.ok()) << stages.status();
      made.push_back(*std::move(stages));
    }
    Tensors xs, ys;
    at::Tensor loss;
    for (int r = 0; r < kReplicas; ++r) {
      xs.push_back(at::randn({rows[r], 16}));
      ys.push_back(at::randn({rows[r], 16}));
      const double weight = by_rows ? rows[r] / 7.0 : 1.0 / kReplicas;
      const at::Tensor part = Loss(alone.Forward(0, {xs[r]}), {ys[r]}) * weight;
      loss = loss.defined() ? loss + part : part;
    }
    loss.backward();
    const auto reduction =
        by_rows ? PipelineOptions::Reduction::kSum : PipelineOptions::Reduction::kMean;
    for (const absl::Status& status : Train(cluster, schedule, xs, ys, reduction)) {
      ASSERT_EQ(status, absl::OkStatus());
    }
    const at::AutoGradMode grad_mode(false);
    for (const EqualLayers& layers : of_replica) {
      EXPECT_TRUE(
          layers.weights[0].allclose(alone.weights[0] - alone.weights[0].grad(), 1e-4, 1e-5));
    }
  }
}

// The last rank of the replica that fails has averaged already: taken again, the step would be
// averaged with the other replica's next one there, and not on the first rank.
TEST_P(PipelineReplicasTest, AStepThatFailsEndsTheAveragesOfAllReplicas) {
  std::atomic<bool> throws{false};
  const CallOnTheWayBack::Call throw_once = [&] {
    if (throws.exchange(false)) throw std::runtime_error("no gradient today");
  };
  const Schedule schedule = *OneForwardOneBackward(2, 2);
  Cluster cluster(Workers(kReplicas * 2));
  const std::vector<EqualLayers> of_replica = {EqualLayers(2), EqualLayers(2)};
  const auto averagers = MakeAveragers(cluster, schedule, of_replica);
  std::vector<std::map<int, PipelineStage>> stages(cluster.size());
  std::vector<std::unique_ptr<PipelineStages>> made;
  for (int i = 0; i < cluster.size(); ++i) {
    const EqualLayers& layers = of_replica[i / 2];
    const int s = i % 2;
    const auto forward = [&layers, &throw_once, s, i](Tensors in) -> Tensors {
      Tensors out = layers.Forward(s, std::move(in));
      return i == 0 ? Tensors{CallOnTheWayBack::apply(out[0], &throw_once)} : out;
    };
    auto one =
        PipelineStages::Create(&cluster[i], "model", {{s, {.forward = forward, .loss = Loss}}},
                               {.averager = averagers[i]});
    ASSERT_TRUE(one.ok()) << one.status();
    made.push_back(*std::move(one));
  }
  const Tensors xs = {at::randn({4, 16}), at::randn({4, 16})};
  const Tensors ys = {at::randn({4, 16}), at::randn({4, 16})};
  Step(cluster, schedule, xs, ys);
  throws = true;
  const std::vector<absl::Status> failed = Train(cluster, schedule, xs, ys);
  EXPECT_THAT(std::string(failed[0].message()),
              AllOf(HasSubstr("no gradient today"), HasSubstr(WorkerName(0))));
  // Which rank of the other replica hears of it first, and so the reason, is not fixed.
  EXPECT_FALSE(failed[1].ok());
  for (const absl::Status& status : Train(cluster, schedule, xs, ys)) EXPECT_FALSE(status.ok());
}

// A rank that was done with its part has averaged, and steps of the other replicas go on from that:
// whether its driver says that the step has failed at once, or when another one has begun.
TEST_P(PipelineReplicasTest, ARankThatHasEndedWellFailsWithItsStep) {
  const std::vector<Action> forward = DriverOfOneStage::Forward(), both = DriverOfOneStage::Both();
  for (const bool is_late : {false, true}) {
    SCOPED_TRACE(is_late);
    Cluster cluster(Workers(1));
    const std::vector<EqualLayers> layers = {EqualLayers(1)};
    const auto averagers = MakeAveragers(cluster, *GPipe(1, 1), layers);
    const auto stages = MakeOneStage(cluster, layers[0], averagers[0]);
    const DriverOfOneStage driver(cluster[0]);
    ASSERT_EQ(driver.Begin(1, /*backward=*/true, both), absl::OkStatus());
    ASSERT_EQ(driver.Run(1), absl::OkStatus());
    // Neither an evaluation that fails averages, nor a step that was never started.
    ASSERT_EQ(driver.Begin(2, /*backward=*/false, forward), absl::OkStatus());
    ASSERT_EQ(driver.Run(2, /*backward=*/false), absl::OkStatus());
    ASSERT_EQ(driver.End(2).status(), absl::OkStatus());
    ASSERT_EQ(driver.Begin(3, /*backward=*/true, both), absl::OkStatus());
    ASSERT_EQ(driver.End(3).status(), absl::OkStatus());
    ASSERT_EQ(driver.Begin(4, /*backward=*/true, both), absl::OkStatus());
    ASSERT_EQ(driver.Run(4), absl::OkStatus());
    if (is_late) {
      ASSERT_EQ(driver.Begin(5, /*backward=*/true, both), absl::OkStatus());
    }
    ASSERT_EQ(driver.End(4).status(), absl::OkStatus());
    ASSERT_EQ(driver.Begin(6, /*backward=*/true, both), absl::OkStatus());
    const absl::Status status = driver.Run(6);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("a step of pipeline 'model' with worker 'worker0' failed: the step has "
                          "failed on another rank, or for its driver"))
        << status;
  }
}

// Drivers that are refused on another worker have begun so many steps here that the one that has
// averaged is forgotten, when its driver says that it has failed. So has the averager of stages
// that were made anew since.
TEST_P(PipelineReplicasTest, AStepThatHasAveragedAndIsForgottenFailsWithItsStep) {
  const std::vector<Action> forward = DriverOfOneStage::Forward(), both = DriverOfOneStage::Both();
  for (const bool is_new : {false, true}) {
    SCOPED_TRACE(is_new);
    Cluster cluster(Workers(1));
    const std::vector<EqualLayers> layers = {EqualLayers(1)};
    const auto averagers = MakeAveragers(cluster, *GPipe(1, 1), layers);
    auto stages = MakeOneStage(cluster, layers[0], averagers[0]);
    const DriverOfOneStage driver(cluster[0]), other(cluster[0]);
    ASSERT_EQ(driver.Begin(1, /*backward=*/true, both), absl::OkStatus());
    ASSERT_EQ(driver.Run(1), absl::OkStatus());
    if (is_new) {
      stages = nullptr;
      stages = MakeOneStage(cluster, layers[0], averagers[0]);
    }
    for (uint64_t step = 2; step < 14; ++step) {
      // Steps of either kind, which are given back.
      const bool backward = step % 2 == 0;
      ASSERT_EQ(other.Begin(step, backward, backward ? both : forward), absl::OkStatus());
      ASSERT_EQ(other.End(step).status(), absl::OkStatus());
    }
    const absl::Status forgotten = driver.End(1).status();
    EXPECT_EQ(forgotten.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(forgotten.message()),
                HasSubstr("worker 'worker0' (0) has begun another step of pipeline 'model'"));
    ASSERT_EQ(driver.Begin(14, /*backward=*/true, both), absl::OkStatus());
    const absl::Status status = driver.Run(14);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("a step of pipeline 'model' with worker 'worker0' failed"))
        << status;
  }
}

// The stages have been taken off when their worker is asked, and are made anew with the averager
// that has averaged the step which failed.
TEST_P(PipelineReplicasTest, StagesThatAreMadeAnewDoNotAverageOnWithTheirAverager) {
  const Schedule schedule = *OneForwardOneBackward(2, 1);
  Cluster cluster(Workers(2));
  const std::vector<EqualLayers> of_replica = {EqualLayers(2)};
  for (at::Tensor parameter : of_replica[0].Of(0)) parameter.requires_grad_(false);
  const auto averagers = MakeAveragers(cluster, schedule, of_replica);
  const auto make = [&](int s, PipelineStagesOptions options) {
    return *PipelineStages::Create(
        &cluster[s], "model",
        {{s,
          {.forward = [&, s](Tensors in) { return of_replica[0].Forward(s, std::move(in)); },
           .loss = Loss}}},
        std::move(options));
  };
  auto back = make(1, {.averager = averagers[1]});
  std::atomic<bool> throws{true};
  const Action last = schedule.lists[0].back();
  const auto end_back = [&](const StageSpan& span) {
    if (span.action.kind != last.kind || !throws.exchange(false)) return;
    absl::StatusOr<Message> state;
    do {
      state = cluster[0].Call(WorkerName(1), absl::StrCat(kDescribe, "model"),
                              {EncodeStepRef({.step = span.step, .first_stage = 1}), {}});
    } while (state.ok() && state->payload != "is at the end of its list");
    EXPECT_TRUE(state.ok()) << state.status();
    // Its answer has gone out, too: closed before that it would fail its averages itself.
    while (CallsServed(cluster[1], kRunStep).in_flight > 0) std::this_thread::yield();
    back = nullptr;
    throw std::runtime_error("no end today");
  };
  const auto front = make(0, {.on_action = end_back});
  const auto pipeline = MakePipeline(cluster, schedule);
  const auto train = [&](Pipeline& of) {
    const Context context = cluster[0].NewContext();
    return of.Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  };
  EXPECT_THAT(std::string(train(*pipeline).message()), HasSubstr("no end today"));
  EXPECT_EQ(train(*pipeline).code(), absl::StatusCode::kNotFound);
  back = make(1, {.averager = averagers[1]});
  const absl::Status refused = train(*pipeline);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("worker 'worker1' of pipeline 'model' may not have failed its average over "
                        "the replicas"));
  // The other replicas have heard of it, and so does any other Pipeline.
  EXPECT_THAT(std::string(train(*MakePipeline(cluster, schedule)).message()),
              HasSubstr("a step of pipeline 'model' with worker 'worker1' failed"));
}

// The last rank of the replica that fails has averaged, and is done, when the first one fails,
// which has nothing to average. Taken again, the step would be averaged with the other replica's
// next one.
TEST_P(PipelineReplicasTest, AStepThatFailsWhenAllAveragesAreDoneEndsThem) {
  const Schedule schedule = *OneForwardOneBackward(2, 2);
  Cluster cluster(Workers(kReplicas * 2));
  const std::vector<EqualLayers> of_replica = WithFrozenFirstStage();
  const auto averagers = MakeAveragers(cluster, schedule, of_replica);
  std::atomic<bool> throws{true};
  const Action last = schedule.lists[0].back();
  const auto throw_once = [&](const StageSpan& span) {
    if (span.action.kind != last.kind || span.action.micro_batch != last.micro_batch ||
        !throws.exchange(false)) {
      return;
    }
    absl::StatusOr<Message> state;
    do {
      state = cluster[0].Call(WorkerName(1), absl::StrCat(kDescribe, "model"),
                              {EncodeStepRef({.step = span.step, .first_stage = 1}), {}});
    } while (state.ok() && state->payload != "is at the end of its list");
    throw std::runtime_error("no end today");
  };
  std::vector<std::unique_ptr<PipelineStages>> made;
  for (int i = 0; i < cluster.size(); ++i) {
    const int s = i % 2;
    const EqualLayers& layers = of_replica[i / 2];
    PipelineStagesOptions options = {.averager = s == 1 ? averagers[i] : nullptr};
    if (i == 0) options.on_action = throw_once;
    made.push_back(*PipelineStages::Create(
        &cluster[i], "model",
        {{s,
          {.forward = [&layers, s](Tensors in) { return layers.Forward(s, std::move(in)); },
           .loss = Loss}}},
        options));
  }
  const Tensors xs = {at::randn({4, 16}), at::randn({4, 16})};
  const Tensors ys = {at::randn({4, 16}), at::randn({4, 16})};
  // Whether the other replica is done before it hears of that is not fixed.
  const std::vector<absl::Status> failed = Train(cluster, schedule, xs, ys);
  EXPECT_THAT(std::string(failed[0].message()),
              AllOf(HasSubstr("no end today"), HasSubstr(WorkerName(0))));
  for (const absl::Status& status : Train(cluster, schedule, xs, ys)) {
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("a step of pipeline 'model' with worker 'worker1' failed"))
        << status;
  }
}

// The ranks have done all, and yet the step has failed for who takes it. One that averages and does
// not hear of that would go on with a good group.
TEST_P(PipelineReplicasTest, AResultThatCannotBeReadEndsTheStep) {
  std::atomic<int> begins{0}, ends{0};
  std::atomic<uint64_t> averager{1};
  Cluster cluster(Workers(1));
  const auto answer = [&](absl::string_view function, const RequestHandler& handler) {
    EXPECT_EQ(cluster[0].RegisterOwn(absl::StrCat(function, "model"), handler), absl::OkStatus());
  };
  const auto nothing = [](Request&) -> absl::StatusOr<Message> { return Message{}; };
  answer(kBeginStep, [&](Request&) -> absl::StatusOr<Message> {
    ++begins;
    return Message{EncodeBegun({.averager = averager}), {}};
  });
  answer(kDeliver, nothing);
  answer(kRunStep, nothing);
  answer(kEndStep, [&](Request&) -> absl::StatusOr<Message> {
    const int end = ++ends;
    if (end == 2 || end == 3) return absl::UnavailableError("no answer today");
    if (end == 4) {
      averager = 2;
      return absl::NotFoundError("the worker is a new one");
    }
    return Message{EncodeStepped({}), {}};
  });
  const auto pipeline = MakePipeline(cluster, *GPipe(1, 1));
  const auto train = [&] {
    const Context context = cluster[0].NewContext();
    return pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  };
  const std::string unknown = "worker 'worker0' may not have failed its average over the replicas";
  const absl::Status told = train();
  EXPECT_FALSE(told.ok());
  EXPECT_EQ(ends, 1);
  EXPECT_THAT(std::string(told.message()), Not(HasSubstr(unknown)));
  const absl::Status untold = train();
  EXPECT_EQ(ends, 2);
  EXPECT_THAT(std::string(untold.message()),
              AllOf(HasSubstr(unknown), HasSubstr("no answer today")));
  // No other step begins before it has heard of that, or has no such step any more.
  EXPECT_EQ(begins, 2);
  const absl::Status refused = train();
  EXPECT_EQ(begins, 2);
  EXPECT_EQ(ends, 3);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("worker 'worker0' of pipeline 'model' may not have failed its average "
                      "over the replicas"),
            HasSubstr("no answer today")));
  const absl::Status begun = train();
  EXPECT_EQ(begins, 3);
  EXPECT_EQ(ends, 5);  // of the step before, and of this one
  EXPECT_THAT(std::string(begun.message()), Not(HasSubstr(unknown)));
}

// That it has failed is said to all ranks at once. To those on whose way there was no room it is
// said again, side by side: here none of them answers before all have been asked.
TEST_P(PipelineReplicasTest, RanksThatAreAskedAgainAreAskedSideBySide) {
  constexpr int kRanks = 3;
  std::array<std::atomic<bool>, kRanks> refused{};
  std::atomic<int> asked_again{0}, short_of_time{0};
  absl::Notification all_are_asked;
  Cluster cluster(Workers(kRanks));
  const auto nothing = [](Request&) -> absl::StatusOr<Message> { return Message{}; };
  const auto end = [&](int rank, const Request& request) -> absl::StatusOr<Message> {
    if (!refused[rank].exchange(true)) return absl::ResourceExhaustedError("no room today");
    // They have as long as any call by default.
    if (request.deadline < Deadline::After(absl::Seconds(10))) ++short_of_time;
    if (++asked_again == kRanks) all_are_asked.Notify();
    all_are_asked.WaitForNotification();
    return Message{EncodeStepped({}), {}};
  };
  for (int i = 0; i < kRanks; ++i) {
    const auto answer = [&](absl::string_view function, const RequestHandler& handler) {
      EXPECT_EQ(cluster[i].RegisterOwn(absl::StrCat(function, "model"), handler), absl::OkStatus());
    };
    const uint64_t averager = 1 + i;
    answer(kBeginStep, [averager](Request&) -> absl::StatusOr<Message> {
      return Message{EncodeBegun({.averager = averager}), {}};
    });
    answer(kTieStep, nothing);
    answer(kDeliver, nothing);
    answer(kRunStep, nothing);  // which is no result
    answer(kEndStep, [&end, i](Request& request) { return end(i, request); });
  }
  const auto pipeline = MakePipeline(cluster, *GPipe(kRanks, 1));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("may not have failed its average")));
  EXPECT_EQ(asked_again, kRanks);
  EXPECT_EQ(short_of_time, 0);
}

// A rank that averages has a minute to hear that its step has failed, and any other one until the
// deadline: a worker does not leave before the answers have come.
TEST_P(PipelineReplicasTest, OnlyARankThatAveragesHasLongerThanTheDeadlineToHearOfTheEnd) {
  std::array<std::atomic<bool>, 2> has_long{};
  Cluster cluster(Workers(2));
  const auto nothing = [](Request&) -> absl::StatusOr<Message> { return Message{}; };
  for (int i = 0; i < 2; ++i) {
    const auto answer = [&](absl::string_view function, const RequestHandler& handler) {
      EXPECT_EQ(cluster[i].RegisterOwn(absl::StrCat(function, "model"), handler), absl::OkStatus());
    };
    const uint64_t averager = i;
    answer(kBeginStep, [averager](Request&) -> absl::StatusOr<Message> {
      return Message{EncodeBegun({.averager = averager}), {}};
    });
    answer(kTieStep, nothing);
    answer(kDeliver, nothing);
    answer(kRunStep, nothing);  // which is no result
    answer(kEndStep, [&has_long, i](Request& request) -> absl::StatusOr<Message> {
      has_long[i] = Deadline::After(absl::Seconds(30)) < request.deadline;
      return Message{EncodeStepped({}), {}};
    });
  }
  const Context context = cluster[0].NewContext();
  const absl::Status status = MakePipeline(cluster, WithSteps(*GPipe(2, 1)))
                                  ->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})},
                                          Deadline::After(absl::Seconds(20)))
                                  .status();
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(has_long[0]);
  EXPECT_TRUE(has_long[1]);
}

// A worker whose threads are all taken does not serve in time that the step has failed. It hears of
// that yet, and before the step is taken again.
TEST_P(PipelineReplicasTest, AnEndThatIsServedLateEndsTheAveragesYet) {
  const Schedule schedule = *OneForwardOneBackward(2, 1);
  const ClusterOptions workers = Workers(2);
  // Where a machine has much to do the deadline may pass before the last rank has averaged: then
  // there is more time for the next try.
  std::atomic<bool> is_late{false};
  for (absl::Duration limit = absl::Seconds(2); !is_late; limit *= 2) {
    ASSERT_LT(limit, absl::Minutes(1));
    Cluster cluster(workers);
    const std::vector<EqualLayers> of_replica = {EqualLayers(2)};
    for (at::Tensor parameter : of_replica[0].Of(0)) parameter.requires_grad_(false);
    const auto averagers = MakeAveragers(cluster, schedule, of_replica);
    std::atomic<size_t> taken{0};
    absl::Notification all_are_taken, returned;
    const auto take = [&](Request&) -> absl::StatusOr<Message> {
      if (++taken == workers.thread_count) all_are_taken.Notify();
      returned.WaitForNotification();
      return Message();
    };
    ASSERT_EQ(cluster[1].Register("take", take), absl::OkStatus());
    const Deadline deadline = Deadline::After(limit);
    std::vector<Future<Message>> taking;
    std::atomic<bool> is_first{true};
    const Action last = schedule.lists[0].back();
    // The last rank has averaged, and all threads that would serve it are taken, when the first one
    // is late.
    const auto be_late = [&](const StageSpan& span) {
      if (span.action.kind != last.kind || !is_first.exchange(false)) return;
      absl::StatusOr<Message> state;
      do {
        state = cluster[0].Call(WorkerName(1), absl::StrCat(kDescribe, "model"),
                                {EncodeStepRef({.step = span.step, .first_stage = 1}), {}});
        if (deadline.Passed()) return;
      } while (state.ok() && state->payload != "is at the end of its list");
      EXPECT_TRUE(state.ok()) << state.status();
      for (size_t i = 0; i < workers.thread_count; ++i) {
        taking.push_back(cluster[0].CallAsync(WorkerName(1), "take", Message()));
      }
      all_are_taken.WaitForNotification();
      is_late = !deadline.Passed();
      returned.WaitForNotification();
    };
    std::vector<std::unique_ptr<PipelineStages>> made;
    for (int s = 0; s < 2; ++s) {
      PipelineStagesOptions options = {.averager = s == 1 ? averagers[s] : nullptr};
      if (s == 0) options.on_action = be_late;
      made.push_back(*PipelineStages::Create(
          &cluster[s], "model",
          {{s,
            {.forward = [&, s](Tensors in) { return of_replica[0].Forward(s, std::move(in)); },
             .loss = Loss}}},
          options));
    }
    const auto train = [&](Deadline until) {
      // Another one each time, which does not know whom to ask again.
      const auto pipeline = MakePipeline(cluster, schedule);
      const Context context = cluster[0].NewContext();
      return pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}, until).status();
    };
    const absl::Status late = train(deadline);
    // On a busy machine what was sent may not have come yet.
    while (is_late && CallsServed(cluster[1], kEndStep).begun == 0) std::this_thread::yield();
    returned.Notify();
    while (CallsServed(cluster[1], kEndStep).in_flight > 0) std::this_thread::yield();
    const absl::Status again = train(absl::InfinitePast());
    made.clear();  // the function has ended
    for (const Future<Message>& call : taking) EXPECT_EQ(call.Wait().status(), absl::OkStatus());
    if (!is_late) continue;
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
    EXPECT_THAT(std::string(late.message()),
                HasSubstr("worker 'worker1' may not have failed its average over the replicas"));
    EXPECT_THAT(std::string(again.message()),
                HasSubstr("a step of pipeline 'model' with worker 'worker1' failed"))
        << again;
  }
}

// Whoever waits for a step that is stopped behind its list hears an error, and its replicas have to
// fail with it.
TEST_P(PipelineReplicasTest, AStepThatIsStoppedBehindItsListEndsTheAverages) {
  Cluster cluster(Workers(1));
  const std::vector<EqualLayers> layers = {EqualLayers(1)};
  const auto averagers = MakeAveragers(cluster, *GPipe(1, 1), layers);
  const DriverOfOneStage driver(cluster[0]);
  const std::vector<Action> forward = DriverOfOneStage::Forward(), both = DriverOfOneStage::Both();
  // What the forward has made ends behind the list, as that has no backward. Then the driver begins
  // another step, which stops this one.
  std::vector<float> ones(16, 1);
  std::atomic<bool> is_first{true};
  const auto begin_another = [&](void*) {
    EXPECT_EQ(driver.Begin(2, /*backward=*/true, both), absl::OkStatus());
  };
  const auto stages = PipelineStages::Create(
      &cluster[0], "model",
      {{0,
        {.forward = [&](Tensors in) -> Tensors {
           Tensors out = layers[0].Forward(0, in);
           if (is_first.exchange(false)) {
             out[0] = out[0] * at::from_blob(ones.data(), {16}, begin_another);
           }
           return out;
         },
         .loss = Loss}}},
      {.averager = averagers[0]});
  ASSERT_TRUE(stages.ok()) << stages.status();
  ASSERT_EQ(driver.Begin(1, /*backward=*/true, forward), absl::OkStatus());
  const std::string why = "has begun another step of pipeline 'model'";
  EXPECT_THAT(std::string(driver.Run(1).message()), HasSubstr(why));
  EXPECT_THAT(
      std::string(driver.Run(2).message()),
      AllOf(HasSubstr("a step of pipeline 'model' with worker 'worker0' failed"), HasSubstr(why)));
}

// The last rank averages, and steps, before the first one goes backward.
TEST_P(PipelineReplicasTest, ARankDoesNotWaitForTheBackwardOfThoseBefore) {
  for (const Schedule& schedule :
       {WithSteps(*OneForwardOneBackward(2, 2)), WithSteps(*ZeroBubbleH1(2, 2))}) {
    std::array<absl::Notification, kReplicas> notifications;
    std::atomic<int> waited_in_vain{0};
    const CallOnTheWayBack::Call await_steps = [&] {
      for (absl::Notification& each : notifications) {
        if (!each.WaitForNotificationWithTimeout(absl::Seconds(30))) ++waited_in_vain;
      }
    };
    Cluster cluster(Workers(kReplicas * 2));
    const std::vector<EqualLayers> of_replica = {EqualLayers(2), EqualLayers(2)};
    const auto averagers = MakeAveragers(cluster, schedule, of_replica);
    std::vector<std::unique_ptr<PipelineStages>> made;
    for (int i = 0; i < cluster.size(); ++i) {
      const int s = i % 2, replica = i / 2;
      const EqualLayers& layers = of_replica[replica];
      made.push_back(*PipelineStages::Create(
          &cluster[i], "model",
          {{s,
            {.forward =
                 [&layers, &await_steps, s](Tensors in) {
                   Tensors out = layers.Forward(s, in);
                   if (s == 0) out[0] = CallOnTheWayBack::apply(out[0], &await_steps);
                   return out;
                 },
             .loss = Loss,
             .step =
                 [&layers, &notifications, s, replica](const Context& context) {
                   if (s == 1) notifications[replica].Notify();
                   return Descend(layers.Of(s), context);
                 }}}},
          {.averager = averagers[i]}));
    }
    Step(cluster, schedule, {at::randn({4, 16}), at::randn({4, 16})},
         {at::randn({4, 16}), at::randn({4, 16})});
    EXPECT_EQ(waited_in_vain, 0);
    EXPECT_TRUE(at::equal(of_replica[0].weights[1], of_replica[1].weights[1]));
  }
}

TEST_P(PipelineReplicasTest, WhatCannotBeAveragedIsNamed) {
  Cluster cluster(Workers(1));
  const std::vector<EqualLayers> layers = {EqualLayers(2)};
  const Schedule one_rank{.micro_batches = 1,
                          .rank_of_stage = {0, 0},
                          .lists = {{{Action::Kind::kForward, 0, 0},
                                     {Action::Kind::kForward, 1, 0},
                                     {Action::Kind::kBackward, 1, 0},
                                     {Action::Kind::kStep, 1, 0},
                                     {Action::Kind::kBackward, 0, 0},
                                     {Action::Kind::kStep, 0, 0}}}};
  const auto averagers = MakeAveragers(cluster, one_rank, layers);
  std::map<int, PipelineStage> own;
  for (int s = 0; s < 2; ++s) {
    own[s] = {.forward = [&, s](Tensors in) { return layers[0].Forward(s, in); }, .loss = Loss};
  }
  const auto stages = PipelineStages::Create(&cluster[0], "model", own, {.averager = averagers[0]});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const auto train = [&](const Schedule& schedule, std::vector<std::string> workers) {
    const auto pipeline =
        Pipeline::Create(&cluster[0], {.name = "model", .workers = workers, .schedule = schedule});
    EXPECT_TRUE(pipeline.ok()) << pipeline.status();
    const Context context = cluster[0].NewContext();
    return (*pipeline)->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  };
  absl::Status status = train(*GPipe(2, 2), {"worker0", "worker0"});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(
          HasSubstr("worker 'worker0' has 2 ranks of the schedule"),
          HasSubstr("PipelineStagesOptions::averager; in C dg_pipeline_stages_options.averager")));
  status = train(one_rank, {"worker0"});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("has the step of stage 1 before the backward of stage 0"));
  EXPECT_EQ(train(*InterleavedOneForwardOneBackward(1, 2, 2), {"worker0"}), absl::OkStatus());
}

// Two workers of one process could be given one averager. The ranks would begin its averages in
// another order on each replica, and average the gradients of one with those of the other.
TEST_P(PipelineReplicasTest, OneAveragerOfTwoWorkersIsRefused) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto group = ProcessGroup::Create({.name = "shared", .store = cluster[0].store()});
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<NamedTensor> parameters;
  for (int s = 0; s < 2; ++s) {
    for (const at::Tensor& parameter : layers.Of(s)) {
      parameters.push_back({absl::StrCat(parameters.size()), parameter});
    }
  }
  auto averager = GradientAverager::Create(*group, parameters, {}, {.in_backward = false});
  ASSERT_TRUE(averager.ok()) << averager.status();
  const std::shared_ptr<GradientAverager> shared = *std::move(averager);
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int s = 0; s < 2; ++s) {
    auto made = PipelineStages::Create(
        &cluster[s], "model",
        {{s, {.forward = [&, s](Tensors in) { return layers.Forward(s, in); }, .loss = Loss}}},
        {.averager = shared});
    ASSERT_TRUE(made.ok()) << made.status();
    stages.push_back(*std::move(made));
  }
  const auto pipeline = MakePipeline(cluster, *ZeroBubbleH1(2, 2));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(
          HasSubstr("pipeline 'model'"), HasSubstr("'worker0' and 'worker1'"),
          HasSubstr("PipelineStagesOptions::averager; in C dg_pipeline_stages_options.averager")));
  // A forward averages nothing.
  EXPECT_EQ(pipeline->Evaluate({at::randn({4, 16})}, {at::randn({4, 16})}).status(),
            absl::OkStatus());
}

// It would be trained by each replica alone.
TEST_P(PipelineReplicasTest, AParameterThatNoAveragerHasIsNamed) {
  const Tensors xs = {at::randn({4, 16}), at::randn({4, 16})};
  const Tensors ys = {at::randn({4, 16}), at::randn({4, 16})};
  for (const Schedule& schedule : {*OneForwardOneBackward(2, 2), *ZeroBubbleH1(2, 2)}) {
    for (const std::string missing : {"", "bias 0", "bias 1", "tied", "averager 0", "averager 1"}) {
      SCOPED_TRACE(absl::StrCat(schedule.lists[0].size(), " actions, without ", missing));
      Cluster cluster(Workers(kReplicas * 2));
      const std::vector<EqualLayers> of_replica = {EqualLayers(2), EqualLayers(2)};
      Tensors tied, left_out;
      for (int i = 0; i < cluster.size(); ++i) {
        tied.push_back((at::ones({16, 16}) * 0.1).requires_grad_(true));
      }
      for (int s = 0; s < 2; ++s) {
        for (const EqualLayers& layers : of_replica) {
          // A frozen one need not be in the list.
          if (missing.empty()) layers.biases[s].requires_grad_(false);
          if (missing.empty() || missing == absl::StrCat("bias ", s)) {
            left_out.push_back(layers.biases[s]);
          }
        }
      }
      const auto averagers = MakeAveragers(cluster, schedule, of_replica,
                                           missing == "tied" ? Tensors() : tied, left_out);
      std::vector<std::unique_ptr<PipelineStages>> made;
      for (int i = 0; i < cluster.size(); ++i) {
        const int s = i % 2;
        PipelineStage stage = {.forward = [&, s, i](Tensors in) -> Tensors {
                                 return of_replica[i / 2].Forward(s, {in[0].mm(tied[i])});
                               },
                               .loss = Loss};
        stage.tied = {{"embedding", tied[i]}};
        const bool has_averager = missing != absl::StrCat("averager ", s);
        auto one = PipelineStages::Create(&cluster[i], "model", {{s, stage}},
                                          {.averager = has_averager ? averagers[i] : nullptr});
        ASSERT_TRUE(one.ok()) << one.status();
        made.push_back(*std::move(one));
      }
      const std::vector<absl::Status> statuses = Train(cluster, schedule, xs, ys);
      if (missing.empty()) {
        for (const absl::Status& status : statuses) EXPECT_EQ(status, absl::OkStatus());
        continue;
      }
      // Each of the replicas fails with that, or as the other one has.
      std::string all;
      for (const absl::Status& status : statuses) {
        EXPECT_FALSE(status.ok());
        absl::StrAppend(&all, status.message(), "\n");
      }
      if (absl::StartsWith(missing, "averager")) {
        const bool first = missing == "averager 0";
        EXPECT_THAT(all,
                    ContainsRegex(first ? "has a gradient on worker 'worker[02]', which has no "
                                          "averager, and worker 'worker[13]' averages"
                                        : "has a gradient on worker 'worker[13]', which has no "
                                          "averager, and worker 'worker[02]' averages"));
      } else {
        EXPECT_THAT(all, ContainsRegex(
                             missing == "tied"
                                 ? "the tied parameter 'embedding' has a gradient on worker "
                                   "'worker.', and the averager there was made without it"
                                 : absl::StrCat("a parameter, Float .16. on cpu, has a gradient on "
                                                "worker 'worker[",
                                                missing == "bias 0" ? "02" : "13",
                                                "]', and the averager there was made without it")));
      }
      EXPECT_THAT(
          all,
          HasSubstr("PipelineStagesOptions::averager; in C dg_pipeline_stages_options.averager"));
    }
  }
}

// Where no stage of a worker is trained there is nothing to average.
TEST_P(PipelineReplicasTest, AWorkerWhoseStagesAreFrozenNeedsNoAverager) {
  const Schedule schedule = *OneForwardOneBackward(2, 2);
  Cluster cluster(Workers(kReplicas * 2));
  const std::vector<EqualLayers> of_replica = WithFrozenFirstStage();
  const auto averagers = MakeAveragers(cluster, schedule, of_replica);
  std::vector<std::unique_ptr<PipelineStages>> made;
  for (int i = 0; i < cluster.size(); ++i) {
    const int s = i % 2;
    const EqualLayers& layers = of_replica[i / 2];
    made.push_back(*PipelineStages::Create(
        &cluster[i], "model",
        {{s,
          {.forward = [&layers, s](Tensors in) { return layers.Forward(s, std::move(in)); },
           .loss = Loss}}},
        {.averager = s == 1 ? averagers[i] : nullptr}));
  }
  Step(cluster, schedule, {at::randn({4, 16}), at::randn({4, 16})},
       {at::randn({4, 16}), at::randn({4, 16})});
}

// Has a step that stands in the forward of stage 1 until LetGo().
class StandingStepTest : public PipelineTest {
 protected:
  void SetUp() override {
    stages_ = MakeStages(cluster_, {0, 1}, [this](int stage, Tensors in) {
      if (stage == 1 && !begun_.HasBeenNotified()) {
        begun_.Notify();
        go_.WaitForNotification();
      }
      return layers_.Forward(stage, in);
    });
    pipeline_ = MakePipeline(cluster_, *GPipe(2, 1));
    step_ = std::thread([this] {
      const Context context = cluster_[0].NewContext();
      EXPECT_EQ(pipeline_->Train(context, x_, y_).status(), absl::OkStatus());
    });
    begun_.WaitForNotification();
  }
  void LetGo() {
    go_.Notify();
    step_.join();
  }
  // Meanwhile another one is refused; afterwards it is not.
  void ExpectRefusedUntilItIsOver(Pipeline& other) {
    const absl::Status status = other.Evaluate(x_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("a stage runs one step at a time"));
    LetGo();
    EXPECT_EQ(other.Evaluate(x_).status(), absl::OkStatus());
  }

  Cluster cluster_{Workers(2)};
  const EqualLayers layers_{2};
  const Tensors x_{at::randn({4, 16})}, y_{at::randn({4, 16})};
  absl::Notification begun_, go_;
  std::vector<std::unique_ptr<PipelineStages>> stages_;
  std::unique_ptr<Pipeline> pipeline_;
  std::thread step_;
};

INSTANTIATE_TEST_SUITE_P(Transports, StandingStepTest, testing::Values("inproc", "socket"));

TEST_P(StandingStepTest, OneStepOfAPipelineRunsAtATime) {
  const absl::Status status = pipeline_->Evaluate(x_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("a step of pipeline 'model' runs already"));
  LetGo();
  EXPECT_EQ(pipeline_->Evaluate(x_).status(), absl::OkStatus());
}

TEST_P(StandingStepTest, APipelineOfAnotherWorkerIsRefused) {
  const auto other = Pipeline::Create(
      &cluster_[1], {.name = "model", .workers = Names(2), .schedule = *GPipe(2, 1)});
  ASSERT_TRUE(other.ok()) << other.status();
  ExpectRefusedUntilItIsOver(**other);
}

TEST_P(StandingStepTest, AnotherPipelineOfTheSameWorkerIsRefused) {
  ExpectRefusedUntilItIsOver(*MakePipeline(cluster_, *GPipe(2, 1)));
}

// Takes the way away by which a rank's last parcel goes, so that it fails when the rank has nothing
// more to do.
TEST_P(PipelineTest, ALastParcelThatIsLostEndsTheStep) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const CallOnTheWayBack::Call before_last = [&] {
    cluster[0].UnregisterOwn("distgrad.pipeline.deliver/model");
  };
  const auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) {
    if (stage == 1) in[0] = CallOnTheWayBack::apply(in[0], &before_last);
    return layers.Forward(stage, in);
  });
  const auto pipeline = MakePipeline(cluster, *OneForwardOneBackward(2, 1));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("worker 'worker1' cannot send the gradients of micro-batch 0 to stage 0"));
}

TEST_P(PipelineTest, MemoryThatIsWrittenAgainIsAnError) {
  enum Fault { kNone, kOutput, kInput, kTarget, kGradient, kLoss };
  static at::Tensor reused;
  struct Reuses : torch::autograd::Function<Reuses> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a) {
      return a.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      reused.copy_(gradients[0]);
      return {reused};
    }
  };
  for (const bool together : {false, true}) {
    SCOPED_TRACE(together ? "on one rank" : "on two ranks");
    Cluster cluster(Workers(2));
    const EqualLayers layers(2);
    std::atomic<Fault> fault{kNone};
    reused = at::empty({2, 16});
    const auto forward = [&](int stage, Tensors in) -> Tensors {
      if (fault == kInput && stage == 1) in[0].add_(1);
      if (fault == kGradient && stage == 1) in[0] = Reuses::apply(in[0]);
      Tensors out = layers.Forward(stage, in);
      if (fault != kOutput || stage != 0) return out;
      const at::AutoGradMode grad_mode(false);
      reused.copy_(out[0]);
      return {reused};
    };
    const auto loss = [&](Tensors out, Tensors targets) {
      if (fault == kTarget) targets[0].zero_();
      const at::Tensor loss = Loss(out, targets);
      if (fault == kLoss) out[0].zero_();
      return loss;
    };
    Schedule schedule = *GPipe(2, 3);
    if (together) {
      schedule = {.micro_batches = 3, .rank_of_stage = {0, 0}, .lists = {{}}};
      for (int m = 0; m < 3; ++m) {
        for (const int s : {0, 1}) schedule.lists[0].push_back({Action::Kind::kForward, s, m});
      }
      // The gradients of a micro-batch wait while the next one's are computed.
      for (const int s : {1, 0}) {
        for (int m = 0; m < 3; ++m) schedule.lists[0].push_back({Action::Kind::kBackward, s, m});
      }
    }
    const auto stages = MakeStages(cluster, schedule.rank_of_stage, forward, loss);
    const auto pipeline = MakePipeline(cluster, schedule);
    const auto step = [&](Fault with, bool train) {
      fault = with;
      const Context context = cluster[0].NewContext();
      const at::Tensor x = at::randn({6, 16}), y = at::randn({6, 16});
      const absl::Status status = train ? pipeline->Train(context, {x}, {y}).status()
                                        : pipeline->Evaluate({x}, {y}).status();
      fault = kNone;
      return status;
    };
    EXPECT_EQ(step(kNone, true), absl::OkStatus());
    for (const bool train : {false, true}) {
      SCOPED_TRACE(train ? "training" : "evaluation");
      absl::Status status = step(kOutput, train);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("stage 0, micro-batch 0 on worker 'worker0' must not write"),
                        HasSubstr("output 0 was written to")));
      status = step(kInput, train);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker"),
                        HasSubstr("given, and input 0 was written to")));
      status = step(kTarget, train);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker"),
                        HasSubstr("given, and target 0 was written to")));
    }
    absl::Status status = step(kGradient, true);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("stage 1, micro-batch 0 on worker '",
                                             WorkerName(together ? 0 : 1), "' must not write")),
                      HasSubstr("the gradient of input 0 was written to")));
    status = step(kLoss, false);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker"),
                      HasSubstr("the loss must not write"), HasSubstr("output 0 was written to")));
    EXPECT_EQ(step(kNone, true), absl::OkStatus());
  }
  reused = at::Tensor();
}

// A loss that reads a target which is not there would end its process.
TEST_P(PipelineTest, AnotherNumberOfTensorsThanAStageTakesIsAnError) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto back = PipelineStages::Create(
      &cluster[1], "model",
      {{1, {.forward = [&](Tensors in) { return layers.Forward(1, in); }, .loss = Loss}}});
  const auto front = PipelineStages::Create(
      &cluster[0], "model", {{0, {.forward = [&](Tensors in) { return layers.Forward(0, in); }}}});
  ASSERT_TRUE(back.ok() && front.ok());
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 2));
  const at::Tensor x = at::randn({4, 16}), y = at::randn({4, 16});
  const Context context = cluster[0].NewContext();
  absl::Status status = pipeline->Train(context, {x}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("forward of stage 1, micro-batch 0 on worker 'worker1'"),
                    HasSubstr("loss takes 1 targets, and is given 0")));
  status = pipeline->Train(context, {x, x}, {y}).status();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("forward of stage 0, micro-batch 0 on worker 'worker0'"),
                    HasSubstr("forward takes 1 inputs, and is given 2")));
}

// What a batch, an activation and a gradient take together is more than may be on its way, or wait
// to be served, at once; and so is their number.
TEST_P(PipelineTest, ABatchMayBeLargerThanTheLimitsOfWhatIsOnItsWay) {
  constexpr int kCount = 12;
  ClusterOptions options = Workers(3);
  options.limits.bytes_per_peer = 100'000;
  options.limits.calls_per_peer = 8;
  Cluster cluster(options);
  const EqualLayers layers(3);
  const auto stages = MakeStages(cluster, {0, 1, 2},
                                 [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = Pipeline::Create(
      &cluster[1], {.name = "model", .workers = Names(3), .schedule = *GPipe(3, kCount)});
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  for (const int rows : {100, 380}) {  // of 64 bytes: the larger ones are nearly a quarter
    const at::Tensor x = at::randn({kCount * rows, 16}), y = at::randn({kCount * rows, 16});
    const Context context = cluster[1].NewContext();
    EXPECT_EQ((*pipeline)->Train(context, {x}, {y}).status(), absl::OkStatus()) << rows;
  }
}

// Says when its memory ends.
at::Tensor Watched(at::Tensor tensor, std::shared_ptr<absl::Notification> end) {
  void* const data = tensor.data_ptr();
  return at::from_blob(
      data, tensor.sizes(), [tensor, end](void*) mutable { end->Notify(); }, tensor.options());
}

TEST_P(PipelineTest, AfterAStepNothingOfItIsKept) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto end = std::make_shared<absl::Notification>();
  const auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) {
    Tensors out = layers.Forward(stage, in);
    if (stage == 1) out[0] = Watched(out[0], end);
    return out;
  });
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  EXPECT_EQ(pipeline->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  EXPECT_TRUE(end->WaitForNotificationWithTimeout(absl::Seconds(30)));
}

// A step that is taken again may need that memory.
TEST_P(PipelineTest, AfterAStepThatHasFailedNothingOfItIsKept) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto end = std::make_shared<absl::Notification>();
  const auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) -> Tensors {
    TORCH_CHECK(stage == 0, "no forward today");
    const at::Tensor saved = Watched(layers.Forward(0, in)[0].detach(), end).requires_grad_();
    return {saved * saved};
  });
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no forward today"));
  EXPECT_TRUE(end->WaitForNotificationWithTimeout(absl::Seconds(30)));
}

// What one stage of a rank has given another one, forwards or backwards.
TEST_P(PipelineTest, AfterAStepThatHasFailedNothingThatAStageWasToGetIsKept) {
  for (const bool backward : {false, true}) {
    SCOPED_TRACE(backward);
    Cluster cluster(Workers(1));
    const EqualLayers layers(2);
    const auto end = std::make_shared<absl::Notification>();
    std::atomic<int> given{0};
    const auto give_once = [&given, end](const at::Tensor& tensor) {
      TORCH_CHECK(++given == 1, "nothing more today");
      return Watched(tensor, end);
    };
    const auto stages = MakeStages(cluster, {0, 0}, [&](int stage, Tensors in) -> Tensors {
      if (stage == 0 && !backward) return {give_once(layers.Forward(0, in)[0].detach())};
      if (stage == 0) return layers.Forward(0, in);
      const at::Tensor same = in[0].view_as(in[0]);
      if (same.requires_grad()) same.register_hook(give_once);
      return layers.Forward(1, {same});
    });
    // All forwards of a stage, or all backwards, come before those of the other one.
    Schedule schedule{.micro_batches = 2, .rank_of_stage = {0, 0}, .lists = {{}}};
    for (const auto& [kind, stage] : {std::pair(Action::Kind::kForward, 0),
                                      {Action::Kind::kForward, 1},
                                      {Action::Kind::kBackward, 1},
                                      {Action::Kind::kBackward, 0}}) {
      for (const int m : {0, 1}) schedule.lists[0].push_back({kind, stage, m});
    }
    const auto pipeline = MakePipeline(cluster, schedule);
    const Context context = cluster[0].NewContext();
    const absl::Status status =
        pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("nothing more today"));
    EXPECT_TRUE(end->WaitForNotificationWithTimeout(absl::Seconds(30)));
  }
}

struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  }
  ~Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
};

TEST_P(PipelineTest, AutocastIsThatOfTheCallerInForwardAndOffInBackward) {
  static std::atomic<int> backwards{0}, backwards_with_autocast{0};
  struct Looks : torch::autograd::Function<Looks> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a) {
      return a.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      ++backwards;
      if (at::autocast::is_autocast_enabled(at::kCPU)) ++backwards_with_autocast;
      return gradients;
    }
  };
  backwards = backwards_with_autocast = 0;
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  std::atomic<int> forwards_of_half{0};
  const auto forward = [&](int stage, Tensors in) -> Tensors {
    const at::Tensor product = at::linear(in[0], layers.weights[stage], layers.biases[stage]);
    if (product.scalar_type() == at::kHalf) ++forwards_of_half;
    return {Looks::apply(product).to(at::kFloat)};
  };
  const auto stages = MakeStages(cluster, {0, 1}, forward);
  const auto pipeline = MakePipeline(cluster, *ZeroBubbleH1(2, 2));
  const at::Tensor x = at::randn({4, 16}), y = at::randn({4, 16});
  Tensors losses;
  for (int step = 0; step < 2; ++step) {
    const Context context = cluster[0].NewContext();
    {
      const Autocast autocast;
      const absl::StatusOr<PipelineResult> result = pipeline->Train(context, {x}, {y});
      ASSERT_TRUE(result.ok()) << result.status();
      losses.push_back(result->loss);
    }
    // What autocast has cast for the first step is old in the second.
    const at::AutoGradMode grad_mode(false);
    for (at::Tensor weight : layers.weights) weight.mul_(2);
  }
  EXPECT_EQ(forwards_of_half, 8);
  EXPECT_EQ(backwards, 8);
  EXPECT_EQ(backwards_with_autocast, 0);
  EXPECT_GT((losses[1] - losses[0]).abs().item<float>(), 0.1);
}

// Not in those of whoever drives the pipeline, nor in what another function has left behind.
TEST_P(PipelineTest, AnOptimizersStepRunsInTheModesOfANewThread) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  std::atomic<int> steps{0}, spans{0}, in_other_modes{0};
  const auto look = [&] {
    if (at::autocast::is_autocast_enabled(at::kCPU) || c10::InferenceMode::is_enabled()) {
      ++in_other_modes;
    }
  };
  const CallOnTheWayBack::Call look_in_backward = look;
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int s = 0; s < 2; ++s) {
    PipelineStage stage = {
        .forward = [&, s](Tensors in) -> Tensors {
          const Tensors out = layers.Forward(s, std::move(in));
          return {CallOnTheWayBack::apply(out[0].to(at::kFloat), &look_in_backward)};
        },
        .loss = Loss,
        .step =
            [&](const Context&) {
              ++steps;
              look();
              if (!at::GradMode::is_enabled()) ++in_other_modes;
              at::autocast::set_autocast_enabled(at::kCPU, true);
              return absl::OkStatus();
            }};
    stages.push_back(*PipelineStages::Create(&cluster[s], "model", {{s, stage}},
                                             {.on_action = [&](const StageSpan&) {
                                               ++spans;
                                               look();
                                               if (!at::GradMode::is_enabled()) ++in_other_modes;
                                               at::autocast::set_autocast_enabled(at::kCPU, true);
                                               at::GradMode::set_enabled(false);
                                             }}));
  }
  const auto pipeline = MakePipeline(cluster, WithSteps(*ZeroBubbleH1(2, 2)));
  for (int step = 0; step < 2; ++step) {
    const Context context = cluster[0].NewContext();
    const Autocast autocast;
    const at::AutoGradMode grad_mode(false);
    const auto result = pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})});
    ASSERT_TRUE(result.ok()) << result.status();
  }
  EXPECT_EQ(steps, 4);
  EXPECT_GT(spans, 4);
  EXPECT_EQ(in_other_modes, 0);
}

TEST_P(PipelineTest, AStageThatIsRecomputedGivesTheSameBitsAndKeepsLess) {
  constexpr int kCount = 4;
  static std::atomic<int> alive{0}, most_alive_in_backward{0};
  // Keeps something until its backward, as a stage's activations are kept.
  struct Keeps : torch::autograd::Function<Keeps> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a) {
      ++alive;
      const at::Tensor copy = a.clone();
      context->save_for_backward({at::from_blob(
          copy.data_ptr(), copy.sizes(), [copy](void*) { --alive; }, copy.options())});
      return a.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      most_alive_in_backward = std::max<int>(most_alive_in_backward, alive);
      return gradients;
    }
  };
  for (const bool halves : {false, true}) {
    SCOPED_TRACE(halves ? "ZB-H1" : "GPipe");
    const EqualLayers layers(2);
    const Tensors x{at::randn({8, 16})}, y{at::randn({8, 16})};
    Tensors losses, gradients;
    std::vector<int> kept;
    for (const bool recompute : {false, true}) {
      Cluster cluster(Workers(2));
      int forwards = 0;
      std::vector<std::unique_ptr<PipelineStages>> stages;
      for (int s = 0; s < 2; ++s) {
        // The first one alone draws random numbers; both are in one process.
        const auto forward = [&, s](Tensors in) {
          if (s == 1) return layers.Forward(1, in);
          ++forwards;
          const at::Tensor some = at::dropout(in[0], 0.5, true);
          return layers.Forward(0, {Keeps::apply(some + layers.biases[0])});
        };
        stages.push_back(*PipelineStages::Create(
            &cluster[s], "model",
            {{s, {.forward = forward, .loss = Loss, .recompute = recompute && s == 0}}}));
      }
      const auto pipeline =
          MakePipeline(cluster, halves ? *ZeroBubbleH1(2, kCount) : *GPipe(2, kCount));
      at::manual_seed(7);
      most_alive_in_backward = 0;
      const Context context = cluster[0].NewContext();
      const absl::StatusOr<PipelineResult> result = pipeline->Train(context, x, y);
      ASSERT_TRUE(result.ok()) << result.status();
      losses.push_back(result->loss);
      gradients.push_back(*context.Gradient(layers.weights[0]));
      kept.push_back(most_alive_in_backward);
      EXPECT_EQ(forwards, recompute ? 2 * kCount : kCount);
      EXPECT_EQ(alive, 0);
    }
    EXPECT_TRUE(at::equal(losses[0], losses[1]));
    EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
    if (halves) continue;
    EXPECT_EQ(kept[0], kCount);
    EXPECT_EQ(kept[1], 1);
  }
}

TEST_P(PipelineTest, ARecomputationWithOtherRandomNumbersIsAnError) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  int forwards = 0;
  const auto stages =
      PipelineStages::Create(&cluster[0], "model",
                             {{0,
                               {.forward =
                                    [&](Tensors in) {
                                      if (++forwards == 2) at::rand({3});
                                      return layers.Forward(0, {at::dropout(in[0], 0.5, true)});
                                    },
                                .loss = Loss,
                                .recompute = true}}});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const auto pipeline = MakePipeline(cluster, *GPipe(1, 1));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("backward of stage 0, micro-batch 0 on worker 'worker0'"),
                    HasSubstr("other random numbers")));
}

// As where the driver makes its next batch while a step is in flight.
TEST_P(PipelineTest, AnotherThreadMayDrawWhereTheRecomputedStageDoesNot) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  const EqualLayers alone = layers.Copy();
  int forwards = 0;
  const auto stages = PipelineStages::Create(&cluster[0], "model",
                                             {{0,
                                               {.forward =
                                                    [&](Tensors in) {
                                                      if (++forwards == 1)
                                                        std::thread([] { at::rand({3}); }).join();
                                                      return layers.Forward(0, std::move(in));
                                                    },
                                                .loss = Loss,
                                                .recompute = true}}});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const auto pipeline = MakePipeline(cluster, *GPipe(1, 1));
  const at::Tensor x = at::randn({4, 16}), y = at::randn({4, 16});
  const Context context = cluster[0].NewContext();
  ASSERT_EQ(pipeline->Train(context, {x}, {y}).status(), absl::OkStatus());
  EXPECT_EQ(forwards, 2);
  StepAlone(alone, 1, 1, true, x, y);
  EXPECT_TRUE(at::equal(*context.Gradient(layers.weights[0]), alone.weights[0].grad()));
}

// Both forwards leave the generator in the same state, and have other numbers.
TEST_P(PipelineTest, ARecomputationWithTheNumbersOfAnotherThreadIsAnError) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  int forwards = 0;
  const auto forward = [&](Tensors in) {
    at::Tensor own, of_another;
    const auto draw = [&] { own = at::rand({4, 16}); };
    const auto draw_another = [&] { std::thread([&] { of_another = at::rand({4, 16}); }).join(); };
    if (++forwards == 1) {
      draw();
      draw_another();
    } else {
      draw_another();
      draw();
    }
    return layers.Forward(0, {in[0] * own});
  };
  const auto front =
      PipelineStages::Create(&cluster[0], "model", {{0, {.forward = forward, .recompute = true}}});
  const auto back = PipelineStages::Create(
      &cluster[1], "model",
      {{1, {.forward = [&](Tensors in) { return layers.Forward(1, in); }, .loss = Loss}}});
  ASSERT_TRUE(front.ok() && back.ok());
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  const Context context = cluster[0].NewContext();
  const absl::Status status =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(forwards, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("backward of stage 0, micro-batch 0 on worker 'worker0'"),
                    HasSubstr("output 0 is not that of the first time")));
}

TEST_P(PipelineTest, ARecomputationComparesOutputsOfEachType) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  constexpr int kNone = -1;
  int forwards = 0, other = kNone;
  const auto forward = [&](Tensors in) -> Tensors {
    Tensors out = layers.Forward(0, {in[0]});
    const at::Tensor some = at::ones({3, 2});
    // The last ones have no elements, and lie in memory with gaps, or conjugated.
    for (const at::Tensor& more : {some.to(at::kLong), some.to(at::kBool), some.to(at::kBFloat16),
                                   some.to(at::kComplexFloat), some.slice(0, 0, 0), some.t(),
                                   some.to(at::kComplexDouble).conj()}) {
      out.push_back(more);
    }
    ++forwards;
    if (forwards == 2 && other != kNone) out[other] = at::zeros_like(out[other]);
    return out;
  };
  const auto front =
      PipelineStages::Create(&cluster[0], "model", {{0, {.forward = forward, .recompute = true}}});
  const auto back =
      PipelineStages::Create(&cluster[1], "model",
                             {{1,
                               {.forward = [&](Tensors in) { return layers.Forward(1, {in[0]}); },
                                .loss = Loss,
                                .inputs = std::nullopt}}});
  ASSERT_TRUE(front.ok() && back.ok());
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  const auto train = [&] {
    forwards = 0;
    const Context context = cluster[0].NewContext();
    return pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  };
  EXPECT_EQ(train(), absl::OkStatus());
  for (const int output : {1, 2, 3, 4, 6, 7}) {
    SCOPED_TRACE(output);
    other = output;
    const absl::Status status = train();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("output ", output, " is not that of the first time")));
  }
}

TEST_P(PipelineTest, ARecomputationOfSomethingElseIsAnError) {
  enum Fault { kNone, kInput, kTarget, kInputMeanwhile, kLoss, kHistory };
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  Fault fault = kNone;
  int forwards = 0;
  at::Tensor kept;
  const auto forward = [&](Tensors in) -> Tensors {
    ++forwards;
    if (fault == kInput && forwards == 2) kept.add_(1);
    if (fault == kInputMeanwhile && forwards == 3) in[0].add_(1);
    if (fault == kInput) kept = in[0];
    if (fault == kLoss && forwards == 3) return layers.Forward(1, {in[0] * 2});
    Tensors out = layers.Forward(1, in);
    if (fault == kHistory && forwards == 3) out[0] = out[0].detach();
    return out;
  };
  const auto loss = [&](Tensors out, Tensors targets) {
    if (fault == kTarget && forwards == 2) kept.add_(1);
    if (fault == kTarget) kept = targets[0];
    return Loss(std::move(out), std::move(targets));
  };
  const auto front = PipelineStages::Create(
      &cluster[0], "model", {{0, {.forward = [&](Tensors in) { return layers.Forward(0, in); }}}});
  const auto back = PipelineStages::Create(
      &cluster[1], "model", {{1, {.forward = forward, .loss = loss, .recompute = true}}});
  ASSERT_TRUE(front.ok() && back.ok());
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 2));
  const std::map<Fault, std::string> expected = {
      {kInput, "must not write to what it is given, and input 0 was written to"},
      {kTarget, "must not write to what it is given, and target 0 was written to"},
      {kInputMeanwhile, "must not write to what it is given, and input 0 was written to"},
      {kLoss, "the loss is not that of the first time"},
      {kHistory, "output 0 is Float [] without a gradient, and was Float [] with a gradient"}};
  for (const auto& [one, text] : expected) {
    SCOPED_TRACE(text);
    fault = one;
    forwards = 0;
    const Context context = cluster[0].NewContext();
    const absl::Status status =
        pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
    kept = at::Tensor();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("of stage 1, micro-batch "), HasSubstr(text)));
  }
  // A loss that is not a number is the same twice.
  fault = kNone;
  const Context context = cluster[0].NewContext();
  EXPECT_EQ(pipeline->Train(context, {at::randn({4, 16}) / 0.}, {at::randn({4, 16})}).status(),
            absl::OkStatus());
}

// The gradient of the parameter is that of the input, the same tensor.
TEST_P(PipelineTest, AStageMayAddAParameterToItsInput) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    Cluster cluster(Workers(ranks));
    Tensors own, alone;
    for (int s = 0; s < 2; ++s) {
      own.push_back(at::randn({2, 16}).requires_grad_(true));
      alone.push_back(own.back().detach().clone().requires_grad_(true));
    }
    const Schedule schedule =
        ranks == 2 ? *ZeroBubbleH1(2, 3)
                   : Schedule{.micro_batches = 3,
                              .rank_of_stage = {0, 0},
                              .lists = {[] {
                                std::vector<Action> list;
                                for (const Action::Kind kind :
                                     {Action::Kind::kForward, Action::Kind::kBackwardInput,
                                      Action::Kind::kBackwardWeight}) {
                                  const int first = kind == Action::Kind::kForward ? 0 : 1;
                                  for (const int s : {first, 1 - first}) {
                                    for (int m = 0; m < 3; ++m) list.push_back({kind, s, m});
                                  }
                                }
                                return list;
                              }()}};
    const auto stages = MakeStages(cluster, schedule.rank_of_stage,
                                   [&](int s, Tensors in) { return Tensors{in[0] + own[s]}; });
    const auto pipeline = MakePipeline(cluster, schedule);
    const at::Tensor x = at::randn({6, 16}), y = at::randn({6, 16});
    const Context context = cluster[0].NewContext();
    ASSERT_EQ(pipeline->Train(context, {x}, {y}).status(), absl::OkStatus());
    for (int m = 0; m < 3; ++m) {
      const at::Tensor loss =
          Loss({x.tensor_split(3)[m] + alone[0] + alone[1]}, {y.tensor_split(3)[m]});
      loss.backward(at::full_like(loss, 2.0 / 6.0));
    }
    EXPECT_TRUE(at::equal(*context.Gradient(own[0]), alone[0].grad()));
  }
}

TEST_P(PipelineTest, AStageUsesAsManyThreadsAsItMay) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  const int before = at::get_num_threads();
  std::atomic<int> threads{0};
  EXPECT_EQ(PipelineStages::Create(&cluster[0], "model", {}, {.num_threads = -1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (const int wanted : {3, 1}) {
    const auto stages = PipelineStages::Create(&cluster[0], "model",
                                               {{0,
                                                 {.forward =
                                                      [&](Tensors in) {
                                                        threads = at::get_num_threads();
                                                        return layers.Forward(0, in);
                                                      }}}},
                                               {.num_threads = wanted});
    ASSERT_TRUE(stages.ok()) << stages.status();
    const auto pipeline = MakePipeline(cluster, *GPipe(1, 1));
    EXPECT_EQ(pipeline->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
    EXPECT_EQ(threads, wanted);
    EXPECT_EQ(at::get_num_threads(), before);
  }
}

// By default the ranks of a worker share its processors: also where no launcher says how many
// workers the machine has.
TEST_P(PipelineTest, RanksOfOneWorkerShareItsProcessors) {
  Cluster cluster(Workers(1));
  ASSERT_EQ(cluster[0].local_world_size(), 0);
  const EqualLayers layers(2);
  std::array<std::atomic<int>, 2> threads{};
  const auto stages = MakeStages(cluster, {0, 0}, [&](int stage, Tensors in) {
    threads[stage] = at::get_num_threads();
    return layers.Forward(stage, in);
  });
  const auto pipeline = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker0", "worker0"}, .schedule = *GPipe(2, 1)});
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  ASSERT_EQ((*pipeline)->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  const int each = std::max(1, std::min(at::get_num_threads(), UsableProcessors() / 2));
  EXPECT_EQ(threads[0], each);
  EXPECT_EQ(threads[1], each);
}

// So do workers of one machine: threads of OpenMP that wait would spin where another one computes.
TEST_P(PipelineTest, WorkersOfOneMachineShareItsProcessors) {
  Cluster cluster(Workers(2));
  ASSERT_EQ(cluster[0].local_world_size(), 0);
  EXPECT_EQ(cluster[0].MembersOnThisMachine().size(), 2u);
  const EqualLayers layers(2);
  std::array<std::atomic<int>, 2> threads{};
  const int before = at::get_num_threads();
  at::set_num_threads(UsableProcessors() + 1);
  const auto stages = MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) {
    threads[stage] = at::get_num_threads();
    return layers.Forward(stage, in);
  });
  at::set_num_threads(before);
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  ASSERT_EQ(pipeline->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  const int each = std::max(1, UsableProcessors() / 2);
  EXPECT_EQ(threads[0], each);
  EXPECT_EQ(threads[1], each);
}

TEST_P(PipelineTest, ADriverWithoutStagesNeedsNoProcessors) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(1);
  std::atomic<int> threads{0};
  const int before = at::get_num_threads(), all = UsableProcessors() + 1;
  at::set_num_threads(all);
  const auto stages = MakeStages(cluster, {1}, [&](int stage, Tensors in) {
    threads = at::get_num_threads();
    return layers.Forward(stage, in);
  });
  at::set_num_threads(before);
  const auto pipeline = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker1"}, .schedule = *GPipe(1, 1)});
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  ASSERT_EQ((*pipeline)->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  EXPECT_EQ(threads, all);
}

// The thread of a rank forgets what it had when another rank shared the worker.
TEST_P(PipelineTest, ARankThatIsAloneUsesAllThreadsAgain) {
  const int before = at::get_num_threads(), all = UsableProcessors() + 1;
  Cluster cluster(Workers(1));
  const EqualLayers layers(2);
  std::array<std::atomic<int>, 2> threads{};
  at::set_num_threads(all);
  const auto stages = MakeStages(cluster, {0, 0}, [&](int stage, Tensors in) {
    threads[stage] = at::get_num_threads();
    return layers.Forward(stage, in);
  });
  at::set_num_threads(before);
  const auto two = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker0", "worker0"}, .schedule = *GPipe(2, 1)});
  ASSERT_TRUE(two.ok()) << two.status();
  const Schedule together{.micro_batches = 1,
                          .rank_of_stage = {0, 0},
                          .lists = {{{Action::Kind::kForward, 0, 0},
                                     {Action::Kind::kForward, 1, 0},
                                     {Action::Kind::kBackward, 1, 0},
                                     {Action::Kind::kBackward, 0, 0}}}};
  const auto one = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker0"}, .schedule = together});
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_EQ((*two)->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  ASSERT_EQ((*one)->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  EXPECT_EQ(threads[0], all);
  EXPECT_EQ(threads[1], all);
}

// Each rank has a thread of its own; so a stage that two pipelines have in different ranks would
// run twice at once.
TEST_P(PipelineTest, OneStepRunsAtATimeAlsoOfAnotherPartition) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(2);
  absl::Notification begun, end;
  std::atomic<int> inside{0}, most{0};
  const auto stages = MakeStages(cluster, {0, 0}, [&](int stage, Tensors in) {
    most = std::max<int>(most, ++inside);
    if (stage == 1 && !begun.HasBeenNotified()) {
      begun.Notify();
      end.WaitForNotification();
    }
    Tensors out = layers.Forward(stage, in);
    --inside;
    return out;
  });
  const auto together = MakePipeline(cluster, *InterleavedOneForwardOneBackward(1, 2, 1));
  const auto apart = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker0", "worker0"}, .schedule = *GPipe(2, 1)});
  ASSERT_TRUE(apart.ok()) << apart.status();
  const Tensors x{at::randn({4, 16})};
  std::thread first([&] { EXPECT_EQ(together->Evaluate(x).status(), absl::OkStatus()); });
  begun.WaitForNotification();
  const absl::Status status = (*apart)->Evaluate(x).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  end.Notify();
  first.join();
  EXPECT_EQ((*apart)->Evaluate(x).status(), absl::OkStatus());
  EXPECT_EQ(most, 1);
}

// A step keeps its stages from its beginning on: those of another partition, too.
TEST_P(PipelineTest, AStepThatHasBegunKeepsItsStages) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(2);
  const auto stages =
      MakeStages(cluster, {0, 0}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const Tensors x{at::randn({4, 16})};
  const auto together = MakePipeline(cluster, *InterleavedOneForwardOneBackward(1, 2, 1));
  const auto apart = Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {"worker0", "worker0"}, .schedule = *GPipe(2, 1)});
  ASSERT_TRUE(apart.ok()) << apart.status();
  const auto expect_refused = [&] {
    for (Pipeline* const pipeline : {together.get(), apart->get()}) {
      const absl::Status status = pipeline->Evaluate(x).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("a step that worker 'worker0' (0) has begun"),
                        HasSubstr("a stage runs one step at a time")));
    }
  };
  const auto begin = [&](uint64_t step, Deadline deadline, const Context* context) {
    const StepPlan plan{.step = step,
                        .pipeline = step,
                        .rank = 0,
                        .micro_batches = 1,
                        .backward = context != nullptr,
                        .has_targets = false,
                        .rank_of_stage = {0, 0},
                        .workers = {"worker0"},
                        .list = {{Action::Kind::kForward, 0, 0}, {Action::Kind::kForward, 1, 0}},
                        .weights = {1}};
    return cluster[0]
        .Call("worker0", absl::StrCat(kBeginStep, "model"), {EncodePlan(plan), {}},
              {.context = context, .deadline = deadline})
        .status();
  };
  // Until its driver gives them back.
  ASSERT_EQ(begin(1, Deadline::Never(), nullptr), absl::OkStatus());
  expect_refused();
  ASSERT_EQ(cluster[0]
                .Call("worker0", absl::StrCat(kEndStep, "model"),
                      {EncodeEnd({.of = {.step = 1, .first_stage = 0}}), {}})
                .status(),
            absl::OkStatus());
  EXPECT_EQ(together->Evaluate(x).status(), absl::OkStatus());
  // Until the driver is lost, and its context with it.
  std::optional<Context> context = cluster[0].NewContext();
  ASSERT_EQ(begin(2, Deadline::Never(), &*context), absl::OkStatus());
  expect_refused();
  context.reset();
  EXPECT_EQ((*apart)->Evaluate(x).status(), absl::OkStatus());
  // Until the driver waits no longer.
  begin(3, Deadline::After(absl::Milliseconds(200)), nullptr).IgnoreError();
  absl::Status status;
  do {
    status = together->Evaluate(x).status();
  } while (absl::IsFailedPrecondition(status));
  EXPECT_EQ(status, absl::OkStatus());
}

// One that cannot be reached would keep its stages to the deadline.
TEST_P(PipelineTest, ARankThatIsNotToldOfAnEvaluationsEndHearsOfItByTheContext) {
  Cluster cluster(Workers(3));
  const auto stages = PipelineStages::Create(&cluster[1], "model",
                                             {{0, {.forward = [](Tensors in) { return in; }}},
                                              {1, {.forward = [](Tensors in) { return in; }}}});
  ASSERT_TRUE(stages.ok()) << stages.status();
  cluster[1].UnregisterOwn(absl::StrCat(kEndStep, "model"));
  const auto pipeline = [&](std::vector<std::string> workers, Schedule schedule) {
    return *Pipeline::Create(
        &cluster[0],
        {.name = "model", .workers = std::move(workers), .schedule = std::move(schedule)});
  };
  // It begins on worker1, and worker2 has no stages.
  const Tensors x{at::randn({4, 16})};
  const absl::Status failed =
      pipeline({"worker1", "worker2"}, *GPipe(2, 1))->Evaluate(x, {}, Deadline::Never()).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kNotFound) << failed;
  // With both stages in one rank.
  const auto other = pipeline({"worker1"}, *InterleavedOneForwardOneBackward(1, 2, 1));
  const Deadline end = Deadline::After(absl::Seconds(30));
  absl::Status status;
  do {
    status = other->Evaluate(x).status();
  } while (absl::IsFailedPrecondition(status) && !end.Passed());
  EXPECT_EQ(status, absl::OkStatus());
}

// What comes of a step that has begun is no new work, though only its begin is in the context.
TEST_P(PipelineTest, AWorkerThatLeavesGoesOnWithTheStepsThatItTakesPartIn) {
  enum Kind { kTrain, kEvaluate, kInFlight, kFails };
  for (const Kind kind : {kTrain, kEvaluate, kInFlight, kFails}) {
    SCOPED_TRACE(kind);
    Cluster cluster(Workers(2));
    const EqualLayers layers(2);
    std::atomic<int> forwards{0};  // of stage 0
    absl::Status left;
    std::vector<std::map<int, PipelineStage>> of_workers(2);
    for (int s = 0; s < 2; ++s) {
      of_workers[s][s] = {.forward = [&, s](Tensors in) -> Tensors {
                            // What stage 1 has yet to get comes when its worker leaves.
                            if (s == 0 && ++forwards == 1) {
                              left = cluster[1].Leave(absl::Now());
                              TORCH_CHECK(kind != kFails, "stage 0 fails");
                            }
                            return layers.Forward(s, in);
                          },
                          .loss = Loss,
                          .step = [](const Context&) { return absl::OkStatus(); }};
    }
    auto stages = CreateStages(cluster, std::move(of_workers));
    const auto pipeline = MakePipeline(cluster, WithSteps(*GPipe(2, 2)));
    const Tensors x{at::randn({4, 16})}, y{at::randn({4, 16})};
    {
      const Context context = cluster[0].NewContext();
      if (kind == kEvaluate) {
        EXPECT_EQ(pipeline->Evaluate(x, y).status(), absl::OkStatus());
      } else if (kind == kInFlight) {
        absl::StatusOr<PipelineStep> first = pipeline->Start(context, x, y);
        absl::StatusOr<PipelineStep> second = pipeline->Start(context, x, y);
        ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
        EXPECT_EQ(first->Wait().status(), absl::OkStatus());
        EXPECT_EQ(second->Wait().status(), absl::OkStatus());
      } else {
        const absl::Status trained = pipeline->Train(context, x, y).status();
        if (kind == kTrain) {
          EXPECT_EQ(trained, absl::OkStatus());
        } else {  // it answers what has become of its stages
          EXPECT_THAT(std::string(trained.message()),
                      AllOf(HasSubstr("stage 0 fails"),
                            HasSubstr("stage 1 on worker 'worker1' has not stepped")));
        }
      }
    }
    EXPECT_EQ(left.code(), absl::StatusCode::kDeadlineExceeded) << left;
    const absl::Status next = pipeline->Evaluate(x, y).status();
    EXPECT_EQ(next.code(), absl::StatusCode::kUnavailable) << next;
    EXPECT_THAT(std::string(next.message()), HasSubstr("it is leaving the job"));
    stages[1] = nullptr;
    cluster.Kill(1);  // it is to end, and not to wait for the others
  }
}

// A step of the same partition that has begun stands before the one whose function still runs.
TEST_P(PipelineTest, AFunctionOfAStepThatWasReplacedStillKeepsItsStage) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(3);
  absl::Notification runs, end;
  std::atomic<int> inside{0}, most{0};
  auto stages = MakeStages(cluster, {0, 0, 0}, [&](int stage, Tensors in) {
    if (stage < 2) return layers.Forward(stage, in);
    most = std::max<int>(most, ++inside);
    if (!runs.HasBeenNotified()) {
      runs.Notify();
      end.WaitForNotification();
    }
    Tensors out = layers.Forward(stage, in);
    --inside;
    return out;
  });
  // The second one of two ranks, with stages 1 and 2.
  const auto call = [&](absl::string_view function, std::string payload, Tensors tensors = {}) {
    return cluster[0].CallAsync("worker0", absl::StrCat(function, "model"),
                                {std::move(payload), std::move(tensors)},
                                {.deadline = Deadline::After(absl::Seconds(30))});
  };
  StepPlan plan{.step = 1,
                .pipeline = 1,
                .rank = 1,
                .micro_batches = 1,
                .backward = false,
                .has_targets = false,
                .rank_of_stage = {0, 1, 1},
                .workers = {"worker0", "worker0"},
                .list = {{Action::Kind::kReceiveActivation, 1, 0},
                         {Action::Kind::kForward, 1, 0},
                         {Action::Kind::kForward, 2, 0}},
                .weights = {1}};
  ASSERT_EQ(call(kBeginStep, EncodePlan(plan)).Wait().status(), absl::OkStatus());
  const StepRef ref{.step = 1, .first_stage = 1};
  const Future<Message> first = call(kRunStep, EncodeStepRef(ref));
  ASSERT_EQ(
      call(kDeliver, EncodeParcel({.to = ref, .stage = 1, .wanted = {false}}), {at::randn({4, 16})})
          .Wait()
          .status(),
      absl::OkStatus());
  runs.WaitForNotification();
  plan.step = 2;
  ASSERT_EQ(call(kBeginStep, EncodePlan(plan)).Wait().status(), absl::OkStatus());
  EXPECT_EQ(first.Wait().status().code(), absl::StatusCode::kFailedPrecondition)
      << first.Wait().status();
  // Not the one that has begun since keeps the stages, but the function.
  ASSERT_EQ(call(kEndStep, EncodeEnd({.of = {2, 1}})).Wait().status(), absl::OkStatus());
  // Another pipeline has stage 2 in a rank, and on a thread, of its own.
  Schedule schedule{.micro_batches = 1,
                    .rank_of_stage = {0, 0, 1},
                    .lists = {{{Action::Kind::kForward, 0, 0},
                               {Action::Kind::kForward, 1, 0},
                               {Action::Kind::kBackward, 1, 0},
                               {Action::Kind::kBackward, 0, 0}},
                              {{Action::Kind::kForward, 2, 0}, {Action::Kind::kBackward, 2, 0}}}};
  AddTransfers(&schedule);
  const auto other = Pipeline::Create(
      &cluster[0],
      {.name = "model", .workers = {"worker0", "worker0"}, .schedule = std::move(schedule)});
  ASSERT_TRUE(other.ok()) << other.status();
  const absl::Status status = (*other)->Evaluate({at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("a stage runs one step at a time"));
  EXPECT_EQ(most, 1);
  end.Notify();
  stages.clear();
}

// A driver that is refused by one worker has nothing of the others.
TEST_P(PipelineTest, AStepThatIsRefusedGivesBackWhatItHas) {
  Cluster cluster(Workers(2));
  const EqualLayers layers(2);
  const auto stages =
      MakeStages(cluster, {0, 1}, [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  const auto pipeline = MakePipeline(cluster, *GPipe(2, 1));
  const auto begin = [&](int rank) {
    const StepPlan plan{.step = 1,
                        .pipeline = 1,
                        .rank = rank,
                        .micro_batches = 1,
                        .backward = false,
                        .has_targets = false,
                        .rank_of_stage = {0, 1},
                        .workers = Names(2),
                        .list = {{Action::Kind::kForward, rank, 0}},
                        .weights = {1}};
    return cluster[1]
        .Call(WorkerName(rank), absl::StrCat(kBeginStep, "model"), {EncodePlan(plan), {}})
        .status();
  };
  ASSERT_EQ(begin(1), absl::OkStatus());
  Context context = cluster[0].NewContext();
  const std::weak_ptr<ContextRecord> record = context.record();
  const absl::Status refused =
      pipeline->Train(context, {at::randn({4, 16})}, {at::randn({4, 16})}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("beginning a step of pipeline 'model', stage 1 on worker 'worker1': "));
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("a step that worker 'worker1' (1) has begun runs on worker 'worker1'; a stage "
                "runs one step at a time"));
  EXPECT_EQ(begin(0), absl::OkStatus());
  context = Context();
  EXPECT_TRUE(record.expired()) << "the step that was refused keeps its context";
}

// Each of two drivers is refused while the other one's step runs, and then alone.
TEST_P(PipelineTest, OfTwoDriversThatBeginAtOneMomentOneRuns) {
  constexpr int kRounds = 50;
  Cluster cluster(Workers(3));
  const EqualLayers layers(3);
  const auto stages = MakeStages(cluster, {0, 1, 2},
                                 [&](int stage, Tensors in) { return layers.Forward(stage, in); });
  std::array<std::unique_ptr<Pipeline>, 2> pipelines;
  for (int driver = 0; driver < 2; ++driver) {
    auto made = Pipeline::Create(&cluster[driver],
                                 {.name = "model", .workers = Names(3), .schedule = *GPipe(3, 1)});
    ASSERT_TRUE(made.ok()) << made.status();
    pipelines[driver] = *std::move(made);
  }
  for (int round = 0; round < kRounds; ++round) {
    std::array<absl::Status, 2> ended;
    std::atomic<int> there{0};
    std::vector<std::thread> drivers;
    for (int driver = 0; driver < 2; ++driver) {
      drivers.emplace_back([&, driver] {
        for (++there; there < 2;) std::this_thread::yield();
        ended[driver] = pipelines[driver]->Evaluate({at::ones({4, 16})}).status();
      });
    }
    for (std::thread& driver : drivers) driver.join();
    EXPECT_TRUE(ended[0].ok() || ended[1].ok()) << ended[0] << "\n" << ended[1];
    for (const absl::Status& status : ended) {
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(
          std::string(status.message()),
          ContainsRegex("a step that worker 'worker.' .[01]. has begun runs on worker 'worker.'; "
                        "a stage runs one step at a time"));
    }
  }
}

// Its driver may ask for that when the next step has begun.
TEST_P(PipelineTest, WhatAStepThatWasReplacedHasSteppedIsKnown) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  PipelineStage stage = {.forward = [&](Tensors in) { return layers.Forward(0, std::move(in)); },
                         .loss = Loss,
                         .step = [](const Context&) { return absl::OkStatus(); }};
  const auto stages = PipelineStages::Create(&cluster[0], "model", {{0, stage}});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const DriverOfOneStage driver(cluster[0]);
  const std::vector<Action> list = {
      {Action::Kind::kForward, 0, 0}, {Action::Kind::kBackward, 0, 0}, {Action::Kind::kStep, 0, 0}};
  const auto begin = [&](uint64_t step) {
    EXPECT_EQ(driver.Begin(step, /*backward=*/true, list), absl::OkStatus());
  };
  begin(1);
  ASSERT_EQ(driver.Run(1), absl::OkStatus());
  begin(2);  // and never runs
  begin(3);
  const absl::StatusOr<Stepped> first = driver.End(1), second = driver.End(2);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  EXPECT_EQ(*first, (Stepped{{0, true}}));
  EXPECT_TRUE(second->empty());
  // What comes for one of them says why it is too late.
  const absl::Status late = driver.Run(1);
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition) << late;
  EXPECT_THAT(std::string(late.message()),
              HasSubstr("worker 'worker0' (0) has begun another step of pipeline 'model' on worker "
                        "'worker0' since: a stage runs one step at a time"));
  // Those of long ago are forgotten.
  for (uint64_t step = 4; step < 14; ++step) begin(step);
  EXPECT_FALSE(driver.End(1).ok());
  EXPECT_TRUE(driver.End(10).ok());
}

// Tied parameters would be sent to the first stage of a rank that has none.
TEST_P(PipelineTest, APlanWithARankThatHasNoStageIsRefused) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  PipelineStage stage = {.forward = [&](Tensors in) { return layers.Forward(0, in); },
                         .loss = Loss};
  stage.tied = {{"embedding", layers.weights[0]}};
  const auto stages = PipelineStages::Create(&cluster[0], "model", {{0, stage}});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const Context context = cluster[0].NewContext();
  const auto call = [&](absl::string_view function, std::string payload) {
    return cluster[0]
        .Call("worker0", absl::StrCat(function, "model"), {std::move(payload), {}},
              {.context = &context, .deadline = Deadline::After(absl::Seconds(20))})
        .status();
  };
  const absl::Status status = call(kBeginStep, EncodePlan({.step = 1,
                                                           .pipeline = 1,
                                                           .rank = 0,
                                                           .micro_batches = 1,
                                                           .backward = true,
                                                           .has_targets = false,
                                                           .rank_of_stage = {0},
                                                           .workers = {"worker0", "worker0"},
                                                           .list = {{Action::Kind::kStep, 0, 0}},
                                                           .weights = {1}}));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 has no stage"));
  const StepRef ref{.step = 1, .first_stage = 0};
  EXPECT_EQ(call(kTieStep, EncodeTies({.to = ref, .ranks = {{"embedding", {0, 1}}}})).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(call(kRunStep, EncodeStepRef(ref)).code(), absl::StatusCode::kNotFound);
}

TEST_P(PipelineTest, StagesThatAreClosedAreWaitedForUntilTheDeadline) {
  Cluster cluster(Workers(1));
  const EqualLayers layers(1);
  absl::Notification begun, end;
  bool closed_in_function = true;
  std::unique_ptr<PipelineStages> stages;
  const auto forward = [&](Tensors in) {
    closed_in_function = stages->Close(absl::InfinitePast());
    begun.Notify();
    end.WaitForNotification();
    return layers.Forward(0, in);
  };
  stages = *PipelineStages::Create(&cluster[0], "model", {{0, {.forward = forward}}});
  const auto pipeline = MakePipeline(cluster, *GPipe(1, 1));
  const absl::Status status = pipeline->Evaluate({at::randn({4, 16})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("stages of pipeline 'model' on worker"));
  begun.WaitForNotification();
  EXPECT_FALSE(stages->Close(Deadline::After(absl::Milliseconds(1))));
  // Others may have the name, and run.
  const auto next = PipelineStages::Create(
      &cluster[0], "model", {{0, {.forward = [&](Tensors in) { return layers.Forward(0, in); }}}});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(pipeline->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
  end.Notify();
  EXPECT_TRUE(stages->Close(Deadline::Never()));
  EXPECT_FALSE(closed_in_function);
  EXPECT_TRUE(stages->Close(absl::InfinitePast()));
  // These are not those.
  EXPECT_EQ(pipeline->Evaluate({at::randn({4, 16})}).status(), absl::OkStatus());
}

// The stages that wait for another one, the driver that waits for all, and the threads below them
// share the processors with the one that computes.
TEST_P(PipelineTest, WhoWaitsUsesNoProcessor) {
  constexpr int kStages = 3;
  Cluster cluster(Workers(kStages));
  const EqualLayers layers(kStages);
  std::atomic<bool> slow{false};
  const auto stages = MakeStages(cluster, {0, 1, 2}, [&](int stage, Tensors in) {
    if (slow) absl::SleepFor(absl::Milliseconds(100));
    return layers.Forward(stage, in);
  });
  const auto pipeline = MakePipeline(cluster, *ZeroBubbleH1(kStages, 4));
  for (slow = false;; slow = true) {
    const std::clock_t before = std::clock();  // of all threads of the process
    const Context context = cluster[0].NewContext();
    ASSERT_EQ(pipeline->Train(context, {at::randn({8, 16})}, {at::rand({8, 16})}).status(),
              absl::OkStatus());
    if (!slow) continue;
    // It takes 0.6 s at least, for each of its six waits.
    EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 4);
    break;
  }
}

TEST_P(PipelineTest, StagesThatCannotBeMadeLeaveNothing) {
  Cluster cluster(Workers(1));
  const std::string taken = "distgrad.pipeline.run/model";
  ASSERT_EQ(cluster[0].RegisterOwn(taken, [](Request&) { return Message{}; }), absl::OkStatus());
  EXPECT_EQ(PipelineStages::Create(&cluster[0], "model", {}).status().code(),
            absl::StatusCode::kAlreadyExists);
  cluster[0].UnregisterOwn(taken);
  EXPECT_EQ(PipelineStages::Create(&cluster[0], "model", {}).status(), absl::OkStatus());
}

}  // namespace
}  // namespace distgrad
