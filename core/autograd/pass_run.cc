#include "core/autograd/pass_run.h"

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/autograd/engine.h"
#include "core/base/check.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// A gradient of this many bytes is sent at once; smaller ones wait for those that come with them.
constexpr size_t kFlushBytes = 64 << 10;
// How many pool threads are asked at once to run send nodes of one pass.
constexpr size_t kMaxHelpers = 8;

}  // namespace

PassRun::PassRun(Engine* engine, std::shared_ptr<ContextRecord> context, PassId id,
                 bool retain_graph, std::optional<Roots> roots)
    : engine_(engine),
      context_(std::move(context)),
      id_(id),
      retain_graph_(retain_graph),
      pass_(engine->self(), this),
      roots_(std::move(roots)) {}

// ------------------------------------------------------------------------------ From outside

void PassRun::Post(absl::AnyInvocable<void()> task, RunHere here) {
  strand_.Run([self = shared_from_this(), task = std::move(task)]() mutable {
    task();
    self->EndTaskOnStrand();
  });
  size_t queued;
  {
    absl::MutexLock lock(&mu_);
    queued = feeds_.size();
  }
  if (queued == 0) return;
  const size_t helpers = std::min(queued - (here == RunHere::kYes ? 1 : 0), kMaxHelpers);
  for (size_t i = 0; i < helpers; ++i) {
    engine_->pool().Schedule([self = shared_from_this()] { self->RunFeeds(); });
  }
  if (here == RunHere::kYes) RunFeeds();
}

Future<Unit> PassRun::Begin(absl::Time deadline, RunHere here) {
  promise_.emplace();
  Future<Unit> done = promise_->future();
  Post(
      [this, deadline] {
        if (deadline != absl::InfiniteFuture()) {
          timer_ = engine_->clock().At(deadline, [weak = weak_from_this()] {
            auto self = weak.lock();
            if (!self) return;
            self->Post(
                [run = self.get()] {
                  run->pass_.Fail(run->LocalError(absl::DeadlineExceededError(
                      absl::StrCat("the deadline has passed", run->DescribeAwaitedOnStrand()))));
                },
                RunHere::kNo);
          });
        }
        pass_.Begin();
      },
      here);
  return done;
}

void PassRun::OnNotices(WorkerId from, std::vector<Notice> notices, RunHere here) {
  Post(
      [this, from, notices = std::move(notices)]() mutable {
        for (Notice& notice : notices) OnNoticeOnStrand(from, notice);
      },
      here);
}

void PassRun::OnNewRecv(size_t place, EdgeEnd end) {
  Post(
      [this, place, end] {
        // Else the plan has it, or will.
        if (place >= known_recvs_) pass_.OnLateRecv(end);
      },
      RunHere::kNo);
}

void PassRun::OnPeerLost(WorkerId peer, const absl::Status& why) {
  Post([this, peer, why] { pass_.OnPeerLost(peer, LocalError(why)); }, RunHere::kNo);
}

void PassRun::Fail(const absl::Status& why) {
  Post([this, why] { pass_.Fail(LocalError(why)); }, RunHere::kNo);
}

// ---------------------------------------------------------------------------- Running the graph

void PassRun::RunFeeds() {
  for (;;) {
    Feed feed;
    {
      absl::MutexLock lock(&mu_);
      if (feeds_.empty()) return;
      feed = std::move(feeds_.front());
      feeds_.pop_front();
    }
    execution_->Feed(feed.root, std::move(feed.gradients), feed.reached);
    if (--outstanding_ == 0) Settle();
  }
}

void PassRun::Settle() {
  strand_.Run([self = shared_from_this()] {
    self->FlushCapturedOnStrand();
    absl::Status status = self->execution_->status();
    if (!status.ok()) status = self->LocalError(status);
    self->pass_.OnIdle(status);
    self->EndTaskOnStrand();
  });
}

void PassRun::OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) {
  context_->Accumulate(leaf, std::move(gradient));
}

void PassRun::OnStop(torch::autograd::Node& stop, std::vector<at::Tensor> gradients, bool reached) {
  const auto& recv = static_cast<const RecvNode&>(stop);
  size_t bytes = 0;
  for (const at::Tensor& gradient : gradients) bytes += gradient.defined() ? gradient.nbytes() : 0;
  {
    absl::MutexLock lock(&mu_);
    captured_.push_back({recv.end(), std::move(gradients), reached});
    captured_bytes_ += bytes;
    if (captured_bytes_ < kFlushBytes) return;
    captured_bytes_ = 0;
  }
  Post([this] { FlushCapturedOnStrand(); }, RunHere::kNo);
}

