#include "core/rpc/membership.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

constexpr int kMaxIds = 1 << 16;  // ids have 16 bits
constexpr size_t kMaxNamed = 16;  // workers in a message
constexpr size_t kMaxReason = 1024;  // bytes, why one is lost

constexpr int64_t kLast = std::numeric_limits<int64_t>::max();  // the barrier of the end

// How long a store that is silent is asked again where no deadline says it.
constexpr absl::Duration kPatience = absl::Minutes(1);

// While a worker waits for others it looks this often whether they still have to come.
constexpr absl::Duration kLook = absl::Seconds(1);

// The keys. Ranks and names are claimed by counters: who counts to 1 is the first.
std::string EntryKey(int id) { return absl::StrCat("worker/", id); }
std::string LivesKey(int id) { return absl::StrCat("worker/", id, "/lives"); }
std::string NameKey(absl::string_view name) { return absl::StrCat("name/", name); }  // its id
std::string LostKey(int id) { return absl::StrCat("lost/", id); }  // the incarnation that is
std::string ClaimsKey(absl::string_view name) { return absl::StrCat("claims/", name); }
constexpr char kReady[] = "ready";        // counts the workers that know all others
constexpr char kSettled[] = "settled";    // who counts to 1 writes the outcome
constexpr char kOutcome[] = "outcome";    // "" or why nobody may start
constexpr char kSize[] = "size";          // how many workers the job started with
constexpr char kJoiners[] = "joiners";    // counts those who came later
constexpr char kBarriers[] = "barriers";  // counts the barriers that have begun
constexpr char kChanges[] = "changes";    // counts what happens to members after the start

absl::Status CheckName(absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxWorkerText) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a worker's name must have 1 to ", kMaxWorkerText, " bytes, not ", name.size()));
}

// Later lives have greater numbers; the random half keeps jobs apart that use one store in turn.
Incarnation MakeIncarnation(int64_t life) {
  return (static_cast<uint64_t>(life) << 32) | std::random_device()();
}

// Writes the outcome, unless somebody has.
absl::Status Settle(Store& store, int world_size, absl::string_view outcome) {
  DG_ASSIGN_OR_RETURN(const int64_t turn, store.Add(kSettled, 1));
  if (turn != 1) return absl::OkStatus();
  DG_RETURN_IF_ERROR(store.Set(kSize, absl::StrCat(world_size)));
  return store.Set(kOutcome, std::string(outcome));
}

absl::StatusOr<int> ReadNumber(Store& store, const std::string& key, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const std::string text, store.Get(key, deadline));
  int number = 0;
  if (absl::SimpleAtoi(text, &number) && number >= 0 && number <= kMaxIds) return number;
  return absl::InvalidArgumentError(absl::StrCat("the store's entry '", key, "' is malformed"));
}

// Waits for a key; kAlreadyExists as soon as the job has failed. kNotFound, if it does not come.
absl::StatusOr<std::string> Await(Store& store, const std::string& key, Deadline deadline) {
  for (;;) {
    const bool last = deadline.Left() <= kLook;
    auto value = store.Get(key, last ? deadline : Deadline::After(kLook));
    // A store that is silent is asked again until the deadline.
    const bool is_silent = absl::IsDeadlineExceeded(value.status());
    if (!absl::IsNotFound(value.status()) && !is_silent) return value;
    const auto outcome = store.Get(kOutcome, absl::InfinitePast());
    if (outcome.ok() && !outcome->empty()) return absl::AlreadyExistsError(*outcome);
    if (last) return value;
  }
}

// Whether the store has not answered, and may be asked again before the deadline.
bool IsSilence(const absl::Status& status, Deadline deadline) {
  return absl::IsDeadlineExceeded(status) && !deadline.Passed();
}

// "1, 2, 3 and 4 more"
std::string Several(const std::vector<std::string>& names) {
  const size_t named = std::min(names.size(), kMaxNamed);
  std::string text = absl::StrJoin(names.begin(), names.begin() + named, ", ");
  if (names.size() > named) absl::StrAppend(&text, " and ", names.size() - named, " more");
  return text;
}

