// The behaviours that PyTorch's own tests of distributed autograd look for, by their names there
// where distgrad has the idea (it has no remote references and no context bound to a thread), each
// with what is expected here. docs/autograd.md has the table of both.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/autograd/state.h"
#include "tests/integration/team.h"

namespace distgrad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Tensors Add(Tensors in, Request&) { return {in[0] + in[1]}; }
Tensors Multiply(Tensors in, Request&) { return {in[0] * in[1]}; }

class DistributedAutogradTest : public ::testing::TestWithParam<std::string> {
 protected:
  DistributedAutogradTest() : team_(4, {.transport = GetParam()}) {}

  ContextState On(int worker) {
    const std::vector<ContextState> contexts = team_[worker].Contexts();
    return contexts.empty() ? ContextState() : contexts[0];
  }
  // Backward from `root`, and the gradients of these leaves.
  Tensors Gradients(const Context& context, const at::Tensor& root, const Tensors& leaves) {
    const absl::Status done = context.Backward({root});
    EXPECT_TRUE(done.ok()) << done;
    Tensors gradients;
    for (const at::Tensor& leaf : leaves) gradients.push_back(GradientOf(context, leaf));
    return gradients;
  }
  void ExpectLike(const Tensors& got, const Tensors& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].defined(), want[i].defined()) << i;
      if (got[i].defined()) {
        EXPECT_TRUE(at::allclose(got[i], want[i])) << got[i] << want[i];
      }
    }
  }

  Team team_;
  const at::Tensor t1_ = Leaf({3, 3}, 1), t2_ = Leaf({3, 3}, 2);
};

// ------------------------------------------------------------------------ Graphs and contexts

TEST_P(DistributedAutogradTest, autograd_context) {
  std::set<ContextId> ids;
  std::vector<Context> contexts;
  for (int i = 0; i < 100; ++i) {
    contexts.push_back(team_[1].NewContext());
    ids.insert(contexts.back().id());
    EXPECT_EQ(MakerOf(contexts.back().id()), 1);
  }
  EXPECT_EQ(ids.size(), 100u);
  EXPECT_EQ(team_[1].context_count(), 100u);
  contexts.clear();
  EXPECT_EQ(team_[1].context_count(), 0u);
}

TEST_P(DistributedAutogradTest, nested_context) {
  // Any number at a time, also in one thread.
  Context outer = team_[0].NewContext(), inner = team_[0].NewContext();
  const at::Tensor a = team_.Run(0, 1, outer, Add, {t1_, t2_})[0];
  const at::Tensor b = team_.Run(0, 1, inner, Multiply, {t1_, t2_})[0];
  ExpectLike(Gradients(inner, b.sum(), {t1_, t2_}), {t2_, t1_});
  ExpectLike(Gradients(outer, a.sum(), {t1_, t2_}), {at::ones({3, 3}), at::ones({3, 3})});
}

TEST_P(DistributedAutogradTest, graph_for_builtin_call) {
  Context context = team_[0].NewContext();
  auto sum = team_[0].CallOp("worker1", "aten::add.Tensor", {t1_, t2_}, {.context = &context});
  ASSERT_TRUE(sum.ok()) << sum.status();
  const at::Tensor y = (*sum)[0].toTensor();
  EXPECT_TRUE(y.requires_grad());
  EXPECT_EQ(y.grad_fn()->name(), "RecvNode(from worker 1)");
  for (const int worker : {0, 1}) {
    EXPECT_EQ(On(worker).sends, 1u);
    EXPECT_EQ(On(worker).receives, 1u);
  }
}

TEST_P(DistributedAutogradTest, remote_operators_with_several_results) {
  Context context = team_[0].NewContext();
  auto result =
      team_[0].CallOp("worker1", "aten::max.dim", {t1_, int64_t{0}}, {.context = &context});
  ASSERT_TRUE(result.ok()) << result.status();
  const at::Tensor values = (*result)[0].toTensor();
  EXPECT_FALSE((*result)[1].toTensor().requires_grad());
  ExpectLike(Gradients(context, values.sum(), {t1_}),
             Reference(std::get<0>(t1_.max(0)).sum(), {t1_}));
}

