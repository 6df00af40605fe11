// Makes packets from a seed, and keeps account of callbacks.
#include "core/transport/transport_testing.h"

#include <cstdint>
#include <utility>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

uint8_t PatternByte(size_t seed, size_t i) {
  return static_cast<uint8_t>(seed * 37 + i * 7 + (i >> 8) * 11);
}

}  // namespace

Segment PatternSegment(size_t seed, size_t size) {
  Segment segment = AllocateSegment(size);
  for (size_t i = 0; i < size; ++i) segment.data[i] = PatternByte(seed, i);
  return segment;
}

Packet BytesPacket(std::string bytes) {
  Packet packet;
  packet.bytes = std::move(bytes);
  return packet;
}

Packet PatternPacket(size_t seed, std::string bytes, const std::vector<size_t>& sizes) {
  Packet packet;
  packet.bytes = std::move(bytes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    packet.segments.push_back(PatternSegment(seed + i, sizes[i]));
  }
  return packet;
}

void ExpectPattern(const Packet& packet, size_t seed, const std::string& bytes,
                   const std::vector<size_t>& sizes) {
  EXPECT_EQ(packet.bytes, bytes);
  ASSERT_EQ(packet.segments.size(), sizes.size());
  for (size_t s = 0; s < sizes.size(); ++s) {
    const Segment& segment = packet.segments[s];
    ASSERT_EQ(segment.size, sizes[s]);
    size_t equal = 0;
    while (equal < segment.size && segment.data[equal] == PatternByte(seed + s, equal)) ++equal;
    ASSERT_EQ(equal, segment.size) << "segment " << s << " differs from there on";
  }
}

// RecordingReceiver

void RecordingReceiver::OnPacket(Packet packet) {
  EXPECT_EQ(inside_.exchange(std::this_thread::get_id()), std::thread::id())
      << "two callbacks of one receiver at the same time";
  EXPECT_FALSE(closed()) << "a packet after OnClosed";
  if (const auto hook = on_packet) hook(packet);  // a copy: OnClosed may drop the original
  {
    absl::MutexLock lock(&mu_);
    packets_.push_back(std::make_unique<Packet>(std::move(packet)));
  }
  inside_ = std::thread::id();
}

void RecordingReceiver::OnClosed(absl::Status why) {
  EXPECT_EQ(inside_.load(), std::thread::id()) << "OnClosed during OnPacket";
  on_packet = nullptr;
  EXPECT_FALSE(why.ok());
  absl::MutexLock lock(&mu_);
  EXPECT_FALSE(closed_) << "OnClosed twice; the second time with " << why;
  closed_ = true;
  why_ = std::move(why);
}

void RecordingReceiver::AwaitPackets(size_t count) {
  const auto enough = [this, count] {
    mu_.AssertReaderHeld();
    return packets_.size() >= count || closed_;
  };
  absl::MutexLock lock(&mu_);
  EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kTransportPatience));
  EXPECT_GE(packets_.size(), count) << "closed: " << why_;
}

absl::Status RecordingReceiver::AwaitClosed() {
  absl::MutexLock lock(&mu_);
  EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&closed_), kTransportPatience));
  return why_;
}

const Packet& RecordingReceiver::packet(size_t i) const {
  static const Packet* const missing = new Packet;
  absl::MutexLock lock(&mu_);
  EXPECT_LT(i, packets_.size());
  return i < packets_.size() ? *packets_[i] : *missing;
}

size_t RecordingReceiver::count() const {
  absl::MutexLock lock(&mu_);
  return packets_.size();
}

bool RecordingReceiver::closed() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

// SendLog

Connection::SendDone SendLog::NewDone() {
  {
    absl::MutexLock lock(&state_->mu);
    ++state_->made;
  }
  return [state = state_, called = false](const absl::Status& status) mutable {
    EXPECT_FALSE(std::exchange(called, true)) << "a send callback called twice";
    absl::MutexLock lock(&state->mu);
    ++(status.ok() ? state->ok : state->failed);
  };
}

void SendLog::AwaitAll() {
  State& state = *state_;
  const auto all = [&state] {
    state.mu.AssertReaderHeld();
    return state.ok + state.failed == state.made;
  };
  absl::MutexLock lock(&state.mu);
  EXPECT_TRUE(state.mu.AwaitWithTimeout(absl::Condition(&all), kTransportPatience))
      << state.made - state.ok - state.failed << " sends did not complete";
}

size_t SendLog::ok() const {
  absl::MutexLock lock(&state_->mu);
  return state_->ok;
}
size_t SendLog::failed() const {
  absl::MutexLock lock(&state_->mu);
  return state_->failed;
}
size_t SendLog::pending() const {
  absl::MutexLock lock(&state_->mu);
  return state_->made - state_->ok - state_->failed;
}

}  // namespace distgrad
