// What is heard of a backward of libtorch's: its gradients, and its end in each of the ways that it
// may have.
#include "core/parallel/process_group/backward_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

namespace autograd_impl = torch::autograd::impl;

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// Runs a function of the test's in its backward.
struct RunsInBackward : torch::autograd::Function<RunsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const std::function<void()>* body) {
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return input * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["body"].toInt()))();
    return {gradients[0] * 2, at::Tensor()};
  }
};

// Writes down what it hears, and asks for the end of each backward. All here runs on one thread.
class Recorder : public BackwardObserver, public std::enable_shared_from_this<Recorder> {
 public:
  void OnGradient(size_t parameter, const at::Tensor& tensor) override {
    EXPECT_TRUE(tensor.grad().defined());
    AwaitEnd();
    heard.push_back(absl::StrCat("gradient ", parameter));
  }
  void OnBackwardEnd(int backward) override {
    EXPECT_EQ(backward, awaited_.back());
    heard.push_back("end");
  }
  void OnNestedBackwardEnd(int backward) override {
    EXPECT_EQ(backward, awaited_.back());
    heard.push_back("nested end");
    AwaitEnd();
  }
  void OnBackwardAbandoned(int backward) override {
    EXPECT_EQ(backward, awaited_.back());
    heard.push_back("abandoned");
  }

  std::vector<std::string> heard;

 private:
  void AwaitEnd() {
    const int backward = RunningBackward();
    ASSERT_NE(backward, -1);
    if (std::find(awaited_.begin(), awaited_.end(), backward) != awaited_.end()) return;
    awaited_.push_back(backward);
    ObserveBackwardEnd(weak_from_this());
  }

  std::vector<int> awaited_;
};

// Somebody else's hook.
class OtherHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit OtherHook(std::function<void()> body) : body_(std::move(body)) {}
  void operator()(const at::Tensor&) override { body_(); }

 private:
  const std::function<void()> body_;
};

class BackwardHooksTest : public ::testing::Test {
 protected:
  BackwardHooksTest() { hooks_.Add({first_, second_}, recorder_); }

  const at::Tensor first_ = at::ones({3}).requires_grad_();
  const at::Tensor second_ = at::ones({3}).requires_grad_();
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  BackwardHooks hooks_;
};

TEST_F(BackwardHooksTest, GradientsAndThenTheEnd) {
  EXPECT_EQ(RunningBackward(), -1);
  (first_ * second_).sum().backward();
  ASSERT_EQ(recorder_->heard.size(), 3u);
  EXPECT_EQ(recorder_->heard.back(), "end");
  EXPECT_THAT(recorder_->heard, UnorderedElementsAre("gradient 0", "gradient 1", "end"));
}

TEST_F(BackwardHooksTest, ABackwardThatFailsIsAbandoned) {
  const std::function<void()> fail = [] { throw std::runtime_error("no"); };
  // Nodes that were made later run earlier.
  const at::Tensor failing = RunsInBackward::apply(first_, &fail);
  const at::Tensor loss = (failing + second_ * 2).sum();
  EXPECT_THROW(loss.backward(), std::runtime_error);
  EXPECT_THAT(recorder_->heard, ElementsAre("gradient 1", "abandoned"));
}

TEST_F(BackwardHooksTest, ABackwardWithinAnotherEndsBeforeIt) {
  const std::function<void()> nested = [this] {
    const at::AutoGradMode grad(true);
    (second_ * 3).sum().backward();
  };
  RunsInBackward::apply(first_, &nested).sum().backward();
  EXPECT_THAT(recorder_->heard, ElementsAre("gradient 1", "nested end", "gradient 0", "end"));
}

TEST_F(BackwardHooksTest, ANestedFailureThatIsCaughtIsNotTheOuterOnes) {
  const std::function<void()> fail = [] { throw std::runtime_error("no"); };
  const std::function<void()> nested = [this, &fail] {
    const at::AutoGradMode grad(true);
    const at::Tensor failing = RunsInBackward::apply(first_, &fail);
    EXPECT_THROW((failing + second_ * 2).sum().backward(), std::runtime_error);
  };
  RunsInBackward::apply(first_, &nested).sum().backward();
  EXPECT_THAT(recorder_->heard, ElementsAre("gradient 1", "nested end", "gradient 0", "end"));
}

TEST_F(BackwardHooksTest, NobodyIsToldOnceTheObserverIsGone) {
  const std::weak_ptr<Recorder> gone = recorder_;
  const std::function<void()> end = [this] { recorder_ = nullptr; };
  const at::Tensor ending = RunsInBackward::apply(first_, &end);
  (ending + second_ * 2).sum().backward();
  EXPECT_EQ(gone.lock(), nullptr);
  EXPECT_TRUE(first_.grad().defined());
}

TEST_F(BackwardHooksTest, HooksOfOthersAreCalledAndComeBack) {
  const at::Tensor parameter = at::ones({3}).requires_grad_();
  autograd_impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<OtherHook>([this] { recorder_->heard.push_back("earlier"); }));
  BackwardHooks hooks;
  hooks.Add({parameter}, recorder_);
  parameter.sum().backward();
  EXPECT_THAT(recorder_->heard, ElementsAre("earlier", "gradient 0", "end"));

  recorder_->heard.clear();
  hooks.Remove();
  parameter.sum().backward();
  EXPECT_THAT(recorder_->heard, ElementsAre("earlier"));
}

TEST_F(BackwardHooksTest, AfterRemoveNothingIsHeard) {
  hooks_.Remove();
  (first_ * second_).sum().backward();
  EXPECT_THAT(recorder_->heard, IsEmpty());
  EXPECT_EQ(autograd_impl::post_acc_grad_hooks(first_), nullptr);
}

}  // namespace
}  // namespace distgrad
