// What TensorPipe is told when a socket or a channel of ours fails. Nothing in it looks at more
// than the text; the transport above it, which gets it back, does.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_ERROR_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_ERROR_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "tensorpipe/common/error.h"

namespace distgrad {

class TextError final : public tensorpipe::BaseError {
 public:
  enum class Cause {
    kOther,
    kExhausted,  // this process lacks the means for it: file descriptors, or memory
    kRefused,    // the other end has refused this one's certificate
    kRefuses,    // this end has refused the certificate that it was shown
    kNobodyListens,
  };

  TextError(std::string what, Cause cause) : what_(std::move(what)), cause_(cause) {}
  std::string what() const override { return what_; }
  Cause cause() const { return cause_; }

 private:
  const std::string what_;
  const Cause cause_;
};

inline tensorpipe::Error MakeError(absl::string_view what,
                                   TextError::Cause cause = TextError::Cause::kOther) {
  return {std::make_shared<TextError>(std::string(what), cause), "", 0};
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_ERROR_H_
