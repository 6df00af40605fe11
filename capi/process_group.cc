// Process groups, and the average of gradients over their ranks.
#include "core/parallel/process_group/process_group.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "capi/averager_object.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "core/base/blocking.h"
#include "core/parallel/process_group/gradient_averager.h"

namespace distgrad {
namespace {

struct ProcessGroupObject : HandleObject {
  using Handle = dg_process_group;
  static constexpr HandleKind kKind = HandleKind::kProcessGroup;
  static constexpr char kName[] = "dg_process_group";

  ~ProcessGroupObject() override { EndWherePossible(std::move(group)); }

  std::shared_ptr<ProcessGroup> group;
};

absl::Duration ToTimeout(int64_t timeout_ms, absl::Duration if_zero) {
  constexpr absl::Duration kLongest = absl::Hours(24 * 365);  // core has no "for ever"
  if (timeout_ms == 0) return if_zero;
  return timeout_ms < 0 ? kLongest : std::min(absl::Milliseconds(timeout_ms), kLongest);
}

absl::StatusOr<ProcessGroupOptions> ToOptions(dg_worker* worker,
                                              const dg_process_group_options* given) {
  DG_ASSIGN_OR_RETURN(const dg_process_group_options read,
                      ReadOptions<dg_process_group_options>(
                          given, DG_PROCESS_GROUP_OPTIONS_INIT, "dg_process_group_options",
                          offsetof(dg_process_group_options, join_timeout_ms)));
  DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
  DG_ASSIGN_OR_RETURN(const std::string name, FromStr(read.name, "name"));
  DG_ASSIGN_OR_RETURN(const std::string backend, FromStr(read.backend, "backend"));
  DG_ASSIGN_OR_RETURN(const std::string host, FromStr(read.host, "host"));
  ProcessGroupOptions options;
  options.store = use->store();
  if (!name.empty()) options.name = name;
  if (!backend.empty()) options.backend = backend;
  options.host = host.empty() ? use->host() : host;
  options.cluster_key = use->cluster_key();
  options.certificates = use->certificates();
  if (read.size == 0 && read.rank != 0) {
    return absl::InvalidArgumentError("a rank of a process group needs its size");
  }
  if (read.size > INT32_MAX || read.rank > INT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no rank ", read.rank, " in a process group of ", read.size));
  }
  options.rank = static_cast<int>(read.size == 0 ? use->rank() : read.rank);
  options.size = read.size == 0 ? use->world_size() : static_cast<int>(read.size);
  options.timeout = ToTimeout(read.timeout_ms, options.timeout);
  options.join_timeout = ToTimeout(read.join_timeout_ms, options.join_timeout);
  return options;
}

// `name` is that of the array, and `what` that of one of its tensors in errors of core's.
absl::StatusOr<std::vector<NamedTensor>> ToNamed(const dg_tensor* const* handles, size_t count,
                                                 absl::string_view name, absl::string_view what) {
  DG_ASSIGN_OR_RETURN(std::vector<at::Tensor> tensors,
                      PinTensors(handles, count, /*allow_null=*/false, name));
  std::vector<NamedTensor> named;
  for (at::Tensor& tensor : tensors) {
    named.push_back({.name = absl::StrCat(what, " ", named.size()), .tensor = std::move(tensor)});
  }
  return named;
}

// Runs a collective of a group, by its handle.
template <typename F>
dg_error* Collective(dg_process_group* group, const dg_tensor* const* tensors, size_t tensor_count,
                     F&& run) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<ProcessGroupObject> pinned,
                        Pin<ProcessGroupObject>(group, "group"));
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> values,
                        PinTensors(tensors, tensor_count, /*allow_null=*/false, "tensors"));
    const BlockingScope blocking;
    return run(*pinned->group, values);
  });
}

uint32_t Ask(const dg_process_group* group, int (ProcessGroup::*get)() const) noexcept {
  return GuardValue<uint32_t>(0, [&]() -> uint32_t {
    absl::StatusOr<Pinned<ProcessGroupObject>> pinned = Pin<ProcessGroupObject>(group, "group");
    return pinned.ok() ? static_cast<uint32_t>(((*pinned)->group.get()->*get)()) : 0;
  });
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_process_group_create(dg_worker* worker, const dg_process_group_options* options,
                                  dg_process_group** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(ProcessGroupOptions core_options, ToOptions(worker, options));
    HandleAhead<ProcessGroupObject> made;
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(made->group, ProcessGroup::Create(std::move(core_options)));
    *out = made.Release();
    return absl::OkStatus();
  });
}

void dg_process_group_destroy(dg_process_group* group) noexcept {
  DestroyHandle<ProcessGroupObject>(group);
}

uint32_t dg_process_group_rank(const dg_process_group* group) noexcept {
  return Ask(group, &ProcessGroup::rank);
}

