// The distributed autograd engine of one worker: runs its part of backward passes. docs/autograd.md
// explains the protocol; pass.h has its rules, pass_run.h ties them to the local graph.
#ifndef DISTGRAD_CORE_AUTOGRAD_ENGINE_H_
#define DISTGRAD_CORE_AUTOGRAD_ENGINE_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/autograd/backward_options.h"
#include "core/autograd/context_record.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/executor/source_node.h"
#include "core/autograd/notice.h"
#include "core/autograd/pass_handle.h"
#include "core/autograd/pass_services.h"
#include "core/autograd/state.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/event_loop.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/base/trace.h"
#include "core/rpc/limits.h"
#include "core/tensor/device_map.h"
#include "core/tensor/message_codec.h"
#include "core/transport/packet.h"

namespace distgrad {

// Thread-safe.
class Engine {
 public:
  // All must outlive the last use of the engine; the pool must be joined before it goes.
  Engine(WorkerRank self, Incarnation incarnation, EngineNetwork* network, ThreadPool* pool,
         Clock* clock, TraceRecorder* trace, ContextRegistry* contexts, const Limits& limits);

  // ---- Forward: what crosses to or from another worker.

  // Makes a send node for those of `tensors` that require grad, with their history as it is now;
  // null if none do.
  static std::shared_ptr<SourceNode> MakeSend(absl::Span<const at::Tensor> tensors);
  // Records that the tensors which `send` was made of go to that worker. Returns their edge; 0 if
  // it is null. Of the results of an operator that was served, each node may allocate no more than
  // a few times Limits::message_bytes in a pass.
  absl::StatusOr<EdgeId> RecordSend(ContextRecord& context, WorkerRank to,
                                    std::shared_ptr<SourceNode> send, bool of_operator = false);

  // Drops the send node of an edge whose message never left this worker: no gradient will come. May
  // be called on any thread.
  void DropSend(ContextRecord& context, EdgeId edge);

  // Makes the recv nodes of an edge and sets them as the histories of `tensors`, which are those
  // that required grad on the sender, in their order.
  absl::Status RecordRecv(const std::shared_ptr<ContextRecord>& context, EdgeEnd end,
                          absl::Span<at::Tensor> tensors);

  // ---- Backward.

  // Runs a pass from `roots`. The future is done when the gradients are in place on every worker
  // that took part. With `run_here` this thread runs the local part of the graph before this
  // returns; else the pool does.
  Future<Unit> Backward(const std::shared_ptr<ContextRecord>& context,
                        std::vector<at::Tensor> roots, BackwardOptions options, bool run_here);

  // Ends a context of this worker here and on every worker that knows of it. Idempotent. Needs no
  // memory: what it has none for, such as telling the other workers, the next release does.
  void Release(ContextId id) noexcept;

  // ---- From the network. Short: nodes run on the pool.

  // `is_cut_off`: whether the connection that the packet came on has ended; see AddPeer(). Where
  // the packet cannot be read (hostile input, no memory) the error says why, and what was in it is
  // lost, so that all contexts have to lose `from`; and the connection has to end before, or what
  // begins anew would be lost with it, and `from` would not hear of it.
  absl::Status OnNotice(WorkerRank from, Packet packet, size_t offset,
                        absl::FunctionRef<bool()> is_cut_off);
  // Of the contexts that had `begun` here by then (ContextRegistry::begun()).
  void OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why);
  // Adds the worker whose message was read, also one that is still to be handled; on a connection
  // that has ended meanwhile, loses it again: OnPeerLost() may have gone by before it was a peer.
  absl::Status AddPeer(ContextRecord& context, WorkerRank peer,
                       absl::FunctionRef<bool()> is_cut_off);

  // Fails all passes; no new ones begin.
  void Close();

  // Ends the threads of accelerators, which take no more nodes; after Close() and when the pool is
  // joined. False if the deadline has passed before; then it may be called again. Must not be
  // called on one of them.
  bool JoinThreads(Deadline deadline) { return services_.device_threads->Join(deadline); }
  bool OnDeviceThread() const { return services_.device_threads->OnThese(); }
  // The number of these threads that have not ended.
  size_t thread_count() const { return services_.device_threads->thread_count(); }

  // Waits for the threads of accelerators; after Close() and when the pool is joined.
  void Join();

  // Contexts and passes at this moment. Waits for steps of the protocol that are in flight.
  std::vector<ContextState> State() const;

  // The passes that ran on this worker: those that are over, those of them that failed, and those
  // in flight.
  struct PassCounts {
    uint64_t ended = 0;
    uint64_t failed = 0;
    uint64_t running = 0;
  };
  PassCounts CountPasses() const;

  // Returns the limits for messages of other workers.
  MessageLimits message_limits() const {
    return {.max_tensors = services_.limits.tensors_per_message,
            .max_payload_bytes = services_.limits.message_bytes};
  }

 private:
  // The notices of one pass that came together; or one message of a context.
  struct Batch {
    std::vector<Notice> notices;
    // The context; null where it is not known, and need not be.
    absl::StatusOr<std::shared_ptr<ContextRecord>> context = std::shared_ptr<ContextRecord>();
  };

  using Batches = absl::InlinedVector<Batch, 1>;

  // The same as OnPeerLost(), of one context.
  void LosePeer(ContextRecord& context, WorkerRank peer, const absl::Status& why);
  // Whether the edge and the passes that it names are of the workers of whom they must be.
  absl::Status CheckIds(const Notice& notice) const;
  Batches Sort(WorkerRank from, std::vector<Notice> notices, absl::FunctionRef<bool()> is_cut_off);
  // Whether handling them, but for nodes that are not cheap, takes less time than having another
  // thread do it.
  static bool CheapToRunInline(const Batches& batches);
  void Handle(WorkerRank from, Batches batches, RunHere here);
  void HandleOfOnePass(WorkerRank from, Batch batch, RunHere here);
  void Abandon(WorkerRank from, ContextId id, PassId pass, const absl::Status& why);
  // Answers messages of a pass that has failed here, or cannot be.
  void Refuse(WorkerRank to, const Notice& notice, const absl::Status& why);
  void Send(WorkerRank to, const Notice& notice);
  void OnKnown(ContextId id, WorkerRank from);
  // Forgets the context, if it is known, and ends it.
  void ReleaseFrom(ContextId id, std::optional<WorkerRank> from,
                   absl::FunctionRef<absl::Status()> why);
  // Ends the context here, its passes with `why`, and on its peers but for `from`. A peer whose
  // part of a pass does not hear of `why` before the release says only that.
  void End(ContextRecord& context, std::optional<WorkerRank> from,
           absl::FunctionRef<absl::Status()> why);

  PassServices services_;
  ContextRegistry* const contexts_;
  std::atomic<uint64_t> last_edge_;
  std::atomic<uint64_t> last_pass_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> has_unfinished_releases_{false};  // of contexts that are still known
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_ENGINE_H_
