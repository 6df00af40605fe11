// Every kind of frame as bytes and back, cut short, out of range and at random.
#include "core/rpc/frame.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "core/base/origin.h"

namespace distgrad {
namespace {

TEST(FrameTest, ARequestIsReadAsItWasWritten) {
  std::string bytes;
  AppendFrame({.kind = FrameKind::kRequest, .function = "square"}, &bytes);
  SetCall(7, 1500, &bytes);
  bytes += "body";
  WireReader reader(bytes);
  absl::StatusOr<Frame> frame = ReadFrame(reader);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->kind, FrameKind::kRequest);
  EXPECT_EQ(frame->call, 7u);
  EXPECT_EQ(frame->timeout_us, 1500);
  EXPECT_EQ(frame->function, "square");
  EXPECT_EQ(reader.Rest(), "body");
}

TEST(FrameTest, AReplyCarriesItsStatus) {
  std::string bytes;
  AppendFrame(
      {.kind = FrameKind::kReply, .call = 3, .status = absl::NotFoundError("no such thing")},
      &bytes);
  WireReader reader(bytes);
  absl::StatusOr<Frame> frame = ReadFrame(reader);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->call, 3u);
  EXPECT_EQ(frame->status, absl::NotFoundError("no such thing"));
}

TEST(FrameTest, ALongErrorIsCut) {
  std::string bytes;
  AppendFrame({.kind = FrameKind::kReply,
               .status = absl::InternalError(std::string(kMaxErrorMessage + 1, 'x'))},
              &bytes);
  WireReader reader(bytes);
  const absl::StatusOr<Frame> frame = ReadFrame(reader);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->status, absl::InternalError(std::string(kMaxErrorMessage, 'x')));
}

TEST(FrameTest, AStatusCarriesItsOrigin) {
  using By = ErrorOrigin::By;
  for (const ErrorOrigin origin :
       {ErrorOrigin{0, By::kDistgrad}, ErrorOrigin{65535, By::kHandler}}) {
    std::string bytes;
    WireWriter writer(&bytes);
    const absl::Status status = WithOrigin(absl::NotFoundError("no such thing"), origin);
    AppendStatus(status, writer);
    WireReader reader(bytes);
    EXPECT_EQ(ReadStatus(reader), status);
    EXPECT_TRUE(reader.status("the status").ok());
    // A kind of tomorrow, or of somebody who means harm.
    bytes[bytes.size() - 3] = '\x7f';
    WireReader again(bytes);
    EXPECT_EQ(ReadStatus(again), absl::NotFoundError("no such thing"));
  }
  std::string bytes;
  WireWriter writer(&bytes);
  AppendStatus(absl::OkStatus(), writer);
  EXPECT_EQ(bytes.size(), 5u) << "that nothing went wrong is said in the bytes that it took";
}

TEST(FrameTest, ACancelNamesItsCall) {
  std::string bytes;
  AppendFrame({.kind = FrameKind::kCancel, .call = 9}, &bytes);
  WireReader reader(bytes);
  const absl::StatusOr<Frame> frame = ReadFrame(reader);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->kind, FrameKind::kCancel);
  EXPECT_EQ(frame->call, 9u);
}

TEST(FrameTest, ABulkFrameNamesItsLink) {
  std::string bytes;
  AppendFrame({.kind = FrameKind::kBulk, .link = 9}, &bytes);
  WireReader reader(bytes);
  EXPECT_EQ(ReadFrame(reader)->link, 9u);
}

