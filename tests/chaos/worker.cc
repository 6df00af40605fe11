// Commands, and training that goes on after every error.
#include "tests/chaos/worker.h"

#include <ATen/Parallel.h>
#include <malloc.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iostream>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "core/worker/optimizer.h"
#include "core/worker/worker.h"
#include "tests/chaos/model.h"
#include "tests/chaos/operation_watch.h"
#include "tests/testing/left_over.h"

namespace distgrad {
namespace {

constexpr int kStepsPerSave = 5;
// A step may be faster; the processes are to have time to be disturbed in, not steps.
constexpr absl::Duration kStepEvery = absl::Milliseconds(20);
// After an error it tries again so soon.
constexpr absl::Duration kTryAgainAfter = absl::Milliseconds(100);
// What the worker did is over everywhere within this.
constexpr absl::Duration kPatience = absl::Minutes(1);

// For all threads: a line comes out whole.
void Write(const std::string& line) {
  static absl::Mutex mu(absl::kConstInit);
  absl::MutexLock lock(&mu);
  std::fputs(absl::StrCat(absl::StrReplaceAll(line, {{"\n", " "}}), "\n").c_str(), stdout);
  std::fflush(stdout);
}

// The lines of standard input, which a thread of its own reads.
class Commands {
 public:
  Commands() {
    // It ends with the process: nobody can interrupt its read.
    std::thread([this] { Run(); }).detach();
  }
  // Waits for the next one; "" at the end.
  std::string Next() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &Commands::IsThere));
    if (lines_.empty()) return "";
    std::string line = std::move(lines_.front());
    lines_.pop_front();
    return line;
  }
  // Whether there is one, or comes within this time.
  bool AwaitFor(absl::Duration duration) {
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(this, &Commands::IsThere), duration);
  }

 private:
  bool IsThere() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return over_ || !lines_.empty(); }
  void Run() {
    for (std::string line; std::getline(std::cin, line);) {
      absl::MutexLock lock(&mu_);
      lines_.push_back(line);
    }
    absl::MutexLock lock(&mu_);
    over_ = true;
  }

  absl::Mutex mu_;
  std::deque<std::string> lines_ ABSL_GUARDED_BY(mu_);
  bool over_ ABSL_GUARDED_BY(mu_) = false;
};

// For one thread, but for handlers.
class ChaosWorker {
 public:
  ChaosWorker(const ChaosWorkerOptions& options, Commands* commands)
      : options_(options),
        commands_(commands),
        layer_(options.rank),
        watch_(ChaosBound(options.heartbeat_limit),
               [this](const std::string& what) {
                 Write(absl::StrCat("! ", what, " has taken more than ",
                                    absl::FormatDuration(ChaosBound(options_.heartbeat_limit))));
               }),
        descriptors_(OpenDescriptors().size()) {}

  absl::StatusOr<std::string> Join() {
    DG_ASSIGN_OR_RETURN(worker_, Worker::Create({.rendezvous = options_.rendezvous,
                                                 .rank = options_.rank,
                                                 .world_size = options_.world_size,
                                                 .host = options_.host,
                                                 .thread_count = 2,
                                                 // Faults are noticed before, by heartbeats.
                                                 .timeout = absl::Minutes(5),
                                                 .join_timeout = absl::Minutes(1),
                                                 .heartbeat_limit = options_.heartbeat_limit}));
    worker_->OnMember([](const MemberEvent& event) {
      const char* const kinds[] = {"?", "joined", "left", "lost"};
      Write(absl::StrCat("* ", kinds[static_cast<int>(event.kind)], " ", event.name, ": ",
                         event.reason));
    });
    DG_RETURN_IF_ERROR(
        worker_->Register("forward", [this](Request& request) { return Forward(request); }));
    DG_RETURN_IF_ERROR(worker_->Register("begin", [this](Request&) -> absl::StatusOr<Message> {
      has_state_ = true;
      return Message{};
    }));
    DG_ASSIGN_OR_RETURN(optimizer_,
                        Optimizer::Create(worker_.get(), OptimizerOf(options_.rank, layer_)));
    const std::string suffix = absl::StrCat(options_.rank);
    DG_ASSIGN_OR_RETURN(
        part_,
        CheckpointPart::Create(
            worker_.get(),
            {.tensors = {{"first" + suffix, layer_.first}, {"second" + suffix, layer_.second}},
             .optimizers = {{options_.rank % 2 == 0 ? "sgd" : "adam", optimizer_.get()}},
             .save_values =
                 [this] {
                   if (!has_state_) throw std::runtime_error(NoState());
                   return CheckpointValues{};
                 },
             .load_values = [this](const LoadedValues&) -> absl::Status {
               has_state_ = true;
               return absl::OkStatus();
             }}));
    return "joined";
  }

