// Copies out of another process, and memory or processes that are gone by then.
#include "core/transport/tensorpipe/cma_channel.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/event_loop.h"
#include "core/base/future.h"
#include "core/net/endpoint.h"
#include "core/net/loop.h"
#include "core/transport/tensorpipe/socket/peer_process.h"
#include "core/transport/tensorpipe/socket/socket_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tensorpipe/channel/channel.h"
#include "tensorpipe/common/cpu_buffer.h"
#include "tensorpipe/transport/connection.h"
#include "tensorpipe/transport/listener.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

using tensorpipe::CpuBuffer;
using tensorpipe::Error;
using tensorpipe::channel::Channel;
using tensorpipe::channel::Endpoint;
using tensorpipe::transport::Connection;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kMiB = 1 << 20;

// A connection, with the word of another kernel on who is at its other end.
class Disguised final : public Connection, public HasPeerProcess {
 public:
  Disguised(std::shared_ptr<Connection> connection, pid_t process)
      : connection_(std::move(connection)), process_(process) {}

  void read(read_callback_fn fn) override { connection_->read(std::move(fn)); }
  void read(void* data, size_t size, read_callback_fn fn) override {
    connection_->read(data, size, std::move(fn));
  }
  void read(tensorpipe::AbstractNopHolder& object, read_nop_callback_fn fn) override {
    connection_->read(object, std::move(fn));
  }
  void write(const void* data, size_t size, write_callback_fn fn) override {
    connection_->write(data, size, std::move(fn));
  }
  void write(const tensorpipe::AbstractNopHolder& object, write_callback_fn fn) override {
    connection_->write(object, std::move(fn));
  }
  void setId(std::string id) override { connection_->setId(std::move(id)); }
  void close() override { connection_->close(); }
  pid_t PeerProcess() const override { return process_; }

 private:
  const std::shared_ptr<Connection> connection_;
  const pid_t process_;
};

// Whether a process may read the memory of another one that lets it. Yama asks for that where its
// scope is 1, and TensorPipe gives it; a child may be read there all the same.
bool MayReadOthers() {
  std::string scope;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope > "1") return false;
  int held[2];
  if (pipe(held) != 0) return false;
  static int word = 0;
  const pid_t other = fork();
  if (other == 0) {
    close(held[1]);
    char end;
    _exit(read(held[0], &end, 1) == 0 ? 0 : 1);  // until this process has read
  }
  close(held[0]);
  int copy = 0;
  const iovec here{&copy, sizeof(copy)}, there{&word, sizeof(word)};
  const bool may = other > 0 && process_vm_readv(other, &here, 1, &there, 1, 0) == sizeof(copy);
  close(held[1]);
  if (other > 0) waitpid(other, nullptr, 0);
  return may;
}

// All other tests of it are skipped where there is none.
TEST(CmaChannelIsThere, WhereAProcessMayReadAnothersMemory) {
  if (!MayReadOthers() || ThisPlace().empty()) {
    GTEST_SKIP() << "no process may read another's memory here";
  }
  EXPECT_NE(NewCmaChannel(), nullptr);
}

// A channel from this process to itself.
class CmaChannelTest : public testing::Test {
 protected:
  void SetUp() override {
    context_ = NewCmaChannel();
    if (context_ == nullptr) GTEST_SKIP() << "no process may read another's memory here";
    loop_ = *Loop::Start("test-sockets");
    transport_ = *NewSocketTransport(loop_, {});
    listener_ = transport_->listen("127.0.0.1");
    Connect(listener_->addr());
  }
  // `process`: what the far end's kernel says of the near one; 0: the truth.
  void Connect(const std::string& address, pid_t process = 0) {
    std::vector<std::shared_ptr<Connection>> near, far;
    for (size_t i = 0; i < context_->numConnectionsNeeded(); ++i) {
      near.push_back(transport_->connect(address));
      Promise<std::shared_ptr<Connection>> accepted;
      const auto connection = accepted.future();
      listener_->accept([&](const Error& error, std::shared_ptr<Connection> connection) {
        ASSERT_FALSE(error) << error.what();
        accepted.Set(std::move(connection));
      });
      far.push_back(*connection.Wait());
      if (process != 0) far.back() = std::make_shared<Disguised>(std::move(far.back()), process);
    }
    near_ = near;
    near_channel_ = context_->createChannel(std::move(near), Endpoint::kConnect);
    far_channel_ = context_->createChannel(std::move(far), Endpoint::kListen);
  }
  void TearDown() override {
    if (context_ == nullptr) return;
    context_->close();
    transport_->close();
    transport_->join();
    context_->join();
  }

