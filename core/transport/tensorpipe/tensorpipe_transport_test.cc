// The suite of all transports over TensorPipe, and listeners that bad peers do not end.
#include "core/transport/tensorpipe/tensorpipe_transport.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/base/event_loop.h"
#include "core/base/fake_clock.h"
#include "core/net/endpoint.h"
#include "core/transport/transport_conformance.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"
#include "tensorpipe/tensorpipe.h"
#include "tests/testing/no_descriptors.h"
#include "tests/testing/no_memory.h"

namespace {

std::atomic<int> large_on_loop{0};

}  // namespace

// Sees who allocates what is large. AddressSanitizer's form with std::nothrow would not fit the
// delete below.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  if (size >= (48 << 20) && distgrad::EventLoop::Current() != nullptr) ++large_on_loop;
  return malloc(size);
}
void* operator new(size_t size) {
  if (void* const memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { free(memory); }

namespace distgrad {
namespace {

using Kind = TensorPipeOptions::Kind;
using Channel = TensorPipeOptions::Channel;

std::unique_ptr<Transport> NewTransport(TensorPipeOptions options) {
  auto transport = NewTensorPipeTransport(std::move(options));
  EXPECT_TRUE(transport.ok()) << transport.status();
  return transport.ok() ? *std::move(transport) : nullptr;
}

std::unique_ptr<Transport> NewTransport(Kind kind, Channel channel) {
  TensorPipeOptions options;
  options.kind = kind;
  options.channel = channel;
  return NewTransport(std::move(options));
}

// Sockets as between machines.
TensorPipeOptions Tcp(std::string cluster_key) {
  TensorPipeOptions options;
  options.unix_sockets = false;
  options.cluster_key = std::move(cluster_key);
  return options;
}

TransportFactory Factory(std::string name, const TensorPipeOptions& options) {
  TransportFactory factory;
  factory.name = std::move(name);
  factory.start = [options] {
    return TransportFactory::Make([options] { return NewTransport(options); });
  };
  factory.bad_addresses = {"",         "nonsense",         "other://1",          "tcp://",
                           "shm://",   "tcp://1.2.3.4",    "tcp://localhost:1",  "shm://x",
                           "shm://-1", " tcp://1.2.3.4:1", "socket://1.2.3.4:1", "socket://"};
  return factory;
}

// Those of the combinations that work here; the others stand as skipped tests.
struct Combination {
  std::string name;
  Kind kind;
  Channel channel;
  std::string full_name;
};
const Combination kCombinations[] = {
    {"socket_basic", Kind::kSocket, Channel::kBasic, "tensorpipe socket+basic"},
    {"socket_cma", Kind::kSocket, Channel::kCma, "tensorpipe socket+cma"},
    {"tcp_basic", Kind::kTcp, Channel::kBasic, "tensorpipe tcp+basic"},
    {"shm_basic", Kind::kShm, Channel::kBasic, "tensorpipe shm+basic"},
};

// Why a combination cannot be tested here, or "".
std::string WhyNot(const Combination& combination) {
  TensorPipeOptions options;
  options.kind = combination.kind;
  options.channel = combination.channel;
  const auto transport = NewTensorPipeTransport(options);
  if (!transport.ok()) return std::string(transport.status().message());
  if ((*transport)->Name() == combination.full_name) return "";
  return absl::StrCat("the machine gives ", (*transport)->Name());
}

std::vector<TransportFactory> WorkingFactories() {
  std::vector<TransportFactory> factories;
  for (const Combination& combination : kCombinations) {
    if (!WhyNot(combination).empty()) continue;
    TensorPipeOptions options;
    options.kind = combination.kind;
    options.channel = combination.channel;
    factories.push_back(Factory(combination.name, options));
  }
  factories.push_back(Factory("socket_over_tcp", Tcp("")));
  factories.push_back(Factory("socket_over_tls", Tcp("0123456789abcdef")));
  return factories;
}

INSTANTIATE_TEST_SUITE_P(TensorPipe, TransportConformanceTest,
                         testing::ValuesIn(WorkingFactories()), TransportFactoryName);

class CombinationTest : public testing::TestWithParam<Combination> {
 protected:
  void SetUp() override {
    const std::string why_not = WhyNot(GetParam());
    if (!why_not.empty()) GTEST_SKIP() << GetParam().full_name << ": " << why_not;
  }
  std::unique_ptr<Transport> New() { return NewTransport(GetParam().kind, GetParam().channel); }
};

INSTANTIATE_TEST_SUITE_P(TensorPipe, CombinationTest, testing::ValuesIn(kCombinations),
                         [](const auto& info) { return info.param.name; });

TEST_P(CombinationTest, Works) { EXPECT_EQ(New()->Name(), GetParam().full_name); }

TEST_P(CombinationTest, LeavesNoSharedMemoryFiles) {
  const auto list = [] {
    std::set<std::string> names;
    DIR* dir = opendir("/dev/shm");
    EXPECT_NE(dir, nullptr);
    while (const dirent* entry = dir ? readdir(dir) : nullptr) {
      if (absl::StrContains(entry->d_name, "tensorpipe")) names.insert(entry->d_name);
    }
    if (dir) closedir(dir);
    return names;
  };
  const std::set<std::string> before = list();
  {
    auto server = New();
    auto client = New();
    auto receiver = std::make_shared<RecordingReceiver>();
    const std::string address =
        server->Listen([&](std::shared_ptr<Connection>) { return receiver; }).value();
    auto own = std::make_shared<RecordingReceiver>();
    auto connection = client->Connect(address, own).value();
    Packet packet;
    packet.segments.push_back(AllocateSegment(1 << 20));
    connection->Send(std::move(packet), nullptr);
    receiver->AwaitPackets(1);
    EXPECT_EQ(list(), before);  // not even while they talk: a killed process leaves none either
  }
  EXPECT_EQ(list(), before);
}

// The calling thread takes SIGPIPE as before.
TEST_P(CombinationTest, LeavesTheCallersSignalsAlone) {
  sigset_t before, after;
  pthread_sigmask(SIG_BLOCK, nullptr, &before);
  const auto transport = New();
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  EXPECT_EQ(sigismember(&before, SIGPIPE), sigismember(&after, SIGPIPE));
}

// Sender and receiver with different channels settle on the one that both have.
TEST(TensorPipeTransportTest, DifferentChannels) {
  for (const Channel first : {Channel::kBasic, Channel::kCma}) {
    auto server = NewTransport(Kind::kSocket, first);
    auto client =
        NewTransport(Kind::kSocket, first == Channel::kCma ? Channel::kBasic : Channel::kCma);
    auto receiver = std::make_shared<RecordingReceiver>();
    const std::string address =
        server->Listen([&](std::shared_ptr<Connection>) { return receiver; }).value();
    auto connection = client->Connect(address, std::make_shared<RecordingReceiver>()).value();
    Packet packet;
    packet.segments.push_back(AllocateSegment(1 << 20));
    connection->Send(std::move(packet), nullptr);
    receiver->AwaitPackets(1);
    EXPECT_EQ(receiver->packet(0).segments[0].size, 1u << 20);
  }
}

// Where the kernel cannot say whose memory it is that is to be read, none is.
TEST(TensorPipeTransportTest, CmaNeedsUnixDomainSockets) {
  for (const Kind kind : {Kind::kTcp, Kind::kShm}) {
    TensorPipeOptions options;
    options.kind = kind;
    const auto transport = NewTensorPipeTransport(options);
    if (!transport.ok()) continue;  // the machine has none
    EXPECT_TRUE(absl::EndsWith((*transport)->Name(), "+basic")) << (*transport)->Name();
  }
}

TEST(TensorPipeTransportTest, BadHosts) {
  for (const char* host : {"", "0.0.0.0", "203.0.113.7", "no-such-host.invalid"}) {
    TensorPipeOptions options;
    options.host = host;
    auto transport = NewTransport(options);
    const auto address = transport->Listen([](auto) { return nullptr; });
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << host;
    EXPECT_TRUE(absl::StrContains(address.status().message(), "listen on")) << address.status();
  }
}

TEST(TensorPipeTransportTest, ListensAgainAfterABadHost) {
  TensorPipeOptions options;
  options.host = "localhost";
  auto transport = NewTransport(options);
  const auto address = transport->Listen([](auto) { return nullptr; });
  ASSERT_TRUE(address.ok()) << address.status();
  EXPECT_TRUE(absl::StartsWith(*address, "socket://127.0.0.1:")) << *address;
}

// Bytes are cleared before they arrive, and a peer says how many there are: not on the thread of
// the sockets.
TEST(TensorPipeTransportTest, LongBytesAreAllocatedAside) {
  auto server = NewTransport(TensorPipeOptions());
  auto client = NewTransport(TensorPipeOptions());
  auto receiver = std::make_shared<RecordingReceiver>();
  const std::string address =
      server->Listen([&](std::shared_ptr<Connection>) { return receiver; }).value();
  auto connection = client->Connect(address, std::make_shared<RecordingReceiver>()).value();
  const std::string large(64 << 20, 'x');
  for (const std::string& bytes : {std::string("before"), large, std::string("after")}) {
    connection->Send(BytesPacket(bytes), nullptr);
  }
  receiver->AwaitPackets(3);
  EXPECT_EQ(receiver->packet(0).bytes, "before");
  EXPECT_TRUE(receiver->packet(1).bytes == large);
  EXPECT_EQ(receiver->packet(2).bytes, "after");
  EXPECT_EQ(large_on_loop, 0);
}

// That says nothing of whether somebody listens there.
TEST(TensorPipeTransportTest, WhoHasNoDescriptorsLeftSaysSo) {
  auto server = NewTransport(TensorPipeOptions());
  auto client = NewTransport(TensorPipeOptions());
  const std::string address =
      server->Listen([](auto) { return std::make_shared<RecordingReceiver>(); }).value();
  auto receiver = std::make_shared<RecordingReceiver>();
  {
    const NoDescriptors none;
    auto connection = client->Connect(address, receiver).value();
    const absl::Status why = receiver->AwaitClosed();
    EXPECT_EQ(why.code(), absl::StatusCode::kResourceExhausted) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), "Too many open files")) << why;
  }
}

// Nor does a network that does not lead there.
TEST(TensorPipeTransportTest, WhereNoWayLeadsSomebodyMayBe) {
  auto server = NewTransport(TensorPipeOptions());
  auto client = NewTransport(TensorPipeOptions());
  const std::string scheme = "socket://";
  const std::string address = server->Listen([](auto) { return nullptr; }).value();
  Endpoint endpoint = ParseEndpoint(address.substr(scheme.size())).value();
  endpoint.place = "";
  endpoint.tcp = "224.0.0.1:9";  // nobody connects to a group
  auto receiver = std::make_shared<RecordingReceiver>();
  auto connection = client->Connect(scheme + FormatEndpoint(endpoint), receiver).value();
  const absl::Status why = receiver->AwaitClosed();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
}

// A client that goes away before it said who it is.
TEST(TensorPipeTransportTest, ListensOnAfterAnEarlyGoodbye) {
  auto server = NewTransport(Kind::kTcp, Channel::kBasic);
  auto at_server = std::make_shared<RecordingReceiver>();
  const std::string address =
      server->Listen([&](std::shared_ptr<Connection>) { return at_server; }).value();
  sockaddr_in target = {};
  target.sin_family = AF_INET;
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  target.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  for (const int linger : {0, 1}) {  // an orderly end, and a reset
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&target), sizeof(target)), 0);
    const struct linger reset = {linger, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    close(fd);
  }
  auto client = NewTransport(Kind::kTcp, Channel::kBasic);
  auto connection = client->Connect(address, std::make_shared<RecordingReceiver>()).value();
  connection->Send(Packet{"x", {}}, nullptr);
  at_server->AwaitPackets(1);
}

