// Makes c10d's Gloo over a device that can be aborted, and encrypts where there is a key.
#include <net/if.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "core/base/log.h"
#include "core/net/address.h"
#include "core/net/cluster_key.h"
#include "core/parallel/process_group/c10d_store.h"
#include "core/parallel/process_group/encrypted_gloo.h"
#include "core/parallel/process_group/gloo_device.h"
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

class Gloo final : public c10d::ProcessGroupGloo {
 public:
  Gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
       c10::intrusive_ptr<Options> options, std::function<void()> abort)
      : ProcessGroupGloo(store, rank, size, std::move(options)), abort_(std::move(abort)) {}

  // c10d's does nothing.
  void abort() override { abort_(); }

 private:
  const std::function<void()> abort_;
};

c10::intrusive_ptr<Gloo> NewGloo(const BackendPlace& place,
                                 std::shared_ptr<gloo::transport::Device> device,
                                 std::function<void()> abort) {
  using c10d::ProcessGroupGloo;
  // Gloo connects within the time-out of its collectives, which is another one.
  auto options =
      ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(place.connect_timeout));
  options->devices.push_back(std::move(device));
  auto gloo = c10::make_intrusive<Gloo>(C10dStoreOf(place.store, place.connect_timeout), place.rank,
                                        place.size, std::move(options), std::move(abort));
  gloo->setTimeout(absl::ToChronoMilliseconds(place.timeout));
  return gloo;
}

}  // namespace

NewBackend NewGlooBackend(const BackendPlace& place) {
  using c10d::ProcessGroupGloo;
  if (!place.cluster_key.empty() || place.certificates != nullptr) {
    const auto device = std::make_shared<EncryptedGloo>(EncryptedGlooOptions{
        .cluster_key = place.cluster_key,
        .certificates = place.certificates,
        .group_id = place.group_id,
        .host = place.host,
        .store = place.store,
        .connect_timeout = place.connect_timeout,
        .failed_elsewhere = place.failed_elsewhere,
        .tell_failure = place.tell_failure,
    });
    return {NewGloo(place, device, [device] { device->Abort(); })};
  }
  // Of a host that there is not Gloo itself says so.
  const absl::StatusOr<std::string> listens_on = ResolveBindHost(place.host);
  if (place.size > 1 && listens_on.ok() && !IsLoopback(*listens_on)) {
    DG_LOG(WARNING) << "Gloo listens on " << *listens_on << " without a cluster key ("
                    << kClusterKeySetting << "); see docs/security.md";
  }
  const SigpipeBlocked sigpipe_blocked;
  const auto device =
      std::make_shared<GlooDevice>(if_nametoindex(place.host.c_str()) != 0
                                       ? ProcessGroupGloo::createDeviceForInterface(place.host)
                                       : ProcessGroupGloo::createDeviceForHostname(place.host));
  return {NewGloo(place, device, [device] { device->Abort(); }),
          [device] { device->EndLostWaits(); }};
}

}  // namespace distgrad
