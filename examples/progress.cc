// Draws the progress line, as wide as the terminal, at most ten times a second.
#include "examples/progress.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace distgrad {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(100);
constexpr absl::Duration kPlainLine = absl::Seconds(10);
constexpr char kClearLine[] = "\r\x1b[K";
constexpr int kNarrowestBar = 10;

std::string Clock(absl::Duration duration) {
  const int64_t seconds = absl::ToInt64Seconds(absl::Ceil(duration, absl::Seconds(1)));
  if (seconds < 3600) return absl::StrFormat("%d:%02d", seconds / 60, seconds % 60);
  return absl::StrFormat("%d:%02d:%02d", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

}  // namespace

Screen Screen::None() {
  return {.terminal = false,
          .columns = [] { return 0; },
          .write = [](absl::string_view) {},
          .now = [] { return absl::Now(); }};
}

Screen Screen::Stderr() {
  const char* type = getenv("TERM");
  Screen screen;
  screen.terminal =
      isatty(STDERR_FILENO) == 1 && type != nullptr && absl::string_view(type) != "dumb";
  screen.columns = [] {
    winsize size = {};
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  };
  screen.write = [](absl::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  };
  screen.now = [] {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  };
  return screen;
}

ProgressBar::ProgressBar(Screen screen, int64_t total, std::string items, int64_t done)
    : screen_(std::move(screen)),
      total_(total),
      items_(std::move(items)),
      done_before_(done),
      start_(screen_.now()),
      done_(done),
      now_(start_),
      next_(start_ + (screen_.terminal ? kRedraw : kPlainLine)) {}

ProgressBar::~ProgressBar() { Close(); }

void ProgressBar::Update(int64_t done, double loss, double rate) {
  done_ = done;
  loss_ = loss;
  rate_ = rate;
  now_ = screen_.now();
  if (now_ < next_) return;
  if (screen_.terminal) {
    next_ = now_ + kRedraw;
    DrawBar();
  } else {
    next_ = now_ + kPlainLine;
    screen_.write(absl::StrCat(label_, Numbers(), "\n"));
  }
}

void ProgressBar::Print(absl::string_view line) {
  const bool redraw = drawn_;
  Close();
  screen_.write(absl::StrCat(line, "\n"));
  if (redraw) DrawBar();
}

void ProgressBar::Close() {
  if (std::exchange(drawn_, false)) screen_.write(kClearLine);
}

std::string ProgressBar::Numbers() const {
  std::string text =
      absl::StrFormat(" %3d %%  loss %.4f  %.0f %s/s", 100 * done_ / total_, loss_, rate_, items_);
  if (done_ > done_before_) {
    // What is not counted in the rate takes time, too.
    const absl::Duration each = (now_ - start_) / (done_ - done_before_);
    absl::StrAppend(&text, "  ", Clock(each * (total_ - done_)), " left");
  }
  return text;
}

void ProgressBar::DrawBar() {
  const std::string numbers = Numbers();
  // A full last column would make some terminals go on to the next line.
  const int columns = screen_.columns() - 1;
  const int inside = columns - static_cast<int>(label_.size() + numbers.size()) - 3;
  std::string line = label_;
  if (inside >= kNarrowestBar) {
    const auto filled = static_cast<size_t>(inside * done_ / total_);
    std::string bar(filled, '=');
    if (filled > 0 && done_ < total_) bar.back() = '>';
    bar.resize(inside, ' ');
    absl::StrAppend(&line, " [", bar, "]");
  }
  line += numbers;
  if (line.size() > static_cast<size_t>(std::max(columns, 0))) line.resize(std::max(columns, 0));
  screen_.write(absl::StrCat(kClearLine, line));
  drawn_ = true;
}

}  // namespace distgrad
