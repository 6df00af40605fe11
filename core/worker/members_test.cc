// Workers that join a running job, leave it and come back; several jobs in one store.
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/log.h"
#include "core/membership/membership.h"
#include "core/membership/store/in_process_store.h"
#include "core/membership/store/signed_store.h"
#include "core/membership/worker_info.h"
#include "core/net/endpoint.h"
#include "core/rpc/frame.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"
#include "gtest/gtest.h"
#include "tests/testing/forwarding_store.h"
#include "tests/testing/free_port.h"
#include "tests/testing/no_threads.h"

namespace distgrad {
namespace {

absl::Time Later() { return absl::Now() + absl::Minutes(1); }

bool Contains(const absl::Status& status, absl::string_view text) {
  return absl::StrContains(status.message(), text);
}

// "worker0", "worker1", ... over one store. Each has "echo", and "double", which can be
// differentiated.
class MembersTest : public testing::TestWithParam<std::string> {
 protected:
  WorkerOptions Options() {
    return {.store = store_, .transport = GetParam(), .network = network_, .thread_count = 2};
  }
  static std::unique_ptr<Worker> New(WorkerOptions options) {
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(std::move(options));
    EXPECT_TRUE(worker.ok()) << worker.status();
    if (!worker.ok()) return nullptr;
    Worker& self = **worker;
    EXPECT_TRUE(
        self.Register("echo",
                      [](Request& r) -> absl::StatusOr<Message> { return std::move(r.message); })
            .ok());
    EXPECT_TRUE(self.Register("double",
                              [](Request& r) -> absl::StatusOr<Message> {
                                return Message{"", {at::mul(r.message.tensors[0], 2)}};
                              })
                    .ok());
    return *std::move(worker);
  }
  std::unique_ptr<Worker> NewRank(int rank, int world_size) {
    WorkerOptions options = Options();
    options.rank = rank;
    options.world_size = world_size;
    return New(std::move(options));
  }
  std::unique_ptr<Worker> Join(std::string name) {
    WorkerOptions options = Options();
    options.name = std::move(name);
    options.join = true;
    return New(std::move(options));
  }
  void Start(int world_size) {
    workers_.resize(world_size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([&, rank] { workers_[rank] = NewRank(rank, world_size); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  Worker& worker(int i) { return *workers_[i]; }

  static absl::Status Echo(Worker& from, const std::string& to) {
    return from.Call(to, "echo", {"hello", {}}).status();
  }
  // Forward and backward by way of another worker.
  static absl::Status Train(Worker& from, const std::string& to) {
    const Context context = from.NewContext();
    const at::Tensor x = at::ones({3}).requires_grad_();
    const auto y = from.Call(to, "double", {"", {x}}, {.context = &context});
    if (!y.ok()) return y.status();
    const absl::Status done = context.Backward({y->tensors[0].sum()});
    if (!done.ok()) return done;
    EXPECT_TRUE(context.Gradient(x)->equal(at::full({3}, 2.0)));
    return done;
  }

  // The same with one who has come back: the connection to the old incarnation may not have ended
  // yet, or is still being tried, and fails one more call.
  static absl::Status TrainWithReturned(Worker& from, const std::string& to) {
    const absl::Time end = Later();
    absl::Status done;
    do {
      done = Train(from, to);
    } while (absl::IsUnavailable(done) && absl::Now() < end);
    return done;
  }

  std::shared_ptr<Store> store_ = NewInProcessStore();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::vector<std::unique_ptr<Worker>> workers_;
};

using Names = std::vector<std::string>;

// Says when somebody has looked for the worker "late" and has not found it.
class LookedForLate final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    absl::StatusOr<std::vector<Value>> values = ForwardingStore::GetEach(keys, deadline);
    for (const auto& key : keys) {
      if (key == "name/late" && !looked_.HasBeenNotified()) looked_.Notify();
    }
    return values;
  }
  void Await() { looked_.WaitForNotification(); }

 private:
  absl::Notification looked_;
};

// The store has not known it, and it has come before the call goes on.
TEST_P(MembersTest, OneWhoComesWhileItIsLookedForIsCalled) {
  const auto store = std::make_shared<LookedForLate>(store_);
  WorkerOptions options = Options();
  options.store = store;
  options.rank = 0;
  options.world_size = 1;
  options.thread_count = 1;
  const std::unique_ptr<Worker> first = New(std::move(options));
  ASSERT_NE(first, nullptr);
  // The only thread of its pool, where the call goes on.
  absl::Notification busy, go_on;
  ASSERT_TRUE(first
                  ->Register("keep_busy",
                             [&](Request&) -> absl::StatusOr<Message> {
                               busy.Notify();
                               go_on.WaitForNotification();
                               return Message{};
                             })
                  .ok());
  const Future<Message> kept = first->CallAsync("worker0", "keep_busy", {});
  busy.WaitForNotification();
  const Future<Message> call = first->CallAsync("late", "echo", {"hello", {}});
  store->Await();
  const std::unique_ptr<Worker> late = Join("late");
  ASSERT_NE(late, nullptr);
  const Future<Message> here = late->CallAsync("worker0", "echo", {});
  while (first->names().size() < 2) std::this_thread::yield();
  go_on.Notify();
  EXPECT_TRUE(kept.Wait().ok());
  EXPECT_TRUE(here.Wait().ok()) << here.Wait().status();
  ASSERT_TRUE(call.Wait().ok()) << call.Wait().status();
  EXPECT_EQ(call.Wait()->payload, "hello");
  EXPECT_TRUE(late->Leave(Later()).ok());
}

TEST_P(MembersTest, OneWhoJoinsIsFoundByItsName) {
  Start(2);
  const absl::Status nobody = Echo(worker(0), "late");
  EXPECT_EQ(nobody.code(), absl::StatusCode::kNotFound) << nobody;
  EXPECT_TRUE(Contains(nobody, "there are: worker0, worker1")) << nobody;
  auto late = Join("late");
  ASSERT_NE(late, nullptr);
  EXPECT_EQ(late->rank(), 2);
  EXPECT_EQ(late->names(), (Names{"worker0", "worker1", "late"}));
  EXPECT_TRUE(Train(worker(0), "late").ok());
  EXPECT_TRUE(Train(*late, "worker1").ok());
  EXPECT_EQ(worker(0).names(), late->names());
  EXPECT_EQ(worker(1).world_size(), 3) << "the new one has called it";

  workers_.push_back(std::move(late));
  std::vector<std::thread> threads;
  for (auto& w : workers_) {
    threads.emplace_back([&w] { EXPECT_TRUE(w->Barrier(Later()).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(MembersTest, OneWhoLeavesFinishesWhatIsInFlight) {
  Start(3);
  absl::Notification arrived, release;
  ASSERT_TRUE(worker(1)
                  .Register("wait",
                            [&](Request&) -> absl::StatusOr<Message> {
                              arrived.Notify();
                              release.WaitForNotification();
                              return Message{"done", {}};
                            })
                  .ok());
  Context context = worker(0).NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  const auto y = worker(0).Call("worker1", "double", {"", {x}}, {.context = &context});
  ASSERT_TRUE(y.ok()) << y.status();
  auto waiting = worker(0).CallAsync("worker1", "wait", {});
  arrived.WaitForNotification();

  EXPECT_EQ(worker(1).Leave(absl::Now()).code(), absl::StatusCode::kDeadlineExceeded);
  const absl::Status refused = Echo(worker(0), "worker1");
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_TRUE(Contains(refused, "'worker1' (1): it is leaving the job")) << refused;
  const absl::Status unknown = Echo(worker(2), "worker1");
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnavailable) << unknown;
  // The latter if its worker has been connected since: members watch each other.
  EXPECT_TRUE(Contains(unknown, "has left the job") || Contains(unknown, "it is leaving the job"))
      << unknown;
  // So is each call of a new context, though the edge of the first one has to be kept.
  {
    Context late = worker(0).NewContext();
    const at::Tensor z = at::ones({3}).requires_grad_();
    for (int i = 0; i < 2; ++i) {
      const auto call = worker(0).Call("worker1", "double", {"", {z}}, {.context = &late});
      EXPECT_TRUE(Contains(call.status(), "it is leaving the job")) << "call " << i;
    }
  }
  // What belongs to a context that it takes part in goes on.
  EXPECT_TRUE(worker(0).Call("worker1", "echo", {"", {}}, {.context = &context}).ok());
  EXPECT_TRUE(context.Backward({y->tensors[0].sum()}).ok());
  EXPECT_TRUE(context.Gradient(x)->equal(at::full({3}, 2.0)));
  release.Notify();
  EXPECT_EQ(waiting.Take()->payload, "done");
  EXPECT_EQ(worker(1).Leave(Later()).code(), absl::StatusCode::kFailedPrecondition);

  workers_[1].reset();
  context.Release();
  EXPECT_EQ(worker(0).names(), (Names{"worker0", "worker2"}));
  EXPECT_EQ(worker(0).members()[1].rank, 2);
  EXPECT_EQ(worker(0).Describe(1), "'worker1' (1)") << "it has left";
  EXPECT_EQ(worker(0).Describe(7), "7");
  // What they agree on besides.
  ASSERT_TRUE(worker(0).store()->Set("test/key", "seen", Later()).ok());
  const absl::StatusOr<std::string> seen = worker(2).store()->Get("test/key", Later());
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(*seen, "seen");
  EXPECT_TRUE(Contains(Echo(worker(0), "worker1"), "has left the job"));
  EXPECT_TRUE(Train(worker(0), "worker2").ok());
  // It may come back.
  workers_[1] = NewRank(1, 3);
  EXPECT_EQ(TrainWithReturned(worker(0), "worker1"), absl::OkStatus());
}

TEST_P(MembersTest, LeavingWaitsForContextsToEnd) {
  Start(2);
  Context context = worker(0).NewContext();
  ASSERT_TRUE(worker(0).Call("worker1", "echo", {"", {}}, {.context = &context}).ok());
  const absl::Status early = worker(1).Leave(absl::Now());
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  // The call may still count: its answer is here before all of it is put away.
  EXPECT_TRUE(Contains(early, "0 calls of its own, 1 contexts")) << early;
  absl::Status left = absl::UnknownError("not run");
  std::thread leaving([&] { left = worker(0).Leave(Later()); });
  context.Release();
  leaving.join();
  EXPECT_TRUE(left.ok()) << left;
}

TEST_P(MembersTest, LeavingDoesNotWaitForContextsWhoseCallsItHasRefused) {
  Start(2);
  Context taken = worker(0).NewContext();
  ASSERT_TRUE(worker(0).Call("worker1", "echo", {"", {}}, {.context = &taken}).ok());
  absl::Status left = absl::UnknownError("not run");
  std::thread leaving([&] { left = worker(1).Leave(Later()); });
  const at::Tensor x = at::ones({3}).requires_grad_();
  Context refused;
  absl::Status call;
  do {
    refused = worker(0).NewContext();
    call = worker(0).Call("worker1", "double", {"", {x}}, {.context = &refused}).status();
  } while (call.ok());
  EXPECT_TRUE(Contains(call, "it is leaving the job")) << call;
  taken.Release();
  leaving.join();
  EXPECT_TRUE(left.ok()) << left;
}

TEST_P(MembersTest, AHandlerCannotLeave) {
  Start(1);
  Worker& self = worker(0);
  const std::map<std::string, std::function<absl::Status()>> ends = {
      {"shut down", [&] { return self.Shutdown(); }},
      {"serve", [&] { return self.Serve(); }},
      {"leave", [&] { return self.Leave(Deadline::Never()); }}};
  for (const auto& [name, end] : ends) {
    ASSERT_TRUE(
        self.Register(name, [end = end](Request&) -> absl::StatusOr<Message> { return end(); })
            .ok());
    const absl::Status status = self.Call("worker0", name, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(Contains(status, "in a handler")) << status;
  }
  EXPECT_TRUE(Echo(self, "worker0").ok());
  EXPECT_TRUE(self.Shutdown().ok());
}

// A store whose answers wait, while its door is closed. Thread-safe.
class SlowStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  void CloseDoor() {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  void OpenDoor() {
    absl::MutexLock lock(&mu_);
    closed_ = false;
  }

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(
          +[](bool* closed) { return !*closed; }, &closed_));
    }
    return ForwardingStore::GetEach(keys, deadline);
  }

 private:
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

TEST_P(MembersTest, AMessageToANewcomerIsWhatItWasWhenItWasSent) {
  const auto store = store_;
  const auto slow = std::make_shared<SlowStore>(store);
  store_ = slow;
  Start(1);
  // Before it joins, for it says hello at once, and who reads that asks the store who it is.
  slow->CloseDoor();
  store_ = store;
  const auto late = Join("late");
  ASSERT_NE(late, nullptr);
  Context context = worker(0).NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  at::Tensor h = at::mul(x, 3), leaf = at::ones({3});
  Future<Message> call = worker(0).CallAsync("late", "double", {"", {h}}, {.context = &context});
  Future<Message> unrecorded =
      worker(0).CallAsync("late", "double", {"", {leaf}}, {.context = &context});
  h.mul_(2);
  leaf.requires_grad_();
  slow->OpenDoor();
  const absl::StatusOr<Message> y = call.Take();
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_TRUE(y->tensors[0].equal(at::full({3}, 6.0)));
  EXPECT_FALSE(unrecorded.Take()->tensors[0].requires_grad());
  const absl::Status done = context.Backward({y->tensors[0].sum()});
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_TRUE(context.Gradient(x)->equal(at::full({3}, 6.0))) << *context.Gradient(x);
}

TEST_P(MembersTest, ACallToANewcomerCanBeCancelledBeforeItIsFound) {
  const auto store = store_;
  const auto slow = std::make_shared<SlowStore>(store);
  store_ = slow;
  Start(1);
  // Before it joins, for it says hello at once, and who reads that asks the store who it is.
  slow->CloseDoor();
  store_ = store;
  const auto late = Join("late");
  ASSERT_NE(late, nullptr);
  const Future<Message> first = worker(0).CallAsync("late", "echo", {});
  const auto cancellation = std::make_shared<Cancellation>();
  const Future<Message> second =
      worker(0).CallAsync("late", "echo", {}, {.cancellation = cancellation});
  first.Cancel();
  cancellation->Cancel(absl::CancelledError("no longer wanted"));
  for (const Future<Message>& call : {first, second}) {
    EXPECT_TRUE(call.Done());
    EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kCancelled);
  }
  slow->OpenDoor();
  EXPECT_TRUE(Echo(worker(0), "late").ok());
  for (const CallStats& stats : late->Metrics().calls) {
    if (stats.function == "echo") {
      EXPECT_EQ(stats.calls, 1u);
    }
  }
}

// Its peer never heard of the edge of such a call.
TEST_P(MembersTest, ACallThatNeverLeftLeavesNothingWaitingInItsContext) {
  const auto slow = std::make_shared<SlowStore>(store_);
  store_ = slow;
  Start(2);
  slow->CloseDoor();
  Context context = worker(0).NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  const absl::Status late =
      worker(0)
          .Call("worker1", "double", {"", {at::mul(x, 3)}},
                {.context = &context, .deadline = absl::Now() + absl::Milliseconds(50)})
          .status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  slow->OpenDoor();
  const auto y = worker(0).Call("worker1", "double", {"", {x}}, {.context = &context});
  ASSERT_TRUE(y.ok()) << y.status();
  const absl::Status done = context.Backward({y->tensors[0].sum()});
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_TRUE(context.Gradient(x)->equal(at::full({3}, 2.0)));
}

TEST_P(MembersTest, CloseEndsWhateverWaits) {
  Start(3);
  const auto release = std::make_shared<absl::Notification>();  // the handler may begin late
  ASSERT_TRUE(worker(2)
                  .Register("wait",
                            [release](Request&) -> absl::StatusOr<Message> {
                              release->WaitForNotification();
                              return Message{};
                            })
                  .ok());
  const CallOptions for_ever{.deadline = absl::InfiniteFuture()};
  Context context = worker(1).NewContext();  // or it could leave
  absl::Status barrier, end, alone, call;
  std::thread threads[] = {
      std::thread([&] { barrier = worker(0).Barrier(absl::InfiniteFuture()); }),
      std::thread([&] { end = worker(0).Shutdown(absl::InfiniteFuture()); }),
      std::thread([&] { alone = worker(1).Leave(absl::InfiniteFuture()); }),
      std::thread([&] { call = worker(0).Call("worker2", "wait", {}, for_ever).status(); }),
  };
  EXPECT_TRUE(store_->Get("at/0", Later()).ok());
  EXPECT_TRUE(store_->Get("shutdown/0", Later()).ok());
  while (!absl::IsUnavailable(Echo(worker(2), "worker1"))) continue;
  worker(0).Abort();
  worker(1).Abort();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : {barrier, end, alone, call}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  }
  EXPECT_EQ(Echo(worker(0), "worker2").code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(worker(1).Barrier(absl::InfiniteFuture()).code(), absl::StatusCode::kCancelled);
  const at::Tensor x = at::ones({3}).requires_grad_();
  EXPECT_EQ(context.Backward({x.sum()}).code(), absl::StatusCode::kCancelled);
  release->Notify();
}

TEST_P(MembersTest, AWorkerThatDiedComesBackUnderItsName) {
  Start(3);
  EXPECT_TRUE(Train(worker(0), "worker1").ok());
  Context old = worker(0).NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  const auto y = worker(0).Call("worker1", "double", {"", {x}}, {.context = &old});
  ASSERT_TRUE(y.ok()) << y.status();
  const Incarnation incarnation = worker(0).members()[1].incarnation;
  workers_[1].reset();
  const absl::Status gone = Echo(worker(0), "worker1");
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable) << gone;
  EXPECT_TRUE(Contains(gone, "'worker1' (1)")) << gone;

  workers_[1] = NewRank(1, 3);
  ASSERT_NE(workers_[1], nullptr);
  EXPECT_EQ(workers_[1]->members()[1].name, "worker1");
  EXPECT_GT(workers_[1]->members()[1].incarnation, incarnation);
  EXPECT_EQ(TrainWithReturned(worker(0), "worker1"), absl::OkStatus());
  EXPECT_EQ(worker(0).members()[1].incarnation, workers_[1]->members()[1].incarnation);
  EXPECT_TRUE(Train(worker(2), "worker1").ok()) << "had never met the old one";
  // Contexts, edges and passes of the new incarnation have numbers of their own.
  EXPECT_TRUE(Train(worker(1), "worker0").ok());
  EXPECT_TRUE(Train(worker(1), "worker2").ok());
  // What the old incarnation took part in is over.
  const absl::Status backward = old.Backward({y->tensors[0].sum()});
  EXPECT_EQ(backward.code(), absl::StatusCode::kUnavailable) << backward;
  EXPECT_TRUE(Contains(backward, "'worker1' (1)")) << backward;
}

// The worker that calls it has not met its former incarnation, which another one has involved.
TEST_P(MembersTest, AContextThatIsOlderThanAWorkersReturnReachesItNoMore) {
  Start(3);
  Worker& middle = worker(1);
  ASSERT_TRUE(middle
                  .Register("pass_on",
                            [&middle](Request& r) {
                              return middle.Call("worker2", "double", r.message,
                                                 {.context = &r.context});
                            })
                  .ok());
  const Context old = worker(0).NewContext(), untouched = worker(0).NewContext();
  Context others = worker(1).NewContext();
  const at::Tensor x = at::ones({3}).requires_grad_();
  const auto y = worker(0).Call("worker1", "pass_on", {"", {x}}, {.context = &old});
  ASSERT_TRUE(y.ok()) << y.status();
  workers_[2].reset();
  workers_[2] = NewRank(2, 3);
  ASSERT_NE(workers_[2], nullptr);
  for (const Context* context : {&old, &untouched}) {
    const absl::Status late =
        worker(0).Call("worker2", "double", {"", {x}}, {.context = context}).status();
    EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable) << late;
    EXPECT_TRUE(Contains(late, "'worker2' (2)")) << late;
    EXPECT_TRUE(Contains(late, "before worker 2 came back")) << late;
  }
  const absl::Status late =
      worker(1).Call("worker2", "double", {"", {x}}, {.context = &others}).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable) << late;
  // The next one reaches it, from either.
  EXPECT_EQ(Train(worker(0), "worker2"), absl::OkStatus());
  EXPECT_EQ(Train(worker(1), "worker2"), absl::OkStatus());
  EXPECT_EQ(Train(worker(2), "worker0"), absl::OkStatus());
}

// Loses the questions of a worker that has come back, to one or to all, or refuses them; and counts
// them. Thread-safe.
class LosesQuestions final : public FaultInjector {
 public:
  Action OnSend(const std::string&, const std::string& to, Packet& packet) override {
    if (!absl::StrContains(packet.bytes, "distgrad.context.last")) return Action::kDeliver;
    absl::MutexLock lock(&mu_);
    ++asked_;
    if (!is_on_ || (!to_.empty() && to_ != to)) return Action::kDeliver;
    return left_-- > 0 ? Action::kDeliver : action_;
  }
  // After so many that are delivered.
  void Begin(std::string to, Action action = Action::kDrop, int after = 0) {
    absl::MutexLock lock(&mu_);
    is_on_ = true;
    to_ = std::move(to);
    action_ = action;
    left_ = after;
  }
  void End() {
    absl::MutexLock lock(&mu_);
    is_on_ = false;
  }
  int asked() const {
    absl::MutexLock lock(&mu_);
    return asked_;
  }

