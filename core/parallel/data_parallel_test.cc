// Outputs and gradients of replicas, compared with those of the module alone.
#include "core/parallel/data_parallel.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <functional>
#include <string>

#include "core/parallel/new_device_collectives.h"
#include "core/parallel/replicas.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;
using testing::HasSubstr;
using testing::IsEmpty;

const c10::Device kHost(c10::kCPU);

// Shared, frozen and unused parameters, and buffers.
struct NetImpl : nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(4, 6));
    norm = register_module("norm", nn::BatchNorm1d(6));
    tied = register_module("tied", nn::Linear(6, 6));
    tied_again = register_module("tied_again", tied);
    last = register_module("last", nn::Linear(6, 3));
    unused = register_parameter("unused", torch::ones({5}));
    frozen = register_parameter("frozen", torch::full({6}, 0.5), /*requires_grad=*/false);
    calls = register_buffer("calls", torch::zeros({1}, torch::kLong));
    mean = register_buffer("mean", torch::zeros({4}));
  }
  Tensor forward(const Tensor& x) {
    calls.add_(1);
    if (is_training()) mean.mul_(0.5).add_(x.detach().mean(0));
    const Tensor h = torch::tanh(norm(first(x)));
    return last(tied_again(torch::tanh(tied(h))) * frozen);
  }
  nn::Linear first{nullptr}, tied{nullptr}, tied_again{nullptr}, last{nullptr};
  nn::BatchNorm1d norm{nullptr};
  Tensor unused, frozen, calls, mean;
};
TORCH_MODULE(Net);

// Graphs save its parameter and its buffer.
struct ScaleImpl : nn::Cloneable<ScaleImpl> {
  ScaleImpl() { reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::ones({2}));
    mean = register_buffer("mean", torch::ones({2}));
    calls = register_buffer("calls", torch::zeros({}));
  }
  Tensor forward(const Tensor& x) {
    mean.data().add_(1);  // as batch norm does: no version counts this
    calls.add_(1);
    if (writes) {
      const torch::NoGradGuard no_grad;
      weight.mul_(0.5);
    }
    return x * weight * mean;
  }
  Tensor weight, mean, calls;
  bool writes = false;
};
TORCH_MODULE(Scale);

struct Case {
  std::string name;
  c10::Device home;
  std::vector<c10::Device> devices;
};

class DataParallelTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { torch::manual_seed(1); }
  void TearDown() override { EXPECT_THAT(fake_device::TakeViolations(), IsEmpty()); }

  Net NewNet() const {
    Net net;
    net->to(GetParam().home);
    return net;
  }
  DataParallelOptions Options() const {
    return {.devices = devices(), .replicas = {.bucket_bytes = 200, .first_bucket_bytes = 100}};
  }
  const std::vector<c10::Device>& devices() const { return GetParam().devices; }
  size_t parts() const { return devices().size(); }
};

INSTANTIATE_TEST_SUITE_P(
    Lists, DataParallelTest,
    testing::Values(Case{"Hosts", kHost, {kHost, kHost, kHost}},
                    Case{"Accelerators",
                         fake_device::Device(0),
                         {fake_device::Device(0), fake_device::Device(1), fake_device::Device(2)}},
                    Case{"ModuleOnTheSecond",
                         fake_device::Device(1),
                         {fake_device::Device(0), fake_device::Device(1), fake_device::Device(1)}},
                    Case{"ModuleElsewhere",
                         kHost,
                         {fake_device::Device(0), fake_device::Device(3), fake_device::Device(3)}}),
    [](const auto& info) { return info.param.name; });

