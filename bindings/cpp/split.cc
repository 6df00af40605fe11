// Trains a model that is split over two processes: its first layer is on worker 0, with the data,
// and its second one on worker 1. It learns which points of a square lie within a circle.
#include <cmath>
#include <iostream>
#include <random>
#include <stdexcept>
#include <vector>

#include "job.h"

namespace {

struct Linear {
  dg::Tensor weight, bias;

  Linear(int64_t inputs, int64_t outputs)
      : weight(dg::Op("aten::randn", {std::vector<int64_t>{outputs, inputs}})),
        bias(dg::Op("aten::zeros", {std::vector<int64_t>{outputs}})) {
    weight.RequireGrad();
    bias.RequireGrad();
  }
  dg::Tensor operator()(const dg::Tensor& x) const {
    return dg::Op("aten::linear", {x, weight, bias});
  }
};

struct Batch {
  dg::Tensor points, labels;
};

Batch NewBatch(std::mt19937& random) {
  constexpr int64_t kPoints = 100;
  std::uniform_real_distribution<float> coordinate(-1, 1);
  std::vector<float> points(2 * kPoints);
  std::vector<int64_t> labels(kPoints);
  for (float& x : points) x = coordinate(random);
  for (size_t i = 0; i < kPoints; ++i)
    labels[i] = std::hypot(points[2 * i], points[2 * i + 1]) < 0.8;
  return {dg::Tensor::From<float>(points, {kPoints, 2}),
          dg::Tensor::From<int64_t>(labels, {kPoints})};
}

// One step: forward through both workers, backward through both, an optimizer step on both.
float Step(dg::Worker& worker, const Linear& layer, dg::Optimizer& optimizer, const Batch& batch) {
  const dg::Context context(worker);
  const dg::Tensor hidden = dg::Op("aten::tanh", {layer(batch.points)});
  const dg::Message reply = worker.Call("worker1", "classify", dg::Message("", {hidden}), &context);
  const dg::Tensor loss = dg::Op("aten::cross_entropy_loss", {reply.tensor(0), batch.labels});
  context.Backward({loss});
  optimizer.Step(context);
  return *loss.data<float>();
}

void Train(dg::Worker& worker) {
  constexpr int64_t kHidden = 32;
  dg::ManualSeed(worker.rank());
  const Linear layer = worker.rank() == 0 ? Linear(2, kHidden) : Linear(kHidden, 2);
  dg_adam_options options = DG_ADAM_OPTIONS_INIT;
  options.learning_rate = 0.02;
  dg::Optimizer optimizer =
      dg::Optimizer::Adam(worker, "adam", {layer.weight, layer.bias}, options);
  worker.Register("classify", [&layer](const dg::Request& request) {
    return dg::Message("", {layer(request.tensor(0))});
  });
  worker.Barrier();
  if (worker.rank() == 0) {
    std::mt19937 random(1);  // NOLINT: the same batches each time
    float mean = 0;          // of the latest losses
    for (int step = 0; step < 300; ++step) {
      const float loss = Step(worker, layer, optimizer, NewBatch(random));
      mean = step == 0 ? loss : 0.95f * mean + 0.05f * loss;
      if (step % 50 == 49) std::cout << "step " << step + 1 << ": loss " << mean << std::endl;
    }
    if (!(mean < 0.2f)) throw std::runtime_error("it has not learned");
  }
  worker.Barrier();  // worker 1 serves until then, for the handler uses what is here
}

}  // namespace

int main() { return RunJob(2, Train); }
