// What distgrad relies on in the wheels: that libtorch's libraries find each other and LAPACK as
// Bazel lays them out, that autograd runs, and that TensorPipe's symbols are there.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>

#include <memory>

#include "gtest/gtest.h"
#include "tensorpipe/tensorpipe.h"

namespace {

TEST(TorchTest, LinearAlgebraRuns) {
  const at::Tensor a = at::rand({16, 16}, at::kDouble) + 16 * at::eye(16, at::kDouble);
  const at::Tensor b = at::rand({16, 3}, at::kDouble);
  EXPECT_TRUE(at::allclose(a.matmul(at::linalg_solve(a, b)), b));
  EXPECT_EQ(at::linalg_svdvals(a).size(0), 16);
}

TEST(TorchTest, AutogradRuns) {
  const at::Tensor x = at::ones({4}).requires_grad_();
  (x * x).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), 2 * at::ones({4})));
}

TEST(TorchTest, TensorPipeLinks) {
  const auto context = std::make_shared<tensorpipe::Context>();
  context->registerTransport(0, "uv", tensorpipe::transport::uv::create());
  context->registerChannel(0, "basic", tensorpipe::channel::basic::create());
  const auto listener = context->listen({"uv://127.0.0.1:0"});
  EXPECT_EQ(listener->url("uv").rfind("uv://127.0.0.1:", 0), 0u);
  context->join();
}

}  // namespace
