// Receives the notices of other workers, begins passes, and chooses the threads that run them.
#include "core/autograd/engine.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/autograd/executor/source_node.h"
#include "core/autograd/pass_run.h"
#include "core/base/await_memory.h"
#include "core/base/check.h"
#include "core/base/event_loop.h"
#include "core/base/log.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

std::string Shape(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ", "),
                      "]");
}

absl::Status ShuttingDown() { return absl::CancelledError("this worker is shutting down"); }

absl::Status WasReleased() { return absl::CancelledError("the context was released"); }

// Whether the notice is to be acknowledged.
bool IsCounted(const Notice& notice) {
  return notice.kind == Notice::Kind::kStart ||
         (notice.kind == Notice::Kind::kEdge && !notice.uncounted);
}

// Whether its receiver takes part in the pass from then on, if it does not yet.
bool MayBeNew(const Notice& notice) {
  return IsCounted(notice) || notice.kind == Notice::Kind::kAbort;
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
      return absl::InvalidArgumentError(
          absl::StrCat("root ", i,
                       " does not require grad: nothing that does was used to compute it, or the "
                       "call that gave it was made without a context"));
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
      if (root.is_complex()) {
        return absl::InvalidArgumentError(
            absl::StrCat("root ", i,
                         " is complex: give its gradient in root_gradients, or take a "
                         "real number of it, as its real part or its absolute value"));
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
  ReadyMark ready(gradients);
  return PassRun::Roots{std::move(roots), std::move(gradients), std::move(ready)};
}

}  // namespace

Engine::Engine(WorkerRank self, Incarnation incarnation, EngineNetwork* network, ThreadPool* pool,
               Clock* clock, TraceRecorder* trace, ContextRegistry* contexts, const Limits& limits)
    : services_{.self = self,
                .network = *network,
                .pool = *pool,
                .clock = *clock,
                .trace = *trace,
                .limits = limits,
                .device_threads = std::make_unique<DeviceThreads>(pool, clock)},
      contexts_(contexts),
      last_edge_(FirstCounter(incarnation)),
      last_pass_(FirstCounter(incarnation)) {}

std::shared_ptr<SourceNode> Engine::MakeSend(absl::Span<const at::Tensor> tensors) {
  std::vector<at::Tensor> recorded;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) recorded.push_back(tensor);
  }
  return recorded.empty() ? nullptr : MakeSourceNode(recorded);
}

absl::StatusOr<EdgeId> Engine::RecordSend(ContextRecord& context, WorkerRank to,
                                          std::shared_ptr<SourceNode> send, bool of_operator) {
  if (send == nullptr) return EdgeId{0};
  const EdgeId edge = MakeId(services_.self, ++last_edge_);
  DG_RETURN_IF_ERROR(context.AddSend({{edge, to}, std::move(send), of_operator}));
  return edge;
}

void Engine::DropSend(ContextRecord& context, EdgeId edge) {
  std::shared_ptr<SourceNode> dropped = context.RemoveSend(edge);
  // A pass that is here already would wait for it.
  AwaitMemory([&] {
    for (const auto& run : context.Passes()) run->OnLostSend(edge);
  });
  if (dropped != nullptr) EndOnPool(services_.pool, std::move(dropped));
}

absl::Status Engine::RecordRecv(const std::shared_ptr<ContextRecord>& context, EdgeEnd end,
                                absl::Span<at::Tensor> tensors) {
  absl::StatusOr<std::pair<size_t, std::vector<std::shared_ptr<PassHandle>>>> added =
      context->AddRecv({end, RecvNode::Attach(context->id(), context->holder(), end, tensors)});
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
  if (closed_) return Future<Unit>::Of(ShuttingDown());
  std::shared_ptr<PassRun> run;
  const absl::Status begun =
      context
          ->BeginPass(services_.self,
                      [&](PassId settled) {
                        run = std::make_shared<PassRun>(
                            &services_, context, MakeId(services_.self, ++last_pass_), settled,
                            options.retain_graph, *std::move(checked));
                        return run;
                      })
          .status();
  if (!begun.ok()) return Future<Unit>::Of(begun);
  if (closed_) run->Fail(ShuttingDown());  // Close() may have missed it
  return run->Begin(services_.clock.TimeOf(options.deadline),
                    run_here && MayRunNodesHere() ? RunHere::kYes : RunHere::kNo);
}

