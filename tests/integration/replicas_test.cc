// Replicas of a pipeline: two pipelines of two workers each, whose stages average the gradients of
// their contexts with the same stage of the other pipeline, against the same training in one
// process: to the last bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "core/autograd/context_record.h"
#include "core/base/event_loop.h"
#include "core/membership/store.h"
#include "core/membership/store/in_process_store.h"
#include "core/optim/local_optimizer.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "tests/integration/team.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {
namespace {

constexpr int kReplicas = 2, kStages = 2, kSteps = 20;

std::unique_ptr<torch::optim::Optimizer> NewOptimizer(int kind, Tensors parameters) {
  if (kind == 0) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  if (kind == 1) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(0.01));
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.01));
}

// A layer, and a parameter that only one replica uses, and not in every step.
struct Stage {
  Stage(int number, int seed)
      : parameters{Leaf({4, 4}, seed + 10 * number), Leaf({4}, seed + 10 * number + 1),
                   Leaf({4}, seed + 10 * number + 2)} {}
  at::Tensor Forward(const at::Tensor& x, int step, int replica) const {
    const at::Tensor y = at::addmm(parameters[1], x, parameters[0]).tanh();
    return step % 3 == 1 && replica == 1 ? y * parameters[2] : y;
  }
  Tensors parameters;
};

at::Tensor Input(int step, int replica) { return Leaf({8, 4}, 100 + 2 * step + replica).detach(); }

// What one worker has of its replica.
struct Holder {
  Stage stage;
  std::unique_ptr<GradientAverager> averager;
  std::unique_ptr<LocalOptimizer> optimizer;

  absl::Status Step(ContextRecord& context) {
    const absl::Status averaged = averager->Average(context);
    return averaged.ok() ? optimizer->Step(context) : averaged;
  }
};

constexpr const char* kOptimizerNames[] = {"sgd", "adam", "adamw"};

// By optimizer, and by how many replicas average while the backward runs.
class ReplicasTest : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ReplicasTest, OfPipelinesEqualOneProcess) {
  const auto [kind, early] = GetParam();
  Team team(kReplicas * kStages);  // replica by replica
  const std::shared_ptr<Store> store = NewInProcessStore();
  std::vector<std::unique_ptr<Holder>> holders(team.size());
  const auto begin = [&, early = early](int worker, const Context& context) {
    if (worker / kStages >= early) return absl::OkStatus();
    return holders[worker]->averager->AverageInBackward(*context.record());
  };
  const auto lead = [&](int replica) {
    const int first = replica * kStages, second = first + 1;
    for (int step = 0; step < kSteps; ++step) {
      Context context = team[first].NewContext();
      absl::Status status = begin(first, context);
      ASSERT_TRUE(status.ok()) << status;
      const at::Tensor hidden = holders[first]->stage.Forward(Input(step, replica), step, replica);
      const at::Tensor output =
          team.Run(first, second, context,
                   [&](Tensors in, Request& request) -> absl::StatusOr<Tensors> {
                     const absl::Status begun = begin(second, request.context);
                     if (!begun.ok()) return begun;
                     return Tensors{holders[second]->stage.Forward(in[0], step, replica)};
                   },
                   {hidden})[0];
      status = context.Backward({output.square().mean()});
      ASSERT_TRUE(status.ok()) << status;
      status = holders[first]->Step(*context.record());
      ASSERT_TRUE(status.ok()) << status;
      team.Run(first, second, context,
               [&](Tensors, Request& request) -> absl::StatusOr<Tensors> {
                 const absl::Status stepped = holders[second]->Step(*request.context.record());
                 if (!stepped.ok()) return stepped;
                 return Tensors{};
               },
               {});
    }
  };
  const auto start = [&](int worker) {
    const int replica = worker / kStages, number = worker % kStages;
    auto group = ProcessGroup::Create({.name = "stage" + std::to_string(number),
                                       .store = store,
                                       .rank = replica,
                                       .size = kReplicas});
    ASSERT_TRUE(group.ok()) << group.status();
    // Those of replica 0 are given to all.
    Stage stage(number, 1000 * replica);
    // The one that is not used in every step is in the last bucket.
    std::vector<NamedTensor> named;
    for (const int i : {2, 0, 1}) named.push_back({std::to_string(i), stage.parameters[i]});
    auto averager = GradientAverager::Create(
        *group, named, {}, {.bucket_bytes = 64, .first_bucket_bytes = 16, .in_backward = false});
    ASSERT_TRUE(averager.ok()) << averager.status();
    auto optimizer = std::make_unique<LocalOptimizer>(NewOptimizer(kind, stage.parameters));
    holders[worker] = std::make_unique<Holder>(
        Holder{std::move(stage), *std::move(averager), std::move(optimizer)});
  };
  const auto on_threads = [](int count, const auto& run) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back([&run, i] { run(i); });
    for (std::thread& thread : threads) thread.join();
  };
  on_threads(team.size(), start);
  ASSERT_FALSE(HasFatalFailure());
  on_threads(kReplicas, lead);
  ASSERT_FALSE(HasFatalFailure());

  std::vector<Stage> stages = {Stage(0, 0), Stage(1, 0)};
  Tensors all;
  for (const Stage& stage : stages) {
    all.insert(all.end(), stage.parameters.begin(), stage.parameters.end());
  }
  const auto optimizer = NewOptimizer(kind, all);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int replica = 0; replica < kReplicas; ++replica) {
      at::Tensor x = Input(step, replica);
      for (const Stage& stage : stages) x = stage.Forward(x, step, replica);
      x.square().mean().backward();
    }
    for (const at::Tensor& parameter : all) {
      if (parameter.grad().defined()) parameter.mutable_grad().div_(kReplicas);
    }
    optimizer->step();
  }
  for (int worker = 0; worker < team.size(); ++worker) {
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(
          holders[worker]->stage.parameters[i].equal(stages[worker % kStages].parameters[i]))
          << "worker " << worker << ", parameter " << i;
      EXPECT_FALSE(holders[worker]->stage.parameters[i].grad().defined());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReplicasTest,
                         testing::Combine(testing::Values(0, 1, 2),
                                          testing::Range(0, kReplicas + 1)),
                         [](const auto& info) {
                           return kOptimizerNames[std::get<0>(info.param)] +
                                  std::to_string(std::get<1>(info.param)) + "early";
                         });

