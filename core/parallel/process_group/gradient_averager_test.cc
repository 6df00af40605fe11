// Averages over ranks, when they overlap the backward, and ranks that fail or differ.
#include "core/parallel/process_group/gradient_averager.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "core/autograd/context_record.h"
#include "core/membership/store/in_process_store.h"
#include "core/tensor/exception.h"
#include "tests/testing/ranks.h"

namespace distgrad {
namespace {

using at::Tensor;
using Group = std::shared_ptr<ProcessGroup>;

constexpr GradientAveragerOptions kSmallBuckets = {.bucket_bytes = 64, .first_bucket_bytes = 16};

bool Contains(const absl::Status& status, absl::string_view text) {
  return absl::StrContains(status.message(), text);
}

std::unique_ptr<GradientAverager> NewAverager(const Group& group,
                                              std::vector<NamedTensor> parameters,
                                              std::vector<NamedTensor> buffers = {},
                                              GradientAveragerOptions options = kSmallBuckets) {
  auto averager =
      GradientAverager::Create(group, std::move(parameters), std::move(buffers), options);
  EXPECT_TRUE(averager.ok()) << averager.status();
  return averager.ok() ? *std::move(averager) : nullptr;
}

Tensor Parameter(std::vector<int64_t> sizes, double value = 1) {
  return torch::full(sizes, value).requires_grad_();
}

// What backward() throws.
absl::Status StatusOfBackward(const Tensor& loss) {
  try {
    loss.backward();
    return absl::OkStatus();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

TEST(GradientAveragerTest, GivesParametersAndBuffersOfRank0ToAll) {
  RunRanks(3, [](Group group) {
    const Tensor w = Parameter({2, 3}, group->rank()), frozen = torch::full({2}, group->rank());
    const Tensor count = torch::full({}, group->rank(), torch::kLong);
    const auto averager = NewAverager(group, {{"w", w}, {"frozen", frozen}}, {{"count", count}});
    EXPECT_TRUE(w.equal(torch::zeros({2, 3})));
    EXPECT_TRUE(frozen.equal(torch::zeros({2})));
    EXPECT_EQ(count.item<int64_t>(), 0);
  });
}

// A rank may have built its model otherwise: transposed, say, or with the channels last.
TEST(GradientAveragerTest, StridesNeedNotBeTheSameOnAllRanks) {
  RunRanks(2, [](Group group) {
    const int rank = group->rank();
    const Tensor values = torch::arange(12, torch::kFloat).view({4, 3});
    const Tensor w = rank == 0 ? values.clone() : torch::full({3, 4}, -1.0f).t();
    const Tensor mean = rank == 0 ? torch::full({3, 4}, 2.0f).t() : torch::zeros({4, 3});
    if (rank == 0) mean[1][2] = 5;
    w.requires_grad_();
    const auto averager = NewAverager(group, {{"w", w}}, {{"mean", mean}});
    ASSERT_NE(averager, nullptr);
    EXPECT_TRUE(w.equal(values)) << w;
    Tensor of_rank0 = torch::full({4, 3}, 2.0f);
    of_rank0[1][2] = 5;
    EXPECT_TRUE(mean.equal(of_rank0)) << mean;
    (w * values).sum().backward();
    EXPECT_TRUE(w.grad().equal(values)) << w.grad();
    EXPECT_EQ(w.grad().strides(), w.strides()) << "what optimizers are fast with";
    ContextRecord context(1);
    context.Accumulate(
        static_cast<torch::autograd::AccumulateGrad&>(*torch::autograd::impl::grad_accumulator(w)),
        values.clone());
    EXPECT_EQ(averager->Average(context), absl::OkStatus());
    EXPECT_TRUE(context.Gradient(w)->equal(values)) << *context.Gradient(w);
  });
}

// Nor do graphs notice what batch norm itself writes to its statistics.
TEST(GradientAveragerTest, BuffersOfRank0LeaveGraphsThatHaveSavedThemValid) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2}), scale = torch::full({2}, 2.0f);
    const auto averager = NewAverager(group, {{"w", w}}, {{"scale", scale}});
    const Tensor first = (w * scale).sum(), second = (w * scale).sum(), third = (w * scale).sum();
    scale.data().fill_(group->rank() + 3.0f);
    EXPECT_EQ(StatusOfBackward(first), absl::OkStatus());
    EXPECT_TRUE(scale.equal(torch::full({2}, 3.0f))) << scale;
    EXPECT_EQ(StatusOfBackward(second), absl::OkStatus());
    ContextRecord context(1);
    EXPECT_EQ(averager->Average(context), absl::OkStatus());
    EXPECT_EQ(StatusOfBackward(third), absl::OkStatus());
  });
}

// A backward writes where the integers say that its graph has saved.
TEST(GradientAveragerTest, GraphsNoticePlacesOfRank0ThatAreOthers) {
  RunRanks(2, [](Group group) {
    const bool is_root = group->rank() == 0;
    const Tensor w = Parameter({2}), other = Parameter({2});
    const Tensor same = torch::arange(2), changed = torch::arange(2);
    const auto averager = NewAverager(group, {{"w", w}}, {{"same", same}, {"changed", changed}});
    const Tensor of_same = other.index_select(0, same).sum();
    const Tensor of_changed = other.index_select(0, changed).sum();
    if (is_root) changed.data().fill_(0);
    EXPECT_EQ(StatusOfBackward(w.sum()), absl::OkStatus());
    EXPECT_TRUE(changed.equal(torch::zeros({2}, torch::kLong))) << changed;
    EXPECT_EQ(StatusOfBackward(of_same), absl::OkStatus());
    const absl::Status status = StatusOfBackward(of_changed);
    EXPECT_EQ(Contains(status, "modified by an inplace operation"), !is_root) << status;
  });
}

TEST(GradientAveragerTest, BackwardEndsWithAverages) {
  RunRanks(3, [](Group group) {
    const double rank = group->rank();
    const Tensor a = Parameter({2, 3}), b = Parameter({5}), c = Parameter({4, 4}).detach().t();
    c.requires_grad_();
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}, {"c", c}});
    for (int step = 1; step < 4; ++step) {
      for (const Tensor& parameter : {a, b, c}) parameter.mutable_grad().reset();
      (a.sum() * rank + b.sum() * (rank * step) + (c * c).sum() * rank).backward();
      EXPECT_TRUE(a.grad().equal(torch::ones({2, 3})));
      EXPECT_TRUE(b.grad().equal(torch::full({5}, float(step))));
      EXPECT_TRUE(c.grad().equal(torch::full({4, 4}, 2.0f)));
      EXPECT_EQ(c.grad().strides(), c.strides());
    }
    // Without zeroing they add up, and a tensor that was there stays the same.
    const Tensor before = a.grad();
    (a.sum() * rank).backward();
    EXPECT_TRUE(before.is_same(a.grad()));
    EXPECT_TRUE(before.equal(torch::full({2, 3}, 2.0f)));
  });
}

// As where gradients come by torch::autograd::grad(), which calls no hooks.
TEST(GradientAveragerTest, AverageTakesGradientsThatNoBackwardGave) {
  RunRanks(2, [](Group group) {
    const float rank = group->rank();
    const Tensor a = Parameter({2, 3}), b = Parameter({5}), unused = Parameter({2});
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}, {"unused", unused}});
    for (int step = 0; step < 2; ++step) {
      a.mutable_grad() = torch::full({2, 3}, rank + 1);
      b.mutable_grad().reset();
      if (rank == 1) b.mutable_grad() = torch::full({5}, 4.0f);
      EXPECT_EQ(averager->Average(), absl::OkStatus());
      EXPECT_TRUE(a.grad().equal(torch::full({2, 3}, 1.5f))) << a.grad();
      EXPECT_TRUE(b.grad().defined() && b.grad().equal(torch::full({5}, 2.0f))) << b.grad();
      EXPECT_FALSE(unused.grad().defined());
    }
  });
}

// Also where a backward that does not reach them is averaged before that.
TEST(GradientAveragerTest, AGradientThatNoBackwardGaveIsAveragedBesideABackward) {
  RunRanks(2, [](Group group) {
    const float rank = group->rank();
    const Tensor a = Parameter({8}), b = Parameter({8});
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}});
    for (int step = 0; step < 2; ++step) {
      b.mutable_grad().reset();
      a.mutable_grad() = torch::full({8}, rank + 1);
      (b.sum() * rank).backward();
      EXPECT_EQ(averager->Average(), absl::OkStatus());
      EXPECT_TRUE(a.grad().equal(torch::full({8}, 1.5f))) << a.grad();
      EXPECT_TRUE(b.grad().equal(torch::full({8}, 0.5f))) << b.grad();
    }
  });
}

// They have no version, which would throw, and fail the group for all.
TEST(GradientAveragerTest, AverageTakesGradientsOfInferenceMode) {
  RunRanks(2, [](Group group) {
    const float rank = group->rank();
    const Tensor a = Parameter({2, 3});
    const auto averager = NewAverager(group, {{"a", a}});
    for (const bool averages_in_it : {false, true}) {
      Tensor held;  // which nobody may write to outside of that mode
      {
        const c10::InferenceMode mode(rank == 1);
        held = torch::full({2, 3}, rank + 1);
        a.mutable_grad() = held;
        if (averages_in_it) {
          EXPECT_EQ(averager->Average(), absl::OkStatus());
        }
      }
      if (!averages_in_it) {
        EXPECT_EQ(averager->Average(), absl::OkStatus());
      }
      EXPECT_TRUE(a.grad().equal(torch::full({2, 3}, 1.5f))) << a.grad();
      EXPECT_FALSE(a.grad().is_inference()) << "what a backward adds to";
    }
  });
}

