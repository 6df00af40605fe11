// The header at the front of every packet.
#include "core/base/check.h"
#include "core/base/wire.h"
#include "core/rpc/frame.h"
#include "tests/fuzz/target.h"

namespace distgrad {

// What was taken is written again, and must be read as the same.
bool ReadHostile(absl::string_view bytes) {
  WireReader reader(bytes);
  const absl::StatusOr<Frame> frame = ReadFrame(reader);
  if (!frame.ok()) return false;
  std::string again;
  if (frame->kind == FrameKind::kHello) {
    const absl::StatusOr<Hello> hello = ReadHello(reader);
    if (!hello.ok()) return false;
    AppendHello(*hello, &again);
  } else {
    AppendFrame(*frame, &again);
    if (frame->kind == FrameKind::kRequest) SetCall(frame->call, frame->timeout_us, &again);
  }
  WireReader second(again);
  const absl::StatusOr<Frame> same = ReadFrame(second);
  DG_CHECK(same.ok()) << same.status();
  DG_CHECK(same->kind == frame->kind && same->call == frame->call && same->link == frame->link &&
           same->timeout_us == frame->timeout_us && same->function == frame->function &&
           same->status == frame->status);
  return true;
}

std::vector<std::string> GoodInputs() {
  std::vector<std::string> inputs(5);
  AppendFrame({.kind = FrameKind::kRequest, .function = "square"}, &inputs[0]);
  SetCall(7, 1500, &inputs[0]);
  AppendFrame({.kind = FrameKind::kReply, .call = 3}, &inputs[1]);
  AppendFrame({.kind = FrameKind::kReply, .call = 4, .status = absl::NotFoundError("none")},
              &inputs[2]);
  AppendHello({.from = 1,
               .from_incarnation = 11,
               .to = 2,
               .to_incarnation = 22,
               .link = 3,
               .number = 4,
               .first_own = 5,
               .first_other = 6},
              &inputs[3]);
  AppendFrame({.kind = FrameKind::kBulk, .link = 5}, &inputs[4]);
  for (const Frame& frame :
       {Frame{.kind = FrameKind::kNotice}, Frame{.kind = FrameKind::kCancel, .call = 6},
        Frame{.kind = FrameKind::kPing}, Frame{.kind = FrameKind::kPong},
        Frame{.kind = FrameKind::kLeaving},
        Frame{.kind = FrameKind::kRefused, .status = absl::UnavailableError("lost")},
        Frame{.kind = FrameKind::kBulkPing}, Frame{.kind = FrameKind::kBulkPong}}) {
    AppendFrame(frame, &inputs.emplace_back());
  }
  return inputs;
}

}  // namespace distgrad
