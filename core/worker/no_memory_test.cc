// Workers that have no memory for what arrives: that alone fails, and says why.
#include "tests/testing/no_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DG_SKIP_WITHOUT_LIMIT() \
  GTEST_SKIP() << "a sanitizer's own memory stands above every limit of addresses"
#else
#define DG_SKIP_WITHOUT_LIMIT()
#endif

namespace distgrad {
namespace {

using ::absl::StatusCode;

constexpr int64_t kLarge = 512 << 20;  // bytes; nothing ever touches most of them
constexpr size_t kRest = 256 << 20;    // enough for all else

void ExpectNoMemory(const absl::Status& status) {
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "no memory for the 5368")) << status;
}

class NoMemoryTest : public ::testing::TestWithParam<std::string> {
 protected:
  NoMemoryTest() : cluster_({.transport = GetParam()}), large_(at::empty({kLarge}, at::kByte)) {
    const auto wait = [this](Request& r) -> absl::StatusOr<Message> {
      entered_.Notify();
      released_.WaitForNotification();
      return r.message;
    };
    const auto echo = [](Request& r) -> absl::StatusOr<Message> { return r.message; };
    const auto give = [this](Request&) -> absl::StatusOr<Message> { return Message{"", {large_}}; };
    EXPECT_TRUE(cluster_[1].Register("wait", wait).ok());
    EXPECT_TRUE(cluster_[1].Register("echo", echo).ok());
    EXPECT_TRUE(cluster_[1].Register("give", give).ok());
    // Connections are made while there is memory for it, those for large messages too.
    EXPECT_TRUE(cluster_[0].Call(1, "echo", {"", {at::ones({8 << 20}, at::kByte)}}).ok());
  }

  Cluster cluster_;
  at::Tensor large_;
  absl::Notification entered_, released_;
};

// What else is in flight on the connection is answered, and so is what comes later.
TEST_P(NoMemoryTest, OnlyTheCallFailsWhoseMessageFindsNone) {
  DG_SKIP_WITHOUT_LIMIT();
  const Future<Message> waiting = cluster_[0].CallAsync(1, "wait", {"kept", {}});
  entered_.WaitForNotification();
  {
    const NoMemory no_memory(kRest);
    ExpectNoMemory(cluster_[0].Call(1, "echo", {"", {large_}}).status());
    ExpectNoMemory(cluster_[0].Call(1, "give", {}).status());
    EXPECT_TRUE(cluster_[0].Call(1, "echo", {"", {at::ones({1 << 20}, at::kByte)}}).ok());
  }
  released_.Notify();
  ASSERT_TRUE(waiting.Wait().ok()) << waiting.Wait().status();
  EXPECT_EQ(waiting.Wait()->payload, "kept");
  const absl::StatusOr<Message> again = cluster_[0].Call(1, "echo", {"", {large_}});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->tensors[0].numel(), kLarge);
}

INSTANTIATE_TEST_SUITE_P(Transports, NoMemoryTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
