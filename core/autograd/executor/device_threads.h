// The threads for nodes that the thread which feeds a graph cannot run itself: one for each
// accelerator, and a pool for nodes of the CPU that become ready on such a thread.
//
// Nodes of one device share a thread, as in libtorch: launching kernels from several threads
// gains nothing, and a node that waits for its device (to read a value) holds up no other
// device's.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_DEVICE_THREADS_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_DEVICE_THREADS_H_

#include <c10/core/Device.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/thread_pool.h"

namespace distgrad {

// Thread-safe. Destroying it waits for the threads; no execution may be running then.
class DeviceThreads {
 public:
  // Both must outlive this.
  DeviceThreads(ThreadPool* cpu, Clock* clock) : cpu_(cpu), clock_(clock) {}
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  ThreadPool* cpu() const { return cpu_; }
  // The one thread of an accelerator, started when first asked for. The pool lives as long as
  // this.
  ThreadPool* Of(c10::Device device);

  // Ends the threads once they have run the nodes that they have; they take no more. False if the
  // deadline has passed before that. Must not be called on one of them.
  bool Join(Deadline deadline);
  bool OnThese() const;
  // How many there are that have not ended.
  size_t thread_count() const;

 private:
  std::vector<ThreadPool*> All() const;

  ThreadPool* const cpu_;
  Clock* const clock_;

  mutable absl::Mutex mu_;
  std::unordered_map<c10::Device, std::unique_ptr<ThreadPool>> devices_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_DEVICE_THREADS_H_
