// Copies for devices and sums over them, with their first and second derivatives.
#include "core/parallel/broadcast.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/parallel/new_device_collectives.h"
#include "core/tensor/exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

using at::Tensor;
using testing::IsEmpty;

const c10::Device kHost(c10::kCPU);

class BroadcastTest : public testing::TestWithParam<std::vector<c10::Device>> {
 protected:
  void TearDown() override { EXPECT_THAT(fake_device::TakeViolations(), IsEmpty()); }

  Tensor Leaf(std::vector<int64_t> sizes) const {
    return at::rand(sizes, at::TensorOptions(GetParam()[0]).dtype(at::kDouble)).requires_grad_();
  }
};

INSTANTIATE_TEST_SUITE_P(Lists, BroadcastTest,
                         testing::Values(std::vector<c10::Device>{kHost, kHost, kHost},
                                         std::vector<c10::Device>{fake_device::Device(0),
                                                                  fake_device::Device(1)},
                                         std::vector<c10::Device>{fake_device::Device(2), kHost,
                                                                  fake_device::Device(2)}));

TEST_P(BroadcastTest, GradientsOfAllCopiesAddUp) {
  const Tensor a = Leaf({2, 3}), b = Leaf({4}), frozen = Leaf({2}).detach();
  const std::vector<TensorVector> copies = Broadcast({a, frozen, b, Tensor()}, GetParam());
  std::vector<Tensor> losses;
  Tensor want = at::zeros({2, 3}, at::kDouble);
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_EQ(copies[i][0].device(), GetParam()[i]);
    EXPECT_FALSE(copies[i][0].is_alias_of(a));
    EXPECT_TRUE(copies[i][0].cpu().equal(a.cpu()));
    EXPECT_FALSE(copies[i][1].requires_grad());
    EXPECT_FALSE(copies[i][3].defined());
    const Tensor weight = at::rand({2, 3}, at::kDouble);
    want = i == 0 ? weight : want + weight;
    losses.push_back((copies[i][0] * weight.to(GetParam()[i])).sum().cpu());
  }
  Tensor loss = losses[0];
  for (size_t i = 1; i < losses.size(); ++i) loss = loss + losses[i];
  torch::autograd::backward({loss});
  EXPECT_TRUE(a.grad().cpu().equal(want));
  EXPECT_FALSE(b.grad().defined());  // used by none: no gradient, rather than zeros
}

TEST_P(BroadcastTest, DifferentiatesTwice) {
  const Tensor t = Leaf({3});
  const auto device = GetParam()[0];
  std::vector<Tensor> cubes;
  for (const Tensor& copy : Broadcast(t, GetParam())) cubes.push_back(copy.pow(3));
  const auto n = static_cast<double>(cubes.size());
  const Tensor sum = ReduceAdd(cubes, device);
  EXPECT_EQ(sum.device(), device);
  EXPECT_TRUE(at::allclose(sum.cpu(), n * t.cpu().pow(3)));
  const Tensor first = torch::autograd::grad({sum.sum()}, {t}, {}, true, true)[0];
  EXPECT_TRUE(at::allclose(first.cpu(), 3 * n * t.cpu().pow(2)));
  const Tensor second = torch::autograd::grad({first.sum()}, {t}, {}, true, true)[0];
  EXPECT_TRUE(at::allclose(second.cpu(), 6 * n * t.cpu()));
  const Tensor third = torch::autograd::grad({second.sum()}, {t})[0];
  EXPECT_TRUE(at::allclose(third.cpu(), at::full({3}, 6 * n, at::kDouble)));
}

TEST_P(BroadcastTest, ReduceAddGivesEachSummandTheGradient) {
  std::vector<TensorVector> lists;
  for (const c10::Device device : GetParam()) {
    const auto options = at::TensorOptions(device).dtype(at::kDouble);
    lists.push_back({at::rand({2}, options).requires_grad_(), at::rand({3}, options), Tensor()});
  }
  lists[1][1] = Tensor();
  const TensorVector sums = ReduceAdd(lists);
  EXPECT_EQ(sums[0].device(), GetParam()[0]);
  EXPECT_TRUE(sums[0].requires_grad());
  EXPECT_FALSE(sums[1].requires_grad());
  EXPECT_FALSE(sums[2].defined());
  torch::autograd::backward({(sums[0] * 5).sum()});
  for (const TensorVector& list : lists) {
    EXPECT_TRUE(list[0].grad().cpu().equal(at::full({2}, 5, at::kDouble)));
  }
}

TEST(Broadcast, RecordsNothingWithoutGradMode) {
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(Broadcast(at::ones({2}).requires_grad_(), {kHost, kHost})[0].requires_grad());
}

TEST(Broadcast, ErrorsOfTheCollectivesPassWithTheirCode) {
  const std::shared_ptr<DeviceCollectives> collectives = *NewDeviceCollectives({kHost, kHost});
  const Tensor t = at::ones({2}).requires_grad_();
  const std::vector<TensorVector> copies = Broadcast(TensorVector{t}, collectives);
  collectives->Abort(absl::DeadlineExceededError("replica 1 did not come"));
  try {
    torch::autograd::backward({(copies[0][0] + copies[1][0]).sum()});
    FAIL() << "no error";
  } catch (...) {
    EXPECT_EQ(StatusFromException(std::current_exception()),
              absl::DeadlineExceededError("replica 1 did not come"));
  }
  EXPECT_THROW(Broadcast({at::ones(1), at::ones(1, at::TensorOptions(fake_device::Device(0)))},
                         std::vector<c10::Device>{kHost}),
               StatusError);
  EXPECT_THROW(Broadcast(t, std::vector<c10::Device>()), c10::ValueError);
}

}  // namespace
}  // namespace distgrad