// ----------------------------------------------------------------------------- From the network

absl::Status Engine::OnNotice(WorkerRank from, Packet packet, size_t offset,
                              absl::FunctionRef<bool()> is_cut_off) {
  absl::StatusOr<std::vector<Notice>> notices = std::vector<Notice>();
  try {
    if (packet.segments_status.ok()) {
      notices = ReadNotices(packet, offset, message_limits());
    } else {
      notices = packet.segments_status;
    }
  } catch (...) {
    notices = StatusFromException(std::current_exception());
  }
  absl::Status read = notices.status();
  for (size_t i = 0; read.ok() && i < notices->size(); ++i) read = CheckIds((*notices)[i]);
  if (!read.ok()) {
    read = Annotate(
        read, absl::StrCat("reading gradients from worker ", services_.network.Describe(from)));
    DG_LOG(ERROR) << read;
    return read;
  }
  const bool runs_nodes = absl::c_any_of(*notices, [](const Notice& notice) {
    return notice.kind == Notice::Kind::kEdge || notice.kind == Notice::Kind::kStart;
  });
  Batches batches = Sort(from, *std::move(notices), is_cut_off);
  if (!runs_nodes) {
    Handle(from, std::move(batches), RunHere::kNo);
    return absl::OkStatus();
  }
  // A hand-over to the pool would cost more than what there is to do.
  EventLoop* const loop = EventLoop::Current();
  if (loop != nullptr && CheapToRunInline(batches)) {
    loop->Run([this, from, batches = std::move(batches)]() mutable {
      // This may be another thread: the one that leads the loop by then.
      Handle(from, std::move(batches), MayRunNodesHere() ? RunHere::kCheap : RunHere::kNo);
    });
    return absl::OkStatus();
  }
  services_.pool.ScheduleInline([this, from, batches = std::move(batches)]() mutable {
    Handle(from, std::move(batches), RunHere::kYes);
  });
  return absl::OkStatus();
}

absl::Status Engine::CheckIds(const Notice& notice) const {
  const bool of_context =
      notice.kind == Notice::Kind::kRelease || notice.kind == Notice::Kind::kKnown;
  // 0 is no pass, and would be the end of none.
  if (of_context != (notice.pass == 0)) {
    return absl::InvalidArgumentError("a notice without its pass");
  }
  // Gradients go to who made the edge.
  if (notice.kind == Notice::Kind::kEdge && MakerOf(notice.edge) != services_.self) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a gradient for edge ", notice.edge, ", which is worker ", MakerOf(notice.edge), "'s"));
  }
  // An initiator knows of its own passes alone that they are over everywhere.
  if (notice.settled != 0 && MakerOf(notice.settled) != MakerOf(notice.pass)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pass ", notice.pass, " settles that of another worker, ", notice.settled));
  }
  return absl::OkStatus();
}

// Those of one pass go together, so that what they feed is run in parallel. What they tell of a
// context is known from now on, and not from when a thread handles them: if `from` is lost in
// between, OnPeerLost() finds the context, and `from` among its peers.
Engine::Batches Engine::Sort(WorkerRank from, std::vector<Notice> notices,
                             absl::FunctionRef<bool()> is_cut_off) {
  Batches batches;
  for (auto first = notices.begin(); first != notices.end();) {
    auto last = first + 1;
    while (last != notices.end() && last->pass != 0 && last->context == first->context &&
           last->pass == first->pass) {
      ++last;
    }
    Batch& batch = batches.emplace_back();
    if (std::any_of(first, last, MayBeNew)) {
      batch.context = contexts_->FindOrAdd(first->context, /*edge=*/0);
      // Of one that has been released meanwhile nothing is to be known any more.
      if (batch.context.ok()) AddPeer(**batch.context, from, is_cut_off).IgnoreError();
    } else if (first->pass != 0) {
      batch.context = contexts_->Find(first->context);
    }
    batch.notices.assign(std::make_move_iterator(first), std::make_move_iterator(last));
    first = last;
  }
  return batches;
}

