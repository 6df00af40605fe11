// Batches that are split and put together again, with their gradients.
#include "core/parallel/scatter_gather.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

using at::Tensor;
using testing::HasSubstr;
using testing::IsEmpty;

const c10::Device kHost(c10::kCPU);

template <typename F>
std::string ErrorOf(F f) {
  try {
    f();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

struct Case {
  std::string name;
  c10::Device source;
  std::vector<c10::Device> devices;
};

class ScatterGatherTest : public testing::TestWithParam<Case> {
 protected:
  void TearDown() override { EXPECT_THAT(fake_device::TakeViolations(), IsEmpty()); }

  Tensor Rand(std::vector<int64_t> sizes) const {
    return at::rand(sizes, at::TensorOptions(GetParam().source).dtype(at::kDouble));
  }
  const std::vector<c10::Device>& devices() const { return GetParam().devices; }
};

INSTANTIATE_TEST_SUITE_P(
    Lists, ScatterGatherTest,
    testing::Values(Case{"Hosts", kHost, {kHost, kHost, kHost}},
                    Case{"HostToAccelerators",
                         kHost,
                         {fake_device::Device(0), fake_device::Device(1), fake_device::Device(2)}},
                    Case{"Accelerators",
                         fake_device::Device(1),
                         {fake_device::Device(0), fake_device::Device(1), fake_device::Device(1)}}),
    [](const auto& info) { return info.param.name; });

TEST_P(ScatterGatherTest, PartsAreAtChunks) {
  for (const int64_t size : {1, 2, 3, 4, 5, 7, 9}) {
    const Tensor t = Rand({2, size});
    const std::vector<Tensor> parts = Scatter(t, devices(), {.dim = -1});
    const std::vector<Tensor> want = t.chunk(3, 1);
    ASSERT_EQ(parts.size(), want.size()) << size;
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].device(), devices()[i]);
      EXPECT_TRUE(parts[i].cpu().equal(want[i].cpu())) << size;
      EXPECT_TRUE(parts.size() == 1 || !parts[i].is_alias_of(t));
    }
    EXPECT_TRUE(Gather(parts, GetParam().source, 1).cpu().equal(t.cpu()));
  }
}

TEST_P(ScatterGatherTest, ChunkSizesMayBeGiven) {
  const Tensor t = Rand({6, 2}).requires_grad_();
  const std::vector<Tensor> parts = Scatter(t, devices(), {.sizes = {1, 0, 5}});
  EXPECT_EQ(parts[0].size(0), 1);
  EXPECT_EQ(parts[1].size(0), 0);
  const Tensor all = Gather(parts, kHost);
  EXPECT_EQ(all.device(), kHost);
  EXPECT_TRUE(all.equal(t.cpu()));
  EXPECT_THAT(ErrorOf([&] {
                Scatter(t, devices(), {.sizes = {1, 5}});
              }),
              HasSubstr("2 chunk sizes for 3 devices"));
  EXPECT_THAT(ErrorOf([&] {
                Scatter(t, devices(), {.sizes = {1, 1, 1}});
              }),
              HasSubstr("add up to 3, and the tensor has 6 along dimension 0"));
  EXPECT_THAT(ErrorOf([&] { Scatter(t, devices(), {.sizes = {-1, 1, 6}}); }), HasSubstr("of -1"));
}

TEST_P(ScatterGatherTest, GradientsGoBackAndMissingOnesAreZeros) {
  const Tensor t = Rand({7, 2}).requires_grad_();
  const std::vector<Tensor> parts = Scatter(t, devices());
  const Tensor weight = at::rand({3, 2}, at::kDouble);
  torch::autograd::backward({(parts[1] * weight.to(devices()[1])).sum()});
  Tensor want = at::zeros({7, 2}, at::kDouble);
  want.narrow(0, 3, 3).copy_(weight);
  EXPECT_TRUE(t.grad().cpu().equal(want));
}

// Once more through the gradient: d/dt sum((d/dt sum(t^3))^2) = 36 t^3.
TEST_P(ScatterGatherTest, DifferentiatesTwice) {
  const Tensor t = Rand({5, 2}).requires_grad_();
  std::vector<Tensor> parts = Scatter(t, devices());
  for (Tensor& part : parts) part = part * part * part;
  const Tensor sum = Gather(parts, GetParam().source).sum();
  const Tensor first = torch::autograd::grad({sum}, {t}, {}, true, /*create_graph=*/true)[0];
  EXPECT_TRUE(at::allclose(first.cpu(), 3 * t.detach().cpu().pow(2)));
  const Tensor second = torch::autograd::grad({(first * first).sum()}, {t})[0];
  EXPECT_TRUE(at::allclose(second.cpu(), 36 * t.detach().cpu().pow(3)));
}

TEST_P(ScatterGatherTest, InPlaceOnAPartLeavesTheInputAlone) {
  const Tensor t = Rand({6, 2}).requires_grad_();
  const Tensor before = t.detach().cpu().clone();
  std::vector<Tensor> parts = Scatter(t * 1, devices());
  for (Tensor& part : parts) part.mul_(3);
  torch::autograd::backward({Gather(parts).sum()});
  EXPECT_TRUE(t.detach().cpu().equal(before));
  EXPECT_TRUE(t.grad().cpu().equal(at::full({6, 2}, 3, at::kDouble)));
}

