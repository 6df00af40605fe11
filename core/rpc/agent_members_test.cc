// Agents whose peers fall silent, come back, join and leave.
#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "core/base/fake_clock.h"
#include "core/base/future.h"
#include "core/base/wire.h"
#include "core/membership/directory.h"
#include "core/rpc/agent.h"
#include "core/rpc/agent_testing.h"
#include "core/rpc/frame.h"
#include "core/rpc/link.h"
#include "core/transport/inproc/inproc_transport.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(50);  // a beat each 10 s

// Takes the part of the store. Thread-safe.
class FakeDirectory : public Directory {
 public:
  void Set(const WorkerInfo& worker) {
    absl::MutexLock lock(&mu_);
    workers_[worker.rank] = worker;
  }
  void Break() {
    absl::MutexLock lock(&mu_);
    broken_ = true;
  }
  // From now on answers come with Answer() only.
  void Hold() {
    absl::MutexLock lock(&mu_);
    holds_ = true;
  }
  // What is asked from now on is answered at once.
  void HoldNoMore() {
    absl::MutexLock lock(&mu_);
    holds_ = false;
  }
  void AwaitQuestion() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](std::deque<std::pair<WorkerRank, Found>>* asked) { return !asked->empty(); }, &asked_));
  }
  // `hold_on`: this once.
  void Answer(bool hold_on = false) {
    std::deque<std::pair<WorkerRank, Found>> asked;
    {
      absl::MutexLock lock(&mu_);
      holds_ = hold_on;
      asked.swap(asked_);
    }
    for (auto& [worker, found] : asked) found(Entry(worker));
  }
  void Find(WorkerRank worker, absl::Duration, Found found) override {
    {
      absl::MutexLock lock(&mu_);
      if (holds_) {
        asked_.emplace_back(worker, std::move(found));
        return;
      }
    }
    found(Entry(worker));
  }

 private:
  absl::StatusOr<WorkerInfo> Entry(WorkerRank worker) {
    absl::MutexLock lock(&mu_);
    if (broken_) return absl::UnavailableError("the store is gone");
    if (workers_.count(worker) == 0) return absl::NotFoundError("never heard of it");
    return workers_[worker];
  }

  absl::Mutex mu_;
  std::map<WorkerRank, WorkerInfo> workers_ ABSL_GUARDED_BY(mu_);
  bool broken_ ABSL_GUARDED_BY(mu_) = false, holds_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::pair<WorkerRank, Found>> asked_ ABSL_GUARDED_BY(mu_);
};

// Counts signs of life, and loses all that comes from or goes to some address. A hello waits
// instead, for no network delivers what follows on a connection whose beginning it has lost.
// Thread-safe.
class Silence : public FaultInjector {
 public:
  void Of(const std::string& address) {
    absl::MutexLock lock(&mu_);
    silent_ = address;
  }
  void HoldsLarge(bool holds) { holds_large_ = holds; }
  // Connections for large packets carry nothing, and their ends do not know.
  void LosesLarge(bool loses) { loses_large_ = loses; }
  // They carry nothing that comes from this address, and what goes to it.
  void LosesLargeFrom(const std::string& address) {
    absl::MutexLock lock(&mu_);
    loses_large_from_ = address;
  }
  void CutNext() { cut_next_ = true; }
  // Who sends there is short of memory or file descriptors.
  void RefuseAllTo(const std::string& address) {
    absl::MutexLock lock(&mu_);
    refused_ = address;
  }
  // Who is connected to there has no memory to hear who connects, and closes the connection.
  void CutHellosTo(const std::string& address) {
    absl::MutexLock lock(&mu_);
    cuts_hellos_ = address;
  }
  int cut_hellos() const { return cut_hellos_; }
  // Why a connection is given up takes its time.
  void HoldRefusals() { holds_refusals_ = true; }
  void AwaitRefusals(int n) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return refusals_ >= n;
    };
    mu_.Await(absl::Condition(&there));
  }
  int pings() const { return pings_; }
  int bulk_pings() const { return bulk_pings_; }
  void AwaitPongs(int n, int bulk = 0) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return pongs_ >= n && bulk_pongs_ >= bulk;
    };
    mu_.Await(absl::Condition(&there));
  }
  Action OnSend(const std::string& from, const std::string& to, Packet& packet) override {
    absl::MutexLock lock(&mu_);
    WireReader reader(packet.bytes);
    const FrameKind kind = ReadFrame(reader)->kind;
    if (kind == FrameKind::kPing) ++pings_;
    if (kind == FrameKind::kPong) ++pongs_;
    if (kind == FrameKind::kBulkPing) ++bulk_pings_;
    if (kind == FrameKind::kBulkPong) ++bulk_pongs_;
    if (kind == FrameKind::kRefused) {
      ++refusals_;
      if (holds_refusals_) return Action::kHold;
    }
    const bool is_on_bulk = kind == FrameKind::kBulkPing || packet.size() > Link::kBulkBytes;
    if ((loses_large_ || from == loses_large_from_) && is_on_bulk) return Action::kDrop;
    if (from == silent_ || to == silent_) {
      return kind == FrameKind::kHello ? Action::kHold : Action::kDrop;
    }
    if (cut_next_.exchange(false)) return Action::kCut;
    if (to == refused_) return Action::kRefuse;
    if (to == cuts_hellos_ && kind == FrameKind::kHello) {
      ++cut_hellos_;
      return Action::kCut;
    }
    return holds_large_ && packet.size() > Link::kBulkBytes ? Action::kHold : Action::kDeliver;
  }

 private:
  absl::Mutex mu_;
  std::string silent_ ABSL_GUARDED_BY(mu_), refused_ ABSL_GUARDED_BY(mu_);
  std::string cuts_hellos_ ABSL_GUARDED_BY(mu_);
  std::string loses_large_from_ ABSL_GUARDED_BY(mu_) = "nobody";
  std::atomic<bool> holds_large_{false}, loses_large_{false}, cut_next_{false};
  std::atomic<bool> holds_refusals_{false};
  std::atomic<int> pings_{0}, bulk_pings_{0}, cut_hellos_{0};
  int pongs_ ABSL_GUARDED_BY(mu_) = 0, bulk_pongs_ ABSL_GUARDED_BY(mu_) = 0;
  int refusals_ ABSL_GUARDED_BY(mu_) = 0;
};

AgentOptions Options(Directory* directory) {
  return {.directory = directory,
          .heartbeat_limit = kLimit,
          .max_workers = 100,
          .limits = {.calls_per_peer = 100, .calls = 100}};
}

class AgentMembersTest : public testing::Test {
 protected:
  // "a", "b" and "c", who know each other from the start.
  void SetUp() override {
    std::vector<WorkerInfo> infos;
    for (WorkerRank rank = 0; rank < 3; ++rank) {
      nodes_.push_back(New(rank, 1));
      infos.push_back(nodes_.back()->info);
      directory_.Set(infos.back());
    }
    for (auto& node : nodes_) ASSERT_TRUE(node->agent->Start(node->info, infos).ok());
  }
  std::unique_ptr<TestAgent> New(WorkerRank rank, uint64_t incarnation) {
    return std::make_unique<TestAgent>(&clock_, network_, rank, incarnation, Options(&directory_));
  }
  // One that comes late: the store has it, and it knows those of the start.
  std::unique_ptr<TestAgent> Come(WorkerRank rank, uint64_t incarnation) {
    auto node = New(rank, incarnation);
    directory_.Set(node->info);
    std::vector<WorkerInfo> infos = {node->info};
    for (auto& other : nodes_) {
      if (other != nullptr && other->info.rank != rank) infos.push_back(other->info);
    }
    EXPECT_TRUE(node->agent->Start(node->info, infos).ok());
    return node;
  }
  TestAgent& a() { return *nodes_[0]; }
  TestAgent& b() { return *nodes_[1]; }
  TestAgent& c() { return *nodes_[2]; }
  void Beat() { clock_.Advance(kLimit / 5); }
  void EndSilence() {
    silence_->Of("");
    network_->ReleaseHeld();
  }

  FakeClock clock_;
  FakeDirectory directory_;
  const std::shared_ptr<Silence> silence_ = std::make_shared<Silence>();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>(silence_);
  std::vector<std::unique_ptr<TestAgent>> nodes_;
};

bool Contains(const absl::Status& status, absl::string_view text) {
  return absl::StrContains(status.message(), text);
}

