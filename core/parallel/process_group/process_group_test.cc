// Collectives over ranks, how ranks meet, and ranks that go, are silent or never come.
#include "core/parallel/process_group/process_group.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/membership/start.h"
#include "core/membership/store.h"
#include "core/membership/store/in_process_store.h"
#include "core/parallel/process_group/c10d_store.h"
#include "tests/testing/forwarding_store.h"
#include "tests/testing/key_watch.h"
#include "tests/testing/ranks.h"

namespace distgrad {
namespace {

using at::Tensor;

bool Contains(const absl::Status& status, absl::string_view text) {
  return absl::StrContains(status.message(), text);
}

ProcessGroupOptions Alone() {
  return {.name = "alone", .store = NewInProcessStore(), .cluster_key = KeyOfSuite()};
}

TEST(ProcessGroupTest, Averages) {
  RunRanks(3, [](std::shared_ptr<ProcessGroup> group) {
    const double rank = group->rank();
    std::vector<Tensor> tensors = {at::full({2, 3}, rank),
                                   at::full({5}, rank, at::kDouble),
                                   at::full({3, 2}, 10 * rank).t(),
                                   at::full({}, rank, at::kHalf),
                                   at::full({2}, rank, at::kComplexFloat),
                                   at::full({2}, rank, at::kBFloat16),
                                   at::zeros({0})};
    const absl::Status status = group->Average(tensors);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(tensors[0].equal(at::ones({2, 3})));
    EXPECT_TRUE(tensors[1].equal(at::ones({5}, at::kDouble)));
    EXPECT_TRUE(tensors[2].equal(at::full({2, 3}, 10.0f)));
    EXPECT_EQ(tensors[3].item<float>(), 1);
    EXPECT_TRUE(tensors[4].equal(at::ones({2}, at::kComplexFloat)));
    EXPECT_TRUE(tensors[5].equal(at::ones({2}, at::kBFloat16)));
  });
}

// Elements are those of the same place, wherever in memory that is.
TEST(ProcessGroupTest, StridesNeedNotBeTheSameOnAllRanks) {
  RunRanks(2, [](std::shared_ptr<ProcessGroup> group) {
    const int rank = group->rank();
    const Tensor values = at::arange(12, at::kFloat).view({4, 3});
    const Tensor sum = rank == 0 ? values.clone() : values.t().contiguous().t();
    absl::Status status = group->Average({sum});
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(sum.equal(values)) << sum;
    for (const int root : {0, 1}) {
      const Tensor tensor = rank == root ? sum.clone() : at::full({4, 3}, -1.0f);
      status = group->Broadcast({tensor}, root);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(tensor.equal(values)) << tensor;
    }
  });
}

TEST(ProcessGroupTest, AveragesOfFloat16AreOnesWhoseSumIsTooLarge) {
  RunRanks(8, [](std::shared_ptr<ProcessGroup> group) {
    const std::vector<Tensor> tensors = {at::full({3}, 32768, at::kHalf),
                                         at::full({2, 2}, -57344, at::kHalf)};
    const absl::Status status = group->Average(tensors);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(tensors[0].equal(at::full({3}, 32768, at::kHalf))) << tensors[0];
    EXPECT_TRUE(tensors[1].equal(at::full({2, 2}, -57344, at::kHalf))) << tensors[1];
  });
}

TEST(ProcessGroupTest, WhatHasNoAveragesIsRefusedBeforeAnythingBegins) {
  const auto group = ProcessGroup::Create(Alone());
  ASSERT_TRUE(group.ok()) << group.status();
  for (const at::ScalarType dtype : {at::kLong, at::kByte, at::kBool, at::kFloat8_e5m2}) {
    const absl::Status status = (*group)->Average({at::ones({2}), at::ones({2}).to(dtype)});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "tensor 1 is of " + std::string(c10::toString(dtype)))) << status;
  }
  EXPECT_EQ((*group)->collectives(), 0);
  EXPECT_TRUE((*group)->status().ok());
  const Tensor complex = at::ones({2}, at::kComplexDouble);
  EXPECT_TRUE((*group)->Average({complex}).ok());
}

