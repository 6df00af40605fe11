#include "core/worker/job.h"

#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/rpc/environment.h"
#include "core/rpc/inproc/inproc_transport.h"
#include "core/rpc/start.h"
#include "core/rpc/store/file_store.h"
#include "core/rpc/store/in_process_store.h"
#include "core/rpc/store/signed_store.h"
#include "core/rpc/store/tcp_store.h"
#include "core/rpc/tensorpipe/socket/cluster_key.h"
#include "core/rpc/tensorpipe/tensorpipe_transport.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(const WorkerOptions& options,
                                                         const std::string& kind,
                                                         const std::string& host,
                                                         const std::string& name,
                                                         const std::string& cluster_key) {
  if (kind == "inproc") {
    if (options.network == nullptr) {
      return absl::InvalidArgumentError(
          "transport 'inproc' needs a network that the workers share");
    }
    return NewInprocTransport(options.network);
  }
  TensorPipeOptions tensorpipe;
  tensorpipe.host = host;
  tensorpipe.name = name;
  tensorpipe.cluster_key = cluster_key;
  tensorpipe.handshake_timeout = options.limits.handshake_timeout;
  tensorpipe.max_unauthenticated = options.limits.unauthenticated;
  tensorpipe.max_packet_bytes = options.limits.message_bytes;
  // A sparse tensor has two, and a packet of the engine the gradients of several messages.
  tensorpipe.max_segments = size_t{4} * options.limits.tensors_per_message;
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

absl::StatusOr<std::shared_ptr<Store>> MakeStore(const Place& place, const std::string& cluster_key,
                                                 absl::Time deadline) {
  const RendezvousUrl& url = place.rendezvous;
  switch (url.kind) {
    case RendezvousUrl::Kind::kEnvironment:
      return NewInProcessStore();  // for one worker alone
    case RendezvousUrl::Kind::kFile:
      return NewFileStore(url.path);
    case RendezvousUrl::Kind::kTcp:
      return NewTcpStore({.host = url.host,
                          .port = url.port,
                          .cluster_key = cluster_key,
                          .of_launcher = place.launcher_serves,
                          .is_server = place.serves_store,
                          .bind_host = url.bind,
                          .deadline = deadline});
  }
  return absl::InternalError("a rendezvous of no kind");
}

absl::StatusOr<std::shared_ptr<Store>> StoreOfThisStart(const Place& place,
                                                        std::shared_ptr<Store> store,
                                                        absl::Time deadline) {
  auto run = std::make_shared<PrefixStore>(absl::StrCat("run/", place.run, "/"), std::move(store));
  const uint64_t nonce = (uint64_t{std::random_device()()} << 32) | std::random_device()();
  DG_ASSIGN_OR_RETURN(const int64_t start,
                      AgreeOnStart(*run, place.rank, place.world_size, nonce, deadline));
  return std::make_shared<PrefixStore>(absl::StrCat(start, "/"), std::move(run));
}

// What the options say, or else the variable.
std::string Chosen(const std::string& option, const char* variable, const char* otherwise) {
  return option.empty() ? ProcessEnvironment(variable).value_or(otherwise) : option;
}

}  // namespace

absl::StatusOr<Job> JoinJob(const WorkerOptions& options, absl::Time deadline) {
  DG_ASSIGN_OR_RETURN(const std::string cluster_key, LoadClusterKey(options.key_file));
  // Who joins later has no rank of the start; least of all the one that serves the store.
  DG_ASSIGN_OR_RETURN(const Place place,
                      FindPlace({.rank = options.join ? 1 : options.rank,
                                 .world_size = options.join ? 2 : options.world_size,
                                 .rendezvous = options.rendezvous,
                                 .has_store = options.store != nullptr},
                                &ProcessEnvironment));
  Job job{.rank = place.rank,
          .world_size = place.world_size,
          .local_rank = place.local_rank,
          .local_world_size = place.local_world_size,
          .name = options.name,
          .store = options.store};
  if (job.name.empty()) job.name = place.name;
  if (job.name.empty()) job.name = absl::StrCat("worker", job.rank);
  if (job.store == nullptr) {
    DG_ASSIGN_OR_RETURN(job.store, MakeStore(place, cluster_key, deadline));
    job.serves_store = place.rendezvous.kind == RendezvousUrl::Kind::kTcp && place.serves_store;
  }
  // The signature is over the whole key: an entry of one job or start does not pass for one of
  // another.
  if (!cluster_key.empty()) job.store = NewSignedStore(cluster_key, std::move(job.store));
  if (absl::StrContains(options.job, '/')) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of job '", options.job, "' must not have a '/'"));
  }
  if (!options.job.empty()) {
    job.store =
        std::make_shared<PrefixStore>(absl::StrCat("job/", options.job, "/"), std::move(job.store));
  }
  if (!place.run.empty()) {
    DG_ASSIGN_OR_RETURN(job.store, StoreOfThisStart(place, std::move(job.store), deadline));
  }
  const std::string host = Chosen(options.host, "DISTGRAD_HOST", "127.0.0.1");
  DG_ASSIGN_OR_RETURN(
      job.transport,
      MakeTransport(options, Chosen(options.transport, "DISTGRAD_TRANSPORT", "socket"), host,
                    job.name, cluster_key));
  return job;
}

}  // namespace distgrad
