// The state of one of libtorch's optimizers as tensors with names, as a checkpoint keeps them.
//
// The names are the paths in the state_dict() of PyTorch's optimizer, joined by dots:
//
//   param_groups.0.lr                       a number (float64, without dimensions)
//   param_groups.0.betas                    two numbers
//   param_groups.0.amsgrad                  a bool
//   state.2.step                            an integer: how many steps parameter 2 has taken
//   state.2.exp_avg                         of the shape and dtype of parameter 2
//   state.2.momentum_buffer                 the same; sparse where the gradients were
//
// where parameters count from 0 through all groups, in the order in which the optimizer got them. A
// parameter that has not taken a step has no state, but for those that Adagrad was made with. SGD,
// Adam, AdamW, Adagrad and RMSprop are known; LBFGS is not, whose state is of all parameters at
// once.
#ifndef DISTGRAD_CORE_OPTIM_OPTIMIZER_STATE_H_
#define DISTGRAD_CORE_OPTIM_OPTIMIZER_STATE_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace torch::optim {
class Optimizer;
}

namespace distgrad {

struct StateTensor {
  std::string name;
  at::Tensor tensor;
};

struct StateForm {
  // What parameters are called in the place of their numbers ("state.fc.weight.exp_avg"): one name
  // for each, in the order in which they count. Empty for numbers.
  std::vector<std::string> names;
  // Whether tensors are copied; else the state and the optimizer have the same ones, where they are
  // on the same device.
  bool copy = true;
  // Whether LoadState() says what it would say, and changes nothing.
  bool check_only = false;
};

// Reads the state, on the devices of the parameters. kUnimplemented for an unknown optimizer.
absl::StatusOr<std::vector<StateTensor>> ReadState(torch::optim::Optimizer& optimizer,
                                                   const StateForm& form = {});

// Takes the place of all that the optimizer had, on the devices of the parameters. Numbers may be
// of any type that holds them (PyTorch's `step` is a float). kInvalidArgument, and nothing is
// changed, says what is missing, what is unexpected, and what has another shape or dtype or makes
// no sense.
absl::Status LoadState(const std::vector<StateTensor>& state, torch::optim::Optimizer* optimizer,
                       const StateForm& form = {});

// What PyTorch calls the optimizer: "SGD", say, or "RMSprop". kUnimplemented as of ReadState().
absl::StatusOr<std::string> OptimizerName(const torch::optim::Optimizer& optimizer);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_OPTIM_OPTIMIZER_STATE_H_
