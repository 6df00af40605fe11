// Unauthenticated clients, liars and mischief against a live listener, which must go on serving.
#include <arpa/inet.h>
#include <dirent.h>
#include <malloc.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"
#include "core/net/certificates.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/socket.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"
#include "tests/testing/certificate_strangers.h"
#include "tests/testing/certificates.h"
#include "tests/testing/no_descriptors.h"
#include "tests/testing/no_tls.h"

namespace distgrad {

namespace {

using Kind = TensorPipeOptions::Kind;

const std::string kKey = "a key of thirty-two bytes, about";
const std::string kOtherKey = "A key of thirty-two bytes, about";
constexpr absl::string_view kScheme = "socket://";

std::unique_ptr<Transport> NewTransport(const TensorPipeOptions& options) {
  auto transport = NewTensorPipeTransport(options);
  EXPECT_TRUE(transport.ok()) << transport.status();
  return transport.ok() ? *std::move(transport) : nullptr;
}

TensorPipeOptions WithKey(const std::string& key) {
  TensorPipeOptions options;
  options.cluster_key = key;
  return options;
}

Endpoint EndpointOf(const std::string& address) {
  auto endpoint = ParseEndpoint(absl::string_view(address).substr(kScheme.size()));
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return *std::move(endpoint);
}
uint16_t PortOf(const Endpoint& endpoint) {
  return static_cast<uint16_t>(std::stoi(endpoint.tcp.substr(endpoint.tcp.rfind(':') + 1)));
}
std::string AddressOf(const Endpoint& endpoint) {
  return absl::StrCat(kScheme, FormatEndpoint(endpoint));
}

// A blocking socket in the hands of somebody who need not be ours.
class RawSocket {
 public:
  enum class Family { kTcp, kUnix };

