// c10d's stores and ours (core/membership/store.h), each as the other.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_C10D_STORE_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_C10D_STORE_H_

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "core/membership/store.h"

namespace distgrad {

// Wraps a store of c10d's, for programs that have one. Its own time-out counts for what waits for a
// server.
std::shared_ptr<Store> StoreOfC10d(c10::intrusive_ptr<c10d::Store> store);

// Returns a store for the rendezvous of c10d's backends. `timeout` is that of a key which does not
// come. Throws StatusError.
c10::intrusive_ptr<c10d::Store> C10dStoreOf(std::shared_ptr<Store> store, absl::Duration timeout);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_C10D_STORE_H_
