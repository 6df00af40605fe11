// Which tensors share a bucket, and what packing and unpacking make of them.
#include "core/parallel/bucket.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

using at::Tensor;
using testing::ElementsAre;

std::vector<std::vector<size_t>> Members(const std::vector<Bucket>& buckets) {
  std::vector<std::vector<size_t>> members;
  for (const Bucket& bucket : buckets) {
    members.emplace_back();
    for (const Bucket::Slot& slot : bucket.slots) members.back().push_back(slot.tensor);
  }
  return members;
}

TEST(Bucket, IsFullAtItsLimitAndTheFirstEarlier) {
  const std::vector<Tensor> six(6, at::ones({25}));  // 100 bytes each
  EXPECT_THAT(Members(AssignBuckets(six, 250)),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5)));
  EXPECT_THAT(Members(AssignBuckets(six, 400, 150)),
              ElementsAre(ElementsAre(0), ElementsAre(1, 2, 3, 4), ElementsAre(5)));
  EXPECT_THAT(Members(AssignBuckets(six, 0, 150)),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2), ElementsAre(3),
                          ElementsAre(4), ElementsAre(5)));
  EXPECT_THAT(Members(AssignBuckets({six[0], six[1]}, 0)),
              ElementsAre(ElementsAre(0), ElementsAre(1)));
  // One that is too large for any has its own.
  EXPECT_THAT(Members(AssignBuckets({at::ones({2}), at::ones({99}), at::ones({2})}, 100)),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
}

TEST(Bucket, HoldsOneDeviceAndDtypeAndNothingUndefined) {
  const auto on = at::TensorOptions(fake_device::Device(1));
  const std::vector<Bucket> buckets = AssignBuckets(
      {at::ones({2}), at::ones({2}, at::kDouble), Tensor(), at::ones({2}, on), at::ones({2})}, 99);
  EXPECT_THAT(Members(buckets),
              testing::UnorderedElementsAre(ElementsAre(0, 4), ElementsAre(1), ElementsAre(3)));
  for (const Bucket& bucket : buckets) {
    EXPECT_EQ(bucket.dtype == at::kDouble, bucket.slots[0].tensor == 1);
    EXPECT_EQ(bucket.device == fake_device::Device(1), bucket.slots[0].tensor == 3);
  }
}

TEST(Bucket, SparseAndQuantizedGoAlone) {
  const std::vector<Bucket> buckets = AssignBuckets(
      {at::ones({2}), at::ones({2}).to_sparse(), at::ones({2}), at::ones({2}).to_mkldnn()}, 99);
  EXPECT_THAT(Members(buckets), ElementsAre(ElementsAre(1), ElementsAre(3), ElementsAre(0, 2)));
  EXPECT_FALSE(buckets[0].flat);
  EXPECT_FALSE(buckets[1].flat);
  EXPECT_TRUE(buckets[2].flat);
}

// The bytes that were cleared on this thread.
thread_local size_t cleared = 0;

std::unique_ptr<at::ObserverContext> CountCleared(const at::RecordFunction& op) {
  if (std::string_view(op.name()) == "aten::zero_") cleared += op.inputs()[0].toTensor().nbytes();
  return nullptr;
}

class PackTest : public testing::TestWithParam<bool> {
 protected:
  c10::Device device_ = GetParam() ? fake_device::Device(2) : c10::Device(c10::kCPU);

