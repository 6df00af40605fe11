// How results are shown: a table, a JSON line each, and a plot.
#ifndef DISTGRAD_BENCHMARKS_REPORT_H_
#define DISTGRAD_BENCHMARKS_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "benchmarks/rows.h"

namespace distgrad {

// The machine, its load, and what the versions are.
std::string DescribeMachine();

// `bazel run` changes the folder; a file is meant from where it was called.
std::string FromCaller(const std::string& file);

std::string TableHead();
std::string TableLine(const Result& result);
// What the columns mean.
std::string TableNotes();

// {"metric", "config", "distgrad", "pytorch", "floor", "unit", "ratio", ...}: one flat object. What
// was not measured is null.
std::string JsonLine(const Result& result);

// An SVG, drawn by gnuplot: how many times better than PyTorch each row is, and what is to be
// reached. kUnavailable without gnuplot.
absl::Status Plot(const std::vector<Result>& results, const std::string& file);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_REPORT_H_
