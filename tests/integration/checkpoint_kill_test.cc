// A job of three processes that is killed at any moment, one process of it or all, and goes on from
// its last checkpoint: in the end it has the bits that it has when nobody kills it.
//
//   tools/bazel run //tests/integration:checkpoint_kill_test -- --rounds 100
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/optim/adam.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "core/checkpoint/job/manifest.h"
#include "core/worker/worker.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

namespace fs = std::filesystem;

constexpr int kWorkers = 3;
constexpr int kSteps = 12;
constexpr int64_t kRows = 20'000;

int rounds = 3;  // --rounds

// What a worker trains: from gradients out of a generator, which is a part of its state.
class Model {
 public:
  explicit Model(int rank)
      : weight_(at::full({kRows, 3}, static_cast<double>(rank)).requires_grad_()),
        adam_({weight_}, torch::optim::AdamOptions(0.1)),
        generator_(rank) {}

  void Step() {
    std::vector<float> gradient(weight_.numel());
    for (float& each : gradient) each = static_cast<float>(generator_() % 1000) / 500 - 1;
    weight_.mutable_grad() = at::from_blob(gradient.data(), weight_.sizes()).clone();
    adam_.step();
  }

  CheckpointContents Contents(const std::string& name) {
    return {.tensors = {{name, weight_}},
            .optimizers = {{"", &adam_}},
            .save_values =
                [this] {
                  std::ostringstream text;
                  text << generator_;
                  return CheckpointValues{{"generator", text.str()}};
                },
            .load_values = [this](const LoadedValues& loaded) -> absl::Status {
              std::istringstream text(loaded.values.at("generator"));
              text >> generator_;
              return absl::OkStatus();
            }};
  }

 private:
  at::Tensor weight_;
  torch::optim::Adam adam_;
  std::mt19937 generator_;
};

// Trains, and saves after every step: every other time in the background.
absl::Status Lead(Worker* worker, const std::string& folder) {
  // From here on a process that is killed is missed at once.
  std::printf("joined\n");
  std::fflush(stdout);
  absl::StatusOr<std::unique_ptr<CheckpointManager>> checkpoints =
      CheckpointManager::Create(worker, folder, {.keep = 2});
  if (!checkpoints.ok()) return checkpoints.status();
  const absl::StatusOr<LoadedCheckpoint> loaded = (*checkpoints)->Load();
  if (!loaded.ok() && !absl::IsNotFound(loaded.status())) return loaded.status();
  std::printf("from %d\n", loaded.ok() ? static_cast<int>(loaded->step) : 0);
  std::fflush(stdout);
  std::optional<Future<Unit>> in_flight;
  for (int64_t step = loaded.ok() ? loaded->step : 0; step < kSteps; ++step) {
    for (const std::string& name : worker->names()) {
      const auto stepped = worker->Call(name, "step", {});
      if (!stepped.ok()) return stepped.status();
    }
    if (step % 2 == 0 && step + 1 < kSteps) {
      const absl::StatusOr<Future<Unit>> saved = (*checkpoints)->SaveAsync(step + 1);
      if (!saved.ok()) return saved.status();
      in_flight = *saved;
    } else {
      const absl::Status saved = (*checkpoints)->Save(step + 1);
      if (!saved.ok()) return saved;
      if (in_flight.has_value() && !in_flight->Wait().ok()) return in_flight->Wait().status();
    }
    std::printf("step %d\n", static_cast<int>(step + 1));
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Train(int rank, const std::string& rendezvous, const std::string& folder) {
  Model model(rank);
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create({.rendezvous = rendezvous,
                                                                   .rank = rank,
                                                                   .world_size = kWorkers,
                                                                   .thread_count = 2,
                                                                   .timeout = absl::Minutes(2)});
  if (!worker.ok()) return worker.status();
  const absl::StatusOr<std::unique_ptr<CheckpointPart>> part =
      CheckpointPart::Create(worker->get(), model.Contents(absl::StrCat("weight", rank)));
  if (!part.ok()) return part.status();
  absl::Status status = (*worker)->Register("step", [&](Request&) -> absl::StatusOr<Message> {
    model.Step();
    return Message{};
  });
  if (status.ok()) status = (*worker)->Barrier(absl::Now() + absl::Minutes(2));
  if (status.ok() && rank == 0) status = Lead(worker->get(), folder);
  if (status.ok()) status = (*worker)->Shutdown();
  return status;
}

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class CheckpointKillTest : public testing::Test {
 protected:
  CheckpointKillTest() {
    const char* folder = std::getenv("TEST_TMPDIR");
    folder_ = absl::StrCat(folder != nullptr ? folder : testing::TempDir(), "/checkpoint_kill");
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~CheckpointKillTest() override { fs::remove_all(folder_); }

  using Job = std::vector<std::unique_ptr<ChildProcess>>;
  Job Start(const std::string& checkpoints) {
    const std::string rendezvous = absl::StrCat("file://", folder_, "/rendezvous", ++jobs_);
    Job job;
    for (int rank = 0; rank < kWorkers; ++rank) {
      job.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{
          "--worker", absl::StrCat(rank), rendezvous, absl::StrCat(folder_, "/", checkpoints)}));
    }
    return job;
  }
  // The step that a job begins with.
  static int ReadFrom(ChildProcess& leader) {
    const std::string line = leader.ReadLine();
    int from = -1;
    EXPECT_TRUE(absl::StartsWith(line, "from ") && absl::SimpleAtoi(line.substr(5), &from)) << line;
    return from;
  }
  // Runs a job to its end, which has to be a good one, from this step or a later one. How long it
  // took from its first step.
  absl::Duration Finish(Job job, int at_least_from) {
    std::optional<absl::Time> began;
    EXPECT_EQ(job[0]->ReadLine(), "joined");
    EXPECT_GE(ReadFrom(*job[0]), at_least_from) << "a checkpoint that was saved is not loaded";
    for (std::string line = job[0]->ReadLine(); !line.empty(); line = job[0]->ReadLine()) {
      EXPECT_TRUE(absl::StartsWith(line, "step ")) << line;
      if (!began.has_value()) began = absl::Now();
    }
    const absl::Duration took = began.has_value() ? absl::Now() - *began : absl::ZeroDuration();
    for (int rank = 0; rank < kWorkers; ++rank) EXPECT_EQ(job[rank]->Wait(), 0) << rank;
    return took;
  }
  // What the last checkpoint has, but for its time: files, and the generators.
  std::map<std::string, std::string> State(const std::string& checkpoints) {
    std::map<std::string, std::string> state;
    const fs::path folder = absl::StrCat(folder_, "/", checkpoints, "/step-0000", kSteps);
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") {
        state[entry.path().filename()] = Read(entry.path());
      }
    }
    const absl::StatusOr<Manifest> manifest = ReadManifest(folder);
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    if (!manifest.ok()) return state;
    for (const ManifestWorker& worker : manifest->workers) {
      for (const auto& [name, value] : worker.values) {
        state[absl::StrCat(name, " of ", worker.name)] = value;
      }
    }
    return state;
  }

  std::string folder_;
  int jobs_ = 0;
};

