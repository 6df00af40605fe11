#include <ATen/ops/empty.h>
#include <net/if.h>
#include <signal.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

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

class Gloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  // c10d's does nothing, and Gloo's own way to close connections leaves those waiting for ever who
  // wait here. But it closes all of them, and wakes everybody, when a receipt is late; and this one
  // is, for nobody sends.
  void abort() override {
    try {
      std::vector<at::Tensor> nothing = {at::empty({1}, at::kByte)};
      recvAnysource(nothing, /*tag=*/0)->wait(std::chrono::milliseconds(1));
    } catch (...) {
    }
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> NewGlooBackend(const BackendPlace& place) {
  using c10d::ProcessGroupGloo;
  const SigpipeBlocked sigpipe_blocked;
  // Gloo connects within the time-out of its collectives, which is another one.
  auto options =
      ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(place.connect_timeout));
  options->devices.push_back(if_nametoindex(place.host.c_str()) != 0
                                 ? ProcessGroupGloo::createDeviceForInterface(place.host)
                                 : ProcessGroupGloo::createDeviceForHostname(place.host));
  auto gloo = c10::make_intrusive<Gloo>(C10dStoreOf(place.store, place.connect_timeout), place.rank,
                                        place.size, std::move(options));
  gloo->setTimeout(absl::ToChronoMilliseconds(place.timeout));
  return gloo;
}

}  // namespace distgrad
