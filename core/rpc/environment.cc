#include "core/rpc/environment.h"

#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

using Getenv = std::function<std::optional<std::string>(const std::string&)>;

absl::Status Bad(const std::string& name, const std::string& value, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, "=\"", absl::CHexEscape(value), "\" must be ", expected));
}

absl::StatusOr<std::string> Required(const Getenv& getenv, const std::string& name) {
  std::optional<std::string> value = getenv(name);
  if (value.has_value()) return *std::move(value);
  return absl::FailedPreconditionError(
      absl::StrCat("the environment variable ", name,
                   " is not set; start with a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and "
                   "MASTER_PORT"));
}

absl::StatusOr<int> ParseNumber(const std::string& name, const std::string& value, int low,
                                int high) {
  int number = 0;
  if (absl::SimpleAtoi(value, &number) && number >= low && number <= high) return number;
  return Bad(name, value, absl::StrCat("a number from ", low, " to ", high));
}

absl::StatusOr<int> Number(const Getenv& getenv, const std::string& name, int low, int high) {
  DG_ASSIGN_OR_RETURN(const std::string value, Required(getenv, name));
  return ParseNumber(name, value, low, high);
}

}  // namespace

absl::StatusOr<Environment> ReadEnvironment(const Getenv& getenv) {
  Environment environment;
  DG_ASSIGN_OR_RETURN(environment.world_size, Number(getenv, "WORLD_SIZE", 1, 1 << 16));
  DG_ASSIGN_OR_RETURN(environment.rank, Number(getenv, "RANK", 0, environment.world_size - 1));
  DG_ASSIGN_OR_RETURN(environment.master_addr, Required(getenv, "MASTER_ADDR"));
  if (absl::StripAsciiWhitespace(environment.master_addr) != environment.master_addr ||
      environment.master_addr.empty()) {
    return Bad("MASTER_ADDR", environment.master_addr, "a host name or an address");
  }
  DG_ASSIGN_OR_RETURN(const int port, Number(getenv, "MASTER_PORT", 1, 65535));
  environment.master_port = static_cast<uint16_t>(port);
  if (const auto local_rank = getenv("LOCAL_RANK")) {
    DG_ASSIGN_OR_RETURN(environment.local_rank,
                        ParseNumber("LOCAL_RANK", *local_rank, 0, environment.world_size - 1));
  }
  // torchrun writes "True" and "False".
  if (const auto agent_store = getenv("TORCHELASTIC_USE_AGENT_STORE")) {
    if (!absl::SimpleAtob(*agent_store, &environment.agent_store)) {
      return Bad("TORCHELASTIC_USE_AGENT_STORE", *agent_store, "True or False");
    }
  }
  return environment;
}

absl::StatusOr<Environment> ReadEnvironment() {
  return ReadEnvironment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  });
}

}  // namespace distgrad
