// Claims ranks, publishes entries, and waits at barriers, all by entries of the store.
#include "core/membership/membership.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "core/base/await_memory.h"
#include "core/base/error_list.h"
#include "core/base/random.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// Of which incarnation an entry of a loss is; 0: of none.
Incarnation SaidOf(const Store::Value& entry) {
  const absl::string_view words = entry.has_value() ? absl::string_view(*entry) : "";
  Incarnation incarnation = 0;
  return absl::SimpleAtoi(words.substr(0, words.find(' ')), &incarnation) ? incarnation : 0;
}

constexpr int kMaxRanks = 1 << 16;       // ranks have 16 bits
constexpr int64_t kMaxStarts = 1 << 16;  // of which a context's id has 16 bits
constexpr size_t kMaxReason = 1024;      // bytes, why one is lost

constexpr int64_t kLast = std::numeric_limits<int64_t>::max();  // no barrier's number

// How long a thread that waits for others may take to notice that this worker was closed.
constexpr absl::Duration kCheckInterval = absl::Seconds(1);
// For what nobody says again if the store does not hear it; for whom less is left of the deadline.
constexpr absl::Duration kLeaveTime = absl::Seconds(5);

// After how long what a full store had no room for is said again, at first and at most; and how
// long a thread that waits for that may take to notice that this worker was closed.
constexpr absl::Duration kFirstPause = absl::Milliseconds(100), kLongestPause = absl::Seconds(2);
constexpr absl::Duration kCheckClosed = absl::Milliseconds(100);

// After how long a worker that waits for others checks by itself who has come, in case somebody
// died after changing the members and before saying so. So rarely that it costs little, however
// many wait.
absl::Duration CheckAgain(int size) { return absl::Seconds(10) + absl::Milliseconds(50) * size; }

// What each claim of a name adds to the name's counter, beside the rank that the claimant brings:
// so the first two know whose was the first, and which rank it brought, though it may die before it
// has said anything else.
constexpr int64_t kOneClaim = int64_t{1} << 32;

// The keys. Ranks and names are claimed by counters: the worker that counts to 1 is the first.
// Entries are signed where there is a cluster key, and counters are not: so a counter never opens
// anything, but tells the last worker that comes to check.
std::string EntryKey(int rank) { return absl::StrCat("worker/", rank); }
std::string IncarnationsKey(int rank) { return absl::StrCat("worker/", rank, "/incarnations"); }
std::string NameKey(absl::string_view name) { return absl::StrCat("name/", name); }  // its rank
std::string LostKey(int rank) { return absl::StrCat("lost/", rank); }  // the incarnation that is
std::string AtKey(int rank) { return absl::StrCat("at/", rank); }      // a BarrierMark
std::string ClaimedKey(absl::string_view name) { return absl::StrCat("claimed/", name); }
constexpr char kJoined[] = "joined";    // counts the workers that have an entry
constexpr char kAll[] = "all";          // all of the start have one
constexpr char kReady[] = "ready";      // counts the workers that know all others
constexpr char kSettled[] = "settled";  // the worker that counts to 1 writes the outcome
constexpr char kOutcome[] = "outcome";  // "" or why nobody may start
constexpr char kSize[] = "size";        // how many workers the job started with
constexpr char kJoiners[] = "joiners";  // counts those who came later
constexpr char kChanges[] = "changes";  // another value whenever the members are others

absl::Status CheckName(absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxWorkerText) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a worker's name must have 1 to ", kMaxWorkerText, " bytes, not ", name.size()));
}

// Later incarnations have greater numbers; the random half keeps jobs apart that use one store in
// turn.
Incarnation MakeIncarnation(int64_t count) {
  return (static_cast<uint64_t>(count) << 32) | std::random_device()();
}

// Writes the outcome, unless somebody has.
absl::Status Settle(Store& store, int world_size, absl::string_view outcome, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t turn, store.Add(kSettled, 1, deadline));
  if (turn != 1) return absl::OkStatus();
  DG_RETURN_IF_ERROR(store.Set(kSize, absl::StrCat(world_size), deadline));
  return store.Set(kOutcome, std::string(outcome), deadline);
}

absl::Status Malformed(absl::string_view key) {
  return absl::InvalidArgumentError(absl::StrCat("the store's entry '", key, "' is malformed"));
}

absl::StatusOr<int> ParseNumber(absl::string_view key, absl::string_view text) {
  int number = 0;
  if (absl::SimpleAtoi(text, &number) && number >= 0 && number <= kMaxRanks) return number;
  return Malformed(key);
}

absl::StatusOr<int> ReadNumber(Store& store, const std::string& key, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const std::string text, store.Get(key, deadline));
  return ParseNumber(key, text);
}

// What a key holds now; the store has until the deadline to answer.
absl::StatusOr<Store::Value> TryGet(Store& store, const std::string& key, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(std::vector<Store::Value> values, store.GetEach({key}, deadline));
  return std::move(values[0]);
}

// Waits for a key until the deadline; kAlreadyExists as soon as the job has failed. nullopt, if it
// does not come.
absl::StatusOr<Store::Value> Await(Store& store, const std::string& key, Deadline deadline) {
  const std::string keys[] = {key, kOutcome};
  const Store::Value seen[2];
  DG_ASSIGN_OR_RETURN(std::vector<Store::Value> values, store.AwaitChange(keys, seen, deadline));
  if (values[1].has_value() && !values[1]->empty()) return absl::AlreadyExistsError(*values[1]);
  return std::move(values[0]);
}

// Whether the store has not answered, and may be asked again before the deadline.
bool IsSilence(const absl::Status& status, Deadline deadline) {
  return absl::IsDeadlineExceeded(status) && !deadline.Passed();
}

absl::Status RankIsTaken(absl::string_view name, int rank) {
  return absl::AlreadyExistsError(
      absl::StrCat("worker '", name, "' cannot join: rank ", rank, " is taken by another worker"));
}

std::string NamesOf(const std::vector<WorkerInfo>& workers) {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : workers) {
    names.push_back(absl::StrCat("'", worker.name, "' (", worker.rank, ")"));
  }
  return FirstOf(names);
}

absl::Status NotCome(const std::vector<WorkerInfo>& missing) {
  return absl::DeadlineExceededError(
      absl::StrCat(NamesOf(missing), missing.size() == 1 ? " has" : " have", " not come"));
}

