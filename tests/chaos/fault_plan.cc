// Draws kinds, places and times.
#include "tests/chaos/fault_plan.h"

#include <utility>

#include "tests/chaos/cable_faults.h"
#include "tests/chaos/process_faults.h"
#include "tests/chaos/resource_faults.h"

namespace distgrad {

FaultPlan::FaultPlan(ChaosJob* job, uint64_t seed)
    : job_(job),
      random_(seed),
      kinds_({&FaultPlan::Kill, &FaultPlan::KillStore, &FaultPlan::Stop, &FaultPlan::StopLong,
              &FaultPlan::Descriptors, &FaultPlan::Memory}) {
  if (job->hosts() == 1) return;
  for (const Make make :
       {&FaultPlan::Cut, &FaultPlan::CutLong, &FaultPlan::CutHalf, &FaultPlan::CutHalfLong,
        &FaultPlan::Slow, &FaultPlan::Corrupt, &FaultPlan::Disk}) {
    kinds_.push_back(make);
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
  return is_long ? Between(limit, 1.5 * limit) : Between(absl::Milliseconds(100), 0.5 * limit);
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
