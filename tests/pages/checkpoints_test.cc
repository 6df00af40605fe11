// What docs/checkpoints.md shows of C++.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/future.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "core/checkpoint/optimizer_checkpoint.h"
#include "core/checkpoint/safetensors.h"
#include "core/worker/optimizer.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

// [doc: part]
// On every worker, before the first save or load: what it has.
absl::StatusOr<std::unique_ptr<CheckpointPart>> CreatePart(Worker* worker,
                                                           const TensorMap& parameters_and_buffers,
                                                           const Optimizer* optimizer, int* epoch) {
  const auto save_values = [epoch] { return CheckpointValues{{"epoch", absl::StrCat(*epoch)}}; };
  const auto load_values = [epoch](const LoadedValues& loaded) {
    const auto found = loaded.values.find("epoch");
    const bool read = found != loaded.values.end() && absl::SimpleAtoi(found->second, epoch);
    return read ? absl::OkStatus() : absl::DataLossError("the checkpoint has no epoch");
  };
  return CheckpointPart::Create(worker, {.tensors = parameters_and_buffers,
                                         .optimizers = {{"sgd", optimizer}},  // ours, or libtorch's
                                         .save_values = save_values,
                                         .load_values = load_values});
}
// [doc: end]

// [doc: train]
// On one of them: goes on from the newest checkpoint of the folder, and saves after each step.
absl::Status TrainUntil(Worker* worker, const std::string& folder, int64_t steps,
                        absl::FunctionRef<absl::Status()> step) {
  auto checkpoints = CheckpointManager::Create(worker, folder, {.keep = 3});
  if (!checkpoints.ok()) return checkpoints.status();
  int64_t done = 0;
  const absl::StatusOr<LoadedCheckpoint> loaded = (*checkpoints)->Load();
  if (loaded.ok()) {
    done = loaded->step;
  } else if (!absl::IsNotFound(loaded.status())) {  // there is none: it begins at step 0
    return loaded.status();
  }
  std::optional<Future<Unit>> written;
  while (done < steps) {
    const absl::Status stepped = step();
    if (!stepped.ok()) return stepped;
    // Returns when all have copied theirs, and writes while the next step runs. Save() returns when
    // it is written.
    const absl::StatusOr<Future<Unit>> writing = (*checkpoints)->SaveAsync(++done);
    if (!writing.ok()) return writing.status();
    written = *writing;
  }
  return written ? written->Wait().status() : absl::OkStatus();
}
// [doc: end]

// [doc: files]
absl::Status SaveAndLoad(const at::Tensor& weight, const at::Tensor& bias,
                         const std::string& path) {
  const TensorMap tensors = {{"fc.weight", weight}, {"fc.bias", bias}};
  const absl::Status saved = SaveSafetensors(tensors, path, {{"format", "pt"}});
  if (!saved.ok()) return saved;
  const absl::StatusOr<TensorMap> loaded = LoadSafetensors(path);  // by name, on the CPU
  if (!loaded.ok()) return loaded.status();
  return LoadSafetensorsInto(path, tensors);  // into these tensors
}
// [doc: end]

// [doc: optimizer]
// As Python's named_parameters().
TensorMap NamedParameters(const torch::nn::Module& model) {
  TensorMap parameters;
  for (const auto& each : model.named_parameters()) parameters[each.key()] = each.value();
  return parameters;
}

absl::Status Save(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                  const std::string& path) {
  return SaveOptimizer(optimizer, NamedParameters(model), path);
}

absl::Status Load(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                  const std::string& path) {
  return LoadOptimizer(path, NamedParameters(model), &optimizer);
}
// [doc: end]

std::string TestPath(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
}

// A job of one worker, whose step takes 1 from each of two numbers.
struct Job {
  explicit Job(double begin) : weight(at::full({2}, begin).requires_grad_()) {
    auto made = Optimizer::Create(
        &worker(), std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{weight}, /*lr=*/1));
    EXPECT_TRUE(made.ok()) << made.status();
    optimizer = *std::move(made);
  }
  Worker& worker() { return cluster[0]; }
  absl::Status Step() {
    const Context context = worker().NewContext();
    const absl::Status backward = context.Backward({weight.sum()});
    ++epoch;
    return backward.ok() ? optimizer->Step(context) : backward;
  }

  Cluster cluster{{.workers = 1}};
  at::Tensor weight;
  std::unique_ptr<Optimizer> optimizer;
  int epoch = 0;
};

TEST(CheckpointsPageTest, ARunGoesOnWhereTheLastOneEnded) {
  for (const int64_t steps : {3, 5}) {
    Job job(10);
    const auto part =
        CreatePart(&job.worker(), {{"weight", job.weight}}, job.optimizer.get(), &job.epoch);
    ASSERT_TRUE(part.ok()) << part.status();
    const absl::Status ran =
        TrainUntil(&job.worker(), TestPath("run"), steps, [&job] { return job.Step(); });
    ASSERT_TRUE(ran.ok()) << ran;
    EXPECT_TRUE(at::equal(job.weight.detach(), at::full({2}, 10.0 - static_cast<double>(steps))));
    EXPECT_EQ(job.epoch, steps);
  }
}

TEST(CheckpointsPageTest, FilesOfTensors) {
  const at::Tensor weight = at::rand({2, 3}), bias = at::rand({2});
  const std::string path = TestPath("model.safetensors");
  const absl::Status status = SaveAndLoad(weight, bias, path);
  ASSERT_TRUE(status.ok()) << status;
  const absl::StatusOr<TensorMap> loaded = LoadSafetensors(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(at::equal(loaded->at("fc.weight"), weight));
  EXPECT_TRUE(at::equal(loaded->at("fc.bias"), bias));
}

TEST(CheckpointsPageTest, TheStateOfAnOptimizer) {
  torch::nn::Linear model(3, 2);
  torch::optim::Adam trained(model->parameters()), fresh(model->parameters());
  model->forward(at::rand({4, 3})).sum().backward();
  trained.step();
  EXPECT_EQ(fresh.state().size(), 0);
  const std::string path = TestPath("optimizer.safetensors");
  absl::Status status = Save(*model, trained, path);
  ASSERT_TRUE(status.ok()) << status;
  status = Load(*model, fresh, path);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(fresh.state().size(), trained.state().size());
}

}  // namespace
}  // namespace distgrad
