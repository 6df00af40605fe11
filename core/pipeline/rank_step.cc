// Follows a list of actions, and keeps what one action has for another.
#include "core/pipeline/rank_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstddef>
#include <new>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/base/blocking.h"
#include "core/base/exception.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using Kind = Action::Kind;

Tensors Detached(Tensors tensors) {
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) tensor = tensor.detach();
  }
  return tensors;
}

// Names the tensors of a parcel.
const char* NameOf(Parcel::Kind kind) {
  switch (kind) {
    case Parcel::Kind::kActivation:
      return "the activations";
    case Parcel::Kind::kGradient:
      return "the gradients";
    case Parcel::Kind::kTarget:
      return "the targets";
    case Parcel::Kind::kTied:
      return "the gradients of tied parameters";
    case Parcel::Kind::kSkip:
      return "the activations that skip stages";
    case Parcel::Kind::kSkipGradient:
      return "the gradients of what has skipped stages";
  }
  return "parcels of an unknown kind";
}

// Those of tied parameters belong to no micro-batch: the number is that of the rank that sends
// them.
std::string OfMicroBatch(Parcel::Kind kind, int micro_batch) {
  return kind == Parcel::Kind::kTied ? "" : absl::StrCat(" of micro-batch ", micro_batch);
}

absl::Status CheckCount(absl::string_view function, absl::string_view what, size_t count,
                        std::optional<int> expected) {
  if (!expected.has_value() || count == static_cast<size_t>(*expected)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the stage's ", function, " takes ", *expected, " ", what, ", and is given ",
                   count, " (PipelineStage::", what, "; in C ", what, " of dg_pipeline_stage)"));
}

absl::Status CheckGiven(const std::pair<WriteCheck, WriteCheck>& given) {
  DG_RETURN_IF_ERROR(given.first.Check("it must not write to what it is given, and input"));
  return given.second.Check("it must not write to what it is given, and target");
}

bool IsBackward(const Action& action) {
  return action.kind == Kind::kBackward || action.kind == Kind::kBackwardInput ||
         action.kind == Kind::kBackwardWeight;
}

// The place of the last backward in a list; its size if there is none.
size_t LastBackward(const std::vector<Action>& list) {
  const auto last = std::find_if(list.rbegin(), list.rend(), IsBackward);
  return last == list.rend() ? list.size() : static_cast<size_t>(list.rend() - last) - 1;
}

// The place of the first step in a list; its size if there is none.
size_t FirstStep(const std::vector<Action>& list) {
  const auto first = std::find_if(list.begin(), list.end(),
                                  [](const Action& action) { return action.kind == Kind::kStep; });
  return static_cast<size_t>(first - list.begin());
}

// A number that is another one, but for rare chance, where the values are others: on a CPU of all
// bytes; on other devices, where it stays, the sum. Undefined for what is not dense.
at::Tensor Fingerprint(const at::Tensor& output) {
  if (!output.defined() || output.layout() != at::kStrided || output.is_quantized() ||
      output._is_zerotensor() || output.is_meta()) {
    return {};
  }
  const at::AutoGradMode grad_mode(false);
  at::Tensor values = output.detach().resolve_conj().resolve_neg();
  if (values.is_cpu()) {
    values = values.contiguous();
    const auto hash = static_cast<int64_t>(absl::HashOf(
        absl::string_view(static_cast<const char*>(values.data_ptr()), values.nbytes())));
    return at::scalar_tensor(hash, at::TensorOptions().dtype(at::kLong));
  }
  if (values.is_complex()) values = at::view_as_real(values);
  if (!values.is_floating_point()) return values.sum(at::kLong);
  return values.sum(at::kDouble).view(at::kLong);  // its bits: also where it is not a number
}

Tensors Fingerprints(const Tensors& outputs) {
  Tensors fingerprints;
  for (const at::Tensor& output : outputs) fingerprints.push_back(Fingerprint(output));
  return fingerprints;
}

// Takes an entry out of a map.
template <typename Map>
absl::StatusOr<typename Map::mapped_type> Take(Map& map, const typename Map::key_type& key) {
  const auto found = map.find(key);
  if (found == map.end()) {
    return absl::FailedPreconditionError("what it needs is not there: the list has a wrong order");
  }
  typename Map::mapped_type value = std::move(found->second);
  map.erase(found);
  return value;
}

}  // namespace

void FailAverages(GradientAverager& averager, const std::string& pipeline, const Worker& worker,
                  const absl::Status& why) {
  const BlockingScope blocking;  // it tells the other replicas, in the job's store
  try {
    averager.Fail(Annotate(why, absl::StrCat("a step of pipeline '", pipeline, "' with worker '",
                                             worker.name(), "' failed")));
  } catch (const std::bad_alloc&) {
    averager.Fail(why);
  }
}

RankStep::RankStep(Common common, StepPlan plan, Request& request,
                   std::shared_ptr<RankStep> follows)
    : worker_(common.worker),
      pipeline_(std::move(common.pipeline)),
      stages_(*common.stages),
      on_action_(*common.on_action),
      averager_(common.averager),
      plan_(std::move(plan)),
      driver_(request.from),
      begin_deadline_(request.deadline),
      follows_(std::move(follows)),
      context_(std::move(request.context)) {}

std::shared_ptr<RankStep> RankStep::Create(Common common, StepPlan plan, Request& request,
                                           std::shared_ptr<RankStep> follows) {
  auto step =
      std::make_shared<RankStep>(std::move(common), std::move(plan), request, std::move(follows));
  step->cancellation_->OnCancel([weak = std::weak_ptr<RankStep>(step)] {
    if (const auto alive = weak.lock()) alive->OnStop();
  });
  return step;
}

Tensors RankStep::TiedOf(const std::string& name) const {
  Tensors tied;
  for (const auto& [number, stage] : stages_) {
    const auto found = stage.tied.find(name);
    if (!HasStage(number) || found == stage.tied.end()) continue;
    const bool is_new = std::none_of(tied.begin(), tied.end(), [&](const at::Tensor& other) {
      return other.is_same(found->second);
    });
    if (is_new) tied.push_back(found->second);
  }
  return tied;
}

