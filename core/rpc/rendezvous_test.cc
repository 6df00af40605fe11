#include "core/rpc/rendezvous.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/rpc/store/in_process_store.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Result = absl::StatusOr<std::vector<WorkerInfo>>;

absl::Time Later() { return absl::Now() + absl::Minutes(2); }
absl::Time Soon() { return absl::Now() + absl::Milliseconds(50); }

WorkerInfo Worker(int rank, std::string name = "") {
  WorkerInfo worker;
  worker.id = static_cast<WorkerId>(rank);
  worker.name = name.empty() ? absl::StrCat("worker", rank) : std::move(name);
  worker.address = absl::StrCat("tcp://127.0.0.1:", 4000 + rank);
  worker.incarnation = 1000 + rank;
  return worker;
}

// All at once, each on a thread of its own.
std::vector<Result> JoinAll(Store& store, const std::vector<WorkerInfo>& workers, int world_size,
                            absl::Time deadline) {
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
    for (const Result& result : JoinAll(*store, workers, world_size, Later())) {
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(result->size(), static_cast<size_t>(world_size));
      for (int rank = 0; rank < world_size; ++rank) {
        const WorkerInfo expected = Worker(rank);
        EXPECT_EQ((*result)[rank].id, rank);
        EXPECT_EQ((*result)[rank].name, expected.name);
        EXPECT_EQ((*result)[rank].address, expected.address);
        EXPECT_EQ((*result)[rank].incarnation, expected.incarnation);
      }
    }
  }
}

TEST(RendezvousTest, NamesWhoIsMissing) {
  const auto store = NewInProcessStore();
  for (const Result& result : JoinAll(*store, {Worker(0), Worker(2)}, 5, Soon())) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(
        absl::StartsWith(result.status().message(), "workers 1, 3, 4 of 5 did not join within "))
        << result.status();
  }
  const auto one = Rendezvous(*NewInProcessStore(), Worker(0), 2, Soon());
  EXPECT_TRUE(absl::StartsWith(one.status().message(), "worker 1 of 2 did not join within "))
      << one.status();
  const auto many = Rendezvous(*NewInProcessStore(), Worker(0), 1000, Soon());
  EXPECT_TRUE(absl::StrContains(many.status().message(), ", 16 and 983 more of 1000 did not join"))
      << many.status();
  // A deadline in the past only asks.
  const auto past = Rendezvous(*NewInProcessStore(), Worker(0), 2, absl::InfinitePast());
  EXPECT_EQ(past.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(RendezvousTest, OneNameTwice) {
  const auto store = NewInProcessStore();
  const std::vector<WorkerInfo> workers = {Worker(0, "same"), Worker(1), Worker(2, "same")};
  for (const Result& result : JoinAll(*store, workers, 3, Later())) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(result.status().message(), "workers 0 and 2 have the same name, 'same'");
  }
}

// Nobody starts, also those who still wait for somebody else.
TEST(RendezvousTest, OneRankTwice) {
  const auto store = NewInProcessStore();
  const std::vector<WorkerInfo> workers = {Worker(0), Worker(1, "first"), Worker(1, "second")};
  int refused = 0;
  for (const Result& result : JoinAll(*store, workers, 3, Later())) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists) << result.status();
    EXPECT_TRUE(absl::StrContains(result.status().message(), "rank 1")) << result.status();
    refused += absl::StrContains(result.status().message(), "cannot join");
  }
  EXPECT_EQ(refused, 1);
}

TEST(RendezvousTest, RankTakenAfterAllJoined) {
  const auto store = NewInProcessStore();
  for (const Result& result : JoinAll(*store, {Worker(0), Worker(1)}, 2, Later())) {
    EXPECT_TRUE(result.ok()) << result.status();
  }
  const auto late = Rendezvous(*store, Worker(1, "late"), 2, Later());
  EXPECT_EQ(late.status(), absl::AlreadyExistsError(
                               "worker 'late' cannot join: rank 1 is taken by another worker"));
}

TEST(RendezvousTest, SeveralStartsShareAStore) {
  const auto store = NewInProcessStore();
  for (const char* start : {"1/", "2/"}) {
    PrefixStore prefix(start, store.get());
    EXPECT_TRUE(Rendezvous(prefix, Worker(0), 1, Later()).ok());
  }
}

TEST(RendezvousTest, BadArguments) {
  const auto store = NewInProcessStore();
  WorkerInfo long_address = Worker(0);
  long_address.address = std::string(2000, 'x');
  WorkerInfo no_name = Worker(0);
  no_name.name.clear();
  const std::pair<WorkerInfo, int> cases[] = {
      {Worker(0), 0},
      {Worker(0), -1},
      {Worker(2), 2},
      {Worker(0), 70000},
      {long_address, 1},
      {no_name, 1},
      {Worker(0, std::string(2000, 'x')), 1},
  };
  for (const auto& [worker, world_size] : cases) {
    EXPECT_EQ(Rendezvous(*store, worker, world_size, Later()).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(Rendezvous(*store, Worker(0), 1, Later()).ok()) << "a bad call left traces";
}

// The good entry of another worker, as it stands in a store.
std::string GoodEntry() {
  const auto store = NewInProcessStore();
  EXPECT_FALSE(Rendezvous(*store, Worker(1), 2, absl::InfinitePast()).ok());
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
  long_name[10] = long_name[11] = '\xff';  // the length of the name
  entries.push_back(long_name);
  for (const std::string& entry : entries) {
    const auto store = NewInProcessStore();
    ASSERT_TRUE(store->Set("worker/1", entry).ok());
    const Result result = Rendezvous(*store, Worker(0), 2, Later());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(result.status().message(), "the store's entry of worker 1 is malformed");
  }
}

}  // namespace
}  // namespace distgrad
