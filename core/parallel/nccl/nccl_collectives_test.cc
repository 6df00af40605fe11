// The collectives over a stand-in for NCCL that adds on the simulated accelerator, in the streams
// that it is given: so a wait that is missing is found.
#include "core/parallel/nccl/nccl_collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "core/base/deadline.h"
#include "core/base/fake_clock.h"
#include "core/parallel/nccl/nccl_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/fake_device/fake_device.h"
#include "tests/testing/no_threads.h"

namespace distgrad {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// What a test has the stand-in do, and what it saw.
struct Script {
  std::function<absl::StatusOr<bool>()> ready = [] { return true; };
  absl::Status launch;
  bool launch_throws = false;
  std::function<bool(const c10::Event&)> query = [](const c10::Event& end) { return end.query(); };
  std::function<bool()> capturing = [] { return false; };
  std::function<void()> abort = [] {};
  std::vector<std::string> calls;
  int alive = 0;
  int launching = 0;  // collectives that have not gone to the streams
};

class FakeNcclGroup final : public NcclGroup {
 public:
  explicit FakeNcclGroup(Script* script) : script_(script) { ++script_->alive; }
  ~FakeNcclGroup() override {
    Launched();
    --script_->alive;
  }

  absl::StatusOr<bool> Ready() override {
    absl::StatusOr<bool> ready = script_->ready();
    if (ready.ok() && *ready) Launched();
    return ready;
  }

  absl::Status Reduce(absl::Span<const Part> parts, size_t count, size_t root) override {
    script_->calls.push_back("reduce " + std::to_string(count) + " to " + std::to_string(root));
    if (!script_->launch.ok()) return script_->launch;
    Launching();
    const Streams streams(parts, root);
    at::Tensor sum;
    for (const Part& part : parts) {
      const at::Tensor here = Flat(part.send, count).to(parts[root].stream.device());
      sum = sum.defined() ? sum + here : here.clone();
    }
    Flat(parts[root].receive, count).copy_(sum);
    return absl::OkStatus();
  }

  absl::Status Broadcast(absl::Span<const Part> parts, size_t count, size_t root) override {
    script_->calls.push_back("broadcast " + std::to_string(count) + " from " +
                             std::to_string(root));
    if (!script_->launch.ok()) return script_->launch;
    TORCH_CHECK(!script_->launch_throws, "CUDA error: out of memory");
    Launching();
    const Streams streams(parts, root);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i != root) Flat(parts[i].receive, count).copy_(Flat(parts[root].send, count));
    }
    return absl::OkStatus();
  }

  void Abort() override {
    script_->calls.push_back("abort");
    script_->abort();
  }

 private:
  // The parts' streams are current. As in NCCL, what a stream has been given ends when its memory
  // is not used any more; here the root's stream uses all of it.
  struct Streams {
    Streams(absl::Span<const Part> parts, size_t root) : parts(parts), root(root) {
      for (const Part& part : parts) guards.emplace_back(part.stream);
    }
    ~Streams() {
      c10::Event end(parts[root].stream.device_type());
      end.record(parts[root].stream);
      for (const Part& part : parts) end.block(part.stream);
    }
    const absl::Span<const Part> parts;
    const size_t root;
    std::deque<c10::StreamGuard> guards;
  };
  static at::Tensor Flat(const at::Tensor& tensor, size_t count) {
    return tensor.as_strided({static_cast<int64_t>(count)}, {1});
  }

  // Where one of another list is launched meanwhile, devices may see the two in different orders.
  void Launching() {
    EXPECT_EQ(script_->launching, 0);
    ++script_->launching;
    launching_ = true;
  }
  void Launched() {
    if (launching_) --script_->launching;
    launching_ = false;
  }

  Script* const script_;
  bool launching_ = false;
};

class NcclCollectivesTest : public testing::Test {
 protected:
  void TearDown() override {
    collectives_ = nullptr;
    EXPECT_THAT(fake_device::TakeViolations(), IsEmpty());
  }

  NcclPlatform Platform() {
    NcclPlatform platform;
    platform.start = [this](const std::vector<c10::Device>&) {
      ++started_;
      return std::make_unique<FakeNcclGroup>(&script_);
    };
    platform.query = [this](const c10::Event& end) { return script_.query(end); };
    platform.is_capturing = [this](c10::Stream) { return script_.capturing(); };
    return platform;
  }

