// Measures how fast tensors are saved and loaded, next to cp of the same bytes in the same folder,
// and how much memory that takes. Run with -c opt, on a quiet machine:
//
//   tools/bazel run //core/checkpoint:safetensors_benchmark -- FOLDER MEGABYTES
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/checkpoint/safetensors.h"

namespace distgrad {
namespace {

constexpr int kTensors = 16;

// Prints the best of a few rounds, as a rate, and by how much the process has grown.
template <typename F>
void Measure(const char* what, double megabytes, F f) {
  using Clock = std::chrono::steady_clock;
  rusage before = {}, after = {};
  getrusage(RUSAGE_SELF, &before);
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    const Clock::time_point start = Clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  getrusage(RUSAGE_SELF, &after);
  std::printf("%-28s %8.0f MB/s   %6ld MB more memory at most\n", what, megabytes / best,
              (after.ru_maxrss - before.ru_maxrss) / 1024);
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.ToString().c_str());
  std::exit(1);
}
void Shell(const std::string& command) {
  if (std::system(command.c_str()) != 0) std::exit(1);
}

void Run(const std::string& folder, int64_t megabytes) {
  const std::string path = folder + "/benchmark.safetensors", copy = folder + "/benchmark.copy";
  const int64_t rows = megabytes * 1024 / 4 / kTensors;
  TensorMap plain, transposed;
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = absl::StrCat("tensor", i);
    plain[name] = at::ones({rows, 1024});
    transposed[name] = plain[name].t();
  }
  Measure("save", megabytes, [&] { Check(SaveSafetensors(plain, path)); });
  Measure("save, transposed", megabytes, [&] { Check(SaveSafetensors(transposed, path)); });
  Measure("cp, and sync of the copy", megabytes,
          [&] { Shell(absl::StrCat("cp ", path, " ", copy, " && sync ", copy)); });
  Measure("cp", megabytes, [&] { Shell(absl::StrCat("cp ", path, " ", copy)); });
  Measure("load into transposed", megabytes, [&] { Check(LoadSafetensorsInto(path, transposed)); });
  Check(SaveSafetensors(plain, path));
  Measure("load into given", megabytes, [&] { Check(LoadSafetensorsInto(path, plain)); });
  Measure("load", megabytes, [&] { Check(LoadSafetensors(path).status()); });
  std::remove(path.c_str());
  std::remove(copy.c_str());
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc != 3 || std::atoi(argv[2]) < 16) {
    std::printf("safetensors_benchmark FOLDER MEGABYTES\n");
    return 1;
  }
  distgrad::Run(argv[1], std::atoi(argv[2]));
}