TieNames RankStep::tie_names() const {
  std::set<std::string> names;
  for (const auto& [number, stage] : stages_) {
    if (!HasStage(number) || !plan_.backward) continue;
    for (const auto& [name, parameter] : stage.tied) names.insert(name);
  }
  return {names.begin(), names.end()};
}

std::set<int> RankStep::RanksWithTied(const std::string& name, const at::Tensor& parameter) const {
  std::set<int> ranks;
  for (const auto& [number, stage] : stages_) {
    const auto found = stage.tied.find(name);
    if (number >= plan_.stages() || found == stage.tied.end()) continue;
    const int rank = plan_.rank_of_stage[number];
    // The worker may have stages that this pipeline has elsewhere.
    if (plan_.workers[rank] == plan_.workers[plan_.rank] && found->second.is_same(parameter)) {
      ranks.insert(rank);
    }
  }
  return ranks;
}

absl::Status RankStep::CheckShares() const {
  const std::string& worker = plan_.workers[plan_.rank];
  const bool averages = averager_ != nullptr;
  if (!plan_.backward || (!averages && tie_names().empty())) return absl::OkStatus();
  const auto ranks = std::count(plan_.workers.begin(), plan_.workers.end(), worker);
  if (averages && ranks > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker '", worker, "' has ", ranks,
                     " ranks of the schedule, and averages over replicas "
                     "(PipelineStagesOptions::averager; in C dg_pipeline_stages_options.averager), "
                     "which one alone can have"));
  }
  const auto steps = plan_.list.begin() + static_cast<std::ptrdiff_t>(FirstStep(plan_.list));
  // For tied parameters a rank waits until the others have gone backward, and what it has yet to
  // send then is what they wait for. An average waits for the same rank of other replicas alone.
  const bool ties = !tie_names().empty();
  const auto late = std::find_if(steps, plan_.list.end(), [ties](const Action& action) {
    return IsBackward(action) || (ties && action.kind != Kind::kStep);
  });
  if (late == plan_.list.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the list of worker '", worker, "' has the ", ToString(*steps), " before the ",
      ToString(*late), ", and ",
      ties
          ? "the gradients of tied parameters are added up between all other actions and the first "
            "step"
          : "averages over replicas come between all backwards and the first step"));
}

absl::Status RankStep::CheckSkips() const {
  for (const auto& [number, stage] : stages_) {
    if (!HasStage(number)) continue;
    for (const int to : stage.skips) {
      if (to > number + 1 && to < plan_.stages()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", number, " on worker '", worker_->name(), "' skips to stage ", to,
                       " of ", plan_.stages(),
                       ", and can skip to those behind the next one (PipelineStage::skips; in C "
                       "skips of dg_pipeline_stage)"));
    }
  }
  return absl::OkStatus();
}

absl::Status RankStep::CheckSteps() const {
  bool steps = false;
  for (const Action& action : plan_.list) {
    if (action.kind != Kind::kStep) continue;
    steps = true;
    if (stages_.at(action.stage).step != nullptr) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the schedule has a ", ToString(action), ", and that stage on worker '", worker_->name(),
        "' has no function for it (PipelineStage::step; in C step of dg_pipeline_stage)"));
  }
  if (!steps || plan_.follows == 0) return absl::OkStatus();
  for (const std::string& name : tie_names()) {
    for (const at::Tensor& parameter : TiedOf(name)) {
      if (RanksWithTied(name, parameter).size() == 1) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("several ranks of worker '", worker_->name(),
                       "' have one tensor for the tied parameter '", name,
                       "', so that one of them would read it in a step in flight while another one "
                       "steps it: give each rank a copy, or wait for each step before the next one "
                       "is started"));
    }
  }
  return absl::OkStatus();
}

