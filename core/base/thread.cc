// Starts a named thread, and says so where the machine gives none.
#include "core/base/thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace distgrad {

absl::StatusOr<std::thread> StartThread(std::string name, absl::AnyInvocable<void()> fn) {
  constexpr size_t kKernelLimit = 15;
  if (name.size() > kKernelLimit) name.resize(kKernelLimit);
  try {
    return std::thread([name, fn = std::move(fn)]() mutable {
      pthread_setname_np(pthread_self(), name.c_str());
      fn();
      fn = nullptr;  // what it owns goes while the thread still has its name
    });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread for '", name, "' is to be had: ", error.what(),
                     "; see ulimit -u and the limits of the container on processes"));
  }
}

}  // namespace distgrad
