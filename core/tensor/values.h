// The values that operators take and give, as a message and back.
//
// None, bool, int, double, complex, string, device, tensor (an undefined one too), and lists of
// bool, int, double, complex, string, tensor and optional tensor, and of numbers of several types.
// A dtype, layout or memory format is an int, and the name of a dimension a string, as they are in
// c10::IValue. All else (generators, storages, streams, tuples, dictionaries, objects) is
// kUnimplemented.
//
// All functions here are thread-safe.
#ifndef DISTGRAD_CORE_TENSOR_VALUES_H_
#define DISTGRAD_CORE_TENSOR_VALUES_H_

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/tensor/message.h"

namespace distgrad {

// The tensors of all values, in their order, and all else in the payload.
absl::StatusOr<Message> EncodeValues(absl::Span<const c10::IValue> values);

// Trusts nothing that it reads: kInvalidArgument for what EncodeValues did not write. A value takes
// up to sixteen times its bytes of the payload: kResourceExhausted, before memory is taken for
// them, if all together take more than `most_bytes` beside the elements of tensors.
absl::StatusOr<std::vector<c10::IValue>> DecodeValues(Message message, uint64_t most_bytes);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_VALUES_H_