absl::Status Lost(const std::vector<Membership::LostMember>& lost) {
  std::vector<WorkerInfo> workers;
  for (const auto& member : lost) workers.push_back(member.worker);
  std::string text = absl::StrCat(NamesOf(workers), lost.size() == 1 ? " is lost" : " are lost");
  // Where several go together one cause will do.
  if (!lost.front().reason.empty()) absl::StrAppend(&text, ": ", lost.front().reason);
  return absl::UnavailableError(text);
}

// What a worker writes when it has come to a barrier.
struct BarrierMark {
  Incarnation worker = 0;
  int64_t barrier = 0;
};

std::string EncodeMark(const BarrierMark& mark) {
  return absl::StrCat(mark.worker, " ", mark.barrier);
}

std::optional<BarrierMark> DecodeMark(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(text, ' ');
  BarrierMark mark;
  if (!absl::SimpleAtoi(parts.first, &mark.worker) ||
      !absl::SimpleAtoi(parts.second, &mark.barrier) || mark.barrier < 0) {
    return std::nullopt;
  }
  return mark;
}

// Another thread may have been in the same barrier, and be further by now.
void RaiseTo(int64_t number, std::atomic<int64_t>& last) {
  int64_t now = last;
  while (now < number && !last.compare_exchange_weak(now, number)) continue;
}

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

absl::Duration Patience(Deadline deadline) {
  return absl::Trunc(deadline.Left() + absl::Milliseconds(1), absl::Milliseconds(1));
}

}  // namespace

// --------------------------------------------------------------------------- Claiming a rank

absl::Status Membership::CheckOptions() const {
  if (options_.max_workers < 1 || options_.max_workers > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_workers must be 1 to ", kMaxRanks, ", not ", options_.max_workers));
  }
  if (!options_.name.empty()) DG_RETURN_IF_ERROR(CheckName(options_.name));
  if (options_.join) return absl::OkStatus();
  if (options_.world_size < 1 || options_.world_size > options_.max_workers || options_.rank < 0 ||
      options_.rank >= options_.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no rank ", options_.rank, " in a job of ", options_.world_size,
                     " workers (at most ", options_.max_workers, ")"));
  }
  return absl::OkStatus();
}

std::string Membership::NameAt(int rank) const {
  return options_.name.empty() ? absl::StrCat("worker", rank) : options_.name;
}

absl::StatusOr<WorkerInfo> Membership::Claim(Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckOptions());
  DG_ASSIGN_OR_RETURN(self_, options_.join ? ClaimByName(deadline) : ClaimRank(deadline));
  return self_;
}

absl::StatusOr<WorkerInfo> Membership::ClaimRank(Deadline deadline) {
  WorkerInfo self;
  self.rank = static_cast<WorkerRank>(options_.rank);
  self.name = NameAt(options_.rank);
  world_size_ = options_.world_size;
  DG_ASSIGN_OR_RETURN(const int64_t count,
                      store_->Add(IncarnationsKey(options_.rank), 1, deadline));
  self.incarnation = MakeIncarnation(count);
  if (count == 1) return self;

  const auto refuse = [&] { return RankIsTaken(self.name, self.rank); };
  DG_ASSIGN_OR_RETURN(const Store::Value outcome, TryGet(*store_, kOutcome, deadline));
  if (!outcome.has_value() || !outcome->empty()) {
    // Before the start that is a mistake; the worker that comes second tells everyone.
    DG_RETURN_IF_ERROR(Settle(
        *store_, options_.world_size,
        absl::StrCat("two workers claim rank ", self.rank, "; the second is '", self.name, "'"),
        deadline));
    return refuse();
  }
  DG_ASSIGN_OR_RETURN(const int size, ReadNumber(*store_, kSize, deadline));
  if (size != options_.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker '", self.name, "' cannot come back to a job that started with ", size,
                     " workers as one of ", options_.world_size));
  }
  DG_ASSIGN_OR_RETURN(const WorkerInfo before, Find(self.rank, deadline));
  if (before.name != self.name) return refuse();
  return NextIncarnation(self.rank, count);
}

absl::StatusOr<WorkerInfo> Membership::ClaimByName(Deadline deadline) {
  const auto outcome = store_->Get(kOutcome, deadline);
  if (absl::IsNotFound(outcome.status())) {
    return absl::DeadlineExceededError(
        "the job that is to be joined has not started (or torchrun has, whose jobs nobody joins)");
  }
  DG_RETURN_IF_ERROR(outcome.status());
  if (!outcome->empty()) return absl::AlreadyExistsError(*outcome);
  DG_ASSIGN_OR_RETURN(world_size_, ReadNumber(*store_, kSize, deadline));

  if (!options_.name.empty()) {
    const std::string& name = options_.name;
    DG_ASSIGN_OR_RETURN(std::optional<int> rank, RankOf(name, deadline));
    if (!rank.has_value()) {
      // Looks before it claims: of one claim alone it is known whose it was, however often others
      // have come and gone since, and they take no more ranks.
      DG_ASSIGN_OR_RETURN(const int64_t claims, store_->Add(ClaimedKey(name), 0, deadline));
      if (claims == 0) {
        DG_ASSIGN_OR_RETURN(const int next, NextRank(deadline));
        DG_ASSIGN_OR_RETURN(rank, ClaimName(name, next, deadline));
      } else {
        DG_ASSIGN_OR_RETURN(rank, SayFirst(name, claims, deadline));
      }
    }
    if (rank.has_value()) return ClaimIncarnation(*rank, deadline);
    const absl::StatusOr<int> known = ReadNumber(*store_, NameKey(name), deadline);
    if (absl::IsNotFound(known.status())) {
      return absl::AlreadyExistsError(absl::StrCat(
          "worker '", name,
          "' cannot join: several workers have asked for this name at once, and "
          "the first of them are late, or have ended; if it stays so, take another name"));
    }
    DG_RETURN_IF_ERROR(known.status());
    return ClaimIncarnation(*known, deadline);
  }
  for (;;) {
    DG_ASSIGN_OR_RETURN(const int rank, NextRank(deadline));
    DG_ASSIGN_OR_RETURN(std::optional<int> its, RankOf(NameAt(rank), deadline));
    if (its.has_value()) continue;  // somebody has asked for that name
    DG_ASSIGN_OR_RETURN(its, ClaimName(NameAt(rank), rank, deadline));
    if (its == rank) return ClaimIncarnation(rank, deadline);
  }
}

