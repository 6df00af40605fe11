// Backward through several workers, compared with the same computation on one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

at::Tensor Leaf(at::IntArrayRef sizes, int seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator).set_requires_grad(true);
}

at::Tensor Unwrap(absl::StatusOr<Message> reply, size_t i = 0) {
  EXPECT_TRUE(reply.ok()) << reply.status();
  return reply.ok() ? reply->tensors.at(i) : at::Tensor();
}

// What torch's own engine gives for the leaves; undefined where it gives none.
std::vector<at::Tensor> Reference(const at::Tensor& root, const std::vector<at::Tensor>& leaves) {
  return torch::autograd::grad({root}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

void ExpectGradient(const Context& context, const at::Tensor& leaf, const at::Tensor& want) {
  absl::StatusOr<at::Tensor> got = context.Gradient(leaf);
  if (!want.defined()) {
    EXPECT_EQ(got.status().code(), absl::StatusCode::kNotFound) << "an unused leaf got a gradient";
    return;
  }
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(got->equal(want)) << *got << "\nwant\n" << want;
}

// Workers that each own a parameter and offer functions of it.
class BackwardTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Start(int workers) {
    cluster_ =
        std::make_unique<Cluster>(ClusterOptions{.workers = workers, .transport = GetParam()});
    for (int i = 0; i < workers; ++i) {
      parameters_.push_back(Leaf({3, 3}, 100 + i));
      const at::Tensor parameter = parameters_[i];
      Worker& worker = (*cluster_)[i];
      ASSERT_TRUE(worker
                      .Register("mm",
                                [parameter](Request& r) -> absl::StatusOr<Message> {
                                  return Message{"", {r.message.tensors[0].mm(parameter)}};
                                })
                      .ok());
      ASSERT_TRUE(
          worker
              .Register("two",
                        [parameter](Request& r) -> absl::StatusOr<Message> {
                          return Message{
                              "", {r.message.tensors[0].mm(parameter), r.message.tensors[0].sin()}};
                        })
              .ok());
      // Hands on to the workers named in the payload, one after the other.
      ASSERT_TRUE(worker
                      .Register("relay",
                                [&worker, parameter](Request& r) -> absl::StatusOr<Message> {
                                  at::Tensor x = r.message.tensors[0].mm(parameter);
                                  std::string rest = r.message.payload;
                                  if (!rest.empty()) {
                                    const std::string next = rest.substr(0, 1);
                                    auto reply = worker.Call("worker" + next, "relay",
                                                             {rest.substr(1), {x}}, r.Nested());
                                    if (!reply.ok()) return reply.status();
                                    x = reply->tensors[0];
                                  }
                                  return Message{"", {x.tanh()}};
                                })
                      .ok());
    }
  }
  Worker& worker(int i) { return (*cluster_)[i]; }
  at::Tensor Local(at::Tensor x, const std::string& path) {
    // What "relay" computes along a path of workers.
    x = x.mm(parameters_[path[0] - '0']);
    if (path.size() > 1) x = Local(x, path.substr(1));
    return x.tanh();
  }

  std::unique_ptr<Cluster> cluster_;
  std::vector<at::Tensor> parameters_;
};

TEST_P(BackwardTest, OneOperator) {
  Start(2);
  at::Tensor x = Leaf({4, 3}, 1), y = Leaf({4, 3}, 2);
  Context context = worker(0).NewContext();
  auto result = worker(0).CallOp("worker1", "aten::mul.Tensor", {x, y}, {.context = &context});
  ASSERT_TRUE(result.ok()) << result.status();
  at::Tensor loss = (*result)[0].toTensor().sum();
  ASSERT_TRUE(context.Backward({loss}).ok());
  const auto want = Reference((x * y).sum(), {x, y});
  ExpectGradient(context, x, want[0]);
  ExpectGradient(context, y, want[1]);
  EXPECT_FALSE(x.grad().defined());
}

TEST_P(BackwardTest, ParameterOnTheCallee) {
  Start(2);
  at::Tensor x = Leaf({4, 3}, 1);
  Context context = worker(0).NewContext();
  at::Tensor out = Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &context}));
  ASSERT_TRUE(context.Backward({out.sum()}).ok());
  const auto want = Reference(x.mm(parameters_[1]).sum(), {x, parameters_[1]});
  ExpectGradient(context, x, want[0]);
}

