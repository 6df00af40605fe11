// One optimizer step on every worker of a job, from the gradients of a context.
//
//   absl::StatusOr<std::unique_ptr<Optimizer>> optimizer =
//       Optimizer::Create(worker.get(), std::make_unique<torch::optim::SGD>(my_parameters, 0.1));
//   ...                                          // on every worker, before the first step
//   absl::Status done = (*optimizer)->Step(context);      // on one of them
#ifndef DISTGRAD_CORE_WORKER_OPTIMIZER_H_
#define DISTGRAD_CORE_WORKER_OPTIMIZER_H_

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/checkpoint/safetensors.h"
#include "core/optim/optimizer_state.h"  // IWYU pragma: export
#include "core/worker/worker.h"

namespace torch::optim {
class Optimizer;
}

namespace distgrad {

class LocalOptimizer;  // core/optim/local_optimizer.h

// Every worker of the job has a part; that of one without parameters is an optimizer of none. Where
// only some workers have parts, SetWorkers() says which: a step does not pass over others by
// itself, since a part that was forgotten would never be trained, and nobody would hear of it.
//
// A local one has no worker, and no parts elsewhere: its steps, clips and learning rates are for
// its own parameters, run on the thread that asks for them, and take any context of this process.
// It is a LocalOptimizer (core/optim/local_optimizer.h) with the methods of this class, for the
// steps of stages in C and Rust.
//
// Thread-safe.
class Optimizer {
 public:
  // Makes `optimizer` this worker's part of the optimizer `name`, which lasts until Remove(), or as
  // long as the worker; that must outlive the result. kAlreadyExists if the worker has one of that
  // name; kInvalidArgument for a name of more than 900 bytes, or with a "::" in it. Without a
  // worker (null) it is a local one, whose name is for its errors alone.
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(
      Worker* worker, std::unique_ptr<torch::optim::Optimizer> optimizer,
      absl::string_view name = "");

  // Names the workers that have parts, this one among them, for the steps, learning rates and clips
  // that are asked for here, from the next one on; without it these are all workers of the job,
  // also those that join later, but for learning rates. kInvalidArgument, and nothing is changed,
  // if a name is there twice, or this worker's is not; kFailedPrecondition for a local one.
  absl::Status SetWorkers(std::vector<std::string> workers);

  // Steps the parts of all workers, each from its own gradients in the context, and waits. Returns
  // the first error, by worker, after which the others may have stepped: the same step is not to be
  // asked for again, then. kNotFound for a worker that has no part. This and the methods below fail
  // with kFailedPrecondition in a post-accumulate hook, which must not wait for a step; only
  // Remove() must not be called there.
  absl::Status Step(const Context& context);

  // Sets the learning rate of all parameters of all parts, from the next step on, for schedules.
  // Waits. Without SetWorkers() these are the workers that this one has heard of
  // (Worker::members()): where workers join, UpdateMembers() comes before it. kInvalidArgument if
  // it is negative or not finite; else it fails as a step does.
  absl::Status SetLearningRate(double learning_rate);

  // Clips the gradients of all parts by their global norm, before a step: the 2-norm of all of
  // them as one vector, in which a tied parameter of a pipeline (PipelineStage::tied) is there
  // once, however many copies of it there are. If it is more than `max_norm` they are scaled down
  // to that. Returns the norm as it was. kInvalidArgument if `max_norm` is negative or not a
  // number; kOutOfRange, and nothing is scaled, if the norm is not finite. After any
  // other error some workers may have scaled theirs: release the context.
  absl::StatusOr<double> ClipGradients(const Context& context, double max_norm);

  // Return this worker's part as tensors with names, as they are in PyTorch's state_dict()
  // (core/optim/optimizer_state.h); and load it from such, in place of all that the part had. Each
  // worker's part is its own: where all are read or loaded between the same two steps, they fit
  // together. kInvalidArgument, with nothing changed, says what is missing, unexpected, or of
  // another shape or dtype; kUnimplemented for optimizers that are not known there.
  absl::StatusOr<std::vector<StateTensor>> State() const;
  absl::Status LoadState(const std::vector<StateTensor>& state);

  // Saves this worker's part to a file, by the names of its parameters, and loads it from one:
  // SaveOptimizer() and LoadOptimizer() of core/checkpoint/optimizer_checkpoint.h say what has to
  // fit, and with what error it does not. A step waits for copies in memory while it is saved, and
  // for all of it while it is loaded. kNotFound once the part is removed, and for a file that is
  // not there.
  absl::Status Save(const TensorMap& parameters, const std::string& path) const;
  absl::Status Load(const std::string& path, const TensorMap& parameters);

  // Calls `use` with this worker's part, between two steps, and returns what that returns. Steps
  // wait meanwhile. kNotFound once the part is removed.
  absl::Status Use(absl::FunctionRef<absl::Status(torch::optim::Optimizer&)> use) const;

  // Takes this worker's part off: when this has returned no step touches its parameters, and the
  // worker may have another one of that name. Waits for a step that runs. Steps then fail with
  // kNotFound, also those that other workers ask for; so all workers remove theirs. Idempotent.
  void Remove();

 private:
  Optimizer(Worker* worker, absl::string_view name, std::shared_ptr<LocalOptimizer> local);

  // What all that may wait for a step begins with. kNotFound, with its name, once it is removed.
  absl::Status CheckMayAsk() const;
  // Does that for a local one, and returns the record of the context, which has to be valid.
  absl::StatusOr<ContextRecord*> RecordOf(const Context& context) const;
  // The 2-norms of all parts' gradients, by worker; and a factor for all of these.
  absl::StatusOr<std::vector<at::Tensor>> GradientNorms(const Context& context);
  absl::Status ScaleGradients(const Context& context, const at::Tensor& factor);
  // Calls a function of all parts, and returns their replies by worker. The context may be null.
  absl::StatusOr<std::vector<Message>> CallAll(const std::string& function, const Message& message,
                                               const Context* context);

  Worker* const worker_;  // null of a local one
  const std::string name_;
  const std::array<std::string, 4> functions_;  // what claims the name is the last that goes
  const std::shared_ptr<LocalOptimizer> local_;
  absl::Mutex mu_;
  std::vector<std::string> workers_ ABSL_GUARDED_BY(mu_);  // that have parts; empty: all
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_OPTIMIZER_H_