TEST_P(DistributedAutogradTest, graph_for_py_nested_call_itself) {
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(
      0, 1, context,
      [&](Tensors in, Request& r) { return team_.Try(1, 0, r.Nested(), Add, std::move(in)); },
      {t1_, t2_})[0];
  EXPECT_EQ(On(0).sends, 2u);
  EXPECT_EQ(On(0).receives, 2u);
  ExpectLike(Gradients(context, y.sum(), {t1_}), {at::ones({3, 3})});
}

TEST_P(DistributedAutogradTest, no_graph_with_tensors_not_require_grad) {
  Context context = team_[0].NewContext();
  const Tensors out = team_.Run(0, 1, context, Add, {t1_.detach(), t2_.detach()});
  EXPECT_FALSE(out[0].requires_grad());
  for (const int worker : {0, 1}) {
    EXPECT_EQ(On(worker).sends + On(worker).receives, 0u);
    // Known all the same: it may be used in a later call.
    EXPECT_EQ(team_[worker].context_count(), 1u);
  }
}

TEST_P(DistributedAutogradTest, worker_ids_recorded) {
  Context context = team_[0].NewContext();
  team_.Run(0, 1, context, Add, {t1_.detach(), t2_.detach()});
  team_.Run(0, 2, context, Add, {t1_, t2_});
  EXPECT_EQ(On(0).peers, (std::vector<WorkerRank>{1, 2}));
  EXPECT_EQ(On(2).peers, std::vector<WorkerRank>{0});
}

TEST_P(DistributedAutogradTest, context_cleanup_nested_rpc) {
  {
    Context context = team_[0].NewContext();
    team_.Run(0, 1, context,
              [&](Tensors in, Request& r) {
                return team_.Try(
                    1, 2, r.Nested(),
                    [&](Tensors in, Request& r) {
                      return team_.Try(2, 3, r.Nested(), Add, std::move(in));
                    },
                    std::move(in));
              },
              {t1_, t2_});
    for (int w = 0; w < 4; ++w) EXPECT_EQ(team_[w].context_count(), 1u);
  }
  team_.AwaitQuiet(0);
}

TEST_P(DistributedAutogradTest, grad_only_on_return_value) {
  Context context = team_[0].NewContext();
  const at::Tensor p = Leaf({3, 3}, 3);
  const Tensors out = team_.Run(0, 1, context,
                                [&](Tensors in, Request&) {
                                  return Tensors{p * 2, in[0]};
                                },
                                {t1_.detach()});
  EXPECT_TRUE(out[0].requires_grad());
  EXPECT_FALSE(out[1].requires_grad());
  ExpectLike(Gradients(context, out[0].sum(), {}), {});
  EXPECT_TRUE(team_.Gradient(1, context, p).equal(at::full({3, 3}, 2.0)));
}

// ----------------------------------------------------------------------------------- Backward

TEST_P(DistributedAutogradTest, backward_simple_self) {
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 0, context, Multiply, {t1_, t2_})[0];
  ExpectLike(Gradients(context, y.sum(), {t1_, t2_}), {t2_, t1_});
}

TEST_P(DistributedAutogradTest, backward_without_rpc) {
  Context context = team_[0].NewContext();
  ExpectLike(Gradients(context, (t1_ * t2_).sum(), {t1_, t2_}), {t2_, t1_});
}

TEST_P(DistributedAutogradTest, backward_no_grad_on_tensor) {
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, Multiply, {t1_, t2_.detach()})[0];
  ExpectLike(Gradients(context, y.sum(), {t1_, t2_}), {t2_, at::Tensor()});
}

