// Groups over NCCL, on stand-ins for NCCL and CUDA: how ranks of one process connect, add, fail and
// leave, and that nothing waits without a deadline for one that does not.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"
#include "core/base/fake_clock.h"
#include "core/base/log.h"
#include "core/membership/start.h"
#include "core/membership/store.h"
#include "core/membership/store/in_process_store.h"
#include "core/net/cluster_key.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/group_security.h"
#include "core/parallel/process_group/new_backend.h"
#include "core/parallel/process_group/process_group.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/fake_cuda/fake_cuda.h"
#include "tests/testing/fake_nccl/fake_nccl.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {
namespace {

at::Device Gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

struct Timeouts {
  absl::Duration collective = absl::Minutes(5);
  absl::Duration join = absl::Minutes(5);
};

absl::StatusOr<std::shared_ptr<ProcessGroup>> Join(const std::shared_ptr<Store>& store, int rank,
                                                   int size, const std::string& name = "gpus",
                                                   const Timeouts& timeouts = {}) {
  const c10::DeviceGuard guard(Gpu(rank));
  return ProcessGroup::Create({.name = name,
                               .store = store,
                               .rank = rank,
                               .size = size,
                               .backend = "nccl",
                               .timeout = timeouts.collective,
                               .join_timeout = timeouts.join});
}

// Each rank on a thread.
void OnRanks(int size, const std::function<void(int rank)>& run) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&run, rank] {
      const c10::DeviceGuard guard(Gpu(rank));
      run(rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

at::Tensor On(int rank, float value) { return at::full({1000}, value).to(Gpu(rank)); }

const std::string& What() {
  static const std::string what = "adding";
  return what;
}

TEST(NcclOnStandInsTest, RanksOfOneProcessAdd) {
  const int finalized = fake_nccl::Finalized();
  const auto store = NewInProcessStore();
  OnRanks(3, [&](int rank) {
    const auto group = Join(store, rank, 3);
    ASSERT_TRUE(group.ok()) << group.status();
    EXPECT_EQ((*group)->device(), Gpu(rank));
    for (int step = 0; step < 5; ++step) {
      const at::Tensor tensor = On(rank, static_cast<float>(rank + step));
      const auto running = (*group)->BeginSum(tensor, What());
      ASSERT_TRUE(running.ok()) << running.status();
      const absl::Status status = (*group)->Wait(**running);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(tensor.cpu().equal(at::full({1000}, 3.0f + 3.0f * static_cast<float>(step))));
    }
  });
  EXPECT_EQ(fake_nccl::Communicators(), 0) << "a group that is gone has left some";
  EXPECT_EQ(fake_nccl::Finalized() - finalized, 3)
      << "what other ranks have not taken yet would be lost";
}

// Every other rank says that it is on another machine, to which NCCL's threads send.
class OtherMachines final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    auto values = ForwardingStore::GetEach(keys, deadline);
    for (size_t i = 0; values.ok() && i < keys.size(); ++i) {
      if (absl::StrContains(keys[i], "nccl_place/")) (*values)[i] = "another machine\n1";
    }
    return values;
  }
};

// Two ranks that have added, of which rank 0 leaves on a thread.
class LeavingTest : public testing::Test {
 protected:
  void SetUp() override {
    before_ = fake_nccl::Communicators(), destroyed_ = fake_nccl::Destroyed();
  }
  void Leave(absl::Duration timeout) {
    const auto store = std::make_shared<OtherMachines>(NewInProcessStore());
    groups_.resize(2);
    OnRanks(2, [&](int rank) {
      auto group = Join(store, rank, 2, "gpus", {.collective = timeout});
      ASSERT_TRUE(group.ok()) << group.status();
      const at::Tensor tensor = On(rank, 1);
      const auto running = (*group)->BeginSum(tensor, What());
      ASSERT_TRUE(running.ok()) << running.status();
      ASSERT_TRUE((*group)->Wait(**running).ok());
      groups_[rank] = *std::move(group);
    });
    thread_ = std::thread([this] {
      groups_[0].reset();
      left_.Notify();
    });
  }
  static void AwaitDestroying() {
    while (fake_nccl::Destroying() == 0) absl::SleepFor(absl::Milliseconds(1));
  }
  int communicators() const { return fake_nccl::Communicators() - before_; }
  int destroyed() const { return fake_nccl::Destroyed() - destroyed_; }

