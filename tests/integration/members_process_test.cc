// Real processes that are stopped, killed and started again, join and leave.
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/autograd/state.h"
#include "core/worker/worker.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

constexpr absl::Duration kLimit =
    absl::Seconds(10);  // heartbeats'; whoever stands still for 8 s is lost

absl::Time Later() { return absl::Now() + absl::Minutes(5); }

WorkerOptions Options(const std::string& rendezvous, const std::string& name) {
  WorkerOptions options;
  options.name = name;
  options.rendezvous = rendezvous;
  options.thread_count = 2;
  options.timeout = absl::Minutes(5);
  options.heartbeat_limit = kLimit;
  return options;
}

WorkerOptions AtStart(const std::string& rendezvous, const std::string& name, int rank) {
  WorkerOptions options = Options(rendezvous, name);
  options.rank = rank;
  options.world_size = 3;
  return options;
}

// The child: "late" joins, all others are rank 2. Lives until it is killed, or told to leave.
int Serve(const std::string& rendezvous, const std::string& name) {
  WorkerOptions options = AtStart(rendezvous, name, 2);
  options.join = name == "late";
  auto worker = Worker::Create(std::move(options));
  if (!worker.ok()) {
    std::printf("%s\n", worker.status().ToString().c_str());
    return 1;
  }
  absl::Notification leave;
  absl::Status status = (*worker)->Register("double", [](Request& r) -> absl::StatusOr<Message> {
    return Message{"", {at::mul(r.message.tensors[0], 2)}};
  });
  status.Update((*worker)->Register("leave", [&](Request&) -> absl::StatusOr<Message> {
    leave.Notify();
    return Message{};
  }));
  status.Update((*worker)->Register("wait", [&](Request&) -> absl::StatusOr<Message> {
    leave.WaitForNotification();
    return Message{};
  }));
  std::printf("%s\n", status.ok() ? "ready" : status.ToString().c_str());
  std::fflush(stdout);
  leave.WaitForNotification();
  status = (*worker)->Leave(Later());
  if (!status.ok()) std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

bool Contains(const absl::Status& status, absl::string_view text) {
  return absl::StrContains(status.message(), text);
}

// "lead" and "middle" in this process, and "back" in a child.
class MembersProcessTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string file = absl::StrCat(std::getenv("TEST_TMPDIR"), "/members-XXXXXX");
    const int fd = mkstemp(file.data());
    ASSERT_GE(fd, 0);
    close(fd);
    unlink(file.c_str());
    rendezvous_ = absl::StrCat("file://", file);
    Child("back");
    std::thread other([&] { middle_ = New("middle", 1); });
    lead_ = New("lead", 0);
    other.join();
    ASSERT_NE(lead_, nullptr);
    ASSERT_NE(middle_, nullptr);
    ASSERT_EQ(child_->ReadLine(), "ready");
    ASSERT_TRUE(middle_
                    ->Register("relay",
                               [this](Request& r) -> absl::StatusOr<Message> {
                                 return middle_->Call("back", "double", std::move(r.message),
                                                      r.Nested());
                               })
                    .ok());
    ASSERT_TRUE(
        middle_
            ->Register("echo",
                       [](Request& r) -> absl::StatusOr<Message> { return std::move(r.message); })
            .ok());
  }
  void Child(const std::string& name) {
    child_ =
        std::make_unique<ChildProcess>(std::vector<std::string>{"--worker", rendezvous_, name});
  }
  std::unique_ptr<Worker> New(const std::string& name, int rank) {
    auto worker = Worker::Create(AtStart(rendezvous_, name, rank));
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }

  // A context with its forward done: from here to "middle", and from there to "back".
  struct Step {
    Context context;
    at::Tensor x, y;
    absl::Status Backward() { return context.Backward({y.sum()}); }
  };
  Step Forward() {
    Step step{lead_->NewContext(), at::ones({3}).requires_grad_(), {}};
    const auto y = lead_->Call("middle", "relay", {"", {step.x}}, {.context = &step.context});
    EXPECT_TRUE(y.ok()) << y.status();
    if (y.ok()) step.y = y->tensors[0];
    return step;
  }
  void ExpectTraining() {
    Step step = Forward();
    const absl::Status done = step.Backward();
    ASSERT_TRUE(done.ok()) << done;
    EXPECT_TRUE(step.context.Gradient(step.x)->equal(at::full({3}, 2.0)));
  }

  std::string rendezvous_;
  std::unique_ptr<ChildProcess> child_;
  std::unique_ptr<Worker> lead_, middle_;
};

