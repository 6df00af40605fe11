// The calls that one step of a pipeline makes. Private to core/pipeline.
#ifndef DISTGRAD_CORE_PIPELINE_STEP_CALLS_H_
#define DISTGRAD_CORE_PIPELINE_STEP_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/base/cancellation.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/pipeline/step_plan.h"
#include "core/worker/worker.h"

namespace distgrad {

// Makes calls, of which the first that fails cancels all others: with its status, which the
// cancellation keeps. For one thread at a time.
class StepCalls {
 public:
  // The worker must outlive it.
  StepCalls(Worker* worker, std::string pipeline, Deadline deadline,
            std::shared_ptr<Cancellation> cancellation)
      : worker_(worker),
        pipeline_(std::move(pipeline)),
        deadline_(deadline),
        cancellation_(std::move(cancellation)),
        ended_(absl::CancelledError("the step of the pipeline has ended")) {}
  // Cancels those that are still in flight, and waits for their ends.
  ~StepCalls();
  StepCalls(const StepCalls&) = delete;
  StepCalls& operator=(const StepCalls&) = delete;

  // Calls one of the functions of step_plan.h. `what` says what is being done, for errors.
  Future<Message> Make(const std::string& to, absl::string_view function, const Message& message,
                       std::string what, const Context* context = nullptr);

  // Delivers a parcel. Waits while as much is on its way to that worker as it may take at once: a
  // batch may be larger than Limits::bytes_per_peer, but not what one parcel has.
  void Deliver(const std::string& to, const Parcel& parcel, std::vector<at::Tensor> tensors,
               std::string what);

  // Waits for the answers to all that were made. Returns the first error. Does not throw.
  absl::Status Wait();

 private:
  struct Parcels {
    std::deque<std::pair<Future<Message>, uint64_t>> in_flight;  // the oldest first; with its bytes
    uint64_t bytes = 0;
  };

  // Waits for the end of one that is on its way to that worker; false if there is none.
  bool AwaitParcel(const std::string& to);

  Worker* const worker_;
  const std::string pipeline_;
  const Deadline deadline_;
  const std::shared_ptr<Cancellation> cancellation_;
  const absl::Status ended_;  // made before there may be no memory for it
  std::vector<std::pair<Future<Message>, std::string>> calls_;  // with what is being done
  std::map<std::string, Parcels> parcels_;                      // by worker
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STEP_CALLS_H_
