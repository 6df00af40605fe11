// The parts that the tests of transports share: packets that can be told apart to the last byte,
// and what keeps account of callbacks.
#ifndef DISTGRAD_CORE_TRANSPORT_TRANSPORT_TESTING_H_
#define DISTGRAD_CORE_TRANSPORT_TRANSPORT_TESTING_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/transport/packet.h"
#include "core/transport/transport.h"

namespace distgrad {

// A time that only a hang takes, even on a busy machine under a sanitizer.
inline constexpr absl::Duration kTransportPatience = absl::Minutes(2);

Packet BytesPacket(std::string bytes);
// Make segments of bytes that follow from `seed` and their place; and packets of such segments,
// with seeds that follow each other.
Segment PatternSegment(size_t seed, size_t size);
Packet PatternPacket(size_t seed, std::string bytes, const std::vector<size_t>& sizes);
void ExpectPattern(const Packet& packet, size_t seed, const std::string& bytes,
                   const std::vector<size_t>& sizes);

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

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TRANSPORT_TESTING_H_
