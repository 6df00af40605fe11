// Draws kinds, places and times.
#include "tests/chaos/fault_plan.h"

#include <algorithm>
#include <utility>

#include "tests/chaos/cable_faults.h"
#include "tests/chaos/process_faults.h"
#include "tests/chaos/resource_faults.h"

namespace distgrad {

const std::vector<FaultPlan::Kind>& FaultPlan::Kinds() {
  static const auto* const kinds =
      new std::vector<Kind>({{"kill", false, &FaultPlan::Kill},
                             {"kill-store", false, &FaultPlan::KillStore},
                             {"stop", false, &FaultPlan::Stop},
                             {"stop-long", false, &FaultPlan::StopLong},
                             {"descriptors", false, &FaultPlan::Descriptors},
                             {"memory", false, &FaultPlan::Memory},
                             {"cut", true, &FaultPlan::Cut},
                             {"cut-long", true, &FaultPlan::CutLong},
                             {"one-way", true, &FaultPlan::CutHalf},
                             {"one-way-long", true, &FaultPlan::CutHalfLong},
                             {"slow", true, &FaultPlan::Slow},
                             {"corrupt", true, &FaultPlan::Corrupt},
                             {"disk", true, &FaultPlan::Disk}});
  return *kinds;
}

std::vector<std::string> FaultPlan::Names() {
  std::vector<std::string> names;
  for (const Kind& kind : Kinds()) names.emplace_back(kind.name);
  return names;
}

FaultPlan::FaultPlan(ChaosJob* job, uint64_t seed, const std::vector<std::string>& only)
    : job_(job), random_(seed) {
  for (const Kind& kind : Kinds()) {
    if (kind.needs_hosts && job->hosts() == 1) continue;
    const bool is_wanted =
        only.empty() || std::find(only.begin(), only.end(), kind.name) != only.end();
    if (is_wanted) kinds_.push_back(kind.make);
  }
}

Fault FaultPlan::Next() {
  const size_t place = next_++ % kinds_.size();
  if (place == 0) {
    for (size_t i = kinds_.size() - 1; i > 0; --i) std::swap(kinds_[i], kinds_[Below(i + 1)]);
  }
  return (this->*kinds_[place])();
}

absl::Duration FaultPlan::NextMoment() {
  return Between(absl::Milliseconds(20), absl::Milliseconds(400));
}

absl::Duration FaultPlan::Between(absl::Duration least, absl::Duration most) {
  return least + absl::Milliseconds(Below(absl::ToInt64Milliseconds(most - least) + 1));
}

absl::Duration FaultPlan::Silence(bool is_long) {
  const absl::Duration limit = job_->heartbeat_limit();
  return is_long ? Between(1.2 * limit, 1.7 * limit)
                 : Between(absl::Milliseconds(100), 0.5 * limit);
}

Fault FaultPlan::Kill() {
  return KilledWorker(job_, 1 + static_cast<int>(Below(job_->workers() - 1)));
}
Fault FaultPlan::KillStore() { return KilledWorker(job_, 0); }
Fault FaultPlan::Stop() { return StoppedWorker(job_, AnyWorker(), Silence(false)); }
Fault FaultPlan::StopLong() { return StoppedWorker(job_, AnyWorker(), Silence(true)); }
Fault FaultPlan::Cut() { return CutCable(job_, AnyHost(), Silence(false)); }
Fault FaultPlan::CutLong() { return CutCable(job_, AnyHost(), Silence(true)); }
Fault FaultPlan::CutHalf() { return CutOneWay(job_, AnyHost(), Below(2) == 0, Silence(false)); }
Fault FaultPlan::CutHalfLong() { return CutOneWay(job_, AnyHost(), Below(2) == 0, Silence(true)); }
Fault FaultPlan::Slow() {
  const int delay_ms = 1 + static_cast<int>(Below(50));
  const int64_t bytes_per_second = 100'000 + static_cast<int64_t>(Below(1'000'000));
  return SlowCable(job_, AnyHost(), delay_ms, bytes_per_second,
                   Between(absl::Milliseconds(300), absl::Milliseconds(1500)));
}
Fault FaultPlan::Corrupt() {
  return CorruptingCable(job_, AnyHost(), 1 + static_cast<int>(Below(20)),
                         Between(absl::Milliseconds(300), absl::Milliseconds(1000)));
}
Fault FaultPlan::Disk() {
  return FullDisk(job_, Between(absl::Milliseconds(300), absl::Milliseconds(1000)));
}
Fault FaultPlan::Descriptors() {
  return NoDescriptorsLeft(job_, AnyWorker(),
                           Between(absl::Milliseconds(300), absl::Milliseconds(1000)));
}
Fault FaultPlan::Memory() {
  return NoMemoryLeft(job_, AnyWorker(), Between(absl::Milliseconds(100), absl::Milliseconds(500)));
}

}  // namespace distgrad
