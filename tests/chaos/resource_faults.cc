// Fills a disk, and sets the limits of processes that run.
#include "tests/chaos/resource_faults.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// Returns what it was.
absl::StatusOr<rlim_t> SetSoftLimit(pid_t process, __rlimit_resource resource, rlim_t most) {
  rlimit limit = {};
  if (prlimit(process, resource, nullptr, &limit) != 0)
    return absl::ErrnoToStatus(errno, "prlimit");
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = std::min(most, limit.rlim_max);
  if (prlimit(process, resource, &limit, nullptr) != 0)
    return absl::ErrnoToStatus(errno, "prlimit");
  return before;
}

// The least number that no descriptor of the process has.
absl::StatusOr<rlim_t> FirstFreeDescriptor(pid_t process) {
  std::set<rlim_t> open;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", process, "/fd"), error)) {
    uint64_t number = 0;
    if (absl::SimpleAtoi(entry.path().filename().string(), &number)) open.insert(number);
  }
  if (error) return absl::InternalError(absl::StrCat("its descriptors: ", error.message()));
  rlim_t free = 0;
  while (open.count(free) > 0) ++free;
  return free;
}

absl::StatusOr<rlim_t> MemoryOf(pid_t process) {
  std::ifstream statm(absl::StrCat("/proc/", process, "/statm"));
  rlim_t pages = 0;
  if (!(statm >> pages)) return absl::InternalError("its memory is not known");
  return pages * static_cast<rlim_t>(getpagesize());
}

// Where the process may have ended of the fault, there is nothing to put right.
Fault OfLimit(ChaosJob* job, int worker, const std::string& kind, __rlimit_resource resource,
              const std::function<absl::StatusOr<rlim_t>(pid_t)>& least, absl::Duration lasts) {
  const auto before = std::make_shared<rlim_t>();
  Fault fault;
  fault.kind = kind;
  fault.where = absl::StrCat("worker ", worker, ", for ", absl::FormatDuration(lasts));
  fault.begin = [=]() -> absl::Status {
    const pid_t process = job->process(worker).pid();
    DG_ASSIGN_OR_RETURN(const rlim_t most, least(process));
    DG_ASSIGN_OR_RETURN(*before, SetSoftLimit(process, resource, most));
    return absl::OkStatus();
  };
  fault.lasts = lasts;
  fault.end = [=] {
    if (!job->Runs(worker)) return absl::OkStatus();
    return SetSoftLimit(job->process(worker).pid(), resource, *before).status();
  };
  fault.named = worker;
  return fault;
}

}  // namespace

Fault FullDisk(ChaosJob* job, absl::Duration lasts) {
  const std::string ballast = absl::StrCat(job->checkpoints(), "/ballast");
  Fault fault;
  fault.kind = "the disk of the checkpoints is full";
  fault.where = absl::StrCat("for ", absl::FormatDuration(lasts));
  fault.begin = [ballast] {
    const int fd = open(ballast.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return absl::ErrnoToStatus(errno, ballast);
    const std::vector<char> bytes(1 << 16);
    while (write(fd, bytes.data(), bytes.size()) > 0) continue;
    const absl::Status status =
        errno == ENOSPC ? absl::OkStatus() : absl::ErrnoToStatus(errno, ballast);
    close(fd);
    return status;
  };
  // A save that had written all may have removed an older checkpoint since.
  fault.lasts_until_effect = true;
  fault.again = fault.begin;
  fault.lasts = lasts;
  fault.end = [ballast] {
    return unlink(ballast.c_str()) == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, ballast);
  };
  fault.is_of_checkpoints = true;
  return fault;
}

Fault NoDescriptorsLeft(ChaosJob* job, int worker, absl::Duration lasts) {
  Fault fault = OfLimit(job, worker, "a worker has no descriptors left", RLIMIT_NOFILE,
                        FirstFreeDescriptor, lasts);
  // A save that had files open may have closed them since.
  fault.lasts_until_effect = true;
  fault.again = [job, worker]() -> absl::Status {
    const pid_t process = job->process(worker).pid();
    DG_ASSIGN_OR_RETURN(const rlim_t most, FirstFreeDescriptor(process));
    return SetSoftLimit(process, RLIMIT_NOFILE, most).status();
  };
  fault.is_of_checkpoints = true;
  return fault;
}

Fault NoMemoryLeft(ChaosJob* job, int worker, absl::Duration lasts) {
  // Less than it has, for what it gives back meanwhile it could have again.
  const auto less = [](pid_t process) -> absl::StatusOr<rlim_t> {
    DG_ASSIGN_OR_RETURN(const rlim_t bytes, MemoryOf(process));
    return bytes - (16 << 20);
  };
  Fault fault = OfLimit(job, worker, "a worker has no memory left", RLIMIT_AS, less, lasts);
  // libtorch, and C++'s own library, end a process that has no memory for some of their needs.
  fault.may_end_process = true;
  return fault;
}

}  // namespace distgrad