TEST(ProcessGroupTest, BroadcastsAnyDtype) {
  RunRanks(3, [](std::shared_ptr<ProcessGroup> group) {
    std::vector<Tensor> tensors;
    for (const at::ScalarType dtype :
         {at::kFloat, at::kLong, at::kBool, at::kComplexDouble, at::kFloat8_e5m2}) {
      tensors.push_back(at::full({3}, group->rank() == 1 ? 1 : 0).to(dtype));
    }
    const absl::Status status = group->Broadcast(tensors, 1);
    ASSERT_TRUE(status.ok()) << status;
    for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.to(at::kFloat).equal(at::ones({3})));
    EXPECT_EQ(group->Broadcast(tensors, 3).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(group->status().ok()) << "that harmed nobody";
  });
}

// Which torch lets nobody write to outside of that mode.
TEST(ProcessGroupTest, TakesTensorsOfInferenceMode) {
  RunRanks(2, [](std::shared_ptr<ProcessGroup> group) {
    std::vector<Tensor> tensors = {at::full({2}, group->rank(), at::kFloat)}, sparse;
    {
      const c10::InferenceMode mode;
      for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
        tensors.push_back(at::full({2}, group->rank(), dtype));
      }
      // Half cannot be added there, by torch.
      sparse.push_back(at::full({2}, group->rank() + 1, at::kFloat).to_sparse());
    }
    const int64_t version = tensors[0]._version();
    absl::Status status = group->Average(tensors);
    ASSERT_TRUE(status.ok()) << status;
    for (const Tensor& tensor : tensors) {
      EXPECT_TRUE(tensor.to(at::kFloat).equal(at::full({2}, 0.5))) << tensor;
    }
    status = group->Average(sparse);
    ASSERT_TRUE(status.ok()) << status;
    for (const Tensor& tensor : sparse) {
      EXPECT_TRUE(tensor.to_dense().equal(at::full({2}, 1.5))) << tensor;
    }
    EXPECT_GT(tensors[0]._version(), version) << "a backward that needs its value would not see it";
    {
      const c10::InferenceMode mode;
      for (const Tensor& tensor : tensors) tensor.fill_(group->rank());
    }
    status = group->Broadcast(tensors, 1);
    ASSERT_TRUE(status.ok()) << status;
    for (const Tensor& tensor : tensors) {
      EXPECT_TRUE(tensor.to(at::kFloat).equal(at::ones({2}))) << tensor;
    }
  });
}

