// Handshakes between ends that agree and that do not, and replayed, echoed or changed messages.
#include "core/net/handshake.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/net/cluster_key.h"
#include "core/net/endpoint.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Role = Handshake::Role;

const std::string kKey = "0123456789abcdef";
const std::string kOtherKey = "0123456789abcdeF";
const Token kToken = {1, 2, 3};
const Token kOtherToken = {1, 2, 4};

Handshake New(Role role, const ClusterKey& key, const Token& token) {
  auto handshake = Handshake::Create(role, key, token);
  EXPECT_TRUE(handshake.ok()) << handshake.status();
  return *std::move(handshake);
}

// Lets two ends talk, `step` bytes at a time, until neither says more; each end's status.
std::pair<absl::Status, absl::Status> Talk(Handshake& client, Handshake& server,
                                           size_t step = 1000) {
  absl::Status at_client, at_server;
  for (;;) {
    const std::string to_server = client.TakeOutput(), to_client = server.TakeOutput();
    if (to_server.empty() && to_client.empty()) return {at_client, at_server};
    for (auto [bytes, end, status] :
         {std::make_tuple(&to_server, &server, &at_server), {&to_client, &client, &at_client}}) {
      for (size_t i = 0; i < bytes->size() && status->ok(); i += step) {
        EXPECT_LE(std::min(step, bytes->size() - i), end->wanted());
        *status = end->Receive(absl::string_view(*bytes).substr(i, step));
      }
    }
  }
}

TEST(HandshakeTest, EqualEndsFinish) {
  for (const std::string& key : {std::string(), kKey}) {
    for (const size_t step : {1, 7, 1000}) {
      Handshake client = New(Role::kClient, key, kToken), server = New(Role::kServer, key, kToken);
      const auto [at_client, at_server] = Talk(client, server, step);
      EXPECT_TRUE(at_client.ok()) << at_client;
      EXPECT_TRUE(at_server.ok()) << at_server;
      EXPECT_TRUE(client.done() && server.done());
      EXPECT_EQ(client.wanted() + server.wanted(), 0u);
    }
  }
}

TEST(HandshakeTest, UnequalEndsDoNot) {
  struct End {
    std::string key;
    Token token;
  };
  const std::pair<End, End> pairs[] = {
      {{"", kToken}, {kKey, kToken}},
      {{kKey, kToken}, {"", kToken}},
      {{kOtherKey, kToken}, {kKey, kToken}},
      {{"", kOtherToken}, {"", kToken}},
      // Who has the key, but means another worker: its proof is worth nothing here.
      {{kKey, kOtherToken}, {kKey, kToken}},
  };
  for (const auto& [left, right] : pairs) {
    Handshake client = New(Role::kClient, left.key, left.token);
    Handshake server = New(Role::kServer, right.key, right.token);
    const auto [at_client, at_server] = Talk(client, server);
    EXPECT_FALSE(client.done());
    EXPECT_FALSE(server.done());
    const absl::Status& first = at_client.ok() ? at_server : at_client;
    EXPECT_TRUE(absl::IsUnauthenticated(first)) << first;
    // What to set, where it may be the key.
    EXPECT_EQ(absl::StrContains(first.message(), kClusterKeySetting),
              !left.key.empty() || !right.key.empty())
        << first;
  }
}

TEST(HandshakeTest, SaysWhoLacksTheKey) {
  Handshake client = New(Role::kClient, "", kToken), server = New(Role::kServer, kKey, kToken);
  EXPECT_TRUE(absl::StrContains(Talk(client, server).first.message(), "this one has none"));
  client = New(Role::kClient, kKey, kToken), server = New(Role::kServer, "", kToken);
  EXPECT_TRUE(absl::StrContains(Talk(client, server).first.message(), "other end has no"));
}