uint32_t dg_process_group_size(const dg_process_group* group) noexcept {
  return Ask(group, &ProcessGroup::size);
}

dg_error* dg_process_group_average(dg_process_group* group, const dg_tensor* const* tensors,
                                   size_t tensor_count) noexcept {
  return Collective(
      group, tensors, tensor_count,
      [](ProcessGroup& of, const std::vector<at::Tensor>& values) { return of.Average(values); });
}

dg_error* dg_process_group_broadcast(dg_process_group* group, const dg_tensor* const* tensors,
                                     size_t tensor_count, uint32_t root) noexcept {
  return Collective(group, tensors, tensor_count,
                    [root](ProcessGroup& of, const std::vector<at::Tensor>& values) {
                      // No group is so large, and a root that is too large is an error of core's.
                      return of.Broadcast(values,
                                          static_cast<int>(std::min(root, uint32_t{INT32_MAX})));
                    });
}

dg_error* dg_process_group_fail(dg_process_group* group, dg_code code, dg_str why) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<ProcessGroupObject> pinned,
                        Pin<ProcessGroupObject>(group, "group"));
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(why, "why"));
    const BlockingScope blocking;  // for the store
    pinned->group->Fail(absl::Status(ToStatusCode(code), text));
    return absl::OkStatus();
  });
}

dg_error* dg_gradient_averager_create(dg_process_group* group, const dg_tensor* const* parameters,
                                      size_t parameter_count,
                                      const dg_gradient_averager_options* options,
                                      dg_gradient_averager** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(
        const dg_gradient_averager_options read,
        ReadOptions<dg_gradient_averager_options>(options, DG_GRADIENT_AVERAGER_OPTIONS_INIT,
                                                  "dg_gradient_averager_options"));
    DG_RETURN_IF_ERROR(CheckFlags(read.flags, DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE,
                                  "dg_gradient_averager_options.flags"));
    DG_ASSIGN_OR_RETURN(const Pinned<ProcessGroupObject> pinned,
                        Pin<ProcessGroupObject>(group, "group"));
    DG_ASSIGN_OR_RETURN(std::vector<NamedTensor> of_model,
                        ToNamed(parameters, parameter_count, "parameters", "parameter"));
    DG_ASSIGN_OR_RETURN(std::vector<NamedTensor> buffers,
                        ToNamed(read.buffers, read.buffer_count, "buffers", "buffer"));
    // A program in C has no backward but that of contexts.
    GradientAveragerOptions core_options{
        .in_backward = false,
        .divide_by_active = (read.flags & DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE) != 0};
    if (read.bucket_bytes > 0) core_options.bucket_bytes = read.bucket_bytes;
    // Made before, for the other ranks will have an averager, and wait for this one's part.
    HandleAhead<AveragerObject> made;
    SharedAhead<GradientAverager> shared;
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(std::unique_ptr<GradientAverager> averager,
                        GradientAverager::Create(pinned->group, std::move(of_model),
                                                 std::move(buffers), core_options));
    made->averager = shared.Share(std::move(averager));
    *out = made.Release();
    return absl::OkStatus();
  });
}

void dg_gradient_averager_destroy(dg_gradient_averager* averager) noexcept {
  DestroyHandle<AveragerObject>(averager);
}

dg_error* dg_gradient_averager_average(dg_gradient_averager* averager,
                                       const dg_context* context) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<AveragerObject> pinned,
                        Pin<AveragerObject>(averager, "averager"));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> of, Pin<ContextObject>(context, "context"));
    const BlockingScope blocking;
    return pinned->averager->Average(*of->context.record());
  });
}

dg_error* dg_gradient_averager_average_in_backward(dg_gradient_averager* averager,
                                                   const dg_context* context) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<AveragerObject> pinned,
                        Pin<AveragerObject>(averager, "averager"));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> of, Pin<ContextObject>(context, "context"));
    const BlockingScope blocking;  // for an average on another thread
    return pinned->averager->AverageInBackward(*of->context.record());
  });
}

dg_error* dg_gradient_averager_join(dg_gradient_averager* averager, const dg_context* context,
                                    uint64_t flags, bool* others_go_on) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(others_go_on, "others_go_on"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_RETURN_IF_ERROR(CheckFlags(flags, DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS, "flags"));
    DG_ASSIGN_OR_RETURN(const Pinned<AveragerObject> pinned,
                        Pin<AveragerObject>(averager, "averager"));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> of, Pin<ContextObject>(context, "context"));
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(
        const bool others,
        pinned->averager->Join(
            *of->context.record(),
            {.keep_gradients = (flags & DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS) != 0}));
    *others_go_on = others;
    return absl::OkStatus();
  });
}

}  // extern "C"
