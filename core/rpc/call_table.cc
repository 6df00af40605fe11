// Keeps calls until they end, and one timer for all of their deadlines.
#include "core/rpc/call_table.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/rpc/call_error.h"
#include "core/rpc/frame.h"

namespace distgrad {

std::optional<int64_t> CallTable::TimeLeft(absl::Time deadline, absl::Time now) {
  if (deadline == absl::InfiniteFuture()) return 0;
  const int64_t left = absl::ToInt64Microseconds(deadline - now);
  return left > 0 ? std::optional<int64_t>(left) : std::nullopt;
}

// ------------------------------------------------------------------------------------ Beginning

void CallTable::Add(const Link& link) {
  absl::MutexLock lock(&mu_);
  links_.try_emplace(link.number(), 0);
}

absl::Status CallTable::CheckLimits(const Link& link) const {
  const auto found = links_.find(link.number());
  if (found == links_.end()) return absl::AbortedError("the connection is over");
  if (found->second >= limits_.calls_per_peer) {
    return absl::ResourceExhaustedError(
        absl::StrCat(found->second, " calls to it are in flight; limit calls_per_peer is ",
                     limits_.calls_per_peer));
  }
  if (calls_.size() >= limits_.calls) {
    return absl::ResourceExhaustedError(
        absl::StrCat(calls_.size(), " calls are in flight; limit calls is ", limits_.calls));
  }
  return absl::OkStatus();
}

absl::StatusOr<CallTable::Begun> CallTable::Begin(Call& call, std::shared_ptr<Link> link,
                                                  Packet& request) {
  CallCounters* const counters = metrics_.Find(call.to, /*served=*/false, call.function);
  Begun begun;
  Arming arming;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return absl::CancelledError("this worker is shutting down");
    DG_RETURN_IF_ERROR(CheckLimits(*link));
    begun.number = ++last_call_;
    // First, as there may be no memory for it.
    Call& own = calls_.emplace(begun.number, std::move(call)).first->second;
    SetCall(begun.number, TimeLeft(own.deadline, own.begun).value_or(1), &request.bytes);
    ++links_[link->number()];
    ++counters->calls;
    counters->bytes_sent += own.bytes;
    if (own.span != nullptr) own.span->call = begun.number;
    arming = ArmTimer(own.deadline);
    // While the timer is set, or the connection comes, the call may end.
    begun.leaves_now = arming.number == 0 && link->ready(own.bytes);
    own.has_left = begun.leaves_now;
    own.counters = counters;
    own.link = std::move(link);
  }
  if (!SetTimer(arming)) {
    Drop(begun.number);
    EndThoseWithDeadlines(arming);
    throw std::bad_alloc();
  }
  return begun;
}

void CallTable::Drop(uint64_t number) {
  std::optional<Call> dropped;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  const auto found = calls_.find(number);
  if (found == calls_.end()) return;
  dropped = TakeOut(found);
  ++dropped->counters->errors;
  ++dropped->counters->ended;
}

bool CallTable::OnLeaving(uint64_t number, Packet& request) {
  absl::MutexLock lock(&mu_);
  const auto found = calls_.find(number);
  if (found == calls_.end()) return false;
  const std::optional<int64_t> left = TimeLeft(found->second.deadline, clock_->Now());
  if (!left) return false;  // the timer is about to end it
  SetCall(number, *left, &request.bytes);
  found->second.has_left = true;
  return true;
}

// --------------------------------------------------------------------------------------- Ending

CallTable::Call CallTable::TakeOut(Calls::iterator call) {
  Call taken = std::move(call->second);
  calls_.erase(call);
  const auto link = links_.find(taken.link->number());
  if (link != links_.end()) --link->second;
  return taken;
}

std::optional<CallTable::Call> CallTable::Take(uint64_t number, WorkerRank from) {
  absl::MutexLock lock(&mu_);
  const auto found = calls_.find(number);
  // A reply after the deadline finds nobody; one to a call that went elsewhere is refused.
  if (found == calls_.end() || found->second.to != from || !found->second.has_left) {
    return std::nullopt;
  }
  return TakeOut(found);
}

void CallTable::End(Call call, absl::StatusOr<Body> reply) {
  const absl::Time now = clock_->Now();
  if (call.counters != nullptr) {
    if (reply.ok()) {
      call.counters->bytes_received += reply->packet.size();
    } else {
      ++call.counters->errors;
    }
    call.counters->run_ns += absl::ToInt64Nanoseconds(now - call.begun);
    ++call.counters->ended;
  }
  if (call.span != nullptr && reply.ok()) call.span->bytes_received = reply->packet.size();
  trace_->End(std::move(call.span), now, reply.status());
  call.done(std::move(reply), call.has_left);
}

void CallTable::EndWithError(Call call, const absl::Status& why) {
  absl::Status error = why;
  try {
    error = CallError(why, call.function, peers_->Describe(call.to));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): then it names neither
  }
  End(std::move(call), error);
}

void CallTable::EndIfLate(uint64_t number, absl::Time deadline, Link& link, uint64_t bytes) {
  if (deadline == absl::InfiniteFuture()) return;
  const bool is_late = deadline <= clock_->Now();
  if (!is_late && number > without_timer_) return;
  std::optional<Call> late;
  {
    absl::MutexLock lock(&mu_);
    const auto found = calls_.find(number);
    if (found != calls_.end()) late = TakeOut(found);
  }
  if (late.has_value()) {
    return EndEarly(number, *std::move(late), is_late ? late_ : no_timer_);
  }
  // Its own cancel went before its request, and found nothing.
  try {
    SendCancel(link, number, bytes);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): nobody waits for it
  }
}

