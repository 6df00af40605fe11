// The work of one stage for one micro-batch: the forward, of which it keeps the graph, and the
// backward, whole or in two halves.
//
//   StageRun run;
//   std::vector<at::Tensor> outputs = run.Forward(function, inputs, wanted);
//   absl::StatusOr<std::vector<at::Tensor>> back = run.Backward(gradients, context);
//
// In halves the gradients of the inputs come first, and for them no more is computed than they
// need: an operator that has an input of each kind, as the product of an activation with a weight
// has, runs twice, and each time computes the gradients that are wanted then. That holds for
// libtorch's own operators. A function of the user's, and an operator with a hook, runs once, in
// the first half, and what it has for the weights waits for the second.
#ifndef DISTGRAD_CORE_PIPELINE_STAGE_RUN_H_
#define DISTGRAD_CORE_PIPELINE_STAGE_RUN_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/autograd/context_record.h"
#include "core/autograd/executor/source_node.h"
#include "core/pipeline/tied_gradients.h"

namespace distgrad {

using Tensors = std::vector<at::Tensor>;

// One stage's run for one micro-batch. For one thread at a time; after an error good for nothing.
class StageRun {
 public:
  StageRun();
  StageRun(StageRun&&) noexcept;
  StageRun& operator=(StageRun&&) noexcept;
  ~StageRun();

  // Calls `function` with grad mode on, and keeps the graph that it makes. `inputs` have no history
  // and get one where `wanted` says that their gradient is; these are of floating point. Returns
  // what the function does; throws what it throws.
  Tensors Forward(const std::function<Tensors(Tensors)>& function, Tensors inputs,
                  const std::vector<bool>& wanted);
  // Does what Forward() does, but keeps what is needed to call `function` once more in place of the
  // graph. The outputs have no history; `has_history` says which had one. Recompute() must come
  // before a backward.
  Tensors ForwardToRecompute(std::function<Tensors(Tensors)> function, Tensors inputs,
                             std::vector<bool> wanted, std::vector<bool>* has_history);
  // Returns the outputs once more. kFailedPrecondition if others have drawn from the generators, or
  // if the outputs have another number, size or type than before, or another one has a history.
  // Throws what the function throws.
  absl::StatusOr<Tensors> Recompute();

  // What is asked of each leaf that gets a gradient; an error ends the backward.
  using LeafCheck = std::function<absl::Status(const at::Tensor& leaf)>;

  // Returns the gradients of the inputs, from those of the outputs, one for each; undefined where
  // there is none. Those of leaves go to the context, but for those that `tied` watches.
  absl::StatusOr<Tensors> Backward(Tensors gradients, ContextRecord& context,
                                   TiedGradients* tied = nullptr, const LeafCheck& check = nullptr);

  // Do what Backward() does, in two halves. The second needs none of what the first alone has used,
  // which is freed.
  absl::StatusOr<Tensors> BackwardInput(Tensors gradients);
  absl::Status BackwardWeight(ContextRecord& context, TiedGradients* tied = nullptr,
                              const LeafCheck& check = nullptr);

 private:
  using Node = torch::autograd::Node;

  // Where the second half begins: a gradient that the first has come to, and where it goes.
  struct Entry {
    torch::autograd::Edge edge;
    at::Tensor gradient;
  };
  class InputNode;
  class EntryNode;
  class CaptureNode;
  class CaptureHook;
  class Sink;
  struct Split;
  struct Again;

  absl::Status CheckGradients(const Tensors& gradients) const;
  // Where the gradients of leaves go. Null where none may come.
  struct Leaves {
    ContextRecord* context = nullptr;
    TiedGradients* tied = nullptr;
    const LeafCheck* check = nullptr;
  };
  absl::StatusOr<Tensors> Run(Tensors gradients, Leaves leaves, bool retain_graph);
  absl::StatusOr<Tensors> Execute(std::shared_ptr<Node> root, Tensors gradients,
                                  absl::Span<const bool> reached, Leaves leaves, bool retain_graph);
  std::vector<Split> SplitGraph();

  std::shared_ptr<SourceNode> source_;              // of the outputs
  std::vector<std::shared_ptr<InputNode>> inputs_;  // null where no gradient is wanted
  std::vector<Entry> entries_;
  std::unique_ptr<Again> again_;  // of one that is to be recomputed
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STAGE_RUN_H_
