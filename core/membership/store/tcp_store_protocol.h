// The part that we use of the protocol of c10d's TCPStore, which torchrun's agent serves, and
// requests of our own, with which a client of our server resumes after it has lost its connection,
// and waits without asking again and again.
//
// A request is one byte and its arguments; strings are a 64-bit length and the bytes; all numbers
// little-endian. A connection begins with kValidate. A key has a '/' in front, so that c10d's own
// are apart.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_PROTOCOL_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_PROTOCOL_H_

#include <cstddef>
#include <cstdint>

namespace distgrad {

enum class StoreRequest : uint8_t {
  // Known to both servers.
  kValidate = 0,  // kStoreMagic in 32 bits; no answer
  kSet = 1,       // key, value; no answer
  kPing = 13,     // 32 bits; the same

  // Known to c10d's server alone.
  kCompareSet = 2,  // key, expected, desired; what it holds then, or `expected` if it is not there
  kAdd = 4,         // key, 64-bit amount; the 64-bit sum
  kDeleteKey = 8,   // key; a 64-bit number of keys

  // Known to our server alone. A client names itself, by 64 random bits, on each connection that it
  // makes; the answer is a byte, 1 if the server knows it already and else 0. The server closes
  // the client's former connection first, so that nothing that is still on its way there can be
  // done after what the client says next.
  kSession = 128,
  // What changes something begins with a 64-bit number, another one for each change of a session.
  // When it is that of the session's last change, the server repeats its answer and does nothing:
  // the client has lost that answer, and another client may have changed the same key since.
  // kAddOnce: key, 64-bit amount. The answer is a byte, 0 if the key holds no number and else 1,
  // and the 64-bit sum.
  kAddOnce = 129,
  // How many bytes follow, in 32 bits; milliseconds in 32 bits; and to their end, for each key: the
  // key without '/' (32-bit length), and what the client has seen there. The server answers when
  // one of them holds something else, or the time is over, or when the client says anything more:
  // how many bytes follow, in 32 bits; of how many keys they tell, from the first on, as long as
  // they are fewer than kMaxAnswer; and what each holds. What a key holds is a byte, 0 for nothing
  // and else 1, and then the value (32-bit length). kStoreFull in place of the number of keys:
  // there is no room to remember what it waits for.
  kAwait = 130,
  kDeleteOnce = 131,  // key; a byte, 1
  kSetOnce = 132,     // key, value; a byte, 1
};

inline constexpr uint32_t kStoreMagic = 0x3C85F7CE;
inline constexpr uint32_t kStoreFull = 0xFFFFFFFF;

// Limits of kAwait.
inline constexpr size_t kMaxAwaitBytes = 2 << 20;
inline constexpr size_t kMaxAwaitKeys = 256;
inline constexpr size_t kMaxAnswer = 4 << 20;  // bytes, before the last value

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_PROTOCOL_H_
