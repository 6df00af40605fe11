// Starting, joining, leaving and losing workers, and barriers among those that remain.
#include "core/membership/membership.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/await_memory.h"
#include "core/base/status.h"
#include "core/membership/store/in_process_store.h"
#include "core/membership/store/signed_store.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/forwarding_store.h"
#include "tests/testing/no_threads.h"

namespace distgrad {
namespace {

using Result = absl::StatusOr<std::vector<WorkerInfo>>;

absl::Time Later() { return absl::Now() + absl::Minutes(2); }
absl::Time Soon() { return absl::Now() + absl::Milliseconds(400); }

WorkerInfo Worker(int rank, std::string name = "") {
  WorkerInfo worker;
  worker.rank = static_cast<WorkerRank>(rank);
  worker.name = name.empty() ? absl::StrCat("worker", rank) : std::move(name);
  worker.address = absl::StrCat("tcp://127.0.0.1:", 4000 + rank);
  return worker;
}

// Claims and enters.
Result Rendezvous(std::shared_ptr<Store> store, const WorkerInfo& self, int world_size,
                  absl::Time deadline) {
  Membership members(std::move(store),
                     {.name = self.name, .rank = self.rank, .world_size = world_size});
  auto claimed = members.Claim(deadline);
  if (!claimed.ok()) return claimed.status();
  claimed->address = self.address;
  return members.Enter(*claimed, deadline);
}

// All at once, each on a thread of its own.
std::vector<Result> JoinAll(std::shared_ptr<Store> store, const std::vector<WorkerInfo>& workers,
                            int world_size, absl::Time deadline) {
  std::vector<Result> results(workers.size(), absl::UnknownError("not run"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers.size(); ++i) {
    threads.emplace_back(
        [&, i] { results[i] = Rendezvous(store, workers[i], world_size, deadline); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(RendezvousTest, AllJoin) {
  for (int world_size : {1, 2, 8}) {
    const auto store = NewInProcessStore();
    std::vector<WorkerInfo> workers;
    for (int rank = world_size - 1; rank >= 0; --rank) workers.push_back(Worker(rank));
    for (const Result& result : JoinAll(store, workers, world_size, Later())) {
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(result->size(), static_cast<size_t>(world_size));
      for (int rank = 0; rank < world_size; ++rank) {
        const WorkerInfo expected = Worker(rank);
        EXPECT_EQ((*result)[rank].rank, rank);
        EXPECT_EQ((*result)[rank].name, expected.name);
        EXPECT_EQ((*result)[rank].address, expected.address);
        EXPECT_EQ(StartOf((*result)[rank].incarnation), 1);
      }
    }
  }
}

TEST(RendezvousTest, NamesWhoIsMissing) {
  const auto store = NewInProcessStore();
  // A deadline in the past only asks.
  const auto first = Rendezvous(store, Worker(2), 5, absl::InfinitePast());
  EXPECT_EQ(first.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(
      absl::StartsWith(first.status().message(), "workers 0, 1, 3, 4 of 5 did not join within "))
      << first.status();
  const auto second = Rendezvous(store, Worker(0), 5, Soon());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(
      absl::StartsWith(second.status().message(), "workers 1, 3, 4 of 5 did not join within "))
      << second.status();
  const auto one = Rendezvous(NewInProcessStore(), Worker(0), 2, Soon());
  EXPECT_TRUE(absl::StartsWith(one.status().message(), "worker 1 of 2 did not join within "))
      << one.status();
  const auto many = Rendezvous(NewInProcessStore(), Worker(0), 1000, Soon());
  EXPECT_TRUE(absl::StrContains(many.status().message(), ", 16 and 983 more of 1000 did not join"))
      << many.status();
}

TEST(RendezvousTest, OneNameTwice) {
  const auto store = NewInProcessStore();
  const std::vector<WorkerInfo> workers = {Worker(0, "same"), Worker(1), Worker(2, "same")};
  for (const Result& result : JoinAll(store, workers, 3, Later())) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(result.status().message(), "workers 0 and 2 have the same name, 'same'");
  }
}

// Nobody starts, also those who still wait for somebody else.
TEST(RendezvousTest, OneRankTwice) {
  const auto store = NewInProcessStore();
  const std::vector<WorkerInfo> workers = {Worker(0), Worker(1, "first"), Worker(1, "second")};
  int refused = 0;
  for (const Result& result : JoinAll(store, workers, 3, Later())) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists) << result.status();
    EXPECT_TRUE(absl::StrContains(result.status().message(), "rank 1")) << result.status();
    refused += absl::StrContains(result.status().message(), "cannot join");
  }
  EXPECT_EQ(refused, 1);
}

TEST(RendezvousTest, RankTakenAfterAllJoined) {
  const auto store = NewInProcessStore();
  for (const Result& result : JoinAll(store, {Worker(0), Worker(1)}, 2, Later())) {
    EXPECT_TRUE(result.ok()) << result.status();
  }
  const auto late = Rendezvous(store, Worker(1, "late"), 2, Later());
  EXPECT_EQ(late.status(), absl::AlreadyExistsError(
                               "worker 'late' cannot join: rank 1 is taken by another worker"));
}

// Counts what it is asked, and does not say what it holds while it has another answer, as a store
// whose process is stopped or gone. Thread-safe.
class WatchedStore : public Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    Count(key);
    return store_->Set(key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    Count(key);
    return store_->Add(key, amount, deadline);
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    absl::MutexLock lock(&mu_);
    ++calls_;
    keys_.erase(key);
    return store_->Delete(key, deadline);
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    {
      absl::MutexLock lock(&mu_);
      ++calls_;
      if (!answer_.ok()) ++unanswered_;
      DG_RETURN_IF_ERROR(answer_);
    }
    return store_->GetEach(keys, deadline);
  }
  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    {
      absl::MutexLock lock(&mu_);
      if (!answer_.ok()) ++unanswered_;
      DG_RETURN_IF_ERROR(answer_);
    }
    return store_->AwaitChange(keys, seen, deadline);
  }

  void set_answer(absl::Status answer) {
    absl::MutexLock lock(&mu_);
    answer_ = std::move(answer);
  }
  int unanswered() const { return Read(unanswered_); }
  int calls() const { return Read(calls_); }  // without those that wait
  size_t keys() const {
    absl::MutexLock lock(&mu_);
    return keys_.size();
  }

 private:
  void Count(const std::string& key) {
    absl::MutexLock lock(&mu_);
    ++calls_;
    keys_.insert(key);
  }
  int Read(const int& count) const {
    absl::MutexLock lock(&mu_);
    return count;
  }

  const std::shared_ptr<Store> store_ = NewInProcessStore();
  mutable absl::Mutex mu_;
  // Guarded by mu_.
  absl::Status answer_;
  int unanswered_ = 0, calls_ = 0;
  std::set<std::string> keys_;
};

const absl::Status& Silence() {
  static const auto* const silence =
      new absl::Status(absl::DeadlineExceededError("the store is silent"));
  return *silence;
}

// A worker that comes back does not take the job for one that has not started.
TEST(RendezvousTest, SilenceOfTheStoreIsNoAnswer) {
  const auto store = std::make_shared<WatchedStore>();
  ASSERT_TRUE(Rendezvous(store, Worker(0), 1, Later()).ok());
  store->set_answer(Silence());
  EXPECT_EQ(Rendezvous(store, Worker(0), 1, Later()).status(), Silence());
  Membership joiner(store, {.name = "late", .join = true});
  EXPECT_EQ(joiner.Claim(Later()).status(), Silence());
  EXPECT_EQ(joiner.Find("worker0", Later()).status(), Silence());
  store->set_answer(absl::OkStatus());
  EXPECT_TRUE(Rendezvous(store, Worker(0), 1, Later()).ok());
}

TEST(RendezvousTest, ABarrierOutlastsTheSilenceOfTheStore) {
  const auto store = std::make_shared<WatchedStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Membership members(store, {.rank = rank, .world_size = 2});
      ASSERT_TRUE(members.Claim(Later()).ok());
      ASSERT_TRUE(members.Enter(Worker(rank), Later()).ok());
      if (rank == 1) {
        store->set_answer(Silence());
        while (store->unanswered() < 3) std::this_thread::yield();
        store->set_answer(absl::OkStatus());
      }
      EXPECT_EQ(members.Barrier(Later()), absl::OkStatus());
      EXPECT_EQ(members.Shutdown(Later()), absl::OkStatus());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Its machine may have been switched off, and nobody but the store could tell who else has come.
TEST(RendezvousTest, ABarrierDoesNotOutlastTheLimitOfTheStore) {
  const auto store = std::make_shared<WatchedStore>();
  Membership members(store, {.world_size = 1, .store_limit = absl::ZeroDuration()});
  ASSERT_TRUE(members.Claim(Later()).ok());
  ASSERT_TRUE(members.Enter(Worker(0), Later()).ok());
  store->set_answer(Silence());
  EXPECT_EQ(members.Barrier(Deadline::Never()),
            absl::UnavailableError("waiting for all workers: the job's store has not answered for "
                                   "0: the store is silent"));
  EXPECT_TRUE(absl::IsUnavailable(members.Shutdown(Deadline::Never())));
  EXPECT_TRUE(absl::IsUnavailable(members.AllEver(Deadline::Never()).status()));
  // It answers again.
  store->set_answer(absl::OkStatus());
  EXPECT_EQ(members.Barrier(Later()), absl::OkStatus());
  EXPECT_EQ(members.Shutdown(Later()), absl::OkStatus());
}

// Whatever it waits for.
TEST(RendezvousTest, WhoClosesWaitsForNoStore) {
  const auto store = std::make_shared<WatchedStore>();
  Membership members(store, {.world_size = 1});
  ASSERT_TRUE(members.Claim(Later()).ok());
  ASSERT_TRUE(members.Enter(Worker(0), Later()).ok());
  store->set_answer(Silence());
  const std::function<absl::Status()> waits[] = {
      [&] { return members.Barrier(Deadline::Never()); },
      [&] { return members.Shutdown(Deadline::Never()); },
      [&] { return members.All(Deadline::Never()).status(); },
      [&] { return members.AllEver(Deadline::Never()).status(); },
  };
  std::vector<std::thread> threads;
  for (const auto& wait : waits) {
    threads.emplace_back([&] { EXPECT_TRUE(absl::IsCancelled(wait())); });
  }
  const int before = store->unanswered();
  while (store->unanswered() < before + 100) std::this_thread::yield();
  members.Close();
  for (std::thread& thread : threads) thread.join();
}

TEST(RendezvousTest, SeveralStartsShareAStore) {
  const auto store = NewInProcessStore();
  for (const char* start : {"1/", "2/"}) {
    const auto prefix = std::make_shared<PrefixStore>(start, store);
    EXPECT_TRUE(Rendezvous(prefix, Worker(0), 1, Later()).ok());
  }
}

TEST(RendezvousTest, BadArguments) {
  const auto store = NewInProcessStore();
  const std::pair<WorkerInfo, int> cases[] = {
      {Worker(0), 0},
      {Worker(0), -1},
      {Worker(2), 2},
      {Worker(0), 70000},
      {Worker(0, std::string(2000, 'x')), 1},
  };
  for (const auto& [worker, world_size] : cases) {
    EXPECT_EQ(Rendezvous(store, worker, world_size, Later()).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(Rendezvous(store, Worker(0), 1, Later()).ok()) << "a bad call left traces";

  WorkerInfo long_address = Worker(0);
  long_address.address = std::string(2000, 'x');
  EXPECT_TRUE(
      absl::IsInvalidArgument(Rendezvous(NewInProcessStore(), long_address, 1, Later()).status()));
}

// The good entry of another worker, as it stands in a store.
std::string GoodEntry() {
  const auto store = NewInProcessStore();
  EXPECT_FALSE(Rendezvous(store, Worker(1), 2, absl::InfinitePast()).ok());
  return store->Get("worker/1", absl::InfinitePast()).value();
}

TEST(RendezvousTest, HostileEntries) {
  const std::string good = GoodEntry();
  std::vector<std::string> entries = {good + "x", std::string(100000, '\xff')};
  for (size_t size = 0; size < good.size(); ++size) entries.push_back(good.substr(0, size));
  std::string other_rank = good;
  other_rank[0] = 7;
  entries.push_back(other_rank);
  std::string long_name = good;
  long_name[19] = long_name[20] = '\xff';  // the length of the name
  entries.push_back(long_name);
  std::string half_left = good;
  half_left[10] = 2;
  entries.push_back(half_left);
  for (const std::string& entry : entries) {
    const auto store = NewInProcessStore();
    ASSERT_TRUE(store->Set("worker/1", entry, Later()).ok());
    ASSERT_TRUE(store->Add("joined", 1, Later()).ok());
    const Result result = Rendezvous(store, Worker(0), 2, Later());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(result.status().message(), "the store's entry of worker 1 is malformed");
  }
}

// ------------------------------------------------------------------------- While the job runs

using Names = std::vector<std::string>;

// A job that has started: "worker0", "worker1" and so on.
class RunningJobTest : public testing::Test {
 protected:
  void Start(int workers) {
    std::vector<std::thread> threads;
    members_.resize(workers);
    for (int rank = 0; rank < workers; ++rank) {
      threads.emplace_back([&, rank] {
        members_[rank] = std::make_unique<Membership>(
            store_, MembershipOptions{.rank = rank, .world_size = workers});
        EXPECT_TRUE(Come(*members_[rank], absl::StrCat("inproc://", rank)).ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // What Claim() and Enter() gave.
  static absl::StatusOr<WorkerInfo> Come(Membership& members, std::string address) {
    absl::StatusOr<WorkerInfo> self = members.Claim(Later());
    if (!self.ok()) return self;
    self->address = std::move(address);
    const Result all = members.Enter(*self, Later());
    if (!all.ok()) return all.status();
    return self;
  }
  absl::StatusOr<WorkerInfo> Come(MembershipOptions options, std::string address = "inproc://new") {
    members_.push_back(std::make_unique<Membership>(store_, std::move(options)));
    return Come(*members_.back(), std::move(address));
  }
  Names Present() {
    Names names;
    const Result all = members_[0]->All(Later());
    EXPECT_TRUE(all.ok()) << all.status();
    for (const WorkerInfo& worker : *all) names.push_back(worker.name);
    return names;
  }

  // All who are members, `times` times.
  void AllWait(int times) {
    std::vector<std::thread> threads;
    for (auto& members : members_) {
      threads.emplace_back([times, m = members.get()] {
        for (int i = 0; i < times; ++i) ASSERT_EQ(m->Barrier(Later()), absl::OkStatus());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const std::shared_ptr<WatchedStore> store_ = std::make_shared<WatchedStore>();
  std::vector<std::unique_ptr<Membership>> members_;
};

TEST_F(RunningJobTest, AWorkerComesBackAsANewIncarnation) {
  Start(2);
  const WorkerInfo before = *members_[0]->Find("worker1", Later());
  const auto back = Come({.rank = 1, .world_size = 2});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rank, 1);
  EXPECT_EQ(StartOf(back->incarnation), 2);
  EXPECT_GT(back->incarnation, before.incarnation);
  EXPECT_EQ(members_[0]->Find(WorkerRank{1}, Later())->incarnation, back->incarnation);
  EXPECT_EQ(members_[0]->Find("worker1", Later())->address, "inproc://new");
  EXPECT_EQ(Present(), (Names{"worker0", "worker1"}));
  // By its name alone, too.
  const auto again = Come({.name = "worker1", .join = true});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->rank, 1);
  EXPECT_EQ(StartOf(again->incarnation), 3);
}

// One that answers only who has time left.
class SlowStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    if (deadline.Passed()) return Silence();
    return ForwardingStore::GetEach(keys, deadline);
  }
};

TEST_F(RunningJobTest, WhoComesBackHasAllOfItsTimeToReadTheStore) {
  Start(2);
  Membership back(std::make_shared<SlowStore>(store_), {.rank = 1, .world_size = 2});
  EXPECT_EQ(Come(back, "inproc://new").status(), absl::OkStatus());
  Membership by_name(std::make_shared<SlowStore>(store_), {.name = "worker1", .join = true});
  EXPECT_EQ(Come(by_name, "inproc://new").status(), absl::OkStatus());
}

TEST_F(RunningJobTest, ARankIsNotTakenByAnotherNameOrForAnotherSize) {
  Start(2);
  const auto other = Come({.name = "other", .rank = 1, .world_size = 2});
  EXPECT_EQ(other.status(), absl::AlreadyExistsError(
                                "worker 'other' cannot join: rank 1 is taken by another worker"));
  EXPECT_TRUE(absl::IsInvalidArgument(Come({.rank = 1, .world_size = 3}).status()));
  EXPECT_EQ(StartOf(members_[0]->Find("worker1", Later())->incarnation), 1);
}

TEST_F(RunningJobTest, WorkersJoinAndLeave) {
  Start(1);
  const auto named = Come({.name = "late", .join = true});
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->rank, 1);
  const auto unnamed = Come({.join = true});
  ASSERT_TRUE(unnamed.ok()) << unnamed.status();
  EXPECT_EQ(unnamed->rank, 2);
  EXPECT_EQ(unnamed->name, "worker2");
  EXPECT_EQ(Present(), (Names{"worker0", "late", "worker2"}));

  ASSERT_TRUE(members_[1]->Leave(Later()).ok());
  EXPECT_EQ(Present(), (Names{"worker0", "worker2"}));
  EXPECT_TRUE(members_[0]->Find("late", Later())->left);
  const auto back = Come({.name = "late", .join = true});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rank, 1);
  EXPECT_EQ(Present(), (Names{"worker0", "late", "worker2"}));
}

// Nobody takes the name of another, whichever of the two has said it.
TEST_F(RunningJobTest, WhoJoinsWithoutANameTakesNoneThatIsTaken) {
  ASSERT_TRUE(Come({.name = "worker1", .rank = 0, .world_size = 1}).ok());
  const auto past_the_start = Come({.join = true});
  ASSERT_TRUE(past_the_start.ok()) << past_the_start.status();
  EXPECT_EQ(past_the_start->name, "worker2");
  EXPECT_EQ(past_the_start->rank, 2);
  ASSERT_TRUE(Come({.name = "worker4", .join = true}).ok());
  const auto past_a_joiner = Come({.join = true});
  ASSERT_TRUE(past_a_joiner.ok()) << past_a_joiner.status();
  EXPECT_EQ(past_a_joiner->name, "worker5");
  EXPECT_EQ(past_a_joiner->rank, 5);
  EXPECT_EQ(Present(), (Names{"worker1", "worker2", "worker4", "worker5"}));
}

TEST_F(RunningJobTest, WhoJoinedWithoutANameComesBackUnderTheOneThatItGot) {
  Start(1);
  ASSERT_EQ(Come({.join = true})->name, "worker1");
  const auto back = Come({.name = "worker1", .join = true});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rank, 1);
  EXPECT_EQ(StartOf(back->incarnation), 2);
  EXPECT_EQ(Present(), (Names{"worker0", "worker1"}));
}

// Is gone from the nth change on, which is still made or is not.
class StoreOfWhoDies : public ForwardingStore {
 public:
  StoreOfWhoDies(std::shared_ptr<Store> store, int changes, bool makes_last)
      : ForwardingStore(std::move(store)), left_(changes), makes_last_(makes_last) {}
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    return Change<absl::Status>([&] { return ForwardingStore::Set(key, value, deadline); });
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    return Change<absl::StatusOr<int64_t>>(
        [&] { return ForwardingStore::Add(key, amount, deadline); });
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    if (left_ <= 0) return Gone();
    return ForwardingStore::GetEach(keys, deadline);
  }
  bool is_gone() const { return left_ <= 0; }

 private:
  static absl::Status Gone() { return absl::UnavailableError("this process is dead"); }
  template <typename Result>
  Result Change(absl::FunctionRef<Result()> change) {
    if (left_ <= 0 || --left_ > 0) return left_ > 0 ? change() : Result(Gone());
    if (makes_last_) change().IgnoreError();
    return Gone();
  }

  int left_;
  const bool makes_last_;
};

// Its name is of use to the next one, wherever it dies, and is that of one member.
TEST_F(RunningJobTest, WhoDiesAsItJoinsTakesNoNameAlong) {
  Start(1);
  Names present{"worker0"};
  for (const bool makes_last : {false, true}) {
    bool has_died = true;
    for (int changes = 1; has_died; ++changes) {
      const std::string name = absl::StrCat("late", changes, makes_last);
      const auto dying = std::make_shared<StoreOfWhoDies>(store_, changes, makes_last);
      Membership late(dying, {.name = name, .join = true});
      const absl::Status came = Come(late, "inproc://dead").status();
      has_died = dying->is_gone();
      ASSERT_EQ(came.ok(), !has_died) << came;
      const auto back = Come({.name = name, .join = true});
      ASSERT_TRUE(back.ok()) << name << ": " << back.status();
      EXPECT_EQ(members_[0]->Find(name, Later())->address, "inproc://new");
      present.push_back(name);
      Names now = Present();
      std::sort(now.begin(), now.end());
      std::sort(present.begin(), present.end());
      EXPECT_EQ(now, present);
    }
  }
  AllWait(1);
}

thread_local bool is_held = false;
thread_local bool is_held_at_set = false;

// Keeps a thread that waits for a change, or sets a key, until it may go on. Thread-safe.
class HoldingStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    if (std::exchange(is_held, false)) {
      held.Notify();
      go_on.WaitForNotification();
    }
    return ForwardingStore::AwaitChange(keys, seen, deadline);
  }
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (std::exchange(is_held_at_set, false)) {
      held.Notify();
      go_on.WaitForNotification();
    }
    return ForwardingStore::Set(key, value, deadline);
  }

  absl::Notification held, go_on;
};

// The second is told the rank though the first has not said it yet.
TEST_F(RunningJobTest, OfTwoThatJoinUnderOneNameBothHaveItsRank) {
  Start(1);
  const auto holding = std::make_shared<HoldingStore>(store_);
  Membership first(holding, {.name = "late", .join = true});
  std::thread joining([&] {
    is_held_at_set = true;
    const auto slow = Come(first, "inproc://slow");
    ASSERT_TRUE(slow.ok()) << slow.status();
    EXPECT_EQ(slow->rank, 1);
    EXPECT_EQ(StartOf(slow->incarnation), 2);
  });
  holding->held.WaitForNotification();
  const auto second = Come({.name = "late", .join = true});
  holding->go_on.Notify();
  joining.join();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->rank, 1);
  EXPECT_EQ(StartOf(second->incarnation), 1);
  EXPECT_EQ(members_[0]->Find("late", Later())->address, "inproc://slow");
  EXPECT_EQ(Present(), (Names{"worker0", "late"}));
}

// With both of them its name is gone, for nobody else could tell whose rank it has; a worker
// without a name takes another one.
TEST_F(RunningJobTest, WhereTwoHaveDiedAsTheyJoinedUnderOneNameTheErrorSaysSo) {
  Start(1);
  const auto kill = [&](const std::string& name) {
    ASSERT_TRUE(store_->Add("claimed/" + name, (int64_t{1} << 32) + 1, Later()).ok());
    ASSERT_TRUE(store_->Add("claimed/" + name, (int64_t{1} << 32) + 2, Later()).ok());
  };
  kill("late");
  kill("worker1");
  Membership third(store_, {.name = "late", .join = true});
  EXPECT_EQ(third.Claim(Soon()).status(),
            absl::AlreadyExistsError("worker 'late' cannot join: several workers have asked for "
                                     "this name at once, and the first of them are late, or have "
                                     "ended; if it stays so, take another name"));
  // It has taken no rank.
  EXPECT_EQ(Come({.join = true})->name, "worker2");
}

// Nor do those that die later, one after the other, and each after it has looked.
TEST_F(RunningJobTest, WhereOneHasDiedWithItsClaimAllTheNextOnesHaveItsRank) {
  Start(1);
  ASSERT_TRUE(store_->Add("joiners", 1, Later()).ok());
  ASSERT_TRUE(store_->Add("claimed/late", (int64_t{1} << 32) + 1, Later()).ok());
  const MembershipOptions options{.name = "late", .join = true, .max_workers = 2};
  for (int i = 0; i < 3; ++i) {
    const auto dying = std::make_shared<StoreOfWhoDies>(store_, 3, /*makes_last=*/false);
    Membership late(dying, options);
    EXPECT_FALSE(Come(late, "inproc://dead").ok());
    EXPECT_TRUE(dying->is_gone());
    EXPECT_TRUE(absl::IsNotFound(store_->Get("name/late", absl::InfinitePast()).status()));
  }
  const auto back = Come(options);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rank, 1);
}

// Counters are not signed.
TEST_F(RunningJobTest, ACounterGivesNobodyTheRankOfAnother) {
  Start(2);
  ASSERT_EQ(Come({.name = "other", .join = true})->rank, 2);
  for (const int64_t claimed :
       {int64_t{-1}, int64_t{7}, int64_t{1} << 32, (int64_t{1} << 32) + 1, (int64_t{1} << 32) + 2,
        (int64_t{1} << 32) + 500, (int64_t{1} << 32) + 70000}) {
    const std::string name = absl::StrCat("late", claimed);
    ASSERT_TRUE(store_->Add("claimed/" + name, claimed, Later()).ok());
    EXPECT_FALSE(Come({.name = name, .join = true}).ok()) << claimed;
  }
  // That gives the next one the rank that "other" has.
  const int64_t joiners = store_->Add("joiners", 0, Later()).value();
  ASSERT_TRUE(store_->Add("joiners", -joiners, Later()).ok());
  EXPECT_FALSE(Come({.name = "early", .join = true}).ok());
  ASSERT_TRUE(store_->Add("joiners", joiners, Later()).ok());
  EXPECT_EQ(Present(), (Names{"worker0", "worker1", "other"}));
  EXPECT_EQ(StartOf(members_[0]->Find("other", Later())->incarnation), 1);
}

// Of a crowd, too, some of whom ask for the names that others get by their ranks.
TEST_F(RunningJobTest, WhoeverJoinsAtOnceNoTwoRanksHaveOneName) {
  constexpr int kCrowd = 24;
  Start(1);
  std::vector<std::thread> threads;
  std::vector<absl::StatusOr<WorkerInfo>> claimed(kCrowd, absl::UnknownError("not run"));
  for (int i = 0; i < kCrowd; ++i) {
    threads.emplace_back([&, i] {
      const std::string names[] = {"", "late", absl::StrCat("worker", 1 + i / 3)};
      Membership late(store_, {.name = names[i % 3], .join = true});
      claimed[i] = late.Claim(Later());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<std::string, int> ranks;
  std::map<int, std::string> names;
  for (const auto& self : claimed) {
    ASSERT_TRUE(self.ok()) << self.status();
    EXPECT_EQ(ranks.emplace(self->name, self->rank).first->second, self->rank) << self->name;
    EXPECT_EQ(names.emplace(self->rank, self->name).first->second, self->name) << self->rank;
  }
  EXPECT_EQ(ranks.size(), names.size());
}

TEST_F(RunningJobTest, NoMoreThanTheLimitJoin) {
  Start(1);
  ASSERT_TRUE(Come({.name = "second", .join = true, .max_workers = 2}).ok());
  for (int i = 0; i < 3; ++i) {
    const auto third = Come({.name = "third", .join = true, .max_workers = 2});
    EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted) << third.status();
  }
  EXPECT_EQ(Come({.name = "third", .join = true, .max_workers = 3})->rank, 2)
      << "a refused one left traces";
  EXPECT_TRUE(absl::IsInvalidArgument(Come({.join = true, .max_workers = 0}).status()));
}

TEST_F(RunningJobTest, AJobThatHasNotStartedIsNotJoined) {
  Membership late(store_, {.name = "late", .join = true});
  const auto claimed = late.Claim(Soon());
  EXPECT_EQ(claimed.status(),
            absl::DeadlineExceededError("the job that is to be joined has not started (or torchrun "
                                        "has, whose jobs nobody joins)"));
}

TEST_F(RunningJobTest, WhoWasNeverThereIsNotFound) {
  Start(1);
  EXPECT_TRUE(absl::IsNotFound(members_[0]->Find("nobody", Later()).status()));
  EXPECT_TRUE(absl::IsNotFound(members_[0]->Find(WorkerRank{7}, Later()).status()));
  ASSERT_TRUE(store_->Set("name/nobody", "0", Later()).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(members_[0]->Find("nobody", Later()).status()));
  ASSERT_TRUE(store_->Set("name/nobody", "-3", Later()).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(members_[0]->Find("nobody", Later()).status()));
}

TEST_F(RunningJobTest, ABarrierNamesWhoHasNotCome) {
  Start(3);
  const absl::Status status = members_[0]->Barrier(Soon());
  EXPECT_EQ(status, absl::DeadlineExceededError("waiting for all workers: 'worker1' (1), "
                                                "'worker2' (2) have not come"));
}

TEST_F(RunningJobTest, ABarrierDoesNotWaitForWhoLeavesOrCameLater) {
  Start(3);
  std::thread waiting([&] { EXPECT_TRUE(members_[0]->Barrier(Later()).ok()); });
  // It has begun once somebody is there.
  ASSERT_TRUE(store_->Get("at/0", Later()).ok());
  ASSERT_TRUE(Come({.name = "late", .join = true}).ok());
  ASSERT_TRUE(Come({.rank = 1, .world_size = 3}).ok());
  ASSERT_TRUE(members_[2]->Leave(Later()).ok());
  waiting.join();

  // The next one is theirs too.
  const absl::Status status = members_[0]->Barrier(Soon());
  EXPECT_EQ(status, absl::DeadlineExceededError("waiting for all workers: 'worker1' (1), "
                                                "'late' (3) have not come"));
  EXPECT_TRUE(members_[3]->Barrier(Soon()).code() == absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(members_[4]->Barrier(Later()).ok());
}

// Its next call is for the same barrier.
TEST_F(RunningJobTest, ABarrierThatFailsIsNotUsedUp) {
  Start(2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(members_[0]->Barrier(absl::InfinitePast())));
  }
  AllWait(3);
  // Whether the other came before that one calls again does not matter.
  EXPECT_TRUE(absl::IsDeadlineExceeded(members_[0]->Barrier(absl::InfinitePast())));
  EXPECT_TRUE(members_[1]->Barrier(Later()).ok());
  EXPECT_TRUE(members_[0]->Barrier(Later()).ok());
  AllWait(1);
}

// Of two threads in one barrier the slower one does not set the worker back.
TEST_F(RunningJobTest, CallsAtTheSameTimeAreOneBarrier) {
  const auto holding = std::make_shared<HoldingStore>(store_);
  Membership members(holding, {.rank = 0, .world_size = 2});
  std::thread other([&] {
    Membership second(store_, {.rank = 1, .world_size = 2});
    ASSERT_TRUE(Come(second, "inproc://1").ok());
    holding->held.WaitForNotification();  // who comes last has to open the barrier
    for (int i = 0; i < 2; ++i) EXPECT_EQ(second.Barrier(Later()), absl::OkStatus());
  });
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  std::thread slow([&] {
    is_held = true;
    EXPECT_EQ(members.Barrier(Later()), absl::OkStatus());
  });
  holding->held.WaitForNotification();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(members.Barrier(Later()), absl::OkStatus());
  other.join();
  holding->go_on.Notify();
  ASSERT_TRUE(store_->Set("changes", "1", Later()).ok());  // so that it looks at once
  slow.join();
  // The other has not come to the third.
  EXPECT_TRUE(absl::IsDeadlineExceeded(members.Barrier(absl::InfinitePast())));
}

// Nor does it take back that the other one has come to the next.
TEST_F(RunningJobTest, WhoIsSlowInABarrierDoesNotTakeBackThatAnotherThreadHasComeToTheNext) {
  const auto holding = std::make_shared<HoldingStore>(store_);
  Membership members(holding, {.rank = 0, .world_size = 2});
  std::thread other([&] {
    Membership second(store_, {.rank = 1, .world_size = 2});
    ASSERT_TRUE(Come(second, "inproc://1").ok());
    EXPECT_EQ(second.Barrier(Later()), absl::OkStatus());
  });
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  std::thread slow([&] {
    is_held_at_set = true;
    EXPECT_EQ(members.Barrier(Later()), absl::OkStatus());
  });
  holding->held.WaitForNotification();
  EXPECT_EQ(members.Barrier(Later()), absl::OkStatus());
  other.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(members.Barrier(absl::InfinitePast())));
  const std::string come = store_->Get("at/0", Later()).value();
  ASSERT_TRUE(absl::EndsWith(come, " 2")) << come;
  holding->go_on.Notify();
  slow.join();
  EXPECT_EQ(store_->Get("at/0", Later()).value(), come);
}

TEST_F(RunningJobTest, EachWorkerAsksAFixedNumberOfTimes) {
  constexpr int kWorkers = 40, kBarriers = 5;
  Start(kWorkers);
  EXPECT_LE(store_->calls(), 12 * kWorkers);
  const int before = store_->calls();
  AllWait(kBarriers);
  EXPECT_LE(store_->calls() - before, 4 * kBarriers * kWorkers);
}

TEST_F(RunningJobTest, BarriersLeaveNothingBehind) {
  Start(4);
  AllWait(3);
  const size_t keys = store_->keys();
  AllWait(30);
  EXPECT_EQ(store_->keys(), keys);
}

TEST_F(RunningJobTest, AJoinerThatFailsIsNoMember) {
  Start(2);
  Membership late(store_, {.name = "late", .join = true});
  absl::StatusOr<WorkerInfo> self = late.Claim(Later());
  ASSERT_TRUE(self.ok()) << self.status();
  self->address = "inproc://late";
  store_->set_answer(Silence());
  EXPECT_EQ(late.Enter(*self, Later()).status(), Silence());
  store_->set_answer(absl::OkStatus());
  EXPECT_EQ(Present(), (Names{"worker0", "worker1"}));
  AllWait(1);
}

// What the others could not read would end all barriers of the job.
TEST_F(RunningJobTest, AnEntryThatIsTooLongIsNotWritten) {
  Start(2);
  for (const size_t size : {kMaxWorkerDevices + 1, size_t{70000}}) {
    Membership late(store_, {.name = "late", .join = true});
    absl::StatusOr<WorkerInfo> self = late.Claim(Later());
    ASSERT_TRUE(self.ok()) << self.status();
    self->devices = std::string(size, 'x');
    EXPECT_EQ(late.Enter(*self, Later()).status(),
              absl::InvalidArgumentError(
                  absl::StrCat("the device maps of worker 'late' take ", size,
                               " bytes, and at most 60000 fit: give it fewer, or shorter names")));
    EXPECT_EQ(Present(), (Names{"worker0", "worker1"}));
    AllWait(1);
  }
  Membership late(store_, {.name = "late", .join = true});
  absl::StatusOr<WorkerInfo> self = late.Claim(Later());
  ASSERT_TRUE(self.ok()) << self.status();
  self->devices = std::string(kMaxWorkerDevices, 'x');
  EXPECT_EQ(late.Enter(*self, Later()).status(), absl::OkStatus());
  EXPECT_EQ(Present(), (Names{"worker0", "worker1", "late"}));
}

TEST_F(RunningJobTest, SeveralAreFoundAtOnce) {
  Start(3);
  using Who = Membership::Who;
  const Who who[] = {WorkerRank{2},          "worker1", "nobody", WorkerRank{9},
                     std::string(2000, 'x'), "worker2"};
  const auto found = members_[0]->FindEach(who, Later());
  ASSERT_EQ(found.size(), 6u);
  EXPECT_EQ(found[0]->name, "worker2");
  EXPECT_EQ(found[1]->rank, 1);
  EXPECT_TRUE(absl::IsNotFound(found[2].status())) << found[2].status();
  EXPECT_TRUE(absl::IsNotFound(found[3].status())) << found[3].status();
  EXPECT_TRUE(absl::IsInvalidArgument(found[4].status())) << found[4].status();
  EXPECT_EQ(found[5]->rank, 2);
}

TEST_F(RunningJobTest, BarriersGoOnWithWhoJoined) {
  Start(2);
  ASSERT_TRUE(Come({.join = true}).ok());
  std::vector<std::thread> threads;
  std::atomic<int> before{0};
  for (auto& members : members_) {
    threads.emplace_back([&, m = members.get()] {
      for (int round = 1; round <= 5; ++round) {
        ++before;
        ASSERT_TRUE(m->Barrier(Later()).ok());
        ASSERT_GE(before, 3 * round);
      }
      ASSERT_TRUE(m->Shutdown(Later()).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// --------------------------------------------------------------------------------- Lost members

TEST_F(RunningJobTest, ABarrierFailsAtOnceWhenWhoItWaitsForIsLost) {
  Start(4);
  const WorkerInfo lost = *members_[1]->Find("worker3", Later());
  // One that waits already, and one that comes later; the word is another's.
  std::thread waiting([&] {
    EXPECT_EQ(members_[0]->Barrier(Deadline::Never()),
              absl::UnavailableError("waiting for all workers: 'worker3' (3) is lost"));
  });
  ASSERT_TRUE(store_->Get("at/0", Later()).ok());
  members_[1]->MarkLost(lost);
  waiting.join();
  EXPECT_EQ(members_[2]->Barrier(Deadline::Never()),
            absl::UnavailableError("waiting for all workers: 'worker3' (3) is lost"));
  EXPECT_EQ(members_[2]->Shutdown(Deadline::Never()),
            absl::UnavailableError("waiting for all workers to shut down: 'worker3' (3) is lost"));
}

TEST_F(RunningJobTest, ABarrierGoesOnWithoutWhoIsLost) {
  Start(3);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, m = members_[i].get()] {
      ASSERT_TRUE(m->Barrier(Later(), OnLost::kGoOnWithout).ok());
      ASSERT_TRUE(m->Barrier(Later(), OnLost::kGoOnWithout).ok());
      ASSERT_TRUE(m->Shutdown(Later(), OnLost::kGoOnWithout).ok());
    });
  }
  ASSERT_TRUE(store_->Get("at/0", Later()).ok());
  members_[1]->MarkLost(*members_[1]->Find("worker2", Later()));
  for (std::thread& thread : threads) thread.join();
}

TEST_F(RunningJobTest, WhoComesBackIsNotLost) {
  Start(2);
  const WorkerInfo before = *members_[0]->Find("worker1", Later());
  members_[0]->MarkLost(before);
  ASSERT_TRUE(Come({.rank = 1, .world_size = 2}).ok());
  members_[0]->MarkLost(before);  // once more, and late
  std::thread other([&] { EXPECT_TRUE(members_[2]->Barrier(Later()).ok()); });
  EXPECT_TRUE(members_[0]->Barrier(Later()).ok());
  other.join();
}

// It was only silent for a while, and speaks again.
TEST_F(RunningJobTest, WhoWasTakenForLostAndLivesTakesPart) {
  Start(2);
  members_[0]->MarkLost(*members_[0]->Find("worker1", Later()));
  EXPECT_TRUE(absl::IsUnavailable(members_[0]->Barrier(Deadline::Never())));
  std::thread other([&] {
    EXPECT_TRUE(members_[1]->Barrier(Later()).ok());
    EXPECT_TRUE(members_[1]->Shutdown(Later()).ok());
  });
  while (store_->Get("lost/1", Later()).value() != "") std::this_thread::yield();
  EXPECT_TRUE(members_[0]->Shutdown(Later()).ok());
  other.join();
}

void ExpectOver(const absl::Status& status) {
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "'worker1' (1) is over")) << status;
}

// A process that was stopped, for so long that its worker was started again elsewhere, goes on.
class ReplacedTest : public RunningJobTest {
 protected:
  void SetUp() override {
    Start(2);
    before_ = *members_[0]->Find("worker1", Later());
    const absl::StatusOr<WorkerInfo> back = Come({.rank = 1, .world_size = 2});
    ASSERT_TRUE(back.ok()) << back.status();
    incarnation_ = back->incarnation;
  }
  Membership& old() { return *members_[1]; }
  Membership& back() { return *members_[2]; }

  WorkerInfo before_;
  Incarnation incarnation_ = 0;
};

TEST_F(ReplacedTest, ItDoesNotTakeTheNextOneAwayWithIt) {
  ExpectOver(old().Leave(Later()));
  EXPECT_EQ(Present(), (Names{"worker0", "worker1"}));
  EXPECT_EQ(members_[0]->Find(WorkerRank{1}, Later())->incarnation, incarnation_);
}

TEST_F(ReplacedTest, ItDoesNotCountInABarrier) {
  ExpectOver(old().Barrier(Later()));
  const absl::Status status = members_[0]->Barrier(absl::InfinitePast());
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  std::thread other([&] { EXPECT_EQ(back().Barrier(Later()), absl::OkStatus()); });
  EXPECT_EQ(members_[0]->Barrier(Later()), absl::OkStatus());
  other.join();
}

TEST_F(ReplacedTest, ItDoesNotTakeBackThatTheNextOneHasCome) {
  std::thread other([&] { EXPECT_EQ(back().Shutdown(Later()), absl::OkStatus()); });
  ASSERT_TRUE(store_->Get("shutdown/1", Later()).ok());
  ExpectOver(old().Shutdown(Later()));
  EXPECT_EQ(members_[0]->Shutdown(Later()), absl::OkStatus());
  other.join();
}

// The others refuse its connections, so that it finds all of them lost.
TEST_F(ReplacedTest, ItTakesNobodyForLost) {
  const WorkerInfo other = *members_[0]->Find("worker0", Later());
  ASSERT_TRUE(store_->Set("lost/0", "", Later()).ok());  // an earlier loss was denied
  ASSERT_TRUE(old().MarkLost(other, "it refused the connection"));
  while (!old().LossesOf({other})->are_all_said) std::this_thread::yield();
  const absl::StatusOr<Membership::Losses> losses = members_[0]->LossesOf({other});
  ASSERT_TRUE(losses.ok()) << losses.status();
  EXPECT_TRUE(losses->lost.empty());
}

// What it writes might take the place of a loss of the next one.
TEST_F(ReplacedTest, ItDeniesNoLoss) {
  const std::string lost = absl::StrCat(before_.incarnation, " it was silent");
  ASSERT_TRUE(store_->Set("lost/1", lost, Later()).ok());
  const absl::StatusOr<bool> denied = old().DenyLoss();
  ASSERT_TRUE(denied.ok()) << denied.status();
  EXPECT_FALSE(*denied);
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), lost);
}

// It had passed the test of its entry when the next one came.
TEST_F(ReplacedTest, WhatItWritesLateDoesNotStay) {
  before_.left = true;
  ASSERT_TRUE(store_->Set("worker/1", EncodeWorkerInfo(before_), Later()).ok());
  std::thread other([&] { EXPECT_EQ(back().Barrier(Later()), absl::OkStatus()); });
  EXPECT_EQ(members_[0]->Barrier(Later()), absl::OkStatus());
  other.join();
  EXPECT_EQ(members_[0]->Find(WorkerRank{1}, Later())->incarnation, incarnation_);
}

TEST_F(ReplacedTest, WhatItWritesLateIsPutRightWhereMembersAreRead) {
  before_.left = true;
  ASSERT_TRUE(store_->Set("worker/1", EncodeWorkerInfo(before_), Later()).ok());
  const absl::StatusOr<std::vector<WorkerInfo>> all = back().All(Later());
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->size(), 2u) << "itself among them";
  EXPECT_EQ(members_[0]->Find(WorkerRank{1}, Later())->incarnation, incarnation_);
}

