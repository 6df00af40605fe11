// Writes results as lines of a table and as JSON, and has gnuplot draw them.
#include "benchmarks/report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace distgrad {
namespace {

// Formats three significant digits.
std::string Number(double value) {
  if (value == 0) return "-";
  if (std::abs(value) >= 100) return absl::StrFormat("%.0f", value);
  if (std::abs(value) >= 10) return absl::StrFormat("%.1f", value);
  if (std::abs(value) < 0.1) return absl::StrFormat("%.3f", value);
  return absl::StrFormat("%.2f", value);
}

double Median(const std::vector<Slice>& slices, double Slice::*field) {
  if (slices.empty()) return 0;
  std::vector<double> values;
  for (const Slice& slice : slices) values.push_back(slice.*field);
  return Quantile(values, 0.5);
}

const std::vector<Slice>& BestPytorch(const Result& result) {
  static const auto* const none = new std::vector<Slice>();
  return result.best < 0 ? *none : result.pytorch[result.best];
}

std::string Reach(const Result& result) {
  const Row& row = result.row;
  if (row.reach == 0) return "measure";
  std::string reach;
  switch (row.against) {
    case Row::Against::kPytorch:
      reach = absl::StrCat(">= ", Number(row.reach), "x");
      break;
    case Row::Against::kBaseline:
      reach = absl::StrCat("<= ", Number(row.reach), "x baseline");
      break;
    case Row::Against::kLimit:
      reach = absl::StrCat("< ", Number(row.reach), " ", UnitOf(row));
      break;
  }
  return absl::StrCat(reach, result.achieved >= 1 ? " yes" : " NO");
}

std::string Json(absl::string_view key, double value) {
  return value == 0 || !std::isfinite(value) ? absl::StrFormat("\"%s\": null", key)
                                             : absl::StrFormat("\"%s\": %.6g", key, value);
}

}  // namespace

