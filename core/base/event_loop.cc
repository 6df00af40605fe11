#include "core/base/event_loop.h"

namespace distgrad {
namespace {

thread_local EventLoop* current = nullptr;

}  // namespace

EventLoop* EventLoop::Current() { return current; }
void EventLoop::SetCurrent(EventLoop* loop) { current = loop; }

}  // namespace distgrad