// Has `leave` called while the entry of worker 1 is written, and does not answer the next writing
// in time. Thread-safe.
class LeavesMeanwhileStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (key != "worker/1" || leave == nullptr) return ForwardingStore::Set(key, value, deadline);
    switch (++writes_) {
      case 1:
        leave();  // which is the second one
        break;
      case 3:
        return absl::DeadlineExceededError("no answer");
      default:
        break;
    }
    return ForwardingStore::Set(key, value, deadline);
  }

  std::function<void()> leave;  // set while nobody writes

 private:
  std::atomic<int> writes_{0};
};

// As it waits in a barrier, and as it looks who is there, for which it has no time.
TEST_F(RunningJobTest, WhoLeavesWhileItsEntryIsPutRightHasLeft) {
  Start(2);
  const std::string before = *store_->Get("worker/1", Later());
  for (const bool in_barrier : {true, false}) {
    const auto store = std::make_shared<LeavesMeanwhileStore>(store_);
    Membership back(store, {.rank = 1, .world_size = 2});
    ASSERT_TRUE(Come(back, "inproc://back").ok());
    ASSERT_TRUE(store_->Set("worker/1", before, Later()).ok());
    store->leave = [&] { EXPECT_EQ(back.Leave(Later()), absl::OkStatus()); };
    if (in_barrier) {
      std::thread other([&] { EXPECT_EQ(members_[0]->Barrier(Later()), absl::OkStatus()); });
      back.Barrier(Later()).IgnoreError();  // it does not count any more
      other.join();
    } else {
      EXPECT_TRUE(back.AllEver(absl::InfinitePast()).ok());
    }
    EXPECT_TRUE(DecodeWorkerInfo(*store_->Get("worker/1", Later()), 1)->left) << in_barrier;
  }
}

