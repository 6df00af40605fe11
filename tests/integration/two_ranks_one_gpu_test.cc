// Two processes, a rank of a group over NCCL in each, on one GPU. NCCL refuses two ranks on a GPU
// of one machine; each process says here that it is on a machine of its own (NCCL_HOSTID), so NCCL
// connects them by sockets, and its kernels wait for each other as those of two GPUs do. With
// --config=cuda alone; it needs a GPU, and is skipped without.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/status.h"
#include "core/membership/store/file_store.h"
#include "core/net/cluster_key.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"
#include "core/tensor/exception.h"
#include "tests/testing/child_process.h"
#include "tests/testing/status_of.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;

const c10::Device kGpu(c10::kCUDA, 0);
constexpr int kRanks = 2;
constexpr int kSteps = 20;
constexpr int kOwnStatus = 17;
// Of what a rank sends and another one takes late: it fits into the buffers to which NCCL's kernels
// give what they send, and not into those that the system has for a connection.
constexpr int64_t kLateBytes = int64_t{64} << 20;
// For one process, by a signal: one that hangs is not waited for until the whole test is ended.
// More than a rank has to come and to connect, so that a deadline comes first.
constexpr unsigned kSeconds = 50;

struct ModelImpl : nn::Module {
  ModelImpl() {
    first = register_module("first", nn::Linear(8, 64));
    tied = register_module("tied", nn::Linear(64, 64));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({64})));
    last = register_module("last", nn::Linear(64, 4));
  }
  Tensor forward(const Tensor& x) {
    return last(norm(torch::tanh(tied(torch::tanh(tied(torch::relu(first(x))))))));
  }
  nn::Linear first{nullptr}, tied{nullptr}, last{nullptr};
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Model);

Model NewModel(int seed) {
  torch::manual_seed(seed);
  Model model;
  model->to(kGpu);
  return model;
}

Tensor Loss(Model model, int step, int rank) {
  torch::manual_seed(100 + step);
  const Tensor batch = torch::rand({16, 8}), target = torch::rand({16, 4});
  return torch::mse_loss(model->forward(batch.narrow(0, rank * 8, 8).to(kGpu)),
                         target.narrow(0, rank * 8, 8).to(kGpu));
}

void Descend(Model model) {
  const torch::NoGradGuard no_grad;
  for (const Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.01);
}

std::string ParametersFile(const std::string& file, int rank) {
  return absl::StrCat(file, ".", rank);
}

absl::StatusOr<std::shared_ptr<ProcessGroup>> Meet(const std::string& file, int rank,
                                                   absl::Duration timeout) {
  auto store = NewFileStore(file);
  if (!store.ok()) return store.status();
  return ProcessGroup::Create({.name = "neighbours",
                               .store = *std::move(store),
                               .rank = rank,
                               .size = kRanks,
                               .backend = "nccl",
                               .timeout = timeout,
                               .join_timeout = absl::Seconds(30),
                               .cluster_key = ClusterKey()});
}

// ---------------------------------------------------------------------------- what a rank does

absl::Status Is(bool right, absl::string_view what) {
  return right ? absl::OkStatus() : absl::InternalError(absl::StrCat("wrong: ", what));
}

