// Guards what c10 does with events.
#include "core/tensor/stream_event.h"

#include <c10/core/DeviceGuard.h>

#include <exception>
#include <optional>
#include <utility>

#include "core/base/log.h"
#include "core/tensor/exception.h"

namespace distgrad {

StreamEvent::StreamEvent(c10::Stream stream) : event_(stream.device_type()) {
  const c10::DeviceGuard on_device(stream.device());
  event_.record(stream);
}

StreamEvent::~StreamEvent() {
  if (event_.eventId() == nullptr) return;  // moved from
  std::optional<c10::DeviceGuard> on_device;
  try {
    on_device.emplace(event_.device());
  } catch (...) {
    DG_LOG(WARNING) << "an event of " << event_.device().str() << ": "
                    << StatusFromException(std::current_exception());
  }
  const c10::Event ended = std::move(event_);
}

void StreamEvent::Block(c10::Stream stream) const {
  const c10::DeviceGuard on_device(stream.device());
  event_.block(stream);
}

void StreamEvent::Synchronize() const {
  const c10::DeviceGuard on_device(event_.device());
  event_.synchronize();
}

}  // namespace distgrad
