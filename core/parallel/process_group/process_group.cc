// Brings the ranks together in the store, runs collectives, and names who is lost.
#include "core/parallel/process_group/process_group.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/membership/environment.h"
#include "core/membership/start.h"
#include "core/net/certificates.h"
#include "core/parallel/bucket.h"
#include "core/parallel/process_group/divides_first.h"
#include "core/parallel/process_group/group_security.h"
#include "core/parallel/process_group/new_backend.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// What is packed together, at most.
constexpr size_t kBucketBytes = size_t{25} << 20;
constexpr int kNoRoot = -1;
// How often a collective that somebody waits for is looked at.
constexpr auto kCheckInterval = std::chrono::milliseconds(100);

// Held while a collective of c10d's Gloo is begun, or such a group aborted. c10d numbers those of a
// group as they come; and in its recorder of collectives, one for all groups of the process, a map
// grows without a lock. Not for a backend that may wait for other ranks: one of them may be in this
// process, and have this mutex still to lock.
ABSL_CONST_INIT absl::Mutex beginning(absl::kConstInit);

// Within it one may write to those tensors: to one of inference mode only in that mode, in which
// one may to others as well.
class WriteScope {
 public:
  explicit WriteScope(absl::Span<const at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.is_inference()) continue;
      mode_.emplace(true);
      break;
    }
  }

 private:
  std::optional<c10::InferenceMode> mode_;
};

absl::Status Check(const ProcessGroupOptions& options) {
  const std::string who = absl::StrCat("process group '", options.name, "': ");
  if (options.store == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, "there is no store for the rendezvous of its ranks"));
  }
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(absl::StrCat(who, "rank ", options.rank, " of ", options.size,
                                                   ": ranks go from 0 to one less than the size"));
  }
  if (options.backend != "gloo" && options.backend != "nccl") {
    return absl::InvalidArgumentError(
        absl::StrCat(who, "there is no backend '", options.backend, "'; there are gloo and nccl"));
  }
  for (const absl::Duration timeout : {options.timeout, options.join_timeout}) {
    if (timeout >= absl::Milliseconds(1) && timeout <= absl::Hours(24 * 365)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(who, "a timeout is ", absl::FormatDuration(timeout), ", not 1ms to a year"));
  }
  DG_RETURN_IF_ERROR(Annotate(CheckClusterKey(options.cluster_key.value_or(ClusterKey())), who));
  if (options.name.empty() || absl::StrContains(options.name, '/')) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, "a name is not empty and has no '/' in it"));
  }
  return absl::OkStatus();
}

// Gloo's own TLS is compiled into the pinned libtorch, takes its certificates, and sends plain text
// all the same: who asks for it must not get that.
absl::Status CheckGlooDevice(const ProcessGroupOptions& options) {
  if (options.backend != "gloo" || !options.cluster_key->empty() ||
      options.certificates != nullptr ||
      ProcessEnvironment("GLOO_DEVICE_TRANSPORT").value_or("") != "TCP_TLS") {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "GLOO_DEVICE_TRANSPORT asks for Gloo's own TLS, which encrypts nothing in this libtorch: "
      "unset it, and give all ranks a cluster key (",
      kClusterKeySetting, "), with which groups are encrypted"));
}

std::string FailureOf(int rank, absl::string_view why) {
  return absl::StrCat("rank ", rank, " failed: ", why);
}

// Tells the others why this rank fails. Another rank's reason is why this one does, so it stays.
void TellFailure(Store& store, int rank, const absl::Status& why) {
  if (!absl::IsNotFound(store.Get(kFailureKey, absl::InfinitePast()).status())) return;
  // The store is given its some seconds; a rank that fails does not wait longer.
  store.Set(kFailureKey, FailureOf(rank, why.message()), absl::InfinitePast()).IgnoreError();
}

// Others cannot be divided, or not be sent; and whoever finds that out behind a collective leaves
// the other ranks with half of it.
bool HasAverages(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

// An error of the collective is left for its wait().
bool EndsWithin(std::chrono::milliseconds timeout, c10d::Work& work) {
  try {
    work.wait(timeout);
  } catch (...) {  // NOLINT(bugprone-empty-catch): that wait() throws it again
  }
  return work.isCompleted();
}

}  // namespace

struct ProcessGroup::Backend : NewBackend {
  // Where to begin may wait for other ranks, only what this group begins waits for that.
  absl::Mutex begins;

