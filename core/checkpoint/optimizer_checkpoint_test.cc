// Optimizers' files that go to Python's torch and come from it, and those that are refused.
#include "core/checkpoint/optimizer_checkpoint.h"

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "core/checkpoint/optimizer_cases.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using torch::optim::Adagrad;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr char kPython[] = "core/checkpoint/testdata";

// Made by Python's torch, as optimizer_python.py says.
class PythonOptimizerTest : public testing::TestWithParam<OptimizerCase> {};

TEST_P(PythonOptimizerTest, GoesOnAsInPython) {
  ExpectGoesOnAsInPython(GetParam(), kPython, testing::TempDir());
}

INSTANTIATE_TEST_SUITE_P(All, PythonOptimizerTest, testing::ValuesIn(OptimizerCases()),
                         [](const auto& info) { return info.param.name; });

class OptimizerCheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    parameters_ = {{"fc.weight", at::ones({2, 3}).requires_grad_()},
                   {"fc.bias", at::ones({2}, at::kDouble).requires_grad_()}};
    adam_ = NewAdam();
    for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::ones_like(parameter);
    adam_->step();
    const absl::Status saved = SaveOptimizer(*adam_, parameters_, path_);
    ASSERT_TRUE(saved.ok()) << saved;
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status();
    good_metadata_ = metadata_ = file->header().metadata;
    tensors_ = LoadSafetensors(path_).value();
  }
  std::unique_ptr<Optimizer> NewAdam() const {
    return std::make_unique<Adam>(
        std::vector<at::Tensor>{parameters_.at("fc.weight"), parameters_.at("fc.bias")},
        AdamOptions(0.25));
  }
  // What the file has now, in `metadata_` and `tensors_`, is refused and changes nothing.
  void ExpectRefused(const std::string& part) {
    ASSERT_TRUE(SaveSafetensors(tensors_, path_, metadata_).ok());
    ExpectRefusedBy(adam_.get(), parameters_, part);
    const std::string again = path_ + ".again";
    ASSERT_TRUE(SaveOptimizer(*adam_, parameters_, again).ok());
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(again);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->header().metadata, good_metadata_) << part;
  }
  void ExpectRefusedBy(Optimizer* optimizer, const TensorMap& parameters, const std::string& part,
                       absl::StatusCode code = absl::StatusCode::kInvalidArgument) const {
    const absl::Status loaded = LoadOptimizer(path_, parameters, optimizer);
    EXPECT_EQ(loaded.code(), code) << loaded;
    EXPECT_TRUE(absl::StrContains(loaded.message(), part)) << loaded << "\nlacks " << part;
    EXPECT_TRUE(absl::StrContains(loaded.message(), path_)) << loaded;
    EXPECT_LT(loaded.message().size(), 1500u);
  }

  const std::string path_ = testing::TempDir() + "/optimizer.safetensors";
  TensorMap parameters_;
  std::unique_ptr<Optimizer> adam_;
  TensorMap tensors_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, std::string> good_metadata_;  // as it was saved
};

TEST_F(OptimizerCheckpointTest, AFileHasTheWordsOfStateDict) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"state.fc.bias.exp_avg", "state.fc.bias.exp_avg_sq",
                                      "state.fc.bias.step", "state.fc.weight.exp_avg",
                                      "state.fc.weight.exp_avg_sq", "state.fc.weight.step"}));
  EXPECT_EQ(tensors_["state.fc.weight.step"].scalar_type(), at::kFloat);
  EXPECT_EQ(tensors_["state.fc.weight.step"].dim(), 0);
  EXPECT_EQ(metadata_, (std::map<std::string, std::string>{
                           {"format", "pt"},
                           {"optimizer", "Adam"},
                           {"param_groups",
                            "[{\"amsgrad\":false,\"betas\":[0.9,0.999],\"eps\":1e-08,\"lr\":0.25,"
                            "\"param_names\":[\"fc.weight\",\"fc.bias\"],\"params\":[0,1],"
                            "\"weight_decay\":0.0}]"}}));
}

