// Tensors of every dtype and layout through a file and back, and files that are damaged or cut.
#include "core/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/crc32c.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

namespace fs = std::filesystem;

constexpr at::ScalarType kAll[] = {at::kBool,
                                   at::kByte,
                                   at::kChar,
                                   at::kShort,
                                   at::kInt,
                                   at::kLong,
                                   at::kUInt16,
                                   at::kUInt32,
                                   at::kUInt64,
                                   at::kHalf,
                                   at::kBFloat16,
                                   at::kFloat,
                                   at::kDouble,
                                   at::kComplexFloat,
                                   at::kFloat8_e5m2,
                                   at::kFloat8_e4m3fn,
                                   at::kFloat8_e5m2fnuz,
                                   at::kFloat8_e4m3fnuz,
                                   at::kFloat8_e8m0fnu,
                                   at::kFloat4_e2m1fn_x2};

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/safetensors.XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ + "/model.safetensors";
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Of that dtype, with any bits.
  static at::Tensor Any(at::IntArrayRef shape, at::ScalarType dtype) {
    at::Tensor tensor = at::empty(shape, dtype);
    const at::Tensor bytes = at::randint(dtype == at::kBool ? 2 : 256,
                                         {static_cast<int64_t>(tensor.nbytes())}, at::kByte);
    if (tensor.nbytes() > 0) {
      std::memcpy(tensor.mutable_data_ptr(), bytes.const_data_ptr(), tensor.nbytes());
    }
    return tensor;
  }
  static std::string BytesOf(const at::Tensor& tensor) {
    EXPECT_TRUE(tensor.is_contiguous());
    return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  static void ExpectSame(const at::Tensor& got, const at::Tensor& want) {
    EXPECT_EQ(got.scalar_type(), want.scalar_type());
    EXPECT_EQ(got.sizes(), want.sizes());
    if (got.sizes() == want.sizes()) {
      EXPECT_TRUE(BytesOf(got) == BytesOf(want));
    }
  }
  std::string Content() const {
    std::ifstream file(path_, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  void Put(const std::string& content) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
  }
  void Save(const TensorMap& tensors) const {
    const absl::Status saved = SaveSafetensors(tensors, path_);
    ASSERT_TRUE(saved.ok()) << saved;
  }
  TensorMap Load() const {
    absl::StatusOr<TensorMap> tensors = LoadSafetensors(path_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    return tensors.ok() ? *std::move(tensors) : TensorMap();
  }
  void ExpectError(const absl::Status& status, absl::StatusCode code,
                   const std::string& part) const {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status << "\nlacks " << part;
    EXPECT_TRUE(absl::StrContains(status.message(), path_)) << status << "\nlacks the path";
  }

  std::string folder_, path_;
};

TEST_F(SafetensorsTest, AllDtypesAndShapes) {
  at::manual_seed(1);
  TensorMap tensors;
  for (const at::ScalarType dtype : kAll) {
    const std::string name = c10::toString(dtype);
    if (dtype != at::kFloat4_e2m1fn_x2) tensors[name + ".scalar"] = Any({}, dtype);
    tensors[name + ".matrix"] = Any({3, 5}, dtype);
    tensors[name + ".empty"] = Any({0}, dtype);
    tensors[name + ".empties"] = Any({2, 0, 3}, dtype);
  }
  tensors[""] = at::ones({1});
  tensors["a \"name\"\n\u4e2d\u6587"] = at::ones({2});
  Save(tensors);
  const TensorMap loaded = Load();
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    ExpectSame(loaded.at(name), tensor);
  }
  // Into given ones.
  TensorMap given;
  for (const auto& [name, tensor] : tensors) {
    given[name] = at::empty(tensor.sizes(), tensor.scalar_type());
    if (tensor.nbytes() > 0) std::memset(given[name].mutable_data_ptr(), 1, tensor.nbytes());
  }
  const absl::Status into = LoadSafetensorsInto(path_, given);
  ASSERT_TRUE(into.ok()) << into;
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    ExpectSame(given.at(name), tensor);
  }
  // The same tensors make the same file.
  const std::string content = Content();
  Save(loaded);
  EXPECT_TRUE(Content() == content);
}

