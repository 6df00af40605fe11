// What a worker asks of others, and what it does with their answers.
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/rpc/frame.h"
#include "core/tensor/allocation_limit.h"
#include "core/tensor/exception.h"
#include "core/worker/worker_impl.h"

namespace distgrad {
namespace {

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

absl::StatusOr<size_t> Worker::Impl::Encode(CallHeader& header,
                                            const std::shared_ptr<ContextRecord>& context,
                                            WorkerId to, const Message& message, Packet* packet) {
  if (message.tensors.size() > options_.limits.tensors_per_message) {
    return absl::ResourceExhaustedError(absl::StrCat("the message has ", message.tensors.size(),
                                                     " tensors; limit tensors_per_message is ",
                                                     options_.limits.tensors_per_message));
  }
  if (context != nullptr) {
    header.context = context->id();
    if (header.modes.grad_enabled) header.recorded = Recorded(message);
  }
  DeviceMap devices;
  if (HasDeviceTensors(message.tensors)) {
    DG_ASSIGN_OR_RETURN(const auto with, DevicesWith(to));
    devices = *with;
  }
  // A view in which one element stands for many is made in full where it cannot be sent as it is.
  const AllocationLimit limit(options_.limits.message_bytes, "limit message_bytes");
  DG_ASSIGN_OR_RETURN(const size_t body, AppendCallBody(header, message, packet, devices));
  // Here, before an edge is made for it.
  if (packet->size() > options_.limits.message_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the message has ", packet->size(),
                                                     " bytes; limit message_bytes is ",
                                                     options_.limits.message_bytes));
  }
  return body;
}

absl::StatusOr<std::shared_ptr<const DeviceMap>> Worker::Impl::DevicesWith(WorkerId worker) {
  DG_ASSIGN_OR_RETURN(const WorkerInfo info, agent_->Info(worker));
  return device_maps_.With(info);
}

std::shared_ptr<SourceNode> Worker::Impl::MakeSend(const CallHeader& header,
                                                   const Message& message) {
  return header.recorded.empty() ? nullptr : Engine::MakeSend(message.tensors);
}

absl::StatusOr<EdgeId> Worker::Impl::Record(const std::shared_ptr<ContextRecord>& context,
                                            WorkerId to, std::shared_ptr<SourceNode> send,
                                            size_t body, Packet* packet) {
  if (context == nullptr) return EdgeId{0};
  DG_RETURN_IF_ERROR(context->AddPeer(to));
  if (send == nullptr) return EdgeId{0};
  // Last, for now next to nothing can keep the edge from being sent.
  DG_ASSIGN_OR_RETURN(const EdgeId edge, engine_.RecordSend(*context, to, std::move(send)));
  SetEdge(body, edge, packet);
  return edge;
}

absl::StatusOr<WorkerId> Worker::Impl::Find(WorkerRef worker) const {
  return worker.by_id() ? agent_->FindWorker(worker.id()) : agent_->FindWorker(worker.name());
}

absl::StatusOr<Worker::Impl::Outgoing> Worker::Impl::Prepare(WorkerId to,
                                                             absl::string_view function,
                                                             const Message& message,
                                                             const CallOptions& options) {
  if (function.empty() || function.size() > kMaxFunctionName) {
    return absl::InvalidArgumentError(absl::StrCat("a function's name has 1 to ", kMaxFunctionName,
                                                   " bytes, not ", function.size()));
  }
  if (options.context != nullptr && !options.context->valid()) {
    return absl::FailedPreconditionError("the context of the call is not valid");
  }
  Outgoing call;
  if (options.context != nullptr) call.context = options.context->record();
  if (options.deadline == absl::InfinitePast()) {
    call.deadline = clock_->Now() + options_.timeout;
  } else if (options.deadline.Passed()) {
    return absl::DeadlineExceededError("the deadline has passed already");
  } else {
    call.deadline = clock_->TimeOf(options.deadline);
  }
  if (options.cancellation != nullptr && options.cancellation->cancelled()) {
    return options.cancellation->why();
  }
  call.request = Agent::NewRequest(function);
  try {
    call.header.modes = CallModes::Current();
    DG_ASSIGN_OR_RETURN(call.body,
                        Encode(call.header, call.context, to, message, &call.request.packet));
    // Their gradients would come to this worker, and be waited for at the other.
    if (!call.header.recorded.empty() && !options.context->IsOf(*this)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the message has tensors that require grad, and context ", options.context->id(),
          " is of another worker than worker '", self_.name,
          "', which makes the call; use the worker that made the context, or Request::context in a "
          "handler"));
    }
    call.send = MakeSend(call.header, message);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return call;
}

