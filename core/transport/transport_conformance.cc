// Has the tests of the suite.
#include "core/transport/transport_conformance.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace distgrad {
namespace {

constexpr size_t kKiB = 1 << 10;
constexpr size_t kMiB = 1 << 20;

// What the calling thread asks a transport for at this moment; 0 for nothing.
thread_local uint64_t asking = 0;
constexpr uint64_t kToConnectOrClose = 1;  // greater numbers are those of sends

class Asks {
 public:
  explicit Asks(uint64_t what) : before_(std::exchange(asking, what)) {}
  ~Asks() { asking = before_; }

 private:
  const uint64_t before_;
};

// Callbacks that ran on a thread that was asking for something else. Thread-safe.
struct Strays {
  std::atomic<int> packets{0}, ends{0}, sends{0}, accepts{0};
};

// Counts what arrives, and strays among it.
class StrayCounter final : public Receiver {
 public:
  explicit StrayCounter(Strays* strays) : strays_(strays) {}

  void OnPacket(Packet) override {
    if (asking != 0) ++strays_->packets;
    absl::MutexLock lock(&mu_);
    ++count_;
  }
  void OnClosed(absl::Status) override {
    if (asking != 0) ++strays_->ends;
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  void AwaitPackets(int count) {
    const auto enough = [&] {
      mu_.AssertReaderHeld();
      return count_ >= count || closed_;
    };
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kTransportPatience));
    EXPECT_GE(count_, count);
  }
  void AwaitClosed() {
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&closed_), kTransportPatience));
  }

 private:
  Strays* const strays_;
  absl::Mutex mu_;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const TransportFactory& factory) {
  return out << factory.name;
}

std::string TransportFactoryName(const testing::TestParamInfo<TransportFactory>& info) {
  return info.param.name;
}

// The fixture

Transport::Accept TransportConformanceTest::Acceptor::Callback() {
  return [this](std::shared_ptr<Connection> connection) -> std::shared_ptr<Receiver> {
    std::shared_ptr<RecordingReceiver> receiver = test_->NewReceiver();
    if (on_accept) on_accept(connection, *receiver);
    absl::MutexLock lock(&mu_);
    accepted_.push_back({nullptr, std::move(connection), nullptr, receiver});
    return receiver;
  };
}

TransportConformanceTest::Link TransportConformanceTest::Acceptor::AwaitNext() {
  absl::MutexLock lock(&mu_);
  if (!mu_.AwaitWithTimeout(absl::Condition(this, &Acceptor::HasNext), kTransportPatience)) {
    ADD_FAILURE() << "nothing accepted";
    return {};
  }
  return accepted_[taken_++];
}

void TransportConformanceTest::TearDown() {
  transports_.clear();
  absl::MutexLock lock(&mu_);
  for (const auto& receiver : receivers_) EXPECT_TRUE(receiver->closed());
  EXPECT_EQ(sends_.pending(), 0u);
}

Transport* TransportConformanceTest::NewTransport() {
  transports_.push_back(make_());
  return transports_.back().get();
}

void TransportConformanceTest::Destroy(Transport* transport) {
  const auto found = std::find_if(transports_.begin(), transports_.end(),
                                  [&](const auto& owned) { return owned.get() == transport; });
  transports_.erase(found);
}

std::shared_ptr<RecordingReceiver> TransportConformanceTest::NewReceiver() {
  auto receiver = std::make_shared<RecordingReceiver>();
  absl::MutexLock lock(&mu_);
  receivers_.push_back(receiver);
  return receiver;
}

TransportConformanceTest::Link TransportConformanceTest::Connect(Transport* client,
                                                                 const std::string& address,
                                                                 Acceptor* acceptor) {
  std::shared_ptr<RecordingReceiver> receiver = NewReceiver();
  auto connection = client->Connect(address, receiver);
  EXPECT_TRUE(connection.ok()) << connection.status();
  Link link = acceptor->AwaitNext();
  link.client = *connection;
  link.client_receiver = std::move(receiver);
  return link;
}

std::string TransportConformanceTest::DeadAddress() {
  Transport* gone = NewTransport();
  const std::string address = gone->Listen(acceptor_.Callback()).value();
  Destroy(gone);
  return address;
}

