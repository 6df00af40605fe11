// A transformer that predicts the next character of a text, cut into consecutive stages.
#ifndef DISTGRAD_EXAMPLES_TRANSFORMER_STAGE_H_
#define DISTGRAD_EXAMPLES_TRANSFORMER_STAGE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace torch::optim {
class AdamW;
}

namespace distgrad {

struct TransformerShape {
  int64_t tokens = 0;     // in the alphabet
  int64_t context = 128;  // how many tokens it sees at most
  int64_t width = 128;
  int64_t heads = 4;  // of each block's attention; divides the width
  int blocks = 4;
};

// Some of the blocks with their parameters, the first stage with the embedding of tokens and of
// their places, the last one with the scores of tokens. Forward may run on many threads, as long as
// nobody writes the parameters meanwhile.
class TransformerStage {
 public:
  // Stage `index` of `count`, each of which has as many blocks as the others, or one more. The same
  // seed gives the same parameters however it is cut. kInvalidArgument if it cannot be cut like
  // that, or the heads do not divide the width.
  static absl::StatusOr<TransformerStage> Create(const TransformerShape& shape, int index,
                                                 int count, uint64_t seed);

  // The first stage takes int64 [n, length], length up to the context, the others what the one
  // before has given, float [n, length, width]; the last one gives float [n, length, tokens], the
  // scores of the next token before softmax.
  at::Tensor Forward(at::Tensor x) const;

  // Leaves that require grad, by names that are theirs however it is cut: "block2.attention".
  const std::map<std::string, at::Tensor>& named_parameters() const { return named_; }

 private:
  // Pre-norm, without biases.
  struct Block {
    at::Tensor attention_norm, attention, attention_out;
    at::Tensor hidden_norm, hidden, hidden_out;
  };

  TransformerStage(const TransformerShape& shape, int begin, int end, uint64_t seed);

  at::Tensor Run(const Block& block, const at::Tensor& x) const;

  // Constant after construction.
  TransformerShape shape_;
  std::map<std::string, at::Tensor> named_;
  at::Tensor token_embedding_, place_embedding_;  // of the first stage
  std::vector<Block> blocks_;
  at::Tensor scores_norm_, scores_;  // of the last stage
};

// Returns the mean cross entropy, in nats a token: scores as the last stage gives them, targets
// int64 [n, length].
at::Tensor TextLoss(const at::Tensor& scores, const at::Tensor& targets);

// Returns which part of the targets has the highest score, 0 to 1.
double TextAccuracy(const at::Tensor& scores, const at::Tensor& targets);

// The optimizer of all variants, for parameters by their names. Its learning rate is 0 until it is
// set.
std::unique_ptr<torch::optim::AdamW> MakeTextOptimizer(
    const std::map<std::string, at::Tensor>& parameters);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRANSFORMER_STAGE_H_
