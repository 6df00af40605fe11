// The elements of a tensor in row-major order, as files have them, whatever its device and strides.
// All of them are in its memory (IsInMemory() of core/tensor/extent.h).
#ifndef DISTGRAD_CORE_CHECKPOINT_ROW_MAJOR_H_
#define DISTGRAD_CORE_CHECKPOINT_ROW_MAJOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// So much of a tensor that has to be copied is in memory at a time.
constexpr int64_t kRowMajorPieceBytes = 16 << 20;

// Whether its memory is what a file has of it.
bool IsPlain(const at::Tensor& tensor);

// Returns the memory of a plain tensor.
absl::string_view BytesOf(const at::Tensor& tensor);

// Returns the same elements as a dtype that every operator knows: not all can copy all.
at::Tensor AsBits(const at::Tensor& tensor);

// Cuts a tensor of more than a piece into parts that follow each other in row-major order, and
// calls `use` with each and the number of bytes before it.
absl::Status ForEachPart(const at::Tensor& tensor,
                         absl::FunctionRef<absl::Status(const at::Tensor&, uint64_t before)> use);

// Calls `use` with all bytes of a tensor, piece by piece: a plain one as it is, others by copies.
absl::Status ForEachPiece(const at::Tensor& tensor,
                          absl::FunctionRef<absl::Status(absl::string_view)> use);

// Returns the CRC-32C of a tensor's bytes. Throws as torch does.
uint32_t RowMajorChecksum(const at::Tensor& tensor);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_ROW_MAJOR_H_
