// That a program with a worker has libtorch's CUDA, if it was built with it; and a backward through
// a GPU, where there is one.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "core/worker/context.h"
#include "core/worker/worker.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(AcceleratorsTest, CudaIsLoadedWithTheWorker) {
  EXPECT_TRUE(c10::impl::hasDeviceGuardImpl(at::kCUDA));
  EXPECT_TRUE(Worker::Create({.name = "alone"}).ok());
}

TEST(AcceleratorsTest, ABackwardCrossesToTheGpuAndBack) {
  if (c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() == 0) {
    GTEST_SKIP() << "this machine has no GPU";
  }
  auto worker = Worker::Create({.name = "alone"});
  ASSERT_TRUE(worker.ok()) << worker.status();
  const Context context = (*worker)->NewContext();
  const at::Tensor on_host = at::rand({4}).requires_grad_();
  const at::Tensor on_gpu = at::rand({4}, at::kCUDA).requires_grad_();
  const at::Tensor loss = (on_host.to(at::kCUDA) * on_gpu).cpu().sum();
  ASSERT_TRUE(context.Backward({loss}).ok());
  EXPECT_TRUE(context.Gradient(on_host)->equal(on_gpu.cpu()));
  EXPECT_TRUE(context.Gradient(on_gpu)->cpu().equal(on_host));
}

}  // namespace
}  // namespace distgrad