// A TensorPipe peer that is none of ours.
class UnknownPeer {
 public:
  UnknownPeer() {
    context_.registerTransport(0, "tcp", tensorpipe::transport::uv::create());
    context_.registerChannel(0, "basic", tensorpipe::channel::basic::create());
  }
  ~UnknownPeer() { context_.join(); }
  void Connect(const std::string& address) { pipe_ = context_.connect(address); }
  void Say(std::string text) {
    tensorpipe::Message message;
    message.metadata = std::move(text);
    pipe_->write(std::move(message), [](const tensorpipe::Error&) {});
  }

 private:
  tensorpipe::Context context_;
  std::shared_ptr<tensorpipe::Pipe> pipe_;
};

TEST(TensorPipeTransportTest, AnotherProtocol) {
  auto server = NewTransport(Kind::kTcp, Channel::kBasic);
  auto receiver = std::make_shared<RecordingReceiver>();
  UnknownPeer unknown_peer;
  unknown_peer.Connect(
      server->Listen([&](std::shared_ptr<Connection>) { return receiver; }).value());
  testing::internal::CaptureStderr();
  unknown_peer.Say("distgrad 0");
  const absl::Status why = receiver->AwaitClosed();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
  EXPECT_TRUE(absl::StrContains(log, absl::StrCat("closing a connection: ", why.message()))) << log;
  EXPECT_EQ(receiver->count(), 0u);
}

