// Process groups of a simulated job: in place of Gloo's backend theirs is one whose ranks find each
// other in this process, and whose data takes as long as the simulated network's packets do. The
// linker has ProcessGroup::Create() make it (--wrap, BUILD.bazel).
//
//   GroupNetwork groups(network);   // one at a time
//   ProcessGroup::Create({.store = store, .rank = 1, .size = 2, .host = host->address()});
//   groups.Kill(host->address(), /*silently=*/false);
#ifndef DISTGRAD_TESTS_SIMULATION_GROUP_H_
#define DISTGRAD_TESTS_SIMULATION_GROUP_H_

#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/simulation/network.h"

namespace distgrad::simulation {

class Room;  // where the ranks of one group meet

// Thread-safe.
class GroupNetwork {
 public:
  explicit GroupNetwork(std::shared_ptr<SimulatedNetwork> network);
  ~GroupNetwork();
  GroupNetwork(const GroupNetwork&) = delete;
  GroupNetwork& operator=(const GroupNetwork&) = delete;

  // The process with this address is gone, as SimulatedNetwork::Kill() has it.
  void Kill(const std::string& address, bool silently);

  // Returns the network, for the backends.
  static GroupNetwork& Current();
  const std::shared_ptr<SimulatedNetwork>& network() const { return network_; }
  int NewRoom(int size);
  std::shared_ptr<Room> Find(int number);
  bool IsDead(const std::string& address);

 private:
  const std::shared_ptr<SimulatedNetwork> network_;

  absl::Mutex mu_;
  int last_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, std::shared_ptr<Room>> rooms_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> dead_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_GROUP_H_
