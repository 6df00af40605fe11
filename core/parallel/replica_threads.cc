// Runs one task for each replica, the first on the caller's thread.
#include "core/parallel/replica_threads.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "core/base/blocking.h"
#include "core/parallel/devices.h"

namespace distgrad {
namespace {

[[noreturn]] void RethrowNaming(const std::exception_ptr& exception, const std::string& where) {
  try {
    std::rethrow_exception(exception);
  } catch (c10::Error& error) {
    error.add_context(where);
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(std::runtime_error(absl::StrCat(where, ": ", error.what())));
  } catch (...) {
    std::throw_with_nested(
        std::runtime_error(absl::StrCat(where, ": threw what is not a std::exception")));
  }
}

}  // namespace

ReplicaThreads::ReplicaThreads(std::vector<c10::Device> devices)
    : devices_(std::move(devices)), pool_("dg-replica", std::max<size_t>(devices_.size(), 2) - 1) {}

void ReplicaThreads::Run(size_t count, absl::FunctionRef<void(size_t)> work) {
  const std::vector<c10::Stream> streams = CurrentStreams(devices_);
  std::vector<std::exception_ptr> errors(count);
  const auto run = [&](size_t i) {
    try {
      const c10::MultiStreamGuard on_streams(streams);
      const c10::DeviceGuard on_device(devices_[i]);
      work(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  if (count > 1) {
    const at::ThreadLocalState state;
    absl::BlockingCounter left(static_cast<int>(count - 1));
    for (size_t i = 1; i < count; ++i) {
      const auto run_as_caller = [&, i] {
        try {
          const at::ThreadLocalStateGuard as_caller(state);
          run(i);
        } catch (...) {  // there is no memory for the state
          errors[i] = std::current_exception();
        }
        left.DecrementCount();
      };
      // Without another thread they run one after the other; and those that run already use what
      // this function has.
      bool scheduled = false;
      try {
        scheduled = pool_.Schedule(run_as_caller);
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): as where there is none
      }
      if (!scheduled) run_as_caller();
    }
    run(0);
    const BlockingScope blocking;
    left.Wait();
  } else if (count == 1) {
    run(0);
  }
  for (size_t i = 0; i < count; ++i) {
    if (errors[i] == nullptr) continue;
    // What a later replica threw is let go here, on this thread.
    const std::exception_ptr first = std::exchange(errors[i], nullptr);
    errors.clear();
    RethrowNaming(first, absl::StrCat("in replica ", i, " of ", count, ", on ", devices_[i].str()));
  }
}

}  // namespace distgrad
