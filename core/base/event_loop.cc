// Keeps for each thread the loop that it leads, and what it waits for.
#include "core/base/event_loop.h"

namespace distgrad {
namespace {

thread_local EventLoop* current = nullptr;
thread_local uint64_t asked = 0;
thread_local const void* awaited = nullptr;

}  // namespace

uint64_t& EventLoop::AskedByThisThread() { return asked; }
const void*& EventLoop::AwaitedByThisThread() { return awaited; }

EventLoop* EventLoop::Current() { return current; }
void EventLoop::SetCurrent(EventLoop* loop) { current = loop; }

}  // namespace distgrad