std::string NamesOf(const std::vector<WorkerInfo>& workers) {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : workers) {
    names.push_back(absl::StrCat("'", worker.name, "' (", worker.id, ")"));
  }
  return Several(names);
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

absl::Duration Patience(Deadline deadline) {
  return absl::Trunc(deadline.Left() + absl::Milliseconds(1), absl::Milliseconds(1));
}

}  // namespace

// ----------------------------------------------------------------------------------- A seat

absl::Status Membership::CheckSeat() const {
  if (seat_.max_workers < 1 || seat_.max_workers > kMaxIds) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_workers must be 1 to ", kMaxIds, ", not ", seat_.max_workers));
  }
  if (!seat_.name.empty()) DG_RETURN_IF_ERROR(CheckName(seat_.name));
  if (seat_.join) return absl::OkStatus();
  if (seat_.world_size < 1 || seat_.world_size > seat_.max_workers || seat_.rank < 0 ||
      seat_.rank >= seat_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("there is no rank ", seat_.rank, " in a job of ",
                                                   seat_.world_size, " workers (at most ",
                                                   seat_.max_workers, ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<WorkerInfo> Membership::Claim(Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckSeat());
  DG_ASSIGN_OR_RETURN(self_, seat_.join ? ClaimByName(deadline) : ClaimRank());
  return self_;
}

absl::StatusOr<WorkerInfo> Membership::ClaimRank() {
  WorkerInfo self;
  self.id = static_cast<WorkerId>(seat_.rank);
  self.name = seat_.name.empty() ? absl::StrCat("worker", seat_.rank) : seat_.name;
  world_size_ = seat_.world_size;
  DG_ASSIGN_OR_RETURN(const int64_t life, store_->Add(LivesKey(seat_.rank), 1));
  self.incarnation = MakeIncarnation(life);
  if (life == 1) return self;

  const auto refuse = [&] {
    return absl::AlreadyExistsError(absl::StrCat("worker '", self.name, "' cannot join: rank ",
                                                 self.id, " is taken by another worker"));
  };
  const auto outcome = store_->Get(kOutcome, absl::InfinitePast());
  if (!absl::IsNotFound(outcome.status())) DG_RETURN_IF_ERROR(outcome.status());
  if (!outcome.ok() || !outcome->empty()) {
    // Before the start that is a mistake; who comes second tells everyone.
    DG_RETURN_IF_ERROR(Settle(
        *store_, seat_.world_size,
        absl::StrCat("two workers claim rank ", self.id, "; the second is '", self.name, "'")));
    return refuse();
  }
  DG_ASSIGN_OR_RETURN(const int size, ReadNumber(*store_, kSize, absl::InfinitePast()));
  if (size != seat_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("worker '", self.name,
                                                   "' cannot come back to a job that started with ",
                                                   size, " workers as one of ", seat_.world_size));
  }
  DG_ASSIGN_OR_RETURN(const WorkerInfo before, Find(self.id));
  if (before.name != self.name) return refuse();
  return NextLife(self.id, life);
}