// The barrier began before the next one came, and so has opened without it.
TEST_F(RunningJobTest, AReplacedOneDoesNotPassABarrierThatIsOpen) {
  Start(2);
  std::thread waiting([&] { EXPECT_EQ(members_[0]->Barrier(Later()), absl::OkStatus()); });
  ASSERT_TRUE(store_->Get("at/0", Later()).ok());
  ASSERT_TRUE(Come({.rank = 1, .world_size = 2}).ok());
  waiting.join();
  std::thread other([&] { EXPECT_EQ(members_[2]->Barrier(Later()), absl::OkStatus()); });
  while (!absl::EndsWith(store_->Get("at/1", Later()).value(), " 2")) std::this_thread::yield();
  ExpectOver(members_[1]->Barrier(Later()));
  EXPECT_EQ(members_[0]->Barrier(Deadline::After(absl::Seconds(5))), absl::OkStatus());
  other.join();
  ExpectOver(members_[1]->Barrier(Later()));
}

// The earlier one of two that come back is the slower one.
TEST_F(RunningJobTest, OfTwoThatComeBackTheLaterOneStays) {
  Start(2);
  const auto holding = std::make_shared<HoldingStore>(store_);
  Membership slow(holding, {.rank = 1, .world_size = 2});
  std::thread enters([&] {
    absl::StatusOr<WorkerInfo> self = slow.Claim(Later());
    ASSERT_TRUE(self.ok()) << self.status();
    self->address = "inproc://slow";
    is_held_at_set = true;
    slow.Enter(*self, Later()).IgnoreError();
  });
  holding->held.WaitForNotification();
  const absl::StatusOr<WorkerInfo> back = Come({.rank = 1, .world_size = 2});
  ASSERT_TRUE(back.ok()) << back.status();
  holding->go_on.Notify();
  enters.join();
  ASSERT_EQ(members_[0]->Find(WorkerRank{1}, Later())->address, "inproc://slow");
  std::thread other([&] { EXPECT_EQ(members_[2]->Barrier(Later()), absl::OkStatus()); });
  EXPECT_EQ(members_[0]->Barrier(Later()), absl::OkStatus());
  other.join();
  EXPECT_EQ(members_[0]->Find(WorkerRank{1}, Later())->incarnation, back->incarnation);
  ExpectOver(slow.Barrier(Later()));
}

