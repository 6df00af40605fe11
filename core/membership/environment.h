// A worker's place in its job, as its options, the user's variables or a launcher's say it.
// docs/launching.md has the variables of each launcher, and their order.
#ifndef DISTGRAD_CORE_MEMBERSHIP_ENVIRONMENT_H_
#define DISTGRAD_CORE_MEMBERSHIP_ENVIRONMENT_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "core/membership/rendezvous_url.h"

namespace distgrad {

// Returns the value of a variable; nullopt: not set.
using Getenv = std::function<std::optional<std::string>(const std::string&)>;

// The environment of this process. A variable that is set to "" counts as not set.
std::optional<std::string> ProcessEnvironment(const std::string& name);

// The place as the worker's options say it. They go before all variables.
struct PlaceOptions {
  int rank = -1;        // -1: not said
  int world_size = -1;  // -1: not said
  std::string rendezvous = "env://";
  bool has_store = false;  // then `rendezvous` says nothing
  // A job that runs, as one more worker: it has no rank of the start, whoever says one.
  bool join = false;
};

struct Place {
  // One that joins is 1 of 2: neither the one that serves the store, nor alone.
  int rank = 0;
  int world_size = 1;
  // The rank among the workers of its machine, and their number; 0 and 0 where nothing says so.
  int local_rank = 0;
  int local_world_size = 0;
  // Whether a launcher gave the place: only then are these all workers of one machine if they are
  // as many as the job has. Options may be of another job than the launcher's, of the same size.
  bool is_launched = false;
  std::string name = {};  // "": not said

  // kEnvironment: no store is needed, for it is one worker alone, or has one.
  RendezvousUrl rendezvous = {};
  // Whether this worker serves the store of a kTcp rendezvous.
  bool serves_store = false;
  // Whether the launcher serves it, which knows no cluster key.
  bool launcher_serves = false;
  // The run, where a launcher starts all its workers anew in the store of the former start. See
  // AgreeOnStart.
  std::string run = {};
};

// Finds the place. kFailedPrecondition names what is missing, kInvalidArgument what is malformed or
// contradicts something else; both with the variables' names and values.
absl::StatusOr<Place> FindPlace(const PlaceOptions& options, const Getenv& getenv);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_ENVIRONMENT_H_