// A context is not disturbed by hooks for .grad, and .grad not by it.
TEST(ReplicasOfStageTest, AParameterMayHaveBoth) {
  Team team(2);
  const std::shared_ptr<Store> store = NewInProcessStore();
  auto group = ProcessGroup::Create({.store = store, .rank = 0, .size = 1});
  ASSERT_TRUE(group.ok()) << group.status();
  const at::Tensor w = Leaf({3}, 1);
  auto averager = GradientAverager::Create(*group, {{"w", w}}, {});
  ASSERT_TRUE(averager.ok()) << averager.status();
  const int64_t before = (*group)->collectives();
  Context context = team[0].NewContext();
  const at::Tensor y =
      team.Run(0, 1, context, [](Tensors in, Request&) { return Tensors{in[0] * 2}; }, {w})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  EXPECT_EQ((*group)->collectives(), before);
  EXPECT_FALSE(w.grad().defined());
  absl::Status status = (*averager)->Average(*context.record());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(GradientOf(context, w).equal(at::full({3}, 2.0f)));
  (w * 5).sum().backward();
  EXPECT_TRUE(w.grad().equal(at::full({3}, 5.0f)));
  EXPECT_TRUE(GradientOf(context, w).equal(at::full({3}, 2.0f)));
  // An error of the context is one of the averager: the other ranks have been left alone.
  context.Release();
  status = (*averager)->Average(*context.record());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ((*averager)->Average(), status);
}

class AverageInBackwardTest : public testing::Test {
 protected:
  AverageInBackwardTest() {
    group_ = *ProcessGroup::Create({.store = NewInProcessStore(), .rank = 0, .size = 1});
    averager_ = *GradientAverager::Create(
        group_, {{"first", first_}, {"last", last_}}, {},
        {.bucket_bytes = 32, .first_bucket_bytes = 32, .in_backward = false});
  }
  at::Tensor Root() { return (first_ * 2 * last_).sum(); }

  Team team_{1};
  const at::Tensor first_ = Leaf({8}, 1), last_ = Leaf({8}, 2);
  std::shared_ptr<ProcessGroup> group_;
  std::unique_ptr<GradientAverager> averager_;
};

// It may wait, for other ranks or for whoever holds the averager.
TEST(LeafObserverTest, IsNotCalledOnTheThreadOfTheSockets) {
  Team team(2, {.transport = "socket"});
  const at::Tensor x = Leaf({8}, 1);
  Context context = team[0].NewContext();
  std::atomic<int> calls = 0;
  context.record()->SetLeafObserver([&](const at::Tensor&) {
    EXPECT_EQ(EventLoop::Current(), nullptr);
    ++calls;
  });
  const auto twice = [](Tensors in, Request&) { return Tensors{in[0] * 2}; };
  const at::Tensor y = team.Run(0, 1, context, twice, {x})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  EXPECT_EQ(calls, 1);
}