// The store is in the hands of somebody who has no key, and spoils the entry of whoever says it.
TEST(SignedMembershipTest, ALossIsSaidThoughTheOwnEntryIsNotSigned) {
  const auto raw = NewInProcessStore();
  const auto store = NewSignedStore("a secret of the whole job", raw);
  Membership members(store, {.rank = 0, .world_size = 1});
  ASSERT_TRUE(members.Claim(Later()).ok());
  ASSERT_TRUE(members.Enter(Worker(0), Later()).ok());
  ASSERT_TRUE(raw->Set("worker/0", "what nobody has signed", Later()).ok());
  WorkerInfo lost = Worker(1);
  lost.incarnation = 7;
  ASSERT_TRUE(members.MarkLost(lost, "it was silent"));
  while (!members.LossesOf({lost})->are_all_said) std::this_thread::yield();
  const absl::StatusOr<std::string> said = store->Get("lost/1", absl::Now() + absl::Seconds(5));
  ASSERT_TRUE(said.ok()) << said.status();
  EXPECT_EQ(*said, "7 it was silent");
}

TEST(SignedMembershipTest, AnEntryThatIsNotSignedHidesNoOther) {
  const auto raw = NewInProcessStore();
  const auto store = NewSignedStore("a secret of the whole job", raw);
  Membership members(store, {.rank = 0, .world_size = 1});
  ASSERT_TRUE(members.Claim(Later()).ok());
  ASSERT_TRUE(members.Enter(Worker(0), Later()).ok());
  ASSERT_TRUE(store->Set("worker/1", EncodeWorkerInfo(Worker(1)), Later()).ok());
  ASSERT_TRUE(raw->Set("worker/2", "what nobody has signed", Later()).ok());
  const auto found = members.FindEach({WorkerRank{0}, WorkerRank{1}, WorkerRank{2}}, Later());
  ASSERT_EQ(found.size(), 3u);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(found[rank].ok()) << found[rank].status();
    EXPECT_EQ(found[rank]->name, absl::StrCat("worker", rank));
  }
  EXPECT_TRUE(absl::IsUnauthenticated(found[2].status())) << found[2].status();
}

