// For builds with CUDA.
#include "core/parallel/new_reducer.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status.h"
#include "core/parallel/coalesced_reducer.h"
#include "core/parallel/nccl/nccl_functions.h"
#include "core/parallel/nccl/nccl_reducer.h"

namespace distgrad {
namespace {

bool AreDistinctGpus(std::vector<c10::Device> devices) {
  const auto by_index = [](c10::Device a, c10::Device b) { return a.index() < b.index(); };
  std::sort(devices.begin(), devices.end(), by_index);
  return devices.size() > 1 &&
         std::all_of(devices.begin(), devices.end(),
                     [](c10::Device device) { return device.is_cuda() && device.has_index(); }) &&
         std::adjacent_find(devices.begin(), devices.end()) == devices.end();
}

// The reducers of this process, each with its communicators. They take long to set up, are as much
// a property of the machine as its streams are, and NCCL wants few: so one for each device list and
// options, for ever. Like libtorch's own state of CUDA it is never destroyed, for at the end of a
// process CUDA may be gone before it. Thread-safe.
class Reducers {
 public:
  absl::StatusOr<std::shared_ptr<Reducer>> Get(std::vector<c10::Device> devices,
                                               ReducerOptions options) {
    std::string key =
        absl::StrCat(options.bucket_bytes, " ", absl::FormatDuration(options.timeout));
    for (const c10::Device device : devices) absl::StrAppend(&key, " ", device.str());
    absl::MutexLock lock(&mu_);
    std::shared_ptr<NcclReducer>& reducer = by_key_[key];
    if (reducer == nullptr || !reducer->status().ok()) {
      reducer = nullptr;
      DG_ASSIGN_OR_RETURN(reducer, NcclReducer::Create(std::move(devices), options,
                                                       [](const std::vector<c10::Device>& list) {
                                                         return StartNcclGroup(list);
                                                       }));
    }
    return reducer;
  }

 private:
  absl::Mutex mu_;  // also while one is set up: NCCL takes no two at a time on the same devices
  std::map<std::string, std::shared_ptr<NcclReducer>> by_key_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::shared_ptr<Reducer>> NewReducer(std::vector<c10::Device> devices,
                                                    ReducerOptions options) {
  if (devices.empty()) return absl::InvalidArgumentError("a reducer needs devices");
  static Reducers* const reducers = new Reducers;
  if (AreDistinctGpus(devices)) return reducers->Get(std::move(devices), options);
  return std::make_shared<CoalescedReducer>(std::move(devices), options);
}

}  // namespace distgrad
