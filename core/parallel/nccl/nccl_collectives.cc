// Packs buckets, and has communicators add and broadcast them.
#include "core/parallel/nccl/nccl_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

bool AnyDefined(const Bucket& bucket, const TensorVector& list) {
  return std::any_of(bucket.slots.begin(), bucket.slots.end(),
                     [&](const Bucket::Slot& slot) { return list[slot.tensor].defined(); });
}

// Whether the bucket is this tensor's memory as it lies there.
bool IsWhole(const Bucket& bucket, const TensorVector& list) {
  if (bucket.slots.size() != 1) return false;
  const at::Tensor& tensor = list[bucket.slots[0].tensor];
  return tensor.defined() && tensor.strides() == bucket.slots[0].strides && !tensor.is_conj() &&
         !tensor.is_neg();
}

// Without what lies behind the last slot.
int64_t Elements(const Bucket& bucket) {
  const Bucket::Slot& last = bucket.slots.back();
  return last.offset + c10::multiply_integers(last.sizes);
}

}  // namespace

NcclCollectives::NcclCollectives(std::shared_ptr<NcclCommunicators> communicators,
                                 DeviceCollectivesOptions options)
    : communicators_(std::move(communicators)),
      options_(options),
      fallback_(communicators_->devices(), options) {}

absl::StatusOr<TensorVector> NcclCollectives::Reduce(absl::Span<const TensorVector> lists,
                                                     c10::Device destination) {
  DG_RETURN_IF_ERROR(CheckReduce(devices(), lists));
  DG_RETURN_IF_ERROR(communicators_->MayBegin("reduce"));
  NcclOrder& order = communicators_->order();
  DG_RETURN_IF_ERROR(
      order.TakeTurn(absl::StrCat(communicators_->name(), ": reduce"), options_.timeout));
  const absl::Cleanup give_turn = [&order] { order.GiveTurn(); };
  try {
    const at::NoGradGuard no_grad;
    TensorVector results(lists[0].size());
    TensorVector shapes(results.size());  // of what NCCL adds
    std::vector<size_t> others;
    for (size_t k = 0; k < results.size(); ++k) {
      bool strided = true;
      for (const TensorVector& list : lists) {
        if (!list[k].defined()) continue;
        if (!shapes[k].defined()) shapes[k] = list[k];
        strided = strided && list[k].layout() == at::kStrided;
      }
      if (!shapes[k].defined() || (strided && NcclAdds(shapes[k].scalar_type()))) continue;
      others.push_back(k);
      shapes[k] = at::Tensor();
    }
    const size_t there = IndexOf(destination);
    const size_t root = there < devices().size() ? there : 0;
    // A bucket is of one device; here only the shapes count.
    for (size_t k = 0; k < shapes.size(); ++k) {
      if (shapes[k].defined() && lists[root][k].defined()) shapes[k] = lists[root][k];
    }
    for (const Bucket& bucket : AssignBuckets(shapes, options_.bucket_bytes)) {
      if (!bucket.flat) {
        others.push_back(bucket.slots[0].tensor);
        continue;
      }
      DG_ASSIGN_OR_RETURN(at::Tensor sum, ReduceBucket(bucket, lists, root));
      if (there != root) {
        sum = sum.to(destination);
        // It may have waited for the collective, which an abort ends as well.
        DG_RETURN_IF_ERROR(communicators_->status());
      }
      TensorVector parts = Parts(bucket, sum);
      for (size_t i = 0; i < parts.size(); ++i) {
        results[bucket.slots[i].tensor] = std::move(parts[i]);
      }
    }
    if (others.empty()) return results;
    std::vector<TensorVector> rest(lists.size());
    for (size_t i = 0; i < lists.size(); ++i) {
      for (const size_t k : others) rest[i].push_back(lists[i][k]);
    }
    DG_ASSIGN_OR_RETURN(TensorVector sums, fallback_.Reduce(rest, destination));
    for (size_t i = 0; i < others.size(); ++i) results[others[i]] = std::move(sums[i]);
    return results;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()),
                    absl::StrCat(communicators_->name(), ": reduce"));
  }
}