absl::Status RankStep::Tie(Ties ties) {
  for (const auto& [name, ranks] : ties.ranks) {
    if (!ranks.empty() && ranks.back() >= static_cast<int>(plan_.workers.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", ranks.back(), " has '", name, "', and there is no such rank"));
    }
  }
  absl::MutexLock lock(&mu_);
  ties_ = std::move(ties);
  return absl::OkStatus();
}

bool RankStep::Advance(Event event) {
  const auto go_to = [this](State next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    state_ = next;
    is_over_ = next == State::kOver;
    return true;
  };
  switch (state_) {
    case State::kBegun:
      if (event == Event::kEndOfList) return false;
      // One that was stopped before is not started any more.
      return go_to(event == Event::kStart ? State::kRunning : State::kOver);
    case State::kRunning:
      if (event == Event::kStart) return false;
      return go_to(event == Event::kStop ? State::kStopping : State::kOver);
    case State::kStopping:
      // Whoever waits for the step has heard of its end; now its thread has come there, too.
      if (event != Event::kEndOfList) return false;
      return go_to(State::kOver);
    case State::kOver:
      return false;
  }
  return false;
}

bool RankStep::MayBeStarted() const {
  return !begin_deadline_.Passed() && !(context_.valid() && context_.record()->released());
}

bool RankStep::HoldsStages() const {
  absl::MutexLock lock(&mu_);
  return state_ == State::kRunning || (state_ == State::kBegun && MayBeStarted());
}

bool RankStep::StopIfAbandoned() {
  {
    absl::MutexLock lock(&mu_);
    if (state_ != State::kBegun || MayBeStarted()) return false;
  }
  Stop(absl::FailedPreconditionError(absl::StrCat(
      "a step of pipeline '", pipeline_, "' that was begun on worker '", worker_->name(),
      "' was not started before its deadline, or before its context was released, as with the loss "
      "of its driver")));
  return true;
}

bool RankStep::busy() const {
  absl::MutexLock lock(&mu_);
  return state_ == State::kRunning || state_ == State::kStopping;
}

std::string RankStep::Describe() const {
  std::shared_ptr<RankStep> before;
  {
    absl::MutexLock lock(&mu_);
    if (state_ == State::kBegun) return "has not begun";
    if (ran_) {
      if (phase_ != nullptr) return phase_;
      if (action_ == nullptr) return "is at the end of its list";
      return absl::StrCat(waits_ ? "waits for others in the " : "is in the ", ToString(*action_));
    }
    before = follows_;
  }
  if (before == nullptr || before->is_over_) return "waits for a function of the step before";
  return absl::StrCat("waits for the step before, which ", before->Describe());
}

absl::Status RankStep::CheckEndedWell() const {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(error_);
  if (ended_well_) return absl::OkStatus();
  DG_RETURN_IF_ERROR(cancellation_->why());
  return absl::FailedPreconditionError("it has not ended");
}

bool RankStep::SharesStagesWith(const RankStep& other) const {
  for (int s = 0; s < plan_.stages(); ++s) {
    if (HasStage(s) && other.HasStage(s)) return true;
  }
  return false;
}

bool RankStep::HasSameStagesAs(const RankStep& other) const {
  for (int s = 0; s < std::max(plan_.stages(), other.plan_.stages()); ++s) {
    if (HasStage(s) != other.HasStage(s)) return false;
  }
  return true;
}

absl::StatusOr<Future<Message>> RankStep::Start(const Request& request) {
  Promise<Message> promise;  // there may be no memory for it
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(cancellation_->why());
  if (!Advance(Event::kStart)) return absl::FailedPreconditionError("the step runs already");
  deadline_ = request.deadline;
  modes_ = CallModes::Current();
  return promise_.emplace(std::move(promise)).future();
}

void RankStep::OnStop() {
  std::optional<Promise<Message>> promise;
  DeliveredParcels delivered;  // these end outside the lock
  Context context;
  std::shared_ptr<RankStep> follows;
  {
    absl::MutexLock lock(&mu_);
    const bool never_runs = state_ == State::kBegun;
    if (!Advance(Event::kStop)) return;
    promise.swap(promise_);
    // What one has that runs ends with its list, on its thread, or in End(): this may be the one
    // that reads messages, as where another rank's error comes, and what was delivered may be
    // large.
    if (never_runs) {
      delivered.swap(delivered_);
      context = std::move(context_);
      follows.swap(follows_);
    }
  }
  if (promise.has_value()) promise->Set(cancellation_->why());
}

Future<Message> RankStep::End(const absl::Status& why) {
  Stop(why);
  OnStop();  // another thread may have begun to stop it, and not have come so far
  bool ran = false, runs = false;
  DeliveredParcels delivered;  // ends outside the lock
  {
    absl::MutexLock lock(&mu_);
    error_.Update(why);
    ran = ran_;
    runs = state_ == State::kStopping;
    // Its thread may hang in the function of an earlier step.
    if (over()) delivered.swap(delivered_);
  }
  // Its list may have ended well before, or end well at this moment: nothing else tells the
  // replicas then. What has stopped one that runs is the cause; what came later is not.
  if (ran) FailAverages(runs ? cancellation_->why() : why);
  absl::MutexLock lock(&mu_);
  if (steps_) return ends_.emplace_back().future();
  return Future<Message>::Of(Message{EncodeStepped(stepped_), {}});
}

void RankStep::OnStepped(int stage, const absl::Status& status) {
  std::vector<Promise<Message>> ends;
  Message stepped;
  {
    absl::MutexLock lock(&mu_);
    steps_ = false;
    stepped_[stage] = status.ok();
    ends.swap(ends_);
    if (!ends.empty()) stepped.payload = EncodeStepped(stepped_);
  }
  for (Promise<Message>& end : ends) end.Set(stepped);
}

absl::Status RankStep::Deliver(const Parcel& parcel, Tensors& tensors) {
  // Of tied parameters each rank sends gradients, and, behind those of all, that it has added them.
  const int count = parcel.kind == Parcel::Kind::kTied ? 2 * static_cast<int>(plan_.workers.size())
                                                       : plan_.micro_batches;
  const bool fits = HasStage(parcel.stage) && parcel.micro_batch < count &&
                    parcel.other < plan_.stages() &&
                    (parcel.wanted.empty() || parcel.wanted.size() == tensors.size());
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(parcel.kind), OfMicroBatch(parcel.kind, parcel.micro_batch),
                     " for stage ", parcel.stage, " are not this rank's, or other tensors"));
  }
  absl::MutexLock lock(&mu_);
  // Who hears of it so should hear of the cause.
  DG_RETURN_IF_ERROR(cancellation_->why());
  DG_RETURN_IF_ERROR(error_);
  if (over()) return absl::FailedPreconditionError("the step is over");
  const ParcelKey key{parcel.kind, parcel.stage, parcel.micro_batch, parcel.other};
  const auto [delivered, is_new] =
      delivered_.try_emplace(key, Delivered{{}, parcel.wanted, parcel.skips});
  if (!is_new) {
    return absl::AlreadyExistsError(
        absl::StrCat(NameOf(parcel.kind), OfMicroBatch(parcel.kind, parcel.micro_batch),
                     " for stage ", parcel.stage, " were there already"));
  }
  delivered->second->tensors = std::move(tensors);
  return absl::OkStatus();
}

absl::StatusOr<RankStep::Delivered> RankStep::Await(Parcel::Kind kind, Cell cell, int other) {
  const ParcelKey key{kind, cell.first, cell.second, other};
  absl::MutexLock lock(&mu_);
  const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return over() || delivered_.count(key) > 0;
  };
  waits_ = true;
  mu_.Await(absl::Condition(&there));
  // One that is stopped was waiting when it was.
  if (over()) return cancellation_->why();
  waits_ = false;
  std::optional<Delivered>& delivered = delivered_[key];
  if (!delivered.has_value()) return absl::FailedPreconditionError("it was received before");
  Delivered taken = *std::move(delivered);
  delivered.reset();
  return taken;
}

