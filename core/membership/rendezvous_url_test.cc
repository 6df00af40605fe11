// URLs of every kind of rendezvous, and the errors for malformed ones.
#include "core/membership/rendezvous_url.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Kind = RendezvousUrl::Kind;

TEST(RendezvousUrlTest, Environment) {
  const auto url = ParseRendezvousUrl("env://");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_EQ(url->kind, Kind::kEnvironment);
  EXPECT_EQ(url->rank, -1);
  EXPECT_EQ(url->world_size, -1);
  EXPECT_EQ(ParseRendezvousUrl("env://?world_size=3")->world_size, 3);
}

TEST(RendezvousUrlTest, Tcp) {
  const auto url = ParseRendezvousUrl("tcp://node-0.job:29500?rank=3&world_size=8&bind=::");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_EQ(url->kind, Kind::kTcp);
  EXPECT_EQ(url->host, "node-0.job");
  EXPECT_EQ(url->port, 29500);
  EXPECT_EQ(url->bind, "::");
  EXPECT_EQ(url->rank, 3);
  EXPECT_EQ(url->world_size, 8);
  EXPECT_EQ(ParseRendezvousUrl("tcp://10.0.0.1:1")->host, "10.0.0.1");
  EXPECT_EQ(ParseRendezvousUrl("tcp://[fd00::2]:65535")->host, "fd00::2");
  EXPECT_EQ(ParseRendezvousUrl("tcp://[fe80::1%eth0]:5")->host, "fe80::1%eth0");
}

TEST(RendezvousUrlTest, File) {
  const auto url = ParseRendezvousUrl("file:///a b/c%20?rank=0");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_EQ(url->kind, Kind::kFile);
  EXPECT_EQ(url->path, "/a b/c%20");
  EXPECT_EQ(url->rank, 0);
}

TEST(RendezvousUrlTest, WhatIsWrongIsSaid) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "is not one of env://"},
      {"http://host:1", "is not one of env://"},
      {"env://host", "between env:// and its parameters"},
      {"tcp://", "is not tcp://host:port"},
      {"tcp://host", "is not tcp://host:port"},
      {"tcp://:1", "is not tcp://host:port"},
      {"tcp://[]:1", "is not tcp://host:port"},
      {"tcp://[::1:1", "is not tcp://host:port"},
      {"tcp://a/b:1", "is not tcp://host:port"},
      {"tcp://a b:1", "is not tcp://host:port"},
      {"tcp://::1:1", "not in brackets"},
      {"tcp://host:", "no port from 1 to 65535"},
      {"tcp://host:0", "no port from 1 to 65535"},
      {"tcp://host:65536", "no port from 1 to 65535"},
      {"tcp://host:+1", "no port from 1 to 65535"},
      {"tcp://host:1/", "no port from 1 to 65535"},
      {"file://", "is not file:///path"},
      {"file://relative", "is not file:///path"},
      {"tcp://host:1?", "unknown parameter ''; it takes rank, world_size and bind"},
      {"tcp://host:1?rnak=1", "unknown parameter 'rnak'; it takes rank, world_size and bind"},
      {"file:///f?bind=::", "unknown parameter 'bind'; it takes rank and world_size"},
      {"tcp://host:1?rank", "a rank that is no number from 0 to 65535"},
      {"tcp://host:1?rank=-1", "a rank that is no number"},
      {"tcp://host:1?rank=1 ", "a rank that is no number"},
      {"tcp://host:1?rank=65536", "a rank that is no number"},
      {"tcp://host:1?world_size=0", "a world_size that is no number from 1 to 65536"},
      {"tcp://host:1?bind=", "an empty bind"},
      {"tcp://host:1?rank=1&rank=1", "says rank twice"},
      {"tcp://host:1?rank=2&world_size=2", "rank 2 in a job of 2"},
      {"tcp://host:1?\n=", "unknown parameter '\\n'"},
  };
  for (const auto& [url, complaint] : bad) {
    const absl::Status status = ParseRendezvousUrl(url).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << url;
    EXPECT_TRUE(absl::StrContains(status.message(), complaint)) << url << "\n" << status;
  }
}

}  // namespace
}  // namespace distgrad
