// What docs/pipelines.md shows of C++.
#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"
#include "core/optim/local_optimizer.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "core/tensor/nested.h"
#include "core/worker/optimizer.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

// [doc: stage]
// What a worker has of the model.
struct Part {
  std::unique_ptr<PipelineStages> stages;
  std::unique_ptr<Optimizer> optimizer;
};

// On every worker: its stage, by the number of it, and its part of the optimizer.
absl::StatusOr<Part> CreatePart(Worker* worker, int number, torch::nn::Linear layer) {
  PipelineStage stage;
  stage.forward = [layer](std::vector<at::Tensor> inputs) mutable {
    return std::vector{at::tanh(layer(inputs[0]))};
  };
  // Of the last stage; the others do not use theirs.
  stage.loss = [](std::vector<at::Tensor> outputs, std::vector<at::Tensor> targets) {
    return at::mse_loss(outputs[0], targets[0]);
  };
  auto stages = PipelineStages::Create(worker, "model", {{number, stage}});
  if (!stages.ok()) return stages.status();
  auto optimizer = Optimizer::Create(
      worker, std::make_unique<torch::optim::SGD>(layer->parameters(), /*lr=*/0.1));
  if (!optimizer.ok()) return optimizer.status();
  // The first step needs the stages of all workers.
  const absl::Status met = worker->Barrier(Deadline::After(absl::Minutes(1)));
  if (!met.ok()) return met;
  return Part{*std::move(stages), *std::move(optimizer)};
}
// [doc: end]

// [doc: steps]
// On one of them, or on another worker. Returns the loss of the last batch.
absl::StatusOr<double> Train(Worker* worker, Optimizer* optimizer, const at::Tensor& inputs,
                             const at::Tensor& targets, int steps) {
  auto pipeline = Pipeline::Create(worker, {.name = "model",
                                            .workers = {"worker0", "worker1"},
                                            .schedule = *OneForwardOneBackward(2, 8)});
  if (!pipeline.ok()) return pipeline.status();
  double loss = 0;
  for (int step = 0; step < steps; ++step) {
    const Context context = worker->NewContext();
    const auto result = (*pipeline)->Train(context, {inputs}, {targets});
    if (!result.ok()) return result.status();
    const absl::Status stepped = optimizer->Step(context);  // on both workers
    if (!stepped.ok()) return stepped;
    loss = result->loss.item<double>();
  }
  return loss;
}
// [doc: end]

// [doc: in flight]
// The step of a stage, by the optimizer of its own parameters.
std::function<absl::Status(const Context&)> StepOf(torch::nn::Linear layer) {
  const auto optimizer = std::make_shared<LocalOptimizer>(
      std::make_unique<torch::optim::SGD>(layer->parameters(), /*lr=*/0.1));
  return [optimizer](const Context& context) { return optimizer->Step(*context.record()); };
}

// With a pipeline whose schedule has these steps, by WithSteps(): while one batch is at its end,
// the next one begins. Returns the loss of the last batch.
absl::StatusOr<double> TrainInFlight(Worker* worker, Pipeline* pipeline, const at::Tensor& inputs,
                                     const at::Tensor& targets, int steps) {
  std::deque<std::pair<Context, PipelineStep>> in_flight;
  double loss = 0;
  for (int step = 0; step < steps || !in_flight.empty(); ++step) {
    if (step < steps) {
      Context context = worker->NewContext();
      auto started = pipeline->Start(context, {inputs}, {targets});
      if (!started.ok()) return started.status();
      in_flight.emplace_back(std::move(context), *std::move(started));
      if (in_flight.size() == 1) continue;
    }
    const auto result = in_flight.front().second.Wait();
    if (!result.ok()) return result.status();
    loss = result->loss.item<double>();
    in_flight.pop_front();
  }
  return loss;
}
// [doc: end]

// [doc: nested]
// A batch of a type of one's own: rows, and more of each row by name.
using Batch = std::pair<at::Tensor, std::map<std::string, at::Tensor>>;

// A stage that is given such a batch, as the first one is with TensorsOf(batch). The example says
// how long lists are, and which keys maps have.
PipelineStage WeightedRows(const Batch& example, torch::nn::Linear layer) {
  PipelineStage stage;
  stage.inputs = static_cast<int>(TensorsOf(example).size());
  stage.forward = [example, layer](std::vector<at::Tensor> inputs) mutable {
    const auto [rows, more] = WithTensors(example, inputs);
    return std::vector{layer(rows) * more.at("weight")};
  };
  return stage;
}
// [doc: end]

// [doc: replicas]
// On every worker: a stage of one of the replicas, which averages with that stage of the others.
absl::StatusOr<std::unique_ptr<PipelineStages>> CreateReplica(
    Worker* worker, int number, const PipelineStage& stage,
    const std::vector<NamedTensor>& parameters, int replica, int replicas) {
  auto group = ProcessGroup::Create({.name = absl::StrCat("stage ", number),
                                     .store = worker->store(),
                                     .rank = replica,
                                     .size = replicas,
                                     .host = worker->host(),
                                     .cluster_key = worker->cluster_key(),
                                     .certificates = worker->certificates()});
  if (!group.ok()) return group.status();
  auto averager = GradientAverager::Create(*group, parameters, {}, {.in_backward = false});
  if (!averager.ok()) return averager.status();
  return PipelineStages::Create(worker, "model", {{number, stage}},
                                {.averager = *std::move(averager)});
}
// [doc: end]

