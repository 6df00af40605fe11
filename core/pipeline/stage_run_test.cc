// Forward and both halves of the backward of one stage, compared with libtorch.
#include "core/pipeline/stage_run.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/autograd/context_record.h"
#include "core/autograd/executor/random_program.h"

namespace distgrad {
namespace {

at::Tensor Leaf(at::Tensor values) { return values.detach().requires_grad_(true); }

// Doubles, and counts how often its backward runs.
struct Counting : torch::autograd::Function<Counting> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a,
                            const at::Tensor& b, int* count) {
    context->saved_data["count"] = reinterpret_cast<int64_t>(count);
    context->save_for_backward({a, b});
    return a * b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    ++*reinterpret_cast<int*>(context->saved_data["count"].toInt());
    const torch::autograd::variable_list saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0], at::Tensor()};
  }
};

// Gives its first argument, and has no gradient for the second one.
struct First : torch::autograd::Function<First> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a,
                            const at::Tensor&) {
    return a.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

// A stage of every kind of edge between inputs and weights.
struct Model {
  std::string name;
  std::vector<at::Tensor> leaves;
  std::function<Tensors(const std::vector<at::Tensor>& leaves, Tensors)> forward;
  std::function<Tensors()> inputs;  // those of floating point get a gradient
};

int counted = 0;

std::vector<Model> Models() {
  std::vector<Model> models;
  models.push_back({"two layers",
                    {at::randn({16, 8}), at::randn({16}), at::randn({4, 16}), at::randn({4})},
                    [](const auto& p, Tensors in) -> Tensors {
                      return {at::linear(at::tanh(at::linear(in[0], p[0], p[1])), p[2], p[3])};
                    },
                    [] {
                      return Tensors{at::randn({5, 8})};
                    }});
  models.push_back({"a weight three times, and the input around it",
                    {at::randn({8, 8})},
                    [](const auto& p, Tensors in) -> Tensors {
                      at::Tensor x = in[0];
                      const at::Tensor w = p[0].t();
                      for (int i = 0; i < 3; ++i) x = at::tanh(x.matmul(i == 1 ? w : p[0])) + in[0];
                      return {x, x * 2, in[0]};
                    },
                    [] {
                      return Tensors{at::randn({5, 8})};
                    }});
  models.push_back({"layer norm, attention, two inputs",
                    {at::rand({8}), at::rand({8}), at::randn({24, 8}), at::randn({8, 8})},
                    [](const auto& p, Tensors in) -> Tensors {
                      const at::Tensor h = at::layer_norm(in[0] + in[1], {8}, p[0], p[1]);
                      const auto qkv = at::linear(h, p[2]).chunk(3, -1);
                      const at::Tensor a = at::softmax(qkv[0].matmul(qkv[1].transpose(1, 2)), -1);
                      return {in[0] + at::linear(a.matmul(qkv[2]), p[3]), in[1]};
                    },
                    [] {
                      return Tensors{at::randn({2, 6, 8}), at::randn({2, 6, 8})};
                    }});
  models.push_back({"a convolution",
                    {at::randn({4, 3, 3, 3}), at::randn({4})},
                    [](const auto& p, Tensors in) -> Tensors {
                      return {at::gelu(at::conv2d(in[0], p[0], p[1]))};
                    },
                    [] {
                      return Tensors{at::randn({2, 3, 8, 8})};
                    }});
  models.push_back({"no input that has a gradient",
                    {at::randn({10, 8}), at::randn({8, 8})},
                    [](const auto& p, Tensors in) -> Tensors {
                      return {at::linear(at::embedding(p[0], in[0]), p[1])};
                    },
                    [] {
                      return Tensors{at::randint(10, {4, 3}, at::kLong)};
                    }});
  models.push_back({"an output of weights alone, and one of inputs alone",
                    {at::randn({3}), at::randn({3})},
                    [](const auto& p, Tensors in) -> Tensors {
                      return {p[0] * p[1], in[0].sin(), at::cat({p[0], in[0]}), p[1]};
                    },
                    [] { return Tensors{at::randn({3})}; }});
  models.push_back({"no weight",
                    {},
                    [](const auto&, Tensors in) -> Tensors {
                      return {in[0].sin() * in[1], in[1].detach()};
                    },
                    [] {
                      return Tensors{at::randn({3}), at::randn({3})};
                    }});
  models.push_back({"a function of the user's",
                    {at::randn({3}), at::randn({3})},
                    [](const auto& p, Tensors in) -> Tensors {
                      return {Counting::apply(in[0] * p[1], p[0] * p[1], &counted) * p[0]};
                    },
                    [] { return Tensors{at::randn({3})}; }});
  models.push_back({"writes to a part of a tensor, with a weight",
                    {at::randn({4}), at::randn({5, 2})},
                    [](const auto& p, Tensors in) -> Tensors {
                      const at::Tensor x = in[0].clone();
                      x.narrow(1, 0, 4).mul_(p[0]);
                      x.narrow(1, 3, 2).copy_(p[1]);
                      return {x.sin()};
                    },
                    [] {
                      return Tensors{at::randn({5, 8})};
                    }});
  // Where there is none for its result, a function's backward is given zeros.
  models.push_back({"a weight whose gradient is zero",
                    {at::randn({3})},
                    [](const auto& p, Tensors in) -> Tensors {
                      return {First::apply(in[0].sin(), Counting::apply(p[0], p[0], &counted))};
                    },
                    [] { return Tensors{at::randn({3})}; }});
  for (Model& model : models) {
    for (at::Tensor& leaf : model.leaves) leaf = Leaf(leaf);
  }
  return models;
}

// Runs some micro-batches of a model, and libtorch's backward of the same, in the same order.
void Compare(const Model& model, bool halves, int late) {
  SCOPED_TRACE(absl::StrCat(model.name, halves ? ", in halves" : ", whole", ", late by ", late));
  constexpr int kMicroBatches = 4;
  ContextRecord context(1);
  std::vector<StageRun> runs(kMicroBatches);
  for (const at::Tensor& leaf : model.leaves) leaf.mutable_grad().reset();
  for (int m = 0; m < kMicroBatches + late; ++m) {
    if (m < kMicroBatches) {
      const Tensors inputs = model.inputs();
      // libtorch
      Tensors own_inputs;
      std::vector<bool> wanted;
      for (const at::Tensor& input : inputs) {
        wanted.push_back(input.is_floating_point());
        own_inputs.push_back(wanted.back() ? Leaf(input.clone()) : input);
      }
      const Tensors expected = model.forward(model.leaves, own_inputs);
      Tensors gradients;
      std::vector<torch::autograd::Edge> roots;
      torch::autograd::variable_list root_gradients;
      Tensors with_history;
      for (size_t i = 0; i < expected.size(); ++i) {
        // One that nothing depends on has none.
        gradients.push_back(i == 1 && m == 2 ? at::Tensor() : at::randn_like(expected[i]));
        if (!expected[i].requires_grad() || !gradients[i].defined()) continue;
        with_history.push_back(expected[i]);
        root_gradients.push_back(gradients[i]);
      }
      torch::autograd::backward(with_history, root_gradients);

      StageRun& run = runs[m];
      const Tensors outputs = run.Forward(
          [&](Tensors in) { return model.forward(model.leaves, std::move(in)); }, inputs, wanted);
      ASSERT_EQ(outputs.size(), expected.size());
      for (size_t i = 0; i < outputs.size(); ++i) {
        EXPECT_TRUE(at::equal(outputs[i], expected[i]));
        EXPECT_EQ(outputs[i].requires_grad(), expected[i].requires_grad());
      }
      const absl::StatusOr<Tensors> back =
          halves ? run.BackwardInput(gradients) : run.Backward(gradients, context);
      ASSERT_TRUE(back.ok()) << back.status();
      ASSERT_EQ(back->size(), inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor gradient = wanted[i] ? at::Tensor(own_inputs[i].grad()) : at::Tensor();
        ASSERT_EQ((*back)[i].defined(), gradient.defined()) << "input " << i;
        if (!gradient.defined()) continue;
        EXPECT_TRUE(at::equal((*back)[i], gradient)) << "input " << i;
      }
    }
    if (halves && m >= late) {
      const absl::Status done = runs[m - late].BackwardWeight(context);
      ASSERT_TRUE(done.ok()) << done;
    }
  }
  for (size_t i = 0; i < model.leaves.size(); ++i) {
    const absl::StatusOr<at::Tensor> gradient = context.Gradient(model.leaves[i]);
    ASSERT_TRUE(gradient.ok()) << gradient.status();
    EXPECT_TRUE(at::equal(*gradient, model.leaves[i].grad())) << "leaf " << i;
  }
}

TEST(StageRunTest, GradientsAreThoseOfLibtorchToTheLastBit) {
  at::manual_seed(1);
  for (const Model& model : Models()) {
    Compare(model, /*halves=*/false, 0);
    for (const int late : {0, 1, 3}) Compare(model, /*halves=*/true, late);
  }
}

// Whether two gradients have the same values, to the last bit or nearly; or are both not there.
bool AreSame(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const at::Tensor x = a.to_dense().to(at::kDouble), y = b.to_dense().to(at::kDouble);
  if (tolerance == 0) return at::allclose(x, y, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true);
  return (x - y).norm().item<double>() <= tolerance * y.norm().item<double>();
}

// What hooks were called, in any order.
std::vector<std::string> NamesOf(const std::vector<std::string>& trace) {
  std::vector<std::string> names;
  for (const std::string& line : trace) names.push_back(line.substr(0, line.find(':')));
  std::sort(names.begin(), names.end());
  return names;
}

// Runs a random program as a stage, and libtorch's backward of the same.
void CompareRandom(uint64_t seed, bool halves, bool recompute, bool hooks) {
  // By the bits of the seed each input has a gradient or not. A hook needs one.
  Tensors inputs, own;
  std::vector<bool> wanted;
  at::manual_seed(seed);
  for (int i = 0; i < 3; ++i) {
    inputs.push_back(at::randn({4, 4}, at::kDouble));
    wanted.push_back(hooks || (seed >> i) % 2 == 0);
    own.push_back(wanted[i] ? Leaf(inputs[i].clone()) : inputs[i]);
  }
  ProgramOptions options{.dtype = at::kDouble,
                         .operators = 12,
                         .hooks = hooks,
                         .post_accumulate_hooks = false,
                         .inputs = own};
  Program theirs(seed, options);
  SCOPED_TRACE(absl::StrCat("seed ", seed, halves ? ", in halves" : ", whole",
                            recompute ? ", recomputed: " : ": ", theirs.text));
  Tensors roots, root_gradients;
  for (size_t i = 0; i < theirs.roots.size(); ++i) {
    if (!theirs.roots[i].requires_grad()) continue;
    roots.push_back(theirs.roots[i]);
    root_gradients.push_back(theirs.root_gradients[i]);
  }
  if (roots.empty()) return;
  torch::autograd::backward(roots, root_gradients);

  std::optional<Program> ours;
  StageRun run;
  ContextRecord context(1);
  const auto forward = [&](Tensors in) {
    options.inputs = std::move(in);
    return ours.emplace(seed, options).roots;
  };
  if (recompute) {
    std::vector<bool> has_history;
    run.ForwardToRecompute(forward, inputs, wanted, &has_history);
    ASSERT_EQ(run.Recompute().status(), absl::OkStatus());
  } else {
    run.Forward(forward, inputs, wanted);
  }
  const absl::StatusOr<Tensors> back = halves ? run.BackwardInput(ours->root_gradients)
                                              : run.Backward(ours->root_gradients, context);
  ASSERT_TRUE(back.ok()) << back.status();
  for (int i = 0; i < 3; ++i) {
    const at::Tensor expected = wanted[i] ? at::Tensor(own[i].grad()) : at::Tensor();
    EXPECT_TRUE(AreSame((*back)[i], expected, 0)) << "input " << i;
  }
  if (halves) {
    ASSERT_EQ(run.BackwardWeight(context), absl::OkStatus());
  }
  // What a function of the user's, or an operator with a hook, has for a leaf is added first in the
  // second half. A cast to fewer bits makes more of that.
  const bool casts = absl::StrContains(theirs.text, "dtypes");
  const double tolerance = !halves ? 0 : casts ? 1e-2 : 1e-5;
  ASSERT_EQ(ours->leaves.size(), theirs.leaves.size());
  for (size_t i = 0; i < theirs.leaves.size(); ++i) {
    const absl::StatusOr<at::Tensor> gradient = context.Gradient(ours->leaves[i]);
    EXPECT_TRUE(
        AreSame(gradient.ok() ? *gradient : at::Tensor(), theirs.leaves[i].grad(), tolerance))
        << "leaf " << i;
  }
  EXPECT_EQ(NamesOf(*ours->trace), NamesOf(*theirs.trace));
}

TEST(StageRunTest, RandomProgramsHaveTheGradientsOfLibtorch) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const bool hooks = seed > 120, recompute = seed % 3 == 0;
    for (const bool halves : {false, true}) CompareRandom(seed, halves, recompute, hooks);
  }
}