TEST_F(SafetensorsTest, ElementsAreInRowMajorOrder) {
  at::manual_seed(2);
  for (const at::ScalarType dtype : kAll) {
    SCOPED_TRACE(c10::toString(dtype));
    const at::Tensor base = Any({4, 6}, dtype);
    // Of the bytes of base, so that it does not depend on what we do.
    const int64_t size = base.element_size();
    const at::Tensor bytes = at::from_blob(base.mutable_data_ptr(), {4, 6, size}, at::kByte);
    TensorMap tensors;
    tensors["transposed"] = base.as_strided({6, 4}, {1, 6});
    tensors["sliced"] = base.as_strided({2, 3}, {12, 2}, 1);
    tensors["expanded"] = base.as_strided({3, 4}, {0, 6});
    Save(tensors);
    const TensorMap loaded = Load();
    EXPECT_EQ(BytesOf(loaded.at("transposed")), BytesOf(bytes.transpose(0, 1).contiguous()));
    EXPECT_EQ(BytesOf(loaded.at("sliced")),
              BytesOf(bytes.slice(0, 0, 4, 2).slice(1, 1, 6, 2).contiguous()));
    EXPECT_EQ(BytesOf(loaded.at("expanded")),
              BytesOf(bytes.select(1, 0).expand({3, 4, size}).contiguous()));
    // And back into tensors with other strides.
    const at::Tensor other = Any({4, 6}, dtype), before = other.clone();
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status();
    const absl::Status into = file->ReadInto("sliced", other.as_strided({2, 3}, {12, 2}, 1));
    ASSERT_TRUE(into.ok()) << into;
    const at::Tensor got = at::from_blob(other.mutable_data_ptr(), {24, size}, at::kByte);
    const at::Tensor was = at::from_blob(before.mutable_data_ptr(), {24, size}, at::kByte);
    const at::Tensor is = at::from_blob(base.mutable_data_ptr(), {24, size}, at::kByte);
    for (int i = 0; i < 24; ++i) {
      const bool written = i / 6 % 2 == 0 && i % 6 % 2 == 1;
      EXPECT_TRUE(got[i].equal(written ? is[i] : was[i])) << i;
    }
  }
}

TEST_F(SafetensorsTest, WhatAViewComputesIsWritten) {
  const at::Tensor numbers = at::randn({3, 2}, at::kComplexFloat);
  TensorMap tensors;
  tensors["conj"] = numbers.conj();
  tensors["minus_imag"] = at::imag(numbers.conj());
  tensors["channels_last"] = at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  ASSERT_TRUE(tensors["conj"].is_conj());
  ASSERT_TRUE(tensors["minus_imag"].is_neg());
  Save(tensors);
  const TensorMap loaded = Load();
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(loaded.at(name).equal(tensor)) << name;
  for (auto& [name, tensor] : tensors) {
    const at::Tensor want = tensor.clone().resolve_conj().resolve_neg();
    tensor.zero_();
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status();
    const absl::Status into = file->ReadInto(name, tensor);
    EXPECT_TRUE(into.ok()) << into;
    EXPECT_TRUE(tensor.equal(want)) << name;
  }
}