// Replica by replica in one thread, on one device; the oracle.
std::vector<Tensor> GradientsOneByOne(Net net, const Tensor& batch, int64_t parts) {
  std::vector<Tensor> outputs;
  for (const Tensor& part : batch.chunk(parts)) outputs.push_back(net->forward(part));
  torch::cat(outputs).pow(2).sum().backward();
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : net->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

TEST_P(DataParallelTest, GradientsAreThoseOfThePartsOneByOne) {
  Net net = NewNet();
  Net oracle(std::dynamic_pointer_cast<NetImpl>(net->clone(kHost)));
  DataParallel parallel(net, Options());
  const Tensor batch = torch::rand({12, 4});
  const std::vector<Tensor> want = GradientsOneByOne(oracle, batch, static_cast<int64_t>(parts()));
  const Tensor output = parallel.Forward(batch);
  EXPECT_EQ(output.device(), devices()[0]);
  output.pow(2).sum().backward();
  const auto parameters = net->named_parameters();
  for (size_t k = 0; k < want.size(); ++k) {
    const Tensor& got = parameters[k].value().grad();
    ASSERT_EQ(got.defined(), want[k].defined()) << parameters[k].key();
    if (!got.defined()) continue;
    EXPECT_EQ(got.device(), GetParam().home);
    EXPECT_TRUE(torch::allclose(got.cpu(), want[k], 1e-5, 1e-6)) << parameters[k].key();
  }
  EXPECT_FALSE(net->unused.grad().defined());
  EXPECT_FALSE(net->frozen.grad().defined());
  EXPECT_TRUE(net->tied->weight.grad().defined());
}

TEST_P(DataParallelTest, BuffersAreThoseOfTheFirstReplica) {
  Net net = NewNet();
  Net oracle(std::dynamic_pointer_cast<NetImpl>(net->clone(kHost)));
  DataParallel parallel(net, Options());
  for (int step = 0; step < 3; ++step) {
    const Tensor batch = torch::rand({12, 4});
    parallel.Forward(batch);
    oracle->forward(batch.chunk(static_cast<int64_t>(parts()))[0]);
  }
  EXPECT_EQ(net->calls.item<int64_t>(), 3);
  EXPECT_TRUE(net->mean.cpu().equal(oracle->mean));
  if (devices()[0].is_cpu()) {  // the simulated accelerator's batch norm keeps no statistics
    EXPECT_TRUE(net->norm->running_mean.equal(oracle->norm->running_mean));
    EXPECT_TRUE(net->norm->running_var.equal(oracle->norm->running_var));
  }
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 3);
  EXPECT_EQ(net->norm->running_mean.device(), GetParam().home);
}

TEST_P(DataParallelTest, ReplicasFollowTheModule) {
  Net net = NewNet();
  DataParallel parallel(net, Options());
  const Tensor batch = torch::rand({12, 4});
  const auto same = [&] {
    const Tensor got = parallel.Forward(batch).cpu();
    return torch::allclose(got, net->forward(batch.to(GetParam().home)).cpu(), 1e-5, 1e-6);
  };
  net->eval();
  EXPECT_TRUE(same());
  {
    const torch::NoGradGuard no_grad;
    net->last->weight.mul_(2);
    net->norm->running_mean.add_(1);
  }
  EXPECT_TRUE(same());
  net->first->weight.data().mul_(2);  // as torch::optim::SGD: no version counts this
  EXPECT_TRUE(same());
  net->norm->train();  // only that
  EXPECT_FALSE(same());
  net->eval();
  net->frozen.set_requires_grad(true);
  net->last->weight.set_requires_grad(false);
  parallel.Forward(batch).sum().backward();
  EXPECT_TRUE(net->frozen.grad().defined());
  EXPECT_FALSE(net->last->weight.grad().defined());
  net->to(torch::kDouble);
  EXPECT_EQ(parallel.Forward(batch.to(torch::kDouble)).scalar_type(), torch::kDouble);
  net->zero_grad();
  parallel.Forward(batch.to(torch::kDouble)).sum().backward();
  EXPECT_EQ(net->frozen.grad().scalar_type(), torch::kDouble);
}

TEST_P(DataParallelTest, TwoForwardsBeforeOneBackward) {
  Net net = NewNet();
  net->eval();
  DataParallel parallel(net, Options());
  const Tensor a = torch::rand({6, 4}), b = torch::rand({9, 4});
  parallel.Forward(a).sum().backward();
  parallel.Forward(b).sum().backward();
  const Tensor want = net->first->weight.grad().clone();
  net->zero_grad();
  const Tensor both = parallel.Forward(a).sum() + parallel.Forward(b).sum();
  both.backward();
  EXPECT_TRUE(torch::allclose(net->first->weight.grad().cpu(), want.cpu(), 1e-5, 1e-6));
}

