// The state of one of libtorch's optimizers in a file, by the names of its parameters; from
// Python's torch and back (docs/checkpoints.md, "Optimizers").
//
//   TensorMap parameters;  // as Python's named_parameters()
//   for (const auto& each : model->named_parameters()) parameters[each.key()] = each.value();
//   absl::Status saved = SaveOptimizer(optimizer, parameters, "optimizer.safetensors");
//   absl::Status loaded = LoadOptimizer("optimizer.safetensors", parameters, &optimizer);
#ifndef DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_
#define DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint/safetensors.h"
#include "core/optim/optimizer_state.h"

namespace torch::optim {
class Optimizer;
}

namespace distgrad {

// Writes the options of all groups and the state of all parameters, as SaveSafetensors() does, from
// where they are. The parameters may be more than the optimizer has. kInvalidArgument if one of the
// optimizer's has no name, and for a state that a load would refuse; kUnimplemented for optimizers
// that core/optim/optimizer_state.h does not know. The optimizer must not run meanwhile.
absl::Status SaveOptimizer(torch::optim::Optimizer& optimizer, const TensorMap& parameters,
                           const std::string& path);

// What SaveOptimizer() gives to SaveSafetensors(), with copies of the tensors, so that the
// optimizer may run while they are written. Errors as of SaveOptimizer().
struct OptimizerSnapshot {
  TensorMap tensors;
  std::map<std::string, std::string> metadata;
};
absl::StatusOr<OptimizerSnapshot> SnapshotOptimizer(torch::optim::Optimizer& optimizer,
                                                    const TensorMap& parameters);

// Loads a state, in place of all that the optimizer had. The file has to be of the same optimizer,
// with the same parameters in each group; their order does not matter. kInvalidArgument, and
// nothing is changed, says what is missing, unexpected, or of another shape or dtype.
absl::Status LoadOptimizer(const std::string& path, const TensorMap& parameters,
                           torch::optim::Optimizer* optimizer);

// The functions for an optimizer whose state is spread over files of several workers
// (core/checkpoint/job):

// Returns the names that its parameters go by, by groups; each once.
absl::StatusOr<std::vector<std::string>> OptimizerParameters(
    const torch::optim::Optimizer& optimizer, const TensorMap& parameters);

// Does what SnapshotOptimizer() does, with the optimizer's own tensors, and as if it had none but
// these of its parameters.
absl::StatusOr<OptimizerSnapshot> ViewOptimizer(torch::optim::Optimizer& optimizer,
                                                const TensorMap& parameters,
                                                const std::set<std::string>& only);

// What an optimizer needs of several files.
struct OptimizerParts {
  // Parameters that no file has. Where there are any, there is no state.
  std::vector<std::string> missing;
  // The state for LoadState().
  std::vector<StateTensor> state;
  StateForm form;
};
// Finds the parameters, which may be some of those of the files, in whichever file has them, and
// reads their state, by the number of the file. kInvalidArgument if the files do not fit: if they
// are of another optimizer, say, or parameters of one group here had different options there, or
// LoadState() would fail.
absl::StatusOr<OptimizerParts> CollectOptimizer(
    const std::vector<const SafetensorsFile*>& files, const TensorMap& parameters,
    torch::optim::Optimizer& optimizer,
    const std::function<absl::StatusOr<at::Tensor>(size_t file, const std::string& name)>& read);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_
