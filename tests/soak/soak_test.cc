// A soak as a test: of half a minute, which has all kinds of load and faults, or of ten minutes.
#include "tests/soak/soak.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/soak/worker.h"

namespace distgrad {
namespace {

void ExpectAllWell(absl::Duration duration) {
  for (const std::string& wrong : RunSoak({.duration = duration, .seed = 17})) {
    ADD_FAILURE() << wrong;
  }
}

class SoakTest : public testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer does not see how TensorPipe orders its threads";
#endif
  }
};

// What grows does not show in so short a time.
TEST_F(SoakTest, EndsWell) { ExpectAllWell(absl::Seconds(25)); }

TEST_F(SoakTest, EndsWellAndNothingGrows) { ExpectAllWell(absl::Minutes(10)); }

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string(distgrad::kSoakWorker)) {
    return distgrad::RunSoakWorker(distgrad::FromArguments({argv + 2, argv + argc}));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
