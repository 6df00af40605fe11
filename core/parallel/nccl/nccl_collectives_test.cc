// The collectives over a stand-in for NCCL that adds on the simulated accelerator, in the streams
// that it is given: so a wait that is missing is found.
#include "core/parallel/nccl/nccl_collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/fake_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_device/fake_device.h"

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
  std::vector<std::string> calls;
};

class FakeNcclGroup final : public NcclGroup {
 public:
  explicit FakeNcclGroup(Script* script) : script_(script) {}

  absl::StatusOr<bool> Ready() override { return script_->ready(); }

  absl::Status Reduce(absl::Span<const Part> parts, size_t count, size_t root) override {
    script_->calls.push_back("reduce " + std::to_string(count) + " to " + std::to_string(root));
    if (!script_->launch.ok()) return script_->launch;
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
    const Streams streams(parts, root);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i != root) Flat(parts[i].receive, count).copy_(Flat(parts[root].send, count));
    }
    return absl::OkStatus();
  }

  void Abort() override { script_->calls.push_back("abort"); }

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

  Script* const script_;
};

class NcclCollectivesTest : public testing::Test {
 protected:
  void TearDown() override {
    collectives_ = nullptr;
    EXPECT_THAT(fake_device::TakeViolations(), IsEmpty());
  }

  NcclCollectives& DeviceCollectives(DeviceCollectivesOptions options = {.bucket_bytes = 256}) {
    const auto start = [this](const std::vector<c10::Device>& devices) {
      EXPECT_EQ(devices, devices_);
      return std::make_unique<FakeNcclGroup>(&script_);
    };
    auto collectives = NcclCollectives::Create(devices_, options, start, &clock_);
    EXPECT_TRUE(collectives.ok()) << collectives.status();
    collectives_ = *std::move(collectives);
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
  const std::vector<c10::Device> devices_ = {fake_device::Device(0), fake_device::Device(1),
                                             fake_device::Device(2)};
  std::shared_ptr<NcclCollectives> collectives_;
};

TEST_F(NcclCollectivesTest, SumsAreRightOnEveryDestinationAndInStreamOrder) {
  NcclCollectives& collectives = DeviceCollectives();
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
  NcclCollectives& collectives = DeviceCollectives();
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
  NcclCollectives& collectives = DeviceCollectives();
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
  NcclCollectives& collectives = DeviceCollectives();
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
  NcclCollectives& collectives = DeviceCollectives({});
  std::vector<TensorVector> lists(3);
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 100; ++k) lists[i].push_back(at::ones({3}, devices_[i]));
  }
  ASSERT_TRUE(collectives.Reduce(lists, devices_[1]).ok());
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("to 1")));
}

TEST_F(NcclCollectivesTest, WhatIsWrongIsSaidBeforeAnythingIsLaunched) {
  NcclCollectives& collectives = DeviceCollectives();
  EXPECT_EQ(collectives.Reduce({{}, {}}, devices_[0]).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(collectives.Broadcast({at::ones({1}, devices_[0]), at::ones({1})}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(script_.calls, IsEmpty());
  EXPECT_TRUE(collectives.Broadcast({at::ones({1})}).ok()) << "the collectives goes on";
}

TEST_F(NcclCollectivesTest, ACollectiveThatIsRefusedAbortsAndStays) {
  NcclCollectives& collectives = DeviceCollectives();
  script_.launch = absl::InternalError("ncclBroadcast of hpu:1: unhandled system error");
  const absl::Status first = collectives.Broadcast({at::ones({4}, devices_[0])}).status();
  EXPECT_EQ(first.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(first.message()),
              AllOf(HasSubstr("NCCL over hpu:0, hpu:1, hpu:2: broadcast"), HasSubstr("hpu:1: un")));
  EXPECT_THAT(script_.calls, ElementsAre(HasSubstr("broadcast"), "abort"));
  EXPECT_EQ(collectives.Broadcast({at::ones({4}, devices_[0])}).status(), first);
  EXPECT_EQ(script_.calls.size(), 2u);
}

TEST_F(NcclCollectivesTest, WhatHangsOnTheDevicesIsAbortedAtItsDeadlineThoughNobodyWaits) {
  NcclCollectives& collectives = DeviceCollectives({.timeout = absl::Seconds(5)});
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  script_.ready = [] { return false; };
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
  NcclCollectives& collectives = DeviceCollectives();
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  script_.ready = [] { return absl::InternalError("communicator of hpu:2: remote error"); };
  clock_.Advance(absl::Milliseconds(200));
  EXPECT_THAT(std::string(collectives.status().message()), HasSubstr("hpu:2"));
}

TEST_F(NcclCollectivesTest, NothingIsWatchedWhileNothingRuns) {
  NcclCollectives& collectives = DeviceCollectives();
  ASSERT_TRUE(collectives.Broadcast({at::ones({4}, devices_[0])}).ok());
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(clock_.NextTimer(), absl::InfiniteFuture());
}

TEST_F(NcclCollectivesTest, SettingUpHasADeadlineToo) {
  script_.ready = [this]() -> absl::StatusOr<bool> {
    clock_.Advance(absl::Seconds(3));
    return false;
  };
  const auto start = [this](const std::vector<c10::Device>&) {
    return std::make_unique<FakeNcclGroup>(&script_);
  };
  const absl::Status status =
      NcclCollectives::Create(devices_, {.timeout = absl::Seconds(5)}, start, &clock_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("setting up did not end within 5s"));
  EXPECT_THAT(script_.calls, ElementsAre("abort"));
}

TEST_F(NcclCollectivesTest, AbortEndsACallThatIsWaiting) {
  NcclCollectives& collectives = DeviceCollectives();
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

}  // namespace
}  // namespace distgrad
