// Checks the arguments of all implementations alike.
#include "core/parallel/device_collectives.h"

#include <c10/util/StringUtil.h>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

std::string Shown(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

}  // namespace

absl::Status CheckReduce(absl::Span<const c10::Device> devices,
                         absl::Span<const TensorVector> lists) {
  if (lists.size() != devices.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("reduce: ", lists.size(), " lists for ", devices.size(), " devices"));
  }
  for (size_t i = 1; i < lists.size(); ++i) {
    if (lists[i].size() == lists[0].size()) continue;
    return absl::InvalidArgumentError(absl::StrCat("reduce: list ", i, " has ", lists[i].size(),
                                                   " tensors, and list 0 ", lists[0].size()));
  }
  for (size_t k = 0; k < lists[0].size(); ++k) {
    const at::Tensor* first = nullptr;
    for (size_t i = 0; i < lists.size(); ++i) {
      const at::Tensor& tensor = lists[i][k];
      if (!tensor.defined()) continue;
      if (tensor.device() != devices[i]) {
        return absl::InvalidArgumentError(c10::str("reduce: tensor ", k, " of list ", i, " is on ",
                                                   tensor.device(), ", not on ", devices[i]));
      }
      if (first == nullptr) first = &tensor;
      if (tensor.sizes() != first->sizes() || tensor.scalar_type() != first->scalar_type()) {
        return absl::InvalidArgumentError(c10::str("reduce: tensor ", k, " of list ", i, " is ",
                                                   Shown(tensor), ", and another list's ",
                                                   Shown(*first)));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBroadcast(const TensorVector& tensors) {
  const at::Tensor* first = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (first == nullptr) first = &tensor;
    if (tensor.device() != first->device()) {
      return absl::InvalidArgumentError(c10::str("broadcast: tensor ", &tensor - tensors.data(),
                                                 " is on ", tensor.device(), ", and another on ",
                                                 first->device()));
    }
  }
  return absl::OkStatus();
}

}  // namespace distgrad
