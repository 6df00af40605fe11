// Builds a line of the log, and writes it if it is severe enough.
#include "core/base/log.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace distgrad::internal {

LogSeverity ParseLogSeverity(absl::string_view text) {
  if (absl::EqualsIgnoreCase(text, "INFO")) return LogSeverity::kINFO;
  if (absl::EqualsIgnoreCase(text, "ERROR")) return LogSeverity::kERROR;
  if (absl::EqualsIgnoreCase(text, "OFF")) return LogSeverity::kOFF;
  return LogSeverity::kWARNING;
}

LogSeverity LogThreshold() {
  static const LogSeverity threshold = [] {
    const char* text = std::getenv("DISTGRAD_LOG");
    return ParseLogSeverity(text == nullptr ? "" : text);
  }();
  return threshold;
}

LogLine::LogLine(LogSeverity severity, const char* file, int line) {
  static constexpr char kLetters[] = "IWE";
  stream_ << kLetters[static_cast<int>(severity)] << " "
          << absl::FormatTime("%Y-%m-%dT%H:%M:%E6S", absl::Now(), absl::UTCTimeZone()) << "Z "
          << file << ":" << line << "] ";
}

LogLine::~LogLine() {
  stream_ << "\n";
  const std::string text = stream_.str();
  // Lines of several threads and processes on one terminal do not mix. A log that cannot be
  // written has nowhere to say so.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace distgrad::internal
