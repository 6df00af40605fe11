#include "core/worker/worker.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/context_registry.h"
#include "core/autograd/engine.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/thread_pool.h"
#include "core/rpc/agent.h"
#include "core/rpc/frame.h"
#include "core/rpc/rendezvous.h"
#include "core/tensor/exception.h"
#include "core/tensor/operator.h"
#include "core/tensor/values.h"
#include "core/worker/call_body.h"
#include "core/worker/job.h"

namespace distgrad {
namespace {

constexpr absl::string_view kOperatorMark = "::";

bool IsOperator(absl::string_view function) { return absl::StrContains(function, kOperatorMark); }

// Whether running it takes less than handing it to another thread: an operator of libtorch's own,
// which waits for nothing, on small tensors.
bool IsShort(absl::string_view function, const Message& message) {
  constexpr size_t kShortBytes = 16 << 10;
  if (!absl::StartsWith(function, "aten::") || message.tensors.empty()) return false;
  size_t bytes = 0;
  for (const at::Tensor& tensor : message.tensors) {
    if (!tensor.defined()) continue;
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) return false;
    bytes += tensor.nbytes();
  }
  return bytes <= kShortBytes;
}

// The places of the tensors that a peer is to record.
std::vector<uint32_t> Recorded(const Message& message) {
  std::vector<uint32_t> places;
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    if (message.tensors[i].defined() && message.tensors[i].requires_grad()) {
      places.push_back(static_cast<uint32_t>(i));
    }
  }
  return places;
}

}  // namespace

class Worker::Impl : public Context::Owner,
                     public AgentService,
                     public EngineNetwork,
                     public std::enable_shared_from_this<Worker::Impl> {
 public:
  static absl::StatusOr<std::shared_ptr<Impl>> Create(WorkerOptions options);
  ~Impl() override { Close(); }

  absl::Status Register(std::string function, Handler handler);
  Future<Message> Call(absl::StatusOr<WorkerId> to, absl::string_view function, Message message,
                       const CallOptions& options);
  Context NewContext() { return Context(shared_from_this(), contexts_.New(), /*is_origin=*/true); }
  absl::Status WaitForAll(absl::Time deadline);
  absl::Status Leave(absl::Time deadline);
  void Close();

  // Context::Owner
  Engine& engine() override { return engine_; }
  absl::Time DefaultDeadline() override { return clock_->Now() + options_.timeout; }

  // AgentService
  void OnCall(IncomingCall call) override;
  void OnNotice(WorkerId from, Body notice) override {
    engine_.OnNotice(from, std::move(notice.packet), notice.offset);
  }
  void OnLateReply(WorkerId from, Body reply) override;
  void OnPeerLost(WorkerId peer, const absl::Status& why) override {
    engine_.OnPeerLost(peer, why);
  }

  // EngineNetwork
  Packet NewNotice() override { return Agent::NewNotice(); }
  void Notify(WorkerId to, Packet notices) override { agent_.Notify(to, std::move(notices)); }
  std::string Describe(WorkerId worker) override { return agent_.Describe(worker); }

  const WorkerInfo& self() const { return self_; }
  const WorkerOptions& options() const { return options_; }
  const std::vector<WorkerInfo>& workers() const { return workers_; }
  const Agent& agent() const { return agent_; }
  size_t context_count() const { return contexts_.size(); }
  std::vector<ContextSnapshot> Contexts() const { return engine_.Snapshot(); }

 private:
  Impl(WorkerOptions options, WorkerInfo self, std::unique_ptr<Transport> transport);

  absl::StatusOr<Message> TakeReply(const std::shared_ptr<ContextRecord>& context, WorkerId from,
                                    Body& body);
  absl::Status TakeEdge(const std::shared_ptr<ContextRecord>& context, WorkerId from,
                        const CallHeader& header, absl::StatusOr<Message>& message);
  void Serve(IncomingCall call, const CallHeader& header, std::shared_ptr<ContextRecord> context,
             Message message);
  absl::StatusOr<Message> RunHandler(Request& request);
  absl::StatusOr<Message> ServeOperator(Request& request);
  absl::StatusOr<Packet> Pack(Packet packet, const std::shared_ptr<ContextRecord>& context,
                              WorkerId to, CallHeader header, const Message& message, EdgeId* edge);
  absl::Status Barrier(const std::string& name, absl::Time deadline);

  // Constant after construction.
  const WorkerOptions options_;
  WorkerInfo self_;
  std::vector<WorkerInfo> workers_;  // by id

  // Synchronize themselves. In the order in which they depend on each other.
  const std::unique_ptr<Clock> clock_;
  std::shared_ptr<Store> store_;
  ContextRegistry contexts_;
  ThreadPool pool_;
  Engine engine_;
  std::unique_ptr<Transport> transport_;
  Agent agent_;
  std::atomic<int> barriers_{0};

  absl::Mutex mu_;
  // Guarded by mu_.
  absl::flat_hash_map<std::string, std::shared_ptr<const Handler>> handlers_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

// ---------------------------------------------------------------------------------------- Life

Worker::Impl::Impl(WorkerOptions options, WorkerInfo self, std::unique_ptr<Transport> transport)
    : options_(std::move(options)),
      self_(std::move(self)),
      clock_(NewSystemClock()),
      contexts_(self_.id),
      pool_(self_.name, options_.threads > 0 ? options_.threads
                                             : std::max(1u, std::thread::hardware_concurrency())),
      engine_(self_.id, this, &pool_, clock_.get(), &contexts_),
      transport_(std::move(transport)),
      agent_(clock_.get(), transport_.get(), this) {}

absl::StatusOr<std::shared_ptr<Worker::Impl>> Worker::Impl::Create(WorkerOptions options) {
  const absl::Time deadline = absl::Now() + options.join_timeout;
  DG_ASSIGN_OR_RETURN(Job job, JoinJob(options, deadline));
  WorkerInfo self;
  self.id = static_cast<WorkerId>(job.rank);
  self.name = job.name;
  self.incarnation = (uint64_t{std::random_device()()} << 32) | std::random_device()();
  const int world_size = job.world_size;
  std::shared_ptr<Impl> impl(
      new Impl(std::move(options), std::move(self), std::move(job.transport)));
  impl->store_ = std::move(job.store);
  DG_ASSIGN_OR_RETURN(impl->self_.address, impl->agent_.Listen());
  DG_ASSIGN_OR_RETURN(impl->workers_, Rendezvous(*impl->store_, impl->self_, world_size, deadline));
  DG_RETURN_IF_ERROR(impl->agent_.Start(impl->self_, impl->workers_));
  return impl;
}

void Worker::Impl::Close() {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
  }
  engine_.Close();
  agent_.Close();
  pool_.Join();
  engine_.Join();
  transport_.reset();
  for (const auto& context : contexts_.All()) engine_.Release(context->id());
}

