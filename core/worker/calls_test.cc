// Calls that are cancelled, answered later, sent to many, refused or counted.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "core/tensor/allocation_limit.h"
#include "core/tensor/values.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

class CallsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Start(ClusterOptions options) {
    options.transport = GetParam();
    cluster_ = std::make_unique<Cluster>(options);
  }
  Worker& worker(int i) { return (*cluster_)[i]; }

  // Registers "wait": says that it began, and waits until its caller has gone.
  void RegisterWait(int i) {
    ASSERT_TRUE(worker(i)
                    .Register("wait",
                              [this](Request& r) -> absl::StatusOr<Message> {
                                began_.Set(Unit());
                                Promise<Unit> gone;
                                Future<Unit> is_gone = gone.future();
                                r.cancellation->OnCancel([&] { gone.Set(Unit()); });
                                is_gone.Wait().IgnoreError();
                                cancelled_.Set(r.cancellation->why());
                                return r.cancellation->why();
                              })
                    .ok());
  }

  // Has a call take the one thread of worker 1's pool until go_on_.
  Future<Message> TakeThreadOf1() {
    absl::Notification begun;
    EXPECT_TRUE(worker(1)
                    .Register("hold",
                              [&](Request&) -> absl::StatusOr<Message> {
                                begun.Notify();
                                go_on_.WaitForNotification();
                                return Message{};
                              })
                    .ok());
    Future<Message> held = worker(0).CallAsync(1, "hold", {});
    begun.WaitForNotification();
    return held;
  }

  absl::Notification go_on_;
  Promise<Unit> began_;
  Promise<absl::Status> cancelled_;
  Future<Unit> has_begun_ = began_.future();
  Future<absl::Status> was_cancelled_ = cancelled_.future();
  std::unique_ptr<Cluster> cluster_;
};

TEST_P(CallsTest, ACancelTravelsThroughNestedCalls) {
  Start({.workers = 3, .thread_count = 1});
  RegisterWait(2);
  ASSERT_TRUE(
      worker(1)
          .Register("relay",
                    [this](Request& r) { return worker(1).Call(2, "wait", {}, r.Nested()); })
          .ok());
  Future<Message> call = worker(0).CallAsync(1, "relay", {});
  has_begun_.Wait().IgnoreError();
  call.Cancel();
  ASSERT_TRUE(call.Done());
  EXPECT_EQ(call.Wait().status().code(), StatusCode::kCancelled);
  EXPECT_EQ(call.Wait().status().message(),
            "call of 'relay' on worker 'worker1' (1): it was cancelled by its caller");
  EXPECT_EQ(was_cancelled_.Wait()->code(), StatusCode::kCancelled);
  EXPECT_TRUE(worker(0).CallOp(1, "aten::neg", {at::ones({1})}).ok());
}

// The call sent a tensor that requires grad, and the loss has others to be differentiated through.
TEST_P(CallsTest, ACancelledCallLeavesNothingWaitingInItsContext) {
  Start({.workers = 2});
  RegisterWait(1);
  const at::Tensor x = at::ones({3}).requires_grad_(), y = at::full({3}, 2.0).requires_grad_();
  Context context = worker(0).NewContext();
  Future<Message> call = worker(0).CallAsync(1, "wait", {"", {x * y}}, {.context = &context});
  has_begun_.Wait().IgnoreError();
  auto product = worker(0).CallOp(1, "aten::mul.Tensor", {x, y}, {.context = &context});
  ASSERT_TRUE(product.ok()) << product.status();
  call.Cancel();
  EXPECT_EQ(call.Wait().status().code(), StatusCode::kCancelled);
  const absl::Status done = context.Backward({(*product)[0].toTensor().sum()});
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_TRUE(context.Gradient(x)->equal(y));
  was_cancelled_.Wait().IgnoreError();
}

// One that lasts as long as a program, for its Ctrl-C say, is not to gather what its calls brought.
TEST_P(CallsTest, ACancellationKeepsNothingOfCallsThatAreOver) {
  Start({.workers = 2});
  // Worker 0 has not heard of it: the store has to find it.
  const std::unique_ptr<Worker> late = cluster_->Join("late");
  for (Worker* const server : {&worker(1), late.get()}) {
    ASSERT_TRUE(
        server->Register("echo", [](Request& r) -> absl::StatusOr<Message> { return r.message; })
            .ok());
  }
  const auto cancellation = std::make_shared<Cancellation>();
  for (const std::string name : {"worker1", "late"}) {
    std::optional<c10::weak_intrusive_ptr<at::TensorImpl>> reply;
    {
      const Future<Message> call =
          worker(0).CallAsync(name, "echo", {"", {at::ones({3})}}, {.cancellation = cancellation});
      ASSERT_TRUE(call.Wait().ok()) << call.Wait().status();
      reply.emplace(call.Wait()->tensors[0].getIntrusivePtr());
    }
    // Whoever set the future may still be on its way out of it.
    const absl::Time patience = absl::Now() + absl::Seconds(20);
    while (!reply->expired() && absl::Now() < patience) std::this_thread::yield();
    EXPECT_TRUE(reply->expired()) << name;
  }
  EXPECT_TRUE(late->Leave(Deadline::After(absl::Seconds(60))).ok());
}

TEST_P(CallsTest, TheEndOfAWorkerCancelsItsCallsOfItself) {
  Start({.workers = 1});
  RegisterWait(0);
  Future<Message> call = worker(0).CallAsync(0, "wait", {});
  has_begun_.Wait().IgnoreError();
  cluster_->Kill(0);  // waits for the handler
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kCancelled) << call.Wait().status();
  EXPECT_EQ(was_cancelled_.Wait()->code(), absl::StatusCode::kCancelled);
}

TEST_P(CallsTest, AnAnswerMayComeAfterTheEndOfItsWorker) {
  Start({.workers = 2});
  std::vector<Promise<Message>> answers(2);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(worker(1)
                    .RegisterAsync(absl::StrCat("later", i),
                                   [&, i](Request&) {
                                     if (i == 1) began_.Set(Unit());
                                     return answers[i].future();
                                   })
                    .ok());
  }
  // From another worker, and from itself.
  const Future<Message> first = worker(0).CallAsync(1, "later0", {});
  const Future<Message> second = worker(1).CallAsync(1, "later1", {});
  has_begun_.Wait().IgnoreError();
  cluster_->Kill(1);
  EXPECT_FALSE(first.Wait().ok());
  EXPECT_FALSE(second.Wait().ok());
  for (Promise<Message>& answer : answers) answer.Set(Message{});
}

