// What gradients are and what may be done with them, across workers and in one process alike:
// types, shapes and layouts; hooks; custom functions; in-place; checkpointing; modes.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/team.h"

namespace distgrad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// A function of two tensors, run by another worker and by this one.
using Formula = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

class GradientsTest : public ::testing::TestWithParam<std::string> {
 protected:
  GradientsTest() : team_(3, {.transport = GetParam()}) {}

  // x and the view of it that is sent are worker 0's, w is worker 1's.
  void Compare(const at::Tensor& x, const Formula& view, const at::Tensor& w,
               const Formula& formula) {
    Context context = team_[0].NewContext();
    const auto loss = [](const at::Tensor& y) {
      return (y.is_complex() ? at::real(y * y.conj()) : y).sum();
    };
    const at::Tensor y =
        team_.Run(0, 1, context, [&](Tensors in, Request&) { return Tensors{formula(in[0], w)}; },
                  {view(x, w)})[0];
    ASSERT_TRUE(y.requires_grad());
    const absl::Status done = context.Backward({loss(y)});
    ASSERT_TRUE(done.ok()) << done;
    const Tensors want = Reference(loss(formula(view(x, w), w)), {x, w});
    ExpectSame(GradientOf(context, x), want[0]);
    ExpectSame(team_.Gradient(1, context, w), want[1]);
    // Laid out like the leaf, as its .grad would be.
    EXPECT_EQ(GradientOf(context, x).strides(), x.strides());
    EXPECT_FALSE(x.grad().defined());
    EXPECT_FALSE(w.grad().defined());
  }

  Team team_;
};

at::Tensor Itself(const at::Tensor& x, const at::Tensor&) { return x; }

