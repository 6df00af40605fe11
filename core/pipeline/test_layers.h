// A model of equal layers, split into the stages of a pipeline, for its tests.
#ifndef DISTGRAD_CORE_PIPELINE_TEST_LAYERS_H_
#define DISTGRAD_CORE_PIPELINE_TEST_LAYERS_H_

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "tests/testing/cluster.h"

namespace distgrad {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor Loss(Tensors outputs, Tensors targets) {
  return at::mse_loss(outputs[0], targets[0]);
}

// Layers of the same size, one for each stage. A row is 64 bytes: the last bits of a product depend
// on how its operands are aligned, and parts of a batch are then as aligned as what was sent.
struct EqualLayers {
  explicit EqualLayers(int count) {
    for (int i = 0; i < count; ++i) {
      weights.push_back((at::randn({16, 16}) * 0.5).requires_grad_(true));
      biases.push_back((at::randn({16}) * 0.5).requires_grad_(true));
    }
  }
  Tensors Forward(int stage, const Tensors& in) const {
    TORCH_CHECK(in.size() == 1, "a layer has one input, and not ", in.size());
    return {at::tanh(at::linear(in[0], weights[stage], biases[stage]))};
  }
  EqualLayers Copy() const {
    EqualLayers copy(0);
    for (const at::Tensor& t : weights) copy.weights.push_back(t.detach().clone().requires_grad_());
    for (const at::Tensor& t : biases) copy.biases.push_back(t.detach().clone().requires_grad_());
    return copy;
  }
  Tensors Of(int stage) const { return {weights[stage], biases[stage]}; }

  Tensors weights, biases;
};

// The stages of all workers, by worker.
inline std::vector<std::unique_ptr<PipelineStages>> CreateStages(
    Cluster& cluster, std::vector<std::map<int, PipelineStage>> stages) {
  std::vector<std::unique_ptr<PipelineStages>> made;
  for (int i = 0; i < cluster.size(); ++i) {
    auto one = PipelineStages::Create(&cluster[i], "model", std::move(stages[i]));
    EXPECT_TRUE(one.ok()) << one.status();
    made.push_back(*std::move(one));
  }
  return made;
}

// The stages of all workers, each from one function, with a loss on the last one.
inline std::vector<std::unique_ptr<PipelineStages>> MakeStages(
    Cluster& cluster, const std::vector<int>& worker_of_stage,
    const std::function<Tensors(int stage, Tensors in)>& forward,
    const std::function<at::Tensor(Tensors, Tensors)>& loss = Loss) {
  std::vector<std::map<int, PipelineStage>> stages(cluster.size());
  for (int s = 0; s < static_cast<int>(worker_of_stage.size()); ++s) {
    stages[worker_of_stage[s]][s] = {
        .forward = [forward, s](Tensors in) { return forward(s, std::move(in)); },
        .loss = loss,
        .inputs = std::nullopt};
  }
  return CreateStages(cluster, std::move(stages));
}

inline std::vector<std::string> Names(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(WorkerName(i));
  return names;
}

inline std::unique_ptr<Pipeline> MakePipeline(
    Cluster& cluster, Schedule schedule,
    PipelineOptions::Reduction reduction = PipelineOptions::Reduction::kMean) {
  auto made = Pipeline::Create(&cluster[0], {.name = "model",
                                             .workers = Names(schedule.ranks()),
                                             .schedule = schedule,
                                             .reduction = reduction});
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

// A copy of a tensor. On the way back `call` is called, which outlives that; the backward throws
// what it throws.
struct CallOnTheWayBack : torch::autograd::Function<CallOnTheWayBack> {
  using Call = std::function<void()>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a,
                            const Call* call) {
    context->saved_data["call"] = reinterpret_cast<int64_t>(call);
    return a.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<const Call*>(context->saved_data["call"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

struct Case {
  std::string name;
  Schedule schedule;
};

inline std::vector<Case> Cases() {
  return {{"GPipe", *GPipe(3, 4)},
          {"1F1B", *OneForwardOneBackward(3, 4)},
          {"interleaved", *InterleavedOneForwardOneBackward(2, 2, 4)},
          {"interleaved, uneven", *InterleavedOneForwardOneBackward(2, 2, 3)},
          {"ZB-H1", *ZeroBubbleH1(3, 4)},
          {"ZB-H2", *ZeroBubbleH2(3, 5)},
          {"one stage", *OneForwardOneBackward(1, 2)},
          {"more stages than micro-batches", *ZeroBubbleH1(3, 1)}};
}

// A step of one process: the same micro-batches, one after the other.
inline Tensors StepAlone(const EqualLayers& layers, int stages, int micro_batches, bool mean,
                         const at::Tensor& x, const at::Tensor& y) {
  Tensors losses;
  const Tensors xs = x.tensor_split(micro_batches), ys = y.tensor_split(micro_batches);
  for (int m = 0; m < micro_batches; ++m) {
    Tensors at{xs[m]};
    for (int s = 0; s < stages; ++s) at = layers.Forward(s, at);
    const at::Tensor loss = Loss(at, {ys[m]});
    const double weight =
        mean ? static_cast<double>(xs[m].size(0)) / static_cast<double>(x.size(0)) : 1.0;
    loss.backward(at::full_like(loss, weight));
    losses.push_back(loss.detach());
  }
  return losses;
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_TEST_LAYERS_H_