bool Engine::CheapToRunInline(const Batches& batches) {
  constexpr size_t kNotices = 64;
  if (batches.size() > 1) return false;
  const Batch& batch = batches.front();
  if (batch.notices.size() > kNotices) return false;
  if (!batch.context.ok() || *batch.context == nullptr) return false;
  // The first message of a pass reads the whole graph. What comes late does not: a handler
  // may be changing the graph, which the pass before has let go.
  const ContextRecord& context = **batch.context;
  const ContextRecord::Found found = context.FindPass(batch.notices.front().pass);
  const bool reads_graph = found.run != nullptr
                               ? !found.done && !found.run->engaged()
                               : found.over.ok() && absl::c_any_of(batch.notices, MayBeNew);
  return !reads_graph || context.CheapToRunInline();
}

void Engine::Handle(WorkerRank from, Batches batches, RunHere here) {
  for (Batch& batch : batches) {
    const Notice& first = batch.notices.front();
    const ContextId context = first.context;
    if (first.kind == Notice::Kind::kRelease) {
      // The origin alone ends its contexts; whoever lost it speaks for itself.
      if (MakerOf(context) == services_.self) continue;
      AwaitMemory([&] { ReleaseFrom(context, from, WasReleased); });
    } else if (first.kind == Notice::Kind::kKnown) {
      AwaitMemory([&] { OnKnown(context, from); });
    } else {
      const PassId pass = first.pass;
      try {
        HandleOfOnePass(from, std::move(batch), here);
      } catch (const std::bad_alloc&) {
        Abandon(from, context, pass, StatusFromException(std::current_exception()));
      }
    }
  }
}

// What was in a notice is lost, and with it the pass: for its sender, too.
void Engine::Abandon(WorkerRank from, ContextId id, PassId pass, const absl::Status& why) {
  AwaitMemory([&] {
    if (const auto context = contexts_->Find(id)) {
      if (const auto run = context->FindPass(pass).run) run->Fail(why);
    }
    Send(from, {.kind = Notice::Kind::kAbort, .context = id, .pass = pass, .status = why});
  });
}

void Engine::HandleOfOnePass(WorkerRank from, Batch batch, RunHere here) {
  const Notice& first = batch.notices.front();
  ContextRecord::Found found;
  if (!batch.context.ok()) {
    found.over = batch.context.status();
  } else if (*batch.context != nullptr) {
    const std::shared_ptr<ContextRecord>& context = *batch.context;
    if (std::none_of(batch.notices.begin(), batch.notices.end(), MayBeNew)) {
      found = context->FindPass(first.pass);
    } else {
      found = context->FindOrAddPass(first.pass, from, first.settled, [&] {
        return std::make_shared<PassRun>(&services_, context, first.pass, first.settled,
                                         first.retain_graph, std::nullopt);
      });
    }
  }
  const bool is_counted = absl::c_any_of(batch.notices, IsCounted);
  if (found.run == nullptr && !is_counted) return;  // who sent them waits for nothing
  if (found.run == nullptr || (is_counted && !found.over.ok())) {
    // What the pass failed with says who says it already.
    const absl::Status why = OriginOf(found.over).has_value()
                                 ? found.over
                                 : services_.LocalError(first.context, found.over);
    for (const Notice& notice : batch.notices) Refuse(from, notice, why);
    if (found.run == nullptr) return;
    // Of the others some may wait for what will not come: so it is an abort of `from`, which says
    // why itself if it sent one. Of a pass that is over here its report may still be awaited.
    std::vector<Notice> taken;
    for (Notice& notice : batch.notices) {
      if (notice.kind == Notice::Kind::kAbort || notice.kind == Notice::Kind::kReport)
        taken.push_back(std::move(notice));
    }
    taken.push_back({.kind = Notice::Kind::kAbort, .status = why});
    found.run->OnNotices(from, std::move(taken), RunHere::kNo);
    return;
  }
  if (closed_) found.run->Fail(ShuttingDown());  // Close() may have missed it
  found.run->OnNotices(from, std::move(batch.notices), here);
}

void Engine::Refuse(WorkerRank to, const Notice& notice, const absl::Status& why) {
  if (!IsCounted(notice)) return;
  Send(to, {.kind = Notice::Kind::kAbort,
            .context = notice.context,
            .pass = notice.pass,
            .status = why});
}

void Engine::Send(WorkerRank to, const Notice& notice) {
  Packet packet = services_.network.NewNotice();
  const absl::Status appended = AppendNotice(notice, &packet);
  DG_CHECK(appended.ok()) << appended << ": there is no tensor in it";
  services_.network.Notify(to, std::move(packet));
}

