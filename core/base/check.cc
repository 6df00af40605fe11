// Writes the message of a failed check, and ends the process.
#include "core/base/check.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace distgrad::internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  stream_ << file << ":" << line << ": check failed: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  stream_ << "\n";
  const std::string text = stream_.str();
  // One write, and nothing that could allocate again or wait for a lock.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  std::abort();
}

}  // namespace distgrad::internal