TEST_F(MembersProcessTest, ABackwardOverAStoppedWorkerFailsOnAllOthers) {
  ExpectTraining();
  Step step = Forward();
  child_->Stop();
  auto waiting = lead_->CallAsync("back", "double", {"", {at::ones({1})}});
  const absl::Status backward = step.Backward();
  EXPECT_EQ(backward.code(), absl::StatusCode::kUnavailable) << backward;
  EXPECT_TRUE(Contains(backward, "'back' (2)")) << backward;
  EXPECT_TRUE(Contains(backward, "heartbeat limit of 10s")) << backward;
  const absl::Status call = waiting.Wait().status();
  EXPECT_EQ(call.code(), absl::StatusCode::kUnavailable) << call;
  EXPECT_TRUE(Contains(call, "'double' on worker 'back' (2)")) << call;
  // Nothing is left of the pass on those who live. The initiator has heard of it from one of them.
  for (Worker* worker : {lead_.get(), middle_.get()}) {
    for (const ContextState& context : worker->Contexts()) EXPECT_TRUE(context.passes.empty());
  }
  // All else goes on.
  EXPECT_TRUE(lead_->Call("middle", "echo", {"hello", {}}).ok());
  // It goes on too, and is as good as before.
  child_->Signal(SIGCONT);
  ExpectTraining();
}

TEST_F(MembersProcessTest, AKilledWorkerIsNoticedAtOnceAndComesBackUnderItsName) {
  Step step = Forward();
  auto waiting = lead_->CallAsync("back", "wait", {});
  child_->Signal(SIGKILL);
  EXPECT_EQ(child_->Wait(), -SIGKILL);
  const absl::Status call = waiting.Wait().status();
  EXPECT_EQ(call.code(), absl::StatusCode::kUnavailable) << call;
  EXPECT_TRUE(Contains(call, "'wait' on worker 'back' (2)")) << call;
  EXPECT_FALSE(Contains(call, "heartbeat")) << call;
  const absl::Status backward = step.Backward();
  EXPECT_EQ(backward.code(), absl::StatusCode::kUnavailable) << backward;
  EXPECT_TRUE(Contains(backward, "'back' (2)")) << backward;

  Child("back");  // the same command line
  ASSERT_EQ(child_->ReadLine(), "ready");
  ExpectTraining();
  EXPECT_TRUE(lead_->Call("back", "double", {"", {at::ones({1})}}).ok());
  EXPECT_FALSE(step.Backward().ok()) << "it was of the old incarnation";
  EXPECT_EQ(lead_->names(), (std::vector<std::string>{"lead", "middle", "back"}));
}

