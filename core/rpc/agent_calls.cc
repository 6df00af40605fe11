// The calls and notices of an agent: sent, matched with their answers, ended by their deadlines,
// and taken in.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/rpc/agent_impl.h"

namespace distgrad {

// --------------------------------------------------------------------------------- Sending

absl::Status Agent::Impl::CheckCalls(const Link& link) const {
  const Limits& limits = shared_.limits;
  if (link.calls_in_flight >= limits.calls_per_peer) {
    return absl::ResourceExhaustedError(
        absl::StrCat(link.calls_in_flight, " calls to it are in flight; limit calls_per_peer is ",
                     limits.calls_per_peer));
  }
  if (pending_.size() >= limits.calls) {
    return absl::ResourceExhaustedError(
        absl::StrCat(pending_.size(), " calls are in flight; limit calls is ", limits.calls));
  }
  return absl::OkStatus();
}

uint64_t Agent::Impl::Call(WorkerId to, Packet request, const CallTerms& terms,
                           ReplyCallback done) {
  WireReader reader(request.bytes);
  const std::string function(ReadFrame(reader)->function);
  const uint64_t size = request.size();
  std::unique_ptr<TraceSpan> span;
  if (trace_->on()) {
    span = std::make_unique<TraceSpan>(TraceSpan{.kind = TraceSpan::Kind::kCallMade,
                                                 .peer = to,
                                                 .function = function,
                                                 .context = terms.context,
                                                 .bytes_sent = size,
                                                 .begin = clock_->Now()});
  }
  const auto fail = [&](const absl::Status& why) {
    const absl::Status status = CallError(to, function, why);
    trace_->End(std::move(span), clock_->Now(), status);
    done(status, /*has_left=*/false);
    return 0;
  };
  if (size > shared_.limits.message_bytes) return fail(TooLarge("the message", size));
  SendWindow::Credit credit;
  for (;;) {
    const absl::Time now = clock_->Now();
    int64_t timeout_us = 0;
    if (terms.deadline != absl::InfiniteFuture()) {
      timeout_us = absl::ToInt64Microseconds(terms.deadline - now);
      if (timeout_us <= 0) {
        return fail(absl::DeadlineExceededError("the deadline has passed already"));
      }
    }
    std::shared_ptr<Link> link;
    Arming arming;
    bool leaves_now = false;
    uint64_t call = 0;
    {
      absl::ReleasableMutexLock lock(&mu_);
      absl::StatusOr<std::shared_ptr<Link>> found = LinkTo(to);
      absl::Status status = found.ok() ? CheckCalls(**found) : found.status();
      if (!status.ok()) {
        lock.Release();
        return fail(status);
      }
      link = *std::move(found);
      std::optional<SendWindow::Credit> acquired;
      if (credit.window() != link->window().get()) acquired = link->window()->TryAcquire(size);
      if (acquired.has_value() || credit.window() == link->window().get()) {
        call = ++last_call_;
        SetCall(call, timeout_us, &request.bytes);
        CallCounters* counters = metrics_.Find(to, /*served=*/false, function);
        ++counters->calls;
        counters->bytes_sent += size;
        ++link->calls_in_flight;
        if (span != nullptr) span->call = call;
        arming = ArmTimer(terms.deadline);
        // While the timer is set, or the connection comes, the call may end.
        leaves_now = arming.number == 0 && link->ready(size);
        pending_.emplace(call, Pending{link, function, to, size, terms.deadline, std::move(done),
                                       counters, now, std::move(span), leaves_now});
        lock.Release();
        if (acquired.has_value()) credit = *std::move(acquired);
      }
    }
    if (call != 0) {
      SetTimer(arming);
      link->Send(std::move(request), std::move(credit), leaves_now ? 0 : call);
      return call;
    }
    if (!terms.wait_for_credit) {
      return fail(absl::ResourceExhaustedError(absl::StrCat(
          link->window()->acquired(), " bytes wait to be sent to it, and this message has ", size,
          "; limit bytes_per_peer is ", link->window()->limit())));
    }
    // When it is there, the connection may be another one.
    absl::StatusOr<SendWindow::Credit> waited = AwaitCredit(link->window(), size, terms);
    if (!waited.ok()) return fail(waited.status());
    credit = *std::move(waited);
  }
}

absl::StatusOr<SendWindow::Credit> Agent::Impl::AwaitCredit(
    const std::shared_ptr<SendWindow>& window, uint64_t bytes, const CallTerms& terms) {
  Promise<SendWindow::Credit> promise;
  Future<SendWindow::Credit> credit = promise.future();
  const uint64_t waiter = window->AcquireAsync(
      bytes, [promise = std::move(promise)](absl::StatusOr<SendWindow::Credit> credit) mutable {
        promise.Set(std::move(credit));
      });
  Cancellation* const cancellation = terms.cancellation;
  const uint64_t watch =
      cancellation == nullptr ? 0 : cancellation->OnCancel([window, waiter, cancellation] {
        window->Withdraw(waiter, cancellation->why());
      });
  std::optional<Clock::TimerId> timer;
  if (terms.deadline != absl::InfiniteFuture() && !credit.Done()) {
    timer = clock_->At(terms.deadline, [window, waiter] {
      window->Withdraw(
          waiter, absl::DeadlineExceededError(absl::StrCat(
                      "no room before the deadline: ", window->acquired(),
                      " bytes wait to be sent to it; limit bytes_per_peer is ", window->limit())));
    });
  }
  absl::StatusOr<SendWindow::Credit> acquired = credit.Take();
  if (timer) clock_->Cancel(*timer);
  if (watch != 0) cancellation->Forget(watch);
  return acquired;
}

bool Agent::Impl::OnLeaving(uint64_t call, Packet& request) {
  absl::MutexLock lock(&mu_);
  const auto found = pending_.find(call);
  if (found == pending_.end()) return false;
  Pending& pending = found->second;
  int64_t timeout_us = 0;
  if (pending.deadline != absl::InfiniteFuture()) {
    timeout_us = absl::ToInt64Microseconds(pending.deadline - clock_->Now());
    if (timeout_us <= 0) return false;  // the timer is about to end it
  }
  SetCall(call, timeout_us, &request.bytes);
  pending.has_left = true;
  return true;
}

absl::Status Agent::Impl::TooLarge(absl::string_view what, uint64_t size) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      what, " has ", size, " bytes; limit message_bytes is ", shared_.limits.message_bytes));
}

