// What every transport must do, as one suite of tests. A transport's own test names how it is
// made; the suite does the rest:
//
//   INSTANTIATE_TEST_SUITE_P(
//       Inproc, TransportConformanceTest,
//       testing::Values(TransportFactory{"inproc", [] {
//         auto network = std::make_shared<InprocNetwork>();
//         return [network] { return NewInprocTransport(network); };
//       }}),
//       TransportFactoryName);
#ifndef DISTGRAD_CORE_TRANSPORT_TRANSPORT_CONFORMANCE_H_
#define DISTGRAD_CORE_TRANSPORT_TRANSPORT_CONFORMANCE_H_

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "core/transport/transport.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"

namespace distgrad {

struct TransportFactory {
  using Make = std::function<std::unique_ptr<Transport>()>;

  std::string name;  // letters, digits and _ only
  // Called once a test; what it returns makes transports that can reach each other.
  std::function<Make()> start;
  // Addresses that are not of this transport's form.
  std::vector<std::string> bad_addresses = {"", "nonsense", "other://1"};
};

std::ostream& operator<<(std::ostream& out, const TransportFactory& factory);
std::string TransportFactoryName(const testing::TestParamInfo<TransportFactory>& info);

class TransportConformanceTest : public testing::TestWithParam<TransportFactory> {
 protected:
  // Two ends that have found each other.
  struct Link {
    std::shared_ptr<Connection> client, server;
    std::shared_ptr<RecordingReceiver> client_receiver, server_receiver;
  };

  // Collects what a listener accepts. Thread-safe.
  class Acceptor {
   public:
    explicit Acceptor(TransportConformanceTest* test) : test_(test) {}
    // Called inside Accept; set before Listen.
    std::function<void(const std::shared_ptr<Connection>&, RecordingReceiver&)> on_accept;

    Transport::Accept Callback();
    // The next accepted connection, in the order of arrival.
    Link AwaitNext();

   private:
    bool HasNext() const { return taken_ < accepted_.size(); }

    TransportConformanceTest* const test_;
    absl::Mutex mu_;
    size_t taken_ = 0;            // guarded by mu_
    std::vector<Link> accepted_;  // guarded by mu_
  };

  TransportConformanceTest() : make_(GetParam().start()) {}
  ~TransportConformanceTest() override = default;

  // Ends all transports, and checks that every receiver was closed and every send completed.
  void TearDown() override;

  Transport* NewTransport();
  void Destroy(Transport* transport);
  std::shared_ptr<RecordingReceiver> NewReceiver();
  Link Connect(Transport* client, const std::string& address, Acceptor* acceptor);
  // The address of a transport that listened and is gone.
  std::string DeadAddress();

  SendLog sends_;
  Acceptor acceptor_{this};

 private:
  const TransportFactory::Make make_;
  std::vector<std::unique_ptr<Transport>> transports_;
  absl::Mutex mu_;
  std::vector<std::shared_ptr<RecordingReceiver>> receivers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TRANSPORT_CONFORMANCE_H_
