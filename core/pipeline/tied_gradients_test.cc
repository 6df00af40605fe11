// In which order torch is asked for sums of gradients of GPUs, on the stand-in for CUDA. It has no
// kernels, but needs none for a sparse tensor without rows.
#include "core/pipeline/tied_gradients.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

std::vector<std::string> operators;

// The operators that SumOfGradients() calls, in their order.
std::vector<std::string> OperatorsOf(const at::Tensor& a, const at::Tensor& b) {
  operators.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& called) -> std::unique_ptr<at::ObserverContext> {
        operators.emplace_back(called.name());
        return nullptr;
      }));
  const at::Tensor sum = SumOfGradients(a, b);
  at::removeCallback(handle);
  EXPECT_TRUE(sum.cpu().equal(a.is_sparse() ? b.cpu() : a.cpu()));
  return operators;
}

at::Tensor NoRows(at::Device device) {
  const at::Tensor sparse = at::_sparse_coo_tensor_unsafe(
      at::empty({1, 0}, at::TensorOptions(at::kLong).device(device)), at::empty({0, 4}, device),
      {10, 4}, at::TensorOptions(at::kFloat).device(device).layout(at::kSparse));
  sparse._coalesced_(false);
  return sparse;
}

TEST(TiedGradientsTest, RowsOfAGpuAreAddedUpBeforeTheyAreAddedToADenseGradient) {
  const at::Device gpu(at::kCUDA, 0);
  const at::Tensor dense = at::rand({10, 4});
  for (const bool sparse_first : {false, true}) {
    const auto of = [&](at::Device device) {
      const at::Tensor here = dense.to(device), sparse = NoRows(device);
      return sparse_first ? OperatorsOf(sparse, here) : OperatorsOf(here, sparse);
    };
    const std::vector<std::string> on_gpu = of(gpu), on_host = of(at::kCPU);
    const auto coalesce = std::find(on_gpu.begin(), on_gpu.end(), "aten::coalesce");
    EXPECT_NE(coalesce, on_gpu.end());
    EXPECT_NE(std::find(coalesce, on_gpu.end(), "aten::add"), on_gpu.end());
    EXPECT_EQ(std::count(on_host.begin(), on_host.end(), "aten::coalesce"), 0)
        << "a host adds in order";
  }
}

}  // namespace
}  // namespace distgrad
