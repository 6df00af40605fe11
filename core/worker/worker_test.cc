// Calls, handlers, errors, barriers and lost workers, over every transport.
#include "core/worker/worker.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/base/origin.h"
#include "core/membership/store/in_process_store.h"
#include "core/tensor/exception.h"
#include "core/transport/inproc/inproc_transport.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

class WorkerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Start(int workers, size_t threads = 2) {
    cluster_ = std::make_unique<Cluster>(
        ClusterOptions{.workers = workers, .transport = GetParam(), .thread_count = threads});
  }
  Worker& worker(int i) { return (*cluster_)[i]; }

  std::unique_ptr<Cluster> cluster_;
};

TEST_P(WorkerTest, BytesAndTensorsGoBothWays) {
  Start(2);
  ASSERT_TRUE(worker(1)
                  .Register("swap",
                            [](Request& r) -> absl::StatusOr<Message> {
                              EXPECT_EQ(r.from, 0);
                              EXPECT_FALSE(r.context.valid());
                              std::swap(r.message.tensors[0], r.message.tensors[1]);
                              return Message{r.message.payload + " world", r.message.tensors};
                            })
                  .ok());
  const at::Tensor small = at::arange(5), large = at::randn({300, 1000});
  auto reply = worker(0).Call("worker1", "swap", {"hello", {small, large.slice(1, 10, 900)}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, "hello world");
  EXPECT_TRUE(reply->tensors[0].equal(large.slice(1, 10, 900)));
  EXPECT_TRUE(reply->tensors[1].equal(small));
}

TEST_P(WorkerTest, ErrorsNameWorkerAndFunction) {
  Start(2);
  ASSERT_TRUE(worker(1)
                  .Register("throws",
                            [](Request&) -> absl::StatusOr<Message> {
                              throw std::runtime_error("thrown on purpose");
                            })
                  .ok());
  absl::Status status = worker(0).Call("worker1", "throws", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "call of 'throws' on worker 'worker1' (1): thrown on purpose");
  status = worker(0).Call("worker1", "throw", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_EQ(status.message(),
            "call of 'throw' on worker 'worker1' (1): no such function is registered there; there "
            "is throws");
  status = worker(0).Call("worker1", "absent", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_EQ(status.message(),
            "call of 'absent' on worker 'worker1' (1): no such function is registered there; there "
            "are: throws");
  status = worker(1).Call("worker0", "absent", {}).status();
  EXPECT_EQ(status.message(),
            "call of 'absent' on worker 'worker0' (0): no such function is registered there, nor "
            "any other");
  status = worker(0).Call("worker1", "distgrad.optimizer.rate/adam", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_NE(status.message().find("every worker needs a part of this optimizer, and that one has "
                                  "none of the name 'adam'"),
            std::string::npos)
      << status;
  status = worker(0).Call("worker1", "distgrad.absent", {}).status();
  EXPECT_EQ(status.message(),
            "call of 'distgrad.absent' on worker 'worker1' (1): no such function is registered "
            "there");
  status = worker(0).Call("nobody", "throws", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_NE(status.message().find("worker0, worker1"), std::string::npos) << status;
  // One that is too long, too, before it is sent: the other end would close the connection.
  for (const size_t size : {0, 1025}) {
    status = worker(0).Call("worker1", std::string(size, 'f'), {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

TEST_P(WorkerTest, ErrorsSayWhereTheyArose) {
  using By = ErrorOrigin::By;
  Start(3);
  const auto not_found = [](Request&) -> absl::StatusOr<Message> {
    return absl::NotFoundError("no such record");
  };
  ASSERT_TRUE(worker(2).Register("find", not_found).ok());
  ASSERT_TRUE(worker(2)
                  .Register("throws",
                            [](Request&) -> absl::StatusOr<Message> {
                              throw std::runtime_error("thrown on purpose");
                            })
                  .ok());
  ASSERT_TRUE(worker(2)
                  .RegisterAsync("later",
                                 [](Request&) {
                                   return Future<Message>::Of(absl::NotFoundError("nor later"));
                                 })
                  .ok());
  // Passes a call on, and what comes of it back: as it is, thrown, or as an error of its own.
  ASSERT_TRUE(worker(1)
                  .Register("ask",
                            [this](Request& r) -> absl::StatusOr<Message> {
                              absl::StatusOr<Message> reply =
                                  worker(1).Call(2, r.message.payload, {}, r.Nested());
                              EXPECT_FALSE(reply.ok());
                              return reply;
                            })
                  .ok());
  ASSERT_TRUE(worker(1)
                  .Register("ask and throw",
                            [this](Request& r) -> absl::StatusOr<Message> {
                              throw StatusError(
                                  worker(1).Call(2, r.message.payload, {}, r.Nested()).status());
                            })
                  .ok());
  ASSERT_TRUE(
      worker(1)
          .Register("hide",
                    [this](Request& r) -> absl::StatusOr<Message> {
                      return absl::AbortedError(
                          worker(1).Call(2, r.message.payload, {}, r.Nested()).status().message());
                    })
          .ok());
  ASSERT_TRUE(worker(1)
                  .Register("lost",
                            [this](Request&) -> absl::StatusOr<Message> {
                              return worker(1).Call("nobody", "find", {});
                            })
                  .ok());
  const auto origin = [&](int to, const std::string& function, const std::string& payload = "") {
    const absl::Status status = worker(0).Call(to, function, {payload, {}}).status();
    EXPECT_FALSE(status.ok()) << function;
    return OriginOf(status).value_or(ErrorOrigin{99, By::kDistgrad});
  };
  const auto expect = [](ErrorOrigin got, int at, By by) {
    EXPECT_EQ(got.worker, at);
    EXPECT_EQ(got.by, by);
  };
  expect(origin(2, "find"), 2, By::kHandler);
  expect(origin(2, "throws"), 2, By::kHandler);
  expect(origin(2, "later"), 2, By::kHandler);
  expect(origin(2, "absent"), 2, By::kDistgrad);
  expect(origin(2, "aten::absent"), 2, By::kDistgrad);
  expect(origin(1, "ask", "find"), 2, By::kHandler);
  expect(origin(1, "ask", "absent"), 2, By::kDistgrad);
  expect(origin(1, "ask and throw", "find"), 2, By::kHandler);
  expect(origin(1, "hide", "find"), 1, By::kHandler);
  expect(origin(1, "lost"), 1, By::kDistgrad);
  expect(origin(99, "find"), 0, By::kDistgrad);
  expect(origin(2, ""), 0, By::kDistgrad);
  const absl::Status stranger = worker(0).Call("nobody", "find", {}).status();
  EXPECT_EQ(OriginOf(stranger), (ErrorOrigin{0, By::kDistgrad})) << stranger;
  const absl::Status late = worker(0).Call(2, "find", {}, {.deadline = absl::UnixEpoch()}).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_EQ(OriginOf(late), (ErrorOrigin{0, By::kDistgrad})) << late;
}

TEST_P(WorkerTest, NamesOfFunctions) {
  Start(1);
  const Worker::Handler nothing = [](Request&) -> absl::StatusOr<Message> { return Message{}; };
  EXPECT_TRUE(worker(0).Register("f", nothing).ok());
  EXPECT_EQ(worker(0).Register("f", nothing).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(worker(0).Register("", nothing).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker(0).Register("aten::add", nothing).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(worker(0).Register(std::string(1000, 'f'), nothing).ok());
  EXPECT_EQ(worker(0).Register(std::string(1001, 'f'), nothing).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker(0).Register("distgrad.f", nothing).message(),
            "'distgrad.f' cannot be the name of a function of worker 'worker0': it has 1 to 1000 "
            "bytes, '::' is for operators, and what begins with 'distgrad.' is distgrad's own");
  const Worker::AsyncHandler later = [](Request&) { return Future<Message>::Of(Message{}); };
  EXPECT_EQ(worker(0).RegisterAsync("distgrad.f", later).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker(0).Register("null", nullptr).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker(0).RegisterAsync("null", nullptr).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(worker(0).RegisterOwn("distgrad.f", nothing).ok());
  EXPECT_TRUE(worker(0).Call("worker0", "f", {}).ok()) << "a call to oneself";
}

// A calls B calls A ..., and every pool has one thread.
TEST_P(WorkerTest, NestedCallsFiftyDeepOnPoolsOfOneThread) {
  Start(2, /*threads=*/1);
  for (int i = 0; i < 2; ++i) {
    Worker& self = worker(i);
    ASSERT_TRUE(self.Register("down",
                              [&self, i](Request& r) -> absl::StatusOr<Message> {
                                const int left = std::stoi(r.message.payload);
                                if (left == 0) return Message{"bottom", {}};
                                return self.Call(WorkerName(1 - i), "down",
                                                 {absl::StrCat(left - 1), {}}, r.Nested());
                              })
                    .ok());
  }
  auto reply = worker(0).Call("worker1", "down", {"50", {}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, "bottom");
}

TEST_P(WorkerTest, ADeadlineShrinksThroughNestedCallsAndFiresThoughThePoolIsBlocked) {
  Start(2, /*threads=*/1);
  Promise<Unit> release;
  Future<Unit> released = release.future();
  ASSERT_TRUE(worker(1)
                  .Register("block",
                            [released](Request&) -> absl::StatusOr<Message> {
                              released.Wait().IgnoreError();
                              return Message{};
                            })
                  .ok());
  const auto nested = std::make_shared<Promise<absl::StatusCode>>();
  const Future<absl::StatusCode> nested_code = nested->future();
  const auto begun = std::make_shared<std::atomic<bool>>(false);
  ASSERT_TRUE(worker(0)
                  .Register("relay",
                            [this, nested, begun](Request& r) -> absl::StatusOr<Message> {
                              const bool first = !begun->exchange(true);
                              auto reply = worker(0).Call("worker1", "block", {}, r.Nested());
                              if (first) nested->Set(reply.status().code());
                              return reply;
                            })
                  .ok());
  // A busy machine may not get as far as the handler; then once more, with more time.
  for (absl::Duration patience = absl::Milliseconds(100); !*begun; patience *= 2) {
    const absl::Status status =
        worker(1).Call("worker0", "relay", {}, {.deadline = absl::Now() + patience}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
  // By its own deadline, or by the word that the caller has given up at the same deadline.
  EXPECT_TRUE(*nested_code.Wait() == absl::StatusCode::kDeadlineExceeded ||
              *nested_code.Wait() == absl::StatusCode::kCancelled);
  release.Set(Unit());
  EXPECT_EQ(worker(0)
                .Call("worker1", "block", {}, {.deadline = absl::Now() - absl::Seconds(1)})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
}

// Several workers of one process, and the wrong one: its edges would be made known where nobody
// waits for them.
TEST_P(WorkerTest, AContextOfAnotherWorkerIsRefused) {
  Start(3);
  const auto expect_refused = [](const absl::Status& status, ContextId context) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& part : {std::string("worker 'worker1'"), std::to_string(context)}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status << "\nlacks " << part;
    }
  };
  ASSERT_TRUE(worker(2)
                  .Register("pass on",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              expect_refused(
                                  worker(1).Call(0, "absent", r.message, r.Nested()).status(),
                                  r.context.id());
                              return r.message;
                            })
                  .ok());
  const Context context = worker(0).NewContext();
  const Message message{"", {at::ones({2}).requires_grad_()}};
  const CallOptions options{.context = &context};
  expect_refused(worker(1).Call(2, "pass on", message, options).status(), context.id());
  expect_refused(worker(1).CallAsync(2, "pass on", message, options).Wait().status(), context.id());
  expect_refused(worker(1).CallEach({2}, "pass on", message, options)[0].status(), context.id());
  expect_refused(worker(1).Call("unknown", "pass on", message, options).status(), context.id());
  const absl::Status own = worker(0).Call(2, "pass on", message, options).status();
  EXPECT_TRUE(own.ok()) << own;
  // Also where nothing of the message is recorded: the handler would have a context that nobody
  // releases on its worker.
  expect_refused(worker(1).Call(2, "pass on", {}, options).status(), context.id());
}

TEST_P(WorkerTest, OperatorsBySchemaName) {
  Start(2);
  const at::Tensor x = at::randn({3, 4});
  auto results = worker(0).CallOp("worker1", "aten::max.dim", {x, 1});
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_EQ(results->size(), 2u);
  const auto [values, indices] = x.max(1);
  EXPECT_TRUE((*results)[0].toTensor().equal(values));
  EXPECT_TRUE((*results)[1].toTensor().equal(indices));
  results = worker(0).CallOp("worker1", "aten::add.Tensor", {x, x});
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_TRUE((*results)[0].toTensor().equal(x + x));
  const absl::Status status = worker(0).CallOp("worker1", "aten::mm", {x, x}).status();
  EXPECT_NE(status.message().find("'aten::mm' on worker 'worker1'"), std::string::npos) << status;
}

TEST_P(WorkerTest, ALostWorkerFailsItsCallsAndNoOthers) {
  Start(3);
  Promise<Unit> release;
  Future<Unit> released = release.future();
  Promise<Unit> arrived;
  Future<Unit> has_arrived = arrived.future();
  ASSERT_TRUE(worker(1)
                  .Register("block",
                            [&arrived, released](Request&) -> absl::StatusOr<Message> {
                              arrived.Set(Unit());
                              released.Wait().IgnoreError();
                              return Message{};
                            })
                  .ok());
  auto blocked = worker(0).CallAsync("worker1", "block", {});
  has_arrived.Wait().IgnoreError();
  std::thread killer([this] { cluster_->Kill(1); });
  const absl::Status status = blocked.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find("'worker1' (1)"), std::string::npos) << status;
  release.Set(Unit());
  killer.join();
  EXPECT_EQ(worker(0).Call("worker1", "block", {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(worker(0).CallOp("worker2", "aten::neg", {at::ones({1})}).ok());
}

TEST_P(WorkerTest, ManyThreadsCallEachOther) {
  Start(3);
  std::vector<std::thread> threads;
  for (int from = 0; from < 3; ++from) {
    threads.emplace_back([this, from] {
      for (int i = 0; i < 100; ++i) {
        const at::Tensor x = at::full({1 + i * 20}, i);
        auto result = worker(from).CallOp(WorkerName(i % 3), "aten::neg", {x});
        ASSERT_TRUE(result.ok()) << result.status();
        ASSERT_TRUE((*result)[0].toTensor().equal(-x));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What has to happen before the end of the wait may need the one thread that waits.
TEST_P(WorkerTest, AHandlerThatWaitsForABarrierLeavesItsThreadToOthers) {
  Start(2, /*threads=*/1);
  absl::Notification entered;
  ASSERT_TRUE(worker(1)
                  .Register("meet",
                            [&](Request&) -> absl::StatusOr<Message> {
                              entered.Notify();
                              const absl::Status met = worker(1).Barrier(Deadline::Never());
                              if (!met.ok()) return met;
                              return Message{};
                            })
                  .ok());
  ASSERT_TRUE(worker(1)
                  .Register("echo", [](Request& r) -> absl::StatusOr<Message> { return r.message; })
                  .ok());
  const Future<Message> meeting = worker(0).CallAsync(1, "meet", {});
  entered.WaitForNotification();
  const absl::Status echo = worker(0).Call(1, "echo", {}).status();
  EXPECT_TRUE(echo.ok()) << echo;
  EXPECT_TRUE(worker(0).Barrier(Deadline::Never()).ok());
  EXPECT_TRUE(meeting.Wait().ok()) << meeting.Wait().status();
}

TEST_P(WorkerTest, AHandlerThatWaitsForTheEndOfAnotherWorkerLeavesItsThreadToOthers) {
  Start(3, /*threads=*/1);
  absl::Notification holds, ending, go;
  ASSERT_TRUE(worker(1)
                  .Register("hold",
                            [&](Request&) -> absl::StatusOr<Message> {
                              holds.Notify();
                              go.WaitForNotification();
                              return Message{};
                            })
                  .ok());
  ASSERT_TRUE(worker(0)
                  .Register("end",
                            [&](Request&) -> absl::StatusOr<Message> {
                              ending.Notify();
                              const absl::Status ended = worker(1).Close(Deadline::Never());
                              if (!ended.ok()) return ended;
                              return Message{};
                            })
                  .ok());
  ASSERT_TRUE(worker(0)
                  .Register("go",
                            [&](Request&) -> absl::StatusOr<Message> {
                              go.Notify();
                              return Message{};
                            })
                  .ok());
  const Future<Message> held = worker(2).CallAsync(1, "hold", {});
  holds.WaitForNotification();
  const Future<Message> end = worker(2).CallAsync(0, "end", {});
  ending.WaitForNotification();
  const absl::Status went = worker(2).Call(0, "go", {}).status();
  EXPECT_TRUE(went.ok()) << went;
  if (!went.ok()) go.Notify();
  EXPECT_TRUE(end.Wait().ok()) << end.Wait().status();
  EXPECT_FALSE(held.Wait().ok()) << "its worker is closed";
  cluster_->Kill(1);
}

TEST_P(WorkerTest, JoinWaitsForHandlers) {
  Start(2);
  absl::Notification entered, release;
  absl::Status inside;
  ASSERT_TRUE(worker(1)
                  .Register("hold",
                            [&](Request&) -> absl::StatusOr<Message> {
                              inside = worker(1).Close(Deadline::Never());
                              entered.Notify();
                              release.WaitForNotification();
                              return Message{};
                            })
                  .ok());
  const Future<Message> call = worker(0).CallAsync("worker1", "hold", {});
  entered.WaitForNotification();
  EXPECT_EQ(inside.code(), absl::StatusCode::kFailedPrecondition) << inside;
  const absl::Status late = worker(1).Close(absl::InfinitePast());
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_NE(late.message().find("'worker1' is closed, and "), std::string::npos) << late;
  EXPECT_FALSE(call.Wait().ok()) << "it is closed";
  release.Notify();
  EXPECT_TRUE(worker(1).Close(Deadline::Never()).ok());
  EXPECT_TRUE(worker(1).Close(absl::InfinitePast()).ok());
  cluster_->Kill(1);  // it is no member that the others could shut down with
}

TEST_P(WorkerTest, AllMeetAtABarrier) {
  Start(3);
  std::atomic<int> before{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 1; round <= 5; ++round) {
        ++before;
        ASSERT_TRUE(worker(i).Barrier(absl::Now() + absl::Seconds(60)).ok());
        ASSERT_GE(before, 3 * round);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Transports, WorkerTest, ::testing::Values("inproc", "socket", "tcp"),
                         [](const auto& info) { return info.param; });

// The clock's thread may be in the agent, and go on to the transport.
TEST(WorkerEndTest, TheTransportStaysAsLongAsATimerRuns) {
  for (absl::Duration patience = absl::Milliseconds(10);; patience *= 2) {
    const auto network = std::make_shared<InprocNetwork>();
    Promise<Message> never;
    auto worker = Worker::Create({.store = NewInProcessStore(),
                                  .rank = 0,
                                  .world_size = 1,
                                  .transport = "inproc",
                                  .network = network});
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE((*worker)->RegisterAsync("wait", [&](Request&) { return never.future(); }).ok());
    const auto test = std::this_thread::get_id();
    bool passed = false;
    absl::Notification in_timer;
    std::atomic<bool> gone{false};
    (*worker)
        ->CallAsync(0, "wait", {}, {.deadline = absl::Now() + patience})
        .Then([&](const absl::StatusOr<Message>&) {
          if (std::this_thread::get_id() == test) {
            passed = true;
            return;
          }
          in_timer.Notify();
          for (int i = 0; i < 100000 && !gone; ++i) {
            gone = network->Find("inproc://1") == nullptr;
            std::this_thread::yield();
          }
        });
    if (passed) continue;  // before it was asked what came of it
    in_timer.WaitForNotification();
    worker->reset();
    EXPECT_FALSE(gone);
    return;
  }
}

TEST(WorkerOptionsTest, WhatMakesNoSenseIsRefused) {
  const auto refused = [](WorkerOptions options) {
    options.join_timeout = absl::Milliseconds(200);
    return Worker::Create(std::move(options)).status().code();
  };
  const std::shared_ptr<Store> store = NewInProcessStore();
  EXPECT_EQ(refused({.store = store, .rank = 2, .world_size = 2}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({.store = store, .rank = 0, .world_size = 0}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({.store = store, .rank = 0, .world_size = 1, .transport = "pigeon"}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({.rendezvous = "pigeon://", .rank = 0, .world_size = 1}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({.rendezvous = "tcp://nowhere", .rank = 0, .world_size = 1}),
            absl::StatusCode::kInvalidArgument);
}

TEST(WorkerOptionsTest, AWorkerThatNeverJoinsIsNamed) {
  const absl::Status status = Worker::Create({.store = NewInProcessStore(),
                                              .rank = 0,
                                              .world_size = 2,
                                              .join_timeout = absl::Milliseconds(100)})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("worker 1 of 2 did not join"), std::string::npos) << status;
}

}  // namespace
}  // namespace distgrad