absl::StatusOr<int> Membership::NextRank(Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t joined, store_->Add(kJoiners, 1, deadline));
  const int64_t rank = world_size_ + joined - 1;
  if (rank < options_.max_workers) return static_cast<int>(rank);
  DG_RETURN_IF_ERROR(store_->Add(kJoiners, -1, deadline).status());
  return absl::ResourceExhaustedError(absl::StrCat(
      "the job has had ", rank, " workers, and max_workers is ", options_.max_workers));
}

absl::StatusOr<std::optional<int>> Membership::RankOf(const std::string& name, Deadline deadline) {
  const std::string key = NameKey(name);
  DG_ASSIGN_OR_RETURN(const Store::Value rank, TryGet(*store_, key, deadline));
  if (!rank.has_value()) return std::nullopt;
  return ParseNumber(key, *rank);
}

absl::StatusOr<std::optional<int>> Membership::ClaimName(const std::string& name, int rank,
                                                         Deadline deadline) {
  const int64_t claim = kOneClaim + rank;
  DG_ASSIGN_OR_RETURN(const int64_t claims, store_->Add(ClaimedKey(name), claim, deadline));
  if (claims < claim) return Malformed(ClaimedKey(name));
  return SayFirst(name, claims == claim ? claims : claims - claim, deadline);
}

absl::StatusOr<std::optional<int>> Membership::SayFirst(const std::string& name, int64_t claims,
                                                        Deadline deadline) {
  if (claims / kOneClaim > 1) return std::nullopt;
  const int64_t first = claims < kOneClaim ? -1 : claims - kOneClaim;
  DG_ASSIGN_OR_RETURN(const int ranks, CountRanks(deadline));
  if (first < world_size_ || first >= ranks) return Malformed(ClaimedKey(name));
  // Whoever knows it says it: all say the same.
  DG_RETURN_IF_ERROR(store_->Set(NameKey(name), absl::StrCat(first), deadline));
  return static_cast<int>(first);
}

absl::StatusOr<WorkerInfo> Membership::ClaimIncarnation(int rank, Deadline deadline) {
  // No counter is believed that leads to somebody else.
  DG_ASSIGN_OR_RETURN(const Store::Value entry, TryGet(*store_, EntryKey(rank), deadline));
  if (entry.has_value()) {
    DG_ASSIGN_OR_RETURN(const WorkerInfo before,
                        DecodeWorkerInfo(*entry, static_cast<WorkerRank>(rank)));
    if (before.name != NameAt(rank)) return RankIsTaken(NameAt(rank), rank);
  }
  DG_ASSIGN_OR_RETURN(const int64_t count, store_->Add(IncarnationsKey(rank), 1, deadline));
  return NextIncarnation(static_cast<WorkerRank>(rank), count);
}

absl::StatusOr<WorkerInfo> Membership::NextIncarnation(WorkerRank rank, int64_t count) {
  late_ = true;
  WorkerInfo self;
  self.rank = rank;
  self.name = NameAt(rank);
  self.incarnation = MakeIncarnation(count);
  return self;
}

// ---------------------------------------------------------------------------------- Entering

absl::Status Membership::Publish(Deadline deadline) {
  return store_->Set(EntryKey(self_.rank), EncodeWorkerInfo(self_), deadline);
}

absl::Status Membership::WakeBarriers(Deadline deadline) {
  return store_->Set(kChanges, absl::StrCat(RandomNumber() >> 1), deadline);
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::Enter(const WorkerInfo& self,
                                                          Deadline deadline) {
  self_ = self;
  if (self_.address.size() > kMaxWorkerText) {
    return absl::InvalidArgumentError(absl::StrCat("the address of worker '", self_.name,
                                                   "' is longer than ", kMaxWorkerText, " bytes"));
  }
  // The others could not read it, and would fail whenever they read all.
  if (self_.devices.size() > kMaxWorkerDevices) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the device maps of worker '", self_.name, "' take ", self_.devices.size(),
        " bytes, and at most ", kMaxWorkerDevices, " fit: give it fewer, or shorter names"));
  }
  if (!late_) return EnterAtStart(deadline);
  absl::StatusOr<std::vector<WorkerInfo>> all = EnterLate(deadline);
  // The others would wait for one that is not there.
  if (!all.ok()) Leave(absl::InfinitePast()).IgnoreError();
  return all;
}

// The last worker that comes tells all, and then they read all entries.
absl::StatusOr<std::vector<WorkerInfo>> Membership::GatherEntries(Deadline deadline) {
  const absl::Duration patience = Patience(deadline);
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size_; ++rank) keys.push_back(EntryKey(rank));
  DG_ASSIGN_OR_RETURN(const int64_t joined, store_->Add(kJoined, 1, deadline));
  if (joined == world_size_) DG_RETURN_IF_ERROR(store_->Set(kAll, "1", deadline));
  std::string next = kAll;
  for (;;) {
    const absl::StatusOr<Store::Value> come = Await(*store_, next, deadline);
    if (IsSilence(come.status(), deadline)) continue;
    DG_RETURN_IF_ERROR(come.status());
    const bool late = !come->has_value();
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> entries, store_->GetEach(keys, deadline));
    std::vector<WorkerInfo> workers;
    std::vector<std::string> missing;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!entries[rank].has_value()) {
        missing.push_back(absl::StrCat(rank));
        continue;
      }
      DG_ASSIGN_OR_RETURN(WorkerInfo worker,
                          DecodeWorkerInfo(*entries[rank], static_cast<WorkerRank>(rank)));
      workers.push_back(std::move(worker));
    }
    if (missing.empty()) return workers;
    if (late) {
      return absl::DeadlineExceededError(
          absl::StrCat(missing.size() == 1 ? "worker " : "workers ", FirstOf(missing), " of ",
                       world_size_, " did not join within ", absl::FormatDuration(patience)));
    }
    next = absl::StrCat("worker/", missing[0]);  // somebody has counted who has no entry
  }
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::EnterAtStart(Deadline deadline) {
  const absl::Duration patience = Patience(deadline);
  DG_RETURN_IF_ERROR(store_->Set(NameKey(self_.name), absl::StrCat(self_.rank), deadline));
  DG_RETURN_IF_ERROR(Publish(deadline));
  DG_ASSIGN_OR_RETURN(std::vector<WorkerInfo> workers, GatherEntries(deadline));

  // All workers see the same names, and so find the same fault.
  std::map<absl::string_view, int> ranks;
  for (const WorkerInfo& worker : workers) {
    const auto [other, is_new] = ranks.emplace(worker.name, worker.rank);
    if (!is_new) {
      return absl::AlreadyExistsError(absl::StrCat("workers ", other->second, " and ", worker.rank,
                                                   " have the same name, '", worker.name, "'"));
    }
  }

  DG_ASSIGN_OR_RETURN(const int64_t ready, store_->Add(kReady, 1, deadline));
  if (ready == world_size_) DG_RETURN_IF_ERROR(Settle(*store_, world_size_, "", deadline));
  absl::StatusOr<Store::Value> outcome;
  do {
    outcome = Await(*store_, kOutcome, deadline);
  } while (IsSilence(outcome.status(), deadline));
  DG_RETURN_IF_ERROR(outcome.status());
  if (!outcome->has_value()) {
    return absl::DeadlineExceededError(absl::StrCat("all ", world_size_,
                                                    " workers joined, but not all of them were "
                                                    "ready within ",
                                                    absl::FormatDuration(patience)));
  }
  size_ = world_size_;
  return workers;
}