void CallTable::SendCancel(Link& link, uint64_t number, uint64_t bytes) {
  Packet packet;
  AppendFrame({.kind = FrameKind::kCancel, .call = number}, &packet.bytes);
  // Should it come before its call, it would find nothing.
  link.SendBehind(bytes, std::move(packet));
}

void CallTable::EndEarly(uint64_t number, Call call, const absl::Status& why) {
  try {
    if (call.has_left) {
      SendCancel(*call.link, number, call.bytes);
    } else {
      call.link->Withdraw(number);
    }
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): nobody waits for it
  }
  EndWithError(std::move(call), why);
}

void CallTable::EndAll(absl::FunctionRef<bool(uint64_t number, const Call& call)> which,
                       absl::FunctionRef<void(uint64_t number, Call call)> end) {
  absl::InlinedVector<std::pair<uint64_t, Call>, 8> taken;
  for (bool all = false; !all; taken.clear()) {
    {
      absl::MutexLock lock(&mu_);
      const auto count = std::count_if(calls_.begin(), calls_.end(), [&](const auto& each) {
        return which(each.first, each.second);
      });
      try {
        taken.reserve(static_cast<size_t>(count));
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): some at a time, then
      }
      auto it = calls_.begin();
      while (it != calls_.end() && taken.size() < taken.capacity()) {
        const auto call = it++;
        const uint64_t number = call->first;
        if (which(number, call->second)) taken.emplace_back(number, TakeOut(call));
      }
      all = it == calls_.end();
    }
    for (auto& [number, call] : taken) {
      try {
        end(number, std::move(call));
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): its Done ends all the same
      }
    }
  }
}

void CallTable::Cancel(uint64_t number) {
  std::optional<Call> cancelled;
  {
    absl::MutexLock lock(&mu_);
    const auto found = calls_.find(number);
    if (found == calls_.end()) return;
    cancelled = TakeOut(found);
  }
  EndEarly(number, *std::move(cancelled), absl::CancelledError("it was cancelled by its caller"));
}

void CallTable::EndCallsOver(const Link& link, const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    const auto of_link = links_.find(link.number());
    if (of_link == links_.end()) return;
    const bool has_calls = of_link->second > 0;
    links_.erase(of_link);
    if (!has_calls) return;
  }
  EndAll([&](uint64_t, const Call& call) { return call.link.get() == &link; },
         [&](uint64_t, Call call) {
           call.has_left = true;
           EndWithError(std::move(call), why);
         });
}

void CallTable::Close(const absl::Status& why) {
  std::optional<Clock::TimerId> timer;
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
    links_.clear();
    timer = std::exchange(timer_, {}).id;
  }
  if (timer) clock_->Cancel(*timer);
  EndAll([](uint64_t, const Call&) { return true; },
         [&](uint64_t, Call call) { EndWithError(std::move(call), why); });
}

// ------------------------------------------------------------------------------------ Deadlines

// One timer serves all calls: it stands at the earliest deadline that there was, and is not
// moved when that call is answered in time.
//
// Whenever mu_ is free, timer_.at is not later than the deadline of any call but those that
// OnTimer() is about to end, and the clock has a timer of that number or the thread that wrote
// timer_ is about to set it. The clock is called without mu_, so a timer may fire, and another may
// take its place, before the thread that sets it goes on: a timer is therefore known by a number
// that it has before the clock hears of it.

CallTable::Arming CallTable::ArmTimer(absl::Time deadline) {
  if (closed_ || deadline >= timer_.at) return {};
  const Arming arming{++last_timer_, deadline, timer_};
  timer_ = {.number = arming.number, .at = deadline};
  return arming;
}

bool CallTable::SetTimer(const Arming& arming) {
  if (arming.number == 0) return true;
  Clock::TimerId id;
  try {
    id = clock_->At(arming.at, [weak = weak_from_this(), number = arming.number] {
      if (auto self = weak.lock()) self->OnTimer(number);
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (arming.before.id) clock_->Cancel(*arming.before.id);
  {
    absl::MutexLock lock(&mu_);
    if (timer_.number == arming.number) {
      timer_.id = id;
      return true;
    }
  }
  clock_->Cancel(id);  // it has fired, or was replaced
  return true;
}

// The timer that this one was to replace may have fired since, or another thread have cancelled it
// as it was replaced: so it does not come back, and what has begun since may have none either.
void CallTable::EndThoseWithDeadlines(const Arming& arming) {
  if (arming.before.id) clock_->Cancel(*arming.before.id);
  uint64_t last = 0;  // those that begin later have a timer
  {
    absl::MutexLock lock(&mu_);
    if (timer_.number != arming.number) return;  // one that is to fire earlier has taken its place
    timer_ = {};
    last = last_call_;
    without_timer_ = last;
  }
  EndAll(
      [last](uint64_t number, const Call& call) {
        return number <= last && call.deadline != absl::InfiniteFuture();
      },
      [this](uint64_t number, Call call) { EndEarly(number, std::move(call), no_timer_); });
}

void CallTable::OnTimer(uint64_t number) {
  absl::Time now;
  Arming next;
  {
    absl::MutexLock lock(&mu_);
    if (timer_.number != number) return;  // an earlier one has taken its place
    timer_ = {};
    now = clock_->Now();
    absl::Time earliest = absl::InfiniteFuture();
    for (const auto& [call_number, call] : calls_) {
      if (call.deadline > now) earliest = std::min(earliest, call.deadline);
    }
    next = ArmTimer(earliest);
  }
  if (!SetTimer(next)) EndThoseWithDeadlines(next);
  EndAll([now](uint64_t, const Call& call) { return call.deadline <= now; },
         [this](uint64_t late, Call call) { EndEarly(late, std::move(call), late_); });
}

size_t CallTable::size() const {
  absl::MutexLock lock(&mu_);
  return calls_.size();
}

}  // namespace distgrad
