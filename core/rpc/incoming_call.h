// A call that a peer made to this worker, on its way to an answer.
#ifndef DISTGRAD_CORE_RPC_INCOMING_CALL_H_
#define DISTGRAD_CORE_RPC_INCOMING_CALL_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/cancellation.h"
#include "core/base/ids.h"
#include "core/base/trace.h"
#include "core/rpc/call_metrics.h"
#include "core/rpc/frame.h"
#include "core/rpc/link.h"
#include "core/rpc/send_window.h"
#include "core/transport/packet.h"

namespace distgrad {

// What arrived: the packet and where its body starts.
struct Body {
  Packet packet;
  size_t offset = 0;

  absl::string_view bytes() const { return absl::string_view(packet.bytes).substr(offset); }
};

// A call that a peer made to this worker. Answered exactly once, on any thread; one that is
// destroyed unanswered tells its caller so. Movable.
class IncomingCall {
 public:
  // What counts and records the call; the link's agent must live as long.
  struct Record {
    CallCounters* counters;
    TraceRecorder* trace;
    std::unique_ptr<TraceSpan> span;  // null unless a trace runs
  };

  // Made by the agent. With a `cancellation` the call counts as served by its link, until it is
  // answered; else it is refused.
  IncomingCall(std::shared_ptr<Link> link, WorkerRank from, const Frame& frame, absl::Time deadline,
               std::shared_ptr<Cancellation> cancellation, absl::Status refusal, Record record);
  IncomingCall(IncomingCall&&) noexcept;
  IncomingCall& operator=(IncomingCall&&) noexcept;
  ~IncomingCall();

  WorkerRank from() const;
  const std::string& function() const;
  absl::Time deadline() const;
  Body& body();

  // Returns the error to fail the call with if it is past a limit; else OK.
  const absl::Status& refusal() const;
  // Returns what is cancelled when the caller waits no longer, or is gone.
  const std::shared_ptr<Cancellation>& cancellation() const;

  // Returns whether the connection that it came on has ended, or been given up: as it was being
  // read on another thread, OnPeerLost() may have gone by. Until it is answered.
  bool is_cut_off() const;

  // Returns the window of what waits to be sent to the caller. While it has no credit left, better
  // not begin.
  const std::shared_ptr<SendWindow>& window() const;

  // Says which context the call belongs to, for the trace.
  void SetContext(ContextId context);
  // Says that the handler begins.
  void Begin();

  // Returns a packet for Reply(), to which the body is to be appended.
  Packet NewReply() const;
  // Sends a reply without waiting: where there is no credit, it goes when there is. Returns false
  // if the call has failed instead, because the reply is too large or there was no memory.
  bool Reply(Packet reply);
  void Fail(const absl::Status& status);

 private:
  class Impl;

  std::unique_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_INCOMING_CALL_H_