TEST(StageRunTest, AFunctionOfTheUsersRunsOnce) {
  counted = 0;
  ContextRecord context(1);
  const at::Tensor weight = Leaf(at::ones({3}));
  StageRun run;
  run.Forward(
      [&](Tensors in) -> Tensors { return {Counting::apply(in[0] * weight, weight, &counted)}; },
      {at::ones({3})}, {true});
  ASSERT_TRUE(run.BackwardInput({at::ones({3})}).ok());
  EXPECT_EQ(counted, 1);
  EXPECT_FALSE(context.Gradient(weight).ok());
  ASSERT_TRUE(run.BackwardWeight(context).ok());
  EXPECT_EQ(counted, 1);
  EXPECT_TRUE(at::equal(*context.Gradient(weight), at::full({3}, 2)));
}

// Counts the products of matrices: each half computes its own gradients alone.
TEST(StageRunTest, AHalfComputesNoMoreThanItsOwnGradients) {
  for (const bool input : {true, false}) {
    const at::Tensor weight = Leaf(at::rand({4, 4}));
    ContextRecord context(1);
    StageRun run;
    run.Forward([&](Tensors in) -> Tensors { return {in[0].mm(weight)}; }, {at::rand({4, 4})},
                {true});
    if (!input) {
      ASSERT_TRUE(run.BackwardInput({at::rand({4, 4})}).ok());
    }
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          if (std::string(function.name()) == "aten::mm") ++counted;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
    counted = 0;
    if (input) {
      EXPECT_TRUE(run.BackwardInput({at::rand({4, 4})}).ok());
    } else {
      EXPECT_TRUE(run.BackwardWeight(context).ok());
    }
    at::removeCallback(handle);
    EXPECT_EQ(counted, 1) << (input ? "inputs" : "weights");
  }
}

