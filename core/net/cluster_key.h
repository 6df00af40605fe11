// The secret that all workers of a job share, and what is computed with it.
//
// While it is exchanged for another, without all workers starting anew at once, a worker has two
// keys: it uses the first, and accepts either.
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

// What an error says is to be set: the option or a variable.
inline constexpr char kClusterKeySetting[] =
    "the option key_file, DISTGRAD_KEY_FILE or DISTGRAD_KEY";

// Overwrites what the text and its spare room hold, and leaves it empty.
void Wipe(std::string* text);

// A text whose memory is overwritten before it is given back, so that it is not found there later.
class SecretText {
 public:
  SecretText() = default;
  explicit SecretText(absl::string_view text) : text_(text) {}
  SecretText(const SecretText&) = default;
  SecretText(SecretText&& other) noexcept { text_.swap(other.text_); }
  SecretText& operator=(SecretText other) noexcept {
    text_.swap(other.text_);
    return *this;
  }
  ~SecretText() { Wipe(&text_); }

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }

 private:
  std::string text_;
};

// Immutable but for assignment. Overwrites its memory before it gives it back.
class ClusterKey {
 public:
  // None.
  ClusterKey() = default;
  // `accepted`: the second one; "": there is but one.
  ClusterKey(absl::string_view used, absl::string_view accepted = "")  // NOLINT: implicit
      : used_(used), accepted_(accepted) {}
  ClusterKey(const std::string& used) : used_(used) {}  // NOLINT: implicit
  ClusterKey(const char* used) : used_(used) {}         // NOLINT: implicit

  bool empty() const { return used_.empty(); }
  // What this process proves itself by to those to which it connects, and signs entries with.
  const std::string& used() const { return used_.text(); }
  // What the others may have in its place; "" where there is no second one.
  const std::string& accepted() const { return accepted_.text(); }

 private:
  SecretText used_, accepted_;
};

// The cluster key of this process: the contents of `key_file`, or if that is empty of the file
// that DISTGRAD_KEY_FILE names, or DISTGRAD_KEY itself; empty where none is set. It is a line of
// text, or two lines of a key each; blanks around a line, and empty lines, are not part of it.
// kInvalidArgument if a key is too short, there are more than two, or both variables are set, and
// what reading the file says otherwise. Never says anything of the keys themselves.
absl::StatusOr<ClusterKey> LoadClusterKey(
    const std::string& key_file,
    const std::function<std::optional<std::string>(const std::string&)>& getenv);

// The same with this process's environment.
absl::StatusOr<ClusterKey> LoadClusterKey(const std::string& key_file);

// kInvalidArgument if one of the keys is neither empty nor long enough.
absl::Status CheckClusterKey(const ClusterKey& key);

using Digest = std::array<uint8_t, 32>;

// HMAC-SHA256. kInternal if the crypto library fails.
absl::StatusOr<Digest> Hmac(absl::string_view key, absl::string_view text);

// Takes equally long wherever the two differ.
bool SameDigest(const Digest& a, const Digest& b);

// Returns bytes that an attacker cannot foresee. kInternal if the machine has none.
absl::Status FillRandom(uint8_t* data, size_t size);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_CLUSTER_KEY_H_
