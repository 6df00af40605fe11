// Several workers in one process, for tests.
//
//   Cluster cluster({.workers = 3});
//   cluster[1].Register("f", ...);
//   cluster[0].Call("worker1", "f", ...);
//
// A worker that cannot be made ends the test program with its status.
#ifndef DISTGRAD_TESTS_TESTING_CLUSTER_H_
#define DISTGRAD_TESTS_TESTING_CLUSTER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/membership/store.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/worker.h"

namespace distgrad {

struct ClusterOptions {
  int workers = 2;
  std::string transport = "inproc";
  size_t thread_count = 2;
  absl::Duration timeout = absl::Seconds(60);
  std::shared_ptr<FaultInjector> faults = nullptr;  // for inproc
  std::shared_ptr<Store> store = nullptr;           // one in this process, unless it is given
  Limits limits = {};
  std::map<int, Limits> limits_of = {};                 // of workers that have others
  std::map<std::string, DevicePairs> device_maps = {};  // of worker 0
  bool gpu_channel = true;                              // of worker 0
  ServeOperators serve_operators = ServeOperators::kSafe;
};

// Thread-safe.
class Cluster {
 public:
  explicit Cluster(const ClusterOptions& options);
  ~Cluster();  // in good order, if none was taken out

  int size() const { return static_cast<int>(workers_.size()); }
  Worker& operator[](int i) { return *workers_[i]; }
  InprocNetwork& network() { return *network_; }

  // Adds one more worker, which the others have not heard of yet. It has to leave by itself, and to
  // end before the cluster does.
  std::unique_ptr<Worker> Join(std::string name);

  // Ends a worker without a farewell.
  void Kill(int i) { workers_[i].reset(); }
  // Kills a worker, and starts it again: it comes back under its name.
  void Restart(int i);

 private:
  WorkerOptions OptionsOf(int i) const;
  std::unique_ptr<Worker> Start(int i) const;

  const ClusterOptions options_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<InprocNetwork> network_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

// The name that the cluster gives worker `i`.
std::string WorkerName(int i);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_CLUSTER_H_
