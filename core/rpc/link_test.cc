// A link between its beginning and its end: what is held, what waits, and what counts no more.
#include "core/rpc/link.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/base/fake_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

Packet Text(const std::string& text) { return Packet{text, {}}; }

// Keeps what it is told. For one thread.
class RecordingOwner : public Link::Owner {
 public:
  void OnPacket(const std::shared_ptr<Link>& link, Packet packet) override {
    packets.push_back(packet.bytes);
    last = link;
    if (on_packet != nullptr) on_packet(*link, packet.bytes);
  }
  void OnBulkWanted(const std::shared_ptr<Link>&) override { ++bulk_wanted; }
  bool OnLeaving(uint64_t, Packet&) override { return leaves; }
  void OnClosed(const std::shared_ptr<Link>&, absl::Status why, bool is_refused) override {
    closed.push_back(std::move(why));
    was_refused = is_refused;
  }

  std::function<void(Link&, const std::string&)> on_packet;
  bool leaves = true;
  std::vector<std::string> packets;
  std::weak_ptr<Link> last;  // which holds its owner
  int bulk_wanted = 0;
  std::vector<absl::Status> closed;
  bool was_refused = false;
};

// Keeps what is sent, and ends its receiver when it is closed.
class RecordingConnection : public Connection {
 public:
  explicit RecordingConnection(std::weak_ptr<Link> receiver) : receiver_(std::move(receiver)) {}
  void Send(Packet packet, SendDone done) override {
    sent.push_back(packet.bytes.substr(0, 20));
    if (throws) throw std::bad_alloc();
    if (done == nullptr) return;
    if (!fails.ok()) return done(fails);
    if (!holds) return done(absl::OkStatus());
    held.push_back(std::move(done));
  }
  // The first packet that was held leaves.
  void Release() {
    SendDone done = std::move(held.front());
    held.pop_front();
    done(absl::OkStatus());
  }
  void Close() override {
    closed = true;
    if (tells_later) return;
    if (const auto receiver = receiver_.lock()) receiver->OnClosed(absl::CancelledError("closed"));
  }

  std::vector<std::string> sent;
  bool closed = false;
  bool tells_later = false;  // the receiver does not hear of Close() yet
  bool holds = false;        // nothing leaves before Release()
  absl::Status fails;        // nothing leaves
  bool throws = false;       // nor is there memory to send it
  std::deque<SendDone> held;

 private:
  const std::weak_ptr<Link> receiver_;
};

class LinkTest : public ::testing::Test {
 protected:
  std::shared_ptr<Link> NewLink(Link::Kind kind) {
    return std::make_shared<Link>(owner_, &shared_, kind, ++links_);
  }
  static std::shared_ptr<RecordingConnection> Connect(const std::shared_ptr<Link>& link) {
    auto connection = std::make_shared<RecordingConnection>(link);
    link->SetConnection(connection);
    return connection;
  }

  FakeClock clock_;
  Link::Shared shared_{.clock = &clock_, .limits = {.calls_per_peer = 4}};
  const std::shared_ptr<RecordingOwner> owner_ = std::make_shared<RecordingOwner>();
  uint64_t links_ = 0;
};

// ------------------------------------------------------------------------------------ Receiving

TEST_F(LinkTest, AnAcceptedOneHoldsWhatArrives) {
  const auto link = NewLink(Link::Kind::kAccepted);
  link->OnPacket(Text("a"));
  link->OnPacket(Text("b"));
  EXPECT_THAT(owner_->packets, IsEmpty());
  link->Release();
  EXPECT_THAT(owner_->packets, ElementsAre("a", "b"));
  link->OnPacket(Text("c"));
  EXPECT_THAT(owner_->packets, ElementsAre("a", "b", "c"));
  EXPECT_EQ(link->heard(), 3u);
}

TEST_F(LinkTest, WhatIsHandedOnMayHaveItHoldAgain) {
  const auto link = NewLink(Link::Kind::kAccepted);
  owner_->on_packet = [](Link& link, const std::string& text) {
    if (text == "hello") link.Hold();
  };
  for (const char* text : {"hello", "a"}) link->OnPacket(Text(text));
  link->Release();
  EXPECT_THAT(owner_->packets, ElementsAre("hello"));
  link->OnPacket(Text("b"));
  link->Release();
  EXPECT_THAT(owner_->packets, ElementsAre("hello", "a", "b"));
}