  RawSocket(const std::string& address, Family family) : RawSocket(family) { Connect(address); }
  explicit RawSocket(Family family)
      : family_(family),
        fd_(socket(family == Family::kTcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}

  void Connect(const std::string& address) {
    const Endpoint endpoint = EndpointOf(address);
    if (family_ == Family::kTcp) {
      sockaddr_in in = {};
      in.sin_family = AF_INET;
      in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      in.sin_port = htons(PortOf(endpoint));
      ConnectTo(&in, sizeof(in));
    } else {
      sockaddr_un un = {};
      un.sun_family = AF_UNIX;
      const std::string name = absl::StrCat("distgrad/", endpoint.name);
      std::memcpy(un.sun_path + 1, name.data(), name.size());
      ConnectTo(&un, offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }
  }

  // What the other end does not take is lost: it may have closed.
  void Send(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;
      bytes.remove_prefix(n);
    }
  }
  // `size` bytes, or what came before the other end closed.
  std::string Receive(size_t size) {
    std::string bytes(size, '\0');
    size_t at = 0;
    while (at < size) {
      const ssize_t n = recv(fd_.get(), &bytes[at], size - at, 0);
      if (n <= 0) break;
      at += n;
    }
    bytes.resize(at);
    return bytes;
  }
  // Waits until the other end closes; what it said before.
  std::string AwaitEnd() { return Receive(1 << 20); }
  // Closes with a reset instead of an orderly end.
  void Reset() {
    const linger reset = {1, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    fd_ = Fd();
  }

 private:
  template <typename T>
  void ConnectTo(const T* address, socklen_t size) {
    ASSERT_EQ(connect(fd_.get(), reinterpret_cast<const sockaddr*>(address), size), 0)
        << std::strerror(errno);
  }

  Family family_;
  Fd fd_;
};

using Family = RawSocket::Family;

// Gets in like one of ours.
void ShakeHands(RawSocket& socket, const std::string& key, const Token& token) {
  Handshake handshake = Handshake::Create(Handshake::Role::kClient, key, token).value();
  while (!handshake.done()) {
    socket.Send(handshake.TakeOutput());
    const std::string bytes = socket.Receive(handshake.wanted());
    ASSERT_FALSE(bytes.empty());
    ASSERT_TRUE(handshake.Receive(bytes).ok());
  }
}

std::string Frame(const std::string& bytes) {
  const uint64_t size = bytes.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + bytes;
}

size_t OpenFiles() {
  size_t count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// Counts what arrives on all connections. Thread-safe.
class Counter {
 public:
  void Add() {
    absl::MutexLock lock(&mu_);
    ++count_;
  }
  // Waits until there were `count` more than when this was called last.
  void AwaitMore(int count) {
    absl::MutexLock lock(&mu_);
    expected_ += count;
    mu_.Await(absl::Condition(
        +[](Counter* self) { return self->count_ >= self->expected_; }, this));
  }

 private:
  absl::Mutex mu_;
  int count_ = 0, expected_ = 0;  // guarded by mu_
};

class HelloReceiver final : public Receiver {
 public:
  explicit HelloReceiver(std::shared_ptr<Counter> hellos) : hellos_(std::move(hellos)) {}
  void OnPacket(Packet packet) override {
    EXPECT_EQ(packet.bytes, "hello");
    hellos_->Add();
  }
  void OnClosed(absl::Status) override {}

 private:
  const std::shared_ptr<Counter> hellos_;
};

class HostileClientTest : public testing::Test {
 protected:
  void Start(const TensorPipeOptions& options) {
    options_ = options;
    server_ = NewTransport(options);
    const auto address = server_->Listen(
        [this](std::shared_ptr<Connection>) { return std::make_shared<HelloReceiver>(hellos_); });
    ASSERT_TRUE(address.ok()) << address.status();
    address_ = *address;
  }

  // Whether one of ours, by either kind of socket, gets through.
  void ExpectServes() {
    Endpoint elsewhere = EndpointOf(address_);
    elsewhere.place = "0";  // so TCP it is
    for (const std::string& address : {address_, AddressOf(elsewhere)}) {
      auto client = NewTransport(options_);
      const auto connection = client->Connect(address, std::make_shared<RecordingReceiver>());
      ASSERT_TRUE(connection.ok()) << connection.status();
      Packet packet{"hello", {}};
      packet.segments.push_back(AllocateSegment(100000));
      packet.segments.push_back(AllocateSegment(1 << 20));
      (*connection)->Send(std::move(packet), nullptr);
      hellos_->AwaitMore(1);
    }
  }

  // What a client is told that cannot get in.
  absl::Status Refusal(const TensorPipeOptions& options, const std::string& address) {
    auto client = NewTransport(options);
    auto receiver = std::make_shared<RecordingReceiver>();
    const auto connection = client->Connect(address, receiver);
    EXPECT_TRUE(connection.ok()) << connection.status();
    const absl::Status why = receiver->AwaitClosed();
    EXPECT_TRUE(absl::IsUnavailable(why)) << why;
    return why;
  }

  // Of 300 attempts to get in, or as many as DISTGRAD_WRONG_KEYS says (10,000 in the long form),
  // nothing is left.
  void ExpectNothingLeft(const char* what, const std::function<void(int)>& attempt) {
    const auto attempt_all = [&](int count) {
      for (int i = 0; i < count; ++i) attempt(i);
      ExpectServes();
    };
    attempt_all(50);  // what is allocated once
    const size_t files = OpenFiles(), before = mallinfo2().uordblks;
    const char* const wanted = std::getenv("DISTGRAD_WRONG_KEYS");
    const int count = wanted == nullptr ? 300 : std::atoi(wanted);
    attempt_all(count);
    const size_t most = before + (64 << 10);
    // What is being closed at this moment is closed by the time some others have come and gone.
    for (int i = 0; i < 100 && (OpenFiles() > files || mallinfo2().uordblks >= most); ++i) {
      ExpectServes();
    }
    std::printf("%d wrong %s: %zu files before and %zu after, %zu bytes of memory and %zu\n", count,
                what, files, OpenFiles(), before, static_cast<size_t>(mallinfo2().uordblks));
    EXPECT_LE(OpenFiles(), files);
    if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
    EXPECT_LT(mallinfo2().uordblks, most);
  }

  SendLog sends_;
  TensorPipeOptions options_;
  std::unique_ptr<Transport> server_;
  std::string address_;
  const std::shared_ptr<Counter> hellos_ = std::make_shared<Counter>();
};

TEST_F(HostileClientTest, ClientsWithoutTheKeyAreToldNothing) {
  Start(WithKey(kKey));
  std::mt19937 random(1);
  std::string garbage(1 << 20, '\0');
  for (char& c : garbage) c = static_cast<char>(random());
  const std::string words[] = {"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                               std::string(16, '\0'),
                               std::string(64, '\xff'),
                               Frame(std::string(40, 'x')),
                               "distgraX",
                               garbage};
  const size_t files = OpenFiles();
  for (int round = 0; round < 20; ++round) {
    for (const Family family : {Family::kTcp, Family::kUnix}) {
      for (const std::string& word : words) {
        RawSocket socket(address_, family);
        socket.Send(word);
        EXPECT_EQ(socket.AwaitEnd(), "");
      }
    }
  }
  EXPECT_EQ(OpenFiles(), files);
  ExpectServes();
}

TEST_F(HostileClientTest, HalfAHandshake) {
  Start(WithKey(kKey));
  const Token token = EndpointOf(address_).token;
  std::vector<RawSocket> held;
  for (const Family family : {Family::kTcp, Family::kUnix}) {
    for (const size_t size : {0, 1, 8, 47, 48}) {
      for (const bool hold : {true, false}) {
        RawSocket socket(address_, family);
        Handshake handshake = Handshake::Create(Handshake::Role::kClient, kKey, token).value();
        socket.Send(handshake.TakeOutput().substr(0, size));
        if (size == kHelloBytes) {
          EXPECT_EQ(socket.Receive(kHelloBytes).size(), kHelloBytes);
        }
        if (hold) {
          held.push_back(std::move(socket));
        } else {
          socket.Reset();
        }
      }
    }
  }
  ExpectServes();
}

TEST_F(HostileClientTest, WrongProof) {
  Start(WithKey(kKey));
  RawSocket socket(address_, Family::kTcp);
  Handshake handshake =
      Handshake::Create(Handshake::Role::kClient, kOtherKey, EndpointOf(address_).token).value();
  socket.Send(handshake.TakeOutput());
  ASSERT_TRUE(handshake.Receive(socket.Receive(kHelloBytes)).ok());
  socket.Send(handshake.TakeOutput());
  EXPECT_EQ(socket.AwaitEnd(), "");
  ExpectServes();
}

TEST_F(HostileClientTest, WrongKeyOrNone) {
  for (const auto& [server, client, reason] : std::vector<std::array<std::string, 3>>{
           {kKey, kOtherKey, "refused our handshake"},
           {kKey, "", "the other end has a cluster key, this one has none"},
           {"", kKey, "the other end has no cluster key, this one has"}}) {
    Start(WithKey(server));
    Endpoint elsewhere = EndpointOf(address_);
    elsewhere.place = "0";
    for (const std::string& address : {address_, AddressOf(elsewhere)}) {
      const absl::Status why = Refusal(WithKey(client), address);
      EXPECT_TRUE(absl::StrContains(why.message(), reason)) << why;
      EXPECT_FALSE(absl::StrContains(why.message(), kKey)) << why;
    }
    ExpectServes();
  }
}

// A listener on loopback is asked from another machine: there nobody is meant, whoever listens.
TEST_F(HostileClientTest, LoopbackOfAnotherMachine) {
  Start(TensorPipeOptions());
  Endpoint elsewhere = EndpointOf(address_);
  ASSERT_FALSE(elsewhere.place.empty());
  elsewhere.place[0] = elsewhere.place[0] == '0' ? '1' : '0';  // another boot's
  const absl::Status why = Refusal(TensorPipeOptions(), AddressOf(elsewhere));
  EXPECT_TRUE(absl::StrContains(why.message(), "set DISTGRAD_HOST there")) << why;
  // Another user of this machine has the same loopback.
  Endpoint of_user = EndpointOf(address_);
  of_user.place += "1";
  auto client = NewTransport(TensorPipeOptions());
  const auto connection =
      client->Connect(AddressOf(of_user), std::make_shared<RecordingReceiver>());
  ASSERT_TRUE(connection.ok()) << connection.status();
  (*connection)->Send(Packet{"hello", {}}, nullptr);
  hellos_->AwaitMore(1);
}

// An address of an earlier listener on the same port, or one that was guessed.
TEST_F(HostileClientTest, WrongToken) {
  for (const std::string& key : {std::string(), kKey}) {
    Start(WithKey(key));
    Endpoint endpoint = EndpointOf(address_);
    endpoint.token[3] ^= 1;
    const absl::Status why = Refusal(WithKey(key), AddressOf(endpoint));
    EXPECT_TRUE(absl::StrContains(why.message(), "refused our handshake")) << why;
    ExpectServes();
  }
}

TEST_F(HostileClientTest, StrangersToCertificates) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/ours");
  TensorPipeOptions options;
  options.certificates = Certificates::Load(authority.Issue("job", {.names = "DNS:job"})).value();
  Start(options);
  const Endpoint endpoint = EndpointOf(address_);
  CertificateStrangers strangers(authority, folder + "/theirs");
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(strangers.Visit(PortOf(endpoint), endpoint.token), "");
    ExpectServes();
  }
}

TEST_F(HostileClientTest, AThousandIdleConnections) {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 4000) GTEST_SKIP() << "only " << limit.rlim_cur << " files may be open";
  Start(WithKey(kKey));
  const size_t files = OpenFiles();
  std::vector<RawSocket> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.emplace_back(address_, Family::kTcp);
  }
  ExpectServes();
  // The oldest had to make room; the limit is far below a thousand.
  for (int i = 0; i < 700; ++i) EXPECT_EQ(idle[i].AwaitEnd(), "");
  EXPECT_LE(OpenFiles(), files + idle.size() + options_.max_unauthenticated + 50);
}

// Who goes on with its handshake, however late it began with that, is not the one who makes room.
TEST_F(HostileClientTest, WhoWasSilentForLongestMakesRoom) {
  TensorPipeOptions options = WithKey(kKey);
  options.max_unauthenticated = 2;
  options.handshake_timeout = absl::Minutes(1);  // of which each has some, though others wait
  Start(options);
  const Token token = EndpointOf(address_).token;
  const auto take_step = [](RawSocket& socket, Handshake& handshake) {
    socket.Send(handshake.TakeOutput());
    ASSERT_TRUE(handshake.Receive(socket.Receive(handshake.wanted())).ok());
  };
  const auto shake = [&] {
    return Handshake::Create(Handshake::Role::kClient, kKey, token).value();
  };
  RawSocket slow(address_, Family::kTcp), silent(address_, Family::kTcp);
  Handshake of_slow = shake(), of_silent = shake(), of_third = shake();
  take_step(silent, of_silent);  // both are inside
  take_step(slow, of_slow);
  RawSocket third(address_, Family::kTcp);
  take_step(third, of_third);
  // It learns that this was for others, and nothing of a key.
  const absl::Status why = of_silent.Receive(silent.AwaitEnd());
  EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  EXPECT_TRUE(absl::StrContains(why.message(), "had no place for one more client")) << why;
  take_step(slow, of_slow);
  EXPECT_TRUE(of_slow.done());
}

// However long a handshake may take: those who are silent keep nobody out for as long as that.
TEST_F(HostileClientTest, WhoHasAllTheTimeMakesRoomToo) {
  TensorPipeOptions options = WithKey(kKey);
  options.max_unauthenticated = 2;
  options.handshake_timeout = absl::InfiniteDuration();
  Start(options);
  const RawSocket silent(address_, Family::kTcp), other(address_, Family::kTcp);
  ExpectServes();
}

// The descriptors are used up, one of them by a client that says half of what is to be said.
TEST_F(HostileClientTest, UnauthenticatedClientsMakeRoomWhereThereAreNoDescriptors) {
  Start(WithKey(kKey));
  const Token token = EndpointOf(address_).token;
  RawSocket stranger(address_, Family::kTcp), client(Family::kTcp);
  Handshake half = Handshake::Create(Handshake::Role::kClient, kKey, token).value();
  stranger.Send(half.TakeOutput());
  ASSERT_TRUE(half.Receive(stranger.Receive(kHelloBytes)).ok());  // it is inside
  const NoMoreDescriptors full;
  client.Connect(address_);
  ShakeHands(client, kKey, token);
  EXPECT_TRUE(absl::IsUnavailable(half.Receive(stranger.AwaitEnd())));
}

// One that has taken a step just now is no stranger who holds a descriptor: who comes then waits
// until there is one.
TEST_F(HostileClientTest, WhoGoesOnWithItsHandshakeStaysWhereThereAreNoDescriptors) {
  TensorPipeOptions options = WithKey(kKey);
  options.handshake_timeout = absl::Hours(100);  // so each has a second, though others wait
  Start(options);
  const Token token = EndpointOf(address_).token;
  // On a machine under load the steps themselves may take longer than that.
  for (bool in_time = false; !in_time;) {
    RawSocket honest(address_, Family::kTcp), client(Family::kTcp);
    Handshake handshake = Handshake::Create(Handshake::Role::kClient, kKey, token).value();
    const auto take_step = [&] {
      honest.Send(handshake.TakeOutput());
      return handshake.Receive(honest.Receive(handshake.wanted()));
    };
    const absl::Time begin = absl::Now();
    ASSERT_TRUE(take_step().ok());
    {
      const NoMoreDescriptors full;
      client.Connect(address_);
      const absl::Status taken = take_step();
      in_time = absl::Now() - begin < absl::Seconds(1);
      if (in_time) {
        EXPECT_TRUE(taken.ok()) << taken;
        EXPECT_TRUE(handshake.done());
      }
    }
    ShakeHands(client, kKey, token);
  }
}

// It gets as far as TLS, and can make no session of it: it says nothing in the clear, and goes on.
TEST_F(HostileClientTest, AListenerThatCanMakeNoSessionSaysSoInItsLogAndServesLater) {
  Start(WithKey(kKey));
  const Token token = EndpointOf(address_).token;
  testing::internal::CaptureStderr();
  {
    const NoTls none;
    RawSocket socket(address_, Family::kTcp);
    ShakeHands(socket, kKey, token);
    EXPECT_EQ(socket.AwaitEnd(), "");
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log, "cannot take a connection: TLS: no memory for a session"))
      << log;
  ExpectServes();
}

