// Shows the progress of long work: on a terminal one line that is drawn again and again, elsewhere
// a plain line now and then.
//
//   epoch 2/5 [=========>                ]  38 %  loss 0.3124  8210 images/s  0:27 left
#ifndef DISTGRAD_EXAMPLES_PROGRESS_H_
#define DISTGRAD_EXAMPLES_PROGRESS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace distgrad {

// Where progress is shown.
struct Screen {
  bool terminal;
  std::function<int()> columns;
  std::function<void(absl::string_view)> write;
  std::function<absl::Time()> now;

  static Screen Stderr();
  static Screen None();  // shows nothing
};

// Shows the progress of so many images, or whatever they are. For one thread.
class ProgressBar {
 public:
  // The work is `total` of those, of which `done` were done before.
  ProgressBar(Screen screen, int64_t total, std::string items = "images", int64_t done = 0);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();  // Close()

  // Names the current part of the work: "epoch 2/5".
  void SetLabel(std::string label) { label_ = std::move(label); }

  // Says that `done` of them in all are done, what the recent loss is, and how many are done in a
  // second of the time that counts. Cheap: seldom draws.
  void Update(int64_t done, double loss, double rate);

  // Prints a line that stays, above the bar.
  void Print(absl::string_view line);

  // Removes the bar.
  void Close();

 private:
  std::string Numbers() const;
  void DrawBar();

  // Constant after construction.
  const Screen screen_;
  const int64_t total_;
  const std::string items_;
  const int64_t done_before_;
  const absl::Time start_;

  std::string label_;
  int64_t done_;
  double loss_ = 0, rate_ = 0;
  absl::Time now_;
  absl::Time next_;
  bool drawn_ = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_PROGRESS_H_
