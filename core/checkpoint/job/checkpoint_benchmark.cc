// How fast the state of a job of one worker is saved and loaded, next to cp of the same bytes in
// the same folder; and how long training stands still. Run with -c opt, on a quiet machine:
//
//   tools/bazel run //core/checkpoint/job:checkpoint_benchmark -- FOLDER MEGABYTES
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

constexpr int kTensors = 16;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Check(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}
void Shell(const std::string& command) {
  if (std::system(command.c_str()) != 0) std::exit(1);
}

// Something that is measured, and how it went.
struct Measured {
  const char* what;
  std::function<void()> run;
  std::function<void()> prepare = [] {};  // is not measured
  double best = 1e9;                      // seconds
  int64_t grown = 0;                      // KiB
};

// Runs each of them in turn, for a few rounds, so that what else the machine does slows down all of
// them alike. Prints the best round of each, as a rate, and by how much the process has grown.
void Measure(double megabytes, std::vector<Measured*> all) {
  using Clock = std::chrono::steady_clock;
  for (int round = 0; round < 5; ++round) {
    for (Measured* const each : all) {
      each->prepare();
      rusage before = {}, after = {};
      getrusage(RUSAGE_SELF, &before);
      const Clock::time_point start = Clock::now();
      each->run();
      each->best =
          std::min(each->best, std::chrono::duration<double>(Clock::now() - start).count());
      getrusage(RUSAGE_SELF, &after);
      each->grown = std::max<int64_t>(each->grown, after.ru_maxrss - before.ru_maxrss);
    }
  }
  for (const Measured* const each : all) {
    std::printf("%-36s %8.0f MiB/s %8.0f ms   %6lld MiB more memory at most\n", each->what,
                megabytes / each->best, each->best * 1000,
                static_cast<long long>(each->grown / 1024));
  }
}

void Run(const std::string& folder, int64_t megabytes) {
  const std::string saved = folder + "/benchmark", copy = folder + "/benchmark.copy";
  const std::unique_ptr<Worker> worker = Check(Worker::Create({.rank = 0, .world_size = 1}));
  TensorMap tensors;
  for (int i = 0; i < kTensors; ++i) {
    tensors[absl::StrCat("tensor", i)] = at::ones({megabytes * 1024 / 4 / kTensors, 1024});
  }
  const std::unique_ptr<CheckpointPart> part =
      Check(CheckpointPart::Create(worker.get(), {.tensors = tensors}));
  {
    const std::unique_ptr<CheckpointManager> checkpoints =
        Check(CheckpointManager::Create(worker.get(), saved, {.keep = 1}));
    int64_t step = 0;
    // Each takes the place of what it made before, whose pages have to be given back.
    const auto file = [&] {
      return absl::StrFormat("%s/step-%06d/model-00001-of-00001.safetensors", saved, step);
    };
    Check(checkpoints->Save(++step));
    Shell(absl::StrCat("cp ", file(), " ", copy));
    Measured save{"Save", [&] { Check(checkpoints->Save(++step)); }};
    Measured sync{"cp, and sync of the copy",
                  [&] { Shell(absl::StrCat("cp ", file(), " ", copy, " && sync ", copy)); }};
    Measured load{"Load", [&] { Check(checkpoints->Load().status()); }};
    Measured cp{"cp", [&] { Shell(absl::StrCat("cp ", file(), " ", copy)); }};
    Measure(megabytes, {&save, &sync, &load, &cp});
    std::printf("Save has %.2f of the rate of cp and sync, Load %.2f of that of cp\n",
                sync.best / save.best, cp.best / load.best);
    Future<Unit> written;
    Measured async{"SaveAsync, until training goes on",
                   [&] { written = Check(checkpoints->SaveAsync(++step)); },
                   [&] {
                     if (written.valid()) Check(written.Wait().status());
                   }};
    Measure(megabytes, {&async});
    Check(written.Wait().status());
  }
  Shell(absl::StrCat("rm -r ", saved, " ", copy));
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc != 3 || std::atoi(argv[2]) < 16) {
    std::printf("checkpoint_benchmark FOLDER MEGABYTES\n");
    return 1;
  }
  distgrad::Run(argv[1], std::atoi(argv[2]));
}