  std::vector<std::shared_ptr<ProcessGroup>> groups_;
  std::thread thread_;
  absl::Notification left_;

 private:
  int before_ = 0, destroyed_ = 0;
};

TEST_F(LeavingTest, WaitsUntilAllIsTaken) {
  {
    const fake_nccl::Untaken untaken;
    Leave(absl::Minutes(5));
    AwaitDestroying();
    EXPECT_FALSE(left_.HasBeenNotified());
  }
  thread_.join();
  EXPECT_EQ(destroyed(), 1);
  EXPECT_EQ(communicators(), 1) << "that of the other rank";
}

TEST_F(LeavingTest, HasTheDeadlineOfACollective) {
  {
    const fake_nccl::Untaken untaken;
    Leave(absl::Seconds(1));
    thread_.join();
    EXPECT_EQ(fake_nccl::Destroying(), 1) << "its communicator sends for as long";
  }
  while (communicators() > 1) absl::SleepFor(absl::Milliseconds(1));
}

TEST_F(LeavingTest, AbortsWhatCannotBeDestroyed) {
  std::optional<fake_nccl::Failure> failure;
  {
    const fake_nccl::Untaken untaken;
    Leave(absl::Minutes(5));
    AwaitDestroying();
    failure.emplace();
  }
  thread_.join();
  EXPECT_EQ(destroyed(), 0);
  EXPECT_EQ(communicators(), 1) << "that of the other rank";
}

TEST_F(LeavingTest, WaitsNoLongerOnceAnotherRankHasFailed) {
  {
    const fake_nccl::Untaken untaken;
    Leave(absl::Minutes(5));
    AwaitDestroying();
    groups_[1]->Fail(absl::DataLossError("no disk"));
    thread_.join();
  }
  while (communicators() > 0) absl::SleepFor(absl::Milliseconds(1));
}

TEST(NcclOnStandInsTest, GroupsMayBeUsedInAnyOrder) {
  const auto store = NewInProcessStore();
  OnRanks(2, [&](int rank) {
    std::vector<std::shared_ptr<ProcessGroup>> groups;
    for (const char* const name : {"a", "b"}) {
      auto group = Join(store, rank, 2, name);
      ASSERT_TRUE(group.ok()) << group.status();
      groups.push_back(*std::move(group));
    }
    if (rank == 1) std::swap(groups[0], groups[1]);
    const std::vector<at::Tensor> tensors = {On(rank, 1), On(rank, 1)};
    std::vector<std::shared_ptr<ProcessGroup::Running>> running;
    for (int i = 0; i < 2; ++i) {
      auto begun = groups[i]->BeginSum(tensors[i], What());
      ASSERT_TRUE(begun.ok()) << begun.status();
      running.push_back(*std::move(begun));
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(groups[i]->Wait(*running[i]).ok());
      EXPECT_TRUE(tensors[i].cpu().equal(at::full({1000}, 2.0f)));
    }
  });
}

// By a key as by certificates: either is said to encrypt groups.
TEST(NcclOnStandInsTest, WhatEncryptsNothingIsWarnedOf) {
  for (const bool has_key : {false, true}) {
    const auto warnings = std::make_shared<std::atomic<int>>(0);
    SetLogSink([warnings](internal::LogSeverity, absl::string_view text) {
      if (absl::StrContains(text, "NCCL encrypts nothing")) ++*warnings;
    });
    const c10::DeviceGuard guard(Gpu(0));
    const auto group = ProcessGroup::Create(
        {.name = "alone",
         .store = NewInProcessStore(),
         .rank = 0,
         .size = 1,
         .backend = "nccl",
         .cluster_key = has_key ? ClusterKey("a key of thirty-two bytes, about") : ClusterKey()});
    SetLogSink(nullptr);
    ASSERT_TRUE(group.ok()) << group.status();
    EXPECT_EQ(*warnings, has_key ? 1 : 0);
  }
}

