// The body of a request or a reply: what autograd has to know of the message, and the message.
// docs/wire.md has the layout.
#ifndef DISTGRAD_CORE_WORKER_CALL_BODY_H_
#define DISTGRAD_CORE_WORKER_CALL_BODY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"
#include "core/tensor/device_map.h"
#include "core/tensor/message.h"
#include "core/tensor/message_codec.h"
#include "core/transport/packet.h"
#include "core/worker/call_modes.h"

namespace distgrad {

// The part before the message. Fixed in size but for the list. A reply has the modes of its
// request: in inference mode its tensors arrive as inference tensors.
struct CallHeader {
  ContextId context = 0;                // 0: no context
  EdgeId edge = 0;                      // 0: no tensor of the message is recorded
  CallModes modes = {};                 // the caller's
  std::vector<uint32_t> recorded = {};  // the tensors that require grad, by place
};

// Appends the body. `header.edge` may be filled in later with SetEdge(). Returns where the body
// began.
absl::StatusOr<size_t> AppendCallBody(const CallHeader& header, const Message& message,
                                      Packet* packet, const DeviceMap& devices);
void SetEdge(size_t body_offset, EdgeId edge, Packet* packet);

// Returns whether the header of what that worker sent can be read, but for a lack of memory, and
// whether its edge is that worker's: what is wrong with an edge is said of who sent it. Needs no
// memory itself.
absl::Status CheckCallHeader(WorkerRank from, absl::string_view body);
// The two parts of reading: the header is needed even where the message is refused or unwanted.
// Each takes the packet and where its body begins; the second moves the segments out.
absl::StatusOr<CallHeader> ReadCallHeader(const Packet& packet, size_t offset);
absl::StatusOr<Message> ReadCallMessage(Packet& packet, size_t offset, const MessageLimits& limits);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALL_BODY_H_
