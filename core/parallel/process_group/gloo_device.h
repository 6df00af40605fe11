// A device of Gloo's whose collectives all end when one cannot go on.
//
// Gloo's own (tcp::Pair) has two gaps there, in each of which a collective waits until its
// time-out, ten minutes as a rule:
//
// - What stands in its queue to be written is forgotten when the connection breaks, so a rank
//   that sends to one that died, and does not receive from it, never hears.
// - A connection that has begun to receive for a collective that failed meanwhile receives nothing
//   more, not even its end.
//
// And Gloo has no way to end the collectives of this rank; nor does it survive ranks whose tensors
// have different sizes (SlotOfSize).
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GLOO_DEVICE_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GLOO_DEVICE_H_

#include <memory>
#include <string>

#include "gloo/transport/device.h"

namespace distgrad {

// Thread-safe. For one group alone.
class GlooDevice final : public gloo::transport::Device {
 public:
  // What connects and carries: one of Gloo's over TCP.
  explicit GlooDevice(std::shared_ptr<gloo::transport::Device> tcp);
  ~GlooDevice() override;

  // If a collective waits for a rank to which the connection has broken, all end with that error.
  // Connections that break later want another call.
  void EndLostWaits();
  // Closes all connections, and ends all collectives.
  void Abort();

  std::string str() const override { return tcp_->str(); }
  const std::string& getPCIBusID() const override { return tcp_->getPCIBusID(); }
  int getInterfaceSpeed() const override { return tcp_->getInterfaceSpeed(); }
  bool hasGPUDirect() const override { return tcp_->hasGPUDirect(); }
  std::shared_ptr<gloo::transport::Context> createContext(int rank, int size) override;

 private:
  class Context;
  class Buffer;

  const std::shared_ptr<gloo::transport::Device> tcp_;
  std::shared_ptr<Context> context_;  // constant once the group is connected
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GLOO_DEVICE_H_
