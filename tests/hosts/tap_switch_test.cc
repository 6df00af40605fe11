// A switch whose cables are socket pairs: what arrives, what does not, what is changed and when.
#include "tests/hosts/tap_switch.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>

namespace distgrad {
namespace {

// An Ethernet frame between hosts, which carries IPv4 and TCP, and that these bytes of a
// connection.
std::string TcpFrame(int from, int to, const std::string& payload) {
  std::string frame(14 + 20 + 20, '\0');
  frame[5] = static_cast<char>(to + 1);
  frame[11] = static_cast<char>(from + 1);
  frame[12] = 8;
  frame[14] = 0x45;
  const size_t length = 40 + payload.size();
  frame[16] = static_cast<char>(length >> 8);
  frame[17] = static_cast<char>(length & 255);
  frame[23] = 6;
  frame[14 + 20 + 12] = 5 << 4;
  return frame + payload;
}

// The sum of all 16-bit words, which is what a checksum of TCP's is made of.
unsigned Sum(const std::string& bytes) {
  unsigned sum = 0;
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    sum += static_cast<uint8_t>(bytes[i]) * 256u + static_cast<uint8_t>(bytes[i + 1]);
  }
  return sum;
}

TEST(SwapWordsTest, ChangesWhatAConnectionCarriesAndNotItsChecksum) {
  for (uint64_t random = 0; random < 50; ++random) {
    const std::string whole = TcpFrame(0, 1, "some bytes of a connection");
    std::string frame = whole;
    ASSERT_TRUE(SwapWords(frame, random));
    EXPECT_NE(frame, whole);
    EXPECT_EQ(frame.substr(0, 54), whole.substr(0, 54));
    EXPECT_EQ(Sum(frame), Sum(whole));
  }
}

TEST(SwapWordsTest, LeavesAloneWhatHasNothingToSwap) {
  std::string other = TcpFrame(0, 1, "some bytes");
  other[23] = 17;  // UDP
  std::string lies = TcpFrame(0, 1, "");
  lies[16] = 0x7f;                     // longer than it is
  lies[46] = static_cast<char>(0xf0);  // with a header of 60 bytes
  for (std::string frame : {TcpFrame(0, 1, ""), TcpFrame(0, 1, "aaaaaaaa"), TcpFrame(0, 1, "ab"),
                            std::string("short"), other, lies}) {
    const std::string whole = frame;
    EXPECT_FALSE(SwapWords(frame, 3));
    EXPECT_EQ(frame, whole);
  }
}

class TapSwitchTest : public testing::Test {
 protected:
  TapSwitchTest() {
    for (auto& pair : ends_) {
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    }
  }
  ~TapSwitchTest() override {
    for (auto& pair : ends_) {
      close(pair[0]);
      close(pair[1]);
    }
  }
  void Send(int host, const std::string& frame) {
    ASSERT_EQ(write(ends_[host][1], frame.data(), frame.size()),
              static_cast<ssize_t>(frame.size()));
  }
  // Waits for the next frame there.
  std::string Receive(int host) {
    pollfd entry = {ends_[host][1], POLLIN, 0};
    EXPECT_EQ(poll(&entry, 1, 60'000), 1);
    char bytes[2048];
    const ssize_t n = read(ends_[host][1], bytes, sizeof(bytes));
    return std::string(bytes, n > 0 ? static_cast<size_t>(n) : 0);
  }

  int ends_[3][2];
};

TEST_F(TapSwitchTest, CarriesFramesToWhomTheyAreFor) {
  TapSwitch taps({ends_[0][0], ends_[1][0], ends_[2][0]}, 1);
  // Nobody has spoken: to all.
  Send(0, TcpFrame(0, 1, "first"));
  EXPECT_EQ(Receive(1), TcpFrame(0, 1, "first"));
  EXPECT_EQ(Receive(2), TcpFrame(0, 1, "first"));
  Send(1, TcpFrame(1, 0, "second"));
  EXPECT_EQ(Receive(0), TcpFrame(1, 0, "second"));
  // Host 2 hears nothing of this, and then something else.
  Send(0, TcpFrame(0, 1, "third"));
  EXPECT_EQ(Receive(1), TcpFrame(0, 1, "third"));
  Send(0, TcpFrame(0, 2, "fourth"));
  EXPECT_EQ(Receive(2), TcpFrame(0, 2, "fourth"));
}

TEST_F(TapSwitchTest, IsCutInOneDirection) {
  TapSwitch taps({ends_[0][0], ends_[1][0], ends_[2][0]}, 1);
  taps.Set(0, 1, {.cut = true});
  Send(0, TcpFrame(0, 1, "lost"));
  // Nobody has spoken: it goes to all, and to host 1 first.
  EXPECT_EQ(Receive(2), TcpFrame(0, 1, "lost"));
  Send(1, TcpFrame(1, 0, "there"));
  EXPECT_EQ(Receive(0), TcpFrame(1, 0, "there"));
  taps.Set(0, 1, {});
  Send(0, TcpFrame(0, 1, "after"));
  EXPECT_EQ(Receive(1), TcpFrame(0, 1, "after"));
}

TEST_F(TapSwitchTest, IsSlow) {
  TapSwitch taps({ends_[0][0], ends_[1][0]}, 1);
  const std::string frame = TcpFrame(0, 1, std::string(946, 'x'));  // 1,000 bytes
  taps.Set(0, 1, {.delay_ms = 30, .bytes_per_second = 20'000});
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) Send(0, frame);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Receive(1), frame);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(3 * 50 + 30));
}

TEST_F(TapSwitchTest, ChangesBytes) {
  TapSwitch taps({ends_[0][0], ends_[1][0]}, 1);
  taps.Set(0, 1, {.corrupt_percent = 100});
  const std::string frame = TcpFrame(0, 1, "some bytes");
  Send(0, frame);
  const std::string arrived = Receive(1);
  EXPECT_EQ(arrived.size(), frame.size());
  EXPECT_NE(arrived, frame);
  EXPECT_EQ(taps.corrupted(), 1);
}

}  // namespace
}  // namespace distgrad