  absl::StatusOr<std::string> Do(const std::string& command) {
    if (command == "load") return Load();
    if (command == "pause") return absl::StrCat("paused ", step_);
    if (command == "barrier") {
      DG_RETURN_IF_ERROR(worker_->Barrier(Deadline::Never()));
      return "met";
    }
    if (command == "check") return Check();
    if (command == "end" || command == "close") return End(command == "end");
    return absl::InvalidArgumentError(absl::StrCat("no command: ", command));
  }

  // Until there is a command.
  void Train() {
    while (!commands_->AwaitFor(kStepEvery)) {
      if (!Try("step", [this] { return Step(); }).ok()) {
        Resume();
      } else if (step_ % kStepsPerSave == 0) {
        // Without it the job goes on, and falls back to the one before.
        Save().IgnoreError();
      }
    }
    while (saved_ != step_) {
      if (Save().ok()) continue;
      Pause();
      // What has failed may be a worker that has to be given its state.
      Resume();
    }
  }

 private:
  std::string NoState() const {
    return absl::StrCat("worker", options_.rank, " has come back, and was not given its state yet");
  }

  absl::StatusOr<Message> Forward(Request& request) {
    if (!has_state_) return absl::FailedPreconditionError(NoState());
    Message message{"", {layer_.Forward(request.message.tensors.at(0))}};
    if (options_.rank + 1 == options_.world_size) return message;
    return worker_->Call(options_.rank + 1, "forward", std::move(message), request.Nested());
  }

  // Says an error, and how long it took.
  absl::Status Try(const std::string& what, const std::function<absl::Status()>& operation) {
    watch_.Begin(what);
    absl::Status status;
    try {
      status = operation();
    } catch (const std::exception& error) {
      // libtorch's, on this thread: it has no memory.
      status =
          absl::ResourceExhaustedError(absl::StrCat("worker", options_.rank, ": ", error.what()));
    }
    const absl::Duration took = watch_.End();
    if (!status.ok()) {
      Write(
          absl::StrCat("failed ", what, " ", absl::ToDoubleSeconds(took), " ", status.ToString()));
    }
    return status;
  }

  // A moment, before it tries again.
  void Pause() { absl::SleepFor(kTryAgainAfter); }

  absl::Status Step() {
    const ChaosBatch batch = BatchOf(step_);
    Context context = worker_->NewContext();
    DG_ASSIGN_OR_RETURN(
        const Message reply,
        worker_->Call(1, "forward", {"", {layer_.Forward(batch.input)}}, {.context = &context}));
    const at::Tensor loss = LossOf(reply.tensors.at(0), batch);
    DG_RETURN_IF_ERROR(context.Backward({loss}));
    DG_RETURN_IF_ERROR(optimizer_->Step(context));
    Write(absl::StrCat("step ", step_, " ", BitsOf(loss)));
    ++step_;
    return absl::OkStatus();
  }

  absl::Status Save() {
    const absl::Status saved = Try("save", [this] { return checkpoints_->Save(step_); });
    if (saved.ok()) {
      saved_ = step_;
      Write(absl::StrCat("saved ", step_));
    }
    return saved;
  }