// As without DataParallel, also where a replica has copies of its own.
TEST_P(DataParallelTest, AnEarlierGraphNoticesWhatHasChangedAndNothingElse) {
  Scale scale;
  scale->to(GetParam().home);
  DataParallel parallel(scale, {.devices = devices()});
  const Tensor x = torch::ones({6, 2}).requires_grad_();
  const auto forward = [&] { return parallel.Forward(x).sum(); };
  const auto backward = [&](const Tensor& loss) { return torch::autograd::grad({loss}, {x}); };
  const Tensor first = forward(), second = forward();
  EXPECT_NO_THROW(backward(first));
  EXPECT_TRUE(backward(second)[0].equal(torch::full({6, 2}, 3.0f)));
  for (const Tensor& changed : {scale->weight, scale->mean}) {
    for (int i = 0; i < 3; ++i) {
      const Tensor before = forward();
      {
        const torch::NoGradGuard no_grad;
        changed.mul_(3);
      }
      const Tensor after = forward();
      EXPECT_THROW(backward(before), c10::Error) << i;
      EXPECT_NO_THROW(backward(after)) << i;
    }
  }
}

TEST_P(DataParallelTest, WhatForwardWritesToAParameterIsNotLost) {
  Scale scale;
  scale->to(GetParam().home);
  scale->writes = true;
  DataParallel parallel(scale, {.devices = devices()});
  try {
    parallel.Forward(torch::ones({6, 2}));
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("wrote to its parameter weight"));
  }
}

TEST_P(DataParallelTest, ABatchOfOnePartSeesTheSameCurrentDevice) {
  struct LookImpl : nn::Cloneable<LookImpl> {
    LookImpl() { reset(); }
    void reset() override { weight = register_parameter("weight", torch::ones({1})); }
    Tensor forward(const Tensor& x) {
      const c10::Device here = x.device();
      if (!here.is_cpu()) {
        EXPECT_EQ(c10::impl::VirtualGuardImpl(here.type()).getDevice(), here);
      }
      return x * weight;
    }
    Tensor weight;
  };
  const auto look = std::make_shared<LookImpl>();
  look->to(devices()[0]);
  DataParallel parallel(look, {.devices = devices()});
  const c10::DeviceGuard elsewhere(fake_device::Device(2));
  parallel.Forward(torch::ones({6}));
  parallel.Forward(torch::ones({1}));
}

TEST_P(DataParallelTest, SmallAndEmptyBatches) {
  Net net = NewNet();
  net->eval();
  DataParallel parallel(net, Options());
  for (const int64_t size : {0, 1, 2, 4, 5}) {
    const Tensor batch = torch::rand({size, 4});
    const Tensor output = parallel.Forward(batch);
    EXPECT_EQ(output.device(), devices()[0]);
    EXPECT_TRUE(
        torch::allclose(output.cpu(), net->forward(batch.to(GetParam().home)).cpu(), 1e-5, 1e-6))
        << size;
    net->zero_grad();
    output.sum().backward();
    if (size == 0) continue;
    EXPECT_EQ(net->last->bias.grad().sum().item<float>(), 3.0f * size);
  }
}

TEST_P(DataParallelTest, DifferentiatesTwice) {
  struct CubeImpl : nn::Cloneable<CubeImpl> {
    CubeImpl() { reset(); }
    void reset() override { weight = register_parameter("weight", torch::rand({2})); }
    Tensor forward(const Tensor& x) { return x * weight.pow(3); }
    Tensor weight;
  };
  const auto cube = std::make_shared<CubeImpl>();
  cube->to(GetParam().home);
  DataParallel parallel(cube, {.devices = devices()});
  const Tensor x = torch::rand({6, 2}).requires_grad_();
  const Tensor loss = parallel.Forward(x).sum();
  const Tensor first = torch::autograd::grad({loss}, {cube->weight}, {}, true, true)[0];
  const Tensor second = torch::autograd::grad({first.sum()}, {cube->weight, x})[0];
  EXPECT_TRUE(torch::allclose(second.cpu(), x.sum(0) * 6 * cube->weight.cpu()));
}

TEST_P(DataParallelTest, GradModeIsTheCallers) {
  Net net = NewNet();
  net->eval();
  DataParallel parallel(net, Options());
  const Tensor batch = torch::rand({12, 4});
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(parallel.Forward(batch).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(parallel.Forward(batch).is_inference());
  }
  const Tensor output = parallel.Forward(batch);
  EXPECT_TRUE(output.requires_grad());
  output.sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
}