void PassRun::OnIdle() {
  // Within RunFeeds() this comes before the feed is counted down, and RunFeeds() sees to it.
  if (outstanding_ == 0) Post([self = shared_from_this()] { self->Settle(); }, RunHere::kNo);
}

// ------------------------------------------------------------------------------- On the strand

void PassRun::OnNoticeOnStrand(WorkerId from, Notice& notice) {
  if (over_.has_value()) return engine_->AnswerForPassThatIsOver(from, notice, *over_);
  switch (notice.kind) {
    case Notice::Kind::kEdge:
      arriving_ = &notice;
      pass_.OnEdge(from, notice.edge, notice.late);
      arriving_ = nullptr;
      return;
    case Notice::Kind::kStart:
      return pass_.OnStart(from);
    case Notice::Kind::kAck:
      return pass_.OnAck(from, notice.count);
    case Notice::Kind::kAbort:
      return pass_.OnAbort(from, notice.status);
    case Notice::Kind::kRelease:
      DG_CHECK(false) << "a release is of a context, not of a pass";
  }
}

absl::StatusOr<PassPlan> PassRun::Engage(std::optional<EdgeId> by) {
  absl::StatusOr<ContextRecord::Edges> edges = context_->Claim(id_, retain_graph_);
  if (!edges.ok()) return LocalError(edges.status());
  known_recvs_ = edges->recvs.size();

  PassPlan plan;
  std::vector<std::shared_ptr<torch::autograd::Node>> sources;
  std::vector<Graph::Index> free, waiting;
  for (const ContextRecord::SendEnd& send : edges->sends) {
    const auto index = static_cast<Graph::Index>(sources.size());
    send_roots_.emplace(send.end.edge, index);
    sources.push_back(send.node);
    (by == send.end.edge ? free : waiting).push_back(index);
    plan.sends.push_back(send.end);
    plan.peers.push_back(send.end.peer);
  }
  if (roots_.has_value()) {
    root_ = static_cast<Graph::Index>(sources.size());
    sources.push_back(MakeSourceNode(roots_->tensors));
    free.push_back(root_);
  }
  const RecvNode* foreign = nullptr;
  auto graph = std::make_shared<const Graph>(sources, [&](torch::autograd::Node& node) {
    if (typeid(node) != typeid(RecvNode)) return false;
    const auto& recv = static_cast<const RecvNode&>(node);
    if (recv.context() != context_->id()) foreign = &recv;
    return true;
  });
  if (foreign != nullptr) {
    return LocalError(absl::InvalidArgumentError(
        absl::StrCat("its graph leads to a tensor that was received from worker ",
                     engine_->network().Describe(foreign->end().peer), " in another context, ",
                     foreign->context())));
  }

  // Only peers that nothing else tells of the pass make the second look at the graph necessary.
  bool all_dead = true;
  for (const auto& recv : edges->recvs) {
    plan.peers.push_back(recv->end().peer);
    if (graph->Find(recv.get()) == Graph::kNone)
      plan.dead.push_back(recv->end());
    else
      all_dead = false;
  }
  if (!all_dead) {
    const std::vector<bool> reach_free = graph->ReachableFrom(free);
    const std::vector<bool> reach_waiting = graph->ReachableFrom(waiting);
    for (const auto& recv : edges->recvs) {
      const Graph::Index i = graph->Find(recv.get());
      if (i != Graph::kNone && reach_free[i] && !reach_waiting[i])
        plan.certain.push_back(recv->end().peer);
    }
  }
  graph_ = std::move(graph);
  execution_ = std::make_unique<Execution>(graph_, ExecutionOptions{retain_graph_}, this);
  return plan;
}

void PassRun::FeedRoots() { Queue({root_, std::move(roots_->gradients), /*reached=*/true}); }

void PassRun::FeedSend(EdgeId edge) {
  const Graph::Index root = send_roots_.at(edge);
  const bool reached = arriving_ != nullptr && arriving_->edge == edge && arriving_->reached;
  const size_t inputs = graph_->entry(root).node->next_edges().size();
  std::vector<at::Tensor> gradients(inputs);
  if (reached) {
    if (arriving_->gradients.size() != inputs) {
      return pass_.Fail(LocalError(absl::InvalidArgumentError(
          absl::StrCat(arriving_->gradients.size(), " gradients came for edge ", edge,
                       ", which has ", inputs))));
    }
    gradients = std::move(arriving_->gradients);
  }
  Queue({root, std::move(gradients), reached});
}

