// CRC-32C (Castagnoli), the checksum of iSCSI, ext4, RocksDB and TensorFlow's files: every burst of
// up to 32 wrong bits shows. It finds damage, but does not prevent forgery.
#ifndef DISTGRAD_CORE_BASE_CRC32C_H_
#define DISTGRAD_CORE_BASE_CRC32C_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace distgrad {

// Returns the checksum of `bytes` and those before them, whose checksum is `before` (0 where there
// are none).
uint32_t Crc32c(absl::string_view bytes, uint32_t before = 0);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_CRC32C_H_
