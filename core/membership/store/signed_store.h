// A store whose entries can be written only with the cluster key.
//
// Each value is stored with an HMAC-SHA256 over it and its key. Counters have none: an attacker who
// tampers with them can stop a job from starting, but not get into it.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_SIGNED_STORE_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_SIGNED_STORE_H_

#include <memory>
#include <string>

#include "core/membership/store.h"
#include "core/net/cluster_key.h"

namespace distgrad {

// Signs with the first key of two, and reads what either has signed. What reads entries is
// kUnauthenticated for one that was not written through such a store with these keys, a counter
// among them.
std::shared_ptr<Store> NewSignedStore(ClusterKey cluster_key, std::shared_ptr<Store> store);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_SIGNED_STORE_H_