// The end of a connection that a test holds itself, in a peer's place. Thread-safe.
class TestEnd : public Receiver {
 public:
  void OnPacket(Packet packet) override {
    absl::MutexLock lock(&mu_);
    packets_.push_back(std::move(packet.bytes));
  }
  void OnClosed(absl::Status) override {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  // Waits until so many packets of a kind have come; returns the last one.
  std::string Await(FrameKind kind, int n) {
    std::string last;
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return CountLocked(kind, &last) >= n;
    };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&there));
    return last;
  }
  // The packets of a kind that have come so far.
  int Count(FrameKind kind) {
    absl::MutexLock lock(&mu_);
    return CountLocked(kind);
  }
  Hello AwaitHello() {
    const std::string bytes = Await(FrameKind::kHello, 1);
    WireReader reader(bytes);
    EXPECT_TRUE(ReadFrame(reader).ok());
    return *ReadHello(reader);
  }
  void AwaitClosed() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&closed_));
  }

 private:
  int CountLocked(FrameKind kind, std::string* last = nullptr) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    int count = 0;
    for (const std::string& bytes : packets_) {
      WireReader reader(bytes);
      if (ReadFrame(reader)->kind != kind) continue;
      ++count;
      if (last != nullptr) *last = bytes;
    }
    return count;
  }

  absl::Mutex mu_;
  std::vector<std::string> packets_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

// "x" is an agent, and "y" what a test plays, connection by connection.
class PlayedPeerTest : public testing::Test {
 protected:
  struct Played {
    std::shared_ptr<TestEnd> end;
    std::shared_ptr<Connection> connection;

    // Sends a ping, and waits for the `n`th pong: what was sent before has been taken in.
    void Ping(int n) const {
      Send(FrameKind::kPing);
      end->Await(FrameKind::kPong, n);
    }
    void Send(FrameKind kind) const {
      Packet packet;
      AppendFrame({.kind = kind}, &packet.bytes);
      connection->Send(std::move(packet), nullptr);
    }
  };

  void SetUp() override {
    const absl::StatusOr<std::string> address =
        peer_->Listen([this](std::shared_ptr<Connection> connection) {
          const Played accepted = {std::make_shared<TestEnd>(), std::move(connection)};
          absl::MutexLock lock(&mu_);
          accepted_.push_back(accepted);
          return accepted.end;
        });
    ASSERT_TRUE(address.ok()) << address.status();
    y_ = {.rank = 1, .name = "y", .address = *address, .incarnation = 7};
    for (const WorkerInfo& info : {x_.info, y_}) directory_.Set(info);
    ASSERT_TRUE(x_.agent->Start(x_.info, {x_.info, y_}).ok());
  }
  // The `n`th connection that "x" has opened, from 0.
  Played AwaitAccepted(size_t n) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return accepted_.size() > n;
    };
    mu_.Await(absl::Condition(&there));
    return accepted_[n];
  }
  size_t CountAccepted() {
    absl::MutexLock lock(&mu_);
    return accepted_.size();
  }
  // Opens a connection to "x" with that hello, but for who says it to whom.
  Played Connect(Hello hello) {
    Played opened = {std::make_shared<TestEnd>(), nullptr};
    absl::StatusOr<std::shared_ptr<Connection>> connection =
        peer_->Connect(x_.info.address, opened.end);
    EXPECT_TRUE(connection.ok()) << connection.status();
    opened.connection = *std::move(connection);
    hello.from = y_.rank;
    hello.from_incarnation = y_.incarnation;
    hello.to = x_.info.rank;
    hello.to_incarnation = x_.info.incarnation;
    Packet packet;
    AppendHello(hello, &packet.bytes);
    opened.connection->Send(std::move(packet), nullptr);
    return opened;
  }

  // It waits as long as it takes for "y" to close what it has given up.
  AgentOptions OptionsOfX() {
    AgentOptions options = Options(&directory_);
    options.limits.handshake_timeout = absl::Hours(1);
    return options;
  }

  // The number by which "x" asks on that connection for another one, for large packets.
  static uint64_t AwaitBulkNumber(const Played& main) {
    const std::string asked = main.end->Await(FrameKind::kBulk, 1);
    WireReader reader(asked);
    const absl::StatusOr<Frame> bulk = ReadFrame(reader);
    EXPECT_TRUE(bulk.ok()) << bulk.status();
    return bulk.ok() ? bulk->link : 0;
  }

  // Has "x" refuse a call to "y", as it has as many calls of its own as it may: that makes a
  // connection which is not open.
  void HaveACallRefused() {
    do {
      own_.push_back(x_.Call(0, "keep"));
    } while (!own_.back().Done());
    ASSERT_TRUE(absl::IsResourceExhausted(x_.Call(1, "echo").Wait().status()));
  }

  FakeClock clock_;
  FakeDirectory directory_;
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  TestAgent x_{&clock_, network_, 0, 1, OptionsOfX()};
  std::vector<Future<std::string>> own_;
  WorkerInfo y_;
  absl::Mutex mu_;
  std::vector<Played> accepted_ ABSL_GUARDED_BY(mu_);
  const std::unique_ptr<Transport> peer_ = NewInprocTransport(network_);  // ends first
};

// ---------------------------------------------------------------------------------- Deadlines

// Which of its functions others have called.
std::vector<std::string> Served(const TestAgent& node) {
  std::vector<std::string> functions;
  for (const CallStats& stats : node.agent->Stats()) {
    if (stats.served) functions.push_back(stats.function);
  }
  return functions;
}

TEST_F(AgentMembersTest, ACallThatIsOverBeforeItsPeerIsFoundDoesNotLeave) {
  directory_.Hold();
  const auto late = a().Call(1, "keep", "late", {.deadline = clock_.Now() + absl::Seconds(2)});
  const auto cancelled = a().Call(1, "keep", "cancelled");
  const auto large = a().Call(1, "keep", std::string(2 * Link::kBulkBytes, 'x'),
                              {.deadline = clock_.Now() + absl::Seconds(3)});
  directory_.AwaitQuestion();
  EXPECT_GT(a().agent->Queued()[1].second, 2 * Link::kBulkBytes);
  clock_.Advance(absl::Seconds(4));
  cancelled.Cancel();
  EXPECT_EQ(late.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(large.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cancelled.Wait().status().code(), absl::StatusCode::kCancelled);
  // What is left asks for a connection for large packets.
  EXPECT_LT(a().agent->Queued()[1].second, 100u) << "their credit is released at once";
  directory_.Answer();
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  EXPECT_EQ(Served(b()), std::vector<std::string>({"echo"}));
}

TEST_F(AgentMembersTest, LookingForAPeerTakesFromTheTimeOfACall) {
  directory_.Hold();
  const absl::Time deadline = clock_.Now() + absl::Seconds(9);
  const auto small = a().Call(1, "keep", "", {.deadline = deadline});
  const auto large =
      a().Call(1, "keep", std::string(2 * Link::kBulkBytes, 'x'), {.deadline = deadline});
  directory_.AwaitQuestion();
  clock_.Advance(absl::Seconds(4));
  directory_.Answer();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(b().service.AwaitKept().deadline(), deadline);
}

// --------------------------------------------------------------------------------- Heartbeats

TEST_F(AgentMembersTest, ASilentPeerIsLostAtBothEndsAndNobodyElseIs) {
  auto pending = a().Call(1, "keep");
  auto other = a().Call(2, "keep");
  const IncomingCall kept = b().service.AwaitKept();
  silence_->Of(b().info.address);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(pending.Done()) << "beat " << i;
    EXPECT_EQ(*a().Call(2, "echo", "here").Wait(), "here");
    Beat();
  }
  const absl::Status status = pending.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "call of 'keep' on worker 'b' (1)")) << status;
  EXPECT_TRUE(Contains(status, "heartbeat limit of 50s")) << status;
  EXPECT_TRUE(Contains(a().service.AwaitLost(1), "'b' (1)"));
  b().service.AwaitLost(0).IgnoreError();
  EXPECT_FALSE(other.Done());
  EXPECT_FALSE(a().service.HasLost(2));
}

TEST_F(AgentMembersTest, WhoIsIdleIsAskedAndKept) {
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  Beat();
  EXPECT_EQ(silence_->pings(), 0) << "there was other traffic";
  for (int i = 0; i < 20; ++i) {
    Beat();
    silence_->AwaitPongs(silence_->pings());
    // What those two have sent has arrived when what comes after it has.
    for (WorkerRank to : {1, 0, 1}) EXPECT_TRUE(c().Call(to, "echo").Wait().ok());
  }
  EXPECT_GE(silence_->pings(), 5);
  EXPECT_FALSE(a().service.HasLost(1));
  EXPECT_FALSE(b().service.HasLost(0));
  EXPECT_EQ(*a().Call(1, "echo", "y").Wait(), "y");
}