  NcclCollectives& Make(DeviceCollectivesOptions options = {.bucket_bytes = 256},
                        Clock* query_clock = nullptr) {
    auto communicators = NcclCommunicators::Create(
        devices_, options.timeout, Platform(), std::make_shared<NcclOrder>(), &clock_, query_clock);
    EXPECT_TRUE(communicators.ok()) << communicators.status();
    collectives_ = std::make_shared<NcclCollectives>(*std::move(communicators), options);
    return *collectives_;
  }

  // Of several types, small and large, one that is not contiguous, one empty, one to be added by
  // torch; on a stream of its own for each device, so that nothing is ordered by chance.
  TensorVector List(size_t i) {
    const auto options = at::TensorOptions(devices_[i]);
    TensorVector list;
    for (const int64_t size : {3, 5, 0, 200}) list.push_back(at::rand({size}, options));
    list.push_back(at::rand({4, 6}, options).t());
    list.push_back(at::rand({6, 40}, options).slice(1, 0, 9));
    list.push_back(at::arange(10, options.dtype(at::kLong)));
    list.push_back(at::rand({7}, options).gt(0.5));
    list.push_back(at::rand({}, options.dtype(at::kDouble)));
    return list;
  }

  static std::vector<at::Tensor> OnHost(const TensorVector& list) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : list) {
      copies.push_back(tensor.defined() ? tensor.cpu().clone() : tensor);
    }
    return copies;
  }

  Script script_;
  FakeClock clock_;
  int started_ = 0;
  const std::vector<c10::Device> devices_ = {fake_device::Device(0), fake_device::Device(1),
                                             fake_device::Device(2)};
  std::shared_ptr<NcclCollectives> collectives_;
};

TEST_F(NcclCollectivesTest, SumsAreRightOnEveryDestinationAndInStreamOrder) {
  NcclCollectives& collectives = Make();
  for (const c10::Device destination : {devices_[0], devices_[2], c10::Device(c10::kCPU)}) {
    std::deque<c10::StreamGuard> streams;  // the caller's; not the default ones
    for (int i = 0; i < 3; ++i) streams.emplace_back(fake_device::NewStream(i));
    std::vector<TensorVector> lists = {List(0), List(1), List(2)};
    std::vector<std::vector<at::Tensor>> before;
    for (const TensorVector& list : lists) before.push_back(OnHost(list));

    absl::StatusOr<TensorVector> sums = collectives.Reduce(lists, destination);
    ASSERT_TRUE(sums.ok()) << sums.status();
    for (TensorVector& list : lists) {
      // What was passed in may be written to and freed at once.
      for (at::Tensor& tensor : list) tensor.zero_();
      list.clear();
    }
    for (size_t k = 0; k < sums->size(); ++k) {
      const at::Tensor want = before[0][k] + before[1][k] + before[2][k];
      EXPECT_EQ((*sums)[k].device(), destination);
      EXPECT_TRUE((*sums)[k].add(0).cpu().equal(want.add(0))) << k;
    }
  }
  EXPECT_THAT(script_.calls, testing::Contains(HasSubstr("reduce")).Times(testing::Ge(9)));
}

TEST_F(NcclCollectivesTest, UndefinedOnesCountAsZeros) {
  NcclCollectives& collectives = Make();
  std::vector<TensorVector> lists(3, TensorVector(3));
  lists[1][0] = at::ones({4}, devices_[1]);
  lists[2][0] = at::ones({4}, devices_[2]);
  lists[2][2] = at::ones({2, 2}, devices_[2]);
  const auto sums = collectives.Reduce(lists, devices_[0]);
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_TRUE((*sums)[0].cpu().equal(at::full({4}, 2.f)));
  EXPECT_FALSE((*sums)[1].defined());
  EXPECT_TRUE((*sums)[2].cpu().equal(at::ones({2, 2})));
}