namespace {

// Whether a client hears so of a server that ends: the connection may not have come to be yet.
bool IsGone(const absl::Status& why) { return absl::IsUnavailable(why) || absl::IsNotFound(why); }

}  // namespace

// The tests

TEST_P(TransportConformanceTest, HasAName) { EXPECT_NE(NewTransport()->Name(), ""); }

TEST_P(TransportConformanceTest, SmallPacketBothWays) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  link.client->Send(BytesPacket("there"), sends_.NewDone());
  link.server_receiver->AwaitPackets(1);
  ExpectPattern(link.server_receiver->packet(0), 0, "there", {});
  link.server->Send(BytesPacket(std::string("and\0back", 8)), sends_.NewDone());
  link.client_receiver->AwaitPackets(1);
  ExpectPattern(link.client_receiver->packet(0), 0, std::string("and\0back", 8), {});
  sends_.AwaitAll();
  EXPECT_EQ(sends_.ok(), 2u);
}

TEST_P(TransportConformanceTest, PacketsSentBeforeTheConnectionStands) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  auto receiver = NewReceiver();
  auto client = NewTransport()->Connect(address, receiver).value();
  for (int i = 0; i < 10; ++i) client->Send(BytesPacket(absl::StrCat(i)), sends_.NewDone());
  Link link = acceptor_.AwaitNext();
  link.server_receiver->AwaitPackets(10);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(link.server_receiver->packet(i).bytes, absl::StrCat(i));
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, EmptyBytesAndNoCallback) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  link.client->Send(Packet{}, nullptr);
  link.client->Send(PatternPacket(3, "", {5}), nullptr);
  link.client->Send(Packet{}, sends_.NewDone());
  link.server_receiver->AwaitPackets(3);
  ExpectPattern(link.server_receiver->packet(0), 0, "", {});
  ExpectPattern(link.server_receiver->packet(1), 3, "", {5});
  ExpectPattern(link.server_receiver->packet(2), 0, "", {});
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, SegmentsOfAllSizes) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  const std::vector<std::vector<size_t>> packets = {
      {1},
      {64 * kKiB},
      {8 * kMiB},
      {1, 64 * kKiB, 8 * kMiB, 3, 64 * kKiB + 1},
      std::vector<size_t>(64, 100),
      {},
  };
  for (size_t i = 0; i < packets.size(); ++i) {
    const std::string bytes(i * 1000, 'x');
    link.client->Send(PatternPacket(i, bytes, packets[i]), sends_.NewDone());
  }
  link.server_receiver->AwaitPackets(packets.size());
  for (size_t i = 0; i < packets.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectPattern(link.server_receiver->packet(i), i, std::string(i * 1000, 'x'), packets[i]);
  }
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, LargeBytes) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  const std::string large(3 * kMiB + 17, 'y');
  link.client->Send(BytesPacket(large), sends_.NewDone());
  link.server_receiver->AwaitPackets(1);
  EXPECT_EQ(link.server_receiver->packet(0).bytes, large);
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, MemoryIsTheSendersAgainWhenDone) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  for (size_t size : {16 * kKiB, 2 * kMiB}) {
    const size_t i = link.server_receiver->count();
    const Segment mine = PatternSegment(i, size);
    Packet packet;
    packet.segments.push_back(mine);
    link.client->Send(std::move(packet), sends_.NewDone());
    sends_.AwaitAll();
    std::memset(mine.data, 0xee, size);
    link.server_receiver->AwaitPackets(i + 1);
    ExpectPattern(link.server_receiver->packet(i), i, "", {size});
    // And the receiver's memory is the receiver's alone.
    std::memset(link.server_receiver->packet(i).segments[0].data, 0x11, size);
    EXPECT_EQ(mine.data[0], 0xee);
    EXPECT_EQ(mine.data[size - 1], 0xee);
  }
}

