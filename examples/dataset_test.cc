// Files of images and labels, good and damaged ones, and the order of batches.
#include "examples/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Path(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
}

std::string WriteGzip(const std::string& name, const std::string& bytes) {
  const std::string path = Path(name);
  gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose(file);
  return path;
}

std::string BigEndian(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

std::string Header(const std::vector<uint32_t>& shape, char type = 8) {
  std::string bytes = {0, 0, type, static_cast<char>(shape.size())};
  for (const uint32_t size : shape) bytes += BigEndian(size);
  return bytes;
}

// `count` images; all pixels of image i are i.
std::string Images(uint32_t count) {
  std::string bytes = Header({count, kImageSide, kImageSide});
  for (uint32_t i = 0; i < count; ++i)
    bytes += std::string(kImageSide * kImageSide, static_cast<char>(i));
  return bytes;
}

std::string Labels(const std::string& labels) {
  return Header({static_cast<uint32_t>(labels.size())}) + labels;
}

absl::Status LoadError(const std::string& images, const std::string& labels) {
  return LoadDataset(WriteGzip("images.gz", images), WriteGzip("labels.gz", labels)).status();
}

Dataset SmallDataset(uint32_t count) {
  std::string labels;
  for (uint32_t i = 0; i < count; ++i) labels.push_back(static_cast<char>(i % kClasses));
  return *LoadDataset(WriteGzip("i.gz", Images(count)), WriteGzip("l.gz", Labels(labels)));
}

TEST(DatasetTest, ReadsImagesAndLabels) {
  const Dataset data = SmallDataset(12);
  EXPECT_EQ(data.size(), 12);
  EXPECT_EQ(data.images.sizes(), (std::vector<int64_t>{12, 28, 28}));
  EXPECT_EQ(data.images.scalar_type(), at::kByte);
  EXPECT_EQ(data.images[11][27][27].item<int>(), 11);
  EXPECT_EQ(data.labels[11].item<int>(), 1);
}

TEST(DatasetTest, RefusesWhatIsNotTheFormat) {
  const std::string labels = Labels({0, 1});
  const auto expect = [&](const std::string& images, const std::string& says) {
    const absl::Status status = LoadError(images, labels);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("images.gz"), HasSubstr(says)));
  };
  expect("", "ends too early");
  expect("PNG, or some such thing", "not an IDX file");
  expect(Header({2, 28, 28}, 13), "IDX type 13");
  expect(Labels({0, 1}), "1 dimensions, want 3");
  expect(Header({2, 28, 27}) + std::string(2 * 28 * 27, 0), "dimension 2 is 27, want 28");
  expect(Header({0, 28, 28}), "announces 0");
  expect(Header({0xFFFFFFFF, 28, 28}), "announces 4294967295");
  expect(Images(2).substr(0, 1000), "ends too early");
  expect(Images(2) + "x", "more bytes");
}

TEST(DatasetTest, RefusesWrongLabels) {
  EXPECT_THAT(std::string(LoadError(Images(2), Labels({0, 10})).message()), HasSubstr("label 10"));
  EXPECT_THAT(std::string(LoadError(Images(2), Labels({0, 1, 2})).message()),
              AllOf(HasSubstr("2 images"), HasSubstr("3 labels")));
}

TEST(DatasetTest, NoticesDamage) {
  const std::string labels = WriteGzip("whole.gz", Labels({0, 1}));
  const std::string images = WriteGzip("images.gz", Images(2));
  std::ifstream in(images, std::ios::binary);
  const std::string packed((std::istreambuf_iterator<char>(in)), {});

  std::ofstream(Path("cut.gz"), std::ios::binary) << packed.substr(0, packed.size() - 4);
  EXPECT_EQ(LoadDataset(Path("cut.gz"), labels).status().code(), absl::StatusCode::kDataLoss);

  std::string flipped = packed;
  flipped[flipped.size() - 8] ^= 1;  // in the checksum
  std::ofstream(Path("flipped.gz"), std::ios::binary) << flipped;
  EXPECT_EQ(LoadDataset(Path("flipped.gz"), labels).status().code(), absl::StatusCode::kDataLoss);
}

TEST(DatasetTest, NamesAMissingFile) {
  const absl::Status status = LoadFashionMnist("/nowhere").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/train-images-idx3-ubyte.gz"));
}

TEST(DatasetTest, FindsTheWholeOfFashionMnist) {
  const absl::StatusOr<FashionMnist> data = LoadFashionMnist();
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train.size(), 60000);
  EXPECT_EQ(data->test.size(), 10000);

  const Batch all = MakeBatch(data->train, 0, data->train.size());
  EXPECT_NEAR(all.images.mean().item<double>(), 0, 1e-3);
  EXPECT_NEAR(all.images.std().item<double>(), 1, 1e-3);
  for (int label = 0; label < kClasses; ++label) {
    EXPECT_EQ(all.labels.eq(label).sum().item<int64_t>(), 6000);
  }
}

TEST(ShuffledBatchesTest, ShowsEveryImageOncePerEpoch) {
  const Dataset data = SmallDataset(25);
  ShuffledBatches batches(data, 10, /*seed=*/1);
  EXPECT_EQ(BatchesPerEpoch(data.size(), 10), 3);

  std::vector<std::vector<float>> epochs(2);
  for (std::vector<float>& epoch : epochs) {
    for (const int64_t size : {10, 10, 5}) {
      const Batch batch = batches.Next();
      EXPECT_EQ(batch.size(), size);
      EXPECT_EQ(batch.images.sizes(), (std::vector<int64_t>{size, 1, 28, 28}));
      for (int64_t i = 0; i < size; ++i) epoch.push_back(batch.images[i][0][0][0].item<float>());
    }
  }
  EXPECT_NE(epochs[0], epochs[1]);
  std::sort(epochs[0].begin(), epochs[0].end());
  std::sort(epochs[1].begin(), epochs[1].end());
  EXPECT_EQ(epochs[0], epochs[1]);
  EXPECT_EQ(std::unique(epochs[0].begin(), epochs[0].end()) - epochs[0].begin(), 25);
}

TEST(ShuffledBatchesTest, GoesOnWhereItIsTold) {
  const Dataset data = SmallDataset(25);
  ShuffledBatches whole(data, 10, 1);
  for (int64_t skipped = 0; skipped < 8; ++skipped) {
    ShuffledBatches resumed(data, 10, 1);
    resumed.Skip(skipped);
    EXPECT_TRUE(resumed.Next().images.equal(whole.Next().images)) << skipped;
  }
}

TEST(ShuffledBatchesTest, FollowsItsSeed) {
  const Dataset data = SmallDataset(100);
  const Batch first = ShuffledBatches(data, 100, 1).Next();
  EXPECT_TRUE(first.images.equal(ShuffledBatches(data, 100, 1).Next().images));
  EXPECT_FALSE(first.images.equal(ShuffledBatches(data, 100, 2).Next().images));
  // Labels stay with their images.
  const at::Tensor image_number = first.images.select(1, 0)
                                      .select(1, 0)
                                      .select(1, 0)
                                      .mul(255 * 0.3530)
                                      .add(255 * 0.2860)
                                      .round();
  EXPECT_TRUE(image_number.remainder(10).to(at::kLong).equal(first.labels));
}

}  // namespace
}  // namespace distgrad
