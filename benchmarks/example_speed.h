// Reads the speed that an example prints when it has trained.
#ifndef DISTGRAD_BENCHMARKS_EXAMPLE_SPEED_H_
#define DISTGRAD_BENCHMARKS_EXAMPLE_SPEED_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// The number before the last " ITEMS/s", which is that of the whole run, of its training alone.
inline absl::StatusOr<double> ExampleSpeed(absl::string_view output, absl::string_view items) {
  const size_t end = output.rfind(absl::StrCat(" ", items, "/s"));
  double speed = 0;
  if (end != absl::string_view::npos) {
    const size_t begin = output.find_last_not_of("0123456789.", end - 1) + 1;
    if (absl::SimpleAtod(output.substr(begin, end - begin), &speed)) return speed;
  }
  return absl::NotFoundError(absl::StrCat("the example has said no ", items, "/s:\n", output));
}

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_EXAMPLE_SPEED_H_