TEST_F(NcclCollectivesTest, BroadcastReachesAllFromWhereverItBegins) {
  NcclCollectives& collectives = Make();
  for (const c10::Device source : {devices_[0], devices_[1], fake_device::Device(3)}) {
    std::deque<c10::StreamGuard> streams;
    for (int i = 0; i < 4; ++i) streams.emplace_back(fake_device::NewStream(i));
    TensorVector tensors;
    for (const at::Tensor& tensor : List(0)) {
      tensors.push_back(tensor.device() == source ? tensor : tensor.to(source));
    }
    tensors.insert(tensors.begin() + 1, at::Tensor());
    const std::vector<at::Tensor> before = OnHost(tensors);
    auto copies = collectives.Broadcast(tensors);
    ASSERT_TRUE(copies.ok()) << copies.status();
    for (size_t i = 0; i < devices_.size(); ++i) {
      for (size_t k = 0; k < tensors.size(); ++k) {
        const at::Tensor& copy = (*copies)[i][k];
        ASSERT_EQ(copy.defined(), tensors[k].defined());
        if (!copy.defined()) continue;
        EXPECT_EQ(copy.device(), devices_[i]);
        EXPECT_EQ(copy.is_same(tensors[k]), source == devices_[i]);
        EXPECT_TRUE(copy.cpu().equal(before[k])) << i << " " << k;
      }
    }
    // The source may be written to at once.
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined()) tensor.zero_();
    }
  }
}

TEST_F(NcclCollectivesTest, WhatIsReadInPlaceMayBeWrittenToAtOnce) {
  NcclCollectives& collectives = Make();
  std::deque<c10::StreamGuard> streams;
  std::vector<TensorVector> lists(3);
  for (int i = 0; i < 3; ++i) {
    streams.emplace_back(fake_device::NewStream(i));
    lists[i].push_back(at::ones({1000}, devices_[i]));
  }
  ASSERT_TRUE(collectives.Reduce(lists, devices_[0]).ok());
  // Without the wait the simulated accelerator throws.
  for (TensorVector& list : lists) list[0].zero_();
  ASSERT_TRUE(collectives.Broadcast(lists[1]).ok());
  lists[1][0].zero_();
}

TEST_F(NcclCollectivesTest, ManySmallTensorsAreOneCollective) {
  NcclCollectives& collectives = Make({});
  std::vector<TensorVector> lists(3);
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 100; ++k) lists[i].push_back(at::ones({3}, devices_[i]));
  }
  ASSERT_TRUE(collectives.Reduce(lists, devices_[1]).ok());
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("to 1")));
}

// Communicators have two threads, from their begin on, for all that runs on them.
TEST_F(NcclCollectivesTest, CollectivesBeginNoThread) {
  auto communicators = NcclCommunicators::Create(devices_, absl::Minutes(5), Platform(),
                                                 std::make_shared<NcclOrder>());
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  NcclCollectives collectives(*std::move(communicators), {});
  const std::vector<TensorVector> lists = {
      {at::ones({4}, devices_[0])}, {at::ones({4}, devices_[1])}, {at::ones({4}, devices_[2])}};
  ASSERT_TRUE(collectives.Reduce(lists, devices_[0]).ok());  // what libtorch begins once
  const NoThreads no_threads;
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(collectives.Reduce(lists, devices_[0]).ok());
    EXPECT_TRUE(collectives.Broadcast(lists[1]).ok());
  }
}