// docs/autograd.md says so: nothing of ours is asked there, and so nothing can object.
TEST_P(BackwardTest, TorchsOwnGradStaysOnThisWorker) {
  Start(2);
  const at::Tensor x = Leaf({3, 3}, 1);
  const Context context = worker(0).NewContext();
  const at::Tensor y = Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &context}));
  const at::Tensor remote = y.sum(), both = (x + y).sum();
  EXPECT_FALSE(Reference(remote, {x})[0].defined());  // with allow_unused
  EXPECT_THROW(torch::autograd::grad({remote}, {x}, {}, /*retain_graph=*/true), c10::Error);
  EXPECT_TRUE(Reference(both, {x})[0].equal(at::ones({3, 3})));  // the local share
  try {
    remote.backward({}, /*retain_graph=*/true);
    ADD_FAILURE() << "it went through";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("use the backward of that context"), std::string::npos)
        << error.what();
  }
  const absl::Status done = context.Backward({both});
  ASSERT_TRUE(done.ok()) << done;
  ExpectGradient(context, x, Reference((x + x.mm(parameters_[1])).sum(), {x})[0]);
}

// The gradients that a worker holds of a context, asked for from another one.
TEST_P(BackwardTest, NestedRingAndRoundTrips) {
  for (const std::string path : {"1", "12", "120", "1010101", "0", "00", "1221"}) {
    SCOPED_TRACE(path);
    parameters_.clear();
    Start(3);
    std::vector<absl::StatusOr<at::Tensor>> got(3, absl::UnknownError("unasked"));
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(worker(i)
                      .Register("gradient",
                                [this, i](Request& r) -> absl::StatusOr<Message> {
                                  auto gradient = r.context.Gradient(parameters_[i]);
                                  if (!gradient.ok()) return gradient.status();
                                  return Message{"", {*gradient}};
                                })
                      .ok());
    }
    at::Tensor x = Leaf({2, 3}, 7);
    Context context = worker(0).NewContext();
    const std::string first = path.substr(0, 1);
    at::Tensor out = Unwrap(
        worker(0).Call("worker" + first, "relay", {path.substr(1), {x}}, {.context = &context}));
    const absl::Status done = context.Backward({out.sum()});
    ASSERT_TRUE(done.ok()) << done;
    const auto want =
        Reference(Local(x, path).sum(), {x, parameters_[0], parameters_[1], parameters_[2]});
    ExpectGradient(context, x, want[0]);
    for (int i = 0; i < 3; ++i) {
      auto reply = worker(0).Call(WorkerName(i), "gradient", {}, {.context = &context});
      if (want[i + 1].defined()) {
        ASSERT_TRUE(reply.ok()) << reply.status();
        EXPECT_TRUE(reply->tensors[0].allclose(want[i + 1], 1e-6, 1e-7));
      } else {
        EXPECT_EQ(reply.status().code(), absl::StatusCode::kNotFound);
      }
    }
    cluster_.reset();
  }
}

TEST_P(BackwardTest, UnusedResultsDoNotHang) {
  Start(3);
  at::Tensor x = Leaf({2, 3}, 1), y = Leaf({2, 3}, 2);
  Context context = worker(0).NewContext();
  Unwrap(worker(0).Call("worker1", "mm", {"", {y}}, {.context = &context}));        // direct
  Unwrap(worker(0).Call("worker1", "relay", {"212", {y}}, {.context = &context}));  // nested
  at::Tensor used = Unwrap(worker(0).Call("worker2", "two", {"", {x}}, {.context = &context}), 1);
  ASSERT_TRUE(context.Backward({used.sum()}).ok());
  ExpectGradient(context, x, Reference(x.sin().sum(), {x})[0]);
  ExpectGradient(context, y, {});
}

// One branch of a diamond is not used; and what a worker sends that received nothing.
TEST_P(BackwardTest, AnUnusedBranchAndAWorkerThatOnlySends) {
  Start(4);
  at::Tensor x = Leaf({2, 3}, 1), y = Leaf({2, 3}, 2);
  Context context = worker(0).NewContext();
  const CallOptions in{.context = &context};
  at::Tensor used = Unwrap(worker(0).Call("worker1", "relay", {"2", {x}}, in));
  Unwrap(worker(0).Call("worker3", "relay", {"2", {y}}, in));
  EXPECT_TRUE(
      Unwrap(worker(0).Call("worker3", "mm", {"", {at::ones({2, 3})}}, in)).requires_grad());
  const absl::Status done = context.Backward({used.sum()});
  ASSERT_TRUE(done.ok()) << done;
  ExpectGradient(context, x, Reference(Local(x, "12").sum(), {x})[0]);
  ExpectGradient(context, y, {});
}

