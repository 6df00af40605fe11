// A store in a file that all workers can open (one machine, or a shared file system with locks).
//
// The file is kept at the end, and what a former job left in it is found by the next: use a new
// path for each start of a job. What is overwritten or deleted is dropped from it now and then, so
// it does not grow with the time that a job takes.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_FILE_STORE_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_FILE_STORE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/membership/store.h"

namespace distgrad {

inline constexpr uint64_t kMaxFileStoreBytes = 256 << 20;

// Creates the file if it is not there. kInvalidArgument, with the system's reason, if it cannot
// be opened for reading and writing, or holds something else than a store.
//
// Calls fail with kUnavailable once the file is deleted or replaced, or damaged; with
// kDeadlineExceeded if a process keeps it locked for `patience`; and with kResourceExhausted while
// this process has no file descriptor left to open it with, where the disk is full, or where its
// keys and values would take more than `max_bytes`, up to kMaxFileStoreBytes, with 8 bytes for
// each.
absl::StatusOr<std::unique_ptr<Store>> NewFileStore(const std::string& path,
                                                    absl::Duration patience = absl::Seconds(10),
                                                    uint64_t max_bytes = kMaxFileStoreBytes);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_FILE_STORE_H_
