// The object behind the handle of an optimizer.
#ifndef DISTGRAD_CAPI_OPTIMIZER_OBJECT_H_
#define DISTGRAD_CAPI_OPTIMIZER_OBJECT_H_

#include <memory>
#include <utility>

#include "capi/handles.h"
#include "capi/include/distgrad/distgrad.h"
#include "capi/worker_object.h"
#include "core/worker/optimizer.h"

namespace distgrad {

// Immutable once a program has its handle.
struct OptimizerObject : HandleObject {
  using Handle = dg_optimizer;
  static constexpr HandleKind kKind = HandleKind::kOptimizer;
  static constexpr char kName[] = "dg_optimizer";

  explicit OptimizerObject(std::shared_ptr<SharedWorker> worker) : worker(std::move(worker)) {}
  const std::shared_ptr<SharedWorker> worker;  // null of a local one
  // Not used once the worker is gone. Parts of checkpoints have it, too.
  std::shared_ptr<Optimizer> optimizer;
};

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_OPTIMIZER_OBJECT_H_