// It has come to the rendezvous, and dies before it connects.
TEST(NcclOnStandInsTest, ARankThatDoesNotConnectIsAnErrorInTime) {
  absl::Status status;
  absl::Duration enough = absl::Milliseconds(200);
  do {
    enough *= 2;
    const auto store = NewInProcessStore();
    std::thread other([&] {
      ListedStoreOfThisStart(std::make_shared<PrefixStore>("group/gpus/", store), 1, 2,
                             Deadline::After(enough))
          .status()
          .IgnoreError();
    });
    status = Join(store, 0, 2, "gpus", {.join = enough}).status();
    other.join();
    ASSERT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  } while (!absl::StrContains(status.message(), "connecting the ranks"));
  EXPECT_TRUE(absl::StrContains(status.message(), "some rank took longer than ")) << status;
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

// NCCL connects to some ranks when a collective needs them.
TEST(NcclOnStandInsTest, ACollectiveThatCannotBeginEndsInTime) {
  const auto store = NewInProcessStore();
  absl::Notification gone;
  OnRanks(2, [&](int rank) {
    auto group = Join(store, rank, 2, "gpus", {.collective = absl::Seconds(1)});
    ASSERT_TRUE(group.ok()) << group.status();
    if (rank == 1) {
      group->reset();
      gone.Notify();
      return;
    }
    gone.WaitForNotification();
    const fake_nccl::Silence silence;
    const at::Tensor tensor = On(rank, 1);
    const absl::Status status = (*group)->BeginSum(tensor, What()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "took longer than 1s")) << status;
    EXPECT_EQ((*group)->BeginSum(tensor, What()).status(), status);
  });
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

TEST(NcclOnStandInsTest, FailEndsACollectiveThatCannotBegin) {
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const fake_nccl::Silence silence;
  absl::Status status;
  std::thread begins([&] {
    const c10::DeviceGuard guard(Gpu(0));
    status = (*group)->BeginSum(On(0, 1), What()).status();
  });
  while ((*group)->collectives() == 0) std::this_thread::yield();
  (*group)->Fail(absl::DataLossError("no disk"));
  begins.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

// Both get as far as NCCL, which lets none of them begin.
TEST(NcclOnStandInsTest, ACollectiveThatCannotBeginHoldsUpNoOtherGroup) {
  const auto store = NewInProcessStore();
  std::vector<std::shared_ptr<ProcessGroup>> groups;
  for (const char* const name : {"a", "b"}) {
    auto group = Join(store, 0, 1, name);
    ASSERT_TRUE(group.ok()) << group.status();
    groups.push_back(*std::move(group));
  }
  const int before = fake_nccl::Begun();
  const fake_nccl::Silence silence;
  std::vector<std::thread> begins;
  for (int i = 0; i < 2; ++i) {
    begins.emplace_back([&, i] {
      const c10::DeviceGuard guard(Gpu(0));
      const absl::Status status = groups[i]->BeginSum(On(0, 1), What()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    });
    while (fake_nccl::Begun() < before + i + 1) std::this_thread::yield();
  }
  for (const auto& group : groups) group->Fail(absl::DataLossError("no disk"));
  for (std::thread& thread : begins) thread.join();
}

// Knows until when rank 0 may take to say how NCCL reaches it, and when a thread had got its GPU
// before that.
class WatchedStore final : public ForwardingStore {
 public:
  WatchedStore() : ForwardingStore(NewInProcessStore()) {}
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    end_ = deadline.at();
    last_set_device_ = fake_cuda::LastSetDeviceTime();
    return ForwardingStore::Set(key, value, deadline);
  }
  Deadline::Clock::time_point end() const { return end_; }
  Deadline::Clock::time_point last_set_device() const { return last_set_device_; }

 private:
  Deadline::Clock::time_point end_, last_set_device_;
};

// The time to connect includes what the driver takes for that thread.
TEST(NcclOnStandInsTest, AGroupsThreadsGetTheirGpuWithinTheTimeToConnect) {
  const c10::DeviceGuard guard(Gpu(1));
  const auto store = std::make_shared<WatchedStore>();
  const auto timeout = std::chrono::minutes(5);
  const size_t before = fake_cuda::SetDevices();
  const NewBackend alone = NewNcclBackend({.store = store,
                                           .timeout = absl::Minutes(5),
                                           .connect_timeout = absl::FromChrono(timeout),
                                           .host = "",
                                           .failed_elsewhere = [] { return absl::OkStatus(); }});
  ASSERT_GT(fake_cuda::SetDevices(), before);
  EXPECT_LE(store->end() - timeout, store->last_set_device())
      << "it has begun when the thread had its GPU";
}

TEST(NcclOnStandInsTest, ASumThatARankDoesNotJoinEndsInTime) {
  const auto store = NewInProcessStore();
  absl::Notification over;
  OnRanks(2, [&](int rank) {
    const auto group = Join(store, rank, 2, "gpus", {.collective = absl::Seconds(1)});
    ASSERT_TRUE(group.ok()) << group.status();
    if (rank == 1) return over.WaitForNotification();
    const auto running = (*group)->BeginSum(On(rank, 1), What());
    EXPECT_TRUE(running.ok()) << running.status();
    const absl::Status status = (*group)->Wait(**running);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "took longer than 1s")) << status;
    over.Notify();
  });
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

// As where a backward waits for all of its device before it gets to Wait().
TEST(NcclOnStandInsTest, ASumThatARankDoesNotJoinLetsTheDeviceGoThoughNobodyWaitsForIt) {
  const auto store = NewInProcessStore();
  absl::Notification over;
  OnRanks(2, [&](int rank) {
    const auto group = Join(store, rank, 2, "gpus", {.collective = absl::Seconds(1)});
    ASSERT_TRUE(group.ok()) << group.status();
    if (rank == 1) return over.WaitForNotification();
    const auto running = (*group)->BeginSum(On(rank, 1), What());
    EXPECT_TRUE(running.ok()) << running.status();
    c10::cuda::device_synchronize();
    const absl::Status status = (*group)->Wait(**running);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "took longer than 1s")) << status;
    over.Notify();
  });
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

