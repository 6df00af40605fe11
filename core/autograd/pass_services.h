// The services that a worker gives to its passes.
#ifndef DISTGRAD_CORE_AUTOGRAD_PASS_SERVICES_H_
#define DISTGRAD_CORE_AUTOGRAD_PASS_SERVICES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/autograd/executor/device_threads.h"
#include "core/base/await_memory.h"
#include "core/base/clock.h"
#include "core/base/event_loop.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/base/trace.h"
#include "core/rpc/limits.h"
#include "core/tensor/device_map.h"
#include "core/transport/packet.h"

namespace distgrad {

// How notices reach other workers. Thread-safe.
class EngineNetwork {
 public:
  virtual ~EngineNetwork() = default;
  // Returns a packet to which notices are to be appended.
  virtual Packet NewNotice() = 0;
  // Sends notices. Packets to one worker may pass each other: large ones take a way of their own. A
  // failure shows up as Engine::OnPeerLost.
  virtual void Notify(WorkerRank to, Packet notices) = 0;
  // Returns the map of our devices to that worker's.
  virtual absl::StatusOr<std::shared_ptr<const DeviceMap>> DevicesWith(WorkerRank worker) = 0;
  // Returns a worker's name for people.
  virtual std::string Describe(WorkerRank worker) = 0;
  // The loop that brings what others send, if threads that wait for it may do its work.
  virtual std::shared_ptr<EventLoop> loop() { return nullptr; }
};

// Thread-safe. What it names outlives the passes.
struct PassServices {
  const WorkerRank self;
  EngineNetwork& network;
  ThreadPool& pool;
  Clock& clock;
  TraceRecorder& trace;
  const Limits limits;
  std::unique_ptr<DeviceThreads> device_threads;
  // Passes that are over on this worker, and those of them that failed.
  std::atomic<uint64_t> passes_ended{0}, passes_failed{0};

  // What went wrong in a backward of that context on this worker, for any worker to read.
  absl::Status LocalError(ContextId context, const absl::Status& why) const;
};

// For what is of a user's graph, where the thread may be the clock's or the sockets', which must
// run nothing of users'. It keeps that until there is memory for the task, and the task empties
// what both hold: so it ends there, whichever of the two lets go last. `work`: see
// ThreadPool::ScheduleInline().
template <typename T>
void EndOnPool(ThreadPool& pool, T ended, const Canceller* work = nullptr) {
  static_assert(std::is_nothrow_move_constructible_v<T>, "half of it would end here");
  const auto held =
      AwaitMemory([&] { return std::make_shared<std::optional<T>>(std::move(ended)); });
  AwaitMemory([&] {
    if (work == nullptr)
      pool.Schedule([held] { held->reset(); });
    else
      pool.ScheduleInline([held] { held->reset(); }, work);
  });
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_PASS_SERVICES_H_
