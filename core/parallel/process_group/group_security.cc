// Rank 0 compares what all ranks have, and writes the verdict.
#include "core/parallel/process_group/group_security.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"
#include "core/net/certificate_files.h"

namespace distgrad {
namespace {

// What a rank has, "open" or "key <salt> <HMAC of the key that it uses> <HMAC of the other one>",
// with "certificates " before it or not; and what rank 0 says of that, "agreed <number>" or "differ
// <why>".
std::string OfRank(int rank) { return absl::StrCat("security/", rank); }
constexpr char kVerdict[] = "security";
constexpr absl::string_view kOpen = "open", kKeyed = "key", kAgreed = "agreed ",
                            kDiffer = "differ ", kCertificates = "certificates ";

absl::StatusOr<std::string> RandomHex() {
  std::array<uint8_t, 16> bytes;
  DG_RETURN_IF_ERROR(FillRandom(bytes.data(), bytes.size()));
  return absl::BytesToHexString(std::string(bytes.begin(), bytes.end()));
}

absl::StatusOr<Digest> CheckOf(const std::string& key, absl::string_view salt) {
  return Hmac(key, absl::StrCat("group key ", salt));
}

// The same in hexadecimal digits, as it goes into the store; "-" in place of a key that this rank
// does not have, which is too short to be the word of any key (IsWordOf()).
absl::StatusOr<std::string> CheckWordOf(const std::string& key, absl::string_view salt) {
  if (key.empty()) return std::string("-");
  DG_ASSIGN_OR_RETURN(const Digest check, CheckOf(key, salt));
  return absl::BytesToHexString(std::string(check.begin(), check.end()));
}

// Takes equally long for all words of that form.
bool IsWordOf(const Digest& check, absl::string_view word) {
  Digest given = {};
  if (word.size() != 2 * given.size() || !absl::c_all_of(word, absl::ascii_isxdigit)) return false;
  const std::string bytes = absl::HexStringToBytes(word);
  std::copy(bytes.begin(), bytes.end(), given.begin());
  return SameDigest(given, check);
}

absl::StatusOr<std::string> WhatIsHere(const ClusterKey& key) {
  if (key.empty()) return std::string(kOpen);
  DG_ASSIGN_OR_RETURN(const std::string salt, RandomHex());
  DG_ASSIGN_OR_RETURN(const std::string used, CheckWordOf(key.used(), salt));
  DG_ASSIGN_OR_RETURN(const std::string accepted, CheckWordOf(key.accepted(), salt));
  return absl::StrCat(kKeyed, " ", salt, " ", used, " ", accepted);
}

// Waits for one of two keys of the store, whichever comes first; nullopt for one that has not.
absl::StatusOr<std::vector<Store::Value>> AwaitEither(Store& store, const std::string& one,
                                                      const std::string& other, Deadline deadline) {
  const std::string keys[] = {one, other};
  return store.AwaitChange(keys, std::vector<Store::Value>(2), deadline);
}

// What each rank says that it has; that of rank 0 is `own`.
absl::StatusOr<std::vector<std::string>> Collect(Store& store, int size, std::string own,
                                                 Deadline deadline) {
  std::vector<std::string> all(size);
  all[0] = std::move(own);
  std::vector<int> missing;
  for (int rank = 1; rank < size; ++rank) missing.push_back(rank);
  for (;;) {
    std::vector<std::string> keys;
    keys.reserve(missing.size());
    for (const int rank : missing) keys.push_back(OfRank(rank));
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> values, store.GetEach(keys, deadline));
    std::vector<int> still;
    for (size_t i = 0; i < missing.size(); ++i) {
      if (values[i].has_value()) {
        all[missing[i]] = *values[i];
      } else {
        still.push_back(missing[i]);
      }
    }
    missing = std::move(still);
    if (missing.empty()) return all;
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> next,
                        AwaitEither(store, OfRank(missing[0]), kFailureKey, deadline));
    if (next[1].has_value()) return absl::UnavailableError(*next[1]);
    if (next[0].has_value()) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", missing[0], " did not say whether it has a cluster key"));
  }
}

// Which of two keys, that a rank uses and that it accepts, are which of rank 0's.
struct KeysOfRank {
  bool has_certificates = false;
  bool has_key = false;
  int used = -1;                   // 0 or 1, of rank 0's; -1: neither
  std::array<bool, 2> knows = {};  // rank 0's
};

