// One engine, whose network, clock and peers are the test's: what leaves it in which packet, and
// what it keeps of workers that are gone.
#include "core/autograd/engine.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/notice.h"
#include "core/base/await_memory.h"
#include "core/base/blocking.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/thread_pool.h"
#include "core/base/trace.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr WorkerRank kSelf = 1, kPeer = 2, kOther = 3;

// Calls something once, when it is asked to. Thread-safe.
class Trap {
 public:
  void Set(absl::AnyInvocable<void()> body) {
    absl::MutexLock lock(&mu_);
    body_ = std::move(body);
  }
  void Spring() {
    absl::AnyInvocable<void()> body;
    {
      absl::MutexLock lock(&mu_);
      body = std::exchange(body_, nullptr);
    }
    if (body != nullptr) body();
  }

 private:
  absl::Mutex mu_;
  absl::AnyInvocable<void()> body_ ABSL_GUARDED_BY(mu_);
};

// Keeps what is sent. Thread-safe.
class RecordingNetwork : public EngineNetwork {
 public:
  struct Sent {
    WorkerRank to;
    std::vector<Notice> notices;
  };

  Packet NewNotice() override { return Packet(); }
  void Notify(WorkerRank to, Packet packet) override {
    on_notify.Spring();
    absl::StatusOr<std::vector<Notice>> notices = ReadNotices(packet, 0, {});
    EXPECT_TRUE(notices.ok()) << notices.status();
    absl::MutexLock lock(&mu_);
    sent_.push_back({to, *std::move(notices)});
  }
  absl::StatusOr<std::shared_ptr<const DeviceMap>> DevicesWith(WorkerRank) override {
    return absl::UnimplementedError("this test has no devices");
  }
  std::string Describe(WorkerRank worker) override {
    on_describe.Spring();
    return std::to_string(worker);
  }

  std::vector<Sent> TakeSent() {
    absl::MutexLock lock(&mu_);
    return std::exchange(sent_, {});
  }
  // How many gradients each packet had.
  std::vector<size_t> TakeGradients() {
    std::vector<size_t> counts;
    for (const Sent& sent : TakeSent()) {
      size_t gradients = 0;
      for (const Notice& notice : sent.notices) gradients += notice.kind == Notice::Kind::kEdge;
      if (gradients > 0) counts.push_back(gradients);
    }
    return counts;
  }

  Trap on_describe, on_notify;

 private:
  absl::Mutex mu_;
  std::vector<Sent> sent_ ABSL_GUARDED_BY(mu_);
};

// Stands still, or goes on by one step each time that somebody looks. Thread-safe.
class SteppingClock : public Clock {
 public:
  void SetStep(absl::Duration step) {
    absl::MutexLock lock(&mu_);
    step_ = step;
  }
  absl::Time Now() override {
    on_now.Spring();
    absl::MutexLock lock(&mu_);
    return now_ += step_;
  }
  TimerId At(absl::Time, absl::AnyInvocable<void()> callback) override {
    absl::MutexLock lock(&mu_);
    timers_[++last_timer_] = std::move(callback);
    return last_timer_;
  }
  bool Cancel(TimerId timer) override {
    absl::MutexLock lock(&mu_);
    return timers_.erase(timer) == 1;
  }
  size_t timers() const {
    absl::MutexLock lock(&mu_);
    return timers_.size();
  }
  // Calls what was to be called at some time, as if all those had come.
  void RunTimers() {
    std::map<TimerId, absl::AnyInvocable<void()>> timers;
    {
      absl::MutexLock lock(&mu_);
      timers.swap(timers_);
    }
    for (auto& [timer, callback] : timers) {
      try {
        callback();
      } catch (const std::bad_alloc&) {
        callback();  // as clocks do
      }
    }
  }

  Trap on_now;

 private:
  mutable absl::Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_) = absl::FromUnixSeconds(1'000'000'000);
  absl::Duration step_ ABSL_GUARDED_BY(mu_);
  TimerId last_timer_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<TimerId, absl::AnyInvocable<void()>> timers_ ABSL_GUARDED_BY(mu_);
};

class EngineTest : public ::testing::Test {
 protected:
  ~EngineTest() override {
    engine_.Close();
    pool_.Join();
    engine_.Join();
    // As a worker does at its end: a pass that is done and its context keep each other.
    for (const auto& context : contexts_.All()) engine_.Release(context->id());
  }