TEST_P(ScatterGatherTest, ScalarsBecomeAVectorWithAWarning) {
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text = warning.msg(); }
    std::string text;
  } handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  const c10::WarningUtils::WarnAlways always;
  std::vector<Tensor> leaves;
  std::vector<Tensor> scalars;
  for (const c10::Device device : devices()) {
    leaves.push_back(at::rand({}, at::TensorOptions(device)).requires_grad_());
    scalars.push_back(leaves.back() * 2);
  }
  const Tensor vector = Gather(scalars, kHost);
  EXPECT_THAT(handler.text, HasSubstr("no dimensions"));
  EXPECT_EQ(vector.sizes(), c10::IntArrayRef({3}));
  torch::autograd::backward({(vector * at::arange(3)).sum()});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(leaves[i].grad().sizes(), c10::IntArrayRef({}));
    EXPECT_EQ(leaves[i].grad().item<float>(), 2 * i);
  }
}

TEST_P(ScatterGatherTest, NestedValues) {
  using Value = std::tuple<Tensor, std::vector<std::map<std::string, Tensor>>, int,
                           std::optional<std::pair<Tensor, std::string>>, Tensor>;
  const Tensor a = Rand({6, 1}), b = Rand({6}), c = Rand({6, 2, 2});
  const Value value(a, {{{"b", b}, {"again", a}}, {}}, 7, {{c, "text"}}, Tensor());
  const std::vector<Value> parts = Scatter(value, devices());
  ASSERT_EQ(parts.size(), 3u);
  std::vector<std::tuple<Tensor, std::vector<std::map<std::string, Tensor>>>> outputs;
  for (size_t i = 0; i < 3; ++i) {
    const auto& [tensor, list, number, optional, undefined] = parts[i];
    EXPECT_EQ(tensor.device(), devices()[i]);
    EXPECT_TRUE(list[0].at("b").cpu().equal(b.narrow(0, 2 * static_cast<int64_t>(i), 2).cpu()));
    EXPECT_EQ(number, 7);
    EXPECT_EQ(optional->second, "text");
    EXPECT_EQ(optional->first.size(0), 2);
    EXPECT_FALSE(undefined.defined());
    outputs.push_back({tensor, list});
  }
  const auto [tensor, list] = Gather(outputs, kHost);
  EXPECT_TRUE(tensor.equal(a.cpu()));
  EXPECT_TRUE(list[0].at("again").equal(a.cpu()));
  EXPECT_TRUE(list[1].empty());
  std::get<1>(outputs[2])[0].erase("b");
  EXPECT_THAT(ErrorOf([&] { Gather(outputs, kHost); }), HasSubstr("output of replica 2"));
}

TEST_P(ScatterGatherTest, SaysWhatDoesNotFit) {
  EXPECT_THAT(ErrorOf([&] { Scatter(Rand({}), devices()); }), HasSubstr("no dimensions"));
  EXPECT_THAT(ErrorOf([&] { Scatter(Tensor(), devices()); }), HasSubstr("undefined"));
  EXPECT_THAT(ErrorOf([&] { Scatter(Rand({2}), {}); }), HasSubstr("no devices"));
  EXPECT_THAT(ErrorOf([&] { Scatter(Rand({2}), {c10::Device(c10::kCUDA, 0)}); }),
              HasSubstr("cuda"));
  EXPECT_THAT(ErrorOf([&] { Scatter(std::pair(Rand({6}), Rand({2})), devices()); }),
              HasSubstr("tensor 1 of the inputs, [2], gives 2 parts along dimension 0, and one "
                        "before it 3"));
  EXPECT_THAT(ErrorOf([&] {
                Gather({Rand({2, 3}), Rand({2, 4})});
              }),
              HasSubstr("tensor 1 is Double [2, 4], which does not fit behind Double [2, 3]"));
  EXPECT_THAT(ErrorOf([&] { Gather({Rand({2}), Rand({})}); }), HasSubstr("tensor 1"));
  EXPECT_THAT(ErrorOf([&] { Gather(std::vector<Tensor>()); }), HasSubstr("no tensors"));
  EXPECT_THROW(Scatter(Rand({2}), devices(), {.dim = 1}), c10::IndexError);
}

TEST_P(ScatterGatherTest, AnEmptyBatchIsOnePart) {
  const std::vector<Tensor> parts = Scatter(Rand({0, 3}), devices());
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].device(), devices()[0]);
  EXPECT_EQ(parts[0].sizes(), c10::IntArrayRef({0, 3}));
}

TEST(ScatterGatherStreams, CopiesRunOnTheStreamsThatWereGiven) {
  const std::vector<c10::Device> devices = {fake_device::Device(0), fake_device::Device(1)};
  const c10::MultiStreamGuard mine({fake_device::NewStream(0), fake_device::NewStream(1)});
  const Tensor t = at::ones({4, 2}, at::TensorOptions(devices[0])) * 3;
  std::vector<Tensor> parts =
      Scatter(t, devices, {.streams = {{fake_device::NewStream(0), std::nullopt}}});
  parts[0] = parts[0] + 1;
  parts[1] = parts[1] + 1;
  EXPECT_TRUE(Gather(parts, devices[1]).cpu().equal(at::full({4, 2}, 4)));
  parts.clear();
  EXPECT_THAT(ErrorOf([&] {
                Scatter(t, devices, {.streams = {{std::nullopt, fake_device::NewStream(0)}}});
              }),
              HasSubstr("is not a stream of hpu:1"));
  EXPECT_THAT(fake_device::TakeViolations(), IsEmpty());
}

TEST(Gather, KeepsTheMemoryFormat) {
  const Tensor t = at::rand({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(Gather({t, t}).is_contiguous(at::MemoryFormat::ChannelsLast));
}

}  // namespace
}  // namespace distgrad
