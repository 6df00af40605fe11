// Numbers the starts of a job that share one store, as under torchrun, which starts all workers
// anew when one has failed, in the store of the first start.
//
// Its TORCHELASTIC_RESTART_COUNT does not tell starts apart: each machine counts its own failures,
// and none are counted when a machine joins or leaves. So worker 0 numbers the starts, and the
// others ask it.
#ifndef DISTGRAD_CORE_MEMBERSHIP_START_H_
#define DISTGRAD_CORE_MEMBERSHIP_START_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/membership/store.h"

namespace distgrad {

// Returns the number of this start, the same on all its workers and on none of another's. Waits for
// all `world_size` of them. `nonce` is new with each worker that is started. What former starts
// have left in the store does not matter, as long as none of their workers runs any more, and what
// their workers have listed of it (see below) is deleted.
//
// kDeadlineExceeded names the ranks that did not come.
absl::StatusOr<int64_t> AgreeOnStart(Store& store, int rank, int world_size, uint64_t nonce,
                                     Deadline deadline);

// Returns the part of the store that is this start's alone, with a nonce of its own making.
absl::StatusOr<std::shared_ptr<Store>> StoreOfThisStart(std::shared_ptr<Store> store, int rank,
                                                        int world_size, Deadline deadline);

// Does the same for what is started again and again in one store: each worker lists there the keys
// that it sets, which costs an exchange for each that is new, and the next start deletes them.
absl::StatusOr<std::shared_ptr<Store>> ListedStoreOfThisStart(std::shared_ptr<Store> store,
                                                              int rank, int world_size,
                                                              Deadline deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_START_H_
