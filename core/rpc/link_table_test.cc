// Links over connections on which there is no memory to say hello, and those of a peer that comes
// back.
#include "core/rpc/link_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/fake_clock.h"
#include "core/base/trace.h"
#include "core/base/wire.h"
#include "core/rpc/call_table.h"
#include "core/rpc/frame.h"
#include "core/rpc/peers.h"
#include "core/transport/transport.h"

namespace distgrad {
namespace {

// Takes what is sent, or finds no memory for it. For one thread.
class FakeConnection : public Connection {
 public:
  FakeConnection(std::shared_ptr<Receiver> receiver, bool is_full)
      : receiver_(std::move(receiver)), is_full_(is_full) {}
  void Send(Packet packet, SendDone done) override {
    if (is_full_) throw std::bad_alloc();
    WireReader reader(packet.bytes);
    kinds.push_back(ReadFrame(reader)->kind);
    if (done) done(absl::OkStatus());
  }
  void Close() override {
    closed = true;
    if (const auto receiver = std::move(receiver_)) {
      receiver->OnClosed(absl::CancelledError("closed"));
    }
  }

  bool closed = false;
  std::vector<FrameKind> kinds;  // of what was sent

 private:
  std::shared_ptr<Receiver> receiver_;
  const bool is_full_;
};

// Makes such connections. For one thread.
class FakeTransport : public Transport {
 public:
  absl::StatusOr<std::string> Listen(Accept listens) override {
    accept = std::move(listens);
    return "fake://";
  }
  absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string&,
                                                      std::shared_ptr<Receiver> receiver) override {
    if (fails) return fails();
    connections.push_back(std::make_shared<FakeConnection>(std::move(receiver), is_full));
    return connections.back();
  }
  std::string Name() const override { return "fake"; }

  bool is_full = false;
  Accept accept;
  std::function<absl::Status()> fails;  // to connect
  std::vector<std::shared_ptr<FakeConnection>> connections;
};

// Keeps why links have ended. For one thread.
class RecordingUser : public LinkTable::User {
 public:
  absl::Status OnPacket(const std::shared_ptr<Link>&, Packet) override { return read; }
  uint64_t BegunSoFar() override { return 0; }
  void OnPeerLost(WorkerRank, uint64_t, const absl::Status& why) override { lost.push_back(why); }
  void OnLinkEnded(const MemberWatch::ClosedLink&, const absl::Status& why) override {
    ended.push_back(why);
  }
  void OnRevived(WorkerRank, Incarnation, uint64_t) override {}
  void OnMemberEvents() override {}

  absl::Status read;  // what becomes of packets
  std::vector<absl::Status> lost, ended;
};

// Worker 0 of two.
class LinkTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(peers_->Start(Worker(0, 1), {Worker(0, 1), Worker(1, 1)}).ok());
    ASSERT_TRUE(links_->Listen(user_).ok());
    links_->Start();
  }
  void TearDown() override { links_->Close(absl::CancelledError("end")); }
  static WorkerInfo Worker(WorkerRank rank, Incarnation incarnation) {
    WorkerInfo worker;
    worker.rank = rank;
    worker.name = std::string(1, static_cast<char>('a' + rank));
    worker.incarnation = incarnation;
    return worker;
  }

  static Packet Ping() {
    Packet packet;
    AppendFrame({.kind = FrameKind::kPing}, &packet.bytes);
    return packet;
  }

  FakeClock clock_;
  FakeTransport transport_;
  const std::shared_ptr<Peers> peers_ = std::make_shared<Peers>(10);
  const std::shared_ptr<CallTable> calls_ =
      std::make_shared<CallTable>(&clock_, Limits{}, std::make_shared<TraceRecorder>(), peers_);
  const std::shared_ptr<LinkTable> links_ =
      std::make_shared<LinkTable>(&clock_, &transport_, /*directory=*/nullptr,
                                  absl::InfiniteDuration(), Limits{}, peers_, calls_);
  const std::shared_ptr<RecordingUser> user_ = std::make_shared<RecordingUser>();
};

