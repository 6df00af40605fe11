// The model, the schedule and the batch of a pipeline that an action runs.
#ifndef DISTGRAD_TESTS_SIMULATION_PIPELINE_MODEL_H_
#define DISTGRAD_TESTS_SIMULATION_PIPELINE_MODEL_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/pipeline/schedule.h"
#include "tests/simulation/plan.h"

namespace distgrad::simulation {

// Constant after construction.
struct PipelineModel {
  PipelineModel(const Action& action, int workers);

  // The functions of a stage, and of the last one.
  std::vector<at::Tensor> Compute(int stage, const std::vector<at::Tensor>& in) const;
  at::Tensor Loss(const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& target) const;

  std::string name;
  bool fails = false;  // its last stage does
  int in_flight = 1;   // steps, that are started one behind the other
  distgrad::Schedule schedule;
  std::vector<int> worker_of_rank;
  std::vector<at::Tensor> weights;  // by stage
  at::Tensor input, target;
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_PIPELINE_MODEL_H_
