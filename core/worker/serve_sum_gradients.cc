// Finds the contexts of a sum on this worker, and adds up their gradients.
#include "core/worker/serve_sum_gradients.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "core/autograd/context_record.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/worker/context_peers.h"

namespace distgrad {

Message EncodeSumGradients(const std::vector<ContextId>& others) {
  Message message;
  WireWriter writer(&message.payload);
  for (const ContextId other : others) writer.U64(other);
  return message;
}

absl::StatusOr<Message> ServeSumGradients(const ContextRegistry& contexts, const Request& request) {
  if (!request.context.valid()) {
    return absl::InvalidArgumentError("gradients are summed in a context");
  }
  // All of them before anything changes.
  std::vector<std::shared_ptr<ContextRecord>> others;
  WireReader reader(request.message.payload);
  while (reader.remaining() > 0) {
    const ContextId id = reader.U64();
    DG_RETURN_IF_ERROR(reader.status("the contexts of a sum"));
    DG_ASSIGN_OR_RETURN(std::shared_ptr<ContextRecord> other, contexts.FindUnlessGone(id));
    if (other == request.context.record()) {
      return absl::InvalidArgumentError("a context cannot be added to itself");
    }
    if (other != nullptr) others.push_back(std::move(other));
  }
  for (const std::shared_ptr<ContextRecord>& other : others) {
    DG_RETURN_IF_ERROR(request.context.record()->TakeGradientsOf(*other));
  }
  std::vector<ContextRecord*> summed = {request.context.record().get()};
  for (const std::shared_ptr<ContextRecord>& other : others) summed.push_back(other.get());
  return Message{NamePeers(summed), {}};
}

}  // namespace distgrad
