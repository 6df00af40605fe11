// Writes and reads the part of a call that autograd needs.
#include "core/worker/call_body.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

constexpr size_t kEdgeOffset = 11;  // behind the modes and the context

// Reads all but the list, of which it returns the length: so much is there.
absl::StatusOr<uint32_t> ReadUpToList(WireReader& reader, CallHeader& header) {
  header.modes = ReadCallModes(reader);
  header.context = reader.U64();
  header.edge = reader.U64();
  const uint32_t recorded = reader.U32();
  if (recorded > reader.remaining() / sizeof(uint32_t)) {
    return absl::InvalidArgumentError("a call body that is cut short");
  }
  DG_RETURN_IF_ERROR(reader.status("call body"));
  return recorded;
}

absl::StatusOr<CallHeader> ReadHeader(WireReader& reader) {
  CallHeader header;
  DG_ASSIGN_OR_RETURN(const uint32_t recorded, ReadUpToList(reader, header));
  header.recorded.reserve(recorded);
  for (uint32_t i = 0; i < recorded; ++i) header.recorded.push_back(reader.U32());
  return header;
}

}  // namespace

absl::StatusOr<size_t> AppendCallBody(const CallHeader& header, const Message& message,
                                      Packet* packet, const DeviceMap& devices) {
  const size_t offset = packet->bytes.size();
  WireWriter writer(&packet->bytes);
  AppendCallModes(header.modes, writer);
  writer.U64(header.context);
  writer.U64(header.edge);
  writer.U32(static_cast<uint32_t>(header.recorded.size()));
  for (uint32_t place : header.recorded) writer.U32(place);
  DG_RETURN_IF_ERROR(AppendMessage(message, packet, devices));
  return offset;
}

void SetEdge(size_t body_offset, EdgeId edge, Packet* packet) {
  for (int i = 0; i < 8; ++i) {
    packet->bytes[body_offset + kEdgeOffset + i] = static_cast<char>(edge >> (8 * i));
  }
}

absl::Status CheckCallHeader(WorkerRank from, absl::string_view body) {
  WireReader reader(body);
  CallHeader header;
  DG_RETURN_IF_ERROR(ReadUpToList(reader, header).status());
  if (header.edge != 0 && MakerOf(header.edge) != from) {
    return absl::InvalidArgumentError(absl::StrCat("edge ", header.edge, " is worker ",
                                                   MakerOf(header.edge), "'s, not its sender's"));
  }
  return absl::OkStatus();
}

absl::StatusOr<CallHeader> ReadCallHeader(const Packet& packet, size_t offset) {
  WireReader reader(absl::string_view(packet.bytes).substr(offset));
  return ReadHeader(reader);
}

absl::StatusOr<Message> ReadCallMessage(Packet& packet, size_t offset,
                                        const MessageLimits& limits) {
  WireReader reader(absl::string_view(packet.bytes).substr(offset));
  DG_ASSIGN_OR_RETURN(const CallHeader header, ReadHeader(reader));
  SegmentReader segments(absl::MakeSpan(packet.segments));
  try {
    DG_ASSIGN_OR_RETURN(Message message, ReadMessage(reader, segments, limits));
    for (size_t i = 0; i < header.recorded.size(); ++i) {
      const uint32_t place = header.recorded[i];
      if (i > 0 && place <= header.recorded[i - 1]) {
        return absl::InvalidArgumentError("the tensors that require grad are not in their order");
      }
      if (place >= message.tensors.size() || !message.tensors[place].defined() ||
          !(message.tensors[place].is_floating_point() || message.tensors[place].is_complex())) {
        return absl::InvalidArgumentError("a tensor that is said to require grad cannot");
      }
    }
    return message;
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad
