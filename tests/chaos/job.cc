// Makes hosts, folders and processes.
#include "tests/chaos/job.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "gtest/gtest.h"
#include "tests/chaos/worker.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

constexpr char kKey[] = "the secret of the chaos";
// Of checkpoints: two of them and one that is written take some 10 MB.
constexpr char kDiskSize[] = "size=48m";

// This program's file.
std::string Program() { return std::filesystem::read_symlink("/proc/self/exe"); }

}  // namespace

absl::StatusOr<std::unique_ptr<ChaosJob>> ChaosJob::Create(const ChaosJobOptions& options) {
  std::unique_ptr<ChaosJob> job(new ChaosJob(options));
  std::string folder = testing::TempDir() + "/chaos-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return absl::ErrnoToStatus(errno, folder);
  job->folder_ = folder;
  job->checkpoints_ = folder + "/checkpoints";
  std::filesystem::create_directory(job->checkpoints_);
  if (options.hosts == 1) {
    job->why_one_host_ = "one host was asked for";
  } else if (absl::Status allowed = CheckNamespaces(); absl::IsFailedPrecondition(allowed)) {
    job->why_one_host_ = std::string(allowed.message());
  } else {
    DG_RETURN_IF_ERROR(allowed);
    // In the namespace of this program, which the hosts' come from.
    if (mount("none", job->checkpoints_.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, kDiskSize) != 0) {
      return absl::ErrnoToStatus(errno, "a file system for checkpoints");
    }
    job->is_mounted_ = true;
    auto hosts = Hosts::Create({.count = options.hosts, .ipv6 = false, .taps = true});
    if (hosts.ok()) {
      job->hosts_ = *std::move(hosts);
      std::vector<int> taps;
      for (int host = 0; host < options.hosts; ++host) taps.push_back(job->hosts_->Tap(host));
      job->cables_ = std::make_unique<TapSwitch>(taps, options.seed);
    } else if (absl::IsFailedPrecondition(hosts.status())) {
      job->why_one_host_ = std::string(hosts.status().message());
    } else {
      return hosts.status();
    }
  }
  job->rendezvous_ = job->hosts_ == nullptr ? absl::StrCat("tcp://127.0.0.1:", FreePort())
                                            : absl::StrCat("tcp://", Hosts::Ipv4(0), ":29500");
  job->processes_.resize(options.workers);
  return job;
}

ChaosJob::~ChaosJob() {
  processes_.clear();
  cables_ = nullptr;
  hosts_ = nullptr;
  if (is_mounted_) umount2(checkpoints_.c_str(), MNT_DETACH);
  std::error_code error;  // what cannot be removed is in a folder of temporary files
  std::filesystem::remove_all(folder_, error);
}

void ChaosJob::Start(int worker) {
  const ChaosWorkerOptions of_worker = {.rank = worker,
                                        .world_size = options_.workers,
                                        .rendezvous = rendezvous_,
                                        .host = hosts_ == nullptr ? "127.0.0.1" : "eth0",
                                        .checkpoints = checkpoints_,
                                        .heartbeat_limit = options_.heartbeat_limit};
  std::vector<std::string> command = {Program(), kChaosWorker};
  for (const std::string& argument : ToArguments(of_worker)) command.push_back(argument);
  const Variables variables = {{"DISTGRAD_KEY", kKey}, {"OMP_NUM_THREADS", "1"}};
  processes_.at(worker) = hosts_ == nullptr ? StartHere(command, variables)
                                            : hosts_->Start(HostOf(worker), command, variables);
}

void ChaosJob::Kill(int worker) {
  process(worker).Signal(SIGKILL);
  process(worker).Wait();
  processes_.at(worker) = nullptr;
}

void ChaosJob::Say(int worker, const std::string& command) {
  if (Runs(worker)) process(worker).Say(command);
}

std::optional<ChaosJob::Line> ChaosJob::TryNextLine() {
  for (size_t i = 0; i < processes_.size(); ++i) {
    const size_t worker = (next_ + i) % processes_.size();
    std::unique_ptr<HostProcess>& process = processes_[worker];
    if (process == nullptr) continue;
    if (std::optional<std::string> text = process->TryReadLine(); text.has_value()) {
      next_ = worker + 1;
      return Line{static_cast<int>(worker), *std::move(text)};
    }
    if (process->is_over()) {
      const int code = process->Wait();
      process = nullptr;
      return Line{static_cast<int>(worker), "", true, code};
    }
  }
  return std::nullopt;
}

std::optional<ChaosJob::Line> ChaosJob::NextLine(absl::Time until) {
  for (;;) {
    if (std::optional<Line> line = TryNextLine(); line.has_value()) return line;
    const absl::Duration left = until - absl::Now();
    if (left <= absl::ZeroDuration()) return std::nullopt;
    std::vector<pollfd> entries;
    for (const auto& process : processes_) {
      if (process != nullptr) entries.push_back({process->output_fd(), POLLIN, 0});
    }
    // Rounded up, lest it ask again and again in the last millisecond.
    const int64_t milliseconds =
        absl::ToInt64Milliseconds(std::min<absl::Duration>(left, absl::Minutes(1))) + 1;
    if (poll(entries.data(), entries.size(), static_cast<int>(milliseconds)) < 0 &&
        errno != EINTR) {
      return std::nullopt;
    }
  }
}

}  // namespace distgrad
