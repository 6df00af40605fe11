// A network between the workers of one process that is slow, breaks, and forgets, as a seed says.
//
//   auto network = std::make_shared<SimulatedNetwork>(seed, NetworkOptions());
//   auto host = std::make_shared<SimulatedHost>(network);
//   WorkerOptions options{.transport = "inproc", .network = host};
//   ...
//   network->Cut(host->address(), other->address(), /*silently=*/false);
//
// Packets of one direction of a connection keep their order; nothing else does. It goes by the
// machine's clock, or by that of a simulation (scheduler.h).
#ifndef DISTGRAD_TESTS_SIMULATION_NETWORK_H_
#define DISTGRAD_TESTS_SIMULATION_NETWORK_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/transport/inproc/inproc_transport.h"

namespace distgrad {

namespace internal {
class SimulatedEnd;
class SimulatedNode;
}  // namespace internal

inline constexpr uint64_t kLargePacket = 64 << 10;

struct NetworkOptions {
  // How long a packet takes; one in `slow_one_in` takes up to `slowest`. 0: none does.
  std::chrono::nanoseconds fastest{20000}, usual{200000}, slowest{50000000};
  uint32_t slow_one_in = 0;
  // A packet of more than kLargePacket takes a millisecond longer for each so many bytes. 0: no.
  uint32_t large_per_ms = 0;
  // How long the system leaves bytes where they are that a connection does not take any more. 0:
  // for ever.
  std::chrono::nanoseconds system_timeout{0};
};

// Thread-safe.
class SimulatedNetwork final : public std::enable_shared_from_this<SimulatedNetwork> {
 public:
  using Clock = std::chrono::steady_clock;

  SimulatedNetwork(uint64_t seed, const NetworkOptions& options)
      : options_(options), random_(seed) {}

  std::unique_ptr<Transport> NewTransport(std::string* address);

  // Ends all connections between the two: both ends hear of it; or, silently, one of them does, and
  // what the other sends is lost.
  void Cut(const std::string& a, const std::string& b, bool silently);
  // One of the connections between the two, as the seed draws it, carries nothing any more, either
  // way, nor does either end hear of the other's end.
  void Deafen(const std::string& a, const std::string& b);
  // The same at both ends; and large packets, and what is sent behind one, do not leave any more:
  // the system has no place for them. It ends that end after its time-out.
  void Choke(const std::string& a, const std::string& b);
  // Half of the connections that this one opens until then fail: it hears so within two seconds,
  // or, if they hang, never; and the other end never has them.
  void FailConnects(const std::string& from, Clock::time_point until, bool hang);
  // What one sends to the other waits until then, and so do news of connections.
  void Hold(const std::string& from, const std::string& to, Clock::time_point until);
  // Kills the process or, silently, the machine: nothing comes from there any more, nor arrives.
  // The others hear of the first.
  void Kill(const std::string& address, bool silently);
  // The number of connections, by their ends.
  size_t ends() const;
  // Describes the connections that are not as they should be, for a report.
  std::string Text() const;

  // The functions for the transports.
  uint64_t Draw();
  // Returns when what is sent now arrives.
  Clock::time_point Arrival(const std::string& from, const std::string& to, uint64_t bytes = 0);
  std::shared_ptr<internal::SimulatedNode> Find(const std::string& address) const;
  void Remove(const std::string& address);
  // Returns how long a connection that is opened now takes to fail, max() for ever; nothing if it
  // does not.
  std::optional<std::chrono::nanoseconds> ConnectFails(const std::string& from);
  std::chrono::nanoseconds system_timeout() const { return options_.system_timeout; }

 private:
  // An end of one of the connections between the two, as the seed draws it; null if there is none.
  std::shared_ptr<internal::SimulatedEnd> AnyBetween(const std::string& a, const std::string& b);
  std::vector<std::shared_ptr<internal::SimulatedNode>> Nodes() const;

  const NetworkOptions options_;

  mutable absl::Mutex mu_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, std::weak_ptr<internal::SimulatedNode>> nodes_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, std::string>, Clock::time_point> held_ ABSL_GUARDED_BY(mu_);
  // Until when connections of theirs fail, and whether they hang.
  std::map<std::string, std::pair<Clock::time_point, bool>> failing_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> silent_ ABSL_GUARDED_BY(mu_);  // machines that are gone
};

// What a worker is given as its network. Thread-safe.
class SimulatedHost final : public InprocNetwork {
 public:
  explicit SimulatedHost(std::shared_ptr<SimulatedNetwork> network)
      : network_(std::move(network)) {}

  std::unique_ptr<Transport> NewTransport() override {
    std::string address;
    auto transport = network_->NewTransport(&address);
    absl::MutexLock lock(&mu_);
    address_ = std::move(address);
    return transport;
  }
  // The address of its transport.
  std::string address() const {
    absl::MutexLock lock(&mu_);
    return address_;
  }

 private:
  const std::shared_ptr<SimulatedNetwork> network_;
  mutable absl::Mutex mu_;
  std::string address_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SIMULATION_NETWORK_H_
