// Parses Slurm's compressed lists of hosts and of numbers of tasks.
#include "core/membership/slurm.h"

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/membership/rendezvous_url.h"

namespace distgrad {
namespace {

bool IsHostCharacter(char c) { return absl::ascii_isalnum(c) || absl::StrContains(".-_", c); }

// "012" of "012-015,020"; "" for what is no list of numbers and ranges.
absl::string_view FirstNumber(absl::string_view ranges) {
  const absl::string_view first = ranges.substr(0, ranges.find_first_of("-,"));
  for (const absl::string_view range : absl::StrSplit(ranges, ',')) {
    for (const absl::string_view number : absl::StrSplit(range, absl::MaxSplits('-', 1))) {
      int value = 0;
      if (!ParseNumber(number, 0, 1 << 30, &value)) return "";
    }
  }
  return first;
}

}  // namespace

absl::StatusOr<std::string> FirstSlurmHost(absl::string_view node_list) {
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("\"", absl::CHexEscape(node_list), "\" is no list of Slurm's nodes"));
  std::string host;
  while (!node_list.empty() && node_list[0] != ',') {
    if (node_list[0] != '[') {
      if (!IsHostCharacter(node_list[0])) return bad;
      host += node_list[0];
      node_list.remove_prefix(1);
      continue;
    }
    const size_t end = node_list.find(']');
    if (end == absl::string_view::npos) return bad;
    const absl::string_view number = FirstNumber(node_list.substr(1, end - 1));
    if (number.empty()) return bad;
    absl::StrAppend(&host, number);
    node_list.remove_prefix(end + 1);
  }
  if (host.empty()) return bad;
  return host;
}

bool IsOneSlurmHost(absl::string_view node_list) {
  return node_list.find_first_of("[,") == absl::string_view::npos;
}

absl::StatusOr<int> SlurmTasksOfNode(absl::string_view tasks_per_node, int node) {
  for (absl::string_view entry : absl::StrSplit(tasks_per_node, ',')) {
    int nodes = 1;
    int tasks = 0;
    const size_t times = entry.find("(x");
    if (times != absl::string_view::npos) {
      absl::string_view count = entry.substr(times + 2);
      if (!absl::ConsumeSuffix(&count, ")") || !ParseNumber(count, 1, 1 << 24, &nodes)) break;
      entry = entry.substr(0, times);
    }
    if (!ParseNumber(entry, 0, kMaxWorldSize, &tasks)) break;
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", absl::CHexEscape(tasks_per_node), "\" is no list of tasks for each node"));
}

}  // namespace distgrad
