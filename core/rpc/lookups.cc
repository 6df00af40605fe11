#include "core/rpc/lookups.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace distgrad {

void Lookups::Find(WorkerId worker, Found found) {
  Ask([this, worker] { return members_->Find(worker); }, std::move(found));
}

void Lookups::Find(std::string name, Found found) {
  Ask([this, name = std::move(name)] { return members_->Find(name); }, std::move(found));
}

void Lookups::Ask(absl::AnyInvocable<absl::StatusOr<WorkerInfo>()> question, Found found) {
  if (++waiting_ > kMaxWaiting) {
    --waiting_;
    return found(absl::ResourceExhaustedError(
        absl::StrCat("more than ", kMaxWaiting, " questions wait for the store")));
  }
  const auto cancelled = [] { return absl::CancelledError("this worker is shutting down"); };
  // Shared, for a pool that is closed destroys its task.
  const auto asked = std::make_shared<Found>(std::move(found));
  if (const absl::Status started = thread_.Start(); !started.ok()) {
    --waiting_;
    return (*asked)(started);
  }
  const bool scheduled =
      thread_.Schedule([this, question = std::move(question), asked, cancelled]() mutable {
        --waiting_;
        (*asked)(closed_ ? absl::StatusOr<WorkerInfo>(cancelled()) : question());
      });
  if (scheduled) return;
  --waiting_;
  (*asked)(cancelled());
}

void Lookups::Run(absl::AnyInvocable<void()> task) {
  if (!thread_.Start().ok()) return;
  thread_.Schedule([this, task = std::move(task)]() mutable {
    if (!closed_) task();
  });
}

void Lookups::Close() {
  closed_ = true;
  thread_.Join();
}

}  // namespace distgrad