// The others find it gone, and may have said so.
TEST_F(RunningJobTest, OneThatIsClosedDeniesNoLoss) {
  Start(2);
  const std::string lost =
      absl::StrCat(members_[1]->Find("worker1", Later())->incarnation, " gone");
  ASSERT_TRUE(store_->Set("lost/1", lost, Later()).ok());
  members_[1]->Close();
  EXPECT_TRUE(absl::IsCancelled(members_[1]->DenyLoss().status()));
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), lost);
}

// Or who serves the store would not wait for it.
TEST_F(RunningJobTest, WhoWasTakenForLostSaysAtTheEndThatItLives) {
  Start(2);
  members_[0]->MarkLost(*members_[0]->Find("worker1", Later()));
  ASSERT_TRUE(store_->Get("lost/1", Later()).ok());
  std::thread other([&] { EXPECT_TRUE(members_[1]->Shutdown(Later()).ok()); });
  ASSERT_TRUE(store_->Get("shutdown/1", Later()).ok());
  EXPECT_EQ(store_->Get("lost/1", absl::InfinitePast()).value(), "");
  EXPECT_TRUE(members_[0]->Shutdown(Later()).ok());
  other.join();
}

// Holds the first word that worker 1 is lost until it may go on. Thread-safe.
class LateWordStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (key == "lost/1" && !held.HasBeenNotified()) {
      held.Notify();
      go_on.WaitForNotification();
    }
    return ForwardingStore::Set(key, value, deadline);
  }

  absl::Notification held, go_on;
};