// Everyone counts itself in; the last one opens the door. Worker 0 may serve the store, so it
// stays until the others have gone through.
absl::Status Worker::Impl::Barrier(const std::string& name, absl::Time deadline) {
  const int world_size = static_cast<int>(workers_.size());
  DG_ASSIGN_OR_RETURN(const int64_t count, store_->Add(name + "/count", 1));
  if (count == world_size) DG_RETURN_IF_ERROR(store_->Set(name + "/open", "1"));
  DG_RETURN_IF_ERROR(store_->Get(name + "/open", deadline).status());
  if (self_.id != 0) return store_->Set(absl::StrCat(name, "/through/", self_.id), "1");
  for (int id = 1; id < world_size; ++id) {
    DG_RETURN_IF_ERROR(store_->Get(absl::StrCat(name, "/through/", id), deadline).status());
  }
  return absl::OkStatus();
}

absl::Status Worker::Impl::WaitForAll(absl::Time deadline) {
  return Annotate(Barrier(absl::StrCat("barrier/", ++barriers_), deadline),
                  "waiting for all workers");
}

absl::Status Worker::Impl::Leave(absl::Time deadline) {
  return Annotate(Barrier("leave", deadline), "waiting for all workers to leave");
}

// ------------------------------------------------------------------------------------- Calling

absl::StatusOr<Packet> Worker::Impl::Pack(Packet packet,
                                          const std::shared_ptr<ContextRecord>& context,
                                          WorkerId to, CallHeader header, const Message& message,
                                          EdgeId* edge) {
  if (context != nullptr) {
    header.context = context->id();
    if (header.modes.grad_enabled) header.recorded = Recorded(message);
  }
  DG_ASSIGN_OR_RETURN(const size_t offset, AppendCallBody(header, message, &packet));
  if (context == nullptr) return packet;
  DG_RETURN_IF_ERROR(context->AddPeer(to));
  if (!header.recorded.empty()) {
    // Last, for now next to nothing can keep the edge from being sent.
    DG_ASSIGN_OR_RETURN(*edge, engine_.RecordSend(*context, to, message.tensors));
    SetEdge(offset, *edge, &packet);
  }
  return packet;
}

