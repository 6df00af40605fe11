// The requests that handlers get, and handlers themselves.
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

// A call, as its handler gets it.
struct Request {
  WorkerRank from;
  std::string function;
  Message message;
  // The caller's context; !valid() if the call was made outside of one.
  Context context;
  // The time until which the caller waits.
  Deadline deadline = Deadline::Never();
  // Cancelled as soon as no caller waits for the answer: it has cancelled the call, given up by its
  // deadline, or is gone.
  std::shared_ptr<Cancellation> cancellation;

  // Returns the options for calls that the handler makes in turn: within the same context and
  // deadline, and cancelled with this one.
  CallOptions Nested() const {
    return {.context = context.valid() ? &context : nullptr,
            .deadline = deadline,
            .cancellation = cancellation};
  }
};

// A handler runs on the worker's pool, several at once; may block, make calls, and throw. The
// caller gets the error with its code.
using RequestHandler = std::function<absl::StatusOr<Message>(Request&)>;
// A handler whose answer may come after it has returned, and from any thread; no thread is held
// meanwhile. The request lives until then. If the caller waits no longer, the future is cancelled.
using AsyncRequestHandler = std::function<Future<Message>(Request&)>;

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_REQUEST_H_