TEST_F(AgentMembersTest, WhereThereIsNoConnectionNothingIsSent) {
  for (int i = 0; i < 20; ++i) Beat();
  EXPECT_EQ(silence_->pings(), 0);
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

TEST_F(AgentMembersTest, AClosedAgentLeavesNoTimer) {
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  EXPECT_LT(clock_.NextTimer(), absl::InfiniteFuture());
  for (auto& node : nodes_) node->agent->Close();
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

TEST_F(AgentMembersTest, ACallToOneWhoIsSilentFromTheStartFails) {
  silence_->Of(b().info.address);
  auto call = a().Call(1, "echo");
  for (int i = 0; i < 6; ++i) Beat();
  EXPECT_TRUE(Contains(call.Wait().status(), "heartbeat limit")) << call.Wait().status();
  // It speaks again, and is as good as before.
  EndSilence();
  EXPECT_EQ(*a().Call(1, "echo", "again").Wait(), "again");
}

// What is large keeps the link busy, and all behind it waiting. Connections with others change
// nothing about that.
TEST_F(AgentMembersTest, WhoseLinkIsBusyIsAskedOnAnother) {
  struct Busy : FaultInjector {
    std::atomic<bool> busy{false};
    std::atomic<int> hellos{0};
    Action OnSend(const std::string&, const std::string&, Packet& packet) override {
      WireReader reader(packet.bytes);
      if (ReadFrame(reader)->kind == FrameKind::kHello) ++hellos;
      // Only the links that were there before are held up.
      return busy && hellos == 0 ? Action::kHold : Action::kDeliver;
    }
  };
  const auto busy = std::make_shared<Busy>();
  const auto network = std::make_shared<InprocNetwork>(busy);
  FakeDirectory directory;
  std::vector<std::unique_ptr<TestAgent>> nodes;
  for (WorkerRank rank : {0, 1, 2}) {
    nodes.push_back(std::make_unique<TestAgent>(&clock_, network, rank, /*incarnation=*/1,
                                                Options(&directory)));
    directory.Set(nodes.back()->info);
  }
  StartAll(nodes);
  for (const auto& [from, to] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 2)}) {
    EXPECT_EQ(*nodes[from]->Call(static_cast<WorkerRank>(to), "echo", "x").Wait(), "x");
  }
  busy->hellos = 0;
  busy->busy = true;
  auto large = nodes[0]->Call(1, "echo", "large");
  for (int i = 0; i < 4; ++i) Beat();
  EXPECT_GE(busy->hellos, 1);
  network->ReleaseHeld();
  EXPECT_EQ(*large.Wait(), "large");
  for (const auto& node : nodes) {
    for (WorkerRank peer : {0, 1, 2}) EXPECT_FALSE(node->service.HasLost(peer));
  }
}

// What waits for a connection that fails is lost, and its peer has never heard of that connection:
// so it hears the end of the one that it has.
TEST_F(AgentMembersTest, APeerHearsOfTheEndOfAConnectionThatItNeverHad) {
  directory_.Hold();
  a().Notify(1, "lost");
  directory_.AwaitQuestion();
  directory_.HoldNoMore();
  // Meanwhile the peer opens one, and waits for what comes on it.
  const auto call = b().Call(0, "keep", "over its own connection");
  IncomingCall kept = a().service.AwaitKept();
  silence_->CutNext();
  directory_.Answer();
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kUnavailable) << call.Wait().status();
  EXPECT_TRUE(absl::IsUnavailable(b().service.AwaitLost(0)));
  EXPECT_TRUE(absl::IsUnavailable(a().service.AwaitLost(1)));
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  EXPECT_EQ(*b().Call(0, "echo", "y").Wait(), "y");
}

// Until the peer has closed it, which may take its time, there are others with that peer.
TEST_F(PlayedPeerTest, AConnectionThatIsGivenUpSaysNothingOfLaterOnes) {
  const Played old = Connect({.number = 1});
  old.Ping(1);
  const auto lost = x_.Call(1, "echo", std::string(2 * Link::kBulkBytes, 'x'));
  const uint64_t number = AwaitBulkNumber(old);
  x_.service.OnNextNotice(
      [](absl::FunctionRef<bool()>) { return absl::ResourceExhaustedError("no memory for it"); });
  old.connection->Send(Agent::NewNotice(), nullptr);
  old.end->Await(FrameKind::kRefused, 1);
  // It has opened that before it heard.
  const Played bulk = Connect({.link = number, .number = 2});
  const Played live = Connect({.number = 3});
  live.Ping(1);
  const Future<std::string> call = x_.Call(1, "keep");
  for (int i = 2; i < 12; ++i) {
    clock_.Advance(kLimit / 5);
    ASSERT_FALSE(call.Done()) << "beat " << i << ": " << call.Wait().status();
    live.Ping(i);
  }
}

// A large packet waits for a connection of its own, which nobody opens if the one on which it is
// asked for is dead. That is found all the same, though the peer is heard on another.
TEST_F(PlayedPeerTest, ADeadConnectionIsFoundThoughALargePacketWaits) {
  const auto large = x_.Call(1, "echo", std::string(2 * Link::kBulkBytes, 'x'));
  // The peer answers on a connection of its own alone.
  const Played live = Connect({});
  for (int i = 1; i <= 5; ++i) {
    live.Ping(i);
    clock_.Advance(kLimit / 5);
  }
  live.Ping(6);
  EXPECT_FALSE(large.Done());
  clock_.Advance(kLimit / 5);
  const absl::Status status = large.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "though it lives")) << status;
}

// A call waits for a connection that is never there, though the peer is heard on another one: here
// the store does not answer; it may as well be a handshake that does not end.
TEST_F(PlayedPeerTest, AConnectionThatIsNeverOpenIsGivenUpThoughItsPeerLives) {
  x_.agent->WatchMembers(/*late=*/false);
  directory_.Hold();
  const auto call = x_.Call(1, "echo", "x");
  directory_.AwaitQuestion();
  directory_.HoldNoMore();
  const Played live = Connect({});
  for (int i = 1; i <= 4; ++i) {
    live.Ping(i);
    clock_.Advance(kLimit / 5);
  }
  live.Ping(5);
  EXPECT_FALSE(call.Done());
  clock_.Advance(kLimit / 5);
  const absl::Status status = call.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "though it lives")) << status;
  // What waits on the other one may have been waiting for what is lost.
  live.end->AwaitClosed();
  EXPECT_FALSE(x_.service.HasUnreachable(1)) << "it was heard all the while";
  directory_.Answer();  // too late
  const auto next = x_.Call(1, "echo", "y");
  const Hello hello = AwaitAccepted(0).end->AwaitHello();
  EXPECT_EQ(hello.number, hello.first_own) << "no other one has been opened";
}

// It goes on with the contexts that it takes part in, over the connection that it has opened at the
// same time.
TEST_F(PlayedPeerTest, OneThatLeavesIsConnectedToAsLongAsItIsHeard) {
  directory_.Hold();
  const auto call = x_.Call(1, "echo");
  directory_.AwaitQuestion();
  directory_.HoldNoMore();
  const Played live = Connect({});
  live.Ping(1);
  y_.left = true;
  directory_.Set(y_);
  directory_.Answer();
  AwaitAccepted(0).end->Await(FrameKind::kRequest, 1);
  live.Ping(2);
  EXPECT_FALSE(call.Done());
  EXPECT_FALSE(x_.service.HasLost(1));
}

// A call that was refused here has sent nothing to its peer: how long that may take to be reached
// is counted from what is sent.
TEST_F(PlayedPeerTest, ARefusedCallTakesNoTimeFromThePeer) {
  ASSERT_NO_FATAL_FAILURE(HaveACallRefused());
  clock_.Advance(2 * kLimit);
  x_.agent->WatchMembers(/*late=*/false);
  clock_.Advance(absl::Seconds(1));
  const Played first = AwaitAccepted(0);
  first.end->AwaitHello();
  clock_.Advance(absl::Seconds(2));
  first.connection->Close();
  while (CountAccepted() < 2 && !x_.service.HasUnreachable(1)) std::this_thread::yield();
  EXPECT_FALSE(x_.service.HasUnreachable(1));
}