// Whoever comes to a barrier says so before it reads who the members are, and this reads who has
// come where after it is a member: so a barrier that begins later cannot miss it.
absl::StatusOr<std::vector<WorkerInfo>> Membership::EnterLate(Deadline deadline) {
  for (;;) {
    DG_RETURN_IF_ERROR(Publish(deadline));
    DG_ASSIGN_OR_RETURN(const int ranks, CountRanks(deadline));
    std::vector<std::string> keys;
    for (int rank = 0; rank < ranks; ++rank) keys.push_back(AtKey(rank));
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> marks, store_->GetEach(keys, deadline));
    int64_t begun = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!marks[i].has_value()) continue;
      const std::optional<BarrierMark> mark = DecodeMark(*marks[i]);
      if (!mark.has_value()) return Malformed(keys[i]);
      begun = std::max(begun, mark->barrier);
    }
    if (begun == self_.barriers) break;
    self_.barriers = begun;
  }
  barriers_ = self_.barriers;
  DG_RETURN_IF_ERROR(WakeBarriers(deadline));
  // Of two that came at the same time the earlier one may have been the slower one.
  DG_ASSIGN_OR_RETURN(const Store::Value entry, TryGet(*store_, EntryKey(self_.rank), deadline));
  DG_RETURN_IF_ERROR(CheckOwnEntry(entry, deadline));
  return All(deadline);
}

// ---------------------------------------------------------------------------------- Members

absl::StatusOr<WorkerInfo> Membership::Find(WorkerRank rank, Deadline deadline) {
  return FindEach({rank}, deadline)[0];
}

absl::StatusOr<WorkerInfo> Membership::Find(absl::string_view name, Deadline deadline) {
  return FindEach({std::string(name)}, deadline)[0];
}

std::vector<absl::StatusOr<WorkerInfo>> Membership::FindEach(absl::Span<const Who> workers,
                                                             Deadline deadline) {
  const Words words = WordsSoFar();
  std::vector<absl::StatusOr<WorkerInfo>> found;
  // Of several, one that somebody else has written would fail all.
  const auto one_by_one = [&] {
    for (const Who& who : workers) found.push_back(FindEach({who}, deadline)[0]);
    return found;
  };
  const auto fails = [&](const absl::Status& status) {
    if (absl::IsUnauthenticated(status) && workers.size() > 1) return one_by_one();
    found.assign(workers.size(), status);
    return found;
  };

  std::vector<std::string> names;  // keys
  for (const Who& who : workers) {
    const auto* name = std::get_if<std::string>(&who);
    if (name != nullptr && CheckName(*name).ok()) names.push_back(NameKey(*name));
  }
  const absl::StatusOr<std::vector<Store::Value>> ranks = store_->GetEach(names, deadline);
  if (!ranks.ok()) return fails(ranks.status());

  // Of each the error so far, or its rank.
  std::vector<absl::StatusOr<int>> known;
  std::vector<std::string> keys;
  for (const Who& who : workers) {
    if (const auto* rank = std::get_if<WorkerRank>(&who)) {
      known.emplace_back(*rank);
    } else {
      const std::string& name = std::get<std::string>(who);
      const absl::Status status = CheckName(name);
      const size_t at = std::find(names.begin(), names.end(), NameKey(name)) - names.begin();
      if (!status.ok()) {
        known.emplace_back(status);
      } else if (!(*ranks)[at].has_value()) {
        known.emplace_back(
            absl::NotFoundError(absl::StrCat("there is no worker '", name, "' in this job")));
      } else {
        known.push_back(ParseNumber(names[at], *(*ranks)[at]));
      }
    }
    if (known.back().ok()) keys.push_back(EntryKey(*known.back()));
  }
  const absl::StatusOr<std::vector<Store::Value>> entries = store_->GetEach(keys, deadline);
  if (!entries.ok()) return fails(entries.status());

  size_t next = 0;
  for (size_t i = 0; i < workers.size(); ++i) {
    if (!known[i].ok()) {
      found.push_back(known[i].status());
      continue;
    }
    const Store::Value& entry = (*entries)[next++];
    const auto rank = static_cast<WorkerRank>(*known[i]);
    if (!entry.has_value()) {
      found.push_back(
          absl::NotFoundError(absl::StrCat("there is no worker with rank ", rank, " in this job")));
      continue;
    }
    found.push_back(DecodeWorkerInfo(*entry, rank));
    if (found.back().ok()) Forget(words, *found.back(), /*loss=*/{});
    const auto* name = std::get_if<std::string>(&workers[i]);
    if (name != nullptr && found.back().ok() && found.back()->name != *name) {
      found.back() = absl::InvalidArgumentError(
          absl::StrCat("the store takes worker '", found.back()->name, "' for '", *name, "'"));
    }
  }
  return found;
}

