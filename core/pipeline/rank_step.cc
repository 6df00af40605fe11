// Follows a list of actions, and keeps what one action has for another.
#include "core/pipeline/rank_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/base/wire.h"
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

const char* NameOf(Parcel::Kind kind) {
  switch (kind) {
    case Parcel::Kind::kActivation:
      return "the activations";
    case Parcel::Kind::kGradient:
      return "the gradients";
    case Parcel::Kind::kTarget:
      return "the targets";
  }
  return "parcels of an unknown kind";
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

RankStep::RankStep(Worker* worker, std::string pipeline, const std::map<int, PipelineStage>* stages,
                   StepPlan plan, WorkerId driver, Context context)
    : worker_(worker),
      pipeline_(std::move(pipeline)),
      stages_(*stages),
      plan_(std::move(plan)),
      driver_(driver),
      context_(std::move(context)) {}

bool RankStep::running() const {
  absl::MutexLock lock(&mu_);
  return started_ && !over_;
}

bool RankStep::busy() const {
  absl::MutexLock lock(&mu_);
  return started_ && !list_done_;
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

absl::Status RankStep::stopped() const {
  absl::MutexLock lock(&mu_);
  return why_;
}

absl::StatusOr<Future<Message>> RankStep::Start(const Request& request) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(why_);
  if (started_) return absl::FailedPreconditionError("the step runs already");
  started_ = true;
  cancellation_ = request.cancellation;
  deadline_ = request.deadline;
  modes_.emplace();
  return future_;
}

void RankStep::Stop(const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (over_) return;
    over_ = true;
    why_ = why;
    delivered_.clear();
  }
  promise_.Set(why);
}

absl::Status RankStep::Deliver(const Parcel& parcel, Tensors tensors) {
  const bool fits = HasStage(parcel.stage) && parcel.micro_batch < plan_.micro_batches &&
                    (parcel.wanted.empty() || parcel.wanted.size() == tensors.size());
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrCat("stage ", parcel.stage, ", micro-batch ",
                                                   parcel.micro_batch,
                                                   " is not this rank's, or has other tensors"));
  }
  absl::MutexLock lock(&mu_);
  // Who hears of it so should hear of the cause.
  DG_RETURN_IF_ERROR(why_);
  if (over_) return absl::FailedPreconditionError("the step is over");
  const bool is_new = delivered_
                          .try_emplace({parcel.kind, parcel.stage, parcel.micro_batch},
                                       Delivered{std::move(tensors), parcel.wanted})
                          .second;
  if (is_new) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(NameOf(parcel.kind), " for stage ", parcel.stage,
                                               ", micro-batch ", parcel.micro_batch,
                                               " were there already"));
}

absl::StatusOr<RankStep::Delivered> RankStep::Await(Parcel::Kind kind, Cell cell) {
  const ParcelKey key{kind, cell.first, cell.second};
  absl::MutexLock lock(&mu_);
  const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return over_ || delivered_.count(key) > 0;
  };
  mu_.Await(absl::Condition(&there));
  DG_RETURN_IF_ERROR(why_);
  std::optional<Delivered>& delivered = delivered_[key];
  if (!delivered.has_value()) return absl::FailedPreconditionError("it was received before");
  Delivered taken = *std::move(delivered);
  delivered.reset();
  return taken;
}

absl::Status RankStep::Send(Parcel::Kind kind, int to_stage, int micro_batch, Delivered what) {
  const int rank = plan_.rank_of_stage[to_stage];
  const std::string& worker = plan_.workers[rank];
  CallOptions options;
  {
    absl::MutexLock lock(&mu_);
    options.deadline = deadline_;
    options.cancellation = cancellation_;
  }
  Message message{EncodeParcel({.to = {plan_.step, FirstStage(plan_.rank_of_stage, rank)},
                                .kind = kind,
                                .stage = to_stage,
                                .micro_batch = micro_batch,
                                .wanted = std::move(what.wanted)}),
                  std::move(what.tensors)};
  const Future<Message> sent = worker_->CallAsync(worker, absl::StrCat(kDeliver, pipeline_),
                                                  std::move(message), std::move(options));
  // Nobody waits for the answer: what cannot be sent ends the step.
  sent.Then([self = weak_from_this(), kind, to_stage, micro_batch,
             worker](const absl::StatusOr<Message>& reply) {
    if (reply.ok()) return;
    const std::shared_ptr<RankStep> step = self.lock();
    if (step == nullptr) return;
    step->Stop(Annotate(reply.status(),
                        absl::StrCat("worker '", step->worker_->name(), "' cannot send ",
                                     NameOf(kind), " of micro-batch ", micro_batch, " to stage ",
                                     to_stage, " on worker '", worker, "'")));
  });
  return absl::OkStatus();
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
          "it is the last stage, and has no loss (PipelineStage::loss)");
    }
    if (plan_.has_targets) {
      DG_ASSIGN_OR_RETURN(Delivered delivered, Await(Parcel::Kind::kTarget, cell));
      targets = std::move(delivered.tensors);
    }
  }
  const auto with_loss = [&](Tensors inputs) {
    Tensors outputs = stage.forward(std::move(inputs));
    if (!has_loss) return outputs;
    if (!plan_.backward) outputs_[m] = outputs;
    return Tensors{stage.loss(std::move(outputs), std::move(targets))};
  };
  Tensors outputs;
  try {
    if (plan_.backward) {
      outputs = runs_[cell].Forward(with_loss, std::move(in.tensors), in.wanted);
    } else {
      const at::AutoGradMode grad_mode(false);
      outputs = with_loss(std::move(in.tensors));
    }
  } catch (...) {
    return WithOrigin(StatusFromException(std::current_exception()),
                      {worker_->rank(), ErrorOrigin::By::kHandler});
  }
  if (has_loss) {
    const at::Tensor& loss = outputs[0];
    if (!loss.defined() || loss.numel() != 1) {
      return absl::InvalidArgumentError("the loss is not one number");
    }
    if (plan_.backward && !loss.requires_grad()) {
      return absl::FailedPreconditionError("the loss depends on nothing that requires grad");
    }
    losses_[m] = loss.detach();
    return absl::OkStatus();
  }
  if (IsLast(s)) {
    outputs_[m] = std::move(outputs);
    return absl::OkStatus();
  }
  Delivered out;
  for (const at::Tensor& output : outputs) {
    out.wanted.push_back(plan_.backward && output.defined() && output.requires_grad());
  }
  out.tensors = Detached(std::move(outputs));
  (IsElsewhere(s + 1) ? to_next_[cell] : inputs_[{s + 1, m}]) = std::move(out);
  return absl::OkStatus();
}