// So is its silence, though other connections' is counted all along.
TEST_F(PlayedPeerTest, TheSilenceOfAConnectionBeginsWhenItIsOpened) {
  const auto connection = peer_->Connect(x_.info.address, std::make_shared<TestEnd>());
  ASSERT_TRUE(connection.ok()) << connection.status();
  ASSERT_NO_FATAL_FAILURE(HaveACallRefused());
  for (int i = 0; i < 4; ++i) clock_.Advance(kLimit / 5);
  x_.agent->WatchMembers(/*late=*/false);
  clock_.Advance(absl::Seconds(1));
  const Played opened = AwaitAccepted(0);
  opened.end->AwaitHello();
  clock_.Advance(kLimit / 5);
  opened.Send(FrameKind::kPing);
  while (opened.end->Count(FrameKind::kPong) == 0 && !x_.service.HasUnreachable(1)) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(x_.service.HasUnreachable(1));
}

// What begins as soon as a call has failed goes over the next connection.
TEST_F(PlayedPeerTest, WhatBeginsWhenACallFailsHasNotLostThePeer) {
  x_.service.begun = 5;
  const auto call = x_.Call(1, "echo");
  call.Then([this](const auto&) { ++x_.service.begun; });
  const Played opened = AwaitAccepted(0);
  opened.end->Await(FrameKind::kRequest, 1);
  opened.connection->Close();
  x_.service.AwaitLost(1).IgnoreError();
  EXPECT_EQ(x_.service.begun, 6);
  EXPECT_EQ(x_.service.begun_at_loss, 5);
}

// The store is slow, and there is a beat between the end of the call and the connection.
TEST_F(PlayedPeerTest, AConnectionWhoseFirstCallHasEndedIsGivenUpWhenItIsSilent) {
  directory_.Hold();
  const auto call = x_.Call(1, "echo");
  directory_.AwaitQuestion();
  call.Cancel();
  EXPECT_TRUE(call.Done());
  clock_.Advance(kLimit / 5);
  directory_.Answer();
  const Played opened = AwaitAccepted(0);
  opened.end->AwaitHello();
  for (int i = 0; i < 6; ++i) clock_.Advance(kLimit / 5);
  opened.end->AwaitClosed();
}

// A call that was refused has made one that is not open.
TEST_F(PlayedPeerTest, WhoIsSilentIsAskedOnAnotherThoughACallWasRefused) {
  ASSERT_NO_FATAL_FAILURE(HaveACallRefused());
  const Played live = Connect({});
  live.Ping(1);
  for (int i = 0; i < 4; ++i) clock_.Advance(kLimit / 5);
  AwaitAccepted(0).end->AwaitHello();
}

// It has opened no connection itself.
TEST_F(PlayedPeerTest, WhoIsOnlyConnectedToAsksItsPeerTooAndGivesItUp) {
  const Played opened = Connect({});
  opened.Ping(1);
  for (int i = 0; i < 6; ++i) clock_.Advance(kLimit / 5);
  opened.end->Await(FrameKind::kPing, 1);
  opened.end->AwaitClosed();
}

// The peer has given up its connections with us, and its next one is faster than the news of their
// end: they end first, and it stays.
TEST_F(PlayedPeerTest, WhatThePeerHasGivenUpEndsBeforeItsNextConnectionIsTakenIn) {
  const Played first = Connect({.number = 1});
  first.Ping(1);
  const auto lost = x_.Call(1, "echo", "over the first");
  first.end->Await(FrameKind::kRequest, 1);
  const Played second = Connect({.number = 2, .first_own = 2});
  second.Ping(1);
  ASSERT_TRUE(lost.Done());
  EXPECT_EQ(lost.Wait().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Contains(lost.Wait().status(), "'y' (1) has given up the connection"));
  EXPECT_TRUE(absl::IsUnavailable(x_.service.AwaitLost(1)));
  const auto call = x_.Call(1, "echo", "over the second");
  second.end->Await(FrameKind::kRequest, 1);
  // Now the first one's end comes, and a connection that was opened before the second.
  first.connection->Close();
  const Played late = Connect({.number = 1});
  late.end->AwaitClosed();
  second.Ping(2);
  EXPECT_FALSE(call.Done());
}

// A second connection says nothing of the first: a peer opens one when it has not heard of us for
// long.
TEST_F(PlayedPeerTest, ASecondConnectionLeavesTheFirstAlone) {
  const Played first = Connect({.number = 5});
  first.Ping(1);
  const auto call = x_.Call(1, "echo");
  first.end->Await(FrameKind::kRequest, 1);
  Connect({.number = 6}).Ping(1);
  EXPECT_FALSE(call.Done());
  EXPECT_FALSE(x_.service.HasLost(1));
}

// Nor does the end of one on which nothing has come but signs of life: the peer was opening it when
// it heard that we had given up the others.
TEST_F(PlayedPeerTest, TheEndOfAConnectionThatCarriedNothingLeavesTheOthersAlone) {
  const auto call = x_.Call(1, "echo");
  const Played used = AwaitAccepted(0);
  used.end->Await(FrameKind::kRequest, 1);
  const Played second = Connect({.number = 1});
  second.Ping(1);
  second.connection->Close();
  used.Ping(1);
  EXPECT_FALSE(call.Done());
  EXPECT_FALSE(x_.service.HasLost(1));
  // What one has carried may have had a sequel that is lost.
  const Played third = Connect({.number = 2});
  third.Send(FrameKind::kNotice);
  third.Ping(1);
  third.connection->Close();
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::IsUnavailable(x_.service.AwaitLost(1)));
}

// While those that the peer has given up end, another thread learns who opened one of them.
TEST_F(PlayedPeerTest, WhatThePeerHasGivenUpIsNotTakenInMeanwhile) {
  y_.incarnation = Incarnation{2} << 32;
  directory_.Set(y_);
  directory_.Hold();
  const Played late = Connect({.number = 2});
  directory_.AwaitQuestion();
  ASSERT_TRUE(x_.agent->UpdatePeer(y_).ok());
  const Played first = Connect({.number = 1});
  first.Ping(1);
  x_.service.OnNextLost([this] { directory_.Answer(); });
  const Played last = Connect({.number = 3, .first_own = 3});
  last.Ping(1);
  EXPECT_TRUE(x_.service.HasLost(1));
  const auto call = x_.Call(1, "echo");
  last.Ping(2);
  EXPECT_EQ(last.end->Count(FrameKind::kRequest), 1) << "the call took another connection";
  EXPECT_EQ(late.end->Count(FrameKind::kRequest), 0);
  late.end->AwaitClosed();
}

// A connection for large packets is of the incarnation whose connection it serves.
TEST_F(PlayedPeerTest, AnotherIncarnationTakesNoLargePackets) {
  const Played main = Connect({.number = 1});
  main.Ping(1);
  const auto call = x_.Call(1, "echo", std::string(2 * Link::kBulkBytes, 'x'));
  const uint64_t number = AwaitBulkNumber(main);
  ASSERT_NE(number, 0u);
  const Incarnation first = std::exchange(y_.incarnation, Incarnation{2} << 32);
  const Played other = Connect({.link = number, .number = 2});
  other.end->Await(FrameKind::kRefused, 1);
  EXPECT_EQ(other.end->Count(FrameKind::kRequest), 0);
  y_.incarnation = first;
  Connect({.link = number, .number = 3}).end->Await(FrameKind::kRequest, 1);
}

// The same for a connection that we have opened; and we say what we have given up.
TEST_F(PlayedPeerTest, AHelloSaysWhatItsSenderHasGivenUp) {
  const auto lost = x_.Call(1, "echo");
  const Hello hello = AwaitAccepted(0).end->AwaitHello();
  EXPECT_EQ(hello.first_own, 0u);
  EXPECT_EQ(hello.first_other, 0u);
  const Played opened = Connect({.number = 3, .first_other = hello.number + 1});
  opened.Ping(1);
  ASSERT_TRUE(lost.Done());
  const auto call = x_.Call(1, "echo");
  opened.end->Await(FrameKind::kRequest, 1);
  opened.connection->Close();
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kUnavailable);
  const auto next = x_.Call(1, "echo");
  const Hello second = AwaitAccepted(1).end->AwaitHello();
  EXPECT_GT(second.number, hello.number);
  EXPECT_GT(second.first_own, hello.number);
  EXPECT_LE(second.first_own, second.number);
  EXPECT_EQ(second.first_other, 4u);
}

