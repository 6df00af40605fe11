// Reads gzipped IDX files, checks them, and cuts them into batches.
#include "examples/dataset.h"

#include <errno.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "examples/runfiles.h"

namespace distgrad {
namespace {

// The folder of the Debian package's files; @fashion_mnist has the same layout.
constexpr char kPackagePath[] = "/usr/share/datasets/fashion-mnist";
// Endings of file names, after "train" or "t10k".
constexpr char kImagesSuffix[] = "-images-idx3-ubyte.gz";
constexpr char kLabelsSuffix[] = "-labels-idx1-ubyte.gz";

// An IDX file starts with two zero bytes, the type of its elements and its rank.
constexpr uint8_t kIdxUnsignedByte = 0x08;
// A file that claims more images than this is damaged; no memory is allocated for it.
constexpr int64_t kMostImages = 1'000'000;

// Mean and deviation of the training images, over all pixels scaled to 0..1.
constexpr float kPixelMean = 0.2860F;
constexpr float kPixelDeviation = 0.3530F;

struct CloseGzip {
  void operator()(gzFile_s* file) const { gzclose_r(file); }
};

// Reads a gzipped file from its start. For one thread.
class GzipReader {
 public:
  static absl::StatusOr<GzipReader> Open(const std::string& path) {
    gzFile file = gzopen(path.c_str(), "rb");
    if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
    return GzipReader(path, file);
  }

  // Fills `out`, or says why it can't.
  absl::Status Read(absl::Span<uint8_t> out) {
    while (!out.empty()) {
      const size_t chunk = std::min<size_t>(out.size(), 1 << 20);
      const int got = gzread(file_.get(), out.data(), static_cast<unsigned>(chunk));
      if (got <= 0) return Truncated();
      out.remove_prefix(got);
    }
    return absl::OkStatus();
  }

  // Returns whether everything has been read and its checksum was right.
  absl::Status ExpectEnd() {
    uint8_t byte;
    const int got = gzread(file_.get(), &byte, 1);
    if (got > 0) return Error("more bytes than its header announces");
    int code = Z_OK;
    gzerror(file_.get(), &code);
    return got < 0 || code != Z_OK ? Truncated() : absl::OkStatus();
  }

  absl::Status Error(absl::string_view what) const {
    return absl::DataLossError(absl::StrCat(path_, ": ", what));
  }

 private:
  GzipReader(std::string path, gzFile file) : path_(std::move(path)), file_(file) {}

  absl::Status Truncated() const {
    int code = Z_OK;
    const char* message = gzerror(file_.get(), &code);
    if (code == Z_OK || code == Z_BUF_ERROR) return Error("ends too early");
    return Error(message);
  }

