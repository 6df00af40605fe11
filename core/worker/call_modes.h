// The modes of a thread that change what operators do: they go with a call, so that its handler
// runs as if the caller ran it.
#ifndef DISTGRAD_CORE_WORKER_CALL_MODES_H_
#define DISTGRAD_CORE_WORKER_CALL_MODES_H_

#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "core/rpc/wire.h"

namespace distgrad {

struct CallModes {
  bool grad_enabled = true;
  bool inference = false;
  // What autocast casts to, where it is on.
  std::optional<at::ScalarType> autocast_cpu = {};
  std::optional<at::ScalarType> autocast_cuda = {};
  bool autocast_cache = true;

  // Those of the calling thread.
  static CallModes Current();
};

// Three bytes; docs/wire.md has the layout. Types that are not known are read as none.
void AppendCallModes(const CallModes& modes, WireWriter& writer);
CallModes ReadCallModes(WireReader& reader);

// Gives the calling thread these modes until it ends.
class CallModesScope {
 public:
  explicit CallModesScope(const CallModes& modes);
  ~CallModesScope();
  CallModesScope(const CallModesScope&) = delete;
  CallModesScope& operator=(const CallModesScope&) = delete;

 private:
  const CallModes before_;
  const bool autocast_;
  const c10::InferenceMode inference_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALL_MODES_H_
