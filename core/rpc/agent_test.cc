#include "core/rpc/agent.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/fake_clock.h"
#include "core/base/future.h"
#include "core/rpc/frame.h"
#include "core/rpc/inproc/inproc_transport.h"
#include "core/rpc/wire.h"

namespace distgrad {
namespace {

// Echoes what is sent to "echo", fails "fail", and keeps the calls of "keep". Thread-safe.
class EchoService : public AgentService {
 public:
  void OnCall(IncomingCall call) override {
    if (call.function() == "echo") {
      Packet reply = call.NewReply();
      reply.bytes += std::string(call.body().bytes());
      reply.segments = std::move(call.body().packet.segments);
      return call.Reply(std::move(reply));
    }
    if (call.function() == "fail") return call.Fail(absl::DataLossError("as was asked"));
    if (call.function() == "drop") return;
    absl::MutexLock lock(&mu_);
    kept_.push_back(std::move(call));
  }
  void OnNotice(WorkerId from, Body notice) override {
    absl::MutexLock lock(&mu_);
    notices_.push_back(absl::StrCat(from, ":", notice.bytes()));
  }
  void OnLateReply(WorkerId, Body reply) override {
    absl::MutexLock lock(&mu_);
    late_.push_back(std::string(reply.bytes()));
  }
  void OnPeerLost(WorkerId peer, const absl::Status& why) override {
    absl::MutexLock lock(&mu_);
    lost_[peer] = why;
  }

  IncomingCall WaitForKept() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](std::deque<IncomingCall>* kept) { return !kept->empty(); }, &kept_));
    IncomingCall call = std::move(kept_.front());
    kept_.pop_front();
    return call;
  }
  std::vector<std::string> WaitForNotices(size_t n) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return notices_.size() >= n;
    };
    mu_.Await(absl::Condition(&there));
    return notices_;
  }
  std::string WaitForLate() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](std::vector<std::string>* late) { return !late->empty(); }, &late_));
    return late_.front();
  }
  absl::Status WaitForLost(WorkerId peer) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return lost_.count(peer) > 0;
    };
    mu_.Await(absl::Condition(&there));
    return lost_[peer];
  }

 private:
  absl::Mutex mu_;
  std::deque<IncomingCall> kept_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> notices_ ABSL_GUARDED_BY(mu_), late_ ABSL_GUARDED_BY(mu_);
  std::map<WorkerId, absl::Status> lost_ ABSL_GUARDED_BY(mu_);
};

class AgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 3; ++i) {
      transports_.push_back(NewInprocTransport(network_));
      services_.push_back(std::make_unique<EchoService>());
      agents_.push_back(std::make_unique<Agent>(&clock_, transports_[i].get(), services_[i].get()));
      WorkerInfo info;
      info.id = static_cast<WorkerId>(i);
      info.name = std::string(1, static_cast<char>('a' + i));
      info.address = *agents_[i]->Listen();
      info.incarnation = 100 + i;
      infos_.push_back(info);
    }
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(agents_[i]->Start(infos_[i], infos_).ok());
  }
  void TearDown() override {
    for (auto& agent : agents_) agent->Close();
    transports_.clear();
  }

  Future<std::string> Call(int from, WorkerId to, const std::string& function,
                           const std::string& body, absl::Time deadline = absl::InfiniteFuture()) {
    Promise<std::string> promise;
    Future<std::string> future = promise.future();
    Packet request = Agent::NewRequest(function);
    request.bytes += body;
    agents_[from]->Call(to, std::move(request), {.deadline = deadline},
                        [promise = std::move(promise)](absl::StatusOr<Body> reply) mutable {
                          if (reply.ok())
                            promise.Set(std::string(reply->bytes()));
                          else
                            promise.Set(reply.status());
                        });
    return future;
  }

  FakeClock clock_;
  std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<EchoService>> services_;
  std::vector<std::unique_ptr<Agent>> agents_;
  std::vector<WorkerInfo> infos_;
};

TEST_F(AgentTest, CallsAreAnsweredByPeersAndByOneself) {
  EXPECT_EQ(*Call(0, 1, "echo", "hello").Wait(), "hello");
  EXPECT_EQ(*Call(1, 0, "echo", "back").Wait(), "back");
  EXPECT_EQ(*Call(0, 0, "echo", "self").Wait(), "self");
}

TEST_F(AgentTest, ErrorsKeepTheirCodeAndNameWorkerAndFunction) {
  const absl::Status status = Call(0, 1, "fail", "").Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "call of 'fail' on worker 'b' (1): as was asked");
}

