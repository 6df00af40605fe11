// Does for a pass what its protocol asks for: sends notices, feeds the graph, ends it.
#include "core/autograd/pass_run.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <typeinfo>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/autograd/executor/cheap_graph.h"
#include "core/base/await_memory.h"
#include "core/base/check.h"
#include "core/base/make_or.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "core/tensor/message.h"

namespace distgrad {
namespace {

// Gradients of so many bytes are sent at once; fewer wait for those that come with them, but not
// while a node runs that may take long, and not for longer than a few packets would cost.
// A packet has no more than this, but where one message alone has.
constexpr size_t kFlushBytes = 64 << 10;
constexpr absl::Duration kFlushDelay = absl::Microseconds(100);
// How many pool threads are asked at once to run send nodes of one pass.
constexpr size_t kMaxHelpers = 8;

// How many feeds, of so many bytes, a thread runs that runs what is cheap.
constexpr size_t kMaxCheapFeeds = 16;
constexpr size_t kMaxCheapBytes = 16 << 10;

// A node of an operator that a peer has called may allocate so many times message_bytes: many take
// several tensors of the size of their arguments on the way.
constexpr uint64_t kNodeTimes = 8;
constexpr absl::string_view kNodeLimitName = "8 times limit message_bytes";

// Whether this thread runs tasks of a strand in the middle of a node.
thread_local bool flushes_in_node = false;

// Whether this thread is a user's that begins a pass, or runs nodes of one.
thread_local bool is_users = false;

// For how many helpers a thread counts. One that runs what is cheap calls them itself if it must.
size_t Weight(RunHere here) { return here == RunHere::kCheap ? kMaxHelpers : 1; }

bool IsLeaf(const torch::autograd::Node& node) {
  return typeid(node) == typeid(torch::autograd::AccumulateGrad);
}

bool AreSmall(const std::vector<at::Tensor>& gradients) {
  size_t bytes = 0;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    if (!gradient.device().is_cpu() || !gradient.has_storage()) return false;
    bytes += gradient.nbytes();
  }
  return bytes <= kMaxCheapBytes;
}

}  // namespace

PassRun::PassRun(PassServices* services, std::shared_ptr<ContextRecord> context, PassId id,
                 PassId settled, bool retain_graph, std::optional<Roots> roots)
    : services_(services),
      context_(std::move(context)),
      id_(id),
      settled_(settled),
      retain_graph_(retain_graph),
      strand_([this](std::exception_ptr thrown) { OnThrowOnStrand(std::move(thrown)); }),
      pass_(services->self, this),
      roots_(std::move(roots)) {
  // From the start: a release may end the pass before it begins.
  if (roots_.has_value()) promise_.emplace();
  span_ = BeginSpan(TraceSpan::Kind::kPass);
}