// The backend of a rank that is alone.
NewBackend Alone(Clock* clock = nullptr) {
  return NewNcclBackend({.store = NewInProcessStore(),
                         .timeout = absl::Minutes(5),
                         .connect_timeout = absl::Minutes(5),
                         .host = "",
                         .failed_elsewhere = [] { return absl::OkStatus(); },
                         .clock = clock});
}

// Its deadline is that of the sum, and not of whoever waits for it.
TEST(NcclOnStandInsTest, ASumThatHasEndedInTimeMayBeWaitedForLate) {
  FakeClock clock;
  const NewBackend alone = Alone(&clock);
  std::vector<at::Tensor> tensors = {On(0, 1)};
  const auto work = alone.backend->allreduce(tensors);
  c10::cuda::device_synchronize();
  clock.Advance(absl::Minutes(10));
  EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture()) << "its deadline was not looked at";
  EXPECT_TRUE(work->wait());
  EXPECT_EQ(fake_nccl::Communicators(), 1);
}

// The group goes on, whatever the device does when that deadline comes.
TEST(NcclOnStandInsTest, ASumThatWasWaitedForIsWatchedNoLonger) {
  FakeClock clock;
  const NewBackend alone = Alone(&clock);
  std::vector<at::Tensor> tensors = {On(0, 1)};
  const auto work = alone.backend->allreduce(tensors);
  EXPECT_NE(clock.NextTimer(), absl::InfiniteFuture());
  EXPECT_TRUE(work->wait());
  EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture());
  EXPECT_EQ(fake_nccl::Communicators(), 1);
}

TEST(NcclOnStandInsTest, ASumThatHasNotEndedInTimeIsAbortedASecondLater) {
  FakeClock clock;
  const NewBackend alone = Alone(&clock);
  std::vector<at::Tensor> tensors = {On(0, 1)};
  const fake_cuda::Standstill standstill;
  const auto work = alone.backend->allreduce(tensors);
  clock.AdvanceTo(clock.NextTimer());
  EXPECT_EQ(fake_nccl::Communicators(), 1) << "the device is asked before";
  clock.AdvanceTo(clock.NextTimer());
  EXPECT_EQ(fake_nccl::Communicators(), 0);
  EXPECT_THROW(work->wait(), std::exception);
}

// It might stand still behind the kernel that is to be aborted. The group's thread for deadlines
// has its GPU as the current one before: not the first one, which is that of each new thread.
TEST(NcclOnStandInsTest, ADeadlineAbortsWithoutSettingTheDevice) {
  bool begun = false;
  for (absl::Duration enough = absl::Milliseconds(500); !begun; enough *= 2) {
    const c10::DeviceGuard guard(Gpu(1));
    const auto group = ProcessGroup::Create({.name = "alone",
                                             .store = NewInProcessStore(),
                                             .rank = 0,
                                             .size = 1,
                                             .backend = "nccl",
                                             .timeout = enough});
    ASSERT_TRUE(group.ok()) << group.status();
    const at::Tensor tensor = On(1, 1);
    const size_t before = fake_cuda::SetDevices();
    const fake_cuda::Standstill standstill;
    const auto running = (*group)->BeginSum(tensor, What());
    begun = running.ok();
    while (fake_nccl::Communicators() > 0) std::this_thread::yield();
    if (begun) {
      EXPECT_LE(fake_nccl::SetDeviceBeforeTheEnd(), before);
    }
  }
}

