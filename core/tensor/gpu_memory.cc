// Allocates, copies and waits through torch's interface for accelerators.
#include "core/tensor/gpu_memory.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/thread_pool.h"
#include "core/tensor/exception.h"
#include "core/tensor/graph_capture.h"
#include "core/tensor/stream_event.h"

namespace distgrad {
namespace {

class GpuMemory final : public DeviceMemory {
 public:
  explicit GpuMemory(int devices) : devices_(devices), streams_(devices) {}

  int devices() const override { return devices_; }

  absl::StatusOr<Segment> Allocate(int device, size_t size) override {
    try {
      const c10::Stream stream = StreamOf(device);
      const c10::StreamGuard guard(stream);
      at::Tensor memory;
      OutsideOfCaptures(stream.device(), [&] {
        memory = at::empty({static_cast<int64_t>(size)},
                           at::TensorOptions(at::kByte).device(stream.device()));
      });
      Segment segment;
      segment.owner = std::make_shared<c10::Storage>(memory.storage());
      segment.data = static_cast<uint8_t*>(memory.mutable_data_ptr());
      segment.size = size;
      segment.device = device;
      segment.stream = stream.native_handle();
      return segment;
    } catch (...) {
      return Annotate(StatusFromException(std::current_exception()),
                      absl::StrCat(size, " bytes of cuda:", device));
    }
  }

  absl::Status Start() { return arrivals_.Start(); }

  void AfterArrival(const Packet& packet,
                    absl::AnyInvocable<void(const absl::Status&)> done) override {
    std::vector<StreamEvent> events;
    try {
      std::set<int> on;
      for (const Segment& segment : packet.segments) {
        if (segment.device < 0 || !on.insert(segment.device).second) continue;
        events.emplace_back(StreamOf(segment.device));
      }
    } catch (...) {
      return done(StatusFromException(std::current_exception()));
    }
    arrivals_.Schedule([events = std::move(events), done = std::move(done)]() mutable {
      absl::Status status;
      try {
        for (StreamEvent& event : events) {
          OutsideOfCaptures(event.device(), [&] {
            event.Synchronize();
            const StreamEvent ended = std::move(event);
          });
        }
      } catch (...) {
        status = StatusFromException(std::current_exception());
      }
      done(status);
    });
  }

 private:
  c10::Stream StreamOf(int device) {
    absl::MutexLock lock(&mu_);
    if (!streams_[device].has_value()) {
      at::globalContext().lazyInitDevice(at::kCUDA);
      const c10::Device of(at::kCUDA, static_cast<c10::DeviceIndex>(device));
      // The first stream of the process asks CUDA for priorities, on the current device.
      const c10::DeviceGuard on_device(of);
      streams_[device] = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(
          of, /*isHighPriority=*/true);
    }
    return *streams_[device];
  }

  const int devices_;

  absl::Mutex mu_;
  std::vector<std::optional<c10::Stream>> streams_ ABSL_GUARDED_BY(mu_);

  // One thread suffices, started by NewGpuMemory(): all that the streams ever wait for are copies
  // that are in flight.
  ThreadPool arrivals_{"dg-gpus", 1};
};

}  // namespace

std::unique_ptr<DeviceMemory> NewGpuMemory() {
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) return nullptr;
  const int devices = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
  if (devices <= 0) return nullptr;
  auto memory = std::make_unique<GpuMemory>(devices);
  if (const absl::Status started = memory->Start(); !started.ok()) {
    DG_LOG(WARNING) << "memory of GPUs is not sent directly: " << started;
    return nullptr;
  }
  return memory;
}

}  // namespace distgrad