TEST_P(CallsTest, AHandlerMayAnswerLater) {
  Start({.workers = 2, .thread_count = 1});
  std::vector<std::pair<Promise<Message>, std::string>> waiting;
  ASSERT_TRUE(worker(1)
                  .RegisterAsync("later",
                                 [&](Request& r) {
                                   waiting.emplace_back(Promise<Message>(), r.message.payload);
                                   return waiting.back().first.future();
                                 })
                  .ok());
  ASSERT_TRUE(worker(1)
                  .Register("answer",
                            [&](Request&) -> absl::StatusOr<Message> {
                              for (auto& [promise, text] : waiting) promise.Set(Message{text, {}});
                              waiting.clear();
                              return Message{};
                            })
                  .ok());
  std::vector<Future<Message>> replies;
  for (int i = 0; i < 20; ++i) {
    replies.push_back(worker(0).CallAsync(1, "later", {absl::StrCat(i), {}}));
  }
  ASSERT_TRUE(worker(0).Call(1, "answer", {}).ok()) << "the one thread is not held";
  for (int i = 0; i < 20; ++i) EXPECT_EQ(replies[i].Wait()->payload, absl::StrCat(i));

  // One that nobody will answer, one that never could be, and one that throws.
  Future<Message> dropped = worker(0).CallAsync(1, "later", {});
  ASSERT_TRUE(worker(1)
                  .Register("drop",
                            [&](Request&) -> absl::StatusOr<Message> {
                              waiting.clear();
                              return Message{};
                            })
                  .ok());
  ASSERT_TRUE(worker(0).Call(1, "drop", {}).ok());
  EXPECT_EQ(dropped.Wait().status().code(), StatusCode::kCancelled);
  ASSERT_TRUE(worker(1).RegisterAsync("none", [](Request&) { return Future<Message>(); }).ok());
  EXPECT_EQ(worker(0).Call(1, "none", {}).status().code(), StatusCode::kInternal);
  ASSERT_TRUE(worker(1)
                  .RegisterAsync("throws",
                                 [](Request&) -> Future<Message> {
                                   throw std::runtime_error("thrown on purpose");
                                 })
                  .ok());
  EXPECT_TRUE(
      absl::StrContains(worker(0).Call(1, "throws", {}).status().message(), "thrown on purpose"));
}

// The reply's history is the caller's modes' and context's, though no handler runs any more.
TEST_P(CallsTest, ALaterAnswerIsRecorded) {
  Start({.workers = 3});
  const at::Tensor w = at::full({3}, 3.0).requires_grad_();
  ASSERT_TRUE(worker(2)
                  .Register("mul",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              return Message{"", {r.message.tensors[0] * w}};
                            })
                  .ok());
  ASSERT_TRUE(worker(1)
                  .RegisterAsync("relay",
                                 [this](Request& r) {
                                   return worker(1).CallAsync(2, "mul", r.message, r.Nested());
                                 })
                  .ok());
  const at::Tensor x = at::full({3}, 2.0).requires_grad_();
  Context context = worker(0).NewContext();
  auto reply = worker(0).Call("worker1", "relay", {"", {x}}, {.context = &context});
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::Status done = context.Backward({reply->tensors[0].sum()});
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_TRUE(context.Gradient(x)->equal(at::full({3}, 3.0)));
  {
    at::NoGradGuard no_grad;
    auto plain = worker(0).Call("worker1", "relay", {"", {x}}, {.context = &context});
    ASSERT_TRUE(plain.ok()) << plain.status();
    EXPECT_FALSE(plain->tensors[0].requires_grad());
  }
}

TEST_P(CallsTest, ACallThatIsCancelledCancelsTheAnswerToCome) {
  Start({.workers = 3, .thread_count = 1});
  RegisterWait(2);
  ASSERT_TRUE(worker(1)
                  .RegisterAsync("relay",
                                 [this](Request& r) {
                                   // On purpose without Nested(): the future alone is cancelled.
                                   (void)r;
                                   return worker(1).CallAsync(2, "wait", {});
                                 })
                  .ok());
  Future<Message> call = worker(0).CallAsync(1, "relay", {});
  has_begun_.Wait().IgnoreError();
  call.Cancel();
  EXPECT_EQ(was_cancelled_.Wait()->code(), StatusCode::kCancelled);
}

// A calls B calls A ..., with one thread each, none of which is ever held.
// With neither of them waiting in a way that the worker could know of.
TEST_P(CallsTest, LongHandlersHoldUpNeitherEachOtherNorTheSockets) {
  Start({.workers = 2, .thread_count = 2});
  absl::BlockingCounter both_run(2);
  absl::Notification go_on;
  ASSERT_TRUE(worker(1)
                  .Register("hold",
                            [&](Request&) -> absl::StatusOr<Message> {
                              both_run.DecrementCount();
                              go_on.WaitForNotification();
                              return Message();
                            })
                  .ok());
  Future<Message> first = worker(0).CallAsync(1, "hold", {});
  Future<Message> second = worker(0).CallAsync(1, "hold", {});
  both_run.Wait();
  // A cheap operator needs no thread of the pool, and so is answered.
  const auto minus_one = worker(0).CallOp(1, "aten::neg", {at::ones({1})});
  EXPECT_TRUE(minus_one.ok()) << minus_one.status();
  go_on.Notify();
  EXPECT_TRUE(first.Wait().ok()) << first.Wait().status();
  EXPECT_TRUE(second.Wait().ok()) << second.Wait().status();
}

// A thread that sends, in modes of its own, runs nothing of what others ask of its worker.
TEST_P(CallsTest, WhoSendsKeepsItsModesToItself) {
  Start({.workers = 2});
  ASSERT_TRUE(worker(1).Register("small", [](Request&) { return Message{}; }).ok());
  std::atomic<bool> over{false};
  const auto send = [&] {
    while (!over) {
      std::vector<Future<Message>> calls;
      for (int i = 0; i < 8; ++i) calls.push_back(worker(0).CallAsync(1, "small", {}));
      for (const auto& call : calls) EXPECT_TRUE(call.Wait().ok()) << call.Wait().status();
    }
  };
  std::thread inference([&] {
    const c10::InferenceMode mode;
    send();
  });
  std::thread autocast([&] {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    send();
  });
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    const at::Tensor x = at::ones({2, 2}).requires_grad_();
    Context context = worker(1).NewContext();
    const auto product = worker(1).CallOp(0, "aten::mm", {x, x}, {.context = &context});
    EXPECT_TRUE(product.ok()) << product.status();
    if (!product.ok()) break;
    const at::Tensor y = (*product)[0].toTensor();
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    const absl::Status done = context.Backward({y.sum()});
    EXPECT_TRUE(done.ok()) << done;
    if (!done.ok()) break;
    EXPECT_TRUE(context.Gradient(x)->equal(at::full({2, 2}, 4.0f)));
  }
  over = true;
  inference.join();
  autocast.join();
}

