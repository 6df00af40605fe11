// Carries frames with poll(), on one thread.
#include "tests/hosts/tap_switch.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/check.h"

namespace distgrad {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kEthernetHeader = 14, kAddress = 6;

uint8_t ByteAt(const std::string& bytes, size_t at) { return static_cast<uint8_t>(bytes[at]); }

}  // namespace

bool SwapWords(std::string& frame, uint64_t random) {
  // Ethernet's type is IPv4, and IPv4's protocol TCP.
  if (frame.size() < kEthernetHeader + 20 || ByteAt(frame, 12) != 8 || ByteAt(frame, 13) != 0 ||
      ByteAt(frame, kEthernetHeader + 9) != 6) {
    return false;
  }
  const size_t length =
      ByteAt(frame, kEthernetHeader + 2) * 256u + ByteAt(frame, kEthernetHeader + 3);
  const size_t segment = kEthernetHeader + (ByteAt(frame, kEthernetHeader) & 15u) * 4;
  const size_t end = std::min(frame.size(), kEthernetHeader + length);
  if (segment + 20 > end) return false;
  // From a TCP header of whole 32-bit words on, the words are those that the checksum adds up.
  const size_t begin = segment + (ByteAt(frame, segment + 12) >> 4) * 4u;
  if (begin + 4 > end) return false;
  const size_t words = (end - begin) / 2, first = random % words;
  for (size_t i = 1; i < words; ++i) {
    const size_t one = begin + 2 * first, other = begin + 2 * ((first + i) % words);
    if (frame.compare(one, 2, frame, other, 2) == 0) continue;
    std::swap(frame[one], frame[other]);
    std::swap(frame[one + 1], frame[other + 1]);
    return true;
  }
  return false;
}

TapSwitch::TapSwitch(std::vector<int> taps, uint64_t seed, Watch watch)
    : taps_(std::move(taps)),
      watch_(std::move(watch)),
      cables_(taps_.size()),
      addresses_(taps_.size()),
      random_(seed) {
  for (std::vector<Cable>& row : cables_) row.resize(taps_.size());
  DG_CHECK(pipe2(wake_, O_CLOEXEC) == 0) << std::strerror(errno);
  thread_ = std::thread([this] { Run(); });
}

TapSwitch::~TapSwitch() {
  close(wake_[1]);
  thread_.join();
  close(wake_[0]);
}

void TapSwitch::Set(int from, int to, const CableSettings& settings) {
  const std::lock_guard<std::mutex> lock(mu_);
  cables_.at(from).at(to).settings = settings;
}

int64_t TapSwitch::corrupted() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return corrupted_;
}

void TapSwitch::Run() {
  std::vector<pollfd> entries;
  for (const int tap : taps_) entries.push_back({tap, POLLIN, 0});
  entries.push_back({wake_[0], POLLIN, 0});
  for (;;) {
    const Time now = std::chrono::steady_clock::now();
    const Time next = SendDue(now);
    timespec timeout = {1, 0};
    if (next < now + seconds(1)) {
      const auto left = std::max(std::chrono::nanoseconds(1000), next - now);
      timeout = {0, static_cast<long>(left.count())};
    }
    const int ready = ppoll(entries.data(), entries.size(), &timeout, nullptr);
    DG_CHECK(ready >= 0 || errno == EINTR) << std::strerror(errno);
    if (ready <= 0) continue;
    if (entries.back().revents != 0) return;
    for (size_t from = 0; from < taps_.size(); ++from) {
      if (entries[from].revents != 0) Receive(from);
    }
  }
}

void TapSwitch::Receive(size_t from) {
  char bytes[65536];
  for (;;) {
    const ssize_t n = read(taps_[from], bytes, sizeof(bytes));
    if (n < static_cast<ssize_t>(kEthernetHeader)) return;
    const Time now = std::chrono::steady_clock::now();
    const std::string frame(bytes, static_cast<size_t>(n));
    if (watch_ != nullptr) watch_(frame);
    const std::lock_guard<std::mutex> lock(mu_);
    addresses_[from] = frame.substr(kAddress, kAddress);
    const auto known = std::find(addresses_.begin(), addresses_.end(), frame.substr(0, kAddress));
    for (size_t to = 0; to < taps_.size(); ++to) {
      // What nobody is known to be meant by, as a broadcast, goes to all.
      const bool is_meant =
          known == addresses_.end() || static_cast<size_t>(known - addresses_.begin()) == to;
      if (to != from && is_meant) Enqueue(cables_[from][to], frame, now);
    }
  }
}

void TapSwitch::Enqueue(Cable& cable, std::string bytes, Time now) {
  const CableSettings& settings = cable.settings;
  if (settings.cut) return;
  if (settings.corrupt_percent > 0 &&
      random_() % 100 < static_cast<uint64_t>(settings.corrupt_percent) &&
      SwapWords(bytes, random_())) {
    ++corrupted_;
  }
  Time due = now;
  if (settings.bytes_per_second > 0) {
    due = std::max(due, cable.free_at);
    if (due > now + seconds(1)) return;
    due += microseconds(static_cast<int64_t>(bytes.size()) * 1'000'000 / settings.bytes_per_second);
    cable.free_at = due;
  }
  due += milliseconds(settings.delay_ms);
  // Frames do not overtake each other when a cable gets faster.
  if (!cable.frames.empty()) due = std::max(due, cable.frames.back().due);
  cable.frames.push_back({due, std::move(bytes)});
}

TapSwitch::Time TapSwitch::SendDue(Time now) {
  const std::lock_guard<std::mutex> lock(mu_);
  Time next = Time::max();
  for (std::vector<Cable>& row : cables_) {
    for (size_t to = 0; to < row.size(); ++to) {
      std::deque<Frame>& frames = row[to].frames;
      for (; !frames.empty() && frames.front().due <= now; frames.pop_front()) {
        // A frame that its host does not take is lost, as on a real cable.
        (void)!write(taps_[to], frames.front().bytes.data(), frames.front().bytes.size());
      }
      if (!frames.empty()) next = std::min(next, frames.front().due);
    }
  }
  return next;
}

}  // namespace distgrad
