// Copies buckets to one device after the other and adds them there.
#include "core/parallel/coalesced_collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "core/base/status.h"
#include "core/parallel/bucket.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;
// From here on a copy takes longer than the few calls that it spares.
constexpr int64_t kAloneBytes = 64 << 10;

// What is copied from or to the host is there when the call returns; else only in stream order.
at::Tensor CopyTo(const at::Tensor& tensor, c10::Device device) {
  const bool non_blocking = !tensor.is_cpu() && !device.is_cpu();
  return tensor.to(device, non_blocking);
}

// A sum that grows; it begins as a copy where the first summand must stay as it is.
class Sum {
 public:
  explicit Sum(c10::Device destination) : destination_(destination) {}

  // `owned`: nobody else has the tensor.
  void Add(const at::Tensor& tensor, bool owned) {
    const at::Tensor here = CopyTo(tensor, destination_);
    owned = owned || !here.is_same(tensor);
    if (!sum_.defined()) {
      sum_ = here;
      owned_ = owned;
      return;
    }
    const c10::DeviceGuard guard(destination_);
    if (here.layout() != sum_.layout()) {
      // torch adds sparse to dense, not the other way round.
      sum_ = sum_.is_sparse() ? here + sum_ : sum_ + here;
    } else if (owned_ && !sum_.is_sparse()) {
      sum_.add_(here);
      return;
    } else {
      sum_ = sum_ + here;
    }
    owned_ = true;
  }

  const at::Tensor& value() const { return sum_; }

 private:
  const c10::Device destination_;
  at::Tensor sum_;
  bool owned_ = false;
};

// Whether all lie in the host's memory in one and the same order.
bool AreAlikeOnHost(absl::Span<const at::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided &&
           tensor.is_non_overlapping_and_dense() && tensor.strides() == tensors[0].strides();
  });
}

// The same sum as by Sum, piece by piece, so that a piece of it stays in the processor's cache:
// each summand goes through memory once, and so does the sum.
at::Tensor AddOnHost(absl::Span<const at::Tensor> tensors) {
  const at::Tensor sum = at::empty_like(tensors[0]);
  const int64_t elements = sum.numel();
  const int64_t step = kPieceBytes / static_cast<int64_t>(sum.itemsize());
  for (int64_t begin = 0; begin < elements; begin += step) {
    const int64_t length = std::min(step, elements - begin);
    const auto piece_of = [&](const at::Tensor& tensor) {
      return tensor.as_strided({length}, {1}, tensor.storage_offset() + begin);
    };
    at::Tensor piece = piece_of(sum);
    at::add_out(piece, piece_of(tensors[0]), piece_of(tensors[1]));
    for (const at::Tensor& tensor : tensors.subspan(2)) piece.add_(piece_of(tensor));
  }
  return sum;
}

// Sparse here and dense there, or not to be packed anywhere; or large, and all on the host that
// wants the sum: packing would be a copy more.
bool GoesAlone(absl::Span<const TensorVector> lists, size_t k, c10::Device destination) {
  bool on_host = destination.is_cpu();
  for (const TensorVector& list : lists) {
    const at::Tensor& tensor = list[k];
    if (!tensor.defined()) continue;
    if (tensor.layout() != at::kStrided) return true;
    on_host = on_host && tensor.is_cpu() &&
              tensor.numel() * static_cast<int64_t>(tensor.itemsize()) >= kAloneBytes;
  }
  return on_host;
}

}  // namespace

CoalescedCollectives::CoalescedCollectives(std::vector<c10::Device> devices,
                                           DeviceCollectivesOptions options)
    : devices_(std::move(devices)), options_(options) {}

absl::StatusOr<TensorVector> CoalescedCollectives::Reduce(absl::Span<const TensorVector> lists,
                                                          c10::Device destination) {
  DG_RETURN_IF_ERROR(Aborted());
  DG_RETURN_IF_ERROR(CheckReduce(devices_, lists));
  try {
    const at::NoGradGuard no_grad;
    TensorVector results(lists[0].size());
    TensorVector shapes(results.size());  // of what may be packed
    const auto add_alone = [&](size_t k) {
      TensorVector summands;
      for (const TensorVector& list : lists) {
        if (list[k].defined()) summands.push_back(list[k]);
      }
      if (destination.is_cpu() && summands.size() > 2 && AreAlikeOnHost(summands)) {
        results[k] = AddOnHost(summands);
        return;
      }
      Sum sum(destination);
      for (const at::Tensor& summand : summands) sum.Add(summand, /*owned=*/false);
      results[k] = sum.value();
    };
    for (size_t k = 0; k < results.size(); ++k) {
      if (GoesAlone(lists, k, destination)) {
        add_alone(k);
        continue;
      }
      for (size_t i = 0; i < lists.size() && !shapes[k].defined(); ++i) shapes[k] = lists[i][k];
    }
    // Shapes may come from lists of different devices.
    std::vector<Bucket> buckets = AssignBuckets(shapes, options_.bucket_bytes);
    for (const Bucket& bucket : buckets) {
      if (bucket.slots.size() == 1) {
        add_alone(bucket.slots[0].tensor);
        continue;
      }
      Sum sum(destination);
      for (const TensorVector& list : lists) {
        const bool any =
            std::any_of(bucket.slots.begin(), bucket.slots.end(),
                        [&list](const Bucket::Slot& slot) { return list[slot.tensor].defined(); });
        if (any) sum.Add(Pack(bucket, list), /*owned=*/true);
      }
      TensorVector parts = Parts(bucket, sum.value());
      for (size_t i = 0; i < parts.size(); ++i) {
        results[bucket.slots[i].tensor] = std::move(parts[i]);
      }
    }
    return results;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), "reduce");
  }
}

absl::StatusOr<std::vector<TensorVector>> CoalescedCollectives::Broadcast(
    const TensorVector& tensors) {
  DG_RETURN_IF_ERROR(Aborted());
  DG_RETURN_IF_ERROR(CheckBroadcast(tensors));
  try {
    const at::NoGradGuard no_grad;
    std::vector<TensorVector> results(devices_.size(), TensorVector(tensors.size()));
    for (const Bucket& bucket : AssignBuckets(tensors, options_.bucket_bytes)) {
      const bool alone = bucket.slots.size() == 1;
      at::Tensor packed;  // once, for all devices
      for (size_t i = 0; i < devices_.size(); ++i) {
        if (devices_[i] == bucket.device) {
          for (const Bucket::Slot& slot : bucket.slots) {
            results[i][slot.tensor] = tensors[slot.tensor];
          }
          continue;
        }
        if (!packed.defined()) {
          packed = alone ? tensors[bucket.slots[0].tensor] : Pack(bucket, tensors);
        }
        const at::Tensor copy = CopyTo(packed, devices_[i]);
        TensorVector parts = alone ? TensorVector{copy} : Parts(bucket, copy);
        for (size_t p = 0; p < parts.size(); ++p) {
          results[i][bucket.slots[p].tensor] = std::move(parts[p]);
        }
      }
    }
    return results;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), "broadcast");
  }
}

void CoalescedCollectives::Abort(const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  aborted_.Update(why);
}

absl::Status CoalescedCollectives::Aborted() const {
  absl::MutexLock lock(&mu_);
  return aborted_;
}

}  // namespace distgrad
