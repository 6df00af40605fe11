// States that are saved, loaded and trained on with, and states that do not fit.
#include "core/optim/optimizer_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace distgrad {
namespace {

using Made = std::unique_ptr<torch::optim::Optimizer>;

struct Case {
  std::string name;
  std::function<Made(std::vector<at::Tensor>)> make;  // as it was trained
  std::function<Made(std::vector<at::Tensor>)> make_other;
  std::vector<std::string> options, state;
  bool from_the_start = false;  // whether parameters that have taken no step have a state
};

Case Sgd() {
  const std::vector<std::string> options = {"lr", "momentum", "dampening", "weight_decay",
                                            "nesterov"};
  return {"Sgd",
          [](std::vector<at::Tensor> parameters) {
            return std::make_unique<torch::optim::SGD>(
                std::move(parameters),
                torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true));
          },
          [](std::vector<at::Tensor> parameters) {
            return std::make_unique<torch::optim::SGD>(std::move(parameters), 7.0);
          },
          options,
          {"momentum_buffer"}};
}
template <typename Optimizer, typename Options>
Case AnyAdam(std::string name, bool amsgrad) {
  std::vector<std::string> state = {"step", "exp_avg", "exp_avg_sq"};
  if (amsgrad) state.push_back("max_exp_avg_sq");
  return {std::move(name),
          [amsgrad](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(
                std::move(parameters),
                Options(0.1).betas({0.8, 0.99}).eps(1e-6).weight_decay(0.02).amsgrad(amsgrad));
          },
          [](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), Options(7.0));
          },
          {"lr", "betas", "eps", "weight_decay", "amsgrad"},
          std::move(state)};
}

Case Adagrad() {
  return {"Adagrad",
          [](std::vector<at::Tensor> parameters) {
            return std::make_unique<torch::optim::Adagrad>(std::move(parameters),
                                                           torch::optim::AdagradOptions(0.1)
                                                               .lr_decay(0.01)
                                                               .weight_decay(0.02)
                                                               .initial_accumulator_value(0.5)
                                                               .eps(1e-6));
          },
          [](std::vector<at::Tensor> parameters) {
            return std::make_unique<torch::optim::Adagrad>(std::move(parameters), 7.0);
          },
          {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"},
          {"step", "sum"},
          /*from_the_start=*/true};
}
Case Rmsprop(std::string name, double momentum, bool centered) {
  std::vector<std::string> state = {"step", "square_avg"};
  if (momentum > 0) state.push_back("momentum_buffer");
  if (centered) state.push_back("grad_avg");
  return {std::move(name),
          [=](std::vector<at::Tensor> parameters) {
            return std::make_unique<torch::optim::RMSprop>(std::move(parameters),
                                                           torch::optim::RMSpropOptions(0.1)
                                                               .alpha(0.8)
                                                               .eps(1e-6)
                                                               .weight_decay(0.02)
                                                               .momentum(momentum)
                                                               .centered(centered));
          },
          [](std::vector<at::Tensor> parameters) {
            return std::make_unique<torch::optim::RMSprop>(std::move(parameters), 7.0);
          },
          {"lr", "alpha", "eps", "weight_decay", "momentum", "centered"},
          std::move(state)};
}

class OptimizerStateTest : public testing::TestWithParam<Case> {
 protected:
  // The third is never used.
  static std::vector<at::Tensor> NewParameters() {
    at::manual_seed(1);
    return {at::randn({2, 3}).requires_grad_(), at::randn({4}, at::kDouble).requires_grad_(),
            at::randn({2}).requires_grad_()};
  }
  static void Step(torch::optim::Optimizer& optimizer, std::vector<at::Tensor>& parameters,
                   int step) {
    for (int i = 0; i < 2; ++i) {
      parameters[i].mutable_grad() = at::full_like(parameters[i], 0.3 * (step + 1) - i).detach();
    }
    optimizer.step();
  }
  static std::vector<StateTensor> StateOf(torch::optim::Optimizer& optimizer) {
    absl::StatusOr<std::vector<StateTensor>> state = ReadState(optimizer);
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? *std::move(state) : std::vector<StateTensor>();
  }
  // After three steps.
  void SetUp() override {
    for (int i = 0; i < 3; ++i) Step(*optimizer_, parameters_, i);
    state_ = StateOf(*optimizer_);
  }
  at::Tensor* Find(const std::string& name) { return FindIn(state_, name); }
  static at::Tensor* FindIn(std::vector<StateTensor>& state, const std::string& name) {
    for (StateTensor& each : state) {
      if (each.name == name) return &each.tensor;
    }
    ADD_FAILURE() << name;
    return nullptr;
  }
  static at::Tensor Of(torch::optim::Optimizer& optimizer, const std::string& name) {
    std::vector<StateTensor> state = StateOf(optimizer);
    return *FindIn(state, name);
  }
  void ExpectRefused(const std::string& part) {
    const std::vector<StateTensor> before = StateOf(*optimizer_);
    const absl::Status loaded = LoadState(state_, optimizer_.get());
    EXPECT_EQ(loaded.code(), absl::StatusCode::kInvalidArgument) << loaded;
    EXPECT_NE(loaded.message().find(part), std::string::npos) << loaded << "\nlacks " << part;
    const std::vector<StateTensor> after = StateOf(*optimizer_);
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(after[i].tensor.equal(before[i].tensor)) << before[i].name;
    }
  }

  std::vector<at::Tensor> parameters_ = NewParameters();
  const Made optimizer_ = GetParam().make(parameters_);
  std::vector<StateTensor> state_;
};

