// Counts a peer's calls against the limits, and cancels them.
#include "core/rpc/served_calls.h"

#include <new>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/check.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<Cancellation>> ServedCalls::Begin(uint64_t call, uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (closed_) return absl::CancelledError("the connection is closed");
  if (calls_.contains(call)) {
    return absl::AlreadyExistsError(absl::StrCat("call ", call, " is in flight already"));
  }
  if (calls_.size() >= limits_->calls_per_peer) {
    return absl::ResourceExhaustedError(
        absl::StrCat(calls_.size(),
                     " calls of this caller are in flight there; limit "
                     "calls_per_peer is ",
                     limits_->calls_per_peer));
  }
  if (!calls_.empty() &&
      (bytes > limits_->bytes_per_peer || bytes_ > limits_->bytes_per_peer - bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "calls of this caller with ", bytes_, " bytes are in flight there, and this one has ",
        bytes, "; limit bytes_per_peer is ", limits_->bytes_per_peer));
  }
  auto cancellation = std::make_shared<Cancellation>();
  // Before it is counted, as there may be no memory for it.
  const auto served = calls_.try_emplace(call, Served{bytes, cancellation}).first;
  if (total_->fetch_add(1) >= limits_->calls) {
    total_->fetch_sub(1);
    calls_.erase(served);
    return absl::ResourceExhaustedError(
        absl::StrCat("too many calls are in flight there; limit calls is ", limits_->calls));
  }
  bytes_ += bytes;
  return cancellation;
}

void ServedCalls::FreePlace(uint64_t call) {
  absl::MutexLock lock(&mu_);
  const auto found = calls_.find(call);
  DG_CHECK(found != calls_.end()) << "call " << call;
  bytes_ -= found->second.bytes;
  calls_.erase(found);
}

void ServedCalls::Cancel(uint64_t call, const absl::Status& why) {
  std::shared_ptr<Cancellation> cancellation;
  {
    absl::MutexLock lock(&mu_);
    const auto found = calls_.find(call);
    if (found == calls_.end()) return;
    cancellation = found->second.cancellation;
  }
  cancellation->Cancel(why);
}

void ServedCalls::Close(const absl::Status& why) {
  absl::InlinedVector<std::shared_ptr<Cancellation>, 8> cancellations;
  do {
    cancellations.clear();
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      try {
        cancellations.reserve(calls_.size());
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): some at a time, then
      }
      for (const auto& [call, served] : calls_) {
        if (cancellations.size() == cancellations.capacity()) break;
        if (!served.cancellation->cancelled()) cancellations.push_back(served.cancellation);
      }
    }
    for (const auto& cancellation : cancellations) cancellation->Cancel(why);
  } while (!cancellations.empty());
}

size_t ServedCalls::count() const {
  absl::MutexLock lock(&mu_);
  return calls_.size();
}

absl::Time ServedCalls::Now() const {
  absl::MutexLock lock(&mu_);
  return closed_ ? absl::InfinitePast() : clock_->Now();
}

}  // namespace distgrad
