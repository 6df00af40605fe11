// Trains replicas of a model, one in each of three processes, each with data of its own: gradients
// are averaged, so that the replicas stay the same. They learn the line y = 3 x - 1.
#include <iostream>
#include <stdexcept>
#include <vector>

#include "job.h"

namespace {

void Train(dg::Worker& worker) {
  dg::ManualSeed(worker.rank());  // data of its own
  dg::Tensor slope = dg::Tensor::From<float>({0}, {1}), offset = dg::Tensor::From<float>({0}, {1});
  slope.RequireGrad();
  offset.RequireGrad();
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = 0.1;
  dg::Optimizer optimizer(worker, "sgd", {slope, offset}, options);
  dg::ProcessGroup group(worker);
  dg::GradientAverager averager(group, {slope, offset});
  worker.Barrier();
  float loss = 0;
  for (int step = 0; step < 200; ++step) {
    const dg::Tensor x = dg::Op("aten::randn", {std::vector<int64_t>{16}});
    const dg::Tensor y = dg::Op("aten::sub.Scalar", {dg::Op("aten::mul.Scalar", {x, 3}), 1});
    const dg::Context context(worker);
    const dg::Tensor guess =
        dg::Op("aten::add.Tensor", {dg::Op("aten::mul.Tensor", {x, slope}), offset});
    const dg::Tensor error = dg::Op("aten::mse_loss", {guess, y});
    averager.AverageInBackward(context);
    context.Backward({error});
    averager.Average(context);
    optimizer.Step(context);
    loss = *error.data<float>();
  }
  std::cout << "replica " << worker.rank() << ": y = " << *slope.data<float>() << " x + "
            << *offset.data<float>() << std::endl;
  if (!(loss < 1e-3f)) throw std::runtime_error("it has not learned");
}

}  // namespace

int main() { return RunJob(3, Train); }
