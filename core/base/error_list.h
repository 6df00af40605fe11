// Lists in errors, of which an error says the first few things and how many more there are.
#ifndef DISTGRAD_CORE_BASE_ERROR_LIST_H_
#define DISTGRAD_CORE_BASE_ERROR_LIST_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {

// "1, 2, 3 and 4 more"
template <typename Item>
std::string FirstOf(const std::vector<Item>& items) {
  const size_t said = std::min<size_t>(items.size(), 16);
  std::string text = absl::StrJoin(items.begin(), items.begin() + said, ", ");
  if (items.size() > said) absl::StrAppend(&text, " and ", items.size() - said, " more");
  return text;
}

// What is wrong with something: ten things at most.
class ErrorList {
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

#endif  // DISTGRAD_CORE_BASE_ERROR_LIST_H_
