// The report of a training run: a table of its loss and accuracy as CSV, and a picture of them as
// SVG.
#ifndef DISTGRAD_EXAMPLES_REPORT_H_
#define DISTGRAD_EXAMPLES_REPORT_H_

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace distgrad {

// What stands in the table and on the picture.
struct ReportStyle {
  std::string items = "images";  // of which so many are done in a second
  bool by_step = false;          // the picture goes by step, rather than by epoch
  std::string accuracy = "accuracy on the test images (%)";
};

// A line of the table. Unknown values stay empty.
struct ReportRow {
  double epoch = 0;  // how many times the data has been seen; 1.5 is in the second epoch
  int64_t step = 0;
  double seconds = 0;  // since the start
  double items_per_second = 0;
  std::optional<double> train_loss;  // mean since the last such row
  std::optional<double> test_loss;
  std::optional<double> test_accuracy;  // 0 to 1
};

// Writes the table and the picture. For one thread.
class Report {
 public:
  // Creates the folder, if needed, and starts training.csv in it; with the rows of the first
  // `steps` that the table there has, for a run that goes on.
  static absl::StatusOr<Report> Create(const std::string& directory, ReportStyle style = {},
                                       int64_t steps = 0);

  // Appends a row, which is in the file when this returns.
  absl::Status Add(const ReportRow& row);

  // Draws training.svg from the table, with the program gnuplot. kUnavailable if that is not
  // installed.
  absl::Status Draw(const std::string& title) const;

  std::string table_path() const { return directory_ + "/training.csv"; }
  std::string picture_path() const { return directory_ + "/training.svg"; }

 private:
  Report(std::string directory, ReportStyle style, const std::string& begins);

  std::string directory_;
  ReportStyle style_;
  std::ofstream table_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_REPORT_H_