// Which torch lets nobody write to outside of that mode.
TEST(GradientAveragerTest, BuffersOfInferenceModeAreGivenToAll) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2}), plain = torch::full({2}, float(group->rank()));
    Tensor count;
    {
      const c10::InferenceMode mode;
      count = torch::full({2}, float(group->rank()));
    }
    const auto averager = NewAverager(group, {{"w", w}}, {{"count", count}, {"plain", plain}});
    ASSERT_NE(averager, nullptr);
    const auto expect_all = [&](float value) {
      for (const Tensor& buffer : {count, plain}) {
        EXPECT_TRUE(buffer.equal(torch::full({2}, value))) << buffer;
      }
    };
    const auto set = [&](float value) {
      const c10::InferenceMode mode;
      count.fill_(group->rank() + value);
      plain.fill_(group->rank() + value);
    };
    expect_all(0);  // when it was made
    set(5);
    w.sum().backward();
    expect_all(5);
    set(7);
    {
      const c10::InferenceMode mode;
      EXPECT_EQ(averager->Average(), absl::OkStatus());
    }
    expect_all(7);
    set(9);
    EXPECT_EQ(averager->Average(), absl::OkStatus());
    expect_all(9);
  });
}

TEST(GradientAveragerTest, NothingIsCopiedBackThatNobodyElseHolds) {
  RunRanks(2, [](Group group) {
    const Tensor a = Parameter({2}), b = Parameter({2});
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}});
    const auto step = [&](float value) {
      for (const Tensor& parameter : {a, b}) parameter.mutable_grad().reset();
      (a.sum() * value + b.sum() * value).backward();
    };
    step(1);
    EXPECT_TRUE(a.grad().is_alias_of(b.grad())) << "both lie in the buffer of their bucket";
    const Tensor held = a.grad();
    step(2);
    EXPECT_TRUE(held.equal(torch::full({2}, 1.0f))) << "it is the holder's now";
    EXPECT_TRUE(a.grad().equal(torch::full({2}, 2.0f)));
    EXPECT_FALSE(a.grad().is_alias_of(held));
  });
}

// As a backward leaves them where it gives two parameters the same values: libtorch keeps what it
// has computed, and both look at it.
TEST(GradientAveragerTest, GradientsThatShareTheirMemoryAreTwo) {
  for (const bool is_part : {false, true}) {
    RunRanks(2, [is_part](Group group) {
      const Tensor a = Parameter({8}), b = Parameter({is_part ? 4 : 8});
      const Tensor c = torch::arange(8, torch::kFloat).view({2, 4});
      const auto averager = NewAverager(group, {{"a", a}, {"b", b}}, {}, {.bucket_bytes = 1024});
      if (group->rank() == 1) {
        (a.view({2, 4}) * c).sum().backward();
      } else if (is_part) {
        const at::AutoGradMode grad(true);
        {
          const GradientAverager::NoSync no_sync(*averager);
          (a.view({2, 4}) * c).sum().backward();
        }
        b.mutable_grad() = a.grad().narrow(0, 4, 4);
        EXPECT_EQ(averager->Average(), absl::OkStatus());
      } else {
        ((a.view({2, 4}) + b.view({2, 4})) * c).sum().backward();
      }
      EXPECT_TRUE(a.grad().equal(c.view({8}))) << a.grad();
      const Tensor of_b = c.view({8}).narrow(0, is_part ? 4 : 0, b.numel());
      EXPECT_TRUE(b.grad().equal(of_b / 2)) << b.grad();
    });
  }
}

TEST(GradientAveragerTest, GradientsWithGapsThatShareTheirMemoryAreTwo) {
  RunRanks(2, [](Group group) {
    const Tensor a = Parameter({8}), b = Parameter({8});
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}}, {}, {.bucket_bytes = 1024});
    const Tensor of_a = torch::ones({8, 2}).select(1, 0);
    a.mutable_grad() = of_a;
    b.mutable_grad() = group->rank() == 0 ? of_a.view({8}) : torch::full({8, 2}, 3.0f).select(1, 0);
    EXPECT_EQ(averager->Average(), absl::OkStatus());
    EXPECT_TRUE(a.grad().equal(torch::ones({8}))) << a.grad();
    EXPECT_TRUE(b.grad().equal(torch::full({8}, 2.0f))) << b.grad();
  });
}

// Several elements are in one place of the program's, so their averages have another one.
TEST(GradientAveragerTest, AnExpandedGradientOfTheProgramsIsReplaced) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({8});
    const auto averager = NewAverager(group, {{"w", w}});
    const Tensor expanded = torch::full({1}, static_cast<float>(group->rank())).expand(8);
    w.mutable_grad() = expanded;
    EXPECT_EQ(averager->Average(), absl::OkStatus());
    EXPECT_TRUE(w.grad().equal(torch::full({8}, 0.5f))) << w.grad();
  });
}

// Of a program that has all its gradients in one buffer, and clips that.
TEST(GradientAveragerTest, PartsOfABufferOfTheProgramsStayThere) {
  RunRanks(2, [](Group group) {
    const Tensor a = Parameter({2, 2}), b = Parameter({2, 2});
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}}, {}, {.bucket_bytes = 1024});
    for (const bool columns : {false, true}) {
      const Tensor flat = columns ? torch::zeros({2, 4}) : torch::zeros({4, 2});
      const int64_t dim = columns ? 1 : 0;
      a.mutable_grad() = flat.narrow(dim, 0, 2);
      b.mutable_grad() = flat.narrow(dim, 2, 2);
      ((a.sum() + b.sum() * 3) * group->rank()).backward();
      EXPECT_TRUE(flat.narrow(dim, 0, 2).equal(torch::full({2, 2}, 0.5f))) << flat;
      EXPECT_TRUE(flat.narrow(dim, 2, 2).equal(torch::full({2, 2}, 1.5f))) << flat;
      EXPECT_TRUE(a.grad().is_alias_of(flat));
      EXPECT_TRUE(b.grad().is_alias_of(flat));
    }
  });
}

TEST(GradientAveragerTest, BucketsAreInFlightWhileTheBackwardRuns) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter({8}), last = Parameter({8});
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    const Tensor middle = first * 2;
    int64_t begun = -1;
    middle.register_hook([&](const Tensor&) { begun = group->collectives(); });
    const int64_t before = group->collectives();
    (middle * last).sum().backward();
    EXPECT_EQ(begun, before + 1) << "that of the last parameter";
    EXPECT_EQ(group->collectives(), before + 2);
  });
}

TEST(GradientAveragerTest, NothingIsTouchedAfterItsEnd) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    NewAverager(group, {{"w", w}}).reset();
    EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(w), nullptr);
    (w.sum() * group->rank()).backward();
    EXPECT_TRUE(w.grad().equal(torch::full({2}, float(group->rank()))));
  });
}

struct CountingHook : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int* count) : count(count) {}
  void operator()(const Tensor&) override { ++*count; }
  int* const count;
};

TEST(GradientAveragerTest, OtherHooksOfAParameterGoOn) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    int count = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<CountingHook>(&count));
    auto averager = NewAverager(group, {{"w", w}});
    auto second = NewAverager(group, {{"w", w}});
    averager.reset();  // below another one
    (w.sum() * group->rank()).backward();
    EXPECT_EQ(count, 1);
    EXPECT_TRUE(w.grad().equal(torch::full({2}, 0.5f)));
    second.reset();
    w.sum().backward();
    EXPECT_EQ(count, 2);
  });
}

struct CallingHook : torch::autograd::PostAccumulateGradHook {
  explicit CallingHook(std::function<void(const Tensor&)> b) : body(std::move(b)) {}
  void operator()(const Tensor& leaf) override { body(leaf); }
  const std::function<void(const Tensor&)> body;
};

// As a pass of a context does.
void AccumulateInContext(const Tensor& leaf) {
  ContextRecord context(/*id=*/1);
  const auto node = torch::autograd::impl::grad_accumulator(leaf);
  context.Accumulate(static_cast<torch::autograd::AccumulateGrad&>(*node),
                     torch::ones(leaf.sizes()));
}

TEST(GradientAveragerTest, ABackwardInAHookThatAContextCallsIsAveraged) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2}), other = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}});
    torch::autograd::impl::set_post_acc_grad_hooks(
        other, std::make_unique<CallingHook>([&](const Tensor&) {
          const at::AutoGradMode on(true);
          (w.sum() * group->rank()).backward();
        }));
    AccumulateInContext(other);
    EXPECT_TRUE(w.grad().equal(torch::full({2}, 0.5f))) << w.grad();
  });
}

// Another thread, that of a context's hook, has nothing in the .grad of a parameter when the first
// bucket begins, in which that is not.
TEST(GradientAveragerTest, ABucketLooksAtItsOwnGradientsAlone) {
  RunRanks(2, [](Group group) {
    const Tensor unused = Parameter({8}), first = Parameter({8}), last = Parameter({8});
    absl::Notification in_context, is_empty, go;
    torch::autograd::impl::set_post_acc_grad_hooks(
        unused, std::make_unique<CallingHook>([&](const Tensor& leaf) {
          if (!in_context.HasBeenNotified()) return;
          leaf.mutable_grad().reset();
          is_empty.Notify();
          go.WaitForNotification();
        }));
    const auto averager =
        NewAverager(group, {{"unused", unused}, {"first", first}, {"last", last}});
    {
      const GradientAverager::NoSync no_sync(*averager);
      (unused.sum() * group->rank()).backward();
    }
    in_context.Notify();
    std::thread context([&] { AccumulateInContext(unused); });
    is_empty.WaitForNotification();
    const Tensor middle = first * 2;
    const int64_t before = group->collectives();
    middle.register_hook([&](const Tensor&) {
      EXPECT_EQ(group->collectives(), before + 1) << "the first bucket has begun";
      go.Notify();
      context.join();
    });
    (middle * last).sum().backward();
    EXPECT_TRUE(unused.grad().equal(torch::full({8}, 0.5f))) << unused.grad();
  });
}

