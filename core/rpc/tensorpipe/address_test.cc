#include "core/rpc/tensorpipe/address.h"

#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(ResolveBindHostTest, NumbersAndNames) {
  EXPECT_EQ(ResolveBindHost("127.0.0.1").value(), "127.0.0.1");
  const auto localhost = ResolveBindHost("localhost");
  ASSERT_TRUE(localhost.ok()) << localhost.status();
  EXPECT_TRUE(*localhost == "127.0.0.1" || *localhost == "[::1]") << *localhost;
}

TEST(ResolveBindHostTest, Interfaces) {
  EXPECT_EQ(ResolveBindHost("lo").value(), "127.0.0.1");
  const absl::Status status = ResolveBindHost("lo7").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("interfaces are lo"), std::string::npos) << status;
}

TEST(ResolveBindHostTest, Ipv6) {
  for (const char* host : {"::1", "0:0::1"}) {
    EXPECT_EQ(ResolveBindHost(host).value(), "[::1]");
  }
}

TEST(ResolveBindHostTest, WhatOthersCouldNotConnectTo) {
  for (const char* host : {"", "0.0.0.0", "::", "203.0.113.7", "no-such-host.invalid"}) {
    const auto result = ResolveBindHost(host);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << host;
    EXPECT_NE(result.status().message().find(*host == '\0' ? "empty" : host), std::string::npos)
        << result.status();
  }
}

TEST(CheckSocketAddressTest, Good) {
  for (const char* address : {"127.0.0.1:1", "10.1.2.3:65535", "[::1]:4711", "[fe80::1:2]:80"}) {
    EXPECT_TRUE(CheckSocketAddress(address).ok()) << CheckSocketAddress(address);
  }
}

TEST(CheckSocketAddressTest, Bad) {
  for (const char* address : {"",
                              ":",
                              "1.2.3.4",
                              "1.2.3.4:",
                              "1.2.3.4:0",
                              "1.2.3.4:65536",
                              "1.2.3.4:99999999999",
                              "1.2.3.4:+1",
                              "1.2.3.4: 1",
                              "1.2.3.4:1x",
                              "1.2.3:1",
                              "1.2.3.256:1",
                              "localhost:1",
                              "::1:1",
                              "[]:1",
                              "[::1]",
                              "[::1:1",
                              "[1.2.3.4]:1",
                              "[::1%lo]:1",
                              " 1.2.3.4:1"}) {
    const absl::Status status = CheckSocketAddress(address);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_NE(status.message().find(address), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace distgrad