void Agent::Impl::Notify(WorkerId to, Packet notice) {
  const uint64_t size = notice.size();
  absl::StatusOr<std::shared_ptr<Link>> link = nullptr;
  {
    absl::MutexLock lock(&mu_);
    link = LinkTo(to);
    if (link.ok()) {
      CallCounters* counters = metrics_.Find(to, /*served=*/false, kNotices);
      ++counters->calls;
      ++counters->ended;
      counters->bytes_sent += size;
    }
  }
  if (!link.ok()) {
    if (!absl::IsCancelled(link.status())) service_->OnPeerLost(to, link.status());
  } else if (size > shared_.limits.message_bytes) {
    // It is lost, and the other end shall know that something is.
    (*link)->Close(TooLarge("a notice", size));
  } else {
    (*link)->Send(std::move(notice));
  }
}

Agent::Impl::Pending Agent::Impl::TakeOut(PendingCalls::iterator call) {
  Pending pending = std::move(call->second);
  pending_.erase(call);
  --pending.link->calls_in_flight;
  return pending;
}

void Agent::Impl::End(Pending& call, absl::StatusOr<Body> reply) {
  if (reply.ok()) {
    call.counters->bytes_received += reply->packet.size();
  } else {
    ++call.counters->errors;
  }
  const absl::Time now = clock_->Now();
  call.counters->run_ns += absl::ToInt64Nanoseconds(now - call.begun);
  ++call.counters->ended;
  if (call.span != nullptr && reply.ok()) call.span->bytes_received = reply->packet.size();
  trace_->End(std::move(call.span), now, reply.status());
  call.done(std::move(reply), call.has_left);
}

void Agent::Impl::SendCancel(uint64_t number, const Pending& call) {
  if (!call.has_left) return call.link->Withdraw(number);
  Packet packet;
  AppendFrame({.kind = FrameKind::kCancel, .call = number}, &packet.bytes);
  // Should it come before its call, it would find nothing.
  call.link->SendBehind(call.bytes, std::move(packet));
}

void Agent::Impl::Cancel(uint64_t call) {
  std::optional<Pending> cancelled;
  {
    absl::MutexLock lock(&mu_);
    const auto found = pending_.find(call);
    if (found == pending_.end()) return;
    cancelled = TakeOut(found);
  }
  SendCancel(call, *cancelled);
  End(*cancelled, CallError(cancelled->to, cancelled->function,
                            absl::CancelledError("it was cancelled by its caller")));
}

