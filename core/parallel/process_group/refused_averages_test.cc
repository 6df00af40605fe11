// Averages that a thread may not begin, as over NCCL where its stream is being captured into a CUDA
// graph: they are refused before anything begins, and the group goes on. The backend is Gloo, and
// whether threads may begin something over it is for the test to say.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "core/autograd/context_record.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/new_backend.h"
#include "core/parallel/process_group/process_group.h"
#include "tests/testing/ranks.h"
#include "tests/testing/status_of.h"

namespace distgrad {

// The linker's name of the function that the next one is called in place of.
NewBackend RealGlooBackend(const BackendPlace& place) __asm__(
    "__real__ZN8distgrad14NewGlooBackendERKNS_12BackendPlaceE");

namespace {

using at::Tensor;
using Group = std::shared_ptr<ProcessGroup>;

// Whether what this thread calls is captured. Backwards of the CPU run on the thread that calls
// them.
thread_local bool capturing = false;
// What the backend throws when this thread begins something; "": nothing.
thread_local std::string thrown;

}  // namespace

NewBackend GlooBackendThatAsks(const BackendPlace& place) __asm__(
    "__wrap__ZN8distgrad14NewGlooBackendERKNS_12BackendPlaceE");
NewBackend GlooBackendThatAsks(const BackendPlace& place) {
  NewBackend backend = RealGlooBackend(place);
  backend.may_begin = [] {
    if (!thrown.empty()) throw std::runtime_error(thrown);
    return capturing ? absl::FailedPreconditionError("it is being captured") : absl::OkStatus();
  };
  return backend;
}

namespace {

// While it lives, this thread captures.
class Capture {
 public:
  Capture() { capturing = true; }
  ~Capture() { capturing = false; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
};

void ExpectRefused(const absl::Status& status, const ProcessGroup& group) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "it is being captured")) << status;
  EXPECT_TRUE(group.status().ok()) << group.status();
}

Tensor Parameter() { return torch::ones({8}).requires_grad_(); }

std::unique_ptr<GradientAverager> NewAverager(const Group& group,
                                              std::vector<NamedTensor> parameters,
                                              bool in_backward = true) {
  auto averager = GradientAverager::Create(
      group, std::move(parameters), {},
      {.bucket_bytes = 64, .first_bucket_bytes = 16, .in_backward = in_backward});
  EXPECT_TRUE(averager.ok()) << averager.status();
  return averager.ok() ? *std::move(averager) : nullptr;
}

TEST(RefusedAveragesTest, ABackwardMayBeDoneAgainOutsideOfTheCapture) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter(), last = Parameter();
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    const int64_t before = group->collectives();
    const auto loss = [&] { return (first * last).sum() * (1 + group->rank()); };
    {
      const Capture capture;
      ExpectRefused(StatusOf([&] { loss().backward(); }), *group);
    }
    EXPECT_EQ(group->collectives(), before) << "nothing was begun";
    for (const Tensor& parameter : {first, last}) parameter.mutable_grad() = Tensor();
    for (int step = 1; step <= 2; ++step) {
      const absl::Status status = StatusOf([&] { loss().backward(); });
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(first.grad().equal(torch::full({8}, 1.5f * static_cast<float>(step))))
          << first.grad();
    }
  });
}

// The others know nothing of it, and wait until it comes again.
TEST(RefusedAveragesTest, ARankThatCapturesAloneRepeatsItsBackwardForThoseThatWait) {
  absl::Notification waits;
  RunRanks(2, [&](Group group) {
    const Tensor first = Parameter(), last = Parameter();
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    const int64_t before = group->collectives();
    const auto backward = [&] {
      const Tensor middle = first * 2;
      if (group->rank() == 0) {
        middle.register_hook([&](const Tensor&) {
          EXPECT_GT(group->collectives(), before) << "the bucket of the last one has begun";
          if (!waits.HasBeenNotified()) waits.Notify();
        });
      }
      (middle * last).sum().backward();
    };
    if (group->rank() == 1) {
      waits.WaitForNotification();
      {
        const Capture capture;
        ExpectRefused(StatusOf(backward), *group);
      }
      EXPECT_EQ(group->collectives(), before) << "nothing was begun";
      for (const Tensor& parameter : {first, last}) parameter.mutable_grad() = Tensor();
    }
    for (int step = 1; step <= 2; ++step) {
      const absl::Status status = StatusOf(backward);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(first.grad().equal(torch::full({8}, 2.0f * static_cast<float>(step))))
          << first.grad();
    }
  });
}

// No hook begins a bucket, for the last parameter has no gradient: the end of the backward would.
TEST(RefusedAveragesTest, TheEndOfABackwardIsRefusedAndLeavesNothing) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter(), last = Parameter();
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    const int64_t before = group->collectives();
    const Tensor twice = first * 2;
    // Before the averager's own, which it asks for at the first gradient of a parameter.
    twice.register_hook([](const Tensor&) {
      torch::autograd::Engine::get_default_engine().queue_callback([] { capturing = true; });
    });
    const absl::Status refused = StatusOf([&] { twice.sum().backward(); });
    capturing = false;
    ExpectRefused(refused, *group);
    EXPECT_EQ(group->collectives(), before) << "nothing was begun";
    first.mutable_grad() = Tensor();
    // The last one comes first, and its bucket alone is complete then.
    const absl::Status again = StatusOf([&] { ((first * 2) * last).sum().backward(); });
    ASSERT_TRUE(again.ok()) << again;
    for (const Tensor& parameter : {first, last}) {
      EXPECT_TRUE(parameter.grad().equal(torch::full({8}, 2.0f))) << parameter.grad();
    }
  });
}