TEST(ProcessGroupTest, MeetsInStoresOfC10dAsOftenAsOneLikes) {
  const auto store = StoreOfC10d(c10::make_intrusive<c10d::HashStore>());
  for (int time = 0; time < 3; ++time) {
    RunRanks(2,
             [](std::shared_ptr<ProcessGroup> group) {
               const Tensor tensor = at::full({}, group->rank(), at::kFloat);
               const absl::Status status = group->Average({tensor});
               EXPECT_TRUE(status.ok()) << status;
               EXPECT_EQ(tensor.item<float>(), 0.5);
             },
             {.store = store});
  }
  EXPECT_EQ(store->Get("nothing", absl::InfinitePast()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(store->Get("nothing", absl::Now() + absl::Milliseconds(5)).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(*store->Add("count", 2, absl::InfinitePast()), 2);
  EXPECT_EQ(*store->Get("count", absl::InfinitePast()), "2");
  EXPECT_TRUE(store->Delete("count", absl::InfinitePast()).ok());
  EXPECT_EQ(store->Add("count", 1, absl::InfinitePast()).value(), 1);
  const std::string keys[] = {"nothing", "count"};
  const std::vector<Store::Value> values = {std::nullopt, "1"};
  EXPECT_EQ(store->GetEach(keys, absl::InfinitePast()).value(), values);
  EXPECT_EQ(store->AwaitChange(keys, std::vector<Store::Value>(2), absl::InfiniteFuture()).value(),
            values);
}

// A program may make a group anew for each epoch, or after each failure, as long as it runs.
TEST(ProcessGroupTest, AGroupThatIsMadeAgainLeavesNothingOfTheFormerOne) {
  const auto store = std::make_shared<KeyWatch>(NewInProcessStore());
  size_t keys = 0;
  for (int i = 0; i < 100; ++i) {
    const bool fails = i % 10 == 5;
    // Where one rank fails before the other's Create() has returned, that returns the error, too.
    absl::Barrier all_have_it(2);
    RunRanks(2,
             [&, fails](std::shared_ptr<ProcessGroup> group) {
               all_have_it.Block();
               if (fails) group->Fail(absl::CancelledError("the epoch is over"));
               EXPECT_EQ(group->Average({at::ones({3})}).ok(), !fails);
             },
             {.store = store});
    if (i == 0) keys = store->keys().size();
    if (!fails) {
      ASSERT_EQ(store->keys().size(), keys) << i;
    }
  }
}

TEST(ProcessGroupTest, OurStoreIsOneOfC10d) {
  const auto store = C10dStoreOf(NewInProcessStore(), absl::Milliseconds(5));
  EXPECT_FALSE(store->check({"a"}));
  store->set("a", "b");
  EXPECT_TRUE(store->clone()->check({"a"}));
  EXPECT_EQ(store->get_to_str("a"), "b");
  EXPECT_EQ(store->add("n", 3), 3);
  EXPECT_TRUE(store->deleteKey("a"));
  EXPECT_FALSE(store->deleteKey("a"));
  EXPECT_FALSE(store->check({"a", "n"}));
  store->set("a", "b");
  EXPECT_THROW(store->get("missing"), c10::Error);
  EXPECT_THROW(store->wait({"a", "missing"}), c10::Error);
  EXPECT_THROW(store->getNumKeys(), c10::Error);
}

TEST(ProcessGroupTest, AKeyThatAStoreDoesNotDeleteIsAnErrorOfC10d) {
  class Keeps final : public ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Delete(const std::string&, Deadline) override {
      return absl::UnavailableError("the store is gone");
    }
  };
  const auto store =
      C10dStoreOf(std::make_shared<Keeps>(NewInProcessStore()), absl::Milliseconds(5));
  store->set("a", "b");
  EXPECT_THROW(store->deleteKey("a"), c10::Error);
}

TEST(ProcessGroupTest, ARankThatDoesNotComeIsNamed) {
  ProcessGroupOptions options = Alone();
  options.size = 3;
  options.join_timeout = absl::Milliseconds(50);
  const absl::Status status = ProcessGroup::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(Contains(status, "process group 'alone' (rank 0 of 3, gloo)")) << status;
  EXPECT_TRUE(Contains(status, "1, 2")) << status;
}

// The other rank has come, and stands still before it connects.
TEST(ProcessGroupTest, ConnectingTheRanksIsPartOfJoining) {
  absl::Status status;
  absl::Duration enough = absl::Milliseconds(50);
  do {
    enough *= 2;
    ProcessGroupOptions options = Alone();
    options.size = 2;
    options.timeout = absl::Minutes(1);
    options.join_timeout = enough;
    std::thread other([&] {
      StoreOfThisStart(std::make_shared<PrefixStore>("group/alone/", options.store), 1, 2,
                       absl::Now() + enough)
          .status()
          .IgnoreError();
    });
    status = ProcessGroup::Create(options).status();
    other.join();
    ASSERT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  } while (!Contains(status, "connecting the ranks"));
  EXPECT_TRUE(Contains(status, "some rank took longer than ")) << status;
  EXPECT_FALSE(Contains(status, "took longer than 1m:")) << status << ": that of collectives";
}

TEST(ProcessGroupTest, ChecksItsOptions) {
  const auto code = [](ProcessGroupOptions options) {
    return ProcessGroup::Create(std::move(options)).status().code();
  };
  EXPECT_EQ(code(Alone()), absl::StatusCode::kOk);
  ProcessGroupOptions options = Alone();
  options.store = nullptr;
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.rank = 1;
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.backend = "mpi";
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.timeout = absl::InfiniteDuration();
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.join_timeout = absl::ZeroDuration();
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.name = "a/b";
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.cluster_key = "short";
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Alone();
  options.host = "lo";
  EXPECT_EQ(code(options), absl::StatusCode::kOk);
  options.host = "no.such.host.invalid";
  const absl::Status status = ProcessGroup::Create(options).status();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(Contains(status, "connecting the ranks")) << status;
}

// In builds with CUDA and without.
TEST(ProcessGroupTest, NcclWithoutAGpuIsAnError) {
  if (at::hasCUDA()) GTEST_SKIP() << "this machine has a GPU";
  ProcessGroupOptions options = Alone();
  options.backend = "nccl";
  const absl::Status status = ProcessGroup::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(Contains(status, "process group 'alone': NCCL: ")) << status;
}

size_t Threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(ProcessGroupTest, ARankThatGoesIsAnErrorThatStaysAndLeavesNoThread) {
  RunRanks(2, [](std::shared_ptr<ProcessGroup>) {});  // libtorch's own threads
  const size_t before = Threads();
  RunRanks(2, [](std::shared_ptr<ProcessGroup> group) {
    const Tensor tensor = at::ones({4});
    ASSERT_TRUE(group->Average({tensor}).ok());
    if (group->rank() == 1) return;
    const absl::Status status = group->Average({tensor});
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(Contains(status, "process group 'ranks' (rank 0 of 2, gloo): averaging 1 tensors"))
        << status;
    const int64_t collectives = group->collectives();
    EXPECT_EQ(group->Average({tensor}), status);
    EXPECT_EQ(group->Broadcast({tensor}), status);
    EXPECT_EQ(group->status(), status);
    EXPECT_EQ(group->collectives(), collectives) << "nothing was begun any more";
  });
  // The system may list a thread a moment longer than join() waits for it.
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (Threads() > before && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_LE(Threads(), before);
}

// Gloo forgets to tell a collective of a connection that broke while a part of what it sends was
// still to be written.
TEST(ProcessGroupTest, ARankThatGoesInTheMiddleOfALargeTensorIsAnErrorAtOnce) {
  for (const bool sum : {true, false}) {
    RunRanks(2,
             [&](std::shared_ptr<ProcessGroup> group) {
               const Tensor tensor = at::ones({int64_t{32} << 20});
               std::thread fails;
               if (group->rank() == 1) {
                 fails = std::thread([&] {
                   while (group->collectives() == 0) std::this_thread::yield();
                   group->Fail(absl::DataLossError("no disk"));
                 });
               }
               absl::Status status;
               // The first one, unless this machine let it pass before it let the other thread run.
               while (status.ok())
                 status = sum ? group->Average({tensor}) : group->Broadcast({tensor});
               EXPECT_TRUE(Contains(status, "no disk")) << status;
               if (fails.joinable()) fails.join();
             },
             {.timeout = absl::Minutes(30)});
  }
}

// Of a GPU it may well be full. The others have begun what this rank never will.
TEST(ProcessGroupTest, ARankThatLacksMemoryFailsTheOthersAtOnce) {
  for (const bool sum : {true, false}) {
    RunRanks(2,
             [&](std::shared_ptr<ProcessGroup> group) {
               const bool lacks = group->rank() == 0;
               // Packed it would be larger than any address space.
               const Tensor tensor = at::ones({1}).expand({lacks ? int64_t{1} << 46 : 1});
               const absl::Status status =
                   sum ? group->Average({tensor}) : group->Broadcast({tensor});
               EXPECT_EQ(status.code(), lacks ? absl::StatusCode::kResourceExhausted
                                              : absl::StatusCode::kUnavailable)
                   << status;
               EXPECT_TRUE(Contains(status, "can't allocate memory")) << status;
               EXPECT_EQ(group->status(), status);
             },
             {.timeout = absl::Minutes(30)});
  }
}

TEST(ProcessGroupTest, TheFirstRankThatFailsIsTheCause) {
  absl::Barrier all_have_it(3), one_has_failed(3), two_have_failed(3);
  RunRanks(3, [&](std::shared_ptr<ProcessGroup> group) {
    all_have_it.Block();
    if (group->rank() == 0) group->Fail(absl::DataLossError("no disk"));
    one_has_failed.Block();
    if (group->rank() == 1) group->Fail(absl::AbortedError("no patience"));
    two_have_failed.Block();
    if (group->rank() != 2) return;
    const absl::Status status = group->Average({at::ones({3})});
    EXPECT_TRUE(Contains(status, "rank 0 failed: no disk")) << status;
    EXPECT_FALSE(Contains(status, "no patience")) << status;
  });
}

// The others have what they wanted, and are not to lose the group by it.
TEST(ProcessGroupTest, WhatARankCannotStoreAtTheEndIsItsOwnError) {
  for (const bool sum : {true, false}) {
    RunRanks(2,
             [&](std::shared_ptr<ProcessGroup> group) {
               const bool fails = group->rank() == 1;
               // Nobody can write to one whose elements share their memory.
               const Tensor tensor = fails ? at::ones({1}).expand({4}) : at::ones({4});
               const absl::Status status =
                   sum ? group->Average({tensor}) : group->Broadcast({tensor});
               EXPECT_EQ(status.ok(), !fails) << status;
               EXPECT_TRUE(group->status().ok()) << group->status();
               const absl::Status next = group->Average({at::ones({3})});
               EXPECT_TRUE(next.ok()) << next;
             },
             {.timeout = absl::Minutes(30)});
  }
}

// In the first of two buckets, one for each dtype: the others are at the second one.
TEST(ProcessGroupTest, WhatARankCannotStoreInBetweenFailsTheOthersAtOnce) {
  RunRanks(2,
           [&](std::shared_ptr<ProcessGroup> group) {
             const bool fails = group->rank() == 1;
             const Tensor tensor = fails ? at::ones({1}).expand({4}) : at::ones({4});
             const absl::Status status = group->Broadcast({tensor, at::ones({4}, at::kDouble)});
             EXPECT_FALSE(status.ok());
             EXPECT_EQ(group->status(), status);
             EXPECT_TRUE(Contains(status, "single memory location")) << status;
           },
           {.timeout = absl::Minutes(30)});
}

TEST(ProcessGroupTest, WhatIsNotDenseIsNotBroadcastAndHarmsNobody) {
  RunRanks(2, [](std::shared_ptr<ProcessGroup> group) {
    const int64_t before = group->collectives();
    const absl::Status status = group->Broadcast({at::ones({2}), at::eye(2).to_sparse()});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, "tensor 1 is not dense")) << status;
    EXPECT_EQ(group->collectives(), before) << "nothing was begun";
    EXPECT_TRUE(group->Broadcast({at::ones({2})}).ok());
  });
}

TEST(ProcessGroupTest, ARankThatIsSilentIsAnErrorInTime) {
  absl::Notification over;
  RunRanks(2,
           [&](std::shared_ptr<ProcessGroup> group) {
             if (group->rank() == 1) {
               over.WaitForNotification();
               return;
             }
             const absl::Status status = group->Average({at::ones({4})});
             over.Notify();
             EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
             EXPECT_TRUE(Contains(status, "took longer than 5s")) << status;
           },
           {.timeout = absl::Seconds(5)});
}

// With a key it is one at once, which says so. Gloo itself would end the process at a message that
// is too long, and take one that is too short.
TEST(ProcessGroupTest, TensorsOfOtherSizesAreAnError) {
  const bool has_key = std::getenv("DISTGRAD_KEY") != nullptr;
  for (const bool sum : {true, false}) {
    for (const int larger : {0, 1}) {
      RunRanks(2,
               [&](std::shared_ptr<ProcessGroup> group) {
                 const Tensor tensor = at::ones({group->rank() == larger ? 2000 : 1000});
                 const absl::Status status =
                     sum ? group->Average({tensor}) : group->Broadcast({tensor});
                 // The root of a broadcast may be done before the other rank notices.
                 if (!sum && group->rank() == 0) return;
                 SCOPED_TRACE(absl::StrCat("rank ", group->rank(), ", sum ", sum));
                 EXPECT_FALSE(status.ok());
                 EXPECT_EQ(Contains(status, "do all ranks begin the same collectives"), has_key)
                     << status;
               },
               {.timeout = has_key ? absl::Minutes(30) : absl::Milliseconds(500)});
    }
  }
}

// A rank that waits twice in one collective, for one that is late and then for one that is later.
TEST(ProcessGroupTest, TheTimeoutIsThatOfAllWaitsOfACollective) {
  absl::Status status;
  absl::Duration timeout;
  // On a busy machine another rank may be the first whose time is over.
  for (absl::Duration enough = absl::Milliseconds(500);
       !absl::IsDeadlineExceeded(status) && enough < absl::Seconds(20); enough *= 2) {
    timeout = enough;
    absl::Notification begun;
    RunRanks(3,
             [&](std::shared_ptr<ProcessGroup> group) {
               const Tensor tensor = at::ones({3});
               if (group->rank() == 0) {
                 begun.Notify();
                 status = group->Average({tensor});
                 return;
               }
               begun.WaitForNotification();
               absl::SleepFor(0.7 * group->rank() * enough);
               group->Average({tensor}).IgnoreError();
             },
             {.timeout = enough});
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(Contains(status, absl::StrCat("longer than ", absl::FormatDuration(timeout))))
      << status;
  // What Gloo says itself is not how much of it was left; with a cluster key no time is named.
  EXPECT_EQ(
      Contains(status, "waiting "),
      Contains(status, absl::StrCat("waiting ", absl::ToInt64Milliseconds(timeout), "ms for ")))
      << status;
}

}  // namespace
}  // namespace distgrad
