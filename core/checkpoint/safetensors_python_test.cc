// Files of the Python package are read, and ours by it: they are the same to the last byte.
#include <ATen/ATen.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/checkpoint/safetensors.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

const std::map<std::string, at::ScalarType>& Dtypes() {
  static const auto* const dtypes = new std::map<std::string, at::ScalarType>{
      {"bool", at::kBool},
      {"uint8", at::kByte},
      {"int8", at::kChar},
      {"int16", at::kShort},
      {"int32", at::kInt},
      {"int64", at::kLong},
      {"uint16", at::kUInt16},
      {"uint32", at::kUInt32},
      {"uint64", at::kUInt64},
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16},
      {"float32", at::kFloat},
      {"float64", at::kDouble},
      {"complex64", at::kComplexFloat},
      {"float8_e5m2", at::kFloat8_e5m2},
      {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
      {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
      {"float8_e8m0fnu", at::kFloat8_e8m0fnu},
      {"float4_e2m1fn_x2", at::kFloat4_e2m1fn_x2},
  };
  return *dtypes;
}

class SafetensorsPythonTest : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c 'import sys; sys.exit(sys.version_info[:2] < (3, 10))'") != 0) {
      GTEST_SKIP()
          << "there is no python3 that is 3.10 or later, which the safetensors wheel is for";
    }
  }

  // What it says, with its exit status unless that is 0.
  static std::string Run(const std::string& arguments) {
    const std::string command = absl::StrCat(
        "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=../safetensors/site python3 "
        "core/checkpoint/safetensors_python.py ",
        arguments, " 2>&1");
    FILE* pipe = popen(command.c_str(), "r");
    std::string output;
    char line[4096];
    while (std::fgets(line, sizeof(line), pipe) != nullptr) output += line;
    const int status = pclose(pipe);
    if (status != 0) absl::StrAppend(&output, "(status ", status, ")");
    return output;
  }
  static std::string Content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }

  const std::string theirs_ = testing::TempDir() + "/theirs.safetensors";
  const std::string ours_ = testing::TempDir() + "/ours.safetensors";
};

TEST_F(SafetensorsPythonTest, BothWays) {
  ASSERT_EQ(Run("write " + theirs_), "");
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(theirs_);
  ASSERT_TRUE(file.ok()) << file.status();
  const absl::StatusOr<TensorMap> tensors = LoadSafetensors(theirs_);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->size(), 3 * Dtypes().size() - 1);
  for (const auto& [name, tensor] : *tensors) {
    SCOPED_TRACE(name);
    const std::string dtype = name.substr(0, name.find('.')),
                      what = name.substr(name.find('.') + 1);
    ASSERT_EQ(Dtypes().count(dtype), 1u);
    EXPECT_EQ(tensor.scalar_type(), Dtypes().at(dtype));
    EXPECT_EQ(tensor.sizes().vec(), what == "matrix"   ? (std::vector<int64_t>{3, 2})
                                    : what == "scalar" ? std::vector<int64_t>()
                                                       : (std::vector<int64_t>{2, 0}));
    unsigned seed = 0;
    for (const char c : name) seed += static_cast<unsigned char>(c);
    const auto* const bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) {
      EXPECT_EQ(bytes[i], (seed + 37 * i) % (dtype == "bool" ? 2 : 256)) << i;
    }
  }
  const absl::Status saved = SaveSafetensors(*tensors, ours_, file->header().metadata);
  ASSERT_TRUE(saved.ok()) << saved;
  EXPECT_TRUE(Content(ours_) == Content(theirs_)) << Content(ours_) << "\n" << Content(theirs_);
  EXPECT_EQ(Run("read " + ours_), "");
}

// The other test does not merely pass with everything: Python looks.
TEST_F(SafetensorsPythonTest, PythonSeesWhatIsWrong) {
  ASSERT_EQ(Run("write " + theirs_), "");
  absl::StatusOr<TensorMap> tensors = LoadSafetensors(theirs_);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  (*tensors)["float32.matrix"][0][0].zero_();
  ASSERT_TRUE(SaveSafetensors(*tensors, ours_).ok());
  EXPECT_NE(Run("read " + ours_).find("float32.matrix is "), std::string::npos);
  std::ofstream(ours_, std::ios::binary | std::ios::app) << "x";
  EXPECT_EQ(Run("refuse " + ours_), "");
  EXPECT_FALSE(SafetensorsFile::Open(ours_).ok());
}

}  // namespace
}  // namespace distgrad
