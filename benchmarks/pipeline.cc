// How long the ranks of a pipeline are idle: with stages that wait for a fixed time in place of
// computing, so that processors do not matter, against what the schedule's theory says; and a model
// split over processes against one process with as many threads.
//
//   tools/bazel run //benchmarks:pipeline -- [--unit-ms 10] [--rounds 5] [--no-split]
#include "core/pipeline/pipeline.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/custom_function.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/status.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "core/worker/worker.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;
using Kind = Action::Kind;

constexpr absl::Duration kPatience = absl::Minutes(5);

absl::Duration unit = absl::Milliseconds(10);
int rounds = 5;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// How long the stages of this process have waited, and how often: a wait that wakes late is work
// that takes longer, and no bubble.
std::atomic<int64_t> waited_ns{0}, waits{0};

void Wait() {
  const absl::Time begin = absl::Now();
  absl::SleepFor(unit);
  waited_ns += absl::ToInt64Nanoseconds(absl::Now() - begin);
  ++waits;
}

// Hands on what it is given, and waits in backward.
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

// A rank of a job: what it has to say, if it is the first one.
using Rank = std::function<absl::Status(Worker& worker, std::vector<double>* said)>;

absl::Status RunRank(int port, int rank, int ranks, const Rank& run, std::vector<double>* said) {
  DG_ASSIGN_OR_RETURN(const auto worker,
                      Worker::Create({.name = absl::StrCat("rank", rank),
                                      .rendezvous = absl::StrCat("tcp://127.0.0.1:", port),
                                      .rank = rank,
                                      .world_size = ranks,
                                      .threads = 1,
                                      .timeout = kPatience,
                                      .join_timeout = kPatience}));
  DG_RETURN_IF_ERROR(run(*worker, said));
  return absl::OkStatus();
}

// Runs a function in each of some processes, which are forks of this one; it has no threads. What
// the first one says comes back; nothing if any of them fails.
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

// Lets the first rank drive, while the others serve.
absl::Status Drive(Worker& worker, const std::string& name, std::map<int, PipelineStage> stages,
                   const Schedule& schedule, const std::function<absl::Status(Pipeline&)>& drive) {
  DG_ASSIGN_OR_RETURN(const auto own, PipelineStages::Create(&worker, name, std::move(stages)));
  DG_RETURN_IF_ERROR(worker.Barrier(Deadline::After(kPatience)));
  if (worker.rank() == 0) {
    DG_ASSIGN_OR_RETURN(
        const auto pipeline,
        Pipeline::Create(&worker,
                         {.name = name, .workers = Names(schedule.ranks()), .schedule = schedule}));
    DG_RETURN_IF_ERROR(drive(*pipeline));
  }
  return worker.Shutdown(Deadline::After(kPatience));
}

// ------------------------------------------------------------------------------------- Waiting

absl::Status RunWaiting(Worker& worker, const Schedule& schedule, std::vector<double>* said) {
  std::map<int, PipelineStage> stages;
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  for (int s = 0; s < schedule.stages(); ++s) {
    if (schedule.rank_of_stage[s] != worker.rank()) continue;
    stages[s] = {.forward = [weight, s](Tensors in) -> Tensors {
                   absl::SleepFor(unit);
                   // The first stage is given nothing that has a gradient.
                   const at::Tensor x = s == 0 ? in[0] + weight : in[0];
                   return {Waits::apply(x) * Waits::apply(weight)};
                 },
                 .loss = [](Tensors out, Tensors) { return out[0].sum(); }};
  }
  return Drive(worker, "waiting", std::move(stages), schedule, [&](Pipeline& pipeline) {
    const at::Tensor batch = at::ones({schedule.micro_batches, 1});
    for (int round = -1; round < rounds; ++round) {
      const Context context = worker.NewContext();
      const absl::Time begin = absl::Now();
      DG_RETURN_IF_ERROR(pipeline.Train(context, {batch}, {}).status());
      if (round >= 0) said->push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
    }
    // Behind the times of the rounds: how long a wait took.
    said->push_back(1e-6 * static_cast<double>(waited_ns) / static_cast<double>(waits));
    return absl::OkStatus();
  });
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
        {"interleaved, 2", *InterleavedOneForwardOneBackward(4, 2, m)},
        {"ZB-H1", *ZeroBubbleH1(4, m)}};
    for (const auto& [name, schedule] : schedules) {
      std::vector<double> times =
          InJob(4, [&schedule = schedule](Worker& worker, std::vector<double>* said) {
            return RunWaiting(worker, schedule, said);
          });
      if (times.empty()) continue;
      const double ms = times.back();
      times.pop_back();
      const absl::StatusOr<Timeline> timeline = Simulate(schedule, [&](const Action& action) {
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
      });
      const double work = timeline->busy[0], took = Median(times);
      std::printf("%-16s %4d %10.2f %10.1f %10.1f %10.1f%% %9.1f%% %9.1f%%\n", name.c_str(), m, ms,
                  timeline->end, took, 100 * (took / timeline->end - 1), 100 * (took - work) / took,
                  100 * (timeline->end - work) / timeline->end);
      std::fflush(stdout);
    }
  }
}

