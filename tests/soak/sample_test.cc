// What one process writes the other reads; and no value that is missing is taken for 0.
#include "tests/soak/sample.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace distgrad {
namespace {

const SoakSample kSample = {.time_ms = 1'795'000'000'123,
                            .resident = 71.5,
                            .heap = 64,
                            .kept = 53,
                            .descriptors = 58,
                            .threads = 69,
                            .contexts = 3,
                            .in_flight = 2,
                            .pings = 1000,
                            .p50 = 120.25,
                            .p99 = 900,
                            .pipe_p99 = 150};

TEST(SampleTest, IsReadAsItWasWritten) {
  const absl::StatusOr<SoakSample> read = ParseSample(FormatSample(kSample));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->time_ms, kSample.time_ms);
  EXPECT_EQ(read->resident, kSample.resident);
  EXPECT_EQ(read->pipe_p99, kSample.pipe_p99);
  EXPECT_EQ(FormatSample(*read), FormatSample(kSample));
}

TEST(SampleTest, AMissingValueIsAnError) {
  const std::vector<std::string> values = absl::StrSplit(FormatSample(kSample), ' ');
  ASSERT_EQ(values.size(), 12);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string name = values[i].substr(0, values[i].find('='));
    for (const std::string& instead : {std::string(), name, name + "=", name + "=many",
                                       name + "=nan", name + "=inf", "x" + values[i]}) {
      std::vector<std::string> others = values;
      others[i] = instead;
      const absl::StatusOr<SoakSample> read = ParseSample(absl::StrJoin(others, " "));
      EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument)
          << name << ": " << instead;
    }
  }
}

}  // namespace
}  // namespace distgrad
