// Keeps a stream of CUDA's from moving, for tests: on a GPU, and on the stand-in for CUDA.
#ifndef DISTGRAD_TESTS_TESTING_HELD_STREAM_H_
#define DISTGRAD_TESTS_TESTING_HELD_STREAM_H_

#include <c10/cuda/CUDAStream.h>

#include "absl/synchronization/notification.h"

namespace distgrad {

// What is launched on the stream after this was made waits until Release(). One thread of CUDA's
// runs the callbacks of all streams, so there is one of these at a time. Meanwhile whatever waits
// for all of the GPU stands still, as freeing its memory does.
class HeldStream {
 public:
  explicit HeldStream(c10::cuda::CUDAStream stream);
  // Releases it, and waits for what is on it.
  ~HeldStream();
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

  void Release();

 private:
  const c10::cuda::CUDAStream stream_;
  absl::Notification released_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_HELD_STREAM_H_