  // A tensor that has come from `from` by the edge with that number.
  at::Tensor Receive(const std::shared_ptr<ContextRecord>& context, WorkerRank from,
                     uint64_t edge) {
    at::Tensor tensor = at::ones({2});
    const absl::Status recorded =
        engine_.RecordRecv(context, {MakeId(from, edge), from}, absl::MakeSpan(&tensor, 1));
    EXPECT_TRUE(recorded.ok()) << recorded;
    return tensor;
  }
  void Deliver(WorkerRank from, const Notice& notice, bool is_cut_off = false) {
    DeliverTogether(from, {notice}, is_cut_off);
  }
  void DeliverTogether(WorkerRank from, const std::vector<Notice>& notices,
                       bool is_cut_off = false) {
    Packet packet;
    for (const Notice& notice : notices) ASSERT_TRUE(AppendNotice(notice, &packet).ok());
    const absl::Status taken =
        engine_.OnNotice(from, std::move(packet), 0, [=] { return is_cut_off; });
    EXPECT_TRUE(taken.ok()) << taken;
  }
  // Does what the agent does where the engine cannot read a notice.
  void DeliverWhatCannotBeRead(WorkerRank from, Packet packet) {
    const absl::Status taken = engine_.OnNotice(from, std::move(packet), 0, [] { return false; });
    EXPECT_FALSE(taken.ok());
    engine_.OnPeerLost(from, contexts_.begun(), taken);
  }
  // Whom this worker has told since then that a pass has failed, and why.
  std::map<WorkerRank, std::string> TakeAborts() {
    std::map<WorkerRank, std::string> told;
    for (const RecordingNetwork::Sent& sent : network_.TakeSent()) {
      for (const Notice& notice : sent.notices) {
        if (notice.kind == Notice::Kind::kAbort) told[sent.to] = notice.status.message();
      }
    }
    return told;
  }
  // A call that has not left, and a pass of its context that waits for nothing else: the peer has
  // said that it is done.
  std::pair<EdgeId, Future<Unit>> PassBesideACall(const std::shared_ptr<ContextRecord>& context,
                                                  const at::Tensor& leaf) {
    const absl::StatusOr<EdgeId> edge =
        engine_.RecordSend(*context, kPeer, Engine::MakeSend({leaf * 2}));
    EXPECT_TRUE(edge.ok()) << edge.status();
    Future<Unit> pass = engine_.Backward(context, {(leaf * 3).sum()},
                                         {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
    const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
    EXPECT_EQ(sent.size(), 1u);
    Deliver(kPeer, {.kind = Notice::Kind::kAck,
                    .context = context->id(),
                    .pass = sent.at(0).notices.front().pass,
                    .count = 1});
    AwaitPool();
    return {edge.value(), std::move(pass)};
  }
  // Until the pool has done what was asked of it so far.
  void AwaitPool() {
    absl::Notification done;
    pool_.Schedule([&] { done.Notify(); });
    done.WaitForNotification();
  }

  SteppingClock clock_;
  RecordingNetwork network_;
  TraceRecorder trace_;
  ThreadPool pool_{"engine", 1};
  ContextRegistry contexts_{kSelf, /*incarnation=*/1};
  Engine engine_{kSelf, /*incarnation=*/1, &network_, &pool_, &clock_, &trace_, &contexts_, {}};
};

// --------------------------------------------------------------------------- When gradients leave

// The sum of `count` received tensors, each after a few operators of its own; `after(i, x)` stands
// between those and the sum.
at::Tensor SumOf(int count, const std::function<at::Tensor(int)>& receive,
                 const std::function<at::Tensor(int, at::Tensor)>& after) {
  at::Tensor sum;
  for (int i = 0; i < count; ++i) {
    const at::Tensor x = after(i, (receive(i) * 2).sin());
    sum = sum.defined() ? sum + x : x;
  }
  return sum.sum();
}

TEST_F(EngineTest, SmallGradientsThatComeTogetherLeaveInOnePacket) {
  const auto context = contexts_.New();
  const at::Tensor loss = SumOf(
      100, [&](int i) { return Receive(context, kPeer, i + 1); },
      [](int, at::Tensor x) { return x; });
  engine_.Backward(context, {loss}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  EXPECT_THAT(network_.TakeGradients(), ElementsAre(100));
}

// A node with a hook may take as long as it likes. The tensors arrive on another thread, which
// counts its nodes by itself.
TEST_F(EngineTest, AGradientLeavesBeforeALongNode) {
  const auto context = contexts_.New();
  std::vector<at::Tensor> received;
  std::thread([&] {
    for (int i = 0; i < 8; ++i) received.push_back(Receive(context, kPeer, i + 1));
  }).join();
  int nodes = 0;
  const at::Tensor loss = SumOf(
      8, [&](int i) { return received[i]; },
      [&](int, at::Tensor x) {
        x.register_hook([&](const at::Tensor&) {
          const std::vector<size_t> left = network_.TakeGradients();
          if (nodes++ == 0) {
            EXPECT_THAT(left, IsEmpty());
          } else {
            EXPECT_THAT(left, ElementsAre(1)) << "node " << nodes;
          }
        });
        return x;
      });
  engine_.Backward(context, {loss}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  EXPECT_EQ(nodes, 8);
  EXPECT_THAT(network_.TakeGradients(), ElementsAre(1)) << "the last";
}

// Nodes that are short each are long together.
TEST_F(EngineTest, AGradientDoesNotWaitForLongForOthers) {
  const auto context = contexts_.New();
  const at::Tensor loss = SumOf(
      100, [&](int i) { return Receive(context, kPeer, i + 1); },
      [](int, at::Tensor x) { return x; });
  clock_.SetStep(absl::Microseconds(10));
  engine_.Backward(context, {loss}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  const std::vector<size_t> gradients = network_.TakeGradients();
  EXPECT_EQ(std::accumulate(gradients.begin(), gradients.end(), size_t{0}), 100u);
  EXPECT_GT(gradients.size(), 1u);
  EXPECT_LT(gradients.size(), 50u) << "they travel together all the same";
}

// The micro-batches of a pipeline: the gradients of all of them have come, and wait in the queue.
TEST_F(EngineTest, AGradientLeavesBeforeTheNextOfTheQueueIsRun) {
  const auto context = contexts_.New();
  int run = 0;
  std::vector<Notice> gradients;
  for (int m = 0; m < 4; ++m) {
    const at::Tensor hooked = Receive(context, kPeer, m + 1) * 2;
    hooked.register_hook([&](const at::Tensor&) {
      const std::vector<size_t> left = network_.TakeGradients();
      if (run++ == 0) {
        EXPECT_THAT(left, IsEmpty());
      } else {
        EXPECT_THAT(left, ElementsAre(1)) << "micro-batch " << run;
      }
    });
    const absl::StatusOr<EdgeId> edge =
        engine_.RecordSend(*context, kPeer, Engine::MakeSend({hooked}));
    ASSERT_TRUE(edge.ok()) << edge.status();
    gradients.push_back({.kind = Notice::Kind::kEdge,
                         .context = context->id(),
                         .edge = *edge,
                         .gradients = {at::ones({2})},
                         .reached = {true}});
  }
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  engine_.Backward(context, {(leaf * 3).sum()}, {.deadline = absl::InfiniteFuture()},
                   /*run_here=*/true);
  const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
  ASSERT_EQ(sent.size(), 1u);
  // No gradient is taken before all have come.
  absl::Notification all_have_come;
  pool_.Schedule([&] { all_have_come.WaitForNotification(); });
  for (Notice& gradient : gradients) {
    gradient.pass = sent[0].notices.front().pass;
    Deliver(kPeer, gradient);
  }
  EXPECT_EQ(run, 0);
  all_have_come.Notify();
  AwaitPool();
  EXPECT_EQ(run, 4);
  EXPECT_THAT(network_.TakeGradients(), ElementsAre(1)) << "the last";
}

// Runs `ask` when what a node has saved is unpacked, which cannot be seen from outside of it.
struct AskingHook : torch::autograd::SavedVariableHooks {
  explicit AskingHook(std::function<void()> ask) : ask(std::move(ask)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed = tensor.detach(); }
  at::Tensor call_unpack_hook() override {
    ask();
    return packed;
  }
  const std::function<void()> ask;
  at::Tensor packed;
};

// What it waits for may be what the peer does with the gradient. There may be no memory for the
// pool's task on the thread that waits, which has locks of others, nor for that of the strand on
// the pool's.
TEST_F(EngineTest, AGradientLeavesBeforeANodeWaitsAlsoWhereThereIsNoMemory) {
  for (const bool on_pool : {false, true}) {
    SCOPED_TRACE(on_pool ? "on the pool's thread" : "on the thread that waits");
    bool failed = false;
    // The pool's queue takes memory for several tasks at once.
    for (int round = 0; !failed && round < 100; ++round) {
      for (int i = 0; i < round % 3; ++i) AwaitPool();
      const auto context = contexts_.New();
      absl::Notification sent, go;
      bool was_kept = false, has_left = false;
      const std::function<void()> wait = [&] {
        was_kept = network_.TakeGradients().empty();
        network_.on_notify.Set([&] {
          if (on_pool) failed = FailAllocation(-1);
          sent.Notify();
        });
        // The next task of the pool is on the same thread, then.
        pool_.Schedule([&] {
          go.WaitForNotification();
          if (on_pool) FailAllocation(0);
        });
        absl::Cleanup let_go = [&] { go.Notify(); };
        if (!on_pool) FailAllocation(0);
        const BlockingScope blocking;
        if (!on_pool) failed = FailAllocation(-1);
        std::move(let_go).Invoke();
        has_left = sent.WaitForNotificationWithTimeout(absl::Seconds(30));
      };
      // The later ones run first.
      const at::Tensor waits = at::ones({2}).requires_grad_().sin();
      auto* const node =
          dynamic_cast<torch::autograd::generated::SinBackward0*>(waits.grad_fn().get());
      ASSERT_NE(node, nullptr);
      node->self_.register_hooks(std::make_unique<AskingHook>(wait));
      const at::Tensor received = Receive(context, kPeer, 1);
      const Future<Unit> pass =
          engine_.Backward(context, {waits.sum() + (received * 2).sum()},
                           {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
      EXPECT_TRUE(was_kept) << "it waits for others to travel with";
      EXPECT_TRUE(has_left);
      AwaitPool();
      const std::vector<RecordingNetwork::Sent> left = network_.TakeSent();
      ASSERT_EQ(left.size(), 1u);
      Deliver(kPeer, {.kind = Notice::Kind::kAck,
                      .context = context->id(),
                      .pass = left[0].notices.front().pass,
                      .count = 1});
      AwaitPool();
      ASSERT_TRUE(pass.Done());
      EXPECT_TRUE(pass.Wait().ok()) << pass.Wait().status();
      engine_.Release(context->id());
    }
    EXPECT_TRUE(failed);
  }
}

// ------------------------------------------------------------------------------ Whose thread it is

// What its thread is to run deferred has been run elsewhere before the thread goes on: as if the
// machine had stopped that thread. To the end of its scope.
class ElsewhereLoop : public EventLoop {
 public:
  ElsewhereLoop() { SetCurrent(this); }
  ~ElsewhereLoop() override { SetCurrent(nullptr); }
  void Run(absl::AnyInvocable<void()>) override { ADD_FAILURE() << "nothing comes here"; }
  bool CanRunDeferred(const void*) override { return true; }
  void RunDeferred(absl::AnyInvocable<void()> task) override {
    std::thread(std::move(task)).join();
  }
};

class WhoseThreadTest : public EngineTest {
 protected:
  // Does what ends the pass on this thread, in the middle of which the nodes run that it feeds. It
  // may be within CallAsync(), under locks of its user's; what hears of the pass is somebody
  // else's.
  void ExpectEndsElsewhere(const Future<Unit>& pass, const std::function<void()>& end,
                           absl::StatusCode how = absl::StatusCode::kOk) {
    ASSERT_FALSE(pass.Done());
    std::thread::id ended;
    absl::Notification told;
    pass.Then([&](const absl::StatusOr<Unit>&) {
      ended = std::this_thread::get_id();
      told.Notify();
    });
    {
      const ElsewhereLoop loop;
      end();
    }
    told.WaitForNotification();
    EXPECT_NE(ended, std::this_thread::get_id());
    EXPECT_EQ(pass.Wait().status().code(), how) << pass.Wait().status();
  }

  const std::shared_ptr<ContextRecord> context_ = contexts_.New();
  const at::Tensor leaf_ = at::ones({2}).requires_grad_();
};

TEST_F(WhoseThreadTest, ACallToOneselfWhileAPassRunsHearsOfNoOther) {
  const absl::StatusOr<EdgeId> edge =
      engine_.RecordSend(*context_, kSelf, Engine::MakeSend({leaf_ * 2}));
  ASSERT_TRUE(edge.ok()) << edge.status();
  const Future<Unit> pass = engine_.Backward(
      context_, {(leaf_ * 3).sum()}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  ExpectEndsElsewhere(pass, [&] {
    at::Tensor received = at::ones({2});
    EXPECT_TRUE(engine_.RecordRecv(context_, {*edge, kSelf}, absl::MakeSpan(&received, 1)).ok());
  });
}

TEST_F(WhoseThreadTest, ACallThatDoesNotLeaveWhileAPassRunsHearsOfNoOther) {
  const auto [edge, pass] = PassBesideACall(context_, leaf_);
  ExpectEndsElsewhere(pass, [&, edge = edge] { engine_.DropSend(*context_, edge); });
}

TEST_F(WhoseThreadTest, AReleaseWhileAPassRunsHearsOfNoOther) {
  const auto [edge, pass] = PassBesideACall(context_, leaf_);
  ExpectEndsElsewhere(
      pass, [&] { engine_.Release(context_->id()); }, absl::StatusCode::kCancelled);
}

// What it does itself for the pass may end it.
TEST_F(WhoseThreadTest, ACallThatEndsAPassHearsOfNoOther) {
  const at::Tensor received = Receive(context_, kPeer, 1);
  const Future<Unit> pass = engine_.Backward(
      context_, {received.sum()}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  ExpectEndsElsewhere(
      pass,
      [&] {
        network_.on_notify.Set([] { throw std::bad_alloc(); });
        Receive(context_, kPeer, 2);
      },
      absl::StatusCode::kResourceExhausted);
}

// Another thread stands on the strand of the pass when it begins.
TEST_F(WhoseThreadTest, APassRunsInTheModesOfWhoBeganIt) {
  const at::Tensor hooked = leaf_ * 2;
  bool autocast = false;
  hooked.register_hook(
      [&](const at::Tensor&) { autocast = at::autocast::is_autocast_enabled(at::kCPU); });
  const at::Tensor root = hooked.sum();
  absl::Notification on_strand, begun;
  std::thread other;
  network_.on_describe.Set([&] {
    on_strand.Notify();
    begun.WaitForNotification();
  });
  // When the pass is known, and has not begun.
  clock_.on_now.Set([&] {
    other = std::thread([&] {
      engine_.OnPeerLost(kOther, contexts_.begun(), absl::UnavailableError("it is gone"));
    });
    on_strand.WaitForNotification();
  });
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Future<Unit> pass = engine_.Backward(
      context_, {root}, {.deadline = absl::Now() + absl::Hours(1)}, /*run_here=*/false);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  begun.Notify();
  EXPECT_TRUE(pass.Wait().ok()) << pass.Wait().status();
  EXPECT_TRUE(autocast);
  other.join();
}

// Runs at once what is cheap, and leaves the rest to the pool. To the end of its scope.
class InlineLoop : public EventLoop {
 public:
  InlineLoop() { SetCurrent(this); }
  ~InlineLoop() override { SetCurrent(nullptr); }
  void Run(absl::AnyInvocable<void()> task) override {
    ++runs;
    task();
  }
  bool CanRunDeferred(const void*) override { return false; }
  void RunDeferred(absl::AnyInvocable<void()>) override { ADD_FAILURE() << "nothing comes here"; }

  int runs = 0;
};

// A handler of the program's next call may be hooking the nodes that one would look at.
TEST_F(EngineTest, WhatComesLateHasNoGraphLookedAt) {
  const auto context = contexts_.New();
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  const at::Tensor hooked = leaf * 2;
  hooked.register_hook([](const at::Tensor&) {});
  const absl::StatusOr<EdgeId> edge =
      engine_.RecordSend(*context, kPeer, Engine::MakeSend({hooked}));
  ASSERT_TRUE(edge.ok()) << edge.status();
  const Future<Unit> pass = engine_.Backward(
      context, {(leaf * 3).sum()}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
  ASSERT_EQ(sent.size(), 1u);
  const PassId id = sent[0].notices.front().pass;
  const Notice gradient{
      .kind = Notice::Kind::kEdge, .context = context->id(), .pass = id, .edge = *edge};
  Deliver(kPeer, {.kind = Notice::Kind::kAck, .context = context->id(), .pass = id, .count = 1});
  Deliver(kPeer, gradient);
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  InlineLoop loop;
  Notice late = gradient;
  late.uncounted = true;
  Deliver(kPeer, late);
  EXPECT_EQ(loop.runs, 1);
}

// The next pass has begun, and has gone well too: so nobody waits for anything of the first.
TEST_F(EngineTest, WhatComesLateOfASettledPassHasNoGraphLookedAt) {
  const auto context = contexts_.New();
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  const at::Tensor hooked = leaf * 2;
  hooked.register_hook([](const at::Tensor&) {});
  const at::Tensor root = (leaf * 3).sum();
  const absl::StatusOr<EdgeId> edge =
      engine_.RecordSend(*context, kPeer, Engine::MakeSend({hooked}));
  ASSERT_TRUE(edge.ok()) << edge.status();
  Notice gradient{.kind = Notice::Kind::kEdge, .context = context->id(), .edge = *edge};
  PassId first = 0;
  for (int i = 0; i < 2; ++i) {
    const Future<Unit> pass = engine_.Backward(
        context, {root}, {.retain_graph = true, .deadline = absl::InfiniteFuture()},
        /*run_here=*/true);
    const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
    ASSERT_EQ(sent.size(), 1u);
    gradient.pass = sent[0].notices.front().pass;
    if (first == 0) first = gradient.pass;
    Deliver(
        kPeer,
        {.kind = Notice::Kind::kAck, .context = context->id(), .pass = gradient.pass, .count = 1});
    Deliver(kPeer, gradient);
    AwaitPool();
    ASSERT_TRUE(pass.Done());
    network_.TakeSent();  // the acknowledgement
  }
  InlineLoop loop;
  Notice late = gradient;
  late.pass = first;
  late.uncounted = true;
  Deliver(kPeer, late);
  EXPECT_EQ(loop.runs, 1);
}

// ------------------------------------------------------------------------- What is over everywhere

// The others keep their parts of a pass until one of these words comes.
TEST_F(EngineTest, APassSaysWhichBeforeItAreSettled) {
  const auto context = contexts_.New();
  const at::Tensor root = Receive(context, kPeer, 1).sum();
  const auto begin = [&] {
    return engine_.Backward(context, {root},
                            {.retain_graph = true, .deadline = absl::InfiniteFuture()},
                            /*run_here=*/true);
  };
  const auto sent = [&] {
    const std::vector<RecordingNetwork::Sent> all = network_.TakeSent();
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? Notice() : all[0].notices.front();
  };
  const auto end = [&](const Notice& gradient) {
    Deliver(
        kPeer,
        {.kind = Notice::Kind::kAck, .context = context->id(), .pass = gradient.pass, .count = 1});
    AwaitPool();
  };
  const Future<Unit> first = begin();
  const Notice of_first = sent();
  const Future<Unit> second = begin();
  const Notice of_second = sent();
  EXPECT_EQ(of_second.settled, of_first.pass - 1) << "the first is in flight";
  end(of_second);
  ASSERT_TRUE(second.Done());
  const Future<Unit> third = begin();
  const Notice of_third = sent();
  EXPECT_EQ(of_third.settled, of_first.pass - 1) << "it still is, though a later one is over";
  end(of_first);
  end(of_third);
  ASSERT_TRUE(first.Done() && third.Done());
  begin();
  EXPECT_EQ(sent().settled, of_third.pass);
}

// ------------------------------------------------------------------------------ What is refused

TEST_F(EngineTest, ARootThatNoCallGaveInAContextSaysSo) {
  const Future<Unit> pass = engine_.Backward(
      contexts_.New(), {at::ones({})}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  ASSERT_TRUE(pass.Done());
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(pass.Wait().status().message()),
              ::testing::HasSubstr("made without a context"));
}

// It may have workers of one job, or of two, that know a context by one number, and edges, too.
TEST_F(EngineTest, APassTakesNoTensorThatAnotherWorkerOfThisProcessHasReceived) {
  const std::pair<ContextRecord::Holder, std::string> all[] = {
      {{kOther, 2}, "from worker 2 by another worker of this process (of this job worker 3)"},
      {{kSelf, 2}, "from worker 2 in another job"}};
  for (const auto& [holder, why] : all) {
    for (const size_t tensors : {1, 2}) {
      SCOPED_TRACE(absl::StrCat(why, ", ", tensors));
      const auto context = contexts_.New();
      std::vector<at::Tensor> ours(1, at::ones({2})), theirs(tensors, at::ones({2}));
      for (at::Tensor& each : theirs) each = each.clone();
      const EdgeEnd end = {MakeId(kPeer, 1), kPeer};
      ASSERT_TRUE(engine_.RecordRecv(context, end, absl::MakeSpan(ours)).ok());
      const auto others = std::make_shared<ContextRecord>(context->id(), holder);
      ASSERT_TRUE(engine_.RecordRecv(others, end, absl::MakeSpan(theirs)).ok());
      const Future<Unit> pass =
          engine_.Backward(context, {(ours[0] * theirs.front() * theirs.back()).sum()},
                           {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
      AwaitPool();
      EXPECT_TRUE(pass.Done());
      if (!pass.Done()) continue;
      EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(pass.Wait().status().message()), HasSubstr(why));
    }
  }
}

// A release comes while the pass is being made.
TEST_F(EngineTest, APassThatIsOverBeforeItBeginsLeavesNoTimer) {
  const auto context = contexts_.New();
  const at::Tensor leaf = at::ones({}).requires_grad_();
  clock_.on_now.Set([&] { engine_.Release(context->id()); });
  const Future<Unit> pass = engine_.Backward(
      context, {leaf * 2}, {.deadline = absl::Now() + absl::Hours(1)}, /*run_here=*/true);
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kCancelled) << pass.Wait().status();
  EXPECT_EQ(clock_.timers(), 0u);
}

// ------------------------------------------------------------------------------- What is reported

// The error of a large job's pass would fill screens, and its memory is the peers' to fill.
TEST_F(EngineTest, AnErrorPastTheDeadlineQuotesSixteenWorkers) {
  constexpr int kPeers = 40;
  const auto context = contexts_.New();
  at::Tensor root;
  for (int i = 0; i < kPeers; ++i) {
    const at::Tensor sum = Receive(context, static_cast<WorkerRank>(100 + i), 1).sum();
    root = root.defined() ? root + sum : sum;
  }
  const Future<Unit> pass =
      engine_.Backward(context, {root}, {.deadline = clock_.Now()}, /*run_here=*/true);
  std::map<WorkerRank, uint32_t> sent;
  PassId id = 0;
  const auto count = [&] {
    for (const RecordingNetwork::Sent& packet : network_.TakeSent()) {
      for (const Notice& notice : packet.notices) {
        if (notice.kind == Notice::Kind::kEdge) ++sent[packet.to];
        id = std::max(id, notice.pass);
      }
    }
  };
  count();
  ASSERT_EQ(sent.size(), static_cast<size_t>(kPeers));
  clock_.RunTimers();
  AwaitPool();
  count();
  for (const auto& [peer, edges] : sent) {
    Deliver(peer, {.kind = Notice::Kind::kReport,
                   .context = context->id(),
                   .pass = id,
                   .awaited = "what it waited for"});
    Deliver(peer,
            {.kind = Notice::Kind::kAck, .context = context->id(), .pass = id, .count = edges});
  }
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  const std::string message(pass.Wait().status().message());
  size_t quoted = 0;
  for (size_t at = 0; (at = message.find("what it waited for", at)) != message.npos; ++at) ++quoted;
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(quoted, 15u) << "and its own; " << message;
  EXPECT_THAT(message, HasSubstr("the end of worker "));
}

// It is lost, and its message comes late: that says nothing of what the others have still to say.
TEST_F(EngineTest, WhatIsRefusedEndsNoWaitForReports) {
  const auto context = contexts_.New();
  for (const WorkerRank peer : {kPeer, kOther}) ASSERT_TRUE(context->AddPeer(peer).ok());
  const at::Tensor root = Receive(context, kPeer, 1).sum() + Receive(context, kOther, 1).sum();
  const Future<Unit> pass =
      engine_.Backward(context, {root}, {.deadline = clock_.Now()}, /*run_here=*/true);
  const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
  ASSERT_FALSE(sent.empty());
  Notice notice{
      .kind = Notice::Kind::kStart, .context = context->id(), .pass = sent[0].notices.front().pass};
  clock_.RunTimers();
  engine_.OnPeerLost(kPeer, contexts_.begun(), absl::UnavailableError("it is gone"));
  Deliver(kPeer, notice);
  AwaitPool();
  ASSERT_FALSE(pass.Done()) << pass.Wait().status();
  notice.kind = Notice::Kind::kReport;
  notice.awaited = "what it waited for";
  Deliver(kOther, notice);
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  EXPECT_THAT(std::string(pass.Wait().status().message()), HasSubstr("what it waited for"));
}

// -------------------------------------------------------------------------------- What is thrown

// When everything has been done but to say so. A pass that has gone well is kept, and what waits
// for it with it.
TEST_F(EngineTest, WhatIsThrownAtTheEndOfAPassKeepsNobodyWaiting) {
  const auto context = contexts_.New();
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  const absl::StatusOr<EdgeId> edge =
      engine_.RecordSend(*context, kPeer, Engine::MakeSend({leaf * 2}));
  ASSERT_TRUE(edge.ok()) << edge.status();
  const Future<Unit> pass = engine_.Backward(
      context, {(leaf * 3).sum()}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
  ASSERT_EQ(sent.size(), 1u);
  const PassId id = sent[0].notices.front().pass;
  Deliver(kPeer, {.kind = Notice::Kind::kAck, .context = context->id(), .pass = id, .count = 1});
  ASSERT_FALSE(pass.Done()) << "no gradient has come";
  network_.on_notify.Set([] { throw std::bad_alloc(); });
  Deliver(kPeer,
          {.kind = Notice::Kind::kEdge, .context = context->id(), .pass = id, .edge = *edge});
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  EXPECT_TRUE(pass.Wait().ok()) << pass.Wait().status();
}

TEST_F(EngineTest, APacketThatCannotBeSentKeepsNoOtherFromItsWorker) {
  const auto context = contexts_.New();
  const at::Tensor sum = Receive(context, kPeer, 1) + Receive(context, kOther, 1);
  const Future<Unit> pass = engine_.Backward(
      context, {sum.sum()}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  ASSERT_FALSE(pass.Done()) << "the peers have not said that they are done";
  network_.TakeSent();
  network_.on_notify.Set([] { throw std::bad_alloc(); });
  pass.Cancel();
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kCancelled);
  const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
  ASSERT_EQ(sent.size(), 1u) << "the first of two was lost";
  EXPECT_EQ(sent[0].notices.front().kind, Notice::Kind::kAbort);
}

// Nobody reports, and the timer that would end the wait for that may find no memory.
TEST_F(EngineTest, APassPastItsDeadlineEndsWithoutMemory) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const auto context = contexts_.New();
    const Future<Unit> pass = engine_.Backward(context, {Receive(context, kPeer, nth + 1).sum()},
                                               {.deadline = clock_.Now()}, /*run_here=*/true);
    const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
    ASSERT_EQ(sent.size(), 1u);
    FailAllocation(nth);
    clock_.RunTimers();
    failed = FailAllocation(-1);
    Deliver(kPeer, {.kind = Notice::Kind::kAck,
                    .context = context->id(),
                    .pass = sent[0].notices.front().pass,
                    .count = 1});
    AwaitPool();
    clock_.RunTimers();
    AwaitPool();
    EXPECT_TRUE(pass.Done());
    engine_.Release(context->id());
    network_.TakeSent();
  }
}

// The pass would wait for the answer to what was never sent.
TEST_F(EngineTest, WhatIsNotSentIsNotWaitedForWithoutMemory) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const auto context = contexts_.New();
    const auto [edge, pass] = PassBesideACall(context, at::ones({2}).requires_grad_());
    FailAllocation(nth);
    engine_.DropSend(*context, edge);
    failed = FailAllocation(-1);
    AwaitPool();
    EXPECT_TRUE(pass.Done());
    engine_.Release(context->id());
    network_.TakeSent();
  }
}

// The graph is its user's, and the thread may be one that must run nothing of theirs.
TEST_F(EngineTest, WhatIsNotSentEndsOnThePoolWithoutMemory) {
  constexpr int kMany = 100;  // of which some need memory for the pool's queue
  const auto context = contexts_.New();
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  float values[2] = {1, 1};
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<int> here_ended{0}, elsewhere_ended{0};
  AwaitPool();
  for (int nth = 0; nth < 2; ++nth) {
    for (int i = 0; i < kMany; ++i) {
      at::Tensor factor = at::from_blob(values, {2}, [&](void*) {
        ++(std::this_thread::get_id() == here ? here_ended : elsewhere_ended);
      });
      const absl::StatusOr<EdgeId> edge =
          engine_.RecordSend(*context, kPeer, Engine::MakeSend({leaf * factor}));
      factor.reset();  // the graph has it
      ASSERT_TRUE(edge.ok()) << edge.status();
      FailAllocation(nth);
      EXPECT_NO_THROW(engine_.DropSend(*context, *edge));
      FailAllocation(-1);
    }
  }
  AwaitPool();
  EXPECT_EQ(here_ended, 0);
  EXPECT_EQ(elsewhere_ended, 2 * kMany);
}

// The thread that hears of it may be that of the sockets or the clock's.
TEST_F(EngineTest, WhatAnotherWorkerReleasesEndsOnThePoolWithoutMemory) {
  float values[2] = {1, 1};
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<int> here_ended{0}, elsewhere_ended{0};
  const auto leaf = [&] {
    return at::from_blob(values, {2},
                         [&](void*) {
                           ++(std::this_thread::get_id() == here ? here_ended : elsewhere_ended);
                         })
        .requires_grad_();
  };
  int ended = 0;
  const auto context_with_graph = [&](uint64_t number) {
    const auto context = contexts_.FindOrAdd(MakeId(kOther, number), /*edge=*/0);
    EXPECT_TRUE(context.ok()) << context.status();
    for (const WorkerRank peer : {kPeer, kOther}) EXPECT_TRUE((*context)->AddPeer(peer).ok());
    EXPECT_TRUE(engine_.RecordSend(**context, kPeer, Engine::MakeSend({leaf() * 2})).ok());
    (*context)->AddToGradient(leaf(), at::ones({2}));
    ended += 2;
    return (*context)->id();
  };
  Deliver(kOther, {.kind = Notice::Kind::kRelease, .context = context_with_graph(1)});
  AwaitPool();
  EXPECT_EQ(elsewhere_ended, ended);
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const ContextId id = context_with_graph(nth + 2);
    const absl::Status why = absl::UnavailableError("it is gone");
    FailAllocation(nth);
    AwaitMemory([&] { engine_.OnPeerLost(kOther, contexts_.begun(), why); });
    failed = FailAllocation(-1);
    EXPECT_EQ(contexts_.Find(id), nullptr);
    AwaitPool();
    EXPECT_EQ(elsewhere_ended, ended);
  }
  EXPECT_EQ(here_ended, 0);
}

// A node of a program's, whose destructor says where it runs.
class NodeOfUser : public torch::autograd::Node {
 public:
  explicit NodeOfUser(std::function<void()> on_end) : on_end_(std::move(on_end)) {}
  ~NodeOfUser() override { on_end_(); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  // A tensor that was made of `from`.
  static at::Tensor Make(const at::Tensor& from, std::function<void()> on_end) {
    const auto node = std::make_shared<NodeOfUser>(std::move(on_end));
    node->set_next_edges(torch::autograd::collect_next_edges(from));
    at::Tensor made = at::ones({2});
    torch::autograd::create_gradient_edge(made, node);
    return made;
  }

 private:
  const std::function<void()> on_end_;
};

// It has what it would have run in: the modes of its caller's, which take memory to be moved.
TEST_F(EngineTest, APassThatIsRefusedEndsWithoutMemory) {
  const auto context = contexts_.New();
  // It outlives all passes, for libtorch's deleteNode() allocates in a destructor.
  const at::Tensor root = (at::ones({2}).requires_grad_() * 2).sum();
  ASSERT_TRUE(engine_
                  .Backward(context, {root}, {.deadline = absl::InfiniteFuture()},
                            /*run_here=*/true)
                  .Wait()
                  .ok());  // which uses the context's graph up
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    std::optional<Future<Unit>> refused;
    std::vector<at::Tensor> roots = {root};
    FailAllocation(nth);
    try {
      refused = engine_.Backward(context, std::move(roots), {.deadline = absl::InfiniteFuture()},
                                 /*run_here=*/true);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): then there is no pass
    }
    failed = FailAllocation(-1);
    if (refused.has_value()) {
      EXPECT_FALSE(refused->Wait().ok());
    }
  }
}

// Where what a pass alone has of its user's ends: its graph, and the root's gradient, whose memory
// may be lent.
class EndOfPassTest : public EngineTest, public ::testing::WithParamInterface<bool> {
 protected:
  struct Begun {
    ContextId context;
    EdgeId edge;
    PassId pass = 0;
    Future<Unit> done;
  };

  // Counts on this thread, which is a user's here and stands for one of the sockets or the clock's
  // elsewhere, and on others.
  std::function<void()> Count() {
    return [this, here = std::this_thread::get_id()] {
      ++(std::this_thread::get_id() == here ? ended_here_ : ended_elsewhere_);
    };
  }
  Future<Unit> Begin(const std::shared_ptr<ContextRecord>& context) {
    std::vector<at::Tensor> gradients, roots;
    gradients.push_back(GetParam()
                            ? at::from_blob(values_, {2}, [count = Count()](void*) { count(); })
                            : at::ones({2}));
    roots.push_back(NodeOfUser::Make(at::ones({2}).requires_grad_() * 3, Count()));
    return engine_.Backward(context, std::move(roots),
                            {.root_gradients = std::move(gradients), .deadline = clock_.Now()},
                            /*run_here=*/true);
  }
  // One that waits for its peer alone, in a context of another worker's.
  Begun BeginBesideAPeer() {
    const auto context = contexts_.FindOrAdd(MakeId(kOther, ++contexts_begun_), /*edge=*/0);
    EXPECT_TRUE(context.ok()) << context.status();
    for (const WorkerRank peer : {kPeer, kOther}) EXPECT_TRUE((*context)->AddPeer(peer).ok());
    const absl::StatusOr<EdgeId> edge = engine_.RecordSend(
        **context, kPeer, Engine::MakeSend({at::ones({2}).requires_grad_() * 2}));
    EXPECT_TRUE(edge.ok()) << edge.status();
    Begun begun{.context = (*context)->id(), .edge = *edge, .done = Begin(*context)};
    const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
    EXPECT_EQ(sent.size(), 1u);
    begun.pass = sent.at(0).notices.front().pass;
    return begun;
  }

  // The pass, with all that it had; and makes way for the next one.
  void ExpectEndedElsewhere(const Begun& begun) {
    AwaitPool();
    EXPECT_TRUE(begun.done.Done());
    EXPECT_EQ(ended_here_.exchange(0), 0);
    EXPECT_EQ(ended_elsewhere_.exchange(0), all_);
    engine_.Release(begun.context);
    network_.TakeSent();
  }

  const int all_ = GetParam() ? 2 : 1;
  float values_[2] = {1, 1};
  uint64_t contexts_begun_ = 0;
  std::atomic<int> ended_here_{0}, ended_elsewhere_{0};
};

TEST_P(EndOfPassTest, WhatAPassHasOfItsUsersEndsOnThePool) {
  using End = std::function<void(const Begun&)>;
  const std::pair<std::string, End> ways[] = {
      {"well",
       [&](const Begun& b) {
         Deliver(
             kPeer,
             {.kind = Notice::Kind::kEdge, .context = b.context, .pass = b.pass, .edge = b.edge});
         AwaitPool();
         Deliver(kPeer,
                 {.kind = Notice::Kind::kAck, .context = b.context, .pass = b.pass, .count = 1});
       }},
      {"an abort",
       [&](const Begun& b) {
         Deliver(kPeer, {.kind = Notice::Kind::kAbort,
                         .context = b.context,
                         .pass = b.pass,
                         .status = absl::InternalError("it has failed")});
       }},
      {"a lost peer",
       [&](const Begun&) {
         engine_.OnPeerLost(kPeer, contexts_.begun(), absl::UnavailableError("it is gone"));
       }},
      {"a deadline",
       [&](const Begun&) {
         clock_.RunTimers();
         clock_.RunTimers();  // nobody says what it waited for
       }},
      {"a release",
       [&](const Begun& b) {
         Deliver(kOther, {.kind = Notice::Kind::kRelease, .context = b.context});
       }},
      {"a cancel", [&](const Begun& b) { b.done.Cancel(); }},
  };
  for (const auto& [name, end] : ways) {
    SCOPED_TRACE(name);
    const Begun begun = BeginBesideAPeer();
    ASSERT_EQ(ended_here_ + ended_elsewhere_, 0);
    ASSERT_FALSE(begun.done.Done());
    end(begun);
    ExpectEndedElsewhere(begun);
  }
}

TEST_P(EndOfPassTest, WhatAPassHasOfItsUsersEndsOnThePoolWithoutMemory) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const Begun begun = BeginBesideAPeer();
    const absl::Status why = absl::UnavailableError("it is gone");
    FailAllocation(nth);
    AwaitMemory([&] { engine_.OnPeerLost(kPeer, contexts_.begun(), why); });
    failed = FailAllocation(-1);
    ExpectEndedElsewhere(begun);
  }
}

// The pool would have to wake a thread for that. But memory that is lent ends there, for its
// deleter may wait for who waits for the pass.
TEST_P(EndOfPassTest, WhatAPassHasOfItsUsersEndsOnTheThreadThatRanIt) {
  const Future<Unit> pass = Begin(contexts_.New());
  EXPECT_TRUE(pass.Done());
  AwaitPool();
  EXPECT_EQ(ended_here_, GetParam() ? 0 : all_);
  EXPECT_EQ(ended_elsewhere_, GetParam() ? all_ : 0);
}

INSTANTIATE_TEST_SUITE_P(Lent, EndOfPassTest, ::testing::Bool());

// Two workers that leave may each have made a context of the other's: whoever hears in the middle
// of a release that its maker is lost does not end it once more.
TEST_F(EngineTest, AContextThatAnotherWorkerReleasesEndsOnce) {
  for (const bool has_memory : {true, false}) {
    SCOPED_TRACE(has_memory);
    const ContextId id = MakeId(kOther, has_memory ? 1 : 2);
    const absl::StatusOr<std::shared_ptr<ContextRecord>> context = contexts_.FindOrAdd(id, 0);
    ASSERT_TRUE(context.ok()) << context.status();
    ASSERT_TRUE((*context)->AddPeer(kPeer).ok());
    network_.on_notify.Set([&] {
      engine_.OnPeerLost(kOther, contexts_.begun(), absl::UnavailableError("it is gone"));
      if (!has_memory) throw std::bad_alloc();
    });
    Deliver(kOther, {.kind = Notice::Kind::kRelease, .context = id});
    AwaitPool();
    EXPECT_EQ(contexts_.size(), 0u);
    const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
    ASSERT_EQ(sent.size(), 1u);
    EXPECT_EQ(sent[0].to, kPeer);
    EXPECT_EQ(sent[0].notices.front().kind, Notice::Kind::kRelease);
  }
}

// ------------------------------------------------------------------------------ Workers that go

// Of a pass of a third worker's context, of which nothing else has come yet.
Notice StartOf(ContextId context) {
  return {.kind = Notice::Kind::kStart, .context = context, .pass = MakeId(MakerOf(context), 1)};
}

// Its call is on its way, on the link for large packets, and then lost.
TEST_F(EngineTest, AContextThatANoticeBroughtIsMadeKnownToItsOriginWhenTheSenderIsLost) {
  const ContextId context = MakeId(kOther, 1);
  Deliver(kPeer, StartOf(context));
  AwaitPool();
  ASSERT_NE(contexts_.Find(context), nullptr);
  network_.TakeSent();
  engine_.OnPeerLost(kPeer, contexts_.begun(), absl::UnavailableError("it is gone"));
  bool asked = false;
  for (const auto& sent : network_.TakeSent()) {
    for (const Notice& notice : sent.notices) {
      asked |= sent.to == kOther && notice.kind == Notice::Kind::kKnown;
    }
  }
  EXPECT_TRUE(asked) << "the origin's release was going to come by way of the worker that is lost";
  Deliver(kOther, {.kind = Notice::Kind::kRelease, .context = context});
  AwaitPool();
  EXPECT_EQ(contexts_.size(), 0u);
}

// Who hears that a call has failed may begin anew, with the peer as it can be reached now, before
// the contexts hear what was lost.
TEST_F(EngineTest, AContextThatBeganAfterALossHasLostNobody) {
  const std::shared_ptr<ContextRecord> old = contexts_.New();
  ASSERT_TRUE(old->AddPeer(kPeer).ok());
  const uint64_t begun = contexts_.begun();
  const std::shared_ptr<ContextRecord> next = contexts_.New();
  const auto of_peer = contexts_.FindOrAdd(MakeId(kPeer, 1), /*edge=*/0);
  ASSERT_TRUE(of_peer.ok()) << of_peer.status();
  for (const auto& context : {next, *of_peer}) ASSERT_TRUE(context->AddPeer(kPeer).ok());
  engine_.OnPeerLost(kPeer, begun, absl::UnavailableError("it is gone"));
  EXPECT_TRUE(
      absl::IsUnavailable(old->AddSend({.end = {.edge = 1, .peer = kPeer}, .node = nullptr})));
  EXPECT_EQ(next->AddSend({.end = {.edge = 2, .peer = kPeer}, .node = nullptr}), absl::OkStatus());
  EXPECT_FALSE((*of_peer)->released());
}

// What was read when its connection ended is lost by itself.
TEST_F(EngineTest, OneContextMayLoseThePeerThatMadeIt) {
  const auto late = contexts_.FindOrAdd(MakeId(kPeer, 1), /*edge=*/0);
  const auto next = contexts_.FindOrAdd(MakeId(kPeer, 2), /*edge=*/0);
  for (const bool is_cut_off : {true, false}) {
    const auto& context = is_cut_off ? *late : *next;
    ASSERT_TRUE(engine_.AddPeer(*context, kPeer, [&] { return is_cut_off; }).ok());
  }
  EXPECT_TRUE((*late)->released());
  EXPECT_EQ(contexts_.Find(MakeId(kPeer, 1)), nullptr);
  EXPECT_FALSE((*next)->released());
}

// A call of this worker to its peer has failed, and the peer knows nothing of that: it had nothing
// of the context yet. Edges of its later calls to this worker never come to be, and it waits for
// their gradients.
TEST_F(EngineTest, APassEndsWhoseWorkerHasLostAnotherThatDoesNotKnow) {
  uint64_t contexts = 0;
  for (const bool waits : {false, true}) {
    for (const Notice::Kind kind : {Notice::Kind::kStart, Notice::Kind::kEdge}) {
      SCOPED_TRACE(absl::StrCat(waits ? "this worker waits for a gradient" : "this worker is done",
                                kind == Notice::Kind::kStart ? "" : ", and one comes"));
      const ContextId id = MakeId(kOther, ++contexts);
      const auto context = contexts_.FindOrAdd(id, /*edge=*/0);
      ASSERT_TRUE(context.ok()) << context.status();
      ASSERT_TRUE((*context)->AddPeer(kPeer).ok());
      if (waits) {
        const auto edge = engine_.RecordSend(
            **context, kOther, Engine::MakeSend({at::ones({2}).requires_grad_() * 2}));
        ASSERT_TRUE(edge.ok()) << edge.status();
      }
      engine_.OnPeerLost(kPeer, contexts_.begun(), absl::UnavailableError("worker 2 was silent"));
      Deliver(kOther, StartOf(id));
      AwaitPool();
      EXPECT_EQ(engine_.CountPasses().running, waits ? 1u : 0u);
      network_.TakeSent();
      Notice notice = StartOf(id);
      notice.kind = kind;
      if (kind == Notice::Kind::kEdge) notice.edge = MakeId(kSelf, 7);
      Deliver(kPeer, notice);
      AwaitPool();
      const std::map<WorkerRank, std::string> told = TakeAborts();
      const std::string why = absl::StrCat("backward of context ", id, " on worker 1: context ", id,
                                           " has lost worker 2: worker 2 was silent");
      EXPECT_THAT(told, Contains(Pair(kPeer, why)));
      // Who is done has told its parent so, and hears nothing more of it from here.
      EXPECT_EQ(told.count(kOther), waits ? 1u : 0u);
      EXPECT_EQ(engine_.CountPasses().running, 0u);
    }
  }
}

// Else the initiator would hear only that the message before it was refused.
TEST_F(EngineTest, AnAbortBesideWhatIsRefusedSaysWhyAPassFails) {
  const ContextId id = MakeId(kOther, 1);
  const auto context = contexts_.FindOrAdd(id, /*edge=*/0);
  ASSERT_TRUE(context.ok()) << context.status();
  ASSERT_TRUE((*context)->AddPeer(kPeer).ok());
  const auto edge =
      engine_.RecordSend(**context, kOther, Engine::MakeSend({at::ones({2}).requires_grad_() * 2}));
  ASSERT_TRUE(edge.ok()) << edge.status();
  engine_.OnPeerLost(kPeer, contexts_.begun(), absl::UnavailableError("worker 2 was silent"));
  Deliver(kOther, StartOf(id));
  AwaitPool();
  ASSERT_EQ(engine_.CountPasses().running, 1u);
  network_.TakeSent();
  Notice abort = StartOf(id);
  abort.kind = Notice::Kind::kAbort;
  abort.status = absl::DataLossError("its disk is full");
  DeliverTogether(kPeer, {StartOf(id), abort});
  AwaitPool();
  EXPECT_EQ(engine_.CountPasses().running, 0u);
  const std::map<WorkerRank, std::string> told = TakeAborts();
  EXPECT_THAT(told, Contains(Pair(kOther, "its disk is full")));
  EXPECT_THAT(told, Contains(Pair(kPeer, HasSubstr("has lost worker 2"))));
}

// What is told of it is the user's code, which runs in no modes of the pass's nodes.
TEST_F(EngineTest, AnEndThatComesWhileANodeSendsIsToldOutsideOfThatNode) {
  const std::thread::id this_thread = std::this_thread::get_id();
  // The gradient is so large that the thread that is in the node sends it, unless another one has
  // the pass's strand just then: that may be this one, within Backward(). Then once more.
  bool in_node = false;
  for (uint64_t edge = 1; !in_node; ++edge) {
    const auto context = contexts_.New();
    at::Tensor large = at::ones({1 << 16});
    ASSERT_TRUE(
        engine_.RecordRecv(context, {MakeId(kPeer, edge), kPeer}, absl::MakeSpan(&large, 1)).ok());
    absl::Notification is_begun, told;
    bool is_here = false, in_modes_of_nodes = true;
    Future<Unit> pass;
    network_.on_notify.Set([&] {
      if (std::this_thread::get_id() == this_thread) {
        is_here = true;
        return;
      }
      in_node = !at::GradMode::is_enabled();
      is_begun.WaitForNotification();
      // It is left to the thread that is here.
      std::thread([&] { pass.Cancel(); }).join();
    });
    pass = engine_.Backward(context, {large.sum()}, {.deadline = absl::InfiniteFuture()},
                            /*run_here=*/false);
    pass.Then([&](const absl::StatusOr<Unit>&) {
      in_modes_of_nodes = !at::GradMode::is_enabled();
      told.Notify();
    });
    is_begun.Notify();
    if (is_here) pass.Cancel();
    told.WaitForNotification();
    EXPECT_FALSE(in_modes_of_nodes);
  }
}

// The worker that made it takes no part in the pass, whose workers would know only of a release.
TEST_F(EngineTest, APassOfAContextWhoseMakerIsLostSaysSo) {
  const absl::StatusOr<std::shared_ptr<ContextRecord>> context =
      contexts_.FindOrAdd(MakeId(kOther, 1), /*edge=*/0);
  ASSERT_TRUE(context.ok()) << context.status();
  ASSERT_TRUE((*context)->AddPeer(kOther).ok());
  const Future<Unit> pass =
      engine_.Backward(*context, {Receive(*context, kPeer, 1).sum()},
                       {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  ASSERT_FALSE(pass.Done()) << "the peer has not said that it is done";
  network_.TakeSent();
  engine_.OnPeerLost(kOther, contexts_.begun(), absl::UnavailableError("worker 2 is gone"));
  AwaitPool();
  EXPECT_THAT(TakeAborts(), Contains(Pair(kPeer, HasSubstr("worker 2 is gone"))));
  Deliver(kPeer, {.kind = Notice::Kind::kAck,
                  .context = (*context)->id(),
                  .pass = MakeId(kSelf, 1),
                  .count = 1});
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(pass.Wait().status().message()), HasSubstr("worker 2 is gone"));
}

// What was in the packet is lost; its bytes alone cannot be read without it.
TEST_F(EngineTest, APassFailsWhoseGradientsFoundNoMemory) {
  const auto context = contexts_.New();
  const Future<Unit> pass =
      engine_.Backward(context, {Receive(context, kPeer, 1).sum()},
                       {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  ASSERT_FALSE(pass.Done()) << "the peer has not said that it is done";
  Packet packet{"what tells of gradients", {}, absl::ResourceExhaustedError("there is no memory")};
  DeliverWhatCannotBeRead(kPeer, std::move(packet));
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kResourceExhausted)
      << pass.Wait().status();
}

// What a packet would have told of the pass is lost with it: its sender counts as lost.
TEST_F(EngineTest, APassFailsWhosePeerSendsWhatIsNoNotice) {
  Packet unknown, cut;
  ASSERT_TRUE(AppendNotice({.kind = static_cast<Notice::Kind>(99), .pass = 1}, &unknown).ok());
  ASSERT_TRUE(AppendNotice({.kind = Notice::Kind::kAck, .pass = 1, .count = 1}, &cut).ok());
  cut.bytes.pop_back();
  // Of these each byte can be read.
  Packet of_no_pass, of_a_pass;
  ASSERT_TRUE(AppendNotice({.kind = Notice::Kind::kAck, .count = 1}, &of_no_pass).ok());
  ASSERT_TRUE(AppendNotice({.kind = Notice::Kind::kRelease, .pass = 1}, &of_a_pass).ok());
  // These name a worker that what they say cannot be about.
  const PassId of_other = MakeId(kOther, 1);
  Packet others_edge, others_settled;
  ASSERT_TRUE(AppendNotice({.kind = Notice::Kind::kEdge, .pass = 1, .edge = MakeId(kOther, 7)},
                           &others_edge)
                  .ok());
  ASSERT_TRUE(
      AppendNotice({.kind = Notice::Kind::kAck, .pass = 1, .settled = of_other}, &others_settled)
          .ok());
  const std::tuple<Packet, std::string> all[] = {
      {unknown, "reading gradients from worker 2: a notice of unknown kind 99"},
      {cut, "reading gradients from worker 2: "},
      {of_no_pass, "reading gradients from worker 2: a notice without its pass"},
      {of_a_pass, "reading gradients from worker 2: a notice without its pass"},
      {others_edge, absl::StrCat("reading gradients from worker 2: a gradient for edge ",
                                 MakeId(kOther, 7), ", which is worker 3's")},
      {others_settled, absl::StrCat("reading gradients from worker 2: pass 1 settles that of "
                                    "another worker, ",
                                    of_other)}};
  for (const auto& [packet, why] : all) {
    SCOPED_TRACE(why);
    const auto context = contexts_.New();
    const Future<Unit> pass =
        engine_.Backward(context, {Receive(context, kPeer, 1).sum()},
                         {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
    ASSERT_FALSE(pass.Done()) << "the peer has not said that it is done";
    DeliverWhatCannotBeRead(kPeer, packet);
    AwaitPool();
    EXPECT_TRUE(pass.Done());
    if (!pass.Done()) continue;
    EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(pass.Wait().status().message()), HasSubstr(why));
  }
}

// It would be in the place of the one that this worker begins next, which would never end.
TEST_F(EngineTest, NobodyElseBeginsAPassOfThisWorker) {
  const auto context = contexts_.New();
  const Notice start{
      .kind = Notice::Kind::kStart, .context = context->id(), .pass = MakeId(kSelf, 1)};
  Deliver(kPeer, start);
  AwaitPool();
  EXPECT_THAT(TakeAborts(), Contains(Pair(kPeer, HasSubstr("or was never begun"))));
  const Future<Unit> pass =
      engine_.Backward(context, {Receive(context, kPeer, 1).sum()},
                       {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
  const std::vector<RecordingNetwork::Sent> sent = network_.TakeSent();
  ASSERT_EQ(sent.size(), 1u);
  ASSERT_EQ(sent[0].notices.front().pass, start.pass);
  Deliver(kPeer,
          {.kind = Notice::Kind::kAck, .context = context->id(), .pass = start.pass, .count = 1});
  AwaitPool();
  ASSERT_TRUE(pass.Done());
  EXPECT_TRUE(pass.Wait().ok()) << pass.Wait().status();
}

// Of two gradients for one edge its other end would take the first.
TEST_F(EngineTest, APassFailsWhosePeerHasSentTwoMessagesWithOneEdge) {
  for (const int tensors : {1, 2}) {
    SCOPED_TRACE(tensors);
    const auto context = contexts_.New();
    at::Tensor sum = at::zeros({2});
    for (int message = 0; message < 2; ++message) {
      std::vector<at::Tensor> received;
      for (int i = 0; i < tensors; ++i) received.push_back(at::ones({2}));
      ASSERT_TRUE(
          engine_.RecordRecv(context, {MakeId(kPeer, 1), kPeer}, absl::MakeSpan(received)).ok());
      for (const at::Tensor& each : received) sum = sum + each;
    }
    const Future<Unit> pass = engine_.Backward(
        context, {sum.sum()}, {.deadline = absl::InfiniteFuture()}, /*run_here=*/true);
    AwaitPool();
    ASSERT_TRUE(pass.Done());
    EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(pass.Wait().status().message()),
                HasSubstr("two messages with one edge"));
  }
}

// The pool comes to the message of a worker when that is lost already.
TEST_F(EngineTest, AMessageThatIsReadLateBringsNoContextOfALostWorker) {
  absl::Notification go;
  pool_.Schedule([&] { go.WaitForNotification(); });
  Deliver(kPeer, StartOf(MakeId(kPeer, 1)));
  Deliver(kPeer, StartOf(MakeId(kOther, 1)));
  engine_.OnPeerLost(kPeer, contexts_.begun(), absl::UnavailableError("it is gone"));
  go.Notify();
  AwaitPool();
  EXPECT_EQ(contexts_.Find(MakeId(kPeer, 1)), nullptr) << "nobody is left to release it";
  bool asked = false;
  for (const auto& sent : network_.TakeSent()) {
    for (const Notice& notice : sent.notices) {
      asked |= sent.to == kOther && notice.kind == Notice::Kind::kKnown;
    }
  }
  EXPECT_TRUE(asked || contexts_.Find(MakeId(kOther, 1)) == nullptr);
  EXPECT_EQ(engine_.CountPasses().running, 0u) << "a pass that nobody will end";
}

// It is read while another thread tells of the end of its connection.
TEST_F(EngineTest, ANoticeThatIsReadAfterALossBringsNoContextOfALostWorker) {
  Deliver(kPeer, StartOf(MakeId(kPeer, 1)), /*is_cut_off=*/true);
  EXPECT_EQ(contexts_.size(), 0u) << "nobody is left to release it";
  const auto known = contexts_.FindOrAdd(MakeId(kOther, 1), /*edge=*/0);
  ASSERT_TRUE(known.ok()) << known.status();
  ASSERT_TRUE((*known)->AddPeer(kOther).ok());
  const auto edge =
      engine_.RecordSend(**known, kOther, Engine::MakeSend({at::ones({2}).requires_grad_() * 2}));
  ASSERT_TRUE(edge.ok()) << edge.status();
  Deliver(kPeer, StartOf(MakeId(kOther, 1)), /*is_cut_off=*/true);
  AwaitPool();
  EXPECT_EQ(engine_.CountPasses().running, 0u) << "a pass that nobody will end";
}

}  // namespace
}  // namespace distgrad
