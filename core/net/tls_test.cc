// Two ends that talk through bytes in memory: whole, in pieces, changed, left out and repeated.
#include "core/net/tls.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Role = Handshake::Role;

constexpr Digest kSecret = {1, 2, 3};
constexpr Digest kOtherSecret = {1, 2, 4};

std::unique_ptr<TlsSession> New(Role role, const Digest& secret = kSecret,
                                uint64_t key_bytes = TlsSession::kKeyBytes) {
  auto session = TlsSession::Create(role, secret, key_bytes);
  EXPECT_TRUE(session.ok()) << session.status();
  return *std::move(session);
}

std::string TakeOutput(TlsSession& session) {
  std::string output(session.output());
  session.DropOutput(output.size());
  return output;
}

// Feeds it as a socket would, and appends what comes out.
absl::Status Receive(TlsSession& session, absl::string_view bytes, std::string* plain,
                     size_t step = SIZE_MAX) {
  while (!bytes.empty() || session.HasInput()) {
    const absl::Span<char> space = session.InputSpace();
    const size_t size = bytes.copy(space.data(), std::min(space.size(), step));
    session.AddInput(size);
    bytes.remove_prefix(size);
    if (!session.established()) {
      if (absl::Status status = session.Establish(); !status.ok()) return status;
    }
    while (session.established()) {
      char read[1000];
      const absl::StatusOr<size_t> n = session.Read(read, sizeof(read));
      if (!n.ok()) return n.status();
      if (*n == 0) break;
      plain->append(read, *n);
    }
  }
  return absl::OkStatus();
}

// Lets two ends talk until neither says more; each end's status.
std::pair<absl::Status, absl::Status> Establish(TlsSession& client, TlsSession& server,
                                                size_t step = SIZE_MAX) {
  absl::Status at_client = client.Establish(), at_server = server.Establish();
  std::string nothing;
  for (;;) {
    const std::string to_server = TakeOutput(client), to_client = TakeOutput(server);
    if (to_server.empty() && to_client.empty()) break;
    if (at_server.ok()) at_server = Receive(server, to_server, &nothing, step);
    if (at_client.ok()) at_client = Receive(client, to_client, &nothing, step);
  }
  EXPECT_EQ(nothing, "");
  return {at_client, at_server};
}

struct Ends {
  std::unique_ptr<TlsSession> client = New(Role::kClient), server = New(Role::kServer);

  Ends() {
    const auto [at_client, at_server] = Establish(*client, *server);
    EXPECT_TRUE(at_client.ok()) << at_client;
    EXPECT_TRUE(at_server.ok()) << at_server;
    EXPECT_TRUE(client->established() && server->established());
  }
};

// What one Write() of these bytes puts on the wire.
std::string Encrypt(TlsSession& session, absl::string_view bytes) {
  const absl::Status written = session.Write(bytes);
  EXPECT_TRUE(written.ok()) << written;
  return TakeOutput(session);
}

std::string Text(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 7 + i / 251);
  return text;
}

