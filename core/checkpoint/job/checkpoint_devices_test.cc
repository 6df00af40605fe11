// Checkpoints of tensors on accelerators, loaded onto the CPU and onto other accelerators:
// simulated ones (tests/testing/fake_device), which see whether all is asked for in the right
// order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adam.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/checkpoint/job/checkpoint_folder.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

// What a worker trains, on one device.
struct ModelOnDevice {
  ModelOnDevice(const c10::Device& device, double value)
      : weight(at::full({10, 3}, value).to(device).requires_grad_()),
        // More than is copied at once, and not in row-major order.
        table(at::arange(5'000'000, at::kFloat).view({2, -1}).t().mul(value).to(device)),
        adam({weight}, torch::optim::AdamOptions(0.1)) {}
  void Step() {
    weight.mutable_grad() = at::full_like(weight, 0.25).detach();
    adam.step();
  }
  CheckpointContents Contents(const std::string& name) {
    return {.tensors = {{name + ".weight", weight}, {name + ".table", table}},
            .optimizers = {{"adam", &adam}}};
  }

  at::Tensor weight, table;
  torch::optim::Adam adam;
};

using CheckpointDevicesTest = CheckpointFolderTest;

TEST_F(CheckpointDevicesTest, WhatOneDeviceHasSavedAnotherLoads) {
  const c10::Device cpu(c10::kCPU), zero = fake_device::Device(0), one = fake_device::Device(1);
  struct Case {
    std::vector<c10::Device> from, to;  // of each worker
    bool async;
  };
  for (const auto& [from, to, async] :
       {Case{{zero, one}, {cpu, cpu}, false}, Case{{zero, one}, {one, zero}, true},
        Case{{cpu, zero}, {zero, zero}, true}, Case{{cpu, cpu}, {zero, one}, false}}) {
    SCOPED_TRACE(absl::StrCat("from ", from[0].str(), " and ", from[1].str(), " to ", to[0].str(),
                              " and ", to[1].str()));
    std::vector<std::unique_ptr<ModelOnDevice>> models, others;
    for (const bool loads : {false, true}) {
      Cluster cluster({.workers = 2});
      std::vector<std::unique_ptr<CheckpointPart>> parts;
      for (int i = 0; i < 2; ++i) {
        auto& mine = loads ? others : models;
        mine.push_back(std::make_unique<ModelOnDevice>((loads ? to : from)[i], loads ? -1 : i + 2));
        if (!loads) mine[i]->Step();
        absl::StatusOr<std::unique_ptr<CheckpointPart>> part =
            CheckpointPart::Create(&cluster[i], mine[i]->Contents(absl::StrCat("model", i)));
        ASSERT_TRUE(part.ok()) << part.status();
        parts.push_back(*std::move(part));
      }
      const absl::StatusOr<std::unique_ptr<CheckpointManager>> manager =
          CheckpointManager::Create(&cluster[0], folder_);
      ASSERT_TRUE(manager.ok()) << manager.status();
      if (loads) {
        const absl::StatusOr<LoadedCheckpoint> loaded = (*manager)->Load();
        ASSERT_TRUE(loaded.ok()) << loaded.status();
      } else if (async) {
        const absl::StatusOr<Future<Unit>> saved = (*manager)->SaveAsync(1);
        ASSERT_TRUE(saved.ok()) << saved.status();
        for (const auto& model : models) model->Step();  // while that is written
        ASSERT_TRUE(saved->Wait().ok()) << saved->Wait().status();
      } else {
        const absl::Status saved = (*manager)->Save(1);
        ASSERT_TRUE(saved.ok()) << saved;
        for (const auto& model : models) model->Step();
      }
    }
    for (int i = 0; i < 2; ++i) {
      others[i]->Step();  // the one that the others have taken since
      EXPECT_EQ(others[i]->weight.device(), to[i]);
      EXPECT_TRUE(at::equal(others[i]->weight.cpu(), models[i]->weight.cpu())) << i;
      EXPECT_TRUE(at::equal(others[i]->table.cpu(), models[i]->table.cpu())) << i;
    }
    for (const std::string& violation : fake_device::TakeViolations()) ADD_FAILURE() << violation;
  }
}

}  // namespace
}  // namespace distgrad
