// The part that we use of the protocol of c10d's TCPStore, which torchrun's agent serves, and two
// requests of our own, by which a client of our server resumes after it has lost its connection.
//
// A request is one byte and its arguments; strings are a 64-bit length and the bytes; all numbers
// little-endian. A connection begins with kValidate. A key has a '/' in front, so that c10d's own
// are apart.
#ifndef DISTGRAD_CORE_RPC_STORE_TCP_STORE_PROTOCOL_H_
#define DISTGRAD_CORE_RPC_STORE_TCP_STORE_PROTOCOL_H_

#include <cstdint>

namespace distgrad {

enum class StoreRequest : uint8_t {
  kValidate = 0,  // kStoreMagic in 32 bits; no answer
  kSet = 1,       // key, value; no answer
  kGet = 3,       // key; the value
  kAdd = 4,       // key, 64-bit amount; the 64-bit sum
  kCheck = 5,     // 64-bit number of keys (we ask for 1), keys; a byte: 0 if they are there, else 1
  kPing = 13,     // 32 bits; the same

  // Known to our server alone. A client names itself, by 64 random bits, on each connection that it
  // makes; the answer is a byte, 1 if the server knows it already and else 0. The server closes
  // the client's former connection first, so that nothing that is still on its way there can be
  // done after what the client says next.
  kSession = 128,
  // kAdd with a 64-bit number before the key, another one for each addition of a session. When it
  // is that of the session's last addition, the server repeats its answer and adds nothing.
  kAddOnce = 129,
};

inline constexpr uint32_t kStoreMagic = 0x3C85F7CE;

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_STORE_TCP_STORE_PROTOCOL_H_
