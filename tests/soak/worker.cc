// Commands, and what the system says of this process.
#include "tests/soak/worker.h"

#include <ATen/Parallel.h>
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/transport/packet.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"
#include "tests/soak/functions.h"
#include "tests/soak/load.h"
#include "tests/soak/sample.h"
#include "tests/testing/left_over.h"

namespace distgrad {
namespace {

// For all threads: a line comes out whole.
void Write(const std::string& line) {
  static absl::Mutex mu(absl::kConstInit);
  absl::MutexLock lock(&mu);
  std::fputs(absl::StrCat(absl::StrReplaceAll(line, {{"\n", " "}}), "\n").c_str(), stdout);
  std::fflush(stdout);
}

// 0 of none.
double Percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<ptrdiff_t>(part * (values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// Its place in the job, from "join" to "leave" or "end".
struct Session {
  std::unique_ptr<Worker> worker;
  Optimizers optimizers;
  std::unique_ptr<Load> load;
};

// For one thread.
class SoakWorker {
 public:
  explicit SoakWorker(const SoakWorkerOptions& options)
      : options_(options), descriptors_(OpenDescriptors().size()) {
    sampler_ = std::thread([this] { RunSampler(); });
  }
  ~SoakWorker() {
    stop_.Notify();
    sampler_.join();
  }

  absl::StatusOr<std::string> Do(const std::string& command) {
    if (command == "join") return Join();
    if (command == "go") return Go();
    if (command == "barrier") {
      DG_RETURN_IF_ERROR(session_->worker->Barrier(Deadline::After(kHangs), OnLost::kGoOnWithout));
      return "met";
    }
    if (command == "stop") return Stop();
    if (command == "check") return Check();
    if (command == "leave" || command == "end") return End(command == "leave");
    return absl::InvalidArgumentError(absl::StrCat("no command: ", command));
  }

 private:
  absl::StatusOr<std::string> Join() {
    auto session = std::make_unique<Session>();
    DG_ASSIGN_OR_RETURN(session->worker, Worker::Create({.name = options_.name,
                                                         .rendezvous = options_.rendezvous,
                                                         .join = options_.rank < 0,
                                                         .rank = options_.rank,
                                                         .world_size = options_.world_size,
                                                         .thread_count = 2,
                                                         .join_timeout = kHangs}));
    DG_ASSIGN_OR_RETURN(session->optimizers, ServeFunctions(session->worker.get()));
    absl::MutexLock lock(&mu_);
    session_ = std::move(session);
    return "joined";
  }

  absl::StatusOr<std::string> Go() {
    absl::MutexLock lock(&mu_);
    session_->load = std::make_unique<Load>(
        session_->worker.get(), &session_->optimizers, options_.seed + 1000 * sessions_++,
        [](const std::string& what) { Write(absl::StrCat("! ", what)); });
    return "going";
  }

  absl::StatusOr<std::string> Stop() {
    session_->load->Stop();
    for (const auto& [kind, count] : session_->load->counts()) {
      WorkCount& all = counts_[kind];
      all.done += count.done;
      all.excused += count.excused;
      all.longest = std::max(all.longest, count.longest);
    }
    latest_ = std::max(latest_, session_->load->latest());
    absl::MutexLock lock(&mu_);
    session_->load = nullptr;
    return "stopped";
  }

  absl::StatusOr<std::string> Check() {
    const absl::Time patience = absl::Now() + absl::Minutes(1);
    std::string left = LeftOfWorker(*session_->worker);
    for (; !left.empty(); left = LeftOfWorker(*session_->worker)) {
      if (absl::Now() > patience) return absl::InternalError(absl::StrCat("left:", left));
      absl::SleepFor(absl::Milliseconds(100));
    }
    return "nothing is left";
  }

  absl::StatusOr<std::string> End(bool leaves) {
    const absl::Status status = leaves ? session_->worker->Leave(Deadline::After(kHangs))
                                       : session_->worker->Shutdown(Deadline::After(kHangs));
    std::unique_ptr<Session> session;
    {
      absl::MutexLock lock(&mu_);
      session = std::move(session_);
    }
    session = nullptr;
    DG_RETURN_IF_ERROR(status);
    DG_RETURN_IF_ERROR(CheckProcess());
    if (leaves) return "left";
    for (const auto& [kind, count] : counts_) {
      Write(absl::StrCat("count done=", count.done, " excused=", count.excused,
                         " longest=", absl::ToDoubleSeconds(count.longest), " kind=", kind));
    }
    Write(absl::StrCat("latest ", absl::ToDoubleSeconds(latest_)));
    return "ended";
  }

  // That no thread and no descriptor of the worker's has outlived it. What the system has still to
  // take down has some time.
  absl::Status CheckProcess() {
    const absl::Time patience = absl::Now() + absl::Minutes(1);
    while (true) {
      const std::string left = LeftOfProcess(descriptors_);
      if (left.empty()) return absl::OkStatus();
      if (absl::Now() > patience) {
        return absl::InternalError(
            absl::StrCat("the worker is gone, and this process still has:", left));
      }
      absl::SleepFor(absl::Milliseconds(100));
    }
  }

  void RunSampler() {
    while (!stop_.WaitForNotificationWithTimeout(options_.sample_every)) {
      absl::MutexLock lock(&mu_);
      if (session_ == nullptr || session_->load == nullptr) continue;
      // The end of this process ends the soak.
      if (!session_->load->CheckThatNothingHangs()) std::_Exit(2);
      const Latencies latencies = session_->load->TakeLatencies();
      const WorkerMetrics metrics = session_->worker->Metrics();
      uint64_t in_flight = 0;
      for (const CallStats& call : metrics.calls) in_flight += call.in_flight;
      constexpr double kMegabyte = 1 << 20;
      const SoakSample sample = {.time_ms = static_cast<double>(absl::ToUnixMillis(absl::Now())),
                                 .resident = ResidentBytes() / kMegabyte,
                                 .heap = HeapBytes() / kMegabyte,
                                 .kept = static_cast<double>(KeptSegmentBytes()) / kMegabyte,
                                 .descriptors = static_cast<double>(OpenDescriptors().size()),
                                 .threads = static_cast<double>(ThreadNames().size()),
                                 .contexts = static_cast<double>(metrics.contexts),
                                 .in_flight = static_cast<double>(in_flight),
                                 .pings = static_cast<double>(latencies.call.size()),
                                 .p50 = Percentile(latencies.call, 0.5),
                                 .p99 = Percentile(latencies.call, 0.99),
                                 .pipe_p99 = Percentile(latencies.pipe, 0.99)};
      Write(absl::StrCat("sample ", FormatSample(sample)));
    }
  }

  const SoakWorkerOptions options_;
  const size_t descriptors_;  // open before there was a worker
  int sessions_ = 0;
  std::map<std::string, WorkCount> counts_;
  absl::Duration latest_ = absl::ZeroDuration();

  absl::Mutex mu_;  // while the sampler looks, and while it changes
  std::unique_ptr<Session> session_;

  absl::Notification stop_;
  std::thread sampler_;  // goes first
};

}  // namespace

std::vector<std::string> ToArguments(const SoakWorkerOptions& options) {
  return {options.name,
          absl::StrCat(options.rank),
          absl::StrCat(options.world_size),
          options.rendezvous,
          absl::StrCat(options.seed),
          absl::StrCat(absl::ToInt64Milliseconds(options.sample_every))};
}

SoakWorkerOptions FromArguments(const std::vector<std::string>& arguments) {
  SoakWorkerOptions options;
  int64_t milliseconds = 0;
  options.name = arguments.at(0);
  options.rendezvous = arguments.at(3);
  if (!absl::SimpleAtoi(arguments.at(1), &options.rank) ||
      !absl::SimpleAtoi(arguments.at(2), &options.world_size) ||
      !absl::SimpleAtoi(arguments.at(4), &options.seed) ||
      !absl::SimpleAtoi(arguments.at(5), &milliseconds)) {
    std::abort();
  }
  options.sample_every = absl::Milliseconds(milliseconds);
  return options;
}

int RunSoakWorker(const SoakWorkerOptions& options) {
  at::set_num_threads(1);
  // malloc has an arena for each of many threads, and keeps in each what was freed there: resident
  // memory grows for half an hour until all have had their share of everything. With few, and with
  // large blocks given back to the system, a leak shows sooner.
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 256 << 10);
  SoakWorker worker(options);
  for (std::string command; std::getline(std::cin, command);) {
    const absl::StatusOr<std::string> answer = worker.Do(command);
    Write(absl::StrCat("= ", answer.ok() ? *answer : answer.status().ToString()));
    if (command == "end") return answer.ok() ? 0 : 1;
  }
  return 1;  // whoever commands is gone
}

}  // namespace distgrad