void RankStep::Send(Parcel::Kind kind, int to_stage, int micro_batch, Delivered what, int other) {
  const int rank = plan_.rank_of_stage[to_stage];
  const std::string& worker = plan_.workers[rank];
  calls_->Deliver(worker,
                  {.to = {plan_.step, FirstStage(plan_.rank_of_stage, rank)},
                   .kind = kind,
                   .stage = to_stage,
                   .micro_batch = micro_batch,
                   .wanted = std::move(what.wanted),
                   .other = other,
                   .skips = std::move(what.skips)},
                  std::move(what.tensors),
                  absl::StrCat("worker '", worker_->name(), "' cannot send ", NameOf(kind),
                               OfMicroBatch(kind, micro_batch), " to stage ", to_stage,
                               " on worker '", worker, "'"));
}

absl::Status RankStep::ReceiveSkips(Cell cell, Delivered& in) {
  const auto [s, m] = cell;
  std::vector<StageSkip> ends_here;
  for (const StageSkip& skip : std::exchange(in.skips, {})) {
    (skip.to == s ? ends_here : in.skips).push_back(skip);
  }
  std::sort(ends_here.begin(), ends_here.end(),
            [](const StageSkip& a, const StageSkip& b) { return a.from < b.from; });
  for (const StageSkip& skip : ends_here) {
    Delivered skipped;
    if (IsElsewhere(skip.from)) {
      DG_ASSIGN_OR_RETURN(skipped, Await(Parcel::Kind::kSkip, cell, skip.from));
    } else {
      DG_ASSIGN_OR_RETURN(skipped, Take(skipped_, {cell, skip.from}));
    }
    const size_t count = skipped.tensors.size();
    if (plan_.backward) skip_inputs_[cell].emplace_back(skip.from, count);
    in.wanted.resize(in.tensors.size());
    for (at::Tensor& tensor : skipped.tensors) in.tensors.push_back(std::move(tensor));
    in.wanted.insert(in.wanted.end(), skipped.wanted.begin(), skipped.wanted.end());
    in.wanted.resize(in.tensors.size());
  }
  return absl::OkStatus();
}

absl::Status RankStep::CutSkips(Cell cell, Delivered& out) {
  const auto [s, m] = cell;
  const std::vector<int>& to = stages_.at(s).skips;
  if (to.empty()) return absl::OkStatus();
  if (out.tensors.size() < to.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the stage gives ", out.tensors.size(), " tensors, and the last ", to.size(),
                     " are to skip (PipelineStage::skips; in C skips of dg_pipeline_stage)"));
  }
  const size_t first = out.tensors.size() - to.size();
  Skipping skipping;
  for (size_t i = 0; i < to.size(); ++i) {
    skipping[to[i]].tensors.push_back(std::move(out.tensors[first + i]));
    skipping[to[i]].wanted.push_back(out.wanted[first + i]);
  }
  out.tensors.resize(first);
  out.wanted.resize(first);
  for (auto& [stage, what] : skipping) {
    out.skips.push_back({s, stage});
    if (IsElsewhere(stage)) {
      skips_[cell][stage] = std::move(what);
    } else {
      skipped_[{{stage, m}, s}] = std::move(what);
    }
  }
  return absl::OkStatus();
}

void RankStep::SendSkips(Parcel::Kind kind, Cell cell, std::map<Cell, Skipping>& what) {
  const auto found = what.find(cell);
  if (found == what.end()) return;
  for (auto& [stage, skipping] : found->second) {
    Send(kind, stage, cell.second, std::move(skipping), cell.first);
  }
  what.erase(found);
}

absl::Status RankStep::ReceiveSkipGradients(Cell cell, Tensors& gradients) {
  const std::vector<int>& to = stages_.at(cell.first).skips;
  std::map<int, Tensors> from;  // by stage, the last one first
  for (const int stage : to) {
    if (from.count(stage) > 0) continue;
    Delivered delivered;
    if (IsElsewhere(stage)) {
      DG_ASSIGN_OR_RETURN(delivered, Await(Parcel::Kind::kSkipGradient, cell, stage));
    } else {
      DG_ASSIGN_OR_RETURN(delivered, Take(skipped_gradients_, {cell, stage}));
    }
    if (delivered.tensors.size() != static_cast<size_t>(std::count(to.begin(), to.end(), stage))) {
      return absl::InvalidArgumentError(absl::StrCat("stage ", stage, " has sent ",
                                                     delivered.tensors.size(),
                                                     " gradients of what skips to it"));
    }
    std::reverse(delivered.tensors.begin(), delivered.tensors.end());
    from[stage] = std::move(delivered.tensors);
  }
  for (const int stage : to) {
    gradients.push_back(std::move(from[stage].back()));
    from[stage].pop_back();
  }
  return absl::OkStatus();
}

void RankStep::CutSkipGradients(Cell cell, Tensors& gradients) {
  const auto found = skip_inputs_.find(cell);
  if (found == skip_inputs_.end()) return;
  for (auto each = found->second.rbegin(); each != found->second.rend(); ++each) {
    const auto& [stage, count] = *each;
    const auto begin = gradients.end() - static_cast<std::ptrdiff_t>(count);
    Delivered part{{begin, gradients.end()}, {}, {}};
    gradients.erase(begin, gradients.end());
    gradients_read_.emplace(std::pair(cell, stage), part.tensors);
    if (IsElsewhere(stage)) {
      skip_gradients_[cell][stage] = std::move(part);
    } else {
      skipped_gradients_[{{stage, cell.second}, cell.first}] = std::move(part);
    }
  }
}