// A worker that comes back numbers its connections anew.
TEST_F(PlayedPeerTest, WhatAnEarlierIncarnationHasGivenUpSaysNothingOfTheNext) {
  Connect({.number = 9, .first_own = 9}).Ping(1);
  y_.incarnation = Incarnation{2} << 32;
  directory_.Set(y_);
  const Played next = Connect({.number = 1});
  next.Ping(1);
  const auto call = x_.Call(1, "echo");
  next.end->Await(FrameKind::kRequest, 1);
}

// What begins with the new incarnation would end with what is told of the old one after that.
TEST_F(PlayedPeerTest, TheLossOfAnOldIncarnationIsToldOnce) {
  const Played old = Connect({.number = 1});
  old.Send(FrameKind::kNotice);
  old.Ping(1);
  const auto losses = std::make_shared<std::atomic<int>>(0);  // outlives the test's body
  x_.service.OnNextLost([this, losses] {
    ++*losses;
    x_.service.OnNextLost([losses] { ++*losses; });
  });
  y_.incarnation = Incarnation{8};
  directory_.Set(y_);
  ASSERT_TRUE(x_.agent->UpdatePeer(y_).ok());
  EXPECT_EQ(*losses, 1);
  old.end->AwaitClosed();
  // The end of the old connection has come before what is on the new one.
  const Played next = Connect({.number = 1});
  next.Ping(1);
  EXPECT_EQ(*losses, 1);
}

// Signs of life do not wait behind what is large.
TEST_F(AgentMembersTest, WhoTakesLongForALargePacketIsKept) {
  const std::string large(Link::kBulkBytes, 'x');
  EXPECT_EQ(*a().Call(1, "echo", large).Wait(), large);
  silence_->HoldsLarge(true);
  auto call = a().Call(1, "echo", large);
  for (int i = 0; i < 10; ++i) {
    Beat();
    for (WorkerRank to : {1, 0, 1}) EXPECT_TRUE(c().Call(to, "echo").Wait().ok());
  }
  EXPECT_FALSE(call.Done());
  silence_->HoldsLarge(false);
  network_->ReleaseHeld();
  EXPECT_EQ(*call.Wait(), large);
  EXPECT_FALSE(a().service.HasLost(1));
  EXPECT_FALSE(b().service.HasLost(0));
}

// A connection for large packets may be dead alone, too.
TEST_F(AgentMembersTest, ADeadConnectionForLargePacketsIsFound) {
  const std::string large(Link::kBulkBytes, 'x');
  EXPECT_EQ(*a().Call(1, "echo", large).Wait(), large);
  silence_->LosesLarge(true);
  const auto call =
      a().Call(1, "echo", large, {.deadline = clock_.Now() + 1.2 * kLimit + absl::Seconds(1)});
  for (int i = 0; i < 7; ++i) {
    Beat();
    for (WorkerRank to : {1, 0, 1}) EXPECT_TRUE(c().Call(to, "echo").Wait().ok());
  }
  const absl::Status status = call.Wait().status();
  ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "though it lives")) << status;
  b().service.AwaitLost(0).IgnoreError();
  silence_->LosesLarge(false);
  EXPECT_EQ(*a().Call(1, "echo", large).Wait(), large);
}

// Or one way of it: as where a byte was changed in the length of what is encrypted together, and
// the other end waits for the rest. Each hears the other one all the while: the one its pings, the
// other one the answers to them.
TEST_F(AgentMembersTest, AConnectionForLargePacketsThatCarriesOneWayIsFound) {
  const std::string large(Link::kBulkBytes, 'x');
  EXPECT_EQ(*a().Call(1, "echo", large).Wait(), large);
  silence_->LosesLargeFrom(a().info.address);
  const auto call = a().Call(1, "echo", large, {.deadline = clock_.Now() + 3 * kLimit});
  for (int i = 0; i < 16 && !call.Done(); ++i) {
    Beat();
    // Later ones may be on a connection that has ended.
    if (i < 9) silence_->AwaitPongs(silence_->pings());
    for (WorkerRank to : {1, 0, 1}) EXPECT_TRUE(c().Call(to, "echo").Wait().ok());
  }
  const absl::Status status = call.Wait().status();
  ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "though it lives")) << status;
  b().service.AwaitLost(0).IgnoreError();
  silence_->LosesLargeFrom("nobody");
  EXPECT_EQ(*a().Call(1, "echo", large).Wait(), large);
}

TEST_F(AgentMembersTest, AnIdleConnectionForLargePacketsIsKept) {
  const std::string large(Link::kBulkBytes, 'x');
  EXPECT_EQ(*a().Call(1, "echo", large).Wait(), large);
  for (int i = 0; i < 20; ++i) {
    Beat();
    silence_->AwaitPongs(silence_->pings(), silence_->bulk_pings());
    for (WorkerRank to : {1, 0, 1}) EXPECT_TRUE(c().Call(to, "echo").Wait().ok());
  }
  EXPECT_GE(silence_->bulk_pings(), 5);
  EXPECT_FALSE(a().service.HasLost(1));
  EXPECT_FALSE(b().service.HasLost(0));
}

// -------------------------------------------------------------------------------- Watching

// All three watch, and their connections are there.
class AgentWatchTest : public AgentMembersTest {
 protected:
  void SetUp() override {
    AgentMembersTest::SetUp();
    for (auto& node : nodes_) node->agent->KeepEvents(true);
    for (auto& node : nodes_) node->agent->WatchMembers(/*late=*/false);
    clock_.Advance(absl::Seconds(1));
    silence_->AwaitPongs(3);
    // Who has sent a pong may not have seen its own yet; what comes behind that has come after it.
    for (auto& node : nodes_) {
      for (WorkerRank to : {0, 1, 2}) ASSERT_TRUE(node->Call(to, "echo").Wait().ok());
    }
  }
  // It ceases to listen after it has closed its connections, which no process does that dies: so
  // the attempt that follows at once may still find it there, and the next one does not.
  void Die(WorkerRank worker) {
    nodes_[worker].reset();
    clock_.Advance(absl::Seconds(4));
  }
  static Incarnation IncarnationOf(const TestAgent& node) { return node.info.incarnation; }
  // The next event of that worker, as "lost 1"; waits for it, and calls `meanwhile` again and
  // again.
  static std::string NextEvent(
      TestAgent& node, absl::FunctionRef<void()> meanwhile = [] {}) {
    for (;;) {
      const Peers::Events events = node.agent->TakeEvents();
      if (events.empty()) {
        meanwhile();
        std::this_thread::yield();
        continue;
      }
      EXPECT_EQ(events.size(), 1u);
      const char* const kinds[] = {"?", "joined ", "left ", "lost "};
      return absl::StrCat(kinds[static_cast<int>(events.front().kind)], events.front().rank);
    }
  }
};

TEST_F(AgentWatchTest, EachKeepsAConnectionWithTheNextOne) {
  // As before the calls of the set-up, one for each: who is asked is pinged once.
  EXPECT_EQ(silence_->pings(), 3);
}

TEST_F(AgentWatchTest, TheDeathOfOneWithWhomNothingIsInFlightIsNoticedByOneOther) {
  const Incarnation incarnation = IncarnationOf(b());
  Die(1);
  const absl::Status why = a().service.AwaitUnreachable(1, incarnation);
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
  EXPECT_TRUE(Contains(why, "'b' (1)")) << why;
  EXPECT_FALSE(c().service.HasUnreachable(1));
  EXPECT_TRUE(a().agent->TakeEvents().empty()) << "nobody has said that it is lost";
  a().agent->SetLost(1, incarnation, "it died");
  a().agent->SetLost(1, incarnation, "it died again");
  EXPECT_EQ(NextEvent(a()), "lost 1");
  EXPECT_EQ(a().agent->Members().size(), 3u) << "it may come back";
  // It is the next one now whom "a" watches.
  const Incarnation incarnation_of_c = IncarnationOf(c());
  Die(2);
  a().service.AwaitUnreachable(2, incarnation_of_c).IgnoreError();
  nodes_[1] = Come(1, 2);
  EXPECT_EQ(*b().Call(0, "echo", "back").Wait(), "back");
  EXPECT_EQ(NextEvent(a()), "joined 1");
}

