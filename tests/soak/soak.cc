// Starts the processes, disturbs them, and judges what they say.
#include "tests/soak/soak.h"

#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "tests/soak/fit.h"
#include "tests/soak/functions.h"
#include "tests/soak/load.h"
#include "tests/soak/sample.h"
#include "tests/soak/worker.h"
#include "tests/testing/child_process.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

constexpr absl::Duration kBarrierEvery = absl::Seconds(5), kFaultEvery = absl::Seconds(10),
                         kSampleEvery = absl::Seconds(10), kTellEvery = absl::Minutes(5);
// Before this the first of everything is allocated.
constexpr absl::Duration kWarmUp = absl::Minutes(1);
constexpr double kWarmUpPart = 0.2;  // of the run, if that is more

constexpr char kBarriers[] = "barriers", kKills[] = "kills", kReturns[] = "departures and returns",
               kStops[] = "stops";

using Values = std::map<std::string, std::string>;  // of a line "a=1 b=2"

Values ParseValues(absl::string_view text) {
  Values values;
  // The last may have blanks in it.
  while (!text.empty()) {
    const size_t equals = text.find('=');
    if (equals == absl::string_view::npos) break;
    const absl::string_view name = text.substr(0, equals);
    const size_t end = name == "kind" ? absl::string_view::npos : text.find(' ', equals);
    values[std::string(name)] = std::string(text.substr(equals + 1, end - equals - 1));
    text = end == absl::string_view::npos ? "" : text.substr(end + 1);
  }
  return values;
}

// What is looked at in each sample.
struct Series {
  const char* name;
  std::function<std::optional<double>(const SoakSample&)> value;
  double bound = INFINITY;  // how fast it may grow, in an hour
  double least = 0;         // by how much it has to grow in a run for that to be told from noise
  double most = INFINITY;   // how much it may be at any time
};

struct Process {
  SoakWorkerOptions options;
  std::unique_ptr<ChildProcess> child = nullptr;
  std::optional<std::string> answer = {};
  std::vector<SoakSample> samples = {};  // of all its lives
};

// For one thread.
class Soak {
 public:
  explicit Soak(const SoakOptions& options) : options_(options), random_(options.seed) {
    const std::string rendezvous = absl::StrCat("tcp://127.0.0.1:", FreePort());
    int rank = 0;
    for (const char* name : {kFront, kMiddle, kVictim, kGuest}) {
      const bool is_guest = name == std::string(kGuest);
      processes_[name].options = {
          .name = name,
          .rank = is_guest ? -1 : rank++,
          .world_size = 3,
          .rendezvous = rendezvous,
          .seed = random_(),
          .sample_every = std::clamp(options.duration / 60, absl::Seconds(1), kSampleEvery)};
    }
  }

  std::vector<std::string> Run() {
    // With a key each connection has its handshake.
    setenv("DISTGRAD_KEY", "the secret of the soak", 1);
    if (RunJob()) CheckThatAllWasDone();
    for (auto& [name, process] : processes_) process.child = nullptr;
    PrintCounts();
    PrintFits();
    for (const std::string& one : wrong_) std::printf("WRONG: %s\n", one.c_str());
    std::printf("%zu things went wrong\n", wrong_.size());
    std::fflush(stdout);
    return wrong_;
  }

 private:
  using Names = std::vector<std::string>;

  // False where something keeps the soak from going on.
  bool RunJob() {
    const Names at_start = {kFront, kMiddle, kVictim}, all = {kFront, kMiddle, kVictim, kGuest};
    for (const std::string& name : all) Start(name);
    if (!Tell(at_start, "join", "joined") || !Tell({kGuest}, "join", "joined")) return false;
    if (!Tell(all, "go", "going")) return false;
    begin_ = absl::Now();
    const absl::Time end = begin_ + options_.duration;
    const absl::Duration fault_every = std::min(kFaultEvery, options_.duration / 8);
    const absl::Duration barrier_every = std::min(kBarrierEvery, options_.duration / 10);
    absl::Time barrier_at = begin_ + barrier_every, fault_at = begin_ + fault_every;
    absl::Time tell_at = begin_ + kTellEvery;
    for (int fault = 0; absl::Now() < end;) {
      if (!PumpUntil(std::min({barrier_at, fault_at, end}))) return false;
      if (absl::Now() >= barrier_at) {
        if (!Tell(all, "barrier", "met")) return false;
        ++done_[kBarriers];
        barrier_at = absl::Now() + barrier_every;
      }
      if (absl::Now() >= fault_at) {
        if (!Disturb(fault++ % 3)) return false;
        fault_at = absl::Now() + fault_every;
      }
      if (absl::Now() >= tell_at) {
        PrintLastSamples();
        tell_at += kTellEvery;
      }
    }
    std::printf("the load ends after %s\n", absl::FormatDuration(absl::Now() - begin_).c_str());
    if (!Tell(all, "stop", "stopped") || !Tell(all, "check", "nothing is left") ||
        !Tell(all, "end", "ended")) {
      return false;
    }
    for (auto& [name, process] : processes_) {
      if (const int code = process.child->Wait(); code != 0) {
        wrong_.push_back(absl::StrCat(name, " has ended with ", code));
      }
    }
    return true;
  }

