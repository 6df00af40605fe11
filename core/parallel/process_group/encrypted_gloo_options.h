// The options of a device of Gloo's that encrypts (encrypted_gloo.h).
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_GLOO_OPTIONS_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_GLOO_OPTIONS_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/membership/store.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"

namespace distgrad {

struct EncryptedGlooOptions {
  // At least one of the two.
  ClusterKey cluster_key;
  std::shared_ptr<Certificates> certificates = nullptr;
  // What the ranks of this start of this group have in common, and those of no other.
  Digest group_id = {};
  // The address, name or interface at which the others can reach this rank.
  std::string host;
  // The store in which the ranks tell each other their addresses; of this start of this group
  // alone.
  std::shared_ptr<Store> store;
  absl::Duration connect_timeout;
  // Returns the reason of another rank that has failed, or OK. Asked while this rank waits to be
  // connected.
  std::function<absl::Status()> failed_elsewhere;
  // Tells the others why this rank gives up. Called before it closes its connections, so that who
  // finds them closed finds the reason, too.
  std::function<void(const absl::Status&)> tell_failure;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_GLOO_OPTIONS_H_