 private:
  mutable absl::Mutex mu_;
  int asked_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_on_ ABSL_GUARDED_BY(mu_) = false;
  Action action_ ABSL_GUARDED_BY(mu_) = Action::kDrop;
  int left_ ABSL_GUARDED_BY(mu_) = 0;    // before the first that is lost
  std::string to_ ABSL_GUARDED_BY(mu_);  // "": to all
};

// What was logged. Thread-safe.
class Warnings {
 public:
  void Add(absl::string_view text) {
    absl::MutexLock lock(&mu_);
    texts_.emplace_back(text);
  }
  int CountThoseWith(absl::string_view part, absl::string_view other) const {
    absl::MutexLock lock(&mu_);
    return static_cast<int>(std::count_if(texts_.begin(), texts_.end(), [&](const auto& text) {
      return absl::StrContains(text, part) && absl::StrContains(text, other);
    }));
  }

 private:
  mutable absl::Mutex mu_;
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mu_);
};

// "worker1" comes back, and does not hear from all others at once.
class ReturnTest : public testing::Test {
 protected:
  WorkerOptions Options(int rank) const {
    return {.store = store_,
            .rank = rank,
            .world_size = world_size_,
            .transport = "inproc",
            .network = network_,
            .heartbeat_limit = absl::Seconds(1)};
  }
  void Create(WorkerOptions options) {
    const int rank = options.rank;
    auto worker = Worker::Create(std::move(options));
    ASSERT_TRUE(worker.ok()) << worker.status();
    workers_[rank] = *std::move(worker);
  }
  void Start(int world_size) {
    world_size_ = world_size;
    workers_.resize(world_size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([this, rank] { Create(Options(rank)); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::string AddressOf(int rank) const {
    const auto entry = store_->Get(absl::StrCat("worker/", rank), Later());
    return DecodeWorkerInfo(*entry, static_cast<WorkerRank>(rank))->address;
  }
  absl::Status CallInContext(const Context& context) {
    const at::Tensor x = at::ones({3}).requires_grad_();
    return workers_[0]->CallOp("worker1", "aten::neg", {x}, {.context = &context}).status();
  }
  absl::Status CallInNewContext() { return CallInContext(workers_[0]->NewContext()); }
  // Calls worker 1, each time in another context, until that is served.
  absl::Status CallUntilServed(absl::Duration limit = absl::Seconds(40)) {
    const absl::Time end = absl::Now() + limit;
    absl::Status status;
    do {
      status = CallInNewContext();
    } while (absl::IsUnavailable(status) && absl::Now() < end);
    return status;
  }

  // Has worker 2 call worker 1 in it until that says that it is older.
  void ExpectTooOld(const Context& context) {
    const at::Tensor x = at::ones({3}).requires_grad_();
    const absl::Time end = absl::Now() + absl::Seconds(40);
    absl::Status status;
    do {  // its first connection may be refused
      status = workers_[2]->CallOp("worker1", "aten::neg", {x}, {.context = &context}).status();
    } while (absl::IsUnavailable(status) && !Contains(status, "began before worker 1 came back") &&
             absl::Now() < end);
    EXPECT_TRUE(Contains(status, "began before worker 1 came back")) << status;
  }

  const std::shared_ptr<LosesQuestions> faults_ = std::make_shared<LosesQuestions>();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>(faults_);
  const std::shared_ptr<Store> store_ = NewInProcessStore();
  int world_size_ = 0;
  std::vector<std::unique_ptr<Worker>> workers_;
};

TEST_F(ReturnTest, AMemberThatHasNotSaidWhichContextsAreOlderIsAskedAgain) {
  Start(2);
  const Context old = workers_[0]->NewContext();
  workers_[1].reset();
  faults_->Begin(/*to=*/"");
  Create(Options(1));
  // It has not been told up to where; so it refuses a new one, too, and asks.
  absl::Status status = CallInNewContext();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  faults_->End();
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
  status = CallInContext(old);
  EXPECT_TRUE(absl::IsUnavailable(status) && Contains(status, "came back")) << status;
}

// Contexts may come, and be refused, much faster than members and the store are to be asked: while
// not all have answered, and when all but the maker have.
TEST_F(ReturnTest, ItAsksAgainTenTimesASecondAtMost) {
  Start(3);
  for (const bool is_through : {false, true}) {
    SCOPED_TRACE(is_through);
    faults_->Begin(/*to=*/AddressOf(0), FaultInjector::Action::kRefuse,
                   /*after=*/is_through ? 1 : 0);
    workers_[1].reset();
    Create(Options(1));
    const int before = faults_->asked();
    const absl::Time begin = absl::Now();
    while (absl::Now() < begin + absl::Milliseconds(300)) {
      EXPECT_TRUE(absl::IsUnavailable(CallInNewContext()));
    }
    EXPECT_LE(faults_->asked() - before, (absl::Now() - begin) / absl::Milliseconds(100) + 2);
    faults_->End();
    EXPECT_EQ(CallUntilServed(), absl::OkStatus());
  }
}

// Worker 2 may still have what it had with the former worker 1, and involve it in any context,
// whoever has made that: so none is safe until it has answered, as the maker's next ones are.
TEST_F(ReturnTest, NoContextIsServedBeforeAllHaveDroppedTheFormerIncarnation) {
  const auto warnings = std::make_shared<Warnings>();
  SetLogSink([warnings](LogSeverity, absl::string_view text) { warnings->Add(text); });
  Start(3);
  faults_->Begin(/*to=*/AddressOf(2));
  workers_[1].reset();
  std::atomic<bool> is_back{false};
  std::thread back([&] {
    Create(Options(1));
    is_back = true;
  });
  int served = 0, calls = 0;
  for (int since = 0; since < 20; since += is_back ? 1 : 0) {
    ++calls;
    served += CallInNewContext().ok() ? 1 : 0;
  }
  back.join();
  EXPECT_EQ(served, 0) << "of " << calls;
  // It may name another one before, which has not answered yet.
  EXPECT_EQ(warnings->CountThoseWith(
                "worker 'worker1' (1) has come back, and refuses all contexts of other workers "
                "until they have answered: ",
                "call of 'distgrad.context.last' on worker 'worker2' (2): "),
            1);
  SetLogSink(nullptr);
  faults_->End();
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
}

// Worker 2 says it in the store.
TEST_F(ReturnTest, OneThatIsLostKeepsNoContextsRefused) {
  Start(4);
  workers_[3].reset();
  workers_[1].reset();
  Create(Options(1));
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
}

// It has joined, and was gone before anybody had met it: no member watches it.
TEST_F(ReturnTest, OneThatNobodyHasMetKeepsNoContextsRefused) {
  Start(3);
  Membership ghost(store_, {.name = "ghost", .join = true});
  absl::StatusOr<WorkerInfo> info = ghost.Claim(Later());
  ASSERT_TRUE(info.ok()) << info.status();
  info->address = "inproc://nowhere";
  ASSERT_TRUE(ghost.Enter(*info, Later()).ok());
  workers_[1].reset();
  Create(Options(1));
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
}

// What an incarnation that is over has written late says nothing of the one that is there.
TEST_F(ReturnTest, AnEntryOfAnEarlierIncarnationExcusesNobody) {
  Start(3);
  WorkerInfo earlier = *DecodeWorkerInfo(*store_->Get("worker/2", Later()), 2);
  workers_[2].reset();
  Create(Options(2));
  faults_->Begin(/*to=*/AddressOf(2));
  workers_[1].reset();
  Create(Options(1));
  earlier.left = true;
  ASSERT_TRUE(store_->Set("worker/2", EncodeWorkerInfo(earlier), Later()).ok());
  EXPECT_TRUE(absl::IsUnavailable(CallUntilServed(absl::Seconds(3))));
  faults_->End();
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
}

// That entry's worker puts it right later, and goes on with a context that it had begun before.
TEST_F(ReturnTest, AnEntryOfAnEarlierIncarnationHidesNoContextThatIsOlder) {
  Start(3);
  WorkerInfo earlier = *DecodeWorkerInfo(*store_->Get("worker/2", Later()), 2);
  workers_[2].reset();
  Create(Options(2));
  const std::string right = *store_->Get("worker/2", Later());
  const Context old = workers_[2]->NewContext();
  workers_[1].reset();
  earlier.left = true;
  ASSERT_TRUE(store_->Set("worker/2", EncodeWorkerInfo(earlier), Later()).ok());
  Create(Options(1));
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
  ASSERT_TRUE(store_->Set("worker/2", right, Later()).ok());
  ExpectTooOld(old);
}

// The process of that incarnation lives, and answers, though it is over.
TEST_F(ReturnTest, AnAnswerOfAnEarlierIncarnationHidesNoContextThatIsOlder) {
  Start(3);
  const std::string earlier = *store_->Get("worker/2", Later());
  const std::unique_ptr<Worker> over = std::exchange(workers_[2], nullptr);
  Create(Options(2));
  const std::string right = *store_->Get("worker/2", Later());
  const Context old = workers_[2]->NewContext();
  workers_[1].reset();
  ASSERT_TRUE(store_->Set("worker/2", earlier, Later()).ok());
  Create(Options(1));
  ASSERT_TRUE(store_->Set("worker/2", right, Later()).ok());
  ExpectTooOld(old);
}

// Nobody signs it.
TEST_F(ReturnTest, ACounterOfStartsThatIsNoNumberKeepsNobodyOut) {
  Start(2);
  workers_[1].reset();
  ASSERT_TRUE(store_->Set("worker/0/incarnations", "x", Later()).ok());
  Create(Options(1));
  EXPECT_EQ(CallUntilServed(absl::Seconds(10)), absl::OkStatus());
}

// As by one that has the wrong name.
TEST_F(ReturnTest, AStartThatWasRefusedHasNoContextOfTheLivingRefused) {
  Start(2);
  // Any thread may stand still for longer than an answer is waited for: the next round is another.
  absl::Status status;
  for (int round = 0; round < 3; ++round) {
    workers_[1].reset();
    Membership wrong(store_, {.name = "another", .rank = 0, .world_size = 2});
    EXPECT_EQ(wrong.Claim(Later()).status().code(), absl::StatusCode::kAlreadyExists);
    Create(Options(1));
    status = CallInNewContext();
    if (status.ok()) break;
  }
  EXPECT_EQ(status, absl::OkStatus());
}

TEST_F(ReturnTest, OneThatLeavesKeepsNoContextsRefused) {
  Start(3);
  faults_->Begin(/*to=*/AddressOf(2));
  workers_[1].reset();
  Create(Options(1));
  EXPECT_FALSE(CallInNewContext().ok());
  EXPECT_EQ(workers_[2]->Leave(Later()), absl::OkStatus());
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
}

// It takes part in its own contexts as long as they last, and in no others that are new.
TEST_F(ReturnTest, OneThatLeavesSaysWhichOfItsContextsAreOlder) {
  Start(2);
  Context kept = workers_[0]->NewContext();
  workers_[1].reset();
  absl::Status left = absl::UnknownError("not run");
  std::thread leaving([&] { left = workers_[0]->Leave(Later()); });
  while (!DecodeWorkerInfo(*store_->Get("worker/0", Later()), 0)->left) std::this_thread::yield();
  Create(Options(1));
  EXPECT_EQ(CallUntilServed(), absl::OkStatus());
  const absl::Status old = CallInContext(kept);
  EXPECT_TRUE(Contains(old, "began before worker 1 came back")) << old;
  kept.Release();
  leaving.join();
  EXPECT_EQ(left, absl::OkStatus());
}

TEST_F(ReturnTest, ItsQuestionsKeepItNeitherFromStartingInTimeNorFromLeaving) {
  Start(2);
  workers_[1].reset();
  faults_->Begin(/*to=*/"");
  // The machine may have something else to do; a question lasts for five seconds each time.
  constexpr absl::Duration kInTime = absl::Milliseconds(4500);
  absl::Duration took = absl::InfiniteDuration();
  for (int tries = 0; tries < 3 && took >= kInTime; ++tries) {
    workers_[1].reset();
    WorkerOptions options = Options(1);
    options.heartbeat_limit = absl::Seconds(20);
    options.join_timeout = absl::Seconds(2);
    const absl::Time begin = absl::Now();
    Create(std::move(options));
    took = absl::Now() - begin;
  }
  EXPECT_LT(took, kInTime);
  EXPECT_TRUE(absl::IsUnavailable(CallInNewContext())) << "which has it ask again";
  EXPECT_EQ(workers_[1]->Leave(absl::Now() + absl::Seconds(4)), absl::OkStatus());
}

// ------------------------------------------------------------------------ The end of a job

TEST_P(MembersTest, WhoServesAnswersWhatIsInFlightBeforeItEnds) {
  Start(3);
  const auto arrived = std::make_shared<absl::Notification>();
  const auto release = std::make_shared<absl::Notification>();
  ASSERT_TRUE(worker(1)
                  .Register("relay",
                            [&, arrived, release](Request& r) -> absl::StatusOr<Message> {
                              arrived->Notify();
                              release->WaitForNotification();
                              // By way of one who is at the end itself.
                              return worker(1).Call("worker2", "echo", std::move(r.message),
                                                    r.Nested());
                            })
                  .ok());
  const Future<Message> call =
      worker(0).CallAsync("worker1", "relay", {"hello", {}}, {.deadline = Later()});
  arrived->WaitForNotification();
  std::atomic<int> ended{0};
  absl::Status statuses[3];
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      statuses[i] = i == 0 ? worker(i).Shutdown() : worker(i).Serve();
      ++ended;
    });
  }
  EXPECT_TRUE(store_->Get("shutdown/open", Later()).ok());  // all are at the end
  EXPECT_FALSE(call.Done());
  EXPECT_EQ(ended, 0);
  release->Notify();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(call.Done());
  const absl::StatusOr<Message> reply = call.Wait();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, "hello");
}

TEST_P(MembersTest, WhoServesWaitsForOneThatJoinsLateAndForNoneThatLeaves) {
  Start(2);
  auto late = Join("late");
  ASSERT_NE(late, nullptr);
  std::thread serving([&] { EXPECT_TRUE(worker(1).Serve().ok()); });
  EXPECT_TRUE(Echo(*late, "worker1").ok());
  std::thread leaving([&] { EXPECT_TRUE(worker(0).Shutdown().ok()); });
  EXPECT_TRUE(store_->Get("shutdown/0", Later()).ok());
  EXPECT_TRUE(Echo(*late, "worker1").ok()) << "it serves while one is at work";
  EXPECT_TRUE(late->Leave(Later()).ok());
  late.reset();
  serving.join();
  leaving.join();
}

// Nobody has called it, and nobody does.
TEST_P(MembersTest, TheDeathOfAMemberEndsWhatWaitsForIt) {
  Start(4);
  absl::Status statuses[3];
  std::vector<std::thread> threads;
  threads.emplace_back([&] { statuses[0] = worker(0).Shutdown(); });
  threads.emplace_back([&] { statuses[1] = worker(1).Barrier(Deadline::Never()); });
  threads.emplace_back([&] { statuses[2] = worker(2).Serve(); });
  EXPECT_TRUE(store_->Get("shutdown/2", Later()).ok());
  workers_[3].reset();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(Contains(status, "waiting for all workers")) << status;
    EXPECT_TRUE(Contains(status, "'worker3' (3) is lost: ")) << status;
  }
}

TEST_P(MembersTest, OneThatIsLostIsNotOnThisMachine) {
  Start(2);
  EXPECT_EQ(worker(0).MembersOnThisMachine().size(), 2u);
  workers_[1].reset();
  const absl::Time end = Later();
  while (worker(0).MembersOnThisMachine().size() > 1 && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  const std::vector<Member> here = worker(0).MembersOnThisMachine();
  ASSERT_EQ(here.size(), 1u);
  EXPECT_EQ(here[0].name, "worker0");
  EXPECT_EQ(worker(0).world_size(), 2) << "it may come back";
}

// It has an entry in the store, and was gone before anybody heard of it.
TEST_P(MembersTest, AMemberThatNobodyHasMetIsMissed) {
  Start(1);
  Membership ghost(store_, {.name = "ghost", .join = true});
  absl::StatusOr<WorkerInfo> info = ghost.Claim(Later());
  ASSERT_TRUE(info.ok()) << info.status();
  info->address = "nowhere";
  ASSERT_TRUE(ghost.Enter(*info, Later()).ok());
  const absl::Status status = worker(0).Serve();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "'ghost' (1) is lost: ")) << status;
}

