// Puts a guard of a new thread's state around each borrowed thread.
#include "core/worker/callers_loop.h"

#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <utility>

#include "core/base/thread.h"
#include "core/tensor/allocation_limit.h"

namespace distgrad {
namespace {

// Null where the machine gives no thread.
const at::ThreadLocalState* NewStateOfNewThread() {
  const at::ThreadLocalState* state = nullptr;
  auto thread = StartThread("dg-new", [&] { state = new at::ThreadLocalState; });
  if (thread.ok()) thread->join();
  return state;
}

const at::ThreadLocalState* StateOfNewThread() {
  static std::atomic<const at::ThreadLocalState*> known{nullptr};
  if (const at::ThreadLocalState* state = known.load(std::memory_order_acquire)) return state;
  const at::ThreadLocalState* made = NewStateOfNewThread();
  const at::ThreadLocalState* none = nullptr;
  if (made == nullptr || known.compare_exchange_strong(none, made)) return made;
  delete made;  // another thread was faster
  return none;
}

class CallersLoop final : public EventLoop {
 public:
  explicit CallersLoop(std::shared_ptr<EventLoop> loop) : loop_(std::move(loop)) {}

  void Run(absl::AnyInvocable<void()> task) override { loop_->Run(std::move(task)); }

  std::unique_ptr<EventLoop::BorrowedThread> BorrowThread() override {
    const at::ThreadLocalState* const state = StateOfNewThread();
    if (state == nullptr) return nullptr;
    auto borrowed = loop_->BorrowThread();
    if (borrowed == nullptr) return nullptr;
    return std::make_unique<BorrowedThread>(*state, std::move(borrowed));
  }
  void WakeBorrowedThread() override { loop_->WakeBorrowedThread(); }

 private:
  class BorrowedThread final : public EventLoop::BorrowedThread {
   public:
    BorrowedThread(const at::ThreadLocalState& state,
                   std::unique_ptr<EventLoop::BorrowedThread> borrowed)
        : guard_(state), borrowed_(std::move(borrowed)) {}
    bool PollOnce() override { return borrowed_->PollOnce(); }
    bool Sleep(Deadline deadline) override { return borrowed_->Sleep(deadline); }

   private:
    // While the thread is borrowed.
    const at::ThreadLocalStateGuard guard_;
    const AllocationLimitPause pause_;
    const std::unique_ptr<EventLoop::BorrowedThread> borrowed_;
  };

  const std::shared_ptr<EventLoop> loop_;
};

}  // namespace

std::shared_ptr<EventLoop> NewCallersLoop(std::shared_ptr<EventLoop> loop) {
  if (loop == nullptr) return nullptr;
  return std::make_shared<CallersLoop>(std::move(loop));
}

}  // namespace distgrad
