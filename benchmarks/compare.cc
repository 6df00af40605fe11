// Compares distgrad, PyTorch's own engine, and the baselines:
//
//   tools/bazel run //benchmarks:compare -- [--quick] [--json FILE] [--plot FILE]
//
// docs/performance.md explains what is measured, and how to read the table.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/group.h"
#include "benchmarks/report.h"
#include "benchmarks/rows.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

struct Options {
  bool quick = false;
  std::string json, plot, filter, transport = "socket", against;
  int rounds = 0;      // 0: 7 when quick, else 11
  int slice_ms = 0;    // 0: 60 when quick, else 300
  double quiet = 0.1;  // the share of the machine that others may take in a round
};

// Runs rows, and keeps the groups of processes that they need.
class Runner {
 public:
  explicit Runner(Options options) : options_(std::move(options)) {}

  absl::StatusOr<Result> Run(const Row& row) {
    // Many workers take much memory.
    for (auto it = groups_.begin(); it != groups_.end();) {
      const int world = std::get<2>(it->first);
      it = world > 2 && world != row.world ? groups_.erase(it) : std::next(it);
    }
    Result result;
    result.row = row;
    result.pytorch.resize(row.pytorch.size());
    result.baselines.resize(row.baselines.size());
    std::vector<std::pair<const Contender*, std::vector<Slice>*>> turns;
    if (!row.ours.side.empty()) turns.emplace_back(&row.ours, &result.ours);
    for (size_t i = 0; i < row.pytorch.size(); ++i)
      turns.emplace_back(&row.pytorch[i], &result.pytorch[i]);
    for (size_t i = 0; i < row.baselines.size(); ++i)
      turns.emplace_back(&row.baselines[i], &result.baselines[i]);

    std::vector<bool> quiet;
    // A start takes long, and counts and sizes do not change.
    const bool of_start = row.ours.work.kind == "start";
    const bool fact = row.value == Row::Value::kCount || row.value == Row::Value::kMegabytes;
    const int rounds = fact ? 1 : of_start ? std::min(3, options_.rounds) : options_.rounds;
    for (result.rounds = 0; result.rounds < rounds; ++result.rounds) {
      // The order alternates, so that no side always comes first.
      std::reverse(turns.begin(), turns.end());
      quiet.push_back(true);
      for (const auto& [contender, slices] : turns) {
        DG_ASSIGN_OR_RETURN(const Slice slice, RunOne(*contender, row.world));
        slices->push_back(slice);
        if (slice.others > options_.quiet) quiet.back() = false;
      }
    }
    const auto kept = std::count(quiet.begin(), quiet.end(), true);
    result.noisy = kept * 3 < rounds;
    if (!result.noisy) {
      for (const auto& [contender, slices] : turns) {
        std::vector<Slice> good;
        for (size_t i = 0; i < quiet.size(); ++i) {
          if (quiet[i]) good.push_back((*slices)[i]);
        }
        *slices = std::move(good);
      }
    }
    Derive(&result);
    return result;
  }

 private:
  using Key = std::tuple<std::string, std::string, int, std::string>;

  absl::StatusOr<Slice> RunOne(const Contender& contender, int world) {
    std::unique_ptr<Group>& group =
        groups_[Key(contender.side, contender.config, world, contender.program)];
    const std::string& kind = contender.work.kind;
    if (group == nullptr || kind == "start") {
      group = nullptr;
      DG_ASSIGN_OR_RETURN(group,
                          Group::Start(contender.side, contender.config, world, contender.program));
    }
    Slice fact;
    fact.sample.operations = 1;
    if (kind == "start") {
      fact.sample.median_us = group->facts().start_ms;
    } else if (kind == "thread_count") {
      fact.sample.median_us = group->facts().threads;
    } else if (kind == "memory") {
      fact.sample.median_us = group->facts().peak_mb;
    } else if (kind == "idle") {
      return group->Idle(absl::Milliseconds(std::max(300, options_.slice_ms)));
    } else {
      return group->Run(contender.work, absl::Milliseconds(options_.slice_ms));
    }
    return fact;
  }

