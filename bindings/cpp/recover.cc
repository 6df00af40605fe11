// A job that saves checkpoints, goes on from the last one, and survives the loss of a process.
//
//   recover FOLDER [KILL_AT]
//
// It learns the line y = 3 x - 1 in 100 steps: worker 0 has the slope, and worker 1 the offset.
// At step KILL_AT worker 1 is killed. A second run with the same FOLDER goes on from the first.
#include <signal.h>

#include <chrono>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "job.h"

namespace {

constexpr int kSteps = 100, kEvery = 20;

// One step over both processes. Returns the loss of its batch.
float Step(dg::Worker& worker, const dg::Tensor& slope, dg::Optimizer& optimizer, int step) {
  dg::ManualSeed(static_cast<uint64_t>(step));  // a step that is taken again has the same batch
  const dg::Tensor x = dg::Op("aten::randn", {std::vector<int64_t>{16}});
  const dg::Tensor y = dg::Op("aten::sub.Scalar", {dg::Op("aten::mul.Scalar", {x, 3}), 1});
  const dg::Context context(worker);
  const dg::Tensor product = dg::Op("aten::mul.Tensor", {x, slope});
  const dg::Message sum = worker.Call("worker1", "add", dg::Message("", {product}), &context);
  const dg::Tensor loss = dg::Op("aten::mse_loss", {sum.tensor(0), y});
  context.Backward({loss});
  optimizer.Step(context);
  return *loss.data<float>();
}

// [doc: resume]
// Loads the newest checkpoint, and returns its step. If there is none, saves what there is as that
// of step 0: something to come back to.
int Resume(dg::CheckpointManager& checkpoints) {
  try {
    return static_cast<int>(checkpoints.Load().step);
  } catch (const dg::Error& error) {
    if (error.code() != DG_NOT_FOUND) throw;
    checkpoints.Save(0);
    return 0;
  }
}
// [doc: end]

// [doc: train]
void Train(dg::Worker& worker, const dg::Tensor& slope, dg::Optimizer& optimizer,
           const std::string& folder, int kill_at) {
  dg::CheckpointManager checkpoints(worker, folder);
  const auto in_a_minute = [] {
    return std::chrono::steady_clock::now() + std::chrono::minutes(1);
  };
  auto give_up = in_a_minute();
  bool ready = false;
  int step = 0;
  while (step < kSteps) {
    try {
      if (!ready) {
        step = Resume(checkpoints);
        ready = true;
        std::cout << "going on from step " << step << std::endl;
        continue;
      }
      if (step == kill_at) {
        kill_at = -1;  // once
        worker.Call("worker1", "die", dg::Message());
      }
      const float loss = Step(worker, slope, optimizer, step);
      if (++step % kEvery != 0) continue;
      checkpoints.Save(step);
      std::cout << "step " << step << ": loss " << loss << std::endl;
    } catch (const dg::Error& error) {
      // Worker 1 is gone, or is there and has not created its part yet.
      if (error.code() != DG_UNAVAILABLE && error.code() != DG_FAILED_PRECONDITION) throw;
      if (ready) {
        std::cout << "step " << step << " has failed: " << error.what() << std::endl;
        give_up = in_a_minute();
        ready = false;
      }
      if (std::chrono::steady_clock::now() > give_up) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // before it tries again
    }
  }
}
// [doc: end]

// [doc: part]
void Run(dg::Worker& worker, const std::string& folder, int kill_at) {
  dg::Tensor parameter = dg::Tensor::From<float>({0}, {1});
  parameter.RequireGrad();
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = 0.02;
  options.momentum = 0.5;
  dg::Optimizer optimizer(worker, "sgd", {parameter}, options);
  worker.Register("add", [parameter](const dg::Request& request) {
    return dg::Message("", {dg::Op("aten::add.Tensor", {request.tensor(0), parameter})});
  });
  worker.Register("die", [](const dg::Request&) -> dg::Message {
    raise(SIGKILL);  // as the kernel does where memory is out
    return dg::Message();
  });
  // Last, for whoever finds this part finds all of the above.
  dg::CheckpointContents contents;
  contents.tensors = {{worker.rank() == 0 ? "slope" : "offset", parameter}};
  contents.optimizers = {{"sgd", &optimizer}};
  const dg::CheckpointPart part(worker, contents);
  if (worker.rank() == 0) Train(worker, parameter, optimizer, folder, kill_at);
}
// [doc: end]

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "recover FOLDER [KILL_AT]" << std::endl;
    return 2;
  }
  const std::string folder = argv[1];
  const int kill_at = argc > 2 ? std::stoi(argv[2]) : -1;
  const auto run = [&](dg::Worker& worker) { Run(worker, folder, kill_at); };
  return RunJob(2, run, /*restarts=*/1);
}