TEST_P(GradientsTest, Types) {
  for (const at::ScalarType type :
       {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    SCOPED_TRACE(c10::toString(type));
    Compare(Leaf({3, 4}, 1, type), Itself, Leaf({3, 4}, 2, type),
            [](const at::Tensor& x, const at::Tensor& w) { return x * w * w; });
  }
  // From one to another on the way.
  Compare(
      Leaf({3, 4}, 1, at::kDouble),
      [](const at::Tensor& x, const at::Tensor&) { return x.to(at::kHalf); }, Leaf({3, 4}, 2),
      [](const at::Tensor& x, const at::Tensor& w) { return x * w; });
}

TEST_P(GradientsTest, ShapesAndLayouts) {
  const Formula product = [](const at::Tensor& x, const at::Tensor& w) { return x * w; };
  const std::map<std::string, std::pair<at::Tensor, Formula>> cases = {
      {"0-dim", {Leaf({}, 1), Itself}},
      {"empty", {Leaf({0, 3}, 1), Itself}},
      {"expanded",
       {Leaf({3, 1}, 1),
        [](const at::Tensor& x, const at::Tensor&) {
          return x.expand({3, 5});
        }}},
      {"transposed",
       {Leaf({3, 5}, 1), [](const at::Tensor& x, const at::Tensor&) { return x.t(); }}},
      {"strided",
       {Leaf({6, 8}, 1), [](const at::Tensor& x,
                            const at::Tensor&) { return x.slice(0, 0, 6, 2).slice(1, 1, 8, 3); }}},
      {"channels last",
       {Leaf({2, 3, 4, 5}, 1),
        [](const at::Tensor& x, const at::Tensor&) {
          return x.contiguous(at::MemoryFormat::ChannelsLast);
        }}},
      {"large", {Leaf({200, 300}, 1), Itself}},
  };
  for (const auto& [name, one] : cases) {
    SCOPED_TRACE(name);
    const at::Tensor sent = one.second(one.first, {});
    Compare(one.first, one.second, Leaf(sent.sizes(), 2), product);
    Compare(one.first, one.second, Leaf({}, 2), product);
  }
  // A leaf that is itself laid out otherwise keeps its layout in its gradient.
  at::Tensor leaf = Leaf({2, 3, 4, 5}, 1).detach().contiguous(at::MemoryFormat::ChannelsLast);
  leaf.set_requires_grad(true);
  Compare(leaf, Itself, Leaf({2, 3, 4, 5}, 2), product);
}

TEST_P(GradientsTest, SparseOnTheCalleeAndOverTheWire) {
  const at::Tensor rows = at::tensor({5, 0, 0, 2});
  const auto look_up = [&](const at::Tensor& table) {
    return at::embedding(table, rows, -1, false, /*sparse=*/true);
  };
  const at::Tensor factor = at::rand({4, 3});
  // The table is the callee's.
  Compare(Leaf({4, 3}, 1), Itself, Leaf({6, 3}, 2),
          [&](const at::Tensor& x, const at::Tensor& w) { return look_up(w) * x; });
  // The table is sent, and its sparse gradient comes back; twice, and then a dense one too.
  for (const bool dense : {false, true}) {
    SCOPED_TRACE(dense);
    const at::Tensor table = Leaf({6, 3}, 3);
    Context context = team_[0].NewContext();
    const auto f = [&](const at::Tensor& t) {
      const at::Tensor y = look_up(t) * factor;
      return dense ? y.sum() + t.sum() : y.sum();
    };
    const at::Tensor y = team_.Run(
        0, 1, context, [&](Tensors in, Request&) { return Tensors{f(in[0])}; }, {table})[0];
    const absl::Status done = context.Backward({y}, {.retain_graph = true});
    ASSERT_TRUE(done.ok()) << done;
    const at::Tensor want = Reference(f(table), {table})[0];
    EXPECT_EQ(want.is_sparse(), !dense);
    ExpectSame(GradientOf(context, table), want);
    ASSERT_TRUE(context.Backward({y}).ok());
    const at::Tensor got = GradientOf(context, table);
    EXPECT_EQ(got.is_sparse(), !dense);
    EXPECT_TRUE(got.to_dense().allclose(want.to_dense() * 2));
  }
}

// Shows what arrived for its two outputs.
struct Shows : torch::autograd::Function<Shows> {
  static variable_list forward(AutogradContext* context, const Variable& x, bool materialize) {
    context->set_materialize_grads(materialize);
    return {x * 1, x * 2};
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    seen = gradients;
    at::Tensor sum;
    for (const at::Tensor& g : gradients) {
      if (g.defined()) sum = sum.defined() ? sum + g : g;
    }
    return {sum, Variable()};
  }
  static variable_list seen;
};
variable_list Shows::seen;

TEST_P(GradientsTest, UndefinedStaysUndefined) {
  for (const bool materialize : {false, true}) {
    const at::Tensor x = Leaf({2, 3}, 1);
    Context context = team_[0].NewContext();
    const variable_list both = Shows::apply(x, materialize);
    // Both are sent, one of them is used there.
    const at::Tensor y =
        team_.Run(0, 1, context, [](Tensors in, Request&) { return Tensors{in[1].sin()}; },
                  {both[0], both[1]})[0];
    ASSERT_TRUE(context.Backward({y.sum()}).ok());
    EXPECT_EQ(Shows::seen[0].defined(), materialize);
    EXPECT_TRUE(Shows::seen[1].defined());
    // None is used: then it does not run at all.
    Shows::seen = {};
    Context unused = team_[0].NewContext();
    const variable_list again = Shows::apply(x, materialize);
    const at::Tensor z =
        team_.Run(0, 1, unused, [](Tensors in, Request&) { return Tensors{in[2].sin()}; },
                  {again[0], again[1], x})[0];
    ASSERT_TRUE(unused.Backward({z.sum()}).ok());
    EXPECT_TRUE(GradientOf(unused, x).equal(x.cos()));
  }
}

TEST_P(GradientsTest, GradientsShareNoMemory) {
  const at::Tensor x = Leaf({2, 3}, 1), y = Leaf({2, 3}, 2), factor = at::rand({6});
  Context context = team_[0].NewContext();
  const at::Tensor r =
      team_.Run(0, 1, context, [](Tensors in, Request&) { return Tensors{in[0] * 3}; }, {x})[0];
  // One buffer is the gradient of all three, each time as another view.
  const at::Tensor loss = ((x.reshape({6}) + y.reshape({6}) + r.reshape({6})) * factor).sum();
  for (int pass = 1; pass <= 3; ++pass) {
    ASSERT_TRUE(context.Backward({loss}, {.retain_graph = true}).ok());
    const at::Tensor want = factor.view({2, 3}) * pass;
    EXPECT_TRUE(GradientOf(context, x).allclose(want * 4)) << "pass " << pass;
    EXPECT_TRUE(GradientOf(context, y).allclose(want)) << "pass " << pass;
  }
  EXPECT_FALSE(GradientOf(context, x).is_alias_of(GradientOf(context, y)));
}

TEST_P(GradientsTest, AGradientThatNobodyElseHoldsIsNotCopied) {
  const at::Tensor x = Leaf({64, 64}, 1);
  const void* memory = nullptr;
  x.register_hook([&](const at::Tensor& g) { memory = g.data_ptr(); });
  Context context = team_[0].NewContext();
  const at::Tensor y =
      team_.Run(0, 1, context, [](Tensors in, Request&) { return Tensors{in[0].sin()}; }, {x})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  EXPECT_EQ(GradientOf(context, x).data_ptr(), memory);
}

TEST_P(GradientsTest, ANewGradientIsOfItsLeafsKind) {
  const at::Tensor x = Leaf({2, 3}, 1), other = Leaf({2, 3}, 2);
  Context context = team_[0].NewContext();
  ASSERT_TRUE(context.Backward({x.sum()}).ok());
  for (const at::Tensor& wrong : {at::Tensor(), at::ones({3, 2}), at::ones({6}),
                                  at::ones({2, 3}, at::kDouble), at::ones({2, 3}, at::kMeta)}) {
    EXPECT_EQ(context.SetGradient(x, wrong).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(context.SetGradient(other, at::ones({2, 3})).code(), absl::StatusCode::kNotFound);
  ExpectSame(GradientOf(context, x), at::ones({2, 3}));
  EXPECT_TRUE(context.SetGradient(x, at::full({2, 3}, 7.0)).ok());
  ExpectSame(GradientOf(context, x), at::full({2, 3}, 7.0));
  context.Release();
  EXPECT_EQ(context.SetGradient(x, at::ones({2, 3})).code(), absl::StatusCode::kFailedPrecondition);
}

// The next pass adds to what the context has in place.
TEST_P(GradientsTest, ANewGradientStaysItsGivers) {
  const at::Tensor x = Leaf({2, 3}, 1), y = Leaf({2, 3}, 2);
  const at::Tensor before = x.detach().clone();
  const at::Tensor given = at::full({2, 3}, 7.0);
  Context context = team_[0].NewContext();
  const at::Tensor loss = (x + y).sum();
  ASSERT_TRUE(context.Backward({loss}, {.retain_graph = true}).ok());
  for (const at::Tensor& leaf : {x, y}) ASSERT_TRUE(context.SetGradient(leaf, given).ok());
  ASSERT_TRUE(context.Backward({loss}, {.retain_graph = true}).ok());
  for (const at::Tensor& leaf : {x, y}) ExpectSame(GradientOf(context, leaf), given + 1);
  ExpectSame(given, at::full({2, 3}, 7.0));
  ASSERT_TRUE(context.SetGradient(x, x).ok());
  ASSERT_TRUE(context.SetGradient(y, at::ones({1}).expand({2, 3})).ok());
  ASSERT_TRUE(context.Backward({loss}).ok());
  ExpectSame(x.detach(), before);
  ExpectSame(GradientOf(context, x), before + 1);
  ExpectSame(GradientOf(context, y), at::full({2, 3}, 2.0));
}

// Nor does it add in place to what libtorch lets nobody write to.
TEST_P(GradientsTest, ANewGradientMayBeOfInferenceModeOrOfOtherMemory) {
  const at::Tensor x = Leaf({2, 3}, 1), y = Leaf({2, 3}, 2);
  Context context = team_[0].NewContext();
  const at::Tensor loss = (x + y).sum();
  ASSERT_TRUE(context.Backward({loss}, {.retain_graph = true}).ok());
  std::vector<float> memory(6, 5);
  {
    const c10::InferenceMode inference;
    ASSERT_TRUE(context.SetGradient(x, at::full({2, 3}, 7.0)).ok());
  }
  ASSERT_TRUE(context.SetGradient(y, at::from_blob(memory.data(), {2, 3})).ok());
  const absl::Status again = context.Backward({loss});
  ASSERT_TRUE(again.ok()) << again;
  ExpectSame(GradientOf(context, x), at::full({2, 3}, 8.0));
  ExpectSame(GradientOf(context, y), at::full({2, 3}, 6.0));
  EXPECT_EQ(memory, std::vector<float>(6, 5));
}

// Also where nobody else has the tensor. The memory is written again when the pass has ended.
TEST_P(GradientsTest, ARootGradientMayBeOfOtherMemory) {
  const at::Tensor x = Leaf({2, 3}, 1), bias = Leaf({2, 3}, 2);
  Context context = team_[0].NewContext();
  const at::Tensor sum = x + bias, twice = sum * 2;
  std::vector<float> memory(6, 5);
  const auto backward = [&](std::vector<at::Tensor> roots, std::vector<at::Tensor> more) {
    BackwardOptions options{.retain_graph = true};
    options.root_gradients.push_back(at::from_blob(memory.data(), {2, 3}));
    for (at::Tensor& gradient : more) options.root_gradients.push_back(std::move(gradient));
    const absl::Status done = context.Backward(std::move(roots), std::move(options));
    ASSERT_TRUE(done.ok()) << done;
  };
  backward({sum}, {});  // to the leaves as it is
  memory.assign(6, 100);
  for (const at::Tensor& leaf : {x, bias}) {
    ExpectSame(GradientOf(context, leaf), at::full({2, 3}, 5.0));
  }
  backward({sum, twice}, {at::ones({2, 3})});  // something is added to it on its way
  for (const at::Tensor& leaf : {x, bias}) {
    ExpectSame(GradientOf(context, leaf), at::full({2, 3}, 107.0));
  }
  EXPECT_EQ(memory, std::vector<float>(6, 100));
}

TEST_P(GradientsTest, TensorHooksAndRetainsGrad) {
  const at::Tensor x = Leaf({2, 3}, 1);
  at::Tensor received, hooked;
  Context context = team_[0].NewContext();
  const at::Tensor y =
      team_.Run(0, 1, context,
                [&](Tensors in, Request&) {
                  received = in[0];
                  received.register_hook([](const at::Tensor& g) { return g * 3; });
                  received.retain_grad();
                  hooked = received * 2;
                  hooked.register_hook([](const at::Tensor& g) { return g * 5; });
                  return Tensors{hooked.sin()};
                },
                {x})[0];
  y.register_hook([](const at::Tensor& g) { return g * 7; });
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  const at::Tensor want = (x.detach() * 2).cos() * 7 * 5 * 2 * 3;
  EXPECT_TRUE(GradientOf(context, x).allclose(want));
  EXPECT_TRUE(received.grad().allclose(want)) << "what its hook made";
}

struct Scale : torch::autograd::PostAccumulateGradHook {
  explicit Scale(int* calls) : calls(calls) {}
  void operator()(const Variable& tensor) override {
    ++*calls;
    tensor.mutable_grad() = tensor.grad() * 10;
  }
  int* const calls;
};

TEST_P(GradientsTest, LeafAndPostAccumulateHooks) {
  const at::Tensor x = Leaf({2, 3}, 1), w = Leaf({2, 3}, 2);
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<Scale>(&calls));
  x.register_hook([](const at::Tensor& g) { return -g; });
  Context context = team_[0].NewContext();
  const at::Tensor y =
      team_.Run(0, 1, context, [&](Tensors in, Request&) { return Tensors{in[0] * w}; }, {x})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(GradientOf(context, x).equal(-w));
  EXPECT_TRUE(team_.Gradient(1, context, w).equal(x * 10));
}

struct Cube : torch::autograd::Function<Cube> {
  static Variable forward(AutogradContext* context, const Variable& x, double factor) {
    context->save_for_backward({x});
    context->saved_data["factor"] = factor;
    return x * x * x * factor;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Variable x = context->get_saved_variables()[0];
    return {gradients[0] * 3 * x * x * context->saved_data["factor"].toDouble(), Variable()};
  }
};

TEST_P(GradientsTest, CustomFunctions) {
  Compare(
      Leaf({3, 4}, 1), [](const at::Tensor& x, const at::Tensor&) { return Cube::apply(x, 0.5); },
      Leaf({3, 4}, 2),
      [](const at::Tensor& x, const at::Tensor& w) { return Cube::apply(x * w, 2.0); });
}

TEST_P(GradientsTest, InPlaceOnAReceivedTensor) {
  // Before anything saved it: as in one process.
  Compare(
      Leaf({3, 4}, 1), [](const at::Tensor& x, const at::Tensor&) { return x * 1; },
      Leaf({3, 4}, 2), [](at::Tensor x, const at::Tensor& w) { return x.mul_(w).add_(1).sin(); });
  // On a reply too.
  {
    const at::Tensor x = Leaf({3, 4}, 1);
    Context context = team_[0].NewContext();
    at::Tensor y =
        team_.Run(0, 1, context, [](Tensors in, Request&) { return Tensors{in[0].sin()}; }, {x})[0];
    y.mul_(2);
    ASSERT_TRUE(context.Backward({y.sum()}).ok());
    EXPECT_TRUE(GradientOf(context, x).allclose(x.cos() * 2));
  }
  // After sin() saved it.
  const at::Tensor x = Leaf({3, 4}, 1);
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context,
                                 [](Tensors in, Request&) {
                                   const at::Tensor result = in[0].sin();
                                   in[0].mul_(2);
                                   return Tensors{result};
                                 },
                                 {x})[0];
  const absl::Status status = context.Backward({y.sum()});
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("modified by an inplace operation"), std::string::npos) << status;
  EXPECT_NE(status.message().find("SinBackward0"), std::string::npos) << status;
  EXPECT_NE(status.message().find("worker1"), std::string::npos) << status;
}