TEST_P(MembersTest, AJobGoesOnWithoutALostMemberWhereThatIsAskedFor) {
  Start(3);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const absl::Status all = worker(i).Barrier(Deadline::Never(), OnLost::kGoOnWithout);
      EXPECT_TRUE(all.ok()) << all;
      const absl::Status end = i == 0 ? worker(i).Shutdown(Deadline::Never(), OnLost::kGoOnWithout)
                                      : worker(i).Serve(OnLost::kGoOnWithout);
      EXPECT_TRUE(end.ok()) << end;
    });
  }
  workers_[2].reset();
  for (std::thread& thread : threads) thread.join();
}

// ------------------------------------------------------------------------------- Callbacks

// What it was told, as "lost worker1". Thread-safe.
class Told {
 public:
  std::function<void(const MemberEvent&)> Callback() {
    return [this](const MemberEvent& event) {
      const char* const kinds[] = {"?", "joined ", "left ", "lost "};
      absl::MutexLock lock(&mu_);
      EXPECT_EQ(event.kind == MemberEvent::Kind::kLost, !event.reason.empty()) << event.reason;
      EXPECT_NE(event.incarnation, 0u);
      events_.push_back(absl::StrCat(kinds[static_cast<int>(event.kind)], event.name));
    };
  }
  // The first `n`.
  std::vector<std::string> Await(size_t n) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return events_.size() >= n;
    };
    mu_.Await(absl::Condition(&there));
    return events_;
  }

 private:
  absl::Mutex mu_;
  std::vector<std::string> events_ ABSL_GUARDED_BY(mu_);
};

