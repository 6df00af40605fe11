// Calls between workers: matches replies with requests, keeps deadlines, knows which peers are
// reachable. It carries bytes and segments and does not look into them; what a call means is its
// service's affair.
//
// There is one connection to each peer, opened by whoever calls first and used both ways. When
// it breaks, everything under way with that peer fails at once, and the next call opens another.
// A call to oneself touches no transport.
#ifndef DISTGRAD_CORE_RPC_AGENT_H_
#define DISTGRAD_CORE_RPC_AGENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/rpc/packet.h"
#include "core/rpc/rendezvous.h"
#include "core/rpc/transport.h"

namespace distgrad {

// What arrived: the packet and where its body starts.
struct Body {
  Packet packet;
  size_t offset = 0;

  absl::string_view bytes() const { return absl::string_view(packet.bytes).substr(offset); }
};

// A call that somebody made to us. Answered exactly once, on any thread; one that is destroyed
// unanswered tells its caller so. Movable.
class IncomingCall {
 public:
  class Impl;

  explicit IncomingCall(std::unique_ptr<Impl> impl);
  IncomingCall(IncomingCall&&) noexcept;
  IncomingCall& operator=(IncomingCall&&) noexcept;
  ~IncomingCall();

  WorkerId from() const;
  const std::string& function() const;
  absl::Time deadline() const;
  Body& body();

  // A reply packet to which the body is to be appended, for Reply().
  Packet NewReply() const;
  void Reply(Packet reply);
  void Fail(const absl::Status& status);

 private:
  std::unique_ptr<Impl> impl_;
};

// Who gets what others send. Called on transport threads, several at once for different peers
// (and on the calling thread for messages to oneself), with no lock held; must not block.
class AgentService {
 public:
  virtual ~AgentService() = default;
  virtual void OnCall(IncomingCall call) = 0;
  virtual void OnNotice(WorkerId from, Body notice) = 0;
  // A reply to a call that has ended already, by its deadline. Nobody waits for it.
  virtual void OnLateReply(WorkerId from, Body reply) = 0;
  // The connection with a worker broke: what was under way with it may be lost. It may be back.
  virtual void OnPeerLost(WorkerId peer, const absl::Status& why) = 0;
};

// Thread-safe.
class Agent {
 public:
  class Impl;
  using ReplyCallback = absl::AnyInvocable<void(absl::StatusOr<Body>)>;

  // `clock`, `transport` and `service` must outlive the agent's Close().
  Agent(Clock* clock, Transport* transport, AgentService* service);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent();  // Close()

  // Listens; the address goes into WorkerInfo.
  absl::StatusOr<std::string> Listen();

  // The members of the job, this worker among them. Before any call is made; what arrives
  // earlier is held back until then.
  absl::Status Start(const WorkerInfo& self, std::vector<WorkerInfo> workers);

  // A packet to which the body of a call is to be appended, for Call().
  static Packet NewRequest(absl::string_view function);
  // Sends it. `done` is called exactly once, on any thread (also before this returns), with no
  // lock held; it must not block. The message of an error names the worker and the function.
  void Call(WorkerId to, Packet request, absl::Time deadline, ReplyCallback done);

  // The same for a message without an answer. A failure to deliver shows up as OnPeerLost.
  static Packet NewNotice();
  void Notify(WorkerId to, Packet notice);

  // kNotFound with the names that exist.
  absl::StatusOr<WorkerId> FindWorker(absl::string_view name) const;
  // "'name' (id)", for messages.
  std::string Describe(WorkerId worker) const;
  absl::Time Now() const;

  // Fails every call under way with kCancelled and closes all connections. No callback starts
  // after the transport is destroyed.
  void Close();

 private:
  const std::shared_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_AGENT_H_