TEST_P(CallsTest, LaterAnswersFiftyDeepOnPoolsOfOneThread) {
  Start({.workers = 2, .thread_count = 1});
  for (int i = 0; i < 2; ++i) {
    Worker& self = worker(i);
    ASSERT_TRUE(
        self.RegisterAsync(
                "down",
                [&self, i](Request& r) {
                  const int left = std::stoi(r.message.payload);
                  if (left == 0) return Future<Message>::Of(Message{"end", {}});
                  return self.CallAsync(1 - i, "down", {absl::StrCat(left - 1), {}}, r.Nested());
                })
            .ok());
  }
  auto reply = worker(0).Call(1, "down", {"50", {}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, "end");
}

TEST_P(CallsTest, ByNameById) {
  Start({.workers = 2});
  const std::string name = "worker1";
  EXPECT_TRUE(worker(0).CallOp(name, "aten::neg", {at::ones({1})}).ok());
  EXPECT_TRUE(worker(0).CallOp(0, "aten::neg", {at::ones({1})}).ok());
  EXPECT_TRUE(worker(0).CallOp(worker(1).rank(), "aten::neg", {at::ones({1})}).ok());
  for (int id : {2, -1, 65536, 1 << 20}) {
    EXPECT_EQ(worker(0).Call(id, "f", {}).status().code(), StatusCode::kNotFound) << id;
  }
  EXPECT_EQ(worker(0).Call("", "f", {}).status().code(), StatusCode::kNotFound);
}

TEST_P(CallsTest, OneMessageToMany) {
  Start({.workers = 3});
  for (int i = 0; i < 3; ++i) {
    if (i == 1) continue;
    ASSERT_TRUE(worker(i)
                    .Register("scale",
                              [i](Request& r) -> absl::StatusOr<Message> {
                                return Message{absl::StrCat(i), {r.message.tensors[0] * i}};
                              })
                    .ok());
  }
  // Not contiguous, and large: it is laid out once for all.
  const at::Tensor x = at::ones({200, 300}).t().requires_grad_();
  Context context = worker(0).NewContext();
  auto replies =
      worker(0).CallEach({"worker2", 0, 1, "nobody"}, "scale", {"", {x}}, {.context = &context});
  ASSERT_EQ(replies.size(), 4u);
  ASSERT_TRUE(replies[0].ok()) << replies[0].status();
  EXPECT_EQ(replies[0]->payload, "2");
  ASSERT_TRUE(replies[1].ok()) << replies[1].status();
  EXPECT_EQ(replies[2].status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(replies[2].status().message(), "'scale' on worker 'worker1' (1)"))
      << replies[2].status();
  EXPECT_EQ(replies[3].status().code(), StatusCode::kNotFound);
  // Each has an edge of its own.
  const absl::Status done =
      context.Backward({replies[0]->tensors[0].sum() + replies[1]->tensors[0].sum()});
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_TRUE(context.Gradient(x)->equal(at::full_like(x, 2.0)));
}

// -------------------------------------------------------------------------------- Contexts

TEST_P(CallsTest, AContextThatIsNoneIsAnError) {
  Start({.workers = 1});
  // As a handler has it that was called outside any context.
  Context none;
  ASSERT_TRUE(worker(0)
                  .Register("f",
                            [&](Request& request) -> absl::StatusOr<Message> {
                              none = std::move(request.context);
                              return Message{};
                            })
                  .ok());
  ASSERT_TRUE(worker(0).Call(0, "f", {}).ok());
  const at::Tensor x = at::ones({1}).requires_grad_();
  EXPECT_FALSE(none.valid());
  EXPECT_EQ(none.id(), 0u);
  EXPECT_EQ(none.Gradients().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(none.Gradient(x).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(none.SetGradient(x, x.detach()).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(none.Backward({x.sum()}).code(), StatusCode::kFailedPrecondition);
  none.Release();
  const CallOptions recorded{.context = &none};
  for (const absl::Status& status : {worker(0).Call(0, "f", {}, recorded).status(),
                                     worker(0).CallAsync(0, "f", {}, recorded).Take().status(),
                                     worker(0).CallEach({0}, "f", {}, recorded)[0].status(),
                                     worker(0).Call("nobody", "f", {}, recorded).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
  }
}

// --------------------------------------------------------------------------------- Limits

TEST_P(CallsTest, LimitsAreNamed) {
  Start({.workers = 2, .limits = {.tensors_per_message = 2, .calls_per_peer = 1}});
  RegisterWait(1);
  Future<Message> one = worker(0).CallAsync(1, "wait", {});
  has_begun_.Wait().IgnoreError();
  absl::Status status = worker(0).Call(1, "wait", {}).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "limit calls_per_peer is 1")) << status;
  one.Cancel();
  const std::vector<at::Tensor> three(3, at::ones({1}));
  status = worker(0).Call(1, "wait", {"", three}).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "limit tensors_per_message is 2")) << status;
  was_cancelled_.Wait().IgnoreError();
}

TEST_P(CallsTest, ContextsOfAPeerAreBounded) {
  Start({.workers = 2, .limits = {.contexts_per_peer = 2}});
  std::vector<Context> contexts;
  for (int i = 0; i < 3; ++i) contexts.push_back(worker(0).NewContext());
  const at::Tensor x = at::ones({2}).requires_grad_();
  const auto call = [&](int i) {
    return worker(0).CallOp(1, "aten::neg", {x}, {.context = &contexts[i]});
  };
  auto first = call(0);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(call(1).ok());
  const absl::Status status = call(2).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "limit contexts_per_peer is 2")) << status;
  // The context that was refused does not hang: it fails, for its edge was never made.
  EXPECT_EQ(contexts[2].Backward({x.sum()}).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(contexts[0].Backward({(*first)[0].toTensor().sum()}).ok());
  contexts[0].Release();
  contexts[1].Release();
  EXPECT_TRUE(worker(0).Call(1, "absent", {}).status().code() == StatusCode::kNotFound);
  Context again = worker(0).NewContext();
  EXPECT_TRUE(worker(0).CallOp(1, "aten::neg", {x}, {.context = &again}).ok());
}

// ------------------------------------------------------------------------------ Operators

TEST_P(CallsTest, OperatorsThatDoMoreThanComputeAreRefused) {
  Start({.workers = 2});
  for (const char* name : {"aten::from_file", "aten::_sparse_coo_tensor_unsafe",
                           "profiler::_record_function_enter", "aten::set_.source_Tensor"}) {
    const absl::Status status = worker(0).CallOp(1, name, {"/nowhere"}).status();
    EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << name << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "does more than compute")) << status;
  }
}

// The error names the operator, and what to do, in each language.
TEST_P(CallsTest, OnlyOperatorsThatAreListedAreServed) {
  Start({.workers = 2});
  const at::Tensor x = at::ones({4});
  for (const char* name : {"aten::fft_fft", "aten::cov", "aten::lcm", "aten::neg.out"}) {
    const absl::Status status = worker(0).CallOp(1, name, {x, x}).status();
    EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << name << ": " << status;
    for (const char* part :
         {name, "worker1", "is not on the list", "register a function there",
          "ServeOperators::kAll", "DG_WORKER_ALL_OPERATORS", "ServeOperators::All"}) {
      EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
    }
  }
  // What there is not is another error, whatever its name.
  for (const char* name : {"aten::nega", "prim::Print"}) {
    const absl::Status status = worker(0).CallOp(1, name, {x}).status();
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << name << ": " << status;
  }
  // A function that the worker's owner has registered may call anything.
  ASSERT_TRUE(worker(1)
                  .Register("transform",
                            [](Request& request) -> absl::StatusOr<Message> {
                              return Message{"", {at::fft_fft(request.message.tensors[0])}};
                            })
                  .ok());
  const auto transformed = worker(0).Call(1, "transform", {"", {x}});
  ASSERT_TRUE(transformed.ok()) << transformed.status();
  EXPECT_EQ(transformed->tensors[0].numel(), 4);
  Start({.workers = 2, .serve_operators = ServeOperators::kAll});
  EXPECT_TRUE(worker(0).CallOp(1, "aten::fft_fft", {x}).ok());
}

