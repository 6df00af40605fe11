// Answers a call once, and counts it.
#include "core/rpc/incoming_call.h"

#include <cstdint>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "core/base/log.h"

namespace distgrad {
namespace {

// Made before main(), for later there may be no memory for them.
const absl::Status* const kUnanswered =
    new absl::Status(absl::InternalError("the handler ended without an answer"));
const absl::Status* const kNoMemory =
    new absl::Status(absl::ResourceExhaustedError("there was no memory for an answer"));

}  // namespace

class IncomingCall::Impl {
 public:
  Impl(std::shared_ptr<Link> link, WorkerRank from, const Frame& frame, absl::Time deadline,
       std::shared_ptr<Cancellation> cancellation, absl::Status refusal, Record record)
      : link(std::move(link)),
        from(from),
        call(frame.call),
        function(frame.function),
        deadline(deadline),
        cancellation(std::move(cancellation)),
        refusal(std::move(refusal)),
        record(std::move(record)),
        since(this->link->served().Now()) {
    if (this->record.span != nullptr) this->record.span->begin = since;
  }
  ~Impl() { Fail(*kUnanswered); }

  void Begin() {
    if (begun) return;
    begun = true;
    record.counters->queue_ns += TakeTime();
    if (record.span != nullptr) record.span->work = since;
  }

  bool Reply(Packet packet) {
    if (link == nullptr) return false;
    const uint64_t size = packet.size();
    try {
      if (size > link->limits().message_bytes) {
        Fail(absl::ResourceExhaustedError(absl::StrCat("the reply has ", size,
                                                       " bytes; limit message_bytes is ",
                                                       link->limits().message_bytes)));
        return false;
      }
      Count(size, absl::OkStatus());
      if (auto credit = link->window()->TryAcquire(size)) {
        Send(std::move(packet), *std::move(credit));
        return true;
      }
      // It stays one that is served, and so counts against those limits.
      link->window()->AcquireAsync(size, [to = link, call = call, packet = std::move(packet)](
                                             absl::StatusOr<SendWindow::Credit> credit) mutable {
        to->served().FreePlace(call);
        const absl::Cleanup end = [&] { to->served().End(); };
        if (!credit.ok()) return;
        try {
          to->Send(std::move(packet), *std::move(credit));
        } catch (const std::bad_alloc&) {
          Close(*to);
        }
      });
      link = nullptr;
      return true;
    } catch (const std::bad_alloc&) {
      FailWithoutMemory();
      return false;
    }
  }

  void Fail(const absl::Status& status) {
    if (link == nullptr) return;
    try {
      SendError(status);
    } catch (const std::bad_alloc&) {
      FailWithoutMemory();
    }
  }

  std::shared_ptr<Link> link;  // null once answered
  const WorkerRank from;
  const uint64_t call;
  const std::string function;
  const absl::Time deadline;
  const std::shared_ptr<Cancellation> cancellation;
  const absl::Status refusal;
  Record record;     // in the agent, which the link keeps alive
  absl::Time since;  // when it arrived, or began
  bool begun = false, counted = false, place_is_free = false;
  Body body;

 private:
  // What comes instead of an answer for which there was no memory. If there is none for this,
  // either, the caller hears that the connection has ended. To itself a worker has none, and waits
  // until the call's deadline.
  void FailWithoutMemory() {
    try {
      SendError(absl::ResourceExhaustedError("there was no memory for the answer"));
    } catch (const std::bad_alloc&) {
      FreePlace();
      Close(*link);
      End();
    }
  }
  static void Close(Link& link) {
    // The worker's way to itself has to stay, for it gets no other one.
    if (link.kind() != Link::Kind::kLoopback) return link.Close(*kNoMemory);
    DG_LOG(ERROR) << "a call is not answered: there is no memory";
  }

  // Throw where there is no memory; then another answer may be sent.
  void SendError(const absl::Status& status) {
    Packet packet;
    AppendFrame({.kind = FrameKind::kReply, .call = call, .status = status}, &packet.bytes);
    Count(packet.size(), status);
    Send(std::move(packet), {});
  }
  void Send(Packet packet, SendWindow::Credit credit) {
    FreePlace();
    link->Send(std::move(packet), std::move(credit));
    End();
  }

  void FreePlace() {
    if (cancellation == nullptr) return;  // it was refused
    if (!std::exchange(place_is_free, true)) link->served().FreePlace(call);
  }
  void End() {
    if (cancellation != nullptr) link->served().End();
    link = nullptr;
  }

  // What has passed since then, in ns.
  int64_t TakeTime() {
    const absl::Time now = link->served().Now();
    if (now == absl::InfinitePast() || since == absl::InfinitePast()) return 0;
    return absl::ToInt64Nanoseconds(now - std::exchange(since, now));
  }
  void Count(uint64_t bytes, const absl::Status& status) {
    if (std::exchange(counted, true)) return;
    CallCounters& counters = *record.counters;
    (begun ? counters.run_ns : counters.queue_ns) += TakeTime();
    counters.bytes_sent += bytes;
    if (!status.ok()) ++counters.errors;
    ++counters.ended;
    if (record.span != nullptr) record.span->bytes_sent = bytes;
    record.trace->End(std::move(record.span), since, status);
  }
};

IncomingCall::IncomingCall(std::shared_ptr<Link> link, WorkerRank from, const Frame& frame,
                           absl::Time deadline, std::shared_ptr<Cancellation> cancellation,
                           absl::Status refusal, Record record)
    : impl_(std::make_unique<Impl>(std::move(link), from, frame, deadline, std::move(cancellation),
                                   std::move(refusal), std::move(record))) {}
IncomingCall::IncomingCall(IncomingCall&&) noexcept = default;
IncomingCall& IncomingCall::operator=(IncomingCall&&) noexcept = default;
IncomingCall::~IncomingCall() = default;
WorkerRank IncomingCall::from() const { return impl_->from; }
const std::string& IncomingCall::function() const { return impl_->function; }
absl::Time IncomingCall::deadline() const { return impl_->deadline; }
Body& IncomingCall::body() { return impl_->body; }
const absl::Status& IncomingCall::refusal() const { return impl_->refusal; }
const std::shared_ptr<Cancellation>& IncomingCall::cancellation() const {
  return impl_->cancellation;
}
bool IncomingCall::is_cut_off() const { return impl_->link->dropped(); }
const std::shared_ptr<SendWindow>& IncomingCall::window() const { return impl_->link->window(); }
void IncomingCall::SetContext(ContextId context) {
  if (impl_->record.span != nullptr) impl_->record.span->context = context;
}
void IncomingCall::Begin() { impl_->Begin(); }
Packet IncomingCall::NewReply() const {
  Packet packet;
  AppendFrame({.kind = FrameKind::kReply, .call = impl_->call}, &packet.bytes);
  return packet;
}
bool IncomingCall::Reply(Packet reply) { return impl_->Reply(std::move(reply)); }
void IncomingCall::Fail(const absl::Status& status) { impl_->Fail(status); }

}  // namespace distgrad