  const std::string path_;
  std::unique_ptr<gzFile_s, CloseGzip> file_;
};

uint32_t BigEndian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

// Reads an IDX file of unsigned bytes, in which one element has the shape `element`.
absl::StatusOr<at::Tensor> ReadIdx(const std::string& path, const std::vector<int64_t>& element) {
  absl::StatusOr<GzipReader> opened = GzipReader::Open(path);
  if (!opened.ok()) return opened.status();
  GzipReader reader = *std::move(opened);

  const size_t rank = 1 + element.size();
  std::array<uint8_t, 4> header;
  if (auto s = reader.Read(absl::MakeSpan(header)); !s.ok()) return s;
  if (header[0] != 0 || header[1] != 0) return reader.Error("not an IDX file");
  if (header[2] != kIdxUnsignedByte) {
    return reader.Error(
        absl::StrCat("elements of IDX type ", header[2], ", want unsigned bytes (8)"));
  }
  if (header[3] != rank) {
    return reader.Error(absl::StrCat("has ", header[3], " dimensions, want ", rank));
  }
  std::vector<uint8_t> sizes(4 * rank);
  if (auto s = reader.Read(absl::MakeSpan(sizes)); !s.ok()) return s;
  std::vector<int64_t> shape;
  for (size_t i = 0; i < rank; ++i) shape.push_back(BigEndian(&sizes[4 * i]));
  if (shape[0] < 1 || shape[0] > kMostImages) {
    return reader.Error(absl::StrCat("announces ", shape[0], " elements"));
  }
  for (size_t i = 0; i < element.size(); ++i) {
    if (shape[i + 1] != element[i]) {
      return reader.Error(
          absl::StrCat("dimension ", i + 1, " is ", shape[i + 1], ", want ", element[i]));
    }
  }

  at::Tensor tensor = at::empty(shape, at::kByte);
  if (auto s = reader.Read({tensor.data_ptr<uint8_t>(), static_cast<size_t>(tensor.numel())});
      !s.ok()) {
    return s;
  }
  if (auto s = reader.ExpectEnd(); !s.ok()) return s;
  return tensor;
}

std::string FilePath(const std::string& directory, const char* part, const char* suffix) {
  return absl::StrCat(directory, "/", part, suffix);
}

std::optional<std::string> FindDirectory() {
  const std::string file = FilePath(kPackagePath, "train", kImagesSuffix);
  const std::optional<std::string> beside = FindRunfile(absl::StrCat("fashion_mnist", file));
  if (beside.has_value()) return std::filesystem::path(*beside).parent_path().string();
  if (access(file.c_str(), R_OK) == 0) return kPackagePath;
  return std::nullopt;
}

absl::StatusOr<Dataset> LoadPart(const std::string& directory, const char* part) {
  return LoadDataset(FilePath(directory, part, kImagesSuffix),
                     FilePath(directory, part, kLabelsSuffix));
}

Batch ToBatch(const at::Tensor& images, const at::Tensor& labels) {
  at::Tensor pixels = images.to(at::kFloat).unsqueeze(1);
  pixels.sub_(255 * kPixelMean).div_(255 * kPixelDeviation);
  return {std::move(pixels), labels.to(at::kLong)};
}

}  // namespace

absl::StatusOr<Dataset> LoadDataset(const std::string& images_path,
                                    const std::string& labels_path) {
  absl::StatusOr<at::Tensor> images = ReadIdx(images_path, {kImageSide, kImageSide});
  if (!images.ok()) return images.status();
  absl::StatusOr<at::Tensor> labels = ReadIdx(labels_path, {});
  if (!labels.ok()) return labels.status();
  if (images->size(0) != labels->size(0)) {
    return absl::DataLossError(absl::StrCat(images_path, " has ", images->size(0), " images, ",
                                            labels_path, " has ", labels->size(0), " labels"));
  }
  const auto* label = labels->const_data_ptr<uint8_t>();
  const int highest = *std::max_element(label, label + labels->numel());
  if (highest >= kClasses) {
    return absl::DataLossError(
        absl::StrCat(labels_path, ": label ", highest, ", want 0 to ", kClasses - 1));
  }
  return Dataset{*std::move(images), *std::move(labels)};
}

absl::StatusOr<FashionMnist> LoadFashionMnist(const std::string& directory) {
  std::string from = directory;
  if (from.empty()) {
    std::optional<std::string> found = FindDirectory();
    if (!found) {
      return absl::NotFoundError(
          "Fashion-MNIST is not here: start with `tools/bazel run //examples:fashion_mnist`, "
          "install the "
          "Debian package dataset-fashion-mnist, or name a folder with --data");
    }
    from = *std::move(found);
  }
  absl::StatusOr<Dataset> train = LoadPart(from, "train");
  if (!train.ok()) return train.status();
  absl::StatusOr<Dataset> test = LoadPart(from, "t10k");
  if (!test.ok()) return test.status();
  return FashionMnist{*std::move(train), *std::move(test)};
}

Batch MakeBatch(const Dataset& data, int64_t begin, int64_t end) {
  return ToBatch(data.images.slice(0, begin, end), data.labels.slice(0, begin, end));
}

ShuffledBatches::ShuffledBatches(const Dataset& data, int64_t batch_size, uint64_t seed)
    : data_(data), batch_size_(batch_size), generator_(seed), order_(data.size()) {
  std::iota(order_.begin(), order_.end(), 0);
}

int64_t BatchesPerEpoch(int64_t images, int64_t batch_size) {
  return (images + batch_size - 1) / batch_size;
}

int64_t ShuffledBatches::Advance() {
  if (next_ == 0) std::shuffle(order_.begin(), order_.end(), generator_);
  const int64_t count = std::min(batch_size_, data_.size() - next_);
  next_ = (next_ + count) % data_.size();
  return count;
}

void ShuffledBatches::Skip(int64_t batches) {
  for (int64_t i = 0; i < batches; ++i) Advance();
}

Batch ShuffledBatches::Next() {
  const int64_t begin = next_;
  const int64_t count = Advance();
  const at::Tensor rows = at::from_blob(order_.data() + begin, {count}, at::kLong);
  return ToBatch(data_.images.index_select(0, rows), data_.labels.index_select(0, rows));
}

}  // namespace distgrad
