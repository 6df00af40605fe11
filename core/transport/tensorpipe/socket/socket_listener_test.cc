// A listener without memory: it ends all the same, and goes on with those that wait.
#include "core/transport/tensorpipe/socket/socket_listener.h"

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "core/base/future.h"
#include "core/net/endpoint.h"
#include "core/net/loop.h"
#include "core/transport/tensorpipe/socket/socket_connection.h"
#include "core/transport/tensorpipe/socket/socket_options.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

TEST(SocketListenerTest, OneThatFindsNoMemoryFromTheStartKeepsNoLoopFromItsEnd) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    FailAllocation(nth);
    std::shared_ptr<SocketListener> listener;
    try {
      listener = *SocketListener::Listen(loop, "127.0.0.1", SocketOptions());
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the loop's end is looked at
    }
    failed = FailAllocation(-1);
    if (listener != nullptr) listener->Close();
    loop->Close();
    loop->Join();
  }
}

// TensorPipe waits for the end of what it has asked for, and the loop for the listener's.
TEST(SocketListenerTest, WithoutMemoryItEndsAllTheSame) {
  for (const bool throws : {false, true}) {
    for (int count = 1; count <= 3; ++count) {
      bool failed = true;
      for (int nth = 0; failed; ++nth) {
        SCOPED_TRACE(testing::Message() << throws << ": " << count << " allocations from " << nth);
        const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
        const auto listener = *SocketListener::Listen(loop, "127.0.0.1", SocketOptions());
        int ended = 0;
        for (int i = 0; i < 2; ++i) {
          listener->Accept([&](const tensorpipe::Error& error, auto) {
            EXPECT_TRUE(error);
            ++ended;
            if (throws) throw std::bad_alloc();
          });
        }
        FailAllocation(nth, count);
        listener->Close();
        failed = FailAllocation(-1);
        EXPECT_EQ(ended, 2);
        loop->Close();
        loop->Join();
      }
    }
  }
}

// TensorPipe does not ask again before it has been answered, with a connection or an error.
TEST(SocketListenerTest, WithoutMemoryItTakesTheNextQuestion) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    const auto listener = *SocketListener::Listen(loop, "127.0.0.1", SocketOptions());
    int ended = 0;
    for (int i = 0; i < 100; ++i) {  // more than a block of a queue holds
      if (i == 50) FailAllocation(nth);
      listener->Accept([&](const tensorpipe::Error&, auto) { ++ended; });
    }
    failed = FailAllocation(-1);
    listener->Close();
    EXPECT_EQ(ended, 100);
    FailAllocation(nth);
    listener->Accept([&](const tensorpipe::Error&, auto) { ++ended; });
    failed = FailAllocation(-1) || failed;
    EXPECT_EQ(ended, 101);
    loop->Close();
    loop->Join();
  }
}

// The loop says once that there are connections.
void TakeClientsWithoutMemory(int count) {
  const std::shared_ptr<Loop> clients = *Loop::Start("test-clients");
  bool failed = true;
  for (int nth = 0; failed && !testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE(testing::Message() << count << " allocations from " << nth);
    const SocketOptions options;
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    const auto listener = *SocketListener::Listen(loop, "127.0.0.1", options);
    // Each of the clients is taken in, or hears that it is not.
    std::atomic<int> taken{0};
    for (int i = 0; i < 3; ++i) {
      listener->Accept([&](const tensorpipe::Error& error, auto connection) {
        if (error) return;
        ++taken;
        connection->Write("", nullptr, 0, [](const tensorpipe::Error&) {});
      });
    }
    absl::Notification stands, goes;
    loop->Run([&, nth] {
      stands.Notify();
      goes.WaitForNotification();
      FailAllocation(nth, count);
    });
    stands.WaitForNotification();
    std::vector<std::shared_ptr<SocketConnection>> connections;
    std::vector<Future<bool>> heard;
    for (int i = 0; i < 3; ++i) {
      Promise<bool> promise;
      heard.push_back(promise.future());
      connections.push_back(
          SocketConnection::Connect(clients, *ParseEndpoint(listener->address()), options));
      const auto kept = std::make_shared<Promise<bool>>(std::move(promise));
      connections.back()->Read(
          nullptr, 0,
          [kept](const tensorpipe::Error& error, const void*, size_t) { kept->Set(!error); });
    }
    goes.Notify();
    int is_in = 0;
    for (const Future<bool>& one : heard) is_in += *one.Wait();
    EXPECT_GE(is_in, 3 - count);
    absl::Notification told;
    loop->Run([&] {
      failed = FailAllocation(-1);
      told.Notify();
    });
    told.WaitForNotification();
    for (const auto& connection : connections) connection->Close();
    listener->Close();
    loop->Close();
    loop->Join();
  }
  clients->Close();
  clients->Join();
}

TEST(SocketListenerTest, OneThatFindsNoMemoryKeepsNoOtherOut) { TakeClientsWithoutMemory(1); }

// Nor does what is logged of that find any.
TEST(SocketListenerTest, SomeThatFindNoMemoryKeepNoOtherOut) {
  for (const int count : {2, 3, 4, 8}) TakeClientsWithoutMemory(count);
}

// TensorPipe's callbacks let go of what they have as they are called.
TEST(SocketListenerTest, AQuestionWhoseAnswerFindsNoMemoryIsStillWhole) {
  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  const auto listener = *SocketListener::Listen(loop, "127.0.0.1", SocketOptions());
  int calls = 0;
  Promise<bool> promise;
  const Future<bool> whole = promise.future();
  listener->Accept([&, is_whole = true](const tensorpipe::Error& error, auto) mutable {
    const bool was_whole = std::exchange(is_whole, false);
    if (error) return;
    if (++calls == 1) throw std::bad_alloc();
    promise.Set(was_whole);
  });
  std::vector<std::shared_ptr<SocketConnection>> connections;
  for (int i = 0; i < 2; ++i) {
    connections.push_back(SocketConnection::Connect(loop, *ParseEndpoint(listener->address()), {}));
  }
  EXPECT_TRUE(*whole.Wait());
  for (const auto& connection : connections) connection->Close();
  listener->Close();
  loop->Close();
  loop->Join();
}

// Its timers fire on the loop's thread, which ends the process if that throws.
TEST(SocketListenerTest, WithoutMemoryAClientWhoSaysNothingIsClosed) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    SocketOptions options;
    options.handshake_timeout = absl::Milliseconds(1);
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    const auto listener = *SocketListener::Listen(loop, "127.0.0.1", options);
    absl::Notification lacks;  // before anybody comes
    loop->Run([&] {
      FailAllocation(nth);
      lacks.Notify();
    });
    lacks.WaitForNotification();
    const Endpoint endpoint = *ParseEndpoint(listener->address());
    const Fd client = *NewSocketFor(endpoint, /*is_unix=*/false);
    StartConnecting(client, endpoint, /*is_unix=*/false);
    pollfd events = {.fd = client.get(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&events, 1, /*timeout=*/-1), 1);
    char byte;
    EXPECT_LE(recv(client.get(), &byte, 1, 0), 0);
    absl::Notification told;
    loop->Run([&] {
      failed = FailAllocation(-1);
      told.Notify();
    });
    told.WaitForNotification();
    listener->Close();
    loop->Close();
    loop->Join();
  }
}

}  // namespace
}  // namespace distgrad
