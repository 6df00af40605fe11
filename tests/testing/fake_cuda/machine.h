// The machine behind the stand-in for CUDA: memory of devices, and streams that run late.
#ifndef DISTGRAD_TESTS_TESTING_FAKE_CUDA_MACHINE_H_
#define DISTGRAD_TESTS_TESTING_FAKE_CUDA_MACHINE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad::fake_cuda {

// A place in a stream: done once the stream has come there.
struct Mark {
  bool done = false;
};

struct Stream {
  struct Step {
    std::chrono::steady_clock::time_point not_before = {};
    std::shared_ptr<const Mark> after = nullptr;
    std::function<void()> run = nullptr;
    std::shared_ptr<Mark> mark = nullptr;
  };
  int device = 0;
  bool blocking = false;  // of which captures alone take note
  int held = 0;
  std::deque<Step> steps;
};

struct Event {
  std::shared_ptr<Mark> mark;  // null until it is recorded
};

// A stream that is being captured.
struct CaptureState {
  int number = 0;
  const Stream* stream = nullptr;
  std::thread::id thread;
  CaptureMode mode = CaptureMode::kGlobal;
  bool intact = true;
};

// A range of memory that CUDA knows of.
struct Range {
  uint8_t* data = nullptr;   // what the program has; of a device's, no thread may touch it
  uint8_t* bytes = nullptr;  // where the bytes are
  size_t size = 0;
  int device = -1;  // -1: pinned memory of the host
};

// One thread runs what stands at the front of the streams, each step kLateness after it was given,
// and in an unpredictable order between streams. Never destroyed. Thread-safe.
class Machine {
 public:
  static Machine& Get();

  // What null and the runtime's two other names of it stand for, on this device.
  Stream* DefaultStream(int device) { return &default_streams_[device]; }
  // `blocking`: it waits for the device's default stream, and that one for it.
  Stream* NewStream(int device, bool blocking);
  // Deletes a stream once it has run.
  void Delete(Stream* stream);

  void Run(Stream* stream, std::function<void()> step);
  std::shared_ptr<Mark> MarkEndOf(Stream* stream);
  void Wait(Stream* stream, std::shared_ptr<const Mark> mark);
  // What stands in no stream is done when this says so.
  void Set(Mark* mark);
  bool IsDone(const Mark& mark);
  void WaitOnHost(const Mark& mark);
  void WaitOnHostForDevice(int device);
  bool IsIdle(Stream* stream);

  // Memory of a device is a page-aligned mapping that only the machine's thread has a way into.
  // Null if there is no more.
  void* Allocate(int device, size_t size);
  void* AllocatePinned(size_t size);
  // Frees memory; waits for all streams first, as CUDA does. False for what none of the two has
  // given.
  bool Free(void* data);
  // Returns an empty range if CUDA knows nothing of it.
  Range Find(const void* data);
  // Where the bytes at `data` are.
  uint8_t* Bytes(const void* data);
  size_t used(int device);

  // Changes the number of holds on a stream, or on all.
  void Hold(Stream* stream, int change);

  std::atomic<size_t> pageable_bytes{0};
  std::atomic<size_t> waits{0};
  std::atomic<int> broken{0};

  int BeginCapture(const Stream* stream, CaptureMode mode);
  void EndCapture(int number);
  bool IsCaptured(const Stream* stream);
  // Whether one is captured for which the device's default stream would wait.
  bool IsBlockingStreamCaptured(int device);
  bool IsIntact(int capture);
  // Whether captures refuse this thread, which is of this mode, something that is not safe beside
  // them: then they end. Always where it would wait for a stream that is captured, if one is given.
  bool Refuses(CaptureMode mode, const Stream* stream);

 private:
  Machine();
  void Loop();
  void Push(Stream* stream, Stream::Step step);

  std::mutex mu_;
  std::condition_variable changed_;
  // All guarded by mu_.
  Stream default_streams_[kDevices];
  std::vector<Stream*> streams_;
  std::map<uintptr_t, Range> ranges_;  // by where they begin
  std::vector<CaptureState> captures_;
  int captures_so_far_ = 0;
  int held_ = 0;
  uint32_t random_ = 1;
};

}  // namespace distgrad::fake_cuda

#endif  // DISTGRAD_TESTS_TESTING_FAKE_CUDA_MACHINE_H_