  void Start(const std::string& name) {
    Process& process = processes_[name];
    std::vector<std::string> arguments = ToArguments(process.options);
    arguments.insert(arguments.begin(), kSoakWorker);
    process.child = std::make_unique<ChildProcess>(arguments);
    process.options.seed = random_();  // another life does other things
  }

  void Kill(const std::string& name) {
    processes_[name].child->Signal(SIGKILL);
    processes_[name].child->Wait();
    processes_[name].child = nullptr;
    ++done_[kKills];
  }

  bool Disturb(int kind) {
    const auto some_time = [&](absl::Duration most) {
      return absl::Now() + std::uniform_real_distribution<>(0, 1)(random_) * most;
    };
    if (kind == 0) {
      const bool in_barrier = std::bernoulli_distribution(0.5)(random_);
      if (in_barrier) Say({kFront, kMiddle, kVictim, kGuest}, "barrier");
      if (!PumpUntil(some_time(absl::Milliseconds(in_barrier ? 20 : 0)))) return false;
      Kill(kVictim);
      if (in_barrier && !Await({kFront, kMiddle, kGuest}, "barrier", "met")) return false;
      if (!PumpUntil(some_time(absl::Seconds(2)))) return false;
      Start(kVictim);
      if (std::bernoulli_distribution(0.3)(random_)) {  // and once more, as it joins
        Say({kVictim}, "join");
        if (!PumpUntil(some_time(absl::Seconds(1)))) return false;
        Kill(kVictim);
        Start(kVictim);
      }
      return Tell({kVictim}, "join", "joined") && Tell({kVictim}, "go", "going");
    }
    if (kind == 1) {
      ++done_[kReturns];
      return Tell({kGuest}, "stop", "stopped") && Tell({kGuest}, "leave", "left") &&
             PumpUntil(some_time(absl::Seconds(1))) && Tell({kGuest}, "join", "joined") &&
             Tell({kGuest}, "go", "going");
    }
    // One of those that were there at the start: the one that serves the store, too.
    const char* const stopped[] = {kFront, kMiddle, kVictim};
    Process& process = processes_[stopped[random_() % 3]];
    ++done_[kStops];
    process.child->Stop();
    const bool goes_on = PumpUntil(some_time(absl::Seconds(3)));
    process.child->Signal(SIGCONT);
    return goes_on;
  }

  // ---------------------------------------------------------------------- What is said and heard

  void Say(const Names& names, const std::string& command) {
    for (const std::string& name : names) {
      processes_[name].answer.reset();
      processes_[name].child->WriteLine(command);
    }
  }
  bool Await(const Names& names, const std::string& command, const std::string& answer) {
    const absl::Time patience = absl::Now() + 2 * kHangs;
    for (const std::string& name : names) {
      Process& process = processes_[name];
      while (!process.answer.has_value()) {
        if (!PumpUntil(absl::Now() + absl::Milliseconds(10))) return false;
        if (absl::Now() > patience) {
          wrong_.push_back(absl::StrCat(name, " does not answer '", command, "'"));
          return false;
        }
      }
      if (*process.answer != answer) {
        wrong_.push_back(absl::StrCat(name, " was told '", command, "': ", *process.answer));
        return false;
      }
    }
    return true;
  }
  bool Tell(const Names& names, const std::string& command, const std::string& answer) {
    Say(names, command);
    return Await(names, command, answer);
  }

