// Runs the same work for several replicas at the same time.
#ifndef DISTGRAD_CORE_PARALLEL_REPLICA_THREADS_H_
#define DISTGRAD_CORE_PARALLEL_REPLICA_THREADS_H_

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "core/base/thread_pool.h"

namespace distgrad {

// One thread for each replica but the first, whose work the caller does. They are started when
// first needed and joined by the destructor. Thread-safe.
class ReplicaThreads {
 public:
  // devices[i] is the i-th replica's.
  explicit ReplicaThreads(std::vector<c10::Device> devices);

  // Calls work(i) for the first `count` replicas, and returns when all have ended. Each sees its
  // device as the current one, the caller's current streams, and the caller's thread-local state:
  // grad mode, inference mode, autocast, hooks for saved tensors, profiling.
  //
  // The exception of the first one by order is thrown again: a c10::Error is the same object with
  // the replica and the device added to its message, anything else a std::runtime_error that has
  // them and nests it. All the others have ended by then, too.
  void Run(size_t count, absl::FunctionRef<void(size_t)> work);

 private:
  // Constant after construction.
  const std::vector<c10::Device> devices_;

  ThreadPool pool_;  // synchronizes itself
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_REPLICA_THREADS_H_