Future<Message> Worker::Impl::Call(absl::StatusOr<WorkerId> to, absl::string_view function,
                                   Message message, const CallOptions& options) {
  if (!to.ok()) return Future<Message>::Of(to.status());
  if (function.empty() || function.size() > kMaxFunctionName) {
    return Future<Message>::Of(absl::InvalidArgumentError(absl::StrCat(
        "a function's name has 1 to ", kMaxFunctionName, " bytes, not ", function.size())));
  }
  const std::shared_ptr<ContextRecord> context =
      options.context ? options.context->record() : nullptr;
  const absl::Time deadline =
      options.deadline == absl::InfinitePast() ? DefaultDeadline() : options.deadline;
  EdgeId edge = 0;
  absl::StatusOr<Packet> packet = absl::DeadlineExceededError("the deadline has passed already");
  if (deadline > clock_->Now()) {
    try {
      packet = Pack(Agent::NewRequest(function), context, *to, {.modes = CallModes::Current()},
                    message, &edge);
    } catch (...) {
      packet = StatusFromException(std::current_exception());
    }
  }
  if (!packet.ok()) {
    return Future<Message>::Of(
        Annotate(packet.status(),
                 absl::StrCat("call of '", function, "' on worker ", agent_.Describe(*to))));
  }
  Promise<Message> promise;
  Future<Message> future = promise.future();
  // While this thread is in agent_.Call() the request has not left, or fails at once.
  std::shared_ptr<std::atomic<bool>> leaving;
  if (edge != 0) leaving = std::make_shared<std::atomic<bool>>(true);
  agent_.Call(*to, *std::move(packet), deadline,
              [this, context, to = *to, edge, leaving, caller = std::this_thread::get_id(),
               promise = std::move(promise)](absl::StatusOr<Body> reply) mutable {
                if (reply.ok()) {
                  promise.Set(TakeReply(context, to, *reply));
                  return;
                }
                if (edge != 0 && *leaving && caller == std::this_thread::get_id())
                  engine_.DropSend(*context, edge);
                promise.Set(reply.status());
              });
  if (leaving != nullptr) *leaving = false;
  return future;
}

// Makes the recv node of an edge. A message that could not be read, or that nobody wants, gets
// one too, which leads nowhere: so the other end hears that no gradient will come.
absl::Status Worker::Impl::TakeEdge(const std::shared_ptr<ContextRecord>& context, WorkerId from,
                                    const CallHeader& header, absl::StatusOr<Message>& message) {
  if (context == nullptr || header.edge == 0) return absl::OkStatus();
  std::vector<at::Tensor> recorded;
  if (message.ok()) {
    for (uint32_t place : header.recorded) recorded.push_back(message->tensors[place]);
  }
  return engine_.RecordRecv(context, {header.edge, from}, absl::MakeSpan(recorded));
}

absl::StatusOr<Message> Worker::Impl::TakeReply(const std::shared_ptr<ContextRecord>& context,
                                                WorkerId from, Body& body) {
  DG_ASSIGN_OR_RETURN(const CallHeader header, ReadCallHeader(body.packet, body.offset));
  try {
    const c10::InferenceMode inference(header.modes.inference);
    absl::StatusOr<Message> message = ReadCallMessage(body.packet, body.offset);
    DG_RETURN_IF_ERROR(TakeEdge(context, from, header, message));
    return message;
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

void Worker::Impl::OnLateReply(WorkerId from, Body reply) {
  absl::StatusOr<CallHeader> header = ReadCallHeader(reply.packet, reply.offset);
  if (!header.ok() || header->context == 0) return;
  if (auto context = contexts_.Find(header->context)) {
    absl::StatusOr<Message> unwanted = absl::CancelledError("the reply came late");
    const absl::Status taken = TakeEdge(context, from, *header, unwanted);
    if (!taken.ok()) DG_LOG(INFO) << "a late reply: " << taken;
  }
}

// ------------------------------------------------------------------------------------- Serving

absl::Status Worker::Impl::Register(std::string function, Handler handler) {
  if (function.empty() || function.size() > kMaxFunctionName || IsOperator(function)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", function, "' cannot be a function's name: it has 1 to ", kMaxFunctionName,
                     " bytes, and '::' is for operators"));
  }
  auto shared = std::make_shared<const Handler>(std::move(handler));
  absl::MutexLock lock(&mu_);
  if (!handlers_.emplace(function, std::move(shared)).second) {
    return absl::AlreadyExistsError(absl::StrCat(
        "function '", function, "' is registered on worker '", self_.name, "' already"));
  }
  return absl::OkStatus();
}

