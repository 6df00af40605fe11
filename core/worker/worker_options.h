// The options that a worker is made with.
#ifndef DISTGRAD_CORE_WORKER_WORKER_OPTIONS_H_
#define DISTGRAD_CORE_WORKER_WORKER_OPTIONS_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "core/net/tls_options.h"
#include "core/rpc/limits.h"
#include "core/tensor/device_map.h"

namespace distgrad {

class InprocNetwork;  // core/transport/inproc/inproc_transport.h
class Store;          // core/membership/store.h

// Which operators ("aten::...") the other workers may call here; see docs/security.md.
enum class ServeOperators {
  kNone,
  // A list of some 400 of libtorch's own, which models are trained with, chosen for what a peer can
  // do by them. One that writes to its arguments is among them, since the worker
  // has copies; one that takes the tensor of its result is not. See
  // core/tensor/served_operators.cc. For others a registered function can call them.
  kSafe,
  // All that are registered in this process, whatever they do.
  kAll,
};

struct WorkerOptions {
  // Unique in the job. Default: DISTGRAD_NAME, or "worker<rank>".
  std::string name = {};

  // How the workers find each other; docs/launching.md:
  //   "env://"            as DISTGRAD_RENDEZVOUS says, or the launcher: torchrun, Slurm, Open MPI,
  //                       Kubernetes' training operators, any that sets MASTER_ADDR and
  //                       MASTER_PORT; where nothing is set, one worker alone
  //   "tcp://host:port"   worker 0 serves a store there
  //   "file:///path"      a file that all workers see; it must not be there from an earlier job
  // with "?rank=1&world_size=2" where these are not given below.
  std::string rendezvous = "env://";
  // The store to use instead of `rendezvous`: workers of one process share an in-process store.
  std::shared_ptr<Store> store = nullptr;

  // The job's name, with no '/' in it, where several jobs share one store.
  std::string job = {};

  // Whether to join a job that runs already, as one more worker: the store gives its rank, and
  // `rank` and `world_size` are not read. See docs/membership.md.
  bool join = false;
  // The number of workers that may ever join the job. A worker neither joins beyond that nor knows
  // of more.
  int max_workers = 4096;

  // The place in the job; -1: as the rendezvous or the launcher says.
  int rank = -1;
  int world_size = -1;

  // "socket" (Unix-domain sockets within a machine, TCP between machines), TensorPipe's own "tcp"
  // (any machine; unauthenticated clients can end the process) and "shm" (this machine; keeps a
  // core busy), or "inproc" (this process; give the network that its workers share).
  // "": DISTGRAD_TRANSPORT, or "socket".
  std::string transport = {};
  // What this worker listens on, for "socket" and "tcp", and the others connect to: an address, a
  // name, or an interface ("eth0") of this machine. "": DISTGRAD_HOST, or loopback where the store
  // is there or is not served over TCP, or where the launcher says that all workers are on this
  // machine; else the address by which this machine reaches the store.
  std::string host = {};
  std::shared_ptr<InprocNetwork> network = nullptr;

  // A file with the secret that all workers of the job share, at least 16 bytes; "": what
  // DISTGRAD_KEY_FILE names, or the secret itself in DISTGRAD_KEY, or none. With one, "socket"
  // talks only to workers that have it, and "tcp" and "shm", which cannot tell, are refused. See
  // docs/security.md.
  std::string key_file = {};
  // Certificates, in the place of that secret or beside it, and whether sockets within the machine
  // are encrypted too. What is not given here is as DISTGRAD_TLS_CERT and so on say. With
  // certificates "socket" talks only to workers that have them, and "tcp" and "shm" are refused.
  TlsOptions tls = {};

  // Threads that run handlers and backward at the same time; more are started while some wait
  // for others. 0: as many as there are processors that the process may use.
  size_t thread_count = 0;

  // The time limit of calls and backward passes that set no deadline.
  absl::Duration timeout = absl::Minutes(1);
  // The time limit for all workers to join.
  absl::Duration join_timeout = absl::Minutes(1);
  // A peer of which nothing is heard for so long is lost, though its connection stands: it was
  // stopped, or its cable was cut. One that has nothing to say is pinged before. Barriers and the
  // end of the job fail if the store is silent for so long (and for some seconds). At least 100 ms;
  // InfiniteDuration() for never (in a debugger, for instance).
  absl::Duration heartbeat_limit = absl::Seconds(20);

  ServeOperators serve_operators = ServeOperators::kSafe;

  Limits limits = {};

  // For each peer, by name, the pairs of a local and a remote device. A tensor that is sent from
  // the local one arrives on the remote one; replies and gradients take the way back. One to one,
  // and known to both ends as soon as one of them says so; where both do they must agree. A tensor
  // of an accelerator that has no place in the map cannot be sent. The CPU always goes with the
  // CPU.
  std::map<std::string, DevicePairs> device_maps = {};
  // Whether, in builds with CUDA, large tensors on GPUs go through TensorPipe's channel for them,
  // to workers that have it too (docs/cuda.md). If false they go by way of the CPU, like all
  // others.
  bool gpu_channel = true;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_WORKER_OPTIONS_H_