TEST_P(BackwardTest, Diamond) {
  Start(3);
  at::Tensor x = Leaf({2, 3}, 1);
  Context context = worker(0).NewContext();
  auto left = worker(0).CallAsync("worker1", "relay", {"", {x}}, {.context = &context});
  auto right = worker(0).CallAsync("worker2", "relay", {"1", {x}}, {.context = &context});
  at::Tensor loss = (Unwrap(left.Take()) * Unwrap(right.Take())).sum();
  ASSERT_TRUE(context.Backward({loss}).ok());
  ExpectGradient(context, x, Reference((Local(x, "1") * Local(x, "21")).sum(), {x})[0]);
}

TEST_P(BackwardTest, RetainedGraphAccumulates) {
  Start(2);
  at::Tensor x = Leaf({2, 3}, 1);
  Context context = worker(0).NewContext();
  at::Tensor out = Unwrap(worker(0).Call("worker1", "relay", {"01", {x}}, {.context = &context}));
  at::Tensor loss = out.sum();
  for (int i = 0; i < 3; ++i) {
    const absl::Status done = context.Backward({loss}, {.retain_graph = true});
    ASSERT_TRUE(done.ok()) << done;
  }
  ASSERT_TRUE(context.Backward({loss}).ok());
  const at::Tensor want = Reference(Local(x, "101").sum(), {x})[0];
  EXPECT_TRUE(context.Gradient(x)->allclose(want * 4));
  const absl::Status again = context.Backward({loss});
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition) << again;
}

TEST_P(BackwardTest, RootGradientsAndSeveralRoots) {
  Start(2);
  at::Tensor x = Leaf({2, 3}, 1), g = Leaf({2, 3}, 5).detach();
  Context context = worker(0).NewContext();
  at::Tensor a = Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &context}));
  at::Tensor b = Unwrap(worker(0).Call("worker1", "mm", {"", {x.exp()}}, {.context = &context}));
  ASSERT_TRUE(context.Backward({a, b.sum()}, {.root_gradients = {g, at::Tensor()}}).ok());
  const at::Tensor& w = parameters_[1];
  const at::Tensor want =
      torch::autograd::grad({x.mm(w), x.exp().mm(w).sum()}, {x}, {g, at::ones({})})[0];
  EXPECT_TRUE(context.Gradient(x)->allclose(want));
}

