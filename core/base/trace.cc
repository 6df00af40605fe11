// Records spans into a bounded list while a trace runs.
#include "core/base/trace.h"

#include <new>
#include <utility>

namespace distgrad {
namespace {

size_t BytesOf(const TraceSpan& span) {
  return sizeof(span) + span.function.capacity() + span.status.message().size();
}

}  // namespace

absl::Status TraceRecorder::Start(const TraceOptions& options, absl::Time now) {
  absl::MutexLock lock(&mu_);
  if (on()) return absl::FailedPreconditionError("a trace runs already");
  options_ = options;
  bytes_ = 0;
  trace_.begin = now;
  on_.store(true, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<Trace> TraceRecorder::Stop(absl::Time now) {
  absl::MutexLock lock(&mu_);
  if (!on()) return absl::FailedPreconditionError("no trace runs");
  on_.store(false, std::memory_order_relaxed);
  trace_.end = now;
  return std::exchange(trace_, Trace());
}

void TraceRecorder::End(std::unique_ptr<TraceSpan> span, absl::Time end,
                        const absl::Status& status) {
  if (span == nullptr) return;
  span->end = end;
  span->status = status;
  absl::MutexLock lock(&mu_);
  if (!on() || span->begin < trace_.begin) return;
  const size_t bytes = BytesOf(*span);
  if (bytes > options_.max_bytes - bytes_) {
    ++trace_.dropped;
    return;
  }
  try {
    trace_.spans.push_back(*std::move(span));
    bytes_ += bytes;
  } catch (const std::bad_alloc&) {  // what was traced is not to fail for it
    ++trace_.dropped;
  }
}

}  // namespace distgrad