// One that can make none itself says so: that is nobody else's word, nor about anybody else.
TEST_F(HostileClientTest, AClientThatCanMakeNoSessionLacksTheMeans) {
  Start(WithKey(kKey));
  const NoTls none;
  TensorPipeOptions options = WithKey(kKey);
  options.unix_sockets = false;  // which are not encrypted
  auto client = NewTransport(options);
  auto receiver = std::make_shared<RecordingReceiver>();
  const auto connection = client->Connect(address_, receiver);
  ASSERT_TRUE(connection.ok()) << connection.status();
  const absl::Status why = receiver->AwaitClosed();
  EXPECT_EQ(why.code(), absl::StatusCode::kResourceExhausted) << why;
}

// docs/security.md says what they cost, of whom there may be hundreds.
TEST_F(HostileClientTest, AClientInItsHandshakeCostsLessThanAKilobyte) {
  TensorPipeOptions options = WithKey(kKey);
  options.handshake_timeout = absl::Minutes(10);
  Start(options);
  const Token token = EndpointOf(address_).token;
  constexpr size_t kClients = 200;  // all of whom may stay
  std::vector<RawSocket> clients;
  clients.reserve(kClients + 1);
  const auto begin = [&] {
    clients.emplace_back(address_, Family::kTcp);
    clients.back().Send(Handshake::Create(Handshake::Role::kClient, kKey, token)->TakeOutput());
    ASSERT_EQ(clients.back().Receive(kHelloBytes).size(), kHelloBytes);
  };
  begin();  // what is allocated once
  const size_t files = OpenFiles(), before = mallinfo2().uordblks;
  if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
  for (size_t i = 0; i < kClients; ++i) begin();
  const size_t after = mallinfo2().uordblks;
  EXPECT_LT(after, before + kClients * 1024);
  std::printf("%.0f bytes for each client\n", (1.0 * after - before) / kClients);
  EXPECT_EQ(OpenFiles(), files + 2 * kClients) << "one at each end";
}

