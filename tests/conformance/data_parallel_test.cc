// The behaviours that PyTorch's own tests of data parallelism look for, by their names there (of
// test/cpp/api/parallel.cpp first, then of test_data_parallel.py), each with what is expected here.
// Where theirs needs CUDA, these run on the CPU and on simulated accelerators, which hide GPUs: so
// DataParallelUsesAllAvailableCUDADevices is in core/parallel/cuda/one_gpu_twice_test.cc.
#include "core/parallel/data_parallel.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;

const c10::Device kHost(c10::kCPU);

class DataParallelConformance : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { torch::manual_seed(0); }
  void TearDown() override {
    const std::vector<std::string> violations = fake_device::TakeViolations();
    EXPECT_TRUE(violations.empty()) << violations[0];
  }
  void ExpectClose(const Tensor& got, const Tensor& want) {
    EXPECT_TRUE(torch::allclose(got.cpu(), want.cpu(), 1e-5, 1e-6)) << got << want;
  }

  const std::vector<c10::Device> devices_ =
      GetParam() ? std::vector<c10::Device>{fake_device::Device(0), fake_device::Device(1)}
                 : std::vector<c10::Device>{kHost, kHost};
  const torch::TensorOptions first_ = torch::TensorOptions(devices_[0]);
};

INSTANTIATE_TEST_SUITE_P(Devices, DataParallelConformance, testing::Bool(),
                         [](const auto& info) { return info.param ? "Accelerators" : "Hosts"; });

// ------------------------------------------------------------------------------ parallel.cpp

TEST_P(DataParallelConformance, DifferentiableScatter) {
  const Tensor input = torch::ones(10, torch::requires_grad());
  const std::vector<Tensor> output = Scatter(input, devices_);
  ASSERT_EQ(output.size(), 2u);
  EXPECT_EQ(output[0].size(0), 5);
  EXPECT_EQ(output[1].device(), devices_[1]);
  EXPECT_TRUE(torch::cat({output[0].cpu(), output[1].cpu()}).equal(input));
  (output[0].to(devices_[1]) + output[1]).sum().backward();
  EXPECT_TRUE(input.grad().equal(torch::ones(10)));
}

TEST_P(DataParallelConformance, DifferentiableGather) {
  const Tensor a = torch::ones(5, first_).requires_grad_();
  const Tensor b = torch::ones(5, torch::TensorOptions(devices_[1])).requires_grad_();
  const Tensor output = Gather({a, b}, devices_[1]);
  EXPECT_EQ(output.size(0), 10);
  EXPECT_EQ(output.device(), devices_[1]);
  output.backward(torch::ones(10, torch::TensorOptions(devices_[1])));
  EXPECT_EQ(a.grad().device(), a.device());
  EXPECT_EQ(a.grad().sum().item<float>(), 5);
  EXPECT_EQ(b.grad().sum().item<float>(), 5);
  const Tensor scalar = torch::tensor(1.0f, first_);
  EXPECT_EQ(Gather({scalar, scalar}).sizes(), c10::IntArrayRef({2}));
}

TEST_P(DataParallelConformance, Replicate) {
  nn::Linear linear(3, 4);
  linear->to(devices_[0]);
  const auto replicas = distgrad::Replicate(linear, devices_);
  ASSERT_EQ(replicas.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NE(replicas[i].get(), linear.get());
    EXPECT_EQ(replicas[i]->weight.device(), devices_[i]);
    EXPECT_TRUE(replicas[i]->bias.cpu().equal(linear->bias.cpu()));
  }
}

TEST_P(DataParallelConformance, ParallelApply) {
  std::vector<nn::Linear> modules;
  std::vector<Tensor> inputs;
  for (const c10::Device device : devices_) {
    modules.push_back(nn::Linear(10, 5));
    modules.back()->to(device);
    inputs.push_back(torch::ones({2, 10}, torch::TensorOptions(device)));
  }
  const std::vector<Tensor> outputs = distgrad::ParallelApply(modules, inputs);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(outputs[i].device(), devices_[i]);
    EXPECT_EQ(outputs[i].sizes(), c10::IntArrayRef({2, 5}));
  }
}

struct PassImpl : nn::Cloneable<PassImpl> {
  void reset() override {}
  Tensor forward(Tensor x) { return x; }
};

// Devices say what is current, not where the output goes: that is Gather's.
TEST_P(DataParallelConformance, ParallelApplyWithDifferentOutputDevice) {
  const std::vector<std::shared_ptr<PassImpl>> modules(2, std::make_shared<PassImpl>());
  const auto outputs = distgrad::ParallelApply(
      modules, std::vector<Tensor>{torch::ones(5), torch::ones(5)}, devices_);
  EXPECT_EQ(Gather(outputs, devices_[1]).device(), devices_[1]);
}

