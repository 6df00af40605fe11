// The worker that a call goes to, and the options of the call.
#ifndef DISTGRAD_CORE_WORKER_CALL_OPTIONS_H_
#define DISTGRAD_CORE_WORKER_CALL_OPTIONS_H_

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/cancellation.h"
#include "core/base/deadline.h"
#include "core/worker/context.h"

namespace distgrad {

// A worker by its name or its rank. Meant for parameters: it does not keep the name.
class WorkerRef {
 public:
  WorkerRef(absl::string_view name) : name_(name) {}    // NOLINT: implicit
  WorkerRef(const std::string& name) : name_(name) {}   // NOLINT: implicit
  WorkerRef(const char* name) : name_(name) {}          // NOLINT: implicit
  WorkerRef(int rank) : by_rank_(true), rank_(rank) {}  // NOLINT: implicit

  bool by_rank() const { return by_rank_; }
  int rank() const { return rank_; }
  absl::string_view name() const { return name_; }

 private:
  bool by_rank_ = false;
  int rank_ = 0;
  absl::string_view name_;
};

struct CallOptions {
  // Records the call for the backward of this context. Null: of none; one that is not valid() fails
  // the call with kFailedPrecondition; one of another worker of this process fails it with
  // kInvalidArgument.
  const Context* context = nullptr;
  // The call fails with kDeadlineExceeded if it is not answered by then. Default: now plus
  // WorkerOptions::timeout.
  Deadline deadline = absl::InfinitePast();
  // Cancels the call too. Null: only the future's Cancel() does.
  std::shared_ptr<Cancellation> cancellation = nullptr;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALL_OPTIONS_H_