absl::StatusOr<int> Membership::CountRanks(Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t joiners, store_->Add(kJoiners, 0, deadline));
  return static_cast<int>(
      std::min<int64_t>(world_size_ + std::max<int64_t>(joiners, 0), options_.max_workers));
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::AllEver(Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int ranks,
                      Patiently(deadline, [&](Deadline until) { return CountRanks(until); }));
  std::vector<std::string> keys;
  for (int rank = 0; rank < ranks; ++rank) keys.push_back(EntryKey(rank));
  const Words words = WordsSoFar();
  DG_ASSIGN_OR_RETURN(
      const std::vector<Store::Value> entries,
      Patiently(deadline, [&](Deadline until) { return store_->GetEach(keys, until); }));
  std::vector<WorkerInfo> workers;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!entries[rank].has_value()) continue;  // it has claimed its rank, and no more
    DG_ASSIGN_OR_RETURN(WorkerInfo worker,
                        DecodeWorkerInfo(*entries[rank], static_cast<WorkerRank>(rank)));
    Forget(words, worker, /*loss=*/{});
    if (worker.rank == self_.rank && worker.incarnation < self_.incarnation && !has_left_) {
      PutEntryRight(absl::InfinitePast()).IgnoreError();  // the next look does it, too
      worker = self_;
    }
    workers.push_back(std::move(worker));
  }
  return workers;
}