absl::Status RankStep::Backward(Kind kind, Cell cell) {
  const int s = cell.first, m = cell.second;
  if (kind == Kind::kBackwardWeight) {
    DG_ASSIGN_OR_RETURN(StageRun run, Take(runs_, cell));
    return run.BackwardWeight(*context_.record());
  }
  Tensors gradients;
  if (IsLast(s)) {
    gradients = {at::full_like(losses_[m], plan_.weights[m])};
  } else {
    DG_ASSIGN_OR_RETURN(gradients, Take(gradients_, cell));
  }
  absl::StatusOr<Tensors> back;
  if (kind == Kind::kBackwardInput) {
    const auto found = runs_.find(cell);
    if (found == runs_.end()) return absl::FailedPreconditionError("there was no forward");
    back = found->second.BackwardInput(std::move(gradients));
  } else {
    DG_ASSIGN_OR_RETURN(StageRun run, Take(runs_, cell));
    back = run.Backward(std::move(gradients), *context_.record());
  }
  DG_RETURN_IF_ERROR(back.status());
  if (s == 0) return absl::OkStatus();
  if (IsElsewhere(s - 1)) {
    to_previous_[cell] = {*std::move(back), {}};
  } else {
    gradients_[{s - 1, m}] = *std::move(back);
  }
  return absl::OkStatus();
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
      return Send(Parcel::Kind::kActivation, action.stage + 1, action.micro_batch, std::move(what));
    }
    case Kind::kReceiveActivation: {
      DG_ASSIGN_OR_RETURN(inputs_[cell], Await(Parcel::Kind::kActivation, cell));
      inputs_[cell].wanted.resize(inputs_[cell].tensors.size());
      return absl::OkStatus();
    }
    case Kind::kSendGradient: {
      DG_ASSIGN_OR_RETURN(Delivered what, Take(to_previous_, cell));
      return Send(Parcel::Kind::kGradient, action.stage - 1, action.micro_batch, std::move(what));
    }
    case Kind::kReceiveGradient: {
      DG_ASSIGN_OR_RETURN(Delivered what, Await(Parcel::Kind::kGradient, cell));
      gradients_[cell] = std::move(what.tensors);
      return absl::OkStatus();
    }
    case Kind::kStep: {
      const PipelineStage& stage = stages_.at(action.stage);
      if (stage.step == nullptr)
        return absl::FailedPreconditionError("it has no PipelineStage::step");
      return stage.step(context_);
    }
  }
  return absl::InternalError("an action of an unknown kind");
}

void RankStep::Run() {
  try {
    RunList();
  } catch (...) {  // there was no memory
    {
      absl::MutexLock lock(&mu_);
      list_done_ = true;
    }
    Stop(StatusFromException(std::current_exception()));
  }
}

void RankStep::RunList() {
  std::optional<at::ThreadLocalStateGuard> modes;
  {
    absl::MutexLock lock(&mu_);
    if (modes_.has_value()) modes.emplace(*modes_);
  }
  absl::Status status;
  for (const Action& action : plan_.list) {
    // One that was stopped goes on no further.
    status = stopped();
    if (!status.ok()) break;
    try {
      status = Do(action);
    } catch (...) {
      status = StatusFromException(std::current_exception());
    }
    if (status.ok()) continue;
    status = Annotate(status, absl::StrCat(ToString(action), " on worker '", worker_->name(), "'"));
    break;
  }
  {
    // Before anybody hears that the step is over.
    absl::MutexLock lock(&mu_);
    list_done_ = true;
  }
  Message reply;
  WireWriter writer(&reply.payload);
  for (int m = 0; m < plan_.micro_batches && status.ok(); ++m) {
    const bool has_loss = losses_.count(m) > 0;
    writer.U8(has_loss ? 1 : 0);
    if (has_loss) reply.tensors.push_back(losses_[m]);
    Tensors outputs = std::move(outputs_[m]);
    writer.U32(static_cast<uint32_t>(outputs.size()));
    for (at::Tensor& output : Detached(std::move(outputs))) {
      reply.tensors.push_back(std::move(output));
    }
  }
  // What it held ends here, and not when the next step begins.
  runs_.clear();
  inputs_.clear();
  gradients_.clear();
  to_next_.clear();
  to_previous_.clear();
  losses_.clear();
  outputs_.clear();
  context_ = Context();
  if (!status.ok()) return Stop(status);
  {
    absl::MutexLock lock(&mu_);
    if (over_) return;
    over_ = true;
    delivered_.clear();
  }
  promise_.Set(std::move(reply));
}

}  // namespace distgrad
