// Tells how long operations take, and notices one that takes too long while it does.
#ifndef DISTGRAD_TESTS_CHAOS_OPERATION_WATCH_H_
#define DISTGRAD_TESTS_CHAOS_OPERATION_WATCH_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace distgrad {

// It counts time in which this process runs: where that is stopped, or gets no processor, nobody
// can keep a bound. For one operation at a time.
class OperationWatch {
 public:
  // Calls `too_long` with the operation's name, once for each that takes longer than `bound`; on a
  // thread of its own.
  OperationWatch(absl::Duration bound, std::function<void(const std::string&)> too_long);
  ~OperationWatch();
  OperationWatch(const OperationWatch&) = delete;
  OperationWatch& operator=(const OperationWatch&) = delete;

  void Begin(std::string operation);
  // How long it took, to about kTick.
  absl::Duration End();

 private:
  static constexpr absl::Duration kTick = absl::Milliseconds(20);
  // A thread that wakes later than this did not run.
  static constexpr absl::Duration kLongestTick = absl::Milliseconds(200);

  void Run();

  const absl::Duration bound_;
  const std::function<void(const std::string&)> too_long_;
  absl::Notification stop_;

  absl::Mutex mu_;
  std::string operation_ ABSL_GUARDED_BY(mu_);  // "": none runs, or it was told of
  absl::Duration took_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // goes first
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_OPERATION_WATCH_H_
