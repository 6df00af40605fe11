// Text to learn from, as numbers: by default the King James Version of the Bible, 4.1 million
// characters.
#ifndef DISTGRAD_EXAMPLES_TEXT_H_
#define DISTGRAD_EXAMPLES_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// A text whose characters (bytes) are tokens, by their places in its alphabet. The last twentieth
// is for tests. Immutable after construction.
class Text {
 public:
  // Reads a file; by default the one in the program's runfiles. kNotFound says where it should be;
  // kInvalidArgument if it is shorter than 1,000 characters.
  static absl::StatusOr<Text> Load(const std::string& path = "");
  // Of characters that are there.
  static absl::StatusOr<Text> Of(absl::string_view characters);

  const at::Tensor& train() const { return train_; }  // int64 [characters]
  const at::Tensor& test() const { return test_; }    // int64 [characters]
  const std::string& alphabet() const { return alphabet_; }

  // The characters of tokens, int64 [n].
  std::string Decode(const at::Tensor& tokens) const;
  // The token of a character; that of the first one if the text does not have it.
  int64_t Encode(char character) const;

 private:
  Text() = default;

  std::string alphabet_;  // sorted
  at::Tensor train_;
  at::Tensor test_;
};

// What a model is given, and what it is to predict: for each place the token behind it.
struct TextBatch {
  at::Tensor inputs;   // int64 [n, length]
  at::Tensor targets;  // int64 [n, length]

  int64_t size() const { return inputs.numel(); }  // in tokens
};

// `n` pieces of so many tokens, from places of `tokens` that `seed` and `step` decide. `tokens` has
// more than `length`.
TextBatch RandomPieces(const at::Tensor& tokens, int64_t n, int64_t length, uint64_t seed,
                       int64_t step);

// `n` pieces that are spread over all of it.
TextBatch SpreadPieces(const at::Tensor& tokens, int64_t n, int64_t length);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TEXT_H_
