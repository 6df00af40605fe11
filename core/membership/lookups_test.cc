// Finding workers while the store is silent, and until the lookups are closed.
#include "core/membership/lookups.h"

#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/membership/membership.h"
#include "core/membership/store/in_process_store.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {
namespace {

// Says nothing while its door is closed. Thread-safe.
class SilentStore : public ForwardingStore {
 public:
  SilentStore() : ForwardingStore(NewInProcessStore()) {}

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    if (silent) return absl::DeadlineExceededError("the store is silent");
    return ForwardingStore::GetEach(keys, deadline);
  }

  std::atomic<bool> silent{false};
};

class LookupsTest : public testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<WorkerInfo> self = members_.Claim(Later());
    ASSERT_TRUE(self.ok()) << self.status();
    ASSERT_TRUE(members_.Enter(*self, Later()).ok());
  }
  static absl::Time Later() { return absl::Now() + absl::Minutes(2); }

  const std::shared_ptr<SilentStore> store_ = std::make_shared<SilentStore>();
  Membership members_{store_, {.name = "one", .rank = 0, .world_size = 1}};
  Lookups lookups_{"one", &members_};
};

// An answer, which a test waits for.
struct Answer {
  absl::StatusOr<WorkerInfo> found = absl::UnknownError("not run");
  absl::Notification done;

  Directory::Found Take() {
    return [this](absl::StatusOr<WorkerInfo> worker) {
      found = std::move(worker);
      done.Notify();
    };
  }
  absl::StatusOr<WorkerInfo> Wait() {
    done.WaitForNotification();
    return found;
  }
};

TEST_F(LookupsTest, FindsByNameAndById) {
  Answer by_name, by_rank, nobody;
  lookups_.Find("one", Later(), by_name.Take());
  lookups_.Find(WorkerRank{0}, absl::Minutes(2), by_rank.Take());
  lookups_.Find("nobody", Later(), nobody.Take());
  EXPECT_EQ(by_name.Wait()->rank, 0);
  EXPECT_EQ(by_rank.Wait()->name, "one");
  EXPECT_TRUE(absl::IsNotFound(nobody.Wait().status()));
}

// Who has time waits for a silent store, and holds up nobody who has not.
TEST_F(LookupsTest, EachWaitsAsLongAsItsCallerHasTime) {
  store_->silent = true;
  Answer patient, hasty[3];
  lookups_.Find("one", absl::InfiniteFuture(), patient.Take());
  for (Answer& answer : hasty) lookups_.Find("one", absl::InfinitePast(), answer.Take());
  for (Answer& answer : hasty) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(answer.Wait().status())) << answer.found.status();
  }
  EXPECT_FALSE(patient.done.HasBeenNotified());
  store_->silent = false;
  EXPECT_EQ(patient.Wait()->name, "one");
}

// Those included that the store is being asked for just now.
TEST_F(LookupsTest, HowManyWaitIsBounded) {
  constexpr int kMost = 4096;
  for (int round = 0; round < 2; ++round) {
    absl::Notification asked, goes, over;
    std::atomic<int> found{0};
    const auto count = [&](const absl::StatusOr<WorkerInfo>& worker) { found += worker.ok(); };
    lookups_.Find("one", Later(), [&](const absl::StatusOr<WorkerInfo>& worker) {
      asked.Notify();
      if (worker.ok()) goes.WaitForNotification();  // else it is this thread's
      count(worker);
    });
    asked.WaitForNotification();
    for (int i = 1; i < kMost; ++i) lookups_.Find("one", Later(), count);
    Answer beyond;
    lookups_.Find("one", Later(), beyond.Take());
    EXPECT_TRUE(beyond.done.HasBeenNotified());
    ASSERT_TRUE(lookups_.Run([&] { over.Notify(); }));  // behind them
    goes.Notify();
    over.WaitForNotification();
    EXPECT_TRUE(absl::IsResourceExhausted(beyond.Wait().status())) << beyond.found.status();
    EXPECT_EQ(found, kMost);
  }
}

// On their thread, which ends the process if that throws.
TEST_F(LookupsTest, WithoutMemoryEachIsAnsweredAllTheSame) {
  for (const bool silent : {false, true}) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(testing::Message() << silent << ": " << nth);
      store_->silent = silent;
      absl::Notification waits, goes, over;
      // So that all are asked in one turn.
      lookups_.Run([&, nth] {
        waits.Notify();
        goes.WaitForNotification();
        FailAllocation(nth);
      });
      waits.WaitForNotification();
      Answer answers[3], throws;
      lookups_.Find("one", Later(), answers[0].Take());
      lookups_.Find("one", Later(), [&](const absl::StatusOr<WorkerInfo>&) {
        throws.done.Notify();
        throw std::bad_alloc();
      });
      lookups_.Find("one", Later(), answers[1].Take());
      lookups_.Find("nobody", Later(), answers[2].Take());
      lookups_.Run([&] {
        failed = FailAllocation(-1);
        store_->silent = false;
        over.Notify();
      });
      goes.Notify();
      throws.done.WaitForNotification();
      for (Answer& answer : answers) answer.Wait().status().IgnoreError();
      over.WaitForNotification();
    }
  }
  Answer answer;
  lookups_.Find("one", Later(), answer.Take());
  EXPECT_TRUE(answer.Wait().ok());
}

// Who asks hears of it, or is answered.
TEST_F(LookupsTest, WhoHasNoMemoryToAskHearsOfIt) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    std::atomic<int> answers{0};
    absl::Notification waits, goes;
    lookups_.Run([&] {
      waits.Notify();
      goes.WaitForNotification();
    });
    waits.WaitForNotification();
    constexpr int kCount = 40;  // more than a block of a queue holds
    int thrown = 0;
    std::vector<Directory::Found> found(kCount);
    for (auto& each : found) each = [&](const absl::StatusOr<WorkerInfo>&) { ++answers; };
    FailAllocation(nth);
    for (auto& each : found) {
      try {
        lookups_.Find(WorkerRank{0}, absl::Minutes(2), std::move(each));
      } catch (const std::bad_alloc&) {
        ++thrown;
      }
    }
    failed = FailAllocation(-1);
    Answer next;  // with all that waits
    lookups_.Find("one", Later(), next.Take());
    goes.Notify();
    EXPECT_TRUE(next.Wait().ok());
    EXPECT_EQ(answers + thrown, kCount);
  }
}

// Who follows the members would do so no more.
TEST_F(LookupsTest, ATaskWithoutMemoryRunsAgain) {
  std::atomic<int> runs{0};
  absl::Notification done;
  ASSERT_TRUE(lookups_.Run([&] {
    if (++runs < 3) throw std::bad_alloc();
    done.Notify();
  }));
  done.WaitForNotification();
  // Not after the end, though.
  absl::Notification closes;
  ASSERT_TRUE(lookups_.Run([&] {
    if (!closes.HasBeenNotified()) closes.Notify();
    throw std::bad_alloc();
  }));
  closes.WaitForNotification();
  lookups_.Close();
  EXPECT_EQ(runs, 3);
}

TEST_F(LookupsTest, CloseAnswersAll) {
  store_->silent = true;
  Answer patient;
  lookups_.Find("one", absl::InfiniteFuture(), patient.Take());
  lookups_.Close();
  EXPECT_TRUE(absl::IsCancelled(patient.Wait().status())) << patient.found.status();
  Answer late;
  lookups_.Find("one", absl::InfiniteFuture(), late.Take());
  EXPECT_FALSE(late.Wait().ok());
}

}  // namespace
}  // namespace distgrad
