// The buckets of a list of tensors, which share a flat buffer, so that many small ones are copied,
// sent and added as one.
//
//   for (const Bucket& bucket : AssignBuckets(gradients, 25 << 20)) {
//     at::Tensor flat = Pack(bucket, gradients);
//     ...                                       // add, send
//     Unpack(bucket, flat, absl::MakeSpan(gradients));
//   }
//
// Everything here throws c10::Error as torch does, works without recording, and launches on the
// calling thread's current streams.
#ifndef DISTGRAD_CORE_PARALLEL_BUCKET_H_
#define DISTGRAD_CORE_PARALLEL_BUCKET_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace distgrad {

// How a tensor lies in its slot.
enum class SlotOrder {
  kOwn,       // as it lies in its own memory, if that has no gaps: the fastest copy
  kRowMajor,  // the same whatever its strides, which another process may have otherwise
};

// Immutable once assigned.
struct Bucket {
  struct Slot {
    size_t tensor;   // its place in the list
    int64_t offset;  // in elements; a multiple of 64 bytes
    std::vector<int64_t> sizes, strides;
  };

  c10::Device device = c10::kCPU;
  at::ScalarType dtype = at::kFloat;
  // Whether the tensors lie in a flat buffer. False: a tensor that cannot lie in a flat buffer
  // (sparse, quantized, mkldnn, nested, a subclass), and goes alone. It has one slot, of no sizes.
  bool flat = true;
  int64_t elements = 0;  // of the flat buffer, with what lies between slots
  std::vector<Slot> slots;
};

// Assigns every defined tensor to one bucket, and undefined ones to none. A bucket holds tensors of
// one device and dtype in the order of the list, at most `bytes` of them unless a single one is
// larger. `first_bytes`, if not 0, is the limit for the first bucket of each device and dtype: a
// small one is full early. Buckets come in the order in which they became full.
std::vector<Bucket> AssignBuckets(absl::Span<const at::Tensor> tensors, size_t bytes,
                                  size_t first_bytes = 0, SlotOrder order = SlotOrder::kOwn);

// Returns the parts of `flat` (1-d, bucket.elements of bucket.dtype, on any device) by slot, with
// the slots' sizes and strides. They share its memory, but are no views for autograd and have
// version counters of their own.
std::vector<at::Tensor> Parts(const Bucket& bucket, const at::Tensor& flat);

// Returns a flat buffer with the bucket's members out of the list that it was assigned from, or of
// one with the same shapes. Undefined members, and what lies between members, are zeros. `spare` is
// taken for it if it is one of the CPU, of this bucket, that nothing else holds: fresh memory costs
// as much as the copy.
at::Tensor Pack(const Bucket& bucket, absl::Span<const at::Tensor> tensors, at::Tensor spare = {});

// Copies the parts of `flat` into the bucket's members; undefined ones are left out.
void Unpack(const Bucket& bucket, const at::Tensor& flat, absl::Span<const at::Tensor> tensors);

// Copies from[i] to to[i], all on one device, in as few launches as the device has for it. Shapes
// and dtypes of each pair are equal; strides need not be.
void CopyMany(absl::Span<const at::Tensor> to, absl::Span<const at::Tensor> from);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_BUCKET_H_
