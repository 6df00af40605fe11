// Training on several devices is training on one: the same model, seed and optimizer, twenty
// steps. What the devices do part by part is done part by part on one device here, and then every
// parameter is equal to the last bit; against the whole batch at once, whose sums are added in
// another order, it is close.
#include "core/parallel/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;

constexpr int kSteps = 20;
const c10::Device kHost(c10::kCPU);

struct ModelImpl : nn::Cloneable<ModelImpl> {
  ModelImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(8, 16));
    tied = register_module("tied", nn::Linear(16, 16));
    last = register_module("last", nn::Linear(16, 4));
  }
  Tensor forward(const Tensor& x) {
    return last(torch::tanh(tied(torch::tanh(tied(torch::relu(first(x)))))));
  }
  nn::Linear first{nullptr}, tied{nullptr}, last{nullptr};
};
TORCH_MODULE(Model);

using NewOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;

struct NamedOptimizer {
  std::string name;
  NewOptimizer make;
};

const std::vector<NamedOptimizer> kOptimizers = {
    {"Sgd",
     [](std::vector<Tensor> parameters) {
       return std::make_unique<torch::optim::SGD>(
           parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(1e-3));
     }},
    {"Adam",
     [](std::vector<Tensor> parameters) {
       return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
     }},
    {"AdamW",
     [](std::vector<Tensor> parameters) {
       return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
     }},
};

struct NamedDevices {
  std::string name;
  c10::Device home;
  std::vector<c10::Device> devices;
};

const std::vector<NamedDevices> kDevices = {
    {"TwoHosts", kHost, {kHost, kHost}},
    {"FourHosts", kHost, {kHost, kHost, kHost, kHost}},
    {"ThreeAccelerators",
     fake_device::Device(0),
     {fake_device::Device(0), fake_device::Device(1), fake_device::Device(2)}},
    {"HostAndAccelerators", kHost, {kHost, fake_device::Device(0), fake_device::Device(0)}},
};

class DataParallelTraining
    : public testing::TestWithParam<std::tuple<NamedOptimizer, NamedDevices>> {
 protected:
  const NamedOptimizer& optimizer() const { return std::get<0>(GetParam()); }
  const NamedDevices& devices() const { return std::get<1>(GetParam()); }

  static Model NewModel(c10::Device device) {
    torch::manual_seed(5);
    Model model;
    model->to(device);
    return model;
  }
  // 11 rows: uneven parts.
  static std::pair<Tensor, Tensor> Batch(int step) {
    torch::manual_seed(100 + step);
    return {torch::rand({11, 8}), torch::rand({11, 4})};
  }
};

INSTANTIATE_TEST_SUITE_P(All, DataParallelTraining,
                         testing::Combine(testing::ValuesIn(kOptimizers),
                                          testing::ValuesIn(kDevices)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + std::get<1>(info.param).name;
                         });

// The sums of the parts' gradients, in the order of the parts.
void BackwardPartByPart(Model model, const Tensor& batch, const Tensor& target, int64_t parts) {
  std::vector<Tensor> outputs, leaves;
  for (const Tensor& part : batch.chunk(parts)) {
    outputs.push_back(model->forward(part));
    leaves.push_back(outputs.back().detach().requires_grad_());
  }
  torch::mse_loss(torch::cat(leaves), target).backward();
  for (size_t i = 0; i < outputs.size(); ++i) outputs[i].backward(leaves[i].grad());
}

TEST_P(DataParallelTraining, EqualsOneDevice) {
  Model model = NewModel(devices().home), by_parts = NewModel(kHost), whole = NewModel(kHost);
  DataParallel parallel(model, {.devices = devices().devices,
                                .output_device = kHost,
                                .replicas = {.bucket_bytes = 1024, .first_bucket_bytes = 256}});
  const auto a = optimizer().make(model->parameters());
  const auto b = optimizer().make(by_parts->parameters());
  const auto c = optimizer().make(whole->parameters());
  for (int step = 0; step < kSteps; ++step) {
    const auto [batch, target] = Batch(step);
    a->zero_grad();
    torch::mse_loss(parallel.Forward(batch), target).backward();
    a->step();
    b->zero_grad();
    BackwardPartByPart(by_parts, batch, target, static_cast<int64_t>(devices().devices.size()));
    b->step();
    c->zero_grad();
    torch::mse_loss(whole->forward(batch), target).backward();
    c->step();
  }
  for (const auto& item : model->named_parameters()) {
    const Tensor got = item.value().detach().cpu();
    EXPECT_TRUE(got.equal(by_parts->named_parameters()[item.key()])) << item.key();
    EXPECT_TRUE(torch::allclose(got, whole->named_parameters()[item.key()], 1e-3, 1e-4))
        << item.key();
  }
  EXPECT_FALSE(
      model->first->weight.detach().cpu().equal(NewModel(kHost)->first->weight));  // it trained
  const std::vector<std::string> violations = fake_device::TakeViolations();
  EXPECT_TRUE(violations.empty()) << violations[0];
}

}  // namespace
}  // namespace distgrad
