// Measures how long the ranks of a pipeline are idle, with stages that wait for a fixed time
// instead of computing, so that processors do not matter, and compares it with the schedule's
// theory; compares a model split over processes with one process of as many threads, and with
// PyTorch's own RPC and distributed autograd; and the examples with their --single.
//
//   tools/bazel run //benchmarks:pipeline -- [--unit-ms 10] [--rounds 5] [--no-waiting]
//                                            [--no-split] [--no-examples] [--models NAME]
//                                            [--only NAME,...] [--micro-batches N] [--traces DIR]
//
// With --traces each rank's actions go to DIR/SCHEDULE-M.RANK.json where stages wait, and to
// DIR/SCHEDULE-MODEL-M.RANK.json where they compute; tools/pipeline_picture.py draws pictures of
// them.
#include "core/pipeline/pipeline.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn_like.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/custom_function.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "benchmarks/example_rows.h"
#include "benchmarks/pytorch_side.h"
#include "benchmarks/ratio.h"
#include "benchmarks/split_model.h"
#include "core/base/chrome_trace.h"
#include "core/base/status.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stage_trace.h"
#include "core/pipeline/stages.h"
#include "core/tensor/exception.h"
#include "core/worker/worker.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;
using Kind = Action::Kind;

constexpr absl::Duration kPatience = absl::Minutes(5);
// How often a process that computes measures before it is the next contender's turn.
constexpr int kRoundsOfATurn = 3;

absl::Duration unit = absl::Milliseconds(10);
int rounds = 5;
std::string traces;             // the folder; empty: none
std::string models;             // a part of the names of the models that are computed; empty: all
std::vector<std::string> only;  // parts of the names of the ways to compute them; empty: all
int given_micro_batches = 0;    // of the models that are computed; 0: each has its own
bool failed = false;            // something has not been measured

// The time that the stages of this process have waited, and how often: a wait that wakes late
// counts as longer work, not as a bubble.
std::atomic<int64_t> waited_ns{0}, waits{0};

void Wait() {
  const absl::Time begin = absl::Now();
  absl::SleepFor(unit);
  waited_ns += absl::ToInt64Nanoseconds(absl::Now() - begin);
  ++waits;
}

// Passes its input on, and waits in backward.
struct Waits : torch::autograd::Function<Waits> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a) {
    return a.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    Wait();
    return gradients;
  }
};

// Runs a rank of a job; the first one returns the result.
using Rank = std::function<absl::Status(Worker& worker, std::vector<double>* said)>;

absl::Status RunRank(int port, int rank, int ranks, const Rank& run, std::vector<double>* said) {
  DG_ASSIGN_OR_RETURN(const auto worker,
                      Worker::Create({.name = absl::StrCat("rank", rank),
                                      .rendezvous = absl::StrCat("tcp://127.0.0.1:", port),
                                      .rank = rank,
                                      .world_size = ranks,
                                      .thread_count = 1,
                                      .timeout = kPatience,
                                      .join_timeout = kPatience}));
  DG_RETURN_IF_ERROR(run(*worker, said));
  return absl::OkStatus();
}

// Runs a function in each of some processes, which are forks of this one; it has no threads.
// Returns the results of those that have one; nothing if any of them fails.
std::vector<double> InProcesses(int count,
                                const std::function<absl::Status(int, std::vector<double>*)>& run) {
  int ends[2];
  if (pipe(ends) != 0) std::exit(1);
  for (int i = 0; i < count; ++i) {
    const pid_t child = fork();
    if (child < 0) std::exit(1);
    if (child > 0) continue;
    std::vector<double> said;
    const absl::Status status = run(i, &said);
    if (!status.ok()) std::fprintf(stderr, "process %d: %s\n", i, status.ToString().c_str());
    const size_t bytes = said.size() * sizeof(double);
    const bool written = write(ends[1], said.data(), bytes) == static_cast<ssize_t>(bytes);
    _exit(status.ok() && written ? 0 : 1);
  }
  close(ends[1]);
  std::vector<double> said;
  for (double value; read(ends[0], &value, sizeof(value)) == sizeof(value);) said.push_back(value);
  close(ends[0]);
  bool failed = false;
  for (int i = 0, status; i < count && wait(&status) > 0; ++i) failed = failed || status != 0;
  return failed ? std::vector<double>{} : said;
}

