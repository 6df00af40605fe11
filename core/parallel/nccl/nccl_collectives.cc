// Packs buckets, orders streams, and watches what NCCL has left running.
#include "core/parallel/nccl/nccl_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// How soon a failure is noticed that nobody waits for.
constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);
// Between two polls of whether a collective has gone to the streams: NCCL has nothing to wait on.
// It takes tens of microseconds, less than a sleep would, and so the first polls follow on each
// other.
constexpr int kPollsWithoutSleep = 64;
constexpr absl::Duration kReadyInterval = absl::Microseconds(50);

const c10::impl::DeviceGuardImplInterface& GuardOf(c10::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

std::string Names(const std::vector<c10::Device>& devices) {
  return absl::StrJoin(devices, ", ",
                       [](std::string* out, c10::Device device) { out->append(device.str()); });
}

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

struct NcclCollectives::Collective {
  std::string what;
  std::vector<Buffer> buffers;  // by device: what is sent, or received where nothing is sent
  at::Tensor result;            // what the root receives, if not its buffer
  size_t root = 0;
  std::vector<bool> waits;  // by device: has results, for its current stream
  std::function<absl::Status(NcclGroup&, absl::Span<const NcclGroup::Part>)> run;
};

absl::StatusOr<std::shared_ptr<NcclCollectives>> NcclCollectives::Create(
    std::vector<c10::Device> devices, DeviceCollectivesOptions options,
    const NcclGroupStarter& start, Clock* clock) {
  std::unique_ptr<Clock> own_clock;
  if (clock == nullptr) {
    DG_ASSIGN_OR_RETURN(own_clock, NewSystemClock());
  }
  std::shared_ptr<NcclCollectives> collectives(
      new NcclCollectives(std::move(devices), options, std::move(own_clock), clock));
  try {
    DG_ASSIGN_OR_RETURN(auto group, start(collectives->devices_));
    for (const c10::Device device : collectives->devices_) {
      collectives->streams_.push_back(
          GuardOf(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true));
    }
    absl::MutexLock lock(&collectives->mu_);
    collectives->group_ = std::move(group);
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), collectives->name_);
  }
  DG_RETURN_IF_ERROR(collectives->AwaitReady("setting up"));
  return collectives;
}

NcclCollectives::NcclCollectives(std::vector<c10::Device> devices, DeviceCollectivesOptions options,
                                 std::unique_ptr<Clock> own_clock, Clock* clock)
    : devices_(std::move(devices)),
      options_(options),
      name_(absl::StrCat("NCCL over ", Names(devices_))),
      fallback_(devices_, options),
      own_clock_(std::move(own_clock)),
      clock_(clock == nullptr ? own_clock_.get() : clock) {}

NcclCollectives::~NcclCollectives() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      Poll();
      if (running_.empty()) break;
    }
    // Not a wait on the event: a collective that hangs would hang us too.
    absl::SleepFor(kReadyInterval);
  }
  absl::MutexLock lock(&mu_);
  if (watched_ && clock_->Cancel(timer_)) watched_ = false;
  mu_.Await(absl::Condition(
      +[](bool* watched) { return !*watched; }, &watched_));
}

absl::StatusOr<TensorVector> NcclCollectives::Reduce(absl::Span<const TensorVector> lists,
                                                     c10::Device destination) {
  DG_RETURN_IF_ERROR(CheckReduce(devices_, lists));
  absl::MutexLock turn(&turn_);
  DG_RETURN_IF_ERROR(status());
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
    const size_t root = there < devices_.size() ? there : 0;
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
      if (there != root) sum = sum.to(destination);
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
    return Annotate(StatusFromException(std::current_exception()), name_ + ": reduce");
  }
}

