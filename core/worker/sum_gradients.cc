// Has every worker add up the gradients that it has, and waits for all.
#include "core/worker/sum_gradients.h"

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/autograd/context_record.h"
#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/tensor/message.h"
#include "core/worker/member_calls.h"
#include "core/worker/serve_sum_gradients.h"

namespace distgrad {
namespace {

// Two jobs give their contexts the same numbers, so one of another job would be taken for one of
// this, and the wrong gradients be moved.
absl::Status CheckIsOfJob(const Worker& worker, const std::vector<Member>& members,
                          const ContextRecord& context) {
  const ContextRecord::Holder holder = context.holder();
  std::string known_as = "no member";
  for (const Member& member : members) {
    if (member.rank != holder.rank) continue;
    if (member.incarnation == holder.incarnation) return absl::OkStatus();
    known_as = absl::StrCat("worker '", member.name, "' of incarnation ", member.incarnation);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("context ", context.id(), " of a sum is of worker ", holder.rank,
                   " of incarnation ", holder.incarnation, ", in whose place the job of worker '",
                   worker.name(), "' (", worker.rank(), ") has ", known_as,
                   ": it is of another job, or UpdateMembers() has to be called first"));
}

}  // namespace

absl::Status SumGradients(Worker& worker, absl::Span<const Context* const> contexts) {
  if (contexts.empty()) {
    return absl::InvalidArgumentError("there are no contexts whose gradients could be summed");
  }
  const std::vector<Member> members = worker.members();
  absl::flat_hash_set<ContextId> seen;
  std::vector<ContextId> others;
  for (size_t i = 0; i < contexts.size(); ++i) {
    if (contexts[i] == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("context ", i, " of a sum is null"));
    }
    if (!contexts[i]->valid()) {
      return absl::FailedPreconditionError(absl::StrCat("context ", i, " of a sum is not valid"));
    }
    DG_RETURN_IF_ERROR(CheckIsOfJob(worker, members, *contexts[i]->record()));
    const ContextId id = contexts[i]->id();
    if (!seen.insert(id).second) {
      return absl::InvalidArgumentError(absl::StrCat("context ", id, " is there twice in a sum"));
    }
    // Before a worker changes anything.
    if (contexts[i]->record()->released()) {
      return absl::FailedPreconditionError(absl::StrCat("context ", id, " is released"));
    }
    if (i > 0) others.push_back(id);
  }
  if (others.empty()) return absl::OkStatus();
  return CallMembers(worker, std::string(kSumGradients), EncodeSumGradients(others), *contexts[0])
      .status();
}

}  // namespace distgrad