TEST_P(MembersTest, ACallbackHearsWhatHappensToMembersThatItNeverMet) {
  Told told, told_late;
  Start(3);
  worker(0).OnMember(told.Callback());
  auto late = Join("late");
  ASSERT_NE(late, nullptr);
  EXPECT_EQ(told.Await(1), Names({"joined late"}));
  late->OnMember(told_late.Callback());
  EXPECT_TRUE(late->Leave(Later()).ok());
  late.reset();
  EXPECT_EQ(told.Await(2)[1], "left late");
  late = Join("late");
  EXPECT_EQ(told.Await(3)[2], "joined late");
  late.reset();  // without a word
  EXPECT_EQ(told.Await(4)[3], "lost late");
  workers_[2].reset();
  EXPECT_EQ(told.Await(5)[4], "lost worker2");
  workers_[2] = NewRank(2, 3);
  EXPECT_EQ(told.Await(6)[5], "joined worker2");
  workers_[0].reset();
  EXPECT_EQ(told.Await(6).size(), 6u);
}

TEST_P(MembersTest, ACallbackThatIsTakenOffIsCalledNoMore) {
  Start(1);
  absl::Notification entered, leave, off;
  std::atomic<int> calls{0};
  worker(0).OnMember([&](const MemberEvent&) {
    ++calls;
    entered.Notify();
    leave.WaitForNotification();
  });
  const auto late = Join("late");
  entered.WaitForNotification();
  std::thread remover([&] {
    worker(0).OnMember(nullptr);
    EXPECT_TRUE(leave.HasBeenNotified()) << "it waits for the callback";
    off.Notify();
  });
  EXPECT_FALSE(off.HasBeenNotified());
  leave.Notify();
  remover.join();
  const auto later = Join("later");
  EXPECT_TRUE(worker(0).UpdateMembers().ok());
  Told told;
  worker(0).OnMember(told.Callback());
  const auto last = Join("last");
  EXPECT_EQ(told.Await(1), Names({"joined last"})) << "what was before is not for the new one";
  EXPECT_EQ(calls, 1);
  worker(0).OnMember(nullptr);  // before `told` ends
}

