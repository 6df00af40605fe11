// Context that is added to errors, and the macros that pass them on.
#include "core/base/status.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(AnnotateTest, KeepsCodeAndPayloadsAndOk) {
  EXPECT_EQ(Annotate(absl::OkStatus(), "reading"), absl::OkStatus());
  absl::Status status = absl::NotFoundError("no file");
  status.SetPayload("worker", absl::Cord("w1"));
  const absl::Status annotated = Annotate(Annotate(status, "reading x"), "starting");
  EXPECT_EQ(annotated.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(annotated.message(), "starting: reading x: no file");
  EXPECT_EQ(annotated.GetPayload("worker"), absl::Cord("w1"));
}

absl::StatusOr<std::unique_ptr<int>> Half(int n) {
  if (n % 2 != 0) return absl::InvalidArgumentError("odd");
  return std::make_unique<int>(n / 2);
}

absl::Status Check(int n) {
  if (n > 100)
    DG_RETURN_IF_ERROR(absl::OutOfRangeError("large"));
  else
    return absl::OkStatus();
  return absl::OkStatus();
}

absl::StatusOr<std::string> Quarter(int n) {
  DG_RETURN_IF_ERROR(Check(n));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<int> half, Half(n));
  std::unique_ptr<int> quarter;
  DG_ASSIGN_OR_RETURN(quarter, Half(*half));
  return std::to_string(*quarter);
}

TEST(StatusMacrosTest, PassErrorsOn) {
  EXPECT_EQ(Quarter(20).value(), "5");
  EXPECT_EQ(Quarter(10).status(), absl::InvalidArgumentError("odd"));
  EXPECT_EQ(Quarter(200).status(), absl::OutOfRangeError("large"));
}

}  // namespace
}  // namespace distgrad