// The other ranks have a part of it, and would wait for the rest.
TEST(RefusedAveragesTest, ABackwardWhoseFirstBucketHasBegunFailsTheGroup) {
  RunRanks(2, [](Group group) {
    const Tensor first = Parameter(), last = Parameter();
    const auto averager = NewAverager(group, {{"first", first}, {"last", last}});
    const Tensor middle = first * 2;
    if (group->rank() == 1) {
      middle.register_hook([&](const Tensor&) {
        EXPECT_GT(group->collectives(), 0);
        capturing = true;
      });
    }
    const absl::Status status = StatusOf([&] { (middle * last).sum().backward(); });
    capturing = false;
    EXPECT_TRUE(absl::StrContains(status.message(), "it is being captured")) << status;
    EXPECT_EQ(group->status(), status);
  });
}

// Nor does it go on where the end of the backward begins the second bucket, whose parameter is not
// used.
TEST(RefusedAveragesTest, ABackwardWhoseEndCannotBeginTheRestFailsTheGroup) {
  RunRanks(2, [](Group group) {
    const Tensor never = Parameter(), last = Parameter(), input = Parameter();
    const auto averager = NewAverager(group, {{"never", never}, {"last", last}});
    const Tensor middle = input * 2;
    if (group->rank() == 1) {
      middle.register_hook([&](const Tensor&) {
        EXPECT_GT(group->collectives(), 0);
        capturing = true;
      });
    }
    const absl::Status status = StatusOf([&] { (middle * last).sum().backward(); });
    capturing = false;
    EXPECT_TRUE(absl::StrContains(status.message(), "it is being captured")) << status;
    EXPECT_EQ(group->status(), status);
  });
}

void AddGradient(ContextRecord& context, const Tensor& parameter, Tensor gradient) {
  context.Accumulate(static_cast<torch::autograd::AccumulateGrad&>(
                         *torch::autograd::impl::grad_accumulator(parameter)),
                     std::move(gradient));
}

TEST(RefusedAveragesTest, TheAverageInThePassOfAContextMayBeDoneAfterIt) {
  RunRanks(2, [](Group group) {
    const Tensor w = Parameter();
    const auto averager = NewAverager(group, {{"w", w}}, /*in_backward=*/false);
    ContextRecord context(1);
    ASSERT_TRUE(averager->AverageInBackward(context).ok());
    {
      const Capture capture;
      ExpectRefused(StatusOf([&] { AddGradient(context, w, torch::ones({8})); }), *group);
    }
    const absl::Status status = averager->Average(context);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(context.Gradient(w)->equal(torch::ones({8})));
  });
}

TEST(RefusedAveragesTest, WhatIsAskedForMayBeAskedForAgain) {
  using Ask = std::function<absl::Status(const Group&, GradientAverager&)>;
  const std::vector<std::pair<std::string, Ask>> asks = {
      {"Average", [](auto&, auto& averager) { return averager.Average(); }},
      {"Average of a context",
       [](auto&, auto& averager) {
         ContextRecord context(1);
         return averager.Average(context);
       }},
      {"Join", [](auto&, auto& averager) { return averager.Join().status(); }},
      {"Join of a context",
       [](auto&, auto& averager) {
         ContextRecord context(1);
         return averager.Join(context).status();
       }},
      {"Create",
       [](auto& group, auto&) {
         return GradientAverager::Create(group, {{"w", Parameter()}}, {}).status();
       }},
      {"Average of tensors", [](auto& group, auto&) { return group->Average({torch::ones({3})}); }},
      {"Broadcast", [](auto& group, auto&) { return group->Broadcast({torch::ones({3})}); }},
      {"BeginSum",
       [](auto& group, auto&) -> absl::Status {
         const std::string what = "adding";
         const Tensor tensor = torch::ones({3});
         const auto running = group->BeginSum(tensor, what);
         return running.ok() ? group->Wait(**running) : running.status();
       }},
  };
  for (const auto& [name, ask] : asks) {
    RunRanks(2, [&, name = name, ask = ask](Group group) {
      SCOPED_TRACE(name);
      const auto averager = NewAverager(group, {{"w", Parameter()}}, /*in_backward=*/false);
      const int64_t before = group->collectives();
      {
        const Capture capture;
        ExpectRefused(ask(group, *averager), *group);
      }
      EXPECT_EQ(group->collectives(), before) << "nothing was begun";
      const absl::Status again = ask(group, *averager);
      EXPECT_TRUE(again.ok()) << again;
      EXPECT_GT(group->collectives(), before);
    });
  }
}

// Backends have words alone for it. A connection that the system gives up after its own time, as
// where the other machine is gone, is not one of a rank that is late.
TEST(RefusedAveragesTest, WhatABackendSaysOfTimeIsToldFromALostConnection) {
  for (const auto& [words, code] : std::vector<std::pair<std::string, absl::StatusCode>>{
           {"Timed out waiting 5000ms for recv operation to complete",
            absl::StatusCode::kDeadlineExceeded},
           {"timed out connecting: SO_ERROR: Connection timed out, remote=[10.0.0.2]:31625",
            absl::StatusCode::kDeadlineExceeded},
           {"Read error [10.0.0.2]:31625: Connection timed out", absl::StatusCode::kUnavailable},
           {"Read error [10.0.0.2]:31625: Connection reset by peer",
            absl::StatusCode::kUnavailable}}) {
    RunRanks(1, [words = words, code = code](Group group) {
      thrown = words;
      const absl::Status status = group->Average({torch::ones({2})});
      thrown.clear();
      EXPECT_EQ(status.code(), code) << status;
      EXPECT_EQ(absl::StrContains(status.message(), "some rank took longer"),
                code == absl::StatusCode::kDeadlineExceeded)
          << status;
      EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
    });
  }
}

}  // namespace
}  // namespace distgrad