TEST_P(OptimizerStateTest, HasTheNamesOfPyTorch) {
  std::vector<std::string> want, got;
  for (const std::string& name : GetParam().options) want.push_back("param_groups.0." + name);
  for (const char* parameter : {"0.", "1.", "2."}) {
    if (parameter[0] == '2' && !GetParam().from_the_start) continue;
    for (const std::string& name : GetParam().state) {
      want.push_back("state." + (parameter + name));
    }
  }
  for (const StateTensor& each : state_) got.push_back(each.name);
  EXPECT_EQ(got, want);
  EXPECT_EQ(Find("param_groups.0.lr")->item<double>(), 0.1);
}

TEST_P(OptimizerStateTest, TrainingGoesOnWithItToTheLastBit) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : parameters_) {
    parameters.push_back(parameter.detach().clone().requires_grad_());
  }
  const Made other = GetParam().make_other(parameters);
  Step(*other, parameters, 17);  // what it had goes
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].detach().copy_(parameters_[i]);
  {
    const c10::InferenceMode inference;  // of whoever loads; what is loaded is written to later
    const absl::Status loaded = LoadState(state_, other.get());
    ASSERT_TRUE(loaded.ok()) << loaded;
  }
  for (int i = 3; i < 6; ++i) {
    Step(*optimizer_, parameters_, i);
    Step(*other, parameters, i);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].equal(parameters_[i])) << i;
  }
  const std::vector<StateTensor> state = StateOf(*other), reference = StateOf(*optimizer_);
  ASSERT_EQ(state.size(), reference.size());
  for (size_t i = 0; i < state.size(); ++i) {
    EXPECT_EQ(state[i].name, reference[i].name);
    EXPECT_TRUE(state[i].tensor.equal(reference[i].tensor)) << state[i].name;
  }
  // What was read and given is nobody else's: it has not followed.
  const size_t last = GetParam().options.size() + GetParam().state.size() - 1;
  ASSERT_EQ(state_[last].name, reference[last].name);
  EXPECT_FALSE(state_[last].tensor.equal(reference[last].tensor));
}

TEST_P(OptimizerStateTest, NumbersMayBeOfOtherTypes) {
  for (StateTensor& each : state_) {
    // As PyTorch has its steps.
    if (each.tensor.scalar_type() == at::kLong) each.tensor = each.tensor.to(at::kFloat);
  }
  const absl::Status loaded = LoadState(state_, optimizer_.get());
  EXPECT_TRUE(loaded.ok()) << loaded;
}

TEST_P(OptimizerStateTest, AParameterThatHasTakenNoStepHasNone) {
  state_.resize(GetParam().options.size());
  if (GetParam().from_the_start) return ExpectRefused("'state.2.step' is missing");
  ASSERT_TRUE(LoadState(state_, optimizer_.get()).ok());
  EXPECT_TRUE(optimizer_->state().empty());
}

