// Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28 grey pixels, in
// ten classes (Xiao, Rasul and Vollgraf, arXiv:1708.07747), out of four gzipped IDX files.
#ifndef DISTGRAD_EXAMPLES_DATASET_H_
#define DISTGRAD_EXAMPLES_DATASET_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace distgrad {

inline constexpr int kImageSide = 28;
inline constexpr int kClasses = 10;

// Images and their labels, in the same order. Immutable after construction.
struct Dataset {
  at::Tensor images;  // uint8 [n, 28, 28]
  at::Tensor labels;  // uint8 [n], each below 10

  int64_t size() const { return labels.size(0); }
};

struct FashionMnist {
  Dataset train;
  Dataset test;
};

// Reads the four files in `directory`; if that is empty, looks in the program's runfiles and
// then where Debian's package puts them. kNotFound names the file or the package that is
// missing, kDataLoss what is wrong in which file.
absl::StatusOr<FashionMnist> LoadFashionMnist(const std::string& directory = "");

// Reads one pair of files.
absl::StatusOr<Dataset> LoadDataset(const std::string& images_path, const std::string& labels_path);

// What a network takes and is compared with.
struct Batch {
  at::Tensor images;  // float [n, 1, 28, 28], about mean 0 and deviation 1
  at::Tensor labels;  // int64 [n]

  int64_t size() const { return labels.size(0); }
};

// Images `begin` to `end` (exclusive), in the order of the file.
Batch MakeBatch(const Dataset& data, int64_t begin, int64_t end);

// How often batches of that size are taken until all images were.
int64_t BatchesPerEpoch(int64_t images, int64_t batch_size);

// Every image of `data` once per epoch, in a new order each time; the last batch of an epoch
// may be smaller. The same seed gives the same batches. Keeps a reference to `data`. Not
// thread-safe: for one thread.
class ShuffledBatches {
 public:
  ShuffledBatches(const Dataset& data, int64_t batch_size, uint64_t seed);

  Batch Next();
  // Goes on as if Next() had been called so often more.
  void Skip(int64_t batches);

 private:
  // How many images the next batch has.
  int64_t Advance();

  // Constant after construction.
  const Dataset& data_;
  const int64_t batch_size_;

  std::mt19937_64 generator_;
  std::vector<int64_t> order_;
  int64_t next_ = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_DATASET_H_
