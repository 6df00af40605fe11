// Times distgrad's executor, torch::autograd::backward and memcpy in one process.
#include "benchmarks/local_side.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/parallel_step.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/graph.h"
#include "core/autograd/executor/source_node.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

constexpr double kFactor = 1.0001;

class KeepingSink : public GradientSink {
 public:
  void OnLeaf(torch::autograd::AccumulateGrad&, at::Tensor gradient) override {
    gradient_ = std::move(gradient);
  }
  void OnStop(torch::autograd::Node&, torch::autograd::variable_list, bool) override {}
  void OnIdle() override {}

  const at::Tensor& gradient() const { return gradient_; }

 private:
  at::Tensor gradient_;
};

// This includes the building of the Graph.
absl::StatusOr<at::Tensor> RunExecutor(const at::Tensor& root) {
  const std::shared_ptr<Graph::Node> source =
      std::make_shared<SourceNode>(absl::MakeSpan(&root, 1));
  const auto graph =
      std::make_shared<const Graph>(absl::MakeSpan(&source, 1), [](Graph::Node&) { return false; });
  KeepingSink sink;
  Execution execution(graph, ExecutionOptions(), &sink);
  execution.Feed(0, {at::ones_like(root)}, {true});
  DG_RETURN_IF_ERROR(execution.status());
  return sink.gradient();
}

absl::StatusOr<double> Backward(int nodes, bool by_executor) {
  at::Tensor x = at::ones({1}).requires_grad_();
  at::Tensor root = x;
  for (int i = 0; i < nodes; ++i) root = at::mul(root, kFactor);
  at::Tensor gradient;
  const double start = MicrosNow();
  if (by_executor) {
    DG_ASSIGN_OR_RETURN(gradient, RunExecutor(root));
  } else {
    torch::autograd::backward({root}, {});
    gradient = x.grad();
  }
  const double micros = MicrosNow() - start;
  const double got = gradient.item<float>(), want = std::pow(kFactor, nodes);
  if (std::abs(got - want) > 1e-2) {
    return absl::InternalError(absl::StrCat("the gradient is ", got, ", not ", want));
  }
  return micros;
}

class LocalSide : public BenchmarkSide {
 public:
  absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) override {
    if (work.kind == "executor" || work.kind == "backward") {
      return Repeat(budget, [&] { return Backward(work.count, work.kind == "executor"); });
    }
    if (absl::StartsWith(work.kind, "step_") || absl::StartsWith(work.kind, "parallel_")) {
      return RunParallelStep(work, budget);
    }
    if (work.kind != "memcpy")
      return absl::UnimplementedError(absl::StrCat("no such work: ", work.kind));
    std::vector<char> from(work.bytes, 1), to(work.bytes, 2);
    // Small ones are measured in batches, for the clock takes longer than one.
    const int batch = work.bytes < (1 << 16) ? 1000 : 1;
    return Repeat(budget, [&]() -> absl::StatusOr<double> {
      const double start = MicrosNow();
      for (int i = 0; i < batch; ++i) {
        std::memcpy(to.data(), from.data(), work.bytes);
        asm volatile("" ::"r"(to.data()) : "memory");
      }
      return (MicrosNow() - start) / batch;
    });
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartLocal(const SideOptions& place) {
  if (place.config != "all") at::set_num_threads(1);
  return std::make_unique<LocalSide>();
}

}  // namespace distgrad
