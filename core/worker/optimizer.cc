#include "core/worker/optimizer.h"

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"

namespace distgrad {

Optimizer::Optimizer(Worker* worker, std::unique_ptr<torch::optim::Optimizer> optimizer,
                     absl::string_view name)
    : worker_(worker), function_(absl::StrCat("distgrad.optimizer.step/", name)) {
  auto local = std::make_shared<LocalOptimizer>(std::move(optimizer));
  const absl::Status registered =
      worker->Register(function_, [local](Request& request) -> absl::StatusOr<Message> {
        if (!request.context.valid())
          return absl::InvalidArgumentError("an optimizer step needs a context");
        const absl::Status done = local->Step(*request.context.record());
        if (!done.ok()) return done;
        return Message{};
      });
  DG_CHECK(registered.ok()) << registered << ": one worker has one optimizer of a name";
}

absl::Status Optimizer::Step(const Context& context) {
  std::vector<Future<Message>> steps;
  for (const std::string& worker : worker_->names()) {
    steps.push_back(worker_->CallAsync(worker, function_, {}, {.context = &context}));
  }
  absl::Status status;
  for (Future<Message>& step : steps) status.Update(step.Wait().status());
  return status;
}

}  // namespace distgrad
