// What the tool says of checkpoints, as its user sees it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/checkpoint/job/manifest.h"
#include "core/checkpoint/job/step_folders.h"
#include "core/checkpoint/safetensors.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Options = std::map<std::string, std::string>;  // of SGDs, by their parameters

struct Result {
  int status = -1;
  std::string output;
};

Result Tool(const std::string& arguments) {
  Result result;
  FILE* const pipe = popen(absl::StrCat("tools/checkpoint ", arguments, " 2>&1").c_str(), "r");
  if (pipe == nullptr) return result;
  char line[4096];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) result.output += line;
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.status = WEXITSTATUS(status);
  return result;
}

class CheckpointToolTest : public testing::Test {
 protected:
  CheckpointToolTest() {
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(absl::StrCat(testing::TempDir(), "/", test->name()))
                  .lexically_normal()
                  .string();
    std::filesystem::remove_all(folder_);
  }

  // A checkpoint of one worker. Its SGD has no state, as those without momentum.
  void Save(int64_t step, const TensorMap& tensors, const Options& options = {}) {
    absl::StatusOr<std::unique_ptr<StepFolders>> folders = StepFolders::Lock(folder_);
    ASSERT_TRUE(folders.ok()) << folders.status();
    const absl::StatusOr<std::string> attempt = (*folders)->Begin(step);
    ASSERT_TRUE(attempt.ok()) << attempt.status();
    ManifestWorker worker{"worker0", {}, {}};
    const auto save = [&](const std::string& name, std::optional<std::string> optimizer,
                          const TensorMap& those, const std::map<std::string, std::string>& with) {
      ManifestFile& file = worker.files.emplace_back(ManifestFile{name, std::move(optimizer), {}});
      const absl::Status saved = SaveSafetensors(those, absl::StrCat(*attempt, "/", name), with,
                                                 {.checksums = &file.checksums});
      ASSERT_TRUE(saved.ok()) << saved;
    };
    save("model.safetensors", std::nullopt, tensors, {{"format", "pt"}});
    int number = 0;
    for (const auto& [parameter, rest] : options) {
      // One for each, as where each is of another worker.
      const std::string groups =
          absl::StrCat("[{\"params\":[0],\"param_names\":[\"", parameter, "\"],", rest, "}]");
      save(absl::StrCat("optimizer.sgd-", number++, ".safetensors"), "sgd", {},
           {{"format", "pt"}, {"optimizer", "SGD"}, {"param_groups", groups}});
    }
    const absl::Status committed = (*folders)->Commit(*attempt, Manifest{step, 0, "", {worker}});
    ASSERT_TRUE(committed.ok()) << committed;
  }
  std::string Step(int64_t step) const { return absl::StrCat(folder_, "/step-00000", step); }
  // Of steps 1 and 2.
  Result Diff() const { return Tool(absl::StrCat("diff ", Step(1), " ", Step(2))); }

  std::string folder_;
};

// The damaged one may be the newest.
TEST_F(CheckpointToolTest, AnOlderOneIsNotTakenForADamagedOne) {
  for (const int64_t step : {1, 2}) Save(step, {{"x", at::full({3}, step)}});
  std::ofstream(Step(2) + "/manifest.json") << "{}";
  const std::string out = folder_ + "/out";
  for (const std::string& arguments :
       {absl::StrCat("merge ", folder_, " ", out), absl::StrCat("split ", folder_, " 2 ", out),
        absl::StrCat("diff ", folder_, " ", Step(1)), absl::StrCat("show ", folder_)}) {
    const Result result = Tool(arguments);
    EXPECT_EQ(result.status, 2) << arguments << ": " << result.output;
    EXPECT_TRUE(absl::StrContains(result.output, Step(2) + "/manifest.json")) << result.output;
    EXPECT_TRUE(absl::StrContains(result.output, "give the folder of one step")) << result.output;
  }
  EXPECT_FALSE(std::filesystem::exists(out));
  EXPECT_EQ(Tool(absl::StrCat("merge ", Step(1), " ", out)).status, 0);
}

