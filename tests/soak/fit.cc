// Least squares, with the error of a series whose neighbours resemble each other.
#include "tests/soak/fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace distgrad {

Fit FitLine(absl::Span<const Point> points) {
  Fit fit;
  fit.points = points.size();
  fit.error = std::numeric_limits<double>::infinity();
  if (points.empty()) return fit;
  const double n = static_cast<double>(points.size());
  double mean_x = 0;
  for (const Point& point : points) {
    mean_x += point.x / n;
    fit.mean += point.y / n;
  }
  double sum_xx = 0, sum_xy = 0;
  for (const Point& point : points) {
    sum_xx += (point.x - mean_x) * (point.x - mean_x);
    sum_xy += (point.x - mean_x) * (point.y - fit.mean);
  }
  if (points.size() < kFewestPoints || sum_xx == 0) return fit;
  fit.slope = sum_xy / sum_xx;

  double squares = 0, neighbours = 0, last = 0;
  for (const Point& point : points) {
    const double residual = point.y - fit.mean - fit.slope * (point.x - mean_x);
    squares += residual * residual;
    neighbours += residual * last;
    last = residual;
  }
  const double r = squares > 0 ? std::max(0.0, neighbours / squares) : 0;
  // Two are used up by the line. One is the least that an error can be estimated from.
  const double freedom = std::max(1.0, n * (1 - r) / (1 + r) - 2);
  fit.error = std::sqrt(squares / freedom / sum_xx);
  return fit;
}

Growth JudgeGrowth(const Fit& fit, double bound, double resolution) {
  if (fit.slope - 3 * fit.error > bound) return Growth::kGrows;
  // Not where the error is infinite, or no number.
  const bool is_shown = fit.slope + 3 * fit.error <= bound + resolution;
  return is_shown ? Growth::kNone : Growth::kTooNoisy;
}

}  // namespace distgrad
