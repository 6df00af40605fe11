// Finds and makes the contexts of a worker, within the limits for each origin.
#include "core/autograd/context_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// Of two contexts of one maker.
bool IsOfLaterStart(ContextId id, ContextId than) {
  return CounterOf(id) >> 32 > CounterOf(than) >> 32;
}

}  // namespace

std::shared_ptr<ContextRecord> ContextRegistry::New() {
  absl::MutexLock lock(&mu_);
  auto record = std::make_shared<ContextRecord>(MakeId(self_.rank, ++last_), self_, ++begun_);
  contexts_.emplace(record->id(), record);
  return record;
}

absl::StatusOr<std::shared_ptr<ContextRecord>> ContextRegistry::FindOrAdd(ContextId id, EdgeId edge,
                                                                          bool refuses) {
  absl::MutexLock lock(&mu_);
  if (auto it = contexts_.find(id); it != contexts_.end()) return it->second;
  const absl::Status gone = WhyGone(id);
  if (!gone.ok()) {
    // It may turn out to be none of the older ones (SetOlder()), and has lost the edge all the
    // same.
    if (edge != 0 && AgeOf(id) != Age::kNewer) Remember(id, Gone::kOlder);
    return gone;
  }
  size_t& count = of_origin_[MakerOf(id)];
  if (count >= most_) {
    if (edge != 0) Remember(id, Gone::kTooMany);
    return absl::ResourceExhaustedError(absl::StrCat(count, " contexts of worker ", MakerOf(id),
                                                     " are open here; limit contexts_per_peer is ",
                                                     most_));
  }
  const auto added =
      contexts_.emplace(id, std::make_shared<ContextRecord>(id, self_, ++begun_)).first;
  if (refuses) added->second->SetRefused();
  ++count;
  return added->second;
}

absl::Status ContextRegistry::WhyGone(ContextId id) const {
  const auto gone = gone_.find(id);
  if (gone != gone_.end() && gone->second == Gone::kTooMany) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "context ", id, " was refused when it came; limit contexts_per_peer is ", most_));
  }
  const bool was_older = gone != gone_.end() && gone->second == Gone::kOlder;
  if (was_older || (gone == gone_.end() && AgeOf(id) != Age::kNewer)) return OlderError(id);
  // Of our own contexts we know all.
  if (gone != gone_.end() || MakerOf(id) == self_.rank) {
    return absl::FailedPreconditionError(absl::StrCat("context ", id, " is released"));
  }
  return absl::OkStatus();
}

absl::Status ContextRegistry::OlderError(ContextId id) const {
  if (AgeOf(id) != Age::kOlder) {
    return absl::UnavailableError(absl::StrCat(
        "context ", id, " came when worker ", self_.rank,
        ", which has come back, had not heard from all others which ones are older: begin another "
        "one"));
  }
  return absl::UnavailableError(
      absl::StrCat("context ", id, " began before worker ", self_.rank,
                   " came back, which may have lost its part of it: begin another one"));
}

ContextId ContextRegistry::last() const {
  absl::MutexLock lock(&mu_);
  return MakeId(self_.rank, last_);
}

void ContextRegistry::SetComesBack() {
  absl::MutexLock lock(&mu_);
  older_.insert_or_assign(self_.rank, Older{.last = MakeId(self_.rank, last_)});
  refuses_others_ = true;
}

void ContextRegistry::SetMayBeOlder(const std::vector<ContextId>& last) {
  absl::MutexLock lock(&mu_);
  for (const ContextId id : last) older_.insert_or_assign(MakerOf(id), Older{.may_be = id});
  refuses_others_ = false;
}

bool ContextRegistry::SetOlder(ContextId last) {
  absl::MutexLock lock(&mu_);
  Older& older = older_[MakerOf(last)];
  if (!older.last.has_value() || last > *older.last) older.last = last;
  return !IsOfLaterStart(older.may_be, *older.last);
}

ContextRegistry::Age ContextRegistry::AgeOf(ContextId id) const {
  const auto found = older_.find(MakerOf(id));
  if (found == older_.end()) return refuses_others_ ? Age::kMayBeOlder : Age::kNewer;
  const Older& older = found->second;
  if (older.last.has_value() && id <= *older.last) return Age::kOlder;
  if (id > older.may_be) return Age::kNewer;
  const bool is_answered = older.last.has_value() && !IsOfLaterStart(id, *older.last);
  return is_answered ? Age::kNewer : Age::kMayBeOlder;
}

absl::StatusOr<std::shared_ptr<ContextRecord>> ContextRegistry::FindUnlessGone(ContextId id) const {
  absl::MutexLock lock(&mu_);
  if (auto it = contexts_.find(id); it != contexts_.end()) return it->second;
  DG_RETURN_IF_ERROR(WhyGone(id));
  return nullptr;
}

std::shared_ptr<ContextRecord> ContextRegistry::Find(ContextId id) const {
  absl::MutexLock lock(&mu_);
  auto it = contexts_.find(id);
  return it == contexts_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<ContextRecord>> ContextRegistry::All() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<ContextRecord>> all;
  all.reserve(contexts_.size());
  for (const auto& [id, record] : contexts_) all.push_back(record);
  return all;
}

size_t ContextRegistry::size() const {
  absl::MutexLock lock(&mu_);
  return contexts_.size();
}

uint64_t ContextRegistry::begun() const {
  absl::MutexLock lock(&mu_);
  return begun_;
}

std::shared_ptr<ContextRecord> ContextRegistry::Remove(ContextId id) {
  absl::MutexLock lock(&mu_);
  // Of our own all are known, so that their end needs no memory.
  if (MakerOf(id) != self_.rank) Remember(id, Gone::kReleased);
  auto it = contexts_.find(id);
  if (it == contexts_.end()) return nullptr;
  std::shared_ptr<ContextRecord> record = std::move(it->second);
  contexts_.erase(it);
  const auto origin = of_origin_.find(MakerOf(id));
  if (origin != of_origin_.end() && --origin->second == 0) of_origin_.erase(origin);
  return record;
}

void ContextRegistry::Remember(ContextId id, Gone how) {
  if (gone_.contains(id)) return;
  // In this order, as there may be no memory for either: what is in order alone does no harm.
  gone_order_.push_back(id);
  gone_.emplace(id, how);
  if (gone_order_.size() > kRemembered) {
    gone_.erase(gone_order_.front());
    gone_order_.pop_front();
  }
}

}  // namespace distgrad