// Nor one that has been replaced before, in itself, and runs still.
TEST_P(MembersTest, ACallbackThatReplacesItselfIsWaitedFor) {
  Start(1);
  absl::Notification entered, leave, removing;
  worker(0).OnMember([&](const MemberEvent&) {
    worker(0).OnMember([](const MemberEvent&) {});
    entered.Notify();
    leave.WaitForNotification();
  });
  const auto late = Join("late");
  entered.WaitForNotification();
  std::thread remover([&] {
    removing.Notify();
    worker(0).OnMember(nullptr);
    EXPECT_TRUE(leave.HasBeenNotified()) << "it waits for the callback";
  });
  removing.WaitForNotification();
  leave.Notify();
  remover.join();
}

TEST_P(MembersTest, ACallbackMayWaitCallAndTakeItselfOff) {
  Start(1);
  absl::Notification done;
  absl::Status called;
  worker(0).OnMember([&](const MemberEvent& event) {
    called = Echo(worker(0), event.name);
    worker(0).OnMember(nullptr);
    worker(0).Abort();
    done.Notify();
    throw std::runtime_error("is logged");
  });
  const auto late = Join("late");
  done.WaitForNotification();
  // It may have been called before the function was registered there.
  EXPECT_TRUE(called.ok() || absl::IsNotFound(called)) << called;
}

TEST_P(MembersTest, TheEndOfAWorkerWaitsForItsCallback) {
  Start(1);
  absl::Notification entered;
  std::atomic<bool> returned{false};
  Worker& self = worker(0);  // not found there any more while it ends
  self.OnMember([&](const MemberEvent&) {
    entered.Notify();
    // Ends when Close() fails it.
    EXPECT_FALSE(self.Barrier(Deadline::Never()).ok());
    returned = true;
  });
  const auto late = Join("late");
  entered.WaitForNotification();
  workers_[0].reset();
  EXPECT_TRUE(returned);
}