absl::StatusOr<WorkerInfo> Membership::ClaimByName(Deadline deadline) {
  const auto outcome = store_->Get(kOutcome, deadline);
  if (absl::IsNotFound(outcome.status())) {
    return absl::DeadlineExceededError("the job that is to be joined has not started");
  }
  DG_RETURN_IF_ERROR(outcome.status());
  if (!outcome->empty()) return absl::AlreadyExistsError(*outcome);
  DG_ASSIGN_OR_RETURN(world_size_, ReadNumber(*store_, kSize, deadline));

  if (!seat_.name.empty()) {
    DG_ASSIGN_OR_RETURN(const int64_t claims, store_->Add(ClaimsKey(seat_.name), 1));
    if (claims > 1) {
      DG_ASSIGN_OR_RETURN(const int id, ReadNumber(*store_, NameKey(seat_.name), deadline));
      DG_ASSIGN_OR_RETURN(const int64_t life, store_->Add(LivesKey(id), 1));
      return NextLife(static_cast<WorkerId>(id), life);
    }
  }
  DG_ASSIGN_OR_RETURN(const int64_t joined, store_->Add(kJoiners, 1));
  const int64_t id = world_size_ + joined - 1;
  if (id >= seat_.max_workers) {
    DG_RETURN_IF_ERROR(store_->Add(kJoiners, -1).status());
    if (!seat_.name.empty()) DG_RETURN_IF_ERROR(store_->Add(ClaimsKey(seat_.name), -1).status());
    return absl::ResourceExhaustedError(
        absl::StrCat("the job has had ", id, " workers, and max_workers is ", seat_.max_workers));
  }
  late_ = true;
  WorkerInfo self;
  self.id = static_cast<WorkerId>(id);
  self.name = seat_.name.empty() ? absl::StrCat("worker", id) : seat_.name;
  DG_RETURN_IF_ERROR(store_->Set(NameKey(self.name), absl::StrCat(id)));
  DG_ASSIGN_OR_RETURN(const int64_t life, store_->Add(LivesKey(self.id), 1));
  self.incarnation = MakeIncarnation(life);
  return self;
}

absl::StatusOr<WorkerInfo> Membership::NextLife(WorkerId id, int64_t life) {
  late_ = true;
  WorkerInfo self;
  self.id = id;
  self.name = seat_.name.empty() ? absl::StrCat("worker", id) : seat_.name;
  self.incarnation = MakeIncarnation(life);
  return self;
}

// ---------------------------------------------------------------------------------- Entering

absl::Status Membership::Publish() {
  return store_->Set(EntryKey(self_.id), EncodeWorkerInfo(self_));
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::Enter(const WorkerInfo& self,
                                                          Deadline deadline) {
  self_ = self;
  if (self_.address.size() > kMaxWorkerText) {
    return absl::InvalidArgumentError(absl::StrCat("the address of worker '", self_.name,
                                                   "' is longer than ", kMaxWorkerText, " bytes"));
  }
  return late_ ? EnterLate() : EnterAtStart(deadline);
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::EnterAtStart(Deadline deadline) {
  const absl::Duration patience = Patience(deadline);
  DG_RETURN_IF_ERROR(store_->Add(ClaimsKey(self_.name), 1).status());
  DG_RETURN_IF_ERROR(store_->Set(NameKey(self_.name), absl::StrCat(self_.id)));
  DG_RETURN_IF_ERROR(Publish());

  std::vector<WorkerInfo> workers;
  std::vector<std::string> missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    // Past the deadline this only asks, so that all who are missing are named.
    const auto entry = Await(*store_, EntryKey(rank), deadline);
    if (absl::IsNotFound(entry.status())) {
      missing.push_back(absl::StrCat(rank));
      continue;
    }
    DG_RETURN_IF_ERROR(Annotate(entry.status(), absl::StrCat("waiting for worker ", rank)));
    DG_ASSIGN_OR_RETURN(WorkerInfo worker, DecodeWorkerInfo(*entry, static_cast<WorkerId>(rank)));
    workers.push_back(std::move(worker));
  }
  if (!missing.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(missing.size() == 1 ? "worker " : "workers ", Several(missing), " of ",
                     world_size_, " did not join within ", absl::FormatDuration(patience)));
  }

  // All workers see the same names, and so find the same fault.
  std::map<absl::string_view, int> ranks;
  for (const WorkerInfo& worker : workers) {
    const auto [other, is_new] = ranks.emplace(worker.name, worker.id);
    if (!is_new) {
      return absl::AlreadyExistsError(absl::StrCat("workers ", other->second, " and ", worker.id,
                                                   " have the same name, '", worker.name, "'"));
    }
  }

  DG_ASSIGN_OR_RETURN(const int64_t ready, store_->Add(kReady, 1));
  if (ready == world_size_) DG_RETURN_IF_ERROR(Settle(*store_, world_size_, ""));
  const auto outcome = Await(*store_, kOutcome, deadline);
  if (absl::IsNotFound(outcome.status())) {
    return absl::DeadlineExceededError(absl::StrCat("all ", world_size_,
                                                    " workers joined, but not all of them were "
                                                    "ready within ",
                                                    absl::FormatDuration(patience)));
  }
  DG_RETURN_IF_ERROR(outcome.status());
  if (!outcome->empty()) return absl::AlreadyExistsError(*outcome);
  size_ = world_size_;
  return workers;
}

