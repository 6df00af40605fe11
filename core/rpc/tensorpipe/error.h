// What TensorPipe is told when a socket or a channel of ours fails. Nothing in it looks at more than
// the text; the transport above it, which gets it back, does.
#ifndef DISTGRAD_CORE_RPC_TENSORPIPE_ERROR_H_
#define DISTGRAD_CORE_RPC_TENSORPIPE_ERROR_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "tensorpipe/common/error.h"

namespace distgrad {

class TextError final : public tensorpipe::BaseError {
 public:
  TextError(std::string what, bool is_exhausted)
      : what_(std::move(what)), is_exhausted_(is_exhausted) {}
  std::string what() const override { return what_; }
  // Whether this process lacks the means for it: file descriptors, or memory.
  bool is_exhausted() const { return is_exhausted_; }

 private:
  const std::string what_;
  const bool is_exhausted_;
};

inline tensorpipe::Error MakeError(absl::string_view what, bool is_exhausted = false) {
  return {std::make_shared<TextError>(std::string(what), is_exhausted), "", 0};
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_TENSORPIPE_ERROR_H_
