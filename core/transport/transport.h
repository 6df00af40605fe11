// Carries packets from one worker to another. Implementations: core/transport/inproc (within a
// process) and core/transport/tensorpipe. transport_conformance.h is the suite that each must pass.
#ifndef DISTGRAD_CORE_TRANSPORT_TRANSPORT_H_
#define DISTGRAD_CORE_TRANSPORT_TRANSPORT_H_

#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/event_loop.h"
#include "core/transport/packet.h"

namespace distgrad {

// The receiver of what arrives on a connection. Called by one thread at a time, on a thread of the
// transport: never on one that sends, connects, closes or destroys, which has modes of its own
// (grad mode, autocast) and may hold locks. No lock of the transport is held. Must not block.
class Receiver {
 public:
  virtual ~Receiver() = default;

  // Gets packets, in the order in which the other end sent them.
  virtual void OnPacket(Packet packet) = 0;

  // Says that the connection is over; called exactly once, and last. `why` is never OK: kCancelled
  // after our own Close; kNotFound when nobody listens there; kResourceExhausted when this process
  // lacks file descriptors, ports or memory, which says nothing of the other end; and kUnavailable
  // when the other end went away, or has not admitted this one (it may be short of those, or have
  // another key), or the network does not lead there: somebody may be there all the same.
  virtual void OnClosed(absl::Status why) = 0;
};

// One end of a two-way, ordered, reliable stream of packets. Thread-safe. It lives until it is
// closed, even if nothing holds it, and keeps its receiver until OnClosed has returned: the two may
// own each other.
class Connection {
 public:
  using SendDone = absl::AnyInvocable<void(const absl::Status&)>;

  virtual ~Connection() = default;

  // Queues a packet. `done` (may be null) is called exactly once: when the packet's memory is
  // no longer needed, or with the error. It is called on a transport thread or inside this very
  // call, with no lock held, and must not block.
  virtual void Send(Packet packet, SendDone done) = 0;

  // Ends the connection at both ends. Packets in flight may be lost. Returns at once, and throws
  // nothing.
  virtual void Close() = 0;
};

// Thread-safe.
class Transport {
 public:
  // Returns the receiver of a connection that a peer opened to this transport. Called on a thread
  // of the transport, before anything arrives; may send and close at once.
  using Accept = absl::AnyInvocable<std::shared_ptr<Receiver>(std::shared_ptr<Connection>)>;

  // Closes every connection, waits for all callbacks, and ends all threads.
  virtual ~Transport() = default;

  // Starts to listen, once; returns the address that others connect to.
  virtual absl::StatusOr<std::string> Listen(Accept accept) = 0;

  // Opens a connection. Returns at once: packets may be sent already, and an address where nothing
  // listens shows up as OnClosed(kNotFound). kInvalidArgument for an address that is not of this
  // transport.
  virtual absl::StatusOr<std::shared_ptr<Connection>> Connect(
      const std::string& address, std::shared_ptr<Receiver> receiver) = 0;

  // Returns whether segments that are sent to the listener at `address` may be memory of
  // accelerators.
  virtual bool CarriesDevices(const std::string& address) const { return false; }

  // Returns whether the listener at `address` is known to be on this machine: processes on one
  // that do not share its network, as containers mostly do not, count as of several.
  virtual bool IsOnThisMachine(const std::string& address) const { return false; }

  // Returns the loop that brings what arrives, if threads that wait for it may do its work.
  virtual std::shared_ptr<EventLoop> loop() { return nullptr; }

  // Returns the name for logs and errors: "inproc", "tensorpipe tcp+basic", ...
  virtual std::string Name() const = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TRANSPORT_H_
