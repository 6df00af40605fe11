// Faults of processes. The job outlives them.
#ifndef DISTGRAD_TESTS_CHAOS_PROCESS_FAULTS_H_
#define DISTGRAD_TESTS_CHAOS_PROCESS_FAULTS_H_

#include "absl/time/time.h"
#include "tests/chaos/fault.h"
#include "tests/chaos/job.h"

namespace distgrad {

// By SIGKILL. The one that serves the store is a kind of its own, for it ends the job.
Fault KilledWorker(ChaosJob* job, int worker);
// By SIGSTOP.
Fault StoppedWorker(ChaosJob* job, int worker, absl::Duration lasts);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_PROCESS_FAULTS_H_
