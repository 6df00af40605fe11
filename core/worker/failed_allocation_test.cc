// What a worker's user calls where an allocation of that thread fails.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/base/cancellation.h"
#include "core/base/future.h"
#include "core/rpc/call_metrics.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// A destructor that throws ends the process. One allocation fails of each: the rest is done by the
// release of the next context.
TEST(FailedAllocationTest, AContextEndsAllTheSame) {
  for (int nth = 0, failed = true; failed; ++nth) {
    SCOPED_TRACE(nth);
    // A connection on which an allocation fails ends, so each has one of its own.
    Cluster cluster(ClusterOptions{});
    ASSERT_EQ(cluster[1].Register("echo", [](Request& r) { return r.message; }), absl::OkStatus());
    const auto new_context = [&] {
      auto context = std::make_optional(cluster[0].NewContext());
      EXPECT_TRUE(cluster[0].Call(1, "echo", {"", {}}, {.context = &*context}).ok());
      return context;
    };
    std::optional<Context> first = new_context(), second = new_context();
    ASSERT_EQ(cluster[1].context_count(), 2u);
    FailAllocation(nth);
    first.reset();
    failed = FailAllocation(-1);
    second.reset();
    EXPECT_EQ(cluster[0].context_count(), 0u);
    while (cluster[1].context_count() > 0) std::this_thread::yield();
  }
}

// Also where a backward of it runs, which needs memory to be told.
TEST(FailedAllocationTest, AContextInABackwardEndsAllTheSame) {
  for (int nth = 0, failed = true; failed; ++nth) {
    SCOPED_TRACE(nth);
    absl::Notification runs, go;
    Cluster cluster({.workers = 1});
    auto context = std::make_optional(cluster[0].NewContext());
    const at::Tensor leaf = at::ones({1}).requires_grad_(true);
    const at::Tensor root = (leaf * 2).sum();
    leaf.register_hook([&](const at::Tensor& gradient) {
      runs.Notify();
      go.WaitForNotification();
      return gradient;
    });
    const Future<Unit> backward = context->BackwardAsync({root});
    runs.WaitForNotification();
    FailAllocation(nth);
    context.reset();
    failed = FailAllocation(-1);
    cluster[0].NewContext();  // whose release does the rest
    EXPECT_EQ(cluster[0].context_count(), 0u);
    go.Notify();
    EXPECT_FALSE(backward.Wait().ok());
  }
}

// Makes a call whose allocation number `nth` fails, and says whether there was one. Nullopt where
// the call throws: then there is none.
std::optional<Future<Message>> CallWhereOneFails(int nth, absl::FunctionRef<Future<Message>()> call,
                                                 bool* failed) {
  std::optional<Future<Message>> made;
  FailAllocation(nth);
  try {
    made = call();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the result says so
  }
  *failed = FailAllocation(-1);
  return made;
}

// An error is one of a call that was never made: nobody would wait for it.
TEST(FailedAllocationTest, ACallThatThrowsIsNotMade) {
  Cluster cluster({.workers = 1});
  std::atomic<int> served{0};
  ASSERT_EQ(cluster[0].Register("count",
                                [&](Request& r) {
                                  ++served;
                                  return r.message;
                                }),
            absl::OkStatus());
  const auto cancellation = std::make_shared<Cancellation>();
  const auto call = [&] {
    return cluster[0].CallAsync(0, "count", {"", {}}, {.cancellation = cancellation});
  };
  int expected = 0;
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const std::optional<Future<Message>> made = CallWhereOneFails(nth, call, &failed);
    if (made.has_value() && made->Wait().ok()) ++expected;
    ASSERT_TRUE(call().Wait().ok());
    EXPECT_EQ(served, ++expected);
  }
  for (const CallStats& calls : cluster[0].Metrics().calls) {
    EXPECT_TRUE(calls.served || calls.in_flight == 0);
  }
}