TEST_P(CallsTest, OperatorsMayBeServedAllOrNotAtAll) {
  Start({.workers = 1, .serve_operators = ServeOperators::kAll});
  absl::Status status = worker(0).CallOp(0, "aten::from_file", {"/nowhere"}).status();
  EXPECT_NE(status.code(), StatusCode::kPermissionDenied) << status;
  Start({.workers = 1, .serve_operators = ServeOperators::kNone});
  status = worker(0).CallOp(0, "aten::neg", {at::ones({1})}).status();
  EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << status;
}

at::Tensor Floats(at::IntArrayRef sizes) { return at::rand(sizes); }

// As the parcels of a pipeline are taken, of which each costs less than waking another thread.
TEST_P(CallsTest, AnInlineFunctionRunsWhereItsCallArrives) {
  Start({.workers = 2, .thread_count = 1});
  const auto echo = [](Request& request) -> absl::StatusOr<Message> {
    return std::move(request.message);
  };
  ASSERT_TRUE(worker(1).RegisterOwn("distgrad.pooled", echo).ok());
  ASSERT_TRUE(worker(1).RegisterOwnInline("distgrad.inline", echo).ok());
  const Future<Message> held = TakeThreadOf1();
  const Future<Message> pooled = worker(0).CallAsync(1, "distgrad.pooled", {"a", {}});
  EXPECT_EQ(worker(0).Call(1, "distgrad.inline", {"b", {}})->payload, "b");
  EXPECT_FALSE(pooled.Done());
  go_on_.Notify();
  EXPECT_EQ(pooled.Wait()->payload, "a");
  EXPECT_TRUE(held.Wait().ok());
}

// Stages of a pipeline own functions of the user's.
TEST_P(CallsTest, WhatAnInlineFunctionOwnsDoesNotEndWhereItsCallsArrive) {
  Start({.workers = 2, .thread_count = 1});
  std::atomic<std::thread::id> served{};
  absl::Notification ended;
  std::thread::id ended_on;
  auto owned = std::shared_ptr<int>(new int(0), [&](const int* owner) {
    delete owner;
    ended_on = std::this_thread::get_id();
    ended.Notify();
  });
  ASSERT_TRUE(worker(1)
                  .RegisterOwnInline("distgrad.inline",
                                     [&, owned](Request&) -> absl::StatusOr<Message> {
                                       served = std::this_thread::get_id();
                                       worker(1).UnregisterOwn("distgrad.inline");
                                       return Message{};
                                     })
                  .ok());
  owned = nullptr;
  EXPECT_TRUE(worker(0).Call(1, "distgrad.inline", {}).ok());
  ended.WaitForNotification();
  EXPECT_NE(ended_on, served.load());
}

