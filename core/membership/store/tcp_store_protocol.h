// The part that we use of the protocol of c10d's TCPStore, which torchrun's agent serves, and
// requests of our own, with which a client of our server resumes after it has lost its connection,
// and waits without asking again and again.
//
// A request is one byte and its fields; strings are a 64-bit length and the bytes; all numbers
// little-endian. A connection begins with kValidate. A key has a '/' in front, so that c10d's own
// are apart.
//
// Whoever reads gets bytes that may come from anybody: //tests/fuzz:store_test has the readers of
// both ends, and //tests/fuzz:store_answers_test those of tcp_store_answers.h.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_PROTOCOL_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_PROTOCOL_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/membership/store.h"

namespace distgrad {

enum class StoreRequestKind : uint8_t {
  // Known to both servers.
  kValidate = 0,  // kStoreMagic in 32 bits; no answer
  kSet = 1,       // key, value; no answer
  kPing = 13,     // 32 bits; the same

  // Known to c10d's server alone.
  kCompareSet = 2,  // key, expected, desired; what it holds then, or `expected` if it is not there
  kAdd = 4,         // key, 64-bit amount; the 64-bit sum
  kDeleteKey = 8,   // key; a 64-bit number of keys

  // Known to our server alone. A client names itself, by 64 random bits, on each connection that it
  // makes; the answer is a byte, 1 if the server knows it already and else 0; or kStoreIsFull. The
  // server closes the client's former connection first, so that nothing that is still on its way
  // there can be done after what the client says next.
  kSession = 128,
  // What changes something begins with a 64-bit number, another one for each change of a session.
  // When it is that of the session's last change, the server repeats its answer and does nothing:
  // the client has lost that answer, and another client may have changed the same key since. One
  // for which there is no room is answered by kStoreIsFull, changes nothing, and may be repeated.
  // kAddOnce: key, 64-bit amount. The answer is a byte, 0 if the key holds no number and else 1,
  // and the 64-bit sum; 0 where there is none.
  kAddOnce = 129,
  // How many bytes follow, in 32 bits, and a StoreAwait. The server answers when one of its keys
  // holds something else, or the time is over, or when the client says anything more: how many
  // bytes
  // follow, in 32 bits, and a StoreAwaitAnswer.
  kAwait = 130,
  kDeleteOnce = 131,  // key; a byte, 1
  kSetOnce = 132,     // key, value; a byte, 1
};

inline constexpr uint32_t kStoreMagic = 0x3C85F7CE;
// In place of the byte of an answer: there is no room.
inline constexpr uint8_t kStoreIsFull = 2;

struct StoreRequest {
  StoreRequestKind kind = StoreRequestKind::kPing;
  // What is not among a kind's fields stays as it is here. Text refers to the bytes that were read.
  uint32_t number = 0;
  uint64_t session = 0;
  uint64_t change = 0;
  int64_t amount = 0;
  absl::string_view key = {};  // without '/'
  absl::string_view expected = {};
  absl::string_view value = {};
  absl::string_view await = {};
};

void AppendStoreRequest(const StoreRequest& request, std::string* out);

// Reads the first request of `in` and returns its size, or 0 if not all of it is there.
// kInvalidArgument if no more bytes can make it a request.
absl::StatusOr<size_t> DecodeStoreRequest(absl::string_view in, StoreRequest* request);

// Limits of kAwait.
inline constexpr size_t kMaxAwaitBytes = 2 << 20;
inline constexpr size_t kMaxAwaitKeys = 256;
inline constexpr size_t kMaxAnswer = 4 << 20;  // bytes, before the last value

// What a client waits for: 32 bits of milliseconds, and to the end of the bytes, for each key: the
// key without '/' (32-bit length), and what the client has seen there. That is a byte, 0 for
// nothing and else 1, and then the value (32-bit length).
struct StoreAwait {
  uint32_t milliseconds = 0;
  std::vector<std::pair<std::string, Store::Value>> seen = {};
};

std::string EncodeStoreAwait(const StoreAwait& await);
absl::StatusOr<StoreAwait> DecodeStoreAwait(absl::string_view bytes);

// The answer: of how many keys it tells, from the first on, in 32 bits, and what each holds, as
// above. It tells of one at least, and of no more once it has kMaxAnswer bytes. In place of the
// number kStoreFull: there is no room to remember what the client waits for.
inline constexpr uint32_t kStoreFull = 0xFFFFFFFF;

void AppendStoreValue(const std::string* value, std::string* out);  // null: nothing

// The values of up to `keys` keys. kResourceExhausted for kStoreFull, and kInternal for anything
// that is no answer to a question for so many.
absl::StatusOr<std::vector<Store::Value>> DecodeStoreAwaitAnswer(absl::string_view answer,
                                                                 size_t keys);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_PROTOCOL_H_
