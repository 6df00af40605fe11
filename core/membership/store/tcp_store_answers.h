// Reads what a store's server answers to the requests of tcp_store_protocol.h, for its client.
//
// The server may be anybody: no answer makes its reader take more memory than the answer's kind may
// have. //tests/fuzz:store_answers_test reads hostile ones.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_ANSWERS_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_ANSWERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/deadline.h"
#include "core/membership/store.h"
#include "core/net/socket.h"

namespace distgrad {

// What a client sends as the number of a kPing: any number.
inline constexpr uint32_t kStorePing = 0x64677264;

// To a kPing; kUnavailable where it is another number.
absl::Status ReadPong(Socket& socket, Deadline deadline);
// To a kSetOnce or a kDeleteOnce. This one and the next two: kResourceExhausted for kStoreIsFull.
absl::Status ReadDone(Socket& socket, Deadline deadline);
// To a kSession: whether the server knows it already.
absl::StatusOr<bool> ReadSessionAnswer(Socket& socket, Deadline deadline);
// To a kAddOnce: the sum; nothing where the key holds no number.
absl::StatusOr<std::optional<int64_t>> ReadSumOnce(Socket& socket, Deadline deadline);
// To c10d's kAdd, and to its kDeleteKey.
absl::StatusOr<int64_t> ReadNumber(Socket& socket, Deadline deadline);
// To a kAwait of so many keys.
absl::StatusOr<std::vector<Store::Value>> ReadAwaitAnswer(Socket& socket, size_t keys,
                                                          Deadline deadline);
// To as many kCompareSet, each of which expects `nothing`: what no key holds.
absl::StatusOr<std::vector<Store::Value>> ReadComparedValues(Socket& socket, size_t keys,
                                                             absl::string_view nothing,
                                                             Deadline deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_ANSWERS_H_