// One timer serves all calls: it stands at the earliest deadline that there was, and is not
// moved when that call is answered in time.
//
// Whenever mu_ is free, timer_.at is not later than the deadline of any call in flight, and the
// clock has a timer of that number or the thread that wrote timer_ is about to set it. The clock is
// called without mu_, so a timer may fire, and another may take its place, before the thread that
// sets it goes on: a timer is therefore known by a number that it has before the clock hears of it.

Agent::Impl::Arming Agent::Impl::ArmTimer(absl::Time deadline) {
  if (closed_ || deadline >= timer_.at) return {};
  const Arming arming{++last_timer_, deadline, timer_.id};
  timer_ = {.number = arming.number, .at = deadline};
  return arming;
}

void Agent::Impl::SetTimer(const Arming& arming) {
  if (arming.number == 0) return;
  if (arming.stale) clock_->Cancel(*arming.stale);
  const Clock::TimerId id =
      clock_->At(arming.at, [weak = weak_from_this(), number = arming.number] {
        if (auto self = weak.lock()) self->OnTimer(number);
      });
  {
    absl::MutexLock lock(&mu_);
    if (timer_.number == arming.number) {
      timer_.id = id;
      return;
    }
  }
  clock_->Cancel(id);  // it has fired, or was replaced
}

void Agent::Impl::OnTimer(uint64_t number) {
  std::vector<std::pair<uint64_t, Pending>> late;
  Arming next;
  {
    absl::MutexLock lock(&mu_);
    if (timer_.number != number) return;  // an earlier one has taken its place
    timer_ = {};
    const absl::Time now = clock_->Now();
    absl::Time earliest = absl::InfiniteFuture();
    for (auto it = pending_.begin(); it != pending_.end();) {
      if (it->second.deadline <= now) {
        const uint64_t call = it->first;
        late.emplace_back(call, TakeOut(it++));
      } else {
        earliest = std::min(earliest, it->second.deadline);
        ++it;
      }
    }
    next = ArmTimer(earliest);
  }
  SetTimer(next);
  for (auto& [call, p] : late) {
    SendCancel(call, p);
    End(p,
        CallError(p.to, p.function, absl::DeadlineExceededError("no answer before the deadline")));
  }
}

// ------------------------------------------------------------------------------- Receiving

void Agent::Impl::OnPacket(const std::shared_ptr<Link>& link, Packet packet) {
  bool full = false;
  std::shared_ptr<Link> main = link;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || link->dead) return;
    if (link->is_bulk) {
      main = link->main.lock();
      if (main == nullptr || main->dead) return;
    }
    if (link->holds) {
      const uint64_t size = packet.size();
      full = link->held.size() >= shared_.limits.calls_per_peer ||
             (!link->held.empty() && link->held_bytes + size > shared_.limits.bytes_per_peer);
      if (!full) {
        link->held_bytes += size;
        return link->held.push_back(std::move(packet));
      }
    }
  }
  if (full) {
    return link->Close(absl::ResourceExhaustedError("too much came before its sender was known"));
  }
  Handle(main, std::move(packet));
}

void Agent::Impl::Handle(const std::shared_ptr<Link>& link, Packet packet) {
  absl::Status status = HandleOrFail(link, std::move(packet));
  if (status.ok()) return;
  DG_LOG(WARNING) << "closing a connection: " << status.message();
  link->Close(status);
}