// More than a piece, which is 16 MiB, in any dimension.
TEST_F(SafetensorsTest, LargeTensorsThatAreCopied) {
  at::manual_seed(3);
  TensorMap tensors;
  tensors["rows"] = at::randint(100, {7, 1'000'003}, at::kInt).t();
  tensors["one_row"] = at::randint(100, {5'000'000, 2}, at::kInt).slice(1, 0, 1).t();
  tensors["nested"] = at::randint(100, {2, 3, 2'500'000}, at::kInt).transpose(0, 1);
  tensors["bool"] = at::randint(2, {20'000'000}, at::kByte).view(at::kBool);
  Save(tensors);
  const TensorMap loaded = Load();
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(loaded.at(name).equal(tensor)) << name;
  TensorMap given;
  for (const auto& [name, tensor] : tensors) given[name] = at::zeros_like(tensor);
  ASSERT_EQ(given.at("rows").strides(), tensors.at("rows").strides());
  const absl::Status into = LoadSafetensorsInto(path_, given);
  ASSERT_TRUE(into.ok()) << into;
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(given.at(name).equal(tensor)) << name;
}

TEST_F(SafetensorsTest, TensorsThatShareMemoryAreEachWrittenInFull) {
  const at::Tensor tied = at::randn({4, 4});
  Save({{"embedding", tied}, {"head", tied}, {"row", tied[1]}});
  TensorMap loaded = Load();
  EXPECT_TRUE(loaded["embedding"].equal(tied));
  EXPECT_TRUE(loaded["head"].equal(tied));
  EXPECT_TRUE(loaded["row"].equal(tied[1]));
  EXPECT_FALSE(loaded["head"].is_alias_of(loaded["embedding"]));
  // Into those that share, they still do.
  const at::Tensor want = tied.clone();
  tied.zero_();
  ASSERT_TRUE(
      LoadSafetensorsInto(path_, {{"embedding", tied}, {"head", tied}, {"row", tied[1]}}).ok());
  EXPECT_TRUE(tied.equal(want));
}

TEST_F(SafetensorsTest, TensorsThatShareMemoryHaveToHaveTheSameValues) {
  const at::Tensor tied = at::randn({4, 4});
  Save({{"embedding", tied}, {"head", tied + 1}});
  const auto refuses = [&](const at::Tensor& embedding, const at::Tensor& head,
                           const std::string& why) {
    const at::Tensor before = embedding.clone();
    const absl::Status status =
        LoadSafetensorsInto(path_, {{"embedding", embedding}, {"head", head}});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "'head'")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), why)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path_)) << status;
    EXPECT_TRUE(embedding.equal(before)) << "nothing is written";
  };
  const at::Tensor zeros = at::zeros({4, 4});
  refuses(zeros, zeros, "is the same memory as 'embedding'");
  refuses(zeros, zeros.t(), "shares memory with another tensor");
  // Of two storages, too.
  std::vector<float> buffer(16);
  refuses(at::from_blob(buffer.data(), {4, 4}), at::from_blob(buffer.data(), {4, 4}),
          "is the same memory as 'embedding'");
}

TEST_F(SafetensorsTest, ParametersAndInferenceTensors) {
  const at::Tensor parameter = at::randn({3}).requires_grad_();
  at::Tensor inference;
  {
    const c10::InferenceMode mode;
    inference = at::randn({2, 2}).t();
    Save({{"parameter", parameter}, {"inference", inference}});
    EXPECT_FALSE(Load().at("parameter").is_inference());
  }
  const at::Tensor want = parameter.detach().clone(), other = inference.clone();
  {
    const c10::InferenceMode mode;
    inference.zero_();
  }
  at::Tensor saved = parameter * parameter;  // for its backward
  const int64_t version = parameter._version();
  const absl::Status into =
      LoadSafetensorsInto(path_, {{"parameter", parameter}, {"inference", inference}});
  ASSERT_TRUE(into.ok()) << into;
  EXPECT_TRUE(parameter.detach().equal(want));
  EXPECT_TRUE(inference.equal(other));
  EXPECT_TRUE(parameter.requires_grad());
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_GT(parameter._version(), version);
  EXPECT_THROW(saved.sum().backward(), c10::Error);
}

