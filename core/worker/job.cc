#include "core/worker/job.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"
#include "core/rpc/environment.h"
#include "core/rpc/inproc/inproc_transport.h"
#include "core/rpc/store/file_store.h"
#include "core/rpc/store/signed_store.h"
#include "core/rpc/store/tcp_store.h"
#include "core/rpc/tensorpipe/socket/cluster_key.h"
#include "core/rpc/tensorpipe/tensorpipe_transport.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

constexpr int kMaxWorkers = 1 << 16;  // ids have 16 bits

absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(const WorkerOptions& options,
                                                         const std::string& name,
                                                         const std::string& cluster_key) {
  if (options.transport == "inproc") {
    if (options.network == nullptr) {
      return absl::InvalidArgumentError(
          "transport 'inproc' needs a network that the workers share");
    }
    return NewInprocTransport(options.network);
  }
  TensorPipeOptions tensorpipe;
  tensorpipe.host = options.host;
  tensorpipe.name = name;
  tensorpipe.cluster_key = cluster_key;
  if (options.transport == "socket")
    tensorpipe.kind = TensorPipeOptions::Kind::kSocket;
  else if (options.transport == "tcp")
    tensorpipe.kind = TensorPipeOptions::Kind::kTcp;
  else if (options.transport == "shm")
    tensorpipe.kind = TensorPipeOptions::Kind::kShm;
  else {
    return absl::InvalidArgumentError(absl::StrCat("there is no transport '", options.transport,
                                                   "'; there are socket, tcp, shm and inproc"));
  }
  return NewTensorPipeTransport(std::move(tensorpipe));
}

// "tcp://host:port"; "[::1]:port" for an IPv6 address.
absl::StatusOr<std::shared_ptr<Store>> TcpStoreAt(absl::string_view address, bool serve,
                                                  absl::Time deadline) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == 0 || colon == absl::string_view::npos ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port == 0 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("rendezvous 'tcp://", address, "' is not tcp://host:port"));
  }
  absl::string_view host = address.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  return NewTcpStore({.host = std::string(host),
                      .port = static_cast<uint16_t>(port),
                      .is_server = serve,
                      .deadline = deadline});
}

}  // namespace

absl::StatusOr<Job> JoinJob(const WorkerOptions& options, absl::Time deadline) {
  DG_ASSIGN_OR_RETURN(const std::string cluster_key, LoadClusterKey(options.key_file));
  Job job{.rank = options.rank, .world_size = options.world_size};
  const bool by_environment = options.store == nullptr && options.rendezvous == "env://";
  Environment environment;
  if (by_environment || job.rank < 0 || job.world_size < 0) {
    DG_ASSIGN_OR_RETURN(environment, ReadEnvironment());
    if (job.rank < 0) job.rank = environment.rank;
    if (job.world_size < 0) job.world_size = environment.world_size;
  }
  if (job.world_size < 1 || job.world_size > kMaxWorkers || job.rank >= job.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no worker of rank ", job.rank, " in a job of ", job.world_size));
  }
  job.name = options.name.empty() ? absl::StrCat("worker", job.rank) : options.name;

  absl::string_view rest = options.rendezvous;
  if (options.store != nullptr) {
    job.store = options.store;
  } else if (by_environment) {
    DG_ASSIGN_OR_RETURN(job.store,
                        NewTcpStore({.host = environment.master_addr,
                                     .port = environment.master_port,
                                     .is_server = job.rank == 0 && !environment.agent_store,
                                     .deadline = deadline}));
  } else if (absl::ConsumePrefix(&rest, "tcp://")) {
    DG_ASSIGN_OR_RETURN(job.store, TcpStoreAt(rest, job.rank == 0, deadline));
  } else if (absl::ConsumePrefix(&rest, "file://")) {
    DG_ASSIGN_OR_RETURN(job.store, NewFileStore(std::string(rest)));
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("rendezvous '", options.rendezvous,
                     "' is none of env://, tcp://host:port and file:///path"));
  }
  if (!cluster_key.empty()) job.store = NewSignedStore(cluster_key, std::move(job.store));
  DG_ASSIGN_OR_RETURN(job.transport, MakeTransport(options, job.name, cluster_key));
  return job;
}

}  // namespace distgrad
