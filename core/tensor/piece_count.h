// How many tensors an operator makes that cuts one into pieces, before it does.
#ifndef DISTGRAD_CORE_TENSOR_PIECE_COUNT_H_
#define DISTGRAD_CORE_TENSOR_PIECE_COUNT_H_

#include <ATen/core/ivalue.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace distgrad {

// Whether operators of that name, in all their overloads, return a list of so many tensors as a
// size of a tensor, or a number that is given, says: split, unbind and the like. The pieces take
// memory though all their elements together take none.
bool CutsIntoPieces(absl::string_view name);

// How many these are. 0 for all other operators, and for arguments that it does not take.
int64_t CountPieces(absl::string_view name, absl::Span<const c10::IValue> args);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_PIECE_COUNT_H_