TEST_P(DistributedAutogradTest, backward_different_tensor_dims) {
  const at::Tensor a = Leaf({4, 6}, 1), b = Leaf({6, 5}, 2), c = Leaf({5, 7}, 3),
                   d = Leaf({7, 9}, 4);
  const auto chain = [](Tensors in, Request&) {
    return Tensors{at::linalg_multi_dot({in[0], in[1], in[2], in[3]})};
  };
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, chain, {a, b, c, d})[0];
  ExpectLike(Gradients(context, y.sum(), {a, b, c, d}),
             Reference(at::linalg_multi_dot({a, b, c, d}).sum(), {a, b, c, d}));
}

TEST_P(DistributedAutogradTest, mixed_requires_grad) {
  Context context = team_[0].NewContext();
  const Tensors out = team_.Run(0, 1, context,
                                [](Tensors in, Request&) {
                                  return Tensors{in[0] * in[1], in[1] + 1};
                                },
                                {t1_, t2_.detach()});
  EXPECT_TRUE(out[0].requires_grad());
  EXPECT_FALSE(out[1].requires_grad());
  ExpectLike(Gradients(context, (out[0] * out[1]).sum(), {t1_}), {t2_ * (t2_ + 1)});
}

TEST_P(DistributedAutogradTest, backward_multiple_output_tensors) {
  const at::Tensor x = Leaf({100}, 1);
  Context context = team_[0].NewContext();
  const Tensors parts =
      team_.Run(0, 1, context, [](Tensors in, Request&) { return in[0].split(10); }, {x});
  ASSERT_EQ(parts.size(), 10u);
  const std::vector<at::Tensor> want = x.split(10);
  ExpectLike(Gradients(context, (parts[0] * parts[2] * parts[4]).sum(), {x}),
             Reference((want[0] * want[2] * want[4]).sum(), {x}));
}

TEST_P(DistributedAutogradTest, backward_unused_send_function) {
  Context context = team_[0].NewContext();
  team_.Run(0, 1, context, Multiply, {t1_, t2_});
  const at::Tensor y = team_.Run(0, 1, context, Multiply, {t1_, t1_})[0];
  ExpectLike(Gradients(context, y.sum(), {t1_, t2_}), {t1_ * 2, at::Tensor()});
  team_.AwaitQuiet(1);
}

TEST_P(DistributedAutogradTest, one_of_two_results_unused) {
  // What the other depends on has no gradient, rather than zeros.
  Context context = team_[0].NewContext();
  const Tensors out = team_.Run(0, 1, context,
                                [](Tensors in, Request&) {
                                  return Tensors{in[0].sin(), in[1].sin()};
                                },
                                {t1_, t2_});
  ExpectLike(Gradients(context, out[0].sum(), {t1_, t2_}), {t1_.cos(), at::Tensor()});
}

TEST_P(DistributedAutogradTest, backward_multiple_roots) {
  // Four gradients add up in any order.
  const at::Tensor a = Leaf({3, 3}, 1, at::kDouble), b = Leaf({3, 3}, 2, at::kDouble);
  Context context = team_[0].NewContext();
  Tensors roots;
  for (int i = 0; i < 4; ++i) {
    const at::Tensor y = team_.Run(0, 1 + i % 3, context, i % 2 ? Add : Multiply, {a, b})[0];
    roots.push_back(i < 2 ? y.sum() : y.norm());
  }
  ASSERT_TRUE(context.Backward(roots).ok());
  const at::Tensor want = ((a + b).sum() + (a * b).sum() + (a + b).norm() + (a * b).norm());
  ExpectLike({GradientOf(context, a), GradientOf(context, b)}, Reference(want, {a, b}));
}

TEST_P(DistributedAutogradTest, backward_multiple_round_trips) {
  Context context = team_[0].NewContext();
  at::Tensor y = t1_, want = t1_;
  for (int i = 0; i < 5; ++i) {
    y = team_.Run(0, 1 + i % 3, context, Multiply, {y, t2_})[0].tanh();
    want = (want * t2_).tanh();
  }
  ExpectLike(Gradients(context, y.sum(), {t1_, t2_}), Reference(want.sum(), {t1_, t2_}));
}

