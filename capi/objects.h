// The objects behind the handles of the C interface.
#ifndef DISTGRAD_CAPI_OBJECTS_H_
#define DISTGRAD_CAPI_OBJECTS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <deque>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "capi/handles.h"
#include "capi/include/distgrad/distgrad.h"
#include "core/base/cancellation.h"
#include "core/base/future.h"
#include "core/tensor/message.h"

namespace distgrad {

// The objects. All are immutable once a program has their handles, but for what is said.

struct ErrorObject : HandleObject {
  using Handle = dg_error;
  static constexpr HandleKind kKind = HandleKind::kError;
  static constexpr char kName[] = "dg_error";

  explicit ErrorObject(absl::Status status) : status(std::move(status)) {}
  const absl::Status status;
};

struct TensorObject : HandleObject {
  using Handle = dg_tensor;
  static constexpr HandleKind kKind = HandleKind::kTensor;
  static constexpr char kName[] = "dg_tensor";

  explicit TensorObject(at::Tensor tensor) : tensor(std::move(tensor)) {}
  const at::Tensor tensor;  // defined
};

struct MessageObject : HandleObject {
  using Handle = dg_message;
  static constexpr HandleKind kKind = HandleKind::kMessage;
  static constexpr char kName[] = "dg_message";

  MessageObject() = default;
  explicit MessageObject(Message message) : message(std::move(message)) {}
  Message message;  // moved out of when it is taken
};

struct ValuesObject : HandleObject {
  using Handle = dg_values;
  static constexpr HandleKind kKind = HandleKind::kValues;
  static constexpr char kName[] = "dg_values";

  std::vector<dg_value> values;
  // What they point to.
  std::deque<std::vector<int64_t>> integers;
  std::deque<std::vector<double>> reals;
  std::deque<std::vector<uint8_t>> bools;
  std::deque<std::string> strings;
  std::deque<std::vector<const dg_tensor*>> lists;
  std::vector<OwnedHandle<TensorObject>> tensors;
};

// The values of an operator that ran elsewhere, as they arrived.
struct RemoteValues {
  Future<Message> reply;
  uint64_t most_bytes;  // that they may take: see DecodeValues()
};

struct FutureObject : HandleObject {
  using Handle = dg_future;
  static constexpr HandleKind kKind = HandleKind::kFuture;
  static constexpr char kName[] = "dg_future";

  using Work = std::variant<Future<Message>, Future<Unit>, RemoteValues>;
  Work work;
};

struct CancellationObject : HandleObject {
  using Handle = dg_cancellation;
  static constexpr HandleKind kKind = HandleKind::kCancellation;
  static constexpr char kName[] = "dg_cancellation";

  explicit CancellationObject(std::shared_ptr<Cancellation> cancellation)
      : cancellation(std::move(cancellation)) {}
  const std::shared_ptr<Cancellation> cancellation;  // synchronizes itself
};

// ---------------------------------------------------------------------------------- Conversion

// Returns the tensors of an array of handles; undefined where NULL is given, if that is allowed.
// `name` is that of the parameter or field.
absl::StatusOr<std::vector<at::Tensor>> PinTensors(const dg_tensor* const* handles, size_t count,
                                                   bool allow_null, absl::string_view name);
// Returns NULL for an undefined one. Throws if memory is out.
dg_tensor* NewTensorHandle(const at::Tensor& tensor);
std::vector<OwnedHandle<TensorObject>> NewTensorHandles(const std::vector<at::Tensor>& tensors);

absl::StatusOr<c10::Device> ToDevice(dg_str name, absl::string_view what);

absl::StatusOr<std::vector<c10::IValue>> FromValues(const dg_value* values, size_t count);
absl::StatusOr<std::unique_ptr<ValuesObject>> ToValues(const std::vector<c10::IValue>& values);

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_OBJECTS_H_