// Nor does a backward wait for a gradient of what it would have sent; nor, where it goes to the
// worker itself, of what the call's handler and its answer would have.
TEST(FailedAllocationTest, ACallThatThrowsHasNoPartInABackward) {
  for (const WorkerRank to : {0, 1}) {
    bool failed = true;
    for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
      SCOPED_TRACE(absl::StrCat("to ", to, ", allocation ", nth));
      // A connection on which an allocation fails ends, and the context with it.
      Cluster cluster({.workers = 2});
      ASSERT_EQ(cluster[to].Register("echo", [](Request& r) { return r.message; }),
                absl::OkStatus());
      const Context context = cluster[0].NewContext();
      const at::Tensor leaf = at::ones({1}).requires_grad_(true);
      const auto call = [&] {
        return cluster[0].CallAsync(to, "echo", {"", {leaf}}, {.context = &context});
      };
      const std::optional<Future<Message>> made = CallWhereOneFails(nth, call, &failed);
      if (made.has_value()) made->Wait().status().IgnoreError();
      const Future<Message> next = call();
      EXPECT_NE(next.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
      if (!next.Wait().ok()) continue;
      const absl::Status status = context.Backward({next.Wait()->tensors[0].sum()});
      EXPECT_NE(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    }
  }
}

// Each call ends where an allocation behind its handler fails, and the worker serves on; no
// backward waits for a gradient of an answer that has not come.
TEST(FailedAllocationTest, AnAnswerEndsItsCall) {
  constexpr int kAllocations = 40;  // more than an answer makes
  for (const char* const handler : {"answers", "fails", "throws", "answers later"}) {
    for (const WorkerRank to : {0, 1}) {
      for (int nth = 0; nth < kAllocations && !testing::Test::HasFailure(); ++nth) {
        SCOPED_TRACE(absl::StrCat(handler, ", worker ", to, ", allocation ", nth));
        Cluster cluster({.workers = 2, .thread_count = 1});
        Worker& server = cluster[to];
        EXPECT_EQ(server.Register("echo",
                                  [](Request& r) {
                                    FailAllocation(-1);  // on the thread of the call before
                                    return r.message;
                                  }),
                  absl::OkStatus());
        EXPECT_EQ(server.Register("answers",
                                  [nth](Request& r) {
                                    FailAllocation(nth);
                                    return r.message;
                                  }),
                  absl::OkStatus());
        EXPECT_EQ(server.Register("fails",
                                  [nth](Request&) -> absl::StatusOr<Message> {
                                    absl::Status why = absl::DataLossError("it fails");
                                    FailAllocation(nth);
                                    return why;
                                  }),
                  absl::OkStatus());
        EXPECT_EQ(server.Register("throws",
                                  [nth](Request&) -> absl::StatusOr<Message> {
                                    FailAllocation(nth);
                                    throw std::bad_alloc();
                                  }),
                  absl::OkStatus());
        std::thread completes;
        EXPECT_EQ(server.RegisterAsync("answers later",
                                       [&, nth](Request& r) {
                                         Promise<Message> promise;
                                         const Future<Message> reply = promise.future();
                                         completes = std::thread([nth, promise = std::move(promise),
                                                                  message = r.message]() mutable {
                                           absl::StatusOr<Message> with = std::move(message);
                                           FailAllocation(nth);
                                           promise.Set(std::move(with));
                                           FailAllocation(-1);
                                         });
                                         return reply;
                                       }),
                  absl::OkStatus());
        const Context context = cluster[0].NewContext();
        const at::Tensor leaf = at::ones({1}).requires_grad_(true);
        const auto call = [&](const char* function) {
          return cluster[0].Call(to, function, {"", {leaf}}, {.context = &context});
        };
        const absl::Status answered = call(handler).status();
        FailAllocation(-1);  // a call to the worker itself may have been served on this thread
        if (completes.joinable()) completes.join();
        EXPECT_NE(answered.code(), absl::StatusCode::kDeadlineExceeded) << answered;
        const absl::StatusOr<Message> next = call("echo");
        EXPECT_NE(next.status().code(), absl::StatusCode::kDeadlineExceeded) << next.status();
        if (next.ok()) {  // else the connection has ended, and the context with it
          const absl::Status status = context.Backward({next->tensors[0].sum()});
          EXPECT_NE(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
        }
        cluster.Kill(1);  // it may be lost to the other one, and could not leave in good order
      }
    }
  }
}

// Stages of a pipeline own functions of the user's.
TEST(FailedAllocationTest, WhatAnInlineFunctionOwnsDoesNotEndWhereItsCallsArrive) {
  bool failed = true;
  for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE(nth);
    Cluster cluster({.workers = 2, .thread_count = 1});
    std::atomic<std::thread::id> served{};
    absl::Notification ended;
    std::thread::id ended_on;
    auto owned = std::shared_ptr<int>(new int(0), [&](const int* owner) {
      delete owner;
      ended_on = std::this_thread::get_id();
      ended.Notify();
    });
    ASSERT_EQ(cluster[1].RegisterOwnInline("distgrad.inline",
                                           [&, nth, owned](Request&) -> absl::StatusOr<Message> {
                                             served = std::this_thread::get_id();
                                             cluster[1].UnregisterOwn("distgrad.inline");
                                             FailAllocationOf(gettid(), nth);
                                             return Message{};
                                           }),
              absl::OkStatus());
    owned = nullptr;
    cluster[0].Call(1, "distgrad.inline", {}).status().IgnoreError();
    ended.WaitForNotification();
    EXPECT_NE(ended_on, served.load());
    cluster.Kill(1);  // it may be lost to the other one, and could not leave in good order
    failed = FailAllocationOf(0, -1);
  }
}

// Nor does its caller wait on, or hear of something else than its error, where there is memory for
// that.
TEST(FailedAllocationTest, AnInlineFunctionThatLeavesTensorsAnswers) {
  bool failed = true;
  for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE(nth);
    Cluster cluster({.workers = 2, .thread_count = 1});
    ASSERT_EQ(cluster[1].RegisterOwnInline("distgrad.inline",
                                           [nth](Request&) -> absl::StatusOr<Message> {
                                             absl::Status why = absl::DataLossError("not wanted");
                                             FailAllocationOf(gettid(), nth);
                                             return why;
                                           }),
              absl::OkStatus());
    const absl::Status answered =
        cluster[0].Call(1, "distgrad.inline", {"", {at::ones({1})}}).status();
    EXPECT_TRUE(absl::IsDataLoss(answered) || absl::IsResourceExhausted(answered) ||
                absl::IsUnavailable(answered))
        << answered;
    cluster.Kill(1);  // it may be lost to the other one, and could not leave in good order
    failed = FailAllocationOf(0, -1);
  }
}