// It may be large, and take long to free.
TEST_P(CallsTest, WhatAnInlineFunctionLeavesDoesNotEndWhereItsCallsArrive) {
  Start({.workers = 2, .thread_count = 1});
  float value = 0;
  std::atomic<std::thread::id> served{};
  absl::Notification ended;
  std::thread::id ended_on;
  const auto end = [&](void*) {
    ended_on = std::this_thread::get_id();
    ended.Notify();
  };
  ASSERT_TRUE(worker(1)
                  .RegisterOwnInline("distgrad.inline",
                                     [&](Request& r) -> absl::StatusOr<Message> {
                                       served = std::this_thread::get_id();
                                       r.message.tensors = {at::from_blob(&value, {1}, end)};
                                       return absl::FailedPreconditionError("it takes nothing");
                                     })
                  .ok());
  EXPECT_EQ(worker(0).Call(1, "distgrad.inline", {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ended.WaitForNotification();
  EXPECT_NE(ended_on, served.load());
}

// Or who sends what is not taken would fill the memory of a worker whose pool is busy.
TEST_P(CallsTest, WhatAnInlineFunctionLeavesCountsAgainstTheLimitUntilItHasEnded) {
  Start({.workers = 2, .thread_count = 1, .limits = {.bytes_per_peer = 10'000}});
  ASSERT_TRUE(worker(1)
                  .RegisterOwnInline("distgrad.inline",
                                     [](Request&) -> absl::StatusOr<Message> {
                                       return absl::FailedPreconditionError("it takes nothing");
                                     })
                  .ok());
  const Message message{"", {at::ones({6000}, at::kByte)}};
  const Future<Message> held = TakeThreadOf1();
  const Future<Message> first = worker(0).CallAsync(1, "distgrad.inline", message);
  const absl::Status second = worker(0).Call(1, "distgrad.inline", message).status();
  EXPECT_EQ(second.code(), StatusCode::kResourceExhausted) << second;
  EXPECT_FALSE(first.Done());
  go_on_.Notify();
  EXPECT_EQ(first.Wait().status().code(), StatusCode::kFailedPrecondition) << first.Wait().status();
  const absl::Status third = worker(0).Call(1, "distgrad.inline", message).status();
  EXPECT_EQ(third.code(), StatusCode::kFailedPrecondition) << third;
  EXPECT_TRUE(held.Wait().ok());
}

// With the one thread of the pool taken, only what the thread that reads messages runs itself is
// answered.
TEST_P(CallsTest, OnlyOperatorsThatMakeLittleRunWhereTheyArrive) {
  Start({.workers = 2, .thread_count = 1, .serve_operators = ServeOperators::kAll});
  const Future<Message> held = TakeThreadOf1();
  using Values = std::vector<c10::IValue>;
  using Ints = std::vector<int64_t>;
  const std::vector<std::pair<std::string, Values>> long_ones = {
      {"aten::new_ones", {Floats({1}), Ints{64}}},
      {"aten::new_empty", {Floats({1}), Ints{64}}},
      {"aten::full_like", {Floats({1}), 1.0}},
      {"aten::repeat", {Floats({4}), Ints{64}}},
      {"aten::expand", {Floats({1}), Ints{64}}},
      {"aten::as_strided", {Floats({1}), Ints{64}, Ints{0}}},
      {"aten::one_hot", {at::arange(8), 64}},
      {"aten::bincount", {at::full({1}, 1000, at::kLong)}},
      {"aten::repeat_interleave.self_int", {Floats({1}), 1000}},
      {"aten::index_select", {Floats({1}), 0, at::zeros({1}, at::kLong)}},
      {"aten::pad", {Floats({1}), Ints{0, 64}}},
      {"aten::mul.Tensor", {Floats({100, 1}), Floats({1, 100})}},
      {"aten::add.Tensor", {Floats({100, 1}), Floats({1, 100})}},
      {"aten::where.self", {Floats({1}).to(at::kBool), Floats({100, 1}), Floats({1, 100})}},
      {"aten::mm", {Floats({100, 1}), Floats({1, 100})}},
      {"aten::linear", {Floats({100, 1}), Floats({100, 1})}},
      {"aten::matmul", {Floats({32, 4, 1}), Floats({1, 64})}},
      {"aten::addmm", {Floats({1}), Floats({100, 1}), Floats({1, 100})}},
      {"aten::view", {Floats({1}), Ints(1000, 1)}},  // long arguments
  };
  std::vector<Future<Message>> replies;
  for (const auto& [name, arguments] : long_ones)
    replies.push_back(worker(0).CallAsync(1, name, *EncodeValues(arguments)));
  const at::Tensor x = Floats({3, 3});
  for (const auto& [name, arguments] :
       std::vector<std::pair<std::string, Values>>{{"aten::neg", {x}},
                                                   {"aten::add.Tensor", {x, x}},
                                                   {"aten::mul_.Tensor", {x, x}},
                                                   {"aten::tanh", {x}},
                                                   {"aten::sum", {x}},
                                                   {"aten::t", {x}},
                                                   {"aten::mm", {x, x}},
                                                   {"aten::linear", {x, x}},
                                                   {"aten::neg", {x}}}) {
    const auto reply = worker(0).CallAsync(1, name, *EncodeValues(arguments));
    EXPECT_TRUE(reply.Wait().ok()) << name << ": " << reply.Wait().status();
  }
  // The last of those came behind all the others, and so did its answer.
  for (size_t i = 0; i < replies.size(); ++i)
    EXPECT_FALSE(replies[i].Done()) << long_ones[i].first << " did not wait for the pool";
  go_on_.Notify();
  EXPECT_TRUE(held.Wait().ok());
  for (size_t i = 0; i < replies.size(); ++i) {
    // So many dimensions cannot be sent back.
    EXPECT_EQ(replies[i].Wait().ok(), long_ones[i].first != "aten::view")
        << long_ones[i].first << ": " << replies[i].Wait().status();
  }
}

TEST_P(CallsTest, WhatAnOperatorAllocatesIsBounded) {
  Start({.workers = 2, .limits = {.message_bytes = 1 << 20}});
  const at::Tensor x = at::ones({1});
  for (const int64_t size : {int64_t{300000}, int64_t{1} << 28}) {
    const absl::Status status =
        worker(0).CallOp(1, "aten::new_ones", {x, std::vector<int64_t>{size}}).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "aten::new_ones")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker1")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "allocate")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "limit message_bytes is 1048576")) << status;
    // Neither the thread nor the worker has less for what comes next.
    EXPECT_TRUE(worker(0).CallOp(1, "aten::new_ones", {x, std::vector<int64_t>{200000}}).ok());
  }
}

// Each takes memory, though they have no elements.
TEST_P(CallsTest, HowManyTensorsAnOperatorMakesIsBounded) {
  Start({.workers = 2, .limits = {.tensors_per_message = 100}});
  const at::Tensor x = at::ones({1000, 0});
  const std::vector<std::pair<std::string, std::vector<c10::IValue>>> calls = {
      {"aten::tensor_split.sections", {x, int64_t{1} << 16, 1}},
      {"aten::unbind.int", {x}},
      {"aten::split.Tensor", {x, 2}},
  };
  for (const auto& [name, arguments] : calls) {
    const absl::Status status = worker(0).CallOp(1, name, arguments).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker1")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "it would make")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "limit tensors_per_message is 100")) << status;
  }
  EXPECT_TRUE(worker(0).CallOp(1, "aten::split.Tensor", {x, 10}).ok());
}

// n views of n dimensions, or what each of n products with each other costs.
TEST_P(CallsTest, WhatGrowsWithTheSquareOfTensorsIsBounded) {
  Start({.workers = 2,
         .limits = {.message_bytes = 1 << 20},
         .serve_operators = ServeOperators::kAll});
  const auto expect = [&](const std::string& name, const std::vector<c10::IValue>& many,
                          const std::vector<c10::IValue>& few, const std::string& bytes) {
    const absl::Status status = worker(0).CallOp(1, name, many).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker1")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(" ", bytes, " bytes"))) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "limit message_bytes is 1048576")) << status;
    const absl::Status good = worker(0).CallOp(1, name, few).status();
    EXPECT_TRUE(good.ok()) << name << ": " << good;
  };
  const auto of = [](size_t count, const at::Tensor& tensor) {
    return c10::IValue(std::vector<at::Tensor>(count, tensor));
  };
  for (const std::string name : {"aten::meshgrid", "aten::cartesian_prod"}) {
    expect(name, {of(120, at::ones({1}))}, {of(30, at::ones({1}))}, "1382400");
  }
  for (const std::string name : {"aten::linalg_multi_dot", "aten::chain_matmul"}) {
    expect(name, {of(300, at::ones({1, 1}))}, {of(30, at::ones({1, 1}))}, "1440000");
  }
  expect("aten::combinations", {at::ones({1}), 120}, {at::ones({4}), 3}, "1382400");
}

// And of the elements of a dimension, each with its place.
TEST_P(CallsTest, WhatListsOfElementsTakeIsBounded) {
  Start({.workers = 2,
         .limits = {.message_bytes = 1 << 20},
         .serve_operators = ServeOperators::kAll});
  const auto call = [&](const std::string& name, const at::Tensor& x) {
    std::vector<c10::IValue> arguments = {x};
    if (name == "aten::topk") arguments.push_back(1);
    return worker(0).CallOp(1, name, arguments).status();
  };
  for (const std::string name : {"aten::topk", "aten::mode"}) {
    const absl::Status status = call(name, at::ones({70000}));
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "it would take 1120000 bytes beside elements"))
        << status;
    for (const at::Tensor& few : {at::ones({60000}), at::ones({20000, 1}), at::ones({})}) {
      const absl::Status good = call(name, few);
      EXPECT_TRUE(good.ok()) << name << ": " << good;
    }
  }
}

// And where it makes a tensor for each place of a dimension.
TEST_P(CallsTest, WhatAnOperatorMakesForEachPlaceOfADimensionIsBounded) {
  Start({.workers = 2,
         .limits = {.message_bytes = 1 << 20},
         .serve_operators = ServeOperators::kAll});
  const std::vector<std::pair<std::string, std::vector<c10::IValue>>> calls = {
      {"aten::unique_dim", {0}},
      {"aten::unique_dim_consecutive", {-2}},
      {"aten::unique_consecutive", {false, false, 0}},
  };
  for (const auto& [name, rest] : calls) {
    const auto call = [&, &name = name, &rest = rest](const at::Tensor& x) {
      std::vector<c10::IValue> arguments = {x};
      arguments.insert(arguments.end(), rest.begin(), rest.end());
      return worker(0).CallOp(1, name, arguments).status();
    };
    const absl::Status status = call(at::ones({5000, 1}));
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << name << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "it would take 1280000 bytes beside elements"))
        << status;
    for (const at::Tensor& few : {at::ones({4000, 1}), at::ones({1, 5000})}) {
      const absl::Status good = call(few);
      EXPECT_TRUE(good.ok()) << name << ": " << good;
    }
  }
  // Without a dimension there are no such tensors.
  const absl::Status flat =
      worker(0).CallOp(1, "aten::unique_consecutive", {at::ones({5000})}).status();
  EXPECT_TRUE(flat.ok()) << flat;
}

// And of a Fourier transform, of the whole or of frames, whose length has a large prime factor.
TEST_P(CallsTest, WhatTransformsOfOddLengthsTakeIsBounded) {
  Start({.workers = 2,
         .limits = {.message_bytes = 1 << 20},
         .serve_operators = ServeOperators::kAll});
  constexpr int64_t kPrime = 8209, kOther = 8191;
  const at::Tensor signal = at::ones({2 * kPrime});
  const auto frames = [&](int64_t length) {
    return std::vector<c10::IValue>{signal,        length,
                                    c10::IValue(), c10::IValue(),
                                    c10::IValue(), /*normalized=*/false,
                                    c10::IValue(), /*return_complex=*/true};
  };
  const std::vector<std::pair<std::string, std::vector<c10::IValue>>> calls = {
      {"aten::fft_fft", {at::ones({kPrime})}},
      {"aten::fft_fft", {at::ones({kPrime, 2}), c10::IValue(), 0}},
      {"aten::stft", frames(kPrime)},
  };
  for (const auto& [name, arguments] : calls) {
    const absl::Status status = worker(0).CallOp(1, name, arguments).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << name << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "it would take 1050752 bytes beside elements"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "Fourier transform")) << status;
  }
  const std::vector<std::pair<std::string, std::vector<c10::IValue>>> few = {
      {"aten::fft_fft", {at::ones({kOther})}},
      {"aten::fft_fft", {at::ones({kPrime, 2})}},
      {"aten::stft", frames(kOther)},
      {"aten::fft_fftshift", {at::ones({kPrime})}},
  };
  for (const auto& [name, arguments] : few) {
    const absl::Status good = worker(0).CallOp(1, name, arguments).status();
    EXPECT_TRUE(good.ok()) << name << ": " << good;
  }
}