TEST(TlsTest, BothWaysInAnyPieces) {
  for (const size_t step : {size_t{1}, size_t{7}, size_t{5000}, SIZE_MAX}) {
    std::unique_ptr<TlsSession> client = New(Role::kClient), server = New(Role::kServer);
    const auto [at_client, at_server] = Establish(*client, *server, step);
    ASSERT_TRUE(at_client.ok() && at_server.ok()) << at_client << at_server;
    for (const size_t size : {0, 1, 8, 16383, 16384, 16385, 300'000}) {
      const std::string text = Text(size);
      for (auto [from, to] : {std::make_pair(client.get(), server.get()),
                              std::make_pair(server.get(), client.get())}) {
        std::string read;
        const absl::Status status = Receive(*to, Encrypt(*from, text), &read, step);
        ASSERT_TRUE(status.ok()) << status << size << " " << step;
        ASSERT_TRUE(read == text) << size << " " << step;
      }
    }
  }
}

TEST(TlsTest, NothingReadableIsOnTheWire) {
  Ends ends;
  const std::string text = "a gradient that nobody else may see";
  const std::string wire = Encrypt(*ends.client, text);
  for (size_t i = 0; i + 4 <= text.size(); ++i) {
    EXPECT_FALSE(absl::StrContains(wire, text.substr(i, 4))) << i;
  }
  EXPECT_NE(Encrypt(*ends.client, text), wire);  // nor whether the same was sent again
}

// Whether a server's hello has its share of an ephemeral exchange of keys (RFC 8446, section
// 4.2.8).
bool SharesAKey(absl::string_view record) {
  const auto number = [&](size_t at, size_t bytes) {
    size_t sum = 0;
    for (; bytes > 0; --bytes) sum = 256 * sum + static_cast<uint8_t>(record.at(at++));
    return sum;
  };
  size_t at = 5 + 4 + 2 + 32;  // the heads of the record and the message, version, random bytes
  at += 1 + number(at, 1);     // the session's name
  at += 2 + 1;                 // cipher suite, compression
  const size_t end = at + 2 + number(at, 2);
  constexpr size_t kKeyShare = 51;
  for (at += 2; at + 4 <= end; at += 4 + number(at + 2, 2)) {
    if (number(at, 2) == kKeyShare) return true;
  }
  return false;
}

// So who has recorded a connection and learns the secret later cannot read it.
TEST(TlsTest, KeysAreOfAnExchangeToo) {
  std::unique_ptr<TlsSession> client = New(Role::kClient), server = New(Role::kServer);
  ASSERT_TRUE(client->Establish().ok());
  std::string nothing;
  ASSERT_TRUE(Receive(*server, TakeOutput(*client), &nothing).ok());
  const std::string hello = TakeOutput(*server);
  ASSERT_TRUE(absl::StartsWith(hello, "\x16\x03\x03")) << "a record of the handshake";
  ASSERT_EQ(hello[5], 2) << "a server's hello";
  EXPECT_TRUE(SharesAKey(hello));
}

TEST(TlsTest, WhoHasAnotherSecretIsRefused) {
  std::unique_ptr<TlsSession> client = New(Role::kClient),
                              server = New(Role::kServer, kOtherSecret);
  const auto [at_client, at_server] = Establish(*client, *server);
  EXPECT_TRUE(absl::IsUnavailable(at_server)) << at_server;
  EXPECT_FALSE(client->established() || server->established());
}

// Each changed bit of TLS's own handshake stops one of the two before anything is given out.
TEST(TlsTest, EveryBitOfTheHandshakeCounts) {
  // Returns how many bytes are said if this bit is changed, and whether both ends go on.
  const auto talk = [](size_t bit) {
    std::unique_ptr<TlsSession> client = New(Role::kClient), server = New(Role::kServer);
    EXPECT_TRUE(client->Establish().ok());
    size_t at = 0;  // bytes said before
    absl::Status at_client, at_server;
    std::string nothing;
    for (;;) {
      std::string to_server = TakeOutput(*client), to_client = TakeOutput(*server);
      if (to_server.empty() && to_client.empty()) break;
      for (std::string* bytes : {&to_server, &to_client}) {
        if (bit / 8 >= at && bit / 8 < at + bytes->size()) (*bytes)[bit / 8 - at] ^= 1 << (bit % 8);
        at += bytes->size();
      }
      if (at_server.ok()) at_server = Receive(*server, to_server, &nothing);
      if (at_client.ok()) at_client = Receive(*client, to_client, &nothing);
    }
    EXPECT_EQ(nothing, "");
    // A client may have finished before its server refuses what it said last.
    return std::pair(at, at_client.ok() && at_server.ok() && server->established());
  };
  const auto [said, agree] = talk(SIZE_MAX);
  EXPECT_TRUE(agree);
  EXPECT_GT(said, 400u);
  for (size_t bit = 0; bit < 8 * said; bit += 37) EXPECT_FALSE(talk(bit).second) << bit;
}

TEST(TlsTest, EveryBitOfARecordCounts) {
  const std::string text = Text(100);
  for (size_t bit = 0, size = SIZE_MAX; bit < size; bit += 3) {
    Ends ends;
    std::string wire = Encrypt(*ends.client, text);
    size = 8 * wire.size();
    wire[bit / 8] ^= 1 << (bit % 8);
    // A longer record than was sent waits for its end.
    wire += Encrypt(*ends.client, Text(100'000));
    std::string read;
    EXPECT_TRUE(absl::IsUnavailable(Receive(*ends.server, wire, &read))) << bit;
    EXPECT_EQ(read, "") << bit;
  }
}

TEST(TlsTest, RecordsComeOnceAndInTheirOrder) {
  const auto refuses = [](const auto& order) {
    Ends ends, others;
    const std::vector<std::string> records = {
        Encrypt(*ends.client, "first"), Encrypt(*ends.client, "second"),
        Encrypt(*others.client, "another connection's"), Encrypt(*ends.server, "the other way")};
    std::string read;
    absl::Status status;
    for (const int record : order) {
      if (status.ok()) status = Receive(*ends.server, records[record], &read);
    }
    EXPECT_TRUE(read.empty() || read == "first") << read;
    return absl::IsUnavailable(status);
  };
  EXPECT_FALSE(refuses(std::vector<int>{0}));
  EXPECT_TRUE(refuses(std::vector<int>{1, 0}));  // reordered, or the first was dropped
  EXPECT_TRUE(refuses(std::vector<int>{0, 0}));  // replayed
  EXPECT_TRUE(refuses(std::vector<int>{0, 2}));  // spliced in
  EXPECT_TRUE(refuses(std::vector<int>{0, 3}));  // sent back
}

TEST(TlsTest, HalfARecordIsNotGivenOut) {
  Ends ends;
  const std::string wire = Encrypt(*ends.client, Text(1000));
  std::string read;
  EXPECT_TRUE(Receive(*ends.server, wire.substr(0, wire.size() - 1), &read).ok());
  EXPECT_EQ(read, "");
  EXPECT_FALSE(ends.server->HasInput());  // so nobody looks for it again and again
  EXPECT_TRUE(Receive(*ends.server, wire.substr(wire.size() - 1), &read).ok());
  EXPECT_EQ(read, Text(1000));
}

TEST(TlsTest, KeysChangeInTheMidst) {
  std::unique_ptr<TlsSession> client = New(Role::kClient, kSecret, 1000);
  std::unique_ptr<TlsSession> server = New(Role::kServer);
  const auto [at_client, at_server] = Establish(*client, *server);
  ASSERT_TRUE(at_client.ok() && at_server.ok());
  const std::string text = Text(900);
  size_t longest = 0, shortest = SIZE_MAX;
  for (int i = 0; i < 20; ++i) {
    const std::string wire = Encrypt(*client, text);
    longest = std::max(longest, wire.size());
    shortest = std::min(shortest, wire.size());
    std::string read;
    ASSERT_TRUE(Receive(*server, wire, &read).ok()) << i;
    ASSERT_EQ(read, text);
  }
  EXPECT_GT(longest, shortest);  // the message about a new key goes with some of them
}

TEST(TlsTest, WhoSpeaksNoTlsIsRefused) {
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100, '\0'), std::string(100, '\xff')}) {
    std::unique_ptr<TlsSession> server = New(Role::kServer);
    std::string nothing;
    EXPECT_TRUE(absl::IsUnavailable(Receive(*server, bytes, &nothing)));
    EXPECT_EQ(nothing, "");
  }
}

}  // namespace
}  // namespace distgrad
