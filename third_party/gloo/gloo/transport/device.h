// See third_party/gloo/gloo/context.h.
#pragma once

#include <memory>
#include <string>

#include "gloo/transport/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace gloo::transport {

class Device {
 public:
  virtual ~Device() = 0;
  virtual std::string str() const = 0;
  virtual const std::string& getPCIBusID() const = 0;
  virtual int getInterfaceSpeed() const = 0;
  virtual bool hasGPUDirect() const = 0;
  virtual std::shared_ptr<Context> createContext(int rank, int size) = 0;
};

}  // namespace gloo::transport
