// Keeps the table of slots that handles name, and refuses a parent's handles in a forked child.
#include "capi/handles.h"

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <new>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {
namespace internal {
namespace {

static_assert(sizeof(uintptr_t) == sizeof(HandleBits), "handles need pointers of 64 bits");

// A handle:     kind (8 bits) | generation of the slot (32) | number of the slot (24)
// A slot's state: generation of the slot (32) | alive (1) | pins (31)
constexpr int kSlotBits = 24;
constexpr int kGenerationBits = 32;
constexpr int kGenerationBitsOfTable = kGenerationBits - 8;
constexpr uint64_t kAlive = uint64_t{1} << 31;
constexpr uint64_t kPins = kAlive - 1;
constexpr size_t kSlotsOfBlock = size_t{1} << 12;
constexpr size_t kBlocks = (size_t{1} << kSlotBits) / kSlotsOfBlock;

struct Slot {
  std::atomic<uint64_t> state{0};
  std::atomic<HandleKind> kind{};
  // Written before the slot comes alive, constant while it is alive or pinned.
  // With its bits inverted, so that to LeakSanitizer a handle that nobody destroyed is a leak.
  uintptr_t object = 0;
};

uint64_t Generation(uint64_t state) { return state >> kGenerationBits; }

// Blocks are never freed: any number may be looked up.
class Table {
 public:
  static Table& Get() { return *Current().load(std::memory_order_acquire); }

  // Whether the process was forked off one that had handles.
  bool forked() const { return parent_ != nullptr; }

  HandleBits Reserve(HandleKind kind) {
    const size_t number = TakeFreeSlot();
    const uint64_t generation = Generation(At(number).state.load(std::memory_order_relaxed));
    return uint64_t{static_cast<uint8_t>(kind)} << (kSlotBits + kGenerationBits) |
           generation << kSlotBits | number;
  }

  void Publish(HandleBits handle, std::unique_ptr<HandleObject> object) {
    HandleObject* const released = object.release();
    Slot* const slot = FindOwn(handle);
    if (slot == nullptr) return;
    slot->kind.store(KindOf(handle), std::memory_order_relaxed);
    slot->object = ~reinterpret_cast<uintptr_t>(released);
    slot->state.store(GenerationOf(handle) << kGenerationBits | kAlive, std::memory_order_release);
  }

  void GiveBack(HandleBits handle) {
    if (FindOwn(handle) == nullptr) return;
    absl::MutexLock lock(&mu_);
    free_.push_back(Number(handle));
  }

  HandleObject* Pin(HandleKind kind, HandleBits handle) {
    Slot* slot = nullptr;
    uint64_t state = 0;
    if (!Match(kind, handle, &slot, &state)) return nullptr;
    const uint64_t generation = Generation(state);
    while (!slot->state.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
      if (Generation(state) != generation || !(state & kAlive)) return nullptr;
    }
    return Object(*slot);
  }

  void Unpin(HandleBits handle) {
    Slot* const slot = FindOwn(handle);
    if (slot == nullptr) return;
    const uint64_t before = slot->state.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kPins) == 1 && !(before & kAlive)) TakeObject(Number(handle), *slot);
  }

  std::pair<bool, std::unique_ptr<HandleObject>> Remove(HandleKind kind, HandleBits handle) {
    Slot* slot = nullptr;
    uint64_t state = 0;
    if (!Match(kind, handle, &slot, &state)) return {};
    const uint64_t generation = Generation(state);
    while (!slot->state.compare_exchange_weak(state, state & ~kAlive, std::memory_order_acq_rel)) {
      if (Generation(state) != generation || !(state & kAlive)) return {};
    }
    if ((state & kPins) != 0) return {true, nullptr};
    return {true, TakeObject(Number(handle), *slot)};
  }

 private:
  // Forked children have tables of their own: the mutex may have been held as they were forked, and
  // what the handles of the parent stand for has threads that are not there.
  explicit Table(const Table* parent)
      : parent_(parent), forks_(parent == nullptr ? 0 : parent->forks_ + 1) {}

  static std::atomic<Table*>& Current() {
    static std::atomic<Table*>& current = *[] {
      pthread_atfork(nullptr, nullptr, [] { Current() = new Table(&Get()); });
      return new std::atomic<Table*>(new Table(nullptr));
    }();
    return current;
  }

  // The generations of a table are its own, so that its handles are no other table's.
  uint64_t FirstGeneration() const { return uint64_t{forks_} << kGenerationBitsOfTable; }
  uint64_t LastGeneration() const {
    return FirstGeneration() + (uint64_t{1} << kGenerationBitsOfTable) - 1;
  }

  static size_t Number(HandleBits handle) { return handle & ((uint64_t{1} << kSlotBits) - 1); }
  static uint64_t GenerationOf(HandleBits handle) { return handle >> kSlotBits & 0xffffffff; }
  static HandleKind KindOf(HandleBits handle) {
    return static_cast<HandleKind>(handle >> (kSlotBits + kGenerationBits));
  }
  static HandleObject* Object(const Slot& slot) {
    return reinterpret_cast<HandleObject*>(~slot.object);
  }

  // Of a slot that there is.
  Slot& At(size_t number) {
    return blocks_[number / kSlotsOfBlock].load(std::memory_order_acquire)[number % kSlotsOfBlock];
  }
  // Null if there is no such slot yet.
  Slot* Find(size_t number) {
    Slot* block = blocks_[number / kSlotsOfBlock].load(std::memory_order_acquire);
    return block == nullptr ? nullptr : &block[number % kSlotsOfBlock];
  }

  // The slot of a handle that the caller has pinned or reserved. Null where the process was forked
  // off meanwhile, inside a callback: that slot is in the parent's table, and its object is left
  // alone, as all that the parent's handles stand for.
  Slot* FindOwn(HandleBits handle) {
    Slot* const slot = Find(Number(handle));
    if (slot == nullptr) return nullptr;
    const uint64_t state = slot->state.load(std::memory_order_acquire);
    return Generation(state) == GenerationOf(handle) ? slot : nullptr;
  }

  // The slot of a live handle, and its state.
  bool Match(HandleKind kind, HandleBits handle, Slot** slot, uint64_t* state) {
    if (handle >> (kSlotBits + kGenerationBits) != static_cast<uint8_t>(kind)) return false;
    *slot = Find(Number(handle));
    if (*slot == nullptr) return false;
    *state = (*slot)->state.load(std::memory_order_acquire);
    return Generation(*state) == GenerationOf(handle) && (*state & kAlive) &&
           (*slot)->kind.load(std::memory_order_relaxed) == kind;
  }

  size_t TakeFreeSlot() {
    absl::MutexLock lock(&mu_);
    if (!free_.empty()) {
      const size_t number = free_.back();
      free_.pop_back();
      return number;
    }
    if (used_ == kBlocks * kSlotsOfBlock) throw std::bad_alloc();
    if (used_ % kSlotsOfBlock == 0) {
      free_.reserve(used_ + kSlotsOfBlock);  // so that giving a slot back cannot fail
      Slot* const block = new Slot[kSlotsOfBlock];
      for (size_t i = 0; i < kSlotsOfBlock; ++i) {
        block[i].state.store(FirstGeneration() << kGenerationBits, std::memory_order_relaxed);
      }
      blocks_[used_ / kSlotsOfBlock].store(block, std::memory_order_release);
    }
    return used_++;
  }

  // Of a slot that is neither alive nor pinned; makes it free.
  std::unique_ptr<HandleObject> TakeObject(size_t number, Slot& slot) {
    std::unique_ptr<HandleObject> object(Object(slot));
    slot.object = 0;
    const uint64_t generation = Generation(slot.state.load(std::memory_order_relaxed));
    // After its last generation a slot is given up, so that no handle comes back to life.
    if (generation == LastGeneration()) return object;
    slot.state.store((generation + 1) << kGenerationBits, std::memory_order_release);
    absl::MutexLock lock(&mu_);
    free_.push_back(number);
    return object;
  }

  // Constant.
  const Table* const parent_;
  const uint8_t forks_;

  std::atomic<Slot*> blocks_[kBlocks] = {};

  absl::Mutex mu_;
  size_t used_ ABSL_GUARDED_BY(mu_) = 0;  // slots that ever held an object
  std::vector<size_t> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

HandleBits ReserveInTable(HandleKind kind) { return Table::Get().Reserve(kind); }
void PublishInTable(HandleBits handle, std::unique_ptr<HandleObject> object) noexcept {
  Table::Get().Publish(handle, std::move(object));
}
void GiveBackToTable(HandleBits handle) noexcept { Table::Get().GiveBack(handle); }
HandleObject* PinInTable(HandleKind kind, HandleBits handle) {
  return Table::Get().Pin(kind, handle);
}
void UnpinInTable(HandleBits handle) noexcept { Table::Get().Unpin(handle); }
std::pair<bool, std::unique_ptr<HandleObject>> RemoveFromTable(HandleKind kind,
                                                               HandleBits handle) noexcept {
  return Table::Get().Remove(kind, handle);
}

absl::Status NotAHandle(absl::string_view name, bool is_null, absl::string_view kind) {
  if (is_null) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is NULL, and has to be a valid ", kind));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      name, " is not a valid ", kind, ": it was destroyed already, or is a handle of another kind",
      Table::Get().forked()
          ? ", or one of the process that this one was forked off (none of its handles is alive "
            "here; fork before the first use, or exec after it)"
          : ""));
}

}  // namespace internal

}  // namespace distgrad