TEST_P(DataParallelTest, TheFirstErrorNamesReplicaAndDevice) {
  struct PickyImpl : nn::Cloneable<PickyImpl> {
    PickyImpl() { reset(); }
    void reset() override { weight = register_parameter("weight", torch::ones({1})); }
    Tensor forward(const Tensor& x) {
      TORCH_CHECK_VALUE(x.max().item<float>() < 1, "too large: ", x.max().item<float>());
      return x * weight;
    }
    Tensor weight;
  };
  const auto picky = std::make_shared<PickyImpl>();
  picky->to(GetParam().home);
  DataParallel parallel(picky, {.devices = devices()});
  try {
    parallel.Forward(torch::arange(6, torch::kFloat) - 1);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("too large: 2"));
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("in replica 1 of 3, on " + devices()[1].str()));
  }
  EXPECT_EQ(parallel.Forward(torch::zeros({6})).sum().item<float>(), 0);  // goes on
}

TEST_P(DataParallelTest, FunctionsOverParameters) {
  const auto on = torch::TensorOptions(GetParam().home);
  const Tensor weight = torch::rand({4, 2}, on).requires_grad_();
  const Tensor scale = (weight * 2).sum();  // not a leaf
  const auto function = [](const TensorVector& parameters, std::vector<Tensor> inputs) {
    const Tensor y = inputs[0].mm(parameters[0]) * parameters[1];
    return std::map<std::string, Tensor>{{"y", y}, {"sum", y.sum(1)}};
  };
  const std::vector<Tensor> inputs = {torch::rand({7, 4})};
  auto outputs = RunDataParallel(function, {weight, scale}, inputs, devices(), kHost);
  EXPECT_EQ(outputs["sum"].sizes(), c10::IntArrayRef({7}));
  (outputs["y"].sum() + outputs["sum"].sum()).backward();
  const Tensor got = weight.grad().cpu();
  const Tensor plain = weight.detach().cpu().requires_grad_();
  auto want = function({plain, (plain * 2).sum()}, inputs);
  (want["y"].sum() + want["sum"].sum()).backward();
  EXPECT_TRUE(torch::allclose(got, plain.grad(), 1e-5, 1e-5));
}

TEST_P(DataParallelTest, NestedInputsAndOutputs) {
  nn::LSTM lstm(nn::LSTMOptions(3, 2).batch_first(false));
  lstm->to(GetParam().home);
  const Tensor x = torch::rand({5, 6, 3});
  using State = std::tuple<Tensor, Tensor>;
  const State state(torch::rand({1, 6, 2}), torch::rand({1, 6, 2}));
  DataParallel parallel(lstm, {.devices = devices(), .output_device = kHost, .dim = 1});
  const auto [output, last] = parallel.Forward(x, std::optional<State>(state));
  lstm->to(kHost);
  const auto [want, want_last] = lstm->forward(x, state);
  EXPECT_TRUE(torch::allclose(output, want, 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(std::get<1>(last), std::get<1>(want_last), 1e-5, 1e-6));
}

TEST_P(DataParallelTest, ReplicateGivesModulesWhoseGradientsAddUp) {
  nn::Linear linear(2, 1);
  linear->to(GetParam().home);
  const std::vector<std::shared_ptr<nn::LinearImpl>> replicas = Replicate(linear, devices());
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < parts(); ++i) inputs.push_back(torch::ones({2}, devices()[i]));
  const std::vector<Tensor> outputs = ParallelApply(replicas, inputs, devices());
  ReduceAdd(outputs).sum().backward();
  EXPECT_TRUE(linear->weight.grad().cpu().equal(
      torch::full({1, 2}, static_cast<int64_t>(parts()), torch::kFloat)));
}

// The last layer's bucket is added before the first layer's backward runs.
TEST(DataParallel, BucketsAreReducedWhileTheBackwardRuns) {
  nn::Sequential net(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4));
  std::vector<std::string> order;
  net[2]->as<nn::Linear>()->weight.register_hook([&](const Tensor&) { order.push_back("last"); });
  DataParallel parallel(
      net, {.devices = {kHost, kHost}, .replicas = {.bucket_bytes = 64, .first_bucket_bytes = 64}});
  Tensor input = torch::rand({4, 4}).requires_grad_();
  input.register_hook([&](const Tensor&) { order.push_back("input"); });
  parallel.Forward(input).sum().backward();
  EXPECT_THAT(order, testing::ElementsAre("last", "input"));
}