// Whoever begins a barrier counts it before it looks who the members are, and this looks at the
// count after it is a member: so a barrier that begins later cannot miss it.
absl::StatusOr<std::vector<WorkerInfo>> Membership::EnterLate() {
  for (;;) {
    DG_RETURN_IF_ERROR(Publish());
    DG_ASSIGN_OR_RETURN(const int64_t begun, store_->Add(kBarriers, 0));
    if (begun == self_.barriers) break;
    self_.barriers = begun;
  }
  barriers_ = self_.barriers;
  DG_RETURN_IF_ERROR(SayThatSomethingChanged());
  return All();
}

// ---------------------------------------------------------------------------------- Members

absl::StatusOr<WorkerInfo> Membership::Find(WorkerId id) {
  const auto entry = store_->Get(EntryKey(id), absl::InfinitePast());
  if (absl::IsNotFound(entry.status())) {
    return absl::NotFoundError(absl::StrCat("there is no worker with the id ", id, " in this job"));
  }
  DG_RETURN_IF_ERROR(entry.status());
  return DecodeWorkerInfo(*entry, id);
}

absl::StatusOr<WorkerInfo> Membership::Find(absl::string_view name) {
  DG_RETURN_IF_ERROR(CheckName(name));
  const auto id = ReadNumber(*store_, NameKey(name), absl::InfinitePast());
  if (absl::IsNotFound(id.status())) {
    return absl::NotFoundError(absl::StrCat("there is no worker '", name, "' in this job"));
  }
  DG_RETURN_IF_ERROR(id.status());
  DG_ASSIGN_OR_RETURN(WorkerInfo worker, Find(static_cast<WorkerId>(*id)));
  if (worker.name == name) return worker;
  return absl::InvalidArgumentError(
      absl::StrCat("the store takes worker '", worker.name, "' for '", name, "'"));
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::All() {
  DG_ASSIGN_OR_RETURN(std::vector<WorkerInfo> workers, AllEver());
  workers.erase(std::remove_if(workers.begin(), workers.end(),
                               [](const auto& worker) { return worker.left; }),
                workers.end());
  size_ = static_cast<int>(workers.size());
  if (read_ != nullptr) read_(workers);
  return workers;
}

// For those who have time: a store that is silent is asked again for a minute.
absl::StatusOr<WorkerInfo> Membership::FindPatiently(WorkerId id) {
  const Deadline deadline = Deadline::After(kPatience);
  for (;;) {
    absl::StatusOr<WorkerInfo> worker = Find(id);
    if (!IsSilence(worker.status(), deadline) || closed_) return worker;
  }
}

absl::StatusOr<std::vector<WorkerInfo>> Membership::AllEver() {
  DG_ASSIGN_OR_RETURN(const int64_t joiners, store_->Add(kJoiners, 0));
  const int64_t ids =
      std::min<int64_t>(world_size_ + std::max<int64_t>(joiners, 0), seat_.max_workers);
  std::vector<WorkerInfo> workers;
  for (int64_t id = 0; id < ids; ++id) {
    absl::StatusOr<WorkerInfo> worker = FindPatiently(static_cast<WorkerId>(id));
    if (absl::IsNotFound(worker.status())) continue;  // it has claimed its seat, and no more
    DG_RETURN_IF_ERROR(worker.status());
    workers.push_back(*std::move(worker));
  }
  return workers;
}

absl::Status Membership::Leave() {
  WorkerInfo left = self_;
  left.left = true;
  DG_RETURN_IF_ERROR(store_->Set(EntryKey(self_.id), EncodeWorkerInfo(left)));
  return SayThatSomethingChanged();
}

// --------------------------------------------------------------------------------- Barriers

void Membership::MarkLost(const WorkerInfo& member, std::string reason) {
  LostMember lost{member, std::move(reason)};
  {
    absl::MutexLock lock(&mu_);
    lost_[member.id] = lost;
  }
  announcer_.Schedule([this, lost = std::move(lost)] { Announce(lost); });
}

void Membership::Announce(const LostMember& lost) {
  const Deadline deadline = Deadline::After(kPatience);
  while (!closed_) {
    absl::Status status =
        store_->Set(LostKey(lost.worker.id),
                    absl::StrCat(lost.worker.incarnation, " ", lost.reason.substr(0, kMaxReason)));
    if (status.ok()) status = SayThatSomethingChanged();
    if (!IsSilence(status, deadline)) return;
  }
}

absl::StatusOr<Membership::Loss> Membership::LossOf(const WorkerInfo& member) {
  const auto entry = store_->Get(LostKey(member.id), absl::InfinitePast());
  if (absl::IsNotFound(entry.status())) return Loss{};
  DG_RETURN_IF_ERROR(entry.status());
  if (entry->empty()) return Loss{.is_denied = true};
  absl::string_view reason = *entry;
  if (!absl::ConsumePrefix(&reason, absl::StrCat(member.incarnation, " "))) return Loss{};
  return Loss{.is_lost = true, .reason = std::string(reason.substr(0, kMaxReason))};
}

absl::Status Membership::DenyLoss() {
  DG_ASSIGN_OR_RETURN(const Loss loss, LossOf(self_));
  if (!loss.is_lost) return absl::OkStatus();
  DG_RETURN_IF_ERROR(store_->Set(LostKey(self_.id), ""));
  return SayThatSomethingChanged();
}

absl::Status Membership::SayThatSomethingChanged() { return store_->Add(kChanges, 1).status(); }

absl::StatusOr<int64_t> Membership::Changes() { return store_->Add(kChanges, 0); }

absl::StatusOr<Membership::Losses> Membership::LossesOf(const std::vector<WorkerInfo>& members) {
  Losses losses;
  for (const WorkerInfo& member : members) {
    if (member.left) continue;
    DG_ASSIGN_OR_RETURN(Loss loss, LossOf(member));
    if (loss.is_lost) losses.lost.push_back({member, std::move(loss.reason)});
    if (loss.is_denied) losses.denied.push_back(member);
  }
  return losses;
}

absl::Status Membership::WithLost(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  std::vector<LostMember> lost;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [id, worker] : lost_) lost.push_back(worker);
  }
  if (lost.empty()) return status;
  return absl::UnavailableError(absl::StrCat(Lost(lost).message(), ", and ", status.message()));
}

