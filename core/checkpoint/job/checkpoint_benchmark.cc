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

// Prints the best of a few rounds, as a rate, and by how much the process has grown. What `prepare`
// does is not measured.
template <typename F>
void Measure(
    const char* what, double megabytes, F f, const std::function<void()>& prepare = [] {}) {
  using Clock = std::chrono::steady_clock;
  rusage before = {}, after = {};
  getrusage(RUSAGE_SELF, &before);
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    prepare();
    const Clock::time_point start = Clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  getrusage(RUSAGE_SELF, &after);
  std::printf("%-36s %8.0f MB/s %8.0f ms   %6ld MB more memory at most\n", what, megabytes / best,
              best * 1000, (after.ru_maxrss - before.ru_maxrss) / 1024);
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
    Measure("Save", megabytes, [&] { Check(checkpoints->Save(++step)); });
    const std::string file =
        absl::StrFormat("%s/step-%06d/model-00001-of-00001.safetensors", saved, step);
    Measure("cp, and sync of the copy", megabytes,
            [&] { Shell(absl::StrCat("cp ", file, " ", copy, " && sync ", copy)); });
    Measure("cp", megabytes, [&] { Shell(absl::StrCat("cp ", file, " ", copy)); });
    Measure("Load", megabytes, [&] { Check(checkpoints->Load().status()); });
    Future<Unit> written;
    Measure(
        "SaveAsync, until training goes on", megabytes,
        [&] { written = Check(checkpoints->SaveAsync(++step)); },
        [&] {
          if (written.valid()) Check(written.Wait().status());
        });
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
