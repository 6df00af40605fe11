#include "core/base/thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "core/base/check.h"

namespace distgrad {

std::thread StartThread(std::string name, absl::AnyInvocable<void()> fn) {
  constexpr size_t kKernelLimit = 15;
  if (name.size() > kKernelLimit) name.resize(kKernelLimit);
  try {
    return std::thread([name, fn = std::move(fn)]() mutable {
      pthread_setname_np(pthread_self(), name.c_str());
      fn();
      fn = nullptr;  // what it owns goes while the thread still has its name
    });
  } catch (const std::system_error& error) {
    DG_CHECK(false) << "no thread for " << name << ": " << error.what();
  }
  return {};
}

}  // namespace distgrad