absl::Status Membership::Barrier(Deadline deadline, OnLostMember on_lost) {
  const int64_t number = ++barriers_;
  return Annotate(Gather(absl::StrCat("barrier/", number), number, deadline, on_lost),
                  "waiting for all workers");
}

absl::Status Membership::BarrierOfTheEnd(Deadline deadline, OnLostMember on_lost,
                                         absl::FunctionRef<absl::Status()> finish) {
  absl::Status status = Gather("leave", kLast, deadline, on_lost);
  if (status.ok()) status = finish();
  if (status.ok()) status = Gather("finish", kLast, deadline, on_lost);
  if (status.ok()) finished_ = true;
  // So that worker 0 does not miss it, when it is gone.
  if (status.ok()) status = Leave();
  if (status.ok()) status = store_->Set(absl::StrCat("left/", self_.id), "1");
  if (status.ok() && self_.id == 0) status = AwaitOthers("left", deadline);
  return Annotate(status, "waiting for all workers to leave");
}

absl::Status Membership::CheckOpen() const {
  if (!closed_) return absl::OkStatus();
  return absl::CancelledError("this worker is shutting down");
}

// All have come to the end, so one that is lost now is not missed.
absl::Status Membership::AwaitOthers(const std::string& name, Deadline deadline) {
  for (;;) {
    DG_RETURN_IF_ERROR(CheckOpen());
    const absl::StatusOr<Absent> missing = Missing(name, kLast);
    if (IsSilence(missing.status(), deadline)) continue;
    DG_RETURN_IF_ERROR(missing.status());
    if (missing->late.empty()) return absl::OkStatus();
    if (deadline.Passed()) return NotCome(missing->late);
    const auto there = store_->Get(absl::StrCat(name, "/", missing->late.front().id),
                                   std::min(deadline, Deadline::After(kLook)));
    if (absl::IsNotFound(there.status()) || IsSilence(there.status(), deadline)) continue;
    DG_RETURN_IF_ERROR(there.status());
  }
}

