// Devices by a map and back, and maps that cannot be reversed or do not agree.
#include "core/tensor/device_map.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;

c10::Device Hpu(int index) { return {c10::kHPU, static_cast<c10::DeviceIndex>(index)}; }

TEST(DeviceMapTest, TheCpuGoesWithTheCpuAndOthersByTheMap) {
  const auto map = DeviceMap::Of({{Hpu(0), Hpu(2)}});
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(*map->Remote(c10::kCPU), c10::kCPU);
  EXPECT_EQ(*map->Remote(Hpu(0)), Hpu(2));
  const absl::Status status = map->Remote(Hpu(1)).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(status.message(), "hpu:1")) << status;
  EXPECT_FALSE(DeviceMap().Remote(Hpu(0)).ok());
  EXPECT_EQ(*DeviceMap::Identity().Remote(Hpu(3)), Hpu(3));
}

TEST(DeviceMapTest, WhatCannotBeReversedIsRefused) {
  for (const DevicePairs& pairs :
       {DevicePairs{{Hpu(0), Hpu(1)}, {Hpu(0), Hpu(2)}},
        DevicePairs{{Hpu(0), Hpu(1)}, {Hpu(2), Hpu(1)}}, DevicePairs{{Hpu(0), c10::kCPU}},
        DevicePairs{{c10::kCPU, Hpu(0)}}, DevicePairs{{c10::Device(c10::kHPU), Hpu(0)}}}) {
    EXPECT_EQ(DeviceMap::Of(pairs).status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(DeviceMapTest, BothEndsHaveToAgree) {
  const DeviceMap ours = *DeviceMap::Of({{Hpu(0), Hpu(2)}}),
                  same = *DeviceMap::Of({{Hpu(2), Hpu(0)}}),
                  more = *DeviceMap::Of({{Hpu(3), Hpu(1)}}),
                  other = *DeviceMap::Of({{Hpu(3), Hpu(0)}});
  EXPECT_EQ(ours.With(same)->pairs(), ours.pairs());
  EXPECT_EQ(*ours.With(more)->Remote(Hpu(1)), Hpu(3));
  EXPECT_EQ(*DeviceMap().With(ours)->Remote(Hpu(2)), Hpu(0)) << "reversed for replies";
  EXPECT_EQ(ours.With(other).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace distgrad
