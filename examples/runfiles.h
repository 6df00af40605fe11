// Finds the data that Bazel puts beside a program.
#ifndef DISTGRAD_EXAMPLES_RUNFILES_H_
#define DISTGRAD_EXAMPLES_RUNFILES_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace distgrad {

// Returns where a file is that can be read, if it is among the program's runfiles: by its
// repository and its path there ("bible/kjv.txt").
std::optional<std::string> FindRunfile(absl::string_view path);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_RUNFILES_H_
