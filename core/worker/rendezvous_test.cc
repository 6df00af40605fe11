// The setting that names the rendezvous, and which address a worker listens on.
#include "core/worker/rendezvous.h"

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

// For documentation only (RFC 5737): no machine has it, and none is on the way there where a test
// has nothing but a loopback.
constexpr char kNowhere[] = "192.0.2.1";

Place PlaceWithStoreAt(const std::string& host) {
  Place place;
  place.rank = 1;
  place.world_size = 2;
  place.rendezvous.kind = RendezvousUrl::Kind::kTcp;
  place.rendezvous.host = host;
  place.rendezvous.port = 29500;
  return place;
}

TEST(SaidHostTest, TheOptionGoesBeforeTheVariable) {
  unsetenv("DISTGRAD_HOST");
  EXPECT_EQ(SaidHost("").value(), "");
  setenv("DISTGRAD_HOST", "lo", 1);
  EXPECT_EQ(SaidHost("").value(), "lo");
  EXPECT_EQ(SaidHost("localhost").value(), "localhost");
  setenv("DISTGRAD_HOST", kNowhere, 1);
  EXPECT_EQ(SaidHost("localhost").value(), "localhost");
  unsetenv("DISTGRAD_HOST");
}

TEST(SaidHostTest, WhatIsNotOursIsNamedWithWhereItWasSaid) {
  absl::Status status = SaidHost(kNowhere).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "the option host")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), kNowhere)) << status;
  setenv("DISTGRAD_HOST", "0.0.0.0", 1);
  status = SaidHost("").status();
  unsetenv("DISTGRAD_HOST");
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_HOST")) << status;
}

TEST(DefaultHostTest, IsLoopbackWhereTheStoreIs) {
  EXPECT_EQ(DefaultHost(PlaceWithStoreAt("127.0.0.1")).value(), "127.0.0.1");
  const auto ipv6 = DefaultHost(PlaceWithStoreAt("::1"));
  if (ipv6.ok()) {  // where the machine has IPv6
    EXPECT_EQ(*ipv6, "::1");
  }
}

TEST(DefaultHostTest, IsLoopbackWhereAllAreOnThisMachineOrNothingIsKnown) {
  Place place = PlaceWithStoreAt(kNowhere);
  place.local_world_size = 2;
  // The launcher's job may be another one, of the same size.
  EXPECT_NE(DefaultHost(place).value_or(""), "127.0.0.1");
  place.is_launched = true;
  EXPECT_EQ(DefaultHost(place).value(), "127.0.0.1");
  place = PlaceWithStoreAt("");
  place.rendezvous.kind = RendezvousUrl::Kind::kFile;
  EXPECT_EQ(DefaultHost(place).value(), "127.0.0.1");
  place.rendezvous.kind = RendezvousUrl::Kind::kEnvironment;
  EXPECT_EQ(DefaultHost(place).value(), "127.0.0.1");
}

TEST(DefaultHostTest, WhereThereIsNoneSaysWhatToSet) {
  const absl::Status status = DefaultHost(PlaceWithStoreAt("no.such.host.invalid")).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_HOST")) << status;
}

}  // namespace
}  // namespace distgrad
