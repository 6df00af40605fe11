// Asks for the last context of each member, and reads the answers.
#include "core/worker/last_context.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/base/status.h"
#include "core/base/wire.h"

namespace distgrad {

absl::StatusOr<Message> ServeLastContext(const ContextRegistry& contexts) {
  Message message;
  WireWriter(&message.payload).U64(contexts.last());
  return message;
}

void LastContexts::ComeBack(absl::Span<const WorkerInfo> ever) {
  contexts_.SetComesBack();
  absl::MutexLock lock(&mu_);
  for (const WorkerInfo& each : ever) {
    if (each.rank == self_) continue;
    contexts_.SetOlder(LastIdOf(each.rank, each.incarnation));
    if (!each.left) unheard_.emplace(each.rank, false);
  }
}

void LastContexts::AskAll(absl::Duration patience) {
  std::vector<std::pair<WorkerRank, Answer>> answers;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [maker, is_asked] : unheard_) answers.emplace_back(maker, ContextId{0});
  }
  for (int round = 0; round < 2; ++round) {
    const Deadline deadline = Deadline::After(patience);
    std::vector<Future<Message>> calls;
    for (const auto& [maker, last] : answers) {
      // Who has not answered has had its time.
      calls.push_back(last.ok() ? caller_.Call(maker, kLastContext, Message(),
                                               {.deadline = deadline}, /*wait=*/true)
                                : Future<Message>::Of(last.status()));
    }
    for (size_t i = 0; i < calls.size(); ++i) {
      answers[i].second = Read(answers[i].first, calls[i].Take());
    }
  }
  for (const auto& [maker, last] : answers) Take(maker, last);
}

void LastContexts::AskAgain(WorkerRank maker, std::weak_ptr<void> owner) {
  {
    absl::MutexLock lock(&mu_);
    const auto found = unheard_.find(maker);
    if (found == unheard_.end() || std::exchange(found->second, true)) return;
  }
  absl::Cleanup ask_next_time = [&] { Take(maker, absl::CancelledError("")); };
  caller_.Call(maker, kLastContext, Message(), {}, /*wait=*/false)
      .Then([this, owner = std::move(owner), maker](const absl::StatusOr<Message>& answer) {
        if (const auto alive = owner.lock()) Take(maker, Read(maker, answer));
      });
  std::move(ask_next_time).Cancel();
}

LastContexts::Answer LastContexts::Read(WorkerRank maker, const absl::StatusOr<Message>& answer) {
  DG_RETURN_IF_ERROR(answer.status());
  WireReader reader(answer->payload);
  const ContextId last = reader.U64();
  DG_RETURN_IF_ERROR(reader.status("the last context of a worker"));
  // It speaks for its own contexts alone.
  if (MakerOf(last) != maker) return absl::InvalidArgumentError("a context of another worker");
  return last;
}

void LastContexts::Take(WorkerRank maker, const Answer& last) {
  absl::MutexLock lock(&mu_);
  const auto found = unheard_.find(maker);
  if (found == unheard_.end()) return;
  found->second = false;
  if (!last.ok()) return;
  contexts_.SetOlder(*last);
  unheard_.erase(found);
}

}  // namespace distgrad
