// What strangers send to a listener, or a false listener to us. The bits of the first byte say
// which end we are, and what we have; then come chunks, each with its size in a byte.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "core/base/wire.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

constexpr absl::string_view kKey = "a key that nobody can guess", kOld = "the key before that one";

// Of the first byte.
constexpr uint8_t kIsClient = 1, kHasKey = 2, kHasCertificates = 4, kEncryptsUnix = 8,
                  kAcceptsOldKey = 16;
constexpr uint8_t kOptions = 32;  // so many there are

Handshake Begin(uint8_t options, Handshake::Role role) {
  const ClusterKey key(options & kHasKey ? kKey : "",
                       options & kHasKey && options & kAcceptsOldKey ? kOld : "");
  auto handshake = Handshake::Create(role, key, Token{1, 2, 3}, (options & kHasCertificates) != 0,
                                     (options & kEncryptsUnix) != 0);
  DG_CHECK(handshake.ok()) << handshake.status();
  return *std::move(handshake);
}

// Whether the other end has, by its hello, a key and certificates if and only if we do.
bool HasTheSame(uint8_t options, absl::string_view hello) {
  WireReader reader(hello.substr(sizeof("distgrad") - 1));
  reader.U16();  // its version
  const uint16_t flags = reader.U16();
  return ((flags & 1) != 0) == ((options & kHasKey) != 0) &&
         ((flags & 2) != 0) == ((options & kHasCertificates) != 0);
}

// Sends one message of ours in chunks of `size` bytes.
void AppendChunks(absl::string_view message, size_t size, std::string* input) {
  for (; !message.empty(); message.remove_prefix(std::min(size, message.size()))) {
    const absl::string_view chunk = message.substr(0, size);
    *input += static_cast<char>(chunk.size());
    input->append(chunk.data(), chunk.size());
  }
}

}  // namespace

// Taken is who gets as far as his hello. Nobody gets further: our random bytes are new each time,
// so no proof can be known before.
bool ReadHostile(absl::string_view bytes) {
  WireReader reader(bytes);
  const uint8_t first = reader.U8();
  const auto role = first & kIsClient ? Handshake::Role::kClient : Handshake::Role::kServer;
  Handshake handshake = Begin(first, role);
  size_t sent = handshake.TakeOutput().size();
  std::string received;
  while (reader.remaining() > 0) {
    absl::string_view chunk = reader.Rest();
    WireReader next(chunk);
    const size_t wanted = std::min<size_t>(next.U8(), handshake.wanted());
    chunk = next.Rest();
    const absl::string_view taken = chunk.substr(0, wanted);
    reader = WireReader(chunk.substr(taken.size()));
    if (!handshake.Receive(taken).ok()) break;
    received.append(taken.data(), taken.size());
    DG_CHECK(!handshake.done());
    sent += handshake.TakeOutput().size();
  }
  // A listener tells a stranger no more than its own hello, and nothing before it has heard his.
  const bool hello = received.size() >= kHelloBytes;
  if (role == Handshake::Role::kServer) DG_CHECK(sent == (hello ? kHelloBytes : 0)) << sent;
  // A client has refused such a hello already; a server lets it, and knows it.
  if (hello && handshake.CheckHello().ok()) DG_CHECK(HasTheSame(first, received));
  return hello;
}

std::vector<std::string> GoodInputs() {
  std::vector<std::string> inputs;
  for (uint8_t first = 0; first < kOptions; ++first) {
    for (const size_t size : {size_t{1}, size_t{20}, kHelloBytes}) {
      // Both ends begin with the same kind of hello; the client's is there at once.
      Handshake other = Begin(first, Handshake::Role::kClient);
      inputs.emplace_back(1, static_cast<char>(first));
      AppendChunks(other.TakeOutput(), size, &inputs.back());
    }
  }
  return inputs;
}

}  // namespace distgrad