TEST_F(NcclCollectivesTest, WhatIsWrongIsSaidBeforeAnythingIsLaunched) {
  NcclCollectives& collectives = Make();
  EXPECT_EQ(collectives.Reduce({{}, {}}, devices_[0]).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(collectives.Broadcast({at::ones({1}, devices_[0]), at::ones({1})}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(script_.calls, IsEmpty());
  EXPECT_TRUE(collectives.Broadcast({at::ones({1})}).ok()) << "the collectives goes on";
}

TEST_F(NcclCollectivesTest, ACollectiveThatIsRefusedAbortsAndStays) {
  NcclCollectives& collectives = Make();
  script_.launch = absl::InternalError("ncclBroadcast of hpu:1: unhandled system error");
  const absl::Status first = collectives.Broadcast({at::ones({4}, devices_[0])}).status();
  EXPECT_EQ(first.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(first.message()),
              AllOf(HasSubstr("NCCL over hpu:0, hpu:1, hpu:2: broadcast"), HasSubstr("hpu:1: un")));
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  EXPECT_EQ(collectives.Broadcast({at::ones({4}, devices_[0])}).status(), first);
  EXPECT_EQ(script_.calls.size(), 2u);
}

TEST_F(NcclCollectivesTest, ACollectiveThatThrowsAbortsAndStays) {
  NcclCollectives& collectives = Make();
  script_.launch_throws = true;
  const absl::Status first = collectives.Broadcast({at::ones({4}, devices_[0])}).status();
  EXPECT_THAT(std::string(first.message()), HasSubstr("out of memory"));
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  EXPECT_EQ(collectives.status(), first);
}

// Nobody would look at its deadline.
TEST_F(NcclCollectivesTest, WhatRunsAndCannotBeWatchedIsAborted) {
  bool thrown = true;
  for (int nth = 0; thrown; ++nth) {
    collectives_ = nullptr;
    script_ = Script();
    NcclCollectives& collectives = Make();
    script_.ready = [nth] {  // it has been launched
      fake_device::FailEvent(nth);
      return true;
    };
    const absl::Status status = collectives.Broadcast({at::ones({4}, devices_[0])}).status();
    script_.ready = [] { return true; };
    thrown = fake_device::FailEvent(-1);
    EXPECT_EQ(status.ok(), !thrown) << nth << ": " << status;
    EXPECT_EQ(collectives.status(), status);
    if (!thrown) {
      EXPECT_GT(nth, 3) << "each device has an event";
      continue;
    }
    EXPECT_THAT(std::string(status.message()), HasSubstr("an event failed"));
    EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  }
}

// A clock that has memory for some timers, and no more.
class ShortClock final : public Clock {
 public:
  explicit ShortClock(int timers) : left_(timers) {}
  absl::Time Now() override { return clock_.Now(); }
  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override {
    if (left_-- == 0) throw std::bad_alloc();
    return clock_.At(when, std::move(callback));
  }
  bool Cancel(TimerId timer) override { return clock_.Cancel(timer); }

 private:
  int left_;
  FakeClock clock_;
};

TEST_F(NcclCollectivesTest, WhatRunsAndHasNoTimerIsAborted) {
  for (const int timers : {0, 1}) {  // for deadlines, and then for the devices
    script_ = Script();
    ShortClock clock(timers);
    auto communicators = NcclCommunicators::Create(devices_, absl::Minutes(5), Platform(),
                                                   std::make_shared<NcclOrder>(), &clock);
    ASSERT_TRUE(communicators.ok()) << communicators.status();
    NcclCollectives collectives(*std::move(communicators), {});
    const absl::Status status = collectives.Broadcast({at::ones({4}, devices_[0])}).status();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(collectives.status(), status);
    EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  }
}

// With threads of its own, which its deadlines need. Whatever there is no memory for.
TEST_F(NcclCollectivesTest, AListThatThereIsNoMemoryForIsAnError) {
  bool thrown = true;
  int failures = 0;
  for (int nth = 0; thrown; ++nth) {
    std::vector<c10::Device> devices = devices_;
    NcclPlatform platform = Platform();
    auto order = std::make_shared<NcclOrder>();
    absl::StatusOr<std::shared_ptr<NcclCommunicators>> made;
    FailAllocation(nth);
    EXPECT_NO_THROW(made = NcclCommunicators::Create(std::move(devices), absl::Minutes(5),
                                                     std::move(platform), std::move(order)))
        << nth;
    thrown = FailAllocation(-1);
    EXPECT_EQ(made.ok(), !thrown) << nth << ": " << made.status();
    if (!thrown) break;
    EXPECT_EQ(made.status().code(), absl::StatusCode::kResourceExhausted) << made.status();
    ++failures;
  }
  EXPECT_GT(failures, 2) << "its threads alone need some";
}

// NCCL is not ready while it connects to a device for a later one.
TEST_F(NcclCollectivesTest, WhatHasEndedIsNotLateWhileALaterOneBegins) {
  NcclCollectives& collectives = Make({.timeout = absl::Seconds(5)});
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  script_.ready = [] { return false; };
  clock_.Advance(absl::Seconds(10));
  EXPECT_TRUE(collectives.status().ok()) << collectives.status();
  script_.ready = [] { return true; };
}

TEST_F(NcclCollectivesTest, WhatHangsOnTheDevicesIsAbortedAtItsDeadlineThoughNobodyWaits) {
  NcclCollectives& collectives = Make({.timeout = absl::Seconds(5)});
  script_.query = [](const c10::Event&) { return false; };
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  clock_.Advance(absl::Seconds(4));
  EXPECT_TRUE(collectives.status().ok());
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(collectives.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(collectives.status().message()),
              AllOf(HasSubstr("hpu:0"), HasSubstr("broadcast did not end within 5s")));
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  EXPECT_EQ(collectives.Broadcast({at::ones({4}, devices_[0])}).status(), collectives.status());
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

TEST_F(NcclCollectivesTest, AFailureLaterOnIsNoticedThoughNobodyWaits) {
  NcclCollectives& collectives = Make();
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  script_.ready = [] { return absl::InternalError("communicator of hpu:2: remote error"); };
  clock_.Advance(absl::Milliseconds(200));
  EXPECT_THAT(std::string(collectives.status().message()), HasSubstr("hpu:2"));
}

// Has the list given up as soon as the sum, whose collective has begun, is on its way to the host:
// an abort lets the copy go on.
NcclCollectives* given_up = nullptr;

std::unique_ptr<at::ObserverContext> GiveUpBeforeTheCopy(const at::RecordFunction& op) {
  if (given_up != nullptr && std::string_view(op.name()) == "aten::to") {
    std::exchange(given_up, nullptr)->Abort(absl::DeadlineExceededError("too late"));
  }
  return nullptr;
}

TEST_F(NcclCollectivesTest, TheRemainsOfAnAbortedSumAreNoResult) {
  NcclCollectives& collectives = Make();
  std::vector<TensorVector> lists;
  for (const c10::Device device : devices_) lists.push_back({at::ones({4}, device)});
  script_.ready = [&] {
    if (!script_.calls.empty()) given_up = &collectives;  // after the first launch
    return true;
  };
  const auto callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&GiveUpBeforeTheCopy));
  const auto sums = collectives.Reduce(lists, c10::kCPU);
  at::removeCallback(callback);
  EXPECT_EQ(sums.status().code(), absl::StatusCode::kDeadlineExceeded) << sums.status();
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("reduce"), "abort"));
}

