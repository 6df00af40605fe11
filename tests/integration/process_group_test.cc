// Data parallel training in several processes: equal to one process on the whole batch, and an
// error on all others, in time, when one of them is killed or stopped, or fails.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/membership/store/file_store.h"
#include "core/net/cluster_key.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/tensor/exception.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;

constexpr int kSteps = 20;
constexpr int64_t kRows = 12;  // of all ranks together

struct ModelImpl : nn::Module {
  ModelImpl() {
    first = register_module("first", nn::Linear(8, 16));
    tied = register_module("tied", nn::Linear(16, 16));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})));
    last = register_module("last", nn::Linear(16, 4));
  }
  Tensor forward(const Tensor& x) {
    return last(norm(torch::tanh(tied(torch::tanh(tied(torch::relu(first(x))))))));
  }
  nn::Linear first{nullptr}, tied{nullptr}, last{nullptr};
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Model);

std::unique_ptr<torch::optim::Optimizer> NewOptimizer(int kind, std::vector<Tensor> parameters) {
  if (kind == 0) {
    return std::make_unique<torch::optim::SGD>(
        std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(1e-3));
  }
  if (kind == 1) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(0.01));
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.01));
}
constexpr int kOptimizers = 3;

Model NewModel(int seed) {
  torch::manual_seed(seed);
  return Model();
}

Tensor Loss(Model model, int step, int rank, int size) {
  torch::manual_seed(100 + step);
  const Tensor batch = torch::rand({kRows, 8}), target = torch::rand({kRows, 4});
  const int64_t rows = kRows / size;
  return torch::mse_loss(model->forward(batch.narrow(0, rank * rows, rows)),
                         target.narrow(0, rank * rows, rows));
}

absl::StatusOr<std::shared_ptr<ProcessGroup>> Meet(const std::string& file, int rank, int size,
                                                   absl::Duration timeout) {
  auto store = NewFileStore(file);
  if (!store.ok()) return store.status();
  return ProcessGroup::Create({.name = "trainers",
                               .store = *std::move(store),
                               .rank = rank,
                               .size = size,
                               .timeout = timeout,
                               .cluster_key = LoadClusterKey("").value()});
}

GradientAveragerOptions SmallBuckets() { return {.bucket_bytes = 1024, .first_bucket_bytes = 256}; }

absl::Status Step(Model model, torch::optim::Optimizer& optimizer, int step, int rank, int size) {
  optimizer.zero_grad();
  try {
    Loss(model, step, rank, size).backward();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  optimizer.step();
  return absl::OkStatus();
}

std::string ParametersFile(const std::string& file, int optimizer, int rank) {
  return absl::StrCat(file, ".", optimizer, ".", rank);
}

// What a child does, and then says how it ended: "train" with each optimizer, "on" with one for as
// long as it lives, or "fail" in the middle of a backward, and then live on.
int RunRank(const std::string& mode, const std::string& file, int rank, int size, int seconds) {
  const auto say = [](const absl::Status& status) {
    std::printf("%s\n", status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
    std::fflush(stdout);
    return status.ok() ? 0 : 1;
  };
  const auto group = Meet(file, rank, size, absl::Seconds(seconds));
  if (!group.ok()) return say(group.status());
  for (int kind = 0; kind < kOptimizers; ++kind) {
    Model model = NewModel(rank);
    const auto optimizer = NewOptimizer(kind, model->parameters());
    const auto averager = GradientAverager::Create(*group, *model, SmallBuckets());
    if (!averager.ok()) return say(averager.status());
    if (mode != "train") say(absl::OkStatus());
    for (int step = 0; step < kSteps || mode != "train"; ++step) {
      if (mode == "fail" && step == 3) {
        model->first->weight.register_hook(
            [](const Tensor&) { throw std::runtime_error("on fire"); });
      }
      const absl::Status status = Step(model, *optimizer, step, rank, size);
      if (status.ok()) continue;
      const int code = say(status);
      while (mode == "fail") pause();
      return code;
    }
    torch::save(model->parameters(), ParametersFile(file, kind, rank));
  }
  return say(absl::OkStatus());
}

class ProcessGroupProcessTest : public testing::Test {
 protected:
  void SetUp() override {
    file_ = absl::StrCat(std::getenv("TEST_TMPDIR"), "/group-XXXXXX");
    const int fd = mkstemp(file_.data());
    ASSERT_GE(fd, 0);
    close(fd);
    unlink(file_.c_str());
  }
  ChildProcess* Start(const std::string& mode, int rank, int size, int seconds = 300) {
    children_.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{
        "--rank", mode, file_, absl::StrCat(rank), absl::StrCat(size), absl::StrCat(seconds)}));
    return children_.back().get();
  }

  std::string file_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
};

// The parameters after training in one process: on each part of a batch by itself, or on all of it.
std::vector<Tensor> TrainedAlone(int kind, int parts) {
  Model model = NewModel(0);
  const auto optimizer = NewOptimizer(kind, model->parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int part = 0; part < parts; ++part) Loss(model, step, part, parts).backward();
    for (const Tensor& parameter : model->parameters()) parameter.mutable_grad().div_(parts);
    optimizer->step();
  }
  return model->parameters();
}

class TrainingTest : public ProcessGroupProcessTest, public testing::WithParamInterface<int> {};