TEST_P(MembersTest, AJobIsApartFromAnotherInTheSameStore) {
  std::vector<std::unique_ptr<Worker>> red(2), blue(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    for (auto* job : {&red, &blue}) {
      threads.emplace_back([this, job, rank, &red] {
        WorkerOptions options = Options();
        options.job = job == &red ? "red" : "blue";
        options.rank = rank;
        options.world_size = 2;
        (*job)[rank] = New(std::move(options));
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (auto* job : {&red, &blue}) {
    const std::string color = job == &red ? "red" : "blue";
    ASSERT_TRUE((*job)[1]
                    ->Register("job",
                               [color](Request&) -> absl::StatusOr<Message> {
                                 return Message{color, {}};
                               })
                    .ok());
  }
  EXPECT_EQ(red[0]->Call("worker1", "job", {})->payload, "red");
  EXPECT_EQ(blue[0]->Call("worker1", "job", {})->payload, "blue");
  // One ends, the other goes on.
  std::thread other([&] { EXPECT_TRUE(red[1]->Shutdown(Later()).ok()); });
  EXPECT_TRUE(red[0]->Shutdown(Later()).ok());
  other.join();
  red.clear();
  EXPECT_TRUE(Train(*blue[0], "worker1").ok());
}

// Neither deadlines nor the loss of a peer need a thread of the pool.
TEST_P(MembersTest, DeadlinesFireThoughEveryPoolThreadIsBlocked) {
  Start(2);
  absl::Notification release;
  std::vector<std::unique_ptr<absl::Notification>> blocked;
  for (int i = 0; i < 4; ++i) blocked.push_back(std::make_unique<absl::Notification>());
  for (int i = 0; i < 2; ++i) {
    // They wait as a library would that knows nothing of the pool.
    ASSERT_TRUE(worker(i)
                    .Register("block",
                              [&](Request& r) -> absl::StatusOr<Message> {
                                blocked[std::stoi(r.message.payload)]->Notify();
                                release.WaitForNotification();
                                return Message{};
                              })
                    .ok());
  }
  const Context context = worker(0).NewContext();
  // Large enough to need the pool: cheap operators run inline on the thread that received the
  // request.
  const at::Tensor x = at::ones({1 << 16}).requires_grad_();
  const auto y = worker(0).Call("worker1", "double", {"", {x}}, {.context = &context});
  ASSERT_TRUE(y.ok()) << y.status();
  std::vector<Future<Message>> calls;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(worker(i % 2).CallAsync(absl::StrCat("worker", i % 2), "block",
                                            {absl::StrCat(i), {}}, {.deadline = Later()}));
  }
  for (auto& b : blocked) b->WaitForNotification();

  const absl::Time soon = absl::Now() + absl::Milliseconds(50);
  const absl::Status call = worker(0).Call("worker1", "echo", {}, {.deadline = soon}).status();
  EXPECT_EQ(call.code(), absl::StatusCode::kDeadlineExceeded) << call;
  const absl::Status backward = context.Backward({y->tensors[0].sum()}, {.deadline = soon});
  EXPECT_EQ(backward.code(), absl::StatusCode::kDeadlineExceeded) << backward;
  release.Notify();
  for (auto& c : calls) EXPECT_TRUE(c.Wait().ok()) << c.Wait().status();
}

INSTANTIATE_TEST_SUITE_P(Transports, MembersTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

TEST(MembersStoreTest, WhoWaitsHearsThatTheWorkerWithTheStoreIsGone) {
  const std::string url = absl::StrCat("tcp://127.0.0.1:", FreePort());
  std::unique_ptr<Worker> workers[2];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto worker = Worker::Create({.rendezvous = url, .rank = rank, .world_size = 2});
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers[rank] = *std::move(worker);
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Notification lost;
  std::string name;
  workers[1]->OnMember([&](const MemberEvent& event) {
    EXPECT_EQ(event.kind, MemberEvent::Kind::kLost);
    name = event.name;
    lost.Notify();
  });
  absl::Status status;
  std::thread serving([&] { status = workers[1]->Serve(); });
  workers[0].reset();
  serving.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(Contains(status, "'worker0' (0)")) << status;
  lost.WaitForNotification();
  EXPECT_EQ(name, "worker0");
  workers[1].reset();
}

// Has workers listen, as others read it, for another user of this machine: so they use TCP.
class OtherUsersStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    std::string other = ThisPlace();
    other.back() = other.back() == '1' ? '2' : '1';
    return ForwardingStore::Set(key, absl::StrReplaceAll(value, {{ThisPlace(), other}}), deadline);
  }
};

// How many TCP connections of this process end where the other end takes nothing for so long.
int ConnectionsWithLimit(absl::Duration limit) {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    unsigned timeout = 0;
    socklen_t size = sizeof(timeout);
    count += getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &size) == 0 &&
             absl::Milliseconds(timeout) == limit;
  }
  return count;
}

TEST(MembersStoreTest, TheSystemEndsWhatTakesNothingForTheHeartbeatLimit) {
  if (ThisPlace().empty()) GTEST_SKIP() << "this machine has no boot id, and so no other user's";
  constexpr absl::Duration kLimit = absl::Milliseconds(123'456);
  const auto store = std::make_shared<OtherUsersStore>(NewInProcessStore());
  std::unique_ptr<Worker> workers[2];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto worker = Worker::Create(
          {.store = store, .rank = rank, .world_size = 2, .heartbeat_limit = kLimit});
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers[rank] = *std::move(worker);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(workers[1]
                  ->Register("echo",
                             [](Request& request) -> absl::StatusOr<Message> {
                               return std::move(request.message);
                             })
                  .ok());
  const auto call = [&](size_t size) {
    return workers[0]->Call("worker1", "echo", Message{std::string(size, 'x'), {}}).status();
  };
  ASSERT_TRUE(call(4).ok());
  EXPECT_GE(ConnectionsWithLimit(kLimit), 2) << "both ends of one";
  ASSERT_TRUE(call(1 << 20).ok());
  EXPECT_GE(ConnectionsWithLimit(kLimit), 4) << "and of the one for large packets";
}

// Fails once to read the two entries of all members.
class ForgetfulStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    const bool is_all = keys.size() == 2 && keys[0] == "worker/0" && keys[1] == "worker/1";
    if (is_all && forgets.exchange(false)) return absl::UnavailableError("it forgets");
    return ForwardingStore::GetEach(keys, deadline);
  }

  std::atomic<bool> forgets{false};
};

// Or the next call would be in another barrier than the others are.
TEST(MembersStoreTest, ABarrierThatFailsAtItsEndIsNotUsedUp) {
  const auto store = NewInProcessStore();
  const auto forgetful = std::make_shared<ForgetfulStore>(store);
  const auto network = std::make_shared<InprocNetwork>();
  std::unique_ptr<Worker> workers[2];
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      auto worker = Worker::Create({.store = rank == 0 ? forgetful : store,
                                    .rank = rank,
                                    .world_size = 2,
                                    .transport = "inproc",
                                    .network = network});
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers[rank] = *std::move(worker);
      if (rank == 1) {
        EXPECT_TRUE(workers[1]->Barrier(Later()).ok());
      }
    });
  }
  threads[0].join();
  forgetful->forgets = true;
  const absl::Status failed = workers[0]->Barrier(Later());
  EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable) << failed;
  threads[1].join();
  // The other has come to no further one.
  const absl::Status met = workers[0]->Barrier(Deadline::After(absl::Seconds(5)));
  EXPECT_TRUE(met.ok()) << met;
}

// Reads lost/0 for its worker, with its entry, and then waits before it says what it has read.
class LateReader : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    auto values = ForwardingStore::GetEach(keys, deadline);
    if (keys.size() == 2 && keys[0] == "lost/0" && !read.HasBeenNotified()) {
      read.Notify();
      go_on.WaitForNotification();
    }
    return values;
  }

  absl::Notification read, go_on;
};

// That a worker is lost may be said while it looks whether somebody has said so.
TEST(MembersStoreTest, WhoLivesDeniesEachLoss) {
  const auto store = NewInProcessStore();
  const auto late = std::make_shared<LateReader>(store);
  const auto network = std::make_shared<InprocNetwork>();
  constexpr int kWorkers = 5;
  std::unique_ptr<Worker> workers[kWorkers];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      auto worker = Worker::Create({.store = rank == 0 ? late : store,
                                    .rank = rank,
                                    .world_size = kWorkers,
                                    .transport = "inproc",
                                    .network = network,
                                    .heartbeat_limit = absl::Seconds(2)});
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers[rank] = *std::move(worker);
      const auto echo = [](Request& r) -> absl::StatusOr<Message> { return std::move(r.message); };
      ASSERT_TRUE(workers[rank]->Register("echo", echo).ok());
      ASSERT_TRUE(workers[rank]->Barrier(Later()).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  // With those that it watches, or that watch it, it would try again and again.
  for (int to : {1, 2, 3, 4}) ASSERT_TRUE(workers[0]->Call(to, "echo", {}).ok());
  workers[2].reset();
  late->read.WaitForNotification();
  workers[3].reset();
  // What has come after the end of that connection says that it was seen.
  ASSERT_TRUE(workers[0]->Call(4, "echo", {}).ok());
  const Incarnation incarnation = workers[0]->members()[0].incarnation;
  ASSERT_TRUE(store->Set("lost/0", absl::StrCat(incarnation, " it was silent"), Later()).ok());
  late->go_on.Notify();
  const std::string keys[] = {"lost/0"};
  const Store::Value said[] = {absl::StrCat(incarnation, " it was silent")};
  EXPECT_EQ(store->AwaitChange(keys, said, Later()).value()[0], "");
}

// There is none for the first look at the members, and is one later.
TEST(MembersStoreTest, MembersAreFollowedOnceThereIsAThreadForIt) {
  Told told;
  const auto store = NewInProcessStore();
  auto worker = Worker::Create({.store = store,
                                .rank = 0,
                                .world_size = 1,
                                .transport = "inproc",
                                .network = std::make_shared<InprocNetwork>()});
  ASSERT_TRUE(worker.ok()) << worker.status();
  {
    const NoThreads no_threads;
    (*worker)->OnMember(told.Callback());
  }
  // It connects to nobody.
  Membership late(store, {.name = "late", .join = true});
  absl::StatusOr<WorkerInfo> self = late.Claim(Later());
  ASSERT_TRUE(self.ok()) << self.status();
  self->address = "inproc://nowhere";
  ASSERT_TRUE(late.Enter(*self, Later()).ok());
  EXPECT_EQ(told.Await(1)[0], "joined late");
}

// Loses all packets while it is silent, and holds up hellos; refuses each connection that worker 0
// opens to worker 1 while it breaks them, and those that either opens to the other while they are
// apart. Thread-safe.
class WatcherFaults : public FaultInjector {
 public:
  Action OnSend(const std::string&, const std::string&, Packet& packet) override {
    WireReader reader(packet.bytes);
    if (ReadFrame(reader)->kind == FrameKind::kHello) {
      const Hello hello = *ReadHello(reader);
      if ((breaks || apart) && hello.from == 0 && hello.to == 1) return Action::kNobodyListens;
      if (apart && hello.from == 1 && hello.to == 0) return Action::kNobodyListens;
      return silent ? Action::kHold : Action::kDeliver;
    }
    return silent ? Action::kDrop : Action::kDeliver;
  }

  std::atomic<bool> silent{false}, breaks{false}, apart{false};
};

// Holds up the next answer about a key. Thread-safe.
class HeldReader : public ForwardingStore {
 public:
  HeldReader(std::shared_ptr<Store> store, std::string key)
      : ForwardingStore(std::move(store)), key_(std::move(key)) {}
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    auto values = ForwardingStore::GetEach(keys, deadline);
    // Alone, or with the reader's own entry.
    if (!keys.empty() && keys.size() <= 2 && keys[0] == key_ && holds.exchange(false)) {
      read.Notify();
      go_on.WaitForNotification();
    }
    return values;
  }

  std::atomic<bool> holds{false};
  absl::Notification read, go_on;

 private:
  const std::string key_;
};

