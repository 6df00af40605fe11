// What an attacker between two workers sees, and what happens when it changes that.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "core/base/deadline.h"
#include "core/net/certificates.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/socket.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"
#include "tests/testing/certificates.h"
#include "tests/testing/tcp_proxy.h"
#include "tests/testing/tls_relay.h"

namespace distgrad {
namespace {

using Way = TcpProxy::Way;

const std::string kKey = "a key of thirty-two bytes, about";
constexpr absl::string_view kScheme = "socket://";
// All of it goes by the one connection that leads through the proxy: for large segments TensorPipe
// makes others, to the address that the server itself says.
const std::string kBytes =
    "the name of a function, and what it is called with" + std::string(30'000, '.');
const std::vector<size_t> kSegments = {100, 12'000};
constexpr int kPackets = 3;

// Two transports over TCP, with a proxy between them. The client sends packets, which the server
// echoes.
class Pair {
 public:
  Pair(TensorPipeOptions server, TensorPipeOptions client, TcpProxy::Edit edit) {
    server.unix_sockets = client.unix_sockets = false;
    server_ = NewTensorPipeTransport(std::move(server)).value();
    client_ = NewTensorPipeTransport(std::move(client)).value();
    const std::string address = server_
                                    ->Listen([this](std::shared_ptr<Connection> connection) {
                                      auto echo =
                                          std::make_shared<Echo>(std::move(connection), at_server_);
                                      return echo;
                                    })
                                    .value();
    Endpoint endpoint = ParseEndpoint(address.substr(kScheme.size())).value();
    const size_t colon = endpoint.tcp.rfind(':');
    proxy_ = std::make_unique<TcpProxy>(std::stoi(endpoint.tcp.substr(colon + 1)), std::move(edit));
    endpoint.tcp = absl::StrCat(endpoint.tcp.substr(0, colon), ":", proxy_->port());
    connection_ =
        client_->Connect(absl::StrCat(kScheme, FormatEndpoint(endpoint)), at_client_).value();
  }
  ~Pair() {
    connection_->Close();
    client_.reset();
    server_.reset();
  }

  void Send(Packet packet) { connection_->Send(std::move(packet), nullptr); }
  void SendAll() {
    for (int i = 0; i < kPackets; ++i) Send(PatternPacket(i, kBytes, kSegments));
  }
  // What has come, at either end, is what was sent: the first packets, each as it was.
  void ExpectPrefix() const {
    for (const RecordingReceiver* receiver : {at_server_.get(), at_client_.get()}) {
      ASSERT_LE(receiver->count(), static_cast<size_t>(kPackets));
      for (size_t i = 0; i < receiver->count(); ++i) {
        ExpectPattern(receiver->packet(i), i, kBytes, kSegments);
      }
    }
  }
  RecordingReceiver& at_client() { return *at_client_; }
  RecordingReceiver& at_server() { return *at_server_; }

 private:
  class Echo final : public Receiver {
   public:
    Echo(std::shared_ptr<Connection> connection, std::shared_ptr<RecordingReceiver> log)
        : connection_(std::move(connection)), log_(std::move(log)) {}
    void OnPacket(Packet packet) override {
      const size_t i = log_->count();
      const std::string bytes = packet.bytes;
      std::vector<size_t> segments;
      for (const Segment& segment : packet.segments) segments.push_back(segment.size);
      log_->OnPacket(std::move(packet));
      connection_->Send(PatternPacket(i, bytes, segments), nullptr);
    }
    // Its end is no concern of this test: one that is refused has had no other.
    void OnClosed(absl::Status) override { connection_ = nullptr; }

   private:
    std::shared_ptr<Connection> connection_;
    const std::shared_ptr<RecordingReceiver> log_;
  };

  const std::shared_ptr<RecordingReceiver> at_client_ = std::make_shared<RecordingReceiver>();
  const std::shared_ptr<RecordingReceiver> at_server_ = std::make_shared<RecordingReceiver>();
  std::unique_ptr<Transport> server_, client_;
  std::unique_ptr<TcpProxy> proxy_;
  std::shared_ptr<Connection> connection_;
};

// Keeps what passes.
class Recorder {
 public:
  TcpProxy::Edit Edit() {
    return [this](Way, std::string bytes) {
      absl::MutexLock lock(&mu_);
      seen_ += bytes;
      return bytes;
    };
  }
  std::string seen() const {
    absl::MutexLock lock(&mu_);
    return seen_;
  }

 private:
  mutable absl::Mutex mu_;
  std::string seen_ ABSL_GUARDED_BY(mu_);
};

// What all three packets bring through a proxy that only looks.
std::string Watch(const TensorPipeOptions& server, const TensorPipeOptions& client) {
  Recorder recorder;
  Pair pair(server, client, recorder.Edit());
  pair.SendAll();
  pair.at_client().AwaitPackets(kPackets);
  pair.ExpectPrefix();
  return recorder.seen();
}

std::string Watch(const std::string& key) {
  TensorPipeOptions options;
  options.cluster_key = key;
  return Watch(options, options);
}

// Parts of what is sent.
std::vector<std::string> Secrets() {
  std::vector<std::string> secrets = {kBytes.substr(0, 30)};
  for (const size_t size : kSegments) {
    const Segment segment = PatternSegment(0, size);
    const auto* data = reinterpret_cast<const char*>(segment.data);
    for (size_t at = 0; at + 16 <= size; at += 999) secrets.emplace_back(data + at, 16);
  }
  return secrets;
}

TEST(TamperingTest, NothingCanBeReadThatHasAKey) {
  const std::string open = Watch(""), encrypted = Watch(kKey);
  for (const std::string& secret : Secrets()) {
    EXPECT_TRUE(absl::StrContains(open, secret));
    EXPECT_FALSE(absl::StrContains(encrypted, secret));
  }
}

TensorPipeOptions WithCertificates(CertificateFiles files, const std::string& key = "") {
  TensorPipeOptions options;
  options.cluster_key = key;
  options.certificates = Certificates::Load(std::move(files)).value();
  return options;
}

std::string Folder(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}

TEST(TamperingTest, NothingCanBeReadOfThoseThatHaveCertificates) {
  TestAuthority authority(Folder("agree"));
  for (const std::string& key : {std::string(), kKey}) {  // without a key, and beside one
    const std::string seen =
        Watch(WithCertificates(authority.Issue("one", {.names = "DNS:job"}), key),
              WithCertificates(authority.Issue("two", {.names = "DNS:job"}), key));
    EXPECT_GT(seen.size(), 2 * kPackets * kBytes.size()) << "it has not all passed here";
    for (const std::string& secret : Secrets()) EXPECT_FALSE(absl::StrContains(seen, secret));
  }
}

TEST(TamperingTest, WhoHasAnotherCertificateOrNoneIsRefused) {
  TestAuthority authority(Folder("ours")), other(Folder("theirs"));
  const TensorPipeOptions honest = WithCertificates(authority.Issue("one", {.names = "DNS:job"}));
  CertificateFiles strange = other.Issue("two", {.names = "DNS:job"});
  strange.ca = authority.Issue("any", {.names = "DNS:job"}).ca;  // it takes ours
  const auto expect_refused = [](const TensorPipeOptions& server, const TensorPipeOptions& client,
                                 const std::string& words) {
    Pair pair(server, client, [](Way, std::string bytes) { return bytes; });
    pair.SendAll();
    const absl::Status why = pair.at_client().AwaitClosed();
    EXPECT_TRUE(absl::IsUnavailable(why)) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), words)) << why;
    EXPECT_EQ(pair.at_server().count(), 0);
    EXPECT_EQ(pair.at_client().count(), 0);
  };
  expect_refused(honest, WithCertificates(strange), "refuses this process's certificate");
  expect_refused(WithCertificates(strange), honest, "DISTGRAD_TLS_CA");
  expect_refused(honest, WithCertificates(authority.Issue("old", {.names = "DNS:job", .days = -1})),
                 "refuses this process's certificate");
  expect_refused(honest, TensorPipeOptions(), "uses certificates");
  expect_refused(TensorPipeOptions(), honest, "has no certificates");
}

// What a client gets that has shaken hands as one that has the key, and wants TLS or not: whether
// the other end goes on with TLS.
bool EndsSpeakTls(bool server_asks, bool client_asks) {
  TensorPipeOptions options;
  options.cluster_key = kKey;
  options.encrypts_unix = server_asks;
  const auto server = NewTensorPipeTransport(options).value();
  const auto nobody = std::make_shared<RecordingReceiver>();
  const std::string address =
      server->Listen([&](std::shared_ptr<Connection>) { return nobody; }).value();
  const Endpoint endpoint = ParseEndpoint(address.substr(kScheme.size())).value();
  Fd fd = NewSocketFor(endpoint, true).value();
  EXPECT_EQ(StartConnecting(fd, endpoint, true), 0);
  Socket socket(fd.Release());
  const Deadline deadline = Deadline::After(absl::Minutes(1));
  Handshake handshake =
      Handshake::Create(Handshake::Role::kClient, kKey, endpoint.token, false, client_asks).value();
  while (!handshake.done()) {
    std::string bytes;
    EXPECT_TRUE(socket.Send(handshake.TakeOutput(), deadline).ok());
    bytes.resize(handshake.wanted());
    EXPECT_TRUE(socket.Receive(bytes.data(), bytes.size(), deadline).ok());
    EXPECT_TRUE(handshake.Receive(bytes).ok());
  }
  EXPECT_EQ(handshake.encrypts_unix(), server_asks || client_asks);
  // One that speaks no TLS takes the first words of it for a frame that is too long.
  return socket.StartTls(handshake, nullptr, deadline).ok();
}

TEST(TamperingTest, UnixSocketsAreEncryptedIfOneEndAsks) {
  if (ThisPlace().empty()) GTEST_SKIP() << "this machine has no place for Unix-domain sockets";
  EXPECT_FALSE(EndsSpeakTls(false, false));
  EXPECT_TRUE(EndsSpeakTls(true, false));
  EXPECT_TRUE(EndsSpeakTls(false, true));
  EXPECT_TRUE(EndsSpeakTls(true, true));
}

// Two transports of which one asks; a segment large enough for any channel.
TEST(TamperingTest, WhatIsEncryptedOnUnixSocketsArrives) {
  TensorPipeOptions options;
  options.cluster_key = kKey;
  const auto client = NewTensorPipeTransport(options).value();
  options.encrypts_unix = true;
  const auto server = NewTensorPipeTransport(options).value();
  const auto at_server = std::make_shared<RecordingReceiver>();
  const auto at_client = std::make_shared<RecordingReceiver>();
  const std::string address =
      server->Listen([&](std::shared_ptr<Connection>) { return at_server; }).value();
  const auto connection = client->Connect(address, at_client).value();
  const std::vector<size_t> segments = {100, 1 << 20};
  connection->Send(PatternPacket(0, kBytes, segments), nullptr);
  at_server->AwaitPackets(1);
  ExpectPattern(at_server->packet(0), 0, kBytes, segments);
  connection->Close();
}

// What comes by each connection to a server, in the order in which they were opened.
class Arrivals {
 public:
  std::shared_ptr<RecordingReceiver> Add() {
    absl::MutexLock lock(&mu_);
    return all_.emplace_back(std::make_shared<RecordingReceiver>());
  }
  size_t count() const {
    absl::MutexLock lock(&mu_);
    return all_.size();
  }
  std::shared_ptr<RecordingReceiver> Await(size_t i) {
    absl::MutexLock lock(&mu_);
    const auto has_come = [&] {
      mu_.AssertHeld();
      return all_.size() > i;
    };
    mu_.Await(absl::Condition(&has_come));
    return all_[i];
  }