TEST_F(NcclCollectivesTest, NothingIsWatchedWhileNothingRuns) {
  NcclCollectives& collectives = Make();
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

// As at the end of a process, when CUDA is gone soon.
TEST_F(NcclCollectivesTest, NothingIsAskedOfTheDevicesOnceAllHaveLeft) {
  NcclPool pool(Platform(), &clock_);
  const auto communicators = pool.Get(devices_, absl::Seconds(5));
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  NcclCollectives collectives(*communicators, {});
  script_.query = [](const c10::Event&) { return false; };
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  EXPECT_NE(clock_.NextTimer(), absl::InfiniteFuture());
  pool.Leave(Deadline::Never());
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
  // Nor by a list that another thread makes meanwhile.
  const auto later = pool.Get({devices_[2], devices_[1]}, absl::Seconds(5));
  ASSERT_TRUE(later.ok()) << later.status();
  ASSERT_TRUE(NcclCollectives(*later, {}).Broadcast({at::ones({4}, devices_[1])}).ok());
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
  script_.query = [](const c10::Event& end) { return end.query(); };
}

// Who asks may wait for the devices, until a deadline ends that.
TEST_F(NcclCollectivesTest, WhoIsAskingTheDevicesIsWaitedForAndDeadlinesHoldMeanwhile) {
  FakeClock queries;
  absl::Notification asked, aborted;
  script_.query = [&](const c10::Event&) {
    asked.Notify();
    aborted.WaitForNotification();
    return false;
  };
  script_.abort = [&] { aborted.Notify(); };
  NcclCollectives& collectives = Make({.timeout = absl::Seconds(5)}, &queries);
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  std::thread asks([&] { queries.Advance(absl::Milliseconds(100)); });
  asked.WaitForNotification();
  std::thread leaves([&] {
    while (!collectives.communicators()->TryLeave()) std::this_thread::yield();
  });
  clock_.Advance(absl::Seconds(7));
  leaves.join();
  asks.join();
  EXPECT_EQ(collectives.status().code(), absl::StatusCode::kDeadlineExceeded);
  for (FakeClock* const clock : {&clock_, &queries}) {
    EXPECT_EQ(clock->NextTimer(), absl::InfiniteFuture());
  }
}

// The driver may never let NCCL end it.
TEST_F(NcclCollectivesTest, AnAbortThatDoesNotEndHoldsUpNoEndOfTheProcess) {
  NcclPool pool(Platform(), &clock_);
  const auto first = pool.Get(devices_, absl::Minutes(5));
  const auto second = pool.Get({devices_[2], devices_[1]}, absl::Minutes(5));
  ASSERT_TRUE(first.ok() && second.ok());
  script_.query = [](const c10::Event&) { return false; };
  ASSERT_TRUE(NcclCollectives(*second, {}).Broadcast({at::ones({4}, devices_[1])}).ok());
  absl::Notification aborts, end;
  script_.abort = [&] {
    aborts.Notify();
    end.WaitForNotification();
  };
  std::thread holder([&] { (*first)->Abort(absl::InternalError("the test aborts it")); });
  aborts.WaitForNotification();
  // All of it has passed: each is tried once.
  pool.Leave(Deadline::After(absl::ZeroDuration()));
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture()) << "the other one has left";
  end.Notify();
  holder.join();
  EXPECT_TRUE((*first)->TryLeave());
  script_.query = [](const c10::Event& end) { return end.query(); };
}