  // What came of it: "" or an error.
  static Future<std::string> Send(Channel& channel, std::vector<uint8_t>& bytes) {
    return Start([&](auto done) {
      channel.send(CpuBuffer{.ptr = bytes.data()}, bytes.size(), std::move(done));
    });
  }
  static Future<std::string> Receive(Channel& channel, std::vector<uint8_t>& bytes) {
    return Start([&](auto done) {
      channel.recv(CpuBuffer{.ptr = bytes.data()}, bytes.size(), std::move(done));
    });
  }
  // Has the far end receive what lies there, in the words of the near one.
  std::string ReceiveFrom(uint64_t address, size_t size) {
    const uint64_t lease = 7;
    std::vector<uint8_t> bytes(size);
    return ReceiveOffer({address, reinterpret_cast<uint64_t>(&lease), lease}, bytes);
  }
  std::string ReceiveOffer(const std::vector<uint64_t>& offer, std::vector<uint8_t>& bytes) {
    const auto received = Receive(*far_channel_, bytes);
    const auto sent = Start(
        [&](auto done) { near_[0]->write(offer.data(), offer.size() * sizeof(uint64_t), done); });
    sent.Wait();
    return *received.Wait();
  }

  std::shared_ptr<tensorpipe::channel::Context> context_;
  std::shared_ptr<Loop> loop_;
  std::shared_ptr<tensorpipe::transport::Context> transport_;
  std::shared_ptr<tensorpipe::transport::Listener> listener_;
  std::vector<std::shared_ptr<Connection>> near_;
  std::shared_ptr<Channel> near_channel_, far_channel_;

  template <typename Begin>
  static Future<std::string> Start(Begin begin) {
    const auto promise = std::make_shared<Promise<std::string>>();
    begin([promise](const Error& error) {
      EXPECT_TRUE(promise->Set(error ? error.what() : "")) << "told twice";
    });
    return promise->future();
  }
};

std::vector<uint8_t> Bytes(size_t size, uint8_t first) {
  std::vector<uint8_t> bytes(size);
  std::iota(bytes.begin(), bytes.end(), first);
  return bytes;
}

