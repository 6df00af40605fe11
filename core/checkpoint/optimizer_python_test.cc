// What Python's torch of now saves goes on here, and what is saved here goes on there.
// optimizer_checkpoint_test has the same with what an earlier run of it has made.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/checkpoint/optimizer_cases.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

// What it says, with its exit status unless that is 0.
std::string RunPython(const std::string& arguments) {
  const std::string command = absl::StrCat(
      "PYTHONPATH=../safetensors/site ../torchrun/python core/checkpoint/optimizer_python.py ",
      arguments, " 2>&1");
  FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  char line[4096];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) output += line;
  const int status = pclose(pipe);
  if (status != 0) absl::StrAppend(&output, "(status ", status, ")");
  return output;
}

TEST(OptimizerPythonTest, BothWays) {
  if (std::system("python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'") != 0) {
    GTEST_SKIP() << "there is no python3 that is 3.11, which torch's wheel is for";
  }
  const std::string theirs = testing::TempDir() + "/theirs", ours = testing::TempDir() + "/ours";
  std::filesystem::create_directories(theirs);
  std::filesystem::create_directories(ours);
  ASSERT_EQ(RunPython("make " + theirs), "");
  for (const OptimizerCase& each : OptimizerCases()) ExpectGoesOnAsInPython(each, theirs, ours);
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(RunPython(absl::StrCat("check ", theirs, " ", ours)), "");
}

}  // namespace
}  // namespace distgrad
