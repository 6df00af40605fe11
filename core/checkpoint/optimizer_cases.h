// Optimizers that Python's torch has trained for some steps, as optimizer_python.py makes them.
#ifndef DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CASES_H_
#define DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CASES_H_

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/checkpoint/safetensors.h"

namespace distgrad {

struct OptimizerCase {
  std::string name;
  // Makes an optimizer of the same kind and groups, with other options and in another order.
  std::function<std::unique_ptr<torch::optim::Optimizer>(TensorMap& parameters)> make;
};

inline void PrintTo(const OptimizerCase& which, std::ostream* out) { *out << which.name; }

const std::vector<OptimizerCase>& OptimizerCases();

// Returns the parameters of that case at the time when its optimizer was saved.
TensorMap ParametersOf(const std::string& folder, const std::string& name);

// Expects that what LoadOptimizer() loads of a case of `folder` has all that its file has, saves it
// to `saved_folder` by SaveOptimizer(), and trains on, as Python has.
void ExpectGoesOnAsInPython(const OptimizerCase& which, const std::string& folder,
                            const std::string& saved_folder);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_OPTIMIZER_CASES_H_
