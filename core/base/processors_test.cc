// Counts of processors by affinity masks and by the files of both versions of control groups.
#include "core/base/processors.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// The quota of a process that sees these files.
double QuotaOf(const std::map<std::string, std::string>& files) {
  static int folders = 0;
  const std::string root = absl::StrCat(testing::TempDir(), "/processors", ++folders);
  for (const auto& [name, text] : files) {
    const std::filesystem::path path = root + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  return ControlGroupQuota(root);
}

TEST(ControlGroupQuotaTest, WithoutControlGroupsThereIsNone) { EXPECT_EQ(QuotaOf({}), kNoLimit); }

TEST(ControlGroupQuotaTest, Version2) {
  const std::string of = "/proc/self/cgroup", top = "/sys/fs/cgroup";
  EXPECT_EQ(QuotaOf({{of, "0::/"}, {top + "/cpu.max", "max 100000"}}), kNoLimit);
  EXPECT_EQ(QuotaOf({{of, "0::/"}, {top + "/cpu.max", "150000 100000"}}), 1.5);
  // The group's own, and those of all it is in.
  EXPECT_EQ(QuotaOf({{of, "0::/a/b"},
                     {top + "/a/cpu.max", "200000 100000"},
                     {top + "/a/b/cpu.max", "max 100000"}}),
            2.0);
  EXPECT_EQ(QuotaOf({{of, "0::/a/b"},
                     {top + "/a/cpu.max", "200000 100000"},
                     {top + "/a/b/cpu.max", "50000 100000"},
                     {top + "/a/b/c/cpu.max", "10000 100000"},
                     {top + "/b/cpu.max", "10000 100000"}}),
            0.5);
  // Where a container sees its own group as the topmost, and the path from outside.
  EXPECT_EQ(QuotaOf({{of, "0::/docker/77"}, {top + "/cpu.max", "100000 100000"}}), 1.0);
}

TEST(ControlGroupQuotaTest, Version1) {
  const std::string of = "/proc/self/cgroup", top = "/sys/fs/cgroup/cpu,cpuacct";
  const std::string groups = "12:cpuset:/\n4:cpu,cpuacct:/job/7\n1:name=systemd:/init.scope\n0::/";
  EXPECT_EQ(QuotaOf({{of, groups},
                     {top + "/job/7/cpu.cfs_quota_us", "-1"},
                     {top + "/job/7/cpu.cfs_period_us", "100000"}}),
            kNoLimit);
  EXPECT_EQ(QuotaOf({{of, groups},
                     {top + "/job/7/cpu.cfs_quota_us", "-1"},
                     {top + "/job/7/cpu.cfs_period_us", "100000"},
                     {top + "/job/cpu.cfs_quota_us", "75000"},
                     {top + "/job/cpu.cfs_period_us", "50000"}}),
            1.5);
}

TEST(ControlGroupQuotaTest, WhatIsNoNumberIsNoLimit) {
  for (const char* text : {"", "100000", "x 100000", "100000 0", "0 100000", "1 2 3"}) {
    EXPECT_EQ(QuotaOf({{"/proc/self/cgroup", "0::/"}, {"/sys/fs/cgroup/cpu.max", text}}), kNoLimit)
        << text;
  }
  EXPECT_EQ(QuotaOf({{"/proc/self/cgroup", "0::"}, {"/sys/fs/cgroup/cpu.max", "1 2"}}), 0.5);
  EXPECT_EQ(QuotaOf({{"/proc/self/cgroup", "nonsense\n:"}}), kNoLimit);
}

TEST(UsableProcessorsTest, AnAffinityMaskNarrowsThem) {
  EXPECT_GE(UsableProcessors(), 1);
  int processors = 0;
  std::thread pinned([&] {
    cpu_set_t mask, one;
    CPU_ZERO(&one);
    ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++i) {
      if (CPU_ISSET(i, &mask)) CPU_SET(i, &one);
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    processors = UsableProcessors();
  });
  pinned.join();
  EXPECT_EQ(processors, 1);
}

}  // namespace
}  // namespace distgrad
