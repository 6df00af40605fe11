// Feeds roots, counts what arrives at each node, and runs the nodes that have all.
#include "core/autograd/executor/execution.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <deque>
#include <exception>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/executor/gradient_slot.h"
#include "core/autograd/executor/lane.h"
#include "core/autograd/executor/nested_backward.h"
#include "core/autograd/executor/node_calls.h"
#include "core/autograd/executor/node_turn.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/autograd/executor/streams.h"
#include "core/base/blocking_observer.h"
#include "core/base/status.h"
#include "core/tensor/allocation_limit.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// How far a node is. Thread-safe.
struct Progress {
  std::atomic<uint32_t> missing{0};  // dependencies that have not run; one for a root
  std::atomic<bool> reached{false};
};

// The limit of what is allocated for a node, if it has one. Stays on its thread.
class NodeLimit {
 public:
  NodeLimit(const ExecutionOptions& options, Graph::Index node) {
    if (options.limited.empty() || !options.limited[node]) return;
    limit_.emplace(options.limit_bytes, options.limit_name);
  }

 private:
  std::optional<AllocationLimit> limit_;
};

// A thread that is running nodes. Not thread-safe.
struct Runner final : BlockingObserver {
  explicit Runner(GradientSink* the_sink) : sink(the_sink) {}
  void OnBlocking() override { sink->OnWait(); }

  GradientSink* const sink;
  NestedBackwards nested;
  uint8_t lane = 0;
  Lane* inbox = nullptr;  // none for a thread that feeds
  ReadyHeap ready;
};

}  // namespace

bool MayRunNodesHere() {
  if (NodeTurn::IsHeldHere() || IsCallingPostAccumulateHook()) return false;
  if (torch::autograd::get_current_node() != nullptr) return false;
  // What Node::task_should_compute_output() looks at.
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted == nullptr || wanted->empty();
}

struct Execution::State : std::enable_shared_from_this<Execution::State> {
  State(std::shared_ptr<const Graph> the_graph, ExecutionOptions the_options,
        GradientSink* the_sink, const at::ThreadLocalState& the_thread_state);

  // A burst begins with the first Begin() and ends when each has had its End().
  void Begin();
  void End();
  void Fail(absl::Status why);
  // Calls `f`; what that throws, where there is no memory, is how the execution fails.
  void OrFail(absl::FunctionRef<void()> f);

  // What a thread does for one Feed, or for one lane.
  void RunRoot(Graph::Index root, variable_list gradients, absl::Span<const bool> reached);
  void RunLane(uint8_t lane);
  void RunReady(Runner& runner);

  void RunNode(Graph::Index index, variable_list gradients, Runner& runner);
  void FailAt(Node& node, std::exception_ptr exception);
  // One edge has been followed: adds `gradient`, and has the node run if it was the last.
  void Arrive(Graph::Successor at, at::Tensor gradient, bool reached, Runner& runner);
  void HandOver(uint8_t lane, ReadyNode node);

  // Constant after construction.
  const std::shared_ptr<const Graph> graph;
  const ExecutionOptions options;
  GradientSink* const sink;
  const bool has_devices;
  at::ThreadLocalState thread_state;

  // Synchronize themselves.
  const std::unique_ptr<Progress[]> progress;    // by node
  const std::unique_ptr<GradientSlot[]> inputs;  // by input
  std::deque<Lane> lanes;                        // by Graph::Entry::lane; none without threads
  std::atomic<bool> stopped{false};

  absl::Mutex mu;
  // Guarded by mu.
  absl::Status status ABSL_GUARDED_BY(mu);
  int running ABSL_GUARDED_BY(mu) = 0;
  bool in_on_idle ABSL_GUARDED_BY(mu) = false;
  bool idle_again ABSL_GUARDED_BY(mu) = false;  // a burst ended while OnIdle was being called
};

Execution::State::State(std::shared_ptr<const Graph> the_graph, ExecutionOptions the_options,
                        GradientSink* the_sink, const at::ThreadLocalState& the_thread_state)
    : graph(std::move(the_graph)),
      options(std::move(the_options)),
      sink(the_sink),
      has_devices(!graph->devices().empty()),
      thread_state(the_thread_state),
      progress(new Progress[graph->size()]),
      inputs(new GradientSlot[graph->input_count()]) {
  thread_state.set_grad_mode(false);
  for (Graph::Index i = 0; i < graph->size(); ++i) {
    const uint32_t dependencies = graph->entry(i).dependencies;
    progress[i].missing.store(dependencies == 0 ? 1 : dependencies, std::memory_order_relaxed);
  }
  if (has_devices && options.device_threads != nullptr) {
    lanes.emplace_back(options.device_threads->cpu());
    for (const c10::Device device : graph->devices()) {
      lanes.emplace_back(options.device_threads->Of(device));
    }
  }
}

