// Lowers the limit on addresses of this process, and raises it again.
#include "tests/testing/no_memory.h"

#include <unistd.h>

#include <fstream>

#include "core/base/check.h"

namespace distgrad {

NoMemory::NoMemory(size_t left) {
  DG_CHECK(getrlimit(RLIMIT_AS, &before_) == 0);
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  DG_CHECK(pages > 0);
  rlimit limit = before_;
  limit.rlim_cur = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + left;
  DG_CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

NoMemory::~NoMemory() { setrlimit(RLIMIT_AS, &before_); }

}  // namespace distgrad