// Of numbers that are the same in every order of adding.
absl::Status AddAndBroadcast(ProcessGroup& group) {
  const std::string what = "adding";
  for (const at::ScalarType dtype :
       {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    for (const int64_t size : {int64_t{1}, int64_t{1000}, int64_t{4} << 20}) {
      const Tensor numbers = at::arange(size, at::kLong).remainder(64);
      const Tensor sum = (numbers + group.rank()).to(dtype).to(kGpu);
      const auto running = group.BeginSum(sum, what);
      if (!running.ok()) return running.status();
      absl::Status status = group.Wait(**running);
      if (!status.ok()) return status;
      const std::string which = absl::StrCat(c10::toString(dtype), ", ", size);
      status = Is(sum.cpu().equal((numbers * 2 + 1).to(dtype)), absl::StrCat("sum of ", which));
      if (!status.ok()) return status;
      for (int root = 0; root < kRanks; ++root) {
        const Tensor from_root = (numbers + group.rank()).to(dtype).to(kGpu);
        status = group.Broadcast({from_root}, root);
        if (!status.ok()) return status;
        status = Is(from_root.cpu().equal((numbers + root).to(dtype)),
                    absl::StrCat("broadcast by ", root, " of ", which));
        if (!status.ok()) return status;
      }
    }
  }
  // The sum of these overflows, and their average does not.
  const Tensor large = at::full({1000}, 40000.0).to(at::kHalf).to(kGpu);
  const absl::Status status = group.Average({large});
  if (!status.ok()) return status;
  return Is(large.cpu().equal(at::full({1000}, 40000.0).to(at::kHalf)), "average of large float16");
}

// On a stream that is not the default one if `stream`.
absl::Status Train(const std::shared_ptr<ProcessGroup>& group, const std::string& file, bool stream,
                   bool fails) {
  const c10::OptionalStreamGuard on_stream(
      stream ? std::make_optional<c10::Stream>(c10::cuda::getStreamFromPool()) : std::nullopt);
  Model model = NewModel(group->rank());
  const auto averager =
      GradientAverager::Create(group, *model, {.bucket_bytes = 8192, .first_bucket_bytes = 1024});
  if (!averager.ok()) return averager.status();
  for (int step = 0; step < kSteps; ++step) {
    if (fails && step == 3) {
      model->first->weight.register_hook(
          [](const Tensor&) { throw std::runtime_error("on fire"); });
    }
    model->zero_grad();
    const absl::Status status = StatusOf([&] { Loss(model, step, group->rank()).backward(); });
    if (!status.ok()) return status;
    Descend(model);
  }
  torch::save(model->parameters(), ParametersFile(file, group->rank()));
  return absl::OkStatus();
}

// Adds until that fails.
absl::Status AddForEver(ProcessGroup& group) {
  const std::string what = "adding";
  const Tensor tensor = at::zeros({1 << 20}, kGpu);
  for (;;) {
    const auto running = group.BeginSum(tensor, what);
    if (!running.ok()) return running.status();
    const absl::Status status = group.Wait(**running);
    if (!status.ok()) return status;
  }
}

// What a rank does as a process, and then says how it ended.
int RunRank(const std::string& mode, const std::string& file, int rank, int seconds) {
  alarm(kSeconds);
  setenv("NCCL_HOSTID", absl::StrCat("machine ", rank).c_str(), 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  setenv("NCCL_MNNVL_ENABLE", "0", 1);
  if (absl::StrContains(mode, "late")) setenv("NCCL_BUFFSIZE", absl::StrCat(kLateBytes).c_str(), 1);
  // What NCCL prints goes elsewhere than the lines that the parent reads.
  const int lines = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  const auto say = [lines](const absl::Status& status) {
    dprintf(lines, "%s\n", status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
    return status.ok() ? 0 : 1;
  };
  auto group = Meet(file, rank, absl::Seconds(seconds));
  if (!group.ok()) return say(group.status());
  if (mode == "add") return say(AddAndBroadcast(**group));
  if (mode == "train" || mode == "train on a stream") {
    return say(Train(*group, file, mode != "train", /*fails=*/false));
  }
  if (mode == "train and fail") {
    return say(Train(*group, file, /*stream=*/false, /*fails=*/rank == 1));
  }
  const std::string what = "adding";
  const Tensor tensor = at::zeros({1 << 20}, kGpu);
  if (mode == "exit") {
    const auto running = (*group)->BeginSum(tensor, what);
    // The other one may be gone before this one has begun.
    if (!absl::IsUnavailable(running.status()) && !running.ok()) return say(running.status());
    std::exit(kOwnStatus);
  }
  // The first collective works, and says that both are there.
  const absl::Status added = (*group)->Average({tensor});
  say(added);
  if (mode == "add for ever") return say(AddForEver(**group));
  // From what the kernels of rank 0 have given to NCCL, which may take it for sent.
  if (mode == "leave while the other is late" || mode == "take late") {
    const Tensor numbers = at::arange(kLateBytes / 4, at::kInt).to(kGpu) + 7 * rank;
    std::string line;
    if (rank == 1) std::getline(std::cin, line);
    absl::Status status = (*group)->Broadcast({numbers});
    if (status.ok())
      status = Is(numbers.cpu().equal(at::arange(kLateBytes / 4, at::kInt)), "what was sent");
    if (rank == 0) say(status);
    group->reset();
    return say(status);
  }
  // What the other rank adds alone does not end by itself.
  if (mode == "stay away") {
    for (;;) pause();
  }
  if (mode == "fail") {
    (*group)->Fail(absl::DataLossError("no disk"));
    for (;;) pause();
  }
  if (mode == "wait for nothing") {
    const auto running = (*group)->BeginSum(tensor, what);
    if (!running.ok()) return say(running.status());
    // Its kernel is on the GPU until it is aborted, with nobody who waits.
    c10::cuda::device_synchronize();
    return say((*group)->Wait(**running));
  }
  return say(absl::InvalidArgumentError(mode));
}

// ------------------------------------------------------------------------------------ the tests

class TwoRanksOneGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() < 1) GTEST_SKIP() << "this machine has no GPU";
    const char* const folder = std::getenv("TEST_TMPDIR");
    file_ = absl::StrCat(folder == nullptr ? "/tmp" : folder, "/group-XXXXXX");
    const int fd = mkstemp(file_.data());
    ASSERT_GE(fd, 0);
    close(fd);
    unlink(file_.c_str());
  }
  void TearDown() override {
    if (file_.empty()) return;
    for (int rank = 0; rank < kRanks; ++rank) unlink(ParametersFile(file_, rank).c_str());
    unlink(file_.c_str());
  }

  ChildProcess& Start(const std::string& mode, int rank, int seconds = 30) {
    children_.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{
        "--rank", mode, file_, absl::StrCat(rank), absl::StrCat(seconds)}));
    return *children_.back();
  }
  void ExpectOk(const std::string& mode) {
    for (int rank = 0; rank < kRanks; ++rank) Start(mode, rank);
    for (const auto& child : children_) {
      EXPECT_EQ(child->ReadLine(), "OK");
      EXPECT_EQ(child->Wait(), 0);
    }
  }
  // Of a rank whose other one does not come to what it adds.
  void ExpectDeadline(const std::string& mode) {
    ChildProcess& adds = Start(mode, 0, /*seconds=*/5);
    ChildProcess& away = Start("stay away", 1, /*seconds=*/5);
    EXPECT_EQ(adds.ReadLine(), "OK");
    EXPECT_EQ(away.ReadLine(), "OK");
    const std::string said = adds.ReadLine();
    EXPECT_TRUE(absl::StartsWith(said, "DEADLINE_EXCEEDED")) << said;
    EXPECT_TRUE(absl::StrContains(said, "ncclAllReduce")) << said;
    EXPECT_EQ(adds.Wait(), 1);
  }
  void ExpectTrained(const std::string& mode) {
    ExpectOk(mode);
    Model alone = NewModel(0);
    for (int step = 0; step < kSteps; ++step) {
      alone->zero_grad();
      for (int rank = 0; rank < kRanks; ++rank) Loss(alone, step, rank).backward();
      for (const Tensor& parameter : alone->parameters()) parameter.mutable_grad().div_(kRanks);
      Descend(alone);
    }
    std::vector<Tensor> first, second;
    torch::load(first, ParametersFile(file_, 0));
    torch::load(second, ParametersFile(file_, 1));
    const std::vector<Tensor> expected = alone->parameters();
    ASSERT_EQ(first.size(), expected.size());
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(first[i].equal(second[i])) << i;
      EXPECT_TRUE(torch::allclose(first[i], expected[i], 1e-4, 1e-6)) << i;
    }
    EXPECT_FALSE(first[0].equal(NewModel(0)->parameters()[0])) << "it trained";
  }

  std::string file_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
};

