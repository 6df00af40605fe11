// Reads the affinity mask and the quotas of control groups, of both versions.
#include "core/base/processors.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace distgrad {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Of what a group may use in each period; what is no number is no limit, as "max" and -1 are none.
double Quota(absl::string_view quota, absl::string_view period) {
  double used = 0, of = 0;
  if (!absl::SimpleAtod(quota, &used) || !absl::SimpleAtod(period, &of)) return kNoLimit;
  return used > 0 && of > 0 ? used / of : kNoLimit;
}

double QuotaV1(const std::string& group) {
  return Quota(FirstLine(group + "/cpu.cfs_quota_us"), FirstLine(group + "/cpu.cfs_period_us"));
}

double QuotaV2(const std::string& group) {
  const std::vector<std::string> parts = absl::StrSplit(FirstLine(group + "/cpu.max"), ' ');
  return parts.size() == 2 ? Quota(parts[0], parts[1]) : kNoLimit;
}

// The least of a group's and of all those that it is in. In a container the group that its path
// names may not be there: its files are then those of the topmost.
double Least(double (*quota)(const std::string&), const std::string& top, absl::string_view path) {
  double least = quota(top);
  for (size_t end = 0; end != absl::string_view::npos;) {
    end = path.find('/', end + 1);
    least = std::min(least, quota(absl::StrCat(top, path.substr(0, end))));
  }
  return least;
}

}  // namespace

double ControlGroupQuota(const std::string& root) {
  const std::string top = root + "/sys/fs/cgroup";
  double least = kNoLimit;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/path" is of version 2, "4:cpu,cpuacct:/path" of version 1.
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (parts[1].empty()) {
      least = std::min(least, Least(QuotaV2, top, parts[2]));
    } else if (std::count(controllers.begin(), controllers.end(), "cpu") > 0) {
      least = std::min(least, Least(QuotaV1, absl::StrCat(top, "/", parts[1]), parts[2]));
    }
  }
  return least;
}

int UsableProcessors() {
  double processors = std::max(1u, std::thread::hardware_concurrency());
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) {
    processors = std::min<double>(processors, CPU_COUNT(&mask));
  }
  return static_cast<int>(std::max(1.0, std::min(processors, ControlGroupQuota(""))));
}

}  // namespace distgrad
