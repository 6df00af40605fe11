// What a GradientAverager is made of. Private to its folder.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GRADIENT_AVERAGER_IMPL_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GRADIENT_AVERAGER_IMPL_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/context_record.h"
#include "core/parallel/process_group/averaging_round.h"
#include "core/parallel/process_group/gradient_averager.h"

namespace distgrad {

// Thread-safe. The hooks of the parameters and the callbacks of a backward know of it as long as it
// lives.
class GradientAverager::Impl : public std::enable_shared_from_this<Impl> {
 public:
  // `parameters` are distinct and in the order of the module.
  Impl(std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
       std::vector<NamedTensor> buffers, const AveragerOptions& options);

  // All ranks have the same; then those of rank 0.
  absl::Status Agree();
  absl::Status BroadcastState(int root);

  void AddHooks();
  void RemoveHooks();
  void OnAveragerEnd();

  absl::Status Average();
  absl::Status Average(ContextRecord& context);
  absl::Status AverageInBackward(ContextRecord& context);
  absl::StatusOr<bool> Join(const JoinOptions& options);
  absl::StatusOr<bool> Join(ContextRecord& context, const JoinOptions& options);
  void AddToNoSync(int amount);

 private:
  class Hook;
  class Ending;
  // A gradient and its version, when it was seen last.
  using Seen = std::pair<const c10::TensorImpl*, int64_t>;
  static Seen SeenOf(const at::Tensor& gradient);
  class Following;
  // A context whose gradients are averaged as they come.
  struct Followed {
    Following* following;  // whose end comes here first
    AveragingRound round;
    std::vector<bool> touched;    // by parameter
    std::vector<size_t> missing;  // gradients, by bucket
  };

  // From the hooks and callbacks of a backward; they throw StatusError.
  void OnGradient(size_t parameter, const at::Tensor& tensor);
  void OnBackwardEnd();
  void OnNestedBackwardEnd();
  void OnBackwardAbandoned();
  // From a context: of its passes, likewise, and of its release.
  void OnContextGradient(const Following& following, const ContextRecord& context,
                         const at::Tensor& leaf);
  void OnContextEnd(const Following& following);

  std::string Describe() const;
  absl::Status CheckFrozen() const;
  // The .grad of a parameter. One that has been reset is no longer touched.
  at::Tensor GradientOf(size_t parameter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those of all parameters, between backwards.
  std::vector<at::Tensor> Gradients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those in a bucket, by parameter. While the backward runs, other threads of it may be changing
  // those that are in none that is complete.
  std::vector<at::Tensor> GradientsIn(size_t bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::vector<at::Tensor>> GradientsOf(const ContextRecord& context) const;
  std::vector<size_t> AllMissing() const;
  bool Follows(const ContextRecord& context) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void Unfollow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Before any other average. An error once averages of it have begun.
  absl::Status GiveUpFollowed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The group's error, if averages of it have begun.
  void FailFollowed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailRound(const char* what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OpenRound(bool active = true) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Has libtorch tell of the end of the backward that this thread runs; false if it runs none.
  bool AwaitBackwardEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Averages .grad with what has begun.
  absl::Status FinishRound() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Averages the gradients of a context with what has begun.
  absl::Status Finish(ContextRecord& context, AveragingRound& round,
                      const std::vector<at::Tensor>& gradients, const std::vector<bool>& touched)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Guarded(absl::FunctionRef<absl::Status()> body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After each round: who goes on, and the buffers of the first of these.
  absl::Status FollowActive(AveragingRound& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether any rank is active in a round whose first bucket has begun. If none is, all get the
  // parameters and buffers of the lowest one that was so last.
  absl::StatusOr<bool> AnyActive(AveragingRound& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckMayJoin(const JoinOptions& options) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  int LowestActive() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const std::shared_ptr<ProcessGroup> group_;
  const AveragerOptions options_;
  std::vector<NamedTensor> frozen_, buffers_;
  const AveragingPlan plan_;  // from the last parameter to the first
  absl::flat_hash_map<const c10::TensorImpl*, size_t> numbers_;  // of its parameters
  std::vector<const Hook*> hooks_;

  // Guarded by mu_, which is held while torch copies and while ranks are waited for: rounds come
  // one after the other.
  absl::Mutex mu_;
  int no_sync_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<bool> touched_ ABSL_GUARDED_BY(mu_);      // since they were last averaged
  std::vector<at::Tensor> spare_ ABSL_GUARDED_BY(mu_);  // buffers of buckets, for the next round
  at::Tensor active_ ABSL_GUARDED_BY(mu_);  // by rank, in the last round that had any such
  // Of the backward that runs.
  std::optional<AveragingRound> round_ ABSL_GUARDED_BY(mu_);
  std::vector<int> tasks_ ABSL_GUARDED_BY(mu_);  // libtorch's numbers of it and of those in it
  // By parameter. Between two backwards: what the last average has left.
  std::vector<Seen> seen_ ABSL_GUARDED_BY(mu_);
  std::vector<size_t> missing_ ABSL_GUARDED_BY(mu_);  // gradients, by bucket
  std::optional<Followed> followed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GRADIENT_AVERAGER_IMPL_H_
