// Where an error arose, as far as that is known: on which worker, and whether a handler of its
// program gave it, or distgrad itself.
//
//   const absl::Status status = worker->Call("back", "find", message).status();
//   if (absl::IsNotFound(status) && OriginOf(status)->by == ErrorOrigin::By::kHandler) {
//     ...  // the handler has not found it; the handler itself was found
//   }
//
// It is a payload of the status, which calls carry from worker to worker, through nested ones too,
// as long as each handler returns the status that it got (Annotate() keeps it). What a peer says of
// an error's origin is its word, as is the error itself.
#ifndef DISTGRAD_CORE_BASE_ORIGIN_H_
#define DISTGRAD_CORE_BASE_ORIGIN_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "core/base/ids.h"

namespace distgrad {

struct ErrorOrigin {
  // The numbers of the wire format.
  enum class By : uint8_t {
    kDistgrad = 1,  // distgrad, or an operator or optimizer of torch that it ran
    kHandler = 2,   // a handler returned or threw it
  };

  WorkerRank worker = 0;
  By by = By::kDistgrad;

  friend bool operator==(const ErrorOrigin& a, const ErrorOrigin& b) {
    return a.worker == b.worker && a.by == b.by;
  }
};

// Nothing for an error that has not been on any worker: of wrong arguments, say.
std::optional<ErrorOrigin> OriginOf(const absl::Status& status);

// The status with that origin, unless it has one, or is OK.
absl::Status WithOrigin(absl::Status status, ErrorOrigin origin);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_ORIGIN_H_
