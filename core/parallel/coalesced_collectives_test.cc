// Reductions and broadcasts over devices, and the order of the devices' streams.
#include "core/parallel/coalesced_collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "core/parallel/new_device_collectives.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

using at::Tensor;
using testing::HasSubstr;
using testing::IsEmpty;

const c10::Device kHost(c10::kCPU);

struct Case {
  std::string name;
  std::vector<c10::Device> devices;
  c10::Device destination;
};

class CoalescedCollectivesTest : public testing::TestWithParam<Case> {
 protected:
  void TearDown() override { EXPECT_THAT(fake_device::TakeViolations(), IsEmpty()); }

  // Many small ones, one that is larger than a bucket (and than a piece of one), and odd ones.
  TensorVector List(c10::Device device) const {
    const auto options = at::TensorOptions(device);
    TensorVector list;
    for (int i = 0; i < 20; ++i) list.push_back(at::rand({i, 3}, options));
    list.push_back(at::rand({300, 300}, options));
    list.push_back(at::rand({4, 6}, options).t());
    list.push_back(at::rand({3}, options).to(at::kDouble));
    // In the middle of what it is a part of.
    list.push_back(at::rand({302, 300}, options).narrow(0, 1, 300));
    return list;
  }

  const std::vector<c10::Device> devices_ = GetParam().devices;
  const c10::Device destination_ = GetParam().destination;
  CoalescedCollectives collectives_{devices_, {.bucket_bytes = 512}};
};

INSTANTIATE_TEST_SUITE_P(
    Lists, CoalescedCollectivesTest,
    testing::Values(
        Case{"Hosts", {kHost, kHost, kHost}, kHost}, Case{"OneHost", {kHost}, kHost},
        Case{"Accelerators",
             {fake_device::Device(0), fake_device::Device(1), fake_device::Device(2)},
             fake_device::Device(0)},
        Case{"ToTheLast", {fake_device::Device(0), fake_device::Device(1)}, fake_device::Device(1)},
        Case{"Twice", {fake_device::Device(1), fake_device::Device(1)}, fake_device::Device(1)},
        Case{"ToTheHost", {fake_device::Device(0), kHost}, kHost},
        Case{"Elsewhere", {fake_device::Device(0), kHost}, fake_device::Device(3)}),
    [](const auto& info) { return info.param.name; });

TEST_P(CoalescedCollectivesTest, AddsInTheOrderOfTheDevices) {
  std::vector<TensorVector> lists;
  for (const c10::Device device : devices_) lists.push_back(List(device));
  std::vector<TensorVector> before = lists;
  for (TensorVector& list : before) {
    for (Tensor& tensor : list) tensor = tensor.cpu().clone();
  }
  const absl::StatusOr<TensorVector> sums = collectives_.Reduce(lists, destination_);
  ASSERT_TRUE(sums.ok()) << sums.status();
  for (size_t k = 0; k < sums->size(); ++k) {
    Tensor want = before[0][k];
    for (size_t i = 1; i < lists.size(); ++i) want = want + before[i][k];
    EXPECT_EQ((*sums)[k].device(), destination_);
    EXPECT_TRUE((*sums)[k].cpu().equal(want)) << k;
    for (size_t i = 0; i < lists.size(); ++i) {
      EXPECT_TRUE(lists[i][k].cpu().equal(before[i][k])) << "changed: " << k;
    }
  }
}

TEST_P(CoalescedCollectivesTest, UndefinedCountsAsZeros) {
  std::vector<TensorVector> lists;
  for (const c10::Device device : devices_) lists.push_back(List(device));
  for (TensorVector& list : lists) list[5] = Tensor();
  lists[0][6] = lists[0][20] = Tensor();
  const absl::StatusOr<TensorVector> sums = collectives_.Reduce(lists, destination_);
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_FALSE((*sums)[5].defined());
  for (const size_t k : {size_t{6}, size_t{20}}) {
    if (devices_.size() == 1) {
      EXPECT_FALSE((*sums)[k].defined());
      continue;
    }
    Tensor want = lists[1][k].cpu();
    for (size_t i = 2; i < lists.size(); ++i) want = want + lists[i][k].cpu();
    EXPECT_TRUE((*sums)[k].cpu().equal(want)) << k;
  }
}

TEST_P(CoalescedCollectivesTest, BroadcastsIntoNewMemoryElsewhere) {
  TensorVector tensors = List(destination_);
  tensors[3] = Tensor();
  const absl::StatusOr<std::vector<TensorVector>> lists = collectives_.Broadcast(tensors);
  ASSERT_TRUE(lists.ok()) << lists.status();
  ASSERT_EQ(lists->size(), devices_.size());
  for (size_t i = 0; i < devices_.size(); ++i) {
    for (size_t k = 0; k < tensors.size(); ++k) {
      const Tensor& copy = (*lists)[i][k];
      ASSERT_EQ(copy.defined(), k != 3);
      if (k == 3) continue;
      EXPECT_EQ(copy.device(), devices_[i]);
      EXPECT_TRUE(copy.cpu().equal(tensors[k].cpu())) << k;
      EXPECT_EQ(copy.strides(), tensors[k].strides()) << k;
      EXPECT_EQ(copy.is_same(tensors[k]), devices_[i] == destination_);
    }
  }
}

