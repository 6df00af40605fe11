// The suite of all transports, and each fault on demand: dropped, doubled, held, cut, corrupted.
#include "core/transport/inproc/inproc_transport.h"

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/transport/transport_conformance.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

INSTANTIATE_TEST_SUITE_P(Inproc, TransportConformanceTest,
                         testing::Values(TransportFactory{
                             "inproc",
                             []() -> TransportFactory::Make {
                               auto network = std::make_shared<InprocNetwork>();
                               return [network] { return NewInprocTransport(network); };
                             },
                             {"", "nonsense", "other://1", "inproc://", "inproc://x"}}),
                         TransportFactoryName);

// Does to the n-th packet what the test says.
class Script final : public FaultInjector {
 public:
  explicit Script(std::function<Action(int, Packet&)> script) : script_(std::move(script)) {}
  Action OnSend(const std::string& from, const std::string& to, Packet& packet) override {
    EXPECT_EQ(from, "inproc://2");
    EXPECT_EQ(to, "inproc://1");
    return script_(n_++, packet);
  }

 private:
  const std::function<Action(int, Packet&)> script_;
  int n_ = 0;  // the tests send on one thread
};

using Action = FaultInjector::Action;

// A client that sends to a server over a network with faults.
class InprocFaultTest : public testing::Test {
 protected:
  void Start(std::function<Action(int, Packet&)> script) {
    network_ = std::make_shared<InprocNetwork>(std::make_shared<Script>(std::move(script)));
    server_ = NewInprocTransport(network_);
    client_ = NewInprocTransport(network_);
    const std::string address =
        server_->Listen([this](std::shared_ptr<Connection>) { return there_; }).value();
    EXPECT_EQ(address, "inproc://1");
    connection_ = client_->Connect(address, here_).value();
  }
  void Send(const std::string& bytes) {
    Packet packet;
    packet.bytes = bytes;
    connection_->Send(std::move(packet), sends_.NewDone());
  }
  std::string Arrived(size_t i) { return there_->packet(i).bytes; }

  const std::shared_ptr<RecordingReceiver> here_ = std::make_shared<RecordingReceiver>();
  const std::shared_ptr<RecordingReceiver> there_ = std::make_shared<RecordingReceiver>();
  SendLog sends_;
  std::shared_ptr<InprocNetwork> network_;
  std::unique_ptr<Transport> server_, client_;
  std::shared_ptr<Connection> connection_;
};

TEST_F(InprocFaultTest, Drop) {
  Start([](int n, Packet&) { return n == 1 ? Action::kDrop : Action::kDeliver; });
  for (const char* bytes : {"a", "b", "c"}) Send(bytes);
  there_->AwaitPackets(2);
  EXPECT_EQ(Arrived(0) + Arrived(1), "ac");
  EXPECT_EQ(sends_.ok(), 3u);
}

TEST_F(InprocFaultTest, Duplicate) {
  Start([](int n, Packet&) { return n == 1 ? Action::kDuplicate : Action::kDeliver; });
  for (const char* bytes : {"a", "b", "c"}) Send(bytes);
  there_->AwaitPackets(4);
  EXPECT_EQ(Arrived(0) + Arrived(1) + Arrived(2) + Arrived(3), "abbc");
  EXPECT_EQ(sends_.ok(), 3u);
}

TEST_F(InprocFaultTest, HoldKeepsWhatIsBehindInOrder) {
  Start([](int n, Packet&) {
    return n == 1 ? Action::kHold : n == 2 ? Action::kDuplicate : Action::kDeliver;
  });
  for (const char* bytes : {"a", "b", "c"}) Send(bytes);
  there_->AwaitPackets(1);
  EXPECT_EQ(there_->count(), 1u);
  network_->ReleaseHeld();
  Send("d");
  there_->AwaitPackets(5);
  EXPECT_EQ(Arrived(1) + Arrived(2) + Arrived(3) + Arrived(4), "bccd");
}

