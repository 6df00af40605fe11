// The messages between a pipeline's driver and its ranks: the plan of a step, and what belongs to
// one micro-batch.
#ifndef DISTGRAD_CORE_PIPELINE_STEP_PLAN_H_
#define DISTGRAD_CORE_PIPELINE_STEP_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/pipeline/schedule.h"

namespace distgrad {

// Functions of distgrad's own, each followed by the pipeline's name.
inline constexpr absl::string_view kBeginStep = "distgrad.pipeline.begin/";    // a plan; Begun
inline constexpr absl::string_view kTieStep = "distgrad.pipeline.tie/";        // Ties
inline constexpr absl::string_view kRunStep = "distgrad.pipeline.run/";        // a StepRef
inline constexpr absl::string_view kDeliver = "distgrad.pipeline.deliver/";    // a Parcel
inline constexpr absl::string_view kDescribe = "distgrad.pipeline.describe/";  // a StepRef
inline constexpr absl::string_view kEndStep = "distgrad.pipeline.end/";        // a StepEnd; Stepped
// The most steps of a rank that are in flight; its worker keeps as many that have ended, for those
// who ask about them.
inline constexpr size_t kMostStepsInFlight = 8;
inline constexpr size_t kMaxPipelineName = 900;  // with the longest of these it is a function's

// What one rank does in one step.
struct StepPlan {
  uint64_t step = 0;      // a random number, of this step alone
  uint64_t pipeline = 0;  // another: of the Pipeline that runs it
  // The step of the same Pipeline behind which this one comes on each rank, and without whose
  // success it fails. 0: it comes behind none.
  uint64_t follows = 0;
  int rank = 0;
  int micro_batches = 0;
  bool backward = true;
  bool has_targets = false;
  std::vector<int> rank_of_stage = {};
  std::vector<std::string> workers = {};  // by rank
  std::vector<Action> list = {};
  // The factor of each micro-batch's loss, by micro-batch.
  std::vector<double> weights = {};

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};

// Returns the stage by which a rank is known to others; -1 for a rank that has no stage.
int FirstStage(const std::vector<int>& rank_of_stage, int rank);

std::string EncodePlan(const StepPlan& plan);
// Returns kInvalidArgument unless the numbers fit together. Does not check that the list comes to
// its end.
absl::StatusOr<StepPlan> DecodePlan(absl::string_view bytes);

struct StepRef {
  uint64_t step = 0;
  int first_stage = 0;  // of those of the rank that is meant
};

std::string EncodeStepRef(const StepRef& ref);
absl::StatusOr<StepRef> DecodeStepRef(absl::string_view bytes);

// The names of the tied parameters that a rank has.
using TieNames = std::vector<std::string>;

// What a rank answers to a plan.
struct Begun {
  TieNames names = {};
  // Which averager (GradientAverager::number()) averages the rank's gradients over replicas of the
  // pipeline. 0: none does.
  uint64_t averager = 0;
};
std::string EncodeBegun(const Begun& begun);
absl::StatusOr<Begun> DecodeBegun(absl::string_view bytes);

// That a step has failed.
struct StepEnd {
  StepRef of = {};
  // What the rank has said that averages (Begun), if the step may have run there: it may have
  // averaged all the same where the averager is that one yet, and the stages do not know the step,
  // which they have forgotten, or are new ones. 0: it has not run.
  uint64_t averager = 0;
};
std::string EncodeEnd(const StepEnd& end);
absl::StatusOr<StepEnd> DecodeEnd(absl::string_view bytes);

// What a rank has to know of others: which of them have a tied parameter, of each that several
// have; and where this rank does not average over replicas, the worker of one that does.
struct Ties {
  StepRef to = {};
  std::map<std::string, std::vector<int>> ranks = {};  // by name; rising
  std::string averages = {};                           // none: empty
};
std::string EncodeTies(const Ties& ties);
absl::StatusOr<Ties> DecodeTies(absl::string_view bytes);

// Of the stages of a rank that have begun their optimizer's steps (Action::Kind::kStep): whether
// the function has ended well. A rank answers it when it begins no more of them.
using Stepped = std::map<int, bool>;
std::string EncodeStepped(const Stepped& stepped);
absl::StatusOr<Stepped> DecodeStepped(absl::string_view bytes);

// That a stage has something for one behind the next, which goes there straight.
struct StageSkip {
  int from = 0;  // stages
  int to = 0;
};

// Tensors for a stage and a micro-batch.
struct Parcel {
  enum class Kind : uint8_t {
    kActivation = 0,  // what the stage before has given; the first stage gets its part of the batch
    kGradient = 1,    // of what the stage has given
    kTarget = 2,      // for the loss
    // Of tied parameters: for the first stage of a rank, from the rank that stands for the
    // micro-batch; and without tensors, plus the number of ranks, that it has added them up.
    kTied = 3,
    kSkip = 4,          // what the stage gets from one before the stage before
    kSkipGradient = 5,  // of what the stage has given to one behind the next
  };

  StepRef to = {};
  Kind kind = Kind::kActivation;
  int stage = 0;
  int micro_batch = 0;
  std::vector<bool> wanted = {};  // by tensor: whether its gradient is
  int other = 0;                  // of a skip, or its gradient: the stage at its other end
  // Of activations: those of the micro-batch that end at this stage or a later one.
  std::vector<StageSkip> skips = {};
};

std::string EncodeParcel(const Parcel& parcel);
absl::StatusOr<Parcel> DecodeParcel(absl::string_view bytes);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STEP_PLAN_H_
