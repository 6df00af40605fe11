// Gives the options of a worker to C.
#include <vector>

#include "distgrad/src/ffi/shim.h"
#include "distgrad/src/ffi/worker_options.rs.h"

namespace distgrad_rust {

// What src/worker_options.rs and src/tls_options.rs take the flags to be.
static_assert(DG_WORKER_NO_OPERATORS == 1 && DG_WORKER_ALL_OPERATORS == 2 && DG_WORKER_JOIN == 4 &&
              DG_WORKER_NO_GPU_CHANNEL == 8);
static_assert(DG_TLS_ENCRYPT_LOCAL == 1 && DG_TLS_NO_ENCRYPT_LOCAL == 2);

WorkerHandle worker_create(const RawWorkerOptions& from) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = ToStr(from.name);
  options.rank = from.rank;
  options.world_size = from.world_size;
  options.rendezvous = ToStr(from.rendezvous);
  options.transport = ToStr(from.transport);
  options.host = ToStr(from.host);
  options.key_file = ToStr(from.key_file);
  options.thread_count = from.thread_count;
  options.timeout_ms = from.timeout_ms;
  options.join_timeout_ms = from.join_timeout_ms;
  options.flags = from.flags;
  options.job = ToStr(from.job);
  options.heartbeat_limit_ms = from.heartbeat_limit_ms;
  options.max_workers = from.max_workers;
  dg_limits limits = DG_LIMITS_INIT;
  limits.message_bytes = from.limits.message_bytes;
  limits.tensors_per_message = from.limits.tensors_per_message;
  limits.calls_per_peer = from.limits.calls_per_peer;
  limits.calls = from.limits.calls;
  limits.bytes_per_peer = from.limits.bytes_per_peer;
  limits.contexts_per_peer = from.limits.contexts_per_peer;
  limits.unauthenticated_connections = from.limits.unauthenticated_connections;
  limits.handshake_timeout_ms = from.limits.handshake_timeout_ms;
  options.limits = &limits;
  std::vector<dg_device_pair> pairs;
  for (const RawDevicePair& each : from.device_pairs) {
    dg_device_pair pair = DG_DEVICE_PAIR_INIT;
    pair.peer = ToStr(each.peer);
    pair.local = ToStr(each.local);
    pair.remote = ToStr(each.remote);
    pairs.push_back(pair);
  }
  std::vector<const dg_device_pair*> pointers;
  for (const dg_device_pair& pair : pairs) pointers.push_back(&pair);
  options.device_pairs = pointers.data();
  options.device_pair_count = pointers.size();
  dg_tls_options tls = DG_TLS_OPTIONS_INIT;
  tls.cert = ToStr(from.tls.cert);
  tls.key = ToStr(from.tls.key);
  tls.ca = ToStr(from.tls.ca);
  tls.name = ToStr(from.tls.name);
  tls.flags = from.tls.flags;
  options.tls = &tls;
  return Out<WorkerHandle>(dg_worker_create, &options);
}

}  // namespace distgrad_rust
