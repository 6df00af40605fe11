// Tensors by name, from arrays of the C interface.
#ifndef DISTGRAD_CAPI_TENSOR_MAP_H_
#define DISTGRAD_CAPI_TENSOR_MAP_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "capi/include/distgrad/distgrad.h"
#include "core/checkpoint/safetensors.h"

namespace distgrad {

// kInvalidArgument for a handle that is none, and for a name that is there twice. `of_tensors` and
// `of_names` are the names of the two parameters, or fields.
absl::StatusOr<TensorMap> PinTensorMap(const dg_str* names, const dg_tensor* const* tensors,
                                       size_t count, absl::string_view of_tensors,
                                       absl::string_view of_names = "names");

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_TENSOR_MAP_H_
