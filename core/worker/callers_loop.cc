#include "core/worker/callers_loop.h"

#include <ATen/ThreadLocalState.h>

#include <utility>

#include "core/base/thread.h"

namespace distgrad {
namespace {

const at::ThreadLocalState* NewStateOfNewThread() {
  const at::ThreadLocalState* state = nullptr;
  StartThread("dg-new", [&] { state = new at::ThreadLocalState; }).join();
  return state;
}

class CallersLoop final : public EventLoop {
 public:
  explicit CallersLoop(std::shared_ptr<EventLoop> loop) : loop_(std::move(loop)) {}

  void Run(absl::AnyInvocable<void()> task) override { loop_->Run(std::move(task)); }

  std::unique_ptr<EventLoop::Visitor> Visit() override {
    auto visitor = loop_->Visit();
    if (visitor == nullptr) return nullptr;
    return std::make_unique<Visitor>(std::move(visitor));
  }
  void WakeVisitor() override { loop_->WakeVisitor(); }

 private:
  class Visitor final : public EventLoop::Visitor {
   public:
    explicit Visitor(std::unique_ptr<EventLoop::Visitor> visitor) : visitor_(std::move(visitor)) {}
    bool Look() override { return visitor_->Look(); }
    bool Sleep(absl::Time deadline) override { return visitor_->Sleep(deadline); }

   private:
    static const at::ThreadLocalState& state() {
      static const at::ThreadLocalState* const state = NewStateOfNewThread();
      return *state;
    }

    const at::ThreadLocalStateGuard guard_{state()};  // to the end of the visit
    const std::unique_ptr<EventLoop::Visitor> visitor_;
  };

  const std::shared_ptr<EventLoop> loop_;
};

}  // namespace

std::shared_ptr<EventLoop> NewCallersLoop(std::shared_ptr<EventLoop> loop) {
  if (loop == nullptr) return nullptr;
  return std::make_shared<CallersLoop>(std::move(loop));
}

}  // namespace distgrad
