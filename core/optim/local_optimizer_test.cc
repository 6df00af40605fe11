// Steps by the gradients of a context, and parameters that have none.
#include "core/optim/local_optimizer.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/autograd/context_record.h"
#include "core/base/thread_pool.h"
#include "tests/testing/waiting_thread.h"

namespace distgrad {
namespace {

struct Hook : torch::autograd::PostAccumulateGradHook {
  explicit Hook(std::function<void()> body) : body(std::move(body)) {}
  void operator()(const at::Tensor&) override { body(); }
  const std::function<void()> body;
};

class LocalOptimizerTest : public testing::Test {
 protected:
  static void AddGradient(ContextRecord& context, const at::Tensor& parameter, double value) {
    context.Accumulate(static_cast<torch::autograd::AccumulateGrad&>(
                           *torch::autograd::impl::grad_accumulator(parameter)),
                       at::full({2}, value));
  }
  static double LearningRate(torch::optim::Optimizer& sgd) {
    return sgd.param_groups()[0].options().get_lr();
  }

  const at::Tensor used_ = at::ones({2}).set_requires_grad(true);
  const at::Tensor unused_ = at::ones({2}).set_requires_grad(true);
  torch::optim::SGD* const sgd_ =
      new torch::optim::SGD({used_, unused_}, torch::optim::SGDOptions(1));
  LocalOptimizer optimizer_{std::unique_ptr<torch::optim::Optimizer>(sgd_)};
  ContextRecord context_{1};
};

TEST_F(LocalOptimizerTest, WhatHasNoGradientIsLeftAlone) {
  used_.mutable_grad() = at::full({2}, 7.0);
  AddGradient(context_, used_, 3);
  const auto norms = optimizer_.GradientNorms(context_);
  ASSERT_TRUE(norms.ok()) << norms.status();
  ASSERT_EQ(norms->size(), 1u);
  EXPECT_NEAR((*norms)[0].item<double>(), 3 * std::sqrt(2), 1e-5);
  ASSERT_TRUE(optimizer_.ScaleGradients(context_, at::scalar_tensor(2)).ok());
  ASSERT_TRUE(optimizer_.Step(context_, /*learning_rate=*/0.5).ok());
  EXPECT_TRUE(used_.equal(at::full({2}, -2.0f)));
  EXPECT_TRUE(unused_.equal(at::ones({2})));
  EXPECT_TRUE(used_.grad().equal(at::full({2}, 7.0f)));
  EXPECT_FALSE(unused_.grad().defined());
}

// libtorch takes it in one group and in two.
TEST_F(LocalOptimizerTest, AParameterThatIsThereTwiceCountsOnce) {
  LocalOptimizer optimizer(std::make_unique<torch::optim::SGD>(
      std::vector<at::Tensor>{used_, unused_, used_}, torch::optim::SGDOptions(1)));
  AddGradient(context_, used_, 3);
  const auto norms = optimizer.GradientNorms(context_);
  ASSERT_TRUE(norms.ok()) << norms.status();
  ASSERT_EQ(norms->size(), 1u);
  EXPECT_NEAR((*norms)[0].item<double>(), 3 * std::sqrt(2), 1e-5);
  ASSERT_TRUE(optimizer.ScaleGradients(context_, at::scalar_tensor(2)).ok());
  EXPECT_TRUE(context_.Gradient(used_)->equal(at::full({2}, 6.0f)));
}

// A factor of the dtype of the norm over all workers, whose parameters may have another one.
TEST_F(LocalOptimizerTest, AScaledGradientKeepsItsDtype) {
  const at::Tensor temperature = at::ones({}, at::kBFloat16).set_requires_grad(true);
  LocalOptimizer optimizer(std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{temperature},
                                                               torch::optim::SGDOptions(1)));
  context_.Accumulate(static_cast<torch::autograd::AccumulateGrad&>(
                          *torch::autograd::impl::grad_accumulator(temperature)),
                      at::full({}, 3, at::kBFloat16));
  const absl::Status scaled = optimizer.ScaleGradients(context_, at::scalar_tensor(0.5));
  ASSERT_TRUE(scaled.ok()) << scaled;
  EXPECT_TRUE(context_.Gradient(temperature)->equal(at::full({}, 1.5, at::kBFloat16)));
}

// Passes add in place to what it sets, in whatever mode.
TEST_F(LocalOptimizerTest, WhatIsScaledInInferenceModeIsNoTensorOfIt) {
  AddGradient(context_, used_, 3);
  {
    const c10::InferenceMode inference;
    ASSERT_TRUE(optimizer_.ScaleGradients(context_, at::scalar_tensor(0.5)).ok());
  }
  EXPECT_FALSE(context_.Gradient(used_)->is_inference());
  AddGradient(context_, used_, 3);
  EXPECT_TRUE(context_.Gradient(used_)->equal(at::full({2}, 4.5)));
}

TEST_F(LocalOptimizerTest, WhatAStepInInferenceModeMakesIsNoTensorOfIt) {
  LocalOptimizer optimizer(std::make_unique<torch::optim::SGD>(
      std::vector<at::Tensor>{used_}, torch::optim::SGDOptions(1).momentum(0.9)));
  AddGradient(context_, used_, 3);
  {
    const c10::InferenceMode inference;
    ASSERT_TRUE(optimizer.Step(context_).ok());
  }
  const absl::Status again = optimizer.Step(context_);
  EXPECT_TRUE(again.ok()) << again;
}

// The hook of a pass waits for something that this worker's pool has to do, and one step for the
// hook; so whoever waits for that step must not keep the pool's thread.
TEST_F(LocalOptimizerTest, WhoWaitsForAStepLeavesItsThreadToOthers) {
  std::promise<void> in_hook, done, go_on;
  AddGradient(context_, used_, 3);
  torch::autograd::impl::set_post_acc_grad_hooks(used_, std::make_unique<Hook>([&] {
                                                   in_hook.set_value();
                                                   go_on.get_future().wait();
                                                 }));
  ContextRecord other(2);
  std::thread pass([&] { AddGradient(other, used_, 5); });
  in_hook.get_future().wait();
  LocalOptimizer second(
      std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{used_}, /*lr=*/1.0));
  ThreadPool pool("test", 1);  // ends first, with what it runs
  // Waits for the hook, and has the parameters meanwhile.
  pool.Schedule([&] { EXPECT_TRUE(optimizer_.Step(context_).ok()); });
  // Wait for that one.
  pool.Schedule([&] { EXPECT_TRUE(optimizer_.SetLearningRate(1).ok()); });
  pool.Schedule([&] { EXPECT_TRUE(second.Step(context_).ok()); });
  pool.Schedule([&] { done.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  go_on.set_value();
  pass.join();
}

TEST_F(LocalOptimizerTest, OneThatIsRemovedHasLetGoOfItsParameters) {
  AddGradient(context_, used_, 3);
  EXPECT_TRUE(optimizer_.State().ok());
  const auto held = unused_.use_count();
  EXPECT_TRUE(optimizer_.Remove());
  EXPECT_LT(unused_.use_count(), held);
  EXPECT_FALSE(optimizer_.Remove());
  for (const absl::Status& status :
       {optimizer_.Step(context_), optimizer_.SetLearningRate(1), optimizer_.State().status(),
        optimizer_.LoadState({}), optimizer_.GradientNorms(context_).status(),
        optimizer_.ScaleGradients(context_, at::scalar_tensor(2))}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  }
  EXPECT_TRUE(used_.equal(at::ones({2})));
}

TEST_F(LocalOptimizerTest, AContextThatIsReleasedIsAnErrorAndChangesNothing) {
  AddGradient(context_, used_, 3);
  context_.Release();
  for (const absl::Status& status : {optimizer_.Step(context_, /*learning_rate=*/0.5),
                                     optimizer_.GradientNorms(context_).status(),
                                     optimizer_.ScaleGradients(context_, at::scalar_tensor(2))}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  }
  EXPECT_TRUE(used_.equal(at::ones({2})));
  EXPECT_EQ(LearningRate(*sgd_), 1);
}

// Of another context, on another thread. Both want the parameter's .grad for a while.
TEST_F(LocalOptimizerTest, APostAccumulateHookMayRunWhileTheParameterIsStepped) {
  std::promise<void> stepped;
  // Steps only when the hook runs, or its pass waits for what is stepped.
  struct SlowSgd : torch::optim::SGD {
    SlowSgd(std::vector<at::Tensor> parameters, std::function<void()> before)
        : SGD(std::move(parameters), torch::optim::SGDOptions(1)), before(std::move(before)) {}
    at::Tensor step(LossClosure closure) override {
      before();
      return SGD::step(std::move(closure));
    }
    const std::function<void()> before;
  };
  ContextRecord other(2);
  std::optional<WaitingThread> pass;
  LocalOptimizer optimizer(std::make_unique<SlowSgd>(std::vector<at::Tensor>{used_}, [&] {
    pass.emplace([&] { AddGradient(other, used_, 5); });
    EXPECT_TRUE(pass->Waits());
  }));
  AddGradient(context_, used_, 3);
  torch::autograd::impl::set_post_acc_grad_hooks(
      used_, std::make_unique<Hook>([&] { stepped.get_future().wait(); }));
  EXPECT_TRUE(optimizer.Step(context_).ok());
  stepped.set_value();
  pass.reset();
  EXPECT_TRUE(used_.equal(at::full({2}, -2.0f))) << used_;
  const auto gradient = other.Gradient(used_);
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  EXPECT_TRUE(gradient->equal(at::full({2}, 5.0f))) << *gradient;
  EXPECT_FALSE(used_.grad().defined());
}

}  // namespace
}  // namespace distgrad