TEST_F(CmaChannelTest, BothWaysInOrder) {
  // In one go, in pieces, and with a rest.
  const size_t sizes[] = {0, 1, 300'000, 2 * kMiB, 2 * kMiB + 1, 17 * kMiB - 3, 5, 8 * kMiB};
  std::vector<std::vector<uint8_t>> sent, received;
  for (size_t size : sizes) {
    for (int way = 0; way < 2; ++way) {
      sent.push_back(Bytes(size, sent.size()));
      received.emplace_back(size);
    }
  }
  std::vector<Future<std::string>> done;
  for (size_t i = 0; i < sent.size(); ++i) {
    done.push_back(Send(i % 2 == 0 ? *near_channel_ : *far_channel_, sent[i]));
    done.push_back(Receive(i % 2 == 0 ? *far_channel_ : *near_channel_, received[i]));
  }
  for (const auto& d : done) EXPECT_EQ(*d.Wait(), "");
  for (size_t i = 0; i < sent.size(); ++i) EXPECT_EQ(sent[i], received[i]) << "number " << i;
}

TEST_F(CmaChannelTest, AnAddressWhereThereIsNothing) {
  EXPECT_THAT(ReceiveFrom(8, 100), StartsWith(absl::StrCat("copying 100 bytes out of process ",
                                                           getpid(), ": Bad address")));
  // It is over, at both ends.
  std::vector<uint8_t> bytes(10);
  EXPECT_NE(*Receive(*far_channel_, bytes).Wait(), "");
  EXPECT_NE(*Send(*near_channel_, bytes).Wait(), "");
}

TEST_F(CmaChannelTest, MemoryThatEndsInTheMiddle) {
  constexpr size_t kSize = 8 * kMiB;
  void* const memory =
      mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(mprotect(static_cast<char*>(memory) + kSize / 2, kSize / 2, PROT_NONE), 0);
  EXPECT_THAT(ReceiveFrom(reinterpret_cast<uint64_t>(memory), kSize), HasSubstr(": Bad address"));
  munmap(memory, kSize);
}

TEST_F(CmaChannelTest, AProcessThatIsGone) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  Connect(listener_->addr(), child);
  EXPECT_THAT(ReceiveFrom(8, 100), StartsWith(absl::StrCat("copying 100 bytes out of process ",
                                                           child, ": No such process")));
}

TEST_F(CmaChannelTest, EveryoneIsToldWhenItCloses) {
  std::vector<std::vector<uint8_t>> buffers;
  for (int i = 0; i < 40; ++i) buffers.push_back(Bytes(3 * kMiB, i));
  std::vector<Future<std::string>> done;
  for (int i = 0; i < 20; ++i) {
    done.push_back(Send(*near_channel_, buffers[2 * i]));
    done.push_back(Receive(*far_channel_, buffers[2 * i + 1]));
  }
  // Copies run, or have run, or will never.
  far_channel_ = nullptr;
  near_channel_->close();
  for (int i = 0; i < 20; ++i) {
    done[2 * i].Wait();
    if (*done[2 * i + 1].Wait() == "") {
      EXPECT_EQ(buffers[2 * i], buffers[2 * i + 1]);
    }
  }
  std::vector<uint8_t> bytes(10);
  EXPECT_NE(*Receive(*near_channel_, bytes).Wait(), "");
}