TEST(GradientAveragerTest, WhatDiffersIsNamedOnEveryRank) {
  RunRanks(3, [](Group group) {
    const int rank = group->rank();
    const auto status = [&](std::vector<NamedTensor> parameters,
                            std::vector<NamedTensor> buffers = {},
                            GradientAveragerOptions options = {}) {
      return GradientAverager::Create(group, std::move(parameters), std::move(buffers), options)
          .status();
    };
    const NamedTensor a = {"a", Parameter({2})};
    // By shape, dtype, number, name, gradient, and options.
    absl::Status differs = status({a, {"fc.weight", Parameter({3, rank == 2 ? 4 : 5})}});
    EXPECT_EQ(differs.code(), absl::StatusCode::kInvalidArgument) << differs;
    EXPECT_EQ(differs.message(),
              "process group 'ranks': rank 2 has parameter 'fc.weight': Float [3, 4] on cpu, and "
              "rank 0 has parameter 'fc.weight': Float [3, 5] on cpu");
    differs = status({a}, {{"mean", torch::zeros({2}, rank == 1 ? torch::kLong : torch::kFloat)}});
    EXPECT_TRUE(Contains(differs, "rank 1 has buffer 'mean': Long [2]")) << differs;
    differs = status(rank == 1 ? std::vector<NamedTensor>{a}
                               : std::vector<NamedTensor>{a, {"b", Parameter({1})}});
    EXPECT_TRUE(Contains(differs, "1 parameters")) << differs;
    EXPECT_TRUE(Contains(differs, "rank 0 has buckets of")) << differs;
    differs = status({{rank == 0 ? "x" : "y", Parameter({1})}});
    EXPECT_TRUE(Contains(differs, "rank 1 has parameter 'y'")) << differs;
    const NamedTensor frozen = {"f", torch::ones({1}).requires_grad_(rank != 2)};
    differs = status({a, frozen});
    EXPECT_TRUE(Contains(differs, "rank 2 has buckets")) << differs;
    differs = status({a}, {}, {.bucket_bytes = size_t(100 + rank)});
    EXPECT_TRUE(Contains(differs, "rank 1 has buckets of 101 bytes")) << differs;
    // That harmed nobody.
    EXPECT_TRUE(status({a}).ok());
  });
}

TEST(GradientAveragerTest, RefusesWhatIsNoParameter) {
  RunRanks(1, [](Group group) {
    const Tensor w = Parameter({2});
    for (const Tensor& bad : {w * 2, torch::eye(2).to_sparse()}) {
      const absl::Status status = GradientAverager::Create(group, {{"w", bad}}, {}).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(Contains(status, "parameter 'w'")) << status;
    }
    EXPECT_EQ(GradientAverager::Create(nullptr, {{"w", w}}, {}).status().code(),
              absl::StatusCode::kInvalidArgument);
    // A module without parameters, and one that is not shared.
    const auto averager = GradientAverager::Create(group, torch::nn::ReLUImpl());
    ASSERT_TRUE(averager.ok()) << averager.status();
    EXPECT_TRUE((*averager)->Average().ok());
  });
}

// Else the other ranks would wait for it until their deadline.
TEST(GradientAveragerTest, WhatIsNoParameterOnOneRankIsHeardOfOnAll) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2, 2}), whole = torch::eye(2);
    const bool is_bad = group->rank() == 1;
    const std::vector<std::pair<Tensor, std::string>> bad = {
        {is_bad ? w * 2 : w, "rank 1 has parameter 'w': Float [2, 2] on cpu, not a dense leaf"},
        {is_bad ? whole.to_sparse() : whole,
         "rank 1 has frozen parameter 'w': Float [2, 2] on cpu, not dense, not a dense leaf"}};
    for (const auto& [tensor, text] : bad) {
      const absl::Status status = GradientAverager::Create(group, {{"w", tensor}}, {}).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(Contains(status, text)) << status;
    }
    EXPECT_TRUE(group->status().ok()) << group->status();
    EXPECT_TRUE(GradientAverager::Create(group, {{"w", w}}, {}).ok());
  });
}

// All ranks agree, so nobody waits for another one, and nothing has been broadcast.
TEST(GradientAveragerTest, WhatCannotBeBroadcastIsRefusedOnAllRanksAndHarmsNobody) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2}, group->rank());
    const auto create = [&](const Tensor& buffer) {
      return GradientAverager::Create(group, {{"w", w}}, {{"mask", buffer}}).status();
    };
    const Tensor sparse = torch::eye(2).to_sparse();
    absl::Status status = create(sparse);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "buffer 'mask' is not dense")) << status;
    // Where one rank alone has such a tensor, that is what differs.
    status = create(group->rank() == 1 ? sparse : torch::eye(2));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "rank 1 has buffer 'mask': Float [2, 2] on cpu, not dense"))
        << status;
    // The root alone could do without writing to it.
    status = create(torch::ones({1}).expand({8}));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "buffer 'mask' is of elements that share memory")) << status;
    EXPECT_TRUE(w.equal(torch::full({2}, float(group->rank()))));
    const Tensor mean = torch::full({2}, float(group->rank()));
    EXPECT_TRUE(group->status().ok()) << group->status();
    EXPECT_TRUE(group->Average({mean}).ok());
    EXPECT_TRUE(mean.equal(torch::full({2}, 0.5f)));
  });
}

// Before the first collective, or between two: the others wait for this rank in the next one.
TEST(GradientAveragerTest, ARankThatFailsWhileAnAveragerIsMadeFailsTheOthersAtOnce) {
  RunRanks(2,
           [](Group group) {
             std::vector<NamedTensor> buffers = {{"b", torch::ones({2})}};
             if (group->rank() == 1) {
               // It has no sizes to compare, and says so by an exception.
               buffers[0].tensor = at::_nested_tensor_from_tensor_list(
                   {torch::ones({1}), torch::ones({2})}, at::kFloat);
             }
             const absl::Status status =
                 GradientAverager::Create(group, {{"w", Parameter({2})}}, buffers).status();
             EXPECT_FALSE(status.ok());
             EXPECT_EQ(group->status(), status);
             EXPECT_TRUE(Contains(status, "making an averager of gradients")) << status;
             EXPECT_TRUE(Contains(status, "sizes")) << status;
           },
           {.timeout = absl::Minutes(30)});
}

TEST(GradientAveragerTest, AverageWithoutHooks) {
  RunRanks(2, [](Group group) {
    const Tensor a = Parameter({2}), b = Parameter({2}), c = Parameter({2});
    const auto averager =
        NewAverager(group, {{"a", a}, {"b", b}, {"c", c}}, {}, {.in_backward = false});
    (group->rank() == 0 ? a.sum() : a.sum() * 3 + b.sum()).backward();
    EXPECT_TRUE(a.grad().equal(torch::full({2}, group->rank() == 0 ? 1.0f : 3.0f)));
    const absl::Status status = averager->Average();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(a.grad().equal(torch::full({2}, 2.0f)));
    EXPECT_TRUE(b.grad().equal(torch::full({2}, 0.5f)));
    EXPECT_FALSE(c.grad().defined());
  });
}

// A rank whose loss depends on no parameter has no hook to tell it.
TEST(GradientAveragerTest, ARankThatReachesNoParameterAveragesByHand) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}});
    if (group->rank() == 0) {
      EXPECT_TRUE(averager->Average().ok());
    } else {
      w.sum().backward();
    }
    EXPECT_TRUE(w.grad().equal(torch::full({2}, 0.5f)));
  });
}

struct Fail : torch::autograd::Function<Fail> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("on fire");
  }
};

TEST(GradientAveragerTest, ABackwardThatFailsBeforeAnyAverageCanBeDoneAgain) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter({8}), last = Parameter({8});
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    if (group->rank() == 1) {
      EXPECT_TRUE(Contains(StatusOfBackward(Fail::apply(first * last).sum()), "on fire"));
    }
    EXPECT_TRUE(StatusOfBackward((first * last).sum() * group->rank()).ok());
    EXPECT_TRUE(first.grad().equal(torch::full({8}, 0.5f)));
  });
}

// Four ranks, so that some have no connection with the one that fails; and all of them stay.
TEST(GradientAveragerTest, ABackwardThatFailsInTheMiddleIsAnErrorOfAllRanksAtOnce) {
  absl::Barrier begin(4), end(4);
  RunRanks(4, [&](Group group) {
    const Tensor first = Parameter({8}), last = Parameter({8});
    auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    begin.Block();
    absl::Status status;
    const std::string reason =
        "a backward failed when 1 of 2 buckets were being averaged, after the gradient of 'last'";
    if (group->rank() == 1) {
      EXPECT_TRUE(Contains(StatusOfBackward((Fail::apply(first) * last).sum()), "on fire"));
      status = averager->Average();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_EQ(status.message(), "process group 'ranks' (rank 1 of 4, gloo): " + reason);
    } else {
      status = StatusOfBackward((first * last).sum());
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_TRUE(absl::StartsWith(status.message(),
                                   absl::StrCat("process group 'ranks' (rank ", group->rank(),
                                                " of 4, gloo): averaging bucket ")))
          << status;
      EXPECT_TRUE(Contains(status, "rank 1 failed: " + reason)) << status;
    }
    const int64_t collectives = group->collectives();
    EXPECT_EQ(StatusOfBackward((first * last).sum()), status);
    EXPECT_EQ(averager->Average(), status);
    EXPECT_EQ(averager->Join().status(), status);
    EXPECT_EQ(GradientAverager::Create(group, {{"first", first}}, {}).status(), status);
    EXPECT_EQ(group->collectives(), collectives);
    end.Block();
  });
}

