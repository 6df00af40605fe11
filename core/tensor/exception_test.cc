// The codes and messages that exceptions of libtorch become.
#include "core/tensor/exception.h"

#include <c10/util/Exception.h>

#include <new>
#include <stdexcept>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

template <typename Thrower>
absl::Status Caught(Thrower thrower) {
  try {
    thrower();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return absl::OkStatus();
}

TEST(StatusFromException, CodesOfLibtorchErrors) {
  EXPECT_EQ(Caught([] { TORCH_CHECK_INDEX(false, "i"); }), absl::InvalidArgumentError("i"));
  EXPECT_EQ(Caught([] { TORCH_CHECK_VALUE(false, "v"); }), absl::InvalidArgumentError("v"));
  EXPECT_EQ(Caught([] { TORCH_CHECK_TYPE(false, "t"); }), absl::InvalidArgumentError("t"));
  EXPECT_EQ(Caught([] { TORCH_CHECK_NOT_IMPLEMENTED(false, "n"); }), absl::UnimplementedError("n"));
  EXPECT_EQ(Caught([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "m"); }),
            absl::ResourceExhaustedError("m"));
  EXPECT_EQ(Caught([] { TORCH_CHECK(false, "shapes differ: ", 3); }),
            absl::InternalError("shapes differ: 3"));
}

TEST(StatusFromException, NoBacktrace) {
  absl::Status status = Caught([] { TORCH_CHECK(false, "x"); });
  EXPECT_FALSE(absl::StrContains(status.message(), "Exception raised from")) << status;
}

TEST(StatusFromException, OtherExceptions) {
  EXPECT_EQ(Caught([] { throw std::bad_alloc(); }).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Caught([] { throw std::invalid_argument("a"); }), absl::InvalidArgumentError("a"));
  EXPECT_EQ(Caught([] { throw std::out_of_range("r"); }), absl::InvalidArgumentError("r"));
  EXPECT_EQ(Caught([] { throw std::runtime_error("e"); }), absl::InternalError("e"));
  EXPECT_EQ(Caught([] { throw 7; }).code(), absl::StatusCode::kInternal);
}

// Who handles an exception has nothing above it that would handle another one.
TEST(StatusFromException, WithoutMemoryForAStatusItSaysThat) {
  const std::string long_text(100, 'x');
  const auto caught = [](const auto& exception) {
    absl::Status status;
    try {
      throw exception;
    } catch (...) {
      FailAllocation(0);
      status = StatusFromException(std::current_exception());
    }
    EXPECT_TRUE(FailAllocation(-1));
    return status.code();
  };
  EXPECT_EQ(caught(std::runtime_error(long_text)), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(caught(c10::Error({__func__, __FILE__, __LINE__}, long_text)),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(caught(StatusError(absl::DataLossError(long_text))),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace distgrad
