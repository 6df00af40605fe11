// The state of one of libtorch's optimizers in a file, by the names of its parameters; from
// Python's torch and back (docs/checkpoints.md, "Optimizers").
//
//   TensorMap parameters;  // as Python's named_parameters()
//   for (const auto& each : model->named_parameters()) parameters[each.key()] = each.value();
//   absl::Status saved = SaveOptimizer(optimizer, parameters, "optimizer.safetensors");
//   absl::Status loaded = LoadOptimizer("optimizer.safetensors", parameters, &optimizer);
#ifndef DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_
#define DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint/safetensors.h"

namespace torch::optim {
class Optimizer;
}

namespace distgrad {

// Writes the options of all groups and the state of all parameters, as SaveSafetensors() does, from
// where they are. The parameters may be more than the optimizer has. kInvalidArgument if one of the
// optimizer's has no name; kUnimplemented for other optimizers than SGD, Adam and AdamW. The
// optimizer must not run meanwhile.
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

// Takes the place of all that the optimizer had. The file has to be of the same optimizer, with the
// same parameters in each group; their order does not matter. kInvalidArgument, and nothing is
// changed, says what is missing, unexpected, or of another shape or dtype.
absl::Status LoadOptimizer(const std::string& path, const TensorMap& parameters,
                           torch::optim::Optimizer* optimizer);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_
