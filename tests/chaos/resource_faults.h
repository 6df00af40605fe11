// What a process or the machine runs out of. The job outlives them.
#ifndef DISTGRAD_TESTS_CHAOS_RESOURCE_FAULTS_H_
#define DISTGRAD_TESTS_CHAOS_RESOURCE_FAULTS_H_

#include "absl/time/time.h"
#include "tests/chaos/fault.h"
#include "tests/chaos/job.h"

namespace distgrad {

// The file system of the checkpoints, which has to be one of its own.
Fault FullDisk(ChaosJob* job, absl::Duration lasts);
// The worker may open none besides those that it has (RLIMIT_NOFILE).
Fault NoDescriptorsLeft(ChaosJob* job, int worker, absl::Duration lasts);
// The worker gets no memory from the system (RLIMIT_AS).
Fault NoMemoryLeft(ChaosJob* job, int worker, absl::Duration lasts);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_RESOURCE_FAULTS_H_
