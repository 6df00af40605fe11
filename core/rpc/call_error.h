// Writes in front of a call's error which call it was.
#ifndef DISTGRAD_CORE_RPC_CALL_ERROR_H_
#define DISTGRAD_CORE_RPC_CALL_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/status.h"

namespace distgrad {

// Puts "call of 'f' on worker 'b' (1): " before the words of `why`. `worker` is as
// Peers::Describe() has it, or its name in quotes where that is all that is known.
inline absl::Status CallError(const absl::Status& why, absl::string_view function,
                              absl::string_view worker) {
  return Annotate(why, absl::StrCat("call of '", function, "' on worker ", worker));
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_CALL_ERROR_H_
