// Makes the store that the rendezvous asks for, with the job's prefix and signatures.
#include "core/worker/rendezvous.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/descriptors.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/membership/start.h"
#include "core/membership/store/file_store.h"
#include "core/membership/store/in_process_store.h"
#include "core/membership/store/signed_store.h"
#include "core/membership/store/tcp_store.h"
#include "core/net/address.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"

namespace distgrad {
namespace {

absl::StatusOr<std::shared_ptr<Store>> MakeStore(const Rendezvous& rendezvous, Deadline deadline) {
  const Place& place = rendezvous.place;
  const RendezvousUrl& url = place.rendezvous;
  switch (url.kind) {
    case RendezvousUrl::Kind::kEnvironment:
      return NewInProcessStore();  // for one worker alone
    case RendezvousUrl::Kind::kFile:
      return NewFileStore(url.path);
    case RendezvousUrl::Kind::kTcp:
      return NewTcpStore({.host = url.host,
                          .port = url.port,
                          .cluster_key = rendezvous.cluster_key,
                          .certificates = rendezvous.certificates,
                          .of_launcher = place.launcher_serves,
                          .is_server = place.serves_store,
                          .bind_host = url.bind,
                          .deadline = deadline});
  }
  return absl::InternalError("a rendezvous of no kind");
}

constexpr size_t kDescriptorsBesides = 64, kDescriptorsOfPeer = 10;

// All workers talk with the store: the one that serves it cannot do with less.
absl::Status ReserveForStore(const Place& place) {
  if (!place.serves_store || place.rendezvous.kind != RendezvousUrl::Kind::kTcp) {
    return absl::OkStatus();
  }
  return ReserveDescriptors(
      kDescriptorsBesides + place.world_size,
      absl::StrCat("the worker that serves the store of a job of ", place.world_size));
}

}  // namespace

void ReserveForPeers(size_t workers) {
  const absl::Status reserved =
      ReserveDescriptors(kDescriptorsBesides + kDescriptorsOfPeer * (workers - 1),
                         absl::StrCat("a worker that talks with all others of a job of ", workers));
  // No error: not every worker talks with every other.
  if (!reserved.ok()) DG_LOG(WARNING) << reserved.message();
}

absl::StatusOr<std::string> SaidHost(const std::string& option) {
  const std::string host =
      option.empty() ? ProcessEnvironment("DISTGRAD_HOST").value_or("") : option;
  if (host.empty()) return host;
  DG_RETURN_IF_ERROR(Annotate(ResolveBindHost(host).status(),
                              option.empty() ? "DISTGRAD_HOST" : "the option host"));
  return host;
}

absl::StatusOr<std::string> DefaultHost(const Place& place) {
  constexpr char kLoopback[] = "127.0.0.1";
  const bool is_one_machine = place.is_launched && place.local_world_size == place.world_size;
  if (is_one_machine || place.rendezvous.kind != RendezvousUrl::Kind::kTcp) return kLoopback;
  absl::StatusOr<std::string> host = AddressToward(place.rendezvous.host);
  if (host.ok()) return host;
  return absl::FailedPreconditionError(
      absl::StrCat("it is not known by which address the others reach this machine: set "
                   "DISTGRAD_HOST (or the option host) to one, or to an interface (",
                   host.status().message(), ")"));
}

absl::StatusOr<Rendezvous> JoinRendezvous(const RendezvousOptions& options, Deadline deadline) {
  Rendezvous rendezvous;
  DG_ASSIGN_OR_RETURN(rendezvous.cluster_key, LoadClusterKey(options.key_file));
  DG_ASSIGN_OR_RETURN(rendezvous.certificates, LoadCertificates(options.tls));
  DG_ASSIGN_OR_RETURN(rendezvous.place, FindPlace({.rank = options.rank,
                                                   .world_size = options.world_size,
                                                   .rendezvous = options.rendezvous,
                                                   .has_store = options.store != nullptr,
                                                   .join = options.join},
                                                  &ProcessEnvironment));
  const Place& place = rendezvous.place;
  ReserveForPeers(place.world_size);
  DG_RETURN_IF_ERROR(ReserveForStore(place));
  rendezvous.store = options.store;
  if (rendezvous.store == nullptr) {
    DG_ASSIGN_OR_RETURN(rendezvous.store, MakeStore(rendezvous, deadline));
    rendezvous.worker0_serves_store =
        place.rendezvous.kind == RendezvousUrl::Kind::kTcp && !place.launcher_serves;
    rendezvous.serves_store = rendezvous.worker0_serves_store && place.serves_store;
  }
  // The signature is over the whole key: an entry of one job or start does not pass for one of
  // another.
  if (!rendezvous.cluster_key.empty()) {
    rendezvous.store = NewSignedStore(rendezvous.cluster_key, std::move(rendezvous.store));
  } else if (rendezvous.certificates != nullptr && options.store == nullptr &&
             (place.launcher_serves || place.rendezvous.kind == RendezvousUrl::Kind::kFile)) {
    DG_LOG(WARNING) << "this job has certificates and no cluster key, and its store, which "
                    << (place.launcher_serves ? "the launcher serves" : "is a file")
                    << ", knows no certificates: whoever can write to it can forge its entries, "
                       "the addresses of workers and who of them is lost among them, so that the "
                       "job does not start or loses workers. To have the entries signed, give it a "
                       "cluster key, too ("
                    << kClusterKeySetting << "); see docs/security.md";
  }
  if (absl::StrContains(options.job, '/')) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of job '", options.job, "' must not have a '/'"));
  }
  if (!options.job.empty()) {
    rendezvous.store = std::make_shared<PrefixStore>(absl::StrCat("job/", options.job, "/"),
                                                     std::move(rendezvous.store));
  }
  if (!place.run.empty()) {
    auto run = std::make_shared<PrefixStore>(absl::StrCat("run/", place.run, "/"),
                                             std::move(rendezvous.store));
    DG_ASSIGN_OR_RETURN(rendezvous.store,
                        StoreOfThisStart(std::move(run), place.rank, place.world_size, deadline));
  }
  return rendezvous;
}

}  // namespace distgrad