absl::StatusOr<std::vector<int64_t>> Membership::StartsOf(absl::Span<const WorkerInfo> workers,
                                                          Deadline deadline) {
  const bool had_time = !deadline.Passed();  // else each is asked once
  std::vector<int64_t> starts;
  for (const WorkerInfo& worker : workers) {
    if (had_time && deadline.Passed()) {
      return absl::DeadlineExceededError("reading how often each worker was started");
    }
    const std::string key = IncarnationsKey(worker.rank);
    const absl::StatusOr<int64_t> its =
        Patiently(deadline, [&](Deadline until) { return store_->Add(key, 0, until); });
    // Whoever has spoilt one may have had any number there.
    if (absl::IsInvalidArgument(its.status())) {
      starts.push_back(kMaxStarts);
      continue;
    }
    DG_RETURN_IF_ERROR(its.status());
    starts.push_back(*its);
  }
  return starts;
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::All(Deadline deadline) {
  DG_ASSIGN_OR_RETURN(std::vector<WorkerInfo> workers, AllEver(deadline));
  workers.erase(std::remove_if(workers.begin(), workers.end(),
                               [](const auto& worker) { return worker.left; }),
                workers.end());
  size_ = static_cast<int>(workers.size());
  if (read_ != nullptr) read_(workers, {});
  return workers;
}

absl::Status Membership::Leave(Deadline deadline) {
  DG_RETURN_IF_ERROR(PublishLeft(deadline));
  return Patiently(deadline, [&](Deadline until) { return WakeBarriers(until); });
}

absl::Status Membership::PublishLeft(Deadline deadline) {
  if (is_over_) return Replaced();
  has_left_ = true;
  const absl::StatusOr<Store::Value> entry = Patiently(
      deadline, [&](Deadline until) { return TryGet(*store_, EntryKey(self_.rank), until); });
  if (entry.ok()) {
    DG_RETURN_IF_ERROR(CheckOwnEntry(*entry, deadline));
  } else {
    deadline = absl::InfinitePast();  // it has been waited for once
  }
  return Patiently(deadline, [&](Deadline until) {
    return store_->Set(EntryKey(self_.rank), EncodeWorkerInfo(Left()), until);
  });
}

absl::Status Membership::CheckOwnEntry(const Store::Value& entry, Deadline deadline) {
  if (!entry.has_value()) return absl::OkStatus();
  DG_ASSIGN_OR_RETURN(const WorkerInfo now, DecodeWorkerInfo(*entry, self_.rank));
  if (now.incarnation > self_.incarnation) {
    is_over_ = true;
    // What says that the later one has come may have been there before this one's mark.
    WakeBarriers(absl::InfinitePast()).IgnoreError();
    return Replaced();
  }
  if (now.incarnation == self_.incarnation || has_left_) return absl::OkStatus();
  return PutEntryRight(deadline);
}

absl::Status Membership::PutEntryRight(Deadline deadline) {
  const absl::Status published =
      Patiently(deadline, [&](Deadline until) { return Publish(until); });
  // Another thread may have written meanwhile that this worker has left, and have closed this; and
  // what has failed may have been done all the same.
  if (has_left_) {
    const auto say_left = [&](Deadline until) {
      return store_->Set(EntryKey(self_.rank), EncodeWorkerInfo(Left()), until);
    };
    // Once this worker has left nobody looks again whether the entry is right.
    absl::Status said = Patiently(std::max(deadline, Deadline::After(kLeaveTime)), say_left);
    if (!said.ok() && closed_) said = say_left(Deadline::After(kCheckInterval));
    DG_RETURN_IF_ERROR(said);
  }
  DG_RETURN_IF_ERROR(published);
  return Patiently(deadline, [&](Deadline until) { return WakeBarriers(until); });
}

WorkerInfo Membership::Left() const {
  WorkerInfo left = self_;
  left.left = true;
  return left;
}

absl::StatusOr<Store::Value> Membership::ReadLoss(const std::string& key) {
  absl::StatusOr<std::vector<Store::Value>> values =
      store_->GetEach({key, EntryKey(self_.rank)}, absl::InfinitePast());
  // Somebody else may have written the own entry, which says nothing then.
  if (absl::IsUnauthenticated(values.status())) return TryGet(*store_, key, absl::InfinitePast());
  DG_RETURN_IF_ERROR(values.status());
  const auto now = DecodeWorkerInfo((*values)[1].value_or(""), self_.rank);
  if (now.ok() && now->incarnation > self_.incarnation) is_over_ = true;
  return std::move((*values)[0]);
}

absl::Status Membership::Replaced() const {
  return absl::FailedPreconditionError(
      absl::StrCat("this incarnation of worker '", self_.name, "' (", self_.rank,
                   ") is over: the worker has come back since, in another process"));
}

// ----------------------------------------------------------------------------- Lost members

bool Membership::MarkLost(const WorkerInfo& member, std::string reason) {
  if (!announcer_.Start().ok()) return false;
  LostMember lost{member, std::move(reason)};
  // What needs memory comes before what changes: these are put into the maps as they are.
  std::map<WorkerRank, Told> told;
  told[member.rank].lost = lost;
  std::map<WorkerRank, int> unsaid{{member.rank, 0}};
  absl::MutexLock lock(&mu_);
  // It waits for this lock before it asks whether this still holds.
  announcer_.Schedule([this, lost = std::move(lost)] { AwaitMemory([&] { Announce(lost); }); });
  told.begin()->second.word = ++last_word_;
  lost_.erase(member.rank);
  lost_.merge(told);
  unsaid_.merge(unsaid);  // unless it has one
  ++unsaid_.find(member.rank)->second;
  return true;
}

Membership::Loss Membership::LossOf(const WorkerInfo& member, const Store::Value& entry) {
  if (!entry.has_value()) return {};
  if (entry->empty()) return {.is_denied = true};
  absl::string_view reason = *entry;
  if (!absl::ConsumePrefix(&reason, absl::StrCat(member.incarnation, " "))) return {};
  return {.is_lost = true, .reason = std::string(reason.substr(0, kMaxReason))};
}

void Membership::MarkAlive(WorkerRank member, Incarnation incarnation) {
  {
    absl::MutexLock lock(&mu_);
    const auto lost = lost_.find(member);
    if (lost == lost_.end() || lost->second.lost.worker.incarnation != incarnation) return;
    // First, for it needs memory. It waits for this lock before it asks whether this still holds.
    announcer_.Schedule([this, member] { AwaitMemory([&] { TakeBack(member); }); });
    lost_.erase(lost);
  }
}

bool Membership::Say(const std::string& key, const std::string& value,
                     absl::FunctionRef<bool(const Store::Value&)> is_wanted) {
  enum { kAsk, kSay, kRing, kDone } next = kAsk;
  std::optional<Store::Value> before;  // what was there when it was said for the first time
  absl::Duration pause = kFirstPause;
  const auto go_on = [&]() -> absl::Status {
    if (next == kAsk) {
      DG_ASSIGN_OR_RETURN(Store::Value said, ReadLoss(key));
      if (before.has_value() && said == value) {
        next = kRing;  // it came there, and the answer did not
        return absl::OkStatus();
      }
      // What somebody has said since may be the answer to what came there. (A member that had
      // denied an earlier loss, and denies this one, leaves what was there before.)
      const bool is_answered = before.has_value() && said != *before;
      next = !is_answered && is_wanted(said) ? kSay : kDone;
      before = std::move(said);
      return absl::OkStatus();
    }
    if (next == kSay) {
      next = kAsk;  // should it not be known whether it came there
      DG_RETURN_IF_ERROR(store_->Set(key, value, absl::InfinitePast()));
      next = kRing;
      return absl::OkStatus();
    }
    DG_RETURN_IF_ERROR(WakeBarriers(absl::InfinitePast()));
    next = kDone;
    return absl::OkStatus();
  };
  while (next != kDone && !closed_) {
    // What was done stays done where there is no memory for what follows.
    const absl::Status status = AwaitMemory(go_on);
    // Nobody else may know of it: so a store that is silent, or has no room, is asked for as long
    // as that lasts.
    if (absl::IsResourceExhausted(status)) {
      for (absl::Duration left = pause; left > absl::ZeroDuration() && !closed_;
           left -= kCheckClosed) {
        absl::SleepFor(std::min(left, kCheckClosed));
      }
      pause = std::min(2 * pause, kLongestPause);
    } else if (!status.ok() && !absl::IsDeadlineExceeded(status)) {
      return false;
    }
  }
  return next == kDone;
}

void Membership::Announce(const LostMember& lost) {
  const WorkerRank rank = lost.worker.rank;
  const std::string words =
      absl::StrCat(lost.worker.incarnation, " ", lost.reason.substr(0, kMaxReason));
  Say(LostKey(rank), words, [&](const Store::Value& entry) {
    if (LossOf(lost.worker, entry).is_lost) return false;  // mostly another has said it
    // Whoever has said it of a later one, which has died too, would not say it again.
    if (SaidOf(entry) > lost.worker.incarnation) return false;
    // Of one whose worker has come back the others refuse each connection: so it finds all of them
    // lost.
    if (is_over_) return false;
    absl::MutexLock lock(&mu_);
    const auto still = lost_.find(rank);
    if (still == lost_.end() || still->second.lost.worker.incarnation != lost.worker.incarnation) {
      return false;
    }
    said_[rank] = words;
    return true;
  });
  // Also where it could not be written, for it never will be: what the member says from now on is
  // heard. A denial of an earlier loss that still stands there is then taken for one of this.
  absl::MutexLock lock(&mu_);
  if (--unsaid_[rank] == 0) unsaid_.erase(rank);
}

// What another worker says may be later than the life that this one has seen, and stays: the member
// itself denies it. Where both have found it lost, and this one was first, the other has said
// nothing; but this one, which watches the member again, finds it lost once more.
void Membership::TakeBack(WorkerRank member) {
  const bool is_done = Say(LostKey(member), "", [&](const Store::Value& entry) {
    absl::MutexLock lock(&mu_);
    return IsTakenBack(member, entry);
  });
  absl::MutexLock lock(&mu_);
  if (is_done && lost_.count(member) == 0) said_.erase(member);
}

bool Membership::IsTakenBack(WorkerRank member, const Store::Value& entry) {
  const auto said = said_.find(member);
  return said != said_.end() && entry == said->second && lost_.count(member) == 0;
}

absl::StatusOr<bool> Membership::DenyLoss() {
  DG_RETURN_IF_ERROR(CheckOpen());
  constexpr absl::Time kNow = absl::InfinitePast();
  const std::string key = LostKey(self_.rank);
  DG_ASSIGN_OR_RETURN(const Store::Value entry, ReadLoss(key));
  // What would be written could take the place of what is said of the next one meanwhile.
  if (is_over_) return false;
  const bool is_lost = LossOf(self_, entry).is_lost;
  {
    // What is not there any more another thread may have just denied, and those who would read that
    // may not be woken yet: it waits for the store, and may give up. Or it has given up: whoever
    // takes that over says so again if it fails, too.
    absl::MutexLock lock(&mu_);
    if (!is_lost && denials_ == 0 && !denial_is_unheard_) return false;
    denial_is_unheard_ = false;
    ++denials_;
  }
  bool is_heard = false;
  const absl::Cleanup is_over = [this, &is_heard] {
    absl::MutexLock lock(&mu_);
    denial_is_unheard_ = denial_is_unheard_ || !is_heard;
    --denials_;
  };
  if (is_lost) DG_RETURN_IF_ERROR(store_->Set(key, "", kNow));
  DG_RETURN_IF_ERROR(WakeBarriers(kNow));
  is_heard = true;
  return true;
}

bool Membership::DenialIsUnheard() {
  absl::MutexLock lock(&mu_);
  return denial_is_unheard_;
}

absl::StatusOr<int64_t> Membership::Changes() {
  DG_ASSIGN_OR_RETURN(const Store::Value entry, TryGet(*store_, kChanges, absl::InfinitePast()));
  int64_t number = 0;
  if (entry.has_value() && !absl::SimpleAtoi(*entry, &number)) return Malformed(kChanges);
  return number;
}

Membership::Words Membership::WordsSoFar() {
  absl::MutexLock lock(&mu_);
  return {.last = last_word_, .unsaid = unsaid_};
}

void Membership::Forget(const Words& words, const WorkerInfo& member, const Loss& loss) {
  absl::MutexLock lock(&mu_);
  const auto told = lost_.find(member.rank);
  if (told == lost_.end() || told->second.word > words.last) return;
  const Incarnation incarnation = told->second.lost.worker.incarnation;
  if (incarnation > member.incarnation) return;  // what was read of it is older
  const bool is_denied = words.IsDenied(member.rank, loss);
  if (!member.left && incarnation == member.incarnation && !is_denied) return;
  lost_.erase(told);
  said_.erase(member.rank);
}

absl::StatusOr<Membership::Losses> Membership::LossesOf(const std::vector<WorkerInfo>& members) {
  const Words words = WordsSoFar();
  std::vector<std::string> keys;
  for (const WorkerInfo& member : members) keys.push_back(LostKey(member.rank));
  DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> entries,
                      store_->GetEach(keys, absl::InfinitePast()));
  Losses losses;
  for (size_t i = 0; i < members.size(); ++i) {
    Loss loss = LossOf(members[i], entries[i]);
    Forget(words, members[i], loss);
    if (members[i].left) continue;
    if (loss.is_lost) {
      absl::MutexLock lock(&mu_);
      if (!IsTakenBack(members[i].rank, entries[i])) {
        losses.lost.push_back({members[i], std::move(loss.reason)});
      }
    }
    const bool is_denied = words.IsDenied(members[i].rank, loss);
    if (is_denied) losses.denied.push_back(members[i]);
    losses.are_all_said = losses.are_all_said && is_denied == loss.is_denied;
  }
  return losses;
}