  void Abort(const std::string& who) const {
    try {
      backend->abort();
    } catch (...) {
      DG_LOG(ERROR) << who << ": it has failed, and to abort it failed, too: "
                    << StatusFromException(std::current_exception());
    }
  }
};

struct ProcessGroup::Running {
  c10::intrusive_ptr<c10d::Work> work;
  const std::string* what;
};

ProcessGroup::ProcessGroup(ProcessGroupOptions options, c10::Device device)
    : options_(std::move(options)),
      device_(device),
      who_(absl::StrCat("process group '", options_.name, "' (rank ", options_.rank, " of ",
                        options_.size, ", ", options_.backend, ")")) {}

ProcessGroup::~ProcessGroup() = default;

absl::StatusOr<std::shared_ptr<ProcessGroup>> ProcessGroup::Create(ProcessGroupOptions options) {
  DG_RETURN_IF_ERROR(Check(options));
  const BlockingScope blocking;
  const auto begin = std::chrono::steady_clock::now();
  const Deadline deadline = Deadline::After(options.join_timeout);
  if (!options.cluster_key.has_value()) {
    DG_ASSIGN_OR_RETURN(options.cluster_key, LoadClusterKey(""));
  }
  if (options.certificates == nullptr) {
    DG_ASSIGN_OR_RETURN(options.certificates, LoadCertificates());
  }
  DG_RETURN_IF_ERROR(
      Annotate(CheckGlooDevice(options), absl::StrCat("process group '", options.name, "'")));
  if (options.host.empty()) {
    options.host = ProcessEnvironment("DISTGRAD_HOST").value_or("127.0.0.1");
  }
  const bool nccl = options.backend == "nccl";
  const absl::StatusOr<c10::Device> device = nccl ? NcclDevice() : c10::Device(c10::kCPU);
  if (!device.ok()) {
    return Annotate(device.status(), absl::StrCat("process group '", options.name, "'"));
  }
  std::shared_ptr<ProcessGroup> group(new ProcessGroup(std::move(options), *device));
  const ProcessGroupOptions& place = group->options_;
  // A group that is made again under its name must not meet the addresses of the former one, and
  // leaves nothing of it in the store.
  auto store = std::make_shared<PrefixStore>(absl::StrCat("group/", place.name, "/"), place.store);
  absl::StatusOr<std::shared_ptr<Store>> of_start =
      ListedStoreOfThisStart(std::move(store), place.rank, place.size, deadline);
  if (!of_start.ok()) return Annotate(of_start.status(), group->who_);
  group->store_ = *std::move(of_start);
  if (nccl && (!place.cluster_key->empty() || place.certificates != nullptr)) {
    DG_LOG(WARNING) << group->who_
                    << ": NCCL encrypts nothing, with a cluster key or without: docs/security.md";
  }
  const auto taken = [begin, &place] {
    return std::min(absl::Trunc(absl::FromChrono(std::chrono::steady_clock::now() - begin),
                                absl::Milliseconds(1)),
                    place.join_timeout);
  };
  constexpr char kConnecting[] = "connecting the ranks";
  Digest group_id = {};
  if (!nccl && place.size > 1) {
    const absl::StatusOr<Digest> agreed =
        AgreeOnSecurity(*group->store_,
                        {.group = place.name,
                         .rank = place.rank,
                         .size = place.size,
                         .cluster_key = *place.cluster_key,
                         .has_certificates = place.certificates != nullptr},
                        deadline);
    if (absl::IsDeadlineExceeded(agreed.status())) {
      return group->Failed(std::make_exception_ptr(StatusError(agreed.status())), kConnecting,
                           taken());
    }
    if (!agreed.ok()) {
      group->Fail(agreed.status());
      return group->status();
    }
    group_id = *agreed;
  }
  const BackendPlace at = {
      .store = group->store_,
      .rank = place.rank,
      .size = place.size,
      .timeout = place.timeout,
      .connect_timeout = std::max(deadline.Left(), absl::Milliseconds(1)),
      .host = place.host,
      .cluster_key = *place.cluster_key,
      .certificates = place.certificates,
      .group_id = group_id,
      .failed_elsewhere =
          [store = group->store_] {
            const auto failure = store->Get(kFailureKey, absl::InfinitePast());
            return failure.ok() ? absl::UnavailableError(*failure) : absl::OkStatus();
          },
      .tell_failure = [store = group->store_, rank = place.rank](
                          const absl::Status& why) { TellFailure(*store, rank, why); },
  };
  try {
    auto backend = std::make_unique<Backend>();
    static_cast<NewBackend&>(*backend) = nccl ? NewNcclBackend(at) : NewGlooBackend(at);
    group->backend_ = std::move(backend);
  } catch (...) {
    return group->Failed(std::current_exception(), kConnecting, taken());
  }
  return group;
}

