// Orders streams, and watches what NCCL has left running.
#include "core/parallel/nccl/nccl_communicators.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/parallel/nccl/current_device.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// How soon a failure is noticed that nobody waits for.
constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);
// How much later than its deadline a collective ends that nobody can ask the devices about.
constexpr absl::Duration kGrace = absl::Seconds(1);
// Between two polls of whether a collective has gone to the streams: NCCL has nothing to wait on.
// It takes tens of microseconds, less than a sleep would, and so the first polls follow on each
// other.
constexpr int kPollsWithoutSleep = 64;
constexpr absl::Duration kReadyInterval = absl::Microseconds(50);

const c10::impl::DeviceGuardImplInterface& GuardOf(c10::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

}  // namespace

absl::Status NcclOrder::TakeTurn(const std::string& who, absl::Duration timeout) {
  const Deadline deadline = Deadline::After(timeout);
  absl::MutexLock lock(&mu_);
  const auto own = turns_.insert(turns_.end(), who);
  const auto is_first = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return turns_.begin() == own; };
  absl::Cleanup leave = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    turns_.erase(own);
    waiting_.WakeAll();
  };
  if (waiting_.Await(&mu_, absl::Condition(&is_first), deadline)) {
    std::move(leave).Cancel();
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(
      who, ": its turn did not come within ", absl::FormatDuration(timeout), ", as '",
      turns_.front(), "' has it; nothing was begun: call again, or with a longer time-out"));
}

void NcclOrder::GiveTurn() {
  absl::MutexLock lock(&mu_);
  turns_.pop_front();
  waiting_.WakeAll();
}

c10::Stream NcclOrder::StreamOf(c10::Device device) {
  absl::MutexLock lock(&mu_);
  const auto known = streams_.find(device.index());
  if (known != streams_.end()) return known->second;
  const c10::Stream stream =
      GuardOf(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  streams_.emplace(device.index(), stream);
  return stream;
}

absl::StatusOr<std::shared_ptr<NcclCommunicators>> NcclCommunicators::Create(
    std::vector<c10::Device> devices, absl::Duration timeout, NcclPlatform platform,
    std::shared_ptr<NcclOrder> order, Clock* clock, Clock* query_clock) {
  std::shared_ptr<NcclCommunicators> made;
  try {
    made.reset(new NcclCommunicators(std::move(devices), std::move(platform), std::move(order)));
    if (clock == nullptr) {
      DG_ASSIGN_OR_RETURN(made->own_clock_, NewSystemClock());
      DG_ASSIGN_OR_RETURN(made->own_query_clock_, NewSystemClock());
    }
    made->clock_ = clock != nullptr ? clock : made->own_clock_.get();
    made->query_clock_ = query_clock != nullptr ? query_clock
                         : clock != nullptr     ? clock
                                                : made->own_query_clock_.get();
    DG_ASSIGN_OR_RETURN(auto group, made->platform_.start(made->devices_));
    for (const c10::Device device : made->devices_) {
      made->streams_.push_back(made->order_->StreamOf(device));
    }
    {
      absl::MutexLock lock(&made->mu_);
      made->group_ = std::move(group);
    }
    DG_RETURN_IF_ERROR(made->AwaitReady("setting up", timeout));
    if (made->own_clock_ != nullptr) {
      MakeCurrentDevice(made->devices_[0], made->own_clock_.get());
    }
    return made;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()),
                    made != nullptr ? absl::string_view(made->name_) : "NCCL");
  }
}

NcclCommunicators::NcclCommunicators(std::vector<c10::Device> devices, NcclPlatform platform,
                                     std::shared_ptr<NcclOrder> order)
    : devices_(std::move(devices)),
      platform_(std::move(platform)),
      order_(std::move(order)),
      name_(NameOf(devices_)) {}

NcclCommunicators::Running::~Running() {
  while (!ends.empty()) {
    std::optional<OnDevice> on_device;
    if (ends.back().was_marked_for_recording()) on_device.emplace(ends.back().device());
    ends.pop_back();
  }
}

std::string NcclCommunicators::NameOf(const std::vector<c10::Device>& devices) {
  return absl::StrCat("NCCL over ",
                      absl::StrJoin(devices, ", ", [](std::string* out, c10::Device device) {
                        out->append(device.str());
                      }));
}

