// Order, modes and devices of what runs in parallel, and which error is thrown.
#include "core/parallel/parallel_apply.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "core/parallel/replica_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/fake_device/fake_device.h"
#include "tests/testing/no_threads.h"

namespace distgrad {
namespace {

using at::Tensor;
using testing::HasSubstr;

using Function = std::function<Tensor(Tensor)>;

const c10::Device kHost(c10::kCPU);

TEST(ParallelApply, AllRunAtTheSameTimeAndInOrder) {
  auto* const barrier = new absl::Barrier(4);  // each waits for all others
  std::vector<Function> functions;
  for (int i = 0; i < 4; ++i) {
    functions.push_back([barrier, i](const Tensor& t) {
      if (barrier->Block()) delete barrier;
      return t + i;
    });
  }
  const std::vector<Tensor> results =
      ParallelApply(functions, std::vector<Tensor>(4, at::zeros({1})));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(results[i].item<float>(), i);
}

TEST(ParallelApply, ATupleIsTheArguments) {
  const std::vector<std::tuple<Tensor, int>> inputs = {{at::ones({1}), 2}, {at::ones({1}), 3}};
  auto scale = [](const Tensor& t, int factor) { return std::pair(t * factor, t); };
  const auto results = ParallelApply(std::vector(2, scale), inputs);
  EXPECT_EQ(results[1].first.item<float>(), 3);
}

TEST(ParallelApply, DevicesAndStreamsAreTheCallers) {
  const c10::impl::VirtualGuardImpl impl(c10::DeviceType::HPU);
  const c10::Stream of_one = fake_device::NewStream(1), of_two = fake_device::NewStream(2);
  const c10::MultiStreamGuard guard({of_one, of_two});
  const Function check = [&](const Tensor& t) {
    EXPECT_EQ(impl.getDevice(), t.device());
    EXPECT_EQ(impl.getStream(fake_device::Device(1)), of_one);
    EXPECT_EQ(impl.getStream(fake_device::Device(2)), of_two);
    return t * 2;
  };
  std::vector<Tensor> inputs;
  for (const int device : {1, 2}) {
    inputs.push_back(at::ones({2}, at::TensorOptions(fake_device::Device(device))));
  }
  for (const Tensor& result : ParallelApply(std::vector<Function>(2, check), inputs)) {
    EXPECT_TRUE((result + 1).cpu().equal(at::full({2}, 3)));
  }
  EXPECT_THAT(fake_device::TakeViolations(), testing::IsEmpty());
}

TEST(ParallelApply, ModesAreTheCallers) {
  std::atomic<int> grad{0}, inference{0}, autocast{0};
  const Function look = [&](const Tensor& t) {
    grad += at::GradMode::is_enabled();
    inference += c10::InferenceMode::is_enabled();
    autocast += at::autocast::is_autocast_enabled(at::kCPU) &&
                at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf;
    return t;
  };
  const std::vector<Function> functions(3, look);
  const std::vector<Tensor> inputs(3, at::ones({1}));
  ParallelApply(functions, inputs);
  EXPECT_EQ(std::tuple(grad.exchange(0), inference.exchange(0), autocast.exchange(0)),
            std::tuple(3, 0, 0));
  {
    const at::NoGradGuard no_grad;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::ScalarType before = at::autocast::get_autocast_dtype(at::kCPU);
    at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
    ParallelApply(functions, inputs);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, before);
  }
  EXPECT_EQ(std::tuple(grad.exchange(0), inference.exchange(0), autocast.exchange(0)),
            std::tuple(0, 0, 3));
  const c10::InferenceMode guard;
  ParallelApply(functions, inputs);
  EXPECT_EQ(std::tuple(grad.load(), inference.load(), autocast.load()), std::tuple(0, 3, 0));
}

// The second fails at once, the third and then the first only when the second is long over.
TEST(ParallelApply, TheFirstErrorByOrderIsThrownWhenAllHaveStopped) {
  absl::Notification second, third;
  std::atomic<int> stopped{0};
  const std::vector<Function> functions = {[&](const Tensor& t) {
                                             third.WaitForNotification();
                                             return t;
                                           },
                                           [&](const Tensor& t) -> Tensor {
                                             third.WaitForNotification();
                                             ++stopped;
                                             TORCH_CHECK_INDEX(false, "of the second");
                                           },
                                           [&](const Tensor&) -> Tensor {
                                             ++stopped;
                                             third.Notify();
                                             throw std::runtime_error("of the third");
                                           }};
  try {
    ParallelApply(functions, std::vector<Tensor>(3, at::ones({1})));
    FAIL() << "no error";
  } catch (const c10::IndexError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("of the second"));
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("in replica 1 of 3, on cpu"));
  }
  EXPECT_EQ(stopped, 2);
}

