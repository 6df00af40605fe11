#include "core/rpc/rendezvous.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/rpc/wire.h"

namespace distgrad {
namespace {

constexpr size_t kMaxName = 256;  // bytes, of names and addresses

std::string Encode(const WorkerInfo& worker) {
  std::string out;
  WireWriter writer(&out);
  writer.U16(worker.id);
  writer.U64(worker.incarnation);
  writer.Str16(worker.name);
  writer.Str16(worker.address);
  return out;
}

absl::StatusOr<WorkerInfo> Decode(const std::string& entry, int rank) {
  WireReader reader(entry);
  WorkerInfo worker;
  worker.id = reader.U16();
  worker.incarnation = reader.U64();
  worker.name = std::string(reader.Str16());
  worker.address = std::string(reader.Str16());
  DG_RETURN_IF_ERROR(reader.status(absl::StrCat("the store's entry of worker ", rank)));
  if (reader.remaining() > 0 || worker.id != rank || worker.name.empty() ||
      worker.name.size() > kMaxName || worker.address.size() > kMaxName) {
    return absl::InvalidArgumentError(
        absl::StrCat("the store's entry of worker ", rank, " is malformed"));
  }
  return worker;
}

}  // namespace

absl::StatusOr<std::vector<WorkerInfo>> Rendezvous(Store& store, const WorkerInfo& self,
                                                   int world_size, absl::Time deadline) {
  if (self.name.empty() || self.name.size() > kMaxName) {
    return absl::InvalidArgumentError(
        absl::StrCat("a worker's name has 1 to ", kMaxName, " bytes"));
  }
  if (self.id >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no worker of rank ", self.id, " in a job of ", world_size));
  }
  const absl::Time start = absl::Now();
  const std::string key = absl::StrCat("worker/", self.id);
  // The second to claim a rank tells everyone: the first may have been heard by some already.
  DG_ASSIGN_OR_RETURN(const int64_t claims, store.Add(key + "/claims", 1));
  if (claims > 1) {
    return absl::AlreadyExistsError(absl::StrCat("worker '", self.name, "': rank ", self.id,
                                                 " is taken by another worker of this job"));
  }
  DG_RETURN_IF_ERROR(store.Set(key, Encode(self)));

  std::vector<WorkerInfo> workers;
  std::vector<int> missing;
  absl::flat_hash_map<std::string, int> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    // Past the deadline this only asks, so that all who are missing are named.
    absl::StatusOr<std::string> entry = store.Get(absl::StrCat("worker/", rank), deadline);
    if (absl::IsDeadlineExceeded(entry.status())) {
      missing.push_back(rank);
      continue;
    }
    DG_RETURN_IF_ERROR(Annotate(entry.status(), absl::StrCat("waiting for worker ", rank)));
    DG_ASSIGN_OR_RETURN(WorkerInfo worker, Decode(*entry, rank));
    auto [other, is_new] = ranks.emplace(worker.name, rank);
    if (!is_new) {
      return absl::AlreadyExistsError(absl::StrCat("workers ", other->second, " and ", rank,
                                                   " have the same name, '", worker.name, "'"));
    }
    workers.push_back(std::move(worker));
  }
  if (!missing.empty()) {
    return absl::DeadlineExceededError(absl::StrCat(
        missing.size() == 1 ? "worker " : "workers ", absl::StrJoin(missing, ", "), " of ",
        world_size, " did not join within ",
        absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(1)))));
  }
  // Two that claimed one rank: everybody refuses, not the second alone.
  for (int rank = 0; rank < world_size; ++rank) {
    DG_ASSIGN_OR_RETURN(const int64_t others,
                        store.Add(absl::StrCat("worker/", rank, "/claims"), 0));
    if (others > 1) {
      return absl::AlreadyExistsError(
          absl::StrCat(others, " workers claim rank ", rank, " in this job"));
    }
  }
  return workers;
}

}  // namespace distgrad