void Engine::OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) {
  for (const auto& context : contexts_->All()) {
    // Somebody has begun anew, with the peer as it can be reached now.
    if (context->number() <= begun) LosePeer(*context, peer, why);
  }
}

absl::Status Engine::AddPeer(ContextRecord& context, WorkerRank peer,
                             absl::FunctionRef<bool()> is_cut_off) {
  DG_RETURN_IF_ERROR(context.AddPeer(peer));
  if (!is_cut_off()) return absl::OkStatus();
  AwaitMemory([&] {
    LosePeer(context, peer,
             absl::UnavailableError("the connection broke while what came on it was read"));
  });
  return absl::OkStatus();
}

void Engine::LosePeer(ContextRecord& context, WorkerRank peer, const absl::Status& why) {
  const ContextId id = context.id();
  const bool was_peer = context.LosePeer(peer, why);
  for (const auto& run : context.Passes()) run->OnPeerLost(peer, why);
  if (MakerOf(id) == peer) {
    ReleaseFrom(id, peer,
                [&] { return Annotate(why, "the worker that made the context is lost"); });
  } else if (was_peer && MakerOf(id) != services_.self) {
    // The release may have been going to come by way of that worker.
    if (context.AddPeer(MakerOf(id)).ok())
      Send(MakerOf(id), {.kind = Notice::Kind::kKnown, .context = id});
  }
}

void Engine::OnKnown(ContextId id, WorkerRank from) {
  if (MakerOf(id) != services_.self) return;
  const std::shared_ptr<ContextRecord> context = contexts_->Find(id);
  if (context == nullptr || !context->AddPeer(from).ok())
    Send(from, {.kind = Notice::Kind::kRelease, .context = id});
}

// ------------------------------------------------------------------------------------- Release

void Engine::Release(ContextId id) noexcept {
  const auto release = [this](ContextRecord& context) {
    End(context, std::nullopt, WasReleased);
    // Not before, so that one whose passes or peers could not be told is found again.
    contexts_->Remove(context.id());
  };
  try {
    if (const auto context = contexts_->Find(id)) release(*context);
    if (!has_unfinished_releases_.exchange(false)) return;
    for (const auto& context : contexts_->All()) {
      if (context->released()) release(*context);
    }
  } catch (...) {  // there was no memory
    has_unfinished_releases_ = true;
  }
}

void Engine::ReleaseFrom(ContextId id, std::optional<WorkerRank> from,
                         absl::FunctionRef<absl::Status()> why) {
  // Where there is no memory to remember it nothing has changed, and this is called again; from
  // then on nobody else ends it, also who hears in the middle of it that another worker is lost.
  if (const auto context = contexts_->Remove(id)) AwaitMemory([&] { End(*context, from, why); });
}

void Engine::End(ContextRecord& context, std::optional<WorkerRank> from,
                 absl::FunctionRef<absl::Status()> why) {
  ContextRecord::Released released = context.Release();
  const absl::Cleanup end = [&] {
    if (from.has_value() && !released.empty()) EndOnPool(services_.pool, std::move(released));
  };
  for (const auto& run : released.passes) {
    if (from.has_value())
      run->Fail(why());
    else
      run->OnRelease(why());
  }
  for (WorkerRank peer : context.Peers()) {
    if (peer == from || peer == services_.self) continue;
    Send(peer, {.kind = Notice::Kind::kRelease, .context = context.id()});
  }
}

void Engine::Close() {
  closed_ = true;
  for (const auto& context : contexts_->All()) {
    for (const auto& run : context->Passes()) run->Fail(ShuttingDown());
  }
}

void Engine::Join() { services_.device_threads.reset(); }

Engine::PassCounts Engine::CountPasses() const {
  PassCounts counts{.ended = services_.passes_ended, .failed = services_.passes_failed};
  for (const auto& context : contexts_->All()) counts.running += context->Passes().size();
  return counts;
}

std::vector<ContextState> Engine::State() const {
  std::vector<ContextState> states;
  for (const auto& context : contexts_->All()) {
    states.push_back(context->State());
    for (const auto& run : context->Passes()) states.back().passes.push_back(run->State());
  }
  return states;
}

}  // namespace distgrad
