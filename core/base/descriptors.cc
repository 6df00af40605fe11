// Counts and raises what the kernel grants, and puts errno into a Status.
#include "core/base/descriptors.h"

#include <dirent.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

constexpr size_t kRaiseTo = 65536;

size_t OpenDescriptors(const rlimit& limit) {
  DIR* const folder = opendir("/proc/self/fd");
  // It takes one itself.
  if (folder == nullptr) return errno == EMFILE ? limit.rlim_cur : 0;
  size_t count = 0;
  while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
  closedir(folder);
  return count - 1;  // the folder's own
}

// That a device is gone does not say that what is asked for is not there, nor EINVAL that a file is
// damaged, or the caller's argument wrong: they are as EIO is.
absl::StatusCode CodeOf(int error) {
  switch (error) {
    case EINVAL:
    case ENODEV:
    case ENOMEDIUM:
    case ENXIO:
      return absl::StatusCode::kUnknown;
    default:
      return absl::ErrnoToStatusCode(error);
  }
}

}  // namespace

absl::Status ReserveDescriptors(size_t more, absl::string_view what) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::OkStatus();  // none is known
  const size_t open = OpenDescriptors(limit), need = open + more;
  if (limit.rlim_cur >= need) return absl::OkStatus();
  const rlim_t soft = std::min<rlim_t>(limit.rlim_max, std::max(need, kRaiseTo));
  if (soft > limit.rlim_cur) {
    const rlimit raised = {soft, limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  if (limit.rlim_cur >= need) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " needs about ", more, " file descriptors besides the ", open,
                   " that this process has open, and it may have ", limit.rlim_cur,
                   ": raise the limit (`ulimit -n ", need, "`; docs/operating.md)"));
}

bool IsReadable(int socket) {
  pollfd entry = {socket, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

bool IsExhaustion(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

std::string ErrnoText(int error) {
  std::string text = std::strerror(error);
  rlimit limit = {};
  if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    absl::StrAppend(&text, ": this process may have ", limit.rlim_cur,
                    " file descriptors: raise the limit (`ulimit -n`; docs/operating.md)");
  }
  return text;
}

absl::Status ErrnoStatus(int error, absl::string_view what) {
  return absl::Status(CodeOf(error), absl::StrCat(what, ": ", ErrnoText(error)));
}

}  // namespace distgrad
