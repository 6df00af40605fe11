// A straight line through what was measured now and then, and how far its slope can be trusted.
#ifndef DISTGRAD_TESTS_SOAK_FIT_H_
#define DISTGRAD_TESTS_SOAK_FIT_H_

#include <cstddef>

#include "absl/types/span.h"

namespace distgrad {

struct Point {
  double x = 0;
  double y = 0;
};

struct Fit {
  size_t points = 0;
  double mean = 0;   // of all y
  double slope = 0;  // y for each x
  // The slope's standard error; infinite with fewer than kFewestPoints points.
  double error = 0;
};

constexpr size_t kFewestPoints = 8;

// By least squares. `points` are in the order in which they were measured: what a process holds is
// much the same from one moment to the next, so two neighbours say less than two points do. The
// standard error takes that into account: it counts n (1 - r) / (1 + r) points, where r is the
// correlation of neighbouring residuals (Santer et al., Journal of Geophysical Research 105, 2000).
Fit FitLine(absl::Span<const Point> points);

enum class Growth {
  kNone,      // the slope and three standard errors are at most the bound and the resolution
  kGrows,     // the slope is above the bound by more than three standard errors
  kTooNoisy,  // neither: nobody can tell; also where there are too few points
};

// Of a thousand series whose slope is `bound` one or two are found to grow, and of a thousand whose
// slope is greater by `resolution` as many not to: without the latter a series passes if it is
// noisy enough.
Growth JudgeGrowth(const Fit& fit, double bound, double resolution);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SOAK_FIT_H_
