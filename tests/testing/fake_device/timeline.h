// What the fake accelerator's streams have done, and which of it is ordered before which: a
// vector clock for each stream, each event, and what each host thread has waited for.
#ifndef DISTGRAD_TESTS_TESTING_FAKE_DEVICE_TIMELINE_H_
#define DISTGRAD_TESTS_TESTING_FAKE_DEVICE_TIMELINE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace distgrad::fake_device {

using StreamKey = std::pair<int, int64_t>;  // device, stream
// The number of kernels that have surely ended, for each stream.
using VectorClock = std::map<StreamKey, uint64_t>;

// A piece of device memory, and its last uses. Guarded by the timeline's mutex.
struct Block {
  StreamKey owner;  // on which it was allocated, and for which the allocator may use it again
  size_t bytes = 0;
  void* data = nullptr;
  std::pair<StreamKey, uint64_t> last_write;
  VectorClock last_reads;
  VectorClock recorded;  // streams that the allocator was told of
};

// Thread-safe.
class Timeline {
 public:
  static Timeline& Get();

  // A kernel on `stream` reads and writes these. Returns what is wrong with that: something
  // here was last written, or read and is now written, by a stream that `stream` did not wait
  // for. Empty if all is well; else the kernel did not run.
  std::string Launch(StreamKey stream, const std::vector<Block*>& reads,
                     const std::vector<Block*>& writes);

  VectorClock Record(StreamKey stream);
  void Wait(StreamKey stream, const VectorClock& event);
  // The calling thread waits; what it launches from now on comes after.
  void WaitOnHost(StreamKey stream);
  void WaitOnHost(const VectorClock& event);
  void WaitOnHostForDevice(int device);

  void RecordUse(Block* block, StreamKey stream);
  // Checks that no stream may still use it, unless the allocator was told.
  void Free(const Block& block);
  std::vector<std::string> TakeViolations();

 private:
  absl::Mutex mu_;
  std::map<StreamKey, VectorClock> clocks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> violations_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad::fake_device

#endif  // DISTGRAD_TESTS_TESTING_FAKE_DEVICE_TIMELINE_H_
