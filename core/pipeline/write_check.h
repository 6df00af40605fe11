// Notices that a tensor was written to. Private to core/pipeline.
#ifndef DISTGRAD_CORE_PIPELINE_WRITE_CHECK_H_
#define DISTGRAD_CORE_PIPELINE_WRITE_CHECK_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// Remembers what has been written to tensors so far, and keeps none of them alive. It sees what
// autograd sees: any operator that writes to a tensor or to a view of it; not what goes by way of
// pointers, and nothing of inference tensors. Not thread-safe.
class WriteCheck {
 public:
  explicit WriteCheck(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      const bool counts = tensor.defined() && !tensor.is_inference();
      versions_.emplace_back(counts ? tensor.unsafeGetTensorImpl()->version_counter()
                                    : c10::VariableVersion(c10::VariableVersion::DISABLED),
                             counts ? tensor._version() : 0);
    }
  }

  // Returns kFailedPrecondition, which names after `what` the tensor that was written to since.
  absl::Status Check(absl::string_view what) const {
    for (size_t i = 0; i < versions_.size(); ++i) {
      const auto& [version, before] = versions_[i];
      if (!version.enabled() || version.current_version() == before) continue;
      return absl::FailedPreconditionError(absl::StrCat(what, " ", i, " was written to"));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_WRITE_CHECK_H_
