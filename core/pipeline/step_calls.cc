// Makes the calls of a step, keeps what is on its way within limits, and hears of the first error.
#include "core/pipeline/step_calls.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

uint64_t SizeOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  // A sparse one has no size to ask for.
  if (tensor.is_sparse()) return tensor._indices().nbytes() + tensor._values().nbytes();
  return tensor.nbytes();
}

// About what a parcel takes on its way.
uint64_t SizeOf(const Message& message) {
  uint64_t size = message.payload.size();
  for (const at::Tensor& tensor : message.tensors) size += SizeOf(tensor);
  return size;
}

// Annotates an error; leaves it as it is where there is no memory for that.
absl::Status Explained(const absl::Status& error, const std::string& what) {
  try {
    return Annotate(error, what);
  } catch (const std::bad_alloc&) {
    return error;
  }
}

bool IsFull(const Future<Message>& call) {
  return call.Done() && absl::IsResourceExhausted(call.Wait().status());
}

}  // namespace

StepCalls::~StepCalls() {
  cancellation_->Cancel(ended_);
  Wait().IgnoreError();
}

Future<Message> StepCalls::Make(const std::string& to, absl::string_view function,
                                const Message& message, std::string what, const Context* context) {
  const std::string name = absl::StrCat(function, pipeline_);
  // Before the call is made, so that none is in flight of which this does not know.
  Future<Message>& made = calls_.emplace_back(Future<Message>(), what).first;
  CallOptions options{.context = context, .deadline = deadline_, .cancellation = cancellation_};
  Future<Message> future = made = worker_->CallAsync(to, name, message, options);
  // Others' messages fill the way to that worker. A call that waits for its answer waits for
  // credit, too; and all are answered at once, but for the one that runs a step: its answer is the
  // step's end, which may need what is sent after it. In its place one waits that asks about the
  // step.
  for (int tries = 0; tries < 100 && IsFull(future); ++tries) {
    if (function == kRunStep) {
      const absl::Status asked =
          worker_->Call(to, absl::StrCat(kDescribe, pipeline_), message, options).status();
      if (absl::IsResourceExhausted(asked) && !AwaitParcel(to)) break;
      future = made = worker_->CallAsync(to, name, message, options);
    } else {
      future = made = Future<Message>::Of(worker_->Call(to, name, message, options));
      // It is the number of calls that is full.
      if (IsFull(future) && !AwaitParcel(to)) break;
    }
  }
  future.Then([cancellation = cancellation_, what](const absl::StatusOr<Message>& reply) {
    if (!reply.ok()) cancellation->Cancel(Explained(reply.status(), what));
  });
  return future;
}

bool StepCalls::AwaitParcel(const std::string& to) {
  for (const auto& [call, size] : parcels_[to].in_flight) {
    if (call.Done()) continue;
    call.Wait();
    return true;
  }
  return false;
}

void StepCalls::Deliver(const std::string& to, const Parcel& parcel,
                        std::vector<at::Tensor> tensors, std::string what) {
  const Message message{EncodeParcel(parcel), std::move(tensors)};
  const uint64_t size = SizeOf(message);
  // What has left this worker may still wait there to be taken in, and counts there. The others,
  // with whom that has to be shared, are the driver and the ranks of this worker, and other calls.
  const Limits& limits = worker_->limits();
  const uint64_t most_bytes = limits.bytes_per_peer / 4;
  const size_t most_parcels = std::max<size_t>(limits.calls_per_peer / 4, 1);
  Parcels& own = parcels_[to];
  while (!own.in_flight.empty() &&
         (own.in_flight.front().first.Done() || own.in_flight.size() >= most_parcels ||
          own.bytes + size > most_bytes)) {
    own.in_flight.front().first.Wait();
    own.bytes -= own.in_flight.front().second;
    own.in_flight.pop_front();
  }
  own.in_flight.emplace_back(Make(to, kDeliver, message, std::move(what)), size);
  own.bytes += size;
}

absl::Status StepCalls::Wait() {
  for (const auto& [call, what] : std::exchange(calls_, {})) {
    if (!call.valid()) continue;  // could not be made
    const absl::StatusOr<Message>& reply = call.Wait();
    // Who waits may be faster than what the call's end sets off.
    if (!reply.ok()) cancellation_->Cancel(Explained(reply.status(), what));
  }
  return cancellation_->why();
}

}  // namespace distgrad
