// Sends and arrivals over TensorPipe whose allocations fail: its transport ends all the same, and
// the process ends where the transport would stand still.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "core/base/event_loop.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "core/transport/transport_testing.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// A connection that stands.
struct Pair {
  Pair() {
    const std::string address =
        server->Listen([this](std::shared_ptr<Connection>) { return at_server; }).value();
    connection = client->Connect(address, at_client).value();
    connection->Send(BytesPacket("first"), nullptr);
    at_server->AwaitPackets(1);
    // What this thread hands in would be left to the client's, if that was still in TensorPipe.
    absl::Notification is_out;
    client->loop()->Run([&] { is_out.Notify(); });
    is_out.WaitForNotification();
  }

  const std::shared_ptr<RecordingReceiver> at_server = std::make_shared<RecordingReceiver>();
  const std::shared_ptr<RecordingReceiver> at_client = std::make_shared<RecordingReceiver>();
  const std::unique_ptr<Transport> server = NewTensorPipeTransport({}).value();
  const std::unique_ptr<Transport> client = NewTensorPipeTransport({}).value();
  std::shared_ptr<Connection> connection;
};

// What a send allocates before TensorPipe has it, of a packet with a small segment.
constexpr int kBeforeTensorPipe = 3;

// The end of a transport waits for what counts as on its way.
TEST(TensorPipeNoMemoryTest, ASendThatFindsNoneIsNotWaitedFor) {
  Pair pair;
  for (int nth = 0; nth < kBeforeTensorPipe; ++nth) {
    SCOPED_TRACE(nth);
    Packet packet = PatternPacket(1, "lost", {100});
    FailAllocation(nth);
    EXPECT_THROW(pair.connection->Send(std::move(packet), nullptr), std::bad_alloc);
    EXPECT_TRUE(FailAllocation(-1));
  }
  pair.connection->Send(BytesPacket("second"), nullptr);
  pair.at_server->AwaitPackets(2);
  EXPECT_EQ(pair.at_server->packet(1).bytes, "second");
}

// In the middle of it TensorPipe would take this thread for the one that runs what is handed in.
TEST(TensorPipeNoMemoryDeathTest, WhereTensorPipeFindsNoneTheProcessEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Pair pair;
  for (const int nth : {0, 1, 2}) {
    Packet packet = PatternPacket(1, "x", {100});
    EXPECT_DEATH(
        {
          FailAllocation(kBeforeTensorPipe + nth);
          pair.connection->Send(std::move(packet), nullptr);
        },
        "");
  }
}

// Of what is handed on by a thread that is in TensorPipe nothing is lost.
void CloseHere(int nth) {
  alarm(60);
  Pair pair;
  FailAllocation(nth);
  pair.connection->Close();
  FailAllocation(-1);
  pair.at_client->AwaitClosed().IgnoreError();
  _exit(0);
}

bool WentOnOrEnded(int status) {
  return (WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
         (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

// What arrives is delivered, or ends its connection, or the process.
void Arrive(int nth) {
  alarm(60);  // only a transport that stands still takes so long
  Pair pair;
  absl::Notification stands;
  pair.server->loop()->Run([&, nth] {
    FailAllocation(nth);
    stands.Notify();
  });
  stands.WaitForNotification();
  pair.connection->Send(PatternPacket(1, "x", {100}), nullptr);
  while (pair.at_server->count() < 2 && !pair.at_server->closed()) std::this_thread::yield();
  _exit(0);
}

TEST(TensorPipeNoMemoryDeathTest, ACloseIsToldOrEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (int nth = 0; nth < 30; ++nth) {
    SCOPED_TRACE(nth);
    EXPECT_EXIT(CloseHere(nth), WentOnOrEnded, "");
  }
}

TEST(TensorPipeNoMemoryDeathTest, AnArrivalDoesNotLeaveTheTransportStanding) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (int nth = 0; nth < 30; ++nth) {
    SCOPED_TRACE(nth);
    EXPECT_EXIT(Arrive(nth), WentOnOrEnded, "");
  }
}

}  // namespace
}  // namespace distgrad
