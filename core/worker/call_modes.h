// The modes of a thread that change what operators do: they go with a call, so that its handler
// runs as if the caller ran it.
#ifndef DISTGRAD_CORE_WORKER_CALL_MODES_H_
#define DISTGRAD_CORE_WORKER_CALL_MODES_H_

#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "core/base/wire.h"

namespace distgrad {

struct CallModes {
  bool grad_enabled = true;
  bool inference = false;
  // The types that autocast casts to, where it is on.
  std::optional<at::ScalarType> autocast_cpu = {};
  std::optional<at::ScalarType> autocast_cuda = {};
  bool autocast_cache = true;

  // Returns the modes of the calling thread.
  static CallModes Current();
};

// Write and read the modes: three bytes; docs/wire.md has the layout. Types that are not known are
// read as none.
void AppendCallModes(const CallModes& modes, WireWriter& writer);
CallModes ReadCallModes(WireReader& reader);

// Gives the calling thread these modes until it ends, and then those that it had, whatever has run
// in between. What autocast casts to is a mode of the thread also where autocast is off.
class CallModesScope {
 public:
  explicit CallModesScope(const CallModes& modes);
  ~CallModesScope();
  CallModesScope(const CallModesScope&) = delete;
  CallModesScope& operator=(const CallModesScope&) = delete;

 private:
  struct Autocast {
    static Autocast Of(at::DeviceType device);
    void Set() const;

    at::DeviceType device;
    bool enabled;
    at::ScalarType type;
  };

  // The modes that the thread had.
  const bool grad_enabled_, autocast_cache_;
  const Autocast autocast_cpu_, autocast_cuda_;
  const bool autocast_;  // whether these modes have any
  const c10::InferenceMode inference_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CALL_MODES_H_