TEST_P(TransportConformanceTest, OrderOfAThousandPackets) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  constexpr size_t kPackets = 1000;
  const auto sizes = [](size_t i) -> std::vector<size_t> {
    if (i % 100 == 7) return {200 * kKiB, 1};
    if (i % 10 == 3) return {i + 1};
    return {};
  };
  const auto bytes = [](size_t i) { return absl::StrCat(i, std::string(i * 37 % 5000, '.')); };
  for (size_t i = 0; i < kPackets; ++i) {
    link.client->Send(PatternPacket(i, bytes(i), sizes(i)), sends_.NewDone());
  }
  link.server_receiver->AwaitPackets(kPackets);
  for (size_t i = 0; i < kPackets; ++i) {
    SCOPED_TRACE(i);
    ExpectPattern(link.server_receiver->packet(i), i, bytes(i), sizes(i));
    if (HasFatalFailure()) return;
  }
  sends_.AwaitAll();
  EXPECT_EQ(sends_.ok(), kPackets);
}

TEST_P(TransportConformanceTest, ManyConnections) {
  Transport* server = NewTransport();
  const std::string address = server->Listen(acceptor_.Callback()).value();
  const std::vector<Transport*> clients = {NewTransport(), NewTransport(), server};
  std::vector<Link> links;
  for (int i = 0; i < 30; ++i) links.push_back(Connect(clients[i % 3], address, &acceptor_));
  for (size_t round = 0; round < 5; ++round) {
    for (size_t i = 0; i < links.size(); ++i) {
      links[i].client->Send(PatternPacket(i, absl::StrCat("to ", i), {i + 1}), sends_.NewDone());
      links[i].server->Send(PatternPacket(i, absl::StrCat("from ", i), {}), sends_.NewDone());
    }
  }
  for (size_t i = 0; i < links.size(); ++i) {
    SCOPED_TRACE(i);
    links[i].server_receiver->AwaitPackets(5);
    links[i].client_receiver->AwaitPackets(5);
    for (size_t round = 0; round < 5; ++round) {
      ExpectPattern(links[i].server_receiver->packet(round), i, absl::StrCat("to ", i), {i + 1});
      ExpectPattern(links[i].client_receiver->packet(round), i, absl::StrCat("from ", i), {});
    }
  }
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, BothEndsSendAtOnce) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  constexpr size_t kPackets = 200;
  const auto sizes = [](size_t i) -> std::vector<size_t> {
    return i % 8 == 0 ? std::vector<size_t>{64 * kKiB} : std::vector<size_t>{};
  };
  // Two threads at each end: the packets of one thread stay in order.
  std::vector<std::thread> threads;
  for (Connection* end : {link.client.get(), link.server.get()}) {
    for (char thread : {'a', 'b'}) {
      threads.emplace_back([&, end, thread] {
        for (size_t i = 0; i < kPackets; ++i) {
          end->Send(PatternPacket(i, absl::StrCat(std::string(1, thread), i), sizes(i)),
                    sends_.NewDone());
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (RecordingReceiver* receiver : {link.client_receiver.get(), link.server_receiver.get()}) {
    receiver->AwaitPackets(2 * kPackets);
    size_t next[2] = {0, 0};
    for (size_t p = 0; p < 2 * kPackets; ++p) {
      const Packet& packet = receiver->packet(p);
      ASSERT_FALSE(packet.bytes.empty());
      const char thread = packet.bytes[0];
      const size_t i = next[thread == 'a' ? 0 : 1]++;
      ExpectPattern(packet, i, absl::StrCat(std::string(1, thread), i), sizes(i));
      if (HasFatalFailure()) return;
    }
  }
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, SendInsideCallbacks) {
  acceptor_.on_accept = [&](const std::shared_ptr<Connection>& connection,
                            RecordingReceiver& receiver) {
    connection->Send(BytesPacket("welcome"), sends_.NewDone());
    receiver.on_packet = [&, connection](const Packet& packet) {
      connection->Send(BytesPacket(packet.bytes), sends_.NewDone());
    };
  };
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  for (size_t i = 0; i < 100; ++i) {
    link.client_receiver->AwaitPackets(i + 1);
    link.client->Send(BytesPacket(absl::StrCat(i)), sends_.NewDone());
  }
  link.client_receiver->AwaitPackets(101);
  EXPECT_EQ(link.client_receiver->packet(0).bytes, "welcome");
  for (size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(link.client_receiver->packet(i + 1).bytes, absl::StrCat(i));
  }
  sends_.AwaitAll();
}

TEST_P(TransportConformanceTest, NobodyListens) {
  const std::string address = DeadAddress();
  auto receiver = NewReceiver();
  auto connection = NewTransport()->Connect(address, receiver);
  ASSERT_TRUE(connection.ok()) << connection.status();
  (*connection)->Send(PatternPacket(1, "early", {100}), sends_.NewDone());
  EXPECT_EQ(receiver->AwaitClosed().code(), absl::StatusCode::kNotFound);
  (*connection)->Send(PatternPacket(1, "late", {100}), sends_.NewDone());
  (*connection)->Close();
  sends_.AwaitAll();
  EXPECT_EQ(sends_.failed(), 2u);
  EXPECT_EQ(receiver->count(), 0u);
}

// Who takes nobody in lacks memory, say. That is not to be taken for an address where nobody is.
TEST_P(TransportConformanceTest, WhoIsNotTakenInHearsThatSomebodyMayBeThere) {
  const std::string address = NewTransport()->Listen([](auto) { return nullptr; }).value();
  auto receiver = NewReceiver();
  auto connection = NewTransport()->Connect(address, receiver).value();
  EXPECT_EQ(receiver->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

TEST_P(TransportConformanceTest, BadAddresses) {
  Transport* transport = NewTransport();
  for (const std::string& address : GetParam().bad_addresses) {
    // The receiver is never told anything: there is no connection.
    auto receiver = std::make_shared<RecordingReceiver>();
    auto connection = transport->Connect(address, receiver);
    EXPECT_EQ(connection.status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_FALSE(receiver->closed());
  }
}

TEST_P(TransportConformanceTest, ListensOnce) {
  Transport* transport = NewTransport();
  const std::string address = transport->Listen(acceptor_.Callback()).value();
  EXPECT_FALSE(transport->Listen(acceptor_.Callback()).ok());
  // And the first one still does.
  Link link = Connect(NewTransport(), address, &acceptor_);
  link.client->Send(BytesPacket("x"), sends_.NewDone());
  link.server_receiver->AwaitPackets(1);
}

TEST_P(TransportConformanceTest, CloseIsSeenAtTheOtherEnd) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Transport* client = NewTransport();
  for (bool client_closes : {true, false}) {
    Link link = Connect(client, address, &acceptor_);
    link.client->Send(BytesPacket("x"), sends_.NewDone());
    link.server_receiver->AwaitPackets(1);
    sends_.AwaitAll();
    (client_closes ? link.client : link.server)->Close();
    EXPECT_EQ(link.client_receiver->AwaitClosed().code(),
              client_closes ? absl::StatusCode::kCancelled : absl::StatusCode::kUnavailable);
    EXPECT_EQ(link.server_receiver->AwaitClosed().code(),
              client_closes ? absl::StatusCode::kUnavailable : absl::StatusCode::kCancelled);
    const size_t failed = sends_.failed();
    link.client->Send(BytesPacket("late"), sends_.NewDone());
    link.server->Send(BytesPacket("late"), sends_.NewDone());
    sends_.AwaitAll();
    EXPECT_EQ(sends_.failed(), failed + 2);
    link.client->Close();
    link.server->Close();
  }
}

TEST_P(TransportConformanceTest, BothEndsCloseAtOnce) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Transport* client = NewTransport();
  for (int i = 0; i < 20; ++i) {
    Link link = Connect(client, address, &acceptor_);
    std::thread other([&] { link.server->Close(); });
    link.client->Close();
    other.join();
    EXPECT_FALSE(link.client_receiver->AwaitClosed().ok());
    EXPECT_FALSE(link.server_receiver->AwaitClosed().ok());
  }
}

TEST_P(TransportConformanceTest, CloseInsideOnPacket) {
  acceptor_.on_accept = [](const std::shared_ptr<Connection>& connection,
                           RecordingReceiver& receiver) {
    receiver.on_packet = [connection](const Packet&) { connection->Close(); };
  };
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  for (int i = 0; i < 50; ++i) {
    link.client->Send(PatternPacket(i, "x", {10 * kKiB}), sends_.NewDone());
  }
  EXPECT_EQ(link.server_receiver->AwaitClosed().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(link.client_receiver->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  sends_.AwaitAll();
  EXPECT_LE(link.server_receiver->count(), 1u) << "a packet after our own Close";
}

TEST_P(TransportConformanceTest, CloseInsideAccept) {
  acceptor_.on_accept = [](const std::shared_ptr<Connection>& connection, RecordingReceiver&) {
    connection->Close();
  };
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  EXPECT_EQ(link.client_receiver->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(link.server_receiver->AwaitClosed().code(), absl::StatusCode::kCancelled);
}

TEST_P(TransportConformanceTest, DestroyedWithSendsInFlight) {
  for (bool destroy_sender : {true, false}) {
    Transport* server = NewTransport();
    Transport* client = NewTransport();
    const std::string address = server->Listen(acceptor_.Callback()).value();
    Link link = Connect(client, address, &acceptor_);
    for (size_t i = 0; i < 100; ++i) {
      const std::vector<size_t> sizes = {i % 10 == 0 ? kMiB : 1000};
      link.client->Send(PatternPacket(i, absl::StrCat(i), sizes), sends_.NewDone());
      link.server->Send(PatternPacket(i, absl::StrCat(i), sizes), sends_.NewDone());
    }
    Destroy(destroy_sender ? client : server);
    // What the destroyed one promised is done; the other end hears of it.
    RecordingReceiver& own = destroy_sender ? *link.client_receiver : *link.server_receiver;
    RecordingReceiver& other = destroy_sender ? *link.server_receiver : *link.client_receiver;
    EXPECT_TRUE(own.closed());
    EXPECT_EQ(own.AwaitClosed().code(), absl::StatusCode::kCancelled);
    EXPECT_PRED1(IsGone, other.AwaitClosed());
    sends_.AwaitAll();
    // Handles outlive the transport, and say so.
    const size_t failed = sends_.failed();
    (destroy_sender ? link.client : link.server)->Send(BytesPacket("late"), sends_.NewDone());
    EXPECT_EQ(sends_.failed(), failed + 1);
    (destroy_sender ? link.client : link.server)->Close();
    Destroy(destroy_sender ? server : client);
    // What arrived is a beginning of what was sent.
    for (RecordingReceiver* receiver : {&own, &other}) {
      for (size_t i = 0; i < receiver->count(); ++i) {
        EXPECT_EQ(receiver->packet(i).bytes, absl::StrCat(i));
      }
    }
  }
}

TEST_P(TransportConformanceTest, DestroyedWhileConnecting) {
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  const std::string dead = DeadAddress();
  Transport* client = NewTransport();
  for (int i = 0; i < 10; ++i) {
    auto connection = client->Connect(i % 2 == 0 ? address : dead, NewReceiver()).value();
    connection->Send(PatternPacket(1, "x", {kKiB}), sends_.NewDone());
  }
  Destroy(client);
  EXPECT_EQ(sends_.pending(), 0u);
}

TEST_P(TransportConformanceTest, DestroyedWhileOthersSend) {
  Transport* server = NewTransport();
  const std::string address = server->Listen(acceptor_.Callback()).value();
  Link link = Connect(NewTransport(), address, &acceptor_);
  std::thread sender([&] {
    for (int i = 0; i < 1000; ++i) link.server->Send(BytesPacket("x"), sends_.NewDone());
  });
  Destroy(server);
  sender.join();
  sends_.AwaitAll();
  EXPECT_PRED1(IsGone, link.client_receiver->AwaitClosed());
}

TEST_P(TransportConformanceTest, NothingKeepsAClosedReceiverAlive) {
  // As an agent's peers do, each receiver owns its connection.
  class Owner : public Receiver {
   public:
    void OnPacket(Packet) override {}
    void OnClosed(absl::Status) override {}
    std::shared_ptr<Connection> connection;
  };
  const std::string address = NewTransport()->Listen(acceptor_.Callback()).value();
  Transport* client = NewTransport();
  auto owner = std::make_shared<Owner>();
  const std::weak_ptr<Owner> watch = owner;
  owner->connection = client->Connect(address, owner).value();
  owner->connection->Send(BytesPacket("x"), sends_.NewDone());
  acceptor_.AwaitNext();
  owner = nullptr;
  EXPECT_FALSE(watch.expired()) << "an open connection keeps its receiver";
  Destroy(client);
  EXPECT_TRUE(watch.expired());
}

// A thread that sends, connects or closes has its own modes (torch's, say) and may hold locks.
// Nobody else's packets, completions and ends are delivered on it.
TEST_P(TransportConformanceTest, WhoSendsRunsNobodyElsesCallbacks) {
  constexpr int kRounds = 300;
  Strays strays;
  struct End {
    std::shared_ptr<Connection> connection;
    std::shared_ptr<StrayCounter> receiver;
  };
  absl::Mutex mu;
  std::vector<End> accepted;  // guarded by mu
  Transport* server = NewTransport();
  const std::string address = server
                                  ->Listen([&](std::shared_ptr<Connection> connection) {
                                    if (asking != 0) ++strays.accepts;
                                    auto receiver = std::make_shared<StrayCounter>(&strays);
                                    absl::MutexLock lock(&mu);
                                    accepted.push_back({std::move(connection), receiver});
                                    return receiver;
                                  })
                                  .value();
  // Two of them share a transport, so that their threads meet in it.
  Transport* client = NewTransport();
  Transport* const clients[] = {client, client, NewTransport()};
  std::vector<End> ends;
  for (Transport* transport : clients) {
    auto receiver = std::make_shared<StrayCounter>(&strays);
    const Asks asks(kToConnectOrClose);
    ends.push_back({transport->Connect(address, receiver).value(), receiver});
  }
  {
    const auto all = [&] { return accepted.size() == std::size(clients); };
    absl::MutexLock lock(&mu);
    ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&all), kTransportPatience));
    ends.insert(ends.end(), accepted.begin(), accepted.end());
  }
  std::atomic<uint64_t> last_send{kToConnectOrClose};
  std::vector<std::thread> threads;
  for (End& end : ends) {
    threads.emplace_back([&, connection = end.connection.get()] {
      for (int i = 0; i < kRounds; ++i) {
        const uint64_t number = ++last_send;
        const Asks asks(number);
        const std::vector<size_t> sizes(i % 8 == 0 ? 1 : 0, i % 16 == 0 ? 300 * kKiB : kKiB);
        connection->Send(PatternPacket(i, "x", sizes),
                         [&strays, number, done = sends_.NewDone()](const absl::Status& s) mutable {
                           // Its own may be called inside it.
                           if (asking != 0 && asking != number) ++strays.sends;
                           done(s);
                         });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (End& end : ends) end.receiver->AwaitPackets(kRounds);
  sends_.AwaitAll();

  // Ends: of one's own closing too, and of an address where nobody listens.
  auto unheard = std::make_shared<StrayCounter>(&strays);
  const std::string dead = DeadAddress();
  {
    const Asks asks(kToConnectOrClose);
    for (End& end : ends) end.connection->Close();
    EXPECT_TRUE(client->Connect(dead, unheard).ok());
  }
  for (End& end : ends) end.receiver->AwaitClosed();
  unheard->AwaitClosed();
  EXPECT_EQ(strays.packets, 0);
  EXPECT_EQ(strays.sends, 0);
  EXPECT_EQ(strays.accepts, 0);
  EXPECT_EQ(strays.ends, 0);
  ends.clear();
  accepted.clear();
}

// What waits when a transport goes away is told on its own threads too.
TEST_P(TransportConformanceTest, WhoEndsATransportRunsNobodyElsesCallbacks) {
  Strays strays;
  auto at_server = std::make_shared<StrayCounter>(&strays);
  auto at_client = std::make_shared<StrayCounter>(&strays);
  const std::string address =
      NewTransport()->Listen([&](std::shared_ptr<Connection>) { return at_server; }).value();
  Transport* client = NewTransport();
  auto connection = client->Connect(address, at_client).value();
  connection->Send(BytesPacket("x"), sends_.NewDone());
  at_server->AwaitPackets(1);
  for (int i = 0; i < 50; ++i) {
    connection->Send(PatternPacket(i, "x", {kMiB}),
                     [&strays, done = sends_.NewDone()](const absl::Status& s) mutable {
                       if (asking == kToConnectOrClose) ++strays.sends;
                       done(s);
                     });
  }
  {
    const Asks asks(kToConnectOrClose);
    Destroy(client);
  }
  at_client->AwaitClosed();
  at_server->AwaitClosed();
  EXPECT_EQ(strays.ends, 0);
  EXPECT_EQ(strays.sends, 0);
}

}  // namespace distgrad