std::unique_ptr<TraceSpan> PassRun::BeginSpan(TraceSpan::Kind kind) {
  if (!services_->trace.on()) return nullptr;
  try {
    return std::make_unique<TraceSpan>(TraceSpan{.kind = kind,
                                                 .peer = MakerOf(id_),
                                                 .context = context_->id(),
                                                 .pass = id_,
                                                 .begin = services_->clock.Now()});
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// ------------------------------------------------------------------------------ From outside

void PassRun::Post(absl::AnyInvocable<void()> task, RunHere here, ThreadPool* others) {
  const bool outer = std::exchange(is_users, is_users || here == RunHere::kYes);
  const absl::Cleanup restore = [outer] { is_users = outer; };
  if (here != RunHere::kNo) {
    absl::MutexLock lock(&mu_);
    coming_ += Weight(here);
  }
  RunOnStrand(std::move(task), others);
  if (here != RunHere::kNo) RunFeeds(here);
}

void PassRun::RunOnStrand(absl::AnyInvocable<void()> task, ThreadPool* others) {
  strand_.Run(
      [self = shared_from_this(), task = std::move(task),
       on_users_thread = others != nullptr]() mutable {
        self->on_users_thread_ = on_users_thread;
        task();
        self->EndTaskOnStrand();
      },
      others);
}

Future<Unit> PassRun::Begin(absl::Time deadline, RunHere here) {
  Future<Unit> done = promise_->future();
  done.MadeBy(weak_from_this(), id_, services_->network.loop());
  Post(
      [this, deadline, thread_state = at::ThreadLocalState()]() mutable {
        if (over_.has_value()) return;
        // This may be another thread.
        thread_state_ = std::move(thread_state);
        if (deadline != absl::InfiniteFuture()) {
          timer_ = services_->clock.At(deadline, [weak = weak_from_this()] {
            auto self = weak.lock();
            if (!self) return;
            self->Post([run = self.get()] { run->OnDeadlineOnStrand(); }, RunHere::kNo);
          });
        }
        pass_.Begin();
      },
      here);
  return done;
}

void PassRun::OnNotices(WorkerRank from, std::vector<Notice> notices, RunHere here) {
  Post(
      [this, from, notices = std::move(notices)]() mutable {
        try {
          for (Notice& notice : notices) OnNoticeOnStrand(from, notice);
        } catch (...) {
          const absl::Status why = FailOnStrand(std::current_exception());
          // It may not be known as a peer yet.
          if (from != services_->self) SendAbort(from, why);
        }
      },
      here);
}

// The thread of this one and the next two may be a user's, in the middle of CallAsync() or of a
// context's destructor: what others have left on the strand, the end of the pass and what hears of
// it, say, is not for that.
void PassRun::OnNewRecv(size_t place, EdgeEnd end) {
  Post(
      [this, place, end] {
        // Else the plan has it, or will.
        if (place >= known_recvs_) pass_.OnLateRecv(end);
      },
      RunHere::kNo, &services_->pool);
}

void PassRun::OnLostSend(EdgeId edge) {
  Post([this, edge] { pass_.OnLostSend(edge); }, RunHere::kNo, &services_->pool);
}

void PassRun::OnRelease(const absl::Status& why) {
  Post([this, why] { FailWith(LocalError(why)); }, RunHere::kNo, &services_->pool);
}

void PassRun::OnPeerLost(WorkerRank peer, const absl::Status& why) {
  Post(
      [this, peer, why] {
        if (reports_.has_value()) reports_->missing.erase(peer);
        pass_.OnPeerLost(peer, LocalError(why));
      },
      RunHere::kNo);
}

void PassRun::Fail(const absl::Status& why) {
  Post([this, why] { FailWith(LocalError(why)); }, RunHere::kNo);
}

void PassRun::Cancel(uint64_t) {
  Post(
      [this] {
        // A future may outlive the engine, but not a pass that is not over.
        FailWith(over_.has_value() ? *over_
                                   : LocalError(absl::CancelledError("the pass was cancelled")));
      },
      RunHere::kNo);
}

// ---------------------------------------------------------------------------- Running the graph

void PassRun::RunFeeds(RunHere here) {
  for (size_t cheap = 0;; ++cheap) {
    Feed feed;
    std::shared_ptr<Execution> execution;
    {
      absl::MutexLock lock(&mu_);
      coming_ -= Weight(here);
      if (feeds_.empty()) break;
      if (here == RunHere::kCheap && (cheap == kMaxCheapFeeds || !feeds_.front().cheap)) break;
      feed = std::move(feeds_.front());
      feeds_.pop_front();
      execution = execution_;
    }
    try {
      for (const at::Tensor& gradient : feed.gradients) feed.ready.Await(gradient);
    } catch (...) {
      execution->Cancel(StatusFromException(std::current_exception()));
    }
    std::unique_ptr<TraceSpan> span = BeginSpan(TraceSpan::Kind::kNodes);
    execution->Feed(feed.root, std::move(feed.gradients), feed.reached);
    if (span != nullptr) {
      services_->trace.End(std::move(span), services_->clock.Now(), execution->status());
    }
    {
      absl::MutexLock lock(&mu_);
      coming_ += Weight(here);
    }
    const bool was_last = --outstanding_ == 0;
    // An error is not kept waiting for what else runs.
    const bool settles = was_last || !execution->status().ok();
    LetGo(std::move(execution));
    if (settles) Settle();
  }
  AwaitMemory([this] {
    if (has_captured_.load(std::memory_order_relaxed)) PostFlush(/*in_node=*/false);
  });
  CallHelpers();
}

void PassRun::LetGo(std::shared_ptr<Execution> execution) {
  {
    absl::MutexLock lock(&mu_);
    if (execution_ != nullptr) execution.reset();  // which is not its end
  }
  if (execution != nullptr) EndWhereItMay(std::move(execution));
}

template <typename T>
void PassRun::EndWhereItMay(T ended) {
  // A user's thread, and one of the pool's, may lead the sockets' loop while it waits.
  if (EventLoop::Current() == nullptr && (is_users || services_->pool.OnThisPool())) return;
  EndOnPool(services_->pool, std::move(ended), MayRunNodesHere() ? this : nullptr);
}

void PassRun::CallHelpers() {
  size_t helpers = 0;
  {
    absl::MutexLock lock(&mu_);
    const size_t wanted = std::min(feeds_.size(), kMaxHelpers);
    if (wanted <= coming_) return;
    helpers = wanted - coming_;
    coming_ = wanted;
  }
  for (; helpers > 0; --helpers) {
    AwaitMemory([this] {
      auto run = [self = shared_from_this()] { self->RunFeeds(RunHere::kYes); };
      if (!MayRunNodesHere()) {
        services_->pool.Schedule(std::move(run));
        return;
      }
      // One may be this thread, the initiator's if it waits for the pass.
      const Canceller* const maker = this;
      services_->pool.ScheduleInline(std::move(run), maker);
    });
  }
}

void PassRun::Settle() {
  AwaitMemory([this] {
    RunOnStrand([this] {
      if (const auto execution = this->execution()) {
        FlushCapturedOnStrand();
        absl::Status status = execution->status();
        if (!status.ok()) status = LocalError(status);
        pass_.OnIdle(status);
      }
    });
  });
}

void PassRun::OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) {
  context_->Accumulate(leaf, std::move(gradient));
}

void PassRun::OnStop(torch::autograd::Node& stop, std::vector<at::Tensor> gradients, bool reached) {
  const auto& recv = static_cast<const RecvNode&>(stop);
  ReadyMark ready(gradients);
  Captured::Part part{std::move(gradients[0]), std::move(ready), reached};
  const absl::Time now = services_->clock.Now();
  {
    absl::MutexLock lock(&mu_);
    const bool is_first = captured_.empty();
    if (recv.edge_size() == 1) {
      captured_.push_back({recv.end(), {}});
      captured_.back().parts.push_back(std::move(part));
    } else {
      const auto it = gathering_.find(recv.end().edge);
      if (it == gathering_.end()) return;  // the pass is over
      it->second.captured.parts[recv.place()] = std::move(part);
      if (--it->second.missing > 0) return;
      captured_.push_back(std::move(it->second.captured));
      gathering_.erase(it);
    }
    if (is_first) captured_since_ = now;
    has_captured_.store(true, std::memory_order_relaxed);
    for (const Captured::Part& p : captured_.back().parts) {
      if (!p.gradient.defined()) continue;
      // A sparse one has no storage, and no size to ask for.
      captured_bytes_ += p.gradient.has_storage() ? p.gradient.nbytes() : kFlushBytes;
    }
    if (captured_bytes_ < kFlushBytes) return;
    captured_bytes_ = 0;
  }
  PostFlush(/*in_node=*/true);
}

// A peer may have nothing else to do than what these gradients are for.
void PassRun::OnNext(torch::autograd::Node* next) {
  if (next == nullptr) {
    // An error is not kept waiting for what else runs.
    const auto execution = this->execution();
    if (execution != nullptr && !execution->status().ok()) return Settle();
    return AwaitMemory([this] {
      if (has_captured_.load(std::memory_order_relaxed)) PostFlush(/*in_node=*/false);
    });
  }
  if (!has_captured_.load(std::memory_order_relaxed)) return;
  const bool wait =
      !MayTakeLong(*next, RecvNode::Is(*next)) && !(IsLeaf(*next) && context_->has_leaf_observer());
  if (wait) {
    const absl::Time now = services_->clock.Now();
    absl::MutexLock lock(&mu_);
    if (captured_.empty() || now < captured_since_ + kFlushDelay) return;
  }
  PostFlush(/*in_node=*/true);
}

// Within a node this thread is in the modes of that: the end of the pass, which this or what others
// have left on the strand may bring, is told elsewhere. But the rest of the strand is not left to
// another thread, for none may be free, and nothing else would be sent until one is.
void PassRun::PostFlush(bool in_node) {
  const bool outer = std::exchange(flushes_in_node, flushes_in_node || in_node);
  const absl::Cleanup restore = [outer] { flushes_in_node = outer; };
  Post([this] { FlushCapturedOnStrand(); }, RunHere::kNo);
}

// The strand may have something of the user's to call, and this thread is in the middle of a node.
void PassRun::OnWait() {
  if (!has_captured_.load(std::memory_order_relaxed)) return;
  // Its peers may need what was captured to end what this thread is to wait for, whatever locks it
  // has.
  AwaitMemory([this] {
    services_->pool.Schedule([self = shared_from_this()] {
      AwaitMemory(
          [&] { self->Post([run = self.get()] { run->FlushCapturedOnStrand(); }, RunHere::kNo); });
    });
  });
}

void PassRun::OnIdle() {
  // Within RunFeeds() this comes before the feed is counted down, and RunFeeds() sees to it.
  if (outstanding_ == 0) Settle();
}

// ------------------------------------------------------------------------------- On the strand

void PassRun::OnNoticeOnStrand(WorkerRank from, Notice& notice) {
  switch (notice.kind) {
    case Notice::Kind::kEdge:
      return pass_.OnEdge(from, notice.edge, notice.uncounted, &notice);
    case Notice::Kind::kStart:
      return pass_.OnStart(from);
    case Notice::Kind::kAck:
      return pass_.OnAck(from, notice.count);
    case Notice::Kind::kAbort:
      if (absl::IsDeadlineExceeded(notice.status)) SendReportOnStrand();
      return pass_.OnAbort(from, notice.status);
    case Notice::Kind::kReport:
      return TakeReportOnStrand(from, notice);
    case Notice::Kind::kRelease:
    case Notice::Kind::kKnown:
      DG_CHECK(false) << "this is of a context, not of a pass";
  }
}

absl::Status PassRun::FailOnStrand(std::exception_ptr thrown) {
  absl::Status why = StatusFromException(std::move(thrown));
  why = MakeOr(why, [&] { return LocalError(why); });  // or it does not say where
  FailWith(why);
  return why;
}

void PassRun::FailWith(const absl::Status& why) {
  pass_.Fail(why);
  if (reports_.has_value()) reports_->missing.clear();
}

void PassRun::OnThrowOnStrand(std::exception_ptr thrown) {
  FailOnStrand(std::move(thrown)).IgnoreError();
  AwaitMemory([this] { EndTaskOnStrand(); });
}

absl::StatusOr<PassPlan> PassRun::Engage(std::optional<EdgeId> by) {
  try {
    return TraverseGraph(by);
  } catch (...) {
    return LocalError(StatusFromException(std::current_exception()));
  }
}

absl::StatusOr<PassPlan> PassRun::TraverseGraph(std::optional<EdgeId> by) {
  absl::StatusOr<ContextRecord::Edges> edges = context_->Claim(id_, retain_graph_);
  if (!edges.ok()) return LocalError(edges.status());
  known_recvs_ = edges->recvs.size();

  PassPlan plan;
  std::vector<std::shared_ptr<torch::autograd::Node>> sources;
  std::vector<Graph::Index> waiting;  // for other workers than the one that engaged us
  std::vector<Graph::Index> of_operators;
  std::optional<WorkerRank> by_peer;  // who engaged us
  for (const ContextRecord::SendEnd& send : edges->sends) {
    const auto index = static_cast<Graph::Index>(sources.size());
    send_roots_.emplace(send.end.edge, index);
    if (send.of_operator) of_operators.push_back(index);
    sources.push_back(send.node);
    if (by == send.end.edge) {
      by_peer = send.end.peer;
    } else {
      waiting.push_back(index);
    }
    plan.sends.push_back(send.end);
    plan.peers.push_back(send.end.peer);
  }
  if (roots_.has_value()) {
    root_ = static_cast<Graph::Index>(sources.size());
    sources.push_back(MakeSourceNode(roots_->tensors));
  }
  const RecvNode* foreign = nullptr;
  auto graph = std::make_shared<const Graph>(sources, [&](torch::autograd::Node& node) {
    if (!RecvNode::Is(node)) return false;
    const auto& recv = static_cast<const RecvNode&>(node);
    if (recv.context() != context_->id() || recv.holder() != context_->holder()) foreign = &recv;
    return true;
  });
  if (foreign != nullptr) {
    const std::string whose =
        foreign->context() != context_->id()
            ? absl::StrCat(" in another context, ", foreign->context())
        : foreign->holder().rank != services_->self
            ? absl::StrCat(" by another worker of this process (of this job worker ",
                           foreign->holder().rank,
                           "): a tensor goes from worker to worker by a call")
            : " in another job, where a context has the same number";
    return LocalError(absl::InvalidArgumentError(
        absl::StrCat("its graph leads to a tensor that was received from worker ",
                     services_->network.Describe(foreign->end().peer), whose)));
  }

  // What can be reached decides only whether a peer is told of the pass that nothing else tells.
  absl::flat_hash_set<WorkerRank> told = {services_->self};
  if (by_peer.has_value()) told.insert(*by_peer);
  absl::flat_hash_set<EdgeId> received;
  absl::flat_hash_map<EdgeId, Gathering> gathering;
  const auto in_graph = [&](const std::shared_ptr<RecvNode>& node) {
    return graph->Find(node.get()) != Graph::kNone;
  };
  for (const ContextRecord::RecvEnd& recv : edges->recvs) {
    plan.peers.push_back(recv.end.peer);
    // Of two gradients for one edge its other end would take the first.
    if (!received.insert(recv.end.edge).second) {
      return LocalError(absl::InvalidArgumentError(absl::StrCat(
          "worker ", recv.end.peer, " has sent two messages with one edge, ", recv.end.edge)));
    }
    const size_t found = absl::c_count_if(recv.nodes, in_graph);
    if (found == 0) {
      plan.dead.push_back(recv.end);
      told.insert(recv.end.peer);
    } else if (recv.nodes.size() > 1) {
      Gathering& edge = gathering[recv.end.edge];
      edge.missing = found;
      edge.captured.end = recv.end;
      edge.captured.parts.resize(recv.nodes.size());
    }
  }
  const bool all_told = absl::c_all_of(edges->recvs, [&](const ContextRecord::RecvEnd& recv) {
    return told.contains(recv.end.peer);
  });
  if (!all_told) {
    const std::vector<bool> reach_waiting = graph->ReachableFrom(waiting);
    for (const ContextRecord::RecvEnd& recv : edges->recvs) {
      if (told.contains(recv.end.peer)) continue;
      if (absl::c_none_of(recv.nodes, [&](const std::shared_ptr<RecvNode>& node) {
            return in_graph(node) && reach_waiting[graph->Find(node.get())];
          })) {
        plan.certain.push_back(recv.end.peer);
      }
    }
  }
  graph_ = std::move(graph);
  if (!thread_state_.has_value()) thread_state_.emplace();
  // A second owner of the root gradients as long as anything runs, as libtorch has one. They may be
  // over another's memory, as at::from_blob() has it: what has one owner is added to in place, and
  // becomes a leaf's gradient as it is.
  struct Kept {
    std::shared_ptr<PassRun> run;
    std::vector<at::Tensor> root_gradients;
  };
  auto kept = std::make_shared<Kept>();
  kept->run = shared_from_this();
  if (roots_.has_value()) kept->root_gradients = roots_->gradients;
  has_lent_gradients_ = absl::c_any_of(kept->root_gradients, [](const at::Tensor& gradient) {
    return gradient.has_storage() && !gradient.storage().resizable();
  });
  ExecutionOptions options{.retain_graph = retain_graph_,
                           .device_threads = services_->device_threads.get(),
                           .keep_alive = std::move(kept)};
  if (!of_operators.empty()) {
    const uint64_t bytes = services_->limits.message_bytes;
    options.limited = graph_->ReachableFrom(of_operators);
    options.limit_bytes = bytes > std::numeric_limits<uint64_t>::max() / kNodeTimes
                              ? std::numeric_limits<uint64_t>::max()
                              : kNodeTimes * bytes;
    options.limit_name = kNodeLimitName;
  }
  auto execution = std::make_shared<Execution>(graph_, std::move(options), this, *thread_state_);
  thread_state_.reset();
  absl::MutexLock lock(&mu_);
  gathering_ = std::move(gathering);
  execution_ = std::move(execution);
  return plan;
}

void PassRun::FeedRoots() {
  const absl::InlinedVector<bool, 8> reached(roots_->gradients.size(), true);
  Queue({root_, std::move(roots_->gradients), std::move(roots_->ready), reached, /*cheap=*/false});
  roots_.reset();
}

void PassRun::FeedSend(EdgeId edge, Notice* arrived) {
  const Graph::Index root = send_roots_.at(edge);
  const size_t inputs = graph_->entry(root).node->next_edges().size();
  std::vector<at::Tensor> gradients(inputs);
  absl::InlinedVector<bool, 8> reached(inputs, false);
  if (arrived != nullptr && !arrived->reached.empty()) {
    if (arrived->gradients.size() != inputs) {
      return pass_.Fail(LocalError(absl::InvalidArgumentError(absl::StrCat(
          arrived->gradients.size(), " gradients came for edge ", edge, ", which has ", inputs))));
    }
    gradients = std::move(arrived->gradients);
    reached = std::move(arrived->reached);
  }
  ReadyMark ready(gradients);
  const bool cheap = AreSmall(gradients) && !context_->has_leaf_observer() &&
                     CheapToRunInline({graph_->entry(root).node}, RecvNode::Is);
  Queue({root, std::move(gradients), std::move(ready), std::move(reached), cheap});
}

void PassRun::Queue(Feed feed) {
  ++outstanding_;
  absl::MutexLock lock(&mu_);
  feeds_.push_back(std::move(feed));
}

bool PassRun::Idle() {
  // A feed that has just ended may have left gradients to be sent, or an error: Settle() sees to
  // them, and comes here again.
  if (outstanding_ > 0) return false;
  absl::MutexLock lock(&mu_);
  return captured_.empty() &&
         (execution_ == nullptr || (execution_->idle() && execution_->status().ok()));
}

void PassRun::Stop(const absl::Status& why) {
  if (const auto execution = this->execution()) execution->Cancel(why);
  // The pass is over from here on. A deque takes memory to be made, and to be moved.
  struct Ended {
    std::deque<Feed> feeds;
    std::vector<Captured> captured;
  };
  auto ended = AwaitMemory([] { return std::make_unique<Ended>(); });
  {
    absl::MutexLock lock(&mu_);
    outstanding_ -= feeds_.size();
    ended->feeds.swap(feeds_);
    ended->captured.swap(captured_);
    has_captured_.store(false, std::memory_order_relaxed);
  }
  if (!ended->feeds.empty() || !ended->captured.empty()) EndWhereItMay(std::move(ended));
}

void PassRun::FlushCapturedOnStrand() {
  std::vector<Captured> captured;
  {
    absl::MutexLock lock(&mu_);
    captured.swap(captured_);
    captured_bytes_ = 0;
    has_captured_.store(false, std::memory_order_relaxed);
  }
  for (Captured& c : captured) {
    if (!pass_.running()) return EndWhereItMay(std::move(captured));
    const bool counted = pass_.CountGradient(c.end.peer);
    Notice notice{.kind = Notice::Kind::kEdge, .edge = c.end.edge, .uncounted = !counted};
    if (absl::c_any_of(c.parts, [](const Captured::Part& part) { return part.reached; })) {
      notice.gradients.reserve(c.parts.size());
      for (Captured::Part& part : c.parts) {
        part.ready.Await(part.gradient);
        notice.gradients.push_back(std::move(part.gradient));
        notice.reached.push_back(part.reached);
      }
    }
    Deliver(c.end.peer, std::move(notice));
  }
}

// Others wait for these, also of a pass that has ended here.
void PassRun::SendNoGradient(EdgeEnd edge, bool uncounted) {
  AwaitMemory([&] {
    Deliver(edge.peer, {.kind = Notice::Kind::kEdge, .edge = edge.edge, .uncounted = uncounted});
  });
}
void PassRun::SendStart(WorkerRank to) {
  AwaitMemory([&] { Deliver(to, {.kind = Notice::Kind::kStart}); });
}
void PassRun::SendAck(WorkerRank to, uint32_t count) {
  AwaitMemory([&] { Deliver(to, {.kind = Notice::Kind::kAck, .count = count}); });
}
void PassRun::SendAbort(WorkerRank to, const absl::Status& why) {
  AwaitMemory([&] { Deliver(to, {.kind = Notice::Kind::kAbort, .status = why}); });
}

void PassRun::Deliver(WorkerRank to, Notice notice) {
  notice.context = context_->id();
  notice.pass = id_;
  notice.settled = settled_;
  notice.retain_graph = retain_graph_;
  if (to == services_->self) {
    // Runs after this task, like any message.
    std::vector<Notice> notices;
    notices.push_back(std::move(notice));
    RunOnStrand([this, notices = std::move(notices)]() mutable {
      OnNoticeOnStrand(services_->self, notices.front());
    });
    return;
  }
  const absl::Status appended = AppendOnStrand(to, notice);
  if (appended.ok()) return;
  pass_.Fail(LocalError(Annotate(
      appended, absl::StrCat("sending a gradient to worker ", services_->network.Describe(to)))));
}

absl::Status PassRun::AppendOnStrand(WorkerRank to, const Notice& notice) {
  std::shared_ptr<const DeviceMap> devices;
  if (HasDeviceTensors(notice.gradients)) {
    DG_ASSIGN_OR_RETURN(devices, services_->network.DevicesWith(to));
  }
  auto& packets = outbox_[to];
  const bool is_first = packets.empty();
  if (is_first) packets.push_back(services_->network.NewNotice());
  Packet& packet = packets.back();
  const size_t bytes = packet.bytes.size(), segments = packet.segments.size();
  DG_RETURN_IF_ERROR(devices == nullptr ? AppendNotice(notice, &packet)
                                        : AppendNotice(notice, &packet, *devices));
  const uint64_t limit = services_->limits.message_bytes;
  if (packet.size() <= std::min<uint64_t>(kFlushBytes, limit)) return absl::OkStatus();
  if (!is_first) {
    absl::Cleanup take_out = [&] {  // also where there is no memory for the other packet
      packet.bytes.resize(bytes);
      packet.segments.resize(segments);
    };
    Packet next = services_->network.NewNotice();
    next.bytes.append(packet.bytes, bytes);
    next.segments.assign(std::make_move_iterator(packet.segments.begin() + segments),
                         std::make_move_iterator(packet.segments.end()));
    std::move(take_out).Invoke();
    packets.push_back(std::move(next));
  }
  const uint64_t size = packets.back().size();
  if (size <= limit) return absl::OkStatus();
  packets.pop_back();
  return absl::ResourceExhaustedError(
      absl::StrCat("the message has ", size, " bytes; limit message_bytes is ", limit));
}

void PassRun::Finish(const absl::Status& status) { over_ = status; }

void PassRun::EndTaskOnStrand() {
  CallHelpers();
  if (reports_.has_value() && reports_->missing.empty()) EndReportsOnStrand();
  // Before the last acknowledgement goes out: the next pass may be here as soon as it has.
  if (over_.has_value() && !reports_.has_value() && !ended_) EndOnStrand();
  // What throws here loses no packets for others, and OnThrowOnStrand() comes here again.
  while (!outbox_.empty()) {
    const auto first = outbox_.begin();
    const WorkerRank to = first->first;
    absl::InlinedVector<Packet, 1> packets = std::move(first->second);
    outbox_.erase(first);
    for (Packet& packet : packets) services_->network.Notify(to, std::move(packet));
  }
  if (!ended_ || !promise_.has_value() || told_) return;
  // What hears of it is the user's.
  const bool elsewhere = (on_users_thread_ || flushes_in_node) &&
                         services_->pool.Schedule([self = shared_from_this()] { self->Tell(); });
  told_ = true;
  if (!elsewhere) Tell();
}

void PassRun::Tell() {
  if (over_->ok())
    promise_->Set(Unit());
  else
    promise_->Set(*over_);
}

void PassRun::EndOnStrand() {
  if (timer_.has_value()) services_->clock.Cancel(*timer_);
  // It may be kept for late messages: without the graph.
  struct Ended {
    std::shared_ptr<const Graph> graph;
    std::optional<Roots> roots;
    std::optional<at::ThreadLocalState> thread_state;
    std::shared_ptr<Execution> execution;  // a feed may still be using it
    std::vector<Captured> captured;
    absl::flat_hash_map<EdgeId, Gathering> gathering;
  };
  auto ended = std::make_unique<Ended>();  // of which some would take memory to be moved
  const absl::Cleanup end = [&] {
    // The program's deleter of memory that it has lent may wait for who waits for this pass.
    if (has_lent_gradients_)
      EndOnPool(services_->pool, std::move(ended));
    else
      EndWhereItMay(std::move(ended));
  };
  ended->graph.swap(graph_);
  ended->roots.swap(roots_);
  ended->thread_state.swap(thread_state_);
  send_roots_.clear();
  {
    absl::MutexLock lock(&mu_);
    ended->execution.swap(execution_);
    ended->captured.swap(captured_);
    ended->gathering.swap(gathering_);
  }
  services_->trace.End(std::move(span_), services_->clock.Now(), *over_);
  context_->EndPass(id_, *over_);
  ++services_->passes_ended;
  if (!over_->ok()) ++services_->passes_failed;
  ended_ = true;  // last: what throws above is called again
}

absl::Status PassServices::LocalError(ContextId context, const absl::Status& why) const {
  return WithOrigin(Annotate(why, absl::StrCat("backward of context ", context, " on worker ",
                                               network.Describe(self))),
                    {self, ErrorOrigin::By::kDistgrad});
}

absl::Status PassRun::LocalError(const absl::Status& why) {
  return services_->LocalError(context_->id(), why);
}

// Without a reference, which might become the last.
bool PassRun::engaged() {
  absl::MutexLock lock(&mu_);
  return execution_ != nullptr;
}

std::shared_ptr<Execution> PassRun::execution() {
  absl::MutexLock lock(&mu_);
  return execution_;
}

}  // namespace distgrad