// Packs what a node saved as twice its value: unpacking halves it.
struct Doubled : torch::autograd::SavedVariableHooks {
  explicit Doubled(int* unpacked) : unpacked(unpacked) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed = tensor.detach() * 2; }
  at::Tensor call_unpack_hook() override {
    ++*unpacked;
    return packed / 2;
  }
  int* const unpacked;
  at::Tensor packed;
};

TEST_P(GradientsTest, SavedTensorHooks) {
  const at::Tensor x = Leaf({3, 4}, 1);
  int unpacked = 0;
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(
      0, 1, context,
      [&](Tensors in, Request&) {
        const at::Tensor cube = in[0].pow(3);
        auto* node = dynamic_cast<torch::autograd::generated::PowBackward0*>(cube.grad_fn().get());
        EXPECT_NE(node, nullptr);
        if (node != nullptr) node->self_.register_hooks(std::make_unique<Doubled>(&unpacked));
        return Tensors{cube};
      },
      {x})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  EXPECT_EQ(unpacked, 1);
  EXPECT_TRUE(GradientOf(context, x).allclose(3 * x * x));
}

at::Tensor Block(const at::Tensor& x, const at::Tensor& w) { return (x.mm(w).tanh() * x).sin(); }

// Runs a backward of its own within the backward, which accumulates in x's stand-in and, since it
// is libtorch's, in w.grad(). So w goes in as an input.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static Variable forward(AutogradContext* context, const Variable& x, const Variable& w) {
    context->save_for_backward({x, w});
    return Block(x, w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::AutoGradMode on(true);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor x = saved[0].detach().requires_grad_(), w = saved[1].detach().requires_grad_();
    Block(x, w).backward(gradients[0]);
    return {x.grad(), w.grad()};
  }
};