TEST(GradientAveragerTest, AnAveragerThatEndsInTheMiddleIsAnErrorOfAllRanksAtOnce) {
  // Several times, for Gloo has gaps where a connection breaks in the middle of something.
  for (int round = 0; round < 20; ++round) {
    const bool begun = round % 2 == 0;
    absl::Barrier begin(3), end(3);
    RunRanks(3, [&](Group group) {
      const Tensor first = Parameter({8}), last = Parameter({8});
      const size_t bytes = begun ? 16 : 1024;
      auto averager = NewAverager(group, {{"first", first}, {"last", last}}, {}, {bytes, bytes});
      begin.Block();
      const Tensor middle = first * 2;
      middle.register_hook([&](const Tensor&) {
        if (group->rank() == 2) averager.reset();
      });
      const absl::Status status = StatusOfBackward((middle * last).sum());
      const std::string reason =
          absl::StrCat("the averager was destroyed in the middle of a backward when ",
                       begun ? "1 of 2" : "0 of 1", " buckets were being averaged");
      if (group->rank() == 2) {
        EXPECT_TRUE(status.ok()) << status;  // nothing averages any more
        EXPECT_TRUE(Contains(group->status(), reason)) << group->status();
      } else {
        EXPECT_TRUE(Contains(status, "rank 2 failed: " + reason)) << status;
      }
      end.Block();
    });
  }
}

TEST(GradientAveragerTest, AfterAFailureANewGroupOfTheSameNameGoesOn) {
  const auto store = NewInProcessStore();
  for (const bool fail : {true, false}) {
    absl::Barrier begin(2), end(2);
    RunRanks(2,
             [&](Group group) {
               const Tensor w = Parameter({2});
               const auto averager = NewAverager(group, {{"w", w}});
               begin.Block();
               if (fail && group->rank() == 0) group->Fail(absl::DataLossError("no disk"));
               const absl::Status status = StatusOfBackward(w.sum() * group->rank());
               EXPECT_EQ(status.ok(), !fail) << status;
               EXPECT_EQ(Contains(status, "no disk"), fail) << status;
               end.Block();
             },
             {.store = store});
  }
}

// A backward within a node, as checkpointing does it.
struct Nested : torch::autograd::Function<Nested> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad(true);
    const Tensor x = saved[0].detach().requires_grad_(), w = saved[1];
    (x * w).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

TEST(GradientAveragerTest, BackwardsWithinABackwardAreOne) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter({8}), nested = Parameter({8}, 3), last = Parameter({8});
    const auto averager =
        NewAverager(group, {{"first", first}, {"nested", nested}, {"last", last}});
    for (int step = 0; step < 2; ++step) {
      for (const Tensor& parameter : {first, nested, last}) parameter.mutable_grad().reset();
      (Nested::apply(first, nested) * last * group->rank()).sum().backward();
      EXPECT_TRUE(first.grad().equal(torch::full({8}, 1.5f)));
      EXPECT_TRUE(nested.grad().equal(torch::full({8}, 0.5f)));
      EXPECT_TRUE(last.grad().equal(torch::full({8}, 1.5f)));
    }
  });
}

// As reentrant checkpointing does it: computed again in the backward, with a backward of its own,
// by a closure that alone knows of the parameters.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  using Run = std::function<Tensor(const Tensor&)>;
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Run* run) {
    context->save_for_backward({x});
    context->saved_data["run"] = static_cast<int64_t>(reinterpret_cast<intptr_t>(run));
    return (*run)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* run =
        reinterpret_cast<const Run*>(static_cast<intptr_t>(context->saved_data["run"].toInt()));
    const at::AutoGradMode grad(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    (*run)(x).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

// The end of the outermost backward is that of the average, whether or not a hook of a parameter
// runs in it.
TEST(GradientAveragerTest, ABackwardWithCheckpointsEndsWithAverages) {
  RunRanks(2, [](Group group) {
    const Tensor a = Parameter({8}), b = Parameter({8}), c = Parameter({8});
    const Tensor x = torch::full({8}, 1.0f + group->rank());
    const auto averager = NewAverager(group, {{"a", a}, {"b", b}, {"c", c}});
    const Checkpointed::Run times_a = [&](const Tensor& y) { return y * a; };
    const Checkpointed::Run times_b = [&](const Tensor& y) { return y * b; };
    // Of 60 within each other libtorch runs the next one on another thread.
    std::vector<Checkpointed::Run> deep = {[&](const Tensor& y) { return y * a * b; }};
    while (deep.size() < 70) {
      const size_t level = deep.size();
      deep.push_back(
          [&deep, level](const Tensor& y) { return Checkpointed::apply(y, &deep[level - 1]); });
    }
    const std::vector<std::pair<const char*, Checkpointed::Run>> models = {
        {"in a row",
         [&](const Tensor& y) {
           return Checkpointed::apply(Checkpointed::apply(y, &times_a), &times_b);
         }},
        {"within one another", [&](const Tensor& y) { return Checkpointed::apply(y, &deep[2]); }},
        {"deep", [&](const Tensor& y) { return Checkpointed::apply(y, &deep.back()); }},
        {"deep, and not all",
         [&](const Tensor& y) { return Checkpointed::apply(y, &deep.back()) * c; }},
    };
    for (const auto& [name, model] : models) {
      for (int step = 0; step < 2; ++step) {
        for (const Tensor& parameter : {a, b, c}) parameter.mutable_grad().reset();
        const int64_t before = group->collectives();
        const absl::Status status = StatusOfBackward(model(x.detach().requires_grad_()).sum());
        ASSERT_TRUE(status.ok()) << name << ": " << status;
        EXPECT_TRUE(a.grad().equal(torch::full({8}, 1.5f))) << name << ", step " << step;
        EXPECT_TRUE(b.grad().equal(torch::full({8}, 1.5f))) << name << ", step " << step;
        if (c.grad().defined()) {
          EXPECT_TRUE(c.grad().equal(torch::full({8}, 1.5f))) << name << ", step " << step;
        }
        EXPECT_EQ(c.grad().defined(), absl::StrContains(name, "not all")) << name;
        EXPECT_EQ(group->collectives(), before + 2) << name << ": one average of two buckets";
      }
    }
  });
}

TEST(GradientAveragerTest, ABackwardThatFailsAfterOneWithinItCanBeDoneAgain) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({8}), unused = Parameter({8});
    const Tensor x = torch::full({8}, 1.0f + group->rank()).requires_grad_();
    const auto averager =
        NewAverager(group, {{"w", w}, {"unused", unused}}, {}, {.bucket_bytes = 1024});
    const Checkpointed::Run times_w = [&](const Tensor& y) { return y * w; };
    if (group->rank() == 1) {
      const absl::Status status =
          StatusOfBackward(Checkpointed::apply(Fail::apply(x), &times_w).sum());
      EXPECT_TRUE(Contains(status, "on fire")) << status;
      w.mutable_grad().reset();
    }
    const absl::Status status = StatusOfBackward(Checkpointed::apply(x, &times_w).sum());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(w.grad().equal(torch::full({8}, 1.5f))) << w.grad();
    EXPECT_FALSE(unused.grad().defined());
  });
}

// Runs a backward of its own that may fail, which it puts up with.
struct Forgiving : torch::autograd::Function<Forgiving> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Checkpointed::Run* run) {
    context->save_for_backward({x});
    context->saved_data["run"] = static_cast<int64_t>(reinterpret_cast<intptr_t>(run));
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* run = reinterpret_cast<const Checkpointed::Run*>(
        static_cast<intptr_t>(context->saved_data["run"].toInt()));
    const at::AutoGradMode grad(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    try {
      (*run)(x).backward(gradients[0]);
    } catch (const std::exception&) {
    }
    return {gradients[0], Tensor()};
  }
};

// The outer one goes on, and its end is that of the average.
TEST(GradientAveragerTest, ABackwardWithinABackwardThatFailsAndIsCaughtEndsNothing) {
  for (const bool one_bucket : {true, false}) {
    for (const bool within_alone : {true, false}) {
      SCOPED_TRACE(absl::StrCat("one bucket: ", one_bucket, ", within alone: ", within_alone));
      RunRanks(2, [&](Group group) {
        const Tensor within = Parameter({8}), first = Parameter({8});
        const Tensor x = torch::ones({8}).requires_grad_();
        const auto averager =
            NewAverager(group, {{"within", within}, {"first", first}}, {},
                        one_bucket ? GradientAveragerOptions{.bucket_bytes = 1024} : kSmallBuckets);
        const Checkpointed::Run run = [&](const Tensor& y) { return Fail::apply(y) * within; };
        for (int step = 0; step < 2; ++step) {
          for (const Tensor& parameter : {within, first}) parameter.mutable_grad().reset();
          const int64_t before = group->collectives();
          const Tensor y = Forgiving::apply(x, &run) * group->rank();
          const absl::Status status = StatusOfBackward((within_alone ? y : y * first).sum());
          ASSERT_TRUE(status.ok()) << status;
          EXPECT_TRUE(within.grad().equal(torch::full({8}, 0.5f))) << within.grad();
          if (!within_alone) {
            EXPECT_TRUE(first.grad().equal(torch::full({8}, 0.5f))) << first.grad();
          }
          EXPECT_EQ(group->collectives(), before + (one_bucket ? 1 : 2));
        }
      });
    }
  }
}

// A gradient that nobody has averaged, and that is no more, is none.
TEST(GradientAveragerTest, WhatWasResetBeforeItWasAveragedIsUnused) {
  for (const bool fails : {true, false}) {
    RunRanks(2, [&](Group group) {
      const Tensor first = Parameter({8}), middle = Parameter({8}), last = Parameter({8});
      const auto averager =
          NewAverager(group, {{"first", first}, {"middle", middle}, {"last", last}}, {},
                      {.bucket_bytes = 1024});
      if (group->rank() == 1) {
        if (fails) {
          EXPECT_FALSE(StatusOfBackward((Fail::apply(first) * middle).sum()).ok());
        } else {
          const GradientAverager::NoSync no_sync(*averager);
          (first * middle).sum().backward();
        }
        EXPECT_TRUE(middle.grad().defined());
        for (const Tensor& parameter : {first, middle}) parameter.mutable_grad().reset();
      }
      EXPECT_TRUE(StatusOfBackward((first * last).sum() * group->rank()).ok());
      EXPECT_TRUE(first.grad().equal(torch::full({8}, 0.5f)));
      EXPECT_FALSE(middle.grad().defined()) << "fails: " << fails << ", " << middle.grad();
    });
  }
}