TEST_F(AgentWatchTest, OneThatIsSilentIsUnreachableWithinTheLimit) {
  silence_->Of(b().info.address);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(a().service.HasUnreachable(1)) << "beat " << i;
    for (const auto& [from, to] : {std::pair(&c(), 0), std::pair(&a(), 2)}) {
      EXPECT_TRUE(from->Call(to, "echo").Wait().ok());
    }
    Beat();
  }
  const absl::Status why = a().service.AwaitUnreachable(1, IncarnationOf(b()));
  EXPECT_TRUE(Contains(why, "heartbeat limit of 50s")) << why;
  EXPECT_FALSE(c().service.HasUnreachable(0));
  a().agent->SetLost(1, IncarnationOf(b()), "it is silent");
  EXPECT_EQ(NextEvent(a()), "lost 1");
  // It was only cut off, and looks for the one before it, with one beat or another: what it had
  // sent as the silence ended may have to be given up first.
  EndSilence();
  const auto beat = [this] {
    network_->ReleaseHeld();
    Beat();
    EXPECT_TRUE(a().Call(2, "echo").Wait().ok());
  };
  EXPECT_EQ(NextEvent(a(), beat), "joined 1");
}

TEST_F(AgentWatchTest, AConnectionThatBreaksAloneIsOpenedAgain) {
  silence_->CutNext();
  a().Notify(1, "lost");
  a().service.AwaitLost(1).IgnoreError();
  silence_->AwaitPongs(4);
  EXPECT_FALSE(a().service.HasUnreachable(1));
  // Whenever the peer hears of the end of the first, the new one stays.
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
}

TEST_F(AgentWatchTest, WhoLacksTheMeansToConnectTakesNobodyForLost) {
  silence_->RefuseAllTo(b().info.address);
  silence_->CutNext();
  a().Notify(1, "lost");
  while (!absl::IsResourceExhausted(a().service.AwaitLost(1))) std::this_thread::yield();
  // What has come after that says that its end was seen.
  EXPECT_TRUE(c().Call(0, "echo").Wait().ok());
  EXPECT_FALSE(a().service.HasUnreachable(1));
  // It tries again, and then it has the means.
  silence_->RefuseAllTo("");
  clock_.Advance(absl::Seconds(4));
  silence_->AwaitPongs(4);
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  EXPECT_FALSE(a().service.HasUnreachable(1));
}

TEST_F(AgentWatchTest, WhoLacksTheMeansToTakeAConnectionInIsNotTakenForLost) {
  silence_->CutHellosTo(b().info.address);
  silence_->CutNext();
  a().Notify(1, "lost");
  while (silence_->cut_hellos() == 0) std::this_thread::yield();
  // The first is served behind what has said that hello, and the second one behind its end.
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(c().Call(0, "echo").Wait().ok());
  EXPECT_FALSE(a().service.HasUnreachable(1));
  silence_->CutHellosTo("");
  clock_.Advance(absl::Seconds(4));
  silence_->AwaitPongs(4);
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  EXPECT_FALSE(a().service.HasUnreachable(1));
}

// With whom there are connections.
std::set<WorkerRank> ConnectedWith(const TestAgent& node) {
  std::set<WorkerRank> peers;
  for (const auto& [peer, bytes] : node.agent->Queued()) peers.insert(peer);
  return peers;
}

// What begins over the next connection with a watched member would end with the word of the loss.
TEST_F(PlayedPeerTest, ALossIsToldBeforeTheNextConnectionIsOpened) {
  x_.agent->WatchMembers(/*late=*/false);
  const Played live = Connect({});
  live.Ping(1);
  std::set<WorkerRank> with;
  absl::Notification told;
  x_.service.OnNextLost([&] {
    with = ConnectedWith(x_);
    told.Notify();
  });
  live.connection->Close();
  told.WaitForNotification();
  EXPECT_EQ(with, std::set<WorkerRank>({0})) << "itself alone";
  AwaitAccepted(0);
}

// What happened to members since this was last asked, as "lost 1 joined 1".
std::string Happened(const TestAgent& node) {
  std::string happened;
  for (const MemberEvent& event : node.agent->TakeEvents()) {
    const char* const kinds[] = {"?", "joined", "left", "lost"};
    absl::StrAppend(&happened, happened.empty() ? "" : " ", kinds[static_cast<int>(event.kind)],
                    " ", event.rank);
  }
  return happened;
}

// A worker that dies may have opened a connection just before; and that it is lost may be told, by
// way of the store, before what it has sent there is taken in.
TEST_F(PlayedPeerTest, WhatOneHasSentBeforeItDiedDoesNotBringItBack) {
  x_.agent->KeepEvents(true);
  x_.agent->SetLost(1, y_.incarnation, "it died");
  const Played late = Connect({});
  late.Ping(1);
  ASSERT_EQ(Happened(x_), "lost 1");
  late.connection->Close();
  // One that lives answers what is sent now.
  const Played live = Connect({.number = 1});
  live.Ping(1);
  ASSERT_EQ(live.end->Count(FrameKind::kPing), 1);
  EXPECT_EQ(Happened(x_), "");
  live.Send(FrameKind::kPong);
  live.Ping(2);
  EXPECT_EQ(Happened(x_), "joined 1");
}

// An answer may be older than the loss that is told by then.
TEST_F(PlayedPeerTest, WhatOneHasAnsweredBeforeItDiedDoesNotBringItBack) {
  x_.agent->KeepEvents(true);
  const Played asked = Connect({});
  asked.Ping(1);
  clock_.Advance(kLimit / 5);
  clock_.Advance(kLimit / 5);
  asked.end->Await(FrameKind::kPing, 1);
  x_.agent->SetLost(1, y_.incarnation, "it died");
  asked.Send(FrameKind::kPong);
  asked.Ping(2);
  EXPECT_EQ(Happened(x_), "lost 1") << "it was asked before";
  const Played again = Connect({.number = 1});
  again.Ping(1);
  ASSERT_EQ(again.end->Count(FrameKind::kPing), 1);
  x_.agent->SetAlive(1, y_.incarnation);  // as the store says
  x_.agent->SetLost(1, y_.incarnation, "it died after all");
  again.Send(FrameKind::kPong);
  again.Ping(2);
  EXPECT_EQ(Happened(x_), "joined 1 lost 1") << "it was asked before the second loss";
}

// It may have connected just before its loss was told.
TEST_F(PlayedPeerTest, OneThatIsLostAndConnectedIsAsked) {
  x_.agent->KeepEvents(true);
  const Played live = Connect({});
  live.Ping(1);
  EXPECT_TRUE(x_.agent->Hears(1, y_.incarnation));
  EXPECT_FALSE(x_.agent->Hears(1, y_.incarnation + 1));
  x_.agent->AskLost(1, y_.incarnation);
  live.Ping(2);
  EXPECT_EQ(live.end->Count(FrameKind::kPing), 0) << "it is not lost";
  clock_.Advance(kLimit / 5);
  clock_.Advance(kLimit / 5);
  live.end->Await(FrameKind::kPing, 1);
  x_.agent->SetLost(1, y_.incarnation, "it was silent");
  x_.agent->AskLost(1, y_.incarnation);
  live.Ping(3);
  ASSERT_EQ(live.end->Count(FrameKind::kPing), 2);
  live.Send(FrameKind::kPong);
  live.Ping(4);
  EXPECT_EQ(Happened(x_), "lost 1") << "that was asked before";
  const uint64_t loss = x_.agent->LossOf(1, y_.incarnation);
  EXPECT_NE(loss, 0u);
  EXPECT_EQ(x_.service.last_revived(), 0u);
  live.Send(FrameKind::kPong);
  live.Ping(5);
  EXPECT_EQ(Happened(x_), "joined 1");
  EXPECT_EQ(x_.service.last_revived(), loss);
  EXPECT_EQ(x_.agent->LossOf(1, y_.incarnation), 0u);
  live.connection->Close();
}

// It need not have noticed anything, and so connects to nobody by itself.
TEST_F(PlayedPeerTest, OneThatIsLostAndIsCalledIsAsked) {
  x_.agent->KeepEvents(true);
  x_.agent->SetLost(1, y_.incarnation, "it was silent");
  const auto call = x_.Call(1, "echo", "x");
  const Played opened = AwaitAccepted(0);
  opened.end->Await(FrameKind::kRequest, 1);
  opened.Ping(1);
  EXPECT_EQ(opened.end->Count(FrameKind::kPing), 1);
  EXPECT_EQ(Happened(x_), "lost 1");
  opened.Send(FrameKind::kPong);
  opened.Ping(2);
  EXPECT_EQ(Happened(x_), "joined 1");
  opened.connection->Close();
}

