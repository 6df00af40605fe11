// Compares the examples, as their users run them, with the same training in one process.
#ifndef DISTGRAD_BENCHMARKS_EXAMPLE_ROWS_H_
#define DISTGRAD_BENCHMARKS_EXAMPLE_ROWS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// Runs each example whose name contains this, split over its workers and with --single, in turns,
// in so many rounds, and prints the medians of its speed while training and of its ratio to
// --single. Returns the error of the first run that failed.
absl::Status ReportExamples(absl::string_view names, int rounds);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_EXAMPLE_ROWS_H_
