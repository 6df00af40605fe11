// Builds a line of the log, and writes it if it is severe enough.
#include "core/base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
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

namespace {

struct Sink {
  const LogSink write;
  int running = 0;  // guarded by the mutex below
};

// Of the process, as standard error is.
struct CurrentSink {
  absl::Mutex mu;
  std::shared_ptr<Sink> sink ABSL_GUARDED_BY(mu);  // null: standard error
  std::atomic<bool> is_set{false};                 // so that without one no lock is taken
};
CurrentSink& Current() {
  static CurrentSink* const current = new CurrentSink;
  return *current;
}

thread_local bool in_sink = false;

bool WriteToSink(LogSeverity severity, absl::string_view text) {
  CurrentSink& current = Current();
  if (in_sink || !current.is_set.load(std::memory_order_acquire)) return false;
  std::shared_ptr<Sink> sink;
  {
    absl::MutexLock lock(&current.mu);
    if (current.sink == nullptr) return false;
    sink = current.sink;
    ++sink->running;
  }
  in_sink = true;
  bool written = true;
  try {
    sink->write(severity, text);
  } catch (...) {
    written = false;
  }
  in_sink = false;
  absl::MutexLock lock(&current.mu);
  --sink->running;
  // Whoever waits for this one destroys it. One that nobody waits for ends here, outside the lock.
  if (sink.use_count() > 1) sink.reset();
  return written;
}

void WriteLine(LogSeverity severity, const char* file, int line, const std::string& message) {
  if (WriteToSink(severity, message)) return;
  static constexpr char kLetters[] = "IWE";
  std::ostringstream text_of_line;
  text_of_line << kLetters[static_cast<int>(severity)] << " "
               << absl::FormatTime("%Y-%m-%dT%H:%M:%E6S", absl::Now(), absl::UTCTimeZone()) << "Z "
               << file << ":" << line << "] " << message << "\n";
  const std::string text = text_of_line.str();
  // Lines of several threads and processes on one terminal do not mix. A log that cannot be
  // written has nowhere to say so.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

LogLine::~LogLine() {
  try {
    WriteLine(severity_, file_, line_, stream_.str());
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the line is lost
  }
}

}  // namespace distgrad::internal

namespace distgrad {

void SetLogSink(LogSink write) {
  auto& current = internal::Current();
  std::shared_ptr<internal::Sink> sink;  // becomes the former one, which ends outside the lock
  if (write != nullptr) sink = std::make_shared<internal::Sink>(internal::Sink{std::move(write)});
  absl::MutexLock lock(&current.mu);
  current.sink.swap(sink);
  current.is_set.store(current.sink != nullptr, std::memory_order_release);
  if (sink == nullptr || internal::in_sink) return;
  const auto is_idle = [&] { return sink->running == 0; };
  current.mu.Await(absl::Condition(&is_idle));
}

}  // namespace distgrad