TEST_P(TrainingTest, EqualsOneProcess) {
  const int size = GetParam();
  for (int rank = 0; rank < size; ++rank) Start("train", rank, size);
  for (const auto& child : children_) {
    EXPECT_EQ(child->ReadLine(), "OK");
    EXPECT_EQ(child->Wait(), 0);
  }
  for (int kind = 0; kind < kOptimizers; ++kind) {
    const std::vector<Tensor> by_parts = TrainedAlone(kind, size), whole = TrainedAlone(kind, 1);
    std::vector<Tensor> first;
    for (int rank = 0; rank < size; ++rank) {
      std::vector<Tensor> got;
      torch::load(got, ParametersFile(file_, kind, rank));
      ASSERT_EQ(got.size(), whole.size());
      if (rank == 0) first = got;
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(got[i].equal(first[i])) << kind << ", rank " << rank << ", parameter " << i;
        // A sum of two has one order only; of more, Gloo's and a loop's differ. The whole batch's
        // sums have another one still, and Adam divides by what is nearly zero at first.
        EXPECT_TRUE(size > 2 || got[i].equal(by_parts[i])) << kind << ", parameter " << i;
        EXPECT_TRUE(torch::allclose(got[i], by_parts[i], 1e-4, 1e-5)) << kind << ", " << i;
        EXPECT_TRUE(torch::allclose(got[i], whole[i], 1e-3, 1e-4)) << kind << ", " << i;
      }
    }
    EXPECT_FALSE(first[0].equal(NewModel(0)->parameters()[0])) << "it trained";
  }
}

INSTANTIATE_TEST_SUITE_P(Processes, TrainingTest, testing::Values(2, 3, 4));

// This process is rank 0 of 3, and the last one is killed or stopped, or fails.
class LostRankTest : public ProcessGroupProcessTest {
 protected:
  void Train(int seconds, const std::function<void(ChildProcess&)>& lose,
             const std::string& mode = "on") {
    Start("on", 1, 3, seconds);
    Start(mode, 2, 3, seconds);
    {
      auto group = Meet(file_, 0, 3, absl::Seconds(seconds));
      ASSERT_TRUE(group.ok()) << group.status();
      Model model = NewModel(0);
      const auto optimizer = NewOptimizer(0, model->parameters());
      auto averager = GradientAverager::Create(*group, *model, SmallBuckets());
      ASSERT_TRUE(averager.ok()) << averager.status();
      for (int step = 0; step < 3; ++step) {
        ASSERT_TRUE(Step(model, *optimizer, step, 0, 3).ok());
      }
      for (const auto& child : children_) ASSERT_EQ(child->ReadLine(), "OK");
      lose(*children_[1]);
      // What the lost one has already sent may do for a step.
      absl::Status status;
      for (int step = 3; status.ok(); ++step) status = Step(model, *optimizer, step, 0, 3);
      status_ = status;
      EXPECT_TRUE(absl::StrContains(status.message(),
                                    "process group 'trainers' (rank 0 of 3, gloo): averaging "
                                    "bucket "))
          << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "gradients ('")) << status;
      const int64_t collectives = (*group)->collectives();
      EXPECT_EQ(Step(model, *optimizer, 0, 0, 3), status) << "the first error stays";
      EXPECT_EQ((*group)->collectives(), collectives) << "and nothing is begun";
    }
    other_ = children_[0]->ReadLine();
    EXPECT_EQ(children_[0]->Wait(), 1);
    EXPECT_TRUE(absl::StrContains(other_, "process group 'trainers' (rank 1 of 3, gloo)"))
        << other_;
  }

  absl::Status status_;
  std::string other_;
};

TEST_F(LostRankTest, AKilledRankIsAnErrorOfTheOthers) {
  Train(300, [](ChildProcess& child) {
    child.Signal(SIGKILL);
    EXPECT_EQ(child.Wait(), -SIGKILL);
  });
  EXPECT_EQ(status_.code(), absl::StatusCode::kUnavailable) << status_;
  EXPECT_TRUE(absl::StartsWith(other_, "UNAVAILABLE")) << other_;
}

TEST_F(LostRankTest, AStoppedRankIsAnErrorOfTheOthersInTime) {
  Train(20, [](ChildProcess& child) { child.Stop(); });
  // Who waited too long first is gone then, and the other one may hear of that.
  const bool here = status_.code() == absl::StatusCode::kDeadlineExceeded;
  const bool there = absl::StartsWith(other_, "DEADLINE_EXCEEDED");
  EXPECT_TRUE(here || there) << status_ << "; " << other_;
  EXPECT_TRUE(here || status_.code() == absl::StatusCode::kUnavailable) << status_;
  EXPECT_TRUE(there || absl::StartsWith(other_, "UNAVAILABLE")) << other_;
}

TEST_F(LostRankTest, ARankWhoseBackwardFailsIsAnErrorOfTheOthersAtOnce) {
  Train(
      300, [](ChildProcess& child) { EXPECT_EQ(child.ReadLine(), "INTERNAL: on fire"); }, "fail");
  const std::string reason = "rank 2 failed: a backward failed when ";
  EXPECT_EQ(status_.code(), absl::StatusCode::kUnavailable) << status_;
  EXPECT_TRUE(absl::StrContains(status_.message(), reason)) << status_;
  EXPECT_TRUE(absl::StrContains(other_, reason)) << other_;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 7 && argv[1] == std::string("--rank")) {
    int rank = 0, size = 0, seconds = 0;
    if (!absl::SimpleAtoi(argv[4], &rank) || !absl::SimpleAtoi(argv[5], &size) ||
        !absl::SimpleAtoi(argv[6], &seconds)) {
      return 2;
    }
    return distgrad::RunRank(argv[2], argv[3], rank, size, seconds);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