std::vector<double> InJob(int ranks, const Rank& run) {
  const int port = FreePort();
  return InProcesses(ranks, [&](int rank, std::vector<double>* said) {
    return RunRank(port, rank, ranks, run, said);
  });
}

std::vector<std::string> Names(int ranks) {
  std::vector<std::string> names;
  for (int rank = 0; rank < ranks; ++rank) names.push_back(absl::StrCat("rank", rank));
  return names;
}

// Writes what the ranks of this worker did, for tools/pipeline_picture.py.
absl::Status WriteTrace(const Worker& worker, const std::string& name, StageTrace& trace) {
  const std::string path = absl::StrCat(traces, "/", name, ".", worker.rank(), ".json");
  std::ofstream file(path);
  file << ToChromeTrace({.worker = worker.name(), .rank = static_cast<WorkerRank>(worker.rank())},
                        trace.Take())
       << std::flush;
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

// Lets the first rank drive, while the others serve. The name is that of the traces, too.
absl::Status Drive(Worker& worker, const std::string& name, std::map<int, PipelineStage> stages,
                   const Schedule& schedule, const std::function<absl::Status(Pipeline&)>& drive) {
  StageTrace trace;
  PipelineStagesOptions options;
  if (!traces.empty()) options.on_action = trace.Recorder();
  DG_ASSIGN_OR_RETURN(const auto own,
                      PipelineStages::Create(&worker, name, std::move(stages), std::move(options)));
  DG_RETURN_IF_ERROR(worker.Barrier(Deadline::After(kPatience)));
  if (worker.rank() == 0) {
    DG_ASSIGN_OR_RETURN(
        const auto pipeline,
        Pipeline::Create(&worker,
                         {.name = name, .workers = Names(schedule.ranks()), .schedule = schedule}));
    DG_RETURN_IF_ERROR(drive(*pipeline));
  }
  DG_RETURN_IF_ERROR(worker.Shutdown(Deadline::After(kPatience)));
  return traces.empty() ? absl::OkStatus() : WriteTrace(worker, name, trace);
}

// The steps of a pipeline that were started, and that nobody has waited for.
class StepsInFlight {
 public:
  // Starts steps until there are as many, and waits for the first one's end.
  absl::Status Next(Worker& worker, Pipeline& pipeline, const Tensors& inputs,
                    const Tensors& targets, size_t in_flight) {
    while (steps_.size() < in_flight) {
      Context context = worker.NewContext();
      DG_ASSIGN_OR_RETURN(PipelineStep step, pipeline.Start(context, inputs, targets));
      steps_.emplace_back(std::move(context), std::move(step));
    }
    DG_RETURN_IF_ERROR(steps_.front().second.Wait().status());
    steps_.pop_front();
    return absl::OkStatus();
  }

 private:
  std::deque<std::pair<Context, PipelineStep>> steps_;
};

// ------------------------------------------------------------------------------------- Waiting

absl::Status RunWaiting(Worker& worker, const std::string& name, const Schedule& schedule,
                        size_t in_flight, std::vector<double>* said) {
  std::map<int, PipelineStage> stages;
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  for (int s = 0; s < schedule.stages(); ++s) {
    if (schedule.rank_of_stage[s] != worker.rank()) continue;
    stages[s] = {.forward = [weight, s](Tensors in) -> Tensors {
                   absl::SleepFor(unit);
                   // No input of the first stage requires grad.
                   const at::Tensor x = s == 0 ? in[0] + weight : in[0];
                   return {Waits::apply(x) * Waits::apply(weight)};
                 },
                 .loss = [](Tensors out, Tensors) { return out[0].sum(); },
                 .targets = 0};
  }
  const auto drive = [&](Pipeline& pipeline) -> absl::Status {
    const at::Tensor batch = at::ones({schedule.micro_batches, 1});
    StepsInFlight steps;
    absl::Time last = absl::Now();
    for (int round = -1; round < rounds; ++round) {
      DG_RETURN_IF_ERROR(steps.Next(worker, pipeline, {batch}, {}, in_flight));
      const absl::Time now = absl::Now();
      if (round >= 0) said->push_back(absl::ToDoubleMilliseconds(now - last));
      last = now;
    }
    // After the times of the rounds: how long a wait took.
    said->push_back(1e-6 * static_cast<double>(waited_ns) / static_cast<double>(waits));
    return absl::OkStatus();
  };
  return Drive(worker, name, std::move(stages), schedule, drive);
}

// A schedule so many times, one behind the other, on each rank.
Schedule Repeated(const Schedule& schedule, int times) {
  Schedule all = schedule;
  all.micro_batches *= times;
  for (std::vector<Action>& list : all.lists) {
    const std::vector<Action> once = std::exchange(list, {});
    for (int i = 0; i < times; ++i) {
      for (Action action : once) {
        action.micro_batch += i * schedule.micro_batches;
        list.push_back(action);
      }
    }
  }
  return all;
}

void ReportWaiting() {
  std::printf("4 ranks; a forward waits as long as each half of a backward, %.0f ms\n",
              absl::ToDoubleMilliseconds(unit));
  std::printf("%-16s %4s %10s %10s %10s %11s %10s %10s\n", "schedule", "M", "a wait ms",
              "theory ms", "median ms", "difference", "bubble", "in theory");
  for (const int m : {4, 8, 16}) {
    const std::vector<std::pair<std::string, Schedule>> schedules = {
        {"GPipe", *GPipe(4, m)},
        {"1F1B", *OneForwardOneBackward(4, m)},
        {"interleaved", *InterleavedOneForwardOneBackward(4, 2, m)},
        {"ZB-H1", *ZeroBubbleH1(4, m)},
        {"ZB-H2", *ZeroBubbleH2(4, m)},
        {"ZB-H2, 2 steps", *ZeroBubbleH2(4, m)}};  // in flight
    for (const auto& [name, schedule] : schedules) {
      const size_t in_flight = absl::EndsWith(name, "2 steps") ? 2 : 1;
      std::vector<double> times = InJob(
          4, [&, &name = name, &schedule = schedule](Worker& worker, std::vector<double>* said) {
            return RunWaiting(worker, absl::StrCat(name, "-", schedule.micro_batches), schedule,
                              in_flight, said);
          });
      failed = failed || times.empty();
      if (times.empty()) continue;
      const double ms = times.back();
      times.pop_back();
      const auto time_of = [&](const Action& action) {
        switch (action.kind) {
          case Kind::kForward:
          case Kind::kBackwardInput:
          case Kind::kBackwardWeight:
            return ms;
          case Kind::kBackward:
            return 2 * ms;
          default:
            return 0.0;
        }
      };
      const double work = Simulate(schedule, time_of)->busy[0], took = Median(times);
      // Of steps in flight, one that neither begins nor ends alone.
      const double theory = in_flight == 1 ? Simulate(schedule, time_of)->end
                                           : (Simulate(Repeated(schedule, 8), time_of)->end -
                                              Simulate(Repeated(schedule, 4), time_of)->end) /
                                                 4;
      std::printf("%-16s %4d %10.2f %10.1f %10.1f %10.1f%% %9.1f%% %9.1f%%\n", name.c_str(), m, ms,
                  theory, took, 100 * (took / theory - 1), 100 * (took - work) / took,
                  100 * (theory - work) / theory);
      std::fflush(stdout);
    }
  }
}

// ----------------------------------------------------------------------------------- Computing

// Part `index` of `count`, by itself: with what the parts before it would give, whose gradient it
// computes, and for any but the last one with a loss that stands for the parts behind it.
absl::Status RunAlone(const SplitJob& job, int index, int count, int threads, int micro_batches,
                      std::vector<double>* said) {
  at::set_num_threads(threads);
  const SplitPart part(job, index, count);
  const bool is_last = index == count - 1;
  at::Tensor x = job.Inputs(), y = job.Targets();
  {
    const at::AutoGradMode grad_mode(false);
    for (int i = 0; i < index; ++i) x = SplitPart(job, i, count).Forward({x})[0];
    if (!is_last) y = at::randn_like(part.Forward({x})[0]);
  }
  Tensors xs = x.tensor_split(micro_batches);
  const Tensors ys = y.tensor_split(micro_batches);
  return MeasureSplit(job, kRoundsOfATurn, said, [&]() -> absl::Status {
    for (int m = 0; m < micro_batches; ++m) {
      // As what another process has sent: a leaf of its own, which the next round finds as new.
      if (index > 0) xs[m] = xs[m].detach().requires_grad_(true);
      const at::Tensor out = part.Forward({xs[m]})[0];
      const at::Tensor loss = is_last ? job.Loss(out, ys[m]) : at::mse_loss(out, ys[m]);
      loss.backward(at::full_like(loss, 1.0 / micro_batches));
    }
    part.Descend([](const at::Tensor& parameter) { return parameter.grad(); });
    for (at::Tensor parameter : part.Parameters()) parameter.mutable_grad().reset();
    return absl::OkStatus();
  });
}

// With `in_flight` steps at once.
absl::Status RunSplit(Worker& worker, const std::string& name, const SplitJob& job,
                      const Schedule& schedule, size_t in_flight, std::vector<double>* said) {
  at::set_num_threads(1);
  const int rank = worker.rank();
  const auto part = std::make_shared<SplitPart>(job, rank, schedule.ranks());
  const auto step = [part](const Context& context) -> absl::Status {
    part->Descend(
        [&](const at::Tensor& parameter) { return ValueOrThrow(context.Gradient(parameter)); });
    return absl::OkStatus();
  };
  return Drive(worker, name,
               {{rank,
                 {.forward = [part](Tensors in) { return part->Forward(std::move(in)); },
                  .loss = [job](Tensors out, Tensors y) { return job.Loss(out[0], y[0]); },
                  .step = step}}},
               schedule, [&](Pipeline& pipeline) {
                 const at::Tensor x = job.Inputs(), y = job.Targets();
                 StepsInFlight steps;
                 return MeasureSplit(job, kRoundsOfATurn, said, [&] {
                   return steps.Next(worker, pipeline, {x}, {y}, in_flight);
                 });
               });
}

// The part of the time in which a rank computes, if nothing but the schedule keeps it from that.
double Efficiency(const Schedule& schedule) {
  const absl::StatusOr<Timeline> timeline = Simulate(schedule, [](const Action& action) {
    switch (action.kind) {
      case Kind::kForward:
      case Kind::kBackwardInput:
      case Kind::kBackwardWeight:
        return 1.0;
      case Kind::kBackward:
        return 2.0;
      default:
        return 0.0;
    }
  });
  return timeline->busy[0] / timeline->end;
}

// The rate of a turn of processes that do not wait for each other: that of the slowest, as a
// pipeline of them has no other. Each has written the rates of its rounds at once.
double RateOfSlowest(const std::vector<double>& rates) {
  double slowest = 0;
  for (size_t begin = 0; begin + kRoundsOfATurn <= rates.size(); begin += kRoundsOfATurn) {
    const auto first = rates.begin() + static_cast<std::ptrdiff_t>(begin);
    const double rate = Median({first, first + kRoundsOfATurn});
    slowest = begin == 0 ? rate : std::min(slowest, rate);
  }
  return slowest;
}

// A way to compute a job, and what its turns have measured.
struct Contender {
  std::string name;
  std::function<std::vector<double>()> run;
  double at_most = 0;  // of the processes that do not wait; 0 where no schedule bounds it
  std::vector<double> rates;

  Contender(std::string its_name, std::function<std::vector<double>()> its_run,
            double its_at_most = 0)
      : name(std::move(its_name)), run(std::move(its_run)), at_most(its_at_most) {}
};

void ReportSplit(SplitJob job) {
  if (!absl::StrContains(job.name, models)) return;
  if (given_micro_batches > 0) job.micro_batches = given_micro_batches;
  std::printf("%s, batches of %d in %d micro-batches; %s per second\n", job.name.c_str(), job.batch,
              job.micro_batches, job.Unit());
  std::fflush(stdout);  // Before processes are forked, which would print it again.
  const auto alone = [&job](int processes, int threads, int micro_batches) {
    return [=, &job] {
      return InProcesses(processes, [&](int index, std::vector<double>* said) {
        return RunAlone(job, index, processes, threads, micro_batches, said);
      });
    };
  };
  std::vector<Contender> all;
  all.emplace_back("one process, 2 threads", alone(1, 2, 1));
  // Some of the layers in each: what is left if nobody waits for anybody.
  all.emplace_back(absl::StrCat(job.processes, " processes that do not wait, 1 thread each"),
                   alone(job.processes, 1, job.micro_batches));
  all.emplace_back("one process, 2 threads, in micro-batches", alone(1, 2, job.micro_batches));
  all.emplace_back("one process, 1 thread", alone(1, 1, 1));
  all.emplace_back("one process, 1 thread, in micro-batches", alone(1, 1, job.micro_batches));
  // PyTorch has no pipeline without Python: a batch goes through all processes at once, or in parts
  // that all are on their way together, and one backward goes back.
  for (const int parts : {1, job.micro_batches}) {
    all.emplace_back(absl::StrCat(job.processes, " processes, PyTorch's own (uv), ", parts,
                                  parts == 1 ? " part" : " parts"),
                     [&job, parts] {
                       const int port = FreePort();
                       return InProcesses(job.processes, [&](int rank, std::vector<double>* said) {
                         const SideOptions place{
                             .config = "uv", .rank = rank, .world = job.processes, .port = port};
                         return TrainWithPytorch(job, parts, place, kRoundsOfATurn, said);
                       });
                     });
  }
  const int processes = job.processes;
  // Else one that waits lets another one have its processor.
  const bool all_at_once = processes <= static_cast<int>(std::thread::hardware_concurrency());
  const std::vector<std::pair<std::string, Schedule>> schedules = {
      {"GPipe", *GPipe(processes, job.micro_batches)},
      {"1F1B", *OneForwardOneBackward(processes, job.micro_batches)},
      {"ZB-H1", *ZeroBubbleH1(processes, job.micro_batches)},
      {"ZB-H2", *ZeroBubbleH2(processes, job.micro_batches)}};
  const auto add = [&](const std::string& name, const Schedule& schedule, size_t in_flight,
                       double at_most) {
    const Schedule with_steps = WithSteps(schedule);
    const std::string trace = absl::StrCat(name, "-", job.name, "-", job.micro_batches);
    all.emplace_back(
        absl::StrCat(processes, " processes, 1 thread each, ", name),
        [&job, with_steps, trace, in_flight] {
          return InJob(job.processes, [&](Worker& worker, std::vector<double>* said) {
            return RunSplit(worker, trace, job, with_steps, in_flight, said);
          });
        },
        all_at_once ? at_most : 0);
  };
  for (const auto& [name, schedule] : schedules) add(name, schedule, 1, Efficiency(schedule));
  // Where one step fills what is idle in the other, no schedule bounds it.
  add("2 steps in flight", *ZeroBubble(processes, job.micro_batches, 3), 2, 0);
  // Every second round goes backwards, so that a machine that becomes slower meets all alike.
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      Contender& one = all[round % 2 == 0 ? i : all.size() - 1 - i];
      const auto named = [&one](const std::string& part) {
        return absl::StrContains(one.name, part);
      };
      if (!only.empty() && absl::c_none_of(only, named)) continue;
      // One that drives others says alone what it has measured.
      one.rates.push_back(RateOfSlowest(one.run()));
      if (one.rates.back() == 0) failed = true;
    }
  }
  for (const Contender& one : all) {
    if (one.rates.empty()) continue;
    std::printf("%-44s %8.0f", one.name.c_str(), Median(one.rates));
    if (!all[0].rates.empty())
      std::printf(", %s of one process", RatioOf(one.rates, all[0].rates).c_str());
    if (!all[1].rates.empty()) {
      std::printf(", %s of not waiting", RatioOf(one.rates, all[1].rates).c_str());
    }
    if (one.at_most > 0) std::printf(" (at most %.2f)", one.at_most);
    std::printf("\n");
  }
  std::fflush(stdout);
}