absl::Status RankStep::Forward(const PipelineStage& stage, Cell cell) {
  const int s = cell.first, m = cell.second;
  Delivered in;
  if (s == 0) {
    DG_ASSIGN_OR_RETURN(in, Await(Parcel::Kind::kActivation, cell));
    in.wanted.assign(in.tensors.size(), false);
  } else {
    DG_ASSIGN_OR_RETURN(in, Take(inputs_, cell));
  }
  DG_RETURN_IF_ERROR(ReceiveSkips(cell, in));
  for (size_t i = 0; i < in.wanted.size(); ++i) {
    if (in.wanted[i] && in.tensors[i].defined() &&
        !at::isFloatingType(in.tensors[i].scalar_type()) &&
        !at::isComplexType(in.tensors[i].scalar_type())) {
      return absl::InvalidArgumentError(absl::StrCat("input ", i, " can have no gradient"));
    }
  }
  // The last one ends in the loss.
  const bool has_loss = IsLast(s) && (plan_.backward || plan_.has_targets);
  Tensors targets;
  if (has_loss) {
    if (stage.loss == nullptr) {
      return absl::FailedPreconditionError(
          "it is the last stage, and has no function for the loss");
    }
    if (plan_.has_targets) {
      DG_ASSIGN_OR_RETURN(Delivered delivered, Await(Parcel::Kind::kTarget, cell));
      targets = std::move(delivered.tensors);
    }
  }
  const auto with_loss = [this, m, cell, &stage, has_loss, targets](Tensors inputs) {
    Tensors outputs = stage.forward(std::move(inputs));
    if (!has_loss) return outputs;
    if (!plan_.backward) {
      outputs_[m] = outputs;
      outputs_read_.emplace(cell, outputs);
    }
    return Tensors{stage.loss(std::move(outputs), targets)};
  };
  DG_RETURN_IF_ERROR(CheckCount("forward", "inputs", in.tensors.size(), stage.inputs));
  if (has_loss) {
    DG_RETURN_IF_ERROR(CheckCount("loss", "targets", targets.size(), stage.targets));
  }
  const std::pair<WriteCheck, WriteCheck> given{in.tensors, targets};
  Tensors outputs;
  std::vector<bool> has_history;
  try {
    const CallModesScope modes(this->modes());
    if (plan_.backward && stage.recompute) {
      outputs =
          runs_[cell].ForwardToRecompute(with_loss, std::move(in.tensors), in.wanted, &has_history);
    } else if (plan_.backward) {
      outputs = runs_[cell].Forward(with_loss, std::move(in.tensors), in.wanted);
    } else {
      const at::AutoGradMode grad_mode(false);
      outputs = with_loss(std::move(in.tensors));
    }
  } catch (...) {
    return WithOrigin(StatusFromException(std::current_exception()),
                      {worker_->rank(), ErrorOrigin::By::kHandler});
  }
  if (!plan_.backward || !stage.recompute) {
    for (const at::Tensor& output : outputs) {
      has_history.push_back(plan_.backward && output.defined() && output.requires_grad());
    }
  }
  DG_RETURN_IF_ERROR(CheckGiven(given));
  if (plan_.backward && stage.recompute) given_.emplace(cell, given);
  if (has_loss) {
    const at::Tensor& loss = outputs[0];
    if (!loss.defined() || loss.numel() != 1) {
      return absl::InvalidArgumentError("the loss is not one number");
    }
    if (loss.is_meta()) {
      return absl::InvalidArgumentError("the loss is a meta tensor, which has no value");
    }
    if (plan_.backward && loss.is_complex()) {
      return absl::InvalidArgumentError("the loss is complex: take a real number of it");
    }
    if (plan_.backward && !has_history[0]) {
      return absl::FailedPreconditionError("the loss depends on nothing that requires grad");
    }
    losses_[m] = loss.detach().clone();
    if (plan_.backward) return absl::OkStatus();
    // They are what the evaluation gives.
    return outputs_read_.at(cell).Check("the loss must not write to what it is given, and output");
  }
  outputs_read_.emplace(cell, outputs);
  if (plan_.backward && stage.recompute) fingerprints_.emplace(cell, Fingerprints(outputs));
  if (IsLast(s)) {
    outputs_[m] = std::move(outputs);
    return absl::OkStatus();
  }
  Delivered out;
  out.wanted = std::move(has_history);
  out.tensors = Detached(std::move(outputs));
  out.skips = std::move(in.skips);
  DG_RETURN_IF_ERROR(CutSkips(cell, out));
  if (IsElsewhere(s + 1)) {
    to_next_[cell] = std::move(out);
    return absl::OkStatus();
  }
  inputs_[{s + 1, m}] = std::move(out);
  SendSkips(Parcel::Kind::kSkip, cell, skips_);
  return absl::OkStatus();
}

absl::Status RankStep::Backward(Kind kind, Cell cell) {
  const int s = cell.first, m = cell.second;
  const auto check = [this](const at::Tensor& leaf) { return CheckIsAveraged(leaf); };
  if (kind == Kind::kBackwardWeight) {
    DG_ASSIGN_OR_RETURN(StageRun run, Take(runs_, cell));
    return run.BackwardWeight(*context_.record(), &tied_, check);
  }
  // What this stage was given by others of this rank, and what it has given itself: before autograd
  // finds, and names, a variable that was modified.
  std::vector<Cell> given{{s - 1, m}, cell};
  const auto skip_inputs = skip_inputs_.find(cell);
  if (skip_inputs != skip_inputs_.end()) {
    for (const auto& [from, count] : skip_inputs->second) given.emplace_back(from, m);
  }
  for (const Cell& of : given) {
    const auto read = outputs_read_.find(of);
    if (read != outputs_read_.end()) DG_RETURN_IF_ERROR(CheckRead(read->second, "output", of));
  }
  outputs_read_.erase(cell);
  // What this stage is given back by others of this rank, and has not read before.
  const PipelineStage& stage = stages_.at(s);
  std::vector<int> later = stage.skips;
  later.push_back(s + 1);
  for (const int by : later) {
    const Cell of{by, m};
    const auto read = gradients_read_.find({of, s});
    if (read == gradients_read_.end()) continue;
    DG_RETURN_IF_ERROR(CheckRead(read->second, "the gradient of input", of));
    gradients_read_.erase(read);
  }
  if (stage.recompute) DG_RETURN_IF_ERROR(Recompute(cell));
  Tensors gradients;
  if (IsLast(s)) {
    gradients = {at::full_like(losses_[m], plan_.weights[m])};
  } else {
    DG_ASSIGN_OR_RETURN(gradients, Take(gradients_, cell));
    DG_RETURN_IF_ERROR(ReceiveSkipGradients(cell, gradients));
  }
  absl::StatusOr<Tensors> back;
  if (kind == Kind::kBackwardInput) {
    const auto found = runs_.find(cell);
    if (found == runs_.end()) return absl::FailedPreconditionError("there was no forward");
    back = found->second.BackwardInput(std::move(gradients));
  } else {
    DG_ASSIGN_OR_RETURN(StageRun run, Take(runs_, cell));
    back = run.Backward(std::move(gradients), *context_.record(), &tied_, check);
  }
  DG_RETURN_IF_ERROR(back.status());
  if (s == 0) return absl::OkStatus();
  CutSkipGradients(cell, *back);
  gradients_read_.emplace(std::pair(cell, s - 1), *back);
  if (IsElsewhere(s - 1)) {
    to_previous_[cell] = {*std::move(back), {}, {}};
    return absl::OkStatus();
  }
  gradients_[{s - 1, m}] = *std::move(back);
  SendSkips(Parcel::Kind::kSkipGradient, cell, skip_gradients_);
  return absl::OkStatus();
}

