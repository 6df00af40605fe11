// Calls closures of the test by their addresses, and compares gradients with libtorch's.
#include "tests/integration/team.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>
#include <thread>
#include <utility>

#include "core/autograd/state.h"

namespace distgrad {

Team::Team(int workers, ClusterOptions options)
    : killed_(workers), cluster_([&] {
        options.workers = workers;
        return options;
      }()) {
  for (int i = 0; i < workers; ++i) {
    const absl::Status registered =
        cluster_[i].Register("run", [](Request& r) -> absl::StatusOr<Message> {
          Function* function;
          std::memcpy(&function, r.message.payload.data(), sizeof(function));
          absl::StatusOr<Tensors> results = (*function)(std::move(r.message.tensors), r);
          if (!results.ok()) return results.status();
          return Message{"", *std::move(results)};
        });
    EXPECT_TRUE(registered.ok()) << registered;
  }
}

void Team::Kill(int i) {
  {
    absl::MutexLock lock(&mu_);
    killed_[i] = true;
  }
  cluster_.Kill(i);
}

bool Team::alive(int i) {
  absl::MutexLock lock(&mu_);
  return !killed_[i];
}

Future<Message> Team::Start(int from, int to, const CallOptions& options, Function function,
                            Tensors arguments) {
  // Kept to the end: a call may outlive its deadline.
  auto kept = std::make_unique<Function>(std::move(function));
  const Function* const address = kept.get();
  {
    absl::MutexLock lock(&mu_);
    functions_.push_back(std::move(kept));
  }
  std::string payload(sizeof(address), '\0');
  std::memcpy(payload.data(), &address, sizeof(address));
  return cluster_[from].CallAsync(WorkerName(to), "run", {payload, std::move(arguments)}, options);
}

absl::StatusOr<Tensors> Team::Try(int from, int to, const CallOptions& options, Function function,
                                  Tensors arguments) {
  absl::StatusOr<Message> reply =
      Start(from, to, options, std::move(function), std::move(arguments)).Take();
  if (!reply.ok()) return reply.status();
  return std::move(reply->tensors);
}

Tensors Team::Run(int from, int to, const Context& context, Function function, Tensors arguments) {
  absl::StatusOr<Tensors> results =
      Try(from, to, {.context = &context}, std::move(function), std::move(arguments));
  EXPECT_TRUE(results.ok()) << results.status();
  return results.ok() ? *std::move(results) : Tensors(8);
}

at::Tensor Team::Gradient(int worker, const Context& context, const at::Tensor& leaf) {
  at::Tensor gradient;
  const absl::StatusOr<Tensors> done = Try(0, worker, {.context = &context},
                                           [&](Tensors, Request& r) -> absl::StatusOr<Tensors> {
                                             gradient = GradientOf(r.context, leaf);
                                             return Tensors{};
                                           },
                                           {});
  EXPECT_TRUE(done.ok()) << done.status();
  return gradient;
}

void Team::AwaitQuiet(size_t contexts) {
  for (int i = 0; i < size(); ++i) {
    if (!alive(i)) continue;
    EXPECT_TRUE(Eventually([&] {
      const std::vector<ContextState> known = cluster_[i].Contexts();
      for (const ContextState& context : known) {
        if (!context.passes.empty()) return false;
      }
      return known.size() <= contexts;
    })) << "worker "
        << i << " still has " << cluster_[i].context_count() << " contexts, or a pass";
  }
}

bool Eventually(const std::function<bool()>& condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

at::Tensor Leaf(at::IntArrayRef sizes, int seed, at::ScalarType type) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions(at::kDouble))
      .to(type)
      .set_requires_grad(true);
}

Tensors Reference(const at::Tensor& root, const Tensors& leaves) {
  return torch::autograd::grad({root}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

void ExpectSame(const at::Tensor& got, const at::Tensor& want) {
  ASSERT_EQ(got.defined(), want.defined()) << (got.defined() ? "a" : "no") << " gradient";
  if (!want.defined()) return;
  ASSERT_EQ(got.scalar_type(), want.scalar_type());
  ASSERT_EQ(got.layout(), want.layout());
  ASSERT_EQ(got.sizes(), want.sizes());
  if (want.is_sparse()) {
    ExpectSame(got.coalesce().indices(), want.coalesce().indices());
    ExpectSame(got.coalesce().values(), want.coalesce().values());
    return;
  }
  EXPECT_TRUE(at::equal(got, want)) << got << "\nwant\n" << want;
}

at::Tensor GradientOf(const Context& context, const at::Tensor& leaf) {
  const absl::StatusOr<at::Tensor> gradient = context.Gradient(leaf);
  if (gradient.ok()) return *gradient;
  EXPECT_EQ(gradient.status().code(), absl::StatusCode::kNotFound) << gradient.status();
  return at::Tensor();
}

}  // namespace distgrad