TEST_F(OptimizerCheckpointTest, ASnapshotStaysAsItWasTaken) {
  const absl::StatusOr<OptimizerSnapshot> snapshot = SnapshotOptimizer(*adam_, parameters_);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  adam_->step();
  EXPECT_EQ(snapshot->metadata, good_metadata_);
  ASSERT_EQ(snapshot->tensors.size(), tensors_.size());
  for (const auto& [name, tensor] : tensors_) {
    EXPECT_TRUE(snapshot->tensors.at(name).equal(tensor)) << name;
  }
}

// Else it is found out when the job comes back, and the optimizer is gone.
TEST_F(OptimizerCheckpointTest, WhatALoadWouldRefuseIsNotSaved) {
  const auto is_refused = [&](const std::string& part) {
    const std::string path = path_ + ".new";
    const absl::Status saved = SaveOptimizer(*adam_, parameters_, path);
    EXPECT_EQ(saved.code(), absl::StatusCode::kInvalidArgument) << saved;
    EXPECT_TRUE(absl::StrContains(saved.message(), part)) << saved << "\nlacks " << part;
    EXPECT_TRUE(absl::StrContains(saved.message(), path)) << saved;
    EXPECT_FALSE(std::filesystem::exists(path));
    std::filesystem::remove(path);
  };
  auto& options = static_cast<AdamOptions&>(adam_->param_groups()[0].options());
  options.lr(-0.5);
  is_refused("'param_groups.0.lr' is -0.5");
  options.lr(0.25).amsgrad(true);
  is_refused("'state.fc.weight.max_exp_avg_sq' is missing");
  options.amsgrad(false);
  // As Module::to() does.
  parameters_["fc.bias"].set_data(parameters_["fc.bias"].detach().to(at::kFloat));
  is_refused("'state.fc.bias.exp_avg' has dtype Double, not Float");
}

TEST_F(OptimizerCheckpointTest, ManyStepsAreCountedExactly) {
  for (const int64_t steps : {int64_t{1} << 24, (int64_t{1} << 24) + 1}) {
    for (auto& [key, state] : adam_->state()) {
      static_cast<torch::optim::AdamParamState&>(*state).step(steps);
    }
    ASSERT_TRUE(SaveOptimizer(*adam_, parameters_, path_).ok());
    const std::unique_ptr<Optimizer> other = NewAdam();
    ASSERT_TRUE(LoadOptimizer(path_, parameters_, other.get()).ok());
    for (const auto& [key, state] : other->state()) {
      EXPECT_EQ(static_cast<const torch::optim::AdamParamState&>(*state).step(), steps);
    }
  }
}

