// Forwards to the context's record, and ends the context with its object.
#include "core/worker/context.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <exception>

#include "core/autograd/context_record.h"
#include "core/autograd/engine.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

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
  // Passes add to it in place, which nobody else is to see.
  const bool is_shared =
      gradient.defined() &&
      (gradient.use_count() > 1 || !gradient.has_storage() || gradient.storage().use_count() > 1 ||
       !gradient.storage().resizable() ||  // another's memory, as at::from_blob() has it
       gradient.is_inference() || at::has_internal_overlap(gradient) != at::MemOverlap::No);
  try {
    // Passes add to it in any mode.
    const c10::InferenceMode off(false);
    if (is_shared) gradient = gradient.detach().clone();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return record_->SetGradient(leaf, std::move(gradient));
}

}  // namespace distgrad
