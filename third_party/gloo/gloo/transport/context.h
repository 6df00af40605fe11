// See third_party/gloo/gloo/context.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gloo/transport/unbound_buffer.h"

namespace gloo {

class IStore;

namespace transport {

class Address;
class Buffer;
class RemoteKey;

// A connection to another rank.
class Pair {
 public:
  virtual ~Pair() = 0;
  virtual const Address& address() const = 0;
  virtual void connect(const std::vector<char>& bytes) = 0;
  virtual void close() = 0;
  virtual void setSync(bool enable, bool busy_poll) = 0;
  virtual std::unique_ptr<Buffer> createSendBuffer(int slot, void* ptr, size_t size) = 0;
  virtual std::unique_ptr<Buffer> createRecvBuffer(int slot, void* ptr, size_t size) = 0;
  virtual bool isConnected() = 0;
  virtual void send(UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t bytes) = 0;
  virtual void recv(UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t bytes) = 0;
  virtual void put(UnboundBuffer* buffer, const RemoteKey& key, uint64_t slot, size_t offset,
                   size_t remote_offset, size_t bytes) = 0;
  virtual void get(UnboundBuffer* buffer, const RemoteKey& key, uint64_t slot, size_t offset,
                   size_t remote_offset, size_t bytes) = 0;

 protected:
  int local_rank_ = 0;  // among those of this machine; what is inline in Gloo sets it
};

// The connections of a rank. Gloo has one more function behind these, as in UnboundBuffer.
class Context {
 public:
  Context(int rank, int size);
  virtual ~Context();
  virtual std::unique_ptr<Pair>& getPair(int rank);
  virtual std::unique_ptr<Pair>& createPair(int rank) = 0;
  virtual void createAndConnectAllPairs(std::shared_ptr<IStore> store);
  virtual std::unique_ptr<UnboundBuffer> createUnboundBuffer(void* ptr, size_t size) = 0;

  const int rank;
  const int size;

 protected:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Pair>> pairs_;

 public:
  std::chrono::milliseconds timeout_;  // Gloo has accessors, inline ones

 private:
  std::vector<char> tallies_[2];  // of other things; any vector has this size
};

}  // namespace transport
}  // namespace gloo
