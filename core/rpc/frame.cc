// Writes and reads the header of a packet.
#include "core/rpc/frame.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/origin.h"

namespace distgrad {
namespace {

constexpr size_t kCallOffset = 5;  // behind the magic and the kind; the timeout follows
constexpr uint8_t kNoOrigin = 0;
constexpr int kHighestCode = static_cast<int>(absl::StatusCode::kUnauthenticated);

}  // namespace

void AppendStatus(const absl::Status& status, WireWriter& writer) {
  writer.U8(static_cast<uint8_t>(status.code()));
  writer.Bytes(status.message().substr(0, kMaxErrorMessage));
  if (status.ok()) return;
  const std::optional<ErrorOrigin> origin = OriginOf(status);
  writer.U8(origin.has_value() ? static_cast<uint8_t>(origin->by) : kNoOrigin);
  writer.U16(origin.has_value() ? origin->worker : WorkerRank{0});
}

absl::Status ReadStatus(WireReader& reader) {
  const uint8_t code = reader.U8();
  const absl::string_view message = reader.Bytes();
  absl::Status status(
      code <= kHighestCode ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      message);
  if (status.ok()) return status;
  const uint8_t by = reader.U8();
  const WorkerRank worker = reader.U16();
  // One of a kind that is not known is as good as none.
  if (by != static_cast<uint8_t>(ErrorOrigin::By::kDistgrad) &&
      by != static_cast<uint8_t>(ErrorOrigin::By::kHandler)) {
    return status;
  }
  return WithOrigin(std::move(status), {worker, static_cast<ErrorOrigin::By>(by)});
}

void AppendFrame(const Frame& frame, std::string* out) {
  WireWriter writer(out);
  writer.U32(kWireMagic);
  writer.U8(static_cast<uint8_t>(frame.kind));
  switch (frame.kind) {
    case FrameKind::kRequest:
      writer.U64(frame.call);
      writer.I64(frame.timeout_us);
      writer.Str16(frame.function);
      break;
    case FrameKind::kReply:
      writer.U64(frame.call);
      AppendStatus(frame.status, writer);
      break;
    case FrameKind::kCancel:
      writer.U64(frame.call);
      break;
    case FrameKind::kRefused:
      AppendStatus(frame.status, writer);
      break;
    case FrameKind::kBulk:
      writer.U64(frame.link);
      break;
    case FrameKind::kHello:
    case FrameKind::kNotice:
    case FrameKind::kPing:
    case FrameKind::kPong:
    case FrameKind::kBulkPing:
    case FrameKind::kBulkPong:
    case FrameKind::kLeaving:
      break;
  }
}

void SetCall(uint64_t call, int64_t timeout_us, std::string* bytes) {
  const auto timeout = static_cast<uint64_t>(timeout_us);
  for (int i = 0; i < 8; ++i) {
    (*bytes)[kCallOffset + i] = static_cast<char>(call >> (8 * i));
    (*bytes)[kCallOffset + 8 + i] = static_cast<char>(timeout >> (8 * i));
  }
}

absl::StatusOr<Frame> ReadFrame(WireReader& reader) {
  Frame frame;
  const uint32_t magic = reader.U32();
  if (reader.ok() && magic != kWireMagic) {
    return absl::InvalidArgumentError(
        "not a distgrad packet, or of another version of the wire format");
  }
  frame.kind = static_cast<FrameKind>(reader.U8());
  switch (frame.kind) {
    case FrameKind::kRequest:
      frame.call = reader.U64();
      frame.timeout_us = reader.I64();
      frame.function = reader.Str16();
      if (reader.ok() && (frame.timeout_us < 0 || frame.function.empty() ||
                          frame.function.size() > kMaxFunctionName)) {
        return absl::InvalidArgumentError("a request with an impossible deadline or function name");
      }
      break;
    case FrameKind::kReply:
      frame.call = reader.U64();
      frame.status = ReadStatus(reader);
      break;
    case FrameKind::kCancel:
      frame.call = reader.U64();
      break;
    case FrameKind::kRefused:
      frame.status = ReadStatus(reader);
      if (reader.ok() && frame.status.ok()) {
        return absl::InvalidArgumentError("a refusal that gives no reason");
      }
      break;
    case FrameKind::kBulk:
      frame.link = reader.U64();
      break;
    case FrameKind::kHello:
    case FrameKind::kNotice:
    case FrameKind::kPing:
    case FrameKind::kPong:
    case FrameKind::kBulkPing:
    case FrameKind::kBulkPong:
    case FrameKind::kLeaving:
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("a packet of unknown kind ", static_cast<int>(frame.kind)));
  }
  absl::Status read = reader.status("frame");
  if (!read.ok()) return read;
  return frame;
}

void AppendHello(const Hello& hello, std::string* out) {
  AppendFrame({.kind = FrameKind::kHello}, out);
  WireWriter writer(out);
  writer.U16(hello.from);
  writer.U64(hello.from_incarnation);
  writer.U16(hello.to);
  writer.U64(hello.to_incarnation);
  writer.U64(hello.link);
  writer.U64(hello.number);
  writer.U64(hello.first_own);
  writer.U64(hello.first_other);
}

absl::StatusOr<Hello> ReadHello(WireReader& reader) {
  Hello hello;
  hello.from = reader.U16();
  hello.from_incarnation = reader.U64();
  hello.to = reader.U16();
  hello.to_incarnation = reader.U64();
  hello.link = reader.U64();
  hello.number = reader.U64();
  hello.first_own = reader.U64();
  hello.first_other = reader.U64();
  absl::Status read = reader.status("hello");
  if (!read.ok()) return read;
  return hello;
}

}  // namespace distgrad