// Nobody has called it, and nobody does: who waits in a barrier, serves or has left hears of it.
TEST_F(MembersProcessTest, WhoWaitsForAKilledWorkerHearsOfIt) {
  absl::Status barrier, end;
  std::thread waiting([&] { barrier = lead_->Barrier(Deadline::Never()); });
  std::thread serving([&] { end = middle_->Serve(); });
  child_->Signal(SIGKILL);
  waiting.join();
  serving.join();
  for (const absl::Status& status : {barrier, end, lead_->Shutdown()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(Contains(status, "'back' (2) is lost: ")) << status;
    EXPECT_FALSE(Contains(status, "heartbeat")) << status;
  }
  EXPECT_EQ(child_->Wait(), -SIGKILL);
  // It comes back, and is waited for, and so is nobody that is lost.
  Child("back");
  ASSERT_EQ(child_->ReadLine(), "ready");
  ExpectTraining();
}

TEST_F(MembersProcessTest, WhoWaitsForAStoppedWorkerHearsOfItWithinTheHeartbeatLimit) {
  // Whether it is connected with the others when it stops, or not yet, makes no difference.
  child_->Stop();
  absl::Status end;
  std::thread serving([&] { end = middle_->Serve(); });
  const absl::Status left = lead_->Shutdown();
  serving.join();
  for (const absl::Status& status : {left, end}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(Contains(status, "'back' (2) is lost: ")) << status;
  }
  // Where that is asked for the job ends well without it.
  std::thread other([&] { end = middle_->Serve(OnLost::kGoOnWithout); });
  const absl::Status without = lead_->Shutdown(Deadline::Never(), OnLost::kGoOnWithout);
  other.join();
  EXPECT_TRUE(without.ok()) << without;
  EXPECT_TRUE(end.ok()) << end;
}

TEST_F(MembersProcessTest, ACallbackHearsOfAKilledWorkerAndOfItsReturn) {
  struct Told {
    absl::Mutex mu;
    std::vector<MemberEvent> events;
  } told;
  const auto told_of = [&](size_t n) {
    absl::MutexLock lock(&told.mu);
    const auto there = [&] { return told.events.size() >= n; };
    told.mu.Await(absl::Condition(&there));
    return told.events[n - 1];
  };
  const auto tell = [&](const MemberEvent& event) {
    absl::MutexLock lock(&told.mu);
    told.events.push_back(event);
  };
  lead_->OnMember(tell);
  const Incarnation incarnation = lead_->members()[2].incarnation;
  child_->Signal(SIGKILL);
  EXPECT_EQ(child_->Wait(), -SIGKILL);
  const MemberEvent lost = told_of(1);
  EXPECT_EQ(lost.kind, MemberEvent::Kind::kLost);
  EXPECT_EQ(lost.name, "back");
  EXPECT_EQ(lost.rank, 2);
  EXPECT_EQ(lost.incarnation, incarnation);
  EXPECT_TRUE(absl::StrContains(lost.reason, "'back' (2)")) << lost.reason;
  Child("back");
  const MemberEvent joined = told_of(2);
  EXPECT_EQ(joined.kind, MemberEvent::Kind::kJoined);
  EXPECT_EQ(joined.name, "back");
  EXPECT_GT(joined.incarnation, incarnation);
  ASSERT_EQ(child_->ReadLine(), "ready");
  ASSERT_TRUE(lead_->Call("back", "leave", {}).ok());
  EXPECT_EQ(told_of(3).kind, MemberEvent::Kind::kLeft);
  lead_->OnMember(nullptr);
}

TEST_F(MembersProcessTest, AStoppedWorkerWhoseRankIsTakenIsShutOut) {
  ExpectTraining();
  const auto old = std::move(child_);
  old->Stop();
  Child("back");
  ASSERT_EQ(child_->ReadLine(), "ready");
  // Nobody has noticed yet that the old one is silent; the new one's own word is enough.
  Step step = {lead_->NewContext(), at::ones({3}).requires_grad_(), {}};
  const absl::Status updated = lead_->UpdateMembers();
  ASSERT_TRUE(updated.ok()) << updated;
  EXPECT_TRUE(lead_->Call("back", "double", {"", {step.x}}, {.context = &step.context}).ok());
  old->Signal(SIGCONT);
  EXPECT_TRUE(lead_->Call("back", "double", {"", {step.x}}, {.context = &step.context}).ok());
}

TEST_F(MembersProcessTest, AProcessJoinsAndAnotherLeaves) {
  ExpectTraining();
  const auto back = std::move(child_);
  Child("late");
  ASSERT_EQ(child_->ReadLine(), "ready");
  EXPECT_TRUE(middle_->Call("late", "double", {"", {at::ones({1})}}).ok());
  ASSERT_TRUE(lead_->Call("back", "leave", {}).ok());
  EXPECT_EQ(back->Wait(), 0) << back->ReadLine();
  for (Worker* worker : {lead_.get(), middle_.get()}) {
    const absl::Status status = worker->Call("back", "double", {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(Contains(status, "has left the job")) << status;
    EXPECT_TRUE(worker->Call("late", "double", {"", {at::ones({1})}}).ok());
    EXPECT_EQ(worker->names(), (std::vector<std::string>{"lead", "middle", "late"}));
  }
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 4 && argv[1] == std::string("--worker")) return distgrad::Serve(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