NcclCommunicators::~NcclCommunicators() {
  while (true) {
    QueryUntilOneRuns();
    {
      absl::MutexLock lock(&mu_);
      Check();
      if (running_.empty()) break;
    }
    // Not a wait on the event: a collective that hangs would hang us too.
    absl::SleepFor(kReadyInterval);
  }
  absl::MutexLock lock(&mu_);
  if (watched_ && clock_->Cancel(watch_)) watched_ = false;
  if (queried_ && query_clock_->Cancel(query_)) queried_ = false;
  const auto no_timer = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !watched_ && !queried_; };
  mu_.Await(absl::Condition(&no_timer));
}

absl::Status NcclCommunicators::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

absl::Status NcclCommunicators::MayBegin(const std::string& what) const {
  DG_RETURN_IF_ERROR(status());
  try {
    for (const c10::Device device : devices_) {
      if (!platform_.is_capturing(GuardOf(device).getStream(device))) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          name_, ": ", what, ": the current stream of ", device.str(),
          " is being captured into a graph, which collectives between devices cannot be part of; "
          "run this step outside of the capture"));
    }
    return absl::OkStatus();
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), absl::StrCat(name_, ": ", what));
  }
}

absl::Status NcclCommunicators::Launch(Collective collective, absl::Duration timeout) {
  std::vector<c10::Stream> current;
  std::vector<NcclGroup::Part> parts;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const c10::impl::DeviceGuardImplInterface& guard = GuardOf(devices_[i]);
    const c10::DeviceGuard on_device(devices_[i]);  // for events, as ~Running() says
    current.push_back(guard.getStream(devices_[i]));
    c10::Event ready(devices_[i].type());
    ready.record(current[i]);
    ready.block(streams_[i]);
    const at::Tensor& buffer = collective.buffers[i].tensor;
    const at::Tensor& result =
        i == collective.root && collective.result.defined() ? collective.result : buffer;
    // They may be freed before the collective has run.
    guard.recordDataPtrOnStream(buffer.storage().data_ptr(), streams_[i]);
    if (&result != &buffer) {
      guard.recordDataPtrOnStream(result.storage().data_ptr(), streams_[i]);
    }
    parts.push_back({buffer, result, streams_[i]});
  }
  auto running = std::make_shared<Running>();
  running->what = collective.what;
  running->timeout = timeout;
  {
    absl::MutexLock lock(&mu_);
    DG_RETURN_IF_ERROR(status_);
    absl::Status run;
    try {
      run = collective.run(*group_, parts);
    } catch (...) {
      run = StatusFromException(std::current_exception());
    }
    if (!run.ok()) {
      Fail(Annotate(run, absl::StrCat(name_, ": ", collective.what)));
      return status_;
    }
  }
  absl::Status watched;
  try {
    DG_RETURN_IF_ERROR(AwaitReady(collective.what, timeout));
    running->deadline = clock_->Now() + timeout;
    for (size_t i = 0; i < devices_.size(); ++i) {
      const c10::DeviceGuard on_device(devices_[i]);
      running->ends.emplace_back(devices_[i].type());
      running->ends[i].record(streams_[i]);
      if (collective.waits[i] || collective.buffers[i].in_place) running->ends[i].block(current[i]);
    }
    absl::MutexLock lock(&mu_);
    DG_RETURN_IF_ERROR(status_);  // aborted meanwhile
    running_.push_back(std::move(running));
    SetTimers();
    return absl::OkStatus();
  } catch (...) {
    watched = StatusFromException(std::current_exception());
  }
  // It runs, and nobody would look at its deadline.
  absl::MutexLock lock(&mu_);
  Fail(Annotate(watched, absl::StrCat(name_, ": ", collective.what)));
  return status_;
}

void NcclCommunicators::Abort(const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  Fail(Annotate(why, name_));
}

