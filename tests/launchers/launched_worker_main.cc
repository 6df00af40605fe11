// A worker that a launcher starts.
//
//   launched_worker
//   launched_worker kill RANK MARKER   that rank kills itself, unless the file MARKER is there
//   launched_worker fail RANK          that rank fails, and reports why
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/worker/failure.h"
#include "tests/launchers/launched_worker.h"

int main(int argc, char** argv) {
  const std::string what = argc > 2 ? argv[1] : "";
  const int rank = argc > 2 ? std::atoi(argv[2]) : -1;
  const absl::Status status =
      distgrad::RunLaunchedWorker([&](const distgrad::Worker& worker) -> absl::Status {
        if (worker.rank() != rank) return absl::OkStatus();
        if (what == "fail") {
          return absl::ResourceExhaustedError(absl::StrCat("the disk of rank ", rank, " is full"));
        }
        if (what == "kill" && argc > 3 && !std::filesystem::exists(argv[3])) {
          std::ofstream(argv[3]) << "killed\n";
          raise(SIGKILL);
        }
        return absl::OkStatus();
      });
  if (status.ok()) return 0;
  std::fprintf(stderr, "launched_worker: %s\n", status.ToString().c_str());
  const absl::Status reported = distgrad::ReportFailure(status);
  if (!reported.ok()) std::fprintf(stderr, "launched_worker: %s\n", reported.ToString().c_str());
  return 3;
}
