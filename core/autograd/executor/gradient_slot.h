// One input of a node, in which the gradients for it are added up.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_GRADIENT_SLOT_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_GRADIENT_SLOT_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <utility>

namespace distgrad {

// Thread-safe, and without a lock: an adder takes what lies here, adds to it outside, and puts
// the sum back. One that finds that another put something here meanwhile takes that too. So
// exactly one thread owns each partial sum, and may add in place.
class GradientSlot {
 public:
  GradientSlot() = default;
  GradientSlot(const GradientSlot&) = delete;
  GradientSlot& operator=(const GradientSlot&) = delete;
  ~GradientSlot() { Take(); }

  // `sum(held, gradient)` is called without a lock, and may throw: then both are gone.
  template <typename Sum>
  void Add(at::Tensor gradient, Sum sum) {
    if (!gradient.defined()) return;
    while (true) {
      if (at::Tensor held = Take(); held.defined()) {
        gradient = sum(std::move(held), std::move(gradient));
      }
      c10::TensorImpl* empty = nullptr;
      if (held_.compare_exchange_strong(empty, gradient.unsafeGetTensorImpl(),
                                        std::memory_order_release, std::memory_order_relaxed)) {
        (void)gradient.unsafeReleaseTensorImpl();  // it is held_'s now
        return;
      }
    }
  }

  // What has come so far, or undefined.
  at::Tensor Take() {
    // Most inputs get one gradient only: look before writing.
    if (held_.load(std::memory_order_relaxed) == nullptr) return at::Tensor();
    c10::TensorImpl* const held = held_.exchange(nullptr, std::memory_order_acquire);
    if (held == nullptr) return at::Tensor();
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(held));
  }

 private:
  std::atomic<c10::TensorImpl*> held_{nullptr};
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_GRADIENT_SLOT_H_
