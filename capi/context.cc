// Contexts: creating and releasing them, backward, and gradients.
#include "core/worker/context.h"

#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "core/worker/sum_gradients.h"

namespace distgrad {
namespace {

struct Backward {
  std::vector<at::Tensor> roots;
  BackwardOptions options;
};

absl::StatusOr<Backward> ToBackward(const dg_tensor* const* roots, size_t root_count,
                                    const dg_backward_options* given) {
  Backward backward;
  DG_ASSIGN_OR_RETURN(backward.roots, PinTensors(roots, root_count, /*allow_null=*/false, "roots"));
  DG_ASSIGN_OR_RETURN(
      const dg_backward_options read,
      ReadOptions<dg_backward_options>(given, DG_BACKWARD_OPTIONS_INIT, "dg_backward_options"));
  DG_RETURN_IF_ERROR(CheckFlags(read.flags, DG_BACKWARD_RETAIN_GRAPH, "dg_backward_options.flags"));
  backward.options.retain_graph = (read.flags & DG_BACKWARD_RETAIN_GRAPH) != 0;
  backward.options.deadline = ToDeadline(read.timeout_ms, absl::InfinitePast());
  if (read.root_gradients != nullptr) {
    DG_ASSIGN_OR_RETURN(
        backward.options.root_gradients,
        PinTensors(read.root_gradients, root_count, /*allow_null=*/true, "root_gradients"));
  }
  return backward;
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_context_create(dg_worker* worker, dg_context** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    *out = NewHandle<ContextObject>(use->NewContext());
    return absl::OkStatus();
  });
}

dg_error* dg_context_release(dg_context* context) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> pinned, Pin<ContextObject>(context, "context"));
    pinned->context.Release();
    return absl::OkStatus();
  });
}

void dg_context_destroy(dg_context* context) noexcept {
  GuardValue(0, [&] {
    absl::StatusOr<Pinned<ContextObject>> pinned = Pin<ContextObject>(context, "context");
    // Now, and not when other threads have ended what they do with it: this ends what they do.
    if (pinned.ok() && (*pinned)->context.is_origin()) (*pinned)->context.Release();
    return 0;
  });
  DestroyHandle<ContextObject>(context);
}

uint64_t dg_context_id(const dg_context* context) noexcept {
  return GuardValue<uint64_t>(0, [&]() -> uint64_t {
    absl::StatusOr<Pinned<ContextObject>> pinned = Pin<ContextObject>(context, "context");
    return pinned.ok() ? (*pinned)->context.id() : 0;
  });
}

dg_error* dg_context_backward(const dg_context* context, const dg_tensor* const* roots,
                              size_t root_count, const dg_backward_options* options) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> pinned, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(Backward backward, ToBackward(roots, root_count, options));
    return pinned->context.Backward(std::move(backward.roots), std::move(backward.options));
  });
}

dg_error* dg_context_backward_async(const dg_context* context, const dg_tensor* const* roots,
                                    size_t root_count, const dg_backward_options* options,
                                    dg_future** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> pinned, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(Backward backward, ToBackward(roots, root_count, options));
    HandleAhead<FutureObject> future;
    future->work =
        pinned->context.BackwardAsync(std::move(backward.roots), std::move(backward.options));
    *out = future.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_context_gradient(const dg_context* context, const dg_tensor* leaf,
                              dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> pinned, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> tensor, Pin<TensorObject>(leaf, "leaf"));
    DG_ASSIGN_OR_RETURN(const at::Tensor gradient, pinned->context.Gradient(tensor->tensor));
    *out = NewTensorHandle(gradient);
    return absl::OkStatus();
  });
}

dg_error* dg_context_set_gradient(const dg_context* context, const dg_tensor* leaf,
                                  const dg_tensor* gradient) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> pinned, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> tensor, Pin<TensorObject>(leaf, "leaf"));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> value, Pin<TensorObject>(gradient, "gradient"));
    return pinned->context.SetGradient(tensor->tensor, value->tensor);
  });
}

dg_error* dg_context_gradients(const dg_context* context,
                               void (*visit)(void* user_data, const dg_tensor* leaf,
                                             const dg_tensor* gradient),
                               void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    DG_ASSIGN_OR_RETURN(const Pinned<ContextObject> pinned, Pin<ContextObject>(context, "context"));
    DG_ASSIGN_OR_RETURN(const auto gradients, pinned->context.Gradients());
    std::vector<std::pair<OwnedHandle<TensorObject>, OwnedHandle<TensorObject>>> handles;
    for (const auto& [leaf, gradient] : gradients) {
      handles.emplace_back(NewOwnedHandle<TensorObject>(leaf),
                           NewOwnedHandle<TensorObject>(gradient));
    }
    for (const auto& [leaf, gradient] : handles) visit(user_data, leaf.get(), gradient.get());
    return absl::OkStatus();
  });
}

dg_error* dg_worker_sum_gradients(dg_worker* worker, const dg_context* const* contexts,
                                  size_t count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_RETURN_IF_ERROR(CheckArray(contexts, count, "contexts"));
    std::vector<Pinned<ContextObject>> pinned;
    std::vector<const Context*> summed;
    for (size_t i = 0; i < count; ++i) {
      DG_ASSIGN_OR_RETURN(Pinned<ContextObject> each,
                          PinElement<ContextObject>(contexts, i, "contexts"));
      summed.push_back(&each->context);
      pinned.push_back(std::move(each));
    }
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    return SumGradients(*use.get(), summed);
  });
}

}  // extern "C"
