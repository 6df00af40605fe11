// Does with less where there is no memory: for what is said once, that something has ended and why,
// it is better to have less of a text than to say nothing, or to wait for memory (await_memory.h).
#ifndef DISTGRAD_CORE_BASE_MAKE_OR_H_
#define DISTGRAD_CORE_BASE_MAKE_OR_H_

#include <new>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace distgrad {

// Returns what `make` returns, or `otherwise` if that throws std::bad_alloc. An error without a
// text needs no memory.
inline absl::Status MakeOr(absl::Status otherwise, absl::FunctionRef<absl::Status()> make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return otherwise;
  }
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_MAKE_OR_H_
