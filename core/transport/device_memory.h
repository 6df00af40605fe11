// Memory of this process's accelerators, for a transport that receives into it.
#ifndef DISTGRAD_CORE_TRANSPORT_DEVICE_MEMORY_H_
#define DISTGRAD_CORE_TRANSPORT_DEVICE_MEMORY_H_

#include <cstddef>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/transport/packet.h"

namespace distgrad {

// Thread-safe.
class DeviceMemory {
 public:
  // Waits until what AfterArrival() has been given is done.
  virtual ~DeviceMemory() = default;

  // How many accelerators there are.
  virtual int devices() const = 0;

  // `size` bytes of one of them, not cleared, and the stream that shall write them. An error if
  // there are no more.
  virtual absl::StatusOr<Segment> Allocate(int device, size_t size) = 0;

  // Calls `done` when the streams of the packet's segments have done what they have been given so
  // far, or with the error. On a thread of this object or on the calling one; it must not throw.
  virtual void AfterArrival(const Packet& packet,
                            absl::AnyInvocable<void(const absl::Status&)> done) = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_DEVICE_MEMORY_H_
