// What a worker has of a job's checkpoint.
//
//   absl::StatusOr<std::unique_ptr<CheckpointPart>> part = CheckpointPart::Create(
//       worker.get(), {.tensors = parameters_by_name,
//                      .optimizers = {{"sgd", &my_optimizer}},
//                      .save_values = [&] { return CheckpointValues{{"epoch", "3"}}; }});
//   ...                                      // on every worker, before the first save or load
//
// checkpoint_manager.h saves and loads what all workers have.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_PART_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_PART_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/checkpoint/safetensors.h"

namespace torch::optim {
class Optimizer;
}

namespace distgrad {

class FileCalls;       // core/checkpoint/durable_file.h
class LocalOptimizer;  // core/optim/local_optimizer.h
class Optimizer;       // core/worker/optimizer.h
class Worker;          // core/worker/worker.h

// Small things that are no tensors, by name: the epoch, the place in the data, the state of a
// random generator. Any bytes.
using CheckpointValues = std::map<std::string, std::string>;

// What load_values gets.
struct LoadedValues {
  int64_t step = 0;
  CheckpointValues values;                          // of the worker of this name; else none
  std::map<std::string, CheckpointValues> workers;  // of all that saved, by their names
};

// Any of our optimizers, or libtorch's own. It has to outlive the part, unless it is shared.
class CheckpointOptimizer {
 public:
  using Use = absl::FunctionRef<absl::Status(torch::optim::Optimizer&)>;

  CheckpointOptimizer(torch::optim::Optimizer* optimizer);  // NOLINT: implicit
  CheckpointOptimizer(LocalOptimizer* optimizer);           // NOLINT: implicit
  CheckpointOptimizer(const Optimizer* optimizer);          // NOLINT: implicit
  explicit CheckpointOptimizer(std::shared_ptr<const Optimizer> optimizer);

  absl::Status operator()(Use use) const;

 private:
  std::function<absl::Status(Use)> use_;
};

struct CheckpointContents {
  // Parameters and buffers, by names that are theirs in the whole job. What several workers have
  // under one name is the same tensor (replicas), and one of them saves it.
  TensorMap tensors = {};
  // By names of letters, digits, '_' and '-'. Their parameters are among `tensors`. SGD, Adam,
  // AdamW, Adagrad and RMSprop.
  std::map<std::string, CheckpointOptimizer> optimizers = {};
  // Called on a thread of the worker's pool: for each save, and when this worker's tensors and
  // optimizers are loaded. They may throw, and call other workers, but not save or load, nor end
  // the part: that would wait for themselves. At most 1 MiB of values, whose names are UTF-8. With
  // their error the save or load fails: its origin (core/base/origin.h) is a handler of this
  // worker.
  std::function<absl::StatusOr<CheckpointValues>()> save_values = nullptr;
  std::function<absl::Status(const LoadedValues&)> load_values = nullptr;
  // For tests.
  FileCalls* file_calls = nullptr;
};

constexpr size_t kMaxCheckpointValues = 1 << 20;

// kInvalidArgument for the name of a value that no manifest can have: it is not UTF-8.
absl::Status CheckValueName(const std::string& name);

// Thread-safe.
class CheckpointPart {
 public:
  // Lets the managers of that name, of whichever worker of the job, save and load this. The worker
  // has to outlive the result. kAlreadyExists if it has a part of that name; kInvalidArgument for a
  // name of more than 900 bytes or with a "::" in it, and for tensors that no file can have, by
  // their dtype, say, or their name (which is UTF-8, and not "__metadata__"); kUnimplemented for an
  // optimizer of another kind; kFailedPrecondition for one that was removed. Saves and loads fail
  // with that, too, once an optimizer is removed before its part is.
  static absl::StatusOr<std::unique_ptr<CheckpointPart>> Create(Worker* worker,
                                                                CheckpointContents contents,
                                                                absl::string_view name = "");

  // Takes the part off. A save or load that runs fails; waits until it touches nothing here.
  ~CheckpointPart();
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;

 private:
  class Impl;
  explicit CheckpointPart(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  const std::shared_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_PART_H_
