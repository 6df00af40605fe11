// Sends the calls and notices of an agent, and dispatches what arrives by the kind of its frame.
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/await_memory.h"
#include "core/base/exception.h"
#include "core/base/log.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/rpc/agent.h"

namespace distgrad {

// --------------------------------------------------------------------------------- Sending

Agent::Request Agent::NewRequest(absl::string_view function) {
  Request request{.function = std::string(function), .packet = {}};
  AppendFrame({.kind = FrameKind::kRequest, .function = function}, &request.packet.bytes);
  return request;
}

Packet Agent::NewNotice() {
  Packet packet;
  AppendFrame({.kind = FrameKind::kNotice}, &packet.bytes);
  return packet;
}

uint64_t Agent::Call(WorkerRank to, Request request, const CallTerms& terms, ReplyCallback done) {
  const uint64_t size = request.packet.size();
  CallTable::Call call{.to = to,
                       .function = std::move(request.function),
                       .bytes = size,
                       .begun = clock_->Now(),
                       .deadline = terms.deadline,
                       .done = std::move(done)};
  if (trace_->on()) {
    call.span = std::make_unique<TraceSpan>(TraceSpan{.kind = TraceSpan::Kind::kCallMade,
                                                      .peer = to,
                                                      .function = call.function,
                                                      .context = terms.context,
                                                      .bytes_sent = size,
                                                      .begin = call.begun});
  }
  const auto fail = [&](const absl::Status& why) {
    calls_->EndWithError(std::move(call), why);
    return 0;
  };
  if (size > limits_.message_bytes) return fail(TooLarge("the message", size));
  SendWindow::Credit credit;
  for (;; call.begun = clock_->Now()) {
    if (!CallTable::TimeLeft(call.deadline, call.begun)) {
      return fail(absl::DeadlineExceededError("the deadline has passed already"));
    }
    const absl::StatusOr<std::shared_ptr<Link>> link = links_->To(to);
    if (!link.ok()) return fail(link.status());
    const std::shared_ptr<SendWindow>& window = (*link)->window();
    // While it was waited for, the connection may have become another one.
    if (credit.window() != window.get()) {
      std::optional<SendWindow::Credit> acquired = window->TryAcquire(size);
      if (acquired.has_value()) {
        credit = *std::move(acquired);
      } else if (!terms.wait_for_credit) {
        return fail(absl::ResourceExhaustedError(
            absl::StrCat(window->acquired(), " bytes wait to be sent to it, and this message has ",
                         size, "; limit bytes_per_peer is ", window->limit())));
      } else {
        absl::StatusOr<SendWindow::Credit> waited = AwaitCredit(window, size, terms);
        if (!waited.ok()) return fail(waited.status());
        credit = *std::move(waited);
        continue;
      }
    }
    const absl::StatusOr<CallTable::Begun> begun = calls_->Begin(call, *link, request.packet);
    if (absl::IsAborted(begun.status())) continue;  // that link has just ended
    if (!begun.ok()) return fail(begun.status());
    try {
      (*link)->Send(std::move(request.packet), std::move(credit),
                    begun->leaves_now ? 0 : begun->number);
    } catch (...) {  // there was no memory
      calls_->Drop(begun->number);
      throw;
    }
    calls_->EndIfLate(begun->number, terms.deadline, **link, size);
    return begun->number;
  }
}

absl::StatusOr<SendWindow::Credit> Agent::AwaitCredit(const std::shared_ptr<SendWindow>& window,
                                                      uint64_t bytes, const CallTerms& terms) {
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
                      "its send window was full until the deadline: ", window->acquired(),
                      " bytes wait to be sent to it; limit bytes_per_peer is ", window->limit())));
    });
  }
  absl::StatusOr<SendWindow::Credit> acquired = credit.Take();
  if (timer) clock_->Cancel(*timer);
  if (watch != 0) cancellation->ForgetWithoutWaiting(watch);
  return acquired;
}

absl::Status Agent::TooLarge(absl::string_view what, uint64_t size) const {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " has ", size, " bytes; limit message_bytes is ", limits_.message_bytes));
}

CallCounters* Agent::CountNotice(WorkerRank peer, bool served) {
  CallCounters* const counters = calls_->metrics().Find(peer, served, kNotices);
  ++counters->calls;
  ++counters->ended;
  return counters;
}

void Agent::Notify(WorkerRank to, Packet notice) {
  const uint64_t size = notice.size();
  const absl::StatusOr<std::shared_ptr<Link>> link = AwaitMemory([&] { return links_->To(to); });
  if (!link.ok()) {
    if (!absl::IsCancelled(link.status())) {
      service_->OnPeerLost(to, service_->BegunSoFar(), link.status());
    }
    return;
  }
  // Where it is lost the other end shall know that something is.
  try {
    CountNotice(to, /*served=*/false)->bytes_sent += size;
    if (size > limits_.message_bytes) {
      (*link)->Close(TooLarge("a notice", size));
    } else {
      (*link)->Send(std::move(notice));
    }
  } catch (const std::bad_alloc&) {
    (*link)->Close(StatusFromStdException(std::current_exception()));
  }
}

// ------------------------------------------------------------------------------- Receiving

