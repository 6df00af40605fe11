// Addresses to listen on and to connect to, as text and as the system resolves them.
#include "core/net/address.h"

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

// Each test has a network with nothing but a loopback.
TEST(AddressTowardTest, ByLoopbackToWhatIsHere) {
  const auto ipv4 = AddressToward("127.0.0.1");
  ASSERT_TRUE(ipv4.ok()) << ipv4.status();
  EXPECT_EQ(*ipv4, "127.0.0.1");
  const auto ipv6 = AddressToward("::1");
  if (ipv6.ok()) {  // where the machine has IPv6
    EXPECT_EQ(*ipv6, "::1");
  }
  const auto name = AddressToward("localhost");
  ASSERT_TRUE(name.ok()) << name.status();
  EXPECT_TRUE(*name == "127.0.0.1" || *name == "::1") << *name;
  // Others can be told it.
  EXPECT_TRUE(ResolveBindHost(*name).ok());
}

TEST(AddressTowardTest, NobodyIsThere) {
  for (const char* host : {"no.such.host.invalid", "fe80::1"}) {
    const auto address = AddressToward(host);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kUnavailable) << host;
    EXPECT_NE(address.status().message().find(host), std::string::npos) << address.status();
  }
}

TEST(IsLoopbackTest, WithAPortOrWithout) {
  for (const char* host : {"127.0.0.1", "127.0.1.1:80", "[::1]", "[::1]:80"}) {
    EXPECT_TRUE(IsLoopback(host)) << host;
  }
  for (const char* host : {"10.127.0.1", "[::1:2]:80", "[fd77::1]", "12.7.0.0:1"}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
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