// zero_grad(false) leaves zeros. They count for the average, as an optimizer counts them: a rank
// where there are none would not let the parameter decay as the others do.
TEST(GradientAveragerTest, WhatWasSetToZeroBeforeItWasAveragedIsTheSameOnAllRanks) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter({8}), middle = Parameter({8}), last = Parameter({8});
    const auto averager = NewAverager(group, {{"first", first}, {"middle", middle}, {"last", last}},
                                      {}, {.bucket_bytes = 1024});
    torch::optim::SGD optimizer({first, middle, last},
                                torch::optim::SGDOptions(0.5).weight_decay(0.5));
    if (group->rank() == 1) {
      const GradientAverager::NoSync no_sync(*averager);
      (first * middle).sum().backward();
      optimizer.zero_grad(/*set_to_none=*/false);
    }
    EXPECT_TRUE(StatusOfBackward((first * last).sum() * group->rank()).ok());
    EXPECT_TRUE(first.grad().equal(torch::full({8}, 0.5f)));
    EXPECT_TRUE(middle.grad().equal(torch::zeros({8}))) << middle.grad();
    optimizer.step();
    EXPECT_TRUE(middle.equal(torch::full({8}, 0.75f))) << middle;
  });
}

TEST(GradientAveragerTest, WhatWasSetToZeroBeforeItWasAveragedIsNoneOfAJoin) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({8});
    const auto averager = NewAverager(group, {{"w", w}});
    if (group->rank() == 1) {
      {
        const GradientAverager::NoSync no_sync(*averager);
        w.sum().backward();
      }
      const absl::Status refused = averager->Join().status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      w.mutable_grad().zero_();
      const absl::StatusOr<bool> joined = averager->Join();
      ASSERT_TRUE(joined.ok()) << joined.status();
      EXPECT_TRUE(*joined);
    } else {
      EXPECT_TRUE(StatusOfBackward(w.sum()).ok());
    }
    EXPECT_TRUE(w.grad().equal(torch::full({8}, 0.5f))) << w.grad();
  });
}

// What was not reset is averaged with the next ones.
TEST(GradientAveragerTest, WhatABackwardThatFailedHasLeftIsAveraged) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter({8}), middle = Parameter({8}), last = Parameter({8});
    const auto averager = NewAverager(group, {{"first", first}, {"middle", middle}, {"last", last}},
                                      {}, {.bucket_bytes = 1024});
    if (group->rank() == 1) {
      EXPECT_FALSE(StatusOfBackward((Fail::apply(first) * middle).sum()).ok());
    }
    EXPECT_TRUE(StatusOfBackward((first * last).sum() * group->rank()).ok());
    EXPECT_TRUE(middle.grad().equal(torch::full({8}, 0.5f)));
  });
}

TEST(GradientAveragerTest, AGradientThatComesTwiceIsAnError) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter({8}), w = Parameter({8});
    const auto averager = NewAverager(group, {{"first", first}, {"w", w}});
    const Tensor loss = Nested::apply(Nested::apply(first, w), w).sum();
    absl::Status status = StatusOfBackward(loss);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(Contains(status, "'w' got another gradient in one backward")) << status;
  });
}

// NoSync adds to the gradient, and the average of what was there before would take its place.
TEST(GradientAveragerTest, NoSyncDoesNotHideAGradientThatComesTwice) {
  RunRanks(1, [](Group group) {
    const Tensor first = Parameter({8}), last = Parameter({8});
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    const Tensor middle = first * 2;
    const int64_t before = group->collectives();
    absl::Status within;
    middle.register_hook([&](const Tensor&) {
      EXPECT_EQ(group->collectives(), before + 1) << "the first bucket has begun";
      const GradientAverager::NoSync no_sync(*averager);
      const at::AutoGradMode grad(true);
      within = StatusOfBackward(last.sum());
    });
    const absl::Status status = StatusOfBackward((middle * last).sum());
    for (const absl::Status& each : {within, status}) {
      EXPECT_EQ(each.code(), absl::StatusCode::kFailedPrecondition) << each;
      EXPECT_TRUE(Contains(each, "'last' got another gradient in one backward")) << each;
    }
  });
}

// They cannot be told from one that is deep within the other. If the first to end closed the
// average, it would be with half of the other's gradients.
TEST(GradientAveragerTest, TheLastOfTwoBackwardsAtATimeEndsTheAverageOfBoth) {
  // Whether the average has begun when one of them ends or fails.
  for (const bool begun : {false, true}) {
    for (const bool fails : {false, true}) {
      SCOPED_TRACE(absl::StrCat("begun: ", begun, ", fails: ", fails));
      RunRanks(2, [&](Group group) {
        const Tensor first = Parameter({8}), other = Parameter({8}), last = Parameter({8});
        const auto averager =
            NewAverager(group, {{"first", first}, {"other", other}, {"last", last}}, {},
                        begun ? kSmallBuckets : GradientAveragerOptions{.bucket_bytes = 1024});
        const Tensor middle = first * 2;
        absl::Notification has_last, go;
        middle.register_hook([&](const Tensor&) {
          has_last.Notify();
          go.WaitForNotification();
        });
        absl::Status slow;
        const int64_t before = group->collectives(), rank = group->rank();
        std::thread thread([&] { slow = StatusOfBackward((middle * last).sum() * rank); });
        has_last.WaitForNotification();
        const Tensor of_quick =
            fails ? Fail::apply(middle.detach().requires_grad_()) * other : other * 2;
        const absl::Status quick = StatusOfBackward(of_quick.sum() * rank);
        go.Notify();
        thread.join();
        EXPECT_TRUE(fails ? Contains(quick, "on fire") : quick.ok()) << quick;
        EXPECT_EQ(slow, absl::OkStatus());
        for (const Tensor& parameter : {first, other, last}) {
          EXPECT_TRUE(parameter.grad().equal(torch::ones({8}))) << parameter.grad();
        }
        EXPECT_EQ(group->collectives(), before + (begun ? 2 : 1));
      });
    }
  }
}

TEST(GradientAveragerTest, AFrozenParameterThatIsThawedIsAnErrorOfAllRanks) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2}), frozen = torch::ones({2});
    const auto averager = NewAverager(group, {{"w", w}, {"frozen", frozen}});
    w.sum().backward();
    if (group->rank() == 1) frozen.requires_grad_();
    absl::Status status = StatusOfBackward((w * frozen).sum());
    // Rank 0 has had its averages by then.
    if (group->rank() == 0) status = StatusOfBackward((w * frozen).sum());
    EXPECT_TRUE(Contains(status, "'frozen' was frozen when the averager was made")) << status;
    EXPECT_TRUE(Contains(status, group->rank() == 1 ? "(rank 1 of 2, gloo): averaging gradients: "
                                                    : "rank 1 failed: averaging gradients: "))
        << status;
  });
}

TEST(GradientAveragerTest, ASparseGradientOfAnyParameterBecomesDense) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({4, 2});
    const auto averager = NewAverager(group, {{"w", w}});
    const Tensor row = torch::full({1}, group->rank(), torch::kLong);
    torch::embedding(w, row, -1, false, /*sparse=*/true).sum().backward();
    ASSERT_FALSE(w.grad().is_sparse());
    EXPECT_TRUE(w.grad().equal(torch::tensor({{.5f, .5f}, {.5f, .5f}, {0.f, 0.f}, {0.f, 0.f}})));
  });
}

TEST(GradientAveragerTest, DividesByTheActiveRanksIfAsked) {
  RunRanks(3, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.divide_by_active = true});
    for (int step = 0; step < 3; ++step) {
      w.mutable_grad().reset();
      if (step <= group->rank()) {
        (w.sum() * (group->rank() + 1)).backward();
      } else {
        EXPECT_TRUE(averager->Join().value());
      }
      // The sum over ranks from `step` on, by their number.
      EXPECT_TRUE(w.grad().equal(torch::full({2}, (step + 4) / 2.0f))) << step;
    }
    w.mutable_grad().reset();
    EXPECT_FALSE(averager->Join().value());
  });
}

// Which ranks are active is read from the sum: so it is waited for before all others.
TEST(GradientAveragerTest, AFailureOfTheSumThatSaysWhoIsActiveIsOneOfTheAverage) {
  absl::Notification begun;
  RunRanks(2, [&](Group group) {
    const Tensor w = Parameter({2}), input = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.divide_by_active = true});
    if (group->rank() == 1) {
      begun.WaitForNotification();
      group->Fail(absl::DataLossError("no disk"));
      return;
    }
    // Runs after the hook of `w`, which begins the sum.
    const Tensor behind = input * 2;
    behind.register_hook([&](const Tensor&) { begun.Notify(); });
    const absl::Status status = StatusOfBackward((behind * w).sum());
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 failed: no disk")) << status;
  });
}

