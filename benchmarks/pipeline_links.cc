// Measures the example transformer as a pipeline over two hosts that are joined by a slow link: how
// much of the sending hides behind computing. The hosts are namespaces of this machine
// (tests/hosts), half of the stages on each, and each process has one thread.
//
//   tools/bazel run //benchmarks:pipeline_links -- [--rates none,1gbit,100mbit] [--stages 2,4]
//                                                  [--schedules 1f1b,zb_h1] [--rounds 1]
//                                                  [-- OPTIONS OF THE EXAMPLE]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/example_speed.h"
#include "benchmarks/ratio.h"
#include "core/base/status.h"
#include "tests/hosts/hosts.h"

namespace distgrad {
namespace {

constexpr char kProgram[] = "examples/transformer";

struct Settings {
  std::vector<std::string> rates = {"none", "1gbit", "100mbit"};  // as tc writes them
  std::vector<int> stages = {2, 4};
  std::vector<std::string> schedules = {"1f1b", "zb_h1"};
  int rounds = 1;
  std::vector<std::string> more;  // options of the example
};

// Runs the example once, in a folder of its own.
absl::StatusOr<double> Run(const Settings& settings, const std::string& folder,
                           const std::string& rate, int stages, const std::string& schedule) {
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<Hosts> hosts, Hosts::Create({.count = 2}));
  if (rate != "none") hosts->SetRate(rate);
  std::vector<std::unique_ptr<HostProcess>> processes;
  for (int rank = 0; rank < stages; ++rank) {
    const int host = rank * 2 / stages;
    std::vector<std::string> command = {kProgram, absl::StrCat("--stages=", stages),
                                        absl::StrCat("--schedule=", schedule),
                                        absl::StrCat("--output=", folder, "/", rank)};
    command.insert(command.end(), settings.more.begin(), settings.more.end());
    processes.push_back(hosts->Start(host, command,
                                     {{"RANK", absl::StrCat(rank)},
                                      {"WORLD_SIZE", absl::StrCat(stages)},
                                      {"LOCAL_RANK", absl::StrCat(rank - host * stages / 2)},
                                      {"LOCAL_WORLD_SIZE", absl::StrCat(stages / 2)},
                                      {"MASTER_ADDR", Hosts::Ipv4(0)},
                                      {"MASTER_PORT", "29500"},
                                      {"DISTGRAD_HOST", "eth0"},
                                      {"OMP_NUM_THREADS", "1"}}));
  }
  for (const auto& process : processes) {
    if (process->Wait() == 0) continue;
    return absl::UnknownError(absl::StrCat(kProgram, " has failed:\n", process->output()));
  }
  return ExampleSpeed(processes[0]->output(), "tokens");
}

absl::Status Measure(const Settings& settings) {
  std::error_code error;
  std::string folder = (std::filesystem::temp_directory_path(error) / "links.XXXXXX").string();
  if (error || mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError("there is no folder for what the example writes");
  }
  // Link by link within each round, so that a machine whose speed wanders slows all links alike.
  struct Row {
    int stages;
    std::string schedule;
    std::map<std::string, std::vector<double>> rates;  // of each link, round by round
  };
  std::vector<Row> rows;
  for (const int stages : settings.stages) {
    for (const std::string& schedule : settings.schedules) rows.push_back({stages, schedule, {}});
  }
  absl::Status status;
  for (int round = 0; round < settings.rounds && status.ok(); ++round) {
    for (Row& row : rows) {
      for (const std::string& rate : settings.rates) {
        const absl::StatusOr<double> one = Run(settings, folder, rate, row.stages, row.schedule);
        status.Update(one.status());
        if (!status.ok()) break;
        row.rates[rate].push_back(*one);
      }
      if (!status.ok()) break;
    }
  }
  // Each is compared with the first link of its round.
  std::printf("%-10s %7s %-12s %10s %22s\n", "link", "stages", "schedule", "tokens/s",
              absl::StrCat("of link ", settings.rates[0]).c_str());
  for (const std::string& rate : settings.rates) {
    for (Row& row : rows) {
      const std::vector<double>& measured = row.rates[rate];
      if (measured.empty()) continue;
      std::printf("%-10s %7d %-12s %10.0f %22s\n", rate.c_str(), row.stages, row.schedule.c_str(),
                  Median(measured), RatioOf(measured, row.rates[settings.rates[0]]).c_str());
    }
  }
  std::filesystem::remove_all(folder, error);
  return status;
}

int Main(int argc, char** argv) {
  Settings settings;
  // A list that took what comes after it would take the -- as well.
  CLI::App app("Measures the example transformer over two hosts with a slow link between them.");
  app.add_option("--rates", settings.rates, "Of the link, as tc writes them; none: no limit")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--stages", settings.stages, "Half of them on each host")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember({2, 4, 6, 8}));
  app.add_option("--schedules", settings.schedules, "As those of the example")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--rounds", settings.rounds, "How many runs a median is of")
      ->check(CLI::Range(1, 100));
  app.add_option("options", settings.more, "Options of the example, behind a --");
  CLI11_PARSE(app, argc, argv);
  return RunInNamespaces([&] {
    const absl::Status status = Measure(settings);
    if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return status.ok() ? 0 : 1;
  });
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