// libtorch would read or write where nothing of the tensor is.
TEST_P(CallsTest, AViewIsRefusedWhereEachElementNeedsMemory) {
  Start({.workers = 2, .serve_operators = ServeOperators::kAll});
  const auto view = [](std::vector<int64_t> sizes) { return at::ones({1}).expand(sizes); };
  const std::vector<std::pair<std::string, std::vector<c10::IValue>>> calls = {
      {"aten::median.dim", {view({1, 1000, 1}), 1}},
      {"aten::nanmedian.dim", {view({1, 1000, 1}), -2}},
      {"aten::linalg_svdvals.out", {at::ones({2, 2}), c10::IValue(), view({2})}},
      {"aten::neg.out", {at::ones({3}), view({3})}},
      {"aten::_foreach_neg_", {std::vector<at::Tensor>{at::ones({3}), view({3})}}},
      // It would be taken to have an element for each of its places already.
      {"aten::resize_",
       {view({2, 3, 4, 5}), std::vector<int64_t>{2, 3, 4, 5},
        static_cast<int64_t>(at::MemoryFormat::ChannelsLast)}},
  };
  for (const auto& [name, arguments] : calls) {
    const absl::Status status = worker(0).CallOp(1, name, arguments).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << name << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "stands for")) << status;
  }
  const auto median = worker(0).CallOp(1, "aten::median.dim", {at::arange(5.0).expand({3, 5}), 1});
  ASSERT_TRUE(median.ok()) << median.status();
  EXPECT_TRUE((*median)[0].toTensor().equal(at::full({3}, 2.0)));
  EXPECT_TRUE(worker(0).CallOp(1, "aten::neg", {view({3})}).ok());
  // Nothing is written to an element.
  const auto turned = worker(0).CallOp(1, "aten::transpose_", {view({2, 3}), 0, 1});
  ASSERT_TRUE(turned.ok()) << turned.status();
  EXPECT_TRUE((*turned)[0].toTensor().equal(at::ones({3, 2})));
}

// Tensors that it makes on its way, of a number, or of tensors without elements.
TEST_P(CallsTest, HowManyTensorsAnOperatorNeedsIsBounded) {
  Start({.workers = 2,
         .limits = {.tensors_per_message = 100},
         .serve_operators = ServeOperators::kAll});
  const auto expect = [&](const std::string& name, const std::vector<c10::IValue>& many,
                          const std::string& count) {
    const absl::Status status = worker(0).CallOp(1, name, many).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(
        status.message(), absl::StrCat(count, " tensors; limit tensors_per_message is 100")))
        << status;
  };
  const at::Tensor x = at::ones({1});
  expect("aten::combinations", {x, int64_t{1} << 40}, "1099511627776");
  // Autograd keeps what each difference is made of, though it has no elements.
  expect("aten::diff", {at::zeros({200, 0}), 101, 0}, "101");
  EXPECT_TRUE(worker(0).CallOp(1, "aten::diff", {at::zeros({200, 0}), 100, 0}).ok());
  const at::Tensor weight = at::ones({101, 1, 1}, at::kDouble);
  const at::Tensor input = at::ones({1, 101, 1}, at::kDouble);
  const std::vector<int64_t> one = {1}, zero = {0};
  expect("aten::conv1d", {input, weight, c10::IValue(), one, zero, one, 101}, "101");
  EXPECT_TRUE(worker(0)
                  .CallOp(1, "aten::conv1d",
                          {input.slice(1, 0, 100), weight.slice(0, 0, 100), c10::IValue(), one,
                           zero, one, 100})
                  .ok());
  const at::Tensor state = at::zeros({101, 0, 0}), few = at::zeros({1, 1, 1});
  const auto params = std::vector<at::Tensor>(2, at::zeros({1, 1}));
  const std::vector<c10::IValue> rest = {params, false, 1, 0.0, false, false};
  for (const std::string name : {"aten::rnn_tanh.input", "aten::rnn_relu.input"}) {
    const auto call = [&](const at::Tensor& first, const at::Tensor& hx, bool batch_first) {
      std::vector<c10::IValue> arguments = {first, hx};
      arguments.insert(arguments.end(), rest.begin(), rest.end());
      arguments.push_back(batch_first);
      return arguments;
    };
    expect(name, call(few, state, false), "101");
    expect(name, call(at::zeros({101, 0, 0}), few, false), "101");
    expect(name, call(at::zeros({0, 101, 0}), few, true), "101");
    const absl::Status good = worker(0).CallOp(1, name, call(few, few, false)).status();
    EXPECT_TRUE(good.ok()) << good;
  }
  expect("aten::histogramdd.int_bins", {at::ones({1, 101}), 1}, "101");
  EXPECT_TRUE(worker(0).CallOp(1, "aten::histogramdd.int_bins", {at::ones({1, 2}), 1}).ok());
}

// The process would end, and not the call alone: it divides by the number of heads.
TEST_P(CallsTest, AnAttentionNeedsAHead) {
  Start({.workers = 2});
  using Sizes = std::vector<int64_t>;
  const auto attend = [&](const Sizes& queries, const Sizes& keys, const Sizes& values,
                          bool share) {
    return worker(0)
        .CallOp(1, "aten::scaled_dot_product_attention",
                {at::ones(queries), at::ones(keys), at::ones(values), c10::IValue(), 0.0, false,
                 c10::IValue(), share})
        .status();
  };
  for (const absl::Status& status : {attend({0, 4, 2}, {0, 4, 2}, {0, 4, 2}, true),
                                     attend({1, 2, 4, 2}, {1, 0, 4, 2}, {1, 1, 4, 2}, true),
                                     attend({1, 2, 4, 2}, {1, 1, 4, 2}, {1, 0, 4, 2}, true),
                                     attend({2, 0, 5, 8}, {2, 0, 7, 8}, {2, 0, 7, 8}, false)}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "need a head at least")) << status;
  }
  for (const absl::Status& good : {attend({1, 2, 4, 2}, {1, 1, 4, 2}, {1, 1, 4, 2}, true),
                                   attend({1, 2, 4, 2}, {1, 2, 4, 2}, {1, 2, 4, 2}, false),
                                   // A batch of none, of heads that are not shared.
                                   attend({0, 4, 2}, {0, 4, 2}, {0, 4, 2}, false)}) {
    EXPECT_TRUE(good.ok()) << good;
  }
}