// Remembers on whose thread a group says that it has failed. Thread-safe.
class WatchedStore : public ForwardingStore {
 public:
  WatchedStore() : ForwardingStore(NewInProcessStore()) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (absl::StrContains(key, "failure")) {
      loop_ = EventLoop::Current();
      failed.Notify();
    }
    return ForwardingStore::Set(key, value, deadline);
  }
  const EventLoop* loop() const { return loop_; }  // once `failed`

  absl::Notification failed;

 private:
  const EventLoop* loop_ = nullptr;
};

// So may its end, where another worker releases the context.
TEST(LeafObserverTest, DoesNotEndOnTheThreadOfTheSockets) {
  const auto store = std::make_shared<WatchedStore>();
  const at::Tensor w = Leaf({8}, 1);
  auto group = ProcessGroup::Create({.store = store, .rank = 0, .size = 1});
  ASSERT_TRUE(group.ok()) << group.status();
  auto averager = GradientAverager::Create(*group, {{"w", w}}, {}, {.in_backward = false});
  ASSERT_TRUE(averager.ok()) << averager.status();
  Team team(2, {.transport = "socket"});
  Context context = team[0].NewContext();
  const auto times_w = [&](Tensors in, Request& request) -> absl::StatusOr<Tensors> {
    const absl::Status begun = (*averager)->AverageInBackward(*request.context.record());
    if (!begun.ok()) return begun;
    return Tensors{in[0] * w};
  };
  const at::Tensor y = team.Run(0, 1, context, times_w, {Leaf({8}, 2)})[0];
  ASSERT_TRUE(context.Backward({y.sum()}).ok());
  context.Release();
  store->failed.WaitForNotification();
  EXPECT_EQ(store->loop(), nullptr);
}

TEST_F(AverageInBackwardTest, AllBucketsHaveBegunWhenItIsOver) {
  Context unused = team_[0].NewContext(), context = team_[0].NewContext();
  ASSERT_TRUE(averager_->AverageInBackward(*unused.record()).ok());
  ASSERT_TRUE(averager_->AverageInBackward(*context.record()).ok());
  const int64_t before = group_->collectives();
  ASSERT_TRUE(context.Backward({Root()}).ok());
  EXPECT_EQ(group_->collectives(), before + 2);
  ASSERT_TRUE(unused.Backward({Root()}).ok());
  EXPECT_EQ(group_->collectives(), before + 2);
  ASSERT_TRUE(averager_->Average(*context.record()).ok());
  EXPECT_EQ(group_->collectives(), before + 2);
  EXPECT_TRUE(GradientOf(context, first_).equal(last_.detach() * 2));
  // It was for that backward.
  Context later = team_[0].NewContext();
  ASSERT_TRUE(later.Backward({Root()}).ok());
  EXPECT_EQ(group_->collectives(), before + 2);
}

TEST_F(AverageInBackwardTest, ASecondBackwardOfTheContextIsAnError) {
  Context context = team_[0].NewContext();
  ASSERT_TRUE(averager_->AverageInBackward(*context.record()).ok());
  const at::Tensor root = Root();
  ASSERT_TRUE(context.Backward({root}, {.retain_graph = true}).ok());
  const absl::Status status = context.Backward({root});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("'last' got another gradient"), std::string::npos) << status;
  EXPECT_FALSE(averager_->Average(*context.record()).ok());
}

TEST_F(AverageInBackwardTest, AContextThatIsGivenUpInTheMiddleIsAnError) {
  Context context = team_[0].NewContext(), other = team_[0].NewContext();
  ASSERT_TRUE(averager_->AverageInBackward(*context.record()).ok());
  ASSERT_TRUE(context.Backward({Root()}).ok());
  const absl::Status status = averager_->Average(*other.record());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("was given up when 2 of 2 buckets"), std::string::npos) << status;
}

TEST_F(AverageInBackwardTest, AReleaseInTheMiddleFailsTheGroup) {
  Context unused = team_[0].NewContext(), context = team_[0].NewContext();
  ASSERT_TRUE(averager_->AverageInBackward(*unused.record()).ok());
  unused.Release();
  EXPECT_TRUE(group_->status().ok());
  ASSERT_TRUE(averager_->AverageInBackward(*context.record()).ok());
  ASSERT_TRUE(context.Backward({Root()}).ok());
  EXPECT_TRUE(group_->status().ok());
  context.Release();
  EXPECT_EQ(group_->status().code(), absl::StatusCode::kFailedPrecondition) << group_->status();
}

TEST_F(AverageInBackwardTest, AnAveragerThatEndsInTheMiddleFailsItsGroup) {
  Context context = team_[0].NewContext();
  ASSERT_TRUE(averager_->AverageInBackward(*context.record()).ok());
  ASSERT_TRUE(context.Backward({Root()}).ok());
  averager_.reset();
  EXPECT_FALSE(group_->status().ok());
}

}  // namespace
}  // namespace distgrad