absl::Status Agent::OnPacket(const std::shared_ptr<Link>& link, Packet packet) {
  // Of one that was lost as a whole nothing says who waits for it.
  if (packet.bytes.empty() && !packet.segments_status.ok() && link->peer()) {
    const WorkerRank from = *link->peer();
    const absl::Status why = absl::UnavailableError(absl::StrCat(
        "receiving from worker ", peers_->Describe(from), ": ", packet.segments_status.message()));
    DG_LOG(ERROR) << why.message();
    links_->GiveUp(link, from, why);
    return absl::OkStatus();
  }
  WireReader reader(packet.bytes);
  DG_ASSIGN_OR_RETURN(const Frame frame, ReadFrame(reader));
  if (frame.kind == FrameKind::kHello) return links_->OnHello(link, reader);

  const size_t offset = packet.bytes.size() - reader.remaining();
  const std::optional<WorkerRank> peer = link->peer();
  if (!peer)
    return absl::InvalidArgumentError("its first frame is not the hello that names the worker");

  if (frame.kind == FrameKind::kRequest || frame.kind == FrameKind::kReply ||
      frame.kind == FrameKind::kNotice) {
    link->SetCarried();
  }
  if (frame.kind == FrameKind::kRequest || (frame.kind == FrameKind::kReply && frame.status.ok())) {
    const absl::Status checked =
        service_->CheckBody(*peer, absl::string_view(packet.bytes).substr(offset));
    if (!checked.ok()) {
      const absl::string_view what = frame.kind == FrameKind::kRequest ? "call" : "reply";
      const absl::Status read = Annotate(
          checked, absl::StrCat("reading a ", what, " from worker ", peers_->Describe(*peer)));
      DG_LOG(ERROR) << read;
      links_->GiveUp(link, *peer, read);
      return absl::OkStatus();
    }
  }
  switch (frame.kind) {
    case FrameKind::kRequest:
      return Serve(link, *peer, frame, std::move(packet), offset);
    case FrameKind::kCancel:
      link->served().Cancel(frame.call, absl::CancelledError("the caller waits no longer"));
      break;
    case FrameKind::kReply:
      OnReply(*peer, frame, Body{std::move(packet), offset});
      break;
    case FrameKind::kNotice: {
      CountNotice(*peer, /*served=*/true)->bytes_received += packet.size();
      const absl::Status taken = service_->OnNotice(*peer, Body{std::move(packet), offset},
                                                    [&link] { return link->dropped(); });
      if (!taken.ok()) links_->GiveUp(link, *peer, taken);
      break;
    }
    case FrameKind::kPing: {
      Packet pong;
      AppendFrame({.kind = FrameKind::kPong}, &pong.bytes);
      link->Send(std::move(pong));
      break;
    }
    case FrameKind::kBulkPing: {
      Packet pong;
      AppendFrame({.kind = FrameKind::kBulkPong}, &pong.bytes);
      link->Send(std::move(pong));
      break;
    }
    case FrameKind::kBulkPong:
      link->HearBulk();
      break;
    case FrameKind::kLeaving:
      peers_->SetLeft(*peer, link->incarnation());
      service_->OnMemberEvents();
      break;
    case FrameKind::kBulk:
      links_->OnBulk(link, *peer, frame.link);
      break;
    case FrameKind::kRefused:
      link->Close(absl::UnavailableError(
          absl::StrCat("it refused the connection: ", frame.status.message())));
      break;
    case FrameKind::kPong:
      links_->OnPong(link);
      break;
    case FrameKind::kHello:
      break;
  }
  return absl::OkStatus();
}

void Agent::OnReply(WorkerRank peer, const Frame& frame, Body reply) {
  std::optional<CallTable::Call> call = calls_->Take(frame.call, peer);
  if (!call) return service_->OnLateReply(peer, std::move(reply));
  if (!frame.status.ok()) {
    // What says nothing of where it arose, arose there.
    return calls_->EndWithError(*std::move(call),
                                WithOrigin(frame.status, {peer, ErrorOrigin::By::kDistgrad}));
  }
  if (reply.packet.segments_status.ok()) return calls_->End(*std::move(call), std::move(reply));
  calls_->EndWithError(*std::move(call),
                       Annotate(reply.packet.segments_status, "receiving the answer"));
  // Nobody waits for it any more.
  service_->OnLateReply(peer, std::move(reply));
}

absl::Status Agent::Serve(const std::shared_ptr<Link>& link, WorkerRank peer, const Frame& frame,
                          Packet packet, size_t offset) {
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
  // Where there is no memory for what follows. A worker's end waits for the calls that it serves.
  absl::Cleanup forget = [&] {
    if (!begun.ok()) return;
    link->served().FreePlace(frame.call);
    link->served().End();
  };
  CallCounters* const counters = calls_->metrics().Find(peer, /*served=*/true, frame.function);
  ++counters->calls;
  counters->bytes_received += size;
  if (!begun.ok() && link->window()->acquired() > link->window()->limit()) {
    return absl::ResourceExhaustedError(
        "it sends calls beyond the limit bytes_per_peer, and does not read the replies");
  }
  std::unique_ptr<TraceSpan> span;
  if (trace_->on()) {
    const std::optional<WorkerInfo> caller = peers_->Find(peer);
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
  std::move(forget).Cancel();
  call.body() = Body{std::move(packet), offset};
  service_->OnCall(std::move(call));
  return absl::OkStatus();
}

}  // namespace distgrad