struct ThrowImpl : nn::Cloneable<ThrowImpl> {
  void reset() override {}
  Tensor forward(Tensor) { throw std::runtime_error("Badness!"); }
};

TEST_P(DataParallelConformance, ParallelApplyRethrowsException) {
  const auto m = std::make_shared<ThrowImpl>();
  const Tensor input = torch::ones({10, 3});
  try {
    RunDataParallel(m, input, devices_);
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("Badness!"), std::string::npos);
  }
}

TEST_P(DataParallelConformance, DataParallelPlacesTheOutputOnTheRequestedDevice) {
  const auto m = std::make_shared<PassImpl>();
  const Tensor input = torch::ones({10, 3});
  for (const c10::Device device : {devices_[0], devices_[1], kHost}) {
    EXPECT_EQ(RunDataParallel(m, input, devices_, device).device(), device);
  }
  EXPECT_EQ(RunDataParallel(m, input, devices_).device(), devices_[0]);
  EXPECT_EQ(RunDataParallel(m, input, {devices_[0]}, devices_[1]).device(), devices_[1]);
}

TEST_P(DataParallelConformance, DataParallelNumericalEquivalence) {
  if (GetParam()) GTEST_SKIP() << "the simulated accelerator has no convolutions";
  struct M : nn::Cloneable<M> {
    M() { reset(); }
    void reset() override {
      conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 2, 2)));
      fc = register_module("fc", nn::Linear(8, 2));
    }
    Tensor forward(Tensor x) {
      x = torch::relu(conv->forward(x));
      return torch::log_softmax(fc->forward(x.view({-1, 8})), 1);
    }
    nn::Conv2d conv{nullptr};
    nn::Linear fc{nullptr};
  };
  auto model = std::make_shared<M>();
  auto parallel_model = std::dynamic_pointer_cast<M>(model->clone());
  parallel_model->to(devices_[0]);
  torch::optim::SGD optim(model->parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::SGD parallel_optim(parallel_model->parameters(), torch::optim::SGDOptions(0.1));
  Tensor input = torch::rand({16, 2, 3, 3}), target = torch::randint(0, 2, {16});
  for (int i = 0; i < 6; ++i) {
    optim.zero_grad();
    const Tensor loss = torch::nll_loss(model->forward(input), target);
    loss.backward();
    optim.step();
    parallel_optim.zero_grad();
    const Tensor output = RunDataParallel(parallel_model, input, devices_);
    const Tensor parallel_loss = torch::nll_loss(output.cpu(), target);
    parallel_loss.backward();
    parallel_optim.step();
    ExpectClose(parallel_loss, loss);
  }
}

// --------------------------------------------------------------------- test_data_parallel.py

TEST_P(DataParallelConformance, test_data_parallel_buffers_requiring_grad) {
  struct M : nn::Cloneable<M> {
    M() { reset(); }
    void reset() override { buffer = register_buffer("buffer", torch::ones({3}).requires_grad_()); }
    Tensor forward(Tensor x) { return x * buffer; }
    Tensor buffer;
  };
  const auto m = std::make_shared<M>();
  const Tensor leaf = torch::rand({3}, first_).requires_grad_();
  m->buffer.set_data(leaf.detach());
  DataParallel parallel(m, {.devices = devices_});
  parallel.Forward(torch::ones({4, 3})).sum().backward();
  EXPECT_TRUE(m->buffer.grad().cpu().equal(torch::full({3}, 4.0f)));
}

TEST_P(DataParallelConformance, test_data_parallel_rnn) {
  nn::LSTM lstm(nn::LSTMOptions(10, 7).num_layers(2));
  auto clone = std::dynamic_pointer_cast<nn::LSTMImpl>(lstm->clone());
  clone->to(devices_[0]);
  DataParallel parallel(clone, {.devices = devices_, .dim = 1});
  const Tensor input = torch::rand({3, 8, 10});
  const Tensor want = std::get<0>(lstm->forward(input));
  const Tensor got = std::get<0>(parallel.Forward(input));
  ExpectClose(got, want);
  want.sum().backward();
  got.sum().backward();
  for (size_t i = 0; i < lstm->parameters().size(); ++i) {
    ExpectClose(clone->parameters()[i].grad(), lstm->parameters()[i].grad());
  }
}

TEST_P(DataParallelConformance, test_parallel_apply_autocast) {
  const std::vector<nn::Linear> modules(2, nn::Linear(10, 5));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto outputs = distgrad::ParallelApply(
      modules, std::vector<Tensor>(2, torch::rand({2, 10})), {kHost, kHost});
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  for (const Tensor& output : outputs) EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
}

struct SumImpl : nn::Cloneable<SumImpl> {
  SumImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::arange(10, torch::kFloat)); }
  Tensor forward(Tensor x, std::map<std::string, std::vector<Tensor>> more, float factor) {
    return x * weight + more.at("y")[0] * factor + more.at("z")[0].unsqueeze(1);
  }
  Tensor weight;
};