absl::Status NcclCommunicators::AwaitReady(const std::string& what, absl::Duration timeout) {
  const absl::Time deadline = clock_->Now() + timeout;
  for (int polls = 0;; ++polls) {
    if (polls >= kPollsWithoutSleep) {
      absl::SleepFor(kReadyInterval);
    } else if (polls > 0) {
      std::this_thread::yield();
    }
    absl::MutexLock lock(&mu_);
    DG_RETURN_IF_ERROR(status_);
    const absl::StatusOr<bool> ready = group_->Ready();
    if (ready.ok() && *ready) return absl::OkStatus();
    if (!ready.ok()) Fail(Annotate(ready.status(), absl::StrCat(name_, ": ", what)));
    if (ready.ok() && clock_->Now() > deadline) Fail(Late(what, timeout));
  }
}

bool NcclCommunicators::TryLeave() {
  left_ = true;
  if (!mu_.TryLock()) return false;
  if (queried_ && query_clock_->Cancel(query_)) queried_ = false;
  // Who asks may wait for what a deadline alone ends: so deadlines are kept until then.
  if (!queried_ && watched_ && clock_->Cancel(watch_)) watched_ = false;
  const bool left = !queried_ && !watched_;
  mu_.Unlock();
  return left;
}

void NcclCommunicators::SetTimers() {
  if (running_.empty() || (left_ && !queried_)) return;
  if (!watched_) {
    watch_ = clock_->At(clock_->Now() + kWatchInterval, [this] { Watch(); });
    watched_ = true;  // now: to set a timer may throw
  }
  if (!queried_ && !left_) {
    query_ = query_clock_->At(query_clock_->Now() + kWatchInterval, [this] { Query(); });
    queried_ = true;
  }
}

void NcclCommunicators::Watch() {
  absl::MutexLock lock(&mu_);
  Check();
  SetAgain(watched_);
}

void NcclCommunicators::SetAgain(bool& timer) {
  timer = false;
  try {
    SetTimers();
  } catch (const std::bad_alloc&) {
    if (timer) return;  // the other one is set when this one fires
    timer = true;       // the clock calls again
    throw;
  }
}

// Calls nothing that could wait for the devices.
void NcclCommunicators::Check() {
  if (running_.empty()) return;
  const absl::StatusOr<bool> ready = group_->Ready();
  if (!ready.ok()) return Fail(Annotate(ready.status(), name_));
  FailIfLate(kGrace);
}

// Not the oldest alone: one behind it may have less time.
void NcclCommunicators::FailIfLate(absl::Duration grace) {
  const absl::Time now = clock_->Now();
  for (const auto& running : running_) {
    if (now <= running->deadline + grace) continue;
    return Fail(Late(running->what, running->timeout));
  }
}

void NcclCommunicators::Query() {
  if (!left_) QueryUntilOneRuns();
  absl::MutexLock lock(&mu_);
  SetAgain(queried_);
}

void NcclCommunicators::QueryUntilOneRuns() {
  while (true) {
    std::shared_ptr<const Running> oldest;
    {
      absl::MutexLock lock(&mu_);
      if (running_.empty()) return;
      oldest = running_.front();
      const absl::StatusOr<bool> now = group_->Ready();
      if (!now.ok()) return Fail(Annotate(now.status(), name_));
      // Whether it is ready is nothing to this one, which has begun: a later one may be beginning.
    }
    absl::StatusOr<bool> ended = false;
    try {
      ended = std::all_of(oldest->ends.begin(), oldest->ends.end(), platform_.query);
    } catch (...) {
      ended = StatusFromException(std::current_exception());
    }
    absl::MutexLock lock(&mu_);
    if (running_.empty() || running_.front() != oldest) continue;  // somebody else was faster
    if (!ended.ok()) return Fail(Annotate(ended.status(), name_));
    if (!*ended) return FailIfLate(absl::ZeroDuration());
    running_.pop_front();
  }
}

void NcclCommunicators::Fail(absl::Status why) {
  status_.Update(why);
  // Events last until the abort has ended what they wait for.
  const auto aborted = std::exchange(running_, {});
  if (group_ != nullptr) group_->Abort();
  group_ = nullptr;
}

absl::Status NcclCommunicators::Late(const std::string& what, absl::Duration timeout) const {
  return absl::DeadlineExceededError(absl::StrCat(name_, ": ", what, " did not end within ",
                                                  absl::FormatDuration(timeout),
                                                  " and was aborted"));
}

}  // namespace distgrad
