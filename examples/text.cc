// Reads the text, and cuts pieces out of it.
#include "examples/text.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/stack.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "examples/runfiles.h"

namespace distgrad {
namespace {

constexpr int64_t kFewest = 1000;
constexpr int64_t kTestShare = 20;

TextBatch Pieces(const at::Tensor& tokens, const std::vector<int64_t>& begins, int64_t length) {
  std::vector<at::Tensor> inputs, targets;
  for (const int64_t begin : begins) {
    inputs.push_back(tokens.slice(0, begin, begin + length));
    targets.push_back(tokens.slice(0, begin + 1, begin + 1 + length));
  }
  return {at::stack(inputs), at::stack(targets)};
}

}  // namespace

absl::StatusOr<Text> Text::Load(const std::string& path) {
  std::string from = path;
  if (from.empty()) {
    std::optional<std::string> found = FindRunfile("bible/kjv.txt");
    if (!found.has_value()) {
      return absl::NotFoundError(
          "the text is not here: start with `tools/bazel run //examples:transformer`, or name a "
          "file with --data");
    }
    from = *std::move(found);
  }
  errno = 0;
  std::ifstream in(from, std::ios::binary);
  const std::string characters((std::istreambuf_iterator<char>(in)), {});
  if (!in || errno != 0) {
    return absl::NotFoundError(absl::StrCat("--data: cannot read ", from, ": ",
                                            std::strerror(errno == 0 ? ENOENT : errno)));
  }
  absl::StatusOr<Text> text = Of(characters);
  if (text.ok()) return text;
  return absl::Status(text.status().code(), absl::StrCat(from, ": ", text.status().message()));
}

absl::StatusOr<Text> Text::Of(absl::string_view characters) {
  const auto count = static_cast<int64_t>(characters.size());
  if (count < kFewest) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", count, " characters, and should have ", kFewest, " or more"));
  }
  Text text;
  std::array<int64_t, 256> tokens = {};
  for (const char c : characters) tokens[static_cast<unsigned char>(c)] = 1;
  for (int c = 0; c < 256; ++c) {
    if (tokens[c] == 0) continue;
    tokens[c] = static_cast<int64_t>(text.alphabet_.size());
    text.alphabet_ += static_cast<char>(c);
  }
  const at::Tensor all = at::empty({count}, at::kLong);
  auto* const to = all.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) to[i] = tokens[static_cast<unsigned char>(characters[i])];
  const int64_t trained = count - count / kTestShare;
  text.train_ = all.slice(0, 0, trained);
  text.test_ = all.slice(0, trained);
  return text;
}

std::string Text::Decode(const at::Tensor& tokens) const {
  std::string characters;
  for (int64_t i = 0; i < tokens.size(0); ++i) {
    characters += alphabet_[tokens[i].item<int64_t>()];
  }
  return characters;
}

int64_t Text::Encode(char character) const {
  const size_t place = alphabet_.find(character);
  return place == std::string::npos ? 0 : static_cast<int64_t>(place);
}

TextBatch RandomPieces(const at::Tensor& tokens, int64_t n, int64_t length, uint64_t seed,
                       int64_t step) {
  // So that a run that goes on needs no state: each step has a generator of its own.
  std::seed_seq both = {seed, seed >> 32, static_cast<uint64_t>(step)};
  std::mt19937_64 generator(both);
  const auto places = static_cast<uint64_t>(tokens.size(0) - length);
  std::vector<int64_t> begins(n);
  for (int64_t& begin : begins) begin = static_cast<int64_t>(generator() % places);
  return Pieces(tokens, begins, length);
}

TextBatch SpreadPieces(const at::Tensor& tokens, int64_t n, int64_t length) {
  const int64_t places = tokens.size(0) - length;
  std::vector<int64_t> begins(n);
  for (int64_t i = 0; i < n; ++i) begins[i] = places * i / n;
  return Pieces(tokens, begins, length);
}

}  // namespace distgrad
