// Forwards to what a worker is made of.
#include "core/worker/worker.h"

#include <utility>

#include "core/autograd/state.h"
#include "core/base/blocking.h"
#include "core/base/status.h"
#include "core/tensor/values.h"
#include "core/worker/metrics.h"
#include "core/worker/worker_impl.h"

namespace distgrad {

Worker::Worker(std::shared_ptr<WorkerImpl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() { impl_->Join(); }
void Worker::Abort() { impl_->Abort(); }
absl::Status Worker::Close(Deadline deadline) { return impl_->Close(deadline); }

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(WorkerOptions options) {
  const BlockingScope blocking;
  DG_ASSIGN_OR_RETURN(std::shared_ptr<WorkerImpl> impl, WorkerImpl::Create(std::move(options)));
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

WorkerRank Worker::rank() const { return impl_->self().rank; }
const std::string& Worker::name() const { return impl_->self().name; }
int Worker::world_size() const { return static_cast<int>(impl_->agent().MemberCount()); }
const std::shared_ptr<Store>& Worker::store() const { return impl_->job().store; }
const std::string& Worker::host() const { return impl_->job().host; }
const ClusterKey& Worker::cluster_key() const { return impl_->job().cluster_key; }
const std::shared_ptr<Certificates>& Worker::certificates() const {
  return impl_->job().certificates;
}
int Worker::local_rank() const { return impl_->job().local_rank; }
const Limits& Worker::limits() const { return impl_->options().limits; }
int Worker::local_world_size() const { return impl_->job().local_world_size; }

std::vector<Member> Worker::MembersOnThisMachine() const { return impl_->MembersOnThisMachine(); }
std::vector<std::string> Worker::names() const {
  std::vector<std::string> names;
  for (Member& member : members()) names.push_back(std::move(member.name));
  return names;
}
std::vector<Member> Worker::members() const { return impl_->members(); }
Deadline Worker::DefaultDeadline() const { return impl_->DefaultDeadline(); }
std::string Worker::Describe(WorkerRank worker) const { return impl_->agent().Describe(worker); }
absl::Status Worker::Register(std::string function, Handler handler) {
  return impl_->server().Register(std::move(function), {.handler = std::move(handler)});
}
absl::Status Worker::RegisterAsync(std::string function, AsyncHandler handler) {
  return impl_->server().Register(std::move(function), {.async_handler = std::move(handler)});
}
absl::Status Worker::RegisterOwn(std::string function, Handler handler) {
  return impl_->server().Register(std::move(function),
                                  {.handler = std::move(handler), .is_own = true});
}
absl::Status Worker::RegisterOwnAsync(std::string function, AsyncHandler handler) {
  return impl_->server().Register(std::move(function),
                                  {.async_handler = std::move(handler), .is_own = true});
}
absl::Status Worker::RegisterOwnInline(std::string function, Handler handler) {
  return impl_->server().Register(
      std::move(function), {.handler = std::move(handler), .is_own = true, .is_inline = true});
}
void Worker::UnregisterOwn(absl::string_view function) { impl_->server().Unregister(function); }
Future<Message> Worker::CallAsync(WorkerRef to, absl::string_view function, Message message,
                                  CallOptions options) {
  return impl_->caller().Call(to, function, message, options, /*wait=*/false);
}
absl::StatusOr<Message> Worker::Call(WorkerRef to, absl::string_view function, Message message,
                                     CallOptions options) {
  return impl_->caller().Call(to, function, message, options, /*wait=*/true).Take();
}
std::vector<absl::StatusOr<Message>> Worker::CallEach(absl::Span<const WorkerRef> to,
                                                      absl::string_view function,
                                                      const Message& message, CallOptions options) {
  std::vector<absl::StatusOr<Message>> replies;
  for (Future<Message>& reply : impl_->caller().CallEach(to, function, message, options)) {
    replies.push_back(reply.Take());
  }
  return replies;
}
absl::StatusOr<std::vector<c10::IValue>> Worker::CallOp(WorkerRef to, absl::string_view op,
                                                        std::vector<c10::IValue> arguments,
                                                        CallOptions options) {
  DG_ASSIGN_OR_RETURN(Message message, EncodeValues(arguments));
  DG_ASSIGN_OR_RETURN(Message reply, Call(to, op, std::move(message), options));
  return DecodeValues(std::move(reply), limits().message_bytes);
}
Context Worker::NewContext() { return impl_->NewContext(); }
absl::Status Worker::Barrier(Deadline deadline, OnLost on_lost) {
  return impl_->Barrier(deadline, on_lost);
}
absl::Status Worker::Shutdown(Deadline deadline, OnLost on_lost) {
  return impl_->Shutdown(deadline, on_lost);
}
absl::Status Worker::Serve(OnLost on_lost) { return impl_->Shutdown(Deadline::Never(), on_lost); }
void Worker::OnMember(std::function<void(const MemberEvent&)> callback) {
  impl_->OnMember(std::move(callback));
}
absl::Status Worker::Leave(Deadline deadline) { return impl_->Leave(deadline); }
absl::Status Worker::UpdateMembers() { return UpdateMembers(DefaultDeadline()); }
absl::Status Worker::UpdateMembers(Deadline deadline) { return impl_->UpdateMembers(deadline); }
size_t Worker::context_count() const { return impl_->context_count(); }
WorkerMetrics Worker::Metrics() const { return impl_->Metrics(); }
absl::Status Worker::StartTrace() { return StartTrace(TraceOptions{}); }
absl::Status Worker::StartTrace(const TraceOptions& options) { return impl_->StartTrace(options); }
absl::StatusOr<Trace> Worker::StopTrace() { return impl_->StopTrace(); }
std::vector<ContextState> Worker::Contexts() const { return impl_->Contexts(); }

}  // namespace distgrad