absl::Status RankStep::Recompute(Cell cell) {
  const auto run = runs_.find(cell);
  if (run == runs_.end()) return absl::FailedPreconditionError("there was no forward");
  DG_ASSIGN_OR_RETURN(const auto given, Take(given_, cell));
  DG_RETURN_IF_ERROR(CheckGiven(given));
  const CallModesScope modes(this->modes());
  absl::StatusOr<Tensors> recomputed;
  try {
    recomputed = run->second.Recompute();
  } catch (...) {
    return WithOrigin(StatusFromException(std::current_exception()),
                      {worker_->rank(), ErrorOrigin::By::kHandler});
  }
  DG_ASSIGN_OR_RETURN(const Tensors outputs, std::move(recomputed));
  DG_RETURN_IF_ERROR(CheckGiven(given));
  if (!IsLast(cell.first)) {
    // Two draws of two threads may have changed places: the generators know nothing of that.
    DG_ASSIGN_OR_RETURN(const Tensors before, Take(fingerprints_, cell));
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!before[i].defined() || at::equal(Fingerprint(outputs[i]), before[i])) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("the forward that is recomputed is not the same twice: output ", i,
                       " is not that of the first time"));
    }
    return absl::OkStatus();
  }
  // Also where both are not a number.
  const at::Tensor& loss = losses_[cell.second];
  if (at::allclose(outputs[0].detach(), loss, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "the forward that is recomputed is not the same twice: the loss is not that of the first "
      "time");
}

absl::Status RankStep::CheckRead(const WriteCheck& read, absl::string_view what, Cell cell) const {
  return Annotate(read.Check(what),
                  absl::StrCat("stage ", cell.first, ", micro-batch ", cell.second, " on worker '",
                               worker_->name(),
                               "' must not write again to what it has returned before the "
                               "micro-batch's backward has come, or the step is over; let it "
                               "return new tensors"));
}

absl::Status RankStep::Do(const Action& action) {
  const Cell cell{action.stage, action.micro_batch};
  switch (action.kind) {
    case Kind::kForward:
      return Forward(stages_.at(action.stage), cell);
    case Kind::kBackward:
    case Kind::kBackwardInput:
    case Kind::kBackwardWeight:
      return Backward(action.kind, cell);
    case Kind::kSendActivation: {
      DG_ASSIGN_OR_RETURN(Delivered what, Take(to_next_, cell));
      Send(Parcel::Kind::kActivation, action.stage + 1, action.micro_batch, std::move(what));
      SendSkips(Parcel::Kind::kSkip, cell, skips_);
      return absl::OkStatus();
    }
    case Kind::kReceiveActivation: {
      DG_ASSIGN_OR_RETURN(inputs_[cell], Await(Parcel::Kind::kActivation, cell));
      inputs_[cell].wanted.resize(inputs_[cell].tensors.size());
      return absl::OkStatus();
    }
    case Kind::kSendGradient: {
      DG_ASSIGN_OR_RETURN(Delivered what, Take(to_previous_, cell));
      Send(Parcel::Kind::kGradient, action.stage - 1, action.micro_batch, std::move(what));
      SendSkips(Parcel::Kind::kSkipGradient, cell, skip_gradients_);
      return absl::OkStatus();
    }
    case Kind::kReceiveGradient: {
      DG_ASSIGN_OR_RETURN(Delivered what, Await(Parcel::Kind::kGradient, cell));
      gradients_[cell] = std::move(what.tensors);
      return absl::OkStatus();
    }
    case Kind::kStep: {
      const PipelineStage& stage = stages_.at(action.stage);
      absl::Status stepped;
      try {
        stepped = stage.step(context_);
      } catch (...) {
        stepped = StatusFromException(std::current_exception());
      }
      return WithOrigin(std::move(stepped), {worker_->rank(), ErrorOrigin::By::kHandler});
    }
  }
  return absl::InternalError("an action of an unknown kind");
}

absl::Status RankStep::BeginAverage() {
  return Annotate(
      averager_->AverageInBackward(*context_.record()),
      absl::StrCat("beginning the average over the replicas of worker '", worker_->name(), "'"));
}

absl::Status RankStep::SetPhase(const char* phase) {
  absl::MutexLock lock(&mu_);
  // One that was stopped goes on no further.
  if (over()) return cancellation_->why();
  phase_ = phase;
  return absl::OkStatus();
}

absl::Status RankStep::Average() {
  DG_RETURN_IF_ERROR(SetPhase("is in the average of its gradients over the replicas"));
  DG_RETURN_IF_ERROR(
      Annotate(averager_->Average(*context_.record()),
               absl::StrCat("the average over the replicas of worker '", worker_->name(), "'")));
  return SetPhase(nullptr);
}

