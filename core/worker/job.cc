// Resolves options, joins the rendezvous, and makes the transport.
#include "core/worker/job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/membership/environment.h"
#include "core/net/certificate_files.h"
#include "core/net/cluster_key.h"
#include "core/tensor/gpu_memory.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "core/worker/rendezvous.h"
#include "core/worker/worker_options.h"

namespace distgrad {
namespace {

// Whether the user wants sockets within a machine encrypted, as those between machines are.
absl::StatusOr<bool> EncryptsUnix(const TlsOptions& tls, const Rendezvous& rendezvous) {
  constexpr char kVariable[] = "DISTGRAD_ENCRYPT_LOCAL";
  bool encrypts = tls.encrypt_local.value_or(false);
  if (!tls.encrypt_local.has_value()) {
    const std::string value = ProcessEnvironment(kVariable).value_or("0");
    if (value != "0" && value != "1") {
      return absl::InvalidArgumentError(absl::StrCat(kVariable, " is '", value, "', not 0 or 1"));
    }
    encrypts = value == "1";
  }
  if (encrypts && rendezvous.cluster_key.empty() && rendezvous.certificates == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the option tls.encrypt_local, or ", kVariable,
                     ", is set, and there is nothing to encrypt with: give a cluster key (",
                     kClusterKeySetting, ") or certificates (", kCertSetting, ")"));
  }
  return encrypts;
}

absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(const WorkerOptions& options,
                                                         const std::string& kind,
                                                         const std::string& host,
                                                         const std::string& name,
                                                         const Rendezvous& rendezvous) {
  if (kind == "inproc") {
    if (options.network == nullptr) {
      return absl::InvalidArgumentError(
          "transport 'inproc' needs a network that the workers share");
    }
    return options.network->NewTransport();
  }
  TensorPipeOptions tensorpipe;
  tensorpipe.host = host;
  tensorpipe.name = name;
  tensorpipe.cluster_key = rendezvous.cluster_key;
  tensorpipe.certificates = rendezvous.certificates;
  DG_ASSIGN_OR_RETURN(tensorpipe.encrypts_unix, EncryptsUnix(options.tls, rendezvous));
  tensorpipe.handshake_timeout = options.limits.handshake_timeout;
  tensorpipe.max_unauthenticated = options.limits.unauthenticated;
  // Of what takes long to send heartbeats say nothing: here bytes count.
  tensorpipe.acknowledge_timeout = options.heartbeat_limit;
  tensorpipe.max_packet_bytes = options.limits.message_bytes;
  // A sparse tensor has two, and a packet of the engine the gradients of several messages.
  tensorpipe.max_segments = size_t{4} * options.limits.tensors_per_message;
  if (options.gpu_channel) tensorpipe.gpus = NewGpuMemory();
  if (kind == "socket")
    tensorpipe.kind = TensorPipeOptions::Kind::kSocket;
  else if (kind == "tcp")
    tensorpipe.kind = TensorPipeOptions::Kind::kTcp;
  else if (kind == "shm")
    tensorpipe.kind = TensorPipeOptions::Kind::kShm;
  else {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no transport '", kind, "'; there are socket, tcp, shm and inproc"));
  }
  return NewTensorPipeTransport(std::move(tensorpipe));
}

// What the options say, or else the variable.
std::string Chosen(const std::string& option, const char* variable, const char* otherwise) {
  return option.empty() ? ProcessEnvironment(variable).value_or(otherwise) : option;
}

}  // namespace

absl::StatusOr<Job> JoinJob(const WorkerOptions& options, Deadline deadline) {
  const std::string transport = Chosen(options.transport, "DISTGRAD_TRANSPORT", "socket");
  const bool needs_host = transport == "socket" || transport == "tcp";
  std::string host;
  if (needs_host) {
    DG_ASSIGN_OR_RETURN(host, SaidHost(options.host));
  }
  DG_ASSIGN_OR_RETURN(Rendezvous rendezvous, JoinRendezvous({.rendezvous = options.rendezvous,
                                                             .store = options.store,
                                                             .job = options.job,
                                                             .join = options.join,
                                                             .rank = options.rank,
                                                             .world_size = options.world_size,
                                                             .key_file = options.key_file,
                                                             .tls = options.tls},
                                                            deadline));
  const Place& place = rendezvous.place;
  Job job{.rank = place.rank,
          .world_size = place.world_size,
          .local_rank = place.local_rank,
          .local_world_size = place.local_world_size,
          .name = options.name,
          .store = std::move(rendezvous.store),
          .serves_store = rendezvous.serves_store,
          .worker0_serves_store = rendezvous.worker0_serves_store};
  if (options.join) {
    // Without a name it is called by the rank that the store gives.
    if (job.name.empty()) job.name = ProcessEnvironment("DISTGRAD_NAME").value_or("");
  } else {
    if (job.name.empty()) job.name = place.name;
    if (job.name.empty()) job.name = absl::StrCat("worker", job.rank);
  }
  if (needs_host && host.empty()) {
    DG_ASSIGN_OR_RETURN(host, DefaultHost(place));
  }
  job.host = host;
  DG_ASSIGN_OR_RETURN(
      job.transport,
      MakeTransport(options, transport, host, job.name.empty() ? "a worker that joins" : job.name,
                    rendezvous));
  job.cluster_key = std::move(rendezvous.cluster_key);
  job.certificates = std::move(rendezvous.certificates);
  return job;
}

}  // namespace distgrad