void Execution::State::Begin() {
  absl::MutexLock lock(&mu);
  ++running;
}

void Execution::State::End() {
  {
    absl::MutexLock lock(&mu);
    if (--running > 0) return;
    if (in_on_idle) {
      idle_again = true;
      return;
    }
    in_on_idle = true;
  }
  while (true) {
    sink->OnIdle();
    absl::MutexLock lock(&mu);
    // A burst that is in flight again will come here itself.
    in_on_idle = idle_again && running == 0;
    idle_again = false;
    if (!in_on_idle) return;
  }
}

void Execution::State::Fail(absl::Status why) {
  absl::MutexLock lock(&mu);
  if (!status.ok()) return;
  status = std::move(why);
  stopped.store(true, std::memory_order_relaxed);
}

void Execution::State::OrFail(absl::FunctionRef<void()> f) {
  try {
    f();
  } catch (...) {
    Fail(StatusFromException(std::current_exception()));
  }
}

void Execution::State::RunRoot(Graph::Index root, variable_list gradients,
                               absl::Span<const bool> reached) {
  const at::ThreadLocalStateGuard guard(thread_state);
  const Graph::Entry& entry = graph->entry(root);
  if (gradients.size() != entry.input_count || reached.size() != entry.input_count) {
    Fail(absl::InvalidArgumentError(absl::StrCat("a root with ", entry.input_count,
                                                 " inputs was fed ", gradients.size(),
                                                 " gradients, and told of ", reached.size())));
    return;
  }
  if (progress[root].missing.exchange(0, std::memory_order_relaxed) != 1) {
    Fail(absl::InternalError("a root was fed twice"));
    return;
  }
  if (!MayRunNodesHere()) {
    Fail(absl::InternalError(
        "nodes were fed on a thread that is inside a node or torch::autograd::grad()"));
    return;
  }
  Runner runner(sink);
  try {
    // A source node: what it does is to have its gradients checked.
    variable_list outputs;
    if (absl::c_linear_search(reached, true)) {
      const NodeLimit limit(options, root);
      outputs = CallOperator(*entry.node, std::move(gradients), options.retain_graph);
    } else {
      outputs.resize(reached.size());
    }
    const absl::Span<const Graph::Successor> successors = graph->successors(root);
    for (size_t i = 0; i < successors.size(); ++i) {
      if (successors[i].node == Graph::kNone) continue;
      if (!reached[i]) outputs[i].reset();
      Arrive(successors[i], std::move(outputs[i]), reached[i], runner);
    }
  } catch (...) {
    FailAt(*entry.node, std::current_exception());
  }
  RunReady(runner);
}

void Execution::State::RunLane(uint8_t lane) {
  const at::ThreadLocalStateGuard guard(thread_state);
  Runner runner(sink);
  runner.lane = lane;
  runner.inbox = &lanes[lane];
  RunReady(runner);
}

void Execution::State::RunReady(Runner& runner) {
  while (!stopped.load(std::memory_order_relaxed)) {
    if (runner.inbox != nullptr ? !runner.inbox->Refill(&runner.ready) : runner.ready.empty()) {
      return;
    }
    const Graph::Index index = runner.ready.Pop();
    const Graph::Entry& entry = graph->entry(index);
    variable_list gradients(entry.input_count);
    for (uint32_t i = 0; i < entry.input_count; ++i) {
      gradients[i] = inputs[entry.first_input + i].Take();
    }
    RunNode(index, std::move(gradients), runner);
  }
}

