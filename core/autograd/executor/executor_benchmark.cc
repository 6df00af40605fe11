// The executor against torch::autograd::backward: chains of scalar multiplications, the building
// of the Graph included. Alternates the two in rounds and prints the medians and the median of
// the ratios.
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/graph.h"
#include "core/autograd/executor/source_node.h"

namespace distgrad {
namespace {

class KeepingSink : public GradientSink {
 public:
  void OnLeaf(torch::autograd::AccumulateGrad&, at::Tensor gradient) override {
    gradients_.push_back(std::move(gradient));
  }
  void OnStop(torch::autograd::Node&, torch::autograd::variable_list, bool) override {}
  void OnIdle() override {}

 private:
  std::vector<at::Tensor> gradients_;
};

at::Tensor Chain(int length) {
  at::Tensor t = at::ones({1}).requires_grad_();
  for (int i = 0; i < length; ++i) t = at::mul(t, 1.0001);
  return t;
}

void RunExecutor(const at::Tensor& root) {
  const std::shared_ptr<Graph::Node> source =
      std::make_shared<SourceNode>(absl::MakeSpan(&root, 1));
  const auto graph =
      std::make_shared<const Graph>(absl::MakeSpan(&source, 1), [](Graph::Node&) { return false; });
  KeepingSink sink;
  Execution execution(graph, ExecutionOptions(), &sink);
  execution.Feed(0, {at::ones_like(root)}, {true});
  if (!execution.status().ok()) std::abort();
}

void RunTorch(const at::Tensor& root) { torch::autograd::backward({root}, {}, false); }

double MicrosOf(void (*run)(const at::Tensor&), int length) {
  const at::Tensor root = Chain(length);
  const auto start = std::chrono::steady_clock::now();
  run(root);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Compare(int length, int rounds) {
  std::vector<double> ours, theirs, ratios;
  for (int round = 0; round < rounds; ++round) {
    ours.push_back(MicrosOf(RunExecutor, length));
    theirs.push_back(MicrosOf(RunTorch, length));
    ratios.push_back(ours.back() / theirs.back());
  }
  std::printf("%6d nodes: executor %9.1f us, libtorch %9.1f us, ratio %.2f\n", length, Median(ours),
              Median(theirs), Median(ratios));
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  distgrad::Compare(10, rounds * 10);
  distgrad::Compare(1000, rounds);
  distgrad::Compare(10000, rounds / 10 + 1);
}
