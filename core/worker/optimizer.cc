// Sends each worker its step, and waits for all.
#include "core/worker/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/checkpoint/optimizer_checkpoint.h"
#include "core/optim/local_optimizer.h"
#include "core/tensor/exception.h"
#include "core/worker/context_peers.h"
#include "core/worker/member_calls.h"

namespace distgrad {

namespace {

constexpr absl::string_view kStep = "distgrad.optimizer.step/";
constexpr absl::string_view kNorms = "distgrad.optimizer.norms/";
constexpr absl::string_view kScale = "distgrad.optimizer.scale/";
constexpr absl::string_view kRate = "distgrad.optimizer.rate/";
constexpr size_t kMaxName = 900;  // with the longest of these it is a function's name

std::string Describe(const Worker* worker, absl::string_view name) {
  const std::string whose =
      worker == nullptr ? "" : absl::StrCat(" of worker '", worker->name(), "'");
  return absl::StrCat("the optimizer '", name, "'", whose);
}

}  // namespace

Optimizer::Optimizer(Worker* worker, absl::string_view name, std::shared_ptr<LocalOptimizer> local)
    : worker_(worker),
      name_(name),
      functions_{absl::StrCat(kNorms, name), absl::StrCat(kScale, name), absl::StrCat(kRate, name),
                 absl::StrCat(kStep, name)},
      local_(std::move(local)) {}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(
    Worker* worker, std::unique_ptr<torch::optim::Optimizer> optimizer, absl::string_view name) {
  if (worker != nullptr && (name.size() > kMaxName || absl::StrContains(name, "::"))) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker '", worker->name(), "' cannot have an optimizer '", name,
                     "': a name has at most ", kMaxName, " bytes, and no '::'"));
  }
  if (optimizer == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(worker, name), " is null"));
  }
  auto local = std::make_shared<LocalOptimizer>(std::move(optimizer));
  std::unique_ptr<Optimizer> made(new Optimizer(worker, name, local));
  if (worker == nullptr) return made;
  const auto serve_any = [&](absl::string_view function, auto body) {
    return worker->RegisterOwn(absl::StrCat(function, name), body);
  };
  const auto serve = [&](absl::string_view function, auto body) {
    return serve_any(function, [body](Request& request) -> absl::StatusOr<Message> {
      if (!request.context.valid())
        return absl::InvalidArgumentError("an optimizer works on a context");
      return body(request);
    });
  };
  // The thread that comes first here has the name.
  const absl::Status claimed = serve(kStep, [local](Request& request) -> absl::StatusOr<Message> {
    DG_RETURN_IF_ERROR(local->Step(*request.context.record()));
    return Message{NamePeers({request.context.record().get()}), {}};
  });
  if (absl::IsAlreadyExists(claimed)) {
    return absl::AlreadyExistsError(
        absl::StrCat("worker '", worker->name(), "' has an optimizer '", name, "' already"));
  }
  DG_RETURN_IF_ERROR(claimed);
  // Also where there is no memory for what follows: nobody else could give the name back.
  absl::Cleanup remove = [&made] { made->Remove(); };
  DG_RETURN_IF_ERROR(serve(kNorms, [local](Request& request) -> absl::StatusOr<Message> {
    DG_ASSIGN_OR_RETURN(std::vector<at::Tensor> norms,
                        local->GradientNorms(*request.context.record()));
    return Message{NamePeers({request.context.record().get()}), std::move(norms)};
  }));
  DG_RETURN_IF_ERROR(serve(kScale, [local](Request& request) -> absl::StatusOr<Message> {
    if (request.message.tensors.size() != 1)
      return absl::InvalidArgumentError("the factor is one tensor");
    DG_RETURN_IF_ERROR(
        local->ScaleGradients(*request.context.record(), request.message.tensors[0]));
    return Message{NamePeers({request.context.record().get()}), {}};
  }));
  DG_RETURN_IF_ERROR(serve_any(kRate, [local](Request& request) -> absl::StatusOr<Message> {
    if (request.message.tensors.size() != 1)
      return absl::InvalidArgumentError("the learning rate is one tensor");
    DG_RETURN_IF_ERROR(local->SetLearningRate(request.message.tensors[0].item<double>()));
    return Message{};
  }));
  std::move(remove).Cancel();
  return made;
}

absl::StatusOr<std::vector<Message>> Optimizer::CallAll(const std::string& function,
                                                        const Message& message,
                                                        const Context* context) {
  DG_RETURN_IF_ERROR(CheckMayAsk());
  std::vector<std::string> workers;
  {
    absl::MutexLock lock(&mu_);
    workers = workers_;
  }
  if (workers.empty() && context != nullptr) {
    return CallMembers(*worker_, function, message, *context);
  }
  if (workers.empty()) workers = worker_->names();
  const std::vector<WorkerRef> to(workers.begin(), workers.end());
  return CallWorkers(*worker_, to, function, message, context);
}

absl::Status Optimizer::CheckMayAsk() const {
  DG_RETURN_IF_ERROR(CheckMayAwaitStep());
  // There may be another one of that name by now.
  if (!local_->removed()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(Describe(worker_, name_), " was removed"));
}

absl::StatusOr<ContextRecord*> Optimizer::RecordOf(const Context& context) const {
  DG_RETURN_IF_ERROR(CheckMayAsk());
  if (!context.valid()) return absl::InvalidArgumentError("an optimizer works on a context");
  return context.record().get();
}

