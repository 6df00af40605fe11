// The rendezvous of a group's ranks, and ones that make no sense.
#include "core/worker/join_process_group.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

TEST(JoinProcessGroupTest, MeetsWhereTheRendezvousSays) {
  const std::string url =
      absl::StrCat("file://", std::getenv("TEST_TMPDIR"), "/join_process_group");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = JoinProcessGroup(
          {.name = "all"}, {.rendezvous = absl::StrCat(url, "?rank=", rank), .world_size = 2});
      ASSERT_TRUE(group.ok()) << group.status();
      EXPECT_EQ((*group)->rank(), rank);
      EXPECT_EQ((*group)->size(), 2);
      const at::Tensor tensor = at::full({}, rank, at::kFloat);
      const absl::Status status = (*group)->Average({tensor});
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(tensor.item<float>(), 0.5);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(JoinProcessGroupTest, SaysWhatIsWrongWithTheRendezvous) {
  EXPECT_EQ(JoinProcessGroup({}, {.rendezvous = "nowhere"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(JoinProcessGroupTest, AloneWhereNobodySaysAnything) {
  const auto group = JoinProcessGroup();
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_EQ((*group)->size(), 1);
}

}  // namespace
}  // namespace distgrad