// Holds up the next answer to who asks for the losses of all, and hears that worker 1 is lost.
// Thread-safe.
class HeldLosses : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    auto values = ForwardingStore::GetEach(keys, deadline);
    if (keys.size() > 1 && keys[1] == "lost/1" && values.ok() && (*values)[1].value_or("") != "" &&
        holds.exchange(false)) {
      read.Notify();
      go_on.WaitForNotification();
    }
    return values;
  }

  std::atomic<bool> holds{false};
  absl::Notification read, go_on;
};

// Forgets that its worker takes back the loss of worker 1, while it is mute; or once finds no
// memory when those are to be woken who would read something. Thread-safe.
class MuteStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (is_mute && key == "lost/1" && value.empty()) return absl::OkStatus();
    if (key == "lost/1" && value.empty() && refusals > 0) {
      // As a full store says it, and whatever else one may say.
      if (refusals-- % 2 == 0) return absl::ResourceExhaustedError("the store is full");
      return absl::UnavailableError("it closes the connection");
    }
    if (key == "changes" && is_short.exchange(false)) throw std::bad_alloc();
    if (key == "lost/1" && !value.empty()) {
      absl::MutexLock lock(&mu_);
      losses_.push_back(absl::Now());
    }
    return ForwardingStore::Set(key, value, deadline);
  }

  // Waits until its worker has said `n` losses, and returns when it said each.
  std::vector<absl::Time> AwaitLosses(size_t n) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return losses_.size() >= n;
    };
    mu_.Await(absl::Condition(&there));
    return losses_;
  }

  std::atomic<bool> is_mute{false}, is_short{false};
  std::atomic<int> refusals{0};  // of denials, from now on

 private:
  absl::Mutex mu_;
  std::vector<absl::Time> losses_ ABSL_GUARDED_BY(mu_);
};