TEST_F(InprocFaultTest, HeldPacketsAreLostWhenTheConnectionCloses) {
  Start([](int n, Packet&) { return n == 0 ? Action::kDeliver : Action::kHold; });
  Send("a");
  Send("b");
  there_->AwaitPackets(1);
  connection_->Close();
  network_->ReleaseHeld();
  EXPECT_EQ(there_->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(there_->count(), 1u);
}

TEST_F(InprocFaultTest, Cut) {
  Start([](int n, Packet&) { return n == 1 ? Action::kCut : Action::kDeliver; });
  for (const char* bytes : {"a", "b", "c"}) Send(bytes);
  EXPECT_EQ(here_->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(there_->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(there_->count(), 1u);
  EXPECT_EQ(sends_.ok(), 1u);
  EXPECT_EQ(sends_.failed(), 2u);
}

TEST_F(InprocFaultTest, CorruptChangesTheReceiversCopyOnly) {
  Start([](int, Packet& packet) {
    packet.bytes[0] ^= 1;
    packet.segments[0].data[0] ^= 1;
    return Action::kDeliver;
  });
  Packet packet;
  packet.bytes = "a";
  packet.segments.push_back(AllocateSegment(10));
  packet.segments[0].data[0] = 4;
  const Segment mine = packet.segments[0];
  connection_->Send(std::move(packet), nullptr);
  there_->AwaitPackets(1);
  EXPECT_EQ(Arrived(0), "`");
  EXPECT_EQ(there_->packet(0).segments[0].data[0], 5);
  EXPECT_EQ(mine.data[0], 4);
}

// Others wait to hear of the end. It may come in a destructor.
TEST(InprocTransportTest, WithoutMemoryAConnectionAndATransportEndAllTheSame) {
  for (const bool ends_transport : {false, true}) {
    for (int count = 1; count <= 3; ++count) {
      bool failed = true;
      for (int nth = 0; failed; ++nth) {
        SCOPED_TRACE(absl::StrCat(ends_transport, ": ", count, " allocations from ", nth));
        auto network = std::make_shared<InprocNetwork>();
        auto server = NewInprocTransport(network);
        auto client = NewInprocTransport(network);
        auto here = std::make_shared<RecordingReceiver>();
        auto there = std::make_shared<RecordingReceiver>();
        const std::string address = server->Listen([&](auto) { return there; }).value();
        const auto connection = client->Connect(address, here).value();
        connection->Send(Packet{}, nullptr);
        there->AwaitPackets(1);
        FailAllocation(nth, count);
        if (ends_transport) {
          client = nullptr;
        } else {
          connection->Close();
        }
        failed = FailAllocation(-1);
        EXPECT_EQ(here->AwaitClosed().code(), absl::StatusCode::kCancelled);
        EXPECT_EQ(there->AwaitClosed().code(), absl::StatusCode::kUnavailable);
      }
    }
  }
}

// Its two ends own each other from the start.
TEST(InprocTransportTest, AConnectionThatFindsNoMemoryKeepsNothing) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const auto here = std::make_shared<RecordingReceiver>();
    auto network = std::make_shared<InprocNetwork>();
    auto server = NewInprocTransport(network);
    auto client = NewInprocTransport(network);
    const auto accept = [](auto) { return std::make_shared<RecordingReceiver>(); };
    const std::string address = server->Listen(accept).value();
    FailAllocation(nth);
    try {
      client->Connect(address, here).IgnoreError();
    } catch (const std::bad_alloc&) {
      EXPECT_EQ(here.use_count(), 1);  // before the transports end, which close what they know
    }
    failed = FailAllocation(-1);
  }
}

TEST(InprocTransportTest, NetworksAreApart) {
  auto here = NewInprocTransport(std::make_shared<InprocNetwork>());
  auto there = NewInprocTransport(std::make_shared<InprocNetwork>());
  const std::string address =
      there->Listen([](auto) { return std::make_shared<RecordingReceiver>(); }).value();
  auto receiver = std::make_shared<RecordingReceiver>();
  auto connection = here->Connect(address, receiver).value();  // its own: it does not listen
  EXPECT_EQ(receiver->AwaitClosed().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace distgrad
