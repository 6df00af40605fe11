// Gradient accumulation over several contexts, against one process that runs as many backwards: to
// the last bit.
#include "core/worker/sum_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <vector>

#include "core/worker/optimizer.h"
#include "tests/integration/team.h"

namespace distgrad {
namespace {

constexpr int kWorkers = 2;
constexpr int kContexts = 3;

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(bool adam, std::vector<at::Tensor> of) {
  if (adam) {
    return std::make_unique<torch::optim::Adam>(std::move(of), torch::optim::AdamOptions(0.01));
  }
  return std::make_unique<torch::optim::SGD>(std::move(of),
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}

// A weight, a bias, and a parameter that only some contexts use.
std::vector<Tensors> NewLayers() {
  std::vector<Tensors> layers;
  for (int w = 0; w < kWorkers; ++w)
    layers.push_back({Leaf({8, 8}, 10 + w), Leaf({8}, 20 + w), Leaf({8}, 30 + w)});
  return layers;
}
at::Tensor RunLayer(const Tensors& p, const at::Tensor& x, bool scaled) {
  const at::Tensor y = at::addmm(p[1], x, p[0]).tanh();
  return scaled ? y * p[2] : y;
}
at::Tensor Batch(int number) { return Leaf({16, 8}, 100 + number).detach(); }

std::vector<const Context*> PointersTo(const std::vector<Context>& contexts) {
  std::vector<const Context*> pointers;
  for (const Context& context : contexts) pointers.push_back(&context);
  return pointers;
}

struct Accumulation {
  const char* name;
  bool adam;
  double max_norm;  // 0: no clipping
};

class SumGradientsTest : public ::testing::TestWithParam<Accumulation> {};

TEST_P(SumGradientsTest, TwentyStepsEqualThoseOfOneProcess) {
  Team team(kWorkers);
  const std::vector<Tensors> mine = NewLayers(), reference = NewLayers();
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int w = 0; w < kWorkers; ++w) {
    auto made = Optimizer::Create(&team[w], MakeOptimizer(GetParam().adam, mine[w]));
    ASSERT_TRUE(made.ok()) << made.status();
    optimizers.push_back(*std::move(made));
  }
  Tensors all;
  for (const Tensors& p : reference) all.insert(all.end(), p.begin(), p.end());
  const auto single = MakeOptimizer(GetParam().adam, all);

  for (int step = 0; step < 20; ++step) {
    SCOPED_TRACE(step);
    const int leader = step % kWorkers;
    std::vector<Context> contexts;
    single->zero_grad();
    for (int k = 0; k < kContexts; ++k) {
      contexts.push_back(team[leader].NewContext());
      at::Tensor x = Batch(step * kContexts + k), y = x;
      for (int w = 0; w < kWorkers; ++w) {
        // Of some leaves the first context has a gradient, of others a later one alone.
        const bool scaled = (step + k) % 3 == w;
        x = team.Run(leader, w, contexts[k],
                     [&, w, scaled](Tensors in, Request&) {
                       return Tensors{RunLayer(mine[w], in[0], scaled)};
                     },
                     {x})[0];
        y = RunLayer(reference[w], y, scaled);
      }
      y.square().mean().backward();
      const absl::Status done = contexts[k].Backward({x.square().mean()});
      ASSERT_TRUE(done.ok()) << done;
    }
    const absl::Status summed = SumGradients(team[leader], PointersTo(contexts));
    ASSERT_TRUE(summed.ok()) << summed;
    const auto gradient = [&](int w, const Context& context, const at::Tensor& leaf) {
      at::Tensor found;
      team.Run(leader, w, context,
               [&](Tensors, Request& request) {
                 found = GradientOf(request.context, leaf);
                 return Tensors{};
               },
               {});
      return found;
    };
    for (int w = 0; w < kWorkers; ++w) {
      for (size_t i = 0; i < mine[w].size(); ++i) {
        ExpectSame(gradient(w, contexts[0], mine[w][i]), reference[w][i].grad());
        for (int k = 1; k < kContexts; ++k)
          EXPECT_FALSE(gradient(w, contexts[k], mine[w][i]).defined());
      }
    }
    if (GetParam().max_norm > 0) {
      const absl::StatusOr<double> norm =
          optimizers[leader]->ClipGradients(contexts[0], GetParam().max_norm);
      ASSERT_TRUE(norm.ok()) << norm.status();
      EXPECT_EQ(*norm, torch::nn::utils::clip_grad_norm_(all, GetParam().max_norm));
    }
    const absl::Status stepped = optimizers[leader]->Step(contexts[0]);
    ASSERT_TRUE(stepped.ok()) << stepped;
    single->step();
  }
  for (int w = 0; w < kWorkers; ++w) {
    for (size_t i = 0; i < mine[w].size(); ++i)
      EXPECT_TRUE(mine[w][i].equal(reference[w][i])) << "worker " << w << ", parameter " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SumGradientsTest,
                         ::testing::Values(Accumulation{"sgd", false, 0},
                                           Accumulation{"adam", true, 0},
                                           Accumulation{"clipped_adam", true, 0.05}),
                         [](const auto& info) { return std::string(info.param.name); });

// Contexts of several origins, some of which a worker has never heard of.
TEST(SumOfContextsTest, OfSeveralOrigins) {
  Team team(3);
  const at::Tensor w = Leaf({2}, 1), v = Leaf({2}, 2);
  const Context first = team[0].NewContext(), second = team[1].NewContext();
  ASSERT_TRUE(second.Backward({(v * 3).sum()}).ok());
  const at::Tensor y =
      team.Run(0, 2, first, [&](Tensors, Request&) { return Tensors{(w * 2).sum()}; }, {})[0];
  ASSERT_TRUE(first.Backward({y * 1}).ok());
  const absl::Status summed = SumGradients(team[0], {&first, &second});
  ASSERT_TRUE(summed.ok()) << summed;
  EXPECT_TRUE(team.Gradient(2, first, w).equal(at::full({2}, 2.0)));
  EXPECT_TRUE(team.Gradient(1, first, v).equal(at::full({2}, 3.0)));
  EXPECT_FALSE(GradientOf(second, v).defined());
}

TEST(SumOfContextsTest, WhatIsWrongIsSaidBeforeAnythingChanges) {
  Team team(2);
  const at::Tensor w = Leaf({2}, 1);
  const Context first = team[0].NewContext(), second = team[0].NewContext(), none;
  Context released = team[0].NewContext();
  ASSERT_TRUE(first.Backward({w.sum()}).ok());
  ASSERT_TRUE(second.Backward({w.sum()}).ok());
  released.Release();
  const auto code = [&](const std::vector<const Context*>& contexts) {
    return SumGradients(team[0], contexts).code();
  };
  EXPECT_EQ(code({}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({&first, nullptr}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({&first, &second, &first}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({&first, &second, &none}), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code({&first, &second, &released}), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code({&released, &first}), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(SumGradients(team[1], {&first, &second}).code(), absl::StatusCode::kInvalidArgument)
      << "the first context is of the other worker";
  EXPECT_EQ(code({&first}), absl::StatusCode::kOk);
  EXPECT_TRUE(GradientOf(first, w).equal(at::ones({2})));
  EXPECT_TRUE(GradientOf(second, w).equal(at::ones({2})));
}

// Two jobs of one process give their contexts the same numbers.
TEST(SumOfContextsTest, OneOfAnotherJobIsRefused) {
  Team team(2), other(2);
  const at::Tensor w = Leaf({2}, 1);
  const Context first = team[0].NewContext(), second = team[0].NewContext();
  const Context none = other[0].NewContext(), foreign = other[0].NewContext();
  ASSERT_EQ(second.id(), foreign.id());
  for (const Context* context : {&first, &second, &none, &foreign}) {
    ASSERT_TRUE(context->Backward({w.sum()}).ok());
  }
  // The same number is not the same context, here or there.
  for (const Context* theirs : {&none, &foreign}) {
    const absl::Status refused = SumGradients(team[0], {&first, theirs});
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_NE(refused.message().find("of another job"), std::string::npos) << refused;
    EXPECT_NE(refused.message().find("worker 'worker0' (0)"), std::string::npos) << refused;
  }
  EXPECT_EQ(SumGradients(team[0], {&foreign}).code(), absl::StatusCode::kInvalidArgument);
  for (const Context* context : {&first, &second, &none, &foreign}) {
    EXPECT_TRUE(GradientOf(*context, w).equal(at::ones({2})));
  }
  EXPECT_TRUE(SumGradients(team[0], {&first, &second}).ok());
  EXPECT_TRUE(GradientOf(first, w).equal(at::full({2}, 2.0)));
}

// What a peer sends may be anything.
TEST(SumOfContextsTest, CallsThatMakeNoSenseAreRefused) {
  Team team(2);
  const at::Tensor w = Leaf({2}, 1);
  const Context context = team[0].NewContext();
  ASSERT_TRUE(context.Backward({w.sum()}).ok());
  const auto call = [&](std::string payload, const Context* in) {
    return team[0]
        .Call("worker0", "distgrad.context.sum", {std::move(payload), {}}, {.context = in})
        .status()
        .code();
  };
  const ContextId id = context.id();
  const std::string itself(reinterpret_cast<const char*>(&id), sizeof(id));
  EXPECT_EQ(call(itself, nullptr), absl::StatusCode::kInvalidArgument) << "outside of a context";
  EXPECT_EQ(call(itself, &context), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(call("12345", &context), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(call(std::string(8, '\0'), &context), absl::StatusCode::kFailedPrecondition)
      << "context 0 would be worker 0's own";
  EXPECT_TRUE(GradientOf(context, w).equal(at::ones({2})));
}

// Worker 1, which leads, has not heard of it: only gradients of the second context come there.
TEST(SumGradientsMembersTest, OneWhoHasJoinedSumsToo) {
  Team team(3);
  const std::unique_ptr<Worker> late = team.cluster().Join("late");
  const at::Tensor v = at::ones({4}).set_requires_grad(true), x = Leaf({4}, 1);
  ASSERT_EQ(late->Register("scale",
                           [&](Request& request) -> absl::StatusOr<Message> {
                             return Message{"", {request.message.tensors[0] * v}};
                           }),
            absl::OkStatus());
  ASSERT_EQ(late->Register("gradient",
                           [&](Request& request) -> absl::StatusOr<Message> {
                             return Message{"", {GradientOf(request.context, v)}};
                           }),
            absl::OkStatus());
  Context first = team[1].NewContext(), second = team[1].NewContext();
  ASSERT_EQ(first.Backward({Leaf({1}, 2).sum()}), absl::OkStatus());
  const at::Tensor y =
      team.Run(1, 2, second,
               [&](Tensors in, Request& request) -> absl::StatusOr<Tensors> {
                 const auto scaled = team[2].Call("late", "scale", {"", in}, request.Nested());
                 if (!scaled.ok()) return scaled.status();
                 return scaled->tensors;
               },
               {x})[0];
  ASSERT_EQ(second.Backward({y.sum()}), absl::OkStatus());
  ASSERT_EQ(team[1].names().size(), 3u) << "it has heard of the one that has joined";
  ASSERT_EQ(SumGradients(team[1], {&first, &second}), absl::OkStatus());
  const auto gradient = team[1].Call("late", "gradient", {}, {.context = &first});
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  ExpectSame(gradient->tensors[0], x.detach());
  first.Release();
  second.Release();
  EXPECT_EQ(late->Leave(Deadline::Never()), absl::OkStatus());
}

}  // namespace
}  // namespace distgrad
