// Makes packets of messages, with the edges of their context, and messages of packets: what calls
// and their answers have in common.
#ifndef DISTGRAD_CORE_WORKER_CALL_MESSAGES_H_
#define DISTGRAD_CORE_WORKER_CALL_MESSAGES_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/autograd/context_record.h"
#include "core/autograd/engine.h"
#include "core/base/ids.h"
#include "core/rpc/limits.h"
#include "core/tensor/message.h"
#include "core/transport/packet.h"
#include "core/worker/call_body.h"

namespace distgrad {

// Thread-safe. Its arguments outlive it.
class CallMessages {
 public:
  CallMessages(const Limits& limits, Engine* engine, EngineNetwork* network)
      : limits_(limits), engine_(engine), network_(network) {}

  // The steps from a message to a packet: its bytes, which differ by receiver only for tensors of
  // devices; its send node, of the tensors' history as it is then, null where nothing is recorded;
  // and the edge, unique, 0 for null. `of_operator`: see ContextRecord::SendEnd.
  absl::StatusOr<size_t> Encode(CallHeader& header, const std::shared_ptr<ContextRecord>& context,
                                WorkerRank to, const Message& message, Packet* packet) const;
  static std::shared_ptr<SourceNode> MakeSend(const CallHeader& header, const Message& message);
  absl::StatusOr<EdgeId> Record(const std::shared_ptr<ContextRecord>& context, WorkerRank to,
                                std::shared_ptr<SourceNode> send, bool of_operator, size_t body,
                                Packet* packet) const;

  // Reads a message, the first step back. Takes the segments out of the packet.
  absl::StatusOr<Message> Read(Packet& packet, size_t body) const {
    return ReadCallMessage(packet, body, engine_->message_limits());
  }
  // Makes the recv node of the message's edge, if it has one.
  absl::Status TakeEdge(const std::shared_ptr<ContextRecord>& context, WorkerRank from,
                        const CallHeader& header, absl::StatusOr<Message>& message) const;

 private:
  const Limits limits_;
  Engine* const engine_;
  EngineNetwork* const network_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALL_MESSAGES_H_
