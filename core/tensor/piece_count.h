// What an operator makes besides elements of tensors, from its arguments and before it runs: how
// many tensors, lists of numbers, and what grows with the elements that its arguments show.
#ifndef DISTGRAD_CORE_TENSOR_PIECE_COUNT_H_
#define DISTGRAD_CORE_TENSOR_PIECE_COUNT_H_

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace c10 {
class OperatorHandle;
}

namespace distgrad {

// Whether operators of that name, in all their overloads, make so many tensors as a size of a
// tensor, or a number that is given, says: split, unbind and the like, which return them, and
// combinations, convolutions in groups, recurrent networks, histograms of points and differences
// that are taken again and again, which do not. They take memory though all their elements together
// take none.
bool CutsIntoPieces(absl::string_view name);

// How many these are. 0 for all other operators, and for arguments that it does not take.
int64_t CountPieces(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args);

// The bytes of the lists that an operator makes beside elements. Some grow with the square of the
// number n of tensors, though each has but one element: the sizes and strides of the n views of n
// dimensions that `meshgrid` makes, and `cartesian_prod` and `combinations` by it, with what
// autograd keeps of each; and the costs of all products of neighbours of `linalg_multi_dot` and
// `chain_matmul`. `topk`, `multinomial` without replacement, `mode`, `median` and `nanmedian`
// make one, on each thread, of the elements of a dimension. `unique_dim` and its kin make a tensor
// for each place in a dimension, of which there may be more than tensors in a message. `fft_fft`
// and its kin, `stft` and `istft` compute a length with a large prime factor by longer ones; and
// `meshgrid` puts a tensor that it does not take into its error, as text. Of a sparse tensor the
// places of its longest dimension count, for any operator: some make lists of them, and no element
// says how many there are; and for `softmax` and what calls it all places but those of its shortest
// dimension, each of which gets a list. 0 for all other operators, for tensors of CUDA, whose
// operators do without these lists, and for arguments that these do not take.
int64_t CountListBytes(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args);

// What the strided tensors among the arguments show, those in lists of them too.
struct ShownTensors {
  // Of all their elements: a view in which one stands for many counts as if it had them all.
  // Operators make lists of as many, and passes gradients, and no allocation of the operator shows
  // either. Sparse tensors are not counted: their sizes do not say what they hold.
  uint64_t bytes = 0;
  // The places of the arguments that have such a view.
  absl::InlinedVector<size_t, 4> repeating;
};
ShownTensors CountShown(absl::Span<const c10::IValue> args);

// kInvalidArgument for a list of sizes, strides, shifts, repeats or the like that is longer than
// what any tensor with as many dimensions as may be sent could want: operators make tensors of as
// many dimensions of it, which takes the square of its length, or call themselves for each number,
// which ends the process when the stack does. Lists of where to cut are counted as pieces.
absl::Status CheckListLengths(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args);

// kInvalidArgument for an attention without heads: of four dimensions, or of three if several heads
// of queries share one of keys and values (`enable_gqa`): libtorch divides by their number, which
// ends the process. And for one that has not as many keys as values: its kernel takes the values'
// number for both, and divides by that or reads behind the keys.
absl::Status CheckAttention(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args);

// kInvalidArgument for a view in which one element stands for many where libtorch takes each to
// have memory of its own: in what is written to, as `linalg_svdvals.out` does without a look at it,
// and in the dimension of which `median` and `nanmedian` are asked for. What an operator is said to
// write to is no such place if only the tensor's sizes and strides change (`unsqueeze_`, `t_`).
absl::Status CheckViews(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args,
                        const ShownTensors& shown);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_PIECE_COUNT_H_