std::string DescribeMachine() {
  std::string model = "unknown processor", line;
  for (std::ifstream in("/proc/cpuinfo"); std::getline(in, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (absl::StripAsciiWhitespace(parts[0]) != "model name") continue;
    model = std::string(absl::StripAsciiWhitespace(parts.back()));
    break;
  }
  double load[3] = {};
  if (getloadavg(load, 3) < 0) load[0] = load[1] = load[2] = -1;
  utsname kernel = {};
  uname(&kernel);
  return absl::StrFormat(
      "%s, %d processors, %d GB, %s %s; load average %.1f %.1f %.1f; %s", model,
      sysconf(_SC_NPROCESSORS_ONLN),
      static_cast<int>(static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 1e9),
      kernel.sysname, kernel.release, load[0], load[1], load[2],
      absl::FormatTime("%Y-%m-%d %H:%M UTC", absl::Now(), absl::UTCTimeZone()));
}

std::string FromCaller(const std::string& file) {
  const char* const folder = std::getenv("BUILD_WORKING_DIRECTORY");
  return file.empty() || file[0] == '/' || folder == nullptr ? file
                                                             : absl::StrCat(folder, "/", file);
}

std::string TableHead() {
  return absl::StrFormat("%-41s %4s %9s %9s %9s %9s %-8s %8s %7s %-18s %11s %11s %6s %6s\n", "work",
                         "unit", "distgrad", "p99 us", "PyTorch", "p99 us", "its best", "baseline",
                         "times", "reach", "CPU us/op", "switches/op", "rounds", "others");
}

std::string TableLine(const Result& result) {
  const std::vector<Slice>& best = BestPytorch(result);
  double others = 0;
  for (const Slice& slice : result.ours) others = std::max(others, slice.others);
  const bool baseline_only = result.ours.empty();
  const size_t kept = baseline_only ? result.baselines.at(0).size() : result.ours.size();
  return absl::StrFormat(
      "%-41s %4s %9s %9s %9s %9s %-8s %8s %7s %-18s %11s %11s %6s %5.0f%%\n", result.row.title,
      UnitOf(result.row), Number(result.our_value), Number(result.our_p99),
      Number(result.pytorch_value), Number(result.pytorch_p99),
      result.best < 0 ? "-" : result.row.pytorch[result.best].config, Number(result.baseline_value),
      result.row.against == Row::Against::kBaseline ? Number(result.baseline_ratio) + "b"
                                                    : Number(result.ratio),
      baseline_only ? "" : Reach(result),
      baseline_only ? ""
                    : absl::StrCat(Number(Median(result.ours, &Slice::cpu_us)), "/",
                                   Number(Median(best, &Slice::cpu_us))),
      baseline_only ? ""
                    : absl::StrCat(Number(Median(result.ours, &Slice::switches)), "/",
                                   Number(Median(best, &Slice::switches))),
      absl::StrCat(kept, "/", result.rounds, result.noisy ? "!" : ""), 100 * others);
}

std::string TableNotes() {
  return "Medians over rounds in which all take their turns. 'times': how many times better than\n"
         "PyTorch's best, median over rounds ('b': how many times the baseline). CPU time and "
         "context\n"
         "switches are of all processes of a side together, distgrad's / PyTorch's. 'rounds': kept "
         "/\n"
         "done; a round is dropped if other processes took CPU in it. '!': they did in most of "
         "them,\n"
         "so all are kept, and each side's best round is shown instead of a median. 'others': the\n"
         "most that other processes took, of the machine. There is no p99 of fewer than a hundred\n"
         "operations in a round.\n";
}

std::string JsonLine(const Result& result) {
  const Row& row = result.row;
  std::string config = row.ours.side.empty() ? "" : row.ours.name();
  if (result.best >= 0)
    absl::StrAppend(&config, config.empty() ? "" : "; ", row.pytorch[result.best].name());
  if (result.best_baseline >= 0) {
    absl::StrAppend(&config, config.empty() ? "" : "; ", "baseline ",
                    row.baselines[result.best_baseline].name());
  }
  const std::vector<Slice>& best = BestPytorch(result);
  return absl::StrCat(
      "{\"metric\": \"", row.metric, "\", \"config\": \"", config, "\", ",
      Json("distgrad", result.our_value), ", ", Json("pytorch", result.pytorch_value), ", ",
      Json("baseline", result.baseline_value), ", \"unit\": \"", UnitOf(row), "\", ",
      Json("ratio", result.ratio), ", ", Json("baseline_ratio", result.baseline_ratio), ", ",
      Json("distgrad_p99_us", result.our_p99), ", ", Json("pytorch_p99_us", result.pytorch_p99),
      ", ", Json("distgrad_cpu_us", Median(result.ours, &Slice::cpu_us)), ", ",
      Json("pytorch_cpu_us", Median(best, &Slice::cpu_us)), ", ",
      Json("distgrad_switches", Median(result.ours, &Slice::switches)), ", ",
      Json("pytorch_switches", Median(best, &Slice::switches)), ", ", Json("reach", row.reach),
      ", \"against\": \"",
      row.against == Row::Against::kPytorch    ? "pytorch"
      : row.against == Row::Against::kBaseline ? "baseline"
                                               : "limit",
      "\", ", Json("achieved", result.achieved),
      ", \"rounds\": ", result.ours.empty() ? result.baselines.at(0).size() : result.ours.size(),
      ", \"noisy\": ", result.noisy ? "true" : "false", "}");
}

absl::Status Plot(const std::vector<Result>& results, const std::string& file) {
  std::string rows, targets;
  int count = 0;
  for (const Result& result : results) {
    if (result.ratio == 0) continue;
    absl::StrAppendFormat(&rows, "\"%s\" %g\n", result.row.title, result.ratio);
    if (result.row.reach > 0 && result.row.against == Row::Against::kPytorch)
      absl::StrAppendFormat(&targets, "%d %g\n", count, result.row.reach);
    ++count;
  }
  if (count == 0) return absl::OkStatus();
  FILE* const gnuplot = popen("gnuplot", "w");
  if (gnuplot == nullptr) return absl::UnavailableError(std::strerror(errno));
  const std::string script = absl::StrCat(
      "set terminal svg size ", 200 + 45 * count, ",520 font 'sans,11' background 'white'\n",
      "set output '", file, "'\n",
      "set title 'distgrad against PyTorch 2.11, same machine, same rounds'\n",
      "set ylabel 'times better (1: equal)'\nset logscale y\nset grid y\nset key top right\n",
      "set style fill solid 0.7\nset boxwidth 0.6\nset xtics rotate by 55 right\n",
      "set bmargin 14\nset lmargin 22\n", "set yrange [0.2:*]\n", "$rows << EOD\n", rows, "EOD\n",
      "$targets << EOD\n", targets, "EOD\n",
      "plot $rows using 0:2:xtic(1) with boxes lc rgb '#4477aa' title 'measured', ",
      targets.empty() ? ""
                      : "$targets using 1:2 with points pt 2 ps 0.9 lc rgb '#cc3311' "
                        "title 'to be reached', ",
      "1 with lines lc rgb 'black' notitle\n");
  std::fputs(script.c_str(), gnuplot);
  if (pclose(gnuplot) != 0) return absl::UnavailableError("gnuplot failed");
  return absl::OkStatus();
}

}  // namespace distgrad