void RankStep::FailAverages(const absl::Status& why) {
  if (averages()) distgrad::FailAverages(*averager_, pipeline_, *worker_, why);
}

absl::Status RankStep::CheckIsAveraged(const at::Tensor& parameter) const {
  if (averager_ == nullptr ? averages_elsewhere_.empty() : averager_->Averages(parameter)) {
    return absl::OkStatus();
  }
  std::string what = c10::str("a parameter, ", parameter.scalar_type(), " ", parameter.sizes(),
                              " on ", parameter.device(), ",");
  for (const auto& [number, stage] : stages_) {
    for (const auto& [name, tied] : stage.tied) {
      if (tied.is_same(parameter)) what = absl::StrCat("the tied parameter '", name, "'");
    }
  }
  if (averager_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, " has a gradient on worker '", worker_->name(),
        "', which has no averager, and worker '", averages_elsewhere_,
        "' averages over replicas, so that those of this parameter would drift apart: give the "
        "stages of all workers that train an averager (PipelineStagesOptions::averager; in C "
        "dg_pipeline_stages_options.averager)"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      what, " has a gradient on worker '", worker_->name(),
      "', and the averager there was made without it, or while it was frozen, so that its replicas "
      "would drift apart: make the averager (PipelineStagesOptions::averager; in C "
      "dg_pipeline_stages_options.averager) of all parameters "
      "that these stages train"));
}

absl::Status RankStep::AddTied() {
  const TieNames names = tie_names();
  if (names.empty()) return absl::OkStatus();
  DG_RETURN_IF_ERROR(SetPhase("waits for the gradients of its tied parameters"));
  Ties ties;
  {
    absl::MutexLock lock(&mu_);
    ties = ties_;
  }
  // By name: what this rank has, and then that of all ranks.
  std::map<std::string, std::map<int, at::Tensor>> parts;
  std::map<int, Tensors> to;  // by rank; in the order of the names
  for (const std::string& name : names) {
    at::Tensor own;
    for (const at::Tensor& parameter : TiedOf(name)) {
      const at::Tensor sum = tied_.Of(parameter);
      if (sum.defined()) own = own.defined() ? SumOfGradients(own, sum) : sum;
    }
    parts[name][plan_.rank] = own;
    for (const int rank : ties.ranks[name]) {
      if (rank != plan_.rank) to[rank].push_back(own);
    }
  }
  for (auto& [rank, tensors] : to) {
    Send(Parcel::Kind::kTied, FirstStage(plan_.rank_of_stage, rank), plan_.rank, {tensors, {}, {}});
  }
  const int first_stage = FirstStage(plan_.rank_of_stage, plan_.rank);
  for (const auto& [rank, tensors] : to) {
    DG_ASSIGN_OR_RETURN(Delivered from, Await(Parcel::Kind::kTied, {first_stage, rank}));
    size_t next = 0;
    for (const std::string& name : names) {
      const std::vector<int>& ranks = ties.ranks[name];
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
      const at::Tensor part = next < from.tensors.size() ? from.tensors[next] : at::Tensor();
      ++next;
      const at::Tensor parameter = TiedOf(name)[0];
      if (part.defined() &&
          (part.sizes() != parameter.sizes() || part.scalar_type() != parameter.scalar_type() ||
           part.device() != parameter.device())) {
        const auto in_words = [](const at::Tensor& t) {
          return c10::str(t.scalar_type(), " ", t.sizes(), " on ", t.device());
        };
        return absl::InvalidArgumentError(absl::StrCat(
            "tied parameter '", name, "' is ", in_words(parameter), " on worker '", worker_->name(),
            "', and its gradient on worker '", plan_.workers[rank], "' ", in_words(part)));
      }
      parts[name][rank] = part;
    }
  }
  // Where several ranks of a worker have one tensor the first of them adds to its gradient, and the
  // others wait for that.
  std::set<int> added_by, added_for;
  for (const std::string& name : names) {
    at::Tensor total;
    // In the same order everywhere.
    for (const auto& [rank, part] : parts[name]) {
      if (part.defined()) total = total.defined() ? SumOfGradients(total, part) : part;
    }
    const Tensors own = TiedOf(name);
    for (const at::Tensor& parameter : own) {
      const std::set<int> ranks = RanksWithTied(name, parameter);
      if (*ranks.begin() != plan_.rank) {
        added_by.insert(*ranks.begin());
        continue;
      }
      added_for.insert(ranks.begin(), ranks.end());
      // The context adds to it in place, and others have it, too.
      if (total.defined()) {
        DG_RETURN_IF_ERROR(CheckIsAveraged(parameter));
        context_.record()->AddToGradient(parameter, total.clone());
      }
      // One of the copies, on all ranks, stands for all of them where gradients are clipped.
      const bool is_first = parts[name].begin()->first == plan_.rank && own[0].is_same(parameter);
      context_.record()->SetCountsInNorms(parameter, is_first);
    }
  }
  const int workers = static_cast<int>(plan_.workers.size());
  for (const int rank : added_for) {
    if (rank == plan_.rank) continue;
    Send(Parcel::Kind::kTied, FirstStage(plan_.rank_of_stage, rank), workers + plan_.rank, {});
  }
  for (const int rank : added_by) {
    DG_RETURN_IF_ERROR(Await(Parcel::Kind::kTied, {first_stage, workers + rank}).status());
  }
  return SetPhase(nullptr);
}