TEST_P(DataParallelConformance, test_data_parallel_multiple_input_and_nested_input) {
  const auto m = std::make_shared<SumImpl>();
  const Tensor x = torch::rand({5, 10}), y = torch::rand({5, 10}), z = torch::rand({5});
  const std::map<std::string, std::vector<Tensor>> more = {{"y", {y}}, {"z", {z, x}}};
  const Tensor want = m->forward(x, more, 2);
  m->to(devices_[0]);
  ExpectClose(RunDataParallel(m, std::tuple(x, more, 2.0f), devices_), want);
  DataParallel parallel(m, {.devices = devices_});
  const Tensor got = parallel.Forward(x, more, 2.0f);
  ExpectClose(got, want);
  got.sum().backward();
  ExpectClose(m->weight.grad(), x.sum(0));
}

TEST_P(DataParallelConformance, test_data_parallel_small_back) {
  nn::Linear linear(10, 5);
  linear->to(devices_[0]);
  const Tensor input = torch::rand({20, 10});
  const Tensor output = RunDataParallel(linear, input, devices_);
  EXPECT_TRUE(output.device() == devices_[0]);
  output.sum().backward();
  ExpectClose(linear->weight.grad(), input.sum(0).expand({5, 10}));
}

// There the module has to be on the first device; here it may be anywhere, in one place.
TEST_P(DataParallelConformance, test_data_parallel_model_device) {
  nn::Linear linear(2, 2);
  linear->to(fake_device::Device(3));
  const Tensor output = RunDataParallel(linear, torch::ones({4, 2}), devices_);
  EXPECT_EQ(output.device(), devices_[0]);
  EXPECT_EQ(linear->weight.device(), fake_device::Device(3));
  nn::Sequential two(nn::Linear(2, 2), nn::Linear(2, 2));
  two[0]->to(fake_device::Device(3));
  EXPECT_THROW(RunDataParallel(two, torch::ones({4, 2}), devices_), c10::ValueError);
}

TEST_P(DataParallelConformance, test_data_parallel_model_no_refcycles) {
  std::weak_ptr<nn::Module> module;
  {
    nn::Linear linear(2, 2);
    module = linear.ptr();
    DataParallel parallel(linear, {.devices = devices_});
    parallel.Forward(torch::ones({4, 2})).sum().backward();
  }
  EXPECT_TRUE(module.expired());
}

TEST_P(DataParallelConformance, test_data_parallel_no_grad) {
  nn::Linear linear(2, 2);
  DataParallel parallel(linear, {.devices = devices_});
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(parallel.Forward(torch::ones({4, 2})).requires_grad());
}

// Gradients of the input, too.
TEST_P(DataParallelConformance, test_data_parallel) {
  nn::Linear linear(10, 5);
  const Tensor input = torch::rand({20, 10}).requires_grad_();
  const Tensor want = linear->forward(input);
  want.pow(2).sum().backward();
  const Tensor of_input = input.grad().clone(), of_weight = linear->weight.grad().clone();
  input.mutable_grad() = Tensor();
  linear->zero_grad();
  for (const bool all : {true, false}) {
    const std::vector<c10::Device> some = all ? devices_ : std::vector{devices_[1]};
    const Tensor output = RunDataParallel(linear, input, some);
    ExpectClose(output, want);
    output.pow(2).sum().backward();
    ExpectClose(input.grad(), of_input);
    ExpectClose(linear->weight.grad(), of_weight);
    input.mutable_grad() = Tensor();
    linear->zero_grad();
  }
}

TEST_P(DataParallelConformance, test_data_parallel_sparse) {
  if (GetParam()) GTEST_SKIP() << "the simulated accelerator has no sparse tensors";
  nn::Embedding embedding(nn::EmbeddingOptions(10, 5).sparse(true));
  RunDataParallel(embedding, torch::randint(0, 10, {6, 2}), devices_).sum().backward();
  EXPECT_TRUE(embedding->weight.grad().is_sparse());
  EXPECT_EQ(embedding->weight.grad().to_dense().sum().item<float>(), 60);
}

TEST_P(DataParallelConformance, test_data_parallel_nested_output) {
  using Output = std::pair<Tensor, std::vector<std::map<std::string, Tensor>>>;
  const auto nest = [](const TensorVector&, const Tensor& x) {
    return Output{x.cos(), {{{"sin", x.sin()}}, {{"self", x}, {"double", x * 2}}}};
  };
  const Tensor x = torch::rand({8, 2});
  const Output got = RunDataParallel(nest, {}, x, devices_), want = nest({}, x);
  ExpectClose(got.first, want.first);
  ExpectClose(got.second[0].at("sin"), want.second[0].at("sin"));
  ExpectClose(got.second[1].at("double"), want.second[1].at("double"));
}