// A backward ends where an allocation of the thread that began it fails, and the next one is as
// good as any.
TEST(FailedAllocationTest, ABackwardEnds) {
  for (const WorkerRank to : {0, 1}) {
    bool failed = true;
    for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
      SCOPED_TRACE(absl::StrCat("by worker ", to, ", allocation ", nth));
      Cluster cluster({.workers = 2});
      ASSERT_EQ(cluster[to].Register("echo", [](Request& r) { return r.message; }),
                absl::OkStatus());
      const auto backward = [&](int which) {
        const Context context = cluster[0].NewContext();
        const at::Tensor leaf = at::ones({1}).requires_grad_(true);
        const absl::StatusOr<Message> reply =
            cluster[0].Call(to, "echo", {"", {leaf}}, {.context = &context});
        if (!reply.ok()) return reply.status();
        const at::Tensor loss = reply->tensors[0].sum();
        absl::Status status;
        FailAllocation(which);
        try {
          status = context.Backward({loss});
        } catch (const std::bad_alloc&) {
          status = absl::ResourceExhaustedError("");
        }
        failed = FailAllocation(-1);
        return status;
      };
      const absl::Status status = backward(nth);
      EXPECT_NE(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      const bool has_failed = failed;
      const absl::Status next = backward(-1);
      EXPECT_TRUE(next.ok() || absl::IsUnavailable(next)) << next;
      failed = has_failed;
      cluster.Kill(1);  // it may be lost to the other one, and could not leave in good order
    }
  }
}

