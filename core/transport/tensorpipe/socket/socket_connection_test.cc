// Turns of the loop between a connection with much to read and the others.
#include "core/transport/tensorpipe/socket/socket_connection.h"

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/base/future.h"
#include "core/net/endpoint.h"
#include "core/net/loop.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

// However many frames have come, and however short they are: others have their turn.
TEST(SocketConnectionTest, ManySmallFramesLeaveTurnsToOthers) {
  constexpr int kFrames = 10'000;
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const Fd far(ends[1]);
  // All of them are there at once.
  std::string frames;
  for (int i = 0; i < kFrames; ++i) {
    const uint64_t size = 1;
    frames.append(reinterpret_cast<const char*>(&size), sizeof(size));
    frames += static_cast<char>(i);
  }
  ASSERT_EQ(send(far.get(), frames.data(), frames.size(), 0), static_cast<ssize_t>(frames.size()));

  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  const auto connection = SocketConnection::Adopt(loop, Fd(ends[0]));
  int read = 0, read_in_first_turn = 0, wrong = 0;  // on the loop's thread
  Promise<Unit> promise;
  const Future<Unit> all_read = promise.future();
  loop->Run([&] {
    for (int i = 0; i < kFrames; ++i) {
      connection->Read(
          nullptr, 0, [&, i](const tensorpipe::Error& error, const void* data, size_t size) {
            if (error || size != 1 || *static_cast<const char*>(data) != static_cast<char>(i)) {
              ++wrong;
            }
            if (++read == 1) loop->Run([&] { read_in_first_turn = read; });
            if (read == kFrames) promise.Set(Unit());
          });
    }
  });
  all_read.Wait();
  connection->Close();
  loop->Close();
  loop->Join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(read_in_first_turn, 0);
  EXPECT_LT(read_in_first_turn, 2'000);
}

}  // namespace
}  // namespace distgrad
