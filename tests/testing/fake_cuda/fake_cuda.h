// A stand-in for CUDA's runtime and driver, for tests on machines without a GPU: depend on it, and
// libtorch and TensorPipe find kDevices GPUs. It is memory of the host with streams that run late
// and in order, so a wait that is missing is found by what is read. Copies, fills with zeros,
// streams, events and callbacks work; no kernel does. A call of a function that it lacks ends the
// process with that function's name. A real GPU of the machine stays unused.
//
// Memory of a device can be touched by copies alone: a program that reads or writes it directly
// crashes, as with a real GPU.
#ifndef DISTGRAD_TESTS_TESTING_FAKE_CUDA_FAKE_CUDA_H_
#define DISTGRAD_TESTS_TESTING_FAKE_CUDA_FAKE_CUDA_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace distgrad::fake_cuda {

inline constexpr int kDevices = 3;
inline constexpr size_t kDeviceBytes = size_t{1} << 30;

// Keeps all streams, while it lives, from moving; or that one, by its cudaStream_t (none of the
// default ones).
class Standstill {
 public:
  explicit Standstill(void* stream = nullptr);
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;

 private:
  void* const stream_;
};

// The number of bytes that were copied to and from memory of the host that is not pinned: all of a
// tensor's that goes by way of the CPU, and none of what TensorPipe's channel carries.
size_t PageableBytes();

// How often threads have called what waits for a stream, an event or a device.
size_t Waits();

// Whether the process has a context on the device: it has from the first cudaSetDevice() of it on,
// as since CUDA 12, or from what a thread did first whose current device it is: anything but
// questions about the machine, of what the stand-in has.
bool HasContext(int device);
// When a thread has last called cudaSetDevice().
std::chrono::steady_clock::time_point LastSetDeviceTime();

// How often threads have called cudaSetDevice(), which may stand still with the driver.
size_t SetDevices();
// What SetDevices() said after the last one of this thread; 0 where there was none.
size_t LastSetDevice();

// Of which threads a capture refuses what is not safe beside it, as cudaStreamCaptureMode says.
enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

// While it lives, this thread captures the stream, by its cudaStream_t, into a graph; what is
// launched on it runs all the same. As with CUDA, allocations, queries and waits of the threads
// that the mode is for, and every query of this stream, are refused, and end the capture; a thread
// can exempt itself by cudaThreadExchangeStreamCaptureMode().
class Capture {
 public:
  explicit Capture(void* stream, CaptureMode mode = CaptureMode::kGlobal);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // False once something has ended it.
  bool intact() const;

 private:
  const int number_;
};

// While it lives, CUDA answers whoever asks about a stream or an event with an error, as behind a
// kernel that has read invalid memory.
class Broken {
 public:
  Broken();
  ~Broken();
  Broken(const Broken&) = delete;
  Broken& operator=(const Broken&) = delete;
};

// For stand-ins of libraries that launch kernels: the stream, by its cudaStream_t, runs `step`, and
// goes on when what `step` was given has been called, by anybody.
void Launch(void* stream, std::function<void(std::function<void()> done)> step);

// For such a step: where the bytes of a device's memory are.
uint8_t* BytesOf(const void* data);

}  // namespace distgrad::fake_cuda

#endif  // DISTGRAD_TESTS_TESTING_FAKE_CUDA_FAKE_CUDA_H_
