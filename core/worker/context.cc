// Forwards to the context's record, and ends the context with its object.
#include "core/worker/context.h"

#include "core/autograd/context_record.h"
#include "core/autograd/engine.h"
#include "core/base/status.h"

namespace distgrad {

Context& Context::operator=(Context&& other) noexcept {
  if (this == &other) return *this;
  if (is_origin_) Release();
  owner_ = std::move(other.owner_);
  record_ = std::move(other.record_);
  is_origin_ = other.is_origin_;
  return *this;
}

Context::~Context() {
  if (is_origin_) Release();
}

void Context::Release() noexcept {
  if (record_ != nullptr) owner_->engine().Release(record_->id());
}

ContextId Context::id() const { return valid() ? record_->id() : 0; }

absl::Status Context::CheckValid() const {
  return valid() ? absl::OkStatus() : absl::FailedPreconditionError("there is no context");
}

absl::Status Context::Backward(std::vector<at::Tensor> roots, BackwardOptions options) const {
  DG_RETURN_IF_ERROR(CheckValid());
  if (options.deadline == absl::InfinitePast()) options.deadline = owner_->DefaultDeadline();
  return owner_->engine()
      .Backward(record_, std::move(roots), std::move(options), /*run_here=*/true)
      .Wait()
      .status();
}

Future<Unit> Context::BackwardAsync(std::vector<at::Tensor> roots, BackwardOptions options) const {
  if (!valid()) return Future<Unit>::Of(CheckValid());
  if (options.deadline == absl::InfinitePast()) options.deadline = owner_->DefaultDeadline();
  return owner_->engine().Backward(record_, std::move(roots), std::move(options),
                                   /*run_here=*/false);
}

absl::StatusOr<at::Tensor> Context::Gradient(const at::Tensor& leaf) const {
  DG_RETURN_IF_ERROR(CheckValid());
  return record_->Gradient(leaf);
}

absl::StatusOr<std::vector<std::pair<at::Tensor, at::Tensor>>> Context::Gradients() const {
  DG_RETURN_IF_ERROR(CheckValid());
  return record_->Gradients();
}

absl::Status Context::SetGradient(const at::Tensor& leaf, at::Tensor gradient) const {
  DG_RETURN_IF_ERROR(CheckValid());
  return record_->SetGradient(leaf, std::move(gradient));
}

}  // namespace distgrad
