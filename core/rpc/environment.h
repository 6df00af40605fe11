// What launchers (torchrun, Slurm wrappers, Kubernetes training operators) say about a job in
// environment variables.
#ifndef DISTGRAD_CORE_RPC_ENVIRONMENT_H_
#define DISTGRAD_CORE_RPC_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace distgrad {

struct Environment {
  int rank = 0;              // RANK
  int world_size = 1;        // WORLD_SIZE
  int local_rank = 0;        // LOCAL_RANK; 0 when unset
  std::string master_addr;   // MASTER_ADDR
  uint16_t master_port = 0;  // MASTER_PORT

  // TORCHELASTIC_USE_AGENT_STORE=True: the launcher serves the store itself.
  bool agent_store = false;

  // Whether this worker has to serve the store at master_addr:master_port.
  bool ServesStore() const { return rank == 0 && !agent_store; }
};

// Reads them through `getenv` (nullopt: not set). kFailedPrecondition names what is missing,
// kInvalidArgument what is malformed; both say what was expected.
absl::StatusOr<Environment> ReadEnvironment(
    const std::function<std::optional<std::string>(const std::string&)>& getenv);

// The same from this process's environment.
absl::StatusOr<Environment> ReadEnvironment();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_ENVIRONMENT_H_