// Whatever strangers do, and however often: it is forgotten with them.
TEST_F(HostileClientTest, MemoryDoesNotGrow) {
  Start(WithKey(kKey));
  const Token token = EndpointOf(address_).token;
  const auto annoy = [&](int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (const Family family : {Family::kTcp, Family::kUnix}) {
        RawSocket browser(address_, family), liar(address_, family), thief(address_, family),
            quitter(address_, family);
        browser.Send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        liar.Send(std::string(8, '\xff') + std::string(100000, 'x'));
        Handshake wrong = Handshake::Create(Handshake::Role::kClient, kOtherKey, token).value();
        thief.Send(wrong.TakeOutput());
        ASSERT_TRUE(wrong.Receive(thief.Receive(kHelloBytes)).ok());
        thief.Send(wrong.TakeOutput());
        quitter.Send(Handshake::Create(Handshake::Role::kClient, kKey, token)->TakeOutput());
        EXPECT_EQ(quitter.Receive(kHelloBytes).size(), kHelloBytes);
        quitter.Reset();
        for (RawSocket* const stranger : {&browser, &liar, &thief}) stranger->AwaitEnd();
      }
    }
    ExpectServes();
  };
  annoy(20);  // what is allocated once
  const size_t before = mallinfo2().uordblks;
  if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
  annoy(300);
  // Some 27 bytes for each of the 2,400, for whatever threads happen to hold: no stranger's share.
  const size_t most = before + (64 << 10);
  // What is being closed at this moment is closed by the time some others have come and gone.
  for (int i = 0; i < 100 && mallinfo2().uordblks >= most; ++i) ExpectServes();
  EXPECT_LT(mallinfo2().uordblks, most);
}

