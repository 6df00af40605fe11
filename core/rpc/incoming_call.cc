// Answers a call once, and counts it.
#include "core/rpc/incoming_call.h"

#include <cstdint>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace distgrad {

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
  ~Impl() {
    if (link) Fail(absl::InternalError("the handler ended without an answer"));
  }

  void Begin() {
    if (begun) return;
    begun = true;
    record.counters->queue_ns += TakeTime();
    if (record.span != nullptr) record.span->work = since;
  }

  void Reply(Packet packet) {
    if (link == nullptr) return;
    const uint64_t size = packet.size();
    if (size > link->limits().message_bytes) {
      return Fail(absl::ResourceExhaustedError(absl::StrCat("the reply has ", size,
                                                            " bytes; limit message_bytes is ",
                                                            link->limits().message_bytes)));
    }
    Count(size, absl::OkStatus());
    const auto to = std::exchange(link, nullptr);
    if (auto credit = to->window()->TryAcquire(size)) {
      to->served().FreePlace(call);
      const absl::Cleanup end = [&] { to->served().End(); };
      to->Send(std::move(packet), *std::move(credit));
      return;
    }
    // It stays one that is served, and so counts against those limits.
    to->window()->AcquireAsync(size, [to, call = call, packet = std::move(packet)](
                                         absl::StatusOr<SendWindow::Credit> credit) mutable {
      to->served().FreePlace(call);
      const absl::Cleanup end = [&] { to->served().End(); };
      if (credit.ok()) to->Send(std::move(packet), *std::move(credit));
    });
  }

  void Fail(const absl::Status& status) {
    if (link == nullptr) return;
    Packet packet;
    AppendFrame({.kind = FrameKind::kReply, .call = call, .status = status}, &packet.bytes);
    Count(packet.size(), status);
    const auto to = std::exchange(link, nullptr);
    const bool was_begun = cancellation != nullptr;  // it was not refused
    if (was_begun) to->served().FreePlace(call);
    const absl::Cleanup end = [&] {
      if (was_begun) to->served().End();
    };
    to->Send(std::move(packet));
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
  bool begun = false;
  Body body;

 private:
  // What has passed since then, in ns.
  int64_t TakeTime() {
    const absl::Time now = link->served().Now();
    if (now == absl::InfinitePast() || since == absl::InfinitePast()) return 0;
    return absl::ToInt64Nanoseconds(now - std::exchange(since, now));
  }
  void Count(uint64_t bytes, const absl::Status& status) {
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
void IncomingCall::Reply(Packet reply) { impl_->Reply(std::move(reply)); }
void IncomingCall::Fail(const absl::Status& status) { impl_->Fail(status); }

}  // namespace distgrad