// It would stay open, with the link as its receiver, until the peer gives it up. That the memory is
// this worker's lack is what its watch has to hear, or it would take the peer for lost.
TEST_F(LinkTableTest, AConnectionWithoutMemoryForItsHelloIsClosed) {
  transport_.is_full = true;
  const std::weak_ptr<Link> link = *links_->To(1);
  link.lock()->Send(Ping());
  ASSERT_EQ(transport_.connections.size(), 1u);
  EXPECT_TRUE(transport_.connections[0]->closed);
  EXPECT_TRUE(link.expired());
  for (const auto& told : {user_->lost, user_->ended}) {
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].code(), absl::StatusCode::kResourceExhausted) << told[0];
  }
}

// What a peer has sent says nothing of this worker's calls, nor that it lacks the means.
TEST_F(LinkTableTest, AConnectionThatIsClosedForWhatCameIsUnavailableAndTheLogNamesThePeer) {
  for (const absl::Status& read : {absl::ResourceExhaustedError("it sends too much"),
                                   absl::InvalidArgumentError("it sends too much")}) {
    user_->lost.clear();
    user_->ended.clear();
    const std::shared_ptr<Link> link = *links_->To(1);
    link->Send(Ping());
    user_->read = read;
    testing::internal::CaptureStderr();
    link->OnPacket(Ping());
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find("closing a connection with worker 'b' (1): it sends too much"),
              std::string::npos)
        << log;
    for (const auto& told : {user_->lost, user_->ended}) {
      ASSERT_EQ(told.size(), 1u);
      EXPECT_EQ(told[0], absl::UnavailableError(
                             "the connection with worker 'b' (1) broke: it sends too much"));
    }
  }
}

// Whoever has sent it hears why. Of gradients, say, passes cannot do without.
TEST_F(LinkTableTest, WhatIsGivenUpForWhatCameIsUnavailableToCallsAlone) {
  const std::shared_ptr<Link> link = *links_->To(1);
  link->Send(Ping());
  absl::Status ended;
  CallTable::Call call{.to = 1,
                       .function = "f",
                       .begun = clock_.Now(),
                       .deadline = absl::InfiniteFuture(),
                       .done = [&](absl::StatusOr<Body> reply, bool) { ended = reply.status(); }};
  Packet request;
  AppendFrame({.kind = FrameKind::kRequest, .function = "f"}, &request.bytes);
  ASSERT_TRUE(calls_->Begin(call, link, request).ok());
  // It waits for room.
  absl::Status waited;
  const SendWindow::Credit all = link->window()->Acquire(link->window()->limit());
  link->window()->AcquireAsync(
      1, [&](absl::StatusOr<SendWindow::Credit> credit) { waited = credit.status(); });
  links_->GiveUp(link, 1, absl::ResourceExhaustedError("it sends too much"));
  for (const absl::Status& told : {ended, waited}) {
    EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
    EXPECT_NE(told.message().find("it sends too much"), std::string::npos) << told;
  }
  ASSERT_EQ(user_->lost.size(), 1u);
  EXPECT_EQ(user_->lost[0], absl::ResourceExhaustedError("it sends too much"));
  EXPECT_EQ(transport_.connections[0]->kinds.back(), FrameKind::kRefused);
}

TEST_F(LinkTableTest, TheLogNamesWhoIsRefused) {
  Packet hello;
  AppendHello({.from = 1, .from_incarnation = 1, .to = 5, .to_incarnation = 1}, &hello.bytes);
  const auto link = std::dynamic_pointer_cast<Link>(
      transport_.accept(std::make_shared<FakeConnection>(nullptr, /*is_full=*/false)));
  ASSERT_NE(link, nullptr);
  WireReader reader(hello.bytes);
  ASSERT_TRUE(ReadFrame(reader).ok());
  testing::internal::CaptureStderr();
  EXPECT_TRUE(links_->OnHello(link, reader).ok());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("refusing a connection from worker 'b' (1): it was meant for another worker"),
            std::string::npos)
      << log;
}