// The answer that it waits for may come at once.
TEST_F(LinkTest, OneThatIsReleasedWhileItDrainsKeepsTheOrder) {
  const auto link = NewLink(Link::Kind::kAccepted);
  owner_->on_packet = [](Link& link, const std::string& text) {
    if (text != "hello") return;
    link.Hold();
    link.OnPacket(Text("b"));
    link.Release();
  };
  for (const char* text : {"hello", "a"}) link->OnPacket(Text(text));
  link->Release();
  EXPECT_THAT(owner_->packets, ElementsAre("hello", "a", "b"));
  link->OnPacket(Text("c"));
  EXPECT_THAT(owner_->packets, ElementsAre("hello", "a", "b", "c"));
}

TEST_F(LinkTest, NothingCountsThatArrivesOnOneThatIsDropped) {
  const auto held = NewLink(Link::Kind::kAccepted), open = NewLink(Link::Kind::kOpened);
  held->OnPacket(Text("a"));
  for (const auto& link : {held, open}) {
    link->Drop();
    link->OnPacket(Text("b"));
    link->Release();
  }
  EXPECT_THAT(owner_->packets, IsEmpty());
}

TEST_F(LinkTest, WhatIsHeldIsBounded) {
  const auto link = NewLink(Link::Kind::kAccepted);
  const auto connection = Connect(link);
  connection->tells_later = true;
  link->Hold(7);
  for (int i = 0; i < 4; ++i) link->OnPacket(Text("a"));
  EXPECT_FALSE(connection->closed);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) link->OnPacket(Text("one more"));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(connection->closed);
  EXPECT_THAT(log, HasSubstr("closing a connection with worker 7: too much came before its sender "
                             "was known: 4 messages of 4 bytes; limit calls_per_peer is 4, limit "
                             "bytes_per_peer is 4294967296\n"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
  link->OnClosed(absl::CancelledError("closed"));
  ASSERT_EQ(owner_->closed.size(), 1u);
  EXPECT_TRUE(absl::IsResourceExhausted(owner_->closed[0])) << owner_->closed[0];
  link->Release();
  EXPECT_THAT(owner_->packets, IsEmpty());
}

// The store may be silent for long, and the newcomer be pinged meanwhile.
TEST_F(LinkTest, WhatIsHeldMayHaveTheAnswersToPingsBesides) {
  const auto link = NewLink(Link::Kind::kAccepted);
  const auto connection = Connect(link);
  for (int i = 0; i < 3; ++i) link->SetAsked();
  for (int i = 0; i < 7; ++i) link->OnPacket(Text("a"));
  EXPECT_FALSE(connection->closed);
  link->OnPacket(Text("one more"));
  EXPECT_TRUE(connection->closed);
}

TEST_F(LinkTest, WhatIsHeldMayBeWithoutALimit) {
  shared_.limits.calls_per_peer = std::numeric_limits<size_t>::max();
  const auto link = NewLink(Link::Kind::kAccepted);
  const auto connection = Connect(link);
  link->SetAsked();
  for (int i = 0; i < 5; ++i) link->OnPacket(Text("a"));
  EXPECT_FALSE(connection->closed);
}

TEST_F(LinkTest, SoAreItsBytes) {
  shared_.limits.bytes_per_peer = 100;
  const auto link = NewLink(Link::Kind::kAccepted);
  const std::string text(40, 'a');
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 2; ++i) link->OnPacket(Text(text));
    EXPECT_THAT(owner_->closed, IsEmpty()) << "what was handed on counts no more";
    link->Release();
    link->Hold();
  }
  for (int i = 0; i < 3; ++i) link->OnPacket(Text(text));
  ASSERT_EQ(owner_->closed.size(), 1u);
  EXPECT_TRUE(absl::IsResourceExhausted(owner_->closed[0])) << owner_->closed[0];
}

TEST_F(LinkTest, WhatComesOnABulkLinkCountsForItsMainOne) {
  const auto main = NewLink(Link::Kind::kOpened), bulk = NewLink(Link::Kind::kOpened);
  bulk->SetMain(main);
  bulk->OnPacket(Text("a"));
  EXPECT_THAT(owner_->packets, ElementsAre("a"));
  EXPECT_EQ(owner_->last.lock(), main);
  main->Drop();
  bulk->OnPacket(Text("b"));
  EXPECT_THAT(owner_->packets, ElementsAre("a"));
}

// -------------------------------------------------------------------------------------- Sending