  // Hears what they say until then. False when one of them has ended.
  bool PumpUntil(absl::Time until) {
    do {
      for (auto& [name, process] : processes_) {
        if (process.child == nullptr) continue;
        while (const auto line = process.child->TryReadLine()) {
          if (line->empty()) {
            // Those who have said that they end may do so.
            if (process.answer == "ended") break;
            wrong_.push_back(absl::StrCat(name, " has ended by itself"));
            return false;
          }
          Hear(name, process, *line);
        }
      }
      absl::SleepFor(std::clamp(until - absl::Now(), absl::ZeroDuration(), absl::Milliseconds(10)));
    } while (absl::Now() < until);
    return true;
  }

  void Hear(const std::string& name, Process& process, absl::string_view line) {
    if (absl::ConsumePrefix(&line, "= ")) {
      process.answer = std::string(line);
    } else if (absl::ConsumePrefix(&line, "! ")) {
      std::printf("%s after %s: %s\n", name.c_str(),
                  absl::FormatDuration(absl::Now() - begin_).c_str(), std::string(line).c_str());
      std::fflush(stdout);
      // Of many that are alike the first are enough.
      if (++failures_ <= 20) wrong_.push_back(absl::StrCat(name, ": ", line));
    } else if (absl::ConsumePrefix(&line, "sample ")) {
      absl::StatusOr<SoakSample> sample = ParseSample(line);
      if (sample.ok()) {
        process.samples.push_back(*sample);
      } else if (++failures_ <= 20) {
        wrong_.push_back(absl::StrCat(name, ": ", sample.status().message()));
      }
    } else if (absl::ConsumePrefix(&line, "count ")) {
      Values values = ParseValues(line);
      WorkCount& count = counts_[values["kind"]];
      count.done += static_cast<uint64_t>(Number(name, values["done"]));
      count.excused += static_cast<uint64_t>(Number(name, values["excused"]));
      count.longest = std::max(count.longest, absl::Seconds(Number(name, values["longest"])));
    } else if (absl::ConsumePrefix(&line, "latest ")) {
      latest_ = std::max(latest_, absl::Seconds(Number(name, line)));
    } else {
      std::printf("%s: %s\n", name.c_str(), std::string(line).c_str());
    }
  }

  // What is none is wrong, and no 0.
  double Number(const std::string& name, absl::string_view text) {
    double number = 0;
    if (!absl::SimpleAtod(text, &number)) {
      wrong_.push_back(absl::StrCat(name, " says '", text, "' where a number has to be"));
      return 0;
    }
    return number;
  }

  // --------------------------------------------------------------------------- What came of it

