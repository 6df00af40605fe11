// The form of a message in a packet.
//
//   Packet packet;
//   absl::Status status = AppendMessage(message, &packet);    // as often as wanted
//   ...
//   WireReader reader(packet.bytes);
//   SegmentReader segments(absl::MakeSpan(packet.segments));
//   absl::StatusOr<Message> received = ReadMessage(reader, segments, limits);
//
// A tensor arrives with its dtype, sizes, and, where it has neither gaps nor overlaps, its
// strides (so channels-last stays channels-last). An expanded tensor sends each of its elements
// once and arrives expanded. All other strided tensors arrive contiguous: a slice sends its own
// elements, not the whole storage. Conjugate and negative views arrive resolved. Sparse COO
// arrives as sparse COO. Quantized tensors and other layouts are kUnimplemented. What autograd
// knows of a tensor is not sent: it arrives without history and without requires_grad.
//
// Tensors of an accelerator arrive on the device that the sender's DeviceMap gives for theirs. They
// go by way of the CPU; where the map carries GPUs, strided ones of more than kGpuByHostBytes
// are segments of a GPU (but for bools and parts of sparse tensors, which the reader has to read).
//
// All functions here are thread-safe.
#ifndef DISTGRAD_CORE_TENSOR_MESSAGE_CODEC_H_
#define DISTGRAD_CORE_TENSOR_MESSAGE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/wire.h"
#include "core/tensor/device_map.h"
#include "core/tensor/message.h"
#include "core/transport/packet.h"

namespace distgrad {

// Limits past one of which a message is refused, before anything is allocated for it.
struct MessageLimits {
  uint32_t max_tensors = 65536;
  uint64_t max_payload_bytes = uint64_t{1} << 30;
  int max_dims = 64;  // more than 64 is taken as 64
};

// Tensors of up to this many bytes are copied into Packet::bytes; each larger one is a segment.
inline constexpr size_t kInlineBytes = 4096;
// Tensors on a GPU of up to this many bytes, and of a message up to so many together, are copied to
// the host though there is a channel for GPUs: up to there two copies take less time than its
// messages (docs/cuda.md has the times).
inline constexpr size_t kGpuByHostBytes = size_t{256} << 10;
inline constexpr size_t kMessageByHostBytes = size_t{1} << 20;

// Hands out the segments of a packet in their order. Not thread-safe.
class SegmentReader {
 public:
  // Moves out of `segments`, which must outlive the reader.
  explicit SegmentReader(absl::Span<Segment> segments) : segments_(segments) {}

  size_t remaining() const { return segments_.size(); }

  // Returns the next segment; only while remaining() > 0.
  const Segment& Peek() const { return segments_.front(); }
  Segment Take() {
    Segment segment = std::move(segments_.front());
    segments_.remove_prefix(1);
    return segment;
  }

 private:
  absl::Span<Segment> segments_;
};

// Appends `message` to what the packet has. The segments that this makes are the tensors' own
// memory (and keep it alive): no thread may write to those tensors, resize them or free their
// storage until the packet is sent. Those of a GPU are read in the order of its current stream. On
// an error, as that of a device which has no place in `devices`, the packet is as it was.
absl::Status AppendMessage(const Message& message, Packet* packet,
                           const DeviceMap& devices = DeviceMap::Identity());

// Reads the next message; what follows it is left in `reader` and `segments`. Tensors that came
// in segments use that memory, and keep its owner alive; they share nothing else. Those of a GPU
// are there, for any stream, and are the current stream's as far as the allocator knows. Trusts
// nothing that it reads: kInvalidArgument for what no AppendMessage wrote,
// kResourceExhausted past a limit, kFailedPrecondition for a device that this process lacks.
absl::StatusOr<Message> ReadMessage(WireReader& reader, SegmentReader& segments,
                                    const MessageLimits& limits);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_MESSAGE_CODEC_H_