// A receiver stands still, while its sender is told of the failure and reuses its memory. What it
// finds there when it goes on is nobody's message.
TEST_F(CmaChannelTest, MemoryThatWasTakenBack) {
  for (const size_t size : {100'000 * sizeof(char), 5 * kMiB}) {
    if (near_channel_ == nullptr) Connect(listener_->addr());
    std::vector<uint8_t> bytes = Bytes(size, 1), received(size);
    const auto sent = Send(*near_channel_, bytes);
    near_channel_->close();
    EXPECT_NE(*sent.Wait(), "");
    std::fill(bytes.begin(), bytes.end(), 0xee);
    EXPECT_NE(*Receive(*far_channel_, received).Wait(), "");
    near_channel_ = far_channel_ = nullptr;
  }
}

// A byte that another thread may be copying to at this moment.
ABSL_ATTRIBUTE_NO_SANITIZE_THREAD uint8_t Peek(const uint8_t* byte) {
  return *static_cast<const volatile uint8_t*>(byte);
}

// The same, but the receiver copies at that moment.
TEST_F(CmaChannelTest, MemoryThatIsTakenBackDuringTheCopy) {
  constexpr size_t kSize = 24 * kMiB;
  const std::vector<uint8_t> sent = Bytes(kSize, 3);
  for (int i = 0; i < 20; ++i) {
    if (i > 0) Connect(listener_->addr());
    std::vector<uint8_t> bytes = sent, received(kSize);
    const auto gone = Start([&](auto done) {
      near_channel_->send(CpuBuffer{.ptr = bytes.data()}, kSize, [&, done](const Error& error) {
        // The memory is the sender's again.
        if (error) std::memset(bytes.data(), 0xee, kSize);
        done(error);
      });
    });
    const auto arrived = Receive(*far_channel_, received);
    // Until it copies: then the last byte of a piece, or the first, is there.
    while (Peek(received.data()) != sent[0] && !arrived.Done()) std::this_thread::yield();
    near_channel_->close();
    gone.Wait();
    if (*arrived.Wait() == "") {
      EXPECT_TRUE(received == sent) << "foreign bytes in round " << i;
    }
    near_channel_ = far_channel_ = nullptr;
  }
}

// A lease is the word of the memory's owner, not a number that may stand there by chance.
TEST_F(CmaChannelTest, AnOfferWithoutALease) {
  const std::vector<uint8_t> bytes = Bytes(100, 1);
  std::vector<uint8_t> received(100);
  const uint64_t none = 0;
  EXPECT_THAT(ReceiveOffer({reinterpret_cast<uint64_t>(bytes.data()),
                            reinterpret_cast<uint64_t>(&none), none},
                           received),
              HasSubstr("has taken its memory back"));
}

// Nobody can have another process's memory read by naming it.
TEST_F(CmaChannelTest, AnOfferOfSomebodyElsesMemory) {
  const std::vector<uint8_t> nothing(100, 0), own(100, 1), secret(100, 0xcc);
  std::vector<uint8_t> memory = own;
  const uint64_t lease = 7;
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    std::memset(memory.data(), 0xcc, memory.size());  // its own copy, at the same address
    [[maybe_unused]] const ssize_t n = write(pipes[1], "x", 1);
    pause();
    _exit(0);
  }
  char x;
  ASSERT_EQ(read(pipes[0], &x, 1), 1);
  const auto process = static_cast<uint64_t>(child);
  const std::vector<uint64_t> offer = {reinterpret_cast<uint64_t>(memory.data()),
                                       reinterpret_cast<uint64_t>(&lease), lease};
  // Where the kernel names the child that is what is read: it is there to be had.
  std::vector<uint8_t> received = nothing;
  Connect(listener_->addr(), child);
  EXPECT_EQ(ReceiveOffer(offer, received), "");
  EXPECT_EQ(received, secret);
  // The same words of one whom the kernel knows as this process are about this process's memory.
  received = nothing;
  Connect(listener_->addr());
  EXPECT_EQ(ReceiveOffer(offer, received), "");
  EXPECT_EQ(received, own);
  // And there is no place in them for another process.
  for (const bool ahead : {true, false}) {
    std::vector<uint64_t> named = offer;
    named.insert(ahead ? named.begin() : named.end(), process);
    received = nothing;
    Connect(listener_->addr());
    EXPECT_THAT(ReceiveOffer(named, received), HasSubstr("a frame of 32 bytes where 24"));
    EXPECT_EQ(received, nothing);
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(pipes[0]);
  close(pipes[1]);
}

// Where the kernel does not say who is at the other end, its memory is not read.
TEST_F(CmaChannelTest, OnlyOverUnixDomainSockets) {
  distgrad::Endpoint endpoint = *ParseEndpoint(listener_->addr());
  endpoint.place = "";
  Connect(FormatEndpoint(endpoint));
  std::vector<uint8_t> sent = Bytes(100, 1), received(100);
  const auto gone = Send(*near_channel_, sent);
  EXPECT_THAT(*Receive(*far_channel_, received).Wait(), HasSubstr("Unix-domain socket"));
  EXPECT_NE(*gone.Wait(), "");
  EXPECT_NE(received, sent);
}

// The receiver alone has no memory: where it copies itself, and where others are to copy; an error,
// too, is heard at both ends.
TEST_F(CmaChannelTest, WithoutMemoryBothEndsHearOfIt) {
  for (const bool has_lease : {true, false}) {
    for (const size_t size : {size_t{100}, 5 * kMiB}) {
      bool failed = true;
      for (int nth = 0; failed; ++nth) {
        SCOPED_TRACE(absl::StrCat(has_lease, ", ", size, " bytes, allocation ", nth));
        near_channel_ = far_channel_ = nullptr;
        Connect(listener_->addr());
        // Then both connections stand, also at the end that opened them, which needed memory for
        // it.
        std::vector<uint8_t> first = Bytes(1, 1), came(1);
        const auto first_sent = Send(*near_channel_, first);
        ASSERT_EQ(*Receive(*far_channel_, came).Wait(), "");
        ASSERT_EQ(*first_sent.Wait(), "");
        const std::vector<uint8_t> bytes = Bytes(size, 1);
        std::vector<uint8_t> received(size);
        const uint64_t lease = has_lease ? 7 : 0;
        const uint64_t offer[] = {reinterpret_cast<uint64_t>(bytes.data()),
                                  reinterpret_cast<uint64_t>(&lease), 7};
        uint8_t taken = 0;
        bool was_taken = false, arrived = false;
        absl::Notification stands, told_near, told_far;
        // The callbacks need no memory themselves.
        near_[1]->read(&taken, 1, [&](const Error& error, const void*, size_t) {
          was_taken = !error;
          told_near.Notify();
        });
        const auto on_received = [&](const Error& error) {
          arrived = !error;
          told_far.Notify();
        };
        far_channel_->recv(CpuBuffer{.ptr = received.data()}, size, std::ref(on_received));
        loop_->Run([&, nth] {
          FailAllocation(nth);
          stands.Notify();
        });
        stands.WaitForNotification();
        near_[0]->write(offer, sizeof(offer), [](const Error&) {});
        ASSERT_TRUE(told_far.WaitForNotificationWithTimeout(absl::Seconds(30)));
        ASSERT_TRUE(told_near.WaitForNotificationWithTimeout(absl::Seconds(30)));
        absl::Notification over;
        loop_->Run([&] {
          failed = FailAllocation(-1);
          over.Notify();
        });
        over.WaitForNotification();
        EXPECT_EQ(was_taken, arrived);
        if (arrived) {
          EXPECT_TRUE(has_lease);
          EXPECT_TRUE(received == bytes);
        }
      }
    }
  }
}

// One message may have thousands of tensors. The thread of the sockets copies few of them before it
// serves others.
TEST_F(CmaChannelTest, ManyTensorsAtOnce) {
  constexpr int kTensors = 64;
  std::vector<std::vector<uint8_t>> sent, received;
  std::vector<Future<std::string>> gone, arrived;
  for (int i = 0; i < kTensors; ++i) {
    sent.push_back(Bytes(kMiB, i));
    received.emplace_back(kMiB);
  }
  for (auto& bytes : sent) gone.push_back(Send(*near_channel_, bytes));
  // The offers are there, so all of them come to be known in one turn of the loop.
  std::atomic<int> by_loop{0};
  Promise<Unit> asked;
  const Future<Unit> all_asked = asked.future();
  loop_->Run([&] {
    for (auto& bytes : received) {
      arrived.push_back(Start([&](auto done) {
        far_channel_->recv(CpuBuffer{.ptr = bytes.data()}, bytes.size(),
                           [&, done](const Error& error) {
                             if (EventLoop::Current() != nullptr) ++by_loop;
                             done(error);
                           });
      }));
    }
    asked.Set(Unit());
  });
  all_asked.Wait();
  for (int i = 0; i < kTensors; ++i) {
    EXPECT_EQ(*gone[i].Wait(), "");
    EXPECT_EQ(*arrived[i].Wait(), "");
    EXPECT_TRUE(sent[i] == received[i]) << "number " << i;
  }
  EXPECT_LE(by_loop, 2);
}

}  // namespace
}  // namespace distgrad