// Version 3 did not prove within TLS by certificates whose the handshake was.
TEST(HandshakeTest, AnEndOfAnotherVersionIsRefusedAndNamed) {
  const auto with_version = [](std::string hello, char version) {
    hello[8] = version;
    return hello;
  };
  for (const char other : {'\3', '\5'}) {
    const std::string text = absl::StrCat("the other end speaks version ", static_cast<int>(other),
                                          " of distgrad's protocol, not 4");
    Handshake client = New(Role::kClient, kKey, kToken), server = New(Role::kServer, kKey, kToken);
    ASSERT_TRUE(server.Receive(with_version(client.TakeOutput(), other)).ok());
    EXPECT_EQ(server.CheckHello().message(), text);  // what the server's log has
    const absl::Status at_client = client.Receive(with_version(server.TakeOutput(), other));
    EXPECT_TRUE(absl::IsUnauthenticated(at_client)) << at_client;
    EXPECT_EQ(at_client.message(), text);
    EXPECT_EQ(client.TakeOutput(), "") << "it proves nothing to such an end";
  }
}

// What a server without a place says is no refusal of a key, and no server takes it for a proof.
TEST(HandshakeTest, AServerWithoutAPlaceSaysSo) {
  Handshake client = New(Role::kClient, kKey, kToken), server = New(Role::kServer, kKey, kToken);
  EXPECT_EQ(server.NoPlace(), "") << "to who has not said hello";
  ASSERT_TRUE(server.Receive(client.TakeOutput()).ok());
  ASSERT_TRUE(client.Receive(server.TakeOutput()).ok());
  const std::string words(server.NoPlace());
  ASSERT_EQ(words.size(), kProofBytes);
  EXPECT_EQ(client.NoPlace(), "");
  const absl::Status status = client.Receive(words);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "had no place")) << status;
  EXPECT_FALSE(client.done());
  EXPECT_TRUE(absl::IsUnauthenticated(server.Receive(words)));
  EXPECT_FALSE(server.done());
}

// Each flipped bit of what the two say to each other stops one of them.
TEST(HandshakeTest, EveryBitCounts) {
  for (size_t bit = 0; bit < 8 * 2 * (kHelloBytes + kProofBytes); bit += 5) {
    Handshake client = New(Role::kClient, kKey, kToken), server = New(Role::kServer, kKey, kToken);
    size_t at = 0;  // bytes said before
    const auto say = [&](Handshake& from, Handshake& to) {
      std::string bytes = from.TakeOutput();
      if (bit / 8 >= at && bit / 8 < at + bytes.size()) bytes[bit / 8 - at] ^= 1 << (bit % 8);
      at += bytes.size();
      return to.Receive(bytes);
    };
    const bool passed = say(client, server).ok() && say(server, client).ok() &&
                        say(client, server).ok() && say(server, client).ok();
    EXPECT_FALSE(passed && client.done() && server.done()) << bit;
  }
}

// What one handshake was told is worth nothing in the next.
TEST(HandshakeTest, ReplaysAreRefused) {
  Handshake client = New(Role::kClient, kKey, kToken), server = New(Role::kServer, kKey, kToken);
  const std::string hello = client.TakeOutput();
  ASSERT_TRUE(server.Receive(hello).ok());
  ASSERT_TRUE(client.Receive(server.TakeOutput()).ok());
  const std::string proof = client.TakeOutput();
  ASSERT_TRUE(server.Receive(proof).ok());

  Handshake again = New(Role::kServer, kKey, kToken);
  ASSERT_TRUE(again.Receive(hello).ok());
  again.TakeOutput();
  EXPECT_TRUE(absl::IsUnauthenticated(again.Receive(proof)));
  EXPECT_EQ(again.TakeOutput(), "");
}

// A server that sends the client's own words back to it.
TEST(HandshakeTest, EchoesAreRefused) {
  Handshake client = New(Role::kClient, kKey, kToken);
  ASSERT_TRUE(client.Receive(client.TakeOutput()).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(client.Receive(client.TakeOutput())));
}