TEST_F(NcclCollectivesTest, SettingUpHasADeadlineToo) {
  script_.ready = [this]() -> absl::StatusOr<bool> {
    clock_.Advance(absl::Seconds(3));
    return false;
  };
  const absl::Status status = NcclCommunicators::Create(devices_, absl::Seconds(5), Platform(),
                                                        std::make_shared<NcclOrder>(), &clock_)
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("setting up did not end within 5s"));
  EXPECT_THAT(script_.calls, ElementsAre("abort"));
}

TEST_F(NcclCollectivesTest, AbortEndsACallThatIsWaiting) {
  NcclCollectives& collectives = Make();
  script_.ready = [] { return false; };
  // From another thread, while the call waits for a communicator that is never ready.
  absl::Status status;
  std::thread caller(
      [&] { status = collectives.Broadcast({at::ones({4}, devices_[0])}).status(); });
  collectives.Abort(absl::CancelledError("replica 1 failed"));
  caller.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(std::string(status.message()), HasSubstr("replica 1 failed"));
  collectives.Abort(absl::InternalError("too late"));
  EXPECT_EQ(collectives.status().code(), absl::StatusCode::kCancelled);
}

// As where the driver waits for a kernel that waits for another device: only an abort ends that.
TEST_F(NcclCollectivesTest, ADeadlineHoldsWhereTheDevicesDoNotAnswer) {
  FakeClock queries;
  absl::Notification asked, answer;
  script_.query = [&](const c10::Event&) {
    asked.Notify();
    answer.WaitForNotification();
    return false;
  };
  NcclCollectives& collectives = Make({.timeout = absl::Seconds(5)}, &queries);
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  std::thread stands([&] { queries.Advance(absl::Milliseconds(100)); });
  asked.WaitForNotification();
  clock_.Advance(absl::Seconds(4));
  EXPECT_TRUE(collectives.status().ok());
  clock_.Advance(absl::Seconds(3));
  EXPECT_EQ(collectives.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  answer.Notify();
  stands.join();
}

TEST_F(NcclCollectivesTest, WhileAGraphIsCapturedAllIsRefusedAndNothingAborted) {
  NcclCollectives& collectives = Make();
  script_.capturing = [] { return true; };
  const std::vector<TensorVector> lists = {
      {at::ones({4}, devices_[0])}, {at::ones({4}, devices_[1])}, {at::ones({4}, devices_[2])}};
  for (const absl::Status& status : {collectives.Reduce(lists, devices_[0]).status(),
                                     collectives.Broadcast(lists[0]).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("hpu:0"), HasSubstr("captured into a graph")));
  }
  EXPECT_THAT(script_.calls, IsEmpty());
  script_.capturing = [] { return false; };
  EXPECT_TRUE(collectives.Reduce(lists, devices_[0]).ok());
}

// As behind a kernel that has read invalid memory.
TEST_F(NcclCollectivesTest, AnErrorOfCudaIsAStatusBeforeAnythingIsLaunchedToo) {
  NcclCollectives& collectives = Make();
  script_.capturing = []() -> bool { TORCH_CHECK(false, "CUDA error: an illegal memory access"); };
  const std::vector<TensorVector> lists = {
      {at::ones({4}, devices_[0])}, {at::ones({4}, devices_[1])}, {at::ones({4}, devices_[2])}};
  for (const absl::Status& status : {collectives.Reduce(lists, devices_[0]).status(),
                                     collectives.Broadcast(lists[0]).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("NCCL over hpu:0"), HasSubstr("an illegal memory access")));
  }
  EXPECT_THAT(script_.calls, IsEmpty());
}

