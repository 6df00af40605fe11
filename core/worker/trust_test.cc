// Workers with and without the cluster key.
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/rpc/store/in_process_store.h"
#include "core/worker/worker.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

class TrustTest : public testing::Test {
 protected:
  std::string KeyFile(const std::string& key) {
    const std::string path = absl::StrCat(testing::TempDir(), "/trust_test_key", files_++);
    std::ofstream(path) << key << "\n";
    chmod(path.c_str(), 0600);
    return path;
  }

  // One worker for each of the files; their statuses where that fails.
  std::vector<absl::Status> Start(const std::vector<std::string>& key_files) {
    const std::shared_ptr<Store> store = NewInProcessStore();
    workers_.resize(key_files.size());
    std::vector<absl::Status> statuses(key_files.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < key_files.size(); ++i) {
      threads.emplace_back([&, i] {
        auto worker = Worker::Create({.store = store,
                                      .rank = static_cast<int>(i),
                                      .world_size = static_cast<int>(key_files.size()),
                                      .key_file = key_files[i],
                                      .threads = 1,
                                      .join_timeout = absl::Seconds(2)});
        statuses[i] = worker.status();
        if (worker.ok()) workers_[i] = *std::move(worker);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  int files_ = 0;
};

TEST_F(TrustTest, WhoHasTheKeyCallsTheOthers) {
  const std::string key = KeyFile("a secret of the whole job");
  for (const absl::Status& status : Start({key, key})) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(workers_[1]
                  ->Register("echo",
                             [](Request& request) -> absl::StatusOr<Message> {
                               return std::move(request.message);
                             })
                  .ok());
  const auto reply = workers_[0]->Call("worker1", "echo", Message{"hello", {}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, "hello");
}

TEST_F(TrustTest, WhoHasAnotherOrNoneDoesNotJoin) {
  const std::string key = KeyFile("a secret of the whole job");
  for (const std::string& other : {KeyFile("a secret of somebody else"), std::string()}) {
    const std::vector<absl::Status> statuses = Start({key, other});
    EXPECT_TRUE(absl::IsUnauthenticated(statuses[0])) << statuses[0];
    EXPECT_TRUE(absl::StrContains(statuses[0].message(), "cluster key")) << statuses[0];
    EXPECT_FALSE(statuses[1].ok());
  }
}

TEST_F(TrustTest, TheKeyMayComeFromTheEnvironment) {
  setenv("DISTGRAD_KEY", "a secret in the environment", 1);
  const auto statuses = Start({"", KeyFile("a secret in the environment")});
  unsetenv("DISTGRAD_KEY");
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(TrustTest, AKeyThatCannotBeUsedIsAnError) {
  const auto create = [](std::string transport, std::string key_file) {
    return Worker::Create({.store = NewInProcessStore(),
                           .rank = 0,
                           .world_size = 1,
                           .transport = std::move(transport),
                           .key_file = std::move(key_file)})
        .status();
  };
  EXPECT_TRUE(absl::IsNotFound(create("socket", "/no/such/file")));
  EXPECT_TRUE(absl::IsInvalidArgument(create("socket", KeyFile("short"))));
  for (const std::string transport : {"tcp", "shm"}) {
    const absl::Status status = create(transport, KeyFile("a secret of the whole job"));
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
}

}  // namespace
}  // namespace distgrad
