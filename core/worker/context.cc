#include "core/worker/context.h"

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

void Context::Release() {
  if (record_ != nullptr) owner_->engine().Release(record_->id());
}

absl::Status Context::Backward(std::vector<at::Tensor> roots, BackwardOptions options) const {
  if (!valid()) return absl::FailedPreconditionError("backward of no context");
  if (options.deadline == absl::InfinitePast()) options.deadline = owner_->DefaultDeadline();
  return owner_->engine()
      .Backward(record_, std::move(roots), std::move(options), /*run_here=*/true)
      .Wait()
      .status();
}

Future<Unit> Context::BackwardAsync(std::vector<at::Tensor> roots, BackwardOptions options) const {
  if (!valid()) return Future<Unit>::Of(absl::FailedPreconditionError("backward of no context"));
  if (options.deadline == absl::InfinitePast()) options.deadline = owner_->DefaultDeadline();
  return owner_->engine().Backward(record_, std::move(roots), std::move(options),
                                   /*run_here=*/false);
}

}  // namespace distgrad