// By whatever thread: NCCL would make a context on the device that is current there.
TEST(NcclOnStandInsTest, CommunicatorsAreEndedOnTheirDevice) {
  const int before = fake_nccl::EndedElsewhere();
  for (const bool fails : {false, true}) {
    absl::StatusOr<std::shared_ptr<ProcessGroup>> group;
    {
      const c10::DeviceGuard guard(Gpu(1));
      group = ProcessGroup::Create(
          {.name = "alone", .store = NewInProcessStore(), .rank = 0, .size = 1, .backend = "nccl"});
    }
    ASSERT_TRUE(group.ok()) << group.status();
    if (fails) (*group)->Fail(absl::DataLossError("no disk"));
  }
  {
    FakeClock clock;
    const c10::DeviceGuard guard(Gpu(1));
    const NewBackend alone = Alone(&clock);
    std::vector<at::Tensor> tensors = {On(1, 1)};
    const fake_cuda::Standstill standstill;
    const auto work = alone.backend->allreduce(tensors);
    std::thread timers([&] {
      clock.AdvanceTo(clock.NextTimer());
      clock.AdvanceTo(clock.NextTimer());
    });
    timers.join();
    EXPECT_EQ(fake_nccl::Communicators(), 0);
  }
  EXPECT_EQ(fake_nccl::EndedElsewhere(), before);
  EXPECT_EQ(c10::cuda::current_device(), 0);
}

// Nobody would look at its deadline, and its caller could not wait for it.
TEST(NcclOnStandInsTest, WhatRunsWhileMemoryIsShortIsAborted) {
  bool thrown = true;
  int between = 0;
  for (int nth = 0; thrown; ++nth) {
    const NewBackend alone = Alone();
    std::vector<at::Tensor> tensors = {On(0, 1)};
    const int begun = fake_nccl::Begun();
    c10::intrusive_ptr<c10d::Work> work;
    FailAllocation(nth);
    try {
      work = alone.backend->allreduce(tensors);
    } catch (const std::exception& error) {
      SCOPED_TRACE(absl::StrCat(nth, ": ", error.what()));
      const bool runs = fake_nccl::Begun() > begun;
      EXPECT_EQ(fake_nccl::Communicators(), runs ? 0 : 1);
      between += runs ? 1 : 0;
    }
    thrown = FailAllocation(-1);
    EXPECT_EQ(work == nullptr, thrown);
  }
  EXPECT_GT(between, 0) << "its timer needs memory";
}

// A graph of PyTorch's is captured so by default: CUDA refuses other threads what is not safe
// beside it, and ends it then.
TEST(NcclOnStandInsTest, GraphsOfOtherThreadsAreLeftAlone) {
  FakeClock clock;
  const NewBackend alone = Alone(&clock);
  std::vector<at::Tensor> tensors = {On(0, 1)};
  const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, /*device=*/0);
  const fake_cuda::Capture capture(stream.stream());
  std::thread other([&] {
    const auto work = alone.backend->allreduce(tensors);
    clock.AdvanceTo(clock.NextTimer());  // the device is asked
    EXPECT_TRUE(work->wait());
  });
  other.join();
  EXPECT_TRUE(capture.intact());
}

TEST(NcclOnStandInsTest, WhatNcclNoticesLaterEndsAWaitAtOnce) {
  const auto store = NewInProcessStore();
  absl::Notification over;
  OnRanks(2, [&](int rank) {
    const auto group = Join(store, rank, 2);
    ASSERT_TRUE(group.ok()) << group.status();
    if (rank == 1) return over.WaitForNotification();
    const auto running = (*group)->BeginSum(On(rank, 1), What());
    EXPECT_TRUE(running.ok()) << running.status();
    {
      const fake_nccl::Failure failure;
      const absl::Status status = (*group)->Wait(**running);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "remote process exited")) << status;
      EXPECT_EQ(fake_nccl::Communicators(), 1) << "that of the other rank alone";
    }
    over.Notify();
  });
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

