// What TensorPipe is told when a socket or a channel of ours fails: a text, since nothing in it
// looks at more.
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
  explicit TextError(std::string what) : what_(std::move(what)) {}
  std::string what() const override { return what_; }

 private:
  const std::string what_;
};

inline tensorpipe::Error MakeError(absl::string_view what) {
  return {std::make_shared<TextError>(std::string(what)), "", 0};
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_TENSORPIPE_ERROR_H_
