// Which refused connections have a line in the log.
#include "core/net/refusal_log.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/log.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

class RefusalLogTest : public ::testing::Test {
 protected:
  struct Lines {
    absl::Mutex mu;
    std::vector<std::string> all ABSL_GUARDED_BY(mu);
  };

  RefusalLogTest() {
    SetLogSink([lines = lines_](LogSeverity severity, absl::string_view text) {
      if (severity != LogSeverity::kWARNING) return;
      absl::MutexLock lock(&lines->mu);
      lines->all.emplace_back(text);
    });
    // One that speaks the protocol: it has said hello.
    Handshake client = Handshake::Create(Handshake::Role::kClient, key_, {}).value();
    EXPECT_TRUE(server_.Receive(client.TakeOutput()).ok());
  }
  ~RefusalLogTest() override {
    SetLogSink([](LogSeverity, absl::string_view) {});
  }

  void Refuse(const std::string& why, const std::string& address = "10.0.0.1") {
    log_.Add(address, server_, absl::UnauthenticatedError(why));
  }
  // One that speaks another version of the protocol, before it has proved anything.
  void RefuseVersion(uint16_t version) {
    std::string hello = Handshake::Create(Handshake::Role::kClient, key_, {})->TakeOutput();
    std::memcpy(&hello[8], &version, sizeof(version));
    Handshake server = Handshake::Create(Handshake::Role::kServer, key_, {}).value();
    ASSERT_TRUE(server.Receive(hello).ok());
    log_.Add("10.0.0.1", server, absl::UnavailableError("it went away"));
  }
  // Since the last time.
  std::vector<std::string> Take() {
    absl::MutexLock lock(&lines_->mu);
    return std::exchange(lines_->all, {});
  }

  const ClusterKey key_ = "0123456789abcdef";
  const std::shared_ptr<Lines> lines_ = std::make_shared<Lines>();
  absl::Time now_ = absl::UnixEpoch();
  Handshake server_ = Handshake::Create(Handshake::Role::kServer, key_, {}).value();
  RefusalLog log_{"this worker", [this] { return now_; }};
};

TEST_F(RefusalLogTest, OneWhoGoesOnDoesNotFillIt) {
  for (int i = 0; i < 1000; ++i) Refuse("another key");
  const std::vector<std::string> lines = Take();
  ASSERT_EQ(lines.size(), 10u) << "1, 2, 4 ... 512";
  EXPECT_TRUE(absl::StrContains(lines[9], "another key (512 so far)")) << lines[9];
}

TEST_F(RefusalLogTest, OneWhoGoesOnDoesNotHideALateMistake) {
  for (int i = 0; i < 1000; ++i) Refuse("another key");
  Take();
  Refuse("no certificate");
  EXPECT_EQ(Take().size(), 1u) << "for another reason";
  Refuse("another key");
  EXPECT_EQ(Take().size(), 0u);
  now_ += absl::Minutes(10);
  Refuse("another key");
  EXPECT_EQ(Take().size(), 1u) << "later";
  Refuse("another key");
  EXPECT_EQ(Take().size(), 0u);
}

// A stranger may choose the version of its hello, and the names of its certificate.
TEST_F(RefusalLogTest, WhatAClientWritesMakesNoOtherKindOfReason) {
  for (uint16_t i = 0; i < 1000; ++i) {
    RefuseVersion(1000 + i);
    Refuse(absl::StrCat("the other end's certificate is refused: it is for DNS:",
                        std::string(1 + i % 30, 'a'), i, ", and not for DNS:job"));
  }
  const std::vector<std::string> lines = Take();
  EXPECT_EQ(lines.size(), 2 * 10u);
  EXPECT_TRUE(absl::StrContains(lines[18], "speaks version 1511 ")) << lines[18];
  EXPECT_TRUE(absl::StrContains(lines[19], "aa511, and not for")) << lines[19];
  Refuse("the other end has another cluster key (DISTGRAD_KEY_FILE)");
  Refuse("the other end's certificate is refused: certificate has expired (is it valid now?)");
  EXPECT_EQ(Take().size(), 2u) << "of the same address, for other reasons";
}

// As the errors of OpenSSL, whom a stranger may offer all sorts of things.
TEST_F(RefusalLogTest, OneAddressHasFewKindsOfReasons) {
  for (int i = 0; i < 1000; ++i) Refuse(std::string(1 + i, 'x'));
  EXPECT_LE(Take().size(), 16u + 10u);
  Refuse("another key", "10.0.0.2");
  EXPECT_EQ(Take().size(), 1u);
}

TEST_F(RefusalLogTest, HoweverManyAddressesThereAreItsLinesAreFewAndALateMistakeHasOne) {
  for (int i = 0; i < 1000; ++i) Refuse("another key", absl::StrCat("10.0.0.", i));
  EXPECT_EQ(Take().size(), 64u + 10u);
  Refuse("no certificate", "10.1.0.1");
  std::vector<std::string> late = Take();
  ASSERT_EQ(late.size(), 1u);
  EXPECT_TRUE(absl::StrContains(late[0], "10.1.0.1: no certificate (1 so far, of various clients)"))
      << late[0];
  // Those that were silent meanwhile make place.
  now_ += absl::Minutes(10);
  Refuse("another key", "10.0.0.5");
  Refuse("another key", "10.1.0.1");
  late = Take();
  ASSERT_EQ(late.size(), 2u);
  EXPECT_TRUE(absl::StrContains(late[0], "10.0.0.5: another key (2 so far)")) << late[0];
  EXPECT_TRUE(absl::StrContains(late[1], "10.1.0.1: another key (1 so far)")) << late[1];
}

}  // namespace
}  // namespace distgrad
