// A simulated accelerator for tests, on CPU memory: several devices of libtorch's type HPU, with
// streams and events.
//
// Kernels run on the CPU and at once, so results are always right, and equal to the CPU's. What is
// checked instead is the order that the program asked for. As CUDA would, a kernel goes to its
// thread's current stream; events and waits order streams; and each piece of memory knows its last
// use. A kernel that uses what a stream wrote that it did not wait for throws, on every run and not
// only on unlucky ones; memory that is freed while another stream may use it, with the allocator
// not told (record_stream), is a violation too.
//
// Linking it makes HPU libtorch's accelerator, and hides GPUs from the process: libtorch takes no
// second one beside CUDA. Thread-safe.
#ifndef DISTGRAD_TESTS_TESTING_FAKE_DEVICE_FAKE_DEVICE_H_
#define DISTGRAD_TESTS_TESTING_FAKE_DEVICE_FAKE_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

namespace distgrad::fake_device {

inline constexpr int kDevices = 4;

c10::Device Device(int index);

// Returns a stream that nothing else uses.
c10::Stream NewStream(int device);

// Has the calling thread wait for all of the device's streams.
void Synchronize(int device);

// Bytes alive on a device.
int64_t AllocatedBytes(int device);

// Has the `nth` (from 0) use of an event from now on, a record or a wait, throw "fake device: an
// event failed"; a negative number has none throw. Returns whether the use that an earlier call
// asked for has thrown.
bool FailEvent(int nth);

// Returns what was used in no order, since the last call. Those of kernels were thrown as well.
std::vector<std::string> TakeViolations();

}  // namespace distgrad::fake_device

#endif  // DISTGRAD_TESTS_TESTING_FAKE_DEVICE_FAKE_DEVICE_H_
