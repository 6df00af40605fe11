// The handles of the C interface: numbers that look like pointers.
//
// A handle names a slot of a table, its kind, and which of the objects that the slot has held in
// its time is meant. So whatever a program passes can be told apart from a live handle of the right
// kind, without reading memory that the program could have freed. A handle in use is pinned: if it
// is destroyed meanwhile, the last one to use it ends the object.
//
//   dg_tensor* handle = NewHandle<TensorObject>(tensor);      // throws if memory is out
//   {
//     DG_ASSIGN_OR_RETURN(Pinned<TensorObject> pinned, Pin<TensorObject>(leaf, "leaf"));
//     Use(pinned->tensor);
//   }
//   DestroyHandle<TensorObject>(handle);
//
// The table is the one global of this library: a handle must be told from garbage before anything
// that it belongs to is known.
//
// A child that was forked off has none of its parent's handles: most stand for something with
// threads, which a fork does not copy.
//
// All functions here are thread-safe.
#ifndef DISTGRAD_CAPI_HANDLES_H_
#define DISTGRAD_CAPI_HANDLES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace distgrad {

enum class HandleKind : uint8_t {
  kError = 1,
  kTensor,
  kValues,
  kMessage,
  kFuture,
  kWorker,
  kContext,
  kOptimizer,
  kDataParallel,
  kCancellation,
  kResponder,
  kProcessGroup,
  kAverager,
  kSafetensorsFile,
  kCheckpointValues,
  kCheckpointPart,
  kCheckpointManager,
  kLoadedCheckpoint,
  kSchedule,
  kPipelineStages,
  kPipeline,
  kPipelineResult,
  kPipelineStep,
  kCompletions,
};

// The object behind a handle. Each kind has a subclass with
//   using Handle = dg_...;
//   static constexpr HandleKind kKind;
//   static constexpr char kName[] = "dg_...";
class HandleObject {
 public:
  virtual ~HandleObject() = default;
};

namespace internal {

using HandleBits = uint64_t;

// Reserves a handle, which is not alive yet. Throws std::bad_alloc if memory, or the table, is
// full.
HandleBits ReserveInTable(HandleKind kind);
// Makes a reserved handle alive, with its object; or gives it back.
void PublishInTable(HandleBits handle, std::unique_ptr<HandleObject> object) noexcept;
void GiveBackToTable(HandleBits handle) noexcept;
// Returns null if it is not a live handle of that kind.
HandleObject* PinInTable(HandleKind kind, HandleBits handle);
void UnpinInTable(HandleBits handle) noexcept;
// Makes the handle dead. Returns whether this call did that, and its object, if it is not pinned.
std::pair<bool, std::unique_ptr<HandleObject>> RemoveFromTable(HandleKind kind,
                                                               HandleBits handle) noexcept;
// The error of a handle that is NULL, or not a live one of that kind (`kind`: "dg_..."). `name` is
// what the header calls the parameter, or the field, that it was given as.
absl::Status NotAHandle(absl::string_view name, bool is_null, absl::string_view kind);

template <typename T>
HandleBits BitsOf(const T* handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

}  // namespace internal

// Keeps the object of a handle. Movable.
template <typename T>
class Pinned {
 public:
  Pinned(internal::HandleBits handle, T* object) : handle_(handle), object_(object) {}
  Pinned(Pinned&& other) noexcept
      : handle_(other.handle_), object_(std::exchange(other.object_, nullptr)) {}
  Pinned& operator=(Pinned&&) = delete;
  ~Pinned() {
    if (object_ != nullptr) internal::UnpinInTable(handle_);
  }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }

 private:
  const internal::HandleBits handle_;
  T* object_;
};

// Pins the object of a handle; an error calls the handle by that name, which is that of the
// parameter, or of the field, in the header.
template <typename T>
absl::StatusOr<Pinned<T>> Pin(const typename T::Handle* handle, absl::string_view name) {
  const internal::HandleBits bits = internal::BitsOf(handle);
  HandleObject* object = internal::PinInTable(T::kKind, bits);
  if (object == nullptr) return internal::NotAHandle(name, handle == nullptr, T::kName);
  return Pinned<T>(bits, static_cast<T*>(object));
}

