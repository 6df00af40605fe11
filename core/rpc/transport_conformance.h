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
#ifndef DISTGRAD_CORE_RPC_TRANSPORT_CONFORMANCE_H_
#define DISTGRAD_CORE_RPC_TRANSPORT_CONFORMANCE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "core/rpc/packet.h"
#include "core/rpc/transport.h"
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

// Keeps what arrives, and fails the test if callbacks overlap, come after OnClosed, or if
// OnClosed comes twice or with OK. Thread-safe.
class RecordingReceiver final : public Receiver {
 public:
  // Called with each packet before it is kept; set before the receiver is given away. Dropped
  // by OnClosed, so it may own the connection.
  std::function<void(const Packet&)> on_packet;

  void OnPacket(Packet packet) override;
  void OnClosed(absl::Status why) override;

  // Waits until `count` packets in all have arrived; fails the test after a long time.
  void AwaitPackets(size_t count);
  // Waits for OnClosed and returns its status.
  absl::Status AwaitClosed();

  const Packet& packet(size_t i) const;  // stays where it is
  size_t count() const;
  bool closed() const;

 private:
  std::atomic<std::thread::id> inside_{};  // the thread that is in OnPacket

  mutable absl::Mutex mu_;
  std::vector<std::unique_ptr<Packet>> packets_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status why_ ABSL_GUARDED_BY(mu_);
};

// Makes callbacks for Send and sees that each is called exactly once. Thread-safe.
class SendLog {
 public:
  Connection::SendDone NewDone();

  // Waits until all callbacks made so far have been called; fails the test after a long time.
  void AwaitAll();
  // How many were called with OK, and with an error.
  size_t ok() const;
  size_t failed() const;
  size_t pending() const;

 private:
  struct State {
    absl::Mutex mu;
    size_t made ABSL_GUARDED_BY(mu) = 0;
    size_t ok ABSL_GUARDED_BY(mu) = 0;
    size_t failed ABSL_GUARDED_BY(mu) = 0;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

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

#endif  // DISTGRAD_CORE_RPC_TRANSPORT_CONFORMANCE_H_
