// Measures what a pass costs as it grows in edges, workers, hops and tensors, and fits lines.
//
//   tools/bazel run //benchmarks:scaling -- [--json FILE] [--plot FILE]
//
// docs/performance.md explains what is measured, and what the model says.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmarks/group.h"
#include "benchmarks/report.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// A series in which one quantity grows and the others stay.
struct Series {
  std::string name;
  std::string unit;  // of what grows
  int world;
  std::string kind;           // of work
  int per_count;              // of what grows, for each count of the work
  std::vector<int> counts;    // of the work
  int pytorch_up_to;          // counts; it takes too long for more
  std::vector<int> forecast;  // what grows, beyond what can be measured here
};

const std::vector<Series>& AllSeries() {
  static const auto* const series = new std::vector<Series>{
      // A call makes an edge there and one back.
      {"edges", "edge", 2, "fan", 2, {1, 5, 50, 500, 5000, 50000}, 500, {1000000}},
      {"workers", "worker", 32, "fan", 1, {1, 2, 4, 8, 16, 31}, 16, {1000, 4000}},
      {"hops", "hop", 32, "chain", 1, {1, 2, 4, 8, 16, 31}, 16, {1000}},
      {"tensors", "tensor", 2, "tensors", 1, {1, 10, 100, 1000, 10000}, 1000, {100000}},
  };
  return *series;
}

struct Point {
  int x;
  double micros;  // of a pass: the median over rounds
  double cpu_us;  // of all processes together
};

// micros = base + each * x.
struct Line {
  double base = 0, each = 0;
  double worst = 0;  // the largest relative error of a point
};

// Fits by least squares of the relative errors, so that large points count no more than small ones.
Line Fit(const std::vector<Point>& points) {
  double s = 0, sx = 0, sxx = 0, sy = 0, sxy = 0;
  for (const Point& point : points) {
    const double weight = 1 / (point.micros * point.micros), x = point.x;
    s += weight;
    sx += weight * x;
    sxx += weight * x * x;
    sy += weight * point.micros;
    sxy += weight * x * point.micros;
  }
  Line line;
  line.each = (s * sxy - sx * sy) / (s * sxx - sx * sx);
  line.base = (sy - line.each * sx) / s;
  for (const Point& point : points) {
    const double off = std::abs(line.base + line.each * point.x - point.micros) / point.micros;
    line.worst = std::max(line.worst, off);
  }
  return line;
}

struct Options {
  std::string json, plot, only;
  int rounds = 3;
  int slice_ms = 300;
};

using Measured = std::vector<std::pair<std::string, std::vector<Point>>>;  // by side

// Measures a point of each group; the groups take turns.
absl::StatusOr<std::vector<Point>> Measure(const std::vector<Group*>& groups, const Series& series,
                                           int count, const Options& options) {
  std::vector<std::vector<double>> micros(groups.size()), cpu_us(groups.size());
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < groups.size(); ++i) {
      DG_ASSIGN_OR_RETURN(const Slice slice, groups[i]->Run({series.kind, count, 4},
                                                            absl::Milliseconds(options.slice_ms)));
      micros[i].push_back(slice.sample.median_us);
      cpu_us[i].push_back(slice.cpu_us);
    }
  }
  std::vector<Point> points;
  for (size_t i = 0; i < groups.size(); ++i) {
    points.push_back(
        {count * series.per_count, Quantile(micros[i], 0.5), Quantile(cpu_us[i], 0.5)});
  }
  return points;
}

// Of PyTorch's two transports within a machine, the one that spins and the one that does not, the
// faster one stands for it at each point: which one that is depends on how many threads there are.
absl::StatusOr<Measured> Measure(const Series& series, const Options& options) {
  DG_ASSIGN_OR_RETURN(const auto ours, Group::Start("distgrad", "socket", series.world));
  DG_ASSIGN_OR_RETURN(const auto spinning, Group::Start("pytorch", "default", series.world));
  DG_ASSIGN_OR_RETURN(const auto waiting, Group::Start("pytorch", "uv", series.world));
  Measured measured = {{"distgrad", {}}, {"pytorch", {}}};
  for (const int count : series.counts) {
    std::vector<Group*> groups = {ours.get()};
    if (count <= series.pytorch_up_to) groups.insert(groups.end(), {spinning.get(), waiting.get()});
    DG_ASSIGN_OR_RETURN(const std::vector<Point> points, Measure(groups, series, count, options));
    measured[0].second.push_back(points[0]);
    std::printf("%-8s %8d %12.0f %10.1f %10.1f", series.name.c_str(), points[0].x, points[0].micros,
                points[0].micros / points[0].x, points[0].cpu_us / points[0].x);
    if (points.size() > 1) {
      const bool spins = points[1].micros <= points[2].micros;
      const Point& faster = points[spins ? 1 : 2];
      measured[1].second.push_back(faster);
      std::printf(" %12.0f %10.1f %10.1f %s\n", faster.micros, faster.micros / faster.x,
                  faster.cpu_us / faster.x, spins ? "shm" : "uv");
    } else {
      std::printf(" %12s %10s %10s\n", "-", "-", "-");
    }
    std::fflush(stdout);
  }
  return measured;
}