TEST_P(OptimizerStateTest, WhatIsMissingUnexpectedOrOfAnotherShapeIsSaid) {
  const std::vector<StateTensor> whole = state_;
  const std::string last = "state.1." + GetParam().state.back();
  state_.erase(state_.begin());
  ExpectRefused("'param_groups.0.lr' is missing");
  state_ = whole;
  if (GetParam().state.size() > 1) {
    const size_t at = GetParam().options.size() + 2 * GetParam().state.size() - 1;
    ASSERT_EQ(state_[at].name, last);
    state_.erase(state_.begin() + static_cast<std::ptrdiff_t>(at));
    ExpectRefused("'" + last + "' is missing");
    state_ = whole;
    *Find("state.0.step") = at::scalar_tensor(1.5);
    ExpectRefused("'state.0.step' is 1.5");
    state_ = whole;
  }
  if (GetParam().options[1] == "betas") {
    *Find("param_groups.0.betas") = at::tensor({0.5, 1.0});
    ExpectRefused("'param_groups.0.betas' has 1");
    state_ = whole;
  }
  state_.push_back({"state.3." + GetParam().state.back(), at::ones({2})});
  ExpectRefused("'state.3." + GetParam().state.back() + "' is unexpected");
  state_ = whole;
  state_.push_back(state_[0]);
  ExpectRefused("'param_groups.0.lr' is there twice");
  state_ = whole;
  state_[0].tensor = at::Tensor();
  ExpectRefused("'param_groups.0.lr' is no tensor");
  state_ = whole;
  *Find(last) = at::ones({5}, at::kDouble);
  ExpectRefused("'" + last + "' has shape [5], not [4]");
  state_ = whole;
  *Find(last) = at::ones({4});
  ExpectRefused("'" + last + "' has dtype Float, not Double");
  state_ = whole;
  if (GetParam().name != "Sgd") {
    *Find(last) = at::ones({4}, at::kDouble).to_sparse();
    ExpectRefused("'" + last + "' is not a dense tensor");
  }
  state_ = whole;
  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    *Find("param_groups.0.lr") = at::scalar_tensor(wrong, at::kDouble);
    ExpectRefused("'param_groups.0.lr' is ");
  }
  *Find("param_groups.0.lr") = at::ones({2});
  ExpectRefused("'param_groups.0.lr' has dtype Float and shape [2]");
  for (int i = 0; i < 20; ++i) state_.push_back({"more." + std::to_string(i), at::ones({})});
  ExpectRefused("; and 11 more");
}

TEST_P(OptimizerStateTest, ParametersMayHaveNames) {
  const StateForm form = {{"fc.weight", "fc.bias", "unused"}, /*copy=*/false};
  absl::StatusOr<std::vector<StateTensor>> named = ReadState(*optimizer_, form);
  ASSERT_TRUE(named.ok()) << named.status();
  ASSERT_EQ(named->size(), state_.size());
  const std::string slot = GetParam().state.back();
  const std::string last = "state.fc.bias." + slot;
  EXPECT_EQ((*named)[0].name, "param_groups.0.lr");
  for (size_t i = 0; i < state_.size(); ++i) {
    EXPECT_TRUE((*named)[i].tensor.equal(state_[i].tensor)) << state_[i].name;
  }
  // Not a copy, either way.
  std::vector<at::Tensor> parameters = NewParameters();
  const Made other = GetParam().make_other(parameters);
  ASSERT_TRUE(LoadState(*named, other.get(), form).ok());
  const at::Tensor shared = *FindIn(*named, last), before = shared.clone();
  EXPECT_TRUE(Of(*other, "state.1." + slot).equal(before));
  Step(*other, parameters, 5);
  EXPECT_FALSE(shared.equal(before));
  EXPECT_TRUE(Of(*optimizer_, "state.1." + slot).equal(shared));

  *FindIn(*named, last) = at::ones({5}, at::kDouble);
  const absl::Status refused = LoadState(*named, other.get(), form);
  EXPECT_NE(refused.message().find("'state.fc.bias." + slot + "' has shape [5]"), std::string::npos)
      << refused;
  for (const absl::Status& status :
       {LoadState({}, other.get(), {{"one"}}), ReadState(*other, {{"one"}}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("has 3 parameters, and 1 have names"), std::string::npos);
  }
  const std::string name = GetParam().name;
  EXPECT_EQ(OptimizerName(*optimizer_).value(), name == "Sgd"       ? "SGD"
                                                : name == "Amsgrad" ? "Adam"
                                                : name.find("Rmsprop") != std::string::npos
                                                    ? "RMSprop"
                                                    : name);
}

INSTANTIATE_TEST_SUITE_P(
    All, OptimizerStateTest,
    testing::Values(Sgd(), AnyAdam<torch::optim::Adam, torch::optim::AdamOptions>("Adam", false),
                    AnyAdam<torch::optim::Adam, torch::optim::AdamOptions>("Amsgrad", true),
                    AnyAdam<torch::optim::AdamW, torch::optim::AdamWOptions>("AdamW", false),
                    Adagrad(), Rmsprop("Rmsprop", 0, false), Rmsprop("MomentumRmsprop", 0.9, false),
                    Rmsprop("CenteredRmsprop", 0, true)),
    [](const auto& info) { return info.param.name; });

TEST(OptimizersStateTest, ParametersCountThroughAllGroups) {
  const auto leaf = [] { return at::ones({1}).requires_grad_(); };
  const at::Tensor last = leaf();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{leaf(), leaf()});
  groups.emplace_back(
      std::vector<at::Tensor>{last},
      std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.5).momentum(0.5)));
  torch::optim::SGD sgd(groups, torch::optim::SGDOptions(1));
  last.mutable_grad() = at::ones({1});
  sgd.step();
  const absl::StatusOr<std::vector<StateTensor>> state = ReadState(sgd);
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->back().name, "state.2.momentum_buffer");
  EXPECT_TRUE(LoadState(*state, &sgd).ok());
  EXPECT_EQ(sgd.param_groups()[1].options().get_lr(), 0.5);
}

