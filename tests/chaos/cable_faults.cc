// Sets what the switch does.
#include "tests/chaos/cable_faults.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

// From the host, and to it.
void Set(ChaosJob* job, int host, const CableSettings& from, const CableSettings& to) {
  for (int other = 0; other < job->hosts(); ++other) {
    if (other == host) continue;
    job->cables()->Set(host, other, from);
    job->cables()->Set(other, host, to);
  }
}

Fault OfCable(ChaosJob* job, int host, const std::string& kind, const CableSettings& from,
              const CableSettings& to, absl::Duration lasts) {
  Fault fault;
  fault.kind = kind;
  fault.where = absl::StrCat("host ", host, ", for ", absl::FormatDuration(lasts));
  fault.begin = [=] {
    Set(job, host, from, to);
    return absl::OkStatus();
  };
  fault.lasts = lasts;
  fault.end = [=] {
    Set(job, host, {}, {});
    return absl::OkStatus();
  };
  return fault;
}

// One that may keep the workers of the host from being heard for too long.
Fault Silence(ChaosJob* job, int host, const std::string& kind, const std::string& longer,
              const CableSettings& from, const CableSettings& to, absl::Duration lasts) {
  const bool is_long = lasts > job->heartbeat_limit();
  Fault fault = OfCable(job, host, is_long ? longer : kind, from, to, lasts);
  for (int worker = 0; is_long && worker < job->workers(); ++worker) {
    if (job->HostOf(worker) == host) fault.silent.insert(worker);
  }
  return fault;
}

}  // namespace

Fault CutCable(ChaosJob* job, int host, absl::Duration lasts) {
  return Silence(job, host, "a cable is cut for less than the heartbeats allow",
                 "a cable is cut for longer", {.cut = true}, {.cut = true}, lasts);
}

Fault CutOneWay(ChaosJob* job, int host, bool is_deaf, absl::Duration lasts) {
  return Silence(job, host, "a cable carries one way only, for less",
                 "a cable carries one way only, for longer", {.cut = !is_deaf}, {.cut = is_deaf},
                 lasts);
}

Fault SlowCable(ChaosJob* job, int host, int delay_ms, int64_t bytes_per_second,
                absl::Duration lasts) {
  const CableSettings slow = {.delay_ms = delay_ms, .bytes_per_second = bytes_per_second};
  Fault fault = OfCable(job, host, "a cable is slow", slow, slow, lasts);
  absl::StrAppend(&fault.where, ", ", delay_ms, " ms and ", bytes_per_second, " bytes/s");
  return fault;
}

Fault CorruptingCable(ChaosJob* job, int host, int percent, absl::Duration lasts) {
  const CableSettings corrupt = {.corrupt_percent = percent};
  Fault fault = OfCable(job, host, "a cable changes bytes", corrupt, corrupt, lasts);
  absl::StrAppend(&fault.where, ", in ", percent, " % of its frames");
  fault.lasts_until_effect = true;
  fault.effect = [job, before = job->cables()->corrupted()] {
    return job->cables()->corrupted() > before;
  };
  return fault;
}

}  // namespace distgrad
