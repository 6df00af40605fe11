// Bytes of tensors that are not as a file has them, in one piece and in several.
#include "core/checkpoint/row_major.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/crc32c.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

std::string AllOf(const at::Tensor& tensor, size_t* largest = nullptr) {
  std::string all;
  EXPECT_TRUE(ForEachPiece(tensor, [&](absl::string_view bytes) {
                absl::StrAppend(&all, bytes);
                if (largest != nullptr) *largest = std::max(*largest, bytes.size());
                return absl::OkStatus();
              }).ok());
  return all;
}

TEST(RowMajorTest, TheBytesAreThoseOfTheContiguousTensor) {
  const at::Tensor numbers = at::arange(24, at::kInt).view({2, 3, 4});
  const at::Tensor real = at::arange(6, at::kFloat);
  for (const at::Tensor& tensor :
       {numbers, numbers.transpose(0, 2), numbers.select(1, 1), numbers.slice(2, 1, 4, 2),
        at::complex(real, real).conj(), at::imag(at::complex(real, real).conj()), at::empty({0, 3}),
        real.select(0, 5)}) {
    const at::Tensor plain = tensor.resolve_conj().resolve_neg().contiguous();
    const std::string bytes(BytesOf(plain));
    EXPECT_EQ(AllOf(tensor), bytes);
    EXPECT_EQ(RowMajorChecksum(tensor), Crc32c(bytes));
  }
  EXPECT_EQ(RowMajorChecksum(real.requires_grad_()), Crc32c(BytesOf(real)));
}

TEST(RowMajorTest, ALargeOneIsCopiedInPieces) {
  // 36 MiB, and rows of 12 MiB.
  const at::Tensor large = at::arange(9 << 20, at::kInt).view({3 << 20, 3}).t();
  size_t largest = 0;
  const std::string bytes = AllOf(large, &largest);
  EXPECT_LE(largest, static_cast<size_t>(kRowMajorPieceBytes));
  const at::Tensor plain = large.contiguous();
  EXPECT_TRUE(bytes == BytesOf(plain));
  EXPECT_EQ(RowMajorChecksum(large), Crc32c(BytesOf(plain)));
}

TEST(RowMajorTest, AnErrorEndsIt) {
  int calls = 0;
  const absl::Status ended = ForEachPiece(at::zeros({3 << 20, 3}).t(), [&](absl::string_view) {
    ++calls;
    return absl::AbortedError("enough");
  });
  EXPECT_TRUE(absl::IsAborted(ended));
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace distgrad
