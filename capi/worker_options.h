// The options of a worker, from C.
#ifndef DISTGRAD_CAPI_WORKER_OPTIONS_H_
#define DISTGRAD_CAPI_WORKER_OPTIONS_H_

#include "absl/status/statusor.h"
#include "capi/include/distgrad/distgrad.h"
#include "core/worker/worker_options.h"

namespace distgrad {

// Returns kInvalidArgument for what makes no sense whatever the environment says, kUnimplemented
// for what this library does not know. `given` may be null: all is default.
absl::StatusOr<WorkerOptions> ToWorkerOptions(const dg_worker_options* given);

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_WORKER_OPTIONS_H_
