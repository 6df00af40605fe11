// Trains a model whose two layers are in two processes, as a pipeline: each batch is cut into
// micro-batches, and while one process computes one of them, the other computes another.
#include <iostream>
#include <stdexcept>
#include <vector>

#include "job.h"

namespace {

dg::Tensor RandomMatrix(int64_t rows, int64_t columns) {
  return dg::Op("aten::randn", {std::vector<int64_t>{rows, columns}});
}

// [doc: stage]
// Lets the pipeline "model" use this process's stage: worker 0 has stage 0, worker 1 has stage 1.
dg::PipelineStages AddStage(dg::Worker& worker, const dg::Tensor& weight) {
  dg::PipelineStage stage;
  stage.forward = [weight](const std::vector<dg::Tensor>& inputs) {
    const dg::Tensor product = dg::Op("aten::matmul", {inputs[0], weight});
    return std::vector<dg::Tensor>{dg::Op("aten::tanh", {product})};
  };
  // Of the last stage.
  stage.loss = [](const std::vector<dg::Tensor>& outputs, const std::vector<dg::Tensor>& targets) {
    return dg::Op("aten::mse_loss", {outputs[0], targets[0]});
  };
  return dg::PipelineStages(worker, "model", {{worker.rank(), stage}});
}
// [doc: end]

// [doc: train]
// Returns the loss of each step.
std::vector<float> TrainBatches(dg::Worker& worker, dg::Optimizer& optimizer) {
  const dg::Schedule schedule = dg::Schedule::OneForwardOneBackward(2, 4);  // stages, micro-batches
  const dg::Pipeline pipeline(worker, "model", schedule, {"worker0", "worker1"});
  const dg::Tensor x = RandomMatrix(64, 16), y = RandomMatrix(64, 16);
  std::vector<float> losses;
  for (int step = 0; step < 300; ++step) {
    const dg::Context context(worker);
    const dg::PipelineResult result = pipeline.Train(context, {x}, {y});
    optimizer.Step(context);  // on both processes
    losses.push_back(*result.loss.data<float>());
  }
  return losses;
}
// [doc: end]

void Train(dg::Worker& worker) {
  dg::ManualSeed(worker.rank());
  dg::Tensor weight = RandomMatrix(16, 16);
  weight.RequireGrad();
  dg_adam_options options = DG_ADAM_OPTIONS_INIT;
  options.learning_rate = 0.01;
  dg::Optimizer optimizer = dg::Optimizer::Adam(worker, "adam", {weight}, options);
  const dg::PipelineStages stages = AddStage(worker, weight);
  worker.Barrier();  // both have their stages
  if (worker.rank() == 0) {
    const std::vector<float> losses = TrainBatches(worker, optimizer);
    std::cout << "the loss was " << losses.front() << ", and is " << losses.back() << std::endl;
    if (!(losses.back() < 0.8f * losses.front())) throw std::runtime_error("it has not learned");
  }
  worker.Barrier();  // until then worker 1 answers
}

}  // namespace

int main() { return RunJob(2, Train); }
