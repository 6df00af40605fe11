// Asks the worker's own metrics, and the system.
#include "tests/testing/left_over.h"

#include <malloc.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/autograd/state.h"
#include "core/transport/packet.h"
#include "core/worker/metrics.h"

namespace distgrad {

std::string LeftOfWorker(const Worker& worker) {
  const WorkerMetrics metrics = worker.Metrics();
  std::string left;
  for (const CallStats& call : metrics.calls) {
    if (call.in_flight == 0) continue;
    absl::StrAppend(&left, " ", call.in_flight, call.served ? " served" : " made", " calls of '",
                    call.function, "' with ", call.peer, " in flight;");
  }
  for (const auto& [peer, bytes] : metrics.queued_bytes) {
    if (bytes > 0) absl::StrAppend(&left, " ", bytes, " bytes wait to be sent to ", peer, ";");
  }
  if (metrics.passes_in_flight > 0)
    absl::StrAppend(&left, " ", metrics.passes_in_flight, " passes;");
  for (const ContextState& context : worker.Contexts()) {
    absl::StrAppend(&left, " context ", context.id, " with ", context.sends, " sends and ",
                    context.receives, " recvs;");
  }
  return left;
}

std::string LeftOfProcess(size_t descriptors_before) {
  std::string left;
  const std::vector<std::string> descriptors = OpenDescriptors();
  if (descriptors.size() > descriptors_before) {
    for (const std::string& one : descriptors) absl::StrAppend(&left, " ", one);
  }
  for (const std::string& thread : ThreadNames()) {
    const bool is_ours = absl::StartsWith(thread, "dg-") || absl::StartsWith(thread, "dg/");
    if (is_ours) absl::StrAppend(&left, " thread ", thread);
  }
  return left;
}

std::vector<std::string> OpenDescriptors() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error);
    if (!error && target != absl::StrCat("/proc/", getpid(), "/fd")) {
      all.push_back(target.string());
    }
  }
  return all;
}

std::vector<std::string> ThreadNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream comm(entry.path() / "comm");
    std::getline(comm, name);
    names.push_back(name);
  }
  return names;
}

double ResidentBytes() {
  std::ifstream status("/proc/self/status");
  double kilobytes = 0;
  for (std::string word; status >> word;) {
    if (word == "RssAnon:") status >> kilobytes;
  }
  return kilobytes * 1024 - static_cast<double>(KeptSegmentBytes());
}

double HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd) - static_cast<double>(KeptSegmentBytes());
}

}  // namespace distgrad