void PassRun::Queue(Feed feed) {
  ++outstanding_;
  absl::MutexLock lock(&mu_);
  feeds_.push_back(std::move(feed));
}

bool PassRun::Idle() { return outstanding_ == 0 && (execution_ == nullptr || execution_->idle()); }

void PassRun::Stop(const absl::Status& why) {
  if (execution_) execution_->Cancel(why);
  absl::MutexLock lock(&mu_);
  outstanding_ -= feeds_.size();
  feeds_.clear();
  captured_.clear();
}

void PassRun::FlushCapturedOnStrand() {
  std::vector<Captured> captured;
  {
    absl::MutexLock lock(&mu_);
    captured.swap(captured_);
    captured_bytes_ = 0;
  }
  for (Captured& c : captured) {
    if (!pass_.running()) return;
    pass_.OnGradientSent(c.end.peer);
    Deliver(c.end.peer, {.kind = Notice::Kind::kEdge,
                         .edge = c.end.edge,
                         .reached = c.reached,
                         .gradients = std::move(c.gradients)});
  }
}

void PassRun::SendNoGradient(EdgeEnd edge, bool late) {
  Deliver(edge.peer, {.kind = Notice::Kind::kEdge, .edge = edge.edge, .late = late});
}
void PassRun::SendStart(WorkerId to) { Deliver(to, {.kind = Notice::Kind::kStart}); }
void PassRun::SendAck(WorkerId to, uint32_t count) {
  Deliver(to, {.kind = Notice::Kind::kAck, .count = count});
}
void PassRun::SendAbort(WorkerId to, const absl::Status& why) {
  Deliver(to, {.kind = Notice::Kind::kAbort, .status = why});
}

void PassRun::Deliver(WorkerId to, Notice notice) {
  notice.context = context_->id();
  notice.pass = id_;
  notice.retain_graph = retain_graph_;
  if (to == engine_->self()) {
    // Runs after this task, like any message.
    std::vector<Notice> notices;
    notices.push_back(std::move(notice));
    strand_.Run([self = shared_from_this(), notices = std::move(notices)]() mutable {
      // The answer to a message that one sends oneself would go nowhere.
      if (!self->over_.has_value()) self->OnNoticeOnStrand(self->engine_->self(), notices.front());
      self->EndTaskOnStrand();
    });
    return;
  }
  auto [it, is_new] = outbox_.try_emplace(to);
  if (is_new) it->second = engine_->network().NewNotice();
  absl::Status appended = AppendNotice(notice, &it->second);
  if (!appended.ok()) pass_.Fail(LocalError(Annotate(appended, "sending a gradient")));
}

void PassRun::Finish(const absl::Status& status) { over_ = status; }

void PassRun::EndTaskOnStrand() {
  for (auto& [to, packet] : std::exchange(outbox_, {}))
    engine_->network().Notify(to, std::move(packet));
  if (!over_.has_value() || ended_) return;
  ended_ = true;
  context_->EndPass(id_, *over_);
  if (timer_.has_value()) engine_->clock().Cancel(*timer_);
  if (!promise_.has_value()) return;
  if (over_->ok())
    promise_->Set(Unit());
  else
    promise_->Set(*over_);
}

absl::Status PassRun::LocalError(const absl::Status& why) {
  return Annotate(why, absl::StrCat("backward of context ", context_->id(), " on worker ",
                                    engine_->network().Describe(engine_->self())));
}

std::string PassRun::DescribeAwaitedOnStrand() {
  const std::vector<EdgeEnd> awaited = pass_.Awaited();
  if (awaited.empty()) return "; what is missing is on other workers";
  absl::btree_map<WorkerId, int> by_peer;
  for (const EdgeEnd& end : awaited) ++by_peer[end.peer];
  return absl::StrCat("; awaited are gradients of ",
                      absl::StrJoin(by_peer, ", ", [&](std::string* out, const auto& item) {
                        absl::StrAppend(out, item.second, " edge(s) to worker ",
                                        engine_->network().Describe(item.first));
                      }));
}

}  // namespace distgrad
