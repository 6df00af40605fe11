// What a worker does in the tests of launchers: joins the job in which it was started, calls all
// workers, and waits for them.
#ifndef DISTGRAD_TESTS_LAUNCHERS_LAUNCHED_WORKER_H_
#define DISTGRAD_TESTS_LAUNCHERS_LAUNCHED_WORKER_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "core/worker/worker.h"

namespace distgrad {

// Its place comes from the environment alone. Says "rank 0 of 2, local 0 of 2, called 2" on
// standard output at the end. `joined` is called when all workers have come.
absl::Status RunLaunchedWorker(const std::function<absl::Status(const Worker&)>& joined);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_LAUNCHERS_LAUNCHED_WORKER_H_
