// Parses the URLs of a rendezvous, and says what is wrong with them.
#include "core/membership/rendezvous_url.h"

#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// What is wrong, or "".
using Complaint = std::string;

Complaint ParseAddress(absl::string_view address, RendezvousUrl* url) {
  constexpr char kForm[] = "is not tcp://host:port";
  const size_t colon = address.rfind(':');
  if (colon == 0 || colon == absl::string_view::npos) return kForm;
  int port = 0;
  if (!ParseNumber(address.substr(colon + 1), 1, 65535, &port)) {
    return "has no port from 1 to 65535";
  }
  url->port = static_cast<uint16_t>(port);
  absl::string_view host = address.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]")) return kForm;
  } else if (host.find(':') != absl::string_view::npos) {
    return "has an IPv6 address that is not in brackets";
  }
  // What a host's name and an address consist of; '%' is for fe80::1%eth0.
  for (const char c : host) {
    if (!absl::ascii_isalnum(c) && !absl::StrContains(".-_:%", c)) return kForm;
  }
  if (host.empty()) return kForm;
  url->host = std::string(host);
  return "";
}

Complaint ParseParameter(absl::string_view name, absl::string_view value, RendezvousUrl* url) {
  if (name == "rank") {
    if (ParseNumber(value, 0, kMaxWorldSize - 1, &url->rank)) return "";
    return absl::StrCat("has a rank that is no number from 0 to ", kMaxWorldSize - 1);
  }
  if (name == "world_size") {
    if (ParseNumber(value, 1, kMaxWorldSize, &url->world_size)) return "";
    return absl::StrCat("has a world_size that is no number from 1 to ", kMaxWorldSize);
  }
  if (name == "bind" && url->kind == RendezvousUrl::Kind::kTcp) {
    url->bind = std::string(value);
    return value.empty() ? "has an empty bind" : "";
  }
  return absl::StrCat(
      "has an unknown parameter '", absl::CHexEscape(name), "'; it takes ",
      url->kind == RendezvousUrl::Kind::kTcp ? "rank, world_size and bind" : "rank and world_size");
}

Complaint Parse(absl::string_view text, RendezvousUrl* url) {
  const size_t mark = text.find('?');
  absl::string_view place = text.substr(0, mark);
  if (absl::ConsumePrefix(&place, "env://")) {
    if (!place.empty()) return "has something between env:// and its parameters";
  } else if (absl::ConsumePrefix(&place, "tcp://")) {
    url->kind = RendezvousUrl::Kind::kTcp;
    if (Complaint complaint = ParseAddress(place, url); !complaint.empty()) return complaint;
  } else if (absl::ConsumePrefix(&place, "file://")) {
    url->kind = RendezvousUrl::Kind::kFile;
    if (place.empty() || place[0] != '/') return "is not file:///path";
    url->path = std::string(place);
  } else {
    return "is not one of env://, tcp://host:port and file:///path";
  }
  if (mark == absl::string_view::npos) return "";
  std::set<absl::string_view> seen;
  for (const absl::string_view parameter : absl::StrSplit(text.substr(mark + 1), '&')) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(parameter, absl::MaxSplits('=', 1));
    Complaint complaint = ParseParameter(pair.first, pair.second, url);
    if (!complaint.empty()) return complaint;
    if (!seen.insert(pair.first).second) return absl::StrCat("says ", pair.first, " twice");
  }
  if (url->rank >= 0 && url->world_size >= 0 && url->rank >= url->world_size) {
    return absl::StrCat("has rank ", url->rank, " in a job of ", url->world_size);
  }
  return "";
}

}  // namespace

bool ParseNumber(absl::string_view text, int low, int high, int* number) {
  // SimpleAtoi would take blanks and a plus.
  if (text.empty() || text.find_first_not_of("0123456789") != absl::string_view::npos) return false;
  return absl::SimpleAtoi(text, number) && *number >= low && *number <= high;
}

absl::StatusOr<RendezvousUrl> ParseRendezvousUrl(absl::string_view text) {
  RendezvousUrl url;
  const Complaint complaint = Parse(text, &url);
  if (complaint.empty()) return url;
  return absl::InvalidArgumentError(
      absl::StrCat("rendezvous '", absl::CHexEscape(text), "' ", complaint));
}

}  // namespace distgrad