// They live as long as another connection with the peer brings something; one that brings nothing
// is dead all the same.
TEST_F(LinkTableTest, TheLogNamesWhoseConnectionsHeartbeatsClose) {
  const std::pair<bool, std::string> all[] = {
      {false, "nothing was heard of it within the heartbeat limit of 50s"},
      {true,
       "one of the connections with it has brought or taken nothing within the heartbeat limit of "
       "50s, though it lives"}};
  for (const auto& [lives, why] : all) {
    SCOPED_TRACE(why);
    const auto calls =
        std::make_shared<CallTable>(&clock_, Limits{}, std::make_shared<TraceRecorder>(), peers_);
    const auto links = std::make_shared<LinkTable>(&clock_, &transport_, /*directory=*/nullptr,
                                                   absl::Seconds(50), Limits{}, peers_, calls);
    ASSERT_TRUE(links->Listen(user_).ok());
    links->Start();
    const std::shared_ptr<Link> link = *links->To(1);
    link->Send(Ping());
    const auto other = std::dynamic_pointer_cast<Link>(
        transport_.accept(std::make_shared<FakeConnection>(nullptr, /*is_full=*/false)));
    Packet hello;
    AppendHello({.from = 1, .from_incarnation = 1, .to = 0, .to_incarnation = 1, .number = 1},
                &hello.bytes);
    WireReader reader(hello.bytes);
    ASSERT_TRUE(ReadFrame(reader).ok());
    ASSERT_TRUE(links->OnHello(other, reader).ok());
    testing::internal::CaptureStderr();
    for (int i = 0; i < 6 && !link->closed(); ++i) {
      if (lives) other->OnPacket(Ping());
      clock_.Advance(absl::Seconds(10));
    }
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(link->closed());
    EXPECT_NE(log.find(absl::StrCat("the connection with worker 'b' (1) broke: ", why, "\n")),
              std::string::npos)
        << log;
    links->Close(absl::CancelledError("end"));
  }
}

// The number in it is the old incarnation's: the new one may have given it to another link.
TEST_F(LinkTableTest, AWishForABulkLinkIsNotCarriedToTheNextIncarnation) {
  const std::shared_ptr<Link> link = *links_->To(1);
  link->Send(Ping());
  ASSERT_EQ(transport_.connections.size(), 1u);
  ASSERT_TRUE(links_->UpdatePeer(Worker(1, 2)).ok());
  links_->OnBulk(link, 1, 7);  // another thread has taken it in before
  EXPECT_EQ(transport_.connections.size(), 1u);
}

// It has ended with the other one, which waits for the peer to close it.
TEST_F(LinkTableTest, ThatABulkLinkIsNotToBeHadDoesNotTakeTheWordsFromItsMainOne) {
  const std::shared_ptr<Link> link = *links_->To(1);
  link->Send(Ping());
  ASSERT_EQ(transport_.connections.size(), 1u);
  transport_.fails = [&] {
    links_->GiveUp(link, 1, absl::ResourceExhaustedError("no memory for it"));
    return absl::UnavailableError("no more connections");
  };
  links_->OnBulk(link, 1, 7);
  EXPECT_EQ(transport_.connections[0]->kinds.back(), FrameKind::kRefused);
  EXPECT_FALSE(transport_.connections[0]->closed);
}

// What is sent to the new incarnation would be answered by the old one, which may live.
TEST_F(LinkTableTest, WhoKnowsTheNextIncarnationFindsNoLinkWithTheOldOne) {
  constexpr Incarnation kLast = 500;
  std::atomic<Incarnation> seen{1};
  std::thread other([&] {
    // Each has a link, which is opened when something is sent.
    for (Incarnation next = 2; next <= kLast; ++next) {
      (*links_->To(1))->SetPeer(1, next - 1);
      while (seen < next - 1) std::this_thread::yield();
      EXPECT_TRUE(links_->UpdatePeer(Worker(1, next)).ok());
    }
  });
  int old = 0;
  while (seen < kLast) {
    const Incarnation known = peers_->Find(1)->incarnation;
    const Incarnation found = (*links_->To(1))->incarnation();
    if (found != 0 && found < known) ++old;
    seen = known;
  }
  other.join();
  EXPECT_EQ(old, 0);
}

}  // namespace
}  // namespace distgrad