absl::Status Agent::Impl::HandleOrFail(const std::shared_ptr<Link>& link, Packet packet) {
  WireReader reader(packet.bytes);
  DG_ASSIGN_OR_RETURN(const Frame frame, ReadFrame(reader));
  if (frame.kind == FrameKind::kHello) return Greet(link, reader);

  const size_t offset = packet.bytes.size() - reader.remaining();
  std::optional<WorkerId> peer;
  std::optional<Pending> answered;
  {
    absl::MutexLock lock(&mu_);
    peer = link->peer;
    if (peer && frame.kind == FrameKind::kReply) {
      auto it = pending_.find(frame.call);
      // A reply after the deadline finds nobody; one to a call that went elsewhere is refused.
      if (it != pending_.end() && it->second.to == *peer && it->second.has_left) {
        answered = TakeOut(it);
      }
    }
  }
  if (!peer) return absl::InvalidArgumentError("somebody did not say hello first");

  switch (frame.kind) {
    case FrameKind::kRequest:
      return Serve(link, *peer, frame, std::move(packet), offset);
    case FrameKind::kCancel:
      link->served().Cancel(frame.call, absl::CancelledError("the caller waits no longer"));
      break;
    case FrameKind::kReply:
      if (!answered) {
        service_->OnLateReply(*peer, Body{std::move(packet), offset});
      } else if (!frame.status.ok()) {
        // What says nothing of where it arose, arose there.
        End(*answered, CallError(*peer, answered->function,
                                 WithOrigin(frame.status, {*peer, ErrorOrigin::By::kDistgrad})));
      } else if (!packet.segments_status.ok()) {
        const absl::Status lost = Annotate(packet.segments_status, "receiving the answer");
        End(*answered, CallError(*peer, answered->function, lost));
        // Nobody waits for it any more.
        service_->OnLateReply(*peer, Body{std::move(packet), offset});
      } else {
        End(*answered, Body{std::move(packet), offset});
      }
      break;
    case FrameKind::kNotice: {
      absl::MutexLock lock(&mu_);
      CallCounters* counters = metrics_.Find(*peer, /*served=*/true, kNotices);
      ++counters->calls;
      ++counters->ended;
      counters->bytes_received += packet.size();
    }
      service_->OnNotice(*peer, Body{std::move(packet), offset});
      break;
    case FrameKind::kPing: {
      Packet pong;
      AppendFrame({.kind = FrameKind::kPong}, &pong.bytes);
      link->Send(std::move(pong));
      break;
    }
    case FrameKind::kLeaving:
      peers_.SetLeft(*peer);
      service_->OnMemberEvents();
      break;
    case FrameKind::kBulk:
      OpenBulk(link, *peer, frame.link);
      break;
    case FrameKind::kRefused:
      link->Close(absl::UnavailableError(
          absl::StrCat("it refused the connection: ", frame.status.message())));
      break;
    case FrameKind::kPong:
    case FrameKind::kHello:
      break;
  }
  return absl::OkStatus();
}

absl::Status Agent::Impl::Serve(const std::shared_ptr<Link>& link, WorkerId peer,
                                const Frame& frame, Packet packet, size_t offset) {
  const absl::Time deadline = frame.timeout_us == 0
                                  ? absl::InfiniteFuture()
                                  : clock_->Now() + absl::Microseconds(frame.timeout_us);
  const uint64_t size = packet.size();
  absl::StatusOr<std::shared_ptr<Cancellation>> begun = nullptr;
  if (packet.segments_status.ok()) {
    begun = link->served().Begin(frame.call, size);
  } else {
    begun = Annotate(packet.segments_status, "receiving the arguments");
  }
  // A packet that came twice: its call is in flight.
  if (absl::IsAlreadyExists(begun.status())) return absl::OkStatus();
  CallCounters* counters;
  {
    absl::MutexLock lock(&mu_);
    counters = metrics_.Find(peer, /*served=*/true, frame.function);
  }
  ++counters->calls;
  counters->bytes_received += size;
  if (!begun.ok() && link->window()->acquired() > link->window()->limit()) {
    return absl::ResourceExhaustedError("it calls on and on, and reads no answers");
  }
  std::unique_ptr<TraceSpan> span;
  if (trace_->on()) {
    const std::optional<WorkerInfo> caller = peers_.Find(peer);
    span = std::make_unique<TraceSpan>(TraceSpan{.kind = TraceSpan::Kind::kCallServed,
                                                 .peer = peer,
                                                 .function = std::string(frame.function),
                                                 .call = frame.call,
                                                 .incarnation = caller ? caller->incarnation : 0,
                                                 .bytes_received = size});
  }
  // The frame's function points into the packet, so it is copied before the packet moves.
  IncomingCall call(link, peer, frame, deadline, begun.ok() ? *begun : nullptr, begun.status(),
                    {counters, trace_.get(), std::move(span)});
  call.body() = Body{std::move(packet), offset};
  service_->OnCall(std::move(call));
  return absl::OkStatus();
}

std::vector<Agent::Impl::Pending> Agent::Impl::TakePending(const Link& link) {
  std::vector<Pending> taken;
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (it->second.link.get() == &link) {
      taken.push_back(TakeOut(it++));
      // What waited for it is as lost as what went over it: the contexts of both are.
      taken.back().has_left = true;
    } else {
      ++it;
    }
  }
  return taken;
}

size_t Agent::Impl::in_flight() const {
  absl::MutexLock lock(&mu_);
  return pending_.size();
}

}  // namespace distgrad
