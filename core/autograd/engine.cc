#include "core/autograd/engine.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/autograd/executor/source_node.h"
#include "core/autograd/pass_run.h"
#include "core/base/check.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using RunHere = PassRun::RunHere;

std::string Shape(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ", "),
                      "]");
}

absl::StatusOr<PassRun::Roots> CheckRoots(std::vector<at::Tensor> roots,
                                          std::vector<at::Tensor> gradients) {
  if (roots.empty()) return absl::InvalidArgumentError("backward needs at least one root");
  if (!gradients.empty() && gradients.size() != roots.size()) {
    return absl::InvalidArgumentError(absl::StrCat("backward got ", roots.size(), " roots and ",
                                                   gradients.size(), " root gradients"));
  }
  gradients.resize(roots.size());
  for (size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    if (!root.defined())
      return absl::InvalidArgumentError(absl::StrCat("root ", i, " is undefined"));
    if (!root.requires_grad()) {
      return absl::InvalidArgumentError(absl::StrCat("root ", i, " does not require grad"));
    }
    if (!root.grad_fn()) {
      return absl::InvalidArgumentError(
          absl::StrCat("root ", i, " is a leaf: nothing was computed to get it"));
    }
    if (!gradients[i].defined()) {
      if (root.numel() != 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("root ", i, " is ", Shape(root),
                         ", not a scalar: give its gradient in root_gradients"));
      }
      gradients[i] = at::ones_like(root);
    } else if (gradients[i].sizes() != root.sizes() ||
               gradients[i].scalar_type() != root.scalar_type() ||
               gradients[i].device() != root.device()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the gradient of root ", i, " is ", Shape(gradients[i]), " on ",
          gradients[i].device().str(), ", the root ", Shape(root), " on ", root.device().str()));
    }
  }
  return PassRun::Roots{std::move(roots), std::move(gradients)};
}

}  // namespace

Engine::Engine(WorkerId self, EngineNetwork* network, ThreadPool* pool, Clock* clock,
               ContextRegistry* contexts)
    : self_(self), network_(network), pool_(pool), clock_(clock), contexts_(contexts) {}

absl::StatusOr<EdgeId> Engine::RecordSend(ContextRecord& context, WorkerId to,
                                          absl::Span<const at::Tensor> tensors) {
  std::vector<at::Tensor> recorded;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) recorded.push_back(tensor);
  }
  if (recorded.empty()) return EdgeId{0};
  const EdgeId edge = MakeId(self_, ++last_edge_);
  DG_RETURN_IF_ERROR(context.AddSend({{edge, to}, MakeSourceNode(recorded)}));
  return edge;
}

absl::Status Engine::RecordRecv(const std::shared_ptr<ContextRecord>& context, EdgeEnd end,
                                absl::Span<at::Tensor> tensors) {
  absl::StatusOr<std::pair<size_t, std::vector<std::shared_ptr<PassRun>>>> added =
      context->AddRecv(RecvNode::Attach(context->id(), end, tensors));
  DG_RETURN_IF_ERROR(added.status());
  for (const auto& run : added->second) run->OnNewRecv(added->first, end);
  return absl::OkStatus();
}

Future<Unit> Engine::Backward(const std::shared_ptr<ContextRecord>& context,
                              std::vector<at::Tensor> roots, BackwardOptions options,
                              bool run_here) {
  absl::StatusOr<PassRun::Roots> checked = absl::InternalError("unchecked");
  try {
    checked = CheckRoots(std::move(roots), std::move(options.root_gradients));
  } catch (...) {
    checked = StatusFromException(std::current_exception());
  }
  if (!checked.ok()) return Future<Unit>::Of(checked.status());
  if (closed_) return Future<Unit>::Of(absl::CancelledError("this worker is shutting down"));
  const PassId pass = MakeId(self_, ++last_pass_);
  auto run =
      std::make_shared<PassRun>(this, context, pass, options.retain_graph, *std::move(checked));
  ContextRecord::Found found = context->FindOrAddPass(pass, [&] { return run; });
  if (found.run == nullptr) return Future<Unit>::Of(found.over);
  return run->Begin(options.deadline, run_here ? RunHere::kYes : RunHere::kNo);
}

// ----------------------------------------------------------------------------- From the network