// The process would end, and not the call alone: it calls itself for each shift.
TEST_P(CallsTest, HowLongAListOfNumbersMayBeIsBounded) {
  Start({.workers = 2});
  const at::Tensor x = at::ones({2, 3});
  const auto zeros = [](size_t count) { return std::vector<int64_t>(count, 0); };
  const absl::Status deep =
      worker(0).CallOp(1, "aten::roll", {x, zeros(200000), zeros(200000)}).status();
  EXPECT_EQ(deep.code(), StatusCode::kInvalidArgument) << deep;
  for (const char* part : {"aten::roll", "worker1", "'shifts' has 200000 numbers", "may be 128"}) {
    EXPECT_TRUE(absl::StrContains(deep.message(), part)) << deep;
  }
  EXPECT_TRUE(worker(0).CallOp(1, "aten::roll", {x, zeros(128), zeros(128)}).ok());
  // Of a list that may be none.
  const absl::Status sum = worker(0).CallOp(1, "aten::sum.dim_IntList", {x, zeros(129)}).status();
  EXPECT_TRUE(absl::StrContains(sum.message(), "'dim' has 129 numbers")) << sum;
  // Places to cut at are counted as pieces.
  EXPECT_TRUE(
      worker(0).CallOp(1, "aten::tensor_split.indices", {at::ones({500}), zeros(300)}).ok());
}

// Those whose lists have a number for each part of a batch are not safe in other ways, and so not
// served; where all are, the limits hold for them as well.
TEST_P(CallsTest, AWorkerThatServesAllOperatorsTakesListsOfAnyLength) {
  constexpr int64_t kBatch = 200, kTime = 100, kTargets = 10;
  const std::vector<int64_t> inputs(kBatch, kTime), targets(kBatch, kTargets);
  const std::vector<c10::IValue> arguments = {at::zeros({1, 1, 1}).expand({kTime, kBatch, 5}),
                                              at::ones({kBatch, kTargets}, at::kLong),
                                              inputs,
                                              targets,
                                              0,
                                              1,
                                              false};
  Start({.workers = 2});
  const absl::Status unsafe = worker(0).CallOp(1, "aten::ctc_loss.IntList", arguments).status();
  EXPECT_EQ(unsafe.code(), StatusCode::kPermissionDenied) << unsafe;
  Start({.workers = 2, .serve_operators = ServeOperators::kAll});
  const auto loss = worker(0).CallOp(1, "aten::ctc_loss.IntList", arguments);
  ASSERT_TRUE(loss.ok()) << loss.status();
  EXPECT_TRUE((*loss)[0].isTensor());
  // It has sums of 1.7 MB, for each target and what is between two at each time.
  Start({.workers = 2,
         .limits = {.message_bytes = uint64_t{1} << 20},
         .serve_operators = ServeOperators::kAll});
  const absl::Status large = worker(0).CallOp(1, "aten::ctc_loss.IntList", arguments).status();
  EXPECT_EQ(large.code(), StatusCode::kResourceExhausted) << large;
  EXPECT_TRUE(absl::StrContains(large.message(), "limit message_bytes")) << large;
}

// Of a view in which one element stands for many all are made, where the view cannot be sent as it
// is.
TEST_P(CallsTest, WhatAResultTakesToSendIsBounded) {
  Start({.workers = 2,
         .limits = {.message_bytes = 1 << 20},
         .serve_operators = ServeOperators::kAll});
  const auto strided = [&](int64_t size) {
    return worker(0).CallOp(
        1, "aten::as_strided",
        {at::ones({3}), std::vector<int64_t>{2, 2, size}, std::vector<int64_t>{1, 1, 0}});
  };
  for (const int64_t size : {int64_t{75000}, int64_t{1} << 40}) {
    const absl::Status status = strided(size).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "allocate")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "limit message_bytes is 1048576")) << status;
  }
  EXPECT_TRUE(strided(1000).ok());
}

// The gradient of such a view has all of its elements, and a pass would make them after the
// operator.
TEST_P(CallsTest, WhatTheArgumentsOfAnOperatorShowIsBounded) {
  Start({.workers = 2, .limits = {.message_bytes = 1 << 20}});
  const at::Tensor x = at::ones({1}).requires_grad_();
  for (const int64_t size : {int64_t{300000}, int64_t{1} << 40}) {
    const c10::IValue view(x.expand({size}));
    const std::vector<std::pair<std::string, std::vector<c10::IValue>>> calls = {
        {"aten::select.int", {view, 0, 0}},
        {"aten::broadcast_tensors", {std::vector<at::Tensor>{x, x.expand({size})}}},
        {"aten::conj", {at::ones({1}, at::kComplexFloat).expand({2, 2, size})}},
        // Twice half of it.
        {"aten::dot", {at::ones({1}).expand({200000}), at::ones({1}).expand({200000})}},
    };
    for (const auto& [name, arguments] : calls) {
      Context context = worker(0).NewContext();
      const absl::Status status =
          worker(0).CallOp(1, name, arguments, {.context = &context}).status();
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << name << ": " << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "its arguments have elements of")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "limit message_bytes is 1048576")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "send what was expanded as it was before"))
          << status;
    }
  }
  // As it was before, it is broadcast by the operator.
  const at::Tensor queries = at::ones({2, 4, 64, 8}), mask = at::ones({64, 64}).to(at::kBool);
  const auto attend = [&](const at::Tensor& shown) {
    return worker(0)
        .CallOp(1, "aten::scaled_dot_product_attention", {queries, queries, queries, shown})
        .status();
  };
  EXPECT_EQ(attend(mask.expand({200, 4, 64, 64})).code(), StatusCode::kResourceExhausted);
  const absl::Status attended = attend(mask);
  EXPECT_TRUE(attended.ok()) << attended;
  Context context = worker(0).NewContext();
  const auto one =
      worker(0).CallOp(1, "aten::select.int", {x.expand({200000}), 0, 0}, {.context = &context});
  ASSERT_TRUE(one.ok()) << one.status();
  const absl::Status done = context.Backward({(*one)[0].toTensor()});
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_EQ(context.Gradient(x)->item<float>(), 1);
}

