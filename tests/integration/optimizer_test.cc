// Steps and clipping over workers, against the same training in one process: to the last bit.
#include "core/worker/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/team.h"
#include "tests/testing/waiting_thread.h"

namespace distgrad {
namespace {

constexpr int kWorkers = 3;

using Make = std::unique_ptr<torch::optim::Optimizer> (*)(std::vector<at::Tensor>);
std::unique_ptr<torch::optim::Optimizer> MakeSgd(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
}
std::unique_ptr<torch::optim::Optimizer> MakeAdam(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                              torch::optim::AdamOptions(0.01));
}
std::unique_ptr<torch::optim::Optimizer> MakeAdamW(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.01).weight_decay(0.1));
}

// A layer on each worker, of a weight, a bias, and a parameter that only some steps use.
std::vector<Tensors> MakeParameters() {
  std::vector<Tensors> parameters;
  for (int w = 0; w < kWorkers; ++w)
    parameters.push_back({Leaf({4, 4}, 10 + w), Leaf({4}, 20 + w), Leaf({4}, 30 + w)});
  return parameters;
}
at::Tensor Layer(const Tensors& p, const at::Tensor& x, int step, int worker) {
  const at::Tensor y = at::addmm(p[1], x, p[0]).tanh();
  return step % kWorkers == worker ? y * p[2] : y;
}
at::Tensor Input(int step) { return Leaf({8, 4}, 100 + step).detach(); }

struct Case {
  const char* name;
  Make make;
  double max_norm;  // 0: no clipping
};

std::unique_ptr<Optimizer> NewOptimizer(Worker& worker,
                                        std::unique_ptr<torch::optim::Optimizer> part,
                                        absl::string_view name = "") {
  auto optimizer = Optimizer::Create(&worker, std::move(part), name);
  EXPECT_TRUE(optimizer.ok()) << optimizer.status();
  return optimizer.ok() ? *std::move(optimizer) : nullptr;
}
std::unique_ptr<Optimizer> NewSgd(Worker& worker, Tensors parameters, absl::string_view name = "") {
  return NewOptimizer(worker, std::make_unique<torch::optim::SGD>(std::move(parameters), 1.0),
                      name);
}

class OptimizerTest : public ::testing::TestWithParam<Case> {};

TEST_P(OptimizerTest, FiftyStepsEqualThoseOfOneProcess) {
  Team team(kWorkers);
  const std::vector<Tensors> mine = MakeParameters(), reference = MakeParameters();
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int w = 0; w < kWorkers; ++w)
    optimizers.push_back(NewOptimizer(team[w], GetParam().make(mine[w])));
  Tensors all;
  for (const Tensors& p : reference) all.insert(all.end(), p.begin(), p.end());
  const auto single = GetParam().make(all);

  for (int step = 0; step < 50; ++step) {
    SCOPED_TRACE(step);
    const int leader = step % kWorkers;
    if (step % 7 == 6) {
      // Of all parts, by whichever worker.
      const double rate = 0.1 / (step + 1);
      const absl::Status set = optimizers[leader]->SetLearningRate(rate);
      ASSERT_TRUE(set.ok()) << set;
      single->param_groups()[0].options().set_lr(rate);
    }
    Context context = team[leader].NewContext();
    at::Tensor x = Input(step), y = Input(step);
    for (int w = 0; w < kWorkers; ++w) {
      x = team.Run(leader, w, context,
                   [&, w](Tensors in, Request&) { return Tensors{Layer(mine[w], in[0], step, w)}; },
                   {x})[0];
      y = Layer(reference[w], y, step, w);
    }
    const absl::Status done = context.Backward({x.square().mean()});
    ASSERT_TRUE(done.ok()) << done;
    single->zero_grad();
    y.square().mean().backward();
    if (GetParam().max_norm > 0) {
      const absl::StatusOr<double> norm =
          optimizers[leader]->ClipGradients(context, GetParam().max_norm);
      ASSERT_TRUE(norm.ok()) << norm.status();
      EXPECT_EQ(*norm, torch::nn::utils::clip_grad_norm_(all, GetParam().max_norm));
    }
    // From any of them that leads the step.
    const absl::Status stepped = optimizers[leader]->Step(context);
    ASSERT_TRUE(stepped.ok()) << stepped;
    single->step();
  }
  for (int w = 0; w < kWorkers; ++w) {
    for (size_t i = 0; i < mine[w].size(); ++i) {
      EXPECT_TRUE(mine[w][i].equal(reference[w][i])) << "worker " << w << ", parameter " << i;
      EXPECT_FALSE(mine[w][i].grad().defined());
    }
  }
}

