// Reads pieces of work from text, writes them as text, and repeats them for a time.
#include "benchmarks/work.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace distgrad {

std::string ToText(const Work& work) {
  return absl::StrCat(work.kind, "/", work.count, "/", work.bytes);
}

absl::StatusOr<Work> WorkFromText(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '/');
  Work work;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[1], &work.count) ||
      !absl::SimpleAtoi(parts[2], &work.bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not kind/count/bytes"));
  }
  work.kind = std::string(parts[0]);
  return work;
}

double Quantile(std::vector<double> values, double quantile) {
  const auto at = static_cast<size_t>(quantile * (values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[at];
}

double MicrosNow() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace {

Sample Summary(const std::vector<double>& micros, double elapsed_us) {
  const auto count = static_cast<int64_t>(micros.size());
  return {.operations = count,
          .median_us = Quantile(micros, 0.5),
          .p99_us = count < kFewestForP99 ? 0 : Quantile(micros, 0.99),
          .per_second = static_cast<double>(micros.size()) / elapsed_us * 1e6};
}

}  // namespace

absl::StatusOr<Sample> Repeat(absl::Duration budget,
                              absl::FunctionRef<absl::StatusOr<double>()> once) {
  std::vector<double> micros;
  const double start = MicrosNow(), end = start + absl::ToDoubleMicroseconds(budget);
  while (micros.size() < 3 || MicrosNow() < end) {
    absl::StatusOr<double> one = once();
    if (!one.ok()) return one.status();
    micros.push_back(*one);
  }
  return Summary(micros, MicrosNow() - start);
}

absl::StatusOr<Sample> RepeatOnThreads(int count, absl::Duration budget,
                                       absl::FunctionRef<absl::StatusOr<double>()> once) {
  std::atomic<int> ready{0};
  std::vector<absl::StatusOr<Sample>> samples(count, absl::InternalError("not run"));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      // All have started, and are warm, before any is measured.
      absl::StatusOr<double> first = once();
      ++ready;
      while (ready < count) std::this_thread::yield();
      samples[i] = first.ok() ? Repeat(budget, once) : first.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Sample all;
  for (const auto& sample : samples) {
    if (!sample.ok()) return sample.status();
    all.operations += sample->operations;
    all.per_second += sample->per_second;
    all.median_us += sample->median_us / count;
    all.p99_us = std::max(all.p99_us, sample->p99_us);
  }
  return all;
}

absl::StatusOr<Sample> RepeatBeside(int count, absl::Duration budget,
                                    absl::FunctionRef<absl::Status()> beside,
                                    absl::FunctionRef<absl::StatusOr<double>()> once) {
  std::atomic<bool> stop{false};
  std::vector<absl::Status> statuses(count);
  std::vector<std::thread> threads;
  for (absl::Status& status : statuses) {
    threads.emplace_back([&] {
      while (!stop && status.ok()) status = beside();
    });
  }
  const absl::StatusOr<Sample> sample = Repeat(budget, once);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return sample;
}

absl::StatusOr<Sample> RepeatInFlight(int width, absl::Duration budget,
                                      absl::FunctionRef<void(int)> start,
                                      absl::FunctionRef<absl::Status(int)> finish) {
  std::vector<double> started(width), micros;
  for (int i = 0; i < width; ++i) {
    started[i] = MicrosNow();
    start(i);
  }
  const double begin = MicrosNow(), end = begin + absl::ToDoubleMicroseconds(budget);
  absl::Status status;
  double last = begin;
  for (int i = 0; status.ok() && last < end; i = (i + 1) % width) {
    status.Update(finish(i));
    last = MicrosNow();
    micros.push_back(last - started[i]);
    started[i] = last;
    start(i);
  }
  for (int i = 0; i < width; ++i) status.Update(finish(i));
  if (!status.ok()) return status;
  return Summary(micros, last - begin);
}

}  // namespace distgrad