// So does one where it is another worker's thread of the pool that finds none, for its answer, a
// notice or a node; and that worker lives on. The end of a graph is libtorch's, whose deleteNode()
// allocates in a destructor: so the graph is kept beyond the context, whose end is that thread's,
// too.
TEST(FailedAllocationTest, ABackwardEndsWhereAnotherWorkerFindsNoMemory) {
  for (const int count : {1, 3}) {
    bool failed = true;
    for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
      SCOPED_TRACE(absl::StrCat(count, " allocations from ", nth));
      at::Tensor kept;
      Cluster cluster({.workers = 2, .thread_count = 1});
      Worker& other = cluster[1];
      ASSERT_EQ(other.Register("double",
                               [&](Request& r) -> absl::StatusOr<Message> {
                                 kept = (r.message.tensors[0] * 2).sqrt();
                                 return Message{"", {kept}};
                               }),
                absl::OkStatus());
      ASSERT_EQ(other.Register("fail",
                               [&, nth](Request& r) {
                                 FailAllocation(nth, count);
                                 return r.message;
                               }),
                absl::OkStatus());
      ASSERT_EQ(other.Register("go on",
                               [&](Request& r) {
                                 failed = FailAllocation(-1);
                                 return r.message;
                               }),
                absl::OkStatus());
      const auto backward = [&](bool fail) {
        const Context context = cluster[0].NewContext();
        const at::Tensor leaf = at::ones({1}).requires_grad_(true);
        const absl::StatusOr<Message> reply =
            cluster[0].Call(1, "double", {"", {leaf}}, {.context = &context});
        if (!reply.ok()) return reply.status();
        if (fail) {
          const absl::Status answered = cluster[0].Call(1, "fail", {"", {}}).status();
          EXPECT_NE(answered.code(), absl::StatusCode::kDeadlineExceeded) << answered;
        }
        return context.Backward({reply->tensors[0].sum()});
      };
      const absl::Status status = backward(/*fail=*/true);
      EXPECT_NE(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      absl::Status next = absl::UnavailableError("");  // a connection may be about to end
      for (int i = 0; i < 3 && !next.ok(); ++i) {
        next = cluster[0].Call(1, "go on", {"", {}}).status();
      }
      EXPECT_TRUE(next.ok()) << next;
      next = backward(/*fail=*/false);
      EXPECT_TRUE(next.ok()) << next;
      cluster.Kill(1);  // it may be lost to the other one, and could not leave in good order
    }
  }
}

// A destructor that throws ends the process. Those of libtorch's nodes may: so there are none.
TEST(FailedAllocationTest, AWorkerEndsAllTheSame) {
  for (const int count : {1, 3}) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(absl::StrCat(count, " allocations from ", nth));
      Promise<Message> promise;
      Cluster cluster({.workers = 2});
      ASSERT_EQ(cluster[1].RegisterAsync("keep", [&](Request&) { return promise.future(); }),
                absl::OkStatus());
      const Context context = cluster[0].NewContext();
      const Future<Message> call = cluster[0].CallAsync(1, "keep", {"", {}}, {.context = &context});
      while (cluster[1].context_count() == 0) std::this_thread::yield();
      FailAllocation(nth, count);
      cluster.Kill(0);
      failed = FailAllocation(-1);
      EXPECT_FALSE(call.Wait().ok());
      while (cluster[1].context_count() > 0) std::this_thread::yield();
    }
  }
}

}  // namespace
}  // namespace distgrad