 private:
  mutable absl::Mutex mu_;
  std::vector<std::shared_ptr<RecordingReceiver>> all_ ABSL_GUARDED_BY(mu_);
};

// Two clients of one server: after a packet of each, each gets the other's place on the way.
void ExpectSplicingEndsBoth(TensorPipeOptions server_has, TensorPipeOptions client_has) {
  server_has.unix_sockets = client_has.unix_sockets = false;
  const auto server = NewTensorPipeTransport(server_has).value();
  Arrivals arrivals;
  const std::string address =
      server->Listen([&](std::shared_ptr<Connection>) { return arrivals.Add(); }).value();
  Endpoint endpoint = ParseEndpoint(address.substr(kScheme.size())).value();
  const size_t colon = endpoint.tcp.rfind(':');
  TcpProxy proxy(std::stoi(endpoint.tcp.substr(colon + 1)),
                 [](Way, std::string bytes) { return bytes; });
  endpoint.tcp = absl::StrCat(endpoint.tcp.substr(0, colon), ":", proxy.port());
  const auto client = NewTensorPipeTransport(client_has).value();
  std::vector<std::shared_ptr<RecordingReceiver>> at_client, at_server;
  std::vector<std::shared_ptr<Connection>> connections;
  for (size_t i = 0; i < 2; ++i) {
    at_client.push_back(std::make_shared<RecordingReceiver>());
    connections.push_back(
        client->Connect(absl::StrCat(kScheme, FormatEndpoint(endpoint)), at_client[i]).value());
    connections[i]->Send(PatternPacket(i, kBytes, kSegments), nullptr);
    at_server.push_back(arrivals.Await(i));
    at_server[i]->AwaitPackets(1);
    ExpectPattern(at_server[i]->packet(0), i, kBytes, kSegments);
  }
  proxy.ExchangeServers();
  for (size_t i = 0; i < 2; ++i) {
    connections[i]->Send(PatternPacket(10 + i, kBytes, kSegments), nullptr);
  }
  for (const auto& receiver : {at_client[0], at_client[1], at_server[0], at_server[1]}) {
    const absl::Status why = receiver->AwaitClosed();
    EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  }
  for (const auto& receiver : at_server) EXPECT_EQ(receiver->count(), 1) << "nothing more came";
  for (const auto& receiver : at_client) EXPECT_EQ(receiver->count(), 0);
}

TEST(TamperingTest, ConnectionsThatAreSplicedEnd) {
  TensorPipeOptions with_key;
  with_key.cluster_key = kKey;
  ExpectSplicingEndsBoth(with_key, with_key);
  TestAuthority authority(Folder("spliced"));
  for (const std::string& key : {std::string(), kKey}) {  // without a key, and beside one
    ExpectSplicingEndsBoth(WithCertificates(authority.Issue("one", {.names = "DNS:job"}), key),
                           WithCertificates(authority.Issue("two", {.names = "DNS:job"}), key));
  }
}

// Who is on the way and has a certificate, but no key, passes on the handshake of who has it. So
// does, where there is no key, who does not know the listener's token.
TEST(TamperingTest, WhoHasACertificateAndNoKeyIsNotTakenForTheOtherEnd) {
  TestAuthority authority(Folder("relayed"));
  for (const std::string& key : {std::string(), kKey}) {
    SCOPED_TRACE(key.empty() ? "certificates" : "a key and certificates");
    TensorPipeOptions options = WithCertificates(authority.Issue("one", {.names = "DNS:job"}), key);
    options.unix_sockets = false;
    const auto server = NewTensorPipeTransport(options).value();
    const auto client = NewTensorPipeTransport(options).value();
    Arrivals arrivals;
    const std::string address =
        server->Listen([&](std::shared_ptr<Connection>) { return arrivals.Add(); }).value();
    Endpoint endpoint = ParseEndpoint(address.substr(kScheme.size())).value();
    const size_t colon = endpoint.tcp.rfind(':');
    TlsRelay relay(std::stoi(endpoint.tcp.substr(colon + 1)),
                   authority.Issue("relay", {.names = "DNS:job,DNS:relay.example"}));
    endpoint.tcp = absl::StrCat(endpoint.tcp.substr(0, colon), ":", relay.port());
    const auto at_client = std::make_shared<RecordingReceiver>();
    const auto connection =
        client->Connect(absl::StrCat(kScheme, FormatEndpoint(endpoint)), at_client).value();
    connection->Send(PatternPacket(0, kBytes, kSegments), nullptr);
    const absl::Status why = at_client->AwaitClosed();
    EXPECT_TRUE(absl::IsUnavailable(why)) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), "not the one that has shaken hands")) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), "relay.example")) << why;
    EXPECT_GT(relay.inside(), 0) << "TLS itself has nothing against it";
    const std::string seen = relay.seen();
    for (const std::string& secret : Secrets()) EXPECT_FALSE(absl::StrContains(seen, secret));
    EXPECT_EQ(arrivals.count(), 0) << "the server has taken it for a worker";
  }
}

