// The model, the schedule and the batch of a pipeline that an action runs.
#ifndef DISTGRAD_TESTS_SIMULATION_PIPELINE_MODEL_H_
#define DISTGRAD_TESTS_SIMULATION_PIPELINE_MODEL_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/ids.h"
#include "core/pipeline/schedule.h"
#include "tests/simulation/plan.h"

namespace distgrad::simulation {

// Constant after construction, but for what is said.
struct PipelineModel {
  PipelineModel(const Action& action, int workers);

  // The functions of a stage, and of the last one.
  std::vector<at::Tensor> Compute(int stage, const std::vector<at::Tensor>& in) const;
  at::Tensor Loss(const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& target) const;

  std::string name;
  bool fails = false;  // its last stage does, the first time
  int in_flight = 1;   // steps, that are started one behind the other; several have kStep
  // Whether other workers drive the same stages at the same time, and some of them by another
  // schedule, which has a rank for each stage.
  bool has_rivals = false, divides_otherwise = false;
  distgrad::Schedule schedule;
  std::vector<int> worker_of_rank;
  std::vector<at::Tensor> weights;  // by stage
  at::Tensor input, target;

  std::atomic<bool> has_run{false}, has_failed{false};
  absl::Mutex mu;
  // The stages that have stepped, by the context of the step.
  std::map<ContextId, std::set<int>> stepped ABSL_GUARDED_BY(mu);
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_PIPELINE_MODEL_H_
