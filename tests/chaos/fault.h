// One thing that goes wrong in a job, and is put right again.
#ifndef DISTGRAD_TESTS_CHAOS_FAULT_H_
#define DISTGRAD_TESTS_CHAOS_FAULT_H_

#include <functional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace distgrad {

struct Fault {
  std::string kind;   // a row of the table
  std::string where;  // for people: "worker 3", "host 1, for 400ms"
  std::function<absl::Status()> begin;
  absl::Duration lasts = absl::ZeroDuration();
  std::function<absl::Status()> end;

  // The worker that the first error has to name; -1: anyone, for the fault is between workers.
  int named = -1;
  // That worker's process may end of it. It is started again, as after a kill; the job is, if it
  // is the one that serves the store.
  bool may_end_process = false;
  // All others have to hear that the worker is lost.
  bool loses_worker = false;
  // Workers whom the others do not hear for longer than the heartbeats allow, so that one of them
  // has to be lost by one of the others, or the other way round, while it lasts; and it lasts until
  // then. Empty: it may go unnoticed.
  std::set<int> silent;
  // It lasts until it has had an effect: until `effect` says so, or, where there is none, until
  // something has failed. `again` takes meanwhile what the workers have given back.
  bool lasts_until_effect = false;
  std::function<bool()> effect;
  std::function<absl::Status()> again;
  // What it keeps from working is checkpoints: the job has recovered when one is saved again.
  bool is_of_checkpoints = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_FAULT_H_