absl::Status ProcessGroup::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void ProcessGroup::Fail(const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return;
    status_ = Annotate(why, who_);
  }
  TellFailure(*store_, rank(), why);  // before the others notice anything
  if (backend_ == nullptr) return;
  if (backend_->begins_may_wait) {
    // Not behind a collective that begins: it may be what this ends.
    backend_->Abort(who_);
  } else {
    absl::MutexLock lock(&beginning);
    backend_->Abort(who_);
  }
}

absl::Status ProcessGroup::Failed(std::exception_ptr exception, absl::string_view what,
                                  absl::Duration timeout) {
  absl::Status status = StatusFromException(std::move(exception));
  const bool in_words = status.code() == absl::StatusCode::kInternal;
  // Backends say with words alone what happened to the other end; our store has a code for it.
  const auto says = [&status](absl::string_view words) {
    return absl::StrContains(status.message(), words);
  };
  // The system says that (ETIMEDOUT) of a connection whose other end is lost. Gloo repeats it of
  // one that it has tried to make until its time was up.
  const bool is_lost = says("Connection timed out") && !says("timed out connecting");
  if (absl::IsDeadlineExceeded(status) ||
      (in_words && !is_lost && (says("imed out") || says("timeout")))) {
    status = absl::DeadlineExceededError(absl::StrCat(
        "some rank took longer than ", absl::FormatDuration(timeout), ": ", status.message()));
  } else if (in_words) {
    status = absl::UnavailableError(status.message());
  }
  const auto failure = store_->Get(kFailureKey, absl::InfinitePast());
  if (failure.ok() && !absl::StartsWith(*failure, FailureOf(rank(), ""))) {
    status = absl::UnavailableError(absl::StrCat(*failure, " (here: ", status.message(), ")"));
  }
  Fail(Annotate(status, what));
  return this->status();
}

absl::Status ProcessGroup::MayBegin(absl::string_view what) {
  DG_RETURN_IF_ERROR(status());
  if (backend_->may_begin == nullptr) return absl::OkStatus();
  try {
    return Annotate(backend_->may_begin(), absl::StrCat(who_, ": ", what));
  } catch (...) {
    return Failed(std::current_exception(), what, options_.timeout);
  }
}

absl::Status ProcessGroup::RunForOthers(absl::string_view what,
                                        absl::FunctionRef<absl::Status()> part) {
  DG_RETURN_IF_ERROR(status());
  absl::Status wrong;
  try {
    wrong = part();
  } catch (...) {
    wrong = StatusFromException(std::current_exception());
  }
  if (wrong.ok()) return wrong;
  Fail(Annotate(wrong, what));
  return status();
}

