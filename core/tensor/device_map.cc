// Keeps the pairs of devices, one to one, in both directions.
#include "core/tensor/device_map.h"

#include "absl/strings/str_cat.h"

namespace distgrad {

DeviceMap DeviceMap::Identity() {
  DeviceMap map;
  map.identity_ = true;
  return map;
}

absl::StatusOr<DeviceMap> DeviceMap::Of(DevicePairs pairs) {
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto& [ours, theirs] = pairs[i];
    if (ours.is_cpu() || theirs.is_cpu()) {
      return absl::InvalidArgumentError(
          "a device map with the CPU, which always goes with the CPU");
    }
    if (!ours.has_index() || !theirs.has_index()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a device map with a device that lacks its "
                       "number: ",
                       ours.str(), " -> ", theirs.str()));
    }
    for (size_t j = 0; j < i; ++j) {
      if (pairs[j].first == ours || pairs[j].second == theirs) {
        return absl::InvalidArgumentError(
            absl::StrCat("a device map must be one to one, for gradients go the way back: ",
                         pairs[j].first.str(), " -> ", pairs[j].second.str(), " and ", ours.str(),
                         " -> ", theirs.str()));
      }
    }
  }
  DeviceMap map;
  map.pairs_ = std::move(pairs);
  return map;
}

absl::StatusOr<c10::Device> DeviceMap::Remote(c10::Device local) const {
  if (identity_ || local.is_cpu()) return local;
  for (const auto& [ours, theirs] : pairs_) {
    if (ours == local) return theirs;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("it is on ", local.str(),
                   ", which no device map gives a device of that worker; see "
                   "the option device_maps (docs/architecture.md)"));
}

absl::StatusOr<DeviceMap> DeviceMap::With(const DeviceMap& theirs) const {
  DevicePairs pairs = pairs_;
  for (const auto& [of_them, of_us] : theirs.pairs_) {
    const std::pair<c10::Device, c10::Device> reversed(of_us, of_them);
    bool known = false;
    for (const auto& pair : pairs_) known |= pair == reversed;
    if (!known) pairs.push_back(reversed);
  }
  return Of(std::move(pairs));
}

}  // namespace distgrad
