// The command line of the example that trains a transformer.
#ifndef DISTGRAD_EXAMPLES_TRANSFORMER_OPTIONS_H_
#define DISTGRAD_EXAMPLES_TRANSFORMER_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "core/pipeline/schedule.h"
#include "examples/options.h"
#include "examples/transformer_stage.h"

namespace distgrad {

// Those of its own.
struct TransformerOptions {
  int64_t steps = 1200;
  int stages = 2;                  // worker processes of each pipeline
  std::string schedule = "zb_h1";  // gpipe, 1f1b, interleaved, zb_h1, zb_h2
  int micro_batches = 8;
  int replicas = 1;        // of the pipeline
  TransformerShape shape;  // but for the tokens, which are the text's

  // The stages of the model, in order: the interleaved schedule has two on each worker.
  int model_stages() const { return schedule == "interleaved" ? 2 * stages : stages; }
};

// Its options go to `own`, which has to outlive the result.
CommandLine TransformerCommandLine(TransformerOptions* own);

// The schedule that the options name.
absl::StatusOr<Schedule> MakeSchedule(const TransformerOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRANSFORMER_OPTIONS_H_
