// Two processes, and one of them killed.
#include <signal.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"
#include "tests/testing/child_process.h"

namespace distgrad {

namespace {

// "tcp_basic" and so on; nullptr, with a note, if it does not work here.
std::unique_ptr<Transport> NewTransport(const std::string& combination) {
  TensorPipeOptions options;
  options.name = "worker";
  using Kind = TensorPipeOptions::Kind;
  const bool cma = absl::EndsWith(combination, "cma");
  options.kind = absl::StartsWith(combination, "tcp")   ? Kind::kTcp
                 : absl::StartsWith(combination, "shm") ? Kind::kShm
                                                        : Kind::kSocket;
  if (!cma) options.channel = TensorPipeOptions::Channel::kBasic;
  auto transport = NewTensorPipeTransport(options);
  if (!transport.ok() || absl::EndsWith((*transport)->Name(), "cma") != cma) {
    std::fprintf(stderr, "%s does not work here\n", combination.c_str());
    return nullptr;
  }
  return *std::move(transport);
}

// Sends back what arrives.
class Echo : public Receiver {
 public:
  void OnPacket(Packet packet) override { connection->Send(std::move(packet), nullptr); }
  void OnClosed(absl::Status why) override {
    why_ = std::move(why);
    closed_.Notify();
  }
  absl::Status AwaitClosed() {
    closed_.WaitForNotification();
    return why_;
  }

  std::shared_ptr<Connection> connection;

 private:
  absl::Status why_;
  absl::Notification closed_;
};

// The child: listens, prints its address, echoes until the other end closes.
int ServeEchoes(const std::string& combination) {
  auto echo = std::make_shared<Echo>();
  auto transport = NewTransport(combination);
  if (transport == nullptr) return 1;
  const auto address = transport->Listen([&](std::shared_ptr<Connection> connection) {
    echo->connection = std::move(connection);
    return echo;
  });
  if (!address.ok()) return 2;
  std::printf("%s\n", address->c_str());
  std::fflush(stdout);
  return echo->AwaitClosed().code() == absl::StatusCode::kUnavailable ? 0 : 3;
}

Packet MakePacket(std::string bytes, size_t segment) {
  Packet packet;
  packet.bytes = std::move(bytes);
  if (segment > 0) {
    packet.segments.push_back(AllocateSegment(segment));
    std::memset(packet.segments[0].data, static_cast<int>(segment % 251), segment);
  }
  return packet;
}

class TwoProcessesTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    transport_ = NewTransport(GetParam());
    if (transport_ == nullptr) GTEST_SKIP() << GetParam() << " does not work on this machine";
    child_ = std::make_unique<ChildProcess>(std::vector<std::string>{"--echo", GetParam()});
    address_ = child_->ReadLine();
    auto connection = transport_->Connect(address_, receiver_);
    ASSERT_TRUE(connection.ok()) << connection.status();
    connection_ = *connection;
  }
  void TearDown() override {
    transport_ = nullptr;
    sends_.AwaitAll();
  }

  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ChildProcess> child_;
  std::string address_;
  std::shared_ptr<RecordingReceiver> receiver_ = std::make_shared<RecordingReceiver>();
  std::shared_ptr<Connection> connection_;
  SendLog sends_;
};

INSTANTIATE_TEST_SUITE_P(TensorPipe, TwoProcessesTest,
                         testing::Values("socket_basic", "socket_cma", "tcp_basic", "shm_basic"),
                         [](const auto& info) { return info.param; });

TEST_P(TwoProcessesTest, EchoesOfAllSizes) {
  const size_t segments[] = {0, 1, 1000, 100000, 5000000};
  const size_t bytes[] = {0, 10, 100000};
  size_t count = 0;
  for (size_t b : bytes) {
    for (size_t s : segments)
      connection_->Send(MakePacket(std::string(b, 'b'), s), sends_.NewDone());
  }
  receiver_->AwaitPackets(std::size(bytes) * std::size(segments));
  for (size_t b : bytes) {
    for (size_t s : segments) {
      const Packet& packet = receiver_->packet(count++);
      EXPECT_EQ(packet.bytes, std::string(b, 'b'));
      ASSERT_EQ(packet.segments.size(), s > 0 ? 1u : 0u);
      if (s == 0) continue;
      const Packet expected = MakePacket("", s);
      ASSERT_EQ(packet.segments[0].size, s);
      EXPECT_EQ(std::memcmp(packet.segments[0].data, expected.segments[0].data, s), 0);
    }
  }
  sends_.AwaitAll();
  connection_->Close();
  EXPECT_EQ(child_->Wait(), 0);
}

// Killed while packets run both ways: everything completes, and SIGPIPE, which is not ignored
// here, does not end this process.
TEST_P(TwoProcessesTest, PeerIsKilled) {
  ASSERT_EQ(signal(SIGPIPE, SIG_DFL), SIG_DFL) << "somebody has changed how SIGPIPE is handled";
  size_t sent = 0;
  for (; !receiver_->closed(); ++sent) {
    connection_->Send(MakePacket("some bytes", sent % 20 == 0 ? 1 << 20 : 2000), sends_.NewDone());
    if (sent == 100) {
      receiver_->AwaitPackets(1);
      child_->Signal(SIGKILL);
    }
    // Not more than memory holds, should it take long until its end is seen.
    if (sends_.pending() > 200) sends_.AwaitAll();
  }
  EXPECT_GT(sent, 100u);
  const absl::Status why = receiver_->AwaitClosed();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
  const std::string shown = address_.substr(0, address_.find('/', address_.find("://") + 3));
  EXPECT_TRUE(absl::StrContains(why.message(), shown)) << why;
  connection_->Send(MakePacket("late", 0), sends_.NewDone());
  sends_.AwaitAll();
  EXPECT_GE(sends_.failed(), 1u);
  EXPECT_EQ(child_->Wait(), -SIGKILL);

  // Nobody listens there now.
  auto again = std::make_shared<RecordingReceiver>();
  auto connection = transport_->Connect(address_, again);
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_EQ(again->AwaitClosed().code(), absl::StatusCode::kNotFound);
}

// Killed while nothing is in flight.
TEST_P(TwoProcessesTest, IdlePeerIsKilled) {
  connection_->Send(MakePacket("x", 100000), sends_.NewDone());
  receiver_->AwaitPackets(1);
  child_->Signal(SIGKILL);
  EXPECT_EQ(receiver_->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--echo") return distgrad::ServeEchoes(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
