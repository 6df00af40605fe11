// When a peer's devices are checked again.
#include "core/worker/device_maps.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "core/membership/worker_info.h"
#include "core/transport/inproc/inproc_transport.h"

namespace distgrad {
namespace {

// What a worker says of its devices holds for as long as it lives.
// (tests/integration/device_test.cc has what maps say.)
TEST(DeviceMapsTest, AWorkerThatComesAgainIsLookedAtAgain) {
  const auto network = std::make_shared<InprocNetwork>();
  const std::unique_ptr<Transport> transport = NewInprocTransport(network);
  DeviceMaps maps("self", {}, transport.get());
  WorkerInfo peer{.rank = 2, .name = "peer", .incarnation = 1, .devices = "no devices"};
  const absl::Status wrong = maps.With(peer).status();
  EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument) << wrong;
  peer.devices = DeviceMaps::Encode({}).value();
  EXPECT_EQ(maps.With(peer).status(), wrong) << "the same incarnation";
  peer.incarnation = 2;
  const auto map = maps.With(peer);
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(maps.With(peer)->get(), map->get());
  // Another worker has another's rank.
  peer.rank = 3;
  EXPECT_NE(maps.With(peer)->get(), map->get());
}

// No worker has it, and no entry room for it.
TEST(DeviceMapsTest, ANameThatIsTooLongIsAnError) {
  const DevicePairs pairs{{c10::Device("cuda:0"), c10::Device("cuda:1")}};
  const absl::Status status = DeviceMaps::Encode({{std::string(70000, 'x'), pairs}}).status();
  EXPECT_EQ(status,
            absl::InvalidArgumentError("a device map with a worker whose name has 70000 bytes; a "
                                       "name has 1024 at most"));
  EXPECT_TRUE(DeviceMaps::Encode({{std::string(1024, 'x'), pairs}}).ok());
}

}  // namespace
}  // namespace distgrad