  const Options options_;
  std::map<Key, std::unique_ptr<Group>> groups_;
};

bool Chosen(const Row& row, const Options& options) {
  if (options.quick && !row.quick) return false;
  if (options.filter.empty()) return true;
  for (absl::string_view part : absl::StrSplit(options.filter, ',')) {
    if (absl::StrContains(row.metric, part)) return true;
  }
  return false;
}

int Compare(Options options) {
  if (options.rounds == 0) options.rounds = options.quick ? 7 : 11;
  if (options.slice_ms == 0) options.slice_ms = options.quick ? 60 : 300;
  std::ofstream json;
  if (!options.json.empty()) {
    json.open(FromCaller(options.json));
    if (!json) {
      std::fprintf(stderr, "cannot write %s\n", options.json.c_str());
      return 1;
    }
  }
  std::printf("%s\n\n%s", DescribeMachine().c_str(), TableHead().c_str());
  std::fflush(stdout);
  std::vector<Result> results;
  std::vector<std::string> fallen, doubtful;
  Runner runner(options);
  for (Row& row : AllRows(options.transport, options.quick)) {
    if (!Chosen(row, options)) continue;
    if (!options.against.empty()) {
      if (row.ours.side.empty()) continue;
      row.pytorch = {row.ours};
      row.pytorch[0].program = FromCaller(options.against);
      row.baselines.clear();
      row.reach = 0;
    }
    absl::StatusOr<Result> result = runner.Run(row);
    if (!result.ok()) {
      std::fprintf(stderr, "%s: %s\n", row.title.c_str(), result.status().ToString().c_str());
      return 1;
    }
    std::printf("%s", TableLine(*result).c_str());
    std::fflush(stdout);
    if (json.is_open()) json << JsonLine(*result) << std::endl;
    if (result->achieved > 0 && result->achieved < 0.5) {
      // A row that other processes disturbed proves nothing.
      (result->noisy ? doubtful : fallen).push_back(row.title);
    }
    results.push_back(*std::move(result));
  }
  std::printf("\n%s%s\n", TableNotes().c_str(), DescribeMachine().c_str());
  if (!options.plot.empty()) {
    if (absl::Status drawn = Plot(results, FromCaller(options.plot)); !drawn.ok()) {
      std::fprintf(stderr, "the plot: %s\n", drawn.ToString().c_str());
      return 1;
    }
  }
  for (const std::string& title : doubtful)
    std::fprintf(stderr, "less than half of the target, but disturbed: %s\n", title.c_str());
  if (!options.quick || fallen.empty()) return 0;
  for (const std::string& title : fallen)
    std::fprintf(stderr, "less than half of what is to be reached: %s\n", title.c_str());
  return 1;
}

int Main(int argc, char** argv) {
  CLI::App app{"distgrad, PyTorch's own engine, and the baselines, side by side"};
  Options options;
  app.add_flag("--quick", options.quick,
               "under two minutes; fails if a row gets to less than half of its target");
  app.add_option("--json", options.json, "writes a JSON line for each row");
  app.add_option("--plot", options.plot, "draws an SVG, with gnuplot");
  app.add_option("--transport", options.transport, "distgrad's: socket, tcp, shm or inproc")
      ->capture_default_str();
  app.add_option("--against", options.against,
                 "another build of this program, which takes the place of PyTorch");
  app.add_option("--filter", options.filter,
                 "rows whose metric contains one of these, comma between");
  app.add_option("--rounds", options.rounds, "how often each has its turn");
  app.add_option("--slice_ms", options.slice_ms, "how long a turn is");
  app.add_option("--quiet", options.quiet,
                 "rounds in which others took more of the machine are dropped")
      ->capture_default_str();
  const GroupMember member(&app);
  CLI11_PARSE(app, argc, argv);
  return member.IsOne() ? member.Serve() : Compare(options);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