// Those who try keys cost what they are, and only as long as they are there.
TEST_F(HostileClientTest, WrongKeysLeaveNothing) {
  Start(WithKey(kKey));
  const Token token = EndpointOf(address_).token;
  ExpectNothingLeft("keys", [&](int i) {
    RawSocket thief(address_, Family::kTcp);
    Handshake wrong =
        Handshake::Create(Handshake::Role::kClient, absl::StrCat(kOtherKey, i), token).value();
    thief.Send(wrong.TakeOutput());
    ASSERT_TRUE(wrong.Receive(thief.Receive(kHelloBytes)).ok());
    thief.Send(wrong.TakeOutput());
    ASSERT_EQ(thief.AwaitEnd(), "");
  });
}

// The same of those who have the wrong certificates, of whom each gets as far as TLS.
TEST_F(HostileClientTest, WrongCertificatesLeaveNothing) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/flat");
  TensorPipeOptions options;
  options.certificates = Certificates::Load(authority.Issue("job", {.names = "DNS:job"})).value();
  Start(options);
  const Endpoint endpoint = EndpointOf(address_);
  CertificateStrangers strangers(authority, folder + "/flat_strangers");
  ExpectNothingLeft("certificates", [&](int i) {
    ASSERT_EQ(strangers.Come(i, PortOf(endpoint), endpoint.token), "");
  });
}