TEST_F(AgentTest, ACallThatIsDroppedUnansweredTellsItsCaller) {
  EXPECT_EQ(Call(0, 1, "drop", "").Wait().status().code(), absl::StatusCode::kInternal);
}

TEST_F(AgentTest, UnknownWorkers) {
  EXPECT_EQ(Call(0, 9, "echo", "").Wait().status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*agents_[0]->FindWorker("c"), 2);
  const absl::Status status = agents_[0]->FindWorker("z").status();
  EXPECT_EQ(status.message(), "there is no worker 'z' in this job; there are: a, b, c");
}

TEST_F(AgentTest, ADeadlineEndsTheCallAndTheReplyIsLate) {
  auto soon = Call(0, 1, "keep", "", clock_.Now() + absl::Seconds(1));
  auto later = Call(0, 1, "keep", "", clock_.Now() + absl::Seconds(3));
  IncomingCall first = services_[1]->WaitForKept(), second = services_[1]->WaitForKept();
  EXPECT_EQ(first.deadline(), clock_.Now() + absl::Seconds(1));
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(soon.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(later.Done());
  Packet reply = first.NewReply();
  reply.bytes += "too late";
  first.Reply(std::move(reply));
  EXPECT_EQ(services_[0]->WaitForLate(), "too late");
  second.Reply(second.NewReply());
  EXPECT_TRUE(later.Wait().ok());
  EXPECT_EQ(Call(0, 1, "echo", "", clock_.Now()).Wait().status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(AgentTest, NoticesArriveInOrder) {
  for (int i = 0; i < 100; ++i) {
    Packet notice = Agent::NewNotice();
    notice.bytes += absl::StrCat(i);
    agents_[2]->Notify(1, std::move(notice));
  }
  const std::vector<std::string> notices = services_[1]->WaitForNotices(100);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(notices[i], absl::StrCat("2:", i));
}

TEST_F(AgentTest, ALostPeerFailsItsCallsAndIsReported) {
  auto lost = Call(0, 1, "keep", "");
  auto other = Call(0, 2, "keep", "");
  IncomingCall kept = services_[1]->WaitForKept();
  agents_[1]->Close();
  const absl::Status status = lost.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find("'b' (1)"), std::string::npos) << status;
  EXPECT_FALSE(services_[0]->WaitForLost(1).ok());
  EXPECT_FALSE(other.Done());
}

TEST_F(AgentTest, CloseFailsWhatIsUnderWay) {
  auto call = Call(0, 1, "keep", "");
  IncomingCall kept = services_[1]->WaitForKept();
  agents_[0]->Close();
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Call(0, 1, "echo", "").Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(AgentTest, BothMayCallFirstAtTheSameTime) {
  std::vector<std::thread> threads;
  for (int from = 0; from < 3; ++from) {
    threads.emplace_back([this, from] {
      for (int i = 0; i < 200; ++i) {
        const auto to = static_cast<WorkerId>(i % 3);
        ASSERT_EQ(*Call(from, to, "echo", absl::StrCat(i)).Wait(), absl::StrCat(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Whoever speaks first without saying who it is, or is not a member, is shut out; others go on.
TEST_F(AgentTest, StrangersAreShutOut) {
  struct Stranger : Receiver {
    Promise<absl::Status> closed;
    void OnPacket(Packet) override {}
    void OnClosed(absl::Status why) override { closed.Set(why); }
  };
  std::string hello_of_nobody, hello_of_an_earlier_life;
  AppendHello({.from = 7, .from_incarnation = 1, .to = 1, .to_incarnation = 101}, &hello_of_nobody);
  AppendHello({.from = 0, .from_incarnation = 99, .to = 1, .to_incarnation = 101},
              &hello_of_an_earlier_life);
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(), Agent::NewRequest("echo").bytes,
        hello_of_nobody, hello_of_an_earlier_life}) {
    auto transport = NewInprocTransport(network_);
    auto stranger = std::make_shared<Stranger>();
    auto closed = stranger->closed.future();
    auto connection = transport->Connect(infos_[1].address, stranger);
    ASSERT_TRUE(connection.ok());
    (*connection)->Send(Packet{bytes, {}}, nullptr);
    EXPECT_TRUE(closed.Wait().ok());
  }
  EXPECT_EQ(*Call(0, 1, "echo", "still here").Wait(), "still here");
}

}  // namespace
}  // namespace distgrad
