// Writes and reads the fields by one table of their names.
#include "tests/soak/sample.h"

#include <cmath>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace distgrad {
namespace {

constexpr std::pair<const char*, double SoakSample::*> kFields[] = {
    {"time_ms", &SoakSample::time_ms},
    {"resident", &SoakSample::resident},
    {"heap", &SoakSample::heap},
    {"kept", &SoakSample::kept},
    {"descriptors", &SoakSample::descriptors},
    {"threads", &SoakSample::threads},
    {"contexts", &SoakSample::contexts},
    {"in_flight", &SoakSample::in_flight},
    {"pings", &SoakSample::pings},
    {"p50", &SoakSample::p50},
    {"p99", &SoakSample::p99},
    {"pipe_p99", &SoakSample::pipe_p99}};

}  // namespace

std::string FormatSample(const SoakSample& sample) {
  std::string text;
  for (const auto& [name, field] : kFields) {
    absl::StrAppendFormat(&text, "%s%s=%.15g", text.empty() ? "" : " ", name, sample.*field);
  }
  return text;
}

absl::StatusOr<SoakSample> ParseSample(absl::string_view text) {
  std::map<std::string, std::string> values;
  for (const absl::string_view value : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    values.insert(absl::StrSplit(value, absl::MaxSplits('=', 1)));
  }
  SoakSample sample;
  for (const auto& [name, field] : kFields) {
    const auto found = values.find(name);
    if (found == values.end() || !absl::SimpleAtod(found->second, &(sample.*field)) ||
        !std::isfinite(sample.*field)) {
      return absl::InvalidArgumentError(absl::StrCat("a sample without ", name, ": ", text));
    }
  }
  return sample;
}

}  // namespace distgrad
