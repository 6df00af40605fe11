// What a worker of the soak asks of the others: a mixed load, at a bounded rate, on threads of its
// own. Every result is compared with what it must be, and every error with what may be.
#ifndef DISTGRAD_TESTS_SOAK_LOAD_H_
#define DISTGRAD_TESTS_SOAK_LOAD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/worker/worker.h"
#include "tests/soak/functions.h"

namespace distgrad {

// Later than this no deadline fires and no cancel is heard, however busy the machine.
constexpr absl::Duration kLatest = absl::Seconds(10);
// Longer than that nothing takes: it would be for ever.
constexpr absl::Duration kHangs = absl::Seconds(90);

// Of one kind of work.
struct WorkCount {
  uint64_t done = 0;     // with the right result, or with the error that it must have
  uint64_t excused = 0;  // it met a worker that was gone
  absl::Duration longest = absl::ZeroDuration();
};

// In microseconds: of a small call, and of one byte there and back between two threads of this
// process, which tells how busy the machine was.
struct Latencies {
  std::vector<double> call;
  std::vector<double> pipe;
};

// Thread-safe.
class Load {
 public:
  using Random = std::mt19937_64;
  // Says what went wrong. On any thread.
  using Fail = std::function<void(const std::string&)>;

  // Both outlive it. Where that fails in the end, it says so and goes on.
  Load(Worker* worker, const Optimizers* optimizers, uint64_t seed, Fail fail);
  ~Load() { Stop(); }

  // All that there are.
  static std::vector<std::string> KindsOfWork();

  // Waits until everything that was begun has ended.
  void Stop();

  std::map<std::string, WorkCount> counts() const;
  // How late the latest deadline was.
  absl::Duration latest() const;
  // Since the last time.
  Latencies TakeLatencies();
  // False, and says so, where a thread has been at one thing for longer than kHangs.
  bool CheckThatNothingHangs();

 private:
  // One thing that is done.
  struct Work {
    Random& random;
    bool transient = false;  // it involves a worker that may be gone
  };
  struct Kind {
    const char* name;
    int weight;  // how often, of all
    absl::Status (Load::*run)(Work& work);
  };
  static const std::vector<Kind> kKinds;

  // Makes this worker's pool of threads as large as it will be, for it keeps some of those that it
  // has needed; who lasts does that to the others, too, for the threads between them.
  absl::Status FillPools();
  void RunMix(int thread);
  void RunPings();
  void RunTraining();
  void RunPair();
  // Does it, times it and judges its result.
  void Do(const char* kind, Random& random, const std::function<absl::Status(Work&)>& run);
  // False when all is to end.
  bool Pause(absl::Duration duration);

  absl::Status Small(Work& work);
  absl::Status Large(Work& work);
  absl::Status Many(Work& work);
  absl::Status Operator(Work& work);
  absl::Status Nested(Work& work);
  absl::Status Expires(Work& work);
  absl::Status ExpiresSoon(Work& work);
  absl::Status Cancelled(Work& work);
  absl::Status Fails(Work& work);
  absl::Status Unknown(Work& work);
  absl::Status Pass(Work& work);
  absl::Status PassGivenUp(Work& work);
  absl::Status TrainingStep(Work& work, int64_t step);
  // With the other who lasts. `ends`: one of the two is to stop.
  absl::Status Average(bool* ends);

  // One of the members.
  std::string Any(Work& work);
  std::vector<std::string> Path(Work& work);
  // A call that waits for ever, perhaps by way of others.
  Future<Message> CallWait(Work& work, CallOptions options);
  // Sends a tensor through "scale" of all of them.
  absl::StatusOr<at::Tensor> Scale(Context& context, const std::vector<std::string>& path,
                                   const at::Tensor& x);
  // Learns a worker's weight, and checks that it is what the steps so far have made of it.
  absl::Status Sync(const std::string& worker);

  Worker* const worker_;
  const Optimizers* const optimizers_;
  const uint64_t seed_;
  const Fail fail_;
  const std::string other_;  // whom it pings: one who lasts
  const bool leads_;

  absl::Notification stop_;

  // Of the thread that trains: what each worker's weight may be, one after a step that ended well.
  std::map<std::string, std::vector<at::Tensor>> weights_;

  struct Current {
    const char* kind;
    absl::Time since;
  };
  mutable absl::Mutex mu_;
  std::map<std::string, WorkCount> counts_ ABSL_GUARDED_BY(mu_);
  absl::Duration latest_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();
  Latencies latencies_ ABSL_GUARDED_BY(mu_);
  std::map<std::thread::id, Current> current_ ABSL_GUARDED_BY(mu_);

  std::vector<std::thread> threads_;  // goes first
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SOAK_LOAD_H_
