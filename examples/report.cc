// Writes the CSV row by row, and has gnuplot draw the picture.
#include "examples/report.h"

#include <errno.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace distgrad {
namespace {

// gnuplot's commands, one a line. Columns: 1 the epoch, 2 the step, 5 and 6 the losses, 7 the
// accuracy.
constexpr char kScript[] =
    R"(table = {table}
set datafile separator ','
stats table using 7 nooutput
set terminal svg size 960,420 font 'Helvetica,Arial,sans-serif,14' background '#ffffff'
set output {picture}
set multiplot layout 1,2 title {title} font ',16'
set border 3 linecolor '#555555'
set tics out nomirror textcolor '#333333'
set grid ytics linecolor '#dddddd' linetype 1
set style line 1 linecolor '#1f77b4' linewidth 1.5
set style line 2 linecolor '#d62728' linewidth 2 pointtype 7 pointsize 0.7
set lmargin 9
set rmargin 3
set xlabel {x label}
set xrange [0:*]
set yrange [0:*]
set ylabel 'loss'
plot table using {x}:5 with lines linestyle 1 title 'training', '' using {x}:6 with linespoints linestyle 2 title 'test'
set yrange [100*STATS_min - 0.5 : 100*STATS_max + 0.8]
set ylabel {accuracy}
set key off
plot table using {x}:(100*$7) with linespoints linestyle 2, '' using (STATS_records > 12 ? NaN : ${x}):(100*$7):(sprintf('%.1f', 100*$7)) with labels offset -1.5,0.7
)";

std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "''"}}), "'");
}

std::string Cell(const std::optional<double>& value) {
  return value ? absl::StrFormat("%.6g", *value) : "";
}

}  // namespace

Report::Report(std::string directory, ReportStyle style, const std::string& begins)
    : directory_(std::move(directory)), style_(std::move(style)), table_(table_path()) {
  table_ << begins << std::flush;
}

absl::StatusOr<Report> Report::Create(const std::string& directory, ReportStyle style,
                                      int64_t steps) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(),
                               absl::StrCat("cannot make the output folder ", directory));
  }
  std::string begins = absl::StrCat("epoch,step,seconds,", style.items,
                                    "_per_second,train_loss,test_loss,test_accuracy\n");
  if (steps > 0) {
    std::ifstream before(directory + "/training.csv");
    for (std::string line; std::getline(before, line);) {
      const std::vector<std::string> cells = absl::StrSplit(line, ',');
      int64_t step = 0;
      const bool is_row = cells.size() == 7 && absl::SimpleAtoi(cells[1], &step);
      if (is_row && step <= steps) absl::StrAppend(&begins, line, "\n");
    }
  }
  errno = 0;
  Report report(directory, std::move(style), begins);
  if (!report.table_)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", report.table_path()));
  return report;
}

absl::Status Report::Add(const ReportRow& row) {
  errno = 0;
  table_ << absl::StrFormat("%.4f,%d,%.3f,%.0f,%s,%s,%s", row.epoch, row.step, row.seconds,
                            row.items_per_second, Cell(row.train_loss), Cell(row.test_loss),
                            Cell(row.test_accuracy))
         << std::endl;
  if (!table_) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", table_path()));
  return absl::OkStatus();
}

absl::Status Report::Draw(const std::string& title) const {
  const std::string picture = picture_path();
  std::string script =
      absl::StrReplaceAll(kScript, {{"\n", "; "},
                                    {"{title}", Quoted(title)},
                                    {"{x}", style_.by_step ? "2" : "1"},
                                    {"{x label}", style_.by_step ? "'step'" : "'epoch'"},
                                    {"{accuracy}", Quoted(style_.accuracy)},
                                    {"{table}", Quoted(table_path())},
                                    {"{picture}", Quoted(picture)}});
  std::array<std::string, 4> arguments = {"gnuplot", "--default-settings", "-e", std::move(script)};
  std::array<char*, 5> argv = {};
  for (size_t i = 0; i < arguments.size(); ++i) argv[i] = arguments[i].data();
  pid_t pid;
  const int error = posix_spawnp(&pid, argv[0], nullptr, nullptr, argv.data(), environ);
  if (error == ENOENT) {
    return absl::UnavailableError("gnuplot is not installed (Debian package gnuplot-nox)");
  }
  if (error != 0) return absl::ErrnoToStatus(error, "starting gnuplot");
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) {
    std::error_code ignored;  // the half of a picture, if there is one
    std::filesystem::remove(picture, ignored);
    return absl::InternalError(absl::StrCat("gnuplot failed on ", table_path()));
  }
  return absl::OkStatus();
}

}  // namespace distgrad
