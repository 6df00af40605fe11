// --checkpoint, --every and --resume of the examples that train on workers.
#ifndef DISTGRAD_EXAMPLES_CHECKPOINTING_H_
#define DISTGRAD_EXAMPLES_CHECKPOINTING_H_

#include <cstdint>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "core/checkpoint/job/part.h"
#include "core/worker/worker.h"
#include "examples/options.h"

namespace distgrad {

// Has a part save options of the run, by their names, which have to be the same for a run to go on
// as it would have. Loading fails with the name of one that differs. On one worker of the job.
void SaveRunOptions(CheckpointValues options, CheckpointContents& contents);

// Fails if a run that is to begin, and not to go on, would save into a folder with checkpoints: it
// would remove them one by one. For the command line, before anything is started.
absl::Status CheckCheckpointFolder(const Options& options);

// Trains from and to checkpoints if the options say so: `resume` is told after how many steps the
// run goes on, 0 if there is no checkpoint; `run` gets what saves one, or nullptr. On the worker
// that leads.
absl::Status TrainFromCheckpoints(
    Worker* worker, const Options& options, absl::FunctionRef<absl::Status(int64_t steps)> resume,
    absl::FunctionRef<absl::Status(const std::function<absl::Status(int64_t steps)>& save)> run);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_CHECKPOINTING_H_
