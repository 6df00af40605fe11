// Chaos as a test: each kind of fault once, by a fixed seed.
#include "tests/chaos/chaos.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/chaos/worker.h"
#include "tests/hosts/hosts.h"

namespace distgrad {
namespace {

class ChaosTest : public testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer does not see how TensorPipe orders its threads";
#endif
  }
  static void ExpectAllWell(const ChaosResult& result) {
    for (const std::string& wrong : result.wrong) ADD_FAILURE() << wrong;
  }
};

// Where this machine cannot have hosts, it runs on one, and says what was left out.
TEST_F(ChaosTest, AJobOverTwoHostsEndsAsWithoutFaults) {
  const ChaosResult result = RunChaos({.workers = 4, .hosts = 2, .faults = 13, .seed = 20});
  ExpectAllWell(result);
  if (!result.why_one_host.empty()) {
    GTEST_SKIP() << "chaos ran on one host only: " << result.why_one_host;
  }
}

TEST_F(ChaosTest, AJobOnOneHostEndsAsWithoutFaults) {
  ExpectAllWell(RunChaos({.workers = 4, .hosts = 1, .faults = 6, .seed = 2}));
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string(distgrad::kChaosWorker)) {
    return distgrad::RunChaosWorker(distgrad::ToChaosWorkerOptions({argv + 2, argv + argc}));
  }
  return distgrad::RunInNamespaces([&] {
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  });
}
