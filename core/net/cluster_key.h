// The secret that all workers of a job share, and what is computed with it.
#ifndef DISTGRAD_CORE_NET_CLUSTER_KEY_H_
#define DISTGRAD_CORE_NET_CLUSTER_KEY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// An attacker who sees one handshake may try keys at leisure, so a key must be too long to guess.
inline constexpr size_t kMinKeyBytes = 16;

// The cluster key of this process: the contents of `key_file`, or if that is empty of the file
// that DISTGRAD_KEY_FILE names, or DISTGRAD_KEY itself; "" where none is set. Blanks and newlines
// at its ends are not part of it. kInvalidArgument if it is too short or both variables are set,
// and what reading the file says otherwise. Never says anything of the key itself.
absl::StatusOr<std::string> LoadClusterKey(
    const std::string& key_file,
    const std::function<std::optional<std::string>(const std::string&)>& getenv);

// The same with this process's environment.
absl::StatusOr<std::string> LoadClusterKey(const std::string& key_file);

// kInvalidArgument if `key` is neither empty nor long enough.
absl::Status CheckClusterKey(absl::string_view key);

using Digest = std::array<uint8_t, 32>;

// HMAC-SHA256. kInternal if the crypto library fails.
absl::StatusOr<Digest> Hmac(absl::string_view key, absl::string_view text);

// Takes equally long wherever the two differ.
bool SameDigest(const Digest& a, const Digest& b);

// Returns bytes that an attacker cannot foresee. kInternal if the machine has none.
absl::Status FillRandom(uint8_t* data, size_t size);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_CLUSTER_KEY_H_