absl::StatusOr<Membership::Absent> Membership::Missing(const std::string& name, int64_t number) {
  DG_ASSIGN_OR_RETURN(const std::vector<WorkerInfo> members, All());
  Absent missing;
  for (const WorkerInfo& member : members) {
    if (member.barriers >= number) continue;
    const auto there = store_->Get(absl::StrCat(name, "/", member.id), absl::InfinitePast());
    if (absl::IsNotFound(there.status())) {
      DG_ASSIGN_OR_RETURN(Loss loss, LossOf(member));
      if (loss.is_lost) {
        missing.lost.push_back({member, std::move(loss.reason)});
      } else {
        missing.late.push_back(member);
      }
    } else {
      DG_RETURN_IF_ERROR(there.status());
    }
  }
  return missing;
}

// Everyone says that it is there; who sees that all are opens the door. The last to come sees it
// at once; the others look now and then, for somebody may leave rather than come.
absl::Status Membership::Gather(const std::string& name, int64_t number, Deadline deadline,
                                OnLostMember on_lost) {
  const absl::Status denied = DenyLoss();
  if (!IsSilence(denied, deadline)) DG_RETURN_IF_ERROR(WithLost(denied));
  DG_ASSIGN_OR_RETURN(const int64_t come, store_->Add(name + "/count", 1));
  if (come == 1 && number != kLast) DG_RETURN_IF_ERROR(store_->Add(kBarriers, 1).status());
  DG_RETURN_IF_ERROR(store_->Set(absl::StrCat(name, "/", self_.id), "1"));
  const std::string door = name + "/open";
  const auto is_over = [&](const Absent& missing) {
    return missing.late.empty() && (missing.lost.empty() || on_lost == OnLostMember::kGoOnWithout);
  };
  bool look = come >= size_;
  for (;;) {
    DG_RETURN_IF_ERROR(CheckOpen());
    if (look) {
      const absl::Status denied = DenyLoss();
      if (IsSilence(denied, deadline)) continue;
      DG_RETURN_IF_ERROR(WithLost(denied));
      absl::StatusOr<Absent> missing = Missing(name, number);
      // Again, for one may have joined before the first of us came, and after we looked.
      if (missing.ok() && is_over(*missing)) missing = Missing(name, number);
      if (IsSilence(missing.status(), deadline)) continue;
      DG_RETURN_IF_ERROR(WithLost(missing.status()));
      if (is_over(*missing)) return store_->Set(door, "1");
      if (!missing->lost.empty() && on_lost == OnLostMember::kFail) return Lost(missing->lost);
      if (deadline.Passed()) return NotCome(missing->late);
    }
    const auto open = store_->Get(door, std::min(deadline, Deadline::After(kLook)));
    look = true;
    if (absl::IsNotFound(open.status()) || IsSilence(open.status(), deadline)) continue;
    return WithLost(open.status());
  }
}

}  // namespace distgrad
