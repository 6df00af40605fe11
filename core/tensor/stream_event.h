// A place in a stream of an accelerator, which other streams and threads wait for.
#ifndef DISTGRAD_CORE_TENSOR_STREAM_EVENT_H_
#define DISTGRAD_CORE_TENSOR_STREAM_EVENT_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace distgrad {

// An event of c10's, for threads that have chosen no device. What c10 does with an event of CUDA,
// its end included, makes the thread's device current again by cudaSetDevice(), and so a context on
// the first GPU, which takes some hundred MB of it, in a process that uses another one. Under a
// guard of the event's device nothing is changed, and the end of a guard makes no context.
class StreamEvent {
 public:
  // Where the stream is now.
  explicit StreamEvent(c10::Stream stream);
  ~StreamEvent();
  StreamEvent(StreamEvent&& other) noexcept = default;
  StreamEvent& operator=(StreamEvent&& other) noexcept = default;

  c10::Device device() const { return event_.device(); }
  // Has a stream of this device wait for it.
  void Block(c10::Stream stream) const;
  // Waits for it.
  void Synchronize() const;

 private:
  c10::Event event_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_STREAM_EVENT_H_