// It was taken for lost before, and has said that it lives; then it dies.
TEST_F(RunningJobTest, WhatWasSaidOfAnEarlierLossIsNotTakenForAWordOnALaterOne) {
  Start(2);
  ASSERT_TRUE(store_->Set("lost/1", "", Later()).ok());
  const auto late = std::make_shared<LateWordStore>(store_);
  Membership members(late, {.rank = 0, .world_size = 2});
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  const WorkerInfo worker1 = *members.Find("worker1", Later());
  EXPECT_EQ(members.LossesOf({worker1})->denied.size(), 1u);
  members.MarkLost(worker1, "it died");
  late->held.WaitForNotification();
  absl::StatusOr<Membership::Losses> losses = members.LossesOf({worker1});
  ASSERT_TRUE(losses.ok()) << losses.status();
  EXPECT_TRUE(losses->lost.empty());
  EXPECT_TRUE(losses->denied.empty());
  EXPECT_FALSE(losses->are_all_said);
  late->go_on.Notify();
  const std::string keys[] = {"lost/1"};
  const Store::Value taken_back[] = {""};
  ASSERT_TRUE(store_->AwaitChange(keys, taken_back, Later()).ok());
  losses = members.LossesOf({worker1});
  ASSERT_TRUE(losses.ok()) << losses.status();
  ASSERT_EQ(losses->lost.size(), 1u);
  EXPECT_EQ(losses->lost[0].reason, "it died");
  // It lives after all, and takes that back, too. Until the one that has written the word knows
  // that it is there nothing is said of it.
  ASSERT_TRUE(store_->Set("lost/1", "", Later()).ok());
  do {
    losses = members.LossesOf({worker1});
    ASSERT_TRUE(losses.ok()) << losses.status();
    EXPECT_EQ(losses->denied.size(), losses->are_all_said ? 1u : 0u);
  } while (!losses->are_all_said);
}

// Has no room for the next words on a loss of worker 1. Thread-safe.
class FullStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (key == "lost/1" && refusals > 0) {
      --refusals;
      return absl::ResourceExhaustedError("the store is full");
    }
    return ForwardingStore::Set(key, value, deadline);
  }

  std::atomic<int> refusals{0};
};

class FullStoreTest : public RunningJobTest {
 protected:
  void SetUp() override {
    Start(2);
    full_ = std::make_shared<FullStore>(store_);
    watcher_.emplace(full_, MembershipOptions{.rank = 0, .world_size = 2});
    ASSERT_TRUE(Come(*watcher_, "inproc://0").ok());
    worker1_ = *watcher_->Find("worker1", Later());
  }
  // Waits until no word is on its way any more.
  Membership::Losses AwaitSaid() {
    for (;;) {
      const absl::StatusOr<Membership::Losses> losses = watcher_->LossesOf({worker1_});
      EXPECT_TRUE(losses.ok()) << losses.status();
      if (!losses.ok() || losses->are_all_said) return losses.value_or(Membership::Losses());
      std::this_thread::yield();
    }
  }

  std::shared_ptr<FullStore> full_;
  std::optional<Membership> watcher_;
  WorkerInfo worker1_;
};

// Nobody else may know of it, and those who wait for that member would do so to their deadlines.
TEST_F(FullStoreTest, ALossIsSaidOnceThereIsRoom) {
  full_->refusals = 2;
  ASSERT_TRUE(watcher_->MarkLost(worker1_, "it was silent"));
  ASSERT_EQ(store_->Get("lost/1", Deadline::After(absl::Seconds(20))).value_or("nothing"),
            absl::StrCat(worker1_.incarnation, " it was silent"));
  const absl::Status status = watcher_->Barrier(Later());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  // Then it is not waited for: what the member says of it is heard.
  ASSERT_TRUE(store_->Set("lost/1", "", Later()).ok());
  EXPECT_EQ(AwaitSaid().denied.size(), 1u);
}

