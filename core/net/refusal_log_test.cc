// Which refused connections have a line in the log.
#include "core/net/refusal_log.h"

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

  // A client whose socket says no address.
  void Refuse(const std::string& why) { log_.Add(-1, server_, absl::UnauthenticatedError(why)); }
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

// A reason may have the names of a stranger's certificate, any of them.
TEST_F(RefusalLogTest, HoweverManyReasonsThereAreItsLinesAreFew) {
  for (int i = 0; i < 10000; ++i) Refuse(absl::StrCat("it is for name", i));
  const size_t lines = Take().size();
  EXPECT_GE(lines, 64u);
  EXPECT_LE(lines, 64u + 14u);
  now_ += absl::Minutes(10);
  Refuse("yet another");
  const std::vector<std::string> late = Take();
  ASSERT_EQ(late.size(), 1u);
  EXPECT_TRUE(absl::StrContains(late[0], "of various clients")) << late[0];
}

}  // namespace
}  // namespace distgrad
