// The order in which nodes run, and how they get from one thread to another.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_LANE_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_LANE_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/executor/graph.h"
#include "core/base/thread_pool.h"

namespace distgrad {

struct ReadyNode {
  uint64_t sequence_nr;
  Graph::Index node;
};

// The ready nodes of one thread, in libtorch's order: the one made last in forward comes first,
// leaves, and stops, before all. Not thread-safe.
class ReadyHeap {
 public:
  bool empty() const { return heap_.empty(); }

  void Push(ReadyNode node) {
    heap_.push_back(node);
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }

  Graph::Index Pop() {
    std::pop_heap(heap_.begin(), heap_.end(), Later);
    const Graph::Index node = heap_.back().node;
    heap_.pop_back();
    return node;
  }

 private:
  static bool Later(const ReadyNode& a, const ReadyNode& b) {
    return a.sequence_nr < b.sequence_nr;
  }

  std::vector<ReadyNode> heap_;
};

// Nodes of one execution that others hand to a thread that runs one after the other. Such a
// runner is in flight exactly while there is something to run. Thread-safe.
class Lane {
 public:
  explicit Lane(ThreadPool* threads) : threads_(threads) {}

  // The threads whose task the runner is.
  ThreadPool* threads() const { return threads_; }

  // Hands a node over. True if the caller has to start the runner.
  bool Put(ReadyNode node) {
    absl::MutexLock lock(&mu_);
    arrived_.push_back(node);
    return !std::exchange(has_runner_, true);
  }

  // Takes in what has arrived; for the runner. False if there is nothing left, and then the runner
  // is none any more.
  bool Refill(ReadyHeap* ready) {
    absl::MutexLock lock(&mu_);
    for (const ReadyNode& node : arrived_) ready->Push(node);
    arrived_.clear();
    return has_runner_ = !ready->empty();
  }

 private:
  ThreadPool* const threads_;

  absl::Mutex mu_;
  std::vector<ReadyNode> arrived_ ABSL_GUARDED_BY(mu_);
  bool has_runner_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_LANE_H_