// What blocks in NCCL has no deadline.
TEST(NcclOnStandInsTest, CommunicatorsThatWouldBlockAreRefused) {
  setenv("NCCL_COMM_BLOCKING", "1", 1);
  const absl::Status by_variable = Join(NewInProcessStore(), 0, 1).status();
  unsetenv("NCCL_COMM_BLOCKING");
  absl::Status by_file;
  {
    const fake_nccl::BlockingByFile file;
    by_file = Join(NewInProcessStore(), 0, 1).status();
  }
  for (const absl::Status& status : {by_variable, by_file}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "NCCL_COMM_BLOCKING")) << status;
  }
  EXPECT_EQ(fake_nccl::Communicators(), 0);
  EXPECT_TRUE(Join(NewInProcessStore(), 0, 1).ok());
}

// NCCL does not notice it where ranks share a machine.
TEST(NcclOnStandInsTest, ARankThatFailsEndsTheWaitsOfTheOthers) {
  const auto store = NewInProcessStore();
  absl::Notification waits;
  OnRanks(2, [&](int rank) {
    const auto group = Join(store, rank, 2);
    ASSERT_TRUE(group.ok()) << group.status();
    if (rank == 1) {
      waits.WaitForNotification();
      return (*group)->Fail(absl::DataLossError("no disk"));
    }
    const auto running = (*group)->BeginSum(On(rank, 1), What());
    waits.Notify();
    ASSERT_TRUE(running.ok()) << running.status();
    const absl::Status status = (*group)->Wait(**running);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "no disk")) << status;
  });
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

TEST(NcclOnStandInsTest, AGroupThatHasFailedIsMadeAgain) {
  const auto store = NewInProcessStore();
  for (int round = 0; round < 3; ++round) {
    const auto group = Join(store, 0, 1);
    ASSERT_TRUE(group.ok()) << group.status();
    const at::Tensor tensor = On(0, 3);
    const auto added = (*group)->BeginSum(tensor, What());
    ASSERT_TRUE(added.ok()) << added.status();
    EXPECT_TRUE((*group)->Wait(**added).ok());
    const auto running = (*group)->BeginSum(tensor, What());
    ASSERT_TRUE(running.ok()) << running.status();
    (*group)->Fail(absl::DataLossError("no disk"));
    EXPECT_EQ((*group)->Wait(**running).code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(fake_nccl::Communicators(), 0);
  }
}

TEST(NcclOnStandInsTest, ItIsRefusedWhileTheStreamIsCaptured) {
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const at::Tensor tensor = On(0, 1);
  const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, /*device=*/0);
  {
    const c10::StreamGuard on_stream(stream);
    const fake_cuda::Capture capture(stream.stream());
    // The stand-in has no kernels: to pack a bucket would end the process.
    for (const absl::Status& status :
         {(*group)->BeginSum(tensor, What()).status(), (*group)->Average({tensor}),
          (*group)->Broadcast({tensor}),
          GradientAverager::Create(*group, {{"w", tensor}}, {}).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "captured into a graph")) << status;
    }
    EXPECT_TRUE(capture.intact());
  }
  const auto running = (*group)->BeginSum(tensor, What());
  ASSERT_TRUE(running.ok()) << "the group has failed: " << running.status();
  EXPECT_TRUE((*group)->Wait(**running).ok());
}

// The others know nothing of it, and wait until it comes again.
TEST(NcclOnStandInsTest, ARankThatCapturesAloneComesAgainToThoseThatWaitForIt) {
  const auto store = NewInProcessStore();
  absl::Notification waits;
  OnRanks(2, [&](int rank) {
    const auto group = Join(store, rank, 2);
    ASSERT_TRUE(group.ok()) << group.status();
    const at::Tensor tensor = On(rank, 1);
    if (rank == 1) {
      waits.WaitForNotification();
      const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, /*device=*/1);
      const c10::StreamGuard on_stream(stream);
      const fake_cuda::Capture capture(stream.stream());
      const absl::Status status = (*group)->BeginSum(tensor, What()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "captured into a graph")) << status;
      EXPECT_TRUE(capture.intact());
    }
    for (int step = 0; step < 3; ++step) {
      const auto running = (*group)->BeginSum(tensor, What());
      if (rank == 0 && step == 0) waits.Notify();
      ASSERT_TRUE(running.ok()) << running.status();
      const absl::Status status = (*group)->Wait(**running);
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_TRUE(tensor.cpu().equal(at::full({1000}, 8.0f))) << "the sums of three steps";
  });
}

