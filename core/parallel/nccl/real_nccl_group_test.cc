// NCCL's error paths, by functions that fail; that without a GPU there is a clear error; and, with
// one GPU and with two, NCCL itself. real_nccl_group_on_stand_ins_test has the cases for one GPU on
// the stand-ins for CUDA and NCCL.
#include "core/parallel/nccl/real_nccl_group.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/fake_clock.h"
#include "core/parallel/nccl/nccl_collectives.h"
#include "core/parallel/nccl/nccl_pool.h"
#include "core/parallel/new_device_collectives.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/held_stream.h"

namespace distgrad {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const c10::Device kOne(c10::kCUDA, 0);
const std::vector<c10::Device> kTwo = {kOne, {c10::kCUDA, 1}};

// What NCCL was asked, and what it answers. Functions of a table cannot carry state.
struct Fake {
  std::vector<std::string> calls;
  ncclResult_t init = ncclSuccess, end = ncclInProgress, state = ncclSuccess, reduce = ncclSuccess;
  int init_fails_at = -1;  // rank
  int current = 7;
} fake;

ncclComm_t Communicator(int rank) {
  return reinterpret_cast<ncclComm_t>(static_cast<uintptr_t>(rank + 1));
}

NcclFunctions Functions() {
  fake = Fake();
  NcclFunctions functions;
  functions.device_count = [] { return 2; };
  functions.exchange_device = [](int device) { return std::exchange(fake.current, device); };
  functions.restore_device = [](int device) { fake.current = device; };
  functions.stream = [](c10::Stream) { return cudaStream_t{}; };
  functions.get_unique_id = [](ncclUniqueId*) { return ncclSuccess; };
  functions.init_rank = [](ncclComm_t* out, int, ncclUniqueId, int rank, ncclConfig_t* config) {
    fake.calls.push_back("init " + std::to_string(rank) + " on " + std::to_string(fake.current) +
                         (config->blocking == 0 ? "" : " blocking"));
    if (rank == fake.init_fails_at) return fake.init;
    *out = Communicator(rank);
    return ncclInProgress;
  };
  functions.get_async_error = [](ncclComm_t communicator, ncclResult_t* state) {
    *state = communicator == Communicator(1) ? fake.state : ncclSuccess;
    return ncclSuccess;
  };
  functions.abort = [](ncclComm_t communicator) {
    fake.calls.push_back("abort " + std::to_string(reinterpret_cast<uintptr_t>(communicator) - 1) +
                         " on " + std::to_string(fake.current));
    return ncclSuccess;
  };
  functions.group_start = [] {
    fake.calls.push_back("start");
    return ncclSuccess;
  };
  functions.group_end = [] {
    fake.calls.push_back("end");
    return fake.end;
  };
  functions.reduce = [](const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t,
                        cudaStream_t) { return fake.reduce; };
  functions.last_error = [](ncclComm_t) { return "the cable is cut"; };
  return functions;
}

TEST(NcclGroupTest, CommunicatorsDoNotBlockAndStandOnTheirDevices) {
  {
    auto group = StartNcclGroup(kTwo, Functions());
    ASSERT_TRUE(group.ok()) << group.status();
    EXPECT_EQ(fake.current, 7);
    fake.state = ncclInProgress;
    EXPECT_FALSE((*group)->Ready().value());
    fake.state = ncclSuccess;
    EXPECT_TRUE((*group)->Ready().value());
  }
  EXPECT_THAT(fake.calls, ElementsAre("start", "init 0 on 0", "init 1 on 1", "end", "abort 0 on 0",
                                      "abort 1 on 1"));
  EXPECT_EQ(fake.current, 7);
}

// As after a kernel that has read invalid memory.
TEST(NcclGroupTest, CommunicatorsAreAbortedThoughDevicesCannotBeTaken) {
  static bool broken;
  broken = false;
  NcclFunctions functions = Functions();
  functions.exchange_device = [](int device) {
    TORCH_CHECK(!broken, "CUDA error: an illegal memory access was encountered");
    return std::exchange(fake.current, device);
  };
  {
    auto group = StartNcclGroup(kTwo, functions);
    ASSERT_TRUE(group.ok()) << group.status();
    fake.calls.clear();
    broken = true;
  }
  EXPECT_THAT(fake.calls, ElementsAre("abort 0 on 7", "abort 1 on 7"));
}

TEST(NcclGroupTest, ACommunicatorThatCannotBeMadeEndsTheOthers) {
  const NcclFunctions functions = Functions();
  fake.init_fails_at = 1;
  fake.init = ncclUnhandledCudaError;
  const absl::Status status = StartNcclGroup(kTwo, functions).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("ncclCommInitRankConfig of cuda:1: unhandled cuda error"),
                    HasSubstr("the cable is cut")));
  // The group is closed all the same.
  EXPECT_THAT(fake.calls,
              ElementsAre("start", "init 0 on 0", "init 1 on 1", "end", "abort 0 on 0"));
  EXPECT_EQ(fake.current, 7);
}