TEST(PipelinesPageTest, TwoStagesLearn) {
  at::manual_seed(1);
  Cluster cluster({.workers = 2});
  const std::vector<torch::nn::Linear> layers = {torch::nn::Linear(4, 4), torch::nn::Linear(4, 1)};
  std::vector<absl::StatusOr<Part>> parts(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] { parts[i] = CreatePart(&cluster[i], i, layers[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::StatusOr<Part>& part : parts) ASSERT_TRUE(part.ok()) << part.status();

  const at::Tensor inputs = at::rand({16, 4}), targets = at::zeros({16, 1});
  Optimizer* const optimizer = parts[0]->optimizer.get();
  const absl::StatusOr<double> first = Train(&cluster[0], optimizer, inputs, targets, 1);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::StatusOr<double> last = Train(&cluster[0], optimizer, inputs, targets, 100);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_LT(*last, *first / 2);
}

TEST(PipelinesPageTest, StepsInFlightLearn) {
  at::manual_seed(1);
  Cluster cluster({.workers = 2});
  std::vector<torch::nn::Linear> layers = {torch::nn::Linear(4, 4), torch::nn::Linear(4, 1)};
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int i = 0; i < 2; ++i) {
    PipelineStage stage;
    stage.forward = [layer = layers[i]](std::vector<at::Tensor> x) mutable {
      return std::vector{at::tanh(layer(x[0]))};
    };
    stage.loss = [](std::vector<at::Tensor> out, std::vector<at::Tensor> y) {
      return at::mse_loss(out[0], y[0]);
    };
    stage.step = StepOf(layers[i]);
    auto made = PipelineStages::Create(&cluster[i], "model", {{i, stage}});
    ASSERT_TRUE(made.ok()) << made.status();
    stages.push_back(*std::move(made));
  }
  const auto pipeline = Pipeline::Create(&cluster[0], {.name = "model",
                                                       .workers = {"worker0", "worker1"},
                                                       .schedule = WithSteps(*ZeroBubbleH2(2, 4))});
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  const at::Tensor inputs = at::rand({16, 4}), targets = at::zeros({16, 1});
  const auto first = TrainInFlight(&cluster[0], pipeline->get(), inputs, targets, 1);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto last = TrainInFlight(&cluster[0], pipeline->get(), inputs, targets, 100);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_LT(*last, *first / 2);
}

TEST(PipelinesPageTest, AStageIsGivenANestedBatch) {
  Cluster cluster({.workers = 1});
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 1).bias(false));
  const Batch batch = {at::rand({6, 4}), {{"unused", at::rand({6})}, {"weight", at::rand({6, 1})}}};
  PipelineStage stage = WeightedRows(batch, layer);
  stage.loss = [](std::vector<at::Tensor> outputs, std::vector<at::Tensor>) {
    return outputs[0].sum();
  };
  stage.targets = 0;
  const auto stages = PipelineStages::Create(&cluster[0], "model", {{0, stage}});
  ASSERT_TRUE(stages.ok()) << stages.status();
  const auto pipeline =
      Pipeline::Create(&cluster[0], {.name = "model",
                                     .workers = {WorkerName(0)},
                                     .schedule = *GPipe(1, 4),  // of 2, 2, 1 and 1 rows
                                     .reduction = PipelineOptions::Reduction::kSum});
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  const Context context = cluster[0].NewContext();
  const auto result = (*pipeline)->Train(context, TensorsOf(batch), {});
  ASSERT_TRUE(result.ok()) << result.status();
  const absl::StatusOr<at::Tensor> gradient = context.Gradient(layer->weight);
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  EXPECT_TRUE(at::allclose(*gradient, batch.second.at("weight").t().matmul(batch.first)));
}

TEST(PipelinesPageTest, ReplicasHaveTheSameGradients) {
  Cluster cluster({.workers = 2});  // each has a replica, of one stage
  std::vector<at::Tensor> gradients(2);
  std::vector<std::thread> threads;
  for (int replica = 0; replica < 2; ++replica) {
    threads.emplace_back([&, replica] {
      Worker* const worker = &cluster[replica];
      const at::Tensor weight = at::zeros({2, 1}).requires_grad_();
      PipelineStage stage;
      stage.forward = [weight](std::vector<at::Tensor> inputs) {
        return std::vector{inputs[0].matmul(weight)};
      };
      stage.loss = [](std::vector<at::Tensor> outputs, std::vector<at::Tensor>) {
        return outputs[0].sum();
      };
      stage.targets = 0;
      const auto stages = CreateReplica(worker, 0, stage, {{"weight", weight}}, replica, 2);
      ASSERT_TRUE(stages.ok()) << stages.status();
      const auto pipeline =
          Pipeline::Create(worker, {.name = "model",
                                    .workers = {WorkerName(replica)},
                                    .schedule = *GPipe(1, 2),
                                    .reduction = PipelineOptions::Reduction::kSum});
      ASSERT_TRUE(pipeline.ok()) << pipeline.status();
      const Context context = worker->NewContext();
      // The gradient of each replica is the sum of its rows: 4, and 12.
      const auto result =
          (*pipeline)->Train(context, {at::full({4, 2}, replica == 0 ? 1.0 : 3.0)}, {});
      ASSERT_TRUE(result.ok()) << result.status();
      const absl::StatusOr<at::Tensor> gradient = context.Gradient(weight);
      ASSERT_TRUE(gradient.ok()) << gradient.status();
      gradients[replica] = *gradient;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const at::Tensor& gradient : gradients) {
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(at::allclose(gradient, at::full({2, 1}, 8.0)));
  }
}

}  // namespace
}  // namespace distgrad
