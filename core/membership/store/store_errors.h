// The checks and errors that all stores share.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_STORE_ERRORS_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_STORE_ERRORS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/membership/store.h"

namespace distgrad {

inline constexpr size_t kMaxStoreKey = 4 << 10;    // bytes
inline constexpr size_t kMaxStoreValue = 1 << 20;  // bytes; c10d's server breaks off past 8 MiB

// kInvalidArgument for an empty or too long key, or a too long value.
absl::Status CheckEntry(absl::string_view key, absl::string_view value);

// The same for each of several.
absl::Status CheckKeys(Store::Keys keys);

// kInvalidArgument.
absl::Status NotACounter(absl::string_view key);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_STORE_ERRORS_H_