// As where it is full, or another program has it for itself. In a group that stays open NCCL would
// only note what this thread calls from then on.
TEST(NcclGroupTest, AGroupIsClosedThoughADeviceCannotBeTaken) {
  NcclFunctions functions = Functions();
  functions.exchange_device = [](int device) {
    TORCH_CHECK(device != 1, "CUDA error: out of memory");
    return std::exchange(fake.current, device);
  };
  const absl::Status status = StartNcclGroup(kTwo, functions).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("ncclCommInitRankConfig of cuda:1"), HasSubstr("out of memory")));
  EXPECT_THAT(fake.calls, ElementsAre("start", "init 0 on 0", "end", "abort 0 on 0"));
  EXPECT_EQ(fake.current, 7);
}

TEST(NcclGroupTest, AGroupIsClosedThoughACallThrows) {
  NcclFunctions functions = Functions();
  functions.stream = [](c10::Stream) -> cudaStream_t { TORCH_CHECK(false, "no such stream"); };
  auto group = StartNcclGroup(kTwo, functions);
  ASSERT_TRUE(group.ok()) << group.status();
  fake.calls.clear();
  const c10::Stream stream(c10::Stream::UNSAFE, kTwo[0], 0);
  const at::Tensor memory = at::ones({4});
  const absl::Status status =
      (*group)->Broadcast({{memory, memory, stream}, {memory, memory, stream}}, 4, 0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no such stream"));
  EXPECT_THAT(fake.calls, ElementsAre("start", "end"));
  EXPECT_EQ(fake.current, 7);
}

// NCCL reads its file, and sets the variables in it, when it is used first.
TEST(NcclGroupTest, CommunicatorsThatWouldBlockAreNotMade) {
  NcclFunctions functions = Functions();
  functions.get_unique_id = [](ncclUniqueId*) {
    setenv("NCCL_COMM_BLOCKING", "1", 1);
    return ncclSuccess;
  };
  const absl::Status status = StartNcclGroup(kTwo, functions).status();
  unsetenv("NCCL_COMM_BLOCKING");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("NCCL_COMM_BLOCKING"));
  EXPECT_THAT(fake.calls, ElementsAre());
}

TEST(NcclGroupTest, WhatFailsLaterNamesItsDevice) {
  auto group = StartNcclGroup(kTwo, Functions());
  ASSERT_TRUE(group.ok()) << group.status();
  fake.state = ncclRemoteError;
  EXPECT_THAT(std::string((*group)->Ready().status().message()), HasSubstr("cuda:1"));
}

TEST(NcclGroupTest, ACollectiveThatIsRefusedIsAnErrorAndItsGroupClosed) {
  auto group = StartNcclGroup(kTwo, Functions());
  ASSERT_TRUE(group.ok()) << group.status();
  fake.calls.clear();
  fake.reduce = ncclInvalidUsage;
  const c10::Stream stream(c10::Stream::UNSAFE, kTwo[0], 0);
  const at::Tensor memory = at::ones({4});
  const absl::Status status =
      (*group)->Reduce({{memory, memory, stream}, {memory, memory, stream}}, 4, 0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ncclReduce of cuda:0: invalid usage"));
  EXPECT_THAT(fake.calls, ElementsAre("start", "end"));
}

TEST(NcclGroupTest, ADeviceThatIsNotThereIsNamed) {
  const absl::Status status =
      StartNcclGroup({{c10::kCUDA, 0}, {c10::kCUDA, 2}}, Functions()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no cuda:2: CUDA finds 2 GPUs"));
}

TEST(NcclGroupTest, WithoutGpusTheCollectivesIsAClearError) {
  if (c10::cuda::device_count() > 1) GTEST_SKIP() << "this machine has GPUs";
  const absl::Status status = NewDeviceCollectives(kTwo).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("there is no cuda:"));
}

// With a list of one, which NewDeviceCollectives() leaves to torch. NCCL launches no kernel for one
// rank; where the result is another tensor than what is added, as here, it copies on its stream.
class OnOneGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() < 1) GTEST_SKIP() << "this machine has no GPU";
  }
  // From the host: the stand-ins have no kernels.
  static at::Tensor Filled(float value) { return at::full({1 << 20}, value).to(kOne); }
  static testing::AssertionResult Is(const at::Tensor& tensor, float value) {
    const at::Tensor here = tensor.cpu();
    if (here.equal(at::full({1 << 20}, value))) return testing::AssertionSuccess();
    return testing::AssertionFailure() << here[0].item<float>() << " and not " << value;
  }
};

