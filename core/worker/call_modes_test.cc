// Autocast and other modes of the caller, on the handler's thread and afterwards.
#include "core/worker/call_modes.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

namespace distgrad {
namespace {

using at::autocast::get_autocast_dtype;
using at::autocast::is_autocast_enabled;
using at::autocast::set_autocast_dtype;
using at::autocast::set_autocast_enabled;

// What autocast casts to belongs to the thread also while autocast is off: whoever turns it on next
// goes by it.
TEST(CallModesTest, TheThreadsOwnTypeOfAutocastStays) {
  set_autocast_dtype(at::kCPU, at::kBFloat16);
  for (const bool enabled : {false, true}) {
    set_autocast_enabled(at::kCPU, enabled);
    {
      const CallModesScope scope({.autocast_cpu = at::kHalf, .autocast_cuda = at::kBFloat16});
      EXPECT_TRUE(is_autocast_enabled(at::kCPU));
      EXPECT_EQ(get_autocast_dtype(at::kCPU), at::kHalf);
      EXPECT_EQ(get_autocast_dtype(at::kCUDA), at::kBFloat16);
    }
    EXPECT_EQ(is_autocast_enabled(at::kCPU), enabled);
    EXPECT_EQ(get_autocast_dtype(at::kCPU), at::kBFloat16);
    EXPECT_FALSE(is_autocast_enabled(at::kCUDA));
    EXPECT_EQ(get_autocast_dtype(at::kCUDA), at::kHalf);
  }
  set_autocast_enabled(at::kCPU, false);
}

// A handler that turns autocast on, and throws before it turns it off.
TEST(CallModesTest, WhatAHandlerTurnsOnEndsWithIt) {
  {
    const CallModesScope scope(CallModes{});
    set_autocast_enabled(at::kCPU, true);
    set_autocast_dtype(at::kCPU, at::kHalf);
    at::autocast::set_autocast_cache_enabled(false);
    at::GradMode::set_enabled(false);
  }
  EXPECT_FALSE(is_autocast_enabled(at::kCPU));
  EXPECT_EQ(get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(at::GradMode::is_enabled());
}

// A call that was made without autocast does not run under that of the thread that serves it.
TEST(CallModesTest, NoAutocastIsAModeToo) {
  set_autocast_enabled(at::kCPU, true);
  {
    const CallModesScope scope(CallModes{});
    EXPECT_FALSE(is_autocast_enabled(at::kCPU));
  }
  EXPECT_TRUE(is_autocast_enabled(at::kCPU));
  set_autocast_enabled(at::kCPU, false);
}

}  // namespace
}  // namespace distgrad