TEST_F(FullStoreTest, ALossIsTakenBackOnceThereIsRoom) {
  ASSERT_TRUE(watcher_->MarkLost(worker1_, "it was silent"));
  ASSERT_TRUE(store_->Get("lost/1", Later()).ok());
  full_->refusals = 2;
  watcher_->MarkAlive(1, worker1_.incarnation);
  const std::string keys[] = {"lost/1"};
  const Store::Value said[] = {absl::StrCat(worker1_.incarnation, " it was silent")};
  EXPECT_EQ(store_->AwaitChange(keys, said, Deadline::After(absl::Seconds(20))).value()[0], "");
}

TEST_F(FullStoreTest, ALossThatIsOverIsNotSaid) {
  store_->Set("lost/1", "", Later()).IgnoreError();  // an earlier one was denied
  full_->refusals = std::numeric_limits<int>::max();
  ASSERT_TRUE(watcher_->MarkLost(worker1_, "it was silent"));
  EXPECT_FALSE(watcher_->LossesOf({worker1_})->are_all_said);
  watcher_->MarkAlive(1, worker1_.incarnation);
  AwaitSaid();
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), "");
}

TEST_F(FullStoreTest, WhoEndsDoesNotWaitForRoom) {
  full_->refusals = std::numeric_limits<int>::max();
  ASSERT_TRUE(watcher_->MarkLost(worker1_, "it was silent"));
  watcher_.reset();
  EXPECT_EQ(store_->Get("lost/1", absl::InfinitePast()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(RunningJobTest, WhoHasSaidALossTakesItBack) {
  Start(2);
  const WorkerInfo worker1 = *members_[0]->Find("worker1", Later());
  const std::string keys[] = {"lost/1"};
  const auto change_from = [&](const Store::Value& before) {
    const Store::Value seen[] = {before};
    return store_->AwaitChange(keys, seen, Deadline::After(absl::Seconds(20))).value()[0];
  };
  members_[0]->MarkAlive(1, worker1.incarnation);  // nothing was said
  for (const char* reason : {"it was silent", "once more"}) {
    const Store::Value before = store_->GetEach(keys, absl::InfinitePast()).value()[0];
    members_[0]->MarkLost(worker1, reason);
    const Store::Value said = change_from(before);
    EXPECT_EQ(said, absl::StrCat(worker1.incarnation, " ", reason));
    members_[0]->MarkAlive(1, worker1.incarnation + 1);
    ASSERT_EQ(members_[0]->LossesOf({worker1})->lost.size(), 1u);
    members_[0]->MarkAlive(1, worker1.incarnation);
    EXPECT_EQ(change_from(said), "") << reason;
    while (members_[0]->LossesOf({worker1})->denied.empty()) std::this_thread::yield();
  }
  // Another has said this, and this worker would have.
  ASSERT_TRUE(
      store_->Set("lost/1", absl::StrCat(worker1.incarnation, " another word"), Later()).ok());
  members_[0]->MarkLost(worker1, "it was silent");
  members_[0]->MarkAlive(1, worker1.incarnation);
  // What comes after that has been said.
  members_[0]->MarkLost(*members_[0]->Find("worker0", Later()));
  ASSERT_TRUE(store_->Get("lost/0", Later()).ok());
  EXPECT_EQ(members_[0]->LossesOf({worker1})->lost.size(), 1u);
}

// Finds no memory when a word has come there, and when those who would read it are to be woken:
// once each. Thread-safe.
class ShortOfMemoryStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (key == "changes" && is_short.exchange(false)) throw std::bad_alloc();
    const absl::Status set = ForwardingStore::Set(key, value, deadline);
    if (key == "lost/1" && forgets.exchange(false)) throw std::bad_alloc();
    return set;
  }

  std::atomic<bool> is_short{false}, forgets{false};
};

TEST_F(RunningJobTest, AWordIsHeardThoughItsStoreFoundNoMemoryWhenItHadCome) {
  Start(2);
  const auto store = std::make_shared<ShortOfMemoryStore>(store_);
  Membership members(store, {.rank = 0, .world_size = 2});
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  const WorkerInfo worker1 = *members.Find("worker1", Later());
  const std::string keys[] = {"changes"};
  Store::Value changes = store_->GetEach(keys, absl::InfinitePast()).value()[0];
  const auto is_heard = [&](bool is_short) {
    (is_short ? store->is_short : store->forgets) = true;
    return [&] {
      const Store::Value seen[] = {changes};
      const auto now = store_->AwaitChange(keys, seen, Deadline::After(absl::Seconds(20)));
      if (!now.ok() || (*now)[0] == changes) return false;
      changes = (*now)[0];
      return true;
    };
  };
  for (const bool is_short : {true, false}) {
    const auto said = is_heard(is_short);
    ASSERT_TRUE(members.MarkLost(worker1, absl::StrCat("it died ", is_short)));
    ASSERT_TRUE(said()) << is_short;
    const auto taken_back = is_heard(is_short);
    members.MarkAlive(1, worker1.incarnation);
    ASSERT_TRUE(taken_back()) << is_short;
  }
}

// Writes the first denial of worker 1 at once, or when it may go on, and does not answer then.
// Thread-safe.
class LateDenialStore final : public ForwardingStore {
 public:
  LateDenialStore(std::shared_ptr<Store> store, bool writes_at_once)
      : ForwardingStore(std::move(store)), writes_at_once_(writes_at_once) {}
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (key != "lost/1" || held.HasBeenNotified()) {
      return ForwardingStore::Set(key, value, deadline);
    }
    if (writes_at_once_) ForwardingStore::Set(key, value, deadline).IgnoreError();
    held.Notify();
    go_on.WaitForNotification();
    if (!writes_at_once_) ForwardingStore::Set(key, value, deadline).IgnoreError();
    return absl::DeadlineExceededError("the store does not answer");
  }

  absl::Notification held, go_on;

 private:
  const bool writes_at_once_;
};

// Worker 1 was said to be lost, and one of its threads, which denies that, is held by the store.
class HeldDenialTest : public RunningJobTest {
 protected:
  void Hold(bool writes_at_once) {
    Start(2);
    late_ = std::make_shared<LateDenialStore>(store_, writes_at_once);
    denier_.emplace(late_, MembershipOptions{.rank = 1, .world_size = 2});
    ASSERT_TRUE(Come(*denier_, "inproc://1").ok());
    said_ = absl::StrCat(denier_->Find("worker1", Later())->incarnation, " it was silent");
    ASSERT_TRUE(store_->Set("lost/1", said_, Later()).ok());
    slow_ = std::thread([&] { EXPECT_FALSE(denier_->DenyLoss().ok()); });
    late_->held.WaitForNotification();
  }
  void LetGo() {
    late_->go_on.Notify();
    slow_.join();
  }

  std::shared_ptr<LateDenialStore> late_;
  std::optional<Membership> denier_;
  std::string said_;
  std::thread slow_;
};

// What another thread has denied meanwhile, and woken those who would read it, was an earlier word.
TEST_F(HeldDenialTest, ADenialThatMayNotHaveBeenHeardIsSaidAgain) {
  ASSERT_NO_FATAL_FAILURE(Hold(/*writes_at_once=*/false));
  EXPECT_TRUE(denier_->DenyLoss().value());
  EXPECT_TRUE(store_->Set("lost/1", said_, Later()).ok());
  LetGo();
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), "");
  EXPECT_TRUE(denier_->DenyLoss().value()) << "nobody was woken since";
  EXPECT_FALSE(denier_->DenyLoss().value());
}

// Whoever has written it may wait for the store's answer for long, and give up then.
TEST_F(HeldDenialTest, ADenialOfWhichNobodyHasHeardYetIsSaidByAnotherThread) {
  ASSERT_NO_FATAL_FAILURE(Hold(/*writes_at_once=*/true));
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), "");
  const int64_t changes = denier_->Changes().value();
  EXPECT_TRUE(denier_->DenyLoss().value());
  EXPECT_NE(denier_->Changes().value(), changes) << "nobody was woken";
  LetGo();
}

// Who finds no memory says it again.
TEST_F(RunningJobTest, ALossThatFindsNoMemoryIsSaidAndTakenBack) {
  Start(2);
  const WorkerInfo worker1 = *members_[0]->Find("worker1", Later());
  const std::string key[] = {"lost/1"};
  Store::Value entry;
  bool has_failed = true;
  for (int nth = 0; has_failed; ++nth) {
    const std::string reason = absl::StrCat("it was silent in round ", nth);
    FailAllocation(nth);
    EXPECT_TRUE(AwaitMemory([&] { return members_[0]->MarkLost(worker1, reason); }));
    has_failed = FailAllocation(-1);
    Store::Value seen[] = {entry};
    entry = store_->AwaitChange(key, seen, Later()).value()[0];
    ASSERT_EQ(entry, absl::StrCat(worker1.incarnation, " ", reason));
    FailAllocation(nth);
    AwaitMemory([&] { members_[0]->MarkAlive(1, worker1.incarnation); });
    has_failed = FailAllocation(-1) || has_failed;
    seen[0] = entry;
    entry = store_->AwaitChange(key, seen, Later()).value()[0];
    ASSERT_EQ(entry, "");
  }
}

