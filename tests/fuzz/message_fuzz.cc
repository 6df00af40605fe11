// A message and its tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/ones.h>

#include "absl/types/span.h"
#include "core/base/check.h"
#include "core/tensor/message_codec.h"
#include "tests/fuzz/packet.h"
#include "tests/fuzz/target.h"

namespace distgrad {

// What was taken can be sent on, and arrives with the same shapes.
bool ReadHostile(absl::string_view bytes) {
  Packet packet = PacketFromInput(bytes);
  WireReader reader(packet.bytes);
  SegmentReader segments(absl::MakeSpan(packet.segments));
  const MessageLimits limits{.max_tensors = 64, .max_payload_bytes = 1 << 20};
  const absl::StatusOr<Message> message = ReadMessage(reader, segments, limits);
  if (!message.ok()) return false;
  DG_CHECK(message->tensors.size() <= limits.max_tensors);
  Packet again;
  const absl::Status appended = AppendMessage(*message, &again);
  DG_CHECK(appended.ok()) << appended;
  WireReader second(again.bytes);
  SegmentReader rest(absl::MakeSpan(again.segments));
  const absl::StatusOr<Message> same = ReadMessage(second, rest, limits);
  DG_CHECK(same.ok()) << same.status();
  DG_CHECK(same->payload == message->payload && same->tensors.size() == message->tensors.size());
  for (size_t i = 0; i < same->tensors.size(); ++i) {
    const at::Tensor &a = same->tensors[i], &b = message->tensors[i];
    DG_CHECK(a.defined() == b.defined());
    if (!a.defined()) continue;
    DG_CHECK(a.sizes() == b.sizes() && a.dtype() == b.dtype() && a.layout() == b.layout());
  }
  return true;
}

std::vector<std::string> GoodInputs() {
  const std::vector<Message> messages = {
      {"hello", {}},
      {"", {at::ones({2, 3}), at::Tensor(), at::arange(4, at::kLong)}},
      {"", {at::ones({1}).expand({5, 1000000}), at::ones({3, 4}).t(), at::ones({}).to(at::kHalf)}},
      {"", {at::eye(3).to_sparse(), at::ones({40, 40})}},  // the last one is a segment
      {"x", {at::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast), at::ones({0, 7})}},
  };
  std::vector<std::string> inputs;
  for (const Message& message : messages) {
    Packet packet;
    DG_CHECK(AppendMessage(message, &packet).ok());
    inputs.push_back(InputFromPacket(packet));
  }
  return inputs;
}

}  // namespace distgrad
