// A transport between workers of one process: queues in memory, and faults on demand.
//
//   auto network = std::make_shared<InprocNetwork>();
//   std::unique_ptr<Transport> a = NewInprocTransport(network);
//   std::unique_ptr<Transport> b = NewInprocTransport(network);
//   std::string address = *a->Listen(...);      // "inproc://1"
//   auto connection = *b->Connect(address, receiver);
//
// Packets are copied, so that a receiver shares no memory with the sender, as between machines.
#ifndef DISTGRAD_CORE_TRANSPORT_INPROC_INPROC_TRANSPORT_H_
#define DISTGRAD_CORE_TRANSPORT_INPROC_INPROC_TRANSPORT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/transport/packet.h"
#include "core/transport/transport.h"

namespace distgrad {

// Decides what becomes of each packet; for tests. Thread-safe.
class FaultInjector {
 public:
  enum class Action {
    kDeliver,
    kDrop,       // lost, though the sender is told that it went
    kHold,       // waits, with all behind it on this connection, for InprocNetwork::ReleaseHeld;
                 // and so does the sender, to hear that it went
    kDuplicate,  // arrives twice
    kCut,        // is lost with its connection: kUnavailable at both ends
    kNobodyListens,  // the same, with kNotFound at the end of the sender
    kRefuse,         // is not taken, as one beyond a limit of the transport: kResourceExhausted
  };

  virtual ~FaultInjector() = default;

  // Called on the sending thread, with no lock held, for each packet. `packet` is the copy that
  // the receiver would get: change it to corrupt it. Addresses are those of the transports.
  virtual Action OnSend(const std::string& from, const std::string& to, Packet& packet) = 0;
};

namespace internal {
class InprocNode;
}

// The transports of one process that can reach each other. Thread-safe.
class InprocNetwork : public std::enable_shared_from_this<InprocNetwork> {
 public:
  explicit InprocNetwork(std::shared_ptr<FaultInjector> faults = nullptr)
      : faults_(std::move(faults)) {}
  InprocNetwork(const InprocNetwork&) = delete;
  InprocNetwork& operator=(const InprocNetwork&) = delete;
  virtual ~InprocNetwork() = default;

  // What a worker gets that is to be in this network: of another kind in tests that have one.
  virtual std::unique_ptr<Transport> NewTransport();

  // Lets all held packets go on, in order.
  void ReleaseHeld();

  // For the transports.
  std::string NewAddress();
  void Add(const std::shared_ptr<internal::InprocNode>& node);
  void Remove(const std::string& address);
  std::shared_ptr<internal::InprocNode> Find(const std::string& address) const;
  FaultInjector* faults() const { return faults_.get(); }

 private:
  // Constant after construction.
  const std::shared_ptr<FaultInjector> faults_;

  mutable absl::Mutex mu_;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, std::weak_ptr<internal::InprocNode>> nodes_ ABSL_GUARDED_BY(mu_);
};

// A transport with one thread of its own, on which all its receivers are called. It has an
// address from the start, "inproc://N" with N from 1 in the order of creation.
std::unique_ptr<Transport> NewInprocTransport(std::shared_ptr<InprocNetwork> network);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_INPROC_INPROC_TRANSPORT_H_