TEST_F(OptimizerCheckpointTest, WhatIsNoSuchStateIsSaid) {
  const auto good = good_metadata_;
  const TensorMap tensors = tensors_;
  const auto groups = [&](const std::string& from, const std::string& to, const std::string& part) {
    metadata_ = good;
    std::string& text = metadata_["param_groups"];
    ASSERT_TRUE(absl::StrContains(text, from));
    text = absl::StrReplaceAll(text, {{from, to}});
    ExpectRefused(part);
  };
  metadata_.erase("optimizer");
  ExpectRefused("it is not the state of an optimizer");
  metadata_ = good;
  metadata_.erase("param_groups");
  ExpectRefused("it is not the state of an optimizer");
  metadata_ = good;
  metadata_["optimizer"] = "AdamW";
  ExpectRefused("it is of the optimizer 'AdamW', and this is Adam");
  metadata_ = good;
  for (const std::string& text :
       {std::string(), std::string("{}"), std::string("[{]"), std::string("null"),
        std::string(1'000'000, '['), "[{\"a\":[[" + std::string(1'000'000, '[')}) {
    metadata_["param_groups"] = text;
    ExpectRefused("are no list of groups in JSON");
  }
  metadata_["param_groups"] = "[[]]";
  ExpectRefused("its param_groups[0] has no param_names");
  groups("param_names", "names", "its param_groups[0] has no param_names");
  groups("\"fc.bias\"", "7", "has a name that is no string");
  groups("\"fc.bias\"", "\"fc.weight\"", "has 'fc.weight' again");
  groups("\"fc.bias\"", "\"fc.b\\n\"", "missing are 'fc.bias'; unexpected are 'fc.b\\n'");
  groups(",\"fc.bias\"", "", "missing are 'fc.bias'");
  groups("\"fc.bias\"", "\"fc.bias\",\"x\"", "unexpected are 'x'");
  groups("[{", "[{\"param_names\":[]},{", "a group without parameters");
  groups("[\"fc.weight\",\"fc.bias\"]", "[\"fc.weight\"]},{\"param_names\":[\"fc.bias\"]",
         "none of its groups has the parameters of the optimizer's group 0");
  groups("\"lr\":0.25,", "", "'param_groups.0.lr' is missing");
  groups("0.25", "-1", "'param_groups.0.lr' is -1");
  groups("0.25", "\"0.25\"", "'lr' is no option");
  groups("0.25", "{}", "'lr' is no option");
  groups("[0.9,", "[0.9,0.9,", "'param_groups.0.betas' has dtype Double and shape [3]");
  groups("[0.9,", "[null,", "'betas' is no option");
  groups("\"lr\"", "\"momentum\":1,\"lr\"", "'param_groups.0.momentum' is unexpected");
  groups("\"lr\"", "\"a\\nb\":1,\"lr\"", "'a\\nb' is no option");
  groups("\"lr\"", "\"maximize\":true,\"lr\"", "maximize is not false");
  groups("\"lr\"", "\"decoupled_weight_decay\":true,\"lr\"", "decoupled_weight_decay is not");
  groups("false", "true", "'state.fc.weight.max_exp_avg_sq' is missing");
  metadata_ = good;
  const auto with = [&](const std::string& name, const at::Tensor& tensor,
                        const std::string& part) {
    tensors_ = tensors;
    tensors_[name] = tensor;
    ExpectRefused(part);
  };
  with("x", at::ones({1}), "a tensor 'x', which is no state");
  with("state.", at::ones({1}), "a tensor 'state.', which is no state");
  with("state.x.exp_avg", at::ones({1}), "a tensor 'state.x.exp_avg', which is no state");
  with("state.fc.bias.a\nb", at::ones({1}), "which is no state");
  with("state.fc.bias.moment", at::ones({1}), "'state.fc.bias.moment' is unexpected");
  with("state.fc.bias.exp_avg", at::ones({3}, at::kDouble),
       "'state.fc.bias.exp_avg' has shape [3], not [2]");
  with("state.fc.bias.exp_avg", at::ones({2}), "has dtype Float, not Double");
  tensors_ = tensors;
  tensors_.erase("state.fc.bias.step");
  ExpectRefused("'state.fc.bias.step' is missing");
}

TEST_F(OptimizerCheckpointTest, OptionsOfPythonThatChangeNothingArePassedOver) {
  std::string& text = metadata_["param_groups"];
  text = absl::StrReplaceAll(text,
                             {{"\"lr\":0.25",
                               "\"lr\":1,\"initial_lr\":0.5,\"foreach\":null,\"fused\":true,"
                               "\"capturable\":false,\"differentiable\":false,\"maximize\":false,"
                               "\"decoupled_weight_decay\":false"}});
  ASSERT_TRUE(SaveSafetensors(tensors_, path_, metadata_).ok());
  const absl::Status loaded = LoadOptimizer(path_, parameters_, adam_.get());
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(adam_->param_groups()[0].options().get_lr(), 1);
}

