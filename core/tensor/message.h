// What a call carries, either way. message_codec.h says how it stands in a packet.
#ifndef DISTGRAD_CORE_TENSOR_MESSAGE_H_
#define DISTGRAD_CORE_TENSOR_MESSAGE_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "absl/types/span.h"

namespace distgrad {

struct Message {
  std::string payload;
  std::vector<at::Tensor> tensors;  // undefined ones keep their place
};

// Whether a message has a tensor that is not on the CPU, so that device maps matter. Thread-safe.
bool HasDeviceTensors(absl::Span<const at::Tensor> tensors);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_MESSAGE_H_