void Execution::State::RunNode(Graph::Index index, variable_list gradients, Runner& runner) {
  const Graph::Entry& entry = graph->entry(index);
  Node& node = *entry.node;
  const bool reached = progress[index].reached.load(std::memory_order_relaxed);
  try {
    if (reached) sink->OnNext(&node);
    std::optional<HomeStreamGuard> streams;
    if (entry.lane != 0) streams.emplace(node, gradients);
    switch (entry.kind) {
      case Graph::Kind::kLeaf: {
        if (!reached) return;
        auto& leaf = static_cast<AccumulateGrad&>(node);
        CallLeaf(leaf, std::move(gradients), entry.lane == 0 || graph->one_stream_per_device(),
                 [&](at::Tensor gradient) { sink->OnLeaf(leaf, std::move(gradient)); });
        runner.nested.CheckLeavesAreGone();
        return;
      }
      case Graph::Kind::kStop:
        if (reached) gradients = CallStop(node, std::move(gradients));
        runner.nested.CheckLeavesAreGone();
        sink->OnStop(node, std::move(gradients), reached);
        return;
      case Graph::Kind::kOperator:
        break;
    }
    const absl::Span<const Graph::Successor> successors = graph->successors(index);
    variable_list outputs;
    if (reached) {
      const NodeLimit limit(options, index);
      outputs = CallOperator(node, std::move(gradients), options.retain_graph);
    } else {
      outputs.resize(successors.size());
    }
    runner.nested.CheckLeavesAreGone();
    for (size_t i = 0; i < successors.size(); ++i) {
      if (successors[i].node == Graph::kNone) continue;
      Arrive(successors[i], std::move(outputs[i]), reached, runner);
    }
  } catch (...) {
    FailAt(node, std::current_exception());
  }
}

void Execution::State::FailAt(Node& node, std::exception_ptr exception) {
  const absl::Status error = StatusFromException(std::move(exception));
  if (torch::autograd::AnomalyMode::is_enabled()) node.metadata()->print_stack(node.name());
  Fail(Annotate(error, node.name()));
}

void Execution::State::Arrive(Graph::Successor at, at::Tensor gradient, bool reached,
                              Runner& runner) {
  const Graph::Entry& entry = graph->entry(at.node);
  std::optional<c10::Stream> home;
  if (has_devices && IsOnAccelerator(gradient)) {
    home = HomeStream(*entry.node, at.input, gradient);
    if (home.has_value()) BringHome(gradient, *home);
  }
  inputs[entry.first_input + at.input].Add(
      std::move(gradient), [&](at::Tensor held, at::Tensor more) {
        const NodeLimit limit(options, at.node);
        return AddGradients(*entry.node, std::move(held), std::move(more), home,
                            !home.has_value() || graph->one_stream_per_device());
      });
  Progress& node = progress[at.node];
  if (reached) node.reached.store(true, std::memory_order_relaxed);
  // The last to count down sees what all others stored before they did.
  if (node.missing.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // A stop comes before all, as a leaf does: somebody may wait for it. Its own number says nothing
  // here, for it counts the nodes of the thread on which the stop was made.
  const uint64_t order = entry.kind == Graph::Kind::kStop ? std::numeric_limits<uint64_t>::max()
                                                          : entry.node->sequence_nr();
  const ReadyNode ready = {order, at.node};
  if (lanes.empty() || entry.lane == runner.lane) {
    runner.ready.Push(ready);
  } else {
    HandOver(entry.lane, ready);
  }
}

void Execution::State::HandOver(uint8_t lane, ReadyNode node) {
  if (!lanes[lane].Put(node)) return;
  Begin();
  absl::Cleanup end = [this] { End(); };  // never the last: the caller is running
  ThreadPool& threads = *lanes[lane].threads();
  absl::Status started = threads.Start();  // says why, where there is no thread
  if (!started.ok()) return Fail(std::move(started));
  const bool scheduled = threads.Schedule([state = shared_from_this(), lane] {
    state->OrFail([&] { state->RunLane(lane); });
    state->sink->OnNext(nullptr);
    state->End();
  });
  if (!scheduled) {
    return Fail(absl::CancelledError("the thread pool of the execution was closed"));
  }
  std::move(end).Cancel();
}

Execution::Execution(std::shared_ptr<const Graph> graph, ExecutionOptions options,
                     GradientSink* sink, const at::ThreadLocalState& thread_state)
    : state_(std::make_shared<State>(std::move(graph), std::move(options), sink, thread_state)) {}

Execution::~Execution() = default;

void Execution::Feed(Graph::Index root, variable_list gradients, absl::Span<const bool> reached) {
  const std::shared_ptr<State> state = state_;
  state->Begin();
  if (!state->stopped.load(std::memory_order_relaxed)) {
    state->OrFail([&] { state->RunRoot(root, std::move(gradients), reached); });
  }
  state->End();
}

void Execution::Cancel(absl::Status why) { state_->Fail(std::move(why)); }

absl::Status Execution::status() const {
  absl::MutexLock lock(&state_->mu);
  return state_->status;
}

bool Execution::idle() const {
  absl::MutexLock lock(&state_->mu);
  return state_->running == 0;
}

}  // namespace distgrad