// As SGD makes it of sparse gradients, which an embedding has.
TEST(OptimizersStateTest, MomentumMayBeSparse) {
  const auto gradient = [](int64_t row) {
    return at::sparse_coo_tensor(at::full({1, 1}, row, at::kLong), at::ones({1, 3}), {4, 3});
  };
  const auto make = [](const at::Tensor& parameter) {
    return std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{parameter},
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  const auto step = [&](torch::optim::SGD& sgd, const at::Tensor& parameter, int64_t row) {
    parameter.mutable_grad() = gradient(row);
    sgd.step();
  };
  const at::Tensor one = at::ones({4, 3}).requires_grad_();
  const auto sgd = make(one);
  step(*sgd, one, 1);
  step(*sgd, one, 2);
  const absl::StatusOr<std::vector<StateTensor>> state = ReadState(*sgd);
  ASSERT_TRUE(state.ok()) << state.status();
  ASSERT_TRUE(state->back().tensor.is_sparse());
  const at::Tensor other = one.detach().clone().requires_grad_();
  const auto loaded = make(other);
  const absl::Status done = LoadState(*state, loaded.get());
  ASSERT_TRUE(done.ok()) << done;
  const at::Tensor before = state->back().tensor.to_dense();
  step(*sgd, one, 3);
  step(*loaded, other, 3);
  EXPECT_TRUE(one.equal(other)) << one << other;
  EXPECT_TRUE(state->back().tensor.to_dense().equal(before)) << "it is a copy";
}

// A state that is kept on another device would be copied by each save.
TEST(OptimizersStateTest, ACheckCopiesNothing) {
  const at::Tensor parameter = at::ones({2}).requires_grad_();
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
  parameter.mutable_grad() = at::ones({2});
  sgd.step();
  absl::StatusOr<std::vector<StateTensor>> state = ReadState(sgd);
  ASSERT_TRUE(state.ok()) << state.status();
  ASSERT_EQ(state->back().name, "state.0.momentum_buffer");
  state->back().tensor = at::empty({2}, at::kMeta);  // from which nothing can be copied
  const absl::Status checked = LoadState(*state, &sgd, {.names = {}, .check_only = true});
  EXPECT_TRUE(checked.ok()) << checked;
  EXPECT_FALSE(LoadState(*state, &sgd).ok());
}

// A copy would read what is behind it.
TEST(OptimizersStateTest, ATensorThatReachesBehindItsStorageIsRefused) {
  const at::Tensor parameter = at::ones({100}).requires_grad_();
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
  parameter.mutable_grad() = at::ones({100});
  sgd.step();
  absl::StatusOr<std::vector<StateTensor>> state = ReadState(sgd);
  ASSERT_TRUE(state.ok()) << state.status();
  const absl::StatusOr<std::vector<StateTensor>> own = ReadState(sgd, {.names = {}, .copy = false});
  ASSERT_TRUE(own.ok()) << own.status();
  own->back().tensor.storage().set_nbytes(99 * sizeof(float));
  for (const bool copy : {true, false}) {
    const absl::Status read = ReadState(sgd, {.names = {}, .copy = copy}).status();
    EXPECT_EQ(read.code(), absl::StatusCode::kInvalidArgument) << read;
    EXPECT_EQ(read.message(), "'state.0.momentum_buffer' has elements that are not in its memory");
    const absl::Status loaded = LoadState(*own, &sgd, {.names = {}, .copy = copy});
    EXPECT_EQ(loaded.code(), absl::StatusCode::kInvalidArgument) << loaded;
    EXPECT_EQ(loaded.message(),
              "the state is not this optimizer's: 'state.0.momentum_buffer' has elements that are "
              "not in its memory");
  }
  state->front().tensor = at::ones({}, at::kDouble);
  state->front().tensor.storage().set_nbytes(0);
  const absl::Status number = LoadState(*state, &sgd);
  EXPECT_EQ(number.message(),
            "the state is not this optimizer's: 'param_groups.0.lr' has elements that are not in "
            "its memory");
}

TEST(OptimizersStateTest, OthersAreNotKnown) {
  torch::optim::LBFGS lbfgs(std::vector<at::Tensor>{at::ones({1}).requires_grad_()});
  EXPECT_EQ(ReadState(lbfgs).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(LoadState({}, &lbfgs).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(OptimizerName(lbfgs).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace distgrad