Future<Message> Worker::Impl::Send(WorkerId to, Outgoing call, const CallOptions& options,
                                   bool wait) {
  const absl::StatusOr<EdgeId> edge =
      Record(call.context, to, std::move(call.send), call.body, &call.request.packet);
  if (!edge.ok()) return Failed(CallError(to, call.request.function, edge.status()));
  Promise<Message> promise;
  const Future<Message> future = promise.future();
  const CallTerms terms{.deadline = call.deadline,
                        .wait_for_credit = wait,
                        .cancellation = options.cancellation.get(),
                        .context = call.header.context};
  const uint64_t number = agent_->Call(
      to, std::move(call.request), terms,
      [this, context = std::move(call.context), to, edge = *edge, promise = std::move(promise)](
          absl::StatusOr<Body> reply, bool has_left) mutable {
        if (reply.ok()) {
          absl::StatusOr<Message> message = TakeReply(context, to, *reply);
          if (!message.ok()) message = OwnError(message.status());
          promise.Set(std::move(message));
          return;
        }
        // Nobody will send a gradient for what nobody has got.
        if (edge != 0 && !has_left) engine_.DropSend(*context, edge);
        promise.Set(OwnError(reply.status()));
      });
  if (number == 0) return future;
  future.MadeBy(agent_->canceller(), number, loop_);
  if (options.cancellation != nullptr) {
    const uint64_t watch = options.cancellation->OnCancel([future] { future.Cancel(); });
    future.Then([cancellation = options.cancellation, watch](const absl::StatusOr<Message>&) {
      cancellation->Forget(watch);
    });
  }
  return future;
}

Future<Message> Worker::Impl::Call(WorkerRef to, absl::string_view function, const Message& message,
                                   const CallOptions& options, bool wait) {
  const absl::StatusOr<WorkerId> id = Find(to);
  if (!id.ok()) {
    if (to.name().empty()) return Failed(id.status());
    return CallUnresolved(std::string(to.name()), function, message, options, wait);
  }
  absl::StatusOr<Outgoing> call = Prepare(*id, function, message, options);
  if (!call.ok()) return Failed(CallError(*id, function, call.status()));
  return Send(*id, *std::move(call), options, wait);
}

std::vector<Future<Message>> Worker::Impl::CallEach(absl::Span<const WorkerRef> to,
                                                    absl::string_view function,
                                                    const Message& message,
                                                    const CallOptions& options) {
  // By way of a device map the bytes are each worker's own.
  const bool shared = !HasDeviceTensors(message.tensors);
  std::optional<absl::StatusOr<Outgoing>> call;
  std::vector<Future<Message>> replies;
  for (const WorkerRef& worker : to) {
    const absl::StatusOr<WorkerId> id = Find(worker);
    if (!id.ok()) {
      replies.push_back(worker.name().empty()
                            ? Failed(id.status())
                            : CallUnresolved(std::string(worker.name()), function, message, options,
                                             /*wait=*/true));
      continue;
    }
    if (!shared || !call.has_value()) call = Prepare(*id, function, message, options);
    if (!call->ok()) {
      replies.push_back(Failed(CallError(*id, function, call->status())));
      continue;
    }
    // Large tensors are segments, whose memory all the packets share.
    Outgoing own = **call;
    try {
      if (!replies.empty()) own.send = MakeSend(own.header, message);
    } catch (...) {
      replies.push_back(Future<Message>::Of(
          CallError(*id, function, StatusFromException(std::current_exception()))));
      continue;
    }
    replies.push_back(Send(*id, std::move(own), options, /*wait=*/true));
  }
  return replies;
}

absl::Status Worker::Impl::CallError(WorkerId to, absl::string_view function,
                                     const absl::Status& why) const {
  return Annotate(why, absl::StrCat("call of '", function, "' on worker ", agent_->Describe(to)));
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
    absl::StatusOr<Message> message =
        ReadCallMessage(body.packet, body.offset, engine_.message_limits());
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

}  // namespace distgrad