absl::StatusOr<at::Tensor> NcclCollectives::ReduceBucket(const Bucket& bucket,
                                                         absl::Span<const TensorVector> lists,
                                                         size_t root) {
  const auto options = at::TensorOptions(bucket.dtype);
  Collective collective;
  collective.what = "reduce";
  collective.root = root;
  for (size_t i = 0; i < devices_.size(); ++i) {
    Buffer buffer;
    if (IsWhole(bucket, lists[i])) {
      buffer = {lists[i][bucket.slots[0].tensor], /*in_place=*/true};
    } else if (AnyDefined(bucket, lists[i])) {
      buffer.tensor = Pack(bucket, lists[i]);
    } else {
      const c10::DeviceGuard guard(devices_[i]);
      buffer.tensor = at::zeros({bucket.elements}, options.device(devices_[i]));
    }
    collective.buffers.push_back(std::move(buffer));
    collective.waits.push_back(i == root);
  }
  at::Tensor sum = collective.buffers[root].tensor;
  if (collective.buffers[root].in_place) {
    const c10::DeviceGuard guard(devices_[root]);
    sum = collective.result = at::empty({bucket.elements}, options.device(devices_[root]));
  }
  const int64_t elements = Elements(bucket);
  if (elements == 0) return sum;
  collective.run = [&](NcclGroup& group, absl::Span<const NcclGroup::Part> parts) {
    return group.Reduce(parts, elements, root);
  };
  DG_RETURN_IF_ERROR(Launch(std::move(collective)));
  return sum;
}

absl::StatusOr<std::vector<TensorVector>> NcclCollectives::Broadcast(const TensorVector& tensors) {
  DG_RETURN_IF_ERROR(CheckBroadcast(tensors));
  absl::MutexLock turn(&turn_);
  DG_RETURN_IF_ERROR(status());
  try {
    const at::NoGradGuard no_grad;
    std::vector<TensorVector> results(devices_.size(), TensorVector(tensors.size()));
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
    for (size_t i = 0; i < devices_.size(); ++i) {
      for (size_t k = 0; k < rest.size(); ++k) {
        if (rest[k].defined()) results[i][k] = std::move(copies[i][k]);
      }
    }
    return results;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), name_ + ": broadcast");
  }
}