TEST(GradientAveragerTest, WhateverTheDtypeOfTheFirstBucket) {
  for (const at::ScalarType dtype :
       {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    for (const bool divide_by_active : {false, true}) {
      RunRanks(3, [&](Group group) {
        const int rank = group->rank();
        const auto parameter = [&] { return torch::ones({3}, dtype).requires_grad_(); };
        const Tensor w = parameter(), sometimes = parameter(), never = parameter();
        const Tensor count = torch::zeros({}, torch::kLong);
        const auto averager =
            NewAverager(group, {{"w", w}, {"sometimes", sometimes}, {"never", never}},
                        {{"count", count}}, {.divide_by_active = divide_by_active});
        Tensor loss = w.sum() * (3 * rank);
        if (rank == 1) loss = loss + sometimes.sum() * 6;
        count.add_(10 + rank);
        const absl::Status status = StatusOfBackward(loss.is_complex() ? at::real(loss) : loss);
        ASSERT_TRUE(status.ok()) << dtype << ": " << status;
        EXPECT_TRUE(w.grad().equal(torch::full({3}, 3, dtype))) << w.grad();
        EXPECT_TRUE(sometimes.grad().equal(torch::full({3}, 2, dtype))) << sometimes.grad();
        EXPECT_FALSE(never.grad().defined()) << never.grad();
        EXPECT_EQ(count.item<int64_t>(), 10);
        for (const Tensor& each : {w, sometimes}) each.mutable_grad().reset();
        if (rank == 2) {
          w.sum().abs().backward();
        } else {
          const auto others = averager->Join();
          ASSERT_TRUE(others.ok()) << dtype << ": " << others.status();
          EXPECT_TRUE(*others) << dtype;
        }
        const double ranks = divide_by_active ? 1 : 3;
        EXPECT_TRUE(torch::allclose(w.grad(), torch::full({3}, 1 / ranks, dtype), 0.01))
            << w.grad();
        EXPECT_FALSE(sometimes.grad().defined()) << sometimes.grad();
        w.mutable_grad().reset();
        const auto others = averager->Join();
        ASSERT_TRUE(others.ok()) << dtype << ": " << others.status();
        EXPECT_FALSE(*others) << dtype;
      });
    }
  }
}

TEST(GradientAveragerTest, AveragesOfFloat16AreOnesWhoseSumIsTooLarge) {
  for (const bool divide_by_active : {false, true}) {
    RunRanks(4, [&](Group group) {
      const Tensor w = torch::ones({3}, at::kHalf).requires_grad_();
      const auto averager =
          NewAverager(group, {{"w", w}}, {}, {.divide_by_active = divide_by_active});
      (w.sum() * 32768).backward();
      EXPECT_TRUE(w.grad().equal(torch::full({3}, 32768, at::kHalf))) << w.grad();
      w.mutable_grad().reset();
      if (group->rank() == 0) {
        EXPECT_TRUE(averager->Join().value());
      } else {
        (w.sum() * 32768).backward();
      }
      EXPECT_NEAR(w.grad()[0].item<double>(), divide_by_active ? 32768 : 24576, 32);
    });
  }
}

// ---------------------------------------------------------------------------------------- Join

std::unique_ptr<torch::optim::Optimizer> NewOptimizer(bool adam, std::vector<Tensor> parameters) {
  if (adam) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(0.01));
  }
  return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}

// So replicas stay equal in the epochs after. One parameter is used in the first step alone, and by
// a rank that runs out first; it goes on by its momentum, if its gradient is reset to zeros.
TEST(GradientAveragerTest, ARankThatJoinsHasTheSameParametersAndOptimizerState) {
  for (const bool adam : {false, true}) {
    for (const bool set_to_none : {false, true}) {
      std::vector<std::vector<Tensor>> ends(3);
      RunRanks(3, [&](Group group) {
        const int rank = group->rank();
        const Tensor w = Parameter({4}, 1 + rank), once = Parameter({4}, 2 + rank);
        const auto averager = NewAverager(group, {{"w", w}, {"once", once}});
        const auto optimizer = NewOptimizer(adam, {w, once});
        const auto zero_grad = [&] { optimizer->zero_grad(set_to_none); };
        const auto step = [&] { optimizer->step(); };
        for (int epoch = 0; epoch < 3; ++epoch) {
          for (int batch = 0; batch < 1 + rank; ++batch) {
            zero_grad();
            Tensor loss = (w * w).sum() * (1 + rank + batch);
            if (batch == 0 && rank == 0) loss = loss + (once * once).sum();
            loss.backward();
            step();
          }
          StepWithTheOthers(*averager, zero_grad, step);
          if (epoch == 1) {
            // Before the last broadcast makes them so.
            w.sum().backward();
            step();
          }
          ends[rank].push_back(w.detach().clone());
          ends[rank].push_back(once.detach().clone());
        }
      });
      for (int rank = 1; rank < 3; ++rank) {
        for (size_t i = 0; i < ends[0].size(); ++i) {
          EXPECT_TRUE(ends[rank][i].equal(ends[0][i]))
              << (adam ? "adam" : "sgd") << ", set_to_none " << set_to_none << ", rank " << rank
              << ", " << i << ": " << ends[rank][i] << ends[0][i];
        }
      }
    }
  }
}

TEST(GradientAveragerTest, SeveralAveragesInAStepBesideARankThatHasJoined) {
  for (const bool divide_by_active : {false, true}) {
    RunRanks(2, [&](Group group) {
      const Tensor w = Parameter({2}), other = Parameter({2});
      const auto averager = NewAverager(
          group, {{"w", w}, {"other", other}}, {},
          {.bucket_bytes = 8, .first_bucket_bytes = 8, .divide_by_active = divide_by_active});
      const float ranks = divide_by_active ? 1 : 2;
      for (int step = 0; step < 2; ++step) {
        for (const Tensor& parameter : {w, other}) parameter.mutable_grad().reset();
        // The second and third do not use `other`, whose gradient stays.
        for (const float factor : {2, 4, 6}) {
          if (group->rank() == 1) {
            const auto others = averager->Join({.keep_gradients = factor > 2});
            ASSERT_TRUE(others.ok()) << others.status();
            ASSERT_TRUE(*others);
          } else {
            (factor == 2 ? w.sum() * 2 + other.sum() * 8 : w.sum() * factor).backward();
          }
          const float sum = factor == 2 ? 2 : factor == 4 ? 6 : 12;
          EXPECT_TRUE(w.grad().equal(torch::full({2}, sum / ranks))) << w.grad();
          EXPECT_TRUE(other.grad().equal(torch::full({2}, 8 / ranks))) << other.grad();
        }
      }
      for (const Tensor& parameter : {w, other}) parameter.mutable_grad().reset();
      const auto others = averager->Join();
      ASSERT_TRUE(others.ok()) << others.status();
      EXPECT_FALSE(*others);
    });
  }
}

// Nobody had input for it, and so the gradients are the last average's as before.
TEST(GradientAveragerTest, AnAverageThatNobodyHadInputForChangesNothing) {
  for (const bool in_backward : {false, true}) {
    RunRanks(1, [&](Group group) {
      const Tensor w = Parameter({2});
      const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = in_backward});
      w.sum().backward();
      if (!in_backward) {
        ASSERT_EQ(averager->Average(), absl::OkStatus());
      }
      for (int i = 0; i < 2; ++i) {
        const auto others = averager->Join({.keep_gradients = true});
        ASSERT_TRUE(others.ok()) << others.status();
        EXPECT_FALSE(*others);
      }
      const absl::Status status = averager->Join().status();
      EXPECT_TRUE(Contains(status, "'w' still has the gradient of the last average")) << status;
      EXPECT_TRUE(w.grad().equal(torch::ones({2}))) << w.grad();
      if (!in_backward) return;    // what is changed may be new there
      w.mutable_grad().mul_(0.5);  // as clipping does
      for (int i = 0; i < 2; ++i) {
        const auto others = averager->Join({.keep_gradients = true});
        ASSERT_TRUE(others.ok()) << others.status();
        EXPECT_FALSE(*others);
      }
    });
  }
}

// They would be in the averages of the others.
TEST(GradientAveragerTest, GradientsOfTheLastStepAreNoneOfAJoin) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}});
    if (group->rank() == 1) {
      w.mutable_grad() = torch::ones({2});
      const absl::Status status = averager->Join().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(Contains(status, "'w' has a gradient that no backward since the last average"))
          << "nothing has been averaged: " << status;
      w.mutable_grad().reset();
    }
    w.sum().backward();
    if (group->rank() == 0) {
      (w.sum() * 6).backward();
      EXPECT_TRUE(w.grad().equal(torch::full({2}, 4.0f))) << w.grad();
    } else {
      const int64_t collectives = group->collectives();
      absl::Status status = averager->Join().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(Contains(status, "'w' still has the gradient of the last average")) << status;
      {
        const GradientAverager::NoSync no_sync(*averager);
        w.sum().backward();
      }
      status = averager->Join().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(Contains(status, "'w' has a gradient that is still to be averaged")) << status;
      EXPECT_EQ(group->collectives(), collectives);
      EXPECT_TRUE(group->status().ok()) << group->status();
      w.mutable_grad().fill_(1);
      EXPECT_TRUE(averager->Average().ok());
    }
    w.mutable_grad().reset();
    EXPECT_FALSE(averager->Join().value());
  });
}

// As an optimizer's clipping does.
TEST(GradientAveragerTest, NeitherAreThoseThatWereChangedSince) {
  for (const bool in_backward : {true, false}) {
    RunRanks(1, [in_backward](Group group) {
      const Tensor w = Parameter({2});
      const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = in_backward});
      w.sum().backward();
      if (!in_backward) {
        EXPECT_TRUE(averager->Average().ok());
      }
      w.mutable_grad().mul_(0.5);
      const absl::Status status = averager->Join().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      w.mutable_grad().zero_();
      EXPECT_FALSE(averager->Join().value());
    });
  }
}

// All ranks agree on that, too.
TEST(GradientAveragerTest, AParameterWithoutRowsHasNoSparseGradient) {
  RunRanks(2, [](Group group) {
    const Tensor scale = Parameter({}), w = Parameter({2}, group->rank());
    const auto create = [&](bool is_sparse) {
      return GradientAverager::Create(
                 group,
                 {{"w", w}, {.name = "scale", .tensor = scale, .sparse_gradient = is_sparse}}, {})
          .status();
    };
    absl::Status status = create(true);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "parameter 'scale' has no dimensions")) << status;
    // Where one rank alone has marked it, that is what differs.
    status = create(group->rank() == 1);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "rank 1 has sparse parameter 'scale': Float [] on cpu")) << status;
    EXPECT_TRUE(w.equal(torch::full({2}, float(group->rank())))) << "nothing was broadcast";
    status = create(false);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(w.equal(torch::zeros({2})));
  });
}

