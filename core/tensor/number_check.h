// Numbers among the arguments of an operator that libtorch's kernels on the CPU do not bear.
#ifndef DISTGRAD_CORE_TENSOR_NUMBER_CHECK_H_
#define DISTGRAD_CORE_TENSOR_NUMBER_CHECK_H_

#include <ATen/core/ivalue.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace c10 {
class OperatorHandle;
}

namespace distgrad {

// kInvalidArgument for numbers with which an operator of libtorch writes or reads beside its
// tensors, or divides so that the processor ends the process, though it has checked them:
//
//   - an integer beyond 2^40 in either direction, but for the ends of a slice and the bounds of
//     random numbers, and sizes that are more than 2^38 elements together but for a size of 0:
//     products and sums of such numbers wrap around;
//   - a window (`kernel_size`) of more than 2^24 places, a stride, padding or dilation beyond 2^31,
//     and a factor of a pixel_shuffle beyond 2^20, for the same reason;
//   - the least integer of its type, divided by -1 (`div` with a rounding mode, `floor_divide`,
//     `remainder`, `fmod`), or in `lcm`, which may divide it by -1 on its way, and numbers beyond
//     2^61 for `arange`, which divides their difference, or a fraction as its step between
//     integers;
//   - an average pooling of integers, which divides by a divisor that is given or by a product of
//     sizes;
//   - a dilation of a maximum pooling that is larger than the padded dimension: a window may have
//     all its places in the padding, and libtorch then takes one behind the last for the largest;
//     and a window of one that, with its dilation, goes over more than 2^30 places, whose end
//     libtorch computes in 32 bits;
//   - a stride of a convolution beyond 2^10: oneDNN's kernel for what is transposed, and so for the
//     derivative of the others, ends the process with one of 2^14;
//   - a `pad` that reflects three dimensions, as `reflection_pad3d` does, which is not served;
//   - the layout of oneDNN: `new_zeros` writes to what is not there for a dtype that oneDNN lacks;
//   - `pin_memory`, for pinned memory is not of the allocator that counts what a call takes;
//   - a scale of an `upsample_*` that is not from 1e-6 to 1e6: places are made of floats that no
//     integer holds.
//
// For all other arguments OK. Reads elements of tensors of
// integers on the CPU, so it is for those that have come already.
absl::Status CheckNumbers(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args);

// kInvalidArgument for a result that has a size below 0, as `as_strided` and `resize` make it:
// nothing that comes after them counts on that.
absl::Status CheckSizes(absl::Span<const c10::IValue> results);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_NUMBER_CHECK_H_