TEST_F(NcclCollectivesTest, CommunicatorsAreOfDevicesWhateverTheOptions) {
  NcclPool pool(Platform(), &clock_);
  const auto first = pool.Get(devices_, absl::Seconds(5));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*first, pool.Get(devices_, absl::Seconds(7)).value());
  NcclCollectives slow(*first, {.bucket_bytes = 16, .timeout = absl::Seconds(50)});
  NcclCollectives fast(*first, {.timeout = absl::Seconds(5)});
  ASSERT_TRUE(slow.Broadcast({at::ones({40}, devices_[0]), at::ones({40}, devices_[0])}).ok());
  ASSERT_TRUE(fast.Broadcast({at::ones({40}, devices_[0]), at::ones({40}, devices_[0])}).ok());
  EXPECT_EQ(script_.calls.size(), 3u) << "bucket sizes are their own";
  script_.query = [](const c10::Event&) { return false; };
  clock_.Advance(absl::Seconds(4));
  EXPECT_TRUE(fast.status().ok());
  clock_.Advance(absl::Seconds(2));
  EXPECT_THAT(std::string(slow.status().message()), HasSubstr("did not end within 5s"))
      << "the one that has less time stands behind the other";
  EXPECT_NE(*first, pool.Get(devices_, absl::Seconds(5)).value()) << "these have failed";
  EXPECT_EQ(started_, 2);
}

TEST_F(NcclCollectivesTest, NoMoreAreKeptThanAreOfUse) {
  NcclPool pool(Platform(), &clock_);
  const auto mine = pool.Get(devices_, absl::Seconds(5));
  ASSERT_TRUE(mine.ok()) << mine.status();
  // All orders of all subsets of four devices but one: 59 lists.
  std::vector<std::vector<c10::Device>> lists;
  for (int code = 0; code < 4 * 4 * 4 * 4; ++code) {
    std::vector<c10::Device> list;
    for (int rest = code; rest > 0; rest /= 4) {
      const c10::Device device = fake_device::Device(rest % 4);
      if (std::find(list.begin(), list.end(), device) == list.end()) list.push_back(device);
    }
    if (list.size() > 1 && list != devices_) lists.push_back(list);
  }
  for (const auto& list : lists) {
    ASSERT_TRUE(pool.Get(list, absl::Seconds(5)).ok());
    EXPECT_LE(script_.alive, static_cast<int>(NcclPool::kMostIdle) + 1);
  }
  const int before = started_;
  EXPECT_EQ(*mine, pool.Get(devices_, absl::Seconds(5)).value()) << "somebody has these";
  EXPECT_TRUE(pool.Get(lists.back(), absl::Seconds(5)).ok());
  EXPECT_EQ(started_, before) << "what was used last is kept";
  EXPECT_TRUE(NcclCollectives(*mine, {}).Broadcast({at::ones({4}, devices_[0])}).ok());
}

// As where the driver stands still behind a kernel that only the abort of another list would end.
TEST_F(NcclCollectivesTest, AnAbortThatDoesNotEndHoldsUpNoOtherList) {
  NcclPool pool(Platform(), &clock_);
  const auto first = pool.Get(devices_, absl::Minutes(5));
  ASSERT_TRUE(first.ok()) << first.status();
  absl::Notification aborts, end, asks, got;
  script_.abort = [&] {
    aborts.Notify();
    end.WaitForNotification();
  };
  std::thread aborting([&] { (*first)->Abort(absl::CancelledError("replica 1 failed")); });
  aborts.WaitForNotification();
  // Whoever wants the list itself waits for its abort, and then gets another one.
  std::thread same([&] {
    asks.Notify();
    const auto again = pool.Get(devices_, absl::Minutes(5));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_NE(*again, *first);
  });
  asks.WaitForNotification();
  std::thread others([&] {
    for (int i = 0; i < 1000; ++i) {
      EXPECT_TRUE(pool.Get({devices_[2], devices_[1]}, absl::Minutes(5)).ok());
      std::this_thread::yield();
    }
    got.Notify();
  });
  EXPECT_TRUE(got.WaitForNotificationWithTimeout(absl::Minutes(1))) << "it waits for the abort";
  end.Notify();
  for (std::thread* const thread : {&aborting, &same, &others}) thread->join();
  EXPECT_EQ(started_, 3);
}

