// Finds the store by which the processes of a job find each other, and the place of each: by
// options, the user's variables or a launcher's. Serves all that joins a job, with a worker or
// without; docs/launching.md.
#ifndef DISTGRAD_CORE_WORKER_RENDEZVOUS_H_
#define DISTGRAD_CORE_WORKER_RENDEZVOUS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/membership/environment.h"
#include "core/membership/store.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/net/tls_options.h"

namespace distgrad {

// The same options as in WorkerOptions.
struct RendezvousOptions {
  std::string rendezvous = "env://";
  std::shared_ptr<Store> store = nullptr;
  std::string job = {};
  bool join = false;
  int rank = -1;
  int world_size = -1;
  std::string key_file = {};
  TlsOptions tls = {};  // without `encrypt_local`, which is a worker's alone
};

struct Rendezvous {
  Place place = {};
  ClusterKey cluster_key = {};
  std::shared_ptr<Certificates> certificates = nullptr;  // null: there are none
  // The store of this start of this job alone; signed, where there is a cluster key.
  std::shared_ptr<Store> store = nullptr;
  bool serves_store = false;          // to the others
  bool worker0_serves_store = false;  // here or elsewhere
};

// Returns the address by which the others reach this machine, as the option `host` or DISTGRAD_HOST
// says; "" where neither does. kInvalidArgument if it is not one of this machine's, so that no
// thread waits for a store before that is found.
absl::StatusOr<std::string> SaidHost(const std::string& option);

// Returns the same where nothing says it: loopback if all are on this machine for all that is
// known, and else the address by which this machine reaches the store. kFailedPrecondition, with
// what to set, where there is none.
absl::StatusOr<std::string> DefaultHost(const Place& place);

// Makes sure that this process may open the file descriptors that a worker of a job of so many may
// need, or says in the log that it may not: docs/operating.md, "What a worker needs".
void ReserveForPeers(size_t workers);

// Joins the rendezvous. kInvalidArgument for options that make no sense, kFailedPrecondition for an
// environment that lacks something; else the store's error.
absl::StatusOr<Rendezvous> JoinRendezvous(const RendezvousOptions& options, Deadline deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_RENDEZVOUS_H_