TEST_F(HostileClientTest, Ipv6) {
  TensorPipeOptions options = WithKey(kKey);
  options.host = "::1";
  Start(options);
  EXPECT_TRUE(absl::StartsWith(EndpointOf(address_).tcp, "[::1]:")) << address_;
  ExpectServes();
}

// Many honest clients at once are no idle ones: each gets in, though few may be about to.
TEST_F(HostileClientTest, AnHonestCrowd) {
  TensorPipeOptions options = WithKey(kKey);
  options.max_unauthenticated = 2;
  options.handshake_timeout = absl::Minutes(10);  // of which each has seconds, though others wait
  Start(options);
  Endpoint elsewhere = EndpointOf(address_);
  elsewhere.place = "0";
  auto client = NewTransport(options);
  for (int i = 0; i < 40; ++i) {
    const std::string address = i % 2 == 0 ? address_ : AddressOf(elsewhere);
    const auto connection = client->Connect(address, std::make_shared<RecordingReceiver>());
    ASSERT_TRUE(connection.ok()) << connection.status();
    (*connection)->Send(Packet{"hello", {}}, sends_.NewDone());
  }
  sends_.AwaitAll();
  ASSERT_EQ(sends_.ok(), 40u);
  hellos_->AwaitMore(40);
}

TEST_F(HostileClientTest, NobodyMayThinkForEver) {
  TensorPipeOptions options = WithKey(kKey);
  options.handshake_timeout = absl::Milliseconds(20);
  Start(options);
  for (const Family family : {Family::kTcp, Family::kUnix}) {
    RawSocket socket(address_, family);
    socket.Send("distgrad");
    EXPECT_EQ(socket.AwaitEnd(), "");
  }
}