TEST_F(TwoRanksOneGpuTest, SumsAndBroadcastsAreRight) { ExpectOk("add"); }

TEST_F(TwoRanksOneGpuTest, AveragedTrainingEqualsOneProcess) { ExpectTrained("train"); }

TEST_F(TwoRanksOneGpuTest, AveragedTrainingOnAnotherStreamEqualsOneProcess) {
  ExpectTrained("train on a stream");
}

TEST_F(TwoRanksOneGpuTest, ABackwardThatFailsIsAnErrorOfTheOtherRank) {
  for (int rank = 0; rank < kRanks; ++rank) Start("train and fail", rank);
  const std::string other = children_[0]->ReadLine();
  EXPECT_TRUE(absl::StartsWith(other, "UNAVAILABLE")) << other;
  EXPECT_TRUE(absl::StrContains(other, "rank 1 failed: a backward failed when ")) << other;
  EXPECT_EQ(children_[0]->Wait(), 1);
  EXPECT_EQ(children_[1]->ReadLine(), "INTERNAL: on fire");
}

TEST_F(TwoRanksOneGpuTest, AFailureEndsWhatTheOtherRankAdds) {
  ChildProcess& adds = Start("add for ever", 0);
  ChildProcess& fails = Start("fail", 1);
  EXPECT_EQ(adds.ReadLine(), "OK");
  EXPECT_EQ(fails.ReadLine(), "OK");
  const std::string said = adds.ReadLine();
  EXPECT_TRUE(absl::StrContains(said, "rank 1 failed: no disk")) << said;
  EXPECT_EQ(adds.Wait(), 1);
}

