// What ends a connection whose stream somebody has changed so that its reader waits for more than
// will come.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/net/endpoint.h"
#include "core/rpc/agent.h"
#include "core/rpc/agent_testing.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "gtest/gtest.h"
#include "tests/testing/tcp_proxy.h"

namespace distgrad {
namespace {

constexpr absl::string_view kScheme = "socket://";

std::unique_ptr<Transport> NewTransport() {
  TensorPipeOptions options;
  options.cluster_key = "a key of thirty-two bytes, about";
  options.unix_sockets = false;
  return NewTensorPipeTransport(options).value();
}

// A record of a request says that it is longer than all that comes until the heartbeat's limit: so
// it is that which ends the connection, and with it the call.
TEST(ChangedStreamTest, TheHeartbeatEndsWhatAChangedLengthKeepsWaiting) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  AgentOptions options;
  options.heartbeat_limit = absl::Seconds(2);
  TestAgent caller(clock.get(), NewTransport(), 0, /*incarnation=*/1, options);
  TestAgent served(clock.get(), NewTransport(), 1, /*incarnation=*/1, options);

  Endpoint endpoint =
      ParseEndpoint(absl::string_view(served.info.address).substr(kScheme.size())).value();
  const size_t colon = endpoint.tcp.rfind(':');
  std::atomic<bool> change{false}, changed{false};
  TcpProxy proxy(std::stoi(endpoint.tcp.substr(colon + 1)),
                 [&](TcpProxy::Way way, std::string bytes) {
                   constexpr uint8_t kMore = 0x10;  // 4096 bytes
                   // It begins with a record, for before it all has been answered.
                   if (way == TcpProxy::Way::kToServer && change.exchange(false)) {
                     EXPECT_TRUE(absl::StartsWith(bytes, "\x17\x03\x03")) << "data within TLS";
                     bytes[3] ^= kMore;
                     changed = true;
                   }
                   return bytes;
                 });
  endpoint.tcp = absl::StrCat(endpoint.tcp.substr(0, colon), ":", proxy.port());
  WorkerInfo through_proxy = served.info;
  through_proxy.address = absl::StrCat(kScheme, FormatEndpoint(endpoint));
  ASSERT_TRUE(caller.agent->Start(caller.info, {caller.info, through_proxy}).ok());
  ASSERT_TRUE(served.agent->Start(served.info, {caller.info, served.info}).ok());

  EXPECT_EQ(*caller.Call(1, "echo", "as it was").Wait(), "as it was");
  change = true;
  const absl::Status failed = caller.Call(1, "echo", "changed").Wait().status();
  EXPECT_TRUE(changed);
  EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
  // One of them hears only that the other has closed the connection.
  const absl::Status lost = served.service.AwaitLost(0);
  EXPECT_TRUE(absl::StrContains(failed.message(), "heartbeat limit of 2s") ||
              absl::StrContains(lost.message(), "heartbeat limit of 2s"))
      << failed << "; " << lost;
  absl::StatusOr<std::string> answer;
  do {
    answer = caller.Call(1, "echo", "again").Wait();
  } while (absl::IsUnavailable(answer.status()));  // another connection of theirs is ending, too
  EXPECT_EQ(*answer, "again");
}

}  // namespace
}  // namespace distgrad