TEST_F(OptimizerCheckpointTest, EachParameterHasOneName) {
  const TensorMap fewer = {{"fc.bias", parameters_["fc.bias"]}};
  const absl::Status saved = SaveOptimizer(*adam_, fewer, path_ + ".new");
  EXPECT_EQ(saved.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(saved.message(), "parameter 0 of the optimizer, of shape [2, 3]"))
      << saved;
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
  ExpectRefusedBy(adam_.get(), fewer, "parameter 0 of the optimizer, of shape [2, 3]");
  // Others may have one too, and one may have two: the file has either of them.
  TensorMap more = parameters_;
  more["another"] = at::ones({1});
  more["none"] = at::Tensor();
  more["a.tied.weight"] = parameters_["fc.weight"];
  ASSERT_TRUE(LoadOptimizer(path_, more, adam_.get()).ok());
  ASSERT_TRUE(SaveOptimizer(*adam_, more, path_).ok());
  EXPECT_EQ(LoadSafetensors(path_)->count("state.a.tied.weight.exp_avg"), 1u);
  ASSERT_TRUE(LoadOptimizer(path_, more, adam_.get()).ok());
  ExpectRefusedBy(adam_.get(), parameters_, "missing are 'fc.weight'");
}

TEST_F(OptimizerCheckpointTest, OtherOptimizersAreRefused) {
  const std::vector<at::Tensor> all = {parameters_["fc.weight"], parameters_["fc.bias"]};
  torch::optim::LBFGS lbfgs(all);
  EXPECT_EQ(SaveOptimizer(lbfgs, parameters_, path_ + ".new").code(),
            absl::StatusCode::kUnimplemented);
  ExpectRefusedBy(&lbfgs, parameters_, "SGD, Adam, AdamW, Adagrad and RMSprop",
                  absl::StatusCode::kUnimplemented);
  AdamW adamw(all, AdamWOptions(1.0));
  ExpectRefusedBy(&adamw, parameters_, "it is of the optimizer 'Adam', and this is AdamW");
  SGD sgd(all, SGDOptions(1.0));
  ExpectRefusedBy(&sgd, parameters_, "it is of the optimizer 'Adam', and this is SGD");
}

// Adagrad makes the states of its parameters when it is made, and none for those that come later.
TEST_F(OptimizerCheckpointTest, AFrozenParameterThatCameLaterHasNoState) {
  const at::Tensor weight = parameters_["fc.weight"], frozen = at::ones({2});
  const TensorMap parameters = {{"weight", weight}, {"frozen", frozen}};
  const auto make = [&] {
    auto adagrad = std::make_unique<Adagrad>(std::vector<at::Tensor>{weight}, 0.5);
    adagrad->add_param_group(OptimizerParamGroup({frozen}));
    return adagrad;
  };
  const std::unique_ptr<Adagrad> adagrad = make();
  adagrad->step();
  // Nor has one of which libtorch found that out in a step: it leaves a null in the place.
  frozen.mutable_grad() = at::ones({2});
  EXPECT_ANY_THROW(adagrad->step());
  frozen.mutable_grad().reset();
  const absl::Status saved = SaveOptimizer(*adagrad, parameters, path_);
  ASSERT_TRUE(saved.ok()) << saved;
  const std::unique_ptr<Adagrad> same = make();
  const absl::Status loaded = LoadOptimizer(path_, parameters, same.get());
  EXPECT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(same->state().size(), 1u);
  // One that has a state would go on with none.
  Adagrad all(std::vector<OptimizerParamGroup>{OptimizerParamGroup({weight}),
                                               OptimizerParamGroup({frozen})},
              0.5);
  ExpectRefusedBy(&all, parameters, "'state.frozen.step' is missing");
}

// As SGD makes it of sparse gradients: the format has no sparse tensors.
TEST_F(OptimizerCheckpointTest, SparseMomentumIsRefused) {
  const at::Tensor table = at::ones({4, 3}).requires_grad_();
  SGD sgd({table}, SGDOptions(0.1).momentum(0.9));
  table.mutable_grad() =
      at::sparse_coo_tensor(at::ones({1, 1}, at::kLong), at::ones({1, 3}), {4, 3});
  sgd.step();
  const absl::Status saved = SaveOptimizer(sgd, {{"table", table}}, path_ + ".new");
  EXPECT_EQ(saved.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(saved.message(), "'state.table.momentum_buffer' is not dense"))
      << saved;
}

}  // namespace
}  // namespace distgrad
