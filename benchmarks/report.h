// Writes results as a table, as JSON lines, and as a plot.
#ifndef DISTGRAD_BENCHMARKS_REPORT_H_
#define DISTGRAD_BENCHMARKS_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "benchmarks/rows.h"

namespace distgrad {

// Describes the machine, its load, and the versions.
std::string DescribeMachine();

// Resolves a path in the user's folder, which `bazel run` changes.
std::string FromCaller(const std::string& file);

std::string TableHead();
std::string TableLine(const Result& result);
// Explains the columns.
std::string TableNotes();

// Writes one flat object, {"metric", "config", "distgrad", "pytorch", "baseline", "unit", "ratio",
// ...}. Values that were not measured are null.
std::string JsonLine(const Result& result);

// Has gnuplot draw an SVG: how many times better than PyTorch each row is, and its target.
// kUnavailable without gnuplot.
absl::Status Plot(const std::vector<Result>& results, const std::string& file);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_REPORT_H_