// Not before it has had its time for the handshakes of all its sockets.
class PatienceTest : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(PatienceTest, WhoSaysNothingIsLetGo) {
  FakeClock clock;
  TensorPipeOptions options;
  options.kind = Kind::kTcp;
  options.handshake_timeout = absl::Seconds(GetParam().first);
  options.clock = &clock;
  auto server = NewTransport(options);
  auto receiver = std::make_shared<RecordingReceiver>();
  SendLog log;
  absl::Notification accepted;
  UnknownPeer unknown_peer;
  unknown_peer.Connect(server
                           ->Listen([&](std::shared_ptr<Connection> connection) {
                             for (int i = 0; i < 3; ++i)
                               connection->Send(Packet{"hello?", {}}, log.NewDone());
                             accepted.Notify();
                             return receiver;
                           })
                           .value());
  accepted.WaitForNotification();
  while (!receiver->closed()) clock.Advance(absl::Seconds(5));  // the timer may not be set yet
  const absl::Status why = receiver->AwaitClosed();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(
      why.message(), absl::StrCat("did not finish connecting within ", GetParam().second, "s")))
      << why;
  log.AwaitAll();
}

INSTANTIATE_TEST_SUITE_P(HandshakeTimeouts, PatienceTest,
                         ::testing::Values(std::pair(1, 10), std::pair(10, 10), std::pair(30, 30)));

