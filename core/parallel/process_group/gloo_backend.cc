#include <net/if.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "core/parallel/process_group/c10d_store.h"
#include "core/parallel/process_group/new_backend.h"

namespace distgrad {

c10::intrusive_ptr<c10d::Backend> NewGlooBackend(const BackendPlace& place) {
  using c10d::ProcessGroupGloo;
  auto options = ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(place.timeout));
  options->devices.push_back(if_nametoindex(place.host.c_str()) != 0
                                 ? ProcessGroupGloo::createDeviceForInterface(place.host)
                                 : ProcessGroupGloo::createDeviceForHostname(place.host));
  return c10::make_intrusive<ProcessGroupGloo>(C10dStoreOf(place.store, place.timeout), place.rank,
                                               place.size, std::move(options));
}

}  // namespace distgrad