// They are of all bytes of the file, so whoever has them notices any that is damaged.
TEST_F(SafetensorsTest, ChecksumsAreOfWhatIsInTheFile) {
  const at::Tensor large = Any({300'000}, at::kInt);
  const TensorMap tensors = {{"large", large},
                             {"transposed", Any({30, 20}, at::kDouble).t()},
                             {"none", at::empty({0})},
                             {"bool", Any({5}, at::kBool)}};
  SafetensorsChecksums sums;
  ASSERT_TRUE(SaveSafetensors(tensors, path_, {}, {.checksums = &sums}).ok());
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(sums.size, fs::file_size(path_));
  EXPECT_EQ(file->size(), sums.size);
  EXPECT_EQ(file->header_checksum(), sums.header);
  ASSERT_EQ(sums.tensors.size(), tensors.size());
  for (const auto& [name, sum] : sums.tensors) EXPECT_EQ(*file->Checksum(name), sum) << name;
  EXPECT_EQ(sums.tensors.at("large"),
            Crc32c({static_cast<const char*>(large.const_data_ptr()), large.nbytes()}));
  EXPECT_EQ(file->Checksum("other").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SafetensorsTest, ASaveMayBeStopped) {
  ASSERT_TRUE(SaveSafetensors({{"x", at::ones({2})}}, path_).ok());
  int asked = 0;
  const absl::Status stopped = SaveSafetensors(
      {{"x", at::zeros({1'000'000})}}, path_, {},
      {.check = [&] { return ++asked < 3 ? absl::OkStatus() : absl::CancelledError("enough"); }});
  EXPECT_EQ(stopped.code(), absl::StatusCode::kCancelled) << stopped;
  EXPECT_TRUE(LoadSafetensors(path_)->at("x").equal(at::ones({2})));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(SafetensorsTest, MetadataAreKept) {
  const std::map<std::string, std::string> metadata = {
      {"format", "pt"}, {"", ""}, {"a\n\"", "\\ \u4e2d \x01"}, {"json", "{\"a\":[1,2]}"}};
  ASSERT_TRUE(SaveSafetensors({{"a", at::ones({3})}}, path_, metadata).ok());
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header().metadata, metadata);
  EXPECT_EQ(file->header().tensors.size(), 1u);
  ASSERT_TRUE(SaveSafetensors({}, path_, {}).ok());
  EXPECT_TRUE(Load().empty());
}

TEST_F(SafetensorsTest, WhatCannotBeWrittenIsSaidAndTheOlderFileStays) {
  Save({{"a", at::ones({3})}});
  const std::string content = Content();
  const auto refused = [&](const std::string& name, const at::Tensor& tensor,
                           const std::string& part) {
    ExpectError(SaveSafetensors({{"fine", at::ones({3})}, {name, tensor}}, path_),
                absl::StatusCode::kInvalidArgument, part);
    EXPECT_TRUE(Content() == content);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  };
  refused("a", at::Tensor(), "'a' is no tensor");
  refused("a", at::eye(3).to_sparse(), "'a' is not dense");
  refused("a", at::ones({2}, at::kComplexDouble), "'a' has dtype ComplexDouble");
  refused("a", at::quantize_per_tensor(at::ones({2}), 1, 0, at::kQInt8), "'a' has dtype QInt8");
  refused("a", at::empty({2}, at::device(at::kMeta)), "'a' is on the device \"meta\"");
  refused("a", at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({1})}),
          "'a' is not dense");
  at::Tensor shrunk = at::ones({100});
  shrunk.storage().set_nbytes(99 * sizeof(float));
  refused("a", shrunk, "'a' has elements that are not in its memory");
  at::Tensor turned = at::ones({10, 10}).t();
  turned.storage().set_nbytes(99 * sizeof(float));
  refused("a", turned, "'a' has elements that are not in its memory");
  refused("a", at::_efficientzerotensor({2}), "'a' has elements that are not in its memory");
  refused("__metadata__", at::ones({2}), "'__metadata__' is what the format calls the metadata");
  refused("\xff", at::ones({2}), "not UTF-8");
  path_ = folder_ + "/no/such/folder";
  ExpectError(SaveSafetensors({}, path_), absl::StatusCode::kNotFound, "No such file or directory");
}

TEST_F(SafetensorsTest, WhatDoesNotFitIsListedAndNothingIsWritten) {
  Save({{"a", at::ones({2, 3})}, {"b", at::ones({2})}, {"c", at::ones({})}, {"d", at::ones({4})}});
  const at::Tensor nested = at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({1})});
  ExpectError(LoadSafetensorsInto(path_, {{"a", nested}}), absl::StatusCode::kInvalidArgument,
              "'a' is not dense here");
  const TensorMap given = {{"a", at::zeros({3, 2})},
                           {"b", at::zeros({2}, at::kDouble)},
                           {"d", at::zeros({4})},
                           {"e", at::zeros({1})}};
  const absl::Status status = LoadSafetensorsInto(path_, given);
  for (const char* part :
       {"'a' has dtype Float and shape [2, 3] in the file, and here dtype Float and shape [3, 2]",
        "'b' has dtype Float and shape [2] in the file, and here dtype Double and shape [2]",
        "'e' is missing", "'c' is unexpected"}) {
    ExpectError(status, absl::StatusCode::kInvalidArgument, part);
  }
  EXPECT_EQ(given.at("d").sum().item<float>(), 0);
  TensorMap many;
  for (int i = 0; i < 17; ++i) many[absl::StrCat("m", i)] = at::zeros({1});
  ExpectError(LoadSafetensorsInto(path_, many), absl::StatusCode::kInvalidArgument,
              "; and 11 more");

  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto into = [&](const std::string& name, const at::Tensor& tensor,
                        const std::string& part) {
    ExpectError(file->ReadInto(name, tensor), absl::StatusCode::kInvalidArgument, part);
  };
  into("a", at::zeros({6}), "here dtype Float and shape [6]");
  into("a", at::Tensor(), "'a' is no tensor here");
  into("a", at::zeros({2, 3}).to_sparse(), "'a' is not dense here");
  into("b", at::zeros({1}).expand({2}), "'b' has elements here that are one in memory");
  into("a", at::zeros({4}).unfold(0, 3, 1), "'a' has elements here that are one in memory");
  at::Tensor shrunk = at::zeros({2});
  shrunk.storage().set_nbytes(sizeof(float));
  into("b", shrunk, "'b' has elements here that are not in its memory");
  into("b", at::empty({2}, at::kMeta), "'b' is on the device \"meta\" here");
  ExpectError(file->ReadInto("x", at::zeros({1})), absl::StatusCode::kNotFound, "no tensor 'x'");
  ExpectError(file->Read("x").status(), absl::StatusCode::kNotFound, "no tensor 'x'");
}