TEST_P(CoalescedCollectivesTest, SparseOnesAreAddedSparseAndToDenseOnes) {
  if (!destination_.is_cpu() || devices_[0] != kHost) GTEST_SKIP() << "the fake has no sparse";
  std::vector<TensorVector> lists;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const Tensor sparse = at::ones({3}).to_sparse(), dense = at::ones({3});
    lists.push_back({sparse, i % 2 == 0 ? sparse : dense, dense});
  }
  const absl::StatusOr<TensorVector> sums = collectives_.Reduce(lists, destination_);
  ASSERT_TRUE(sums.ok()) << sums.status();
  const Tensor want = at::ones({3}) * static_cast<int64_t>(devices_.size());
  EXPECT_TRUE((*sums)[0].is_sparse());
  for (const Tensor& sum : *sums) EXPECT_TRUE(sum.to_dense().equal(want));
}

TEST_P(CoalescedCollectivesTest, SaysWhichTensorIsNotAsItShouldBe) {
  std::vector<TensorVector> lists;
  for (const c10::Device device : devices_) lists.push_back(List(device));
  EXPECT_THAT(collectives_.Reduce({}, destination_).status().message(), HasSubstr("0 lists for"));
  lists.back()[2] = at::ones({2}, at::TensorOptions(fake_device::Device(3)));
  EXPECT_THAT(collectives_.Reduce(lists, destination_).status().message(),
              HasSubstr("tensor 2 of list"));
  if (devices_.size() > 1) {
    lists.back()[2] = at::ones({7}, at::TensorOptions(devices_.back()));
    EXPECT_THAT(collectives_.Reduce(lists, destination_).status().message(),
                HasSubstr("Float [7], and another list's Float [2, 3]"));
    lists.back().pop_back();
    lists.back()[2] = Tensor();
    EXPECT_THAT(collectives_.Reduce(lists, destination_).status().message(),
                HasSubstr("has 23 tensors"));
    lists.assign(devices_.size(), {});
    lists.back() = {at::ones({2}, at::TensorOptions(devices_.back()))};
    EXPECT_THAT(collectives_.Reduce(lists, destination_).status().message(),
                HasSubstr("has 1 tensors, and list 0 0"));
  }
  EXPECT_THAT(
      collectives_.Broadcast({at::ones(1), at::ones(1, at::TensorOptions(fake_device::Device(3)))})
          .status()
          .message(),
      HasSubstr("tensor 1 is on hpu:3"));
}

TEST_P(CoalescedCollectivesTest, FailsOnceAborted) {
  collectives_.Abort(absl::UnavailableError("a peer is gone"));
  collectives_.Abort(absl::InternalError("second"));
  EXPECT_EQ(collectives_.Broadcast({}).status(), absl::UnavailableError("a peer is gone"));
  EXPECT_EQ(collectives_.Reduce({}, destination_).status(),
            absl::UnavailableError("a peer is gone"));
}

// Each device's work is on a stream of its own that nobody waits for but the collectives.
TEST(CoalescedCollectivesStreams, OrdersTheStreamsOfTheDevices) {
  const std::vector<c10::Device> devices = {fake_device::Device(0), fake_device::Device(1)};
  CoalescedCollectives collectives(devices, {});
  const c10::MultiStreamGuard guard({fake_device::NewStream(0), fake_device::NewStream(1)});
  std::vector<TensorVector> lists;
  for (const c10::Device device : devices) {
    const auto options = at::TensorOptions(device);
    lists.push_back({at::ones({3}, options) * 2, at::ones({2}, options), Tensor()});
  }
  absl::StatusOr<TensorVector> sums = collectives.Reduce(lists, devices[0]);
  ASSERT_TRUE(sums.ok()) << sums.status();
  lists.clear();
  EXPECT_TRUE((*sums)[0].cpu().equal(at::ones({3}) * 4));
  absl::StatusOr<std::vector<TensorVector>> copies = collectives.Broadcast(*sums);
  ASSERT_TRUE(copies.ok()) << copies.status();
  sums->clear();
  EXPECT_TRUE(((*copies)[1][0] + 1).cpu().equal(at::ones({3}) * 5));
  EXPECT_THAT(fake_device::TakeViolations(), IsEmpty());
}

TEST(NewDeviceCollectives, NeedsDevices) {
  EXPECT_EQ(NewDeviceCollectives({}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*NewDeviceCollectives({kHost, kHost}))->devices().size(), 2u);
}

}  // namespace
}  // namespace distgrad