// Keeps nothing, and computes again what is asked for when it is asked for.
struct Recomputed : torch::autograd::SavedVariableHooks {
  explicit Recomputed(std::function<at::Tensor()> compute) : compute(std::move(compute)) {}
  void call_pack_hook(const at::Tensor&) override {}
  at::Tensor call_unpack_hook() override {
    const at::AutoGradMode off(false);
    return compute();
  }
  const std::function<at::Tensor()> compute;
};

TEST_P(GradientsTest, Checkpointing) {
  const auto reentrant = [](const at::Tensor& x, const at::Tensor& w) {
    return Reentrant::apply(x, w);
  };
  for (const bool on_both : {false, true}) {
    const at::Tensor x = Leaf({3, 3}, 1), w = Leaf({3, 3}, 2);
    Context context = team_[0].NewContext();
    const at::Tensor sent = on_both ? Reentrant::apply(x, w) : x * 1;
    const at::Tensor y =
        team_.Run(0, 1, context, [&](Tensors in, Request&) { return Tensors{reentrant(in[0], w)}; },
                  {sent})[0];
    ASSERT_TRUE(context.Backward({y.sum()}).ok());
    const Tensors want = Reference(Block(on_both ? Block(x, w) : x * 1, w).sum(), {x, w});
    ExpectSame(GradientOf(context, x), want[0]);
    if (!on_both) {
      ExpectSame(team_.Gradient(1, context, w), want[1]);
    }
  }
  // Without a backward inside the backward: what was saved is computed when it is unpacked.
  const at::Tensor x = Leaf({3, 3}, 1);
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(
      0, 1, context,
      [](Tensors in, Request&) {
        const at::Tensor start = in[0];
        const at::Tensor cube = (start.tanh() * start).pow(3);
        auto* node = dynamic_cast<torch::autograd::generated::PowBackward0*>(cube.grad_fn().get());
        if (node != nullptr) {
          node->self_.register_hooks(std::make_unique<Recomputed>(
              [start = start.detach()] { return start.tanh() * start; }));
        }
        return Tensors{cube};
      },
      {x})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  ExpectSame(GradientOf(context, x), Reference((x.tanh() * x).pow(3).sum(), {x})[0]);
}