void Worker::Impl::OnCall(IncomingCall call) {
  absl::StatusOr<CallHeader> header = ReadCallHeader(call.body().packet, call.body().offset);
  if (!header.ok()) return call.Fail(header.status());
  std::shared_ptr<ContextRecord> context;
  if (header->context != 0) {
    absl::StatusOr<std::shared_ptr<ContextRecord>> found = contexts_.FindOrAdd(header->context);
    if (!found.ok()) return call.Fail(found.status());
    context = *std::move(found);
    const absl::Status added = context->AddPeer(call.from());
    if (!added.ok()) return call.Fail(added);
  }
  // Here and now, in the order of arrival: messages of a pass that come after this call must find
  // its edge.
  absl::StatusOr<Message> message = ReadCallMessage(call.body().packet, call.body().offset);
  absl::Status taken;
  try {
    taken = TakeEdge(context, call.from(), *header, message);
  } catch (...) {
    taken = StatusFromException(std::current_exception());
  }
  if (!message.ok()) return call.Fail(message.status());
  if (!taken.ok()) return call.Fail(taken);
  if (IsShort(call.function(), *message)) {
    return Serve(std::move(call), *header, std::move(context), *std::move(message));
  }
  pool_.Schedule([this, call = std::move(call), header = *std::move(header),
                  context = std::move(context), message = *std::move(message)]() mutable {
    Serve(std::move(call), header, std::move(context), std::move(message));
  });
}

void Worker::Impl::Serve(IncomingCall call, const CallHeader& header,
                         std::shared_ptr<ContextRecord> context, Message message) {
  Request request{
      .from = call.from(),
      .function = call.function(),
      .message = std::move(message),
      .context = context ? Context(shared_from_this(), context, /*is_origin=*/false) : Context(),
      .deadline = call.deadline()};
  absl::StatusOr<Message> reply = absl::InternalError("not run");
  absl::StatusOr<Packet> packet = absl::InternalError("not packed");
  try {
    // The caller's modes are the handler's too.
    const CallModesScope modes(header.modes);
    reply = RunHandler(request);
    if (!reply.ok()) return call.Fail(reply.status());
    EdgeId edge = 0;
    packet = Pack(call.NewReply(), context, call.from(), {.modes = header.modes}, *reply, &edge);
  } catch (...) {
    packet = StatusFromException(std::current_exception());
  }
  if (packet.ok())
    call.Reply(*std::move(packet));
  else
    call.Fail(packet.status());
}

absl::StatusOr<Message> Worker::Impl::RunHandler(Request& request) {
  std::shared_ptr<const Handler> handler;
  {
    absl::MutexLock lock(&mu_);
    auto it = handlers_.find(request.function);
    if (it != handlers_.end()) handler = it->second;
  }
  if (handler != nullptr) return (*handler)(request);
  if (!IsOperator(request.function))
    return absl::NotFoundError("no such function is registered there");
  if (!options_.serve_operators)
    return absl::PermissionDeniedError("operators are not served there");
  return ServeOperator(request);
}

absl::StatusOr<Message> Worker::Impl::ServeOperator(Request& request) {
  DG_ASSIGN_OR_RETURN(std::vector<c10::IValue> arguments, DecodeValues(std::move(request.message)));
  DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> results,
                      distgrad::CallOperator(request.function, std::move(arguments)));
  return EncodeValues(results);
}

// -------------------------------------------------------------------------------------- Worker

Worker::Worker(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() { impl_->Close(); }

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(WorkerOptions options) {
  DG_ASSIGN_OR_RETURN(std::shared_ptr<Impl> impl, Impl::Create(std::move(options)));
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

WorkerId Worker::id() const { return impl_->self().id; }
const std::string& Worker::name() const { return impl_->self().name; }
int Worker::world_size() const { return static_cast<int>(impl_->workers().size()); }
std::vector<std::string> Worker::names() const {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : impl_->workers()) names.push_back(worker.name);
  return names;
}
absl::Status Worker::Register(std::string function, Handler handler) {
  return impl_->Register(std::move(function), std::move(handler));
}
Future<Message> Worker::CallAsync(absl::string_view to, absl::string_view function, Message message,
                                  CallOptions options) {
  return impl_->Call(impl_->agent().FindWorker(to), function, std::move(message), options);
}
absl::StatusOr<Message> Worker::Call(absl::string_view to, absl::string_view function,
                                     Message message, CallOptions options) {
  return CallAsync(to, function, std::move(message), options).Take();
}
absl::StatusOr<std::vector<c10::IValue>> Worker::CallOperator(absl::string_view to,
                                                              absl::string_view op,
                                                              std::vector<c10::IValue> arguments,
                                                              CallOptions options) {
  DG_ASSIGN_OR_RETURN(Message message, EncodeValues(arguments));
  DG_ASSIGN_OR_RETURN(Message reply, Call(to, op, std::move(message), options));
  return DecodeValues(std::move(reply));
}
Context Worker::NewContext() { return impl_->NewContext(); }
absl::Status Worker::WaitForAll(absl::Time deadline) { return impl_->WaitForAll(deadline); }
absl::Status Worker::Leave(absl::Time deadline) { return impl_->Leave(deadline); }
size_t Worker::context_count() const { return impl_->context_count(); }
std::vector<ContextSnapshot> Worker::Contexts() const { return impl_->Contexts(); }

}  // namespace distgrad