void ReportSplits() {
  ReportSplit({.name = "8 layers of 512", .layers = 8, .width = 512, .batch = 256});
  ReportSplit({.name = "8 layers of 1024", .layers = 8, .width = 1024, .batch = 512, .steps = 2});
  SplitJob transformer = {.name = "4 transformer blocks of 256, sequences of 128",
                          .model = SplitJob::Model::kTransformer,
                          .layers = 4,
                          .width = 256,
                          .batch = 16,
                          .sequence = 128,
                          .micro_batches = 8,
                          .steps = 2};
  ReportSplit(transformer);
  transformer.batch = 32;
  transformer.micro_batches = 16;
  ReportSplit(transformer);
  transformer.batch = 64;
  transformer.micro_batches = 32;
  transformer.steps = 1;
  ReportSplit(transformer);
  transformer.name = "6 transformer blocks of 256, sequences of 128";
  transformer.layers = 6;
  transformer.processes = 3;
  transformer.batch = 128;
  ReportSplit(transformer);
  // As that is by default.
  ReportSplit({.name = "fashion_mnist",
               .model = SplitJob::Model::kImages,
               .batch = 256,
               .micro_batches = 4,
               .steps = 40});
}

int Main(int argc, char** argv) {
  CLI::App app{"Measures pipelines of stages."};
  double unit_ms = 10;
  bool no_waiting = false, no_split = false, no_examples = false;
  app.add_option("--unit-ms", unit_ms, "How long a stage waits in each third of its work");
  app.add_option("--rounds", rounds, "How many steps, or turns of all contenders, a median is of");
  app.add_flag("--no-waiting", no_waiting, "Without the stages that wait");
  app.add_flag("--no-split", no_split, "Without the stages that compute");
  app.add_flag("--no-examples", no_examples, "Without the examples");
  app.add_option("--models", models, "Only the models and examples whose names contain this");
  app.add_option("--only", only,
                 "Only the ways to compute whose names contain one of these, and no examples")
      ->delimiter(',');
  app.add_option("--micro-batches", given_micro_batches,
                 "Of each batch where stages compute; no examples")
      ->check(CLI::Range(1, 1024));
  app.add_option("--traces", traces, "Folder for what each rank did, in the last turn");
  CLI11_PARSE(app, argc, argv);
  unit = absl::Milliseconds(unit_ms);
  if (!no_waiting) ReportWaiting();
  if (!no_split) ReportSplits();
  // Those run as they are.
  if (!no_examples && only.empty() && given_micro_batches == 0) {
    if (const absl::Status status = ReportExamples(models, rounds); !status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      failed = true;
    }
  }
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
