// Sends signals.
#include "tests/chaos/process_faults.h"

#include <signal.h>

#include "absl/strings/str_cat.h"

namespace distgrad {

Fault KilledWorker(ChaosJob* job, int worker) {
  Fault fault;
  fault.kind = worker == 0 ? "the worker that serves the store is killed" : "a worker is killed";
  fault.where = absl::StrCat("worker ", worker);
  fault.begin = [job, worker] {
    job->Kill(worker);
    return absl::OkStatus();
  };
  fault.end = [] { return absl::OkStatus(); };  // whoever ended is started again
  fault.named = worker;
  fault.may_end_process = true;
  fault.loses_worker = true;
  return fault;
}

Fault StoppedWorker(ChaosJob* job, int worker, absl::Duration lasts) {
  Fault fault;
  const bool is_long = lasts > job->heartbeat_limit();
  fault.kind = is_long ? "a worker is stopped for longer"
                       : "a worker is stopped for less than the heartbeats allow";
  if (is_long) fault.silent = {worker};
  fault.where = absl::StrCat("worker ", worker, ", for ", absl::FormatDuration(lasts));
  fault.begin = [job, worker] {
    job->process(worker).Stop();
    return absl::OkStatus();
  };
  fault.lasts = lasts;
  fault.end = [job, worker] {
    job->process(worker).Signal(SIGCONT);
    return absl::OkStatus();
  };
  // Who is stopped hears nothing of the others, and may be the one that says so.
  fault.named = worker == 0 ? -1 : worker;
  return fault;
}

}  // namespace distgrad