  // Part of a step may have been taken, and a worker may have lost all it had: all go back to the
  // last checkpoint together.
  void Resume() {
    const auto load = [this]() -> absl::Status {
      DG_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded, checkpoints_->Load());
      step_ = saved_ = loaded.step;
      return absl::OkStatus();
    };
    while (!Try("load", load).ok()) Pause();
    Write(absl::StrCat("resumed ", step_));
  }

  absl::StatusOr<std::string> Load() {
    if (checkpoints_ == nullptr) {
      DG_ASSIGN_OR_RETURN(checkpoints_, CheckpointManager::Create(
                                            worker_.get(), options_.checkpoints, {.keep = 2}));
    }
    const absl::StatusOr<LoadedCheckpoint> loaded = checkpoints_->Load();
    if (loaded.ok()) {
      step_ = saved_ = loaded->step;
    } else if (absl::IsNotFound(loaded.status())) {
      for (int rank = 0; rank < options_.world_size; ++rank) {
        DG_RETURN_IF_ERROR(worker_->Call(rank, "begin", {}).status());
      }
      DG_RETURN_IF_ERROR(checkpoints_->Save(0));
    } else {
      return loaded.status();
    }
    return absl::StrCat("loaded ", step_);
  }

  absl::StatusOr<std::string> Check() {
    const absl::Time patience = absl::Now() + kPatience;
    for (std::string left; !(left = LeftOfWorker(*worker_)).empty(); Pause()) {
      if (absl::Now() > patience) return absl::StrCat("left", left);
    }
    return absl::StrCat("clean ", layer_.Checksum(), " ", OpenDescriptors().size(), " ",
                        ThreadNames().size(), " ", HeapBytes(), " ", ResidentBytes());
  }

  absl::StatusOr<std::string> End(bool with_all) {
    if (with_all) DG_RETURN_IF_ERROR(worker_->Shutdown());
    checkpoints_ = nullptr;
    part_ = nullptr;
    optimizer_ = nullptr;
    worker_ = nullptr;
    const absl::Time patience = absl::Now() + kPatience;
    for (std::string left; !(left = LeftOfProcess(descriptors_)).empty(); Pause()) {
      if (absl::Now() > patience) {
        return absl::InternalError(
            absl::StrCat("the worker is gone, and this process still has:", left));
      }
    }
    return "ended";
  }

  const ChaosWorkerOptions options_;
  Commands* const commands_;
  const ChaosLayer layer_;
  // What is in layer_ is what the job is at, not what a process begins with.
  std::atomic<bool> has_state_ = false;
  OperationWatch watch_;
  const size_t descriptors_;  // open before there was a worker

  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<CheckpointPart> part_;
  std::unique_ptr<CheckpointManager> checkpoints_;  // of worker 0
  int64_t step_ = 0;                                // so many are done
  int64_t saved_ = -1;
};

}  // namespace

absl::Duration ChaosBound(absl::Duration heartbeat_limit) {
  return absl::Seconds(10) + 1.2 * heartbeat_limit + absl::Seconds(10);
}

std::vector<std::string> ToArguments(const ChaosWorkerOptions& options) {
  return {
      absl::StrCat(options.rank), absl::StrCat(options.world_size),
      options.rendezvous,         options.host,
      options.checkpoints,        absl::StrCat(absl::ToInt64Milliseconds(options.heartbeat_limit))};
}

ChaosWorkerOptions ToChaosWorkerOptions(const std::vector<std::string>& arguments) {
  ChaosWorkerOptions options;
  int64_t milliseconds = 0;
  if (!absl::SimpleAtoi(arguments.at(0), &options.rank) ||
      !absl::SimpleAtoi(arguments.at(1), &options.world_size) ||
      !absl::SimpleAtoi(arguments.at(5), &milliseconds)) {
    std::abort();
  }
  options.rendezvous = arguments.at(2);
  options.host = arguments.at(3);
  options.checkpoints = arguments.at(4);
  options.heartbeat_limit = absl::Milliseconds(milliseconds);
  return options;
}

int RunChaosWorker(const ChaosWorkerOptions& options) {
  at::set_num_threads(1);
  // As in the soak: what grows shows sooner. And a hidden activation comes from the system each
  // time, which may refuse it.
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 64 << 10);
  Commands commands;
  ChaosWorker worker(options, &commands);
  const auto answer = [](const absl::StatusOr<std::string>& said) {
    Write(absl::StrCat("= ", said.ok() ? *said : said.status().ToString()));
    return said.ok();
  };
  if (!answer(worker.Join())) std::_Exit(1);
  for (std::string command = commands.Next(); !command.empty(); command = commands.Next()) {
    if (command == "go") {
      worker.Train();
      continue;
    }
    const bool is_done = answer(worker.Do(command));
    if (command == "end" || command == "close") std::_Exit(is_done ? 0 : 1);
  }
  std::_Exit(1);  // whoever commands is gone
}

}  // namespace distgrad