TEST(ParallelApply, OtherExceptionsAreNested) {
  struct Mine : std::logic_error {
    using std::logic_error::logic_error;
  };
  const Function fail = [](const Tensor&) -> Tensor { throw Mine("own"); };
  try {
    ParallelApply(std::vector<Function>{fail}, std::vector<Tensor>{at::ones({1})});
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "in replica 0 of 1, on cpu: own");
    EXPECT_THROW(std::rethrow_if_nested(error), Mine);
  }
  const std::function<Tensor(int)> odd = [](int) -> Tensor { throw 7; };
  EXPECT_THROW(ParallelApply(std::vector{odd}, std::vector{1}), std::runtime_error);
}

TEST(ParallelApply, WithoutMoreThreadsTheyRunOneAfterTheOther) {
  struct Run {
    absl::Notification goes, over;
    std::vector<Tensor> results;
  };
  const auto run = std::make_shared<Run>();
  std::thread caller([run] {
    const Function add = [id = std::this_thread::get_id()](const Tensor& t) {
      EXPECT_EQ(std::this_thread::get_id(), id);
      return t + 1;
    };
    run->goes.WaitForNotification();
    run->results =
        ParallelApply(std::vector<Function>(3, add), std::vector<Tensor>(3, at::ones({1})));
    run->over.Notify();
  });
  const NoThreads no_threads;
  run->goes.Notify();
  if (!run->over.WaitForNotificationWithTimeout(absl::Minutes(1))) {
    caller.detach();
    FAIL() << "it waits for what nobody runs";
  }
  caller.join();
  EXPECT_EQ(run->results.size(), 3u);
  for (const Tensor& result : run->results) EXPECT_EQ(result.item<float>(), 2);
}

TEST(ParallelApply, NumbersMustAgree) {
  const std::vector<Function> one = {[](const Tensor& t) { return t; }};
  EXPECT_THROW(ParallelApply(one, std::vector<Tensor>(2, at::ones({1}))), c10::ValueError);
  EXPECT_THROW(ParallelApply(one, std::vector<Tensor>(1, at::ones({1})), {kHost, kHost}),
               c10::ValueError);
  EXPECT_TRUE(ParallelApply(std::vector<Function>(), std::vector<Tensor>()).empty());
}

TEST(ReplicaThreads, MayBeUsedWithinThemselvesAndByMany) {
  ReplicaThreads threads({kHost, kHost, kHost});
  std::atomic<int> calls{0};
  threads.Run(3, [&](size_t) { threads.Run(3, [&](size_t) { ++calls; }); });
  EXPECT_EQ(calls, 9);
  threads.Run(2, [&](size_t) { ++calls; });
  threads.Run(0, [&](size_t) { ++calls; });
  EXPECT_EQ(calls, 11);
}

// Where there is no memory for the task of one, those before it run already.
TEST(ReplicaThreads, NoneRunsOnWhenRunHasThrown) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    const std::thread::id caller = std::this_thread::get_id();
    absl::Notification go;
    std::once_flag once;
    std::atomic<int> done{0};
    const auto let_go = [&] { std::call_once(once, [&go] { go.Notify(); }); };
    auto threads = std::make_unique<ReplicaThreads>(std::vector(3, kHost));
    FailAllocation(nth);
    try {
      threads->Run(3, [&](size_t i) {
        if (i == 1 && std::this_thread::get_id() != caller) {
          go.WaitForNotification();
        } else {
          let_go();
        }
        ++done;
      });
    } catch (...) {  // a lack of memory
    }
    failed = FailAllocation(-1);
    const int done_then = done;
    let_go();
    threads = nullptr;  // joins them
    ASSERT_EQ(done, done_then) << "where allocation " << nth << " failed";
    if (!failed) {
      EXPECT_EQ(done, 3);
    }
  }
}

}  // namespace
}  // namespace distgrad
