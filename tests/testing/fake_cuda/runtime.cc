// The functions of CUDA's runtime that libtorch and TensorPipe call, on the fake machine.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/testing/fake_cuda/machine.h"

namespace {

using namespace distgrad::fake_cuda;  // NOLINT: what this file is made of

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local size_t last_set_device = 0;

std::atomic<bool> contexts[kDevices];
std::atomic<size_t> set_devices{0};
std::atomic<std::chrono::steady_clock::time_point> last_set_device_time{};

// A call that needs a context makes one on the thread's current device, as far as is known: more
// rather than fewer.
void MakeContext() { contexts[current_device] = true; }

cudaError_t Fail(cudaError_t error) { return last_error = error; }

Machine& machine() { return Machine::Get(); }

// Whether a capture refuses what CUDA calls potentially unsafe; `stream` is what it asks, if any.
bool Refused(const Stream* stream = nullptr) {
  const CaptureMode mode = capture_mode == cudaStreamCaptureModeGlobal ? CaptureMode::kGlobal
                           : capture_mode == cudaStreamCaptureModeThreadLocal
                               ? CaptureMode::kThreadLocal
                               : CaptureMode::kRelaxed;
  return machine().Refuses(mode, stream);
}

bool IsBroken() { return machine().broken > 0; }
cudaError_t Breakage() { return Fail(cudaErrorIllegalAddress); }

cudaError_t Refusal() { return Fail(cudaErrorStreamCaptureUnsupported); }

Stream* StreamOf(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return machine().DefaultStream(current_device);
  }
  return reinterpret_cast<Stream*>(stream);
}

Event* EventOf(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void Synchronize(Stream* stream) { machine().WaitOnHost(*machine().MarkEndOf(stream)); }

bool IsPageable(const void* data) { return machine().Find(data).data == nullptr; }

// Memory of the host that is not pinned is read and written before this returns.
cudaError_t Copy(void* to, const void* from, size_t size, Stream* stream) {
  const bool at_once = IsPageable(to) || IsPageable(from);
  machine().Run(stream, [=] { std::memcpy(machine().Bytes(to), machine().Bytes(from), size); });
  if (at_once) {
    machine().pageable_bytes += size;
    Synchronize(stream);
  }
  return cudaSuccess;
}

bool IsDevice(int device) { return device >= 0 && device < kDevices; }

}  // namespace

namespace distgrad::fake_cuda {

bool HasContext(int device) { return contexts[device]; }

std::chrono::steady_clock::time_point LastSetDeviceTime() { return last_set_device_time; }

size_t SetDevices() { return set_devices; }

size_t LastSetDevice() { return last_set_device; }

}  // namespace distgrad::fake_cuda

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (!IsDevice(device)) return Fail(cudaErrorInvalidDevice);
  last_set_device = ++set_devices;
  current_device = device;
  contexts[device] = true;
  last_set_device_time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!IsDevice(device)) return Fail(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "fake GPU %d", device);
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = kDeviceBytes;
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 1;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  std::snprintf(id, static_cast<size_t>(size), "0000:%02d:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  MakeContext();
  *least = 0;
  *greatest = -3;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  MakeContext();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  MakeContext();
  if (Refused()) return Refusal();
  ++machine().waits;
  machine().WaitOnHostForDevice(current_device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "an error of the fake CUDA";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "another error of the fake CUDA";
  }
}

cudaError_t cudaMalloc(void** data, size_t size) {
  if (Refused()) return Refusal();
  MakeContext();
  *data = machine().Allocate(current_device, size);
  return *data != nullptr ? cudaSuccess : Fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* data) {
  MakeContext();
  if (Refused()) return Refusal();
  return data == nullptr || machine().Free(data) ? cudaSuccess : Fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostAlloc(void** data, size_t size, unsigned) {
  if (Refused()) return Refusal();
  MakeContext();
  *data = machine().AllocatePinned(size);
  return *data != nullptr ? cudaSuccess : Fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void** data, size_t size) { return cudaHostAlloc(data, size, 0); }
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  MakeContext();
  *total = kDeviceBytes;
  *free = kDeviceBytes - machine().used(current_device);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  MakeContext();
  const Range range = machine().Find(data);
  *attributes = {};
  attributes->type = range.data == nullptr ? cudaMemoryTypeUnregistered
                     : range.device < 0    ? cudaMemoryTypeHost
                                           : cudaMemoryTypeDevice;
  attributes->device = range.device;
  attributes->devicePointer = range.data == nullptr ? nullptr : const_cast<void*>(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  MakeContext();
  return Copy(to, from, size, StreamOf(stream));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                cudaStream_t stream) {
  MakeContext();
  return Copy(to, from, size, StreamOf(stream));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  MakeContext();
  if (Refused()) return Refusal();
  Copy(to, from, size, StreamOf(nullptr));
  Synchronize(StreamOf(nullptr));
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t size, cudaStream_t stream) {
  MakeContext();
  machine().Run(StreamOf(stream), [=] { std::memset(machine().Bytes(data), value, size); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  MakeContext();
  *stream = reinterpret_cast<cudaStream_t>(
      machine().NewStream(current_device, /*blocking=*/(flags & cudaStreamNonBlocking) == 0));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  MakeContext();
  machine().Delete(StreamOf(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  MakeContext();
  if (IsBroken()) return Breakage();
  if (Refused(StreamOf(stream))) return Refusal();
  return machine().IsIdle(StreamOf(stream)) ? cudaSuccess : Fail(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  MakeContext();
  if (Refused(StreamOf(stream))) return Refusal();
  ++machine().waits;
  Synchronize(StreamOf(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  MakeContext();
  if (EventOf(event)->mark != nullptr) machine().Wait(StreamOf(stream), EventOf(event)->mark);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  MakeContext();
  machine().Run(StreamOf(stream), [=] { callback(stream, cudaSuccess, data); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  MakeContext();
  if (IsBroken()) return Breakage();
  if (StreamOf(stream) == machine().DefaultStream(current_device) &&
      machine().IsBlockingStreamCaptured(current_device)) {
    return Fail(cudaErrorStreamCaptureImplicit);
  }
  *status = stream != nullptr && machine().IsCaptured(StreamOf(stream))
                ? cudaStreamCaptureStatusActive
                : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*,  // NOLINT: CUDA's type
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  MakeContext();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  MakeContext();
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  MakeContext();
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  MakeContext();
  delete EventOf(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  MakeContext();
  EventOf(event)->mark = machine().MarkEndOf(StreamOf(stream));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  MakeContext();
  if (IsBroken()) return Breakage();
  if (Refused()) return Refusal();
  const Event* const known = EventOf(event);
  const bool done = known->mark == nullptr || machine().IsDone(*known->mark);
  return done ? cudaSuccess : Fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  MakeContext();
  if (Refused()) return Refusal();
  ++machine().waits;
  if (EventOf(event)->mark != nullptr) machine().WaitOnHost(*EventOf(event)->mark);
  return cudaSuccess;
}

}  // extern "C"
