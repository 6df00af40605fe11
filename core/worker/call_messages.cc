// Encodes messages, and records and takes their edges.
#include "core/worker/call_messages.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/autograd/context_record.h"
#include "core/base/status.h"
#include "core/tensor/allocation_limit.h"
#include "core/tensor/device_map.h"

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

absl::StatusOr<size_t> CallMessages::Encode(CallHeader& header,
                                            const std::shared_ptr<ContextRecord>& context,
                                            WorkerRank to, const Message& message,
                                            Packet* packet) const {
  if (message.tensors.size() > limits_.tensors_per_message) {
    return absl::ResourceExhaustedError(absl::StrCat("the message has ", message.tensors.size(),
                                                     " tensors; limit tensors_per_message is ",
                                                     limits_.tensors_per_message));
  }
  if (context != nullptr) {
    header.context = context->id();
    if (header.modes.grad_enabled) header.recorded = Recorded(message);
  }
  DeviceMap devices;
  if (HasDeviceTensors(message.tensors)) {
    DG_ASSIGN_OR_RETURN(const auto with, network_->DevicesWith(to));
    devices = *with;
  }
  // A view in which one element stands for many is made in full where it cannot be sent as it is.
  const AllocationLimit limit(limits_.message_bytes, "limit message_bytes");
  DG_ASSIGN_OR_RETURN(const size_t body, AppendCallBody(header, message, packet, devices));
  // Here, before an edge is made for it.
  if (packet->size() > limits_.message_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the message has ", packet->size(),
                                                     " bytes; limit message_bytes is ",
                                                     limits_.message_bytes));
  }
  return body;
}

std::shared_ptr<SourceNode> CallMessages::MakeSend(const CallHeader& header,
                                                   const Message& message) {
  return header.recorded.empty() ? nullptr : Engine::MakeSend(message.tensors);
}

absl::StatusOr<EdgeId> CallMessages::Record(const std::shared_ptr<ContextRecord>& context,
                                            WorkerRank to, std::shared_ptr<SourceNode> send,
                                            bool of_operator, size_t body, Packet* packet) const {
  if (context == nullptr) return EdgeId{0};
  DG_RETURN_IF_ERROR(context->AddPeer(to));
  if (send == nullptr) return EdgeId{0};
  // Last, for now next to nothing can keep the edge from being sent.
  DG_ASSIGN_OR_RETURN(const EdgeId edge,
                      engine_->RecordSend(*context, to, std::move(send), of_operator));
  SetEdge(body, edge, packet);
  return edge;
}

// Makes the recv node of an edge. A message that could not be read, or that nobody wants, gets
// one too, which leads nowhere: so the other end hears that no gradient will come.
absl::Status CallMessages::TakeEdge(const std::shared_ptr<ContextRecord>& context, WorkerRank from,
                                    const CallHeader& header,
                                    absl::StatusOr<Message>& message) const {
  if (context == nullptr || header.edge == 0) return absl::OkStatus();
  std::vector<at::Tensor> recorded;
  if (message.ok()) {
    for (uint32_t place : header.recorded) recorded.push_back(message->tensors[place]);
  }
  return engine_->RecordRecv(context, {header.edge, from}, absl::MakeSpan(recorded));
}

}  // namespace distgrad
