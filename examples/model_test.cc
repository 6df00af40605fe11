// Stages of the network, however it is cut, compared with the whole.
#include "examples/model.h"

#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/randint.h"
#include "ATen/ops/randn.h"
#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "torch/optim/sgd.h"

namespace distgrad {
namespace {

at::Tensor SomeImages(int64_t count) {
  return at::randn({count, 1, 28, 28}, at::detail::createCPUGenerator(3));
}

std::vector<Stage> Cut(int count, uint64_t seed) {
  std::vector<Stage> stages;
  for (int i = 0; i < count; ++i) stages.push_back(*Stage::Create(i, count, seed));
  return stages;
}

TEST(ModelTest, IsTheSameHoweverItIsCut) {
  const Stage whole = *Stage::Create(0, 1, 7);
  const at::Tensor images = SomeImages(3);
  const at::Tensor scores = whole.Forward(images);
  EXPECT_EQ(scores.sizes(), (std::vector<int64_t>{3, 10}));

  for (int count = 2; count <= kLayers; ++count) {
    at::Tensor x = images;
    std::vector<at::Tensor> parameters;
    for (const Stage& stage : Cut(count, 7)) {
      EXPECT_FALSE(stage.parameters().empty());
      x = stage.Forward(x);
      parameters.insert(parameters.end(), stage.parameters().begin(), stage.parameters().end());
    }
    EXPECT_TRUE(x.equal(scores)) << count << " stages";
    ASSERT_EQ(parameters.size(), whole.parameters().size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(parameters[i].is_leaf() && parameters[i].requires_grad());
      EXPECT_TRUE(parameters[i].equal(whole.parameters()[i]));
    }
  }
}

TEST(ModelTest, HasTheSizeItsCommentStates) {
  const Stage whole = *Stage::Create(0, 1, 0);
  int64_t size = 0;
  for (const at::Tensor& parameter : whole.parameters()) size += parameter.numel();
  EXPECT_EQ(size, 356746);
}

TEST(ModelTest, IsCutWhereTheStagesTakeTheSameTime) {
  const std::vector<Stage> two = Cut(2, 0);
  EXPECT_EQ(two[0].Describe(), "conv 5x5 1->32, conv 3x3 32->64");
  EXPECT_EQ(two[1].Describe(), "conv 3x3 64->128, linear 2048->128, linear 128->10");
  EXPECT_EQ(Cut(3, 0)[2].Describe(), two[1].Describe());
  EXPECT_EQ(Cut(4, 0)[3].Describe(), "linear 2048->128, linear 128->10");
  EXPECT_EQ(Cut(5, 0)[3].Describe(), "linear 2048->128");
}

TEST(ModelTest, FollowsItsSeed) {
  EXPECT_FALSE(
      Stage::Create(0, 1, 1)->parameters()[0].equal(Stage::Create(0, 1, 2)->parameters()[0]));
}

TEST(ModelTest, RefusesOtherCuts) {
  for (const auto& [index, count] : {std::pair(0, 0), {0, -1}, {0, kLayers + 1}, {2, 2}, {-1, 2}}) {
    EXPECT_EQ(Stage::Create(index, count, 0).status().code(), absl::StatusCode::kInvalidArgument)
        << index << " of " << count;
  }
}

TEST(ModelTest, LearnsABatchByHeart) {
  const Stage model = *Stage::Create(0, 1, 1);
  torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const at::Tensor images = SomeImages(20);
  const at::Tensor labels = at::randint(10, {20}, at::detail::createCPUGenerator(4), at::kLong);
  // About ln 10: no class starts ahead.
  EXPECT_NEAR(Loss(model.Forward(images), labels).item<double>(), 2.3, 0.7);
  for (int step = 0; step < 30; ++step) {
    sgd.zero_grad();
    Loss(model.Forward(images), labels).backward();
    sgd.step();
  }
  EXPECT_LT(Loss(model.Forward(images), labels).item<double>(), 0.1);
  EXPECT_EQ(CountCorrect(model.Forward(images), labels), 20);
}

}  // namespace
}  // namespace distgrad
