// Looks into the folder beside the program, and into those that Bazel names in the environment.
#include "examples/runfiles.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"

namespace distgrad {

std::optional<std::string> FindRunfile(absl::string_view path) {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::string> roots = {absl::StrCat(program.string(), ".runfiles")};
  for (const char* name : {"RUNFILES_DIR", "TEST_SRCDIR"}) {
    if (const char* value = std::getenv(name); value != nullptr) roots.emplace_back(value);
  }
  for (const std::string& root : roots) {
    std::string file = absl::StrCat(root, "/", path);
    if (access(file.c_str(), R_OK) == 0) return file;
  }
  return std::nullopt;
}

}  // namespace distgrad