TEST(DataParallel, OneDeviceIsTheModuleItself) {
  // Not cloneable, and not moved.
  struct OnlyImpl : nn::Module {
    OnlyImpl() { weight = register_parameter("weight", torch::ones({1})); }
    Tensor forward(const Tensor& x) {
      ++calls;
      return x * weight;
    }
    Tensor weight;
    int calls = 0;
  };
  const auto only = std::make_shared<OnlyImpl>();
  const Tensor output = RunDataParallel(only, torch::ones({2}), {kHost}, fake_device::Device(1));
  EXPECT_EQ(output.device(), fake_device::Device(1));
  EXPECT_EQ(only->calls, 1);
  EXPECT_EQ(only->weight.device(), kHost);
  EXPECT_THROW(RunDataParallel(only, torch::ones({2}), {kHost, kHost}), c10::Error);
  // On another device a replica does it, and the module stays where it is.
  nn::Linear linear(2, 2);
  const Tensor there = RunDataParallel(linear, torch::ones({3, 2}), {fake_device::Device(2)});
  EXPECT_EQ(there.device(), fake_device::Device(2));
  EXPECT_TRUE(linear->weight.device() == kHost);
  there.sum().backward();
  EXPECT_TRUE(linear->bias.grad().equal(torch::full({2}, 3.0f)));
}

TEST(DataParallel, WithoutDevicesAndCudaItSaysSo) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is a CUDA device";
  try {
    RunDataParallel(nn::Linear(2, 2), torch::ones({2, 2}));
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("no devices were given"));
  }
}

TEST(DataParallel, SparseGradients) {
  const auto options = nn::EmbeddingOptions(10, 3).sparse(true);
  nn::Embedding sparse(options);
  DataParallel parallel(sparse, {.devices = {kHost, kHost}});
  const Tensor rows = torch::tensor({1, 2, 2, 7});
  parallel.Forward(rows).sum().backward();
  const Tensor got = sparse->weight.grad();
  EXPECT_TRUE(got.is_sparse());
  sparse->zero_grad();
  sparse->forward(rows).sum().backward();
  EXPECT_TRUE(got.to_dense().equal(sparse->weight.grad().to_dense()));
}

TEST(DataParallel, SparseBuffers) {
  struct GraphImpl : nn::Cloneable<GraphImpl> {
    GraphImpl() { reset(); }
    void reset() override {
      weight = register_parameter("weight", torch::rand({3, 2}));
      edges = register_buffer("edges", (torch::eye(3) * 2).to_sparse());
    }
    Tensor forward(const Tensor& x) { return x.mm(edges.to_dense()).mm(weight); }
    Tensor weight, edges;
  };
  const auto graph = std::make_shared<GraphImpl>();
  DataParallel parallel(graph, {.devices = {kHost, kHost}});
  const Tensor x = torch::rand({6, 3});
  for (int i = 0; i < 2; ++i) {
    const Tensor output = parallel.Forward(x);
    EXPECT_TRUE(torch::allclose(output, graph->forward(x)));
    graph->zero_grad();
    output.sum().backward();
    EXPECT_TRUE(torch::allclose(graph->weight.grad(), (x * 2).t().mm(torch::ones({6, 2}))));
    const torch::NoGradGuard no_grad;
    graph->edges.mul_(2).div_(2);
    graph->weight.mul_(2);
  }
}

// What writes to it gives it other memory.
TEST(DataParallel, WhatForwardWritesToASparseBufferIsKept) {
  struct GraphImpl : nn::Cloneable<GraphImpl> {
    GraphImpl() { reset(); }
    void reset() override { edges = register_buffer("edges", torch::eye(3).to_sparse()); }
    Tensor forward(const Tensor& x) {
      const torch::NoGradGuard no_grad;
      edges.copy_(edges * 2);
      return x.mm(edges.to_dense());
    }
    Tensor edges;
  };
  const auto graph = std::make_shared<GraphImpl>();
  DataParallel parallel(graph, {.devices = {kHost, kHost}});
  const Tensor x = torch::rand({6, 3});
  for (const int times : {2, 4, 8}) {
    EXPECT_TRUE(torch::allclose(parallel.Forward(x), x * times));
    EXPECT_TRUE(graph->edges.to_dense().equal(torch::eye(3) * times)) << times;
  }
}