TEST_F(LinkTest, WhatIsSentWaitsForAConnection) {
  const auto link = NewLink(Link::Kind::kOpened);
  EXPECT_FALSE(link->ready(1));
  link->Send(Text("a"));
  link->Send(Text("withdrawn"), {}, /*call=*/1);
  link->Send(Text("b"), {}, /*call=*/2);
  link->Withdraw(1);
  const auto connection = Connect(link);
  EXPECT_THAT(connection->sent, ElementsAre("a", "b"));
  EXPECT_TRUE(link->ready(1));
  owner_->leaves = false;
  link->Send(Text("c"), {}, /*call=*/3);
  EXPECT_THAT(connection->sent, ElementsAre("a", "b")) << "its owner did not let it leave";
}

TEST_F(LinkTest, WhatHasLeftIsCounted) {
  const auto link = NewLink(Link::Kind::kOpened);
  EXPECT_TRUE(link->idle());
  const auto connection = std::make_shared<RecordingConnection>(link);
  connection->holds = true;
  link->SendHello(*connection, Text("hello"));
  link->SetConnection(connection);
  EXPECT_FALSE(link->idle()) << "it is not open yet";
  EXPECT_EQ(link->sent(), 0u);
  link->Send(Text("a"));
  connection->Release();
  EXPECT_FALSE(link->idle());
  EXPECT_EQ(link->sent(), 1u);
  connection->Release();
  EXPECT_TRUE(link->idle());
  EXPECT_EQ(link->sent(), 2u);
  EXPECT_THAT(connection->sent, ElementsAre("hello", "a"));
}

TEST_F(LinkTest, WhatIsLargeWaitsForTheBulkLink) {
  const auto main = NewLink(Link::Kind::kOpened), bulk = NewLink(Link::Kind::kOpened);
  const auto connection = Connect(main);
  const std::string large(Link::kBulkBytes + 1, 'x');
  main->Send(Text(large));
  main->Send(Text(large));
  EXPECT_EQ(owner_->bulk_wanted, 1);
  EXPECT_FALSE(main->ready(large.size()));
  EXPECT_TRUE(main->ClaimBulk());
  EXPECT_FALSE(main->ClaimBulk()) << "both ends may have asked";
  const auto bulk_connection = Connect(bulk);
  main->SetBulk(bulk);
  EXPECT_TRUE(main->ready(large.size()));
  EXPECT_EQ(bulk_connection->sent.size(), 2u);
  EXPECT_THAT(connection->sent, IsEmpty());
  main->Close(absl::UnavailableError("it broke"));
  EXPECT_TRUE(bulk_connection->closed) << "either one's end is the other's";
}

// --------------------------------------------------------------------------------------- Ending

TEST_F(LinkTest, TheLogSaysWhoseConnectionIsClosedForWhatCannotBeSent) {
  const std::pair<std::function<void(RecordingConnection&)>, std::string> all[] = {
      {[](auto& connection) { connection.fails = absl::InternalError("no such device"); },
       "W closing a connection with worker 7: no such device"},
      {[](auto& connection) { connection.throws = true; },
       "E closing a connection with worker 7: out of memory"},
  };
  for (const auto& [have_it_fail, line] : all) {
    SCOPED_TRACE(line);
    owner_->closed.clear();
    const auto link = NewLink(Link::Kind::kOpened);
    link->SetPeer(7, 1);
    have_it_fail(*Connect(link));
    testing::internal::CaptureStderr();
    link->Send(Text("a"));
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, StartsWith(line.substr(0, 2)));
    EXPECT_THAT(log, HasSubstr(line.substr(2)));
    EXPECT_EQ(owner_->closed.size(), 1u);
  }
}

TEST_F(LinkTest, TheFirstReasonStays) {
  const auto link = NewLink(Link::Kind::kOpened);
  const auto connection = Connect(link);
  link->Close(absl::UnavailableError("it was silent"));
  link->Close(absl::InternalError("later"));
  EXPECT_TRUE(connection->closed);
  EXPECT_THAT(owner_->closed, ElementsAre(absl::UnavailableError("it was silent")));
  EXPECT_TRUE(link->closed());
}

TEST_F(LinkTest, AConnectionThatComesTooLateIsClosed) {
  const auto link = NewLink(Link::Kind::kOpened);
  link->Close(absl::UnavailableError("it was given up"));
  EXPECT_EQ(owner_->closed.size(), 1u);
  EXPECT_TRUE(Connect(link)->closed);
  EXPECT_EQ(owner_->closed.size(), 1u);
  const auto dropped = NewLink(Link::Kind::kOpened);
  dropped->Drop();
  EXPECT_TRUE(Connect(dropped)->closed) << "the connection that it would serve is closed";
}

