// Medians of what rounds have measured.
#ifndef DISTGRAD_BENCHMARKS_RATIO_H_
#define DISTGRAD_BENCHMARKS_RATIO_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"

namespace distgrad {

// Of an even number the mean of the two in the middle; 0 where nothing was measured.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// "0.97 (0.91 to 1.02)": the median of rates by others of the same rounds, and the least and the
// most of them. What slows the machine down for some seconds slows both.
inline std::string RatioOf(const std::vector<double>& rates, const std::vector<double>& others) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(rates.size(), others.size()); ++i) {
    if (rates[i] > 0 && others[i] > 0) ratios.push_back(rates[i] / others[i]);
  }
  if (ratios.empty()) return "not measured";
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  const std::string range = absl::StrFormat(" (%.2f to %.2f)", *least, *most);
  return absl::StrFormat("%.2f", Median(ratios)) + (ratios.size() > 1 ? range : "");
}

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_RATIO_H_
