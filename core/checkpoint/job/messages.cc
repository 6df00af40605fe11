// Each message as an object of JSON, in lists of names as they are.
#include "core/checkpoint/job/messages.h"

#include <exception>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/exception.h"
#include "core/base/status.h"
#include "core/checkpoint/job/json_text.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;

template <typename F>
auto Decode(absl::string_view text, const F& decode) -> absl::StatusOr<decltype(decode(Json()))> {
  absl::StatusOr<Json> json = ParseJson(text);
  if (!json.ok()) return Annotate(json.status(), "a message of a checkpoint");
  try {
    return decode(*json);
  } catch (const std::bad_alloc&) {
    return StatusFromStdException(std::current_exception());
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("a message of a checkpoint: ", error.what()));
  }
}

}  // namespace

absl::StatusOr<std::string> Encode(const PartPlan& plan) {
  Json tensors = Json::object();
  for (const auto& [name, tensor] : plan.tensors) {
    tensors[name] = {{"type", tensor.type}, {"bytes", tensor.bytes}};
  }
  return JsonText({{"tensors", std::move(tensors)},
                   {"optimizers", plan.optimizers},
                   {"aliases", plan.aliases},
                   {"with_state", plan.with_state}});
}
absl::StatusOr<PartPlan> DecodePlanReply(absl::string_view text) {
  return Decode(text, [](const Json& json) {
    PartPlan plan;
    for (const auto& [name, tensor] : json.at("tensors").get_ref<const Json::object_t&>()) {
      plan.tensors[name] = {tensor.at("type").get<std::string>(),
                            Whole<uint64_t>(tensor.at("bytes"))};
    }
    json.at("optimizers").get_to(plan.optimizers);
    json.at("aliases").get_to(plan.aliases);
    json.at("with_state").get_to(plan.with_state);
    return plan;
  });
}

absl::StatusOr<std::string> Encode(const HoldRequest& request) {
  return JsonText({{"token", request.token},
                   {"copy", request.copy},
                   {"tensors", request.tensors},
                   {"optimizers", request.optimizers},
                   {"replicas", request.replicas}});
}
absl::StatusOr<HoldRequest> DecodeHold(absl::string_view text) {
  return Decode(text, [](const Json& json) {
    HoldRequest request{Whole<uint64_t>(json.at("token")), json.at("copy").get<bool>(), {}, {}, {}};
    json.at("tensors").get_to(request.tensors);
    json.at("optimizers").get_to(request.optimizers);
    json.at("replicas").get_to(request.replicas);
    return request;
  });
}

absl::StatusOr<std::string> Encode(const HoldReply& reply) {
  return JsonText({{"incarnation", reply.incarnation},
                   {"loaded", reply.loaded},
                   {"checksums", reply.checksums}});
}
absl::StatusOr<HoldReply> DecodeHoldReply(absl::string_view text) {
  return Decode(text, [](const Json& json) {
    HoldReply reply{Whole<Incarnation>(json.at("incarnation")), json.at("loaded").get<bool>(), {}};
    for (const auto& [name, sum] : json.at("checksums").get_ref<const Json::object_t&>()) {
      reply.checksums[name] = Whole<uint32_t>(sum);
    }
    return reply;
  });
}

absl::StatusOr<std::string> Encode(const WriteRequest& request) {
  return JsonText({{"token", request.token},
                   {"folder", request.folder},
                   {"number", request.number},
                   {"count", request.count}});
}
absl::StatusOr<WriteRequest> DecodeWrite(absl::string_view text) {
  return Decode(text, [](const Json& json) {
    return WriteRequest{Whole<uint64_t>(json.at("token")), json.at("folder").get<std::string>(),
                        Whole<int>(json.at("number")), Whole<int>(json.at("count"))};
  });
}

absl::StatusOr<std::string> Encode(const CheckRequest& request) {
  return JsonText({{"token", request.token},
                   {"folder", request.folder},
                   {"manifest", request.manifest},
                   {"strict", request.strict}});
}
absl::StatusOr<CheckRequest> DecodeCheck(absl::string_view text) {
  return Decode(text, [](const Json& json) {
    return CheckRequest{Whole<uint64_t>(json.at("token")), json.at("folder").get<std::string>(),
                        Whole<uint32_t>(json.at("manifest")), json.at("strict").get<bool>()};
  });
}

absl::StatusOr<std::string> Encode(const CheckReply& reply) {
  return JsonText({{"incarnation", reply.incarnation},
                   {"missing", reply.missing},
                   {"mismatched", reply.mismatched},
                   {"damage", reply.damage}});
}
absl::StatusOr<CheckReply> DecodeCheckReply(absl::string_view text) {
  return Decode(text, [](const Json& json) {
    CheckReply reply{.incarnation = Whole<Incarnation>(json.at("incarnation"))};
    json.at("missing").get_to(reply.missing);
    json.at("mismatched").get_to(reply.mismatched);
    json.at("damage").get_to(reply.damage);
    return reply;
  });
}

std::string EncodeToken(uint64_t token) { return Json({{"token", token}}).dump(); }
absl::StatusOr<uint64_t> DecodeToken(absl::string_view text) {
  return Decode(text, [](const Json& json) { return Whole<uint64_t>(json.at("token")); });
}

}  // namespace distgrad