TEST(StageRunTest, AHookRunsOnce) {
  const at::Tensor weight = Leaf(at::ones({3}));
  ContextRecord context(1);
  int calls = 0;
  StageRun run;
  run.Forward(
      [&](Tensors in) -> Tensors {
        const at::Tensor product = in[0] * weight;
        product.register_hook([&](const at::Tensor& gradient) {
          ++calls;
          return gradient * 3;
        });
        return {product.sin()};
      },
      {at::zeros({3})}, {true});
  const absl::StatusOr<Tensors> back = run.BackwardInput({at::ones({3})});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(at::equal((*back)[0], at::full({3}, 3)));
  ASSERT_TRUE(run.BackwardWeight(context).ok());
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(*context.Gradient(weight), at::zeros({3})));
}

TEST(StageRunTest, ErrorsSayWhatIsWrong) {
  ContextRecord context(1);
  StageRun run;
  EXPECT_EQ(run.Backward({}, context).status().code(), absl::StatusCode::kFailedPrecondition);
  at::Tensor kept;
  const auto forward = [&](Tensors in) -> Tensors {
    const at::Tensor earlier = kept;
    kept = in[0];
    return {earlier.defined() ? earlier * in[0] : in[0].sin()};
  };
  run.Forward(forward, {at::ones({3})}, {true});
  EXPECT_EQ(run.Backward({}, context).status().message(),
            "there are 1 outputs, and gradients for 0");
  for (const bool halves : {false, true}) {
    StageRun other;
    other.Forward(forward, {at::ones({3})}, {true});
    const absl::Status status = halves ? other.BackwardInput({at::ones({3})}).status()
                                       : other.Backward({at::ones({3})}, context).status();
    EXPECT_NE(status.message().find("an input of another micro-batch"), std::string::npos)
        << status;
  }
}

}  // namespace
}  // namespace distgrad
