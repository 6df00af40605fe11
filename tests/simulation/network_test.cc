// The suite of all transports, over the simulated network.
#include "tests/simulation/network.h"

#include <memory>

#include "core/transport/transport_conformance.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

INSTANTIATE_TEST_SUITE_P(Simulated, TransportConformanceTest,
                         testing::Values(TransportFactory{
                             "simulated",
                             []() -> TransportFactory::Make {
                               auto network =
                                   std::make_shared<SimulatedNetwork>(1, NetworkOptions());
                               return [network] { return SimulatedHost(network).NewTransport(); };
                             },
                             {"", "nonsense", "other://1", "simulated://", "simulated://x"}}),
                         TransportFactoryName);

}  // namespace
}  // namespace distgrad
