// Reports what a worker does: metrics, traces, and the passes that it waits for.
#include <string>
#include <utility>
#include <vector>

#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "core/autograd/state.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

// A pass, and what its state points to.
struct BorrowedPass {
  explicit BorrowedPass(const PassState& pass) {
    for (const EdgeEnd& end : pass.awaited) awaited.push_back(end.peer);
    for (const auto& [worker, count] : pass.unacknowledged) {
      unacknowledged.insert(unacknowledged.end(), count, worker);
    }
    state.struct_size = sizeof(state);
    state.id = pass.id;
    state.flags = pass.retain_graph ? DG_BACKWARD_RETAIN_GRAPH : 0;
    state.busy = pass.busy;
    state.awaited = awaited.data();
    state.awaited_count = awaited.size();
    state.unacknowledged = unacknowledged.data();
    state.unacknowledged_count = unacknowledged.size();
  }
  BorrowedPass(BorrowedPass&&) noexcept = default;  // vectors keep their memory

  std::vector<uint32_t> awaited, unacknowledged;
  dg_pass_state state = {};
};

void Visit(const ContextState& context,
           void (*visit)(void* user_data, const dg_context_state* context), void* user_data) {
  std::vector<BorrowedPass> passes(context.passes.begin(), context.passes.end());
  std::vector<const dg_pass_state*> pointers;
  for (const BorrowedPass& pass : passes) pointers.push_back(&pass.state);
  const std::vector<uint32_t> peers(context.peers.begin(), context.peers.end());
  dg_context_state state = {};
  state.struct_size = sizeof(state);
  state.id = context.id;
  state.sends = context.sends;
  state.receives = context.receives;
  state.gradients = context.gradients;
  state.peers = peers.data();
  state.peer_count = peers.size();
  state.passes = pointers.data();
  state.pass_count = pointers.size();
  visit(user_data, &state);
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

size_t dg_worker_context_count(const dg_worker* worker) noexcept {
  return GuardValue<size_t>(0, [&]() -> size_t {
    absl::StatusOr<SharedWorker::Use> use = UseWorker(worker);
    return use.ok() ? (*use)->context_count() : 0;
  });
}

dg_error* dg_worker_metrics_text(const dg_worker* worker, dg_message** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    *out = NewHandle<MessageObject>(Message{ToPrometheus(use->Metrics()), {}});
    return absl::OkStatus();
  });
}

dg_error* dg_worker_start_trace(dg_worker* worker, const dg_trace_options* options) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(
        const dg_trace_options read,
        ReadOptions<dg_trace_options>(options, DG_TRACE_OPTIONS_INIT, "dg_trace_options"));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    TraceOptions core_options;
    if (read.max_bytes > 0) core_options.max_bytes = read.max_bytes;
    return use.shared().trace().Start(*use.get(), core_options);
  });
}

dg_error* dg_worker_stop_trace(dg_worker* worker, dg_message** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    HandleAhead<MessageObject> made;
    DG_ASSIGN_OR_RETURN(made->message.payload, use.shared().trace().Stop(*use.get()));
    *out = made.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_worker_contexts(const dg_worker* worker,
                             void (*visit)(void* user_data, const dg_context_state* context),
                             void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    std::vector<ContextState> contexts;
    {
      DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
      contexts = use->Contexts();
    }
    for (const ContextState& context : contexts) Visit(context, visit, user_data);
    return absl::OkStatus();
  });
}

}  // extern "C"