// ----------------------------------------------------------------------------------- Computing

constexpr int kWidth = 512, kLayers = 8, kBatch = 256, kMicroBatches = 8, kSteps = 20;

struct Part {
  explicit Part(int layers) {
    for (int i = 0; i < layers; ++i) {
      weights.push_back((at::randn({kWidth, kWidth}) * 0.05).requires_grad_(true));
    }
  }
  Tensors Forward(Tensors in) const {
    for (const at::Tensor& weight : weights) in[0] = at::relu(at::linear(in[0], weight));
    return in;
  }
  Tensors weights;
};

at::Tensor Loss(Tensors outputs, Tensors targets) { return at::mse_loss(outputs[0], targets[0]); }

// Samples per second.
absl::Status RunAlone(int threads, std::vector<double>* said) {
  at::set_num_threads(threads);
  const Part all(kLayers);
  const at::Tensor x = at::randn({kBatch, kWidth}), y = at::randn({kBatch, kWidth});
  for (int round = -1; round < rounds; ++round) {
    const absl::Time begin = absl::Now();
    for (int step = 0; step < kSteps; ++step) {
      Loss(all.Forward({x}), {y}).backward();
      const at::AutoGradMode grad_mode(false);
      for (at::Tensor weight : all.weights) {
        weight.sub_(weight.grad(), 0.01);
        weight.mutable_grad().reset();
      }
    }
    if (round < 0) continue;
    said->push_back(kBatch * kSteps / absl::ToDoubleSeconds(absl::Now() - begin));
  }
  return absl::OkStatus();
}

absl::Status RunSplit(Worker& worker, const Schedule& schedule, std::vector<double>* said) {
  at::set_num_threads(1);
  const int rank = worker.rank();
  const auto part = std::make_shared<Part>(kLayers / schedule.ranks());
  const auto step = [part](const Context& context) -> absl::Status {
    const at::AutoGradMode grad_mode(false);
    for (at::Tensor weight : part->weights) {
      DG_ASSIGN_OR_RETURN(const at::Tensor gradient, context.Gradient(weight));
      weight.sub_(gradient, 0.01);
    }
    return absl::OkStatus();
  };
  return Drive(worker, "computing",
               {{rank,
                 {.forward = [part](Tensors in) { return part->Forward(std::move(in)); },
                  .loss = Loss,
                  .step = step}}},
               schedule, [&](Pipeline& pipeline) {
                 const at::Tensor x = at::randn({kBatch, kWidth}), y = at::randn({kBatch, kWidth});
                 for (int round = -1; round < rounds; ++round) {
                   const absl::Time begin = absl::Now();
                   for (int i = 0; i < kSteps; ++i) {
                     const Context context = worker.NewContext();
                     DG_RETURN_IF_ERROR(pipeline.Train(context, {x}, {y}).status());
                   }
                   if (round < 0) continue;
                   said->push_back(kBatch * kSteps / absl::ToDoubleSeconds(absl::Now() - begin));
                 }
                 return absl::OkStatus();
               });
}

void ReportSplit() {
  std::printf("%d layers of %d, batches of %d in %d micro-batches; samples per second\n", kLayers,
              kWidth, kBatch, kMicroBatches);
  const double alone =
      Median(InProcesses(1, [](int, std::vector<double>* said) { return RunAlone(2, said); }));
  std::printf("%-34s %10.0f\n", "one process, 2 threads", alone);
  std::vector<std::pair<std::string, Schedule>> schedules = {
      {"GPipe", *GPipe(2, kMicroBatches)},
      {"1F1B", *OneForwardOneBackward(2, kMicroBatches)},
      {"ZB-H1", *ZeroBubbleH1(2, kMicroBatches)}};
  for (auto& [name, schedule] : schedules) {
    for (int s = 0; s < 2; ++s) schedule.lists[s].push_back({Kind::kStep, s});
    const double split =
        Median(InJob(2, [&schedule = schedule](Worker& worker, std::vector<double>* said) {
          return RunSplit(worker, schedule, said);
        }));
    std::printf("%-34s %10.0f %9.2f of one process\n",
                absl::StrCat("2 processes, 1 thread each, ", name).c_str(), split, split / alone);
  }
}

int Main(int argc, char** argv) {
  CLI::App app{"Measures pipelines of stages."};
  double unit_ms = 10;
  bool no_split = false;
  app.add_option("--unit-ms", unit_ms, "How long a stage waits in each third of its work");
  app.add_option("--rounds", rounds, "How many steps, or rows of steps, a median is of");
  app.add_flag("--no-split", no_split, "Only the stages that wait");
  CLI11_PARSE(app, argc, argv);
  unit = absl::Milliseconds(unit_ms);
  ReportWaiting();
  if (!no_split) ReportSplit();
  return 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