void Engine::OnNotice(WorkerId from, Packet packet, size_t offset) {
  absl::StatusOr<std::vector<Notice>> notices = absl::InternalError("unread");
  try {
    notices = ReadNotices(packet, offset);
  } catch (...) {
    notices = StatusFromException(std::current_exception());
  }
  if (!notices.ok()) {
    // What was in it is lost, and with it every pass of that worker.
    DG_LOG(ERROR) << "a notice from worker " << network_->Describe(from)
                  << " is malformed: " << notices.status();
    return OnPeerLost(
        from, Annotate(notices.status(),
                       absl::StrCat("a malformed notice from worker ", network_->Describe(from))));
  }
  bool runs_nodes = false;
  for (const Notice& notice : *notices) {
    runs_nodes |= notice.kind == Notice::Kind::kEdge || notice.kind == Notice::Kind::kStart;
  }
  if (!runs_nodes) return Handle(from, *std::move(notices), RunHere::kNo);
  pool_->Schedule([this, from, notices = *std::move(notices)]() mutable {
    Handle(from, std::move(notices), RunHere::kYes);
  });
}

void Engine::Handle(WorkerId from, std::vector<Notice> notices, RunHere here) {
  // Those of one pass go together, so that what they feed is run in parallel.
  for (auto first = notices.begin(); first != notices.end();) {
    auto last = first + 1;
    if (first->kind == Notice::Kind::kRelease) {
      ReleaseFrom(first->context, from);
    } else {
      while (last != notices.end() && last->kind != Notice::Kind::kRelease &&
             last->context == first->context && last->pass == first->pass) {
        ++last;
      }
      HandleOfOnePass(
          from, std::vector<Notice>(std::make_move_iterator(first), std::make_move_iterator(last)),
          here);
    }
    first = last;
  }
}

void Engine::HandleOfOnePass(WorkerId from, std::vector<Notice> notices, RunHere here) {
  const Notice& first = notices.front();
  const ContextId id = first.context;
  const PassId pass = first.pass;
  absl::StatusOr<std::shared_ptr<ContextRecord>> context = contexts_->FindOrAdd(id);
  ContextRecord::Found found;
  if (!context.ok() || closed_) {
    found.over =
        Annotate(context.ok() ? absl::CancelledError("it is shutting down") : context.status(),
                 absl::StrCat("on worker ", network_->Describe(self_)));
  } else {
    found = (*context)->FindOrAddPass(pass, [&] {
      return std::make_shared<PassRun>(this, *context, pass, first.retain_graph, std::nullopt);
    });
  }
  if (found.run != nullptr) return found.run->OnNotices(from, std::move(notices), here);
  for (const Notice& notice : notices) AnswerForPassThatIsOver(from, notice, found.over);
}

void Engine::AnswerForPassThatIsOver(WorkerId to, const Notice& notice,
                                     const absl::Status& status) {
  const bool counted =
      notice.kind == Notice::Kind::kStart || (notice.kind == Notice::Kind::kEdge && !notice.late);
  if (!counted) return;
  Notice answer{.kind = status.ok() ? Notice::Kind::kAck : Notice::Kind::kAbort,
                .context = notice.context,
                .pass = notice.pass,
                .retain_graph = notice.retain_graph,
                .count = 1,
                .status = status};
  Packet packet = network_->NewNotice();
  if (AppendNotice(answer, &packet).ok()) network_->Notify(to, std::move(packet));
}

void Engine::OnPeerLost(WorkerId peer, const absl::Status& why) {
  for (const auto& context : contexts_->All()) {
    for (const auto& run : context->Passes()) run->OnPeerLost(peer, why);
    if (MakerOf(context->id()) == peer) ReleaseFrom(context->id(), peer);
  }
}

// ------------------------------------------------------------------------------------- Release

void Engine::Release(ContextId context) { ReleaseFrom(context, std::nullopt); }

void Engine::ReleaseFrom(ContextId id, std::optional<WorkerId> from) {
  std::shared_ptr<ContextRecord> context = contexts_->Remove(id);
  if (context == nullptr) return;
  const absl::Status released = absl::CancelledError("the context was released");
  for (const auto& run : context->Release()) run->Fail(released);
  for (WorkerId peer : context->Peers()) {
    if (peer == from || peer == self_) continue;
    Packet packet = network_->NewNotice();
    const absl::Status appended =
        AppendNotice({.kind = Notice::Kind::kRelease, .context = id}, &packet);
    DG_CHECK(appended.ok()) << appended;
    network_->Notify(peer, std::move(packet));
  }
}

void Engine::Close() {
  closed_ = true;
  for (const auto& context : contexts_->All()) {
    for (const auto& run : context->Passes())
      run->Fail(absl::CancelledError("this worker is shutting down"));
  }
}

}  // namespace distgrad
