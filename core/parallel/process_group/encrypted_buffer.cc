// What a collective does with its memory, and how it waits.
#include <chrono>
#include <limits>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "core/parallel/process_group/encrypted_context.h"

namespace distgrad {

EncryptedContext::Operation EncryptedBuffer::At(int rank, uint64_t slot, size_t offset,
                                                size_t bytes) {
  // Gloo's word for all of the rest.
  if (bytes == std::numeric_limits<size_t>::max() && offset <= size) bytes = size - offset;
  if (offset > size || bytes > size - offset || rank < 0 || rank >= context_->size ||
      rank == context_->rank) {
    throw std::logic_error("a part of a collective that has no such place or rank");
  }
  return {this, rank, slot, static_cast<char*>(ptr) + offset, bytes};
}

bool EncryptedBuffer::Wait(Side EncryptedBuffer::*side, absl::string_view what, int* rank,
                           std::chrono::milliseconds timeout) {
  // Gloo's word for that of all.
  if (timeout < std::chrono::milliseconds::zero()) timeout = context_->timeout_;
  const Deadline deadline = Deadline::After(absl::FromChrono(timeout) -
                                            absl::FromChrono(Deadline::Clock::now() - begun_));
  for (;;) {
    Sleeper sleeper;
    absl::Status status;
    {
      absl::MutexLock lock(&context_->mu_);
      Side& of = this->*side;
      if (!of.over.empty()) {
        if (rank != nullptr) *rank = of.over.front();
        of.over.pop_front();
        return true;
      }
      status = failed_.ok() ? context_->aborted_ : failed_;
      if (status.ok() && deadline.Passed()) {
        status = absl::DeadlineExceededError(
            of.begun.empty()
                ? "a collective waits for nothing"
                : absl::StrCat("rank ", of.begun.front(), " did not ", what, " in time"));
      }
      if (status.ok()) waits_ = &sleeper;
    }
    if (!status.ok()) throw StatusError(context_->Fail(status));
    sleeper.Sleep(deadline);
    absl::MutexLock lock(&context_->mu_);
    waits_ = nullptr;
  }
}

EncryptedBuffer::~EncryptedBuffer() {
  bool idle;
  {
    absl::MutexLock lock(&context_->mu_);
    idle = IsIdle();
  }
  // A collective that failed leaves its memory as soon as nobody reads or writes there any more.
  if (!idle) {
    context_->Abort(absl::CancelledError("a collective ended before its messages")).IgnoreError();
  }
  absl::MutexLock lock(&context_->mu_);
  context_->Forget(this);
  context_->mu_.Await(absl::Condition(this, &EncryptedBuffer::IsIdle));
  context_->buffers_.erase(this);
}

}  // namespace distgrad
