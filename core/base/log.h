// DG_LOG(INFO | WARNING | ERROR) << ...: one line on standard error, in one write.
//
// The environment variable DISTGRAD_LOG (INFO, WARNING, ERROR or OFF; WARNING when unset) says
// from which severity on; below it the message is not even put together. Thread-safe.
#ifndef DISTGRAD_CORE_BASE_LOG_H_
#define DISTGRAD_CORE_BASE_LOG_H_

#include <sstream>

#include "absl/strings/string_view.h"

namespace distgrad::internal {

enum class LogSeverity { kINFO, kWARNING, kERROR, kOFF };

// From DISTGRAD_LOG, read once.
LogSeverity LogThreshold();

// What a value of DISTGRAD_LOG means; anything unknown is WARNING.
LogSeverity ParseLogSeverity(absl::string_view text);

// Collects one line; its destructor writes it.
class LogLine {
 public:
  LogLine(LogSeverity severity, const char* file, int line);
  ~LogLine();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct LogVoidify {
  void operator&(std::ostream&) const {}
};

}  // namespace distgrad::internal

#define DG_LOG(severity)                                                                  \
  ::distgrad::internal::LogSeverity::k##severity < ::distgrad::internal::LogThreshold()   \
      ? void()                                                                            \
      : ::distgrad::internal::LogVoidify() &                                              \
            ::distgrad::internal::LogLine(::distgrad::internal::LogSeverity::k##severity, \
                                          __FILE__, __LINE__)                             \
                .stream()

#endif  // DISTGRAD_CORE_BASE_LOG_H_