TEST(HandshakeTest, ClientsWithoutTheKeyAreToldNothing) {
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n"), std::string(1, '\0'), std::string(16, '\xff')}) {
    Handshake server = New(Role::kServer, kKey, kToken);
    EXPECT_TRUE(absl::IsUnauthenticated(server.Receive(bytes)));
    EXPECT_EQ(server.TakeOutput(), "");
  }
}

TEST(HandshakeTest, NothingRepeats) {
  EXPECT_NE(New(Role::kClient, kKey, kToken).TakeOutput(),
            New(Role::kClient, kKey, kToken).TakeOutput());
}

// While a key is exchanged for another, a client uses its first one, and a server takes either.
TEST(HandshakeTest, OfTwoKeysTheFirstIsUsedAndEitherIsAccepted) {
  const ClusterKey old(kKey), both(kKey, kOtherKey), other_first(kOtherKey, kKey), fresh(kOtherKey);
  struct Case {
    ClusterKey client, server;
    bool ok;
  };
  for (const Case& each :
       {Case{old, both, true}, Case{both, old, true}, Case{both, both, true},
        Case{both, other_first, true}, Case{other_first, both, true},
        Case{fresh, other_first, true}, Case{fresh, both, true}, Case{other_first, old, false},
        Case{both, fresh, false}, Case{old, fresh, false}}) {
    Handshake client = New(Role::kClient, each.client, kToken);
    Handshake server = New(Role::kServer, each.server, kToken);
    ASSERT_TRUE(server.Receive(client.TakeOutput()).ok());
    ASSERT_TRUE(client.Receive(server.TakeOutput()).ok());
    EXPECT_EQ(server.Receive(client.TakeOutput()).ok(), each.ok);
    EXPECT_EQ(server.done(), each.ok);
    if (!each.ok) continue;
    ASSERT_TRUE(client.Receive(server.TakeOutput()).ok());
    EXPECT_EQ(client.Secret().value(), server.Secret().value());
  }
}

TEST(HmacTest, IsTheStandards) {
  // RFC 4231, test case 2.
  const auto digest = Hmac("Jefe", "what do ya want for nothing?");
  ASSERT_TRUE(digest.ok()) << digest.status();
  EXPECT_EQ((*digest)[0], 0x5b);
  EXPECT_EQ((*digest)[1], 0xdc);
  EXPECT_EQ((*digest)[31], 0x43);
}

class ClusterKeyTest : public testing::Test {
 protected:
  std::string Write(const std::string& text) {
    const std::string path = absl::StrCat(testing::TempDir(), "/key", files_++);
    std::ofstream(path) << text;
    chmod(path.c_str(), 0600);
    return path;
  }
  absl::StatusOr<ClusterKey> Load(const std::string& file) {
    return LoadClusterKey(file, [this](const std::string& name) -> std::optional<std::string> {
      const auto found = environment_.find(name);
      if (found == environment_.end()) return std::nullopt;
      return found->second;
    });
  }

  std::map<std::string, std::string> environment_;
  int files_ = 0;
};

TEST_F(ClusterKeyTest, NoneIsSet) { EXPECT_TRUE(Load("").value().empty()); }

TEST_F(ClusterKeyTest, ComesFromOneOfThreePlaces) {
  const std::string path = Write(kKey + "\n"), other = Write(kOtherKey);
  EXPECT_EQ(Load(path).value().used(), kKey);
  EXPECT_EQ(Load(path).value().accepted(), "");
  environment_ = {{"DISTGRAD_KEY", kKey}};
  EXPECT_EQ(Load("").value().used(), kKey);
  EXPECT_EQ(Load(other).value().used(), kOtherKey);
  environment_ = {{"DISTGRAD_KEY_FILE", path}};
  EXPECT_EQ(Load("").value().used(), kKey);
  EXPECT_EQ(Load(other).value().used(), kOtherKey);
}