absl::StatusOr<std::vector<StateTensor>> Optimizer::State() const {
  DG_RETURN_IF_ERROR(CheckMayAsk());
  return local_->State();
}

absl::Status Optimizer::LoadState(const std::vector<StateTensor>& state) {
  DG_RETURN_IF_ERROR(CheckMayAsk());
  return local_->LoadState(state);
}

absl::Status Optimizer::Save(const TensorMap& parameters, const std::string& path) const {
  absl::StatusOr<OptimizerSnapshot> snapshot = absl::UnknownError("no snapshot");
  DG_RETURN_IF_ERROR(Use([&](torch::optim::Optimizer& optimizer) {
    snapshot = SnapshotOptimizer(optimizer, parameters);
    return Annotate(snapshot.status(), absl::StrCat("saving an optimizer to ", path));
  }));
  return SaveSafetensors(snapshot->tensors, path, snapshot->metadata);
}

absl::Status Optimizer::Load(const std::string& path, const TensorMap& parameters) {
  return Use([&](torch::optim::Optimizer& optimizer) {
    return LoadOptimizer(path, parameters, &optimizer);
  });
}

absl::Status Optimizer::Use(absl::FunctionRef<absl::Status(torch::optim::Optimizer&)> use) const {
  DG_RETURN_IF_ERROR(CheckMayAsk());
  return local_->Use(use);
}

void Optimizer::Remove() {
  // Before, or a second Remove() could take off another one of that name.
  if (!local_->Remove()) return;
  if (worker_ == nullptr) return;
  for (const std::string& function : functions_) worker_->UnregisterOwn(function);
}

absl::Status Optimizer::SetWorkers(std::vector<std::string> workers) {
  if (worker_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(Describe(worker_, name_), " is a local one, of which no worker has a part"));
  }
  std::set<absl::string_view> names;
  for (const std::string& worker : workers) {
    if (names.insert(worker).second) continue;
    return absl::InvalidArgumentError(absl::StrCat("the workers of the optimizer '", name_,
                                                   "' name '", worker,
                                                   "' twice, whose part would step twice"));
  }
  if (names.count(worker_->name()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the workers of the optimizer '", name_,
                                                   "' lack '", worker_->name(),
                                                   "', which has a part of it: name it too"));
  }
  absl::MutexLock lock(&mu_);
  workers_ = std::move(workers);
  return absl::OkStatus();
}

absl::Status Optimizer::Step(const Context& context) {
  if (worker_ != nullptr) return CallAll(absl::StrCat(kStep, name_), {}, &context).status();
  DG_ASSIGN_OR_RETURN(const ContextRecord* const record, RecordOf(context));
  return local_->Step(*record);
}

absl::Status Optimizer::SetLearningRate(double learning_rate) {
  if (worker_ == nullptr) {
    DG_RETURN_IF_ERROR(CheckMayAsk());
    return local_->SetLearningRate(learning_rate);
  }
  const at::Tensor rate = at::scalar_tensor(learning_rate, at::kDouble);
  return CallAll(absl::StrCat(kRate, name_), {"", {rate}}, nullptr).status();
}

absl::StatusOr<std::vector<at::Tensor>> Optimizer::GradientNorms(const Context& context) {
  if (worker_ == nullptr) {
    DG_ASSIGN_OR_RETURN(const ContextRecord* const record, RecordOf(context));
    return local_->GradientNorms(*record);
  }
  DG_ASSIGN_OR_RETURN(const std::vector<Message> replies,
                      CallAll(absl::StrCat(kNorms, name_), {}, &context));
  std::vector<at::Tensor> norms;
  for (const Message& reply : replies) {
    norms.insert(norms.end(), reply.tensors.begin(), reply.tensors.end());
  }
  return norms;
}

absl::Status Optimizer::ScaleGradients(const Context& context, const at::Tensor& factor) {
  if (worker_ == nullptr) {
    DG_ASSIGN_OR_RETURN(ContextRecord* const record, RecordOf(context));
    return local_->ScaleGradients(*record, factor);
  }
  return CallAll(absl::StrCat(kScale, name_), {"", {factor}}, &context).status();
}

absl::StatusOr<double> Optimizer::ClipGradients(const Context& context, double max_norm) {
  // A negative one would turn the gradients round.
  if (!(max_norm >= 0))
    return absl::InvalidArgumentError(absl::StrCat("the largest norm is to be ", max_norm));
  DG_ASSIGN_OR_RETURN(std::vector<at::Tensor> norms, GradientNorms(context));
  if (norms.empty()) return 0.0;
  try {
    at::NoGradGuard no_grad;
    at::ScalarType type = norms[0].scalar_type();
    for (const at::Tensor& norm : norms) type = at::promote_types(type, norm.scalar_type());
    for (at::Tensor& norm : norms) norm = norm.to(type);
    // The same arithmetic as clipping in one process, so that the result is so to the last bit.
    const at::Tensor total = norms.size() == 1 ? norms[0] : at::norm(at::stack(norms));
    const double value = total.item().toDouble();
    if (!std::isfinite(value))
      return absl::OutOfRangeError(absl::StrCat("the norm of the gradients is ", value));
    const at::Tensor factor = max_norm / (total + 1e-6);
    if (factor.item().toDouble() < 1) DG_RETURN_IF_ERROR(ScaleGradients(context, factor));
    return value;
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad
