// Passes that meet: each other, calls that are made or answered while they run, and errors,
// losses and releases at every point. None may hang, and none may leave anything behind.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "core/autograd/state.h"
#include "core/base/origin.h"
#include "tests/integration/team.h"

namespace distgrad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Tensors Sin(Tensors in, Request&) { return {in[0].sin()}; }

// Passes x through the workers named in `path`, one calling the next; each computes a sine on the
// way there and a tanh on the way back, with `at(worker, there)` in between.
using Visit = std::function<at::Tensor(int worker, bool there, at::Tensor)>;
Team::Function Along(Team& team, std::string path, Visit visit = nullptr) {
  return [&team, path, visit](Tensors in, Request& r) -> absl::StatusOr<Tensors> {
    const int self = path[0] - '0';
    at::Tensor x = in[0].sin();
    if (visit) x = visit(self, true, x);
    if (path.size() > 1) {
      auto further =
          team.Try(self, path[1] - '0', r.Nested(), Along(team, path.substr(1), visit), {x});
      if (!further.ok()) return further.status();
      x = (*further)[0];
    }
    x = x.tanh();
    if (visit) x = visit(self, false, x);
    return Tensors{x};
  };
}
at::Tensor LocalAlong(at::Tensor x, size_t workers) {
  for (size_t i = 0; i < workers; ++i) x = x.sin();
  for (size_t i = 0; i < workers; ++i) x = x.tanh();
  return x;
}

// Whether an error of a pass says all of that.
void ExpectError(const absl::Status& status, const std::vector<std::string>& texts) {
  EXPECT_FALSE(status.ok());
  for (const std::string& text : texts)
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status << "\nlacks " << text;
}

// Whether the error of a pass past its deadline says all of that. On a busy machine the deadline
// may pass before all workers are where a test wants them: then it is tried once more with longer,
// and in the end expected.
bool IsEnough(const absl::Status& status, const std::vector<std::string>& texts,
              absl::Duration patience) {
  const bool says_all = std::all_of(texts.begin(), texts.end(), [&](const std::string& text) {
    return absl::StrContains(status.message(), text);
  });
  if (!says_all && patience < absl::Seconds(10)) return false;
  ExpectError(status, texts);
  return true;
}

class PassesTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Start(int workers) {
    team_ = std::make_unique<Team>(workers, ClusterOptions{.transport = GetParam()});
  }
  Team& team() { return *team_; }

  const at::Tensor x_ = Leaf({2, 3}, 1);
  // Worker 2's nodes tell blocked_ that they have been reached, and wait for go_.
  Visit HeldOnWorker2() {
    return [this](int w, bool, at::Tensor x) {
      if (w == 2) {
        x.register_hook([this](const at::Tensor&) {
          if (!blocked_.HasBeenNotified()) blocked_.Notify();
          go_.WaitForNotification();
        });
      }
      return x;
    };
  }

  // For hooks that still run when their pass is over: these live until the workers are gone.
  absl::Notification blocked_, go_;

 private:
  std::unique_ptr<Team> team_;
};

// ------------------------------------------------------------------------ Passes at once

TEST_P(PassesTest, ThreadsThatRetain) {
  Start(3);
  Context context = team()[0].NewContext();
  const at::Tensor loss = team().Run(0, 1, context, Along(team(), "12"), {x_})[0].sum();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 25; ++i) {
        const absl::Status done = context.Backward({loss}, {.retain_graph = true});
        EXPECT_TRUE(done.ok()) << done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const at::Tensor want = Reference(LocalAlong(x_, 2).sum(), {x_})[0];
  EXPECT_TRUE(GradientOf(context, x_).allclose(want * 100));
  team().AwaitQuiet(1);
}

TEST_P(PassesTest, ThreadsThatDoNotRetain) {
  Start(3);
  for (int round = 0; round < 20; ++round) {
    Context context = team()[0].NewContext();
    const at::Tensor loss = team().Run(0, 1, context, Along(team(), "12"), {x_})[0].sum();
    std::atomic<int> succeeded{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        const absl::Status done = context.Backward({loss});
        if (done.ok())
          ++succeeded;
        else
          EXPECT_EQ(done.code(), absl::StatusCode::kFailedPrecondition) << done;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(succeeded, 1);
    EXPECT_TRUE(GradientOf(context, x_).allclose(Reference(LocalAlong(x_, 2).sum(), {x_})[0]));
  }
}

TEST_P(PassesTest, InitiatorsOnSeveralWorkers) {
  Start(3);
  for (int round = 0; round < 10; ++round) {
    Context context = team()[0].NewContext();
    std::vector<Future<Message>> running;
    // Each runs a backward of its own from what it got, while the others do.
    for (int w = 0; w < 3; ++w) {
      running.push_back(team().Start(
          0, w, {.context = &context},
          [&, w](Tensors in, Request& r) -> absl::StatusOr<Tensors> {
            auto y = team().Try(w, (w + 1) % 3, r.Nested(), Sin, {in[0]});
            if (!y.ok()) return y.status();
            const absl::Status done = r.context.Backward({(*y)[0].sum()}, {.retain_graph = true});
            if (!done.ok()) return done;
            return Tensors{};
          },
          {x_}));
    }
    for (auto& one : running) EXPECT_TRUE(one.Wait().ok()) << one.Wait().status();
    EXPECT_TRUE(GradientOf(context, x_).allclose(x_.cos() * 3));
  }
  team().AwaitQuiet(0);
}

// Two send nodes of one worker, each of which waits until the other runs.
TEST_P(PassesTest, SendNodesRunInParallel) {
  Start(2);
  Context context = team()[0].NewContext();
  absl::Notification running[2];
  at::Tensor sum;
  for (int i = 0; i < 2; ++i) {
    const at::Tensor y = team().Run(0, 1, context,
                                    [&, i](Tensors in, Request& r) {
                                      in[0].register_hook([&, i](const at::Tensor&) {
                                        running[i].Notify();
                                        running[1 - i].WaitForNotification();
                                      });
                                      return Sin(in, r);
                                    },
                                    {x_})[0];
    sum = i == 0 ? y : sum + y;
  }
  const absl::Status done = context.Backward({sum.sum()});
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_TRUE(GradientOf(context, x_).allclose(x_.cos() * 2));
}

// ------------------------------------------------------------- Calls and replies meanwhile

// The root has nothing to do with the chain, whose end nobody uses: its workers hear of the pass
// only because they are told.
TEST_P(PassesTest, WorkersThatWouldWaitForEachOther) {
  Start(2);
  const at::Tensor y = Leaf({2, 3}, 2);
  Context context = team()[0].NewContext();
  at::Tensor chain = y;
  for (int i = 0; i < 3; ++i) chain = team().Run(0, 1, context, Sin, {chain * 2})[0];
  ASSERT_TRUE(context.Backward({x_.sin().sum()}, {.retain_graph = true}).ok());
  EXPECT_TRUE(GradientOf(context, x_).allclose(x_.cos()));
  EXPECT_FALSE(GradientOf(context, y).defined());
  // The other one begins, with nothing of its own in the chain either.
  team().Run(0, 1, context,
             [&](Tensors, Request& r) -> absl::StatusOr<Tensors> {
               const absl::Status done =
                   r.context.Backward({Leaf({2}, 3).sum()}, {.retain_graph = true});
               EXPECT_TRUE(done.ok()) << done;
               return Tensors{};
             },
             {});
  team().AwaitQuiet(1);
}

TEST_P(PassesTest, ACallMadeWhileAPassRuns) {
  Start(3);
  Context context = team()[0].NewContext();
  at::Tensor later;
  const at::Tensor y = team().Run(0, 1, context,
                                  [&](Tensors in, Request& r) {
                                    const ContextId id = r.context.id();
                                    in[0].register_hook([&, id](const at::Tensor&) {
                                      // In the middle of the backward, and in the context that it
                                      // is of.
                                      if (later.defined()) return;
                                      const at::AutoGradMode on(true);
                                      EXPECT_EQ(context.id(), id);
                                      later =
                                          team().Run(0, 2, context, Along(team(), "201"), {x_})[0];
                                    });
                                    return Sin(in, r);
                                  },
                                  {x_})[0];
  ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  EXPECT_TRUE(GradientOf(context, x_).allclose(x_.cos()));
  ASSERT_TRUE(context.Backward({later.sum()}).ok());
  EXPECT_TRUE(
      GradientOf(context, x_).allclose(x_.cos() + Reference(LocalAlong(x_, 3).sum(), {x_})[0]));
  team().AwaitQuiet(1);
}

TEST_P(PassesTest, AReplyThatArrivesWhileAPassRuns) {
  Start(3);
  Context context = team()[0].NewContext();
  absl::Notification reply, arrived;
  Future<Message> late = team().Start(0, 1, {.context = &context},
                                      [&](Tensors in, Request& r) {
                                        reply.WaitForNotification();
                                        return Sin(in, r);
                                      },
                                      {x_});
  const at::Tensor y = team().Run(0, 2, context,
                                  [&](Tensors in, Request& r) {
                                    in[0].register_hook([&](const at::Tensor&) {
                                      reply.Notify();
                                      EXPECT_TRUE(late.Wait().ok());
                                      arrived.Notify();
                                    });
                                    return Sin(in, r);
                                  },
                                  {x_})[0];
  std::thread pass([&] {
    const absl::Status done = context.Backward({y.sum()}, {.retain_graph = true});
    EXPECT_TRUE(done.ok()) << done;
  });
  arrived.WaitForNotification();
  pass.join();
  EXPECT_TRUE(GradientOf(context, x_).allclose(x_.cos()));
  team().AwaitQuiet(1);
  // It belongs to the next pass, which does not run the hook: nothing uses that branch.
  ASSERT_TRUE(context.Backward({late.Take()->tensors[0].sum()}).ok());
  EXPECT_TRUE(GradientOf(context, x_).allclose(x_.cos() * 2));
}

TEST_P(PassesTest, ALateReplyLeavesNothingToWaitFor) {
  Start(3);
  Context context = team()[0].NewContext();
  absl::Notification begun, go, gone;
  const at::Tensor p = Leaf({2, 3}, 2);
  const Future<Message> late =
      team().Start(0, 1, {.context = &context},
                   [&](Tensors in, Request& r) -> absl::StatusOr<Tensors> {
                     begun.Notify();
                     go.WaitForNotification();
                     auto further = team().Try(1, 2, {.context = &r.context}, Sin, {in[0] * p});
                     gone.Notify();
                     return further;
                   },
                   {x_});
  begun.WaitForNotification();
  late.Cancel();
  EXPECT_EQ(late.Wait().status().code(), absl::StatusCode::kCancelled) << late.Wait().status();
  const at::Tensor y = team().Run(0, 2, context, Along(team(), "21"), {x_})[0];
  const at::Tensor want = Reference(LocalAlong(x_, 2).sum(), {x_})[0];
  // Before the answer, while it is on its way, and after it.
  ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  go.Notify();
  ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  gone.WaitForNotification();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(context.Backward({y.sum()}, {.retain_graph = true}).ok());
  EXPECT_TRUE(GradientOf(context, x_).allclose(want * 7));
  EXPECT_FALSE(team().Gradient(1, context, p).defined());
  team().AwaitQuiet(1);
}

TEST_P(PassesTest, ThousandPassesLeaveNothing) {
  Start(4);
  Context context = team()[0].NewContext();
  const at::Tensor loss = team().Run(0, 1, context, Along(team(), "1230"), {x_})[0].sum();
  size_t before = 0;
  for (int pass = 1; pass <= 1000; ++pass) {
    ASSERT_TRUE(context.Backward({loss}, {.retain_graph = true}).ok());
    if (pass == 200) before = mallinfo2().uordblks;
  }
  team().AwaitQuiet(1);
  // A kilobyte for each pass would be 800 kB.
  EXPECT_LT(mallinfo2().uordblks, before + (200 << 10));
  const at::Tensor want = Reference(LocalAlong(x_, 4).sum(), {x_})[0];
  EXPECT_TRUE(GradientOf(context, x_).allclose(want * 1000, 1e-3));
  for (int i = 0; i < 4; ++i) {
    const std::vector<ContextState> contexts = team()[i].Contexts();
    ASSERT_EQ(contexts.size(), 1u);
    EXPECT_EQ(contexts[0].sends, 2u);
    EXPECT_EQ(contexts[0].receives, 2u);
  }
  context.Release();
  team().AwaitQuiet(0);
}

// ---------------------------------------------------------------------------------- Errors

struct Throws : torch::autograd::Function<Throws> {
  static Variable forward(AutogradContext*, const Variable& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) {
    TORCH_CHECK(false, "thrown on purpose");
  }
};

TEST_P(PassesTest, AThrowInEveryPosition) {
  Start(4);
  const std::string path = "1231";
  for (int thrower = 0; thrower < 4; ++thrower) {
    for (const bool there : {false, true}) {
      SCOPED_TRACE(absl::StrCat("worker ", thrower, there ? " there" : " back"));
      const Visit visit = [&](int worker, bool is_there, at::Tensor x) {
        return worker == thrower && is_there == there ? at::Tensor(Throws::apply(x)) : x;
      };
      Context context = team()[0].NewContext(), other = team()[0].NewContext();
      at::Tensor x = x_ * 1;
      if (thrower == 0 && there) x = Throws::apply(x);
      at::Tensor y = team().Run(0, 1, context, Along(team(), path, visit), {x})[0];
      if (thrower == 0 && !there) y = Throws::apply(y);
      // A branch that is well, over the same workers.
      const at::Tensor z = team().Run(0, 3, context, Along(team(), "321"), {x_})[0];
      const at::Tensor fine = team().Run(0, 2, other, Along(team(), "231"), {x_})[0];

      const absl::Status status = context.Backward({(y * z).sum()});
      ExpectError(status, {"thrown on purpose", "Throws", WorkerName(thrower),
                           absl::StrCat("context ", context.id())});
      // Long before the deadline, which is a minute away.
      team().AwaitQuiet(2);
      const absl::Status done = other.Backward({fine.sum()});
      EXPECT_TRUE(done.ok()) << done;
    }
  }
  team().AwaitQuiet(0);
}

TEST_P(PassesTest, ADiamondLeavesNothingRunning) {
  Start(4);
  for (int round = 0; round < 5; ++round) {
    Context context = team()[0].NewContext();
    const Team::Function corner = [](Tensors in, Request&) {
      return Tensors{Throws::apply(in[0])};
    };
    Tensors sides;
    for (const int side : {1, 2}) {
      sides.push_back(team().Run(
          0, side, context,
          [&, side](Tensors in, Request& r) {
            return team().Try(side, 3, r.Nested(),
                              side == 1 + round % 2 ? corner : Team::Function(Sin), {in[0].sin()});
          },
          {x_})[0]);
    }
    ExpectError(context.Backward({(sides[0] * sides[1]).sum()}), {"thrown on purpose", "worker3"});
    team().AwaitQuiet(1);
  }
}

TEST_P(PassesTest, AThrowDoesNotWaitForOtherNodes) {
  Start(2);
  Context context = team()[0].NewContext();
  absl::Notification &blocked = blocked_, &go = go_;
  const at::Tensor slow = team().Run(0, 1, context,
                                     [&](Tensors in, Request& r) {
                                       in[0].register_hook([&](const at::Tensor&) {
                                         blocked.Notify();
                                         go.WaitForNotification();
                                       });
                                       return Sin(in, r);
                                     },
                                     {x_})[0];
  const at::Tensor bad =
      team().Run(0, 1, context,
                 [&](Tensors in, Request&) {
                   const at::Tensor y = Throws::apply(in[0]);
                   y.register_hook([&](const at::Tensor&) { blocked.WaitForNotification(); });
                   return Tensors{y};
                 },
                 {x_})[0];
  ExpectError(context.Backward({(slow + bad).sum()}), {"thrown on purpose", "worker1"});
  team().AwaitQuiet(1);
  go.Notify();
}

// Which edges of which workers: also of those with whom the initiator exchanged nothing.
TEST_P(PassesTest, PastItsDeadlineItSaysWhatIsMissing) {
  const auto awaits = [](WorkerRank of, WorkerRank peer) {
    return absl::StrCat("by worker 'worker", of, "' (", of,
                        "): the gradients of 1 edge(s) to worker 'worker", peer, "' (", peer, ") (",
                        MakeId(of, 1), ")");
  };
  const std::vector<std::string> texts = {awaits(0, 1), awaits(1, 3), awaits(3, 2),
                                          "by worker 'worker2' (2): nodes that run"};
  for (absl::Duration patience = absl::Milliseconds(500);; patience *= 2) {
    const auto go = std::make_shared<absl::Notification>();
    const Visit visit = [go](int w, bool, at::Tensor x) {
      if (w == 2) x.register_hook([go](const at::Tensor&) { go->WaitForNotification(); });
      return x;
    };
    Start(4);
    Context context = team()[0].NewContext();
    const at::Tensor y = team().Run(0, 1, context, Along(team(), "132", visit), {x_})[0];
    const absl::Status status = context.Backward({y.sum()}, {.deadline = absl::Now() + patience});
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_EQ(OriginOf(status), (ErrorOrigin{0, ErrorOrigin::By::kDistgrad})) << status;
    // All have dropped it, though the node still runs.
    team().AwaitQuiet(1);
    go->Notify();
    if (IsEnough(status, texts, patience)) return;
  }
}

TEST_P(PassesTest, TheStateShowsWhatIsAwaited) {
  Start(3);
  Context context = team()[0].NewContext();
  absl::Notification &blocked = blocked_, &go = go_;
  const at::Tensor y = team().Run(0, 1, context, Along(team(), "12", HeldOnWorker2()), {x_})[0];
  std::thread pass([&] { EXPECT_TRUE(context.Backward({y.sum()}).ok()); });
  blocked.WaitForNotification();
  // Worker 0 waits for worker 1, and that for worker 2, which is at it.
  for (int w = 0; w < 2; ++w) {
    EXPECT_TRUE(Eventually([&] {
      const std::vector<ContextState> contexts = team()[w].Contexts();
      return contexts.size() == 1 && contexts[0].passes.size() == 1 &&
             contexts[0].passes[0].awaited.size() == 1 &&
             contexts[0].passes[0].awaited[0].peer == w + 1 && contexts[0].passes[0].busy == 0;
    }));
  }
  const std::vector<ContextState> there = team()[2].Contexts();
  ASSERT_EQ(there.size(), 1u);
  ASSERT_EQ(there[0].passes.size(), 1u);
  EXPECT_TRUE(there[0].passes[0].awaited.empty());
  EXPECT_EQ(there[0].passes[0].busy, 1u);
  go.Notify();
  pass.join();
  team().AwaitQuiet(1);
}

// ----------------------------------------------------------------------- Losses and releases

TEST_P(PassesTest, AWorkerThatIsKilledDuringAPass) {
  Start(4);
  Context context = team()[0].NewContext();
  absl::Notification &blocked = blocked_, &go = go_;
  const at::Tensor y = team().Run(0, 1, context,
                                  Along(team(), "123",
                                        [&](int w, bool there, at::Tensor x) {
                                          if (w == 1 && !there) {
                                            x.register_hook([&](const at::Tensor&) {
                                              blocked.Notify();
                                              go.WaitForNotification();
                                            });
                                          }
                                          return x;
                                        }),
                                  {x_})[0];
  // Worker 3 is told of the pass by another way, and waits for worker 2.
  const at::Tensor z = team().Run(0, 3, context, Sin, {x_})[0];
  absl::Status status;
  std::thread pass([&] { status = context.Backward({(y * z).sum()}); });
  blocked.WaitForNotification();
  EXPECT_TRUE(Eventually([&] {
    const auto contexts = team()[2].Contexts();
    return !contexts.empty() && !contexts[0].passes.empty();
  })) << "it hears of the pass without waiting for worker 1";
  team().Kill(2);
  pass.join();
  ExpectError(status, {"worker2"});
  go.Notify();
  team().AwaitQuiet(1);
  // The context has lost a worker for good: an error, and at once.
  ExpectError(context.Backward({z.sum()}, {.retain_graph = true}), {});
  // Others have not.
  Context next = team()[0].NewContext();
  const at::Tensor fine = team().Run(0, 1, next, Along(team(), "13"), {x_})[0];
  const absl::Status done = next.Backward({fine.sum()});
  EXPECT_TRUE(done.ok()) << done;
  next.Release();
  context.Release();
  team().AwaitQuiet(0);
}

TEST_P(PassesTest, ARelease) {
  Start(3);
  absl::Notification &blocked = blocked_, &go = go_;
  Context context = team()[0].NewContext();
  const at::Tensor y = team().Run(0, 1, context, Along(team(), "12", HeldOnWorker2()), {x_})[0];
  absl::Status status;
  std::thread pass([&] { status = context.Backward({y.sum()}); });
  blocked.WaitForNotification();
  context.Release();
  context.Release();
  pass.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  ExpectError(status, {"released"});
  go.Notify();
  team().AwaitQuiet(0);
  EXPECT_EQ(context.Gradient(x_).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(context.Backward({y.sum()}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(team().Try(0, 1, {.context = &context}, Sin, {x_.detach()}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  team().AwaitQuiet(0);
}

TEST_P(PassesTest, ACancelEndsThePassOnEveryWorker) {
  Start(3);
  absl::Notification &blocked = blocked_, &go = go_;
  Context context = team()[0].NewContext();
  const at::Tensor y = team().Run(0, 1, context, Along(team(), "12", HeldOnWorker2()), {x_})[0];
  const Future<Unit> pass = context.BackwardAsync({y.sum()});
  blocked.WaitForNotification();
  pass.Cancel();
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kCancelled) << pass.Wait().status();
  ExpectError(pass.Wait().status(), {"'worker0' (0)", "the pass was cancelled"});
  pass.Cancel();  // too late
  go.Notify();
  // The context is there still, and no pass of it runs anywhere.
  team().AwaitQuiet(1);
  EXPECT_FALSE(context.Backward({y.sum()}).ok());
  context.Release();
  team().AwaitQuiet(0);
  // One that is done is not undone.
  Context next = team()[0].NewContext();
  const at::Tensor z = team().Run(0, 1, next, Along(team(), "12"), {x_})[0];
  const Future<Unit> done = next.BackwardAsync({z.sum()});
  EXPECT_TRUE(done.Wait().ok()) << done.Wait().status();
  done.Cancel();
  EXPECT_TRUE(done.Wait().ok());
  EXPECT_TRUE(next.Gradient(x_).ok());
}

TEST_P(PassesTest, AReleaseWhileAHandlerRuns) {
  Start(3);
  Context context = team()[0].NewContext();
  absl::Notification running, go;
  absl::Status nested;
  Future<Message> reply = team().Start(0, 1, {.context = &context},
                                       [&](Tensors in, Request& r) -> absl::StatusOr<Tensors> {
                                         running.Notify();
                                         go.WaitForNotification();
                                         nested = team().Try(1, 2, r.Nested(), Sin, in).status();
                                         return Tensors{in[0].sin()};
                                       },
                                       {x_});
  running.WaitForNotification();
  context.Release();
  EXPECT_TRUE(Eventually([&] { return team()[1].context_count() == 0; }));
  go.Notify();
  EXPECT_FALSE(reply.Wait().ok()) << "its result would belong to a context that is gone";
  EXPECT_EQ(nested.code(), absl::StatusCode::kFailedPrecondition) << nested;
  team().AwaitQuiet(0);
}

// Worker 2 knows of the context through worker 1 alone.
TEST_P(PassesTest, AReleaseWhoseWayIsGone) {
  Start(4);
  Context context = team()[0].NewContext();
  team().Run(0, 1, context, Along(team(), "123"), {x_});
  EXPECT_EQ(team()[3].context_count(), 1u);
  team().Kill(1);
  // Sooner or later: it tells the origin that it needs to be told.
  EXPECT_TRUE(Eventually([&] {
    for (const ContextState& known : team()[0].Contexts()) {
      for (const WorkerRank peer : known.peers) {
        if (peer == 2) return true;
      }
    }
    return false;
  }));
  context.Release();
  team().AwaitQuiet(0);
  // And if the release was before that.
  Context again = team()[0].NewContext();
  team().Run(0, 2, again, Along(team(), "23"), {x_});
  again.Release();
  team().AwaitQuiet(0);
}

TEST_P(PassesTest, AContextWhoseOriginIsGoneGoes) {
  Start(4);
  Context context = team()[0].NewContext();
  team().Run(0, 1, context, Along(team(), "123"), {x_});
  EXPECT_EQ(team()[3].context_count(), 1u);
  team().Kill(0);
  team().AwaitQuiet(0);
}

// ------------------------------------------------------------ Threads that torch's engine runs on

// torch::autograd::grad() has libtorch's nodes on its thread leave out what is not in its own list.
// A pass that a node of its calls for, and that comes back to this worker, is not its affair.
TEST_P(PassesTest, APassInsideTorchsOwnGrad) {
  Start(2);
  for (const int64_t size : {2, 200}) {
    SCOPED_TRACE(size);
    const at::Tensor w = Leaf({size, size}, 2);
    Context context = team()[0].NewContext();
    const at::Tensor outer = x_ * 1;
    outer.register_hook([&](const at::Tensor&) {
      const at::AutoGradMode enabled(true);
      const at::Tensor y = team().Run(0, 1, context, Along(team(), "101"), {w.cos()})[0];
      const absl::Status done = context.Backward({y.sum()});
      EXPECT_TRUE(done.ok()) << done;
    });
    torch::autograd::grad({outer.sum()}, {x_});
    ExpectSame(GradientOf(context, w), Reference(LocalAlong(w.cos(), 3).sum(), {w})[0]);
    context.Release();
    team().AwaitQuiet(0);
  }
}

// The same for a pass of another worker, which comes while a node waits for an answer.
TEST_P(PassesTest, APassOfAnotherWorkerInsideTorchsOwnGrad) {
  Start(2);
  const at::Tensor p = Leaf({2, 3}, 2);
  for (int round = 0; round < 10; ++round) {
    at::Tensor gradient;
    const at::Tensor outer = x_ * 1;
    outer.register_hook([&](const at::Tensor&) {
      const at::AutoGradMode enabled(true);  // a mode that goes with calls
      const absl::StatusOr<Tensors> asked = team().Try(
          0, 1, {},
          [&](Tensors, Request&) -> absl::StatusOr<Tensors> {
            Context context = team()[1].NewContext();
            const at::Tensor y = team().Run(
                1, 0, context, [&](Tensors in, Request&) { return Tensors{(in[0] * p).sin()}; },
                {at::ones({2, 3})})[0];
            const absl::Status done = context.Backward({y.sum()});
            team().Run(1, 0, context,
                       [&](Tensors, Request& r) {
                         gradient = GradientOf(r.context, p);
                         return Tensors{};
                       },
                       {});
            return done.ok() ? absl::StatusOr<Tensors>(Tensors{}) : done;
          },
          {});
      EXPECT_TRUE(asked.ok()) << asked.status();
    });
    torch::autograd::grad({outer.sum()}, {x_});
    ExpectSame(gradient, p.detach().cos());
  }
}

// ------------------------------------------------------- Code within nodes that asks others

// 2 x, with a backward that runs `ask`.
struct Asking : torch::autograd::Function<Asking> {
  static Variable forward(AutogradContext* context, const Variable& x, std::function<void()>* ask) {
    context->saved_data["ask"] = reinterpret_cast<int64_t>(ask);
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["ask"].toInt()))();
    return {gradients[0] * 2, Variable()};
  }
};

// Runs `ask` when what a node has saved is unpacked.
struct AskingHook : torch::autograd::SavedVariableHooks {
  explicit AskingHook(std::function<void()>* ask) : ask(ask) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed = tensor.detach(); }
  at::Tensor call_unpack_hook() override {
    (*ask)();
    return packed;
  }
  std::function<void()>* const ask;
  at::Tensor packed;
};

at::Tensor AskingSin(const at::Tensor& x, std::function<void()>* ask) {
  const at::Tensor y = x.sin();
  auto* const node = dynamic_cast<torch::autograd::generated::SinBackward0*>(y.grad_fn().get());
  EXPECT_NE(node, nullptr);
  if (node != nullptr) node->self_.register_hooks(std::make_unique<AskingHook>(ask));
  return y;
}

// Within a node of worker 1, which has one thread, a pass waits for worker 2, which calls worker 1
// when another pass has come to the same node. libtorch holds the node's mutex meanwhile.
TEST_P(PassesTest, APassThatComesToANodeInWhichAnotherOneWaits) {
  enum class Node { kFunction, kSaved, kSavedAndCheap };
  for (const Node kind : {Node::kFunction, Node::kSaved, Node::kSavedAndCheap}) {
    SCOPED_TRACE(static_cast<int>(kind));
    struct Meeting {
      std::atomic<int> asked{0}, arrived{0};
      absl::Notification first_asks, second_arrives;
      absl::Status answer;
      std::function<void()> ask;
    };
    const auto meeting = std::make_shared<Meeting>();
    Team team(3, {.transport = GetParam(), .thread_count = 1});
    // A hook that says that the second pass has come would have its nodes left to the pool.
    const auto second_comes = [&, meeting] {
      if (kind == Node::kSavedAndCheap) {
        return Eventually([&] {
          const auto contexts = team[1].Contexts();
          return contexts.size() == 1 && contexts[0].passes.size() == 2;
        });
      }
      return meeting->second_arrives.WaitForNotificationWithTimeout(absl::Seconds(30));
    };
    meeting->ask = [&, meeting = meeting.get()] {
      if (meeting->asked++ > 0) return;
      meeting->first_asks.Notify();
      meeting->answer =
          team.Try(1, 2, {},
                   [&](Tensors, Request&) -> absl::StatusOr<Tensors> {
                     if (!second_comes()) return absl::DeadlineExceededError("no second pass");
                     return team.Try(2, 1, {}, [](Tensors, Request&) { return Tensors{}; }, {});
                   },
                   {})
              .status();
    };
    Context context = team[0].NewContext();
    const at::Tensor loss = team.Run(0, 1, context,
                                     [&](Tensors in, Request&) {
                                       if (kind == Node::kSavedAndCheap)
                                         return Tensors{AskingSin(in[0], &meeting->ask)};
                                       at::Tensor y = kind == Node::kFunction
                                                          ? Asking::apply(in[0], &meeting->ask)
                                                          : AskingSin(in[0], &meeting->ask);
                                       y.register_hook([meeting](const at::Tensor&) {
                                         if (++meeting->arrived == 2)
                                           meeting->second_arrives.Notify();
                                       });
                                       return Tensors{y};
                                     },
                                     {x_})[0]
                                .sum();
    const Future<Unit> first = context.BackwardAsync({loss}, {.retain_graph = true});
    ASSERT_TRUE(meeting->first_asks.WaitForNotificationWithTimeout(absl::Seconds(30)));
    const Future<Unit> second = context.BackwardAsync({loss}, {.retain_graph = true});
    EXPECT_TRUE(first.Wait().ok()) << first.Wait().status();
    EXPECT_TRUE(second.Wait().ok()) << second.Wait().status();
    EXPECT_TRUE(meeting->answer.ok()) << meeting->answer;
    const at::Tensor once = kind == Node::kFunction ? at::full_like(x_, 2) : x_.detach().cos();
    EXPECT_TRUE(GradientOf(context, x_).allclose(2 * once));
  }
}

// A gradient for worker 2 waits for others that could go with it; but not while the thread waits
// within a node, for that may be for what worker 2 does with it.
TEST_P(PassesTest, NoGradientIsKeptBackWhileANodeWaits) {
  struct Meeting {
    absl::Notification arrived;
    absl::Status answer;
    std::function<void()> ask;
  };
  const auto meeting = std::make_shared<Meeting>();
  Start(3);
  meeting->ask = [&, meeting = meeting.get()] {
    meeting->answer =
        team()
            .Try(1, 2, {},
                 [&, meeting](Tensors, Request&) -> absl::StatusOr<Tensors> {
                   if (meeting->arrived.WaitForNotificationWithTimeout(absl::Seconds(30))) {
                     return Tensors{};
                   }
                   return absl::DeadlineExceededError("no gradient comes to worker 2");
                 },
                 {})
            .status();
  };
  Context context = team()[0].NewContext();
  const auto from_worker_2 = [&](Tensors in, Request&) {
    const at::Tensor y = in[0] * 3;
    y.register_hook([meeting](const at::Tensor&) { meeting->arrived.Notify(); });
    return Tensors{y};
  };
  const at::Tensor loss =
      team()
          .Run(0, 1, context,
               [&](Tensors in, Request& r) {
                 const at::Tensor y = AskingSin(in[0], &meeting->ask);
                 return Tensors{y + team().Run(1, 2, r.context, from_worker_2, {in[0]})[0]};
               },
               {x_})[0]
          .sum();
  const absl::Status done = context.Backward({loss});
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_TRUE(meeting->answer.ok()) << meeting->answer;
  EXPECT_TRUE(GradientOf(context, x_).allclose(x_.detach().cos() + 3));
}

// --------------------------------------------------------------------------------- Pipelines

// Worker 1 is the second stage of eight micro-batches, and has one thread. While it is at one, the
// gradients of all before it come to worker 0.
TEST_P(PassesTest, GradientsOfMicroBatchesLeaveOneByOne) {
  constexpr int kBatches = 8;
  // Of which pass the nodes run on both workers.
  struct Progress {
    // Whether so many have come back; not again if they did not.
    void AwaitBack(int count) ABSL_LOCKS_EXCLUDED(mu) {
      absl::MutexLock lock(&mu);
      const auto are_back = [&] { return back >= count; };
      if (late) return;
      late = !mu.AwaitWithTimeout(absl::Condition(&are_back), absl::Seconds(20));
      EXPECT_FALSE(late) << "of " << count << " gradients " << back << " have come";
    }
    void Back() ABSL_LOCKS_EXCLUDED(mu) {
      absl::MutexLock lock(&mu);
      ++back;
    }
    absl::Mutex mu;
    int begun ABSL_GUARDED_BY(mu) = 0, back ABSL_GUARDED_BY(mu) = 0;
    bool late ABSL_GUARDED_BY(mu) = false;
  };
  // Where the second stage is called, and where it is the one that calls backward.
  for (const bool called : {true, false}) {
    SCOPED_TRACE(called ? "the second stage is called" : "the second stage calls");
    const auto progress = std::make_shared<Progress>();
    Team team(2, {.transport = GetParam(), .thread_count = 1});
    const auto first = [&](const at::Tensor& x) {
      at::Tensor y = x.sin();
      y.register_hook([progress](const at::Tensor&) { progress->Back(); });
      return y;
    };
    const auto second = [&](const at::Tensor& x) {
      at::Tensor y = x.tanh();
      y.register_hook([progress](const at::Tensor&) {
        int before;
        {
          absl::MutexLock lock(&progress->mu);
          before = progress->begun++;
        }
        progress->AwaitBack(before);
      });
      return y;
    };
    // Of doubles, for the gradients of the micro-batches are added up in any order.
    const at::Tensor w = Leaf({16, 16}, 2, at::kDouble);
    Context context = team[0].NewContext();
    at::Tensor loss, local;
    for (int i = 0; i < kBatches; ++i) {
      const at::Tensor x = w * i;
      const at::Tensor y =
          called ? team.Run(0, 1, context,
                            [&](Tensors in, Request&) { return Tensors{second(in[0])}; },
                            {first(x)})[0]
                 : second(team.Run(0, 1, context,
                                   [&](Tensors in, Request&) { return Tensors{first(in[0])}; },
                                   {x})[0]);
      loss = loss.defined() ? loss + y.sum() : y.sum();
      const at::Tensor z = x.sin().tanh().sum();
      local = local.defined() ? local + z : z;
    }
    const absl::Status done = context.Backward({loss});
    ASSERT_TRUE(done.ok()) << done;
    const at::Tensor got = GradientOf(context, w), want = Reference(local, {w})[0];
    EXPECT_TRUE(got.allclose(want, 1e-9, 1e-9)) << (got - want).abs().max();
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, PassesTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

// ------------------------------------------------------------------- With packets in hand

// Cuts or holds what the test says. Thread-safe.
class Faults : public FaultInjector {
 public:
  Action OnSend(const std::string& from, const std::string& to, Packet& packet) override {
    absl::MutexLock lock(&mu_);
    ++sent_;
    last_ = {from, to};
    if (std::exchange(cut_, false)) return Action::kCut;
    if (hold_large_ && packet.size() > 64 << 10) return Action::kHold;
    return held_.count({from, to}) > 0 ? Action::kHold : Action::kDeliver;
  }
  // The next packet is lost, with its connection.
  void Cut() {
    absl::MutexLock lock(&mu_);
    cut_ = true;
  }
  void Hold(const std::pair<std::string, std::string>& way) {
    absl::MutexLock lock(&mu_);
    held_.insert(way);
  }
  // What has a connection of its own because it is large, so that all else passes it.
  void HoldLarge() {
    absl::MutexLock lock(&mu_);
    hold_large_ = true;
  }
  void Let() {
    absl::MutexLock lock(&mu_);
    held_.clear();
    hold_large_ = false;
  }
  int sent() const {
    absl::MutexLock lock(&mu_);
    return sent_;
  }
  std::pair<std::string, std::string> last() const {
    absl::MutexLock lock(&mu_);
    return last_;
  }

 private:
  mutable absl::Mutex mu_;
  bool cut_ ABSL_GUARDED_BY(mu_) = false;
  bool hold_large_ ABSL_GUARDED_BY(mu_) = false;
  int sent_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<std::pair<std::string, std::string>> held_ ABSL_GUARDED_BY(mu_);
  std::pair<std::string, std::string> last_ ABSL_GUARDED_BY(mu_);  // who sent to whom
};

class PacketsTest : public ::testing::Test {
 protected:
  PacketsTest() : team_(3, {.faults = faults_}) {}

  const std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
  Team team_;
  const at::Tensor x_ = Leaf({2, 3}, 1);
};

// Worker 1 is done with its part of the pass before a reply comes to it from worker 2, whose own
// part has not begun and will find the edge of that reply.
TEST_F(PacketsTest, AReplyToAWorkerThatIsDoneWithThePass) {
  const at::Tensor p = Leaf({2, 3}, 2), q = Leaf({2, 3}, 3);
  Context context = team_[0].NewContext();
  absl::Notification begun, go;
  Future<Message> late;
  const at::Tensor y = team_.Run(0, 1, context,
                                 [&](Tensors in, Request& r) {
                                   late = team_.Start(1, 2, r.Nested(),
                                                      [&](Tensors, Request&) {
                                                        begun.Notify();
                                                        go.WaitForNotification();
                                                        return Tensors{p * 2};
                                                      },
                                                      {});
                                   return Sin(in, r);
                                 },
                                 {x_})[0];
  // So that the last packet there is the one from worker 0.
  begun.WaitForNotification();
  std::pair<std::string, std::string> to_worker2;
  const at::Tensor z = team_.Run(0, 2, context,
                                 [&](Tensors, Request&) {
                                   to_worker2 = faults_->last();
                                   return Tensors{q * 3};
                                 },
                                 {})[0];
  faults_->Hold(to_worker2);
  std::thread pass([&] {
    const absl::Status done = context.Backward({(y + z).sum()}, {.retain_graph = true});
    EXPECT_TRUE(done.ok()) << done;
  });
  const auto of = [&](int worker) {
    const std::vector<ContextState> contexts = team_[worker].Contexts();
    return contexts.empty() ? ContextState() : contexts[0];
  };
  EXPECT_TRUE(Eventually([&] {
    const ContextState here = of(0);
    return here.passes.size() == 1 && here.passes[0].awaited.empty() &&
           here.passes[0].unacknowledged == std::map<WorkerRank, uint32_t>{{2, 1}} &&
           of(1).passes.empty();
  }));
  go.Notify();
  EXPECT_TRUE(late.Wait().ok()) << late.Wait().status();
  EXPECT_TRUE(of(1).passes.empty());
  faults_->Let();
  team_.cluster().network().ReleaseHeld();
  pass.join();
  EXPECT_TRUE(team_.Gradient(2, context, q).equal(at::full_like(q, 3)));
  EXPECT_FALSE(team_.Gradient(2, context, p).defined());
  team_.AwaitQuiet(1);
}

// A worker that says nothing is named, and waited for not long.
TEST_F(PacketsTest, PastItsDeadlineASilentWorkerIsNamed) {
  const std::vector<std::string> texts = {
      "by worker 'worker0' (0): the gradients of 1 edge(s) to worker 'worker1'",
      "worker 'worker1' (1) does not say what"};
  for (absl::Duration patience = absl::Milliseconds(30);; patience *= 2) {
    Context context = team_[0].NewContext();
    std::pair<std::string, std::string> there;
    const at::Tensor y = team_.Run(0, 1, context,
                                   [&](Tensors in, Request& r) {
                                     there = faults_->last();
                                     return Sin(in, r);
                                   },
                                   {x_})[0];
    faults_->Hold({there.second, there.first});
    const absl::Status status = context.Backward({y.sum()}, {.deadline = absl::Now() + patience});
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    faults_->Let();
    team_.cluster().network().ReleaseHeld();
    team_.AwaitQuiet(1);
    if (IsEnough(status, texts, patience)) return;
  }
}

// All three know each other: the origin tells two, and each of those the other.
TEST_F(PacketsTest, AReleaseIsRelayedOnce) {
  Context context = team_[0].NewContext();
  team_.Run(0, 1, context, Along(team_, "12"), {x_});
  team_.Run(0, 2, context, Along(team_, "20"), {x_});
  const int before = faults_->sent();
  context.Release();
  EXPECT_TRUE(Eventually([&] { return faults_->sent() >= before + 4; }));
  context.Release();
  team_.AwaitQuiet(0);
  EXPECT_EQ(faults_->sent(), before + 4);
}

// A call that is on its way when the context is released elsewhere.
TEST_F(PacketsTest, ALateMessageBringsNoContextBack) {
  Context context = team_[0].NewContext();
  team_.Run(0, 1, context, Sin, {x_});
  std::pair<std::string, std::string> from2to1;
  team_.Run(0, 2, context,
            [&](Tensors in, Request& r) {
              return team_.Try(
                  2, 1, r.Nested(),
                  [&](Tensors in, Request& r) {
                    from2to1 = faults_->last();
                    return Sin(in, r);
                  },
                  std::move(in));
            },
            {x_});
  faults_->Hold(from2to1);
  Future<Message> late;
  team_.Run(0, 2, context,
            [&](Tensors in, Request& r) {
              late = team_.Start(2, 1, r.Nested(), Sin, std::move(in));
              return Tensors{};
            },
            {x_});
  context.Release();
  EXPECT_TRUE(Eventually([&] { return team_[2].context_count() == 0; }));
  // Worker 1 hears of it from the origin: what worker 2 says is held, with the call before it.
  EXPECT_TRUE(Eventually([&] { return team_[1].context_count() == 0; }));
  faults_->Let();
  team_.cluster().network().ReleaseHeld();
  EXPECT_EQ(late.Wait().status().code(), absl::StatusCode::kFailedPrecondition)
      << late.Wait().status();
  team_.AwaitQuiet(0);
}

// Worker 2 hears of the pass before it hears of the large call, which is lost with worker 1.
TEST_F(PacketsTest, AContextWhoseCallIsOvertakenAndLost) {
  Context context = team_[0].NewContext();
  faults_->HoldLarge();
  const at::Tensor w = Leaf({200, 200}, 2);
  Future<Message> lost;
  const at::Tensor y = team_.Run(0, 1, context,
                                 [&](Tensors in, Request& r) {
                                   lost = team_.Start(1, 2, {.context = &r.context}, Sin, {w * 2});
                                   return Sin(in, r);
                                 },
                                 {x_})[0];
  const Future<Unit> pass = context.BackwardAsync({y.sum()});
  EXPECT_TRUE(Eventually([&] { return team_[2].context_count() == 1; }));
  team_.Kill(1);
  EXPECT_FALSE(pass.Wait().ok());
  EXPECT_FALSE(lost.Wait().ok());
  context.Release();
  team_.AwaitQuiet(0);
}

TEST_F(PacketsTest, ALostPacketIsAnErrorAndNoHang) {
  for (int lost = 0; lost < 4; ++lost) {
    SCOPED_TRACE(lost);
    Context context = team_[0].NewContext();
    // Another path, so that all three take part.
    const at::Tensor y = team_.Run(0, 1, context, Along(team_, "12"), {x_})[0];
    absl::Status status;
    if (lost == 0) faults_->Cut();  // a request
    const auto z = team_.Try(0, 2, {.context = &context},
                             [&](Tensors in, Request& r) {
                               if (lost == 1) faults_->Cut();  // a reply
                               return Sin(in, r);
                             },
                             {x_});
    EXPECT_EQ(z.ok(), lost > 1) << z.status();
    if (lost == 2) {  // the first message of the pass
      faults_->Cut();
    } else if (lost == 3) {  // one in the middle
      y.register_hook([&](const at::Tensor&) { faults_->Cut(); });
    }
    status = context.Backward({y.sum()});
    EXPECT_FALSE(status.ok());
    if (lost < 2) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    }
    team_.AwaitQuiet(1);
    context.Release();
    team_.AwaitQuiet(0);
    // The connection is made again, for new contexts. The pass may have failed by what another
    // worker said, before this one has heard of the cut.
    EXPECT_TRUE(Eventually([&] {
      Context next = team_[0].NewContext();
      const auto fine = team_.Try(0, 1, {.context = &next}, Along(team_, "120"), {x_});
      return fine.ok() && next.Backward({(*fine)[0].sum()}).ok();
    }));
  }
}

}  // namespace
}  // namespace distgrad
