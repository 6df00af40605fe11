// The numbers of what a worker has done so far. docs/metrics.md explains each.
#ifndef DISTGRAD_CORE_WORKER_METRICS_H_
#define DISTGRAD_CORE_WORKER_METRICS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/rpc/call_metrics.h"

namespace distgrad {

struct WorkerMetrics {
  std::string worker = {};                       // its name
  std::map<WorkerRank, std::string> names = {};  // of all workers, by rank

  // The calls by peer and function, each way. The engine's messages are under "(notices)".
  std::vector<CallStats> calls = {};
  std::map<WorkerRank, uint64_t> queued_bytes = {};  // that wait to be sent

  size_t contexts = 0;  // open
  uint64_t passes_ended = 0;
  uint64_t passes_failed = 0;  // of those
  uint64_t passes_in_flight = 0;
};

// Writes metrics in Prometheus' text format (version 0.0.4), all names with "distgrad_" and all
// with the label `worker`, which tells the workers of a process from each other.
std::string ToPrometheus(const WorkerMetrics& metrics);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_METRICS_H_