// While it is aborted, NCCL may wait for the devices, on which nothing is to begin before that
// ends.
TEST_F(NcclCollectivesTest, TheTurnLastsUntilTheAbortHasEndedAndOthersLoseTheirCallsAlone) {
  NcclPool pool(Platform(), &clock_);
  const auto first = pool.Get(devices_, absl::Minutes(5));
  const auto second = pool.Get({devices_[2], devices_[1]}, absl::Minutes(5));
  ASSERT_TRUE(first.ok() && second.ok());
  absl::Notification aborts, end;
  script_.ready = [] { return absl::InternalError("communicator of hpu:1: remote error"); };
  script_.abort = [&] {
    aborts.Notify();
    end.WaitForNotification();
  };
  std::thread holder([&] {
    const absl::Status status =
        NcclCollectives(*first, {}).Broadcast({at::ones({4}, devices_[1])}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  });
  aborts.WaitForNotification();
  NcclCollectives waits(*second, {.timeout = absl::Milliseconds(20)});
  const absl::Status late = waits.Broadcast({at::ones({4}, devices_[1])}).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_THAT(std::string(late.message()),
              AllOf(HasSubstr("as 'NCCL over hpu:0, hpu:1, hpu:2: broadcast' has it"),
                    HasSubstr("nothing was begun")));
  EXPECT_TRUE(waits.status().ok()) << waits.status();
  end.Notify();
  holder.join();
  script_.ready = [] { return true; };
  EXPECT_TRUE(waits.Broadcast({at::ones({4}, devices_[1])}).ok());
}

// Two lists that share devices: where each thread began its own on one device first, each would
// wait for the other one.
TEST_F(NcclCollectivesTest, ListsThatShareDevicesTakeTurns) {
  NcclPool pool(Platform(), &clock_);
  const auto first = pool.Get(devices_, absl::Minutes(5));
  const auto second = pool.Get({devices_[2], devices_[1]}, absl::Minutes(5));
  ASSERT_TRUE(first.ok() && second.ok());
  const auto run = [&](const std::shared_ptr<NcclCommunicators>& communicators) {
    NcclCollectives collectives(communicators, {});
    for (int i = 0; i < 50; ++i) {
      EXPECT_TRUE(collectives.Broadcast({at::ones({4}, devices_[1])}).ok());
    }
  };
  std::thread other([&] { run(*second); });
  run(*first);
  other.join();
  EXPECT_EQ((*first)->order().StreamOf(devices_[1]), (*second)->order().StreamOf(devices_[1]));
}

TEST_F(NcclCollectivesTest, TheWaitForATurnHasADeadlineAndEndsNothing) {
  NcclPool pool(Platform(), &clock_);
  const auto first = pool.Get(devices_, absl::Minutes(5));
  const auto second = pool.Get({devices_[2], devices_[1]}, absl::Minutes(5));
  ASSERT_TRUE(first.ok() && second.ok());
  absl::Notification has_turn;
  script_.ready = [&] {
    if (!has_turn.HasBeenNotified()) has_turn.Notify();
    return false;
  };
  std::thread holder([&] {
    const absl::Status status =
        NcclCollectives(*first, {}).Broadcast({at::ones({4}, devices_[1])}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  });
  has_turn.WaitForNotification();

  const absl::Duration timeout = absl::Milliseconds(20);
  NcclCollectives waits(*second, {.timeout = timeout});
  const std::vector<TensorVector> lists = {{at::ones({4}, devices_[2])},
                                           {at::ones({4}, devices_[1])}};
  for (const absl::Status& status : {
           waits.Reduce(lists, devices_[1]).status(),
           waits.Broadcast(lists[0]).status(),
           pool.Get({devices_[0], devices_[2]}, timeout).status(),
       }) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("its turn did not come within 20ms"),
                      HasSubstr("as 'NCCL over hpu:0, hpu:1, hpu:2: broadcast' has it")));
  }
  EXPECT_EQ(started_, 2);
  EXPECT_EQ(*second, pool.Get((*second)->devices(), timeout).value()) << "it needs no turn";

  (*first)->Abort(absl::CancelledError("replica 1 failed"));
  holder.join();
  script_.ready = [] { return true; };
  EXPECT_TRUE(waits.Reduce(lists, devices_[1]).ok());
  EXPECT_TRUE(pool.Get({devices_[0], devices_[2]}, timeout).ok());
}

}  // namespace
}  // namespace distgrad
