// Raising the limit on open files, and the errors where that is impossible.
#include "core/base/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

rlim_t SoftLimit() {
  rlimit limit = {};
  EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  return limit.rlim_cur;
}

class DescriptorsTest : public testing::Test {
 protected:
  // For the rest of this process the hard limit stays, unless it runs as root.
  void SetLimit(rlim_t soft, rlim_t hard) {
    const rlimit limit = {soft, hard};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
};

TEST_F(DescriptorsTest, WhatSufficesIsNotTouched) {
  SetLimit(512, 4096);
  EXPECT_TRUE(ReserveDescriptors(400, "this").ok());
  EXPECT_EQ(SoftLimit(), 512);
}

TEST_F(DescriptorsTest, ASoftLimitThatDoesNotIsRaised) {
  SetLimit(128, 4096);
  EXPECT_TRUE(ReserveDescriptors(400, "this").ok());
  EXPECT_EQ(SoftLimit(), 4096);
  std::vector<int> open;
  for (int i = 0; i < 400; ++i) open.push_back(dup(STDOUT_FILENO));
  for (const int fd : open) {
    EXPECT_GE(fd, 0);
    close(fd);
  }
}

// Then the count itself finds none.
TEST_F(DescriptorsTest, WhereNoneIsLeftTheLimitIsRaised) {
  SetLimit(128, 4096);
  std::vector<int> open;
  for (int fd; (fd = dup(STDOUT_FILENO)) >= 0;) open.push_back(fd);
  EXPECT_EQ(errno, EMFILE);
  EXPECT_TRUE(ReserveDescriptors(10, "this").ok());
  EXPECT_EQ(SoftLimit(), 4096);
  for (const int fd : open) close(fd);
}

TEST_F(DescriptorsTest, WhatIsOpenCounts) {
  SetLimit(128, 128);
  EXPECT_TRUE(ReserveDescriptors(60, "this").ok());
  std::vector<int> open;
  for (int i = 0; i < 60; ++i) open.push_back(dup(STDOUT_FILENO));
  EXPECT_FALSE(ReserveDescriptors(70, "this").ok());
  for (const int fd : open) close(fd);
}

TEST_F(DescriptorsTest, AHardLimitThatDoesNotSufficeIsAnErrorWithARemedy) {
  SetLimit(64, 128);
  const absl::Status status = ReserveDescriptors(1000, "a job of 99 workers");
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  for (const char* text : {"a job of 99 workers", "1000", "may have 128", "ulimit -n"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status;
  }
  // What there is is taken.
  EXPECT_EQ(SoftLimit(), 128);
}

TEST_F(DescriptorsTest, ErrorsNameTheRemedy) {
  EXPECT_TRUE(absl::StrContains(ErrnoText(EMFILE), "ulimit -n")) << ErrnoText(EMFILE);
  EXPECT_FALSE(absl::StrContains(ErrnoText(ECONNREFUSED), "ulimit -n"));
  EXPECT_TRUE(absl::IsResourceExhausted(ErrnoStatus(EMFILE, "socket")));
}

// Nor is what cannot be read there damaged, which kInvalidArgument would say.
TEST_F(DescriptorsTest, ADeviceThatIsGoneIsNoNameThatIsNotThere) {
  EXPECT_TRUE(absl::IsNotFound(ErrnoStatus(ENOENT, "open")));
  for (const int error : {EIO, ENODEV, ENXIO, ENOMEDIUM, EINVAL}) {
    const absl::Status status = ErrnoStatus(error, "open");
    EXPECT_TRUE(absl::IsUnknown(status)) << status;
  }
}

TEST_F(DescriptorsTest, WhatTheKernelLacksIsNoErrorOfAConnection) {
  for (const int error : {EMFILE, ENFILE, ENOBUFS, ENOMEM}) EXPECT_TRUE(IsExhaustion(error));
  for (const int error : {ECONNABORTED, EAGAIN, EINTR}) EXPECT_FALSE(IsExhaustion(error));
}

}  // namespace
}  // namespace distgrad
