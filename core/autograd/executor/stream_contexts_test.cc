// The order of streams of another GPU than the first leaves no context on the first one, on threads
// that have chosen no GPU, as those of a pool; on the stand-in for CUDA. A process of its own,
// whose GPUs no other test has used.
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "core/autograd/executor/streams.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

const at::Device kSecond(at::kCUDA, 1);

TEST(StreamContextsTest, AGradientIsMarkedAwaitedAndBroughtHome) {
  std::thread pool([] {
    const at::Tensor gradient = at::rand({1000}).to(kSecond);
    const c10::Stream home = c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(kSecond);
    ASSERT_FALSE(fake_cuda::HasContext(0)) << "libtorch has made one";
    {
      ReadyMark mark({gradient});
      EXPECT_FALSE(fake_cuda::HasContext(0)) << "to mark has";
      mark.Await(gradient);
      EXPECT_FALSE(fake_cuda::HasContext(0)) << "to await has";
      mark = ReadyMark({gradient});
    }
    EXPECT_FALSE(fake_cuda::HasContext(0)) << "the end of a mark has";
    BringHome(gradient, home);
    home.synchronize();
  });
  pool.join();
  EXPECT_FALSE(fake_cuda::HasContext(0));
}

}  // namespace
}  // namespace distgrad
