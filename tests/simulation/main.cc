// Runs many seeds, and makes what fails smaller.
//
//   tools/bazel run //tests/simulation -- --seeds 1000 --from 0
//   tools/bazel run //tests/simulation -- --from 17 --trace       # one seed, with all that happens
//   tools/bazel run //tests/simulation -- --case "$PWD"/tests/simulation/cases/NAME.txt
//
// With --case each seed runs the plan of a file, by default from the seed that the file has; the
// seed then draws only what the network and the threads do. With --first it ends with the first
// seed that fails, with --whole nothing is made smaller, with --twice each seed has to take the
// same course again. With --no-fibers each thread runs on one of the system's (fiber.h), where a
// debugger sees all of their stacks.
// --jobs says how many seeds run at a time, by default as many as there are processors. --faults is
// a set of Faults (plan.h).
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/check.h"
#include "tests/simulation/job.h"
#include "tests/simulation/runner.h"

namespace distgrad::simulation {
namespace {

// Leaves out actions for as long as what is left fails.
Plan Shrink(Runner& runner, Plan plan) {
  for (size_t i = 0; i < plan.actions.size();) {
    Plan smaller = plan;
    smaller.actions.erase(smaller.actions.begin() + static_cast<ptrdiff_t>(i));
    if (runner.Run(Text(smaller)).ok) {
      ++i;
    } else {
      plan = std::move(smaller);
    }
  }
  return plan;
}

// What the processes that share the seeds have in common.
struct Tally {
  std::atomic<uint64_t> failed{0}, switches{0}, done{0};
  std::atomic<uint64_t> simulated_ms{0};
  std::atomic<uint64_t> end{0};  // no seed from here on is run
};

struct Options {
  uint64_t seeds = 1, from = 0, jobs = 0;
  unsigned faults = kAllFaults;
  std::optional<Plan> plan;  // of a case
  bool trace = false, fibers = true, twice = false, first = false, shrink = true;
};

// One thread of a simulation runs at a time, so each process of these has a processor of its own:
// a Runner keeps to the first one that it may use.
void KeepToProcessor(uint64_t number) {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof(all), &all) != 0 || CPU_COUNT(&all) == 0) return;
  number %= static_cast<uint64_t>(CPU_COUNT(&all));
  CPU_ZERO(&one);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (!CPU_ISSET(i, &all) || number-- > 0) continue;
    CPU_SET(i, &one);
    break;
  }
  sched_setaffinity(0, sizeof(one), &one);
}

// Runs each seed that is `job` behind a multiple of the number of jobs.
void RunSeeds(const Options& options, uint64_t job, Tally& tally) {
  Runner runner;
  for (uint64_t seed = options.from + job; seed < tally.end; seed += options.jobs) {
    Plan plan = options.plan.has_value() ? *options.plan : DrawPlan(seed, options.faults);
    plan.seed = seed;
    plan.trace = options.trace;
    plan.fibers = options.fibers;
    Outcome outcome = runner.Run(Text(plan));
    ++tally.done;
    tally.switches += outcome.course.switches;
    tally.simulated_ms += static_cast<uint64_t>(outcome.course.time / 1000000);
    if (options.trace) std::fputs(outcome.printed.c_str(), stdout);
    if (options.twice && runner.Run(Text(plan)).course.hash != outcome.course.hash) {
      outcome.ok = false;
      outcome.wrong = absl::StrCat("it takes another course each time: ", outcome.wrong);
    }
    if (outcome.ok) continue;
    ++tally.failed;
    if (options.first) {
      // The others still run the seeds before this one: which is the first does not depend on them.
      uint64_t end = tally.end;
      while (seed + 1 < end && !tally.end.compare_exchange_weak(end, seed + 1)) {
      }
    }
    std::string said = absl::StrCat("seed ", seed, ": ", outcome.wrong, "\n");
    if (options.shrink) {
      plan.trace = false;
      const std::string smaller = Text(Shrink(runner, plan));
      const Outcome small = runner.Run(smaller);
      absl::StrAppend(&said, smaller, small.wrong, "\n", small.printed, "\n");
    }
    std::fputs(said.c_str(), stdout);
    std::fflush(stdout);
  }
}

Plan ReadCase(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  DG_CHECK(file.good()) << "cannot read " << path;
  return ReadPlan(text.str());
}

bool Parse(int argc, char** argv, Options* options) {
  bool has_from = false;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view option = argv[i];
    const bool has_value = i + 1 < argc;
    if (option == "--trace") {
      options->trace = true;
    } else if (option == "--no-fibers") {
      options->fibers = false;
    } else if (option == "--twice") {
      options->twice = true;
    } else if (option == "--first") {
      options->first = true;
    } else if (option == "--whole") {
      options->shrink = false;
    } else if (has_value && option == "--case") {
      options->plan = ReadCase(argv[++i]);
      if (!has_from) options->from = options->plan->seed;
    } else if (!has_value ||
               !((option == "--seeds" && absl::SimpleAtoi(argv[i + 1], &options->seeds)) ||
                 (option == "--from" && absl::SimpleAtoi(argv[i + 1], &options->from)) ||
                 (option == "--jobs" && absl::SimpleAtoi(argv[i + 1], &options->jobs)) ||
                 (option == "--faults" && absl::SimpleAtoi(argv[i + 1], &options->faults)))) {
      return false;
    } else {
      has_from |= option == "--from";
      ++i;
    }
  }
  if (options->jobs == 0) options->jobs = std::max(1U, std::thread::hardware_concurrency());
  options->jobs = std::min(options->jobs, std::max<uint64_t>(options->seeds, 1));
  return true;
}

int Main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, &options)) {
    std::fprintf(
        stderr,
        "usage: simulation [--seeds N] [--from S] [--jobs N] [--faults BITS] [--case FILE] "
        "[--trace] [--twice] [--first] [--whole] [--no-fibers]\n");
    return 2;
  }
  void* const shared =
      mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  DG_CHECK(shared != MAP_FAILED);
  Tally& tally = *new (shared) Tally;
  tally.end = options.from + options.seeds;
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t job = 0; job < options.jobs; ++job) {
    const pid_t child = fork();
    DG_CHECK(child >= 0);
    if (child > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    KeepToProcessor(job);
    RunSeeds(options, job, tally);
    std::fflush(stdout);
    _exit(0);
  }
  bool all_ended = true;
  int status = 0;
  while (wait(&status) > 0) all_ended = all_ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!all_ended) std::printf("a process that runs seeds has ended early\n");
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf(
      "%llu of %llu seeds failed; %.1f s, in which %.0f s were simulated, with %llu changes "
      "of threads\n",
      static_cast<unsigned long long>(tally.failed), static_cast<unsigned long long>(tally.done),
      took, 1e-3 * static_cast<double>(tally.simulated_ms),
      static_cast<unsigned long long>(tally.switches));
  return all_ended && tally.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  distgrad::simulation::Runner::Serve(distgrad::simulation::RunJob, distgrad::simulation::WarmUp);
  return distgrad::simulation::Main(argc, argv);
}