absl::Status Membership::WithLost(const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsResourceExhausted(status)) return status;
  std::vector<LostMember> lost;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [rank, told] : lost_) lost.push_back(told.lost);
  }
  if (lost.empty()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(Lost(lost).message(), ", and ", status.message()));
}

// --------------------------------------------------------------------------------- Barriers

absl::Status Membership::Barrier(Deadline deadline, OnLost on_lost,
                                 absl::FunctionRef<absl::Status()> finish) {
  const int64_t number = barriers_ + 1;
  const BarrierSpec barrier{absl::StrCat("barrier/", number), "at", number, on_lost};
  absl::Status status = WaitAtBarrier(barrier, deadline);
  if (status.ok()) status = finish();
  if (status.ok()) RaiseTo(number, barriers_);
  return Annotate(status, "waiting for all workers");
}

absl::Status Membership::Shutdown(Deadline deadline, OnLost on_lost,
                                  absl::FunctionRef<absl::Status()> finish) {
  // Worker 0, which may serve the store, goes without those who are lost.
  absl::Status status =
      WithLost(Patiently(deadline, [this](Deadline) { return DenyLoss(); }).status());
  if (status.ok()) status = WaitAtBarrier({"shutdown", "shutdown", kLast, on_lost}, deadline);
  if (status.ok()) status = finish();
  if (status.ok()) status = WaitAtBarrier({"finish", "finish", kLast, on_lost}, deadline);
  if (status.ok()) finished_ = true;
  // So that worker 0 does not miss it, when it is gone. Nobody else has to hear of it.
  if (status.ok()) status = PublishLeft(deadline);
  if (status.ok()) status = GoAfterAll(deadline);
  return Annotate(status, "waiting for all workers to shut down");
}

// Once worker 0 knows that all others have left it goes, and the store with it. So of the others
// only the last has something to say, and none minds if nobody hears it.
absl::Status Membership::GoAfterAll(Deadline deadline) {
  const BarrierSpec left{"left", "left", kLast, OnLost::kGoOnWithout};
  if (self_.rank == 0) return WaitAtBarrier(left, deadline);
  constexpr absl::Time kNow = absl::InfinitePast();
  const absl::StatusOr<int64_t> come = store_->Add(left.name + "/count", 1, kNow);
  if (!come.ok() || *come < size_) return absl::OkStatus();
  const absl::StatusOr<Absent> absent = FindAbsent(left, kNow);
  if (absent.ok() && absent->late.empty()) Open(left, kNow).IgnoreError();
  return absl::OkStatus();
}

absl::Status Membership::CheckOpen() const {
  if (!closed_) return absl::OkStatus();
  return absl::CancelledError("this worker is shutting down");
}

template <typename Ask>
auto Membership::Patiently(Deadline deadline, const Ask& ask) -> decltype(ask(deadline)) {
  const Deadline limit = Deadline::After(options_.store_limit);
  for (bool again = false;; again = true) {
    DG_RETURN_IF_ERROR(CheckOpen());
    auto answer = ask(std::min(deadline, Deadline::After(kCheckInterval)));
    const absl::Status status = StatusOf(answer);
    if (!IsSilence(status, deadline)) return answer;
    // Once is not enough: this process may itself have been stopped for so long.
    if (!again || !limit.Passed()) continue;
    return absl::UnavailableError(absl::StrCat("the job's store has not answered for ",
                                               absl::FormatDuration(options_.store_limit), ": ",
                                               status.message()));
  }
}

std::string Membership::MarkKey(const BarrierSpec& barrier, WorkerRank worker) {
  return absl::StrCat(barrier.arrivals, "/", worker);
}

// Another thread may be further, and its mark must not be taken back.
absl::Status Membership::WriteMark(const BarrierSpec& barrier, Deadline deadline) {
  BarrierSpec furthest = barrier;
  if (barrier.number != kLast) RaiseTo(barrier.number, coming_);
  for (;;) {
    if (barrier.number != kLast) furthest.number = coming_;
    DG_RETURN_IF_ERROR(Patiently(deadline, [&](Deadline until) {
      return store_->Set(MarkKey(furthest, self_.rank),
                         EncodeMark({self_.incarnation, furthest.number}), until);
    }));
    if (barrier.number == kLast || coming_ == furthest.number) return absl::OkStatus();
  }
}