absl::StatusOr<KeysOfRank> Parse(int rank, absl::string_view said, const ClusterKey& key) {
  KeysOfRank keys;
  keys.has_certificates = absl::ConsumePrefix(&said, kCertificates);
  if (said == kOpen) return keys;
  const std::vector<absl::string_view> words = absl::StrSplit(said, ' ');
  if (words.size() != 4 || words[0] != kKeyed) {
    return absl::InvalidArgumentError(
        absl::StrCat("what rank ", rank, " says of its cluster key is malformed in the store"));
  }
  keys.has_key = true;
  if (key.empty()) return keys;
  const std::string* const own[] = {&key.used(), &key.accepted()};
  for (int i = 0; i < 2; ++i) {
    if (own[i]->empty()) continue;
    DG_ASSIGN_OR_RETURN(const Digest check, CheckOf(*own[i], words[1]));
    const bool uses = IsWordOf(check, words[2]), accepts = IsWordOf(check, words[3]);
    if (uses) keys.used = i;
    keys.knows[i] = uses || accepts;
  }
  return keys;
}

// Why the ranks cannot connect; "" if they can.
absl::StatusOr<std::string> Difference(const std::vector<std::string>& all, const ClusterKey& key) {
  const std::string advice = absl::StrCat(": give all ranks the same (", kClusterKeySetting, ")");
  const bool certificates = absl::StartsWith(all[0], kCertificates);
  std::vector<KeysOfRank> ranks;
  std::array<std::optional<int>, 2> user;  // of each of rank 0's keys: a rank that uses it
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    DG_ASSIGN_OR_RETURN(const KeysOfRank keys, Parse(rank, all[rank], key));
    if (keys.has_certificates != certificates) {
      return absl::StrCat("rank ", certificates ? 0 : rank, " has certificates and rank ",
                          certificates ? rank : 0, " has none: give them to all ranks (",
                          kCertSetting, ")");
    }
    if (keys.has_key == key.empty()) {
      return absl::StrCat("rank ", key.empty() ? rank : 0, " has a cluster key and rank ",
                          key.empty() ? 0 : rank, " has none", advice);
    }
    if (keys.has_key && keys.used < 0) {
      return absl::StrCat("rank ", rank, " has another cluster key than rank 0", advice);
    }
    if (keys.has_key && !user[keys.used].has_value()) user[keys.used] = rank;
    ranks.push_back(keys);
  }
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    for (int i = 0; i < 2; ++i) {
      if (!user[i].has_value() || ranks[rank].knows[i]) continue;
      return absl::StrCat("rank ", rank, " has another cluster key than rank ", *user[i], advice);
    }
  }
  return std::string();
}

absl::StatusOr<std::string> VerdictOf(Store& store, const RankOfGroup& member, std::string own,
                                      Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      Collect(store, member.size, std::move(own), deadline));
  DG_ASSIGN_OR_RETURN(const std::string difference, Difference(all, member.cluster_key));
  DG_ASSIGN_OR_RETURN(const std::string number, RandomHex());
  std::string verdict =
      difference.empty() ? absl::StrCat(kAgreed, number) : absl::StrCat(kDiffer, difference);
  DG_RETURN_IF_ERROR(store.Set(kVerdict, verdict, deadline));
  return verdict;
}

absl::StatusOr<std::string> AwaitVerdict(Store& store, const RankOfGroup& member,
                                         const std::string& own, Deadline deadline) {
  DG_RETURN_IF_ERROR(store.Set(OfRank(member.rank), own, deadline));
  DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> next,
                      AwaitEither(store, kVerdict, kFailureKey, deadline));
  if (next[0].has_value()) return *next[0];
  if (next[1].has_value()) return absl::UnavailableError(*next[1]);
  return absl::DeadlineExceededError("rank 0 did not say whether all ranks have the same key");
}

}  // namespace

absl::StatusOr<Digest> AgreeOnSecurity(Store& store, const RankOfGroup& member, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(std::string own, WhatIsHere(member.cluster_key));
  if (member.has_certificates) own = absl::StrCat(kCertificates, own);
  DG_ASSIGN_OR_RETURN(const std::string verdict,
                      member.rank == 0 ? VerdictOf(store, member, std::move(own), deadline)
                                       : AwaitVerdict(store, member, own, deadline));
  absl::string_view rest = verdict;
  if (absl::ConsumePrefix(&rest, kDiffer)) return absl::FailedPreconditionError(rest);
  if (!absl::ConsumePrefix(&rest, kAgreed)) {
    return absl::InvalidArgumentError("what rank 0 says of keys is malformed in the store");
  }
  return Hmac(rest, absl::StrCat("group ", member.group));
}

}  // namespace distgrad