TEST_F(CheckpointKillTest, AJobThatIsKilledEndsWithTheSameBits) {
  const absl::Duration length = Finish(Start("whole"), 0);
  ASSERT_FALSE(HasFailure());
  const std::map<std::string, std::string> whole = State("whole");
  ASSERT_EQ(whole.size(), 3u * kWorkers);
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", round ", round));
    const std::string checkpoints = absl::StrCat("round", round);
    const int victim = static_cast<int>(random() % (kWorkers + 1));  // or all
    // The first one is killed when there is a checkpoint.
    const int earliest = round == 0 ? 2 : 0;
    const int step = earliest + static_cast<int>(random() % (kSteps - earliest));
    // Anywhere within a step and its save: the moment is what is to be random here.
    const absl::Duration later = length / kSteps * static_cast<double>(random() % 1000) / 1000;
    Job job = Start(checkpoints);
    EXPECT_EQ(job[0]->ReadLine(), "joined");
    if (step > 0) {
      EXPECT_EQ(ReadFrom(*job[0]), 0);
      std::string line;
      for (int i = 0; i < step; ++i) line = job[0]->ReadLine();
      EXPECT_EQ(line, absl::StrCat("step ", step));
    }
    absl::SleepFor(later);
    for (int rank = 0; rank < kWorkers; ++rank) {
      if (victim == rank || victim == kWorkers) job[rank]->Signal(SIGKILL);
    }
    // The others notice, and end.
    for (const auto& process : job) process->Wait();
    // Every other step ends when its checkpoint is durable.
    Finish(Start(checkpoints), step - step % 2);
    EXPECT_TRUE(State(checkpoints) == whole) << "victim " << victim << ", step " << step;
    if (testing::Test::HasFailure()) break;
    fs::remove_all(absl::StrCat(folder_, "/", checkpoints));
  }
  std::printf("%d rounds, each with the same bits in the end\n", rounds);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 5 && argv[1] == std::string("--worker")) {
    const absl::Status status = distgrad::Train(std::atoi(argv[2]), argv[3], argv[4]);
    if (!status.ok()) std::printf("%s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  testing::InitGoogleTest(&argc, argv);
  if (argc == 3 && argv[1] == std::string("--rounds")) {
    if (!absl::SimpleAtoi(argv[2], &distgrad::rounds)) return 2;
  }
  return RUN_ALL_TESTS();
}