// A worker that only has work for the others, or whose layers have no parameters, has an empty
// part.
TEST_P(OptimizerTest, PartsWithoutParametersAreLeftAlone) {
  Team team(2);
  const Tensors mine = MakeParameters()[1], reference = MakeParameters()[1];
  const auto driver = NewOptimizer(team[0], GetParam().make({}));
  const auto part = NewOptimizer(team[1], GetParam().make(mine));
  const auto single = GetParam().make(reference);
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(driver->SetLearningRate(0.1 / (step + 1)).ok());
    single->param_groups()[0].options().set_lr(0.1 / (step + 1));
    Context context = team[0].NewContext();
    const at::Tensor x = team.Run(
        0, 1, context, [&](Tensors in, Request&) { return Tensors{Layer(mine, in[0], step, 1)}; },
        {Input(step)})[0];
    ASSERT_TRUE(context.Backward({x.square().mean()}).ok());
    single->zero_grad();
    Layer(reference, Input(step), step, 1).square().mean().backward();
    const absl::StatusOr<double> norm = driver->ClipGradients(context, 0.01);
    ASSERT_TRUE(norm.ok()) << norm.status();
    EXPECT_EQ(*norm, torch::nn::utils::clip_grad_norm_(reference, 0.01));
    const absl::Status stepped = driver->Step(context);
    ASSERT_TRUE(stepped.ok()) << stepped;
    single->step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(mine[i].equal(reference[i])) << i;
  const auto state = driver->State();
  ASSERT_TRUE(state.ok()) << state.status();
}