absl::Status ProcessGroup::CheckTensor(const at::Tensor& tensor, absl::string_view what) const {
  if (!device_.is_cuda() || (tensor.is_cuda() && tensor.layout() == at::kStrided)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(c10::str(who_, ": ", what,
                                             ": NCCL takes dense tensors of a GPU, and one is ",
                                             tensor.layout(), " on ", tensor.device()));
}

absl::StatusOr<std::shared_ptr<ProcessGroup::Running>> ProcessGroup::Begin(const at::Tensor& tensor,
                                                                           const std::string& what,
                                                                           int root) {
  DG_RETURN_IF_ERROR(CheckTensor(tensor, what));
  DG_RETURN_IF_ERROR(MayBegin(what));
  std::vector<at::Tensor> tensors = {tensor};
  try {
    absl::MutexLock lock(backend_->begins_may_wait ? &backend_->begins : &beginning);
    DG_RETURN_IF_ERROR(status());
    ++collectives_;
    if (root == kNoRoot) {
      return std::make_shared<Running>(Running{backend_->backend->allreduce(tensors), &what});
    }
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return std::make_shared<Running>(
        Running{backend_->backend->broadcast(tensors, options), &what});
  } catch (...) {
    return Failed(std::current_exception(), what, options_.timeout);
  }
}

absl::StatusOr<std::shared_ptr<ProcessGroup::Running>> ProcessGroup::BeginSum(
    const at::Tensor& tensor, const std::string& what) {
  return Begin(tensor, what, kNoRoot);
}

absl::Status ProcessGroup::Wait(Running& running) {
  const BlockingScope blocking;
  try {
    if (backend_->end_lost_waits != nullptr) {
      while (!EndsWithin(kCheckInterval, *running.work)) backend_->end_lost_waits();
    }
    running.work->wait();
    return absl::OkStatus();
  } catch (...) {
    return Failed(std::current_exception(), *running.what, options_.timeout);
  }
}

absl::Status ProcessGroup::Average(absl::Span<const at::Tensor> tensors) {
  const std::string what = absl::StrCat("averaging ", tensors.size(), " tensors");
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    DG_RETURN_IF_ERROR(CheckTensor(tensors[i], what));
    if (HasAverages(tensors[i].scalar_type())) continue;
    return absl::InvalidArgumentError(absl::StrCat(who_, ": ", what, ": tensor ", i, " is of ",
                                                   c10::toString(tensors[i].scalar_type()),
                                                   ", which has no averages"));
  }
  DG_RETURN_IF_ERROR(MayBegin(what));
  const at::NoGradGuard no_grad;
  std::vector<Bucket> buckets;
  std::vector<at::Tensor> sums;
  std::vector<std::shared_ptr<Running>> running;
  absl::Status status = RunForOthers(what, [&]() -> absl::Status {
    buckets = AssignBuckets(tensors, kBucketBytes, 0, SlotOrder::kRowMajor);
    for (const Bucket& bucket : buckets) {
      sums.push_back(bucket.flat ? Pack(bucket, tensors) : tensors[bucket.slots[0].tensor]);
      // The work, too, writes in the mode in which it is begun.
      const WriteScope writes(absl::MakeConstSpan(&sums.back(), 1));
      if (DividesFirst(bucket.dtype)) sums.back().div_(options_.size);
      DG_ASSIGN_OR_RETURN(auto begun, BeginSum(sums.back(), what));
      running.push_back(std::move(begun));
    }
    return absl::OkStatus();
  });
  for (const auto& each : running) status.Update(Wait(*each));
  DG_RETURN_IF_ERROR(status);
  // The others have their averages, whatever becomes of this rank's.
  try {
    const WriteScope writes(tensors);
    for (size_t i = 0; i < buckets.size(); ++i) {
      if (!DividesFirst(buckets[i].dtype)) sums[i].div_(options_.size);
      if (buckets[i].flat) Unpack(buckets[i], sums[i], tensors);
    }
    return absl::OkStatus();
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), absl::StrCat(who_, ": ", what));
  }
}

absl::Status ProcessGroup::Broadcast(absl::Span<const at::Tensor> tensors, int root) {
  const std::string what = absl::StrCat("broadcasting ", tensors.size(), " tensors of rank ", root);
  if (root < 0 || root >= options_.size) {
    return absl::InvalidArgumentError(absl::StrCat(who_, ": ", what, ": there is no such rank"));
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) DG_RETURN_IF_ERROR(CheckTensor(tensor, what));
  }
  DG_RETURN_IF_ERROR(MayBegin(what));
  const at::NoGradGuard no_grad;
  absl::Status not_dense;
  Bucket bucket;
  at::Tensor flat;
  const auto unpack = [&] {
    const WriteScope writes(tensors);
    if (flat.defined() && options_.rank != root) Unpack(bucket, flat, tensors);
  };
  DG_RETURN_IF_ERROR(RunForOthers(what, [&]() -> absl::Status {
    std::vector<Bucket> buckets = AssignBuckets(tensors, kBucketBytes, 0, SlotOrder::kRowMajor);
    for (const Bucket& each : buckets) {
      if (each.flat) continue;
      not_dense = absl::InvalidArgumentError(
          absl::StrCat(who_, ": ", what, ": tensor ", each.slots[0].tensor, " is not dense"));
      return absl::OkStatus();  // nothing has begun, and nothing failed
    }
    for (Bucket& each : buckets) {
      unpack();  // the one before; the others are at this one
      bucket = std::move(each);
      flat = Pack(bucket, tensors);
      // As bytes: backends do not know all dtypes.
      DG_ASSIGN_OR_RETURN(const auto running, Begin(flat.view(at::kByte), what, root));
      DG_RETURN_IF_ERROR(Wait(*running));
    }
    return absl::OkStatus();
  }));
  DG_RETURN_IF_ERROR(not_dense);
  // The others have theirs, whatever becomes of this rank's.
  try {
    unpack();
    return absl::OkStatus();
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), absl::StrCat(who_, ": ", what));
  }
}

}  // namespace distgrad
