// One training step across workers: what was sent and received under it, and the gradients that
// its backward gave.
#ifndef DISTGRAD_CORE_WORKER_CONTEXT_H_
#define DISTGRAD_CORE_WORKER_CONTEXT_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/autograd/backward_options.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/base/ids.h"

namespace distgrad {

class ContextRecord;
class Engine;

// A handle of a context: made by Worker::NewContext() on its origin, where its end releases the
// context on every worker; and given to handlers, where its end releases nothing. Movable.
// Thread-safe, but for moves.
class Context {
 public:
  // The worker, as far as a context needs it; outlives it.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual Engine& engine() = 0;
    virtual Deadline DefaultDeadline() = 0;
  };

  Context() = default;
  Context(std::shared_ptr<Owner> owner, std::shared_ptr<ContextRecord> record, bool is_origin)
      : owner_(std::move(owner)), record_(std::move(record)), is_origin_(is_origin) {}
  Context(Context&& other) noexcept = default;
  Context& operator=(Context&& other) noexcept;
  ~Context();

  // Returns false for Context(), for one moved from, and for the context of a request that was made
  // outside any. On a context that is not valid every method but Release() fails with
  // kFailedPrecondition.
  bool valid() const { return record_ != nullptr; }
  // Returns the context's number, the same on all workers; 0 if it is not valid.
  ContextId id() const;

  // Returns whether that worker made it, or got it with a request. Other workers of the process
  // that take part have a Context of their own.
  bool IsOf(const Owner& owner) const { return owner_.get() == &owner; }

  // Returns whether its end releases the context.
  bool is_origin() const { return is_origin_; }

  // Computes the gradients of everything that `roots` depend on, on every worker, and waits until
  // they are in place. Roots are real scalars that require grad, unless options.root_gradients has
  // their gradients. Gradients add up over several passes; none goes to any tensor's grad().
  // Without options.retain_graph it can be called once.
  //
  // An error of a node names the worker and the node. After an error the context is good for
  // Release() only.
  absl::Status Backward(std::vector<at::Tensor> roots, BackwardOptions options = {}) const;
  // Does the same without waiting. Future::Cancel() ends the pass on every worker, with kCancelled;
  // the context is then good for Release() only, too.
  Future<Unit> BackwardAsync(std::vector<at::Tensor> roots, BackwardOptions options = {}) const;

  // Returns the gradient of a leaf of this worker; kNotFound if no root depends on it,
  // kFailedPrecondition once the context is released.
  absl::StatusOr<at::Tensor> Gradient(const at::Tensor& leaf) const;
  // Returns all leaves of this worker that have a gradient, each with it, in no order. Fails as
  // Gradient() does, but not with kNotFound: there may be none.
  absl::StatusOr<std::vector<std::pair<at::Tensor, at::Tensor>>> Gradients() const;
  // Replaces the gradient of a leaf that has one. A tensor that somebody else holds is copied.
  // kInvalidArgument unless it has the sizes, dtype and device of the leaf; else it fails as
  // Gradient() does.
  absl::Status SetGradient(const at::Tensor& leaf, at::Tensor gradient) const;

  // Ends the context on every worker; a pass in flight fails. Idempotent, does not wait. Needs no
  // memory; where there is none, the other workers may hear of it with the next release only.
  void Release() noexcept;

  const std::shared_ptr<ContextRecord>& record() const { return record_; }

 private:
  absl::Status CheckValid() const;

  std::shared_ptr<Owner> owner_;
  std::shared_ptr<ContextRecord> record_;
  bool is_origin_ = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CONTEXT_H_
