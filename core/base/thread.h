// A thread with a name that ps, gdb and profilers show.
#ifndef DISTGRAD_CORE_BASE_THREAD_H_
#define DISTGRAD_CORE_BASE_THREAD_H_

#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace distgrad {

// Starts a thread that runs `fn`; the kernel keeps the first 15 bytes of `name`. The caller
// joins it. kResourceExhausted where the machine, the user or the container gives no more threads;
// then `fn` is destroyed unrun.
absl::StatusOr<std::thread> StartThread(std::string name, absl::AnyInvocable<void()> fn);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_THREAD_H_