TEST_P(GradientsTest, IntegersAndBoolsPassThrough) {
  const at::Tensor x = Leaf({4, 3}, 1), index = at::tensor({2, 0}), mask = index.to(at::kBool);
  Context context = team_[0].NewContext();
  const Tensors out = team_.Run(
      0, 1, context,
      [](Tensors in, Request&) {
        EXPECT_FALSE(in[1].requires_grad());
        return Tensors{in[1] + 1, in[0].index_select(0, in[1]), in[2].logical_not(), at::Tensor()};
      },
      {x, index, mask});
  EXPECT_TRUE(out[0].equal(index + 1));
  EXPECT_TRUE(out[2].equal(mask.logical_not()));
  EXPECT_FALSE(out[0].requires_grad() || out[2].requires_grad() || out[3].defined());
  ASSERT_TRUE(context.Backward({out[1].sum()}).ok());
  ExpectSame(GradientOf(context, x), Reference(x.index_select(0, index).sum(), {x})[0]);
}

TEST_P(GradientsTest, TheCallersModesReachTheHandler) {
  const at::Tensor x = Leaf({4, 3}, 1), w = Leaf({3, 3}, 2);
  Context context = team_[0].NewContext();
  std::atomic<bool> grad{true}, inference{false};
  at::ScalarType autocast{};
  const Team::Function mm = [&](Tensors in, Request&) -> absl::StatusOr<Tensors> {
    grad = at::GradMode::is_enabled();
    inference = c10::InferenceMode::is_enabled();
    const at::Tensor y = in[0].mm(w);
    autocast = y.scalar_type();
    return Tensors{y};
  };
  // On its way through a third worker, too.
  const Team::Function relay = [&](Tensors in, Request& r) {
    return team_.Try(1, 2, r.Nested(), mm, std::move(in));
  };
  {
    const at::NoGradGuard no_grad;
    const Tensors y = team_.Run(0, 1, context, relay, {x});
    EXPECT_FALSE(grad || y[0].requires_grad());
  }
  {
    const c10::InferenceMode mode;
    const Tensors y = team_.Run(0, 1, context, relay, {x});
    EXPECT_TRUE(inference);
    EXPECT_TRUE(y[0].is_inference());
    EXPECT_FALSE(grad || y[0].requires_grad());
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const at::Tensor low = team_.Run(0, 1, context, relay, {x})[0];
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(autocast, at::kBFloat16);
  EXPECT_EQ(low.scalar_type(), at::kBFloat16);
  // None of it stays with the threads there.
  for (int i = 0; i < 8; ++i) {
    const at::Tensor y = team_.Run(0, 1, context, relay, {x})[0];
    EXPECT_TRUE(grad && !inference && y.requires_grad());
    EXPECT_EQ(y.scalar_type(), at::kFloat);
  }
  // Gradients of a product in bfloat16 are of the types of what went in.
  ASSERT_TRUE(context.Backward({low.sum()}).ok());
  EXPECT_EQ(GradientOf(context, x).scalar_type(), at::kFloat);
  EXPECT_EQ(team_.Gradient(2, context, w).scalar_type(), at::kFloat);
}

INSTANTIATE_TEST_SUITE_P(Transports, GradientsTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