absl::StatusOr<at::Tensor> NcclCollectives::ReduceBucket(const Bucket& bucket,
                                                         absl::Span<const TensorVector> lists,
                                                         size_t root) {
  const auto options = at::TensorOptions(bucket.dtype);
  Collective collective;
  collective.what = "reduce";
  collective.root = root;
  for (size_t i = 0; i < devices().size(); ++i) {
    NcclCommunicators::Buffer buffer;
    if (IsWhole(bucket, lists[i])) {
      buffer = {lists[i][bucket.slots[0].tensor], /*in_place=*/true};
    } else if (AnyDefined(bucket, lists[i])) {
      buffer.tensor = Pack(bucket, lists[i]);
    } else {
      const c10::DeviceGuard guard(devices()[i]);
      buffer.tensor = at::zeros({bucket.elements}, options.device(devices()[i]));
    }
    collective.buffers.push_back(std::move(buffer));
    collective.waits.push_back(i == root);
  }
  at::Tensor sum = collective.buffers[root].tensor;
  if (collective.buffers[root].in_place) {
    const c10::DeviceGuard guard(devices()[root]);
    sum = collective.result = at::empty({bucket.elements}, options.device(devices()[root]));
  }
  const int64_t elements = Elements(bucket);
  if (elements == 0) return sum;
  collective.run = [&](NcclGroup& group, absl::Span<const NcclGroup::Part> parts) {
    return group.Reduce(parts, elements, root);
  };
  DG_RETURN_IF_ERROR(communicators_->Launch(std::move(collective), options_.timeout));
  return sum;
}

absl::StatusOr<std::vector<TensorVector>> NcclCollectives::Broadcast(const TensorVector& tensors) {
  DG_RETURN_IF_ERROR(CheckBroadcast(tensors));
  DG_RETURN_IF_ERROR(communicators_->MayBegin("broadcast"));
  NcclOrder& order = communicators_->order();
  DG_RETURN_IF_ERROR(
      order.TakeTurn(absl::StrCat(communicators_->name(), ": broadcast"), options_.timeout));
  const absl::Cleanup give_turn = [&order] { order.GiveTurn(); };
  try {
    const at::NoGradGuard no_grad;
    std::vector<TensorVector> results(devices().size(), TensorVector(tensors.size()));
    TensorVector rest(tensors.size());
    bool any_rest = false;
    for (const Bucket& bucket : AssignBuckets(tensors, options_.bucket_bytes)) {
      if (bucket.flat) {
        DG_RETURN_IF_ERROR(BroadcastBucket(bucket, tensors, &results));
        continue;
      }
      rest[bucket.slots[0].tensor] = tensors[bucket.slots[0].tensor];
      any_rest = true;
    }
    if (!any_rest) return results;
    DG_ASSIGN_OR_RETURN(std::vector<TensorVector> copies, fallback_.Broadcast(rest));
    for (size_t i = 0; i < devices().size(); ++i) {
      for (size_t k = 0; k < rest.size(); ++k) {
        if (rest[k].defined()) results[i][k] = std::move(copies[i][k]);
      }
    }
    return results;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()),
                    absl::StrCat(communicators_->name(), ": broadcast"));
  }
}

absl::Status NcclCollectives::BroadcastBucket(const Bucket& bucket, const TensorVector& tensors,
                                              std::vector<TensorVector>* results) {
  Collective collective;
  collective.what = "broadcast";
  const size_t source = IndexOf(bucket.device);
  collective.root = source < devices().size() ? source : 0;
  for (size_t i = 0; i < devices().size(); ++i) {
    NcclCommunicators::Buffer buffer;
    if (i != collective.root) {
      const c10::DeviceGuard guard(devices()[i]);
      buffer.tensor =
          at::empty({bucket.elements}, at::TensorOptions(bucket.dtype).device(devices()[i]));
    } else if (source == i && IsWhole(bucket, tensors)) {
      buffer = {tensors[bucket.slots[0].tensor], /*in_place=*/true};
    } else {
      buffer.tensor = Pack(bucket, tensors);
      if (source != i) buffer.tensor = buffer.tensor.to(devices()[i]);
    }
    TensorVector parts;
    if (i != source) parts = Parts(bucket, buffer.tensor);
    for (size_t p = 0; p < bucket.slots.size(); ++p) {
      const size_t k = bucket.slots[p].tensor;
      (*results)[i][k] = i == source ? tensors[k] : parts[p];
    }
    collective.buffers.push_back(std::move(buffer));
    collective.waits.push_back(i != source);
  }
  const int64_t elements = Elements(bucket);
  if (elements == 0) return absl::OkStatus();
  collective.run = [elements, root = collective.root](NcclGroup& group,
                                                      absl::Span<const NcclGroup::Part> parts) {
    return group.Broadcast(parts, elements, root);
  };
  return communicators_->Launch(std::move(collective), options_.timeout);
}

size_t NcclCollectives::IndexOf(c10::Device device) const {
  return std::find(devices().begin(), devices().end(), device) - devices().begin();
}

}  // namespace distgrad