TEST(GradientAveragerTest, SparseGradientsAreAveraged) {
  for (const bool divide_by_active : {false, true}) {
    RunRanks(3, [&](Group group) {
      const Tensor w = Parameter({4, 2});
      const auto averager =
          NewAverager(group, {{.name = "w", .tensor = w, .sparse_gradient = true}}, {},
                      {.divide_by_active = divide_by_active});
      if (group->rank() == 2) {
        EXPECT_TRUE(averager->Join().value());
      } else {
        const Tensor rows = torch::tensor({int64_t{1}, int64_t{2} * group->rank()});
        torch::embedding(w, rows, -1, false, /*sparse=*/true).sum().backward();
      }
      ASSERT_TRUE(w.grad().is_sparse());
      const float part = 1.0f / (divide_by_active ? 2 : 3);
      const Tensor want = torch::tensor({{1.f, 1.f}, {2.f, 2.f}, {1.f, 1.f}, {0.f, 0.f}}) * part;
      EXPECT_TRUE(torch::allclose(w.grad().to_dense(), want)) << w.grad();
    });
  }
}

// Of an embedding that has looked nothing up. It counts as zeros do, as an optimizer counts them: a
// rank without it would not go on by its momentum as the others do.
TEST(GradientAveragerTest, AnEmptySparseGradientIsOneOfAllRanks) {
  for (const bool is_used : {true, false}) {
    RunRanks(2, [&](Group group) {
      const Tensor w = Parameter({4, 2}), other = Parameter({2});
      const auto averager = NewAverager(
          group, {{.name = "w", .tensor = w, .sparse_gradient = true}, {"other", other}});
      Tensor loss = other.sum();
      if (is_used && group->rank() == 0) {
        const Tensor no_rows = torch::zeros({0}, torch::kLong);
        loss = loss + torch::embedding(w, no_rows, -1, false, /*sparse=*/true).sum();
      }
      EXPECT_TRUE(StatusOfBackward(loss).ok());
      ASSERT_EQ(w.grad().defined(), is_used) << "rank " << group->rank();
      if (!is_used) return;
      ASSERT_TRUE(w.grad().is_sparse());
      EXPECT_EQ(w.grad()._nnz(), 0) << "an optimizer may step the rows that are there";
      EXPECT_EQ(w.grad().sizes(), w.sizes());
    });
  }
}

TEST(GradientAveragerTest, NorSparseOnes) {
  for (const bool in_backward : {true, false}) {
    RunRanks(1, [in_backward](Group group) {
      const Tensor w = Parameter({4, 2});
      const auto averager =
          NewAverager(group, {{.name = "w", .tensor = w, .sparse_gradient = true}}, {},
                      {.in_backward = in_backward});
      const Tensor row = torch::zeros({1}, torch::kLong);
      torch::embedding(w, row, -1, false, /*sparse=*/true).sum().backward();
      ASSERT_TRUE(w.grad().is_sparse());
      const absl::Status status = averager->Join().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      w.mutable_grad().zero_();
      EXPECT_FALSE(averager->Join().value());
    });
  }
}

// ------------------------------------------------------------------------------ Of contexts

void AddGradient(ContextRecord& context, const Tensor& parameter, Tensor gradient) {
  context.Accumulate(static_cast<torch::autograd::AccumulateGrad&>(
                         *torch::autograd::impl::grad_accumulator(parameter)),
                     std::move(gradient));
}

// Another thread cannot make an average between the buckets of a backward: the ranks would have
// them in different orders, each with a part of another's.
TEST(GradientAveragerTest, AnAverageInTheMiddleOfABackwardIsRefused) {
  using Ask = std::function<absl::Status(GradientAverager&, ContextRecord&)>;
  const std::vector<std::pair<std::string, Ask>> asks = {
      {"Average", [](auto& averager, auto&) { return averager.Average(); }},
      {"Average of a context", [](auto& averager, auto& c) { return averager.Average(c); }},
      {"AverageInBackward", [](auto& averager, auto& c) { return averager.AverageInBackward(c); }},
      {"Join", [](auto& averager, auto&) { return averager.Join().status(); }},
      {"Join of a context", [](auto& averager, auto& c) { return averager.Join(c).status(); }},
  };
  for (const auto& [name, ask] : asks) {
    RunRanks(1, [&, name = name, ask = ask](Group group) {
      SCOPED_TRACE(name);
      const Tensor first = Parameter({8}), last = Parameter({8});
      const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
      ContextRecord context(1);
      const Tensor middle = first * 2;
      const int64_t before = group->collectives();
      absl::Status refused;
      middle.register_hook([&](const Tensor&) {
        EXPECT_EQ(group->collectives(), before + 1) << "the first bucket has begun";
        std::thread([&] { refused = ask(*averager, context); }).join();
      });
      const absl::Status backward = StatusOfBackward((middle * last).sum());
      for (const absl::Status& status : {refused, backward, group->status()}) {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
        EXPECT_TRUE(Contains(status, "while a backward that gives .grad is being averaged"))
            << status;
      }
    });
  }
}

// Backwards add to them: also where a rank has none of its own.
TEST(GradientAveragerTest, NoAverageLeavesGradientsOfInferenceMode) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}});
    ContextRecord context(1);
    AddGradient(context, w, torch::full({2}, group->rank() + 1.0f));
    {
      const c10::InferenceMode mode;
      EXPECT_EQ(averager->Average(context), absl::OkStatus());
    }
    AddGradient(context, w, torch::ones({2}));
    EXPECT_TRUE(context.Gradient(w)->equal(torch::full({2}, 2.5f)));
    if (group->rank() == 0) {
      w.sum().backward();
    } else {
      const c10::InferenceMode mode;
      EXPECT_TRUE(averager->Join().value());
    }
    EXPECT_FALSE(w.grad().is_inference());
    w.mutable_grad().reset();
    EXPECT_FALSE(averager->Join().value());
  });
}

// What the averager adds itself, for a parameter that only another rank has used, is not news.
TEST(GradientAveragerTest, AContextThatWasGivenUpMayBeAveragedAfterAll) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
    ContextRecord context(1), other(2);
    EXPECT_TRUE(averager->AverageInBackward(context).ok());
    EXPECT_TRUE(averager->AverageInBackward(other).ok());
    if (group->rank() == 1) AddGradient(context, w, torch::ones({2}));
    const absl::Status status = averager->Average(context);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(context.Gradient(w)->equal(torch::full({2}, 0.5f)));
  });
}

TEST(GradientAveragerTest, AContextThatWasAveragedInItsBackwardMayBeSummedWithOthers) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
    ContextRecord context(1), sum(2);
    ASSERT_EQ(averager->AverageInBackward(context), absl::OkStatus());
    AddGradient(context, w, torch::full({2}, group->rank() + 1.0f));
    ASSERT_EQ(averager->Average(context), absl::OkStatus());
    EXPECT_FALSE(context.has_leaf_observer());
    ASSERT_EQ(sum.TakeGradientsOf(context), absl::OkStatus());
    EXPECT_TRUE(sum.Gradient(w)->equal(torch::full({2}, 1.5f)));
  });
}

// The others have seen nothing of it.
TEST(GradientAveragerTest, AReleaseBeforeTheFirstBucketIsNoErrorOfTheGroup) {
  RunRanks(1, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
    ContextRecord context(1), other(2);
    AddGradient(context, w, torch::ones({2}));
    EXPECT_TRUE(averager->AverageInBackward(context).ok());
    // Released when the gradient has been added, and before the averager looks at it.
    float values[2] = {1, 1};
    AddGradient(context, w, torch::from_blob(values, {2}, [&](void*) { context.Release(); }));
    EXPECT_EQ(context.Gradient(w).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(group->status().ok()) << group->status();
    EXPECT_TRUE(averager->Average(other).ok());
  });
}

TEST(GradientAveragerTest, ARankMayJoinWithContexts) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2}), other = Parameter({2});
    const Tensor count = torch::full({}, group->rank());
    const auto averager = NewAverager(group, {{"w", w}, {"other", other}}, {{"count", count}},
                                      {.in_backward = false});
    const auto join = [&](ContextRecord& context, JoinOptions options) {
      const absl::StatusOr<bool> others = averager->Join(context, options);
      EXPECT_TRUE(others.ok()) << others.status();
      return others.ok() && *others;
    };
    for (int step = 0; step < 2; ++step) {
      ContextRecord context(1 + step);
      // Several averages in a step; `other` is in the first alone.
      for (const int average : {0, 1}) {
        if (group->rank() == 0) {
          EXPECT_TRUE(join(context, {.keep_gradients = average > 0}));
        } else {
          AddGradient(context, w, torch::full({2}, 2.0f * (1 + average)));
          if (average == 0) AddGradient(context, other, torch::full({2}, 8.0f));
          count.add_(1);
          EXPECT_TRUE(averager->Average(context).ok());
        }
        EXPECT_TRUE(context.Gradient(w)->equal(torch::full({2}, average == 0 ? 1.0f : 3.0f)));
        EXPECT_TRUE(context.Gradient(other)->equal(torch::full({2}, 4.0f)));
        EXPECT_EQ(count.item<int64_t>(), 1 + 2 * step + average);
      }
      if (group->rank() == 1) continue;
      const absl::Status status = averager->Join(context).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(Contains(status, "has a gradient of 'other' already")) << status;
    }
    ContextRecord last(9), released(10);
    released.Release();
    const absl::Status status = averager->Join(released).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(group->status().ok()) << group->status();
    EXPECT_FALSE(join(last, {}));
    EXPECT_FALSE(last.Gradient(w).ok());
  });
}