absl::Status NcclCollectives::BroadcastBucket(const Bucket& bucket, const TensorVector& tensors,
                                              std::vector<TensorVector>* results) {
  Collective collective;
  collective.what = "broadcast";
  const size_t source = IndexOf(bucket.device);
  collective.root = source < devices_.size() ? source : 0;
  for (size_t i = 0; i < devices_.size(); ++i) {
    Buffer buffer;
    if (i != collective.root) {
      const c10::DeviceGuard guard(devices_[i]);
      buffer.tensor =
          at::empty({bucket.elements}, at::TensorOptions(bucket.dtype).device(devices_[i]));
    } else if (source == i && IsWhole(bucket, tensors)) {
      buffer = {tensors[bucket.slots[0].tensor], /*in_place=*/true};
    } else {
      buffer.tensor = Pack(bucket, tensors);
      if (source != i) buffer.tensor = buffer.tensor.to(devices_[i]);
    }
    TensorVector parts;
    if (i != source) parts = Parts(bucket, buffer.tensor);
    for (size_t p = 0; p < bucket.slots.size(); ++p) {
      const size_t k = bucket.slots[p].tensor;
      (*results)[i][k] = i == source ? tensors[k] : std::move(parts[p]);
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
  return Launch(std::move(collective));
}

absl::Status NcclCollectives::Launch(Collective collective) {
  std::vector<c10::Stream> current;
  std::vector<NcclGroup::Part> parts;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const c10::impl::DeviceGuardImplInterface& guard = GuardOf(devices_[i]);
    current.push_back(guard.getStream(devices_[i]));
    c10::Event ready(devices_[i].type());
    ready.record(current[i]);
    ready.block(streams_[i]);
    const at::Tensor& buffer = collective.buffers[i].tensor;
    const at::Tensor& result =
        i == collective.root && collective.result.defined() ? collective.result : buffer;
    // They may be freed before the collective has run.
    guard.recordDataPtrOnStream(buffer.storage().data_ptr(), streams_[i]);
    if (&result != &buffer) {
      guard.recordDataPtrOnStream(result.storage().data_ptr(), streams_[i]);
    }
    parts.push_back({buffer, result, streams_[i]});
  }
  {
    absl::MutexLock lock(&mu_);
    DG_RETURN_IF_ERROR(status_);
    if (absl::Status run = collective.run(*group_, parts); !run.ok()) {
      Fail(Annotate(run, absl::StrCat(name_, ": ", collective.what)));
      return status_;
    }
  }
  DG_RETURN_IF_ERROR(AwaitReady(collective.what));

  Running running;
  running.what = collective.what;
  running.deadline = clock_->Now() + options_.timeout;
  for (size_t i = 0; i < devices_.size(); ++i) {
    running.ends.emplace_back(devices_[i].type());
    running.ends[i].record(streams_[i]);
    if (collective.waits[i] || collective.buffers[i].in_place) running.ends[i].block(current[i]);
  }
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(status_);  // aborted meanwhile
  running_.push_back(std::move(running));
  if (!watched_) {
    watched_ = true;
    timer_ = clock_->At(clock_->Now() + kWatchInterval, [this] { Watch(); });
  }
  return absl::OkStatus();
}

void NcclCollectives::Abort(const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  Fail(Annotate(why, name_));
}

absl::Status NcclCollectives::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

size_t NcclCollectives::IndexOf(c10::Device device) const {
  return std::find(devices_.begin(), devices_.end(), device) - devices_.begin();
}

absl::Status NcclCollectives::AwaitReady(const std::string& what) {
  const absl::Time deadline = clock_->Now() + options_.timeout;
  for (int polls = 0;; ++polls) {
    if (polls >= kPollsWithoutSleep) {
      absl::SleepFor(kReadyInterval);
    } else if (polls > 0) {
      std::this_thread::yield();
    }
    absl::MutexLock lock(&mu_);
    DG_RETURN_IF_ERROR(status_);
    const absl::StatusOr<bool> ready = group_->Ready();
    if (ready.ok() && *ready) return absl::OkStatus();
    if (!ready.ok()) Fail(Annotate(ready.status(), absl::StrCat(name_, ": ", what)));
    if (ready.ok() && clock_->Now() > deadline) Fail(Late(what));
  }
}

void NcclCollectives::Watch() {
  absl::MutexLock lock(&mu_);
  Poll();
  watched_ = !running_.empty();
  if (watched_) timer_ = clock_->At(clock_->Now() + kWatchInterval, [this] { Watch(); });
}

void NcclCollectives::Poll() {
  if (running_.empty()) return;
  const absl::StatusOr<bool> ready = group_->Ready();
  if (!ready.ok()) return Fail(Annotate(ready.status(), name_));
  try {
    while (*ready && !running_.empty()) {
      const Running& oldest = running_.front();
      if (!std::all_of(oldest.ends.begin(), oldest.ends.end(),
                       [](const c10::Event& end) { return end.query(); })) {
        break;
      }
      running_.pop_front();
    }
  } catch (...) {
    return Fail(Annotate(StatusFromException(std::current_exception()), name_));
  }
  if (!running_.empty() && clock_->Now() > running_.front().deadline) {
    Fail(Late(running_.front().what));
  }
}

void NcclCollectives::Fail(absl::Status why) {
  status_.Update(why);
  running_.clear();
  if (group_ != nullptr) group_->Abort();
  group_ = nullptr;
}

absl::Status NcclCollectives::Late(const std::string& what) const {
  return absl::DeadlineExceededError(absl::StrCat(name_, ": ", what, " did not end within ",
                                                  absl::FormatDuration(options_.timeout),
                                                  " and was aborted"));
}

}  // namespace distgrad