// "worker0", which watches "worker1", and others, with faults between them.
class WatcherTest : public testing::Test {
 protected:
  void Start(int count, absl::Duration heartbeat_limit = absl::Seconds(2)) {
    workers_.resize(count);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] {
        std::shared_ptr<Store> store = store_;
        if (rank == 0) store = held_losses_;
        if (rank == 1) store = mute1_;
        auto worker = Worker::Create({.store = std::move(store),
                                      .rank = rank,
                                      .world_size = count,
                                      .transport = "inproc",
                                      .network = network_,
                                      .heartbeat_limit = heartbeat_limit});
        ASSERT_TRUE(worker.ok()) << worker.status();
        workers_[rank] = *std::move(worker);
        const auto echo = [](Request& r) -> absl::StatusOr<Message> {
          return std::move(r.message);
        };
        ASSERT_TRUE(workers_[rank]->Register("echo", echo).ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // What the store says of the loss of worker 1, as soon as that is another thing, or at the end of
  // that time.
  Store::Value LossOf1(const Store::Value& before, absl::Duration wait) {
    const std::string keys[] = {"lost/1"};
    const Store::Value seen[] = {before};
    return store_->AwaitChange(keys, seen, Deadline::After(wait)).value()[0];
  }

  // Whether worker 0 is told that worker 1 is back, in time.
  bool WatcherSeesItJoin() {
    const absl::Time end = Later();
    for (;;) {
      const Names told = told_watcher_.Await(1);
      if (std::find(told.begin(), told.end(), "joined worker1") != told.end()) return true;
      if (absl::Now() >= end) return false;
      absl::SleepFor(absl::Milliseconds(10));
    }
  }

  const std::shared_ptr<Store> store_ = NewInProcessStore();
  // Worker 0's, which reads whether worker 1 is lost before it says so; and worker 1's.
  const std::shared_ptr<MuteStore> mute0_ = std::make_shared<MuteStore>(store_);
  const std::shared_ptr<HeldReader> held_ = std::make_shared<HeldReader>(mute0_, "worker/1");
  const std::shared_ptr<HeldReader> held_word_ = std::make_shared<HeldReader>(held_, "lost/1");
  const std::shared_ptr<HeldLosses> held_losses_ = std::make_shared<HeldLosses>(held_word_);
  const std::shared_ptr<MuteStore> mute1_ = std::make_shared<MuteStore>(store_);
  const std::shared_ptr<WatcherFaults> faults_ = std::make_shared<WatcherFaults>();
  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>(faults_);
  Told told_, told_watcher_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

TEST_F(WatcherTest, WhoComesBackWhileTheStoreIsAskedIsNotLost) {
  Start(2);
  ASSERT_TRUE(workers_[0]->Call("worker1", "echo", {}).ok());
  held_->holds = true;
  faults_->silent = true;
  held_->read.WaitForNotification();
  faults_->silent = false;
  network_->ReleaseHeld();
  absl::Status back;
  const absl::Time end = Later();
  do {
    back = workers_[1]->Call("worker0", "echo", {}).status();
  } while (!back.ok() && absl::Now() < end);
  ASSERT_TRUE(back.ok()) << back;
  held_->go_on.Notify();
  EXPECT_EQ(LossOf1(std::nullopt, absl::Seconds(1)), std::nullopt);
  EXPECT_TRUE(workers_[0]->Call("worker1", "echo", {}).ok());
}

// Worker 1 has never heard of the connection that it would miss.
TEST_F(WatcherTest, ALossThatOnlyTheWatcherHasSeenIsDenied) {
  faults_->breaks = true;
  mute0_->is_mute = true;
  Start(3);
  workers_[2]->OnMember(told_.Callback());
  EXPECT_EQ(told_.Await(1)[0], "lost worker1");
  const Store::Value lost = LossOf1(std::nullopt, absl::Seconds(10));
  ASSERT_TRUE(lost.has_value());
  EXPECT_EQ(LossOf1(lost, absl::Seconds(20)), "") << "its denial";
  if (testing::Test::HasFailure()) return;
  EXPECT_EQ(told_.Await(2)[1], "joined worker1");
}

// Its own connections are all there.
TEST_F(WatcherTest, WhoReadsInTheStoreThatItIsLostDeniesIt) {
  Start(3);
  workers_[1]->OnMember([](const MemberEvent&) {});
  const std::string said =
      absl::StrCat(workers_[0]->members()[1].incarnation, " it could not be reached");
  for (const char* change : {"1", "2"}) {
    ASSERT_TRUE(store_->Set("lost/1", said, Later()).ok());
    ASSERT_TRUE(store_->Set("changes", change, Later()).ok());
    EXPECT_EQ(LossOf1(said, absl::Seconds(20)), "") << change;
  }
}

TEST_F(WatcherTest, ADenialIsHeardThoughThereWasNoMemoryWhenItHadCome) {
  Start(3);
  const std::string said =
      absl::StrCat(workers_[0]->members()[1].incarnation, " it could not be reached");
  ASSERT_TRUE(store_->Set("lost/1", said, Later()).ok());
  ASSERT_TRUE(store_->Set("changes", "1", Later()).ok());
  mute1_->is_short = true;
  workers_[1]->OnMember([](const MemberEvent&) {});
  EXPECT_EQ(LossOf1(said, absl::Seconds(20)), "");
  const std::string keys[] = {"changes"};
  const Store::Value seen[] = {"1"};
  EXPECT_NE(store_->AwaitChange(keys, seen, Deadline::After(absl::Seconds(20))).value()[0], "1");
  EXPECT_FALSE(mute1_->is_short);
}

// When it reads that it is lost, and when it looks again.
TEST_F(WatcherTest, ALossIsDeniedThoughTheStoreHadNoRoomForThatTwice) {
  Start(3);
  const std::string said =
      absl::StrCat(workers_[0]->members()[1].incarnation, " it could not be reached");
  mute1_->refusals = 2;
  ASSERT_TRUE(store_->Set("lost/1", said, Later()).ok());
  ASSERT_TRUE(store_->Set("changes", "1", Later()).ok());
  workers_[1]->OnMember([](const MemberEvent&) {});
  EXPECT_EQ(LossOf1(said, absl::Seconds(20)), "");
}

// Each word that one is lost, and each denial, is read by all.
TEST_F(WatcherTest, TwoThatCannotReachEachOtherDoNotArgueWithoutAPause) {
  faults_->apart = true;
  Start(3, /*heartbeat_limit=*/absl::Seconds(20));
  workers_[0]->OnMember(told_.Callback());
  workers_[1]->OnMember([](const MemberEvent&) {});
  const Store::Value lost = LossOf1(std::nullopt, absl::Seconds(20));
  ASSERT_TRUE(lost.has_value());
  // The watcher says so again at once when it has read the denial, and may be faster than this.
  const Store::Value denied = LossOf1(lost, absl::Seconds(15));
  const Store::Value again = denied == "" ? LossOf1("", absl::Seconds(15)) : denied;
  EXPECT_EQ(told_.Await(2)[1], "joined worker1") << "its first denial";
  ASSERT_NE(again, "");
  EXPECT_EQ(LossOf1(again, absl::Seconds(3)), again);
}

// Nor where it is barriers that read it; and there the member denies it each time.
TEST_F(WatcherTest, TwoThatWaitAndCannotReachEachOtherDoNotArgueWithoutAPause) {
  faults_->apart = true;
  constexpr absl::Duration kLimit = absl::Seconds(5);
  Start(3, kLimit);
  std::vector<std::thread> waiting;
  for (const int rank : {0, 1}) {
    waiting.emplace_back([this, rank] {
      workers_[rank]->Barrier(Deadline::Never(), OnLost::kGoOnWithout).IgnoreError();
    });
  }
  // It tries the member again after its first denial, within a fifth of the limit; but not so after
  // the next one.
  const std::vector<absl::Time> said = mute0_->AwaitLosses(3);
  EXPECT_GE(said[2] - said[0], kLimit);
  for (auto& worker : workers_) worker->Abort();
  for (std::thread& thread : waiting) thread.join();
}

// Nobody else would take it back: its member's connections stand, the watcher's among them.
TEST_F(WatcherTest, ALossWhoseMemberAnswersBeforeItIsSaidIsNotSaid) {
  faults_->breaks = true;
  held_word_->holds = true;
  mute1_->is_mute = true;
  Start(3);
  workers_[0]->OnMember(told_watcher_.Callback());
  workers_[2]->OnMember(told_.Callback());
  EXPECT_TRUE(WatcherSeesItJoin());
  held_word_->go_on.Notify();
  // As long as the third one needs to read what there is.
  EXPECT_EQ(LossOf1(std::nullopt, absl::Seconds(3)), std::nullopt);
  EXPECT_EQ(told_.Await(0), Names());
}

TEST_F(WatcherTest, WhoHasToldALossTakesItBackWhenItsMemberAnswers) {
  faults_->apart = true;
  mute1_->is_mute = true;
  Start(3);
  workers_[2]->OnMember(told_.Callback());
  EXPECT_EQ(told_.Await(1), Names({"lost worker1"}));
  const Store::Value lost = LossOf1(std::nullopt, absl::Seconds(10));
  ASSERT_TRUE(lost.has_value());
  faults_->apart = false;
  EXPECT_EQ(LossOf1(lost, absl::Seconds(20)), "");
  if (testing::Test::HasFailure()) return;
  EXPECT_EQ(told_.Await(2)[1], "joined worker1");
}

// Nobody else watches it; and no callback reads that it has denied its loss.
TEST_F(WatcherTest, OneThatDiesAfterItsDenialIsMissedByThoseWhoWait) {
  faults_->apart = true;
  Start(3);
  const Store::Value lost = LossOf1(std::nullopt, absl::Seconds(20));
  ASSERT_TRUE(lost.has_value());
  ASSERT_EQ(LossOf1(lost, absl::Seconds(20)), "") << "its denial";
  workers_[1].reset();
  const auto miss = [](Worker& worker) {
    const absl::Status status = worker.Barrier(absl::Now() + absl::Seconds(30));
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "'worker1' (1) is lost")) << status;
  };
  std::thread other([&] { miss(*workers_[2]); });
  miss(*workers_[0]);
  other.join();
}

// It reads that after the member has answered, and before it has taken it back.
TEST_F(WatcherTest, WhatTheWatcherItselfHasToldIsNoNewLoss) {
  faults_->apart = true;
  mute1_->is_mute = true;
  held_losses_->holds = true;
  Start(3, /*heartbeat_limit=*/absl::Seconds(20));
  workers_[0]->OnMember(told_watcher_.Callback());
  held_losses_->read.WaitForNotification();
  const Store::Value lost = LossOf1(std::nullopt, absl::Seconds(20));
  EXPECT_TRUE(lost.has_value());
  faults_->apart = false;
  EXPECT_TRUE(WatcherSeesItJoin());
  held_losses_->go_on.Notify();
  EXPECT_EQ(LossOf1(lost, absl::Seconds(20)), "");
  workers_[2].reset();
  Names told;
  for (size_t n = 1; told.empty() || told.back() != "lost worker2"; ++n) {
    told = told_watcher_.Await(n);
  }
  // The first loss may have come before there was anybody to be told.
  const auto joined = std::find(told.begin(), told.end(), "joined worker1");
  EXPECT_EQ(Names(joined, told.end()), Names({"joined worker1", "lost worker2"}));
}

// The store is in the hands of somebody who has no key, but has seen all that it ever held.
TEST(SignedMembersTest, AnEntryOfAnEarlierIncarnationOrOfAnotherJobIsRefused) {
  const auto raw = NewInProcessStore();
  const auto store = NewSignedStore("a secret of the whole job", raw);
  const auto start = [&](int rank, const std::string& job) {
    auto worker = Worker::Create({.store = store, .job = job, .rank = rank, .world_size = 2});
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  };
  std::vector<std::unique_ptr<Worker>> workers(2), others(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] { workers[rank] = start(rank, ""); });
    threads.emplace_back([&, rank] { others[rank] = start(rank, "other"); });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string old = *raw->Get("worker/1", absl::InfinitePast());
  workers[1].reset();
  workers[1] = start(1, "");
  ASSERT_TRUE(workers[1]
                  ->Register("f", [](Request&) -> absl::StatusOr<Message> { return Message{}; })
                  .ok());
  ASSERT_TRUE(workers[0]->Call("worker1", "f", {}).ok());

  // Who knows the new incarnation is not led back to the old one.
  ASSERT_TRUE(raw->Set("worker/1", old, Later()).ok());
  EXPECT_TRUE(workers[0]->UpdateMembers().ok());
  EXPECT_TRUE(workers[0]->Call("worker1", "f", {}).ok());
  // Who doesn't, finds nobody there.
  auto late = Worker::Create({.name = "late", .store = store, .join = true});
  ASSERT_TRUE(late.ok()) << late.status();
  const absl::Status status = (*late)->Call("worker1", "f", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;

  ASSERT_TRUE(
      raw->Set("worker/1", *raw->Get("job/other/worker/1", absl::InfinitePast()), Later()).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(workers[0]->UpdateMembers()));
}

TEST(MembersOptionsTest, OneWhoJoinsIsNamedByTheEnvironmentUnlessItsOptionsSayANameOfItsOwn) {
  const auto store = NewInProcessStore();
  const auto create = [&](std::string name, bool join) {
    WorkerOptions options{.name = std::move(name), .store = store, .join = join};
    if (!join) options.rank = 0, options.world_size = 1;
    auto worker = Worker::Create(std::move(options));
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  };
  const auto first = create("", false), second = create("", true);
  setenv("DISTGRAD_NAME", "named", 1);
  const auto third = create("", true), fourth = create("own", true);
  unsetenv("DISTGRAD_NAME");
  EXPECT_EQ(first->name(), "worker0");
  EXPECT_EQ(second->name(), "worker1");
  EXPECT_EQ(third->name(), "named");
  EXPECT_EQ(fourth->name(), "own");
}

TEST(MembersOptionsTest, OneWhoJoinsTakesTheUrlOfTheJob) {
  const std::string url =
      absl::StrCat("file://", testing::TempDir(), "/url_of_the_job_", getpid(), "?world_size=1");
  const auto first = Worker::Create({.rendezvous = url, .rank = 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Worker::Create({.rendezvous = url, .join = true});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*second)->rank(), 1);
}

TEST(MembersOptionsTest, WhatMakesNoSenseIsRefused) {
  const absl::Status status = Worker::Create({.store = NewInProcessStore(),
                                              .rank = 0,
                                              .world_size = 1,
                                              .heartbeat_limit = absl::ZeroDuration()})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Contains(status, "heartbeat_limit")) << status;
}

}  // namespace
}  // namespace distgrad
