// Writes notices into a packet and reads them back, with every length checked.
#include "core/autograd/notice.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/rpc/frame.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

constexpr uint8_t kRetain = 1, kUncounted = 2, kReached = 4;

// Eight to a byte, the first in its lowest bit.
void AppendBits(absl::Span<const bool> bits, WireWriter& writer) {
  for (size_t i = 0; i < bits.size(); i += 8) {
    uint8_t byte = 0;
    for (size_t j = i; j < std::min(i + 8, bits.size()); ++j) byte |= bits[j] << (j - i);
    writer.U8(byte);
  }
}

absl::InlinedVector<bool, 8> ReadBits(WireReader& reader, size_t count) {
  absl::InlinedVector<bool, 8> bits(count);
  for (size_t i = 0; i < count; i += 8) {
    const uint8_t byte = reader.U8();
    for (size_t j = i; j < std::min(i + 8, count); ++j) bits[j] = (byte >> (j - i)) & 1;
  }
  return bits;
}

}  // namespace

absl::Status AppendNotice(const Notice& notice, Packet* packet, const DeviceMap& devices) {
  // What else is in the packet must stay readable, also where there is no memory for this.
  const size_t bytes = packet->bytes.size(), segments = packet->segments.size();
  absl::Cleanup undo = [&] {
    packet->bytes.resize(bytes);
    packet->segments.resize(segments);
  };
  WireWriter writer(&packet->bytes);
  writer.U8(static_cast<uint8_t>(notice.kind));
  writer.U64(notice.context);
  writer.U64(notice.pass);
  writer.U64(notice.settled);
  writer.U8(static_cast<uint8_t>((notice.retain_graph ? kRetain : 0) |
                                 (notice.uncounted ? kUncounted : 0) |
                                 (notice.reached.empty() ? 0 : kReached)));
  switch (notice.kind) {
    case Notice::Kind::kEdge:
      writer.U64(notice.edge);
      if (!notice.reached.empty()) {
        try {
          DG_RETURN_IF_ERROR(AppendMessage(Message{"", notice.gradients}, packet, devices));
        } catch (...) {
          return StatusFromException(std::current_exception());
        }
        AppendBits(notice.reached, writer);
      }
      break;
    case Notice::Kind::kAck:
      writer.U32(notice.count);
      break;
    case Notice::Kind::kAbort:
      AppendStatus(notice.status, writer);
      break;
    case Notice::Kind::kReport:
      writer.Str16(absl::string_view(notice.awaited).substr(0, kMaxReport));
      writer.U16(static_cast<uint16_t>(notice.peers.size()));
      for (const WorkerRank peer : notice.peers) writer.U16(peer);
      break;
    case Notice::Kind::kStart:
    case Notice::Kind::kRelease:
    case Notice::Kind::kKnown:
      break;
  }
  std::move(undo).Cancel();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Notice>> ReadNotices(Packet& packet, size_t offset,
                                                const MessageLimits& limits) {
  WireReader reader(absl::string_view(packet.bytes).substr(offset));
  SegmentReader segments(absl::MakeSpan(packet.segments));
  std::vector<Notice> notices;
  while (reader.ok() && reader.remaining() > 0) {
    Notice notice;
    notice.kind = static_cast<Notice::Kind>(reader.U8());
    notice.context = reader.U64();
    notice.pass = reader.U64();
    notice.settled = reader.U64();
    const uint8_t flags = reader.U8();
    notice.retain_graph = flags & kRetain;
    notice.uncounted = flags & kUncounted;
    switch (notice.kind) {
      case Notice::Kind::kEdge: {
        notice.edge = reader.U64();
        if (!(flags & kReached)) break;
        DG_ASSIGN_OR_RETURN(Message message, ReadMessage(reader, segments, limits));
        notice.gradients = std::move(message.tensors);
        if (notice.gradients.empty()) {
          return absl::InvalidArgumentError(
              absl::StrCat("edge ", notice.edge, " is reached, and has no tensors"));
        }
        notice.reached = ReadBits(reader, notice.gradients.size());
        for (size_t i = 0; i < notice.gradients.size(); ++i) {
          if (notice.gradients[i].defined() && !notice.reached[i]) {
            return absl::InvalidArgumentError(absl::StrCat(
                "gradient ", i, " of edge ", notice.edge, " is there, but said not to be reached"));
          }
        }
        break;
      }
      case Notice::Kind::kAck:
        notice.count = reader.U32();
        break;
      case Notice::Kind::kAbort:
        notice.status = ReadStatus(reader);
        if (notice.status.ok()) notice.status = absl::UnknownError("aborted without a reason");
        break;
      case Notice::Kind::kReport:
        notice.awaited = std::string(reader.Str16().substr(0, kMaxReport));
        for (uint16_t left = reader.U16(); left > 0 && reader.ok(); --left)
          notice.peers.push_back(reader.U16());
        break;
      case Notice::Kind::kStart:
      case Notice::Kind::kRelease:
      case Notice::Kind::kKnown:
        break;
      default:
        return absl::InvalidArgumentError(
            absl::StrCat("a notice of unknown kind ", static_cast<int>(notice.kind)));
    }
    notices.push_back(std::move(notice));
  }
  DG_RETURN_IF_ERROR(reader.status("notices"));
  return notices;
}

}  // namespace distgrad
