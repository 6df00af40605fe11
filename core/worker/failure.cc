// Writes torchrun's error file.
#include "core/worker/failure.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/membership/environment.h"

namespace distgrad {
namespace {

// torchrun takes the earliest failure for the cause, by whole seconds. That another worker is gone
// is seen at once, often before that one has reported why: so it is dated later.
constexpr absl::Duration kBehindTheCause = absl::Seconds(2);

bool IsConsequence(const absl::Status& failure) {
  return absl::IsUnavailable(failure) || absl::IsCancelled(failure);
}

// A string of JSON. What is not printable ASCII is shown as "\x1b" is in C: the reader stops at
// bytes that are no UTF-8.
std::string Quoted(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '\n') {
      quoted += "\\n";
    } else if (!absl::ascii_isprint(c)) {
      absl::StrAppend(&quoted, "\\\\x", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    } else {
      if (c == '"' || c == '\\') quoted += '\\';
      quoted += c;
    }
  }
  return quoted + "\"";
}

absl::Status Write(const std::string& path, absl::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("writing ", path));
  int error = 0;
  while (!bytes.empty() && error == 0) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n >= 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  close(fd);
  if (error != 0) return absl::ErrnoToStatus(error, absl::StrCat("writing ", path));
  return absl::OkStatus();
}

}  // namespace

absl::Status ReportFailure(const absl::Status& failure) {
  const auto path = ProcessEnvironment("TORCHELASTIC_ERROR_FILE");
  if (failure.ok() || !path.has_value()) return absl::OkStatus();
  const absl::Time when =
      absl::Now() + (IsConsequence(failure) ? kBehindTheCause : absl::ZeroDuration());
  // torchrun fails itself on half a file, so it gets all of it at once.
  const std::string draft = absl::StrCat(*path, ".", getpid());
  absl::Status written = Write(
      draft,
      absl::StrCat("{\"message\": {\"message\": ",
                   Quoted(failure.ToString(absl::StatusToStringMode::kWithNoExtraData)),
                   ", \"extraInfo\": {\"timestamp\": \"", absl::ToUnixSeconds(when), "\"}}}\n"));
  if (written.ok() && link(draft.c_str(), path->c_str()) != 0 && errno != EEXIST) {
    written = absl::ErrnoToStatus(errno, absl::StrCat("writing ", *path));
  }
  unlink(draft.c_str());
  return written;
}

}  // namespace distgrad