TEST(DataParallel, AutocastIsTheCallers) {
  nn::Linear linear(4, 4);
  DataParallel parallel(linear, {.devices = {kHost, kHost}});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Tensor output = parallel.Forward(torch::rand({4, 4}));
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
  output.sum().backward();
  EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat);
}

TEST(DataParallel, MakingReplicasTakesNoRandomNumbers) {
  nn::Linear linear(4, 4);
  torch::manual_seed(3);
  const Tensor want = torch::rand({4});
  torch::manual_seed(3);
  DataParallel parallel(linear, {.devices = {kHost, kHost}});
  EXPECT_TRUE(torch::rand({4}).equal(want));
  torch::manual_seed(3);
  DataParallel drawing(linear,
                       {.devices = {kHost, kHost}, .replicas = {.preserve_rng_state = false}});
  EXPECT_FALSE(torch::rand({4}).equal(want));
}

TEST(DataParallel, AChangedParameterIsNoticedByAnEarlierGraph) {
  nn::Linear linear(4, 4);
  DataParallel parallel(linear, {.devices = {kHost, kHost}});
  const Tensor input = torch::rand({4, 4}).requires_grad_();
  const Tensor loss = parallel.Forward(input).sum();
  {
    const torch::NoGradGuard no_grad;
    linear->weight.mul_(2);
  }
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(DataParallel, ParametersThatForwardWritesToCannotBeShared) {
  nn::Embedding embedding(nn::EmbeddingOptions(4, 3).max_norm(0.1));
  DataParallel parallel(embedding, {.devices = {kHost, kHost}});
  try {
    parallel.Forward(torch::tensor({0, 1, 2, 3}));
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("wrote to its parameter weight"));
  }
}

TEST(DataParallel, BadModulesAreNamed) {
  nn::Sequential net(nn::Linear(2, 2), nn::Linear(2, 2));
  net[1]->to(fake_device::Device(1));
  try {
    DataParallel parallel(net, {.devices = {kHost, kHost}});
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("1.weight is on hpu:1, and 0.weight"));
  }
  EXPECT_THROW(DataParallel(std::shared_ptr<nn::LinearImpl>(), {.devices = {kHost, kHost}}),
               c10::ValueError);
}

// A forward within the forward of the same object would change the replicas under it.
TEST(DataParallel, IsNotEnteredTwice) {
  struct LoopImpl : nn::Cloneable<LoopImpl> {
    void reset() override {}
    Tensor forward(const Tensor& x) { return again(x); }
    std::function<Tensor(const Tensor&)> again;
  };
  const auto loop = std::make_shared<LoopImpl>();
  DataParallel<LoopImpl>* self = nullptr;
  loop->again = [&self](const Tensor& x) { return self->Forward(x); };
  DataParallel parallel(loop, {.devices = {kHost, kHost}});
  self = &parallel;
  EXPECT_THROW(parallel.Forward(torch::rand({4})), c10::Error);
}

// As a layer within another module, and within another DataParallel.
TEST(DataParallel, Nests) {
  nn::Linear linear(2, 2);
  auto inner = std::make_shared<DataParallel<nn::LinearImpl>>(
      linear, DataParallelOptions{.devices = {kHost, kHost}});
  const auto function = [&](const TensorVector&, const Tensor& x) {
    return DataParallel(linear, {.devices = {kHost, kHost}}).Forward(x) +
           inner->module()->forward(x);
  };
  const Tensor x = torch::rand({8, 2});
  RunDataParallel(function, {}, x, {kHost, kHost}).sum().backward();
  EXPECT_TRUE(linear->bias.grad().equal(torch::full({2}, 16.0f)));
}

TEST(Replicas, AFailedRefreshFreezesNothing) {
  FailEachAllocation([](absl::FunctionRef<void()> lack) {
    nn::Linear linear(2, 2);
    Replicas replicas(linear.ptr(), *NewDeviceCollectives({kHost, kHost}),
                      {.bucket_bytes = 1, .first_bucket_bytes = 1});
    lack();
    try {
      replicas.Refresh(2);
    } catch (...) {  // a lack of memory
    }
    const bool failed = FailAllocation(-1);
    replicas.Refresh(2);
    for (size_t i = 0; i < 2; ++i) {
      replicas.Install(i);
      for (const Tensor& parameter : replicas.modules()[i]->parameters()) {
        EXPECT_TRUE(parameter.requires_grad());
      }
    }
    return failed;
  });
}

}  // namespace
}  // namespace distgrad
