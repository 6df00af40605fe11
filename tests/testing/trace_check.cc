// trace_check FILE...
//
// Reads the traces of all workers of a job, which have to fit together: each call stands in them at
// both ends. Prints how many slices there are, as "worker category name count".
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testing/trace_events.h"

int main(int argc, char** argv) {
  std::vector<std::string> texts;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const absl::StatusOr<distgrad::TraceEvents> events = distgrad::ReadTraces(texts);
  if (!events.ok()) {
    std::fprintf(stderr, "%s\n", events.status().ToString().c_str());
    return 1;
  }
  std::map<std::string, int> counts;
  int failed = 0;
  for (const distgrad::TraceSlice& slice : events->slices) {
    ++counts[absl::StrCat(slice.process, " ", slice.category, " ", slice.name)];
    if (slice.args.count("call") == 0 || OtherEnd(*events, slice) != nullptr) continue;
    std::fprintf(stderr, "%s: the call of %s, %s, has no other end\n", slice.process.c_str(),
                 slice.name.c_str(), slice.category.c_str());
    failed = 1;
  }
  for (const auto& [name, count] : counts) std::printf("%s %d\n", name.c_str(), count);
  for (const std::string& note : events->notes) std::printf("%s\n", note.c_str());
  return failed;
}
