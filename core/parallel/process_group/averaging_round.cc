// Fills buckets, begins their all-reduces, and divides the sums.
#include "core/parallel/process_group/averaging_round.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "core/base/status.h"
#include "core/parallel/bucket.h"
#include "core/parallel/process_group/divides_first.h"

namespace distgrad {
namespace {

bool IsDense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

// A sparse gradient with the note of a bucket that is not flat: an element in a row behind the
// last, which its sum has if any rank has touched the gradient. The elements do not say that, for a
// gradient may have none: of an embedding of no rows, or of rows whose dense gradient is zero.
// `gradient` undefined: no elements. The result has memory of its own.
at::Tensor WithNote(const at::Tensor& gradient, const at::Tensor& parameter, bool touched) {
  std::vector<int64_t> sizes = parameter.sizes().vec();
  const int64_t rows = sizes[0]++;
  at::Tensor indices, values;
  if (gradient.defined()) {
    const at::Tensor sparse = IsDense(gradient) ? gradient.to_sparse(1) : gradient;
    indices = sparse._indices();
    values = sparse._values();
  } else {
    // Of the shape that the gradients of an embedding have: rows.
    std::vector<int64_t> no_rows = parameter.sizes().vec();
    no_rows[0] = 0;
    indices = at::empty({1, 0}, parameter.options().dtype(at::kLong));
    values = at::empty(no_rows, parameter.options());
  }
  if (touched) {
    at::Tensor place = at::zeros({indices.size(0), 1}, indices.options());
    place[0].fill_(rows);
    std::vector<int64_t> one = values.sizes().vec();
    one[0] = 1;
    indices = at::cat({indices, place}, 1);
    values = at::cat({values, at::ones(one, values.options())});
  } else {
    values = values.clone();
  }
  return at::sparse_coo_tensor(indices, values, sizes).coalesce();
}

// Takes the note off a sum. Undefined if it has none.
at::Tensor WithoutNote(const at::Tensor& sum, const at::Tensor& parameter) {
  const at::Tensor coalesced = sum.coalesce();
  // The indices of rows rise.
  const int64_t last = coalesced._nnz() - 1;
  if (last < 0 || coalesced.indices()[0][last].item<int64_t>() < parameter.size(0)) return {};
  at::Tensor rest = at::sparse_coo_tensor(coalesced.indices().narrow(1, 0, last).contiguous(),
                                          coalesced.values().narrow(0, 0, last), parameter.sizes());
  rest._coalesced_(true);
  return rest;
}

// A gradient has the strides of its parameter, as optimizers are fast with; a bucket's part has
// those that are the same on all ranks, and so it stays if the parameter has got other sizes since.
at::Tensor WithStridesOf(const at::Tensor& parameter, at::Tensor part) {
  if (part.sizes() != parameter.sizes() || part.strides() == parameter.strides() ||
      !parameter.is_non_overlapping_and_dense()) {
    return part;
  }
  return at::empty_strided(parameter.sizes(), parameter.strides(), part.options()).copy_(part);
}

}  // namespace

at::Tensor AveragingRound::Packed(size_t b, const std::vector<at::Tensor>& gradients) {
  const Bucket& bucket = plan_.buckets()[b];
  const bool any = std::any_of(bucket.slots.begin(), bucket.slots.end(),
                               [&](const auto& slot) { return gradients[slot.tensor].defined(); });
  const auto options = at::TensorOptions(bucket.dtype).device(bucket.device);
  if (!any) return at::zeros({bucket.elements}, options);
  std::vector<at::Tensor> dense(gradients.size());
  for (const Bucket::Slot& slot : bucket.slots) {
    const at::Tensor& gradient = gradients[slot.tensor];
    if (!gradient.defined()) continue;
    const std::string& name = plan_.parameters()[slot.tensor].name;
    TORCH_CHECK_VALUE(gradient.device() == bucket.device && gradient.scalar_type() == bucket.dtype,
                      "the gradient of '", name, "' is ", gradient.scalar_type(), " on ",
                      gradient.device(), ", and the parameter was ", bucket.dtype, " on ",
                      bucket.device, " when the averager was made");
    dense[slot.tensor] = IsDense(gradient) ? gradient : gradient.to_dense();
  }
  if (!bucket.device.is_cpu()) return Pack(bucket, dense);
  spare_->resize(plan_.buckets().size());
  at::Tensor& spare = (*spare_)[b];
  return spare = Pack(bucket, dense, std::move(spare));
}

at::Tensor AveragingRound::Notes(size_t bucket) const {
  const int64_t begin = plan_.notes(bucket);
  const at::Tensor notes = sums_[bucket].narrow(0, begin, plan_.buckets()[bucket].elements - begin);
  // Complex numbers have no order.
  return notes.is_complex() ? at::real(notes).contiguous() : notes;
}

absl::Status AveragingRound::Begin(const std::vector<at::Tensor>& all,
                                   const std::vector<bool>& touched) {
  const at::NoGradGuard no_grad;
  const bool counts = active_ || !plan_.divide_by_active();
  const std::vector<at::Tensor> none(counts ? 0 : all.size());
  const std::vector<at::Tensor>& gradients = counts ? all : none;
  const size_t b = sums_.size();
  const Bucket& bucket = plan_.buckets()[b];
  const c10::OptionalDeviceGuard guard(bucket.device);
  at::Tensor sum;
  if (bucket.flat) {
    sum = Packed(b, gradients);
    if (DividesFirst(bucket.dtype)) sum.div_(plan_.group().size());
    std::vector<float> notes;
    for (const Bucket::Slot& slot : bucket.slots) notes.push_back(touched[slot.tensor] ? 1 : 0);
    for (int rank = 0; b == 0 && rank < plan_.group().size(); ++rank) {
      notes.push_back(active_ && rank == plan_.group().rank() ? 1 : 0);
    }
    sum.narrow(0, plan_.notes(b), static_cast<int64_t>(notes.size()))
        .copy_(at::tensor(notes), /*non_blocking=*/true);
  } else {
    const size_t k = bucket.slots[0].tensor;
    sum = WithNote(gradients[k], plan_.parameters()[k].tensor, touched[k]);
    if (DividesFirst(bucket.dtype)) sum.div_(plan_.group().size());
  }
  DG_ASSIGN_OR_RETURN(auto running, plan_.group().BeginSum(sum, plan_.what(b)));
  sums_.push_back(std::move(sum));
  running_.push_back(std::move(running));
  return absl::OkStatus();
}

absl::Status AveragingRound::Await(size_t bucket) {
  const auto running = std::exchange(running_[bucket], nullptr);
  return running == nullptr ? absl::OkStatus() : plan_.group().Wait(*running);
}

absl::StatusOr<at::Tensor> AveragingRound::Active() {
  DG_RETURN_IF_ERROR(Await(0));
  const at::Tensor notes = Notes(0);
  const int64_t size = plan_.group().size();
  // A copy: the rest of the bucket need not be kept for it.
  return notes.narrow(0, notes.size(0) - size, size).clone();
}

absl::StatusOr<std::vector<at::Tensor>> AveragingRound::Finish(
    const std::vector<at::Tensor>& gradients, const std::vector<bool>& touched) {
  const at::NoGradGuard no_grad;
  const std::vector<Bucket>& buckets = plan_.buckets();
  absl::Status status;
  while (status.ok() && begun() < buckets.size()) status = Begin(gradients, touched);
  int64_t divisor = plan_.group().size();
  if (status.ok() && plan_.divide_by_active()) {
    const absl::StatusOr<at::Tensor> active = Active();
    status = active.status();
    if (active.ok()) divisor = std::max<int64_t>(1, active->gt(0).sum().item<int64_t>());
  }
  std::vector<at::Tensor> averages(gradients.size());
  // One is divided while those behind it are in flight. All are waited for also after an error:
  // nothing is to be in flight when this returns.
  for (size_t b = 0; b < begun(); ++b) {
    status.Update(Await(b));
    if (status.ok()) Divide(b, touched, divisor, &averages);
  }
  DG_RETURN_IF_ERROR(status);
  return averages;
}

void AveragingRound::Divide(size_t b, const std::vector<bool>& touched, int64_t divisor,
                            std::vector<at::Tensor>* averages) {
  const Bucket& bucket = plan_.buckets()[b];
  const c10::OptionalDeviceGuard guard(bucket.device);
  const at::Tensor& sum = sums_[b];
  const auto divide = [&](const at::Tensor& of) {
    if (!DividesFirst(bucket.dtype)) {
      of.div_(divisor);
    } else if (divisor != plan_.group().size()) {
      of.mul_(static_cast<double>(plan_.group().size()) / static_cast<double>(divisor));
    }
    return of;
  };
  if (!bucket.flat) {
    const size_t k = bucket.slots[0].tensor;
    const at::Tensor noted = WithoutNote(sum, plan_.parameters()[k].tensor);
    if (noted.defined()) (*averages)[k] = divide(noted);
    return;
  }
  // An accelerator is waited for only where this rank cannot tell by itself.
  const bool all = std::all_of(bucket.slots.begin(), bucket.slots.end(),
                               [&](const auto& slot) { return touched[slot.tensor]; });
  const at::Tensor notes = all ? at::Tensor() : Notes(b).to(at::kCPU, at::kFloat);
  divide(sum.narrow(0, 0, plan_.notes(b)));
  std::vector<at::Tensor> parts = Parts(bucket, sum);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!all && notes.const_data_ptr<float>()[i] <= 0) continue;
    const size_t k = bucket.slots[i].tensor;
    (*averages)[k] = WithStridesOf(plan_.parameters()[k].tensor, std::move(parts[i]));
  }
}

}  // namespace distgrad
