// What a context keeps of gradients: their sums, and why a tensor has none.
#include "core/autograd/context_record.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/autograd/executor/source_node.h"
#include "core/autograd/pass_handle.h"
#include "core/base/ids.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

struct Leaf {
  const at::Tensor tensor = at::full({2}, 1.0).requires_grad_();
  const std::shared_ptr<torch::autograd::Node> node =
      torch::autograd::impl::grad_accumulator(tensor);

  void Add(ContextRecord& record, double gradient) const {
    const at::NoGradGuard no_grad;
    record.Accumulate(static_cast<torch::autograd::AccumulateGrad&>(*node),
                      at::full({2}, gradient));
  }
};

TEST(ContextRecordTest, GradientsAddUp) {
  ContextRecord record(1);
  const Leaf leaf, other;
  leaf.Add(record, 2);
  leaf.Add(record, 3);
  EXPECT_TRUE(record.Gradient(leaf.tensor)->equal(at::full({2}, 5.0)));
  EXPECT_EQ(record.Gradient(other.tensor).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(record.Gradients()->size(), 1u);
  record.Release();
  leaf.Add(record, 3);
  EXPECT_EQ(record.Gradients().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(record.Gradient(leaf.tensor).status().code(), absl::StatusCode::kFailedPrecondition);
}

// The pass fails with that; what is kept until the release is as good as before.
TEST(ContextRecordTest, AGradientThatFindsNoMemoryDoesNoHarm) {
  ContextRecord record(1);
  const Leaf leaf;
  for (int nth = 0, failed = true; failed; ++nth) {
    FailAllocation(nth);
    try {
      leaf.Add(record, 2);
    } catch (...) {  // NOLINT(bugprone-empty-catch): it is no test of what libtorch throws then
    }
    failed = FailAllocation(-1);
    EXPECT_TRUE(record.Gradients().ok());
  }
  EXPECT_EQ(record.Gradients()->size(), 1u);
}

TEST(ContextRecordTest, TheGradientsOfAnotherContextAreMoved) {
  ContextRecord record(1), other(2);
  const Leaf both, here, there;
  both.Add(record, 2);
  here.Add(record, 3);
  both.Add(other, 4);
  there.Add(other, 5);
  const void* const memory = other.Gradient(there.tensor)->data_ptr();
  ASSERT_TRUE(record.TakeGradientsOf(other).ok());
  EXPECT_TRUE(record.Gradient(both.tensor)->equal(at::full({2}, 6.0)));
  EXPECT_TRUE(record.Gradient(here.tensor)->equal(at::full({2}, 3.0)));
  EXPECT_TRUE(record.Gradient(there.tensor)->equal(at::full({2}, 5.0)));
  EXPECT_EQ(record.Gradient(there.tensor)->data_ptr(), memory) << "it was copied";
  EXPECT_TRUE(other.Gradients()->empty());
  both.Add(other, 1);
  EXPECT_TRUE(other.Gradient(both.tensor)->equal(at::full({2}, 1.0)));
  EXPECT_TRUE(record.Gradient(both.tensor)->equal(at::full({2}, 6.0)));
}

// Whichever of them it is, and also in a sum of several contexts.
TEST(ContextRecordTest, OfCopiesOfAParameterOneCountsInNorms) {
  ContextRecord record(1), sum(2);
  const Leaf one, copy, unused;
  one.Add(record, 2);
  copy.Add(record, 2);
  record.SetCountsInNorms(one.tensor, true);
  record.SetCountsInNorms(copy.tensor, false);
  const auto counts = [&](const ContextRecord& of) {
    const auto gradients = of.GradientsInNorms({one.tensor, copy.tensor, unused.tensor});
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    std::vector<bool> there;
    for (const at::Tensor& gradient : *gradients) there.push_back(gradient.defined());
    return there;
  };
  EXPECT_THAT(counts(record), testing::ElementsAre(true, false, false));
  EXPECT_TRUE(record.Gradient(copy.tensor)->equal(at::full({2}, 2.0)));
  ASSERT_TRUE(sum.TakeGradientsOf(record).ok());
  EXPECT_THAT(counts(sum), testing::ElementsAre(true, false, false));
  sum.SetCountsInNorms(one.tensor, false);
  sum.SetCountsInNorms(copy.tensor, true);
  EXPECT_THAT(counts(sum), testing::ElementsAre(false, true, false));
  sum.Release();
  sum.SetCountsInNorms(one.tensor, true);
  EXPECT_EQ(sum.GradientsInNorms({one.tensor}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(ContextRecordTest, TheGradientsOfAContextThatIsAveragedInItsBackwardAreNotSummed) {
  ContextRecord record(1), averaged(2);
  const Leaf leaf;
  leaf.Add(record, 2);
  leaf.Add(averaged, 3);
  averaged.SetLeafObserver([](const at::Tensor&) {});
  EXPECT_EQ(record.TakeGradientsOf(averaged).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(averaged.TakeGradientsOf(record).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(record.Gradient(leaf.tensor)->equal(at::full({2}, 2.0)));
  averaged.SetLeafObserver(nullptr);
  EXPECT_TRUE(record.TakeGradientsOf(averaged).ok());
}

TEST(ContextRecordTest, TheGradientsOfAReleasedContextAreAnErrorAndNothingIsMoved) {
  ContextRecord record(1), other(2), released(3);
  const Leaf leaf;
  leaf.Add(record, 2);
  leaf.Add(other, 3);
  released.Release();
  EXPECT_EQ(record.TakeGradientsOf(released).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(released.TakeGradientsOf(other).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(record.Gradient(leaf.tensor)->equal(at::full({2}, 2.0)));
  EXPECT_TRUE(other.Gradient(leaf.tensor)->equal(at::full({2}, 3.0)));
}

TEST(ContextRecordTest, WhyATensorHasNoGradientIsSaid) {
  ContextRecord record(1);
  const Leaf leaf;
  const auto why = [&](const at::Tensor& tensor) {
    const absl::Status status = record.Gradient(tensor).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(why(leaf.tensor), testing::HasSubstr("no backward"));
  EXPECT_THAT(why(leaf.tensor.detach()), testing::HasSubstr("does not require grad"));
  EXPECT_THAT(why(leaf.tensor * 2), testing::HasSubstr("not a leaf"));
  EXPECT_THAT(why(at::Tensor()), testing::HasSubstr("undefined"));
}

// A pass of which only its number matters.
class NumberedPass : public PassHandle {
 public:
  explicit NumberedPass(PassId id) : id_(id) {}
  PassId id() const override { return id_; }
  void OnNotices(WorkerRank, std::vector<Notice>, RunHere) override {}
  void OnNewRecv(size_t, EdgeEnd) override {}
  void OnLostSend(EdgeId) override {}
  void OnRelease(const absl::Status&) override {}
  void OnPeerLost(WorkerRank, const absl::Status&) override {}
  void Fail(const absl::Status&) override {}
  bool engaged() override { return true; }
  PassState State() override { return {}; }

 private:
  const PassId id_;
};

// A loop of passes over one context, with retain_graph, would otherwise keep all of them.
TEST(ContextRecordTest, APassThatIsOverIsKeptUntilOneSaysThatItIsOverEverywhere) {
  constexpr WorkerRank kSelf = 0, kOther = 1;
  ContextRecord record(1);
  const auto begin = [&](uint64_t counter) {
    const PassId pass = MakeId(kSelf, counter);
    EXPECT_TRUE(
        record.BeginPass(kSelf, [&](PassId) { return std::make_shared<NumberedPass>(pass); }).ok());
    return pass;
  };
  const auto comes = [&](uint64_t counter, PassId settled) {
    const PassId pass = MakeId(kOther, counter);
    const ContextRecord::Found found = record.FindOrAddPass(
        pass, kOther, settled, [&] { return std::make_shared<NumberedPass>(pass); });
    EXPECT_NE(found.run, nullptr) << found.over;
    EXPECT_FALSE(found.done);
    return pass;
  };
  const auto end = [&](PassId pass) { record.EndPass(pass, absl::OkStatus()); };
  const auto is_kept = [&](PassId pass) { return record.FindPass(pass).done; };

  // Those of another worker, which says in later ones which are over.
  const PassId theirs[] = {comes(1, 0), comes(2, 0), comes(3, 0)};
  for (const PassId pass : theirs) end(pass);
  for (const PassId pass : theirs) EXPECT_TRUE(is_kept(pass));
  comes(4, theirs[1]);
  EXPECT_FALSE(is_kept(theirs[0]));
  EXPECT_FALSE(is_kept(theirs[1]));
  EXPECT_TRUE(is_kept(theirs[2])) << "nobody has said so of this one";

  // Its own, of which it knows that itself.
  const PassId first = begin(1);
  end(first);
  EXPECT_TRUE(is_kept(first)) << "none has begun since";
  const PassId second = begin(2);
  EXPECT_FALSE(is_kept(first));
  const PassId third = begin(3);
  end(third);
  begin(4);
  EXPECT_TRUE(is_kept(third)) << "the second is in flight, and passes are over in their order";
  end(second);
  begin(5);
  EXPECT_FALSE(is_kept(second)) << "all before the fourth are over";
  EXPECT_FALSE(is_kept(third));
  EXPECT_TRUE(is_kept(theirs[2])) << "it is another worker's";

  // The other worker says nothing of passes that are not its own, though their ids are lower.
  const PassId own = begin(6);
  end(own);
  comes(5, theirs[2]);
  EXPECT_FALSE(is_kept(theirs[2]));
  EXPECT_TRUE(is_kept(own)) << "none has begun since";
}

// However many fail, and where there was no memory for one of them.
TEST(ContextRecordTest, ThePassesThatFailedAreForgottenInTheirOrder) {
  constexpr PassId kPasses = 200, kRemembered = 1024;
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    ContextRecord record(1);
    const absl::Status why = absl::UnavailableError("it failed");
    FailAllocation(nth);
    for (PassId pass = 1; pass <= kPasses; ++pass) {
      try {
        record.EndPass(pass, why);
      } catch (const std::bad_alloc&) {
        record.EndPass(pass, why);  // as who ends it does
      }
    }
    failed = FailAllocation(-1);
    EXPECT_FALSE(record.FindPass(kPasses).over.ok());
    for (PassId pass = 1; pass <= kRemembered; ++pass) record.EndPass(kPasses + pass, why);
    for (PassId pass = 1; pass <= kPasses; ++pass) {
      EXPECT_TRUE(record.FindPass(pass).over.ok()) << pass;
    }
    EXPECT_FALSE(record.FindPass(kPasses + kRemembered).over.ok());
  }
}

TEST(ContextRecordTest, NoEdgeBeginsWithALostWorkerAndNothingInAReleasedOne) {
  ContextRecord record(1);
  const WorkerRank lost = 2, other = 3;
  ASSERT_TRUE(record.AddPeer(lost).ok());
  EXPECT_TRUE(record.LosePeer(lost, absl::UnavailableError("its cable is cut")));
  for (const absl::Status& status :
       {record.AddSend({{5, lost}, nullptr}), record.AddRecv({{6, lost}, {}}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("its cable is cut"));
  }
  EXPECT_TRUE(record.AddRecv({{6, other}, {}}).ok());
  record.Release();
  const auto begun = record.BeginPass(0, [](PassId) {
    ADD_FAILURE() << "no pass is made";
    return std::make_shared<NumberedPass>(MakeId(0, 1));
  });
  for (const absl::Status& status :
       {begun.status(), record.AddPeer(other), record.AddSend({{5, other}, nullptr}),
        record.AddRecv({{6, other}, {}}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  }
}

// The thread that received a message would serve no other one meanwhile.
TEST(ContextRecordTest, AGraphIsCheapIfWhatIsBehindAllOfItsSendsIs) {
  ContextRecord record(1);
  EXPECT_TRUE(record.CheapToRunInline());
  const auto add = [&record](EdgeId edge, const at::Tensor& sent) {
    ASSERT_TRUE(record.AddSend({{edge, 2}, MakeSourceNode({sent})}).ok());
  };
  add(5, at::full({2}, 1.0).requires_grad_() * 2);
  EXPECT_TRUE(record.CheapToRunInline());
  add(6, at::full({100, 100}, 1.0).requires_grad_() * 2);
  EXPECT_FALSE(record.CheapToRunInline());
  record.RemoveSend(6);
  EXPECT_TRUE(record.CheapToRunInline());
}

// What a thread does while torch adds, on that thread.
std::function<void()>* in_addition = nullptr;

TEST(ContextRecordTest, AdditionsToTwoLeavesGoOnAtOnce) {
  ContextRecord record(1);
  const Leaf leaf, other;
  leaf.Add(record, 2);
  other.Add(record, 2);
  std::thread second;
  absl::Notification added;
  bool was_added = false;
  std::function<void()> body = [&] {
    // While this addition is in flight, and as long as it takes.
    second = std::thread([&] {
      other.Add(record, 3);
      added.Notify();
    });
    was_added = added.WaitForNotificationWithTimeout(absl::Seconds(30));
  };
  in_addition = &body;
  const at::CallbackHandle callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (std::string(function.name()) == "aten::add_") (*in_addition)();
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  leaf.Add(record, 3);
  at::removeCallback(callback);
  ASSERT_TRUE(second.joinable()) << "torch adds otherwise";
  second.join();
  EXPECT_TRUE(was_added);
  EXPECT_TRUE(record.Gradient(leaf.tensor)->equal(at::full({2}, 5.0)));
  EXPECT_TRUE(record.Gradient(other.tensor)->equal(at::full({2}, 5.0)));
}

}  // namespace
}  // namespace distgrad