// Holds the next answer about the loss of worker 1, when asked to. Thread-safe.
class LateAnswerStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    auto values = ForwardingStore::GetEach(keys, deadline);
    if (!keys.empty() && keys[0] == "lost/1" && holds.exchange(false)) {
      held.Notify();
      go_on.WaitForNotification();
    }
    return values;
  }

  std::atomic<bool> holds{false};
  absl::Notification held, go_on;
};

TEST_F(RunningJobTest, ALossThatIsTakenBackBeforeItIsSaidIsNotSaid) {
  Start(2);
  const auto late = std::make_shared<LateAnswerStore>(store_);
  Membership members(late, {.rank = 0, .world_size = 2});
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  const WorkerInfo worker1 = *members.Find("worker1", Later());
  late->holds = true;
  members.MarkLost(worker1, "it was silent");
  late->held.WaitForNotification();
  members.MarkAlive(1, worker1.incarnation);
  late->go_on.Notify();
  members.MarkLost(*members.Find("worker0", Later()));
  ASSERT_TRUE(store_->Get("lost/0", Later()).ok());
  const std::string keys[] = {"lost/1"};
  EXPECT_EQ(store_->GetEach(keys, absl::InfinitePast()).value()[0], std::nullopt);
}

// Who has said that of the next incarnation does not watch it any more, nor does anybody else, who
// would say it again.
TEST_F(RunningJobTest, ALateWordOnAnEarlierIncarnationHidesNoLossOfALaterOne) {
  Start(2);
  WorkerInfo worker1 = *members_[0]->Find("worker1", Later());
  const std::string later = absl::StrCat(worker1.incarnation + 1, " it died, too");
  ASSERT_TRUE(store_->Set("lost/1", later, Later()).ok());
  ASSERT_TRUE(members_[0]->MarkLost(worker1, "it was silent"));
  // What is said comes in its order.
  members_[0]->MarkLost(*members_[0]->Find("worker0", Later()));
  ASSERT_TRUE(store_->Get("lost/0", Later()).ok());
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), later);
}

// While it takes its word back the store may still have it.
TEST_F(RunningJobTest, AWordThatIsBeingTakenBackIsNotALoss) {
  Start(2);
  const auto late = std::make_shared<LateAnswerStore>(store_);
  Membership members(late, {.rank = 0, .world_size = 2});
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  const WorkerInfo worker1 = *members.Find("worker1", Later());
  members.MarkLost(worker1, "it was silent");
  ASSERT_TRUE(store_->Get("lost/1", Later()).ok());
  late->holds = true;
  members.MarkAlive(1, worker1.incarnation);
  late->held.WaitForNotification();
  EXPECT_TRUE(members.LossesOf({worker1})->lost.empty());
  EXPECT_EQ(members_[1]->LossesOf({worker1})->lost.size(), 1u);
  late->go_on.Notify();
  while (store_->Get("lost/1", Later()).value() != "") std::this_thread::yield();
}

// Does not answer to the next word on the loss of worker 1, which has come there, and to which
// somebody else may have answered meanwhile. Thread-safe.
class SilentStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    const absl::Status set = ForwardingStore::Set(key, value, deadline);
    if (key != "lost/1" || !is_silent.exchange(false)) return set;
    if (answer.has_value()) ForwardingStore::Set(key, *answer, deadline).IgnoreError();
    // Who rings after that has heard nothing of it: what rang before is written over.
    ForwardingStore::Set("changes", kSilent, deadline).IgnoreError();
    ++silences;
    return absl::DeadlineExceededError("the store does not answer");
  }

  static constexpr char kSilent[] = "1";
  std::atomic<bool> is_silent{false};
  std::atomic<int> silences{0};  // that are over
  Value answer;                  // set while it is not silent
};

// What it says once more would be said over the answer to it.
TEST_F(RunningJobTest, AWordThatCameThereThoughTheStoreWasSilentIsSaidOnce) {
  Start(2);
  const auto silent = std::make_shared<SilentStore>(store_);
  Membership members(silent, {.rank = 0, .world_size = 2});
  ASSERT_TRUE(Come(members, "inproc://0").ok());
  const WorkerInfo worker1 = *members.Find("worker1", Later());
  const std::string keys[] = {"lost/1", "changes"};
  const auto entries = [&] { return store_->GetEach(keys, absl::InfinitePast()).value(); };
  int words = 0;
  // What comes after that has been said, or not.
  const auto all_is_said = [&] {
    const std::string last = absl::StrCat("last ", ++words);
    WorkerInfo self = *members.Find("worker0", Later());
    self.incarnation += words;
    members.MarkLost(self, last);
    const std::string said = absl::StrCat(self.incarnation, " ", last);
    while (store_->Get("lost/0", Later()).value() != said) std::this_thread::yield();
  };

  // Worker 1 says that it lives.
  silent->answer = "";
  silent->is_silent = true;
  members.MarkLost(worker1, "it was silent");
  all_is_said();
  ASSERT_EQ(entries()[0], "") << "its denial";

  // Nobody says anything: then all who wait are told.
  members.MarkAlive(1, worker1.incarnation);
  silent->answer = std::nullopt;
  silent->is_silent = true;
  members.MarkLost(worker1, "once more");
  while (silent->silences < 2 || entries()[1] == SilentStore::kSilent) std::this_thread::yield();
  EXPECT_EQ(entries()[0], absl::StrCat(worker1.incarnation, " once more"));

  // Another worker finds it lost while this one takes its word back.
  const std::string another = absl::StrCat(worker1.incarnation, " another word");
  silent->answer = another;
  silent->is_silent = true;
  members.MarkAlive(1, worker1.incarnation);
  all_is_said();
  EXPECT_EQ(entries()[0], another);
}

// It is told again then, as long as the member cannot be reached.
TEST_F(RunningJobTest, ALossThatNoThreadCanTellIsNotTakenForTold) {
  Start(2);
  const WorkerInfo worker1 = *members_[0]->Find("worker1", Later());
  {
    const NoThreads no_threads;
    EXPECT_FALSE(members_[0]->MarkLost(worker1, "it died"));
  }
  EXPECT_TRUE(members_[0]->LossesOf({worker1})->are_all_said);
  EXPECT_TRUE(members_[0]->MarkLost(worker1, "it died"));
  EXPECT_EQ(store_->Get("lost/1", Later()).value(), absl::StrCat(worker1.incarnation, " it died"));
}

// Who served the store may be the one that is lost.
TEST_F(RunningJobTest, AStoreThatIsGoneDoesNotHideWhoIsLost) {
  Start(2);
  members_[1]->MarkLost(*members_[1]->Find("worker0", Later()));
  store_->set_answer(absl::UnavailableError("the store is gone"));
  EXPECT_EQ(members_[1]->Barrier(Deadline::Never()),
            absl::UnavailableError(
                "waiting for all workers: 'worker0' (0) is lost, and the store is gone"));
}

// Nor does it have those named that are not lost any more.
TEST_F(RunningJobTest, AStoreThatIsGoneIsNotPutDownToWhoLives) {
  Start(3);
  const WorkerInfo worker1 = *members_[0]->Find("worker1", Later());
  members_[0]->MarkLost(worker1, "it was silent");
  members_[0]->MarkLost(*members_[0]->Find("worker2", Later()), "it died");
  for (const char* key : {"lost/1", "lost/2"}) ASSERT_TRUE(store_->Get(key, Later()).ok());
  ASSERT_TRUE(store_->Set("lost/1", "", Later()).ok());  // it says that it lives
  while (members_[0]->LossesOf({worker1})->denied.empty()) std::this_thread::yield();
  ASSERT_TRUE(Come({.rank = 2, .world_size = 3}).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(members_[0]->Barrier(absl::InfinitePast())));
  store_->set_answer(absl::UnavailableError("the store is gone"));
  EXPECT_EQ(members_[0]->Barrier(Deadline::Never()),
            absl::UnavailableError("waiting for all workers: the store is gone"));
}

// Also where this worker has read nothing else of them than that they are there again.
TEST_F(RunningJobTest, AStoreThatIsGoneIsNotPutDownToWhoIsBack) {
  Start(4);
  const Result before = members_[0]->All(Later());
  ASSERT_TRUE(before.ok()) << before.status();
  for (int rank = 1; rank < 4; ++rank) {
    ASSERT_TRUE(members_[0]->MarkLost((*before)[rank], absl::StrCat(rank, " died")));
    ASSERT_TRUE(store_->Get(absl::StrCat("lost/", rank), Later()).ok());
  }
  // It finds one among all, and one by its name; the third is not back.
  ASSERT_TRUE(Come({.rank = 1, .world_size = 4}).ok());
  ASSERT_TRUE(members_[0]->All(Later()).ok());
  ASSERT_TRUE(Come({.rank = 2, .world_size = 4}).ok());
  for (const char* name : {"worker2", "worker3"}) {
    ASSERT_TRUE(members_[0]->Find(name, Later()).ok());
  }
  store_->set_answer(absl::UnavailableError("the store is gone"));
  EXPECT_EQ(members_[0]->Barrier(Deadline::Never()),
            absl::UnavailableError("waiting for all workers: 'worker3' (3) is lost: 3 died, and "
                                   "the store is gone"));
}

}  // namespace
}  // namespace distgrad
