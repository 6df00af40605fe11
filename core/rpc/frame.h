// The header at the front of every packet between two workers. docs/wire.md has the layout.
#ifndef DISTGRAD_CORE_RPC_FRAME_H_
#define DISTGRAD_CORE_RPC_FRAME_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"
#include "core/base/wire.h"

namespace distgrad {

enum class FrameKind : uint8_t {
  kHello = 1,      // the first packet of a connection: who opened it, and to whom
  kRequest = 2,    // a call of a function
  kReply = 3,      // its result, or the status of its failure
  kNotice = 4,     // one way, not answered
  kCancel = 5,     // nobody waits for the answer to a request any more
  kPing = 6,       // a heartbeat, which asks for a pong
  kPong = 7,       // its answer
  kLeaving = 8,    // the sender leaves the job: it takes no new calls
  kRefused = 9,    // why the receiver of a hello does not want the connection; the last packet
  kBulk = 10,      // large packets want a connection of their own
  kBulkPing = 11,  // a heartbeat on that connection, which asks for a bulk pong
  kBulkPong = 12,  // its answer, on the connection that the other one belongs to
};

inline constexpr uint32_t kWireMagic = 0x36474744;    // "DGG6"; changes with the wire format
inline constexpr size_t kMaxFunctionName = 1024;      // bytes
inline constexpr size_t kMaxErrorMessage = 16 << 10;  // bytes; longer ones are cut

struct Frame {
  FrameKind kind = FrameKind::kNotice;
  uint64_t call = 0;                // request, reply, cancel: numbers the caller's calls
  uint64_t link = 0;                // bulk: what the hello shall name; 0 asks for such a number
  int64_t timeout_us = 0;           // request: what was left of the deadline; 0: none
  absl::string_view function = {};  // request
  absl::Status status = {};         // reply; the body is empty unless OK. Refusal; not OK
};

// The first packet of a connection: names the opener, and the worker that it wants to reach.
struct Hello {
  WorkerRank from = 0;
  Incarnation from_incarnation = 0;
  WorkerRank to = 0;
  Incarnation to_incarnation = 0;
  uint64_t link = 0;  // not 0: for the large packets of that link, by the number `to` gave it
  // The number of this connection among those that `from` opens: a later one has a greater number.
  uint64_t number = 0;
  // The connections between the two that `from` has given up: of those that it has opened itself,
  // all with smaller numbers than `first_own`; of those that `to` has opened, than `first_other`.
  uint64_t first_own = 0, first_other = 0;
};

// Appends the header; the body follows.
void AppendFrame(const Frame& frame, std::string* out);
void AppendHello(const Hello& hello, std::string* out);

// Reads the header and leaves the reader at the body. `function` points into the reader's bytes.
absl::StatusOr<Frame> ReadFrame(WireReader& reader);
absl::StatusOr<Hello> ReadHello(WireReader& reader);

// Writes the number of a call and its timeout into a request header at the front of `bytes`.
void SetCall(uint64_t call, int64_t timeout_us, std::string* bytes);

// The one encoding of a status, also in notices; with its origin (core/base/origin.h).
void AppendStatus(const absl::Status& status, WireWriter& writer);
absl::Status ReadStatus(WireReader& reader);  // check reader.ok() afterwards

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_FRAME_H_
