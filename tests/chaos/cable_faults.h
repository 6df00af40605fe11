// Faults of the cable between a host and all others. The job, which has several hosts, outlives
// them.
#ifndef DISTGRAD_TESTS_CHAOS_CABLE_FAULTS_H_
#define DISTGRAD_TESTS_CHAOS_CABLE_FAULTS_H_

#include <cstdint>

#include "absl/time/time.h"
#include "tests/chaos/fault.h"
#include "tests/chaos/job.h"

namespace distgrad {

// It carries nothing, and neither end is told.
Fault CutCable(ChaosJob* job, int host, absl::Duration lasts);
// The same in one direction: nobody hears the host, or it hears nobody.
Fault CutOneWay(ChaosJob* job, int host, bool is_deaf, absl::Duration lasts);
Fault SlowCable(ChaosJob* job, int host, int delay_ms, int64_t bytes_per_second,
                absl::Duration lasts);
// It changes bytes where TCP does not notice.
Fault CorruptingCable(ChaosJob* job, int host, int percent, absl::Duration lasts);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_CABLE_FAULTS_H_