TEST_F(OnOneGpu, AListOfOneIsCopiedInStreamOrder) {
  NcclPool pool(RealNcclPlatform());
  const auto communicators = pool.Get({kOne}, absl::Minutes(1));
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  NcclCollectives collectives(*communicators, {});
  const c10::StreamGuard on_stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
  for (int step = 0; step < 100; ++step) {
    const auto value = static_cast<float>(step);
    const std::vector<TensorVector> lists = {{Filled(value)}};
    const auto sums = collectives.Reduce(lists, kOne);
    ASSERT_TRUE(sums.ok()) << sums.status();
    lists[0][0].copy_(at::full({1 << 20}, -1.0f));  // waits until it has been read
    EXPECT_TRUE(Is((*sums)[0], value)) << step;
    EXPECT_TRUE(Is(lists[0][0], -1)) << step;
  }
}

TEST_F(OnOneGpu, WhatDoesNotEndInTimeIsAbortedAndTheListIsMadeAgain) {
  FakeClock clock;
  absl::Notification asked;
  const absl::Time deadline = clock.Now() + absl::Minutes(1);
  NcclPlatform platform = RealNcclPlatform();
  platform.query = [&, query = platform.query](const c10::Event& end) {
    const bool ended = query(end);
    if (!ended && clock.Now() > deadline && !asked.HasBeenNotified()) asked.Notify();
    return ended;
  };
  NcclPool pool(platform, &clock);
  const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  const c10::StreamGuard on_stream(stream);
  const std::vector<TensorVector> lists = {{Filled(3)}};
  {
    const auto first = pool.Get({kOne}, absl::Minutes(1));
    ASSERT_TRUE(first.ok()) << first.status();
    NcclCollectives collectives(*first, {.timeout = absl::Minutes(1)});
    ASSERT_TRUE(collectives.Reduce(lists, kOne).ok()) << "what torch and NCCL do once is done";
    HeldStream held(stream);
    const auto sums = collectives.Reduce(lists, kOne);
    ASSERT_TRUE(sums.ok()) << sums.status();
    std::thread late([&] { clock.Advance(absl::Minutes(2)); });
    asked.WaitForNotification();
    held.Release();  // an abort frees memory of the GPU, which waits for all of it
    late.join();
    EXPECT_EQ((*first)->status().code(), absl::StatusCode::kDeadlineExceeded) << (*first)->status();
  }
  const auto again = pool.Get({kOne}, absl::Minutes(1));
  ASSERT_TRUE(again.ok()) << again.status();
  const auto sums = NcclCollectives(*again, {}).Reduce(lists, kOne);
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_TRUE(Is((*sums)[0], 3));
}

class OnTwoGpus : public testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() < 2) GTEST_SKIP() << "this machine has fewer than 2 GPUs";
  }
};

TEST_F(OnTwoGpus, SumsAndCopiesAreRightInStreamOrder) {
  auto collectives = NewDeviceCollectives(kTwo);
  ASSERT_TRUE(collectives.ok()) << collectives.status();
  const auto again = NewDeviceCollectives(kTwo, {.bucket_bytes = 1 << 10});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(dynamic_cast<NcclCollectives&>(**collectives).communicators(),
            dynamic_cast<NcclCollectives&>(**again).communicators())
      << "communicators are kept";
  for (int step = 0; step < 100; ++step) {
    std::vector<TensorVector> lists(2);
    for (int i = 0; i < 2; ++i) {
      for (const int64_t size : {1, 1000, 1 << 22}) {
        lists[i].push_back(at::full({size}, step + i, at::TensorOptions(kTwo[i])));
      }
    }
    auto sums = (*collectives)->Reduce(lists, kTwo[step % 2]);
    ASSERT_TRUE(sums.ok()) << sums.status();
    auto copies = (*collectives)->Broadcast(*sums);
    ASSERT_TRUE(copies.ok()) << copies.status();
    for (const TensorVector& list : *copies) {
      for (const at::Tensor& tensor : list) {
        EXPECT_TRUE(tensor.eq(2 * step + 1).all().item<bool>()) << step;
      }
    }
  }
}

}  // namespace
}  // namespace distgrad