TEST_P(BackwardTest, BadRootsAreRefused) {
  Start(2);
  Context context = worker(0).NewContext();
  at::Tensor x = Leaf({2, 3}, 1);
  EXPECT_EQ(context.Backward({}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(context.Backward({at::Tensor()}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(context.Backward({x.detach().sum()}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(context.Backward({x.exp()}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(context.Backward({x}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(context.Backward({x.sum()}, {.root_gradients = {at::ones({2})}}).code(),
            absl::StatusCode::kInvalidArgument);
  // Of which part is a question, as in libtorch.
  EXPECT_EQ(context.Backward({at::complex(x, x).sum()}).code(), absl::StatusCode::kInvalidArgument);
  Context other = worker(0).NewContext();
  at::Tensor foreign = Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &other}));
  const absl::Status status = context.Backward({foreign.sum()});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  context.Release();
  EXPECT_EQ(context.Backward({x.sum()}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Context().Backward({x.sum()}).code(), absl::StatusCode::kFailedPrecondition);
}

// It came to this process, but not to the worker whose pass it is.
TEST_P(BackwardTest, WhatAnotherWorkerOfTheProcessHasReceivedIsRefused) {
  for (const size_t tensors : {1, 2}) {
    SCOPED_TRACE(tensors);
    Start(2);
    std::vector<at::Tensor> kept;
    ASSERT_TRUE(worker(1)
                    .Register("keep",
                              [&](Request& r) -> absl::StatusOr<Message> {
                                kept = r.message.tensors;
                                return Message();
                              })
                    .ok());
    const at::Tensor x = Leaf({3, 3}, 1);
    const Context context = worker(0).NewContext();
    const auto reply = worker(0).Call("worker1", "keep", {"", std::vector<at::Tensor>(tensors, x)},
                                      {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    const absl::Status status = context.Backward({(kept.front() * kept.back()).sum()});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find("by another worker of this process (of this job worker 1): "),
              std::string::npos)
        << status;
  }
}

TEST_P(BackwardTest, RootsOfSeveralTypes) {
  Start(2);
  at::Tensor x = Leaf({2, 3}, 1);
  Context context = worker(0).NewContext();
  at::Tensor y = Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &context}));
  const auto roots = [&](const at::Tensor& y) {
    return std::vector<at::Tensor>{y.to(at::kDouble).sum(), y.to(at::kBFloat16).sum(),
                                   at::complex(y, y).sum(), y.sum().reshape({1, 1})};
  };
  const std::vector<at::Tensor> want_roots = roots(x.mm(parameters_[1]));
  std::vector<at::Tensor> ones;
  for (const at::Tensor& root : want_roots) ones.push_back(at::ones_like(root));
  const absl::Status done = context.Backward(roots(y), {.root_gradients = ones});
  ASSERT_TRUE(done.ok()) << done;
  const at::Tensor want = torch::autograd::grad(want_roots, {x}, ones)[0];
  EXPECT_TRUE(context.Gradient(x)->allclose(want));
  EXPECT_FALSE(context.Gradient(x)->requires_grad()) << "gradients of gradients are not recorded";
}

struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    TORCH_CHECK(false, "thrown on purpose");
  }
};

TEST_P(BackwardTest, AThrowReachesTheInitiatorAndEveryoneElse) {
  Start(3);
  ASSERT_TRUE(worker(2)
                  .Register("throws",
                            [](Request& r) -> absl::StatusOr<Message> {
                              return Message{"", {Throws::apply(r.message.tensors[0])}};
                            })
                  .ok());
  at::Tensor x = Leaf({2, 3}, 1);
  for (int i = 0; i < 3; ++i) {
    Context context = worker(0).NewContext();
    at::Tensor bad = Unwrap(worker(0).Call("worker2", "throws", {"", {x}}, {.context = &context}));
    at::Tensor good = Unwrap(worker(0).Call("worker1", "relay", {"2", {x}}, {.context = &context}));
    const absl::Status status = context.Backward({(bad * good).sum()});
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("thrown on purpose"), std::string::npos) << status;
    EXPECT_NE(status.message().find("worker2"), std::string::npos) << status;
    // The next pass is unaffected.
    Context next = worker(0).NewContext();
    at::Tensor out = Unwrap(worker(0).Call("worker2", "mm", {"", {x}}, {.context = &next}));
    ASSERT_TRUE(next.Backward({out.sum()}).ok());
  }
}

TEST_P(BackwardTest, ManyContextsAtOnceOnTheSameLeaves) {
  Start(2);
  at::Tensor x = Leaf({2, 3}, 1);
  const at::Tensor want = Reference(Local(x, "101").sum(), {x})[0];
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        Context context = worker(0).NewContext();
        at::Tensor out =
            Unwrap(worker(0).Call("worker1", "relay", {"01", {x}}, {.context = &context}));
        const absl::Status done = context.Backward({out.sum()});
        ASSERT_TRUE(done.ok()) << done;
        ASSERT_TRUE(context.Gradient(x)->allclose(want));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(BackwardTest, AHandlerCallsBackward) {
  Start(2);
  ASSERT_TRUE(worker(1)
                  .Register("train",
                            [](Request& r) -> absl::StatusOr<Message> {
                              const absl::Status done =
                                  r.context.Backward({r.message.tensors[0].square().sum()});
                              if (!done.ok()) return done;
                              return Message{};
                            })
                  .ok());
  at::Tensor x = Leaf({2, 3}, 1);
  Context context = worker(0).NewContext();
  const auto reply = worker(0).Call("worker1", "train", {"", {x}}, {.context = &context});
  ASSERT_TRUE(reply.ok()) << reply.status();
  ExpectGradient(context, x, Reference(x.square().sum(), {x})[0]);
}

TEST_P(BackwardTest, TheCallersGradientModeReachesTheResult) {
  Start(2);
  at::Tensor x = Leaf({2, 3}, 1);
  Context context = worker(0).NewContext();
  {
    at::NoGradGuard no_grad;
    EXPECT_FALSE(
        Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &context})).requires_grad());
  }
  EXPECT_TRUE(
      Unwrap(worker(0).Call("worker1", "mm", {"", {x}}, {.context = &context})).requires_grad());
  EXPECT_FALSE(Unwrap(worker(0).Call("worker1", "mm", {"", {x}})).requires_grad())
      << "outside of a context";
}

TEST_P(BackwardTest, AReleasedContextIsGoneEverywhere) {
  Start(3);
  at::Tensor x = Leaf({2, 3}, 1);
  {
    Context context = worker(0).NewContext();
    Unwrap(worker(0).Call("worker1", "relay", {"2", {x}}, {.context = &context}));
    EXPECT_EQ(worker(2).context_count(), 1u);
  }
  EXPECT_EQ(worker(0).context_count(), 0u);
  // Behind the release on the same connections; the second one is relayed by worker 1.
  Unwrap(worker(0).Call("worker1", "relay", {"2", {x}}));
  EXPECT_EQ(worker(1).context_count(), 0u);
  EXPECT_EQ(worker(2).context_count(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Transports, BackwardTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