  std::vector<Tensor> Odd() const {
    const auto options = at::TensorOptions(device_);
    return {at::rand({3, 5}, options),
            at::rand({4, 3}, options).t(),                // dense in another order
            at::rand({1, 3}, options).expand({2, 3}),     // overlapping
            at::rand({8, 8}, options).slice(1, 0, 8, 2),  // with holes
            at::rand({0, 4}, options),                    // empty
            at::rand({}, options),                        // 0-dim
            at::rand({2, 3, 4, 5}, options).contiguous(at::MemoryFormat::ChannelsLast)};
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, PackTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Accelerator" : "Cpu"; });

TEST_P(PackTest, PartsAreWhatWasPackedAndKeepDenseLayouts) {
  const std::vector<Tensor> tensors = Odd();
  const std::vector<Bucket> buckets = AssignBuckets(tensors, 1 << 20);
  ASSERT_EQ(buckets.size(), 1u);
  const std::vector<Tensor> parts = Parts(buckets[0], Pack(buckets[0], tensors));
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(parts[i].cpu().equal(tensors[i].cpu())) << i;
    if (tensors[i].is_non_overlapping_and_dense()) {
      EXPECT_EQ(parts[i].strides(), tensors[i].strides()) << i;
    }
    EXPECT_TRUE(parts[i].is_non_overlapping_and_dense()) << i;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(parts[i].const_data_ptr()) % 64, 0u) << i;
    EXPECT_FALSE(parts[i].is_view()) << i;
  }
  parts[0].zero_();
  EXPECT_EQ(parts[1]._version(), 0u);  // a counter for each
}

TEST_P(PackTest, InRowMajorOrderABufferIsTheSameWhateverTheStrides) {
  const std::vector<Tensor> tensors = Odd();
  std::vector<Tensor> contiguous;
  for (const Tensor& tensor : tensors) contiguous.push_back(tensor.contiguous());
  const auto flat = [](const std::vector<Tensor>& list) {
    return Pack(AssignBuckets(list, 1 << 20, 0, SlotOrder::kRowMajor).at(0), list);
  };
  EXPECT_TRUE(flat(tensors).equal(flat(contiguous)));
  const Bucket bucket = AssignBuckets(tensors, 1 << 20, 0, SlotOrder::kRowMajor).at(0);
  const std::vector<Tensor> parts = Parts(bucket, flat(tensors));
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(parts[i].cpu().equal(tensors[i].cpu())) << i;
    EXPECT_TRUE(parts[i].is_contiguous()) << i;
  }
}

TEST_P(PackTest, UndefinedMembersAndGapsAreZeros) {
  std::vector<Tensor> tensors = Odd();
  const Bucket bucket = AssignBuckets(tensors, 1 << 20)[0];
  tensors[1] = tensors[6] = Tensor();
  const Tensor flat = Pack(bucket, tensors);
  double sum = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) sum += tensor.cpu().to(at::kDouble).sum().item<double>();
  }
  EXPECT_NEAR(flat.cpu().to(at::kDouble).sum().item<double>(), sum, 1e-9);
}

// What members are copied to is written once, and what is between them is cleared, in few calls.
TEST_P(PackTest, ClearsGapsAndNoMore) {
  const auto on = [&](at::ScalarType dtype) { return at::TensorOptions(device_).dtype(dtype); };
  struct Case {
    std::string name;
    std::vector<Tensor> tensors;
    std::vector<size_t> undefined;
    size_t gaps;  // in bytes
  };
  const std::vector<Case> cases = {
      {"none", {at::rand({32}, device_), at::rand({8, 16}, device_)}, {}, 0},
      {"at the end", {at::rand({32}, device_), at::rand({10}, device_)}, {}, 24},
      // 40 bytes with 24 behind them, 128 of the missing one, 128, and 12 with 52 behind them.
      {"between",
       {at::rand({10}, device_), at::rand({20}, device_), at::rand({32}, device_),
        at::rand({3}, device_)},
       {1},
       24 + 128 + 52},
      {"at the begin", {at::rand({16}, device_), at::rand({16}, device_)}, {0}, 64},
      {"float8",
       {at::ones({3}, device_).to(at::kFloat8_e5m2), at::ones({64}, device_).to(at::kFloat8_e5m2)},
       {},
       61},
      {"bool", {at::ones({3}, on(at::kBool)), at::ones({64}, on(at::kBool))}, {}, 61},
      {"complex",
       {at::ones({3}, on(at::kComplexFloat)), at::ones({8}, on(at::kComplexFloat))},
       {},
       40},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    const Bucket bucket = AssignBuckets(test.tensors, 1 << 20).at(0);
    std::vector<Tensor> tensors = test.tensors;
    for (const size_t missing : test.undefined) tensors[missing] = Tensor();
    const auto callback =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&CountCleared).needsInputs(true));
    cleared = 0;
    const Tensor flat = Pack(bucket, tensors);
    at::removeCallback(callback);
    // On the CPU no operator is called for it.
    EXPECT_EQ(cleared, device_.is_cpu() ? 0 : test.gaps);
    const Tensor bytes = flat.cpu().view(at::kByte);
    const auto size = static_cast<int64_t>(flat.itemsize());
    int64_t end = 0;
    int64_t gaps = 0;
    const auto expect_zeros_until = [&](int64_t begin) {
      EXPECT_TRUE(bytes.narrow(0, end, begin - end).eq(0).all().item<bool>()) << end;
      gaps += begin - end;
    };
    for (const Bucket::Slot& slot : bucket.slots) {
      if (!tensors[slot.tensor].defined()) continue;
      expect_zeros_until(slot.offset * size);
      const Tensor member = tensors[slot.tensor].cpu().flatten().view(at::kByte);
      end = slot.offset * size + member.numel();
      EXPECT_TRUE(bytes.narrow(0, slot.offset * size, member.numel()).equal(member)) << slot.tensor;
    }
    expect_zeros_until(bytes.numel());
    EXPECT_EQ(gaps, static_cast<int64_t>(test.gaps));
  }
}

