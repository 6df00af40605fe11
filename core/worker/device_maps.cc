// Describes this worker's devices and wishes to others, and checks theirs.
#include "core/worker/device_maps.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/wire.h"

namespace distgrad {
namespace {

// How many devices there are of each type, by libtorch's number of the type; the CPU left out.
using Counts = std::map<int, int>;

Counts LocalDevices() {
  Counts counts;
  for (int type = 1; type < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++type) {
    const auto device = static_cast<c10::DeviceType>(type);
    if (device == c10::kMeta || !c10::impl::hasDeviceGuardImpl(device)) continue;
    const int count = c10::impl::getDeviceGuardImpl(device)->deviceCount();
    if (count > 0) counts[type] = count;
  }
  return counts;
}

// What one worker says of itself.
struct Described {
  Counts devices;
  std::map<std::string, DeviceMap> maps;
};

void AppendDevice(c10::Device device, WireWriter& writer) {
  writer.U8(static_cast<uint8_t>(device.type()));
  writer.U8(static_cast<uint8_t>(device.index()));
}

absl::StatusOr<c10::Device> ReadDevice(WireReader& reader) {
  const uint8_t type = reader.U8(), index = reader.U8();
  if (type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES || index > INT8_MAX) {
    return absl::InvalidArgumentError("a device that there is not");
  }
  return c10::Device(static_cast<c10::DeviceType>(type), static_cast<c10::DeviceIndex>(index));
}

absl::StatusOr<Described> Decode(absl::string_view bytes) {
  Described described;
  if (bytes.empty()) return described;
  WireReader reader(bytes);
  const uint8_t types = reader.U8();
  for (int i = 0; i < types && reader.ok(); ++i) {
    const uint8_t type = reader.U8();
    described.devices[type] = reader.U8();
  }
  const uint16_t maps = reader.U16();
  for (int i = 0; i < maps && reader.ok(); ++i) {
    const std::string peer(reader.Str16());
    DevicePairs pairs;
    const uint16_t count = reader.U16();
    for (int j = 0; j < count && reader.ok(); ++j) {
      DG_ASSIGN_OR_RETURN(const c10::Device first, ReadDevice(reader));
      DG_ASSIGN_OR_RETURN(const c10::Device second, ReadDevice(reader));
      pairs.emplace_back(first, second);
    }
    DG_RETURN_IF_ERROR(reader.status("its devices"));
    DG_ASSIGN_OR_RETURN(described.maps[peer], DeviceMap::Of(std::move(pairs)));
  }
  DG_RETURN_IF_ERROR(reader.status("its devices"));
  return described;
}

absl::Status CheckIsThere(c10::Device device, const Counts& devices, absl::string_view worker) {
  const auto found = devices.find(static_cast<int>(device.type()));
  if (found != devices.end() && device.index() < found->second) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("worker '", worker, "' has no ", device.str()));
}

}  // namespace

absl::StatusOr<std::string> DeviceMaps::Encode(const Wanted& wanted) {
  std::string bytes;
  const Counts devices = LocalDevices();
  if (devices.empty() && wanted.empty()) return bytes;
  WireWriter writer(&bytes);
  writer.U8(static_cast<uint8_t>(devices.size()));
  for (const auto& [type, count] : devices) {
    writer.U8(static_cast<uint8_t>(type));
    writer.U8(static_cast<uint8_t>(count));
  }
  writer.U16(static_cast<uint16_t>(wanted.size()));
  for (const auto& [peer, pairs] : wanted) {
    if (peer.size() > kMaxWorkerText) {
      return absl::InvalidArgumentError(absl::StrCat("a device map with a worker whose name has ",
                                                     peer.size(), " bytes; a name has ",
                                                     kMaxWorkerText, " at most"));
    }
    const absl::StatusOr<DeviceMap> map = DeviceMap::Of(pairs);
    DG_RETURN_IF_ERROR(
        Annotate(map.status(), absl::StrCat("the device map with worker '", peer, "'")));
    writer.Str16(peer);
    writer.U16(static_cast<uint16_t>(pairs.size()));
    for (const auto& [ours, theirs] : pairs) {
      AppendDevice(ours, writer);
      AppendDevice(theirs, writer);
    }
  }
  return bytes;
}

absl::StatusOr<std::shared_ptr<const DeviceMap>> DeviceMaps::Make(const WorkerInfo& peer) const {
  if (peer.name == self_) return std::make_shared<const DeviceMap>(DeviceMap::Identity());
  DG_ASSIGN_OR_RETURN(const Described theirs, Decode(peer.devices));
  DeviceMap map;
  if (const auto ours = wanted_.find(peer.name); ours != wanted_.end()) {
    DG_ASSIGN_OR_RETURN(map, DeviceMap::Of(ours->second));
  }
  if (const auto of_us = theirs.maps.find(self_); of_us != theirs.maps.end()) {
    DG_ASSIGN_OR_RETURN(map, map.With(of_us->second));
  }
  const Counts local = LocalDevices();
  for (const auto& [here, there] : map.pairs()) {
    DG_RETURN_IF_ERROR(CheckIsThere(here, local, self_));
    DG_RETURN_IF_ERROR(CheckIsThere(there, theirs.devices, peer.name));
  }
  map.set_carries_gpus(transport_->CarriesDevices(peer.address));
  return std::make_shared<const DeviceMap>(std::move(map));
}

absl::StatusOr<std::shared_ptr<const DeviceMap>> DeviceMaps::With(const WorkerInfo& peer) {
  {
    absl::MutexLock lock(&mu_);
    const auto found = known_.find(peer.rank);
    if (found != known_.end() && found->second.incarnation == peer.incarnation) {
      return found->second.map;
    }
  }
  absl::StatusOr<std::shared_ptr<const DeviceMap>> map = Make(peer);
  if (!map.ok()) {
    map = Annotate(map.status(), absl::StrCat("the device map with worker '", peer.name, "'"));
  }
  absl::MutexLock lock(&mu_);
  return known_.insert_or_assign(peer.rank, Known{peer.incarnation, std::move(map)})
      .first->second.map;
}

}  // namespace distgrad