  void PrintLastSamples() {
    std::printf("after %s:",
                absl::FormatDuration(absl::Trunc(absl::Now() - begin_, absl::Seconds(1))).c_str());
    for (const std::string name : {kFront, kMiddle, kGuest}) {
      if (processes_[name].samples.empty()) continue;
      const SoakSample& last = processes_[name].samples.back();
      std::printf("  %s %.1f MB, heap %.1f, %.0f descriptors, p99 %.0f us;", name.c_str(),
                  last.resident, last.heap, last.descriptors, last.p99);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  void CheckThatAllWasDone() {
    for (const std::string& kind : Load::KindsOfWork()) {
      if (counts_[kind].done == 0) wrong_.push_back(absl::StrCat("no ", kind, " has ended well"));
    }
    for (const char* what : {kBarriers, kKills, kReturns, kStops}) {
      if (done_[what] == 0) wrong_.push_back(absl::StrCat("there were no ", what));
    }
  }

  void PrintCounts() {
    for (const auto& [what, count] : done_) std::printf("%6d %s\n", count, what.c_str());
    std::printf("\n%-26s %10s %10s %12s\n", "", "done", "excused", "longest, s");
    for (const auto& [kind, count] : counts_) {
      std::printf("%-26s %10zu %10zu %12.3f\n", kind.c_str(), static_cast<size_t>(count.done),
                  static_cast<size_t>(count.excused), absl::ToDoubleSeconds(count.longest));
    }
    std::printf("the latest deadline was %.3f s late\n", absl::ToDoubleSeconds(latest_));
  }

  void PrintFits() {
    const double hours = absl::ToDoubleHours(options_.duration);
    using Sample = SoakSample;
    const auto plain = [](double Sample::*field) {
      return [field](const Sample& sample) -> std::optional<double> { return sample.*field; };
    };
    const Series all[] = {
        {"resident, MB", plain(&Sample::resident), kMegabytesPerHour, kLeastMegabytes},
        {"heap, MB", plain(&Sample::heap), kMegabytesPerHour, kLeastMegabytes},
        {.name = "kept segments, MB", .value = plain(&Sample::kept), .most = kMostKeptMegabytes},
        {"descriptors", plain(&Sample::descriptors), kDescriptorsPerHour, kLeastDescriptors},
        {"threads", plain(&Sample::threads), kThreadsPerHour, kLeastThreads},
        {"contexts", plain(&Sample::contexts)},
        {"calls in flight", plain(&Sample::in_flight)},
        {"p50, us", plain(&Sample::p50)},
        {"p99, us", plain(&Sample::p99)},
        {"a pipe's p99, us", plain(&Sample::pipe_p99)},
        // Of a quotient, a factor is a difference of its logarithm.
        {"log(p99 / a pipe's)",
         [](const Sample& sample) -> std::optional<double> {
           if (sample.pings < 100 || sample.p99 <= 0 || sample.pipe_p99 <= 0) return std::nullopt;
           return std::log(sample.p99 / sample.pipe_p99);
         },
         std::log(kLatencyGrowth) / hours, std::log(kLeastLatencyGrowth)}};
    const absl::Duration warm_up = std::max(kWarmUp, kWarmUpPart * options_.duration);
    const absl::Time from = begin_ + warm_up;
    const bool judges = options_.duration >= kShortestToJudge;
    std::printf("\n%-8s %-20s %6s %10s %22s %8s %8s\n", "", "", "points", "mean",
                "slope in an hour", "bound", "and");
    for (const std::string name : {kFront, kMiddle, kGuest}) {
      for (const Series& series : all) {
        std::vector<Point> points;
        for (const SoakSample& sample : processes_[name].samples) {
          const absl::Time at = absl::UnixEpoch() + absl::Milliseconds(sample.time_ms);
          const std::optional<double> value = series.value(sample);
          if (!value.has_value()) continue;
          if (*value > series.most) {
            wrong_.push_back(absl::StrCat(name, ": ", series.name, " are ", *value, " after ",
                                          absl::FormatDuration(at - begin_), ", more than ",
                                          series.most));
          }
          if (judges && at < from) continue;
          points.push_back({absl::ToDoubleHours(at - begin_), *value});
        }
        const Fit fit = FitLine(points);
        const bool is_judged = judges && std::isfinite(series.bound);
        const double resolution =
            std::max(series.bound, series.least / absl::ToDoubleHours(options_.duration - warm_up));
        std::printf("%-8s %-20s %6zu %10.3f %10.3f +- %8.3f %8s %8s\n", name.c_str(), series.name,
                    fit.points, fit.mean, fit.slope, fit.error,
                    is_judged ? absl::StrCat(series.bound).c_str() : "",
                    is_judged ? absl::StrCat(resolution).c_str() : "");
        if (!is_judged) continue;
        const std::string line = absl::StrCat(name, ": ", series.name, " grows by ", fit.slope,
                                              " +- ", fit.error, " in an hour");
        if (fit.points < kFewestPoints) {
          wrong_.push_back(absl::StrCat(name, " has said too little of its ", series.name));
          continue;
        }
        switch (JudgeGrowth(fit, series.bound, resolution)) {
          case Growth::kNone:
            break;
          case Growth::kGrows:
            wrong_.push_back(line);
            break;
          case Growth::kTooNoisy:
            wrong_.push_back(absl::StrCat(line,
                                          ", too noisy to be judged: with three errors that is "
                                          "to be ",
                                          series.bound + resolution, " at most"));
            break;
        }
      }
    }
    if (!judges) {
      std::printf("too short to judge growth: that takes %s\n",
                  absl::FormatDuration(kShortestToJudge).c_str());
    }
  }

  const SoakOptions options_;
  std::mt19937_64 random_;
  absl::Time begin_ = absl::Now();
  std::map<std::string, Process> processes_;

  std::vector<std::string> wrong_;
  int failures_ = 0;
  std::map<std::string, int> done_;  // barriers and faults
  std::map<std::string, WorkCount> counts_;
  absl::Duration latest_ = absl::ZeroDuration();
};

}  // namespace

std::vector<std::string> RunSoak(const SoakOptions& options) {
  std::printf("a soak of %s with seed %zu\n", absl::FormatDuration(options.duration).c_str(),
              static_cast<size_t>(options.seed));
  std::fflush(stdout);
  return Soak(options).Run();
}

}  // namespace distgrad
