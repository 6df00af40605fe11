// The order in which the ranks of a pipeline do what is to be done for one batch: a list of actions
// for each rank, as data. A rank interprets its list, one action after the other; what comes from
// another rank it waits for.
//
//   absl::StatusOr<Schedule> schedule = OneForwardOneBackward(/*stages=*/4, /*micro_batches=*/8);
//   Schedule trains = WithSteps(*schedule);  // where each stage steps an optimizer of its own
//
// Or a list of one's own: fill in `lists` with what is computed, let AddTransfers() put in what is
// sent and received, and ask Check().
#ifndef DISTGRAD_CORE_PIPELINE_SCHEDULE_H_
#define DISTGRAD_CORE_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace distgrad {

struct Action {
  enum class Kind : uint8_t {
    kForward = 0,
    // All of the backward; or its two halves: the gradients of what the stage was given, for which
    // the stage before it waits, and those of its parameters, for which no stage does.
    kBackward = 1,
    kBackwardInput = 2,
    kBackwardWeight = 3,
    // Transfers to the rank of the next stage, from that of the one before. A send does not wait.
    kSendActivation = 4,
    kReceiveActivation = 5,
    // Transfers to the rank of the stage before, from that of the next one.
    kSendGradient = 6,
    kReceiveGradient = 7,
    // The optimizer's step of one stage, for no micro-batch.
    kStep = 8,
  };
  static constexpr int kKinds = 9;

  Kind kind = Kind::kForward;
  int stage = 0;
  int micro_batch = 0;  // 0 for a step

  friend bool operator==(const Action& a, const Action& b) {
    return a.kind == b.kind && a.stage == b.stage && a.micro_batch == b.micro_batch;
  }
};

// Returns "forward of stage 1, micro-batch 3".
std::string ToString(const Action& action);

// A stage belongs to one rank, which may have several. Stage s gives its outputs to stage s + 1.
// Ranks of one pipeline may be on one worker or on several.
struct Schedule {
  int micro_batches = 0;
  // Whether there is a backward; if not, the lists have forwards and their transfers alone.
  bool backward = true;
  std::vector<int> rank_of_stage = {};          // by stage
  std::vector<std::vector<Action>> lists = {};  // by rank
  // The most activations that each rank holds at once: of a stage and a micro-batch, from the
  // forward until its backward, or both halves, are done. Empty: nothing is promised.
  std::vector<int> max_activations = {};

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
  int ranks() const { return static_cast<int>(lists.size()); }
};

// ---- Generators. kInvalidArgument for numbers that are not positive, or a schedule of more than
// a million micro-batches of stages. A stage does the backward of its micro-batches, and so adds up
// their gradients, from the first to the last. With S ranks, M micro-batches, and the same times F
// and B for the forward and the backward on each rank:

// All forwards, and then all backwards. Each rank holds M activations, and is idle for
// (S - 1) (F + B).
absl::StatusOr<Schedule> GPipe(int stages, int micro_batches);

// The schedule with as few forwards before the first backward as keep all busy, then a backward for
// each forward (Narayanan et al., 2019). As idle as GPipe, but rank r holds min(M, S - r)
// activations.
absl::StatusOr<Schedule> OneForwardOneBackward(int stages, int micro_batches);

// The schedule of OneForwardOneBackward() with V stages on each rank: stage s is on rank s % ranks
// (Narayanan et al., 2021). Where M is a multiple of S, a rank is idle for (S - 1) (F + B) / V,
// with F and B of all of its stages; else at most as long as with M rounded up. Rank r holds min(M
// V, (V - 1) S + 2 (S - r - 1) + 1) activations, of one V-th of its work each.
absl::StatusOr<Schedule> InterleavedOneForwardOneBackward(int ranks, int stages_per_rank,
                                                          int micro_batches);

// 1F1B with backward in two halves I and W, the second of which fills what would be idle: ZB-H1 of
// Qi et al., 2023. Where M >= S a rank is idle for (S - 1) (F + I - W), if the three take the same
// time. Each rank holds min(M, S) activations. The first stage's backward stays whole, for nobody
// waits for its I.
absl::StatusOr<Schedule> ZeroBubbleH1(int stages, int micro_batches);

// ZeroBubbleH1() with twice as many forwards ahead: ZB-H2 of the same paper. A rank so has work
// while the first gradients come back, and what comes late holds up less. Where the next step is in
// flight (Pipeline::Start), the three parts take the same time, and M >= 2 S - 1, no rank is idle
// between the first step and the last. Of one step alone, where M >= 2 S - 1, a rank is idle for
// (S - 1) F, if F <= I <= 2 F and I / 2 <= W <= I, which is never longer than with ZeroBubbleH1();
// if the three take the same time, where M >= 2 (S - 1). With fewer micro-batches ZeroBubbleH1() is
// the better one if the three take the same time, and else Simulate() says which is. Each rank
// holds min(M, 2 S - 1) activations.
absl::StatusOr<Schedule> ZeroBubbleH2(int stages, int micro_batches);

// ZeroBubbleH1() is this with one forward ahead for each rank behind a rank, ZeroBubbleH2() with
// two. More fill the time of slower hand-overs, where steps are in flight behind each other
// (Pipeline::Start), so that a rank's next step fills what is idle at the end of this one. Each
// rank holds min(M, forwards_ahead (S - 1) + 1) activations.
absl::StatusOr<Schedule> ZeroBubble(int stages, int micro_batches, int forwards_ahead);

// The schedule without backward, for evaluation, with the stages where another has them.
absl::StatusOr<Schedule> ForwardOnly(std::vector<int> rank_of_stage, int micro_batches);

// Puts a send behind each action whose result another rank needs, and a receive before each action
// that needs one. The lists must have none, and name stages and ranks that exist; else does nothing
// about what they name.
void AddTransfers(Schedule* schedule);

// The same with the optimizer's step of each stage behind the list of its rank, where steps in
// flight (Pipeline::Start) train. Check() refuses two steps of a stage, and any without a backward.
// Has none of a stage whose rank does not exist.
[[nodiscard]] Schedule WithSteps(Schedule schedule);

// ---- What a schedule does.

// The time that an action takes, in any unit.
using ActionTime = absl::FunctionRef<double(const Action&)>;

struct Timeline {
  double end = 0;                           // when the last rank is through
  std::vector<double> busy;                 // the times of a rank's actions, by rank
  std::vector<std::vector<double>> starts;  // of each action of `lists`
  std::vector<int> max_activations;         // that are held at once, by rank
};

// Runs the lists as ranks do, and says when. kInvalidArgument names the rank, its action and what
// it waits for, if it waits for ever.
absl::StatusOr<Timeline> Simulate(const Schedule& schedule, ActionTime time);

// Whether the lists have each action once, after what it needs, on the rank of its stage; whether
// all of them come to their ends; and hold no more activations than is promised. kInvalidArgument
// names stage, action and what is wrong with it.
absl::Status Check(const Schedule& schedule);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_SCHEDULE_H_
