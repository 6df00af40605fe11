// Copies what is not as a file has it, a piece at a time.
#include "core/checkpoint/row_major.h"

#include <algorithm>

#include "core/base/crc32c.h"
#include "core/base/status.h"

namespace distgrad {

bool IsPlain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

absl::string_view BytesOf(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor AsBits(const at::Tensor& tensor) {
  if (tensor.is_complex() || tensor.is_neg()) return tensor;
  constexpr at::ScalarType kBits[] = {at::kByte, at::kShort, at::kInt, at::kLong};
  for (const at::ScalarType bits : kBits) {
    if (tensor.element_size() == static_cast<int64_t>(c10::elementSize(bits)))
      return tensor.view(bits);
  }
  return tensor;
}

absl::Status ForEachPart(const at::Tensor& tensor,
                         absl::FunctionRef<absl::Status(const at::Tensor&, uint64_t)> use) {
  const int64_t count = tensor.size(0);
  const int64_t row = static_cast<int64_t>(tensor.nbytes()) / count;
  if (count == 1) return use(tensor.select(0, 0), uint64_t{0});
  const int64_t rows = std::max<int64_t>(1, kRowMajorPieceBytes / row);
  for (int64_t i = 0; i < count; i += rows) {
    DG_RETURN_IF_ERROR(
        use(tensor.narrow(0, i, std::min(rows, count - i)), static_cast<uint64_t>(i * row)));
  }
  return absl::OkStatus();
}

absl::Status ForEachPiece(const at::Tensor& tensor,
                          absl::FunctionRef<absl::Status(absl::string_view)> use) {
  if (tensor.numel() == 0) return absl::OkStatus();
  if (IsPlain(tensor)) return use(BytesOf(tensor));
  if (static_cast<int64_t>(tensor.nbytes()) <= kRowMajorPieceBytes) {
    const at::Tensor copy = AsBits(tensor.resolve_conj().resolve_neg()).cpu().contiguous();
    return use(BytesOf(copy));
  }
  return ForEachPart(tensor,
                     [&](const at::Tensor& part, uint64_t) { return ForEachPiece(part, use); });
}

uint32_t RowMajorChecksum(const at::Tensor& tensor) {
  uint32_t sum = Crc32c("");
  ForEachPiece(tensor.detach(), [&](absl::string_view bytes) {
    sum = Crc32c(bytes, sum);
    return absl::OkStatus();
  }).IgnoreError();  // it never fails
  return sum;
}

}  // namespace distgrad