TEST_F(SafetensorsTest, ABoolIsZeroOrOne) {
  const at::Tensor bad = at::full({2, 3}, 2, at::kByte).view(at::kBool);
  for (const at::Tensor& each : {bad, bad.t()}) {
    ExpectError(SaveSafetensors({{"no", each}}, path_), absl::StatusCode::kInvalidArgument,
                "'no': it is BOOL and has a byte 2");
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
  Save({{"yes", at::ones({3}, at::kBool)}});
  std::string content = Content();
  content.back() = '\2';
  Put(content);
  ExpectError(LoadSafetensors(path_).status(), absl::StatusCode::kInvalidArgument, "'yes' from ");
  const at::Tensor given = at::zeros({3}, at::kBool);
  ExpectError(LoadSafetensorsInto(path_, {{"yes", given}}), absl::StatusCode::kInvalidArgument,
              "it is BOOL and has a byte 2");
  ExpectError(SafetensorsFile::Open(path_)->Checksum("yes").status(),
              absl::StatusCode::kInvalidArgument, "it is BOOL and has a byte 2");
  EXPECT_FALSE(given.any().item<bool>());
}

TEST_F(SafetensorsTest, WhatIsNoSuchFileIsSaid) {
  const auto open = [&] { return SafetensorsFile::Open(path_).status(); };
  ExpectError(open(), absl::StatusCode::kNotFound, "No such file or directory");
  Put("");
  ExpectError(open(), absl::StatusCode::kInvalidArgument, "it has 0 bytes");
  Put("PK\3\4, as PyTorch's own files begin");
  ExpectError(open(), absl::StatusCode::kInvalidArgument, "it is no safetensors file");
  Put(std::string(8, '\xff'));
  ExpectError(open(), absl::StatusCode::kInvalidArgument,
              "18446744073709551615 bytes, and 0 bytes");
  Put(std::string(8, '\0'));
  ExpectError(open(), absl::StatusCode::kInvalidArgument, "does not begin with {");
  // A file that has as many bytes as it says, and still too many.
  uint64_t length = kMaxSafetensorsHeaderBytes + 1;
  Put(std::string(reinterpret_cast<const char*>(&length), sizeof(length)));
  fs::resize_file(path_, 200'000'000);
  ExpectError(open(), absl::StatusCode::kInvalidArgument, "at most 100000000");
  fs::remove(path_);
  fs::create_directory(path_);
  ExpectError(open(), absl::StatusCode::kInvalidArgument, "it is no file");
  fs::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  ExpectError(open(), absl::StatusCode::kInvalidArgument, "it is no file");
  path_ += std::string("\0x", 2);
  EXPECT_EQ(open().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SafetensorsTest, AFileMayBeCutWhileItIsOpen) {
  Save({{"a", at::ones({1000})}, {"b", at::ones({1000})}});
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  fs::resize_file(path_, fs::file_size(path_) - 1);
  EXPECT_TRUE(file->Read("a").ok());
  ExpectError(file->Read("b").status(), absl::StatusCode::kDataLoss, "cut since it was opened");
  ExpectError(SafetensorsFile::Open(path_).status(), absl::StatusCode::kInvalidArgument,
              "the file has been cut");
}

TEST_F(SafetensorsTest, AFileThatIsOpenStaysItself) {
  Save({{"a", at::ones({2})}});
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  Save({{"a", at::zeros({2})}});
  const absl::StatusOr<at::Tensor> tensor = file->Read("a");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_TRUE(tensor->equal(at::ones({2})));
}

// More than 4 GiB, of which the disk has only what was written.
TEST_F(SafetensorsTest, OffsetsHave64Bits) {
  constexpr uint64_t kFar = uint64_t{5} << 30;
  std::string json = absl::StrCat("{\"far\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[",
                                  kFar, ",", kFar + 8, "]},\"hole\":{\"dtype\":\"I64\",\"shape\":[",
                                  kFar / 8, "],\"data_offsets\":[0,", kFar, "]}}");
  const uint64_t length = json.size();
  Put(absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&length), 8), json));
  const uint64_t data = 8 + length;
  std::error_code error;
  fs::resize_file(path_, data + kFar + 8, error);
  ASSERT_FALSE(error) << error.message();
  struct stat is = {};
  ASSERT_EQ(stat(path_.c_str(), &is), 0);
  ASSERT_LT(is.st_blocks, 10000) << "this file system keeps no holes";
  {
    std::fstream out(path_, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(data + kFar));
    const int32_t numbers[] = {17, -5};
    out.write(reinterpret_cast<const char*>(numbers), sizeof(numbers));
  }
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  const absl::StatusOr<at::Tensor> tensor = file->Read("far");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ((*tensor)[0].item<int>(), 17);
  EXPECT_EQ((*tensor)[1].item<int>(), -5);
}

}  // namespace
}  // namespace distgrad
