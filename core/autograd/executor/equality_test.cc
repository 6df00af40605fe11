// The executor against torch::autograd::backward: equal to the last bit, and the same hooks in
// the same order, over random programs.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/graph.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/autograd/executor/random_program.h"
#include "core/autograd/executor/source_node.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Gradients = std::map<const at::TensorImpl*, at::Tensor>;

// One thread only.
class AddingSink : public GradientSink {
 public:
  explicit AddingSink(Gradients* gradients) : gradients_(gradients) {}
  void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) override {
    const at::AutoGradMode off(false);
    at::Tensor& sum = (*gradients_)[leaf.variable.unsafeGetTensorImpl()];
    const auto add = [&] {
      torch::autograd::AccumulateGrad::accumulateGrad(
          leaf.variable, sum, gradient, 1, [&sum](at::Tensor&& t) { sum = std::move(t); });
      return sum;
    };
    if (HasPostAccumulateHook(leaf)) {
      CallPostAccumulateHook(leaf, add, [&sum](at::Tensor left) { sum = std::move(left); });
    } else {
      add();
    }
  }
  void OnStop(torch::autograd::Node&, torch::autograd::variable_list, bool) override {}
  void OnIdle() override { ++idle_; }
  int idle() const { return idle_; }

 private:
  Gradients* const gradients_;
  int idle_ = 0;
};

// Gradients of the leaves, then of what retains them, then what the hooks saw.
std::vector<std::string> RunTorch(Program& program, int passes) {
  for (int pass = 0; pass < passes; ++pass) {
    torch::autograd::backward(program.roots, program.root_gradients,
                              /*retain_graph=*/pass + 1 < passes);
  }
  std::vector<std::string> result;
  for (const at::Tensor& leaf : program.leaves) result.push_back(Fingerprint(leaf.grad()));
  for (const at::Tensor& value : program.retained) result.push_back(Fingerprint(value.grad()));
  result.insert(result.end(), program.trace->begin(), program.trace->end());
  return result;
}

std::vector<std::string> RunExecutor(Program& program, int passes) {
  const std::shared_ptr<Graph::Node> source = std::make_shared<SourceNode>(program.roots);
  const auto graph =
      std::make_shared<const Graph>(absl::MakeSpan(&source, 1), [](Graph::Node&) { return false; });
  Gradients gradients;
  for (int pass = 0; pass < passes; ++pass) {
    AddingSink sink(&gradients);
    ExecutionOptions options;
    options.retain_graph = pass + 1 < passes;
    Execution execution(graph, options, &sink);
    const absl::InlinedVector<bool, 8> reached(program.root_gradients.size(), true);
    execution.Feed(graph->Find(source.get()), program.root_gradients, reached);
    EXPECT_TRUE(execution.status().ok()) << execution.status();
    EXPECT_EQ(sink.idle(), 1);
  }
  std::vector<std::string> result;
  for (const at::Tensor& leaf : program.leaves) {
    EXPECT_FALSE(leaf.grad().defined());
    result.push_back(Fingerprint(gradients[leaf.unsafeGetTensorImpl()]));
  }
  for (const at::Tensor& value : program.retained) result.push_back(Fingerprint(value.grad()));
  result.insert(result.end(), program.trace->begin(), program.trace->end());
  return result;
}

void ExpectEqual(uint64_t seed, const ProgramOptions& options, int passes = 1) {
  Program theirs(seed, options);
  Program ours(seed, options);
  const std::vector<std::string> expected = RunTorch(theirs, passes);
  const std::vector<std::string> actual = RunExecutor(ours, passes);
  SCOPED_TRACE(
      absl::StrCat("seed ", seed, ", dtype ", c10::toString(options.dtype), ": ", theirs.text));
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(expected[i], actual[i]) << "line " << i;
}

TEST(Equality, Float) {
  for (uint64_t seed = 1; seed <= 100; ++seed) ExpectEqual(seed, ProgramOptions());
}

TEST(Equality, DoubleHalfAndBFloat16) {
  for (uint64_t seed = 1000; seed < 1060; ++seed) {
    ProgramOptions options;
    options.dtype = seed % 3 == 0 ? at::kDouble : seed % 3 == 1 ? at::kHalf : at::kBFloat16;
    ExpectEqual(seed, options);
  }
}

TEST(Equality, HooksOfEveryKind) {
  for (uint64_t seed = 2000; seed < 2060; ++seed) {
    ProgramOptions options;
    options.hooks = true;
    options.operators = 30;
    ExpectEqual(seed, options);
  }
}

TEST(Equality, RetainTwice) {
  for (uint64_t seed = 3000; seed < 3030; ++seed) {
    ProgramOptions options;
    options.operators = 10;
    options.hooks = seed % 2 == 0;
    ExpectEqual(seed, options, /*passes=*/3);
  }
}

TEST(Equality, LargePrograms) {
  for (uint64_t seed = 4000; seed < 4005; ++seed) {
    ProgramOptions options;
    options.operators = 300;
    options.roots = 5;
    options.hooks = true;
    ExpectEqual(seed, options);
  }
}

TEST(Equality, SeedsReachEveryOperator) {
  std::set<std::string> drawn;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    for (absl::string_view name : absl::StrSplit(Program(seed, ProgramOptions()).text, ' ')) {
      drawn.emplace(name);
    }
  }
  for (const std::string& name : ProgramOperatorNames()) EXPECT_EQ(drawn.count(name), 1u) << name;
}

}  // namespace
}  // namespace distgrad
