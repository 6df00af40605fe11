// Workers on a machine that gives no more threads.
#include "tests/testing/no_threads.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "core/membership/store/in_process_store.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

class NoThreadsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(NoThreadsTest, AWorkerThatCannotBeMadeIsAStatus) {
  const auto create = [] {
    return Worker::Create({.store = NewInProcessStore(),
                           .rank = 0,
                           .world_size = 1,
                           .transport = GetParam(),
                           .network = std::make_shared<InprocNetwork>()});
  };
  {
    const NoThreads no_threads;
    const absl::Status status = create().status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  }
  EXPECT_TRUE(create().ok());
}

// More handlers than threads, each of which waits: those that find no thread wait for one.
TEST_P(NoThreadsTest, HandlersWaitForTheThreadsThatThereAre) {
  Cluster cluster({.transport = GetParam(), .thread_count = 1});
  Promise<Unit> promise;
  const Future<Unit> released = promise.future();
  ASSERT_TRUE(cluster[1]
                  .Register("wait",
                            [released](Request& r) -> absl::StatusOr<Message> {
                              released.Wait().IgnoreError();
                              return r.message;
                            })
                  .ok());
  const NoThreads no_threads;
  std::vector<Future<Message>> replies;
  for (int i = 0; i < 20; ++i) {
    replies.push_back(cluster[0].CallAsync(1, "wait", {std::to_string(i), {}}));
  }
  // Nobody stands still who is not waiting.
  EXPECT_TRUE(cluster[0].CallOp(1, "aten::neg", {at::ones({1})}).ok());
  const absl::Status late =
      cluster[0].Call(1, "wait", {}, {.deadline = absl::Now() + absl::Milliseconds(50)}).status();
  EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded) << late;
  promise.Set(Unit());
  for (int i = 0; i < 20; ++i) {
    const absl::StatusOr<Message>& reply = replies[i].Wait();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->payload, std::to_string(i));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, NoThreadsTest, ::testing::Values("inproc", "socket", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