// Each worker saves its part, and a job that begins with other numbers goes on from the files.
TEST_P(OptimizerTest, GoesOnFromFiles) {
  const auto names = [](const Tensors& p) {
    return TensorMap{{"weight", p[0]}, {"bias", p[1]}, {"scale", p[2]}};
  };
  const auto path = [](int w) {
    return testing::TempDir() + "/" + GetParam().name + std::to_string(w) + ".safetensors";
  };
  const auto train = [](Team& team, const std::vector<Tensors>& mine, int leader,
                        Optimizer& optimizer, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      Context context = team[leader].NewContext();
      at::Tensor x = Input(step);
      for (int w = 0; w < kWorkers; ++w) {
        x = team.Run(
            leader, w, context,
            [&, w](Tensors in, Request&) { return Tensors{Layer(mine[w], in[0], step, w)}; },
            {x})[0];
      }
      const absl::Status done = context.Backward({x.square().mean()});
      ASSERT_TRUE(done.ok()) << done;
      const absl::Status stepped = optimizer.Step(context);
      ASSERT_TRUE(stepped.ok()) << stepped;
    }
  };
  const std::vector<Tensors> mine = MakeParameters();
  std::vector<Tensors> copies;
  {
    Team team(kWorkers);
    std::vector<std::unique_ptr<Optimizer>> optimizers;
    for (int w = 0; w < kWorkers; ++w)
      optimizers.push_back(NewOptimizer(team[w], GetParam().make(mine[w])));
    train(team, mine, 0, *optimizers[0], 0, 4);
    for (int w = 0; w < kWorkers; ++w) {
      const absl::Status saved = optimizers[w]->Save(names(mine[w]), path(w));
      ASSERT_TRUE(saved.ok()) << saved;
      copies.emplace_back();
      for (const at::Tensor& p : mine[w])
        copies[w].push_back(p.detach().clone().set_requires_grad(true));
    }
    train(team, mine, 1, *optimizers[1], 4, 8);
    optimizers[2]->Remove();
    EXPECT_EQ(optimizers[2]->Save(names(mine[2]), path(2)).code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(optimizers[2]->Load(path(2), names(mine[2])).code(), absl::StatusCode::kNotFound);
  }
  Team team(kWorkers);
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int w = 0; w < kWorkers; ++w) {
    const Tensors& p = copies[w];
    optimizers.push_back(NewOptimizer(team[w], GetParam().make({p[2], p[0], p[1]})));
    EXPECT_EQ(optimizers[w]->Load(path(w), {{"weight", p[0]}}).code(),
              absl::StatusCode::kInvalidArgument);
    const absl::Status loaded = optimizers[w]->Load(path(w), names(p));
    ASSERT_TRUE(loaded.ok()) << loaded;
  }
  train(team, copies, 2, *optimizers[2], 4, 8);
  for (int w = 0; w < kWorkers; ++w) {
    for (size_t i = 0; i < mine[w].size(); ++i) {
      EXPECT_TRUE(copies[w][i].equal(mine[w][i])) << "worker " << w << ", parameter " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerTest,
                         ::testing::Values(Case{"sgd", MakeSgd, 0}, Case{"adam", MakeAdam, 0},
                                           Case{"adamw", MakeAdamW, 0},
                                           Case{"clipped_sgd", MakeSgd, 0.05},
                                           Case{"clipped_adamw", MakeAdamW, 0.05}),
                         [](const auto& info) { return info.param.name; });

// Steps that come at once, from several threads and contexts, lose nothing of each other.
TEST(OptimizerStepTest, StepsAtOnce) {
  Team team(2);
  const at::Tensor w = at::zeros({64, 64}).set_requires_grad(true);
  const auto here = NewSgd(team[0], {Leaf({1}, 1)}), there = NewSgd(team[1], {w});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 25; ++i) {
        Context context = team[0].NewContext();
        const at::Tensor y = team.Run(
            0, 1, context, [&](Tensors, Request&) { return Tensors{(w * 3).sum()}; }, {})[0];
        const absl::Status done = context.Backward({y * 1});
        EXPECT_TRUE(done.ok()) << done;
        const absl::Status stepped = here->Step(context);
        EXPECT_TRUE(stepped.ok()) << stepped;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(w.equal(at::full({64, 64}, -300.0)));
}

// Two optimizers of each worker share a parameter.
TEST(OptimizerStepTest, StepsOfOptimizersThatShareAParameter) {
  Team team(2);
  const at::Tensor w = at::zeros({64, 64}).set_requires_grad(true);
  const auto make = [&](int worker, const char* name) { return NewSgd(team[worker], {w}, name); };
  const std::unique_ptr<Optimizer> optimizers[] = {make(0, "a"), make(1, "a"), make(0, "b"),
                                                   make(1, "b")};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        // Both workers have a gradient of it, and so a step of each is two.
        Context context = team[t % 2].NewContext();
        const at::Tensor y =
            team.Run(t % 2, 1 - t % 2, context,
                     [&](Tensors, Request&) { return Tensors{(w * 2).sum()}; }, {})[0];
        const absl::Status done = context.Backward({y + w.sum()});
        EXPECT_TRUE(done.ok()) << done;
        const absl::Status stepped = optimizers[t]->Step(context);
        EXPECT_TRUE(stepped.ok()) << stepped;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(w.equal(at::full({64, 64}, -300.0)));
  EXPECT_FALSE(w.grad().defined());
}

// Its steps, clips and learning rates, of contexts of any worker of the process.
TEST_P(OptimizerTest, ALocalOneEqualsThatOfOneProcess) {
  Team team(2);
  const Tensors mine = MakeParameters()[0], reference = MakeParameters()[0];
  const auto optimizer = *Optimizer::Create(nullptr, GetParam().make(mine));
  const auto single = GetParam().make(reference);
  for (int step = 0; step < 10; ++step) {
    SCOPED_TRACE(step);
    const double rate = 0.1 / (step + 1);
    ASSERT_TRUE(optimizer->SetLearningRate(rate).ok());
    single->param_groups()[0].options().set_lr(rate);
    const Context context = team[step % 2].NewContext();
    ASSERT_TRUE(context.Backward({Layer(mine, Input(step), step, 0).square().mean()}).ok());
    single->zero_grad();
    Layer(reference, Input(step), step, 0).square().mean().backward();
    if (GetParam().max_norm > 0) {
      const absl::StatusOr<double> norm = optimizer->ClipGradients(context, GetParam().max_norm);
      ASSERT_TRUE(norm.ok()) << norm.status();
      EXPECT_EQ(*norm, torch::nn::utils::clip_grad_norm_(reference, GetParam().max_norm));
    }
    const absl::Status stepped = optimizer->Step(context);
    ASSERT_TRUE(stepped.ok()) << stepped;
    single->step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(mine[i].equal(reference[i])) << i;
  const auto state = optimizer->State();
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_TRUE(optimizer->LoadState(*state).ok());
}

TEST(OptimizerStepTest, ErrorsOfALocalOne) {
  Team team(1);
  const auto local = *Optimizer::Create(nullptr, MakeSgd({Leaf({1}, 1)}), "net::head");
  EXPECT_EQ(local->SetWorkers({"worker0"}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(local->Step(Context()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(local->ClipGradients(Context(), 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(local->SetLearningRate(-1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Optimizer::Create(nullptr, nullptr, "tail").status().message(),
            "the optimizer 'tail' is null");
  Context context = team[0].NewContext();
  EXPECT_TRUE(local->Step(context).ok());  // without gradients
  context.Release();
  EXPECT_EQ(local->Step(context).code(), absl::StatusCode::kFailedPrecondition);
  local->Remove();
  local->Remove();
  EXPECT_EQ(local->Step(context).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(local->SetLearningRate(1).message(), "the optimizer 'net::head' was removed");
}

// A peer may call its functions with what no optimizer sends.
TEST(OptimizerStepTest, CallsOfNoOptimizerAreRefused) {
  Team team(2);
  const auto optimizer = *Optimizer::Create(&team[1], MakeSgd({Leaf({1}, 1)}), "sgd");
  const Context context = team[0].NewContext();
  const auto call = [&](absl::string_view function, Tensors tensors, const Context* in) {
    return team[0]
        .Call(1, absl::StrCat("distgrad.optimizer.", function, "/sgd"), {"", std::move(tensors)},
              {.context = in})
        .status()
        .code();
  };
  const at::Tensor one = at::ones({});
  ASSERT_EQ(call("scale", {one}, &context), absl::StatusCode::kOk);
  ASSERT_EQ(call("rate", {one}, nullptr), absl::StatusCode::kOk);
  for (const Tensors& tensors : {Tensors{one, one}, Tensors{}}) {
    ASSERT_EQ(call("scale", tensors, &context), absl::StatusCode::kInvalidArgument);
    ASSERT_EQ(call("rate", tensors, nullptr), absl::StatusCode::kInvalidArgument);
  }
  for (const absl::string_view function : {"step", "norms", "scale"}) {
    EXPECT_EQ(call(function, {one}, nullptr), absl::StatusCode::kInvalidArgument) << function;
  }
}

TEST(OptimizerCreateTest, NamesThatCannotBe) {
  Team team(1);
  const auto create = [&](absl::string_view name) {
    return Optimizer::Create(&team[0], MakeSgd({Leaf({1}, 1)}), name).status();
  };
  const std::string longest(900, 'a');
  EXPECT_TRUE(create("").ok());
  EXPECT_TRUE(create(longest).ok());
  EXPECT_EQ(create("").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(create(longest).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(create(longest + "a").code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = create("net::head");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "worker 'worker0' cannot have an optimizer 'net::head': a name has at most 900 bytes, "
            "and no '::'");
  EXPECT_EQ(Optimizer::Create(&team[0], nullptr, "tail").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(create("head").ok());
  EXPECT_EQ(create("head").message(), "worker 'worker0' has an optimizer 'head' already");
}

// The step would wait for the leaf whose hook it is, which ends with the hook.
TEST(OptimizerStepTest, APostAccumulateHookCannotWaitForOne) {
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::function<void()> body) : body(std::move(body)) {}
    void operator()(const at::Tensor&) override { body(); }
    const std::function<void()> body;
  };
  Team team(1);
  const at::Tensor w = Leaf({2}, 1);
  const auto optimizer = NewSgd(team[0], {w});
  const auto local = *Optimizer::Create(nullptr, MakeSgd({w}));
  const Context context = team[0].NewContext();
  int hooks = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(
      w, std::make_unique<Hook>([&] {
        ++hooks;
        for (const absl::Status& status :
             {optimizer->Step(context), local->Step(context), local->SetLearningRate(1),
              local->State().status(), local->LoadState({}), local->Save({}, "none"),
              local->Load("none", {})}) {
          EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
        }
      }));
  EXPECT_TRUE(context.Backward({w.sum()}).ok());
  w.sum().backward();  // libtorch's own holds that leaf, too
  EXPECT_EQ(hooks, 2);
  EXPECT_TRUE(optimizer->Step(context).ok());
}

// A negative one would turn the gradients round.
TEST(OptimizerStepTest, ANormThatNoneCanHaveIsRefused) {
  Team team(1);
  const at::Tensor w = Leaf({2}, 1);
  const auto optimizer = NewSgd(team[0], {w});
  const Context context = team[0].NewContext();
  ASSERT_TRUE(context.Backward({w.sum()}).ok());
  for (const double max_norm : {-1.0, std::nan("")}) {
    const absl::Status clipped = optimizer->ClipGradients(context, max_norm).status();
    EXPECT_EQ(clipped.code(), absl::StatusCode::kInvalidArgument) << clipped;
    EXPECT_TRUE(GradientOf(context, w).equal(at::ones({2}))) << GradientOf(context, w);
  }
}

TEST(OptimizerStepTest, PartsMayBeOnSomeWorkersOnly) {
  Team team(kWorkers);
  const at::Tensor x = Leaf({4}, 1), y = Leaf({4}, 2);
  const at::Tensor x_before = x.detach().clone(), y_before = y.detach().clone();
  const auto first = NewSgd(team[0], {x}), last = NewSgd(team[2], {y});
  const Context context = team[0].NewContext();
  const at::Tensor there =
      team.Run(0, 2, context, [&](Tensors, Request&) { return Tensors{y.sum()}; }, {})[0];
  ASSERT_EQ(context.Backward({x.sum() * 2 + there}), absl::OkStatus());
  const absl::Status all = first->SetLearningRate(0.5);
  EXPECT_TRUE(absl::IsNotFound(all)) << all;
  EXPECT_NE(all.message().find(team[1].name()), std::string::npos) << all;
  ASSERT_EQ(first->SetWorkers({team[0].name(), team[2].name()}), absl::OkStatus());
  EXPECT_EQ(first->SetLearningRate(0.25), absl::OkStatus());
  const absl::StatusOr<double> norm = first->ClipGradients(context, 100);
  ASSERT_TRUE(norm.ok()) << norm.status();
  EXPECT_NEAR(*norm, std::sqrt(4 * 4 + 4 * 1), 1e-5);
  EXPECT_EQ(first->Step(context), absl::OkStatus());
  EXPECT_TRUE(at::allclose(x.detach(), x_before - 0.5));
  EXPECT_TRUE(at::allclose(y.detach(), y_before - 0.25));
  // What one handle names, another does not.
  EXPECT_TRUE(absl::IsNotFound(last->SetLearningRate(1)));

  for (const std::vector<std::string>& wrong : {std::vector<std::string>{},
                                                {team[2].name()},
                                                {team[0].name(), team[2].name(), team[0].name()}}) {
    const absl::Status refused = first->SetWorkers(wrong);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(refused.message().find(team[0].name()), std::string::npos) << refused;
  }
  ASSERT_EQ(first->SetWorkers({team[0].name(), "nobody"}), absl::OkStatus());
  const absl::Status unknown = first->Step(context);
  EXPECT_TRUE(absl::IsNotFound(unknown)) << unknown;
  EXPECT_NE(unknown.message().find("nobody"), std::string::npos) << unknown;
}

// Worker 1, which leads, has not heard of it: only its gradients come there, by way of worker 2.
TEST(OptimizerStepTest, OneWhoHasJoinedIsSteppedToo) {
  Team team(kWorkers);
  const std::unique_ptr<Worker> late = team.cluster().Join("late");
  const at::Tensor v = at::ones({4}).set_requires_grad(true), x = Leaf({4}, 1);
  std::vector<std::unique_ptr<Optimizer>> parts;
  for (int w = 0; w < kWorkers; ++w) parts.push_back(NewSgd(team[w], {Leaf({1}, w)}));
  const auto part_of_late = NewSgd(*late, {v});
  ASSERT_EQ(late->Register("scale",
                           [&](Request& request) -> absl::StatusOr<Message> {
                             return Message{"", {request.message.tensors[0] * v}};
                           }),
            absl::OkStatus());
  Context context = team[1].NewContext();
  const at::Tensor y =
      team.Run(1, 2, context,
               [&](Tensors in, Request& request) -> absl::StatusOr<Tensors> {
                 const auto scaled = team[2].Call("late", "scale", {"", in}, request.Nested());
                 if (!scaled.ok()) return scaled.status();
                 return scaled->tensors;
               },
               {x})[0];
  ASSERT_EQ(context.Backward({y.sum()}), absl::OkStatus());
  ASSERT_EQ(team[1].names().size(), 3u) << "it has heard of the one that has joined";

  const absl::StatusOr<double> norm = parts[1]->ClipGradients(context, 1000);
  ASSERT_TRUE(norm.ok()) << norm.status();
  EXPECT_NEAR(*norm, x.norm().item<double>(), 1e-5);
  ASSERT_EQ(parts[1]->Step(context), absl::OkStatus());
  EXPECT_TRUE(at::allclose(v.detach(), 1 - x.detach())) << v;
  context.Release();
  EXPECT_EQ(late->Leave(Deadline::Never()), absl::OkStatus());
}

// A step of which one part is refused has been taken by the others, and cannot be asked for again.
TEST(OptimizerStepTest, WaitsForRoomOnTheWayToAWorker) {
  class Faults : public FaultInjector {
   public:
    Action OnSend(const std::string&, const std::string&, Packet& packet) override {
      return packet.size() > 64 << 10 ? Action::kHold : Action::kDeliver;
    }
  };
  ClusterOptions options{.faults = std::make_shared<Faults>()};
  options.limits_of[0].bytes_per_peer = 64 << 10;  // the other one takes more
  Team team(2, options);
  const at::Tensor w = at::ones({2}).set_requires_grad(true);
  const at::Tensor v = at::ones({2}).set_requires_grad(true);
  const auto here = NewSgd(team[0], {w}), there = NewSgd(team[1], {v});
  const Context context = team[0].NewContext();
  const at::Tensor y =
      team.Run(0, 1, context, [&](Tensors, Request&) { return Tensors{v.sum()}; }, {})[0];
  ASSERT_EQ(context.Backward({y + w.sum()}), absl::OkStatus());
  ASSERT_EQ(team[1].Register("keep", [](Request&) -> absl::StatusOr<Message> { return Message{}; }),
            absl::OkStatus());
  const Future<Message> large =
      team[0].CallAsync("worker1", "keep", {std::string(100'000, 'x'), {}});
  ASSERT_FALSE(large.Done()) << large.Wait().status();

  absl::Status stepped = absl::UnknownError("it has not come to it");
  {
    WaitingThread step([&] { stepped = here->Step(context); });
    EXPECT_TRUE(step.Waits());
    team.cluster().network().ReleaseHeld();
  }
  EXPECT_EQ(stepped, absl::OkStatus());
  EXPECT_TRUE(w.equal(at::zeros({2}))) << w;
  EXPECT_TRUE(v.equal(at::zeros({2}))) << v;
  EXPECT_TRUE(large.Wait().ok()) << large.Wait().status();
}

TEST(OptimizerStepTest, Errors) {
  Team team(2);
  const at::Tensor w = Leaf({2}, 1), v = Leaf({2}, 2);
  const auto here = NewSgd(team[0], {w});
  Context context = team[0].NewContext();
  absl::Status status = here->Step(context);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << "worker 1 has no part: " << status;
  EXPECT_EQ(here->SetLearningRate(0.5).code(), absl::StatusCode::kNotFound);

  const auto there = NewSgd(team[1], {v});
  // No gradients: nothing to do, and nothing to clip.
  const at::Tensor before = w.detach().clone();
  EXPECT_TRUE(here->Step(context).ok());
  EXPECT_EQ(*here->ClipGradients(context, 1), 0.0);
  EXPECT_EQ(there->Step(context).code(), absl::StatusCode::kInvalidArgument) << "of worker 0";
  EXPECT_TRUE(w.equal(before));
  for (const double rate : {-0.1, std::numeric_limits<double>::infinity(), std::nan("")})
    EXPECT_EQ(here->SetLearningRate(rate).code(), absl::StatusCode::kInvalidArgument) << rate;
  EXPECT_TRUE(here->SetLearningRate(0).ok());

  // One that is not a number changes nothing.
  const at::Tensor y =
      team.Run(0, 1, context, [&](Tensors, Request&) { return Tensors{v.sum()}; }, {})[0];
  ASSERT_TRUE(
      context
          .Backward({y * std::numeric_limits<double>::infinity() + w.sum()}, {.retain_graph = true})
          .ok());
  EXPECT_EQ(here->ClipGradients(context, 1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(GradientOf(context, w).equal(at::ones({2})));

  context.Release();
  status = here->Step(context);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

}  // namespace
}  // namespace distgrad
