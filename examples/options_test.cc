// Defaults, values and errors of the options.
#include "examples/options.h"

#include <stdlib.h>

#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

absl::StatusOr<Options> Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "fashion_mnist");
  const CommandLine line = {.name = "fashion_mnist",
                            .description = "Trains a network.",
                            .processes = "--workers",
                            .processes_description = "Worker processes",
                            .most_processes = 5,
                            .has_worker_options = true};
  return ParseOptions(static_cast<int>(arguments.size()), arguments.data(), line);
}

TEST(OptionsTest, HasDefaults) {
  setenv("BUILD_WORKING_DIRECTORY", "/home/user", 1);
  const Options options = *Parse({});
  EXPECT_FALSE(options.single);
  EXPECT_EQ(options.processes, 2);
  EXPECT_EQ(options.output, "/home/user/fashion_mnist");
  EXPECT_EQ(options.data, "");
  EXPECT_EQ(options.trace, "");
  EXPECT_EQ(options.checkpoint, "");
  EXPECT_EQ(options.help, "");
}

TEST(OptionsTest, ReadsEach) {
  setenv("BUILD_WORKING_DIRECTORY", "/home/user", 1);
  const Options options = *Parse(
      {"--workers", "3", "--epochs=2", "--batch=32", "--lr=0.5", "--seed=18446744073709551615",
       "--data=here", "--output=/tmp/there", "--transport=tcp", "--timeout=1.5", "--trace=t.json"});
  EXPECT_EQ(options.processes, 3);
  EXPECT_EQ(options.epochs, 2);
  EXPECT_EQ(options.batch, 32);
  EXPECT_EQ(options.learning_rate, 0.5);
  EXPECT_EQ(options.seed, 18446744073709551615U);
  EXPECT_EQ(options.data, "/home/user/here");
  EXPECT_EQ(options.output, "/tmp/there");
  EXPECT_EQ(options.transport, "tcp");
  EXPECT_EQ(options.timeout, absl::Seconds(1.5));
  EXPECT_EQ(options.trace, "/home/user/t.json");
  const Options saves = *Parse({"--checkpoint=saved", "--every=3", "--resume"});
  EXPECT_EQ(saves.checkpoint, "/home/user/saved");
  EXPECT_EQ(saves.every, 3);
  EXPECT_TRUE(saves.resume);
  EXPECT_TRUE(Parse({"--single"})->single);
}

TEST(OptionsTest, SaysInOneLineWhatIsWrong) {
  for (const auto& [arguments, says] :
       std::vector<std::pair<std::vector<const char*>, const char*>>{
           {{"--wrokers=2"}, "--wrokers"},
           {{"stray"}, "stray"},
           {{"--workers=6"}, "--workers"},
           {{"--workers=0"}, "--workers"},
           {{"--epochs=many"}, "--epochs"},
           {{"--lr=-1"}, "--lr"},
           {{"--lr=nan"}, "--lr"},
           {{"--seed=-1"}, "--seed"},
           {{"--transport=pigeon"}, "--transport"},
           {{"--timeout"}, "--timeout"},
           {{"--single", "--workers=2"}, "--single"},
           {{"--single", "--trace=t.json"}, "--single"},
           {{"--single", "--checkpoint=saved"}, "--single"},
           {{"--every=3"}, "--checkpoint"},
           {{"--resume"}, "--checkpoint"},
           {{"--checkpoint=saved", "--every=0"}, "--every"},
       }) {
    const absl::Status status = Parse(arguments).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\n")));
  }
}

TEST(OptionsTest, ExplainsEachOption) {
  const std::string help = Parse({"--help"})->help;
  for (const char* option : {"--single", "--workers", "--epochs", "--batch", "--lr", "--seed",
                             "--data", "--output", "--transport", "--timeout", "--trace"}) {
    EXPECT_THAT(help, HasSubstr(option));
  }
}

}  // namespace
}  // namespace distgrad
