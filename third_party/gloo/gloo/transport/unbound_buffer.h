// See third_party/gloo/gloo/context.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gloo::transport {

// Gloo has three more functions behind these, of transports with remote memory; c10d calls none.
class UnboundBuffer {
 public:
  UnboundBuffer(void* ptr, size_t size) : ptr(ptr), size(size) {}
  virtual ~UnboundBuffer() = 0;

  void* const ptr;
  const size_t size;

  // False: the wait was aborted. Throw once `timeout` is over, and then close all connections.
  virtual bool waitRecv(int* rank, std::chrono::milliseconds timeout) = 0;
  virtual bool waitSend(int* rank, std::chrono::milliseconds timeout) = 0;
  virtual void abortWaitRecv() = 0;
  virtual void abortWaitSend() = 0;
  virtual void send(int rank, uint64_t slot, size_t offset, size_t bytes) = 0;
  virtual void recv(int rank, uint64_t slot, size_t offset, size_t bytes) = 0;
  virtual void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t bytes) = 0;
};

}  // namespace gloo::transport