// A listener that takes connections and says nothing.
TEST_F(HostileClientTest, ServersMayNotEither) {
  std::string tcp;
  const Fd mute = *ListenTcp("127.0.0.1", &tcp);
  TensorPipeOptions options;
  options.handshake_timeout = absl::Milliseconds(20);
  const absl::Status why =
      Refusal(options, AddressOf({tcp, "0", std::string(32, 'a'), Token{1, 2, 3}}));
  EXPECT_TRUE(absl::StrContains(why.message(), "did not finish its handshake")) << why;
}

// Who has got in may still talk nonsense, inside of TLS and without: it loses its own connection
// and nothing else.
TEST_F(HostileClientTest, MalformedFrames) {
  std::mt19937 random(7);
  std::vector<std::string> frames = {
      std::string(8, '\xff'), std::string(8, '\0'), Frame(std::string(16, '\0')),
      std::string("\0\0\0\x01\0\0\0\0", 8),     // 16 MiB, of which nothing comes
      std::string("\x01\0\0\x01\0\0\0\0", 8)};  // and a byte too many
  for (int i = 0; i < 300; ++i) {
    // A variant or structure, so that the decoder does not stop at the first byte.
    std::string object = {static_cast<char>(0xb8 + random() % 2), static_cast<char>(random() % 3)};
    for (size_t n = random() % 12; n > 0; --n) {
      const char kinds[] = {'\xb8', '\xb9', '\xba', '\xbb', '\xbc', '\xbd', '\x83', '\x01'};
      object += random() % 2 ? kinds[random() % sizeof(kinds)] : static_cast<char>(random());
    }
    frames.push_back(Frame(object));
  }
  Start(TensorPipeOptions());
  for (const std::string& frame : frames) {
    RawSocket socket(address_, Family::kUnix);
    ShakeHands(socket, "", EndpointOf(address_).token);
    socket.Send(frame);
  }
  ExpectServes();

  Start(WithKey(kKey));
  const Endpoint endpoint = EndpointOf(address_);
  const Deadline deadline = Deadline::After(absl::Minutes(1));
  for (const std::string& frame : frames) {
    Socket socket = Socket::Connect("127.0.0.1", PortOf(endpoint), deadline).value();
    Handshake handshake = Handshake::Create(Handshake::Role::kClient, kKey, endpoint.token).value();
    while (!handshake.done()) {
      ASSERT_TRUE(socket.Send(handshake.TakeOutput(), deadline).ok());
      std::string bytes(handshake.wanted(), '\0');
      ASSERT_TRUE(socket.Receive(bytes.data(), bytes.size(), deadline).ok());
      ASSERT_TRUE(handshake.Receive(bytes).ok());
    }
    ASSERT_TRUE(socket.StartTls(handshake, nullptr, deadline).ok());
    ASSERT_TRUE(socket.Send(frame, deadline).ok());
  }
  ExpectServes();
}

