// Slurm's lists of nodes and of tasks, and text that is neither.
#include "core/membership/slurm.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(SlurmTest, FirstHost) {
  const std::vector<std::pair<std::string, std::string>> lists = {
      {"login1", "login1"},
      {"a,b", "a"},
      {"gpu[1-3]", "gpu1"},
      {"gpu[012-015,020],login1", "gpu012"},
      {"gpu[7]", "gpu7"},
      {"gpu[7,3-5]-ib.cluster", "gpu7-ib.cluster"},
      {"r[1-2]n[03-04],x", "r1n03"},
      {"tux_0-a,b[1-2]", "tux_0-a"},
  };
  for (const auto& [list, first] : lists) {
    const auto host = FirstSlurmHost(list);
    ASSERT_TRUE(host.ok()) << host.status();
    EXPECT_EQ(*host, first);
  }
}

TEST(SlurmTest, WhatIsNoNodeList) {
  for (const char* list : {"", ",a", "gpu[", "gpu[]", "gpu[1", "gpu1]", "gpu[a-b]", "gpu[1-]",
                           "gpu[-1]", "gpu[1,]", "gpu[1-2-3]", "gp u", "gpu[[1]]", "a/b", "\n"}) {
    const absl::Status status = FirstSlurmHost(list).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << list;
    EXPECT_TRUE(absl::StrContains(status.message(), "no list of Slurm's nodes")) << status;
  }
}

TEST(SlurmTest, OneHost) {
  EXPECT_TRUE(IsOneSlurmHost("gpu012"));
  EXPECT_FALSE(IsOneSlurmHost("gpu[12-13]"));
  EXPECT_FALSE(IsOneSlurmHost("gpu12,gpu13"));
}

TEST(SlurmTest, TasksOfNode) {
  for (const auto& [node, tasks] :
       std::vector<std::pair<int, int>>{{0, 4}, {2, 4}, {3, 1}, {4, 2}}) {
    EXPECT_EQ(SlurmTasksOfNode("4(x3),1,2(x2)", node).value(), tasks) << node;
  }
  EXPECT_EQ(SlurmTasksOfNode("8", 0).value(), 8);
  for (const char* list : {"", "x", "4(x)", "4(x0)", "4(x2", "4x2", "4(3)", "-1", "4(x3),"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(SlurmTasksOfNode(list, 3).status())) << list;
  }
  EXPECT_FALSE(SlurmTasksOfNode("4(x3)", 3).ok());
}

}  // namespace
}  // namespace distgrad