TEST_P(DataParallelConformance, test_data_parallel_module_zero_inputs) {
  struct M : nn::Cloneable<M> {
    void reset() override {}
    Tensor forward() { return torch::full({3}, 7.0f); }
  };
  DataParallel parallel(std::make_shared<M>(), {.devices = devices_});
  EXPECT_TRUE(parallel.Forward().cpu().equal(torch::full({3}, 7.0f)));
}

TEST_P(DataParallelConformance, test_data_parallel_device_args) {
  nn::Linear linear(2, 2);
  EXPECT_THROW(RunDataParallel(linear, torch::ones({2, 2}), {c10::Device("hpu:77")}),
               c10::ValueError);
  EXPECT_THROW(RunDataParallel(linear, torch::ones({2, 2}), {c10::Device(c10::kXLA, 0)}),
               c10::ValueError);
}

// The output's graph outlives DataParallel.
TEST_P(DataParallelConformance, test_data_parallel_function_deletion) {
  nn::Linear linear(2, 2);
  const Tensor output = RunDataParallel(linear, torch::ones({4, 2}), devices_);
  output.sum().backward();
  EXPECT_TRUE(linear->bias.grad().equal(torch::full({2}, 4.0f)));
}

TEST_P(DataParallelConformance, test_gather_different_len_dicts) {
  using Map = std::map<std::string, Tensor>;
  const Tensor t = torch::ones({1});
  EXPECT_THROW(Gather(std::vector<Map>{{{"a", t}}, {{"a", t}, {"b", t}}}), c10::ValueError);
}

TEST_P(DataParallelConformance, test_broadcast_double_backwards) {
  const Tensor t = torch::rand({4, 4}, first_).to(torch::kDouble).requires_grad_();
  Tensor sum = torch::zeros({}, torch::kDouble);
  for (const Tensor& copy : Broadcast(t, devices_)) sum = sum + copy.pow(2).sum().cpu();
  const Tensor first = torch::autograd::grad({sum}, {t}, {}, true, true)[0];
  first.sum().backward();
  ExpectClose(t.grad(), torch::full({4, 4}, 4.0, torch::kDouble));
}

TEST_P(DataParallelConformance, test_zero_grad) {
  nn::Linear linear(2, 2);
  DataParallel parallel(linear, {.devices = devices_});
  parallel.Forward(torch::ones({4, 2})).sum().backward();
  linear->zero_grad();
  EXPECT_FALSE(linear->weight.grad().defined());
  EXPECT_NO_THROW(parallel.Forward(torch::ones({4, 2})).sum().backward());
}

// libtorch's own ParameterList and ParameterDict cannot be cloned once they hold something.
TEST_P(DataParallelConformance, test_parameter_list_dict_replica) {
  struct M : nn::Cloneable<M> {
    M() { reset(); }
    void reset() override {
      list = {register_parameter("0", torch::ones({2})),
              register_parameter("1", torch::ones({2}) * 2)};
    }
    Tensor forward(Tensor x) { return x * list[0] + list[1]; }
    std::vector<Tensor> list;
  };
  const auto m = std::make_shared<M>();
  const Tensor output = RunDataParallel(m, torch::ones({4, 2}), devices_);
  EXPECT_TRUE(output.cpu().equal(torch::full({4, 2}, 3.0f)));
  output.sum().backward();
  EXPECT_TRUE(m->list[0].grad().equal(torch::full({2}, 4.0f)));
}

TEST_P(DataParallelConformance, test_replicate_buffers) {
  nn::BatchNorm2d norm(10);
  norm->to(devices_[0]);
  const auto replicas = distgrad::Replicate(norm, devices_);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(replicas[i]->running_mean.device(), devices_[i]);
    EXPECT_EQ(replicas[i]->running_mean.is_alias_of(norm->running_mean), i == 0);
    EXPECT_EQ(replicas[i]->num_batches_tracked.scalar_type(), torch::kLong);
  }
}

TEST_P(DataParallelConformance, test_strided_grad_layout) {
  if (GetParam()) GTEST_SKIP() << "the simulated accelerator has no convolutions";
  nn::Conv2d conv(nn::Conv2dOptions(8, 8, 3).bias(false));
  conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  const Tensor input = torch::rand({4, 8, 6, 6});
  RunDataParallel(conv, input, devices_).sum().backward();
  const Tensor got = conv->weight.grad();
  EXPECT_TRUE(got.strides() == conv->weight.strides());
  conv->zero_grad();
  conv->forward(input).sum().backward();
  EXPECT_TRUE(torch::allclose(got, conv->weight.grad(), 1e-4, 1e-4));
}

}  // namespace
}  // namespace distgrad
