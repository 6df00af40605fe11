// Links that are opened over connections on which there is no memory to say hello.
#include "core/rpc/link_table.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/fake_clock.h"
#include "core/base/trace.h"
#include "core/rpc/call_table.h"
#include "core/rpc/peers.h"
#include "core/transport/transport.h"

namespace distgrad {
namespace {

// Finds no memory for what is sent. For one thread.
class FullConnection : public Connection {
 public:
  explicit FullConnection(std::shared_ptr<Receiver> receiver) : receiver_(std::move(receiver)) {}
  void Send(Packet, SendDone) override { throw std::bad_alloc(); }
  void Close() override {
    closed = true;
    if (const auto receiver = std::move(receiver_)) {
      receiver->OnClosed(absl::CancelledError("closed"));
    }
  }

  bool closed = false;

 private:
  std::shared_ptr<Receiver> receiver_;
};

// Makes such connections. For one thread.
class FullTransport : public Transport {
 public:
  absl::StatusOr<std::string> Listen(Accept) override { return "full://"; }
  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string&,
                                                      std::shared_ptr<Receiver> receiver) override {
    connections.push_back(std::make_shared<FullConnection>(std::move(receiver)));
    return connections.back();
  }
  std::string Name() const override { return "full"; }

  std::vector<std::shared_ptr<FullConnection>> connections;
};

// Keeps why links have ended. For one thread.
class RecordingUser : public LinkTable::User {
 public:
  absl::Status OnPacket(const std::shared_ptr<Link>&, Packet) override { return absl::OkStatus(); }
  uint64_t BegunSoFar() override { return 0; }
  void OnPeerLost(WorkerRank, uint64_t, const absl::Status& why) override { lost.push_back(why); }
  void OnLinkEnded(const MemberWatch::ClosedLink&, const absl::Status& why) override {
    ended.push_back(why);
  }
  void OnRevived(WorkerRank, Incarnation, uint64_t) override {}
  void OnMemberEvents() override {}

  std::vector<absl::Status> lost, ended;
};

// It would stay open, with the link as its receiver, until the peer gives it up. That the memory is
// this worker's lack is what its watch has to hear, or it would take the peer for lost.
TEST(LinkTableTest, AConnectionWithoutMemoryForItsHelloIsClosed) {
  FakeClock clock;
  FullTransport transport;
  const auto peers = std::make_shared<Peers>(10);
  std::vector<WorkerInfo> workers(2);
  for (WorkerRank rank = 0; rank < 2; ++rank) {
    workers[rank].rank = rank;
    workers[rank].name = std::string(1, static_cast<char>('a' + rank));
    workers[rank].incarnation = 1;
  }
  ASSERT_TRUE(peers->Start(workers[0], workers).ok());
  const auto calls =
      std::make_shared<CallTable>(&clock, Limits{}, std::make_shared<TraceRecorder>(), peers);
  const auto links = std::make_shared<LinkTable>(&clock, &transport, /*directory=*/nullptr,
                                                 absl::InfiniteDuration(), Limits{}, peers, calls);
  const auto user = std::make_shared<RecordingUser>();
  ASSERT_TRUE(links->Listen(user).ok());
  links->Start();
  const std::weak_ptr<Link> link = *links->To(1);
  link.lock()->Send(Packet{"x", {}});
  ASSERT_EQ(transport.connections.size(), 1u);
  EXPECT_TRUE(transport.connections[0]->closed);
  EXPECT_TRUE(link.expired());
  for (const auto& told : {user->lost, user->ended}) {
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].code(), absl::StatusCode::kResourceExhausted) << told[0];
  }
  links->Close(absl::CancelledError("end"));
}

}  // namespace
}  // namespace distgrad
