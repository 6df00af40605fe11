// Origins that are attached to errors, kept when passed on, and read back.
#include "core/base/origin.h"

#include <gtest/gtest.h>

#include "absl/strings/cord.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

using By = ErrorOrigin::By;

TEST(OriginTest, TheFirstStays) {
  EXPECT_EQ(OriginOf(absl::NotFoundError("no")), std::nullopt);
  const absl::Status first = WithOrigin(absl::NotFoundError("no"), {3, By::kHandler});
  EXPECT_EQ(OriginOf(first), (ErrorOrigin{3, By::kHandler}));
  EXPECT_EQ(OriginOf(WithOrigin(first, {65535, By::kDistgrad})), (ErrorOrigin{3, By::kHandler}));
  EXPECT_EQ(OriginOf(Annotate(first, "asking")), (ErrorOrigin{3, By::kHandler}));
  EXPECT_EQ(OriginOf(WithOrigin(absl::AbortedError(""), {65535, By::kDistgrad})),
            (ErrorOrigin{65535, By::kDistgrad}));
}

TEST(OriginTest, OkHasNone) {
  EXPECT_EQ(WithOrigin(absl::OkStatus(), {3, By::kHandler}), absl::OkStatus());
  EXPECT_EQ(OriginOf(absl::OkStatus()), std::nullopt);
}

TEST(OriginTest, WhatIsNoOriginIsNone) {
  for (const char* text : {"", "worker", "worker ", "worker 65536", "worker -1", "handler of 3"}) {
    absl::Status status = absl::NotFoundError("no");
    status.SetPayload("distgrad.origin", absl::Cord(text));
    EXPECT_EQ(OriginOf(status), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace distgrad
