// Keeps the counters, a bounded number of them, and sums up the rest.
#include "core/rpc/call_metrics.h"

#include <algorithm>
#include <tuple>

namespace distgrad {

CallCounters* CallMetrics::Find(WorkerRank peer, bool served, absl::string_view function) {
  absl::MutexLock lock(&mu_);
  Table& table = tables_[uint32_t{peer} * 2 + (served ? 1 : 0)];
  auto found = table.find(function);
  if (found == table.end() && table.size() >= kNames) {
    // The first name too many makes the one entry more.
    function = kOther;
    found = table.find(function);
  }
  if (found == table.end()) {
    found = table.emplace(std::string(function), std::make_unique<CallCounters>()).first;
  }
  return found->second.get();
}

std::vector<CallStats> CallMetrics::Stats() const {
  std::vector<CallStats> all;
  absl::MutexLock lock(&mu_);
  for (const auto& [key, table] : tables_) {
    for (const auto& [function, counters] : table) {
      CallStats stats;
      stats.peer = static_cast<WorkerRank>(key / 2);
      stats.served = key % 2 == 1;
      stats.function = function;
      // In this order, so that no call ends before it began.
      const uint64_t ended = counters->ended.load(std::memory_order_acquire);
      stats.errors = counters->errors.load(std::memory_order_relaxed);
      stats.calls = counters->calls.load(std::memory_order_relaxed);
      stats.in_flight = stats.calls - std::min(stats.calls, ended);
      stats.bytes_sent = counters->bytes_sent.load(std::memory_order_relaxed);
      stats.bytes_received = counters->bytes_received.load(std::memory_order_relaxed);
      stats.queue_time = absl::Nanoseconds(counters->queue_ns.load(std::memory_order_relaxed));
      stats.run_time = absl::Nanoseconds(counters->run_ns.load(std::memory_order_relaxed));
      all.push_back(std::move(stats));
    }
  }
  std::sort(all.begin(), all.end(), [](const CallStats& a, const CallStats& b) {
    return std::tie(a.peer, a.served, a.function) < std::tie(b.peer, b.served, b.function);
  });
  return all;
}

}  // namespace distgrad