// What goes in and what comes out is small, and the gradient of what is between them has the sizes
// to which both are broadcast.
TEST_P(CallsTest, WhatTheBackwardOfAnOperatorAllocatesIsBounded) {
  Start({.workers = 2, .limits = {.message_bytes = 1 << 20}});
  const auto take = [&](int64_t rows, int64_t columns) {
    Context context = worker(0).NewContext();
    const at::Tensor x = at::ones({1, columns}).requires_grad_();
    const auto y = worker(0).CallOp(1, "aten::take_along_dim",
                                    {x, at::zeros({rows, 1}, at::kLong), 1}, {.context = &context});
    return y.ok() ? context.Backward({(*y)[0].toTensor().sum()}) : y.status();
  };
  const absl::Status status = take(4000, 4000);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  for (const char* part : {"worker1", "GatherBackward", "it would allocate 64000000 bytes",
                           "8 times limit message_bytes is 8388608"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
  }
  EXPECT_TRUE(take(400, 400).ok());

  // Of arguments that may be sent, a derivative may take more than these have.
  const at::Tensor x = at::full({120000}, 2.0f).requires_grad_();
  Context context = worker(0).NewContext();
  const auto y = worker(0).CallOp(1, "aten::div.Tensor", {x, x}, {.context = &context});
  ASSERT_TRUE(y.ok()) << y.status();
  const absl::Status done = context.Backward({(*y)[0].toTensor().sum()});
  EXPECT_TRUE(done.ok()) << done;

  // What a handler does is its own affair.
  const at::Tensor p = at::ones({1}).requires_grad_();
  ASSERT_TRUE(worker(1)
                  .Register("wide",
                            [&](Request&) -> absl::StatusOr<Message> {
                              return Message{"", {p.expand({4000, 4000}).select(0, 0).sum()}};
                            })
                  .ok());
  Context own = worker(0).NewContext();
  const auto reply = worker(0).Call(1, "wide", {}, {.context = &own});
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::Status ran = own.Backward({reply->tensors[0]});
  EXPECT_TRUE(ran.ok()) << ran;
}

// -------------------------------------------------------------------------------- Metrics

// An operator of the user's, under its caller's limit, may wait for another worker: the nodes of a
// pass of others that the thread runs meanwhile are no doing of its.
TEST_P(CallsTest, WhatAThreadDoesForOthersIsNotWhatItsOperatorAllocates) {
  Start({.workers = 2, .thread_count = 1});
  const at::Tensor p = at::full({2}, 3.0).requires_grad_();
  ASSERT_TRUE(worker(0)
                  .Register("sine",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              return Message{"", {(r.message.tensors[0] * p).sin()}};
                            })
                  .ok());
  ASSERT_TRUE(worker(1)
                  .Register("pass",
                            [this](Request&) -> absl::StatusOr<Message> {
                              const Context context = worker(1).NewContext();
                              const auto y = worker(1).Call(0, "sine", {"", {at::ones({2})}},
                                                            {.context = &context});
                              if (!y.ok()) return y.status();
                              const absl::Status done = context.Backward({y->tensors[0].sum()});
                              return done.ok() ? absl::StatusOr<Message>(Message{}) : done;
                            })
                  .ok());
  for (int round = 0; round < 20; ++round) {
    const AllocationLimit limit(0, "limit of an operator");
    const absl::StatusOr<Message> reply = worker(0).Call(1, "pass", {});
    ASSERT_TRUE(reply.ok()) << reply.status();
  }
}

TEST_P(CallsTest, Metrics) {
  Start({.workers = 2});
  const at::Tensor x = at::ones({1000}).requires_grad_();
  Context context = worker(0).NewContext();
  auto product = worker(0).CallOp(1, "aten::mul.Tensor", {x, x}, {.context = &context});
  ASSERT_TRUE(product.ok()) << product.status();
  ASSERT_TRUE(context.Backward({(*product)[0].toTensor().sum()}).ok());
  EXPECT_FALSE(worker(0).Call(1, "absent\n\"\\\xff", {}).ok());

  const WorkerMetrics caller = worker(0).Metrics(), callee = worker(1).Metrics();
  EXPECT_EQ(caller.worker, "worker0");
  EXPECT_EQ(caller.contexts, 1u);
  EXPECT_EQ(caller.passes_ended, 1u);
  EXPECT_EQ(caller.passes_failed, 0u);
  EXPECT_EQ(caller.passes_in_flight, 0u);
  const auto find = [](const WorkerMetrics& metrics, const std::string& function) {
    for (const CallStats& stats : metrics.calls) {
      if (stats.function == function) return stats;
    }
    return CallStats{};
  };
  const CallStats made = find(caller, "aten::mul.Tensor"),
                  served = find(callee, "aten::mul.Tensor");
  EXPECT_EQ(made.calls, 1u);
  EXPECT_EQ(made.errors, 0u);
  EXPECT_EQ(made.in_flight, 0u);
  EXPECT_GT(made.bytes_sent, 8000u);
  EXPECT_GT(made.bytes_received, 4000u);
  EXPECT_EQ(served.bytes_received, made.bytes_sent);
  EXPECT_EQ(served.bytes_sent, made.bytes_received);
  EXPECT_GT(made.run_time, absl::ZeroDuration());
  EXPECT_GT(find(caller, "(notices)").bytes_sent, 0u);

  const std::string text = ToPrometheus(caller);
  EXPECT_TRUE(absl::StrContains(
      text,
      "# TYPE distgrad_calls_total counter\n"
      "distgrad_calls_total{worker=\"worker0\",peer=\"worker1\",function=\"(notices)\","
      "side=\"client\"} "))
      << text;
  EXPECT_TRUE(
      absl::StrContains(text,
                        "distgrad_call_errors_total{worker=\"worker0\",peer=\"worker1\",function="
                        "\"absent\\n\\\"\\\\?\",side=\"client\"} 1\n"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "\ndistgrad_passes_total{worker=\"worker0\"} 1\n")) << text;
}

size_t CountThreads() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return std::distance(begin(threads), end(threads));
}

// Each keeps a thread while it waits; a few are kept for the next time.
TEST_P(CallsTest, ThreadsOfHandlersThatWaitedEndWithThem) {
  Start({.workers = 2, .thread_count = 2});
  constexpr int kCalls = 200;
  std::atomic<int> begun{0};
  Promise<Unit> release;
  const Future<Unit> released = release.future();
  ASSERT_TRUE(worker(1)
                  .Register("block",
                            [&](Request&) -> absl::StatusOr<Message> {
                              ++begun;
                              released.Wait().IgnoreError();
                              return Message{};
                            })
                  .ok());
  ASSERT_TRUE(worker(0).CallOp(1, "aten::neg", {at::ones({1})}).ok());
  const size_t before = CountThreads();
  std::vector<Future<Message>> calls;
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(worker(0).CallAsync(1, "block", {}));
    // Where they come one by one, a thread of the sockets runs each.
    while (i % 2 == 0 && begun <= i) std::this_thread::yield();
  }
  while (begun < kCalls) std::this_thread::yield();
  EXPECT_GE(CountThreads(), kCalls);
  release.Set(Unit());
  for (const Future<Message>& call : calls) EXPECT_TRUE(call.Wait().ok()) << call.Wait().status();
  // Of the pool and of the sockets' loop some 16 stay.
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (CountThreads() > before + 50 && absl::Now() < patience) std::this_thread::yield();
  EXPECT_LE(CountThreads(), before + 50);
}

INSTANTIATE_TEST_SUITE_P(Transports, CallsTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