// A handshake in single bytes is as good as any.
TEST_F(HostileClientTest, SlowButHonest) {
  Start(WithKey(kKey));
  RawSocket socket(address_, Family::kTcp);
  Handshake handshake =
      Handshake::Create(Handshake::Role::kClient, kKey, EndpointOf(address_).token).value();
  while (!handshake.done()) {
    for (const char c : handshake.TakeOutput()) socket.Send(absl::string_view(&c, 1));
    const std::string bytes = socket.Receive(1);
    ASSERT_EQ(bytes.size(), 1u);
    ASSERT_TRUE(handshake.Receive(bytes).ok());
  }
  ExpectServes();
}

TEST_F(HostileClientTest, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Start(TensorPipeOptions());
  RawSocket probe(address_, Family::kUnix);  // it can be reached
  const std::string name = absl::StrCat("distgrad/", EndpointOf(address_).name);
  testing::internal::CaptureStderr();
  const pid_t child = fork();
  if (child == 0) {  // only plain system calls from here on
    sockaddr_un un = {};
    un.sun_family = AF_UNIX;
    std::memcpy(un.sun_path + 1, name.data(), name.size());
    if (setresuid(65534, 65534, 65534) != 0) _exit(77);
    for (int i = 0; i < 10; ++i) {
      const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&un),
                  offsetof(sockaddr_un, sun_path) + 1 + name.size()) != 0) {
        _exit(2);
      }
      char byte;
      if (recv(fd, &byte, 1, 0) != 0) _exit(3);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  const std::string log = testing::internal::GetCapturedStderr();
  const std::vector<absl::string_view> parts = absl::StrSplit(log, "refused a connection");
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this sandbox has one user only";
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(parts.size(), 1 + 4) << "not a line for each: 1, 2, 4, 8\n" << log;
  ExpectServes();
}

TEST_F(HostileClientTest, NothingIsLeftBehind) {
  const auto sockets = [] {
    std::stringstream text;
    text << std::ifstream("/proc/net/unix").rdbuf();
    return text.str();
  };
  Start(TensorPipeOptions());
  ExpectServes();
  const std::string name = EndpointOf(address_).name;
  EXPECT_TRUE(absl::StrContains(sockets(), absl::StrCat("@distgrad/", name)));
  server_ = nullptr;
  EXPECT_FALSE(absl::StrContains(sockets(), absl::StrCat("@distgrad/", name)));
}

TEST(ClusterKeyOptionTest, IsUsedOrRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(NewTensorPipeTransport(WithKey("short")).status()));
  for (const Kind kind : {Kind::kTcp, Kind::kShm}) {
    TensorPipeOptions options = WithKey(kKey);
    options.kind = kind;
    EXPECT_TRUE(absl::IsInvalidArgument(NewTensorPipeTransport(options).status()));
  }
}

}  // namespace
}  // namespace distgrad
