// Takes a worker from its options to a place in its job: rank, store and transport. The one file
// that picks implementations.
#ifndef DISTGRAD_CORE_WORKER_JOB_H_
#define DISTGRAD_CORE_WORKER_JOB_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/membership/store.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/transport/transport.h"

namespace distgrad {

struct WorkerOptions;

struct Job {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 0;
  std::string name = {};  // of this worker; "": "worker<rank>"
  std::string host = {};  // that it listens on; "": of a transport that has none
  ClusterKey cluster_key = {};
  std::shared_ptr<Certificates> certificates = nullptr;
  std::shared_ptr<Store> store = nullptr;
  bool serves_store = false;          // to the others
  bool worker0_serves_store = false;  // here or elsewhere
  std::unique_ptr<Transport> transport = nullptr;
};

// Joins the job. kInvalidArgument for options that make no sense, kFailedPrecondition for an
// environment that lacks something; else the error of the store or the transport.
absl::StatusOr<Job> JoinJob(const WorkerOptions& options, Deadline deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_JOB_H_
