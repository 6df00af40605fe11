// What is wrong with something, of which an error says the first ten things and how many more there
// are.
#ifndef DISTGRAD_CORE_BASE_COMPLAINTS_H_
#define DISTGRAD_CORE_BASE_COMPLAINTS_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {

class Complaints {
 public:
  void Add(std::string what) {
    constexpr size_t kMost = 10;
    if (++count_ <= kMost) first_.push_back(std::move(what));
  }

  bool empty() const { return count_ == 0; }

  // "one; another; and 3 more"
  std::string Text() const {
    const size_t more = count_ - first_.size();
    return absl::StrCat(absl::StrJoin(first_, "; "),
                        more > 0 ? absl::StrCat("; and ", more, " more") : "");
  }

 private:
  std::vector<std::string> first_;
  size_t count_ = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_COMPLAINTS_H_