absl::Status RankStep::Follow(const Action& action) {
  {
    absl::MutexLock lock(&mu_);
    // One that was stopped goes on no further.
    if (over()) return cancellation_->why();
    // Before its function runs: behind that there may be no memory for it.
    if (action.kind == Kind::kStep) stepped_.emplace(action.stage, false);
    action_ = &action;
    steps_ = action.kind == Kind::kStep;
  }
  const absl::Time begin = on_action_ == nullptr ? absl::Time() : absl::Now();
  absl::Status status;
  try {
    // Neither in those of the driver, nor in what another function on this thread has left behind.
    // A forward then takes those of its caller.
    const CallModesScope modes{CallModes()};
    status = Do(action);
  } catch (...) {
    status = StatusFromException(std::current_exception());
  }
  if (action.kind == Kind::kStep) OnStepped(action.stage, status);
  try {
    if (on_action_ != nullptr) {
      const CallModesScope modes{CallModes()};
      on_action_({plan_.rank, plan_.step, action, begin, absl::Now()});
    }
  } catch (...) {
    status.Update(WithOrigin(StatusFromException(std::current_exception()),
                             {worker_->rank(), ErrorOrigin::By::kHandler}));
  }
  return Annotate(status, absl::StrCat(ToString(action), " on worker '", worker_->name(), "'"));
}

absl::StatusOr<Message> RankStep::FollowList() {
  const std::vector<Action>& list = plan_.list;
  const size_t last_backward = LastBackward(list);
  // Not right behind it, but after the sends that follow: another rank waits for them. All
  // backwards come before the first step (CheckShares).
  const size_t share_at = FirstStep(list);
  {
    absl::MutexLock lock(&mu_);
    averages_elsewhere_ = ties_.averages;
  }
  for (const std::string& name : tie_names()) {
    for (const at::Tensor& parameter : TiedOf(name)) tied_.Watch(parameter);
  }
  // Of several stages each has a last backward of its own, and the average is in one.
  const bool has_one_stage =
      std::count(plan_.rank_of_stage.begin(), plan_.rank_of_stage.end(), plan_.rank) == 1;
  for (size_t i = 0; i < list.size(); ++i) {
    if (averages() && i == last_backward && has_one_stage) DG_RETURN_IF_ERROR(BeginAverage());
    if (i == share_at) {
      DG_RETURN_IF_ERROR(AddTied());
      if (averages()) DG_RETURN_IF_ERROR(Average());
    }
    DG_RETURN_IF_ERROR(Follow(list[i]));
  }
  if (share_at == list.size()) {
    DG_RETURN_IF_ERROR(AddTied());
    if (averages()) DG_RETURN_IF_ERROR(Average());
  }
  {
    absl::MutexLock lock(&mu_);
    if (!over()) action_ = nullptr;
  }
  // What was lost on its way is an error of this step. After its end nobody would hear of it, and
  // who waits for it would wait until the deadline.
  DG_RETURN_IF_ERROR(calls_->Wait());
  for (const auto& [cell, read] : outputs_read_) {
    DG_RETURN_IF_ERROR(CheckRead(read, "output", cell));
  }
  for (const auto& [by_and_for, read] : gradients_read_) {
    DG_RETURN_IF_ERROR(CheckRead(read, "the gradient of input", by_and_for.first));
  }
  return Result();
}

Message RankStep::Result() {
  Message reply;
  WireWriter writer(&reply.payload);
  for (int m = 0; m < plan_.micro_batches; ++m) {
    const bool has_loss = losses_.count(m) > 0;
    writer.U8(has_loss ? 1 : 0);
    if (has_loss) reply.tensors.push_back(losses_[m]);
    Tensors outputs = std::move(outputs_[m]);
    writer.U32(static_cast<uint32_t>(outputs.size()));
    for (at::Tensor& output : Detached(std::move(outputs))) {
      reply.tensors.push_back(std::move(output));
    }
  }
  return reply;
}

void RankStep::Run() {
  absl::StatusOr<Message> result = absl::InternalError("not run");
  bool ran = false;
  try {
    Deadline deadline = Deadline::Never();
    std::shared_ptr<RankStep> before;
    {
      absl::MutexLock lock(&mu_);
      deadline = deadline_;
      ran = ran_ = !over();
      before = std::move(follows_);
    }
    calls_ = std::make_unique<StepCalls>(worker_, pipeline_, deadline, cancellation_);
    // What it would start from is missing without that.
    const absl::Status ended = before == nullptr ? absl::OkStatus() : before->CheckEndedWell();
    result = ended.ok() ? FollowList()
                        : Annotate(ended, absl::StrCat("the step before this one has failed on "
                                                       "worker '",
                                                       worker_->name(), "'"));
  } catch (...) {  // there was no memory
    result = StatusFromException(std::current_exception());
  }
  // Other ranks of this replica may have averaged already. If the step were taken again, they would
  // average with the other replicas' next step, and this rank with the one that failed.
  try {
    if (!result.ok() && ran) FailAverages(result.status());
  } catch (...) {
    LogThrown("failing the averages of a pipeline's step");
  }
  // What it held ends here, and not when the next step begins.
  runs_.clear();
  inputs_.clear();
  gradients_.clear();
  to_next_.clear();
  to_previous_.clear();
  skips_.clear();
  skip_gradients_.clear();
  skipped_.clear();
  skipped_gradients_.clear();
  skip_inputs_.clear();
  outputs_read_.clear();
  gradients_read_.clear();
  given_.clear();
  fingerprints_.clear();
  losses_.clear();
  outputs_.clear();
  tied_ = TiedGradients();
  context_ = Context();
  std::optional<Promise<Message>> promise;
  DeliveredParcels delivered;  // ends outside the lock
  bool stopped = false;        // behind its list: whoever waits for the step has heard an error
  {
    // Before anybody hears that the step is over.
    absl::MutexLock lock(&mu_);
    stopped = state_ == State::kStopping;
    Advance(Event::kEndOfList);
    ended_well_ = result.ok() && !stopped;
    if (!result.ok()) error_ = result.status();
    promise.swap(promise_);
    delivered.swap(delivered_);
  }
  try {
    if (result.ok() && ran && stopped) FailAverages(cancellation_->why());
  } catch (...) {
    LogThrown("failing the averages of a pipeline's step");
  }
  // Ends what is on its way to others, and says why to whoever still sends something.
  if (!result.ok()) Stop(result.status());
  calls_ = nullptr;
  if (promise.has_value()) promise->Set(std::move(result));
}

}  // namespace distgrad
