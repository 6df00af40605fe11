// Numbers the starts of a job in its store, and gives each keys of its own.
#include "core/membership/start.h"

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/error_list.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"

namespace distgrad {
namespace {

// The keys, which each start writes anew. A worker asks under its rank with its nonce; worker 0
// answers "<nonce> <number>"; the worker says that it has heard "<number>". Each lists, a line
// each, the number of its start and the keys that it has set of it.
std::string Question(int rank) { return absl::StrCat("start/ask/", rank); }
std::string Answer(int rank) { return absl::StrCat("start/answer/", rank); }
std::string Heard(int rank) { return absl::StrCat("start/heard/", rank); }
std::string ListOf(int rank) { return absl::StrCat("start/keys/", rank); }

std::string KeyOf(int64_t start, absl::string_view key) { return absl::StrCat(start, "/", key); }

// Lists the keys that are set by way of it. Thread-safe.
class ListedStore : public PrefixStore {
 public:
  ListedStore(std::shared_ptr<Store> store, int64_t start, int rank)
      : PrefixStore(KeyOf(start, ""), store),
        store_(std::move(store)),
        name_(ListOf(rank)),
        list_(absl::StrCat(start)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    DG_RETURN_IF_ERROR(List(key, deadline));
    return PrefixStore::Set(key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    DG_RETURN_IF_ERROR(List(key, deadline));
    return PrefixStore::Add(key, amount, deadline);
  }

 private:
  // Before the key is set, so that none is forgotten by a worker that dies.
  absl::Status List(const std::string& key, Deadline deadline) {
    const BlockingScope blocking;
    // Held while the store is asked: a shorter list of another thread must not come behind this.
    absl::MutexLock lock(&mu_);
    auto its = ends_.find(key);
    if (its == ends_.end()) {
      absl::StrAppend(&list_, "\n", key);
      its = ends_.emplace(key, list_.size()).first;
    }
    if (its->second <= listed_) return absl::OkStatus();
    DG_RETURN_IF_ERROR(store_->Set(name_, list_, deadline));
    listed_ = list_.size();
    return absl::OkStatus();
  }

  const std::shared_ptr<Store> store_;
  const std::string name_;  // the key of the list

  absl::Mutex mu_;
  std::map<std::string, size_t> ends_ ABSL_GUARDED_BY(mu_);  // of the keys, in the list
  std::string list_ ABSL_GUARDED_BY(mu_);
  size_t listed_ ABSL_GUARDED_BY(mu_) = 0;  // how much of it the store has
};

// What a worker has listed in a start before `number`; nothing of what is no list.
void AppendListed(const Store::Value& list, int64_t number, std::vector<std::string>& keys) {
  const std::vector<std::string> lines = absl::StrSplit(list.value_or(""), '\n');
  int64_t start = 0;
  if (!absl::SimpleAtoi(lines[0], &start) || start >= number) return;
  for (size_t i = 1; i < lines.size(); ++i) keys.push_back(KeyOf(start, lines[i]));
}

absl::StatusOr<int64_t> Ask(Store& store, int rank, const std::string& nonce, Deadline deadline) {
  DG_RETURN_IF_ERROR(store.Set(Question(rank), nonce, deadline));
  const std::string keys[] = {Answer(rank)};
  std::vector<Store::Value> seen(1);
  for (;;) {
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> now,
                        store.AwaitChange(keys, seen, deadline));
    if (now == seen) return absl::DeadlineExceededError("worker 0 did not join in time");
    seen = now;
    // An answer with another nonce was for a worker of a former start.
    absl::string_view text = seen[0].has_value() ? absl::string_view(*seen[0]) : "";
    if (absl::ConsumePrefix(&text, absl::StrCat(nonce, " "))) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(text, &number)) {
        return absl::InvalidArgumentError("the number of this start is malformed in the store");
      }
      DG_RETURN_IF_ERROR(store.Set(Heard(rank), absl::StrCat(number), deadline));
      return number;
    }
  }
}

// A question that a former start has left is answered too, and nobody hears it. Before a worker is
// answered what it had listed in a former start is added to `former`: after that it lists what it
// sets in this one.
absl::StatusOr<int64_t> Number(Store& store, int world_size, Deadline deadline,
                               std::vector<std::string>& former) {
  DG_ASSIGN_OR_RETURN(const int64_t number, store.Add("start/count", 1, deadline));
  DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> own, store.GetEach({ListOf(0)}, deadline));
  AppendListed(own[0], number, former);
  std::vector<std::string> answered(world_size);
  std::vector<int> missing(world_size - 1);
  for (int rank = 1; rank < world_size; ++rank) missing[rank - 1] = rank;
  Backoff backoff(deadline);
  do {
    std::vector<std::string> keys;
    for (const int rank : missing) {
      keys.push_back(Heard(rank));
      keys.push_back(Question(rank));
      keys.push_back(ListOf(rank));
    }
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> values, store.GetEach(keys, deadline));
    std::vector<int> still;
    for (size_t i = 0; i < missing.size(); ++i) {
      const int rank = missing[i];
      if (values[3 * i] == absl::StrCat(number)) continue;  // it has heard
      still.push_back(rank);
      const std::string nonce = values[3 * i + 1].value_or("");
      if (nonce.empty() || nonce == answered[rank]) continue;
      AppendListed(values[3 * i + 2], number, former);
      DG_RETURN_IF_ERROR(store.Set(Answer(rank), absl::StrCat(nonce, " ", number), deadline));
      answered[rank] = nonce;
    }
    missing = std::move(still);
    if (missing.empty()) return number;
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(
      absl::StrCat("of ", world_size, " workers these did not join in time: ", FirstOf(missing)));
}

}  // namespace

absl::StatusOr<int64_t> AgreeOnStart(Store& store, int rank, int world_size, uint64_t nonce,
                                     Deadline deadline) {
  if (rank != 0) return Ask(store, rank, absl::StrCat(nonce), deadline);
  std::vector<std::string> former;
  const absl::StatusOr<int64_t> number = Number(store, world_size, deadline, former);
  // Nobody goes on in a former start, which this worker has left. What cannot be deleted is in
  // nobody's way.
  for (const std::string& key : former) {
    if (!store.Delete(key, absl::InfinitePast()).ok()) break;
  }
  return number;
}

absl::StatusOr<std::shared_ptr<Store>> StoreOfThisStart(std::shared_ptr<Store> store, int rank,
                                                        int world_size, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t start,
                      AgreeOnStart(*store, rank, world_size, RandomNumber(), deadline));
  return std::make_shared<PrefixStore>(KeyOf(start, ""), std::move(store));
}

absl::StatusOr<std::shared_ptr<Store>> ListedStoreOfThisStart(std::shared_ptr<Store> store,
                                                              int rank, int world_size,
                                                              Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t start,
                      AgreeOnStart(*store, rank, world_size, RandomNumber(), deadline));
  return std::make_shared<ListedStore>(std::move(store), start, rank);
}

}  // namespace distgrad
