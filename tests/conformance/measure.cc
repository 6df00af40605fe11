// Starts a process for each worker of a scenario, and collects what came of it.
#include "tests/conformance/measure.h"

#include <ATen/core/Tensor.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "core/base/check.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

constexpr char kWorkerFlag[] = "--scenario-worker";
constexpr int kSecondsToStart = 60;

// An empty folder, for as long as it lives.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const char* const base = std::getenv("TEST_TMPDIR");
    path_ = absl::StrCat(base != nullptr ? base : "/tmp", "/scenarios-XXXXXX");
    DG_CHECK(mkdtemp(path_.data()) != nullptr) << path_;
  }
  ~TemporaryFolder() {
    std::error_code ignored;  // what is left there harms nobody
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// On one line, and not too long for a table.
std::string Short(std::string text) {
  absl::StrReplaceAll({{"\n", " "}, {"\t", " "}, {"|", "/"}}, &text);
  text = text.substr(0, text.find(" Exception raised from"));
  if (text.size() > 200) text = absl::StrCat(text.substr(0, 200), " ...");
  return text;
}

// Runs the scenarios from `first` on, until one ends or spoils the processes.
std::vector<std::string> MeasureSome(const std::string& side,
                                     const std::vector<const Scenario*>& scenarios, size_t first,
                                     int limit_seconds) {
  std::vector<std::string> names;
  for (size_t i = first; i < scenarios.size(); ++i) {
    if (scenarios[i]->last && i > first) break;
    names.push_back(scenarios[i]->name);
    if (scenarios[i]->last) break;
  }
  const TemporaryFolder folder;
  std::vector<std::unique_ptr<ChildProcess>> workers;
  for (int rank = 0; rank < kScenarioWorkers; ++rank) {
    workers.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{
        kWorkerFlag, side, absl::StrCat(rank), absl::StrCat(folder.path(), "/store"),
        absl::StrCat(limit_seconds), absl::StrJoin(names, ",")}));
  }
  std::vector<std::string> outcomes;
  while (outcomes.size() < names.size()) {
    const std::string line = workers[0]->ReadLine();
    if (line.empty()) {
      const int code = workers[0]->Wait();
      outcomes.push_back(code == -SIGALRM ? kHangs : absl::StrCat("ends the process: ", code));
      break;
    }
    outcomes.push_back(line);
  }
  return outcomes;
}

std::string Outcome(const Scenario& scenario, Side& side) {
  try {
    return scenario.run(side);
  } catch (const c10::Error& e) {
    return absl::StrCat("an error: ", e.what_without_backtrace());
  } catch (const std::exception& e) {
    return absl::StrCat("an error: ", e.what());
  }
}

}  // namespace

std::vector<std::string> Measure(const std::string& side,
                                 const std::vector<const Scenario*>& scenarios, int limit_seconds) {
  std::vector<std::string> outcomes;
  while (outcomes.size() < scenarios.size()) {
    for (std::string& outcome : MeasureSome(side, scenarios, outcomes.size(), limit_seconds))
      outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

bool IsScenarioWorker(int argc, char** argv) {
  return argc == 7 && argv[1] == std::string(kWorkerFlag);
}

void RunScenarioWorker(char** argv) {
  signal(SIGPIPE, SIG_IGN);
  alarm(kSecondsToStart);
  const std::string side_name = argv[2], file = argv[4];
  int rank = 0, limit_seconds = 0;
  DG_CHECK(absl::SimpleAtoi(argv[3], &rank) && absl::SimpleAtoi(argv[5], &limit_seconds));
  const ServedFunctions functions = FunctionsOf(rank);
  const std::unique_ptr<Side> side = (side_name == "pytorch" ? StartPytorch : StartDistgrad)(
      rank, kScenarioWorkers, file, functions);
  alarm(0);
  // The others serve until they are ended.
  while (rank != 0) pause();
  for (absl::string_view name : absl::StrSplit(argv[6], ',')) {
    for (const Scenario& scenario : Scenarios()) {
      if (name != scenario.name) continue;
      alarm(static_cast<unsigned>(limit_seconds));
      std::printf("%s\n", Short(Outcome(scenario, *side)).c_str());
      std::fflush(stdout);
      alarm(0);
    }
  }
  _exit(0);  // PyTorch's agent would wait for the others
}

}  // namespace distgrad