// Errors say who is at the other end.
TEST(TensorPipeTransportTest, MessagesNameThePeer) {
  TensorPipeOptions options;
  options.name = "worker\n7";
  auto client = NewTransport(options);
  auto server = NewTransport(TensorPipeOptions());
  auto at_server = std::make_shared<RecordingReceiver>();
  const std::string address =
      server->Listen([&](std::shared_ptr<Connection>) { return at_server; }).value();
  // Without what only those need to know who shall connect.
  const std::string shown = address.substr(0, address.find('/', address.find("://") + 3));
  auto at_client = std::make_shared<RecordingReceiver>();
  auto connection = client->Connect(address, at_client).value();
  connection->Send(Packet{"x", {}}, nullptr);
  at_server->AwaitPackets(1);
  connection->Close();
  const absl::Status at_other_end = at_server->AwaitClosed();
  EXPECT_TRUE(absl::StrContains(at_other_end.message(), "'worker\\n7'")) << at_other_end;
  EXPECT_TRUE(absl::StrContains(at_client->AwaitClosed().message(), shown));

  server = nullptr;
  auto gone = std::make_shared<RecordingReceiver>();
  connection = client->Connect(address, gone).value();
  const absl::Status why = gone->AwaitClosed();
  EXPECT_TRUE(absl::StrContains(why.message(), shown)) << why;
  EXPECT_TRUE(absl::StrContains(why.message(), "refused")) << why;
  EXPECT_FALSE(absl::StrContains(why.message(), "originated")) << why;
  EXPECT_FALSE(absl::StrContains(why.message(), address)) << why;
}