TEST_P(DistributedAutogradTest, backward_accumulate_grads) {
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, Add, {at::matmul(t1_, t2_), t1_})[0];
  ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  const Tensors once = Reference((at::matmul(t1_, t2_) + t1_).sum(), {t1_, t2_});
  ExpectLike({GradientOf(context, t1_), GradientOf(context, t2_)}, {once[0] * 2, once[1] * 2});
  EXPECT_FALSE(t1_.grad().defined());
}

TEST_P(DistributedAutogradTest, trainer_ps) {
  // Trainers use a parameter server's parameters, each in a context of its own.
  const at::Tensor parameter = Leaf({3, 3}, 5);
  std::vector<Future<Message>> trainers;
  for (const int trainer : {1, 2, 3}) {
    trainers.push_back(team_.Start(
        0, trainer, {},
        [&, trainer](Tensors, Request&) -> absl::StatusOr<Tensors> {
          for (int step = 0; step < 5; ++step) {
            Context context = team_[trainer].NewContext();
            const at::Tensor x = Leaf({3, 3}, trainer * 10 + step);
            auto y =
                team_.Try(trainer, 0, {.context = &context},
                          [&](Tensors in, Request&) { return Tensors{in[0].mm(parameter)}; }, {x});
            if (!y.ok()) return y.status();
            const absl::Status done = context.Backward({(*y)[0].sum()});
            if (!done.ok()) return done;
            at::Tensor there;
            auto asked = team_.Try(trainer, 0, {.context = &context},
                                   [&](Tensors, Request& r) {
                                     there = GradientOf(r.context, parameter);
                                     return Tensors{};
                                   },
                                   {});
            if (!asked.ok()) return asked.status();
            const Tensors want = Reference(x.mm(parameter).sum(), {x, parameter});
            EXPECT_TRUE(at::allclose(GradientOf(context, x), want[0]));
            EXPECT_TRUE(at::allclose(there, want[1]));
          }
          return Tensors{};
        },
        {}));
  }
  for (Future<Message>& trainer : trainers)
    EXPECT_TRUE(trainer.Wait().ok()) << trainer.Wait().status();
  team_.AwaitQuiet(0);
}

TEST_P(DistributedAutogradTest, embedding_bag_with_no_grad_tensors) {
  const at::Tensor table = Leaf({10, 3}, 1);
  const at::Tensor index = at::tensor({1, 2, 4, 5, 4, 3, 2, 9}), offsets = at::tensor({0, 4});
  const auto bag = [&](const at::Tensor& index, const at::Tensor& offsets) {
    return std::get<0>(at::embedding_bag(table, index, offsets, false, /*sum*/ 0, /*sparse=*/true));
  };
  Context context = team_[0].NewContext();
  const at::Tensor y =
      team_.Run(0, 1, context, [&](Tensors in, Request&) { return Tensors{bag(in[0], in[1])}; },
                {index, offsets})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  ExpectSame(team_.Gradient(1, context, table), Reference(bag(index, offsets).sum(), {table})[0]);
}

TEST_P(DistributedAutogradTest, nested_backward_accumulate_grads) {
  // A pass within a handler of the context, and then the caller's: they add up.
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context,
                                 [](Tensors in, Request& r) {
                                   const absl::Status done = r.context.Backward(
                                       {in[0].square().sum()}, {.retain_graph = true});
                                   EXPECT_TRUE(done.ok()) << done;
                                   return Tensors{in[0].sin()};
                                 },
                                 {t1_})[0];
  ExpectLike(Gradients(context, y.sum(), {t1_}), {t1_ * 2 + t1_.cos()});
}

// ----------------------------------------------------------------------------- Hooks and errors