bool Membership::HasCome(const BarrierSpec& barrier, const WorkerInfo& worker,
                         const Store::Value& mark) {
  const std::optional<BarrierMark> come = DecodeMark(mark.value_or(""));
  return come.has_value() && come->worker == worker.incarnation && come->barrier >= barrier.number;
}

absl::StatusOr<Membership::Absent> Membership::FindAbsent(const BarrierSpec& barrier,
                                                          Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int ranks, CountRanks(deadline));
  std::vector<std::string> keys;
  for (int rank = 0; rank < ranks; ++rank) {
    keys.push_back(EntryKey(rank));
    keys.push_back(LostKey(rank));
    keys.push_back(MarkKey(barrier, static_cast<WorkerRank>(rank)));
  }
  const Words words = WordsSoFar();
  DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> values, store_->GetEach(keys, deadline));
  Absent absent;
  std::vector<WorkerInfo> members, denied;
  int present = 0;
  bool any_lost = false;
  for (int rank = 0; rank < ranks; ++rank) {
    const Store::Value* const of_worker = &values[size_t{3} * rank];
    if (!of_worker[0].has_value()) continue;
    DG_ASSIGN_OR_RETURN(WorkerInfo member,
                        DecodeWorkerInfo(*of_worker[0], static_cast<WorkerRank>(rank)));
    Loss loss = LossOf(member, of_worker[1]);
    Forget(words, member, loss);
    const bool is_this = member.rank == self_.rank && member.incarnation == self_.incarnation;
    if (member.left) continue;
    const bool lost = loss.is_lost;
    members.push_back(member);
    if (words.IsDenied(member.rank, loss)) denied.push_back(member);
    if (lost && is_this) {
      absent.self = true;
    } else if (lost) {
      any_lost = true;
    }
    present += lost ? 0 : 1;
    if (member.barriers >= barrier.number || HasCome(barrier, member, of_worker[2])) continue;
    absent.mark_is_gone = absent.mark_is_gone || is_this;
    if (lost) {
      absent.lost.push_back({std::move(member), std::move(loss.reason)});
    } else {
      absent.late.push_back(std::move(member));
    }
  }
  if (read_ != nullptr) read_(members, denied);
  size_ = present;
  any_lost_ = any_lost;
  return absent;
}

// Each worker says that it is there; one that finds that all are opens the barrier. The last to
// come finds it at once. That one has come is said before it is counted, so whoever is counted last
// sees all.
absl::Status Membership::WaitAtBarrier(const BarrierSpec& barrier, Deadline deadline) {
  if (is_over_) return Replaced();
  // A check finds who is lost, whoever has said it and when.
  bool check = any_lost_ && barrier.on_lost == OnLost::kFail;
  if (come_ < barrier.number) {
    DG_RETURN_IF_ERROR(WithLost(WriteMark(barrier, deadline)));
    const absl::StatusOr<int64_t> come = Patiently(
        deadline, [&](Deadline until) { return store_->Add(barrier.name + "/count", 1, until); });
    // Of a counter it may not be known whether it has counted.
    if (!absl::IsAborted(come.status())) DG_RETURN_IF_ERROR(WithLost(come.status()));
    check = check || !come.ok() || *come >= size_;
    if (barrier.number != kLast) RaiseTo(barrier.number, come_);
  }
  const std::string keys[] = {barrier.name + "/open", kChanges, EntryKey(self_.rank)};
  Store::Value changes = LastChanges(), entry = EncodeWorkerInfo(self_);
  Deadline check_again = Deadline::After(CheckAgain(size_));
  for (;;) {
    const Store::Value seen[] = {std::nullopt, changes, entry};
    const auto now = Patiently(deadline, [&](Deadline until) {
      return store_->AwaitChange(
          keys, seen, check ? Deadline(absl::InfinitePast()) : std::min(until, check_again));
    });
    DG_RETURN_IF_ERROR(WithLost(now.status()));
    if ((*now)[2] != entry) {
      entry = (*now)[2];
      DG_RETURN_IF_ERROR(WithLost(CheckOwnEntry(entry, deadline)));
    }
    if ((*now)[0].has_value()) return absl::OkStatus();
    check = check || (*now)[1] != changes || check_again.Passed() || deadline.Passed();
    if (!check) continue;
    changes = (*now)[1];
    const bool last_check = deadline.Passed();
    const absl::StatusOr<Absent> absent =
        Patiently(deadline, [&](Deadline until) { return FindAbsent(barrier, until); });
    DG_RETURN_IF_ERROR(WithLost(absent.status()));
    SetLastChanges(changes);
    check = false;
    check_again = Deadline::After(CheckAgain(size_));
    if (absent->mark_is_gone && !last_check) {
      // An earlier incarnation, which lives, has written its own.
      DG_RETURN_IF_ERROR(WithLost(WriteMark(barrier, deadline)));
      check = true;
      continue;
    }
    // This worker is alive.
    if (absent->self || DenialIsUnheard()) {
      DG_RETURN_IF_ERROR(Patiently(deadline, [this](Deadline) { return DenyLoss(); }).status());
    }
    const bool fails = !absent->lost.empty() && barrier.on_lost == OnLost::kFail;
    if (absent->late.empty() && !fails) return Open(barrier, deadline);
    if (fails) return Lost(absent->lost);
    if (last_check) return NotCome(absent->late);
  }
}

// What the barrier before has left is over with this: whoever has come to this one has seen it.
absl::Status Membership::Open(const BarrierSpec& barrier, Deadline deadline) {
  DG_RETURN_IF_ERROR(WithLost(Patiently(
      deadline, [&](Deadline until) { return store_->Set(barrier.name + "/open", "1", until); })));
  if (barrier.number == kLast) return absl::OkStatus();
  const std::string before = absl::StrCat("barrier/", barrier.number - 1);
  store_->Delete(before + "/count", absl::InfinitePast()).IgnoreError();
  store_->Delete(before + "/open", absl::InfinitePast()).IgnoreError();
  return absl::OkStatus();
}

Store::Value Membership::LastChanges() {
  absl::MutexLock lock(&mu_);
  return changes_;
}

void Membership::SetLastChanges(const Store::Value& changes) {
  absl::MutexLock lock(&mu_);
  changes_ = changes;
}

}  // namespace distgrad