TEST(FrameTest, ARefusalHasAReason) {
  std::string bytes;
  AppendFrame({.kind = FrameKind::kRefused, .status = absl::AbortedError("not you")}, &bytes);
  WireReader reader(bytes);
  EXPECT_EQ(ReadFrame(reader)->status, absl::AbortedError("not you"));
  bytes.clear();
  AppendFrame({.kind = FrameKind::kRefused}, &bytes);
  WireReader none(bytes);
  EXPECT_EQ(ReadFrame(none).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(FrameTest, WhatIsSaidWithoutABodyIsReadAsItWasWritten) {
  for (FrameKind kind : {FrameKind::kPing, FrameKind::kPong, FrameKind::kLeaving,
                         FrameKind::kBulkPing, FrameKind::kBulkPong}) {
    std::string bytes;
    AppendFrame({.kind = kind}, &bytes);
    WireReader reader(bytes);
    EXPECT_EQ(ReadFrame(reader)->kind, kind);
    EXPECT_EQ(reader.remaining(), 0u);
  }
}

TEST(FrameTest, AHelloIsReadAsItWasWritten) {
  std::string bytes;
  AppendHello({.from = 1,
               .from_incarnation = 11,
               .to = 2,
               .to_incarnation = 22,
               .link = 3,
               .number = 4,
               .first_own = 5,
               .first_other = 6},
              &bytes);
  WireReader reader(bytes);
  ASSERT_EQ(ReadFrame(reader)->kind, FrameKind::kHello);
  absl::StatusOr<Hello> hello = ReadHello(reader);
  ASSERT_TRUE(hello.ok()) << hello.status();
  EXPECT_EQ(hello->from, 1);
  EXPECT_EQ(hello->from_incarnation, 11u);
  EXPECT_EQ(hello->to, 2);
  EXPECT_EQ(hello->to_incarnation, 22u);
  EXPECT_EQ(hello->link, 3u);
  EXPECT_EQ(hello->number, 4u);
  EXPECT_EQ(hello->first_own, 5u);
  EXPECT_EQ(hello->first_other, 6u);
  EXPECT_EQ(reader.remaining(), 0u);
}

TEST(FrameTest, WhatIsCutShortIsRefused) {
  for (const Frame& frame :
       {Frame{.kind = FrameKind::kRequest, .function = "f"},
        Frame{.kind = FrameKind::kReply, .status = absl::InternalError("x")},
        Frame{.kind = FrameKind::kCancel, .call = 9}, Frame{.kind = FrameKind::kBulk, .link = 9},
        Frame{.kind = FrameKind::kRefused, .status = absl::AbortedError("x")},
        Frame{.kind = FrameKind::kPing}, Frame{.kind = FrameKind::kNotice}}) {
    std::string bytes;
    AppendFrame(frame, &bytes);
    for (size_t size = 0; size < bytes.size(); ++size) {
      WireReader reader(absl::string_view(bytes).substr(0, size));
      EXPECT_FALSE(ReadFrame(reader).ok()) << size;
    }
  }
}

TEST(FrameTest, OtherMagicKindsDeadlinesAndNamesAreRefused) {
  std::string good;
  AppendFrame({.kind = FrameKind::kRequest, .function = "f"}, &good);
  const auto refused = [](const std::string& bytes) {
    WireReader reader(bytes);
    return ReadFrame(reader).status().code() == absl::StatusCode::kInvalidArgument;
  };
  std::string bad = good;
  bad[0] ^= 1;
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad[4] = 99;
  EXPECT_TRUE(refused(bad));
  bad = good;
  SetCall(1, -1, &bad);
  EXPECT_TRUE(refused(bad));
  for (const size_t size : {size_t{0}, kMaxFunctionName, kMaxFunctionName + 1}) {
    std::string bytes;
    AppendFrame({.kind = FrameKind::kRequest, .function = std::string(size, 'f')}, &bytes);
    EXPECT_EQ(refused(bytes), size != kMaxFunctionName) << size;
  }
}

TEST(FrameTest, RandomBytesNeverCrash) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes;
    AppendFrame({.kind = static_cast<FrameKind>(1 + rng() % 12), .function = "f"}, &bytes);
    for (int flips = 0; flips < 4; ++flips) bytes[rng() % bytes.size()] = static_cast<char>(rng());
    WireReader reader(bytes);
    if (ReadFrame(reader).ok()) ReadHello(reader).IgnoreError();
  }
}

}  // namespace
}  // namespace distgrad
