#include <net/if.h>
#include <signal.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "core/parallel/process_group/c10d_store.h"
#include "core/parallel/process_group/new_backend.h"

namespace distgrad {
namespace {

// Gloo writes to sockets that the other end may have closed, and counts on a process that ignores
// SIGPIPE, as Python does. The signal goes to the thread that writes; Gloo's begin with the mask of
// the one that makes them.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeBlocked() {
    // One that has come meanwhile would be delivered now.
    const timespec no_time = {};
    if (sigismember(&before_, SIGPIPE) == 0) sigtimedwait(&sigpipe_, nullptr, &no_time);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t sigpipe_, before_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> NewGlooBackend(const BackendPlace& place) {
  using c10d::ProcessGroupGloo;
  const SigpipeBlocked sigpipe_blocked;
  auto options = ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(place.timeout));
  options->devices.push_back(if_nametoindex(place.host.c_str()) != 0
                                 ? ProcessGroupGloo::createDeviceForInterface(place.host)
                                 : ProcessGroupGloo::createDeviceForHostname(place.host));
  return c10::make_intrusive<ProcessGroupGloo>(C10dStoreOf(place.store, place.timeout), place.rank,
                                               place.size, std::move(options));
}

}  // namespace distgrad
