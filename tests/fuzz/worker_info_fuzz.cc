// A worker's entry in the store, and the address in it.
#include "absl/strings/strip.h"
#include "core/base/check.h"
#include "core/membership/worker_info.h"
#include "core/net/endpoint.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

constexpr WorkerRank kRank = 7;

}  // namespace

// What was taken is written again, as the same bytes.
bool ReadHostile(absl::string_view bytes) {
  const absl::StatusOr<WorkerInfo> worker = DecodeWorkerInfo(bytes, kRank);
  if (!worker.ok()) return false;
  DG_CHECK(worker->rank == kRank && worker->name.size() <= kMaxWorkerText &&
           worker->address.size() <= kMaxWorkerText && worker->devices.size() <= kMaxWorkerDevices);
  DG_CHECK(EncodeWorkerInfo(*worker) == bytes);
  absl::string_view address = worker->address;
  absl::ConsumePrefix(&address, "socket://");
  const absl::StatusOr<Endpoint> endpoint = ParseEndpoint(address);
  if (endpoint.ok()) DG_CHECK(ParseEndpoint(FormatEndpoint(*endpoint)).ok());
  return true;
}

std::vector<std::string> GoodInputs() {
  Endpoint endpoint{"[::1]:4711", "0123abcd-1-2-3", std::string(32, 'a'), Token{1, 2, 3}};
  return {EncodeWorkerInfo({.rank = kRank,
                            .name = "back",
                            .address = "socket://" + FormatEndpoint(endpoint),
                            .incarnation = 12345,
                            .devices = "what it says of them",
                            .barriers = 3}),
          EncodeWorkerInfo({.rank = kRank, .name = "x", .left = true})};
}

}  // namespace distgrad