// Does so for an element of the array of that name.
template <typename T>
absl::StatusOr<Pinned<T>> PinElement(const typename T::Handle* const* handles, size_t index,
                                     absl::string_view array) {
  const internal::HandleBits bits = internal::BitsOf(handles[index]);
  HandleObject* object = internal::PinInTable(T::kKind, bits);
  if (object == nullptr) {
    return internal::NotAHandle(absl::StrCat(array, "[", index, "]"), handles[index] == nullptr,
                                T::kName);
  }
  return Pinned<T>(bits, static_cast<T*>(object));
}

// The handle of an object that is filled in later. It is made before whatever it will stand for
// begins: so nothing has begun where there is no memory for its handle. It is alive from Release()
// on: a number that a program makes up reaches no object that is not whole.
template <typename T>
class HandleAhead {
 public:
  template <typename... Args>
  explicit HandleAhead(Args&&... args)
      : HandleAhead(std::make_unique<T>(std::forward<Args>(args)...)) {}
  explicit HandleAhead(std::unique_ptr<T> object)
      : object_(std::move(object)), handle_(internal::ReserveInTable(T::kKind)) {}
  ~HandleAhead() {
    if (object_ != nullptr) internal::GiveBackToTable(handle_);
  }
  HandleAhead(const HandleAhead&) = delete;
  HandleAhead& operator=(const HandleAhead&) = delete;

  T* operator->() const { return object_.get(); }
  // Once.
  typename T::Handle* Release() noexcept {
    internal::PublishInTable(handle_, std::move(object_));
    return reinterpret_cast<typename T::Handle*>(static_cast<uintptr_t>(handle_));
  }

 private:
  std::unique_ptr<T> object_;  // null once it was released
  const internal::HandleBits handle_;
};

template <typename T>
typename T::Handle* AdoptHandle(std::unique_ptr<T> object) {
  return HandleAhead<T>(std::move(object)).Release();
}

template <typename T, typename... Args>
typename T::Handle* NewHandle(Args&&... args) {
  return AdoptHandle(std::make_unique<T>(std::forward<Args>(args)...));
}

// A shared pointer to what is made later. Once that is there, sharing it needs no memory.
template <typename T>
class SharedAhead {
 public:
  std::shared_ptr<T> Share(std::unique_ptr<T> made) {
    *owner_ = std::move(made);
    return std::shared_ptr<T>(owner_, owner_->get());
  }

 private:
  const std::shared_ptr<std::unique_ptr<T>> owner_ = std::make_shared<std::unique_ptr<T>>();
};

// Destroys a handle. Returns whether it was live.
template <typename T>
bool DestroyHandle(const typename T::Handle* handle) noexcept {
  return internal::RemoveFromTable(T::kKind, internal::BitsOf(handle)).first;
}

// Destroys a handle and gives its object, which no other thread may be using. Names as of Pin().
template <typename T>
absl::StatusOr<std::unique_ptr<T>> TakeHandle(const typename T::Handle* handle,
                                              absl::string_view name) {
  auto [was_live, object] = internal::RemoveFromTable(T::kKind, internal::BitsOf(handle));
  if (!was_live) return internal::NotAHandle(name, handle == nullptr, T::kName);
  if (object == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ", a ", T::kName, " that is taken, is in use on another thread"));
  }
  return std::unique_ptr<T>(static_cast<T*>(object.release()));
}

// Owns a handle.
template <typename T>
struct HandleDeleter {
  void operator()(typename T::Handle* handle) const noexcept { DestroyHandle<T>(handle); }
};
template <typename T>
using OwnedHandle = std::unique_ptr<typename T::Handle, HandleDeleter<T>>;

template <typename T, typename... Args>
OwnedHandle<T> NewOwnedHandle(Args&&... args) {
  return OwnedHandle<T>(NewHandle<T>(std::forward<Args>(args)...));
}

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_HANDLES_H_
