// DG_LOG(INFO | WARNING | ERROR) << ...: one line on standard error, in one write; or what a
// program has set in the place of that.
//
// The environment variable DISTGRAD_LOG (INFO, WARNING, ERROR or OFF; WARNING when unset) says
// from which severity on; below it the message is not even put together. Thread-safe.
#ifndef DISTGRAD_CORE_BASE_LOG_H_
#define DISTGRAD_CORE_BASE_LOG_H_

#include <functional>
#include <sstream>

#include "absl/strings/string_view.h"

namespace distgrad::internal {

enum class LogSeverity { kINFO, kWARNING, kERROR, kOFF };

// Returns the severity that DISTGRAD_LOG says, read once.
LogSeverity LogThreshold();

// Returns what a value of DISTGRAD_LOG means; anything unknown is WARNING.
LogSeverity ParseLogSeverity(absl::string_view text);

// Collects one line; its destructor writes it.
class LogLine {
 public:
  LogLine(LogSeverity severity, const char* file, int line)
      : severity_(severity), file_(file), line_(line) {}
  ~LogLine();
  std::ostream& stream() { return stream_; }

 private:
  const LogSeverity severity_;
  const char* const file_;
  const int line_;
  std::ostringstream stream_;
};

struct LogVoidify {
  void operator&(std::ostream&) const {}
};

}  // namespace distgrad::internal

namespace distgrad {

using internal::LogSeverity;

// Takes the text of a line, without time, place and newline.
using LogSink = std::function<void(LogSeverity severity, absl::string_view text)>;

// Gives all lines of this process to `write` from now on, in the place of standard error; null:
// none. When this has returned the former one is not running, nor will it, and is destroyed; in a
// sink this does not wait for that. A sink is called on whichever thread has something to say,
// several at once, also on a transport's and under locks of this library: it must neither wait nor
// call into it. Lines that it logs itself, and those at which it throws, go to standard error.
void SetLogSink(LogSink write);

}  // namespace distgrad

#define DG_LOG(severity)                                                                  \
  ::distgrad::internal::LogSeverity::k##severity < ::distgrad::internal::LogThreshold()   \
      ? void()                                                                            \
      : ::distgrad::internal::LogVoidify() &                                              \
            ::distgrad::internal::LogLine(::distgrad::internal::LogSeverity::k##severity, \
                                          __FILE__, __LINE__)                             \
                .stream()

#endif  // DISTGRAD_CORE_BASE_LOG_H_
