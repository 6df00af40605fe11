// Writes what a worker has recorded in Chrome's trace event format.
#include "examples/trace_file.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "core/base/chrome_trace.h"
#include "core/base/status.h"

namespace distgrad {

absl::StatusOr<TraceFile> TraceFile::Open(const std::string& name, int rank) {
  TraceFile trace;
  if (name.empty()) return trace;
  std::filesystem::path path = name;
  path.replace_extension(absl::StrCat(".", rank, path.extension().string()));
  trace.file_.open(path);
  if (trace.file_) return trace;
  return absl::UnavailableError(absl::StrCat("--trace: cannot write ", path.string()));
}

std::function<void(const StageSpan&)> TraceFile::StageRecorder() const {
  return wanted() ? stages_.Recorder() : nullptr;
}

absl::Status TraceFile::Start(Worker& worker) {
  return wanted() ? worker.StartTrace() : absl::OkStatus();
}

absl::Status TraceFile::Finish(Worker& worker) {
  if (!wanted()) return absl::OkStatus();
  DG_ASSIGN_OR_RETURN(const Trace recorded, worker.StopTrace());
  file_ << ToChromeTrace(recorded, stages_.Take()) << std::flush;
  if (!file_) return absl::DataLossError("--trace: the file could not be written");
  return absl::OkStatus();
}

}  // namespace distgrad
