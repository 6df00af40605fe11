// Packets between processes and machines, over libtorch's TensorPipe.
//
// The end that connects sends a greeting first, so that both know that they speak the same version.
// Small packets travel as one TensorPipe message header; larger byte strings and segments as
// payloads behind it; large segments through a channel (CMA copies straight from the memory of
// the other process, where both are on one machine and may).
//
// TensorPipe runs a context's callbacks on whichever thread finds it idle, also on one that only
// sends, connects or closes. Such a thread delivers nothing: it leaves that to the loop's.
//
// Within a process it is safe to fork only before the first of these transports exists.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_TENSORPIPE_TRANSPORT_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_TENSORPIPE_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/transport/device_memory.h"
#include "core/transport/transport.h"

namespace distgrad {

struct TensorPipeOptions {
  enum class Kind {
    kSocket,  // our own: Unix-domain sockets within a machine, TCP between machines
    kTcp,     // any machine; unauthenticated clients can end the process
    kShm,     // within this machine; a thread of it spins while the transport exists
  };
  enum class Channel {
    kCma,    // cma_channel.h between processes on a Unix-domain socket that may read each other's
             // memory, kBasic for the others; only kSocket can
    kBasic,  // over the transport itself
  };

  Kind kind = Kind::kSocket;
  Channel channel = Channel::kCma;

  // What Listen() binds (not for kShm): a name or number of one address of this machine.
  std::string host = "127.0.0.1";

  // The cluster key; it may be empty. With one there are connections only with processes that have
  // it, and TCP is encrypted; see core/transport/tensorpipe/socket and docs/security.md. Only
  // kSocket can.
  ClusterKey cluster_key;
  // What each end shows the other in TLS; null: none. For the kind kSocket alone, as the key is.
  std::shared_ptr<Certificates> certificates = nullptr;
  // Whether Unix-domain sockets are encrypted, too, where there is one of these.
  bool encrypts_unix = false;

  // Whether processes of one user on one machine use Unix-domain sockets (kSocket only).
  bool unix_sockets = true;

  // The time to connect and prove that, and how many clients may be about to at a time (kSocket
  // only).
  absl::Duration handshake_timeout = absl::Seconds(10);
  size_t max_unauthenticated = 256;

  // How long the other end of a connection may acknowledge nothing of what was sent, or take
  // nothing of what waits (kSocket over TCP only; else as long as the system allows).
  absl::Duration acknowledge_timeout = absl::InfiniteDuration();

  // The memory of GPUs here, for segments that come from a GPU and go to one; null: there are none.
  // Used only in builds with CUDA, and only to and from others that have it too.
  std::shared_ptr<DeviceMemory> gpus;

  // The name of this process for the other end's messages; usually the worker's.
  std::string name;

  // A packet beyond one of these is refused: at the sender with kResourceExhausted; at the
  // receiver, before any memory is allocated for it, by closing the connection.
  uint64_t max_packet_bytes = uint64_t{8} << 30;  // bytes and segments together
  size_t max_segments = 1 << 14;

  // Times out clients that connect and then say nothing, and asks again for threads that the
  // machine refused; one of its own if nullptr. Must outlive the transport.
  Clock* clock = nullptr;
};

// kFailedPrecondition where the kind cannot work on this machine, kInvalidArgument for a cluster
// key that is too short or that the kind cannot use. A channel that cannot work is replaced by
// kBasic; Name() says which it is ("tensorpipe tcp+basic"), and whether GPUs have one
// ("...+cuda_basic").
//
// Addresses are "tcp://127.0.0.1:4711", "shm://0a3f1" and "socket://127.0.0.1:4711/...", whose rest
// is only for clients that shall connect; messages leave it out. Behind it stands "#gpus=2" where
// GPUs have a channel, and behind the greeting, so that both ends know before the first tensor.
absl::StatusOr<std::unique_ptr<Transport>> NewTensorPipeTransport(TensorPipeOptions options);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_TENSORPIPE_TRANSPORT_H_
