// Which faults a job meets, in which order: what a seed says, and nothing else.
#ifndef DISTGRAD_TESTS_CHAOS_FAULT_PLAN_H_
#define DISTGRAD_TESTS_CHAOS_FAULT_PLAN_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/chaos/fault.h"
#include "tests/chaos/job.h"

namespace distgrad {

// For one thread.
class FaultPlan {
 public:
  // The job outlives it. `only`: no other kinds than these, by their names in fault_plan.cc; empty:
  // all that the job's hosts can have.
  FaultPlan(ChaosJob* job, uint64_t seed, const std::vector<std::string>& only = {});

  // The names of all kinds.
  static std::vector<std::string> Names();

  // How many there are in a row in which each has come once.
  size_t cycle() const { return kinds_.size(); }
  Fault Next();
  // How long the job trains before the next one comes, which may be in any part of a step or of a
  // checkpoint.
  absl::Duration NextMoment();

 private:
  using Make = Fault (FaultPlan::*)();
  struct Kind {
    const char* name;
    bool needs_hosts;  // more than one
    Make make;
  };
  static const std::vector<Kind>& Kinds();

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  absl::Duration Between(absl::Duration least, absl::Duration most);
  // Of what peers notice only after a while: shorter or longer than that.
  absl::Duration Silence(bool is_long);
  int AnyWorker() { return static_cast<int>(Below(job_->workers())); }
  int AnyHost() { return static_cast<int>(Below(job_->hosts())); }

  Fault Kill();
  Fault KillStore();
  Fault Stop();
  Fault StopLong();
  Fault Cut();
  Fault CutLong();
  Fault CutHalf();
  Fault CutHalfLong();
  Fault Slow();
  Fault Corrupt();
  Fault Disk();
  Fault Descriptors();
  Fault Memory();

  ChaosJob* const job_;
  std::mt19937_64 random_;
  std::vector<Make> kinds_;
  size_t next_ = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_FAULT_PLAN_H_