TEST_F(ClusterKeyTest, TwoAreALineEach) {
  const std::string path = Write(absl::StrCat("\n ", kOtherKey, "\r\n\n", kKey, "\n"));
  EXPECT_EQ(Load(path).value().used(), kOtherKey);
  EXPECT_EQ(Load(path).value().accepted(), kKey);
  environment_ = {{"DISTGRAD_KEY", absl::StrCat(kKey, "\n", kOtherKey)}};
  EXPECT_EQ(Load("").value().used(), kKey);
  EXPECT_EQ(Load("").value().accepted(), kOtherKey);
}

TEST_F(ClusterKeyTest, AFileThatEverybodyCanReadIsWarnedOf) {
  const std::string path = Write(kKey);
  for (const mode_t mode : {0600, 0640, 0644}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    testing::internal::CaptureStderr();
    const auto key = Load(path);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(key.ok()) << key.status();
    EXPECT_EQ(absl::StrContains(log, "can read the key in " + path), mode == 0644) << log;
    EXPECT_EQ(absl::StrContains(log, "defaultMode: 0400"), mode == 0644) << "what to do: " << log;
    EXPECT_FALSE(absl::StrContains(log, kKey)) << log;
  }
}

TEST_F(ClusterKeyTest, BadKeysAreErrorsThatDoNotTellThem) {
  const std::string secret = "tooshort";
  const std::string bad_files[] = {Write(secret),
                                   Write(""),
                                   Write(" \n"),
                                   Write(std::string(5000, 'x')),
                                   Write(kKey + "\n" + secret),
                                   Write(kKey + "\n" + kOtherKey + "\n" + kKey)};
  for (const std::string& path : bad_files) {
    const absl::Status status = Load(path).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), kClusterKeySetting)) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), secret)) << status;
  }
  const absl::Status none = Load("/no/such/file").status();
  EXPECT_TRUE(absl::IsNotFound(none));
  EXPECT_TRUE(absl::StrContains(none.message(), kClusterKeySetting)) << none;
  for (const std::string& key : {secret, std::string(), std::string("\n")}) {
    environment_ = {{"DISTGRAD_KEY", key}};
    EXPECT_TRUE(absl::IsInvalidArgument(Load("").status()));
  }
  environment_ = {{"DISTGRAD_KEY", kKey}, {"DISTGRAD_KEY_FILE", "/key"}};
  EXPECT_TRUE(absl::IsInvalidArgument(Load("").status()));
}

TEST(EndpointTest, ThereAndBack) {
  for (const std::string tcp : {"127.0.0.1:4711", "[::1]:1"}) {
    for (const std::string& place : {ThisPlace(), std::string()}) {
      const Endpoint endpoint{tcp, place, std::string(32, 'a'), kToken};
      const auto parsed = ParseEndpoint(FormatEndpoint(endpoint));
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(FormatEndpoint(*parsed), FormatEndpoint(endpoint));
      EXPECT_EQ(parsed->token, kToken);
    }
  }
}

TEST(EndpointTest, Malformed) {
  const std::string name(32, 'a'), token(32, 'b');
  for (const std::string& address : std::vector<std::string>{
           "", "x", "1.2.3.4:1", "1.2.3.4:1//" + name, "1.2.3.4:1//" + name + "/" + token + "/",
           "1.2.3.4:1//" + name + "x/" + token, "1.2.3.4:1//" + name + "/" + token + "00",
           "1.2.3.4:1//" + std::string(32, '.') + "/" + token,
           "1.2.3.4:1//" + name + "/" + std::string(32, 'x'),
           "1.2.3.4:1/" + std::string(200, 'a') + "/" + name + "/" + token,
           "1.2.3.4:1/../" + name + "/" + token, "host:1//" + name + "/" + token}) {
    const absl::Status status = ParseEndpoint(address).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << address;
    EXPECT_FALSE(absl::StrContains(status.message(), token)) << status;
  }
}

TEST(EndpointTest, ThisPlaceIsKnown) {
  if (ThisPlace().empty()) GTEST_SKIP() << "this machine does not say its boot and namespaces";
  EXPECT_GT(ThisPlace().size(), 36u);
}

}  // namespace
}  // namespace distgrad
