// Checks options field by field; what is 0 or empty keeps core's default.
#include "capi/worker_options.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

absl::StatusOr<Limits> ToLimits(const dg_limits* given) {
  DG_ASSIGN_OR_RETURN(const dg_limits read,
                      ReadOptions<dg_limits>(given, DG_LIMITS_INIT, "dg_limits"));
  if (read.tensors_per_message > UINT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensors_per_message is ", read.tensors_per_message));
  }
  Limits limits;
  const auto set = [](uint64_t value, auto* limit) {
    if (value > 0) *limit = static_cast<std::remove_pointer_t<decltype(limit)>>(value);
  };
  set(read.message_bytes, &limits.message_bytes);
  set(read.tensors_per_message, &limits.tensors_per_message);
  set(read.calls_per_peer, &limits.calls_per_peer);
  set(read.calls, &limits.calls);
  set(read.bytes_per_peer, &limits.bytes_per_peer);
  set(read.contexts_per_peer, &limits.contexts_per_peer);
  set(read.unauthenticated_connections, &limits.unauthenticated);
  limits.handshake_timeout = ToTimeout(read.handshake_timeout_ms, limits.handshake_timeout);
  return limits;
}

absl::StatusOr<TlsOptions> ToTlsOptions(const dg_tls_options* given) {
  DG_ASSIGN_OR_RETURN(const dg_tls_options read,
                      ReadOptions<dg_tls_options>(given, DG_TLS_OPTIONS_INIT, "dg_tls_options"));
  DG_RETURN_IF_ERROR(CheckFlags(read.flags, DG_TLS_ENCRYPT_LOCAL | DG_TLS_NO_ENCRYPT_LOCAL,
                                "dg_tls_options.flags"));
  TlsOptions options;
  DG_ASSIGN_OR_RETURN(options.cert, FromStr(read.cert, "tls.cert"));
  DG_ASSIGN_OR_RETURN(options.key, FromStr(read.key, "tls.key"));
  DG_ASSIGN_OR_RETURN(options.ca, FromStr(read.ca, "tls.ca"));
  DG_ASSIGN_OR_RETURN(options.name, FromStr(read.name, "tls.name"));
  const bool encrypts = (read.flags & DG_TLS_ENCRYPT_LOCAL) != 0;
  const bool does_not = (read.flags & DG_TLS_NO_ENCRYPT_LOCAL) != 0;
  if (encrypts && does_not) {
    return absl::InvalidArgumentError(
        "dg_tls_options: DG_TLS_ENCRYPT_LOCAL and DG_TLS_NO_ENCRYPT_LOCAL exclude each other");
  }
  if (encrypts || does_not) options.encrypt_local = encrypts;
  return options;
}

absl::StatusOr<std::map<std::string, DevicePairs>> ToDeviceMaps(const dg_device_pair* const* pairs,
                                                                size_t count) {
  DG_RETURN_IF_ERROR(CheckArray(pairs, count, "device_pairs"));
  std::map<std::string, DevicePairs> maps;
  for (size_t i = 0; i < count; ++i) {
    const std::string what = absl::StrCat("device pair ", i);
    if (pairs[i] == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("device_pairs[", i, "] is NULL"));
    }
    DG_ASSIGN_OR_RETURN(
        const dg_device_pair pair,
        ReadOptions<dg_device_pair>(pairs[i], DG_DEVICE_PAIR_INIT, "dg_device_pair"));
    DG_ASSIGN_OR_RETURN(const std::string peer, FromStr(pair.peer, what));
    DG_ASSIGN_OR_RETURN(const c10::Device local, ToDevice(pair.local, what));
    DG_ASSIGN_OR_RETURN(const c10::Device remote, ToDevice(pair.remote, what));
    maps[peer].emplace_back(local, remote);
  }
  return maps;
}

}  // namespace

absl::StatusOr<WorkerOptions> ToWorkerOptions(const dg_worker_options* given) {
  DG_ASSIGN_OR_RETURN(
      const dg_worker_options read,
      ReadOptions<dg_worker_options>(given, DG_WORKER_OPTIONS_INIT, "dg_worker_options",
                                     offsetof(dg_worker_options, job)));
  DG_RETURN_IF_ERROR(CheckFlags(
      read.flags,
      DG_WORKER_NO_OPERATORS | DG_WORKER_ALL_OPERATORS | DG_WORKER_JOIN | DG_WORKER_NO_GPU_CHANNEL,
      "dg_worker_options.flags"));
  WorkerOptions options;
  DG_ASSIGN_OR_RETURN(options.name, FromStr(read.name, "name"));
  options.join = (read.flags & DG_WORKER_JOIN) != 0;
  options.gpu_channel = (read.flags & DG_WORKER_NO_GPU_CHANNEL) == 0;
  if (options.join) {
    // The store says which.
  } else if (read.world_size > 0) {
    if (read.world_size > 1 << 16 || read.rank >= read.world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no worker of rank ", read.rank, " in a job of ", read.world_size));
    }
    options.rank = static_cast<int>(read.rank);
    options.world_size = static_cast<int>(read.world_size);
  } else if (read.rank != 0) {
    return absl::InvalidArgumentError("a rank needs a world_size");
  }
  DG_ASSIGN_OR_RETURN(const std::string rendezvous, FromStr(read.rendezvous, "rendezvous"));
  DG_ASSIGN_OR_RETURN(const std::string transport, FromStr(read.transport, "transport"));
  DG_ASSIGN_OR_RETURN(const std::string host, FromStr(read.host, "host"));
  DG_ASSIGN_OR_RETURN(options.key_file, FromStr(read.key_file, "key_file"));
  if (!rendezvous.empty()) options.rendezvous = rendezvous;
  if (!transport.empty()) options.transport = transport;
  if (!host.empty()) options.host = host;
  if (read.thread_count > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("thread_count is ", read.thread_count));
  }
  options.thread_count = read.thread_count;
  options.timeout = ToTimeout(read.timeout_ms, options.timeout);
  options.join_timeout = ToTimeout(read.join_timeout_ms, options.join_timeout);
  DG_ASSIGN_OR_RETURN(options.job, FromStr(read.job, "job"));
  if (read.heartbeat_limit_ms < 0) {
    options.heartbeat_limit = absl::InfiniteDuration();
  } else if (read.heartbeat_limit_ms > 0) {
    options.heartbeat_limit = absl::Milliseconds(read.heartbeat_limit_ms);
  }
  const bool no_operators = (read.flags & DG_WORKER_NO_OPERATORS) != 0;
  const bool all_operators = (read.flags & DG_WORKER_ALL_OPERATORS) != 0;
  if (no_operators && all_operators) {
    return absl::InvalidArgumentError(
        "dg_worker_options: DG_WORKER_NO_OPERATORS and DG_WORKER_ALL_OPERATORS exclude each other");
  }
  if (no_operators) options.serve_operators = ServeOperators::kNone;
  if (all_operators) options.serve_operators = ServeOperators::kAll;
  if (read.max_workers > 1 << 16) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_workers is ", read.max_workers, ", and ranks have 16 bits"));
  }
  if (read.max_workers > 0) options.max_workers = static_cast<int>(read.max_workers);
  DG_ASSIGN_OR_RETURN(options.limits, ToLimits(read.limits));
  DG_ASSIGN_OR_RETURN(options.tls, ToTlsOptions(read.tls));
  DG_ASSIGN_OR_RETURN(options.device_maps, ToDeviceMaps(read.device_pairs, read.device_pair_count));
  return options;
}

}  // namespace distgrad