TEST_F(CheckpointToolTest, OptimizersWithOtherOptionsAreNotTheSame) {
  const TensorMap tensors = {{"a", at::zeros({1})}, {"b", at::zeros({1})}};
  Save(1, tensors, {{"a", "\"lr\":0.1"}, {"b", "\"lr\":0.1"}});
  Save(2, tensors, {{"a", "\"lr\":0.1"}, {"b", "\"lr\":0.2"}});
  const Result other = Diff();
  EXPECT_EQ(other.status, 1) << other.output;
  EXPECT_EQ(other.output,
            "'optimizer sgd: b' has the options SGD {\"lr\":0.1} and SGD {\"lr\":0.2}\n");
  Save(2, tensors, {{"a", "\"lr\":0.1"}});
  const Result fewer = Diff();
  EXPECT_EQ(fewer.status, 1) << fewer.output;
  EXPECT_EQ(fewer.output, "'optimizer sgd: b' has options only in the first\n");
  // Where several parameters are in one group they have the same options.
  Save(2, tensors, {{"a\",\"b", "\"lr\":0.1"}});
  const Result same = Diff();
  EXPECT_EQ(same.status, 0) << same.output;
}

// Those of one optimizer, as its Save() makes them.
TEST_F(CheckpointToolTest, FilesOfOptimizersHaveOptionsToo) {
  std::filesystem::create_directory(folder_);
  const auto save = [&](const std::string& name, const std::string& optimizer,
                        const std::string& rate) {
    const absl::Status saved = SaveSafetensors(
        {}, absl::StrCat(folder_, "/", name),
        {{"format", "pt"},
         {"optimizer", optimizer},
         {"param_groups",
          absl::StrCat("[{\"lr\":", rate, ",\"params\":[0],\"param_names\":[\"w\"]}]")}});
    ASSERT_TRUE(saved.ok()) << saved;
  };
  save("a", "SGD", "0.1");
  save("b", "SGD", "0.2");
  save("c", "Adam", "0.1");
  save("d", "SGD", "0.1");
  const auto diff = [&](const std::string& other) {
    return Tool(absl::StrCat("diff ", folder_, "/a ", folder_, "/", other));
  };
  Result result = diff("b");
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_EQ(result.output,
            "'optimizer: w' has the options SGD {\"lr\":0.1} and SGD {\"lr\":0.2}\n");
  result = diff("c");
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_EQ(result.output,
            "'optimizer: w' has the options SGD {\"lr\":0.1} and Adam {\"lr\":0.1}\n");
  result = diff("d");
  EXPECT_EQ(result.status, 0) << result.output;
  // What these make has no options.
  const std::string out = folder_ + "/out";
  for (const std::string& arguments : {absl::StrCat("merge ", folder_, "/a ", out),
                                       absl::StrCat("split ", folder_, "/a 2 ", out)}) {
    result = Tool(arguments);
    EXPECT_EQ(result.status, 2) << arguments << ": " << result.output;
    EXPECT_TRUE(absl::StrContains(result.output, "is the file of an optimizer")) << result.output;
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

// A checksum differs, and so has something to be said.
TEST_F(CheckpointToolTest, ElementsDifferIfTheirBytesDo) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto with = [](at::Tensor tensor, int64_t i, const c10::Scalar& value) {
    tensor[i] = value;
    return tensor;
  };
  const int64_t large = int64_t{1} << 53;
  Save(1, {{"int", at::full({3}, large, at::kLong)},
           {"least", at::full({2}, std::numeric_limits<int64_t>::min(), at::kLong)},
           {"nan", with(at::zeros({3}), 0, nan)},
           {"zero", at::zeros({3})}});
  Save(2, {{"int", with(at::full({3}, large, at::kLong), 1, large + 1)},
           {"least", at::full({2}, std::numeric_limits<int64_t>::max(), at::kLong)},
           {"nan", with(with(at::zeros({3}), 0, nan), 1, 0.5)},
           {"zero", with(at::zeros({3}), 2, -0.0)}});
  const Result result = Diff();
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.output,
            "'int' differs in 1 of 3 elements, by 1 at most\n"
            "'least' differs in 2 of 2 elements, by 1.84467e+19 at most\n"
            "'nan' differs in 1 of 3 elements, by 0.5 at most\n"
            "'zero' differs in 1 of 3 elements, by 0 at most\n");
}

}  // namespace
}  // namespace distgrad