TEST_F(AgentWatchTest, WhoIsWatchedByNobodyIsTold) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(c().Call(0, "echo").Wait().ok());
    Beat();
  }
  EXPECT_EQ(a().service.unwatched(), 0);
  nodes_[2].reset();
  a().service.AwaitLost(2).IgnoreError();
  Beat();
  EXPECT_GT(a().service.unwatched(), 0);
}

TEST_F(AgentWatchTest, OnlyWhoWatchesALostOneLooksForMore) {
  std::set<WorkerRank> with = ConnectedWith(a());
  std::vector<std::unique_ptr<TestAgent>> late;
  for (WorkerRank rank = 3; rank < 8; ++rank) {
    late.push_back(Come(rank, 1));
    ASSERT_TRUE(a().agent->UpdatePeer(late.back()->info).ok());
  }
  // The store says it, and its watcher has found it.
  for (const auto& node : late) {
    if (node->info.rank > 5) a().agent->SetLost(node->info.rank, IncarnationOf(*node), "it died");
  }
  EXPECT_EQ(ConnectedWith(a()), with);
  // "a" watches this one.
  a().agent->SetLost(1, IncarnationOf(b()), "it died");
  with.insert(3);
  EXPECT_EQ(ConnectedWith(a()), with);
}

TEST_F(AgentWatchTest, OneThatIsLostIsNotTriedAgainAndAgain) {
  const std::set<WorkerRank> with = ConnectedWith(a());
  const auto d = Come(3, 1);
  ASSERT_TRUE(a().agent->UpdatePeer(d->info).ok());
  a().agent->SetLost(3, IncarnationOf(*d), "it died");
  a().agent->WatchToo(3);
  EXPECT_EQ(ConnectedWith(a()), with);
}

TEST_F(AgentWatchTest, WhoHasLeftIsNotMissed) {
  WorkerInfo left = b().info;
  left.left = true;
  directory_.Set(left);
  nodes_[1].reset();  // without a word
  EXPECT_EQ(NextEvent(a()), "left 1");
  EXPECT_FALSE(a().service.HasUnreachable(1));
  const Incarnation incarnation = IncarnationOf(c());
  Die(2);
  a().service.AwaitUnreachable(2, incarnation).IgnoreError();
  EXPECT_FALSE(a().service.HasUnreachable(1));
}

TEST_F(AgentWatchTest, WhoComesLateIsWatched) {
  const auto d = Come(3, 1);
  d->agent->WatchMembers(/*late=*/true);
  EXPECT_EQ(NextEvent(c()), "joined 3") << "the one before it";
  Beat();
  silence_->AwaitPongs(4);
  EXPECT_EQ(*c().Call(3, "echo", "x").Wait(), "x");
}

TEST_F(AgentWatchTest, WhoStopsWatchingHearsOfNobody) {
  a().agent->StopWatching();
  nodes_[1].reset();
  a().service.AwaitLost(1).IgnoreError();
  Beat();
  Beat();
  EXPECT_FALSE(a().service.HasUnreachable(1));
}

// ------------------------------------------------------------------------------------- Return

TEST_F(AgentMembersTest, AWorkerThatDiedComesBackElsewhere) {
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  nodes_[1].reset();
  a().service.AwaitLost(1).IgnoreError();
  const absl::Status gone = a().Call(1, "echo").Wait().status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable) << gone;
  nodes_[1] = Come(1, 2);
  EXPECT_EQ(*a().Call(1, "echo", "back").Wait(), "back");
  EXPECT_EQ(*c().Call(1, "echo", "never met").Wait(), "never met");
  EXPECT_EQ(*b().Call(0, "echo", "and it calls us").Wait(), "and it calls us");
}

TEST_F(AgentMembersTest, ANewIncarnationEndsWhatThereIsWithTheOld) {
  auto pending = a().Call(1, "keep");
  const IncomingCall kept = b().service.AwaitKept();
  // The old one lives, and nobody hears of its end: it is on a machine that was cut off.
  auto old = std::move(nodes_[1]);
  nodes_[1] = Come(1, 2);
  EXPECT_EQ(*b().Call(0, "echo", "new").Wait(), "new");
  const absl::Status status = pending.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "new incarnation")) << status;
  EXPECT_TRUE(Contains(a().service.AwaitLost(1), "new incarnation"));
  // The old one is told why nobody talks to it any more.
  old->service.AwaitLost(0).IgnoreError();
  const absl::Status refused = old->Call(0, "echo").Wait().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_TRUE(Contains(refused, "refused the connection")) << refused;
  EXPECT_TRUE(Contains(refused, "an incarnation of worker 'b' (1) that is over")) << refused;
  EXPECT_EQ(*a().Call(1, "echo", "goes to the new one").Wait(), "goes to the new one");
}

// It may be read at that moment, and begin what those who hear of the loss do not find yet.
TEST_F(AgentMembersTest, ACallKnowsBeforeALossIsToldThatItsConnectionWasGivenUp) {
  const auto pending = b().Call(0, "keep");
  const IncomingCall kept = a().service.AwaitKept();
  EXPECT_FALSE(kept.is_cut_off());
  WorkerInfo next = b().info;
  next.incarnation = Incarnation{2} << 32;
  bool was_cut_off = false;
  a().service.OnNextLost([&] { was_cut_off = kept.is_cut_off(); });
  ASSERT_TRUE(a().agent->UpdatePeer(next).ok());
  EXPECT_TRUE(was_cut_off);
}

TEST_F(AgentMembersTest, ANoticeKnowsThatItsConnectionWasGivenUp) {
  WorkerInfo next = b().info;
  next.incarnation = Incarnation{2} << 32;
  bool was_cut_off = true, is_cut_off = false;
  a().service.OnNextNotice([&](absl::FunctionRef<bool()> is) {
    was_cut_off = is();
    const absl::Status updated = a().agent->UpdatePeer(next);
    is_cut_off = is();
    return updated;
  });
  Packet notice = Agent::NewNotice();
  notice.bytes += "x";
  b().agent->Notify(0, std::move(notice));
  a().service.AwaitNotices(1);
  EXPECT_FALSE(was_cut_off);
  EXPECT_TRUE(is_cut_off);
}

// Who waits for what it tells would wait for ever.
TEST_F(AgentMembersTest, ANoticeThatCannotBeReadEndsItsConnectionOnBothSides) {
  a().service.OnNextNotice(
      [](absl::FunctionRef<bool()>) { return absl::ResourceExhaustedError("no memory for it"); });
  b().agent->Notify(0, Agent::NewNotice());
  EXPECT_TRUE(Contains(a().service.AwaitLost(1), "no memory for it"));
  EXPECT_TRUE(Contains(b().service.AwaitLost(0), "no memory for it"));
}

// There may be several connections with it, whose ends it hears of in any order.
TEST_F(AgentMembersTest, WhyAConnectionIsGivenUpIsNotOvertakenByTheEndOfAnother) {
  const std::string large(2 * Link::kBulkBytes, 'x');
  EXPECT_EQ(*b().Call(0, "echo", large).Wait(), large);
  silence_->HoldRefusals();
  a().service.OnNextNotice(
      [](absl::FunctionRef<bool()>) { return absl::ResourceExhaustedError("no memory for it"); });
  b().agent->Notify(0, Agent::NewNotice());
  a().service.AwaitLost(1).IgnoreError();
  silence_->AwaitRefusals(1);
  // Served behind the end of any other that has ended meanwhile.
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(c().Call(1, "echo").Wait().ok());
  network_->ReleaseHeld();
  EXPECT_TRUE(Contains(b().service.AwaitLost(0), "no memory for it"));
}

// Its entry was read before that of the next one, which this worker knows of when it is taken in.
TEST_F(AgentMembersTest, AnIncarnationIsRefusedThatIsOverWhenItIsTakenIn) {
  nodes_[1].reset();
  nodes_[1] = Come(1, 2);
  WorkerInfo next = b().info;
  next.incarnation += Incarnation{1} << 32;
  a().service.OnNextMemberEvents([&] { EXPECT_EQ(a().agent->UpdatePeer(next), absl::OkStatus()); });
  const absl::Status refused = b().Call(0, "echo", "x").Wait().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused) || absl::IsUnavailable(refused)) << refused;
  EXPECT_TRUE(Contains(refused, "of an incarnation of worker 'b' (1) that is over")) << refused;
}