// Lets `edit` change the stream of one direction where it has come to `at` bytes, once. Then
// either no end was harmed, or the client's connection is over; and at no time has anything been
// delivered that was not sent.
void Tamper(const TensorPipeOptions& options, Way way, size_t at,
            const std::function<void(std::string*, size_t)>& edit) {
  SCOPED_TRACE(absl::StrCat(at, way == Way::kToServer ? " to the server" : " to the client",
                            options.certificates != nullptr ? ", certificates" : "",
                            options.cluster_key.empty() ? "" : ", a key"));
  size_t passed = 0;  // on the proxy's thread
  bool done = false;
  Pair pair(options, options, [&](Way this_way, std::string bytes) {
    if (this_way != way || done) return bytes;
    const size_t size = bytes.size();
    if (at < passed + size) {
      edit(&bytes, at - passed);
      done = true;
    }
    passed += size;
    return bytes;
  });
  pair.SendAll();
  const absl::Status why = pair.at_client().AwaitClosed();
  EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  EXPECT_LT(pair.at_client().count(), static_cast<size_t>(kPackets));
  pair.ExpectPrefix();
}

// Places all over the stream: its handshakes, its head and its bulk.
std::vector<size_t> Places() {
  std::vector<size_t> places = {0, 47, 48, 79, 80, 81, 85, 200, 300, 400, 500, 600, 700};
  for (size_t at = 1'000; at < 100'000; at += 9'001) places.push_back(at);
  return places;
}

// What ends may have: a key, certificates alone, or both.
std::vector<TensorPipeOptions> Secured() {
  TensorPipeOptions with_key;
  with_key.cluster_key = kKey;
  TestAuthority authority(Folder("secured"));
  const CertificateFiles files = authority.Issue("one", {.names = "DNS:job"});
  return {with_key, WithCertificates(files), WithCertificates(files, kKey)};
}

// At all places from `first` on, of either direction.
void TamperEverywhere(const TensorPipeOptions& options, size_t first,
                      const std::function<void(std::string*, size_t)>& edit) {
  for (const Way way : {Way::kToServer, Way::kToClient}) {
    for (const size_t at : Places()) {
      if (at >= first) Tamper(options, way, at, edit);
    }
  }
}

TEST(TamperingTest, AnyChangedBitEndsTheConnection) {
  for (const TensorPipeOptions& options : Secured()) {
    for (const Way way : {Way::kToServer, Way::kToClient}) {
      for (const size_t at : Places()) {
        Tamper(options, way, at,
               [at](std::string* bytes, size_t i) { (*bytes)[i] ^= 1 << (at % 8); });
      }
    }
  }
}

TEST(TamperingTest, WhatIsRepeatedEndsTheConnection) {
  for (const TensorPipeOptions& options : Secured()) {
    TamperEverywhere(options, 0,
                     [](std::string* bytes, size_t i) { bytes->insert(i, bytes->substr(i, 100)); });
  }
}

TEST(TamperingTest, WhatIsLeftOutEndsTheConnection) {
  for (TensorPipeOptions options : Secured()) {
    options.handshake_timeout = absl::Seconds(1);  // one that lacks something waits for it
    // There may be nothing behind earlier ones.
    TamperEverywhere(options, 700, [](std::string* bytes, size_t i) { bytes->erase(i, 100); });
  }
}

TEST(TamperingTest, WhatIsReorderedEndsTheConnection) {
  for (TensorPipeOptions options : Secured()) {
    options.handshake_timeout = absl::Seconds(1);
    TamperEverywhere(options, 700, [](std::string* bytes, size_t i) {
      std::reverse(bytes->begin() + static_cast<ptrdiff_t>(i / 2), bytes->end());
    });
  }
}

// Counts the bytes within TLS that go one way from Arm() on. In the record by which there are `at`
// it changes a bit of the length: where the sender says no more than that it is the last one,
// whichever records its bytes are in.
class LastRecord {
 public:
  LastRecord(Way way, size_t at, int bit) : way_(way), at_(at), bit_(bit) {}

  TcpProxy::Edit Edit() {
    return [this](Way way, std::string bytes) { return way == way_ ? Pass(bytes) : bytes; };
  }
  void Arm() { armed_ = true; }
  size_t inside() const { return inside_; }
  void AwaitChange() { changed_.WaitForNotification(); }

 private:
  // What goes on is whole records.
  std::string Pass(absl::string_view bytes) {
    constexpr size_t kHead = 5, kTypeAndTag = 17;
    const size_t clear = std::min(clear_, bytes.size());
    clear_ -= clear;
    std::string passed(bytes.substr(0, clear));
    waiting_ += bytes.substr(clear);
    while (waiting_.size() >= kHead) {
      const size_t size =
          kHead + 256 * static_cast<uint8_t>(waiting_[3]) + static_cast<uint8_t>(waiting_[4]);
      if (waiting_.size() < size) break;
      std::string record = waiting_.substr(0, size);
      waiting_.erase(0, size);
      if (armed_) inside_ += size - kHead - kTypeAndTag;
      if (armed_ && inside_ == at_ && !changed_.HasBeenNotified()) {
        record[4 - bit_ / 8] ^= static_cast<char>(1 << (bit_ % 8));
        changed_.Notify();
      }
      passed += record;
    }
    return passed;
  }

  const Way way_;
  const size_t at_;
  const int bit_;
  std::atomic<bool> armed_{false};
  std::atomic<size_t> inside_{0};
  absl::Notification changed_;
  // On the proxy's thread.
  size_t clear_ = kHelloBytes + kProofBytes;  // still to come before TLS
  std::string waiting_;                       // for the rest of its record
};

// Behind it nothing comes of which the connection's end would show that it was changed, until
// something does, as a heartbeat: one that has become longer is waited for.
TEST(TamperingTest, AChangedLengthOfTheLastRecordDeliversNothing) {
  const auto small = [](size_t i) { return PatternPacket(i, "a small call", {}); };
  for (const TensorPipeOptions& options : Secured()) {
    for (const Way way : {Way::kToServer, Way::kToClient}) {
      const auto begin = [&](Pair& pair, LastRecord& record) {
        pair.Send(small(0));
        pair.at_client().AwaitPackets(1);
        record.Arm();
        pair.Send(small(1));
      };
      size_t size;
      {
        LastRecord watched(way, /*at=*/0, 0);
        Pair pair(options, options, watched.Edit());
        begin(pair, watched);
        pair.at_client().AwaitPackets(2);
        size = watched.inside();
      }
      for (int bit = 0; bit < 16; ++bit) {
        SCOPED_TRACE(absl::StrCat("bit ", bit,
                                  way == Way::kToServer ? " to the server" : " to the client",
                                  options.certificates != nullptr ? ", certificates" : "",
                                  options.cluster_key.empty() ? "" : ", a key"));
        LastRecord record(way, size, bit);
        Pair pair(options, options, record.Edit());
        begin(pair, record);
        record.AwaitChange();
        // More than any record has.
        pair.Send(PatternPacket(2, kBytes, {}));
        const absl::Status why = pair.at_client().AwaitClosed();
        EXPECT_TRUE(absl::IsUnavailable(why)) << why;
        EXPECT_EQ(pair.at_client().count(), 1);
        ExpectPattern(pair.at_client().packet(0), 0, "a small call", {});
        // Else the server has had all of it, and what was sent after it, perhaps, too.
        if (way == Way::kToServer) {
          EXPECT_EQ(pair.at_server().count(), 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace distgrad