// The sender's limit, and the receiver's, which is the smaller one here.
TEST(TensorPipeTransportTest, Limits) {
  TensorPipeOptions small;
  small.max_packet_bytes = 1000;
  small.max_segments = 2;
  const auto packets = [] {
    std::vector<Packet> packets(4);
    packets[0].bytes = std::string(1001, 'x');
    packets[1].segments.push_back(AllocateSegment(1001));
    packets[2].segments.push_back(AllocateSegment(1 << 20));
    for (int i = 0; i < 3; ++i) packets[3].segments.push_back(AllocateSegment(1));
    return packets;
  };
  for (const auto& [i, kind] : std::vector<std::pair<size_t, Kind>>{{0, Kind::kSocket},
                                                                    {1, Kind::kSocket},
                                                                    {2, Kind::kSocket},
                                                                    {3, Kind::kSocket},
                                                                    {0, Kind::kTcp},
                                                                    {1, Kind::kTcp},
                                                                    {3, Kind::kTcp}}) {
    small.kind = kind;
    auto client = NewTransport(kind, Channel::kBasic);
    auto server = NewTransport(small);
    std::shared_ptr<Connection> from_server;
    absl::Notification accepted;
    auto at_server = std::make_shared<RecordingReceiver>();
    const std::string address = server
                                    ->Listen([&](std::shared_ptr<Connection> connection) {
                                      from_server = std::move(connection);
                                      accepted.Notify();
                                      return at_server;
                                    })
                                    .value();
    auto at_client = std::make_shared<RecordingReceiver>();
    auto connection = client->Connect(address, at_client).value();
    accepted.WaitForNotification();

    SendLog log;
    from_server->Send(std::move(packets()[i]), log.NewDone());  // refused, and nothing is broken
    EXPECT_EQ(log.failed(), 1u);
    from_server->Send(Packet{"fits", {}}, log.NewDone());
    at_client->AwaitPackets(1);
    const std::string limit =
        i == 3 ? "limit tensors_per_message allows 2" : "limit message_bytes is 1000";
    if (kind == Kind::kSocket) {  // which reads it to its end
      Packet packet = std::move(packets()[i]);
      if (i != 0) packet.bytes = "of it";
      connection->Send(std::move(packet), log.NewDone());
      connection->Send(Packet{"after it", {}}, log.NewDone());
      at_server->AwaitPackets(2);
      const Packet& lost = at_server->packet(0);
      EXPECT_EQ(lost.bytes, i == 0 ? "" : "of it");
      EXPECT_TRUE(lost.segments.empty());
      EXPECT_TRUE(absl::IsResourceExhausted(lost.segments_status)) << lost.segments_status;
      EXPECT_TRUE(absl::StrContains(lost.segments_status.message(), limit)) << lost.segments_status;
      EXPECT_EQ(at_server->packet(1).bytes, "after it");
      log.AwaitAll();
      continue;
    }
    testing::internal::CaptureStderr();
    connection->Send(std::move(packets()[i]), log.NewDone());
    const absl::Status why = at_server->AwaitClosed();
    const std::string logged = testing::internal::GetCapturedStderr();
    EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), limit)) << why;
    EXPECT_TRUE(absl::StrContains(logged, absl::StrCat("closing a connection: ", why.message())))
        << logged;
    EXPECT_EQ(at_client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(at_server->count(), 0u);
    log.AwaitAll();
  }
}

// Packets are read to the end, whatever becomes of them, so those behind them arrive.
TEST(NoMemoryTest, APacketArrivesWithoutTheSegmentsThatFindNone) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory stands above every limit of addresses";
#endif
  constexpr size_t kLarge = 256 << 20, kRest = 128 << 20;
  for (const Channel channel : {Channel::kBasic, Channel::kCma}) {
    auto client = NewTransport(Kind::kSocket, channel);
    auto server = NewTransport(Kind::kSocket, channel);
    auto at_server = std::make_shared<RecordingReceiver>();
    const std::string address =
        server->Listen([&](std::shared_ptr<Connection>) { return at_server; }).value();
    auto connection = client->Connect(address, std::make_shared<RecordingReceiver>()).value();
    SendLog log;
    connection->Send(PatternPacket(1, "before", {3 << 20}), log.NewDone());
    at_server->AwaitPackets(1);
    Packet large{"large", {AllocateSegment(100), AllocateSegment(kLarge)}};
    {
      const NoMemory no_memory(kRest);
      connection->Send(std::move(large), log.NewDone());
      connection->Send(PatternPacket(2, "after", {3 << 20}), log.NewDone());
      at_server->AwaitPackets(3);
    }
    log.AwaitAll();
    EXPECT_EQ(log.ok(), 3u);
    EXPECT_EQ(at_server->packet(1).bytes, "large");
    EXPECT_TRUE(at_server->packet(1).segments.empty());
    EXPECT_EQ(at_server->packet(1).segments_status.code(), absl::StatusCode::kResourceExhausted)
        << at_server->packet(1).segments_status;
    ExpectPattern(at_server->packet(2), 2, "after", {3 << 20});
    EXPECT_TRUE(at_server->packet(2).segments_status.ok());
  }
}

}  // namespace
}  // namespace distgrad