std::string Model(const Series& series, const std::string& side, const Line& line) {
  std::string text =
      absl::StrFormat("%-8s %-8s: %.0f us + %.1f us for each %s (worst point %.0f%% off)",
                      series.name, side, line.base, line.each, series.unit, 100 * line.worst);
  for (const int x : series.forecast) {
    absl::StrAppendFormat(&text, "; %d: %.3g s", x, (line.base + line.each * x) / 1e6);
  }
  return text;
}

absl::Status Plot(const std::vector<std::pair<const Series*, Measured>>& all,
                  const std::string& file) {
  std::string data, plots;
  for (const auto& [series, measured] : all) {
    std::string curves;
    for (const auto& [side, points] : measured) {
      const std::string name = absl::StrCat("$", side, "_", series->name);
      absl::StrAppend(&data, name, " << EOD\n");
      for (const Point& point : points) {
        absl::StrAppendFormat(&data, "%d %g\n", point.x, point.micros);
      }
      absl::StrAppend(&data, "EOD\n");
      const Line line = Fit(points);
      const char* const color = side == "distgrad" ? "#4477aa" : "#cc3311";
      absl::StrAppendFormat(
          &curves,
          "%s%s with points pt 7 lc rgb '%s' title '%s', %g+%g*x with lines lc rgb '%s' notitle",
          curves.empty() ? "" : ", ", name, color, side, line.base, line.each, color);
    }
    absl::StrAppend(&plots, "set xlabel '", series->name,
                    "'\nplot [1:", series->counts.back() * series->per_count, "] ", curves, "\n");
  }
  FILE* const gnuplot = popen("gnuplot", "w");
  if (gnuplot == nullptr) return absl::UnavailableError(std::strerror(errno));
  const std::string script = absl::StrCat(
      "set terminal svg size 1000,700 font 'sans,11' background 'white'\n", "set output '", file,
      "'\n", data, "set multiplot layout 2,2 title 'a pass as it grows, and a line through it'\n",
      "set logscale xy\nset grid\nset ylabel 'us'\nset key top left\n", plots, "unset multiplot\n");
  std::fputs(script.c_str(), gnuplot);
  if (pclose(gnuplot) != 0) return absl::UnavailableError("gnuplot failed");
  return absl::OkStatus();
}

absl::Status Scale(const Options& options) {
  std::ofstream json;
  if (!options.json.empty()) {
    json.open(FromCaller(options.json));
    if (!json) return absl::UnavailableError(absl::StrCat("cannot write ", options.json));
  }
  std::printf("%s\n\n%-8s %8s %12s %10s %10s %12s %10s %10s\n", DescribeMachine().c_str(), "grows",
              "to", "distgrad us", "us each", "CPU each", "PyTorch us", "us each", "CPU each");
  std::vector<std::pair<const Series*, Measured>> all;
  for (const Series& series : AllSeries()) {
    if (!absl::StrContains(series.name, options.only)) continue;
    DG_ASSIGN_OR_RETURN(Measured measured, Measure(series, options));
    all.emplace_back(&series, std::move(measured));
  }
  std::printf("\n");
  for (const auto& [series, measured] : all) {
    for (const auto& [side, points] : measured) {
      const Line line = Fit(points);
      std::printf("%s\n", Model(*series, side, line).c_str());
      if (!json.is_open()) continue;
      json << absl::StrFormat(
          "{\"series\": \"%s\", \"side\": \"%s\", \"base_us\": %g, \"each_us\": %g, "
          "\"worst\": %g, \"points\": [",
          series->name, side, line.base, line.each, line.worst);
      for (size_t i = 0; i < points.size(); ++i) {
        json << absl::StrFormat("%s[%d, %g, %g]", i == 0 ? "" : ", ", points[i].x, points[i].micros,
                                points[i].cpu_us);
      }
      json << "]}" << std::endl;
    }
  }
  std::printf("\n%s\n", DescribeMachine().c_str());
  return options.plot.empty() ? absl::OkStatus() : Plot(all, FromCaller(options.plot));
}

int Main(int argc, char** argv) {
  CLI::App app{"what a pass costs as it grows"};
  Options options;
  app.add_option("--json", options.json, "writes a JSON line for each series and side");
  app.add_option("--plot", options.plot, "draws an SVG, with gnuplot");
  app.add_option("--only", options.only, "one series: edges, workers, hops or tensors");
  app.add_option("--rounds", options.rounds, "how often each point is measured")
      ->capture_default_str();
  app.add_option("--slice_ms", options.slice_ms, "how long, each time")->capture_default_str();
  const GroupMember member(&app);
  CLI11_PARSE(app, argc, argv);
  if (member.IsOne()) return member.Serve();
  const absl::Status status = Scale(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
