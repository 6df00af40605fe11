// What strangers send to a listener, or a false listener to us. The first bit says which end we
// are; then come chunks, each with its size in a byte.
#include "core/base/check.h"
#include "core/base/wire.h"
#include "core/net/handshake.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

constexpr absl::string_view kKey = "a key that nobody can guess";

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
  const auto role = first & 1 ? Handshake::Role::kClient : Handshake::Role::kServer;
  const absl::string_view key = first & 2 ? kKey : "";
  auto handshake = Handshake::Create(role, key, Token{1, 2, 3});
  DG_CHECK(handshake.ok()) << handshake.status();
  size_t sent = handshake->TakeOutput().size();
  size_t received = 0;
  while (reader.remaining() > 0) {
    absl::string_view chunk = reader.Rest();
    WireReader next(chunk);
    const size_t wanted = std::min<size_t>(next.U8(), handshake->wanted());
    chunk = next.Rest();
    const absl::string_view taken = chunk.substr(0, wanted);
    reader = WireReader(chunk.substr(taken.size()));
    if (!handshake->Receive(taken).ok()) break;
    received += taken.size();
    DG_CHECK(!handshake->done());
    sent += handshake->TakeOutput().size();
  }
  // A listener tells a stranger no more than its own hello, and nothing before it has heard his.
  const bool hello = received >= kHelloBytes;
  if (role == Handshake::Role::kServer) DG_CHECK(sent == (hello ? kHelloBytes : 0)) << sent;
  return hello;
}

std::vector<std::string> GoodInputs() {
  std::vector<std::string> inputs;
  for (const char first : {'\0', '\1', '\2', '\3'}) {
    for (const size_t size : {size_t{1}, size_t{20}, kHelloBytes}) {
      // Both ends begin with the same kind of hello; the client's is there at once.
      auto other =
          Handshake::Create(Handshake::Role::kClient, first & 2 ? kKey : "", Token{1, 2, 3});
      DG_CHECK(other.ok());
      inputs.emplace_back(1, first);
      AppendChunks(other->TakeOutput(), size, &inputs.back());
    }
  }
  return inputs;
}

}  // namespace distgrad
