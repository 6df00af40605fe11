// Data parallel training across processes: each rank of a group has the same parameters and its
// own part of each batch, and their gradients are averaged while the backward runs, by all-reduces
// of buckets of them (what PyTorch's DistributedDataParallel leaves to its Reducer).
//
//   auto averager = GradientAverager::Create(group, *net);       // every rank
//   for (...) {
//     optimizer.zero_grad();
//     loss(net->forward(my_part)).backward();   // ends when .grad are the averages
//     optimizer.step();                         // the same on every rank
//   }
//   while (true) {                              // where some ranks have more batches than others
//     optimizer.zero_grad();
//     if (!(*averager)->Join().value()) break;  // in place of a backward, until all have run out
//     optimizer.step();
//   }
//
// or, for the parameters of one stage of a pipeline, after the backward of a context:
//
//   auto averager = GradientAverager::Create(group, parameters, {.in_backward = false});
//   absl::Status status = (*averager)->Average(*context.record());
//
// whose averages begin while it runs if AverageInBackward(*context.record()) came before it.
//
// docs/data_parallel.md ("Across processes") has what happens with unused, shared and frozen
// parameters, buffers, sparse gradients, and with errors.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GRADIENT_AVERAGER_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GRADIENT_AVERAGER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/parallel/process_group/named_tensor.h"   // IWYU pragma: export
#include "core/parallel/process_group/process_group.h"  // IWYU pragma: export

namespace torch::nn {
class Module;
}

namespace distgrad {

class ContextRecord;  // core/autograd/context_record.h

struct GradientAveragerOptions {
  // Gradients are averaged in buckets of so many bytes; the first of a backward is smaller, so
  // that it begins early. The same on all ranks.
  size_t bucket_bytes = size_t{25} << 20;
  size_t first_bucket_bytes = size_t{1} << 20;
  // Every backward that reaches a parameter averages. Without it only Average() does.
  bool in_backward = true;
  // Divide by the number of ranks that have not run out of input, rather than by all. On an
  // accelerator this makes the host wait for each backward.
  bool divide_by_active = false;
};

struct JoinOptions {
  // What the gradients hold of earlier averages is what the other ranks hold, too: for a step's
  // second average and those after it. Without it that is an error.
  bool keep_gradients = false;
};

// Thread-safe, as far as the order is the same on all ranks: averages come one after the other, and
// one that is asked for while a backward that gives .grad is being averaged is an error. So
// backwards that give .grad are not to run on two threads at a time, which is not found out: they
// are taken for one within the other, whose average is there when the last of them has ended, and
// not at all if that one fails. An error of the averager or its group is the result of all later
// calls; backward() throws it as a StatusError. No error of theirs is an average that this thread
// may not begin now (ProcessGroup::MayBegin()): nothing of it has begun, and it may be done again.
class GradientAverager {
 public:
  // Every rank calls it, with the same parameters and buffers but for their values: those of rank 0
  // are given to all. kInvalidArgument on every rank names the first rank and tensor that differ.
  // Each tensor counts once; frozen parameters are left out.
  static absl::StatusOr<std::unique_ptr<GradientAverager>> Create(
      std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
      std::vector<NamedTensor> buffers, GradientAveragerOptions options = {});
  // Makes an averager of all parameters and buffers of a module. It may change and end before the
  // averager.
  static absl::StatusOr<std::unique_ptr<GradientAverager>> Create(
      std::shared_ptr<ProcessGroup> group, const torch::nn::Module& module,
      GradientAveragerOptions options = {});

  // Takes the hooks off the parameters.
  ~GradientAverager();
  GradientAverager(const GradientAverager&) = delete;
  GradientAverager& operator=(const GradientAverager&) = delete;

  // Returns whether a tensor is one of the parameters whose gradients are averaged; not so one that
  // was frozen when the averager was made.
  bool Averages(const at::Tensor& tensor) const;

  // Has backward, as long as it lives, only add to .grad. The first backward after it averages all
  // that has been added up, or Average() does. Scopes nest.
  class NoSync {
   public:
    explicit NoSync(GradientAverager& averager);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    GradientAverager& averager_;
  };

  // Averages the .grad of all parameters, as a backward does, also those that no backward gave. For
  // a rank whose backward reaches none of the parameters, too: nothing else tells the others.
  absl::Status Average();

  // Averages the gradients that a context has for the parameters, once its backward is done on all
  // ranks' own workers; contexts need not be the same.
  absl::Status Average(ContextRecord& context);
  // Averages in the only backward of a context, and is called before it: averages begin as its
  // gradients come, and Average(context) ends them; nothing else changes the gradients until then.
  // Ranks need not do alike. One context at a time, and one averager for each: any other average,
  // and the context's release, gives this one up, and that is an error of all ranks if averages of
  // it have begun.
  absl::Status AverageInBackward(ContextRecord& context);

  // Takes part in the next average of the others, in place of a backward that reaches nothing: for
  // a rank that has run out of input while others have not. True: .grad are the averages; this rank
  // takes the same optimizer step with them as the others do, so that its optimizer keeps the same
  // state. It also resets .grad where they do. False: all ranks have called it, and have the
  // parameters and buffers of the lowest rank that was the last to go on; none takes a step.
  //
  // Returns kFailedPrecondition, and nothing has begun, if this rank has gradients that are still
  // to be averaged, or, without `keep_gradients`, those of the last average.
  absl::StatusOr<bool> Join(JoinOptions options = {});
  // Does the same for Average(context). The context is one without gradients for the parameters,
  // and gets the averages; with `keep_gradients` it may have those of earlier averages.
  absl::StatusOr<bool> Join(ContextRecord& context, JoinOptions options = {});

  // Fails the group (ProcessGroup::Fail()), as this rank cannot take the step that the others take.
  void Fail(const absl::Status& why);

  // A random number that no other averager has, of this process or of another one.
  uint64_t number() const;

 private:
  struct Parts;

  explicit GradientAverager(std::shared_ptr<Parts> parts);

  // Lives until the last hook or callback that runs has ended.
  const std::shared_ptr<Parts> parts_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GRADIENT_AVERAGER_H_
