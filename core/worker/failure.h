// Tells the launcher that started a process why it fails.
//
//   int main() {
//     const absl::Status status = Train();
//     if (!status.ok()) distgrad::ReportFailure(status).IgnoreError();
//     return status.ok() ? 0 : 1;
//   }
#ifndef DISTGRAD_CORE_WORKER_FAILURE_H_
#define DISTGRAD_CORE_WORKER_FAILURE_H_

#include "absl/status/status.h"

namespace distgrad {

// Writes `failure` into the file that TORCHELASTIC_ERROR_FILE names, as torchrun reads it: its
// summary then shows the code and the message instead of the exit status alone. The first failure
// of a process stays. kUnavailable and kCancelled, which tell what another worker's failure has
// brought about, are dated two seconds later, so that torchrun shows that worker's report as the
// cause. Does nothing where the variable is not set, as without torchrun. Returns the system's
// error if the file cannot be written.
absl::Status ReportFailure(const absl::Status& failure);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_FAILURE_H_
