// Which calls make a context on the current device of their thread, which is the first one unless
// it has chosen another: all that would, of those that the stand-in knows. Each in a process of its
// own, since a context stays.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad::fake_cuda {
namespace {

struct Call {
  std::string name;
  std::function<cudaError_t()> make;
};

void ExpectAContext(const Call& call, bool expected) {
  ASSERT_FALSE(HasContext(0)) << "to begin with";
  const auto make = [&] {
    const cudaError_t error = call.make();
    const bool as_expected = HasContext(0) == expected && !HasContext(1);
    std::_Exit(error == cudaSuccess && as_expected ? 0 : 1);
  };
  EXPECT_EXIT(make(), testing::ExitedWithCode(0), "") << call.name;
}

TEST(FakeContextsDeathTest, WhatNeedsOneMakesOne) {
  static char there[8];
  void* memory = nullptr;
  size_t free_bytes = 0, all_bytes = 0;
  cudaPointerAttributes attributes = {};
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  int least = 0, greatest = 0;
  const std::vector<Call> calls = {
      {"cudaSetDevice", [&] { return cudaSetDevice(0); }},
      {"cudaDeviceGetStreamPriorityRange",
       [&] { return cudaDeviceGetStreamPriorityRange(&least, &greatest); }},
      {"cudaDeviceEnablePeerAccess", [&] { return cudaDeviceEnablePeerAccess(1, 0); }},
      {"cudaDeviceSynchronize", [&] { return cudaDeviceSynchronize(); }},
      {"cudaMalloc", [&] { return cudaMalloc(&memory, 1); }},
      {"cudaFree", [&] { return cudaFree(nullptr); }},
      {"cudaHostAlloc", [&] { return cudaHostAlloc(&memory, 1, 0); }},
      {"cudaFreeHost", [&] { return cudaFreeHost(nullptr); }},
      {"cudaMemGetInfo", [&] { return cudaMemGetInfo(&free_bytes, &all_bytes); }},
      {"cudaPointerGetAttributes", [&] { return cudaPointerGetAttributes(&attributes, there); }},
      {"cudaMemcpy", [&] { return cudaMemcpy(there, there + 4, 4, cudaMemcpyHostToHost); }},
      {"cudaMemcpyAsync",
       [&] { return cudaMemcpyAsync(there, there + 4, 4, cudaMemcpyHostToHost, nullptr); }},
      {"cudaMemcpyPeerAsync",
       [&] { return cudaMemcpyPeerAsync(there, 0, there + 4, 0, 4, nullptr); }},
      {"cudaMemsetAsync", [&] { return cudaMemsetAsync(there, 0, 4, nullptr); }},
      {"cudaStreamCreateWithPriority",
       [&] { return cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0); }},
      {"cudaStreamQuery", [&] { return cudaStreamQuery(nullptr); }},
      {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(nullptr); }},
      {"cudaStreamAddCallback",
       [&] {
         return cudaStreamAddCallback(
             nullptr, [](cudaStream_t, cudaError_t, void*) {}, nullptr, 0);
       }},
      {"cudaStreamIsCapturing", [&] { return cudaStreamIsCapturing(nullptr, &status); }},
      {"cudaStreamGetCaptureInfo",
       [&] {
         return cudaStreamGetCaptureInfo(nullptr, &status, nullptr, nullptr, nullptr, nullptr,
                                         nullptr);
       }},
      {"cudaThreadExchangeStreamCaptureMode",
       [&] { return cudaThreadExchangeStreamCaptureMode(&mode); }},
      {"cudaEventCreateWithFlags", [&] { return cudaEventCreateWithFlags(&event, 0); }},
  };
  for (const Call& call : calls) ExpectAContext(call, true);
}

TEST(FakeContextsDeathTest, QuestionsAboutTheMachineMakeNone) {
  int number = 0;
  cudaDeviceProp properties = {};
  const std::vector<Call> calls = {
      {"cudaGetDeviceCount", [&] { return cudaGetDeviceCount(&number); }},
      {"cudaGetDevice", [&] { return cudaGetDevice(&number); }},
      {"cudaGetDeviceProperties", [&] { return cudaGetDeviceProperties(&properties, 0); }},
      {"cudaGetLastError", [&] { return cudaGetLastError(); }},
  };
  for (const Call& call : calls) ExpectAContext(call, false);
}

}  // namespace
}  // namespace distgrad::fake_cuda