TEST_P(PackTest, UnpackCopiesBackIntoAnyLayout) {
  const std::vector<Tensor> tensors = Odd();
  const Bucket bucket = AssignBuckets(tensors, 1 << 20)[0];
  std::vector<Tensor> into;
  for (const Tensor& tensor : tensors) into.push_back(at::zeros_like(tensor).contiguous());
  into[5] = Tensor();
  into[3] = at::ones({8, 16}, tensors[3].options()).slice(1, 0, 16, 4);
  Unpack(bucket, Pack(bucket, tensors), into);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!into[i].defined()) continue;
    EXPECT_TRUE(into[i].cpu().equal(tensors[i].cpu())) << i;
  }
}

TEST(PackTest, TakesASpareBufferThatNobodyElseHolds) {
  const std::vector<Tensor> ones = {at::ones({3}), at::ones({2})};
  const std::vector<Tensor> twos = {at::full({3}, 2.0f), Tensor()};
  const Bucket bucket = AssignBuckets(ones, 1 << 20)[0];
  Tensor spare = Pack(bucket, ones);
  const void* const memory = spare.const_data_ptr();
  Tensor flat = Pack(bucket, twos, std::move(spare));
  EXPECT_EQ(flat.const_data_ptr(), memory);
  EXPECT_EQ(flat.sum().item<float>(), 6) << "what was there is gone, also between the members";
  const std::vector<Tensor> parts = Parts(bucket, flat);
  EXPECT_NE(Pack(bucket, ones, std::move(flat)).const_data_ptr(), memory) << "its parts are held";
  EXPECT_TRUE(parts[0].equal(twos[0]));
}

TEST(PackTest, RefusesOtherShapes) {
  const Bucket bucket = AssignBuckets({at::ones({2}), at::ones({3})}, 99)[0];
  EXPECT_THROW(Pack(bucket, {at::ones({2}), at::ones({4})}), c10::ValueError);
  EXPECT_THROW(Pack(bucket, {at::ones({2}), at::ones({3}, at::kLong)}), c10::ValueError);
}

TEST(PackTest, ReadsConjugatedMembersByTheirValue) {
  const Tensor z = at::arange(4, at::kFloat).view({2, 2});
  const std::vector<Tensor> tensors = {at::view_as_complex(z).conj(), at::view_as_complex(z)};
  const Bucket bucket = AssignBuckets(tensors, 999)[0];
  const std::vector<Tensor> parts = Parts(bucket, Pack(bucket, tensors));
  EXPECT_TRUE(parts[0].equal(tensors[0].resolve_conj()));
}

}  // namespace
}  // namespace distgrad