// To all others it is only not to be had, as is one that has gone away.
TEST_F(LinkTest, WhereNobodyListensItsOwnerHearsSo) {
  const auto link = NewLink(Link::Kind::kOpened);
  Connect(link);
  const auto cancellation = link->served().Begin(1, 10);
  ASSERT_TRUE(cancellation.ok()) << cancellation.status();
  link->OnClosed(absl::NotFoundError("refused"));
  EXPECT_TRUE(owner_->was_refused);
  EXPECT_THAT(owner_->closed, ElementsAre(absl::UnavailableError("refused")));
  EXPECT_EQ((*cancellation)->why(), absl::UnavailableError("refused"));
}

// What the store does not know, say, was not refused by anybody.
TEST_F(LinkTest, WhatIsClosedHereWasNotRefused) {
  const auto link = NewLink(Link::Kind::kOpened);
  link->Close(absl::NotFoundError("never heard of it"));
  EXPECT_FALSE(owner_->was_refused);
  EXPECT_THAT(owner_->closed, ElementsAre(absl::NotFoundError("never heard of it")));
}

// Of several connections that end with it another one's end may be faster than the words.
TEST_F(LinkTest, BehindTheLastWordsItWaitsForThePeerToClose) {
  const auto link = NewLink(Link::Kind::kOpened);
  const auto connection = Connect(link);
  link->SendLast(Text("bye"), absl::InternalError("why"));
  EXPECT_THAT(connection->sent, ElementsAre("bye"));
  EXPECT_FALSE(connection->closed);
  EXPECT_FALSE(link->served().Begin(1, 10).ok()) << "nothing more is served";
  link->OnClosed(absl::UnavailableError("the peer has closed it"));
  EXPECT_THAT(owner_->closed, ElementsAre(absl::InternalError("why")));
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

// The clock may end behind Close(), before the link hears of its end.
TEST_F(LinkTest, OneThatIsClosedBehindItsLastWordsHasNoTimer) {
  const auto link = NewLink(Link::Kind::kOpened);
  const auto connection = Connect(link);
  connection->tells_later = true;
  link->SendLast(Text("bye"), absl::InternalError("why"));
  EXPECT_NE(clock_.NextTimer(), absl::InfiniteFuture());
  link->Close(absl::CancelledError("end"));
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
  link->OnClosed(absl::CancelledError("closed"));
  EXPECT_THAT(owner_->closed, ElementsAre(absl::InternalError("why")));
}

// One that does not read, or does not close it, would keep it for good.
TEST_F(LinkTest, ForThatItHasAsLongAsForItsHandshake) {
  const auto link = NewLink(Link::Kind::kOpened);
  const auto connection = Connect(link);
  connection->holds = true;
  link->SendLast(Text("bye"), absl::InternalError("why"));
  clock_.Advance(shared_.limits.handshake_timeout - absl::Seconds(1));
  EXPECT_FALSE(connection->closed);
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(connection->closed);
  EXPECT_THAT(owner_->closed, ElementsAre(absl::InternalError("why")));
}

TEST_F(LinkTest, ItWaitsForNobodyWhomTheLastWordsDoNotReach) {
  const auto link = NewLink(Link::Kind::kOpened);
  const auto connection = Connect(link);
  connection->fails = absl::UnavailableError("gone");
  link->SendLast(Text("bye"), absl::InternalError("why"));
  EXPECT_TRUE(connection->closed);
  EXPECT_THAT(owner_->closed, ElementsAre(absl::InternalError("why")));
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

// Its peer may have answered the hello already. It hears of the end, in place of the words.
TEST_F(LinkTest, ItClosesWhereTheLastWordsHaveNoConnectionYet) {
  const auto link = NewLink(Link::Kind::kOpened);
  link->SendLast(Text("bye"), absl::CancelledError("this worker is shutting down"));
  EXPECT_THAT(owner_->closed, ElementsAre(absl::CancelledError("this worker is shutting down")));
  EXPECT_TRUE(Connect(link)->closed);
}

TEST_F(LinkTest, TheLoopbackNeedsNoConnection) {
  const auto link = NewLink(Link::Kind::kLoopback);
  EXPECT_TRUE(link->ready(Link::kBulkBytes + 1));
  link->Send(Text("a"));
  EXPECT_THAT(owner_->packets, ElementsAre("a"));
  link->Close(absl::CancelledError("this worker is shutting down"));
  link->Send(Text("b"));
  EXPECT_THAT(owner_->packets, ElementsAre("a"));
  EXPECT_THAT(owner_->closed, IsEmpty());
}

}  // namespace
}  // namespace distgrad
