// However the transformer is cut, it computes the same; and no place sees those behind it.
#include "examples/transformer_stage.h"

#include <cmath>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/randint.h"
#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

constexpr TransformerShape kShape = {
    .tokens = 20, .context = 12, .width = 16, .heads = 4, .blocks = 4};

TEST(TransformerStageTest, IsTheSameHoweverItIsCut) {
  const at::Tensor tokens = at::randint(20, {3, 12}, at::kLong);
  const TransformerStage whole = *TransformerStage::Create(kShape, 0, 1, /*seed=*/1);
  const at::Tensor scores = whole.Forward(tokens);
  EXPECT_EQ(scores.sizes(), (std::vector<int64_t>{3, 12, 20}));
  for (int count = 2; count <= 4; ++count) {
    at::Tensor x = tokens;
    std::map<std::string, at::Tensor> named;
    for (int i = 0; i < count; ++i) {
      const TransformerStage stage = *TransformerStage::Create(kShape, i, count, 1);
      x = stage.Forward(x);
      named.insert(stage.named_parameters().begin(), stage.named_parameters().end());
    }
    EXPECT_TRUE(x.equal(scores)) << count;
    ASSERT_EQ(named.size(), whole.named_parameters().size());
    for (const auto& [name, tensor] : whole.named_parameters()) {
      EXPECT_TRUE(named.at(name).equal(tensor)) << name;
    }
  }
  EXPECT_FALSE(TransformerStage::Create(kShape, 0, 1, 2)->Forward(tokens).equal(scores));
}

TEST(TransformerStageTest, SeesNothingOfWhatComesLater) {
  const TransformerStage model = *TransformerStage::Create(kShape, 0, 1, 1);
  const at::Tensor tokens = at::randint(20, {1, 12}, at::kLong);
  const at::Tensor other = tokens.clone();
  other[0][7] = (other[0][7] + 1).remainder(20);
  const at::Tensor before = model.Forward(tokens), after = model.Forward(other);
  EXPECT_TRUE(at::allclose(before.slice(1, 0, 7), after.slice(1, 0, 7)));
  EXPECT_FALSE(at::allclose(before.slice(1, 7), after.slice(1, 7)));
}

TEST(TransformerStageTest, KnowsNothingAtFirst) {
  const TransformerStage model = *TransformerStage::Create(kShape, 0, 1, 1);
  const at::Tensor tokens = at::randint(20, {8, 12}, at::kLong);
  const at::Tensor targets = at::randint(20, {8, 12}, at::kLong);
  EXPECT_NEAR(TextLoss(model.Forward(tokens), targets).item<double>(), std::log(20), 0.1);
}

TEST(TransformerStageTest, SaysHowItCannotBeCut) {
  for (const auto& [index, count] : {std::pair{0, 5}, {0, 0}, {2, 2}, {-1, 2}}) {
    EXPECT_EQ(TransformerStage::Create(kShape, index, count, 1).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  TransformerShape uneven = kShape;
  uneven.width = 18;
  EXPECT_EQ(TransformerStage::Create(uneven, 0, 1, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace distgrad
