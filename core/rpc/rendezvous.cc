#include "core/rpc/rendezvous.h"

#include <algorithm>
#include <cstddef>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/rpc/wire.h"

namespace distgrad {
namespace {

constexpr size_t kMaxText = 1024;  // bytes, of a name or an address
constexpr size_t kMaxNamed = 16;   // ranks in a message

// While a worker waits for others it looks this often whether the job has failed.
constexpr absl::Duration kLook = absl::Seconds(1);

// The keys. Ranks and names are claimed by counters: who counts to 1 has it.
std::string EntryKey(int rank) { return absl::StrCat("worker/", rank); }
std::string ClaimsKey(int rank) { return absl::StrCat("worker/", rank, "/claims"); }
constexpr char kJoined[] = "joined";    // counts the workers that know all others
constexpr char kSettled[] = "settled";  // who counts to 1 writes the outcome
constexpr char kOutcome[] = "outcome";  // "" or why nobody may start

std::string Encode(const WorkerInfo& worker) {
  std::string entry;
  WireWriter writer(&entry);
  writer.U16(worker.id);
  writer.U64(worker.incarnation);
  writer.Str16(worker.name);
  writer.Str16(worker.address);
  return entry;
}

absl::StatusOr<WorkerInfo> Decode(const std::string& entry, int rank) {
  WireReader reader(entry);
  WorkerInfo worker;
  worker.id = reader.U16();
  worker.incarnation = reader.U64();
  worker.name = std::string(reader.Str16());
  worker.address = std::string(reader.Str16());
  if (!reader.ok() || reader.remaining() > 0 || worker.id != rank || worker.name.empty() ||
      worker.name.size() > kMaxText || worker.address.size() > kMaxText) {
    return absl::InvalidArgumentError(
        absl::StrCat("the store's entry of worker ", rank, " is malformed"));
  }
  return worker;
}

absl::Status CheckSelf(const WorkerInfo& self, int world_size) {
  if (self.name.empty() || self.name.size() > kMaxText) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of worker ", self.id, " must have 1 to ", kMaxText, " bytes"));
  }
  if (self.address.size() > kMaxText) {
    return absl::InvalidArgumentError(absl::StrCat("the address of worker '", self.name,
                                                   "' is longer than ", kMaxText, " bytes"));
  }
  if (world_size < 1 || world_size > (1 << 16) || self.id >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("a job of ", world_size, " workers has no rank ", self.id));
  }
  return absl::OkStatus();
}

// Writes the outcome, unless somebody has.
absl::Status Settle(Store& store, absl::string_view outcome) {
  DG_ASSIGN_OR_RETURN(const int64_t turn, store.Add(kSettled, 1));
  return turn == 1 ? store.Set(kOutcome, std::string(outcome)) : absl::OkStatus();
}

// Waits for a key; kAlreadyExists as soon as the job has failed.
absl::StatusOr<std::string> Await(Store& store, const std::string& key, absl::Time deadline) {
  for (;;) {
    const bool last = absl::Now() + kLook >= deadline;
    auto value = store.Get(key, last ? deadline : absl::Now() + kLook);
    if (!absl::IsDeadlineExceeded(value.status())) return value;
    const auto outcome = store.Get(kOutcome, absl::InfinitePast());
    if (outcome.ok() && !outcome->empty()) return absl::AlreadyExistsError(*outcome);
    if (last) return value;
  }
}

// "worker 1 of 2 did not join within 60s"
absl::Status Missing(const std::vector<int>& ranks, int world_size, absl::Duration waited) {
  const size_t named = std::min(ranks.size(), kMaxNamed);
  std::string text = absl::StrJoin(ranks.begin(), ranks.begin() + named, ", ");
  if (ranks.size() > named) absl::StrAppend(&text, " and ", ranks.size() - named, " more");
  return absl::DeadlineExceededError(absl::StrCat(ranks.size() == 1 ? "worker " : "workers ", text,
                                                  " of ", world_size, " did not join within ",
                                                  absl::FormatDuration(waited)));
}

}  // namespace

absl::StatusOr<std::vector<WorkerInfo>> Rendezvous(Store& store, const WorkerInfo& self,
                                                   int world_size, absl::Time deadline) {
  DG_RETURN_IF_ERROR(CheckSelf(self, world_size));
  const absl::Duration patience =
      absl::Trunc(std::max(deadline - absl::Now(), absl::ZeroDuration()) + absl::Milliseconds(1),
                  absl::Milliseconds(1));

  // Who comes second tells everyone; if all had joined before, it alone is refused.
  DG_ASSIGN_OR_RETURN(const int64_t claims, store.Add(ClaimsKey(self.id), 1));
  if (claims > 1) {
    DG_RETURN_IF_ERROR(Settle(store, absl::StrCat("two workers claim rank ", self.id,
                                                  "; the second is '", self.name, "'")));
    return absl::AlreadyExistsError(absl::StrCat("worker '", self.name, "' cannot join: rank ",
                                                 self.id, " is taken by another worker"));
  }
  DG_RETURN_IF_ERROR(store.Set(EntryKey(self.id), Encode(self)));

  std::vector<WorkerInfo> workers;
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    // Past the deadline this only asks, so that all who are missing are named.
    const auto entry = Await(store, EntryKey(rank), deadline);
    if (absl::IsDeadlineExceeded(entry.status())) {
      missing.push_back(rank);
      continue;
    }
    DG_RETURN_IF_ERROR(Annotate(entry.status(), absl::StrCat("waiting for worker ", rank)));
    DG_ASSIGN_OR_RETURN(WorkerInfo worker, Decode(*entry, rank));
    workers.push_back(std::move(worker));
  }
  if (!missing.empty()) return Missing(missing, world_size, patience);

  // All workers see the same names, and so find the same fault.
  std::map<absl::string_view, int> ranks;
  for (const WorkerInfo& worker : workers) {
    const auto [other, is_new] = ranks.emplace(worker.name, worker.id);
    if (!is_new) {
      return absl::AlreadyExistsError(absl::StrCat("workers ", other->second, " and ", worker.id,
                                                   " have the same name, '", worker.name, "'"));
    }
  }

  DG_ASSIGN_OR_RETURN(const int64_t joined, store.Add(kJoined, 1));
  if (joined == world_size) DG_RETURN_IF_ERROR(Settle(store, ""));
  const auto outcome = Await(store, kOutcome, deadline);
  if (absl::IsDeadlineExceeded(outcome.status())) {
    return absl::DeadlineExceededError(absl::StrCat("all ", world_size,
                                                    " workers joined, but not all of them were "
                                                    "ready within ",
                                                    absl::FormatDuration(patience)));
  }
  DG_RETURN_IF_ERROR(outcome.status());
  if (!outcome->empty()) return absl::AlreadyExistsError(*outcome);
  return workers;
}

}  // namespace distgrad
