// The object behind the handle of an averager.
#ifndef DISTGRAD_CAPI_AVERAGER_OBJECT_H_
#define DISTGRAD_CAPI_AVERAGER_OBJECT_H_

#include <memory>
#include <utility>

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/include/distgrad/distgrad.h"
#include "core/parallel/process_group/gradient_averager.h"

namespace distgrad {

// Immutable once a program has its handle.
struct AveragerObject : HandleObject {
  using Handle = dg_gradient_averager;
  static constexpr HandleKind kKind = HandleKind::kAverager;
  static constexpr char kName[] = "dg_gradient_averager";

  // It may be the last that keeps the group.
  ~AveragerObject() override { EndWherePossible(std::move(averager)); }

  // Stages of pipelines have it, too.
  std::shared_ptr<GradientAverager> averager;
};

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_AVERAGER_OBJECT_H_