TEST_P(DistributedAutogradTest, post_hooks) {
  int calls = 0;
  t1_.register_hook([&](const at::Tensor& g) {
    ++calls;
    return g * 2;
  });
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, Add, {t1_, t2_})[0];
  ExpectLike(Gradients(context, y.sum(), {t1_, t2_}), {at::full({3, 3}, 2.0), at::ones({3, 3})});
  EXPECT_EQ(calls, 1);
}

struct SimulateBackwardError : torch::autograd::Function<SimulateBackwardError> {
  static Variable forward(AutogradContext*, const Variable& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list g) {
    if (fails) throw std::runtime_error("Simulate error on backward pass");
    return g;
  }
  static bool fails;
};
bool SimulateBackwardError::fails = true;

TEST_P(DistributedAutogradTest, backward_autograd_engine_error) {
  SimulateBackwardError::fails = true;
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(
      0, 1, context,
      [](Tensors in, Request&) { return Tensors{SimulateBackwardError::apply(in[0].sin())}; },
      {t1_})[0];
  const absl::Status status = context.Backward({y.sum()}, {.retain_graph = true});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(status.message().find("Simulate error on backward pass"), std::string::npos) << status;
  team_.AwaitQuiet(1);
}

// With retain_graph a pass that failed may be followed by one that does not.
TEST_P(DistributedAutogradTest, multiple_backward_with_errors) {
  SimulateBackwardError::fails = true;
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(
      0, 1, context,
      [](Tensors in, Request&) { return Tensors{SimulateBackwardError::apply(in[0].sin())}; },
      {t1_})[0];
  for (int i = 0; i < 5; ++i)
    EXPECT_FALSE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  team_.AwaitQuiet(1);
  SimulateBackwardError::fails = false;
  ExpectLike(Gradients(context, y.sum(), {t1_}), {t1_.cos()});
}

TEST_P(DistributedAutogradTest, error_in_context) {
  Context context = team_[0].NewContext();
  auto bad = team_[0].CallOp("worker1", "aten::mm", {Leaf({3, 3}, 1), Leaf({6, 6}, 2)},
                             {.context = &context});
  EXPECT_FALSE(bad.ok());
  EXPECT_NE(bad.status().message().find("worker1"), std::string::npos) << bad.status();
  // What the call left behind stops nobody.
  const at::Tensor y = team_.Run(0, 1, context, Multiply, {t1_, t2_})[0];
  ExpectLike(Gradients(context, y.sum(), {t1_, t2_}), {t2_, t1_});
}

TEST_P(DistributedAutogradTest, backward_without_context) {
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, Add, {t1_, t2_})[0];
  context.Release();
  EXPECT_EQ(context.Backward({y.sum()}).code(), absl::StatusCode::kFailedPrecondition);
  // torch's own backward cannot follow an edge to another worker, and says so.
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST_P(DistributedAutogradTest, clean_context_during_backward) {
  Context context = team_[0].NewContext();
  at::Tensor y = t1_;
  for (int i = 0; i < 20; ++i) y = team_.Run(0, 1 + i % 3, context, Add, {y, t2_})[0];
  y.register_hook([&](const at::Tensor&) { context.Release(); });
  const absl::Status status = context.Backward({y.sum()});
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  team_.AwaitQuiet(0);
}

TEST_P(DistributedAutogradTest, debug_info) {
  EXPECT_TRUE(team_[0].Contexts().empty());
  Context context = team_[0].NewContext();
  const at::Tensor y = team_.Run(0, 1, context, Add, {t1_, t2_})[0];
  ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  team_.AwaitQuiet(1);
  const ContextState state = On(0);
  EXPECT_EQ(state.id, context.id());
  EXPECT_EQ(state.gradients, 2u);
  EXPECT_TRUE(state.passes.empty());
}

INSTANTIATE_TEST_SUITE_P(Transports, DistributedAutogradTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
