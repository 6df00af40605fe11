// A soak as a test: of half a minute, which has all kinds of load and faults, or of ten minutes.
#include "tests/soak/soak.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/soak/worker.h"

namespace distgrad {
namespace {

bool is_long = false;  // --long

TEST(SoakTest, EndsWellAndNothingGrows) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see how TensorPipe orders its threads";
#endif
  const absl::Duration duration = is_long ? absl::Minutes(10) : absl::Seconds(25);
  for (const std::string& wrong : RunSoak({.duration = duration, .seed = 17})) {
    ADD_FAILURE() << wrong;
  }
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string(distgrad::kSoakWorker)) {
    return distgrad::RunSoakWorker(distgrad::FromArguments({argv + 2, argv + argc}));
  }
  testing::InitGoogleTest(&argc, argv);
  distgrad::is_long = argc > 1 && argv[1] == std::string("--long");
  return RUN_ALL_TESTS();
}
