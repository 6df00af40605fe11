// A folder for the checkpoints of a test.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_CHECKPOINT_FOLDER_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_CHECKPOINT_FOLDER_H_

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace distgrad {

// A test with a folder of its own, which is not there yet.
class CheckpointFolderTest : public testing::Test {
 protected:
  CheckpointFolderTest() {
    const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(
                  absl::StrCat(testing::TempDir(), "/", test->test_suite_name(), ".", test->name()))
                  .lexically_normal()
                  .string();
    std::filesystem::remove_all(folder_);
  }

  // What is in the folder, but for the lock.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().filename() != ".lock") names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string folder_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_CHECKPOINT_FOLDER_H_
