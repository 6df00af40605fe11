// A switch between hosts whose cables end in this program (HostsOptions::taps): it carries their
// Ethernet frames, and does to them what tc's netem does on machines that have it. Each pair of
// hosts has settings for each direction.
//
//   TapSwitch taps({hosts->Tap(0), hosts->Tap(1)}, /*seed=*/1);
//   taps.Set(0, 1, {.cut = true});   // host 1 hears nothing of host 0, which hears all of host 1
//   taps.Set(0, 1, {});
#ifndef DISTGRAD_TESTS_HOSTS_TAP_SWITCH_H_
#define DISTGRAD_TESTS_HOSTS_TAP_SWITCH_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace distgrad {

struct CableSettings {
  bool cut = false;
  int delay_ms = 0;
  int64_t bytes_per_second = 0;  // 0: no bound. What waits for longer than a second is dropped
  // Of a hundred frames with bytes of a TCP connection so many arrive with two 16-bit words of
  // these swapped, which TCP's checksum does not notice.
  int corrupt_percent = 0;
};

// Thread-safe.
class TapSwitch {
 public:
  // Sees each frame that a host sends, on the switch's thread.
  using Watch = std::function<void(const std::string& frame)>;

  // The descriptors have to last as long as this object; they do not block.
  TapSwitch(std::vector<int> taps, uint64_t seed, Watch watch = nullptr);
  ~TapSwitch();
  TapSwitch(const TapSwitch&) = delete;
  TapSwitch& operator=(const TapSwitch&) = delete;

  void Set(int from, int to, const CableSettings& settings);

  // How many frames it has swapped words of, so far.
  int64_t corrupted() const;

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Frame {
    Time due;
    std::string bytes;
  };
  struct Cable {
    CableSettings settings;
    Time free_at;  // when the last frame has gone through a slow one
    std::deque<Frame> frames;
  };

  void Run();
  // Until no more comes of this host.
  void Receive(size_t from);
  void Enqueue(Cable& cable, std::string bytes, Time now);
  // Sends what is due; when the next one is.
  Time SendDue(Time now);

  const std::vector<int> taps_;
  const Watch watch_;
  int wake_[2];  // a pipe: its end tells the thread to end

  mutable std::mutex mu_;
  std::vector<std::vector<Cable>> cables_;  // [from][to]
  std::vector<std::string> addresses_;      // of each host's interface; "" until it has spoken
  std::mt19937_64 random_;
  int64_t corrupted_ = 0;

  std::thread thread_;  // goes first
};

// Swaps two 16-bit words of what a TCP connection carries in this Ethernet frame; false, and
// nothing is changed, if it carries none that differ. For tests of TapSwitch.
bool SwapWords(std::string& frame, uint64_t random);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_HOSTS_TAP_SWITCH_H_