TEST_F(TwoRanksOneGpuTest, ARankThatIsKilledIsAnErrorOfTheOther) {
  ChildProcess& adds = Start("add for ever", 0);
  ChildProcess& killed = Start("add for ever", 1);
  EXPECT_EQ(adds.ReadLine(), "OK");
  EXPECT_EQ(killed.ReadLine(), "OK");
  const absl::Time begin = absl::Now();
  killed.Signal(SIGKILL);
  EXPECT_EQ(killed.Wait(), -SIGKILL);
  const std::string said = adds.ReadLine();
  RecordProperty("noticed_ms", absl::StrCat(absl::ToInt64Milliseconds(absl::Now() - begin)));
  EXPECT_TRUE(absl::StartsWith(said, "UNAVAILABLE")) << said;
  EXPECT_EQ(adds.Wait(), 1);
}

TEST_F(TwoRanksOneGpuTest, ARankThatStaysAwayIsAnErrorAtTheDeadline) {
  ExpectDeadline("add for ever");
}

TEST_F(TwoRanksOneGpuTest, ADeadlineHoldsWhereNobodyWaits) { ExpectDeadline("wait for nothing"); }

// As the last collective of a job often is.
TEST_F(TwoRanksOneGpuTest, ARankThatLeavesHasSentAllThatTheOtherTakesLate) {
  ChildProcess& sends = Start("leave while the other is late", 0);
  ChildProcess& takes = Start("take late", 1);
  EXPECT_EQ(sends.ReadLine(), "OK");
  EXPECT_EQ(takes.ReadLine(), "OK");
  EXPECT_EQ(sends.ReadLine(), "OK") << "it has sent";
  // It has the time to be gone before the other one begins, but waits for it.
  std::optional<std::string> left;
  const absl::Time enough = absl::Now() + absl::Seconds(1);
  while (!(left = sends.TryReadLine()).has_value() && absl::Now() < enough) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(left, std::nullopt) << "it has left";
  takes.WriteLine("take it");
  EXPECT_EQ(takes.ReadLine(), "OK");
  EXPECT_EQ(takes.Wait(), 0);
  if (!left.has_value()) left = sends.ReadLine();
  EXPECT_EQ(left, "OK");
  EXPECT_EQ(sends.Wait(), 0);
}

TEST_F(TwoRanksOneGpuTest, BothMayExitWithASumOnTheGpu) {
  for (int i = 0; i < 3; ++i) {
    for (int rank = 0; rank < kRanks; ++rank) Start("exit", rank);
    for (const auto& child : children_) ASSERT_EQ(child->Wait(), kOwnStatus) << "exit " << i + 1;
    children_.clear();
  }
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 6 && argv[1] == std::string("--rank")) {
    int rank = 0, seconds = 0;
    if (!absl::SimpleAtoi(argv[4], &rank) || !absl::SimpleAtoi(argv[5], &seconds)) return 2;
    return distgrad::RunRank(argv[2], argv[3], rank, seconds);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
