#include "core/rpc/tensorpipe/cma_channel.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/future.h"
#include "core/rpc/tensorpipe/socket/loop.h"
#include "core/rpc/tensorpipe/socket/socket_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tensorpipe/channel/channel.h"
#include "tensorpipe/common/cpu_buffer.h"
#include "tensorpipe/transport/connection.h"
#include "tensorpipe/transport/listener.h"

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

// A channel from this process to itself.
class CmaChannelTest : public testing::Test {
 protected:
  void SetUp() override {
    context_ = NewCmaChannel();
    if (context_ == nullptr) GTEST_SKIP() << "no process may read another's memory here";
    transport_ = *NewSocketTransport(*Loop::Start("test-sockets"), {});
    listener_ = transport_->listen("127.0.0.1");
    std::vector<std::shared_ptr<Connection>> near, far;
    for (size_t i = 0; i < context_->numConnectionsNeeded(); ++i) {
      near.push_back(transport_->connect(listener_->addr()));
      Promise<std::shared_ptr<Connection>> accepted;
      const auto connection = accepted.future();
      listener_->accept([&](const Error& error, std::shared_ptr<Connection> connection) {
        ASSERT_FALSE(error) << error.what();
        accepted.Set(std::move(connection));
      });
      far.push_back(*connection.Wait());
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
  std::string ReceiveFrom(int64_t process, uint64_t address, size_t size) {
    std::vector<uint8_t> bytes(size);
    const auto received = Receive(*far_channel_, bytes);
    const uint64_t offer[] = {static_cast<uint64_t>(process), address};
    const auto sent = Start([&](auto done) { near_[0]->write(offer, sizeof(offer), done); });
    sent.Wait();
    return *received.Wait();
  }

  std::shared_ptr<tensorpipe::channel::Context> context_;
  std::shared_ptr<tensorpipe::transport::Context> transport_;
  std::shared_ptr<tensorpipe::transport::Listener> listener_;
  std::vector<std::shared_ptr<Connection>> near_;
  std::shared_ptr<Channel> near_channel_, far_channel_;

 private:
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
  EXPECT_THAT(
      ReceiveFrom(getpid(), 8, 100),
      StartsWith(absl::StrCat("copying 100 bytes out of process ", getpid(), ": Bad address")));
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
  EXPECT_THAT(ReceiveFrom(getpid(), reinterpret_cast<uint64_t>(memory), kSize),
              HasSubstr(": Bad address"));
  munmap(memory, kSize);
}

TEST_F(CmaChannelTest, AProcessThatIsGone) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_THAT(
      ReceiveFrom(child, 8, 100),
      StartsWith(absl::StrCat("copying 100 bytes out of process ", child, ": No such process")));
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
    if (*done[2 * i + 1].Wait() == "") EXPECT_EQ(buffers[2 * i], buffers[2 * i + 1]);
  }
  std::vector<uint8_t> bytes(10);
  EXPECT_NE(*Receive(*near_channel_, bytes).Wait(), "");
}

}  // namespace
}  // namespace distgrad
