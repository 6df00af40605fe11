#include "core/rpc/environment.h"

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Variables = std::map<std::string, std::string>;

const Variables kGood = {
    {"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};

absl::StatusOr<Environment> Read(const Variables& variables) {
  return ReadEnvironment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

TEST(EnvironmentTest, Good) {
  const auto environment = Read(kGood);
  ASSERT_TRUE(environment.ok()) << environment.status();
  EXPECT_EQ(environment->rank, 3);
  EXPECT_EQ(environment->world_size, 8);
  EXPECT_EQ(environment->local_rank, 0);
  EXPECT_EQ(environment->master_addr, "node0");
  EXPECT_EQ(environment->master_port, 29500);
  EXPECT_FALSE(environment->agent_store);
  EXPECT_FALSE(environment->ServesStore());
}

TEST(EnvironmentTest, WhoServesTheStore) {
  Variables variables = kGood;
  variables["RANK"] = "0";
  EXPECT_TRUE(Read(variables)->ServesStore());
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_TRUE(Read(variables)->ServesStore());
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_FALSE(Read(variables)->ServesStore());
}

TEST(EnvironmentTest, EachIsNeeded) {
  for (const auto& [name, value] : kGood) {
    Variables variables = kGood;
    variables.erase(name);
    const absl::Status status = Read(variables).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(status.message(), "variable " + name + " is not set")) << status;
  }
}

TEST(EnvironmentTest, Malformed) {
  const std::multimap<std::string, std::string> bad = {
      {"RANK", ""},
      {"RANK", "-1"},
      {"RANK", "8"},
      {"RANK", "3x"},
      {"RANK", "1e0"},
      {"WORLD_SIZE", "0"},
      {"WORLD_SIZE", "-8"},
      {"WORLD_SIZE", "3"},
      {"WORLD_SIZE", "99999999999999"},
      {"WORLD_SIZE", "many"},
      {"MASTER_ADDR", ""},
      {"MASTER_ADDR", " node0"},
      {"MASTER_PORT", "0"},
      {"MASTER_PORT", "-1"},
      {"MASTER_PORT", "65536"},
      {"MASTER_PORT", ""},
      {"LOCAL_RANK", "x"},
      {"LOCAL_RANK", "8"},
      {"TORCHELASTIC_USE_AGENT_STORE", "maybe"},
  };
  for (const auto& [name, value] : bad) {
    Variables variables = kGood;
    variables[name] = value;
    const absl::Status status = Read(variables).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << "=" << value;
    // A rank beyond the world's end is told as the rank's fault.
    const std::string blamed =
        name == "WORLD_SIZE" && value == "3" ? "RANK=\"3\"" : name + "=\"" + value + "\"";
    EXPECT_TRUE(absl::StrContains(status.message(), blamed)) << status;
  }
}

TEST(EnvironmentTest, OfThisProcess) {
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "1", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  unsetenv("MASTER_PORT");
  EXPECT_EQ(ReadEnvironment().status().code(), absl::StatusCode::kFailedPrecondition);
  setenv("MASTER_PORT", "1", 1);
  EXPECT_TRUE(ReadEnvironment().ok()) << ReadEnvironment().status();
}

}  // namespace
}  // namespace distgrad