// A hook of the user's belongs to what a backward has computed. An average is the same on all
// ranks, also on those that had no gradient.
TEST(GradientAveragerTest, AveragesOfAContextCallNoHooks) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter({2});
    int count = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<CountingHook>(&count));
    const auto averager = NewAverager(group, {{"w", w}}, {});
    ContextRecord context(1);
    if (group->rank() == 0) {
      const absl::StatusOr<bool> others = averager->Join(context);
      EXPECT_TRUE(others.ok() && *others) << others.status();
    } else {
      AddGradient(context, w, torch::ones({2}));
      EXPECT_TRUE(averager->Average(context).ok());
    }
    EXPECT_EQ(count, group->rank());
    EXPECT_FALSE(w.grad().defined());
    EXPECT_TRUE(context.Gradient(w)->equal(torch::full({2}, 0.5f)));
    // Both find that nobody goes on.
    ContextRecord last(2);
    EXPECT_FALSE(averager->Join(last).value());
  });
}

TEST(GradientAveragerTest, WithoutHooksAGradientThatIsStillToBeAveragedIsNoneOfAJoin) {
  RunRanks(1, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
    w.sum().backward();
    const absl::Status status = averager->Join().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(Contains(status, "'w' has a gradient that is still to be averaged")) << status;
    w.mutable_grad().zero_();
    EXPECT_FALSE(averager->Join().value());
    EXPECT_TRUE(group->status().ok()) << group->status();
  });
}

// The others have begun the average, and wait for this rank.
TEST(GradientAveragerTest, ARankWhoseGradientsCannotBeReadFailsTheOthersAtOnceWhereItJoins) {
  RunRanks(2,
           [](Group group) {
             const Tensor w = Parameter({2});
             const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
             absl::Status status;
             if (group->rank() == 1) {
               // It has no values to look at, and says so by an exception.
               w.mutable_grad() = torch::empty({2}, torch::kMeta);
               status = averager->Join().status();
             } else {
               status = averager->Average();
               EXPECT_TRUE(Contains(status, "rank 1 failed")) << status;
             }
             EXPECT_FALSE(status.ok());
             EXPECT_EQ(group->status(), status);
           },
           {.timeout = absl::Minutes(30)});
}

// Another worker's release ends the observer on a thread of the pool, and the context may be gone
// by then.
class ContextInPlace {
 public:
  ~ContextInPlace() { context_->~ContextRecord(); }
  ContextRecord& Begin(ContextId id) {
    if (context_ != nullptr) {
      context_->~ContextRecord();
      std::memset(place_, 0xdd, sizeof(place_));
    }
    return *(context_ = new (place_) ContextRecord(id));
  }
  ContextRecord& operator*() { return *context_; }

 private:
  alignas(ContextRecord) unsigned char place_[sizeof(ContextRecord)];
  ContextRecord* context_ = nullptr;
};

TEST(GradientAveragerTest, AFollowedContextMayBeGoneBeforeItsObserver) {
  RunRanks(1, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
    auto context = std::make_unique<ContextRecord>(7);
    EXPECT_TRUE(averager->AverageInBackward(*context).ok());
    AddGradient(*context, w, torch::ones({2}));
    ContextRecord::Released released = context->Release();
    context.reset();
    released.observer.reset();
    const absl::Status status = group->status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(Contains(status, "context 7 was given up when 1 of 1 buckets")) << status;
  });
}

TEST(GradientAveragerTest, AContextInThePlaceOfTheFollowedOneIsAnother) {
  RunRanks(1, [](Group group) {
    const Tensor w = Parameter({2});
    const auto averager = NewAverager(group, {{"w", w}}, {}, {.in_backward = false});
    ContextInPlace place;
    ContextRecord& context = place.Begin(7);
    EXPECT_TRUE(averager->AverageInBackward(context).ok());
    AddGradient(context, w, torch::ones({2}));
    const ContextRecord::Released released = context.Release();
    AddGradient(place.Begin(8), w, torch::full({2}, 5.0f));
    const absl::Status status = averager->Average(*place);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(Contains(status, "context 7 was given up when 1 of 1 buckets")) << status;
  });
}

// ------------------------------------------------------------------------------- Random programs

// What ranks do with some parameters, step by step, by a seed. All numbers are small and whole, so
// that sums are the same in any order.
struct RandomReplicas {
  enum Use { kUnused, kRows, kNoRows, kDense, kZeros, kUses };
  enum class How { kHooks, kByHand, kContext, kInBackwardOfContext, kCount };

  explicit RandomReplicas(uint64_t seed) : random(seed) {
    ranks = 1 + Draw(4);
    how = static_cast<How>(Draw(static_cast<int>(How::kCount)));
    options = {.bucket_bytes = size_t(Draw(2) == 0 ? 8 : 1024),
               .first_bucket_bytes = 8,
               .in_backward = how == How::kHooks,
               .divide_by_active = Draw(2) == 0};
    const int parameters = 1 + Draw(4);
    for (int k = 0; k < parameters; ++k) {
      rows.push_back(1 + Draw(4));
      is_sparse.push_back(Draw(2) == 0);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      // One that has no batch joins.
      uses.emplace_back(Draw(4));
      for (std::vector<Use>& step : uses.back()) {
        for (int k = 0; k < parameters; ++k) step.push_back(static_cast<Use>(Draw(kUses)));
      }
      steps = std::max(steps, static_cast<int>(uses.back().size()));
    }
  }
  int Draw(int below) { return static_cast<int>(random() % below); }

  bool IsActive(int rank, int step) const { return step < static_cast<int>(uses[rank].size()); }
  // What a rank's loss is of one parameter, and its gradient.
  static Tensor Loss(const Tensor& w, Use use, int rank, int step) {
    const int64_t row = (rank + step) % w.size(0);
    const auto look_up = [&](std::vector<int64_t> of) {
      return torch::embedding(w, torch::tensor(of, torch::kLong), -1, false, /*sparse=*/true).sum();
    };
    switch (use) {
      case kRows:
        return look_up({row, 0, row}) * (1 + rank);
      case kNoRows:
        return look_up({});
      case kDense:
        return w.sum() * (2 + rank);
      case kZeros:
        return w.sum() * 0;
      default:
        return Tensor();
    }
  }
  static Tensor Gradient(Use use, int64_t rows, int rank, int step) {
    const Tensor w = Parameter({rows, 2});
    Loss(w, use, rank, step).backward();
    return w.grad();
  }

  std::mt19937_64 random;
  int ranks = 0, steps = 0;
  How how = How::kHooks;
  GradientAveragerOptions options;
  std::vector<int64_t> rows;  // by parameter
  std::vector<bool> is_sparse;
  std::vector<std::vector<std::vector<Use>>> uses;  // by rank, by step, by parameter
};

// Each rank has the averages that one process has, and none where that has none: whatever the
// others have used, by whichever way, and whoever has run out of batches.
TEST(GradientAveragerTest, RandomReplicasHaveTheGradientsOfOneProcess) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const RandomReplicas plan(seed);
    using How = RandomReplicas::How;
    RunRanks(plan.ranks, [&](Group group) {
      const int rank = group->rank();
      std::vector<NamedTensor> named;
      for (size_t k = 0; k < plan.rows.size(); ++k) {
        named.push_back({.name = absl::StrCat(k),
                         .tensor = Parameter({plan.rows[k], 2}),
                         .sparse_gradient = plan.is_sparse[k]});
      }
      const auto averager = NewAverager(group, named, {}, plan.options);
      const bool of_context = plan.how == How::kContext || plan.how == How::kInBackwardOfContext;
      for (int step = 0; step <= plan.steps; ++step) {
        ContextRecord context(1 + step);
        for (const NamedTensor& each : named) each.tensor.mutable_grad().reset();
        absl::Status status;
        bool others = true;
        if (!plan.IsActive(rank, step)) {
          const auto joined = of_context ? averager->Join(context) : averager->Join();
          status = joined.status();
          others = joined.ok() && *joined;
        } else {
          const auto& uses = plan.uses[rank][step];
          if (plan.how == How::kInBackwardOfContext) {
            status = averager->AverageInBackward(context);
          }
          Tensor loss;
          for (size_t k = 0; k < named.size(); ++k) {
            if (uses[k] == RandomReplicas::kUnused) continue;
            if (of_context) {
              AddGradient(context, named[k].tensor,
                          RandomReplicas::Gradient(uses[k], plan.rows[k], rank, step));
              continue;
            }
            const Tensor part = RandomReplicas::Loss(named[k].tensor, uses[k], rank, step);
            loss = loss.defined() ? loss + part : part;
          }
          if (loss.defined()) status.Update(StatusOfBackward(loss));
          if (of_context) {
            status.Update(averager->Average(context));
          } else if (plan.how == How::kByHand || !loss.defined()) {
            status.Update(averager->Average());
          }
        }
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_EQ(others, step < plan.steps) << "step " << step;
        if (!others) return;
        for (size_t k = 0; k < named.size(); ++k) {
          // One process: it adds up what the ranks have.
          Tensor sum;
          int active = 0;
          for (int from = 0; from < plan.ranks; ++from) {
            if (!plan.IsActive(from, step)) continue;
            ++active;
            const auto use = plan.uses[from][step][k];
            if (use == RandomReplicas::kUnused) continue;
            const Tensor part = RandomReplicas::Gradient(use, plan.rows[k], from, step).to_dense();
            sum = sum.defined() ? sum + part : part;
          }
          const Tensor gradient = of_context ? context.GradientsOf({named[k].tensor}).value()[0]
                                             : named[k].tensor.grad();
          ASSERT_EQ(gradient.defined(), sum.defined())
              << "parameter " << k << ", step " << step << ", rank " << rank;
          if (!sum.defined()) continue;
          EXPECT_EQ(gradient.is_sparse(), plan.is_sparse[k]);
          const Tensor average = sum / (plan.options.divide_by_active ? active : plan.ranks);
          EXPECT_TRUE(gradient.to_dense().equal(average))
              << "parameter " << k << ", step " << step << ", rank " << rank << ": " << gradient
              << average;
        }
      }
    });
  }
}

}  // namespace
}  // namespace distgrad
