// Runs the programs of //examples in a folder of their own, and reads what they print.
#include "benchmarks/example_rows.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/example_speed.h"
#include "benchmarks/ratio.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

struct Example {
  const char* name;
  const char* items;   // what is counted
  const char* length;  // options of all runs
  // Options of the runs that are compared; the first one is --single.
  std::vector<std::string> ways;
};

const std::vector<Example>& Examples() {
  static const auto* const examples = new std::vector<Example>{
      {"fashion_mnist", "images", "--epochs 2", {"--single", "--workers 2"}},
      {"transformer", "tokens", "--steps 60", {"--single", "--stages 2", "--stages 3"}},
  };
  return *examples;
}

absl::StatusOr<double> Run(const Example& example, const std::string& way,
                           const std::string& folder) {
  const std::string command = absl::StrCat("examples/", example.name, " ", example.length, " ", way,
                                           " --output '", folder, "' 2>&1");
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return absl::UnavailableError(absl::StrCat("cannot start ", command));
  std::string output;
  char bytes[4096];
  for (size_t got; (got = fread(bytes, 1, sizeof(bytes), pipe)) > 0;) output.append(bytes, got);
  if (pclose(pipe) != 0) {
    return absl::UnknownError(absl::StrCat(command, " has failed:\n", output));
  }
  return ExampleSpeed(output, example.items);
}

absl::Status Report(const Example& example, const std::string& folder, int rounds) {
  std::vector<std::vector<double>> speeds(example.ways.size());
  for (int round = 0; round < rounds; ++round) {
    // Every second round goes backwards, as in the rest of the benchmark.
    for (size_t i = 0; i < speeds.size(); ++i) {
      const size_t way = round % 2 == 0 ? i : speeds.size() - 1 - i;
      DG_ASSIGN_OR_RETURN(const double speed, Run(example, example.ways[way], folder));
      speeds[way].push_back(speed);
    }
  }
  std::printf("//examples:%s %s; %s per second while training\n", example.name, example.length,
              example.items);
  for (size_t way = 0; way < speeds.size(); ++way) {
    std::printf("%-44s %8.0f, %s of --single\n", example.ways[way].c_str(), Median(speeds[way]),
                RatioOf(speeds[way], speeds[0]).c_str());
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace

absl::Status ReportExamples(absl::string_view names, int rounds) {
  std::error_code error;
  std::string folder = (std::filesystem::temp_directory_path(error) / "examples.XXXXXX").string();
  if (error || mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError("there is no folder for what the examples write");
  }
  const auto remove = absl::MakeCleanup([&] { std::filesystem::remove_all(folder, error); });
  for (const Example& example : Examples()) {
    if (!absl::StrContains(example.name, names)) continue;
    DG_RETURN_IF_ERROR(Report(example, folder, rounds));
  }
  return absl::OkStatus();
}

}  // namespace distgrad