// CUDA does not say of the default stream that it is captured: to ask is an error, while one that
// waits for it is.
TEST(NcclOnStandInsTest, ItIsRefusedOnTheDefaultStreamWhileOneThatWaitsForItIsCaptured) {
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const at::Tensor tensor = On(0, 1);
  cudaStream_t waits = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&waits, cudaStreamDefault, 0), cudaSuccess);
  for (const int current : {0, 1}) {
    const c10::DeviceGuard guard(Gpu(current));
    const fake_cuda::Capture capture(waits);
    const absl::Status status = (*group)->BeginSum(tensor, What()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "captured into a graph")) << status;
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "it would be that of whatever comes next";
    EXPECT_TRUE(capture.intact());
  }
  EXPECT_EQ(cudaStreamDestroy(waits), cudaSuccess);
  const auto running = (*group)->BeginSum(tensor, What());
  ASSERT_TRUE(running.ok()) << "the group has failed: " << running.status();
  EXPECT_TRUE((*group)->Wait(**running).ok());
}

// NCCL does not add them, and they are the caller's own: float16 is divided before it is added. The
// stand-in has no kernels, so to divide would end the process.
TEST(NcclOnStandInsTest, WhatNcclDoesNotTakeIsRefusedBeforeItIsChanged) {
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const at::Tensor values = at::full({2}, 3, at::kHalf);
  const at::Tensor sparse =
      at::_sparse_coo_tensor_unsafe(at::arange(2).view({1, 2}).to(Gpu(0)), values.to(Gpu(0)), {4});
  for (const at::Tensor& bad : {sparse, values}) {
    for (const absl::Status& status : {(*group)->Average({bad}), (*group)->Broadcast({bad})}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "NCCL takes dense tensors of a GPU"))
          << status;
    }
  }
  EXPECT_TRUE(sparse._values().cpu().equal(values));
  EXPECT_TRUE((*group)->status().ok()) << (*group)->status();
  EXPECT_EQ((*group)->collectives(), 0);
}

// It is not left to the others' deadline: whatever CUDA is asked for fails from then on.
TEST(NcclOnStandInsTest, AnErrorOfCudaFailsTheGroupBeforeACollectiveBeginsToo) {
  const auto group = Join(NewInProcessStore(), 0, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const at::Tensor tensor = On(0, 1);
  absl::Status status;
  {
    const fake_cuda::Broken broken;
    status = (*group)->BeginSum(tensor, What()).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "an illegal memory access")) << status;
  EXPECT_EQ((*group)->status(), status);
  EXPECT_EQ(fake_nccl::Communicators(), 0);
}

// Another group of the process is in the middle of what waits for a rank.
TEST(NcclOnStandInsTest, AGroupThatWaitsForARankHoldsUpNoOther) {
  const auto store = NewInProcessStore();
  absl::Notification over;
  std::thread joins([&] {
    // Nobody else comes to connect.
    std::thread other([&] {
      const auto of_start =
          ListedStoreOfThisStart(std::make_shared<PrefixStore>("group/lonely/", store), 1, 2,
                                 Deadline::After(absl::Minutes(5)));
      ASSERT_TRUE(of_start.ok()) << of_start.status();
      over.WaitForNotification();
      EXPECT_TRUE((*of_start)->Set(kFailureKey, "rank 1 failed: no disk", Deadline::Never()).ok());
    });
    const absl::Status status = Join(store, 0, 2, "lonely").status();
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 failed: no disk")) << status;
    other.join();
  });
  while (fake_nccl::Communicators() == 0) std::this_thread::yield();
  const auto group = Join(store, 0, 1, "other");
  ASSERT_TRUE(group.ok()) << group.status();
  const at::Tensor tensor = On(0, 1);
  const auto running = (*group)->BeginSum(tensor, What());
  ASSERT_TRUE(running.ok()) << running.status();
  EXPECT_TRUE((*group)->Wait(**running).ok());
  over.Notify();
  joins.join();
}

}  // namespace
}  // namespace distgrad