// Whoever waited may begin anew at once, while the connection is still being ended.
TEST_F(AgentMembersTest, WhatBeginsAfterANoticeThatCannotBeReadIsNotLostWithIt) {
  a().service.begun = 7;
  a().service.OnNextNotice(
      [](absl::FunctionRef<bool()>) { return absl::ResourceExhaustedError("no memory for it"); });
  Future<std::string> anew;
  absl::Notification is_begun;
  a().service.OnNextLost([&] {
    a().service.begun = 8;
    anew = a().Call(1, "echo", "again");
    is_begun.Notify();
  });
  b().agent->Notify(0, Agent::NewNotice());
  b().service.AwaitLost(0).IgnoreError();
  is_begun.WaitForNotification();
  const absl::StatusOr<std::string> echoed = anew.Wait();
  ASSERT_TRUE(echoed.ok()) << echoed.status();
  EXPECT_EQ(*echoed, "again");
  EXPECT_EQ(a().service.begun_at_loss, 7u);
}

TEST_F(AgentMembersTest, AnOldEntryOfTheStoreIsRefused) {
  const WorkerInfo old = b().info;
  nodes_[1].reset();
  nodes_[1] = Come(1, 2);
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  directory_.Set(old);  // somebody replays it
  // Who knows better goes on; here on a new connection.
  nodes_[1]->agent->Close();
  a().service.AwaitLost(1).IgnoreError();
  EXPECT_EQ(a().agent->UpdatePeer(old).code(), absl::StatusCode::kFailedPrecondition);
  const absl::Status status = a().Call(1, "echo").Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST_F(AgentMembersTest, AStoreThatIsGoneKeepsNobodyFromThoseItKnows) {
  directory_.Break();
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  EXPECT_EQ(a().Call(7, "echo").Wait().status().code(), absl::StatusCode::kUnavailable);
}

// ------------------------------------------------------------------------------------- Joining

TEST_F(AgentMembersTest, OneWhoJoinsCallsAndIsCalled) {
  const auto d = Come(3, 1);
  EXPECT_EQ(a().agent->Members().size(), 3u);
  EXPECT_EQ(*d->Call(0, "echo", "here I am").Wait(), "here I am");
  EXPECT_EQ(a().agent->Members().size(), 4u);
  EXPECT_EQ(*a().agent->FindWorker("d"), 3);
  EXPECT_EQ(*c().Call(3, "echo", "by its rank").Wait(), "by its rank");
  EXPECT_EQ(c().agent->Describe(3), "'d' (3)");
}

TEST_F(AgentMembersTest, WhatComesBeforeTheStoreHasAnsweredKeepsItsOrder) {
  const auto d = Come(3, 1);
  EXPECT_TRUE(d->Call(1, "echo").Wait().ok());  // the way is free
  directory_.Hold();
  std::thread asking([&] {
    for (int i = 0; i < 200; ++i) d->Notify(0, absl::StrCat(i));
  });
  directory_.AwaitQuestion();  // its own, for where we are
  directory_.Answer();
  asking.join();
  const std::vector<std::string> notices = a().service.AwaitNotices(200);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(notices[i], absl::StrCat("3:", i));
}

// Not before the store says who the newcomer is can it be answered; which may take longer than the
// heartbeat limit.
TEST_F(AgentMembersTest, WhoAwaitsTheStoreIsNoSilentPeer) {
  const auto d = Come(3, 1);
  for (const auto& [from, to] : {std::pair(d.get(), 1), std::pair(&c(), 0)}) {  // the way is free
    EXPECT_TRUE(from->Call(static_cast<WorkerRank>(to), "echo").Wait().ok());
  }
  directory_.Hold();
  const auto reply = d->Call(0, "echo", "x");
  directory_.AwaitQuestion();  // its own, for where we are
  directory_.Answer(/*hold_on=*/true);
  directory_.AwaitQuestion();  // ours, for who it is
  for (int i = 0; i < 8; ++i) {
    Beat();
    // What was sent to either has arrived when what comes after it has.
    for (int j = 0; j < 2; ++j) {
      EXPECT_TRUE(b().Call(3, "echo").Wait().ok());
      EXPECT_TRUE(c().Call(0, "echo").Wait().ok());
    }
  }
  EXPECT_FALSE(reply.Done());
  directory_.Answer();
  EXPECT_EQ(reply.Wait().value_or(""), "x") << reply.Wait().status();
}

TEST_F(AgentMembersTest, WhoIsNotFoundInTimeIsNotCalledSilent) {
  directory_.Hold();
  const auto reply = a().Call(50, "echo");
  directory_.AwaitQuestion();
  for (int i = 0; i < 6; ++i) Beat();
  const absl::Status status = reply.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "the store has not said within the heartbeat limit of 50s"))
      << status;
  directory_.Answer();
}

TEST_F(AgentMembersTest, OneWhoIsGoneBeforeTheStoreHasAnsweredIsNotTakenIn) {
  const auto d = Come(3, 1);
  EXPECT_EQ(*c().Call(0, "echo", "the way is free").Wait(), "the way is free");
  directory_.Hold();
  auto never = d->Call(0, "echo");
  directory_.AwaitQuestion();  // its own, for where we are
  directory_.Answer(/*hold_on=*/true);
  directory_.AwaitQuestion();  // ours, for who it is
  d->agent->Close();
  EXPECT_EQ(never.Wait().status().code(), absl::StatusCode::kCancelled);
  // What comes after its end has come, so that has come, too.
  EXPECT_EQ(*c().Call(0, "echo", "x").Wait(), "x");
  directory_.Answer();
  EXPECT_EQ(a().Call(3, "echo").Wait().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(AgentMembersTest, WhoIsNotInTheStoreIsRefused) {
  const auto d = New(3, 1);
  std::vector<WorkerInfo> infos = {d->info};
  for (auto& node : nodes_) infos.push_back(node->info);
  ASSERT_TRUE(d->agent->Start(d->info, infos).ok());
  const absl::Status status = d->Call(0, "echo").Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "refused the connection")) << status;
  EXPECT_EQ(a().agent->Members().size(), 3u);
}

TEST_F(AgentMembersTest, NoMoreThanTheLimitAreKnown) {
  AgentOptions options = Options(&directory_);
  options.max_workers = 2;
  TestAgent small(&clock_, network_, 4, 1, options);
  directory_.Set(small.info);
  ASSERT_TRUE(small.agent->Start(small.info, {small.info, a().info}).ok());
  const absl::Status status = b().Call(4, "echo").Wait().status();
  EXPECT_TRUE(Contains(status, "max_workers")) << status;
  EXPECT_EQ(*a().Call(4, "echo", "known").Wait(), "known");
}

// ------------------------------------------------------------------------------------- Leaving

TEST_F(AgentMembersTest, OneWhoLeavesIsNoMemberAndItsCallsFailClearly) {
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  auto pending = a().Call(1, "keep");
  const IncomingCall kept = b().service.AwaitKept();
  WorkerInfo left = b().info;
  left.left = true;
  directory_.Set(left);
  b().agent->SayLeaving();
  EXPECT_EQ(*b().Call(0, "echo", "still at work").Wait(), "still at work");
  EXPECT_EQ(a().agent->Members().size(), 2u);
  nodes_[1].reset();
  const absl::Status status = pending.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "worker 'b' (1) has left the job")) << status;
  for (TestAgent* node : {&a(), &c()}) {
    const absl::Status later = node->Call(1, "echo").Wait().status();
    EXPECT_EQ(later.code(), absl::StatusCode::kUnavailable) << later;
    EXPECT_TRUE(Contains(later, "has left the job")) << later;
  }
  nodes_[1] = Come(1, 2);
  EXPECT_EQ(*a().Call(1, "echo", "back").Wait(), "back");
  EXPECT_EQ(a().agent->Members().size(), 3u);
}

TEST_F(AgentMembersTest, WhoHearsOfOneThatLeavesFindsItGone) {
  EXPECT_EQ(*a().Call(1, "echo", "x").Wait(), "x");
  size_t members = 0;
  absl::Notification told;
  a().service.OnNextMemberEvents([&] {
    members = a().agent->MemberCount();
    told.Notify();
  });
  b().agent->SayLeaving();
  told.WaitForNotification();
  EXPECT_EQ(members, 2u);
}

}  // namespace
}  // namespace distgrad
