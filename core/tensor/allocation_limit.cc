// Wraps the CPU allocator, and fails an allocation beyond its thread's limit.
#include "core/tensor/allocation_limit.h"

#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

thread_local AllocationLimit* current = nullptr;

// The CPU allocator that was there before, after a look at the thread's limit. Immutable after
// construction.
class LimitedAllocator final : public c10::Allocator {
 public:
  explicit LimitedAllocator(c10::Allocator* allocator) : allocator_(*allocator) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (current != nullptr) current->Take(bytes);
    return allocator_.allocate(bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return allocator_.is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return allocator_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    allocator_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& allocator_;
};

// When the program is loaded, while no other thread can be allocating. It never ends: tensors refer
// to the allocator that they come from.
const bool installed = [] {
  c10::SetCPUAllocator(new LimitedAllocator(c10::GetCPUAllocator()));
  return true;
}();

}  // namespace

AllocationLimit::AllocationLimit(uint64_t bytes, absl::string_view name)
    : bytes_(bytes), name_(name), outer_(current) {
  current = this;
}

AllocationLimit::~AllocationLimit() { current = outer_; }

void AllocationLimit::Take(uint64_t bytes) {
  if (bytes > bytes_ - taken_) {
    throw StatusError(absl::ResourceExhaustedError(absl::StrCat(
        "it would allocate ", bytes, " bytes, after ", taken_, "; ", name_, " is ", bytes_)));
  }
  taken_ += bytes;
}

AllocationLimitPause::AllocationLimitPause() : paused_(std::exchange(current, nullptr)) {}

AllocationLimitPause::~AllocationLimitPause() { current = paused_; }

}  // namespace distgrad
