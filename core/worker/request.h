// What a handler gets of a call, and handlers themselves.
#ifndef DISTGRAD_CORE_WORKER_REQUEST_H_
#define DISTGRAD_CORE_WORKER_REQUEST_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/cancellation.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/tensor/message.h"
#include "core/worker/call_options.h"
#include "core/worker/context.h"

namespace distgrad {

// What a handler gets.
struct Request {
  WorkerRank from;
  std::string function;
  Message message;
  // The caller's context; !valid() if the call was made outside of one.
  Context context;
  // The caller waits no longer than this.
  Deadline deadline = Deadline::Never();
  // Cancelled as soon as nobody waits for the answer: the caller has cancelled the call, given up
  // by its deadline, or is gone.
  std::shared_ptr<Cancellation> cancellation;

  // For calls that the handler makes in turn: within the same context and deadline, and cancelled
  // with this one.
  CallOptions Nested() const {
    return {.context = context.valid() ? &context : nullptr,
            .deadline = deadline,
            .cancellation = cancellation};
  }
};

// Runs on the worker's pool, several at once; may block, make calls, and throw. The caller gets
// the error with its code.
using RequestHandler = std::function<absl::StatusOr<Message>(Request&)>;
// The same, but the answer may come after the handler has returned, and from any thread; no thread
// is held meanwhile. The request lives until then. If the caller waits no longer, the future is
// cancelled.
using AsyncRequestHandler = std::function<Future<Message>(Request&)>;

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_REQUEST_H_
