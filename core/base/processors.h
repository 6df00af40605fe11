// How many processors there are for this process, which may be fewer than the machine has.
#ifndef DISTGRAD_CORE_BASE_PROCESSORS_H_
#define DISTGRAD_CORE_BASE_PROCESSORS_H_

#include <string>

namespace distgrad {

// How many threads of this process can run at the same time: by the machine, by the calling
// thread's affinity mask, which cpusets narrow, and by the quota of its control groups, as a
// container has it. At least 1; a part of a processor does not count.
int UsableProcessors();

// How many processors the quotas of this process's control groups pay for; infinite where none
// does. Of version 1 and 2, in /proc and /sys/fs below `root`, which is "" but in tests.
double ControlGroupQuota(const std::string& root);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_PROCESSORS_H_
